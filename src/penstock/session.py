"""What users hold: a compiled model, with its plans by input shapes."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Collection, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cached_property
from importlib import import_module
from pathlib import Path
from typing import Any, TypeGuard

import numpy as np

from penstock import garbage
from penstock.backends.base import Backend
from penstock.compiling import EXECUTORS, Compiler, compiling
from penstock.devices import local
from penstock.errors import InvalidInput, PenstockError
from penstock.executors.base import NEVER, CancelToken, Executor
from penstock.explain import format_plan
from penstock.feeds import checked, convert
from penstock.forecast import Forecast
from penstock.fork import renewed
from penstock.gantt import Chart, charts
from penstock.heap import keep_memory
from penstock.ir import Graph, Model, Node, Value, clone
from penstock.limits import DEFAULT_LIMITS, Limits
from penstock.loading import load
from penstock.observe import Observer
from penstock.ops.tf_control import is_framed
from penstock.ops.tf_state import own_stores
from penstock.passes.infer import infer_types
from penstock.passes.prune import cut, unfed
from penstock.placement import check_overrides
from penstock.plan import Plan
from penstock.profile import Profile
from penstock.running import Job, Named, Run
from penstock.threads import pool
from penstock.types import ANY, AnyType, TensorType, Type

BACKENDS = {
    "numpy": "penstock.backends.numpy.NumpyBackend",
    "onednn": "penstock.backends.onednn.OneDnnBackend",
}
"""where the backends are that go by a name; imported when they are asked for"""
PRECISIONS = ("float32", "bf16")
_WITH_PRECISION = {"onednn"}

# Sets of feeds and fetches that a session remembers.
_MOST_SIGNATURES = 256

_ndarray = np.ndarray


@dataclass(frozen=True, slots=True)
class Port:
    """An input or output of a session: its name and its type."""

    name: str
    type: Type

    def __str__(self) -> str:
        return f"{self.name}: {self.type}"


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes that a session holds: constants, which its plans share; arenas; plans, about, with
    their programs; and how many plans there are."""

    weights: int
    arenas: int
    plans: int
    count: int


class Signature:
    """The part of a model that one set of feeds and fetches needs."""

    def __init__(self, graph: Graph, outputs: Iterable[str]) -> None:
        self.graph = graph
        self.names = tuple(value.name for value in graph.inputs)
        self.types = tuple(value.type for value in graph.inputs)
        self.dtypes = tuple(
            kind.dtype if isinstance(kind, TensorType) else None for kind in self.types
        )
        # Whether a plan depends on the dtypes of what is fed, and not on shapes alone.
        self.loose = None in self.dtypes
        self.outputs = tuple(outputs)
        self.lock = threading.Lock()  # held by the thread that compiles
        # The plan of the last run: most sessions see the same shapes again and again.
        self.last: tuple[Any, Executor | None] = (None, None)

    def values(self, feeds: Mapping[str, Any]) -> list[Any]:
        """The fed values in order, checked and converted. Raises ``KeyError`` for other names."""
        values = []
        for name, kind, dtype in zip(self.names, self.types, self.dtypes, strict=True):
            value = feeds[name]
            if value.__class__ is not _ndarray or value.dtype != dtype:
                value = convert(name, value, kind)
            values.append(value)
        if len(values) != len(feeds):
            raise KeyError
        return values

    def key(self, values: Sequence[Any]) -> tuple[Any, ...]:
        """What of the fed values a plan depends on."""
        if self.loose:
            return tuple([(x.shape, x.dtype) if x.__class__ is _ndarray else None for x in values])
        return tuple([x.shape if x.__class__ is _ndarray else None for x in values])


class Request:
    """A signature, and its outputs in the order in which somebody wants them."""

    __slots__ = ("_reordered", "names", "signature")

    def __init__(self, signature: Signature, names: Sequence[str]) -> None:
        self.signature = signature
        self.names = tuple(names)
        self._reordered = self.names != signature.outputs

    def named(self, outputs: Sequence[Any]) -> dict[str, Any]:
        """The outputs of a run by name."""
        found = dict(zip(self.signature.outputs, outputs, strict=False))
        return {name: found[name] for name in self.names} if self._reordered else found


class Session:
    """A compiled model; made by ``penstock.compile``.

    ``run`` may be called from any number of threads at once, and gives each the answers that it
    would get alone. Outputs are new arrays; fed arrays are read, never written, and must not be
    changed by others while the run goes on.
    """

    def __init__(
        self,
        model: Model | str | Path | Any,
        *,
        executor: str = "auto",
        backends: Sequence[str | Backend] | None = None,
        place: Mapping[str, str] | None = None,
        threads: int | None = None,
        shapes: Mapping[str, Sequence[int]] | None = None,
        limits: Limits | None = None,
        autotune: bool = False,
        precision: str = "float32",
        max_streams: int | None = None,
        devices: int | Sequence[str] | None = None,
    ) -> None:
        if precision not in PRECISIONS:
            raise ValueError(f"precision {precision!r} is not one of {', '.join(PRECISIONS)}")
        if executor not in EXECUTORS:
            raise ValueError(f"executor {executor!r} is not one of {', '.join(EXECUTORS)}")
        if threads is not None and not threads >= 1:
            raise ValueError(f"threads={threads}: a run needs at least one thread")
        if max_streams is not None and not max_streams >= 1:
            raise ValueError(f"max_streams={max_streams}: a plan needs at least one stream")
        if devices is not None and executor not in ("auto", "frames"):
            raise ValueError(f'devices= are for executor="frames", not {executor!r}')
        virtual = () if devices is None else local(devices)
        chosen = [_backend(each, precision) for each in backends or _default()]
        if len({backend.name for backend in chosen}) < len(chosen):
            raise ValueError(f"backends= has two of one name: {[b.name for b in chosen]}")
        self._options = {
            "executor": executor,
            "backends": backends,
            "place": place,
            "threads": threads,
            "shapes": shapes,
            "limits": limits,
            "autotune": autotune,
            "precision": precision,
            "max_streams": max_streams,
            "devices": devices,
        }
        keep_memory()
        self.limits = limits or DEFAULT_LIMITS
        self._closed = False
        self._lock = threading.Lock()
        # All in the order of their last use. Requests are found by names in the order in which
        # they are given, signatures by sets of names.
        self._requests: OrderedDict[Any, Request] = OrderedDict()
        self._signatures: OrderedDict[Any, Signature] = OrderedDict()
        self._plans: OrderedDict[tuple[Signature, Any, bool], Executor] = OrderedDict()
        with garbage.paused():
            self.model = model if isinstance(model, Model) else load(model, limits=self.limits)
            model = self.model
            functions = own_stores({"": model.graph, **model.functions})
            graph = self._graph = functions.pop("")
            options = threads, autotune, max_streams, virtual, functions
            self._compiler = Compiler(executor, chosen, self.limits, place, *options)
            check_overrides(place or {}, graph, chosen)
            self._values = _values_by_name(graph)
            inputs, outputs = ([v.name for v in values] for values in (graph.inputs, graph.outputs))
            self._main = self._compile_signature(inputs, outputs, ())
            self._all = Request(self._main, outputs)
            if shapes is not None:
                self._prepare(shapes)
        renewed(self)

    # Running.

    def run(
        self,
        feeds: Mapping[str, Any] | None = None,
        fetches: Sequence[str] | None = None,
        targets: Sequence[str] | None = None,
        *,
        timeout: float | None = None,
        cancel: CancelToken | None = None,
        trace: Observer | None = None,
        observers: Sequence[Observer] = (),
    ) -> dict[str, Any]:
        """Run the model and return what was fetched, by name.

        ``feeds`` maps names to arrays (anything with ``__array__`` or ``__dlpack__``, lists and
        numbers) of the input's dtype and shape. Any value of the model may be fed or fetched by
        name; only what the fetches need is run. ``targets`` are values to compute without fetching
        them. After ``timeout`` seconds the run ends with ``DeadlineExceeded``, after
        ``cancel.cancel()`` with ``Cancelled``. A ``trace`` records the run; it, and ``observers``
        of other kinds, are told of each step while it runs.

        Raises ``InvalidInput`` for wrong names, dtypes and shapes, ``RunError`` for what goes wrong
        on the way.
        """
        if self._closed:
            raise PenstockError("the session is closed")
        request, key, values = self._resolve(feeds, fetches, targets)
        signature = request.signature
        last, executor = signature.last
        if executor is None or key != last:
            executor = self._executor(signature, key, values)
        if timeout is None and cancel is None and trace is None and not observers:
            outputs = executor.run(values, NEVER)
        else:
            told = _told(trace, observers)
            if told:
                executor = self._observed(signature, key, values)
            outputs = Run(timeout, cancel, told).run_inline(executor, values)
        return request.named(outputs)

    def __call__(self, *inputs: Any) -> Any:
        """Run with inputs by position: the array of one output, a tuple of several."""
        signature = self._main
        if len(inputs) != len(signature.names):
            wanted = ", ".join(map(str, self.inputs))
            raise InvalidInput(f"{len(inputs)} inputs given, the model takes ({wanted})")
        outputs = tuple(self.run(dict(zip(signature.names, inputs, strict=True))).values())
        return outputs[0] if len(outputs) == 1 else outputs

    def submit(
        self,
        feeds: Mapping[str, Any] | None = None,
        fetches: Sequence[str] | None = None,
        targets: Sequence[str] | None = None,
        *,
        timeout: float | None = None,
        cancel: CancelToken | None = None,
        trace: Observer | None = None,
        observers: Sequence[Observer] = (),
    ) -> Future[dict[str, Any]]:
        """``run`` on the process-wide pool of threads; returns at once.

        The ``timeout`` counts from now, and a run that is stopped while it is queued ends at once.
        Errors are the future's. Closing the session does not stop the run.
        """
        job = self.job(
            feeds,
            fetches,
            targets,
            timeout=timeout,
            cancel=cancel,
            trace=trace,
            observers=observers,
        )
        try:
            pool().submit(job)
        except RuntimeError as error:  # the process ends
            job.refuse(error)
            raise
        return job.future

    def job(
        self,
        feeds: Mapping[str, Any] | None = None,
        fetches: Sequence[str] | None = None,
        targets: Sequence[str] | None = None,
        *,
        timeout: float | None = None,
        cancel: CancelToken | None = None,
        trace: Observer | None = None,
        observers: Sequence[Observer] = (),
    ) -> Job:
        """A run for somebody to call later, on a thread that may do its work: see ``submit``."""
        if self._closed:
            raise PenstockError("the session is closed")

        def resolve(watched: bool) -> tuple[Executor, Sequence[Any], Named]:
            request, key, values = self._resolve(feeds, fetches, targets)
            find = self._observed if watched else self._executor
            return find(request.signature, key, values), values, request.named

        return Job(Run(timeout, cancel, _told(trace, observers)), resolve)

    async def arun(
        self, feeds: Mapping[str, Any] | None = None, *arguments: Any, **options: Any
    ) -> dict[str, Any]:
        """``run`` for asyncio: the event loop goes on meanwhile; cancelling it cancels the run."""
        import asyncio

        # Of several runs that share a token, cancelling the task stops its own only.
        token = CancelToken(options.pop("cancel", None))
        future = self.submit(feeds, *arguments, cancel=token, **options)
        try:
            return await asyncio.wrap_future(future)
        except asyncio.CancelledError:
            token.cancel()
            raise

    def profile(self, feeds: Mapping[str, Any] | None = None, *, runs: int = 10) -> Profile:
        """Run the model step by step, every node on every backend that supports it, and keep what
        each took in the table of costs (in the user's cache folder), which later decides where
        nodes run and what runs in parallel. Returns where the time went, of ``runs`` runs on each
        backend. Raises as ``run`` does.
        """
        if self._closed:
            raise PenstockError("the session is closed")
        request, _, values = self._resolve(feeds, None, None)
        return self._compiler.profile(request.signature.graph, values, runs)

    def forecast(self, workers: int) -> Forecast:
        """What the last plan would take with so many workers of one thread each, by a simulated
        schedule, from measured costs (``profile``), or else estimated ones.
        """
        return self._compiler.forecast(self.plan, workers)

    def schedule(self, max_streams: int | None = None) -> list[Chart]:
        """The static schedule of the last plan on streams, and of blocks inside of it that have
        streams of their own: on as many as pay, by measured costs (``profile``), or else estimated
        ones; or on up to ``max_streams``, whatever they cost.
        """
        return charts(self.plan, self._compiler.streaming(self.plan, max_streams))

    # Looking inside.

    @property
    def inputs(self) -> list[Port]:
        """Names and types of the model's inputs."""
        return [Port(v.name, v.type) for v in self.model.graph.inputs]

    @property
    def outputs(self) -> list[Port]:
        """Names and types of the model's outputs, as far as they are known before a run."""
        types = [v.type for v in self._main.graph.outputs]
        return [Port(n, t) for n, t in zip(self._main.outputs, types, strict=True)]

    @property
    def source(self) -> str:
        """The generated program of the plan that was used last."""
        return self.latest.source

    @property
    def plan(self) -> Plan:
        """The plan that was used last."""
        return self.latest.plan

    @property
    def memory(self) -> Memory:
        """Bytes held."""
        executors = self._executors()
        return Memory(
            max((e.plan.constant_bytes for e in executors), default=0),
            sum(e.arena_bytes for e in executors),
            sum(e.plan_bytes for e in executors),
            len(executors),
        )

    def explain(self) -> str:
        """How the last plan will run: its steps, its memory, what was simplified away."""
        executor = self.latest
        return format_plan(executor.plan, executor.layout, executor.tasks)

    def trim(self) -> None:
        """Give back the arenas that no run holds."""
        for executor in self._executors():
            executor.trim()

    # Lifetime.

    def close(self) -> None:
        """Refuse further runs and give up plans and arenas; runs in flight finish."""
        with self._lock:
            self._closed = True
            for signature, _, _ in self._plans:
                signature.last = (None, None)
            self._requests.clear()
            self._signatures.clear()
            self._plans.clear()

    def forked(self) -> None:
        """In a forked child: nobody compiles, and nobody holds a lock."""
        self._lock = threading.Lock()
        for signature in (self._main, *self._signatures.values()):
            signature.lock = threading.Lock()

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def __reduce__(self) -> tuple[Any, ...]:
        """Sessions are pickled as the path and the options they were made with."""
        if self.model.path is None:
            raise TypeError("only a session of a model loaded from a path can be pickled")
        return _restore, (self.model.path, self._options)

    def __repr__(self) -> str:
        ports = ", ".join(map(str, self.inputs)), ", ".join(map(str, self.outputs))
        return f"Session({self.model.entry!r}: ({ports[0]}) -> ({ports[1]}))"

    # Inside.

    def _resolve(
        self,
        feeds: Mapping[str, Any] | None,
        fetches: Sequence[str] | None,
        targets: Sequence[str] | None,
    ) -> tuple[Request, Any, list[Any]]:
        """The part of the model to run, the key of its plan, and the values fed."""
        if feeds is None:
            feeds = {}
        if feeds and self.model.aliases and isinstance(feeds, Mapping):
            feeds = self._renamed(feeds)
        request = self._all
        if fetches is not None or targets is not None or len(feeds) != len(self._main.names):
            request = self._request_for(feeds, fetches, targets)
        try:
            values = request.signature.values(feeds)
        except (KeyError, TypeError):  # perhaps other values of the model than its inputs
            request = self._request_for(feeds, fetches, targets)
            values = request.signature.values(feeds)
        return request, request.signature.key(values), values

    @property
    def latest(self) -> Executor:
        """The executor that was used last; compiled now if all dims are known before a run."""
        executor = self._main.last[1]
        if executor is None:
            kinds = [v.type for v in self._main.graph.inputs]
            if not all(isinstance(kind, TensorType) and kind.static for kind in kinds):
                raise InvalidInput("no plan yet: run the session, or compile it with shapes=...")
            self._prepare({})
            executor = self._main.last[1]
            assert executor is not None
        return executor

    def _prepare(self, shapes: Mapping[str, Sequence[int]]) -> None:
        """Compile the plan for the given shapes of inputs ahead of the first run."""
        signature = self._main
        for name in sorted(set(shapes) - set(signature.names)):
            self._value(name, "feed")
            raise InvalidInput(f"shapes= has {name!r}, which is no input of the model")
        values = []
        for name, kind in zip(signature.names, signature.types, strict=True):
            if not isinstance(kind, TensorType) or kind.dtype is None:
                raise InvalidInput(f"input {name!r}: shapes= needs a tensor, not {kind}")
            dims = shapes.get(name, kind.shape)
            shape = () if dims is None else tuple([d for d in dims if _is_dim(d)])
            if dims is None or len(shape) < len(dims):
                raise InvalidInput(f"input {name!r} of type {kind}: shapes= must say every dim")
            try:
                values.append(np.broadcast_to(np.zeros((), kind.dtype), shape))
            except ValueError as error:
                raise InvalidInput(f"input {name!r}: no array has shape {shape}") from error
        self._executor(signature, signature.key(values), values)

    def _executors(self) -> list[Executor]:
        with self._lock:
            return list(self._plans.values())

    def _executor(self, signature: Signature, key: Any, values: Sequence[Any]) -> Executor:
        """The executor of a plan that was not the last one used; compiled if it is new.

        Of threads that need the same new plan one compiles it; those that have theirs go on.
        """
        found = self._known(signature, key, False)
        if found is None:
            with signature.lock:
                found = self._known(signature, key, False)
                if found is None:
                    found = self._compiler.compile(signature.graph, values)
                    self._keep(signature, key, False, found)
        signature.last = (None, None) if self._closed else (key, found)
        return found

    def _observed(self, signature: Signature, key: Any, values: Sequence[Any]) -> Executor:
        """As ``_executor``, one that tells observers what it does."""
        found = self._known(signature, key, True)
        if found is None:
            plain = self._executor(signature, key, values)
            with signature.lock:
                found = self._known(signature, key, True)
                if found is None:
                    found = plain.observed()
                    self._keep(signature, key, True, found)
        return found

    def _known(self, signature: Signature, key: Any, observed: bool) -> Executor | None:
        with self._lock:
            found = self._plans.get((signature, key, observed))
            if found is not None:
                self._plans.move_to_end((signature, key, observed))
        return found

    def _keep(self, signature: Signature, key: Any, observed: bool, executor: Executor) -> None:
        """Add a plan, and drop those not used for longest, down to the limit on their bytes."""
        with self._lock:
            if self._closed:
                return
            self._plans[signature, key, observed] = executor
            held = sum(map(_bytes, self._plans.values()))
            while held > self.limits.max_plans_bytes and len(self._plans) > 1:
                (old, _, _), dropped = self._plans.popitem(last=False)
                held -= _bytes(dropped)
                if old.last[1] is dropped:
                    old.last = (None, None)

    def _request_for(
        self,
        feeds: Mapping[str, Any],
        fetches: Sequence[str] | None,
        targets: Sequence[str] | None,
    ) -> Request:
        # A dict is one, which takes a tenth of the time to ask.
        if feeds.__class__ is not dict and not isinstance(feeds, Mapping):
            raise InvalidInput(f"feeds must map names to values, not be a {type(feeds).__name__}")
        if isinstance(fetches, str) or isinstance(targets, str):
            what, name = ("fetches", fetches) if isinstance(fetches, str) else ("targets", targets)
            raise InvalidInput(f"{what} must be a list of names; did you mean [{name!r}]?")
        fetched = self._main.outputs if fetches is None else tuple(fetches)
        key = (frozenset(feeds), fetched, tuple(targets or ()))
        with self._lock:
            found = self._requests.get(key)
            if found is not None:
                self._requests.move_to_end(key)
                return found
        signature = self._signature_for(
            list(feeds), dict.fromkeys(fetched), dict.fromkeys(targets or ())
        )
        with self._lock:
            found = self._requests.setdefault(
                key, Request(signature, tuple(dict.fromkeys(fetched)))
            )
            while len(self._requests) > _MOST_SIGNATURES:
                self._requests.popitem(last=False)
        return found

    def _signature_for(
        self, feeds: Collection[str], fetches: Collection[str], targets: Collection[str]
    ) -> Signature:
        """What a set of feeds, fetches and targets needs, in whatever order they are given."""
        main = self._main
        key = (frozenset(feeds), frozenset(fetches), frozenset(targets))
        if key == (frozenset(main.names), frozenset(main.outputs), frozenset()):
            return main
        with self._lock:
            found = self._signatures.get(key)
            if found is not None:
                self._signatures.move_to_end(key)
                return found
        made = self._compile_signature(feeds, fetches, targets)
        with self._lock:
            found = self._signatures.setdefault(key, made)
            while len(self._signatures) > _MOST_SIGNATURES:
                _, dropped = self._signatures.popitem(last=False)
                for plan in [plan for plan in self._plans if plan[0] is dropped]:
                    del self._plans[plan]
                for each in [k for k, v in self._requests.items() if v.signature is dropped]:
                    del self._requests[each]
        return found

    def _compile_signature(
        self, feeds: Collection[str], fetches: Collection[str], targets: Collection[str]
    ) -> Signature:
        with compiling():
            fed = [self._value(name, "feed") for name in feeds]
            fetched = [self._value(name, "fetch") for name in fetches]
            more, nodes = self._targets(targets)
            graph = cut(self._graph, fed, [*fetched, *more], nodes)
            missing = unfed(graph)
            if missing:
                names = ", ".join(f"{v.name!r} ({v.type})" for v in missing)
                raise InvalidInput(f"the fetches need inputs that were not fed: {names}")
            for value in graph.inputs:
                if isinstance(value.type, AnyType):
                    value.type = self._inferred.get(value.name, ANY)
                value.type = checked(value.type)
            graph = self._compiler.prepare(graph)
        return Signature(graph, fetches)

    @cached_property
    def _inferred(self) -> dict[str, Type]:
        """What is known of the values that the model declares no type of: dtypes, no shapes.

        Which shapes fit a value that is fed instead of computed, the graph behind it decides.
        """
        graph = clone(self._graph)
        infer_types(graph)
        return {
            name: TensorType(value.type.dtype)
            for name, value in _values_by_name(graph).items()
            if isinstance(value.type, TensorType)
        }

    def _targets(self, names: Collection[str]) -> tuple[list[Value], list[Node]]:
        """What must be computed that nobody fetches: values, or nodes. A node of a frame may run
        many times and has no one value, so that where there are frames, all are nodes."""
        values: list[Value] = []
        nodes: list[Node] = []
        for name in names:
            value = self._values.get(self.model.aliases.get(name, name))
            node = self._nodes.get(name) if value is None else value.producer
            if value is not None and (node is None or not self._framed):
                values.append(value)
            elif node is not None:
                nodes.append(node)
            else:
                raise InvalidInput(f"no target is {name!r}: {suggest(name, self._values)}")
        return values, nodes

    @cached_property
    def _nodes(self) -> dict[str, Node]:
        """Every node of the outermost graph that has a name."""
        return {node.name: node for node in self._graph.nodes if node.name}

    @cached_property
    def _framed(self) -> bool:
        return is_framed(self._graph)

    def _renamed(self, feeds: Mapping[str, Any]) -> Mapping[str, Any]:
        """Feeds by the names that values have, not by aliases of these."""
        aliases = self.model.aliases
        if aliases.keys().isdisjoint(feeds):
            return feeds
        found: dict[str, Any] = {}
        for name, value in feeds.items():
            known = name if name in self._values else aliases.get(name, name)
            if known in found:
                raise InvalidInput(f"{known!r} is fed twice, once as {name!r}; feed it once")
            found[known] = value
        return found

    def _value(self, name: str, role: str) -> Value:
        found = self._values.get(name)
        if found is None:
            found = self._values.get(self.model.aliases.get(name, name))
        if found is None:
            raise InvalidInput(f"cannot {role} {name!r}: {suggest(name, self._values)}")
        return found


def compile(
    model: Model | str | Path | Any,
    executor: str = "auto",
    backends: Sequence[str | Backend] | None = None,
    place: Mapping[str, str] | None = None,
    threads: int | None = None,
    shapes: Mapping[str, Sequence[int]] | None = None,
    limits: Limits | None = None,
    autotune: bool = False,
    precision: str = "float32",
    max_streams: int | None = None,
    devices: int | Sequence[str] | None = None,
) -> Session:
    """Compile a model, or the file at a path, into a session.

    ``executor``: how plans run. "linear": in a fixed order, as one generated function; "dataflow":
    step by step, as they become ready; "parallel": on several threads, where a simulated schedule
    says that this is no slower; "streams": on streams that are scheduled when the plan is compiled,
    and wait for each other's signals, where these pay, or on exactly ``max_streams`` as far as the
    model is as wide; "frames": by tokens, as TensorFlow does, every node as it is; "auto": "frames"
    where the model needs it, else "linear", or "parallel" where it clearly wins. For all but
    "frames", TensorFlow's loops and conditions become structured ones; what cannot is run by frames
    with "auto", and refused by the others. ``backends``: names, or backends of your own, those to
    be preferred first; where several can run a node, costs decide, measured before or else
    estimated, unless ``place`` does: it maps operations ("Conv"), or nodes ("node:add_3"), to names
    of backends. With ``autotune`` they are measured when a plan is compiled, and kept for later
    ones. ``threads``: how many cores one run may keep
    busy; all that the process has, if not given. ``shapes``: dims of inputs, to compile the plan
    for them now rather than at the first run. ``limits``: bounds on what the model may ask for.
    ``precision="bf16"`` lets oneDNN round operands of large products and convolutions to bfloat16,
    where the processor has it: faster, with two to three digits. ``devices``: how many virtual
    devices of this process there are, ``cpu:0`` and so on, or their names: the frames executor then
    runs each node where it says, each device by itself. Without, all nodes run on one, whatever
    device they name.

    Raises ``InvalidModel`` for a file or model that breaks the rules, ``Unsupported`` with all
    operations that there are no kernels for.
    """
    return Session(
        model,
        executor=executor,
        backends=backends,
        place=place,
        threads=threads,
        shapes=shapes,
        limits=limits,
        autotune=autotune,
        precision=precision,
        max_streams=max_streams,
        devices=devices,
    )


def _default() -> Sequence[str]:
    """oneDNN where there is one, and NumPy for all that it has no kernels for."""
    from penstock.backends.onednn.library import library

    return ("numpy",) if library() is None else ("onednn", "numpy")


def _backend(chosen: str | Backend, precision: str) -> Backend:
    if not isinstance(chosen, str):
        return chosen
    if chosen not in BACKENDS:
        raise ValueError(f"backend {chosen!r} is not one of {', '.join(BACKENDS)}")
    module, _, name = BACKENDS[chosen].rpartition(".")
    kind = getattr(import_module(module), name)
    made: Backend = kind(precision) if chosen in _WITH_PRECISION else kind()
    return made


def _told(trace: Observer | None, observers: Sequence[Observer]) -> Sequence[Observer]:
    found = tuple(observers) if trace is None else (trace, *observers)
    for each in found:
        if not isinstance(each, Observer):
            raise TypeError(
                f"a {type(each).__name__} does not observe: trace= takes a penstock.Trace, "
                "observers= a list of these and of other penstock.Observers"
            )
    return found


def _bytes(executor: Executor) -> int:
    """What dropping a plan gives back."""
    return executor.arena_bytes + executor.plan_bytes


def _restore(path: str, options: dict[str, Any]) -> Session:
    return compile(path, **options)


def _values_by_name(graph: Graph) -> dict[str, Value]:
    """Every value of the outermost graph that can be fed or fetched."""
    found = {value.name: value for value in graph.inputs}
    for node in graph.nodes:
        for value in (*node.inputs, *node.outputs):
            if value is not None:
                found.setdefault(value.name, value)
    for value in graph.outputs:
        found.setdefault(value.name, value)
    return found


def suggest(name: str, names: Iterable[str]) -> str:
    """What to say of a name that is none of ``names``."""
    alike = [other for other in names if other.casefold() == name.casefold()]
    close = alike or get_close_matches(name, list(names), n=3, cutoff=0.6)
    if close:
        return "the model has no such value; did you mean " + " or ".join(map(repr, close)) + "?"
    shown = list(names)[:8]
    return f"the model has no such value; it has {', '.join(map(repr, shown))}" + (
        ", ..." if len(shown) == 8 else ""
    )


def _is_dim(dim: Any) -> TypeGuard[int]:
    return isinstance(dim, int | np.integer) and int(dim) >= 0
