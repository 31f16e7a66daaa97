"""``penstock serve``: answer requests for models over HTTP, by the Open Inference Protocol."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import click

from penstock.cli.base import CompileArguments, command, count_option, read_model, showing_progress
from penstock.cli.generators import DRAFT, TOKENIZER, GeneratorOptions, refuse_given
from penstock.cli.options import compile_options, gathered, pairs
from penstock.cli.shapes import names_in_model, read_shapes, shape_option
from penstock.core.errors import InvalidInput, PenstockError, extra_needed
from penstock.core.records import dataclass
from penstock.core.types import JsonObject, TensorType, Type
from penstock.frontends.load import load
from penstock.host.threads import core_budget
from penstock.serving.replicas import Replicas
from penstock.serving.repository import ModelRepository, Served
from penstock.serving.sequence_table import IDLE, MOST
from penstock.serving.sequences import Sequences
from penstock.serving.text_models import TextModel, TextModels
from penstock.session.ahead import freeze
from penstock.stepping.stepper import Stepper

# As ``Stepper`` and ``SharedLoops`` have it.
_SEQUENCES = 64
_MAX_ERROR = 0.01  # as ``Session.quantize_after`` has it
_OF_BATCHES = "max_batch max_batch_tokens max_delay cluster retries"
_OF_TENSORS = "shapes no_compile_in_run shared_memory"


@dataclass(frozen=True)
class _HttpOptions:
    """The address of the server, and the bounds of requests."""

    host: str
    port: int
    timeout: float
    max_request: int
    shared_memory: bool
    cors: Sequence[str]
    access_log: Path | None


@dataclass(frozen=True)
class _ReplicaOptions:
    """The replicas of each model, and their queue."""

    replicas: int | None
    queue: int
    max_batch: int
    max_batch_tokens: int | None
    max_delay: float
    cluster: bool
    retries: int | None
    no_compile_in_run: bool

    def of(self, options: Mapping[str, object]) -> dict[str, Any]:
        """The arguments of ``Replicas``, with the options of compiling. Starts the cluster."""
        # One more than cores, which are idle for a moment when a run begins, ends or waits for
        # Python's lock. A single core never is: runs on it would only divide its time.
        cores = core_budget()
        count = self.replicas or (1 if self.cluster or cores == 1 else cores + 1)
        if self.cluster:
            options = _on_cluster(count, self.retries, options)
        elif self.retries is not None:
            raise click.UsageError("--retries is for --cluster")
        queue: dict[str, Any] = {"queue": self.queue, "max_delay": self.max_delay}
        queue |= {"max_batch": self.max_batch, "max_batch_tokens": self.max_batch_tokens}
        if self.no_compile_in_run:
            queue["compile_in_run"] = False
        return {**options, **queue, "n": count}


@dataclass(frozen=True)
class _StepOptions:
    """Models whose requests share steps: those that OpenAI's API is for, and what their texts are
    made with, and those with state, and how long their sequences are kept."""

    generate: Sequence[str]
    embed: Sequence[str]
    tokenizer: str | None
    draft: str | None
    share_loops: Sequence[str]
    stateful: Sequence[str]
    state: Mapping[str, str]
    max_idle: float
    max_rows: int | None
    max_sequences: int | None
    cache_bytes: str | None

    def check(self, models: Sequence[str]) -> None:
        """Refuse a server without models, and options that would do nothing."""
        if not (models or self.generate or self.embed or self.share_loops or self.stateful):
            raise click.UsageError(
                "a MODEL is needed, --generate, --embed, --share-loops or --stateful"
            )
        if not self.generate:
            refuse_given("draft", "for --generate")
        if not (self.generate or self.stateful):
            refuse_given("max_sequences", "for --generate and --stateful")
        if not (self.generate or self.stateful or self.share_loops):
            refuse_given("max_rows cache_bytes", "for --generate, --share-loops and --stateful")
        if not self.stateful:
            refuse_given("state max_idle", "for --stateful")
        if self.state and len(self.stateful) != 1:
            raise click.UsageError("--state is for one model of --stateful")
        if self.tokenizer is not None and len(self.generate) + len(self.embed) != 1:
            raise click.UsageError("--tokenizer is for one model of --generate or --embed")
        if not (models or self.embed):
            self._check_alone()

    def _check_alone(self) -> None:
        """Refuse options of replicas, where there are none."""
        refuse_given(_OF_BATCHES, "not for models whose requests share steps or iterations")
        if self.share_loops:
            if not (self.generate or self.stateful):
                refuse_given("shapes no_compile_in_run warm_up", "not for --share-loops")
            return
        refuse_given("replicas", "not for --generate and --stateful, whose requests share steps")
        if not self.stateful:
            refuse_given(_OF_TENSORS, "not for --generate, whose texts share steps")
        elif not self.generate:
            refuse_given("queue", "not for --stateful: a sequence has one request at a time")

    def sharing(self, path: Path, pool: _ReplicaOptions, options: CompileArguments) -> Replicas:
        """The runs of the model at a path that share the iterations of its loops."""
        from penstock.stepping.shared_loops import SharedLoops

        most = self.max_rows or _SEQUENCES
        if self.cache_bytes is not None:
            options = {**options, "cache_bytes": self.cache_bytes}
        loops = SharedLoops(path, max_runs=most, **options)
        return Replicas(loops, pool.replicas or most, queue=pool.queue)

    def stepper(self, path: Path, options: CompileArguments) -> Stepper:
        """The stepper of the model with state at a path."""
        model = load(path, limits=options.get("limits"), map_weights=True)
        # More sequences may be open than a step has rows for.
        options = {**self._sizes(self.max_rows), **options}
        return Stepper(model, state=self.state or None, **options)

    def _sizes(self, sequences: int | None) -> dict[str, object]:
        """The options of a stepper, with a bound on the sequences of a step."""
        sizes = {"max_rows": self.max_rows, "max_sequences": sequences}
        given = {**sizes, "cache_bytes": self.cache_bytes}
        return {name: size for name, size in given.items() if size is not None}

    def texts(self, queue: int, warm_up: bool, options: CompileArguments) -> TextModels:
        """The models for texts by name, which are loaded."""
        from penstock.generation.sources import context_of, tokenizer_of
        from penstock.serving.embeddings import EmbeddingModel, pools_first

        made = GeneratorOptions(self.tokenizer, self.draft, self._sizes(self.max_sequences))
        running = self.max_sequences or _SEQUENCES
        generators, embedders = {}, {}
        for name, path in _named(self.generate).items():
            generator = made.read(path, options)
            # Any token will do: plans of steps leave their rows open.
            if warm_up:
                generator.generate([0], max_tokens=2, ignore_end=True)
            generators[name] = TextModel(name, generator, running=running, queue=queue)
        # Their replicas are those of the repository; here is what they lack for texts.
        for name, path in _named(self.embed).items():
            model = load(path, limits=options.get("limits"), map_weights=True)
            tokenizer = tokenizer_of(self.tokenizer, path, model.metadata)
            known, by_first = context_of(model.metadata, path), pools_first(path)
            most = None if known is None else known.most
            embedders[name] = EmbeddingModel(name, tokenizer, most=most, by_first=by_first)
        return TextModels(generators, embedders)


class _Plans:
    """Makes the replicas of models: with plans that are compiled, and run, before the server is
    ready, and perhaps quantized later."""

    def __init__(
        self,
        shapes: Sequence[str],
        warm_up: bool,
        quantize_after: int | None = None,
        max_error: float = _MAX_ERROR,
    ) -> None:
        self.shapes = shapes
        self.warm_up = warm_up
        self.quantize_after, self.max_error = quantize_after, max_error
        self._used: set[str] = set()

    def replicas(self, path: Path, options: CompileArguments) -> Replicas:
        """The replicas of the model at a path; their session quantizes itself if that is asked."""
        made = self.compiled(path, options)
        if self.quantize_after is not None:
            try:
                made.session.quantize_after(self.quantize_after, self.max_error)
            except BaseException:
                made.close()
                raise
        return made

    def compiled(self, path: Path, options: CompileArguments) -> Replicas:
        """The replicas of the model at a path, with plans for those shapes whose name it has."""
        if not self.shapes and not self.warm_up and options["max_batch"] == 1:
            return Replicas(path, **options)
        # Read here, since names of dims are those of the model.
        limits = {name: options[name] for name in ("limits",) if name in options}
        model, _ = read_model(path, None, limits)
        types = {value.name: value.type for value in model.graph.inputs}
        own = [text for text in self.shapes if names_in_model(model, text)]
        self._used.update(own)
        shapes = [one.resolve(types, {}) for one in read_shapes(model, own)]
        if own or self.warm_up:
            options = {**options, "shapes": shapes}
        return Replicas(model, warm_up=self.warm_up, **options)

    def check(self, cluster: bool, models: Sequence[str]) -> None:
        """Refuse options that would do nothing, or that cannot go together."""
        if self.quantize_after is None:
            refuse_given("max_error", "for --quantize-after")
        elif cluster:
            raise click.UsageError(
                "--quantize-after is not for --cluster, whose workers have parts"
            )
        elif not models:
            raise click.UsageError("--quantize-after is for a MODEL, and none is given")

    def sequences(
        self, path: Path, steps: _StepOptions, options: CompileArguments, freezes: bool
    ) -> Sequences:
        """The sequences of the model with state at a path, as ``replicas`` those of one without."""
        stepper = steps.stepper(path, options)
        made = Sequences(stepper, most=steps.max_sequences or MOST, idle=steps.max_idle)
        model = stepper.model
        texts = [text for text in self.shapes if names_in_model(model, text)]
        self._used.update(texts)
        if texts or self.warm_up:
            types = {port.name: _of_one_row(port.type, stepper) for port in made.inputs}
            types |= stepper.fixed
            shapes = [one.resolve(types, {}) for one in read_shapes(model, texts)]
            made.warm_up(shapes, whole=self.warm_up)
        if freezes:  # from the first request on
            freeze(made.session)
        return made

    def load(
        self,
        paths: Mapping[str, Path],
        options: CompileArguments,
        own: Mapping[str, Callable[[Path], Served]],
    ) -> ModelRepository:
        """The models at paths, by name, of which ``own`` makes some. Refuses a shape that is for
        none of them."""
        try:
            repository = ModelRepository(paths, partial(self.replicas, options=options), own)
        except ValueError as error:  # a model has variables, or cannot take batches
            raise PenstockError(str(error)) from error
        # Only now is it known which names all of the models have.
        for text in self.shapes:
            if text not in self._used:
                raise InvalidInput(f"--shape {text}: no model has an input or dim of that name")
        return repository


def _of_one_row(type_: Type, stepper: Stepper) -> Type:
    """The type of an input; of a decoder that of one row, [1, 1, ...]."""
    if stepper.state or not isinstance(type_, TensorType):
        return type_
    return TensorType(type_.dtype, (1, 1, *(type_.shape or ())[2:]))


def _origins(
    context: click.Context, parameter: click.Parameter, texts: Sequence[str]
) -> Sequence[str]:
    """Origins as browsers send them; with a path or without a scheme none would ever match."""
    for text in texts:
        if text != "*" and not re.fullmatch(r"[a-z][a-z0-9+.-]*://[^/?#@]+", text):
            raise click.BadParameter(f"{text!r} must look like https://example.com or be *")
    return texts


@command(lambda result: click.echo(f"served {', '.join(result['models'])}"), progress=False)
@click.argument("models", nargs=-1, metavar="[NAME=]MODEL...")
@click.option(
    "--generate",
    multiple=True,
    metavar="[NAME=]MODEL",
    help="Answer OpenAI's API with texts of this model: a GGUF file, a folder with config.json, "
    "*.safetensors and tokenizer.json, or a decoder with a tokenizer.json beside it. May be "
    "repeated.",
)
@click.option(
    "--embed",
    multiple=True,
    metavar="[NAME=]MODEL",
    help="Answer OpenAI's API with vectors of texts by this encoder, which has a tokenizer.json "
    "beside it. May be repeated.",
)
@TOKENIZER
@DRAFT
@click.option(
    "--share-loops",
    multiple=True,
    metavar="[NAME=]MODEL",
    help="Serve a model with loops, and compute the next iteration of all requests that are in the "
    "same loop together. May be repeated.",
)
@click.option(
    "--stateful",
    multiple=True,
    metavar="[NAME=]MODEL",
    help="Serve a model whose outputs are fed back to it, and keep its state between requests of a "
    "sequence, which have a sequence_id. May be repeated.",
)
@click.option(
    "--state",
    multiple=True,
    metavar="INPUT=OUTPUT",
    callback=lambda context, parameter, texts: pairs(texts),
    help="With --stateful: an output that is fed back, where names do not tell; all of them are "
    "named. May be repeated.",
)
@click.option(
    "--max-idle",
    type=click.FloatRange(min=0, min_open=True),
    default=IDLE,
    show_default=True,
    help="With --stateful: seconds without a request after which a sequence ends.",
)
@count_option(
    "--max-rows",
    help="Rows of a step at most: tokens of --generate, requests of --share-loops, frames or rows "
    "of --stateful. Default: 512 tokens, or 64.",
)
@count_option(
    "--max-sequences",
    help="With --generate: texts that share steps at most, by default 64. With --stateful: "
    f"sequences of a model that are open at most, by default {MOST}.",
)
@click.option(
    "--cache-bytes",
    metavar="BYTES",
    help="With --generate, --share-loops and --stateful: memory of all caches, or states, of a "
    "model at most, as 4GB. Default: 1 GiB.",
)
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen at.")
@click.option("--port", type=click.IntRange(0, 65535), default=8000, show_default=True)
@count_option(
    "--replicas",
    help="Requests of a model, or batches, that run at once. Default: one more than cores, or 1 "
    "with --cluster; with --share-loops --max-rows.",
)
@count_option(
    "--queue", default=128, help="Requests of a model that may wait; further ones are refused."
)
@count_option("--max-batch", default=1, help="Rows of requests that run together.")
@count_option(
    "--max-batch-tokens",
    help="Tokens that run together, of requests of any lengths; needs a mask among the inputs.",
)
@click.option(
    "--max-delay",
    type=click.FloatRange(min=0),
    default=0.0,
    show_default=True,
    help="Seconds that a request waits for others of its batch.",
)
@click.option(
    "--timeout",
    type=click.FloatRange(min=0, min_open=True),
    default=60.0,
    show_default=True,
    help="Seconds that a request may take.",
)
@count_option("--max-request", default=64 << 20, help="Bytes of a request.")
@click.option(
    "--shared-memory",
    is_flag=True,
    help="Take tensors in POSIX shared memory of this machine. Clients can read and write any "
    "segment that the server can.",
)
@click.option(
    "--cors",
    multiple=True,
    metavar="ORIGIN",
    callback=_origins,
    help="Let pages of this origin, as in https://example.com, use the server from browsers; * is "
    "all origins. May be repeated.",
)
@click.option(
    "--access-log",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Append a line for each request to this file, in the Common Log Format; - is the standard "
    "output.",
)
@click.option(
    "--cluster",
    is_flag=True,
    help="Let each replica be a process of Ray, with --threads threads (1), on this machine or at "
    "RAY_ADDRESS. Needs penstock-runtime[ray].",
)
@count_option(
    "--retries",
    least=0,
    help="With --cluster: times that a request is tried again whose replica dies. Default: 1.",
)
@shape_option(
    "A plan for it is compiled before the server is ready, for all models that have the name; "
    "several for one name are for plans each. An unknown first dim counts as 1."
)
@click.option(
    "--no-compile-in-run",
    is_flag=True,
    help="Refuse a request of shapes without a plan (400), instead of compiling one for it.",
)
@click.option(
    "--warm-up",
    is_flag=True,
    help="Run each --shape, or what a model says of its inputs, on values that are made up, and "
    "batches of such requests, before the server is ready.",
)
@count_option(
    "--quantize-after",
    metavar="RUNS",
    help="Record some of this many requests of each MODEL, make a quantized model by them in a "
    "process of its own, and answer by that from then on.",
)
@click.option(
    "--max-error",
    type=click.FloatRange(min=0, min_open=True),
    metavar="E",
    default=_MAX_ERROR,
    show_default=True,
    help="With --quantize-after: the largest error of an output, as of penstock quantize.",
)
@compile_options("timeout")
@gathered("steps", _StepOptions)
@gathered("plans", _Plans)
@gathered("pool", _ReplicaOptions)
@gathered("http", _HttpOptions)
def serve(
    models: Sequence[str],
    pool: _ReplicaOptions,
    http: _HttpOptions,
    plans: _Plans,
    steps: _StepOptions,
    options: CompileArguments,
) -> JsonObject:
    """Answer requests for models over HTTP, by the Open Inference Protocol (version 2), also for
    models with loops or state (--share-loops, --stateful), and for texts by OpenAI's API
    (--generate, --embed).

    A MODEL is a model in any format, a saved session, or a folder of versions: MODEL/1/FILE,
    MODEL/2/FILE and so on. Its name is that of the file, without its ending, or NAME. SIGTERM ends
    the server once it has answered the requests that it has. Needs penstock-runtime[serve].
    """
    with extra_needed("serving needs Starlette and uvicorn", "serve"):
        import uvicorn

        from penstock.serving.access_log import logging_to
        from penstock.serving.app import Server
        from penstock.serving.connection import connections
        from penstock.serving.listener import Listener
    steps.check(models)
    plans.check(pool.cluster, models or steps.embed)
    protocol = [*models, *steps.embed, *steps.share_loops, *steps.stateful]
    paths, names = _named(protocol), [*_named([*protocol, *steps.generate])]
    freezes = pool.no_compile_in_run
    make = partial(plans.sequences, steps=steps, options=options, freezes=freezes)
    share = partial(steps.sharing, pool=pool, options=options)
    own: dict[str, Callable[[Path], Served]] = dict.fromkeys(_named(steps.stateful), make)
    own |= dict.fromkeys(_named(steps.share_loops), share)
    of_replicas = pool.of(options)
    as_json = bool(click.get_current_context().params.get("as_json"))
    with logging_to(http.access_log), of_replicas.get("cluster", nullcontext()):
        # Requests come at any time: only what is done before the first one has a bar.
        with showing_progress("serve", quiet=as_json):
            served = steps.texts(pool.queue, plans.warm_up, options)
            repository = plans.load(paths, of_replicas, own)
        server = Server(
            repository,
            max_bytes=http.max_request,
            timeout=http.timeout,
            shared_memory=http.shared_memory,
            cors=http.cors,
            texts=served,
        )
        with Listener(http.host, http.port) as listener:
            address = "{}:{}".format(*listener.getsockname()[:2])
            click.echo(f"serving {', '.join(names)} at http://{address}", err=True)
            config = uvicorn.Config(
                server.app,
                http=connections(http.timeout, server.direct),
                ws="none",
                loop="asyncio",
                proxy_headers=False,
                log_level="warning",
                access_log=False,
            )
            uvicorn.Server(config).run([listener])
    return {"models": names, "address": address}


def _on_cluster(replicas: int, retries: int | None, options: CompileArguments) -> Mapping[str, Any]:
    """The options of replicas that are workers of a cluster, which is started."""
    from penstock.cluster.cluster import Cluster

    for name in ("executor", "devices"):
        if name in options:
            raise click.UsageError(f"--{name} is not for --cluster, whose workers choose their own")
    address, tries = os.environ.get("RAY_ADDRESS"), 1 if retries is None else retries
    others = {name: value for name, value in options.items() if name != "threads"}
    cluster = Cluster(replicas, options.get("threads", 1), retries=tries, address=address)
    cluster.start()  # here, where the first request need not wait for Ray
    return {**others, "cluster": cluster}


def _named(models: Sequence[str]) -> dict[str, Path]:
    """The paths of models by name."""
    paths: dict[str, Path] = {}
    for text in models:
        given, _, path = text.rpartition("=")
        name = given or Path(path).stem
        if name in paths:
            raise click.UsageError(f"two models have the name {name!r}: use NAME=MODEL")
        paths[name] = Path(path)
    return paths
