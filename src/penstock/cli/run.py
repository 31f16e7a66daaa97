"""``penstock run``: run a model once."""

from __future__ import annotations

import json
import math
import time
import zipfile
from collections.abc import Mapping, Sequence
from functools import wraps
from pathlib import Path
from typing import Any

import click
import numpy as np

from penstock.analysis.frames import Frames
from penstock.cli.base import (
    MODEL,
    SIGNATURE,
    Command,
    CompileArguments,
    Decorator,
    command,
    count_option,
    read_model,
    show_table,
)
from penstock.cli.options import compile_options, file_option, folder_option, gathered
from penstock.cli.shapes import SHAPES, GivenShapes, read_dims, read_shapes, show_assumed
from penstock.core.errors import InvalidInput, RunError, suggest
from penstock.core.limits import DEFAULT_LIMITS
from penstock.core.records import dataclass, field
from penstock.core.types import (
    STRING,
    JsonObject,
    NamedValues,
    RunValue,
    TensorType,
    dtype_name,
    type_of,
)
from penstock.ir.graph import Model
from penstock.observers.trace import Trace
from penstock.session.facts import Port
from penstock.session.session import Session, compile

INPUTS = click.option(
    "--input",
    "-i",
    "inputs",
    multiple=True,
    metavar="NAME=WHAT",
    help="WHAT: a .npy or .npz file, 'random' or 'zeros' (with dims as in random:1x3x8x8), or a "
    "value in JSON. A .npz file without NAME feeds all of its arrays.",
)
SEED = click.option("--seed", default=0, show_default=True, help="Seed of random inputs.")


@dataclass(frozen=True)
class ModelInputs:
    """A model and what it is fed with, as the command line has them. ``assumed`` gets a note for
    each generated input with a dim that was not named, ``integers`` the names of inputs that are
    random whole numbers."""

    model: str
    signature: str | None
    inputs: Sequence[str]
    seed: int
    shapes: Sequence[str]
    assumed: dict[str, str] = field(init=False, default_factory=dict)
    integers: list[str] = field(init=False, default_factory=list)

    def read(self, options: CompileArguments) -> tuple[Model, dict[str, Any]]:
        """The model, and the options of compiling it with the time that is left."""
        return read_model(self.model, self.signature, options)

    def feeds(
        self, session: Session, *, fill: bool = True, load: str | None = None
    ) -> dict[str, RunValue]:
        """Feeds by the names of inputs, from the file ``load`` and the texts of ``--input``. An
        input that none of them names is random with ``fill``; without, that is an error unless
        another value is fed instead."""
        ports = {port.name: port for port in session.inputs}
        aliases = {a: ports[name] for a, name in session.model.aliases.items() if name in ports}
        by_name = {**aliases, **ports}
        given = read_shapes(session.model, self.shapes)[-1]
        generator = _Generator(np.random.default_rng(self.seed), given, self.assumed, self.integers)
        feeds: dict[str, Any] = {}

        def add(file: str) -> None:
            arrays = _read_arrays(file)
            if "" in arrays:
                raise InvalidInput(f"{file} has no names of inputs; use --input NAME={file}")
            feeds.update((by_name[n].name if n in by_name else n, a) for n, a in arrays.items())

        if load is not None:
            add(load)
        for text in self.inputs:
            # Names may have an equals sign of their own: those of inputs come first.
            name = next((n for n in by_name if text.startswith(f"{n}=")), text.partition("=")[0])
            what = text[len(name) + 1 :]
            port = by_name.get(name)
            if name == text:
                if not text.endswith(".npz"):
                    raise click.UsageError(f"--input {text!r} must be NAME=WHAT or a .npz file")
                add(text)
            elif port is None and what.partition(":")[0] in ("random", "zeros"):
                raise InvalidInput(f"cannot generate {name!r}: {suggest(name, by_name)}")
            else:
                feeds[name if port is None else port.name] = _value(name, what, port, generator)
        missing = [port for port in ports.values() if port.name not in feeds]
        if fill:
            # All at once, so that a message about unknown dims names those of all inputs.
            given.resolve({port.name: port.type for port in missing}, {})
            for port in missing:
                feeds[port.name] = generator.value(port.name, "random", "", port)
        elif missing and not feeds.keys() - ports.keys():
            hints = " ".join(f"--input {port.name}=random" for port in missing)
            names = ", ".join(map(str, missing))
            raise InvalidInput(f"no value for {names}; for a first look: {hints}")
        if given:
            types = {port.name: port.type for port in ports.values()}
            given.check(types, {name: np.shape(value) for name, value in feeds.items()})
        return feeds

    def describe(self, feeds: NamedValues) -> JsonObject:
        """The part of a command's result that says what was run."""
        types = {name: str(type_of(value)) for name, value in feeds.items()}
        return {"model": self.model, "inputs": types, "assumed": self.assumed}


def model_and_inputs(function: Command) -> Command:
    """Give a command a model, and the options for what it is fed with, which it takes as
    ``source``. The error of a run on random integers says how to feed others."""

    @wraps(function)
    def with_hint(*arguments: object, source: ModelInputs, **options: object) -> JsonObject:
        try:
            return function(*arguments, source=source, **options)
        except RunError as error:
            if type(error) is not RunError or not source.integers:
                raise
            feed = " ".join(f"--input {name}=zeros" for name in source.integers)
            raise RunError(
                f"{error}\nintegers that are not given are random, 0 or 1; for others: {feed}, or "
                "NAME=FILE.npy"
            ) from error

    declared: Command = gathered("source", ModelInputs)(with_hint)
    for declare in (SHAPES, SIGNATURE, SEED, INPUTS, MODEL):
        declared = declare(declared)
    return declared


def runs_option(default: int, text: str) -> Decorator:
    """The option for how many runs are measured."""
    return count_option("--runs", default=default, help=text)


def _show_run(result: JsonObject) -> None:
    if result["assumed"]:
        show_assumed(result)
    rows = []
    for name, output in result["outputs"].items():
        input_type = f"{output['dtype']}{output['shape']}" if "dtype" in output else output["type"]
        spread = {k: output.get(k) for k in ("min", "mean", "max")}
        shown = ", ".join(f"{k} {v:.6g}" for k, v in spread.items() if isinstance(v, float))
        first = str(output.get("first", output.get("value")))
        rows.append((name, input_type, shown, first, output.get("file", "")))
    headers = ("output", "type", "range", "first values", "file")
    show_table(headers if any(row[4] for row in rows) else headers[:4], rows)
    seconds = result["seconds"]
    click.echo(f"loaded in {seconds['load']:.3f} s, ran in {seconds['compile_and_run']:.3f} s")


@dataclass(frozen=True)
class _Wanted:
    """The values that a run fetches, and the files that it writes."""

    fetches: Sequence[str]
    output: Path | None
    dump: Path | None
    trace: Path | None


@command(_show_run)
@model_and_inputs
@click.option("--load", type=click.Path(), metavar="FILE.npz", help="File with inputs by name.")
@click.option(
    "--fetch",
    "-f",
    "fetches",
    multiple=True,
    metavar="NAME",
    help="Any value by name, or 'all' for each that a node computes.",
)
@folder_option("--output", "-o", help="Folder for .npy files.")
@file_option("--dump", metavar="FILE.npz", help="File for outputs by name.")
@click.option(
    "--timeout", type=click.FloatRange(min=0), help="Seconds after which the run is stopped."
)
@compile_options("timeout")
@file_option("--trace", help="File for a trace of the run, for Perfetto.")
@gathered("wanted", _Wanted)
def run(
    source: ModelInputs,
    load: str | None,
    timeout: float | None,
    options: CompileArguments,
    wanted: _Wanted,
) -> JsonObject:
    """Run a model once, and show or save its outputs."""
    begin = time.perf_counter()
    session = compile(source.model, signature=source.signature, **options)
    trace = None if wanted.trace is None else Trace()
    feeds = source.feeds(session, fill=False, load=load)
    compiled = time.perf_counter()
    fetches = _fetched(session, wanted.fetches)
    outputs = session.run(feeds, fetches, timeout=timeout, trace=trace)
    ended = time.perf_counter()
    if trace is not None and wanted.trace is not None:
        trace.save(wanted.trace)
    summaries = {name: _summary(value) for name, value in outputs.items()}
    if wanted.output is not None:
        for name, value in outputs.items():
            summaries[name]["file"] = str(_save(wanted.output, name, value))
    if wanted.dump is not None:
        _dump(wanted.dump, outputs)
    return {
        **source.describe(feeds),
        "outputs": summaries,
        "seconds": {"load": compiled - begin, "compile_and_run": ended - compiled},
    }


def _fetched(session: Session, names: Sequence[str]) -> list[str] | None:
    """The names of values to fetch. "all" stands for those of nodes, unless one has this name, but
    for those in loops of TensorFlow's frames, which have a value for each iteration."""
    values, graph = {port.name for port in session.values}, session.model.graph
    if "all" not in names or "all" in values:
        return list(names) or None
    frames = Frames(graph)
    computed = [
        value.name
        for node in graph.nodes
        if frames.of_outputs[node] is frames.root
        for value in node.outputs
        if value is not None and value.name in values
    ]
    return list(dict.fromkeys([name for name in names if name != "all"] + computed))


def _value(name: str, what: str, port: Port | None, generator: _Generator) -> RunValue:
    word, _, dims = what.partition(":")
    if word in ("random", "zeros"):
        return generator.value(name, word, dims, port)
    if what.endswith((".npy", ".npz")):
        arrays = _read_arrays(what)
        if name not in arrays and len(arrays) != 1:
            raise InvalidInput(f"{what} has no array {name!r}, it has {', '.join(arrays)}")
        return arrays.get(name, next(iter(arrays.values())))
    try:
        return json.loads(what)
    except json.JSONDecodeError:
        if port is not None and isinstance(port.type, TensorType) and port.type.dtype == STRING:
            return what
        raise InvalidInput(
            f"input {name!r}: {what!r} is neither a .npy or .npz file, 'random', 'zeros', nor a "
            "value in JSON"
        ) from None


@dataclass(frozen=True)
class _Generator:
    """Makes values of inputs, with the shapes that ``--shape`` gives; other dims are as declared,
    or noted in ``assumed``."""

    rng: np.random.Generator
    shapes: GivenShapes
    assumed: dict[str, str]
    integers: list[str]

    def value(self, name: str, word: str, dims: str, port: Port | None) -> np.ndarray:
        """A value of an input: "random" or "zeros", with these dims if any are given."""
        type_ = port and port.type
        if not isinstance(type_, TensorType) or type_.dtype is None:
            raise InvalidInput(
                f"input {name!r}: {word} needs an input that is a tensor of known dtype"
            )
        if type_.dtype == STRING:
            raise InvalidInput(f"input {name!r}: strings cannot be {word}, give them in JSON")
        if dims:
            shape = read_dims(dims)
        else:
            shape = self.shapes.resolve({name: type_}, self.assumed)[name]
        max_bytes = DEFAULT_LIMITS.max_bytes
        if max_bytes is not None and math.prod(shape) * type_.dtype.itemsize > max_bytes:
            raise InvalidInput(
                f"input {name!r}: an array of shape {shape} does not fit into memory; give fewer "
                f"with --input {name}={word}:DIMS"
            )
        try:
            if word == "zeros":
                return np.zeros(shape, type_.dtype)
            if type_.dtype.kind not in "biu":
                return self.rng.standard_normal(shape).astype(type_.dtype)
            # Most are indices, masks or kinds of tokens: what each table has, and no more.
            if type_.dtype.kind != "b":
                self.integers.append(name)
            return self.rng.integers(0, 2, shape).astype(type_.dtype)
        except (MemoryError, OverflowError, ValueError) as error:
            raise InvalidInput(f"input {name!r}: no array of shape {shape}: {error}") from error


def _read_arrays(path: str) -> dict[str, np.ndarray]:
    """The arrays of a .npz file by name, or the one of a .npy file under the name ""."""
    try:
        # A pickle could run any code.
        loaded = np.load(path, allow_pickle=False)
        if isinstance(loaded, np.ndarray):
            return {"": loaded}
        with loaded:
            return {key: loaded[key] for key in loaded.files}
    except OSError as error:
        raise InvalidInput(f"cannot read {path}: {error.strerror or error}") from error
    except (ValueError, EOFError, MemoryError, zipfile.BadZipFile) as error:
        raise InvalidInput(
            f"cannot read {path}: {error}; save arrays of numbers or strings with numpy.save or "
            "numpy.savez"
        ) from error


def _save(folder: Path, name: str, value: RunValue) -> Path:
    """Save a value as .npy (lists and strings as .json); names become safe file names."""
    # Names of TensorFlow's nodes have slashes; a file whose name begins with a dot is hidden.
    safe = "".join(c if c.isalnum() or c in "._-" else "_" for c in name).lstrip(".") or "output"
    if isinstance(value, np.ndarray) and value.dtype != STRING:
        path = folder / f"{safe}.npy"
        np.save(path, _storable(value))
        return path
    path = folder / f"{safe}.json"
    path.write_text(json.dumps(_plain(value)))
    return path


def _dump(path: Path, outputs: NamedValues) -> None:
    """Save values as a .npz file, which ``np.savez`` cannot with any names."""
    with zipfile.ZipFile(path, "w") as archive:
        for name, value in outputs.items():
            if not isinstance(value, np.ndarray):
                raise InvalidInput(f"{path} can have no {type(value).__name__}, as output {name!r}")
            # The size is not known ahead, and without this an entry of more than 2 GiB is an error.
            with archive.open(f"{name}.npy", "w", force_zip64=True) as file:
                np.lib.format.write_array(file, _storable(value), allow_pickle=False)


def _storable(array: np.ndarray) -> np.ndarray:
    """An array that .npy files can have: of formats that they lack, as float32."""
    if array.dtype == STRING:
        return array.astype(str)
    native = array.dtype.kind in "biufc" and type(array.dtype).__module__.startswith("numpy")
    return array if native else array.astype(np.float32)


def _plain(value: RunValue) -> Any:
    if isinstance(value, np.ndarray | np.generic):
        return value.tolist()
    if isinstance(value, Mapping):
        return {str(key): _plain(x) for key, x in value.items()}
    return [_plain(x) for x in value] if isinstance(value, list | tuple) else value


def _summary(value: RunValue) -> JsonObject:
    if not isinstance(value, np.ndarray):
        return {"type": type(value).__name__, "value": _plain(value)}
    summary: dict[str, Any] = {"dtype": dtype_name(value.dtype), "shape": list(value.shape)}
    if value.size and value.dtype.kind not in "OSU":
        # The sum behind a mean could overflow in the own dtype of the values.
        wide = value.astype(np.complex128 if value.dtype.kind == "c" else np.float64)
        if value.dtype.kind != "c":
            statistics = {"min": wide.min(), "mean": wide.mean(), "max": wide.max()}
            summary.update(
                # JSON has neither NaN nor infinities.
                (k, float(v) if np.isfinite(v) else str(v))
                for k, v in statistics.items()
            )
    first = value.reshape(-1)[:8]
    summary["first"] = [
        x if isinstance(x, int) or (isinstance(x, float) and np.isfinite(x)) else str(x)
        for x in first.tolist()
    ]
    return summary
