"""The command line: ``penstock run | info | check | plan``.

Exit code 0, 1 (the model or an input is at fault), 2 (usage). With ``--json`` every command prints
one JSON object on standard output, errors included.
"""

from __future__ import annotations

import json
import math
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import wraps
from pathlib import Path
from typing import Any

import click
import numpy as np

import penstock
from penstock.errors import InvalidInput, InvalidModel, PenstockError, Unsupported
from penstock.explain import format_bytes
from penstock.ir import Model, Value
from penstock.limits import DEFAULT_LIMITS
from penstock.loading import load
from penstock.ops.cost import flops
from penstock.session import Port, Session, compile, suggest
from penstock.types import STRING, TensorType, dtype_name

CONTEXT = {"help_option_names": ["-h", "--help"]}


@click.group(context_settings=CONTEXT)
@click.version_option(penstock.__version__, prog_name="penstock")
def main() -> None:
    """Run neural networks, and look at how they run."""


def command(function: Callable[..., dict[str, Any]]) -> click.Command:
    """A command that returns what ``--json`` prints; errors of Penstock end it with exit code 1."""

    @click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
    @wraps(function)
    def wrapped(*arguments: Any, as_json: bool, **options: Any) -> None:
        try:
            with _progress(function.__name__.rstrip("_"), quiet=as_json):
                result = function(*arguments, **options)
        except PenstockError as error:
            _fail(error, as_json)
        if as_json:
            click.echo(json.dumps(result, indent=2))
        else:
            _SHOW[function.__name__](result)
        if not result.get("ok", True):
            sys.exit(1)

    return main.command(function.__name__.rstrip("_"))(wrapped)


def _fail(error: PenstockError, as_json: bool) -> None:
    kind = type(error).__name__
    if as_json:
        click.echo(json.dumps({"ok": False, "error": {"type": kind, "message": str(error)}}))
    else:
        click.secho(f"{kind}: ", fg="red", bold=True, nl=False, err=True)
        click.echo(str(error), err=True)
    sys.exit(1)


@contextmanager
def _progress(what: str, *, quiet: bool) -> Iterator[None]:
    """A moving bar on a terminal for what takes more than a second."""
    if quiet or not sys.stderr.isatty():
        yield
        return
    import threading

    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    progress = Progress(*columns, console=Console(stderr=True), transient=True)
    progress.add_task(what, total=None)
    timer = threading.Timer(1, progress.start)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        timer.join()
        progress.stop()


MODEL = click.argument("model", type=click.Path(path_type=Path))
SHAPES = click.option(
    "--shape",
    "shapes",
    multiple=True,
    metavar="NAME=DIMS",
    help="Dims of an input, as in --shape x=1x3x224x224. Unknown dims count as 1.",
)


# run


@command
@MODEL
@click.option(
    "--input",
    "-i",
    "inputs",
    multiple=True,
    metavar="NAME=WHAT",
    help="WHAT: a .npy or .npz file, 'random' or 'zeros' (with dims as in random:1x3x8x8), or a "
    "value in JSON. A .npz file without NAME feeds all of its arrays.",
)
@click.option("--fetch", "-f", "fetches", multiple=True, metavar="NAME", help="Any value by name.")
@click.option("--output", "-o", type=click.Path(path_type=Path), help="Folder for .npy files.")
@click.option("--timeout", type=float, help="Seconds after which the run is stopped.")
@click.option("--seed", default=0, show_default=True, help="Seed of random inputs.")
def run(
    model: Path,
    inputs: Sequence[str],
    fetches: Sequence[str],
    output: Path | None,
    timeout: float | None,
    seed: int,
) -> dict[str, Any]:
    """Run a model once, and show or save what comes out."""
    begin = time.perf_counter()
    session = compile(model)
    feeds = _feeds(session, inputs, np.random.default_rng(seed))
    compiled = time.perf_counter()
    outputs = session.run(feeds, list(fetches) or None, timeout=timeout)
    ended = time.perf_counter()
    files = {}
    if output is not None:
        output.mkdir(parents=True, exist_ok=True)
        for name, value in outputs.items():
            files[name] = str(_save(output, name, value))
    return {
        "outputs": {
            name: {**_summary(value), **({"file": files[name]} if name in files else {})}
            for name, value in outputs.items()
        },
        "seconds": {"load": compiled - begin, "compile_and_run": ended - compiled},
    }


def _feeds(session: Session, given: Sequence[str], rng: np.random.Generator) -> dict[str, Any]:
    ports = {port.name: port for port in session.inputs}
    feeds: dict[str, Any] = {}
    for text in given:
        # Names may have an equals sign of their own; values of known inputs come first.
        name, equals, what = text.partition("=")
        known = next((n for n in ports if text.startswith(f"{n}=")), None)
        if known is not None:
            name, equals, what = known, "=", text[len(known) + 1 :]
        if not equals:
            if not text.endswith(".npz"):
                raise click.UsageError(f"--input {text!r} must be NAME=WHAT or a .npz file")
            feeds.update(_read_npz(text))
            continue
        port = ports.get(name)
        if port is None and what.partition(":")[0] in ("random", "zeros"):
            raise InvalidInput(f"cannot make {name!r}: {suggest(name, ports)}")
        feeds[name] = _value(name, what, port, rng)
    missing = [str(port) for port in ports.values() if port.name not in feeds]
    if missing and not feeds.keys() - ports.keys():
        hints = " ".join(f"--input {n}=random" for n in ports if n not in feeds)
        raise InvalidInput(f"no value for {', '.join(missing)}; for a first look: {hints}")
    return feeds


def _value(name: str, what: str, port: Port | None, rng: np.random.Generator) -> Any:
    word, _, dims = what.partition(":")
    if word in ("random", "zeros"):
        return _made(name, word, dims, port, rng)
    if what.endswith(".npy"):
        return _read(name, what)
    if what.endswith(".npz"):
        arrays = _read_npz(what)
        if name not in arrays and len(arrays) != 1:
            raise InvalidInput(f"{what} has no array {name!r}, it has {', '.join(arrays)}")
        return arrays.get(name, next(iter(arrays.values()), None))
    try:
        return json.loads(what)
    except json.JSONDecodeError:
        if port is not None and isinstance(port.type, TensorType) and port.type.dtype == STRING:
            return what
        raise InvalidInput(
            f"input {name!r}: {what!r} is neither a .npy or .npz file, 'random', 'zeros', nor a "
            "value in JSON"
        ) from None


def _made(
    name: str, word: str, dims: str, port: Port | None, rng: np.random.Generator
) -> np.ndarray:
    kind = port.type if port is not None else None
    if not isinstance(kind, TensorType) or kind.dtype is None:
        raise InvalidInput(f"input {name!r}: {word} needs an input that is a tensor of known dtype")
    if kind.dtype == STRING:
        raise InvalidInput(f"input {name!r}: strings cannot be {word}, give them in JSON")
    shape = _dims(dims) if dims else tuple(d if isinstance(d, int) else 1 for d in kind.shape or ())
    most = DEFAULT_LIMITS.max_bytes
    if most is not None and math.prod(shape) * kind.dtype.itemsize > most:
        raise InvalidInput(
            f"input {name!r}: {shape} is larger than the memory there is; give fewer with "
            f"--input {name}={word}:DIMS"
        )
    try:
        if word == "zeros":
            return np.zeros(shape, kind.dtype)
        if kind.dtype.kind == "b":
            return rng.integers(0, 2, shape).astype(kind.dtype)
        if kind.dtype.kind in "iu":
            return rng.integers(0, 100, shape).astype(kind.dtype)
        return rng.standard_normal(shape).astype(kind.dtype)
    except (MemoryError, OverflowError, ValueError) as error:
        raise InvalidInput(f"input {name!r}: no array of shape {shape}: {error}") from error


def _dims(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(dim) for dim in text.replace(",", "x").split("x") if dim)
    except ValueError:
        raise click.UsageError(f"dims must look like 1x3x224x224, not {text!r}") from None


def _read(name: str, path: str) -> np.ndarray:
    try:
        array = np.load(path, allow_pickle=False)
    except (OSError, ValueError, EOFError, MemoryError) as error:
        raise InvalidInput(f"input {name!r}: cannot read {path}: {error}") from error
    assert isinstance(array, np.ndarray)
    return array


def _read_npz(path: str) -> dict[str, np.ndarray]:
    import zipfile

    try:
        with np.load(path, allow_pickle=False) as arrays:
            return {key: arrays[key] for key in arrays.files}
    except (OSError, ValueError, EOFError, zipfile.BadZipFile, AttributeError) as error:
        raise InvalidInput(f"cannot read {path}: {error}") from error


def _save(folder: Path, name: str, value: Any) -> Path:
    """Save a value as .npy (lists and strings as .json); names become safe file names."""
    safe = "".join(c if c.isalnum() or c in "._-" else "_" for c in name).lstrip(".") or "output"
    if isinstance(value, np.ndarray) and value.dtype != STRING:
        path = folder / f"{safe}.npy"
        # Formats that NumPy's file does not know are saved as float32.
        known = value.dtype.kind in "biufc" and type(value.dtype).__module__.startswith("numpy")
        np.save(path, value if known else value.astype(np.float32))
        return path
    path = folder / f"{safe}.json"
    path.write_text(json.dumps(_plain(value)))
    return path


def _plain(value: Any) -> Any:
    if isinstance(value, np.ndarray | np.generic):
        return value.tolist()
    if isinstance(value, Mapping):
        return {str(key): _plain(x) for key, x in value.items()}
    return [_plain(x) for x in value] if isinstance(value, list | tuple) else value


def _summary(value: Any) -> dict[str, Any]:
    if not isinstance(value, np.ndarray):
        return {"type": type(value).__name__, "value": _plain(value)}
    found: dict[str, Any] = {"dtype": dtype_name(value.dtype), "shape": list(value.shape)}
    if value.size and value.dtype.kind not in "OSU":
        wide = value.astype(np.complex128 if value.dtype.kind == "c" else np.float64)
        if value.dtype.kind != "c":
            statistics = {"min": wide.min(), "mean": wide.mean(), "max": wide.max()}
            found.update((k, float(v) if np.isfinite(v) else str(v)) for k, v in statistics.items())
    first = value.reshape(-1)[:8]
    found["first"] = [x if isinstance(x, str) else _number(x) for x in first.tolist()]
    return found


def _number(x: Any) -> Any:
    return x if isinstance(x, int | bool) or (isinstance(x, float) and np.isfinite(x)) else str(x)


def _show_run(result: Mapping[str, Any]) -> None:
    rows = []
    for name, output in result["outputs"].items():
        kind = f"{output['dtype']}{output['shape']}" if "dtype" in output else output["type"]
        spread = ", ".join(
            f"{k} {output[k]:.6g}" for k in ("min", "mean", "max") if _real(output, k)
        )
        shown = output.get("first", output.get("value"))
        rows.append((name, kind, spread, str(shown), output.get("file", "")))
    headers = ("output", "type", "range", "first values", "file")
    _table(headers if any(row[4] for row in rows) else headers[:4], rows)
    seconds = result["seconds"]
    click.echo(f"loaded in {seconds['load']:.3f} s, ran in {seconds['compile_and_run']:.3f} s")


def _real(output: Mapping[str, Any], key: str) -> bool:
    return isinstance(output.get(key), float)


# info


@command
@MODEL
@SHAPES
def info(model: Path, shapes: Sequence[str]) -> dict[str, Any]:
    """Inputs, outputs, operations, parameters, work and memory of a model."""
    loaded = load(model)
    graph = loaded.graph
    constants = _constants(loaded)
    result: dict[str, Any] = {
        "model": str(model),
        "metadata": loaded.metadata,
        "inputs": {v.name: str(v.type) for v in graph.inputs},
        "outputs": [v.name for v in graph.outputs],
        "nodes": sum(1 for _ in graph.walk()),
        "operations": dict(Counter(n.op.full_name for n in graph.walk()).most_common()),
        "parameters": sum(c.size for c in constants),
        "parameter_bytes": sum(c.nbytes for c in constants),
    }
    try:
        session = compile(loaded, shapes=_all_shapes(loaded, shapes))
    except InvalidInput as error:
        return {**result, "plan": None, "why": str(error)}
    executor = session.latest
    plan = executor.plan
    result["plan"] = {
        "inputs": {plan.slots[i].name: str(plan.slots[i].type) for i in plan.inputs},
        "outputs": {
            name: str(plan.slots[i].type)
            for name, i in zip(result["outputs"], plan.outputs, strict=True)
        },
        "steps": sum(1 for _ in plan.walk()),
        "flops": sum(flops(step.node) for step in plan.walk()),
        "arena_bytes": executor.layout.size,
        "arena_lower_bound": executor.layout.lower_bound,
        "constant_bytes": plan.constant_bytes,
    }
    return result


def _constants(model: Model) -> list[np.ndarray]:
    values: dict[int, np.ndarray] = {}
    for node in model.graph.walk():
        for value in node.inputs:
            if isinstance(value, Value) and value.const is not None:
                values[id(value.const)] = value.const
    return list(values.values())


def _all_shapes(model: Model, given: Sequence[str]) -> dict[str, tuple[int, ...]]:
    """Dims of every input: as given, as declared, and 1 where neither says."""
    shapes: dict[str, tuple[int, ...]] = {}
    for value in model.graph.inputs:
        if isinstance(value.type, TensorType):
            dims = value.type.shape or ()
            shapes[value.name] = tuple(d if isinstance(d, int) else 1 for d in dims)
    for text in given:
        name, equals, dims_text = text.rpartition("=")
        if not equals:
            raise click.UsageError(f"--shape must be NAME=DIMS, not {text!r}")
        shapes[name] = _dims(dims_text)
    return shapes


def _show_info(result: Mapping[str, Any]) -> None:
    click.echo(f"model       {result['model']}")
    plan = result["plan"]
    for title, ports in (("inputs", result["inputs"]), ("outputs", result["outputs"])):
        click.echo(title)
        for name in ports:
            declared = f": {ports[name]}" if title == "inputs" else ""
            here = f", here {plan[title][name]}" if plan else ""
            click.echo(f"  {name}{declared}{here}")
    parameters = f"{result['parameters']:,} ({format_bytes(result['parameter_bytes'])})"
    click.echo(f"parameters  {parameters}")
    click.echo(f"nodes       {result['nodes']}")
    _table(("operation", "nodes"), [(k, str(v)) for k, v in result["operations"].items()])
    if not plan:
        click.echo(f"no plan: {result['why']}")
        return
    click.echo(f"steps       {plan['steps']}")
    click.echo(f"work        {plan['flops'] / 1e6:,.1f} MFLOP a run")
    arena, bound = format_bytes(plan["arena_bytes"]), format_bytes(plan["arena_lower_bound"])
    click.echo(f"arena       {arena} (lower bound {bound})")
    click.echo(f"constants   {format_bytes(plan['constant_bytes'])}")


# check


@command
@MODEL
def check(model: Path) -> dict[str, Any]:
    """Verify a model and report everything that is wrong with it."""
    problems: list[str] = []
    unsupported: list[str] = []
    try:
        compile(model)
    except InvalidModel as error:
        problems.extend(error.problems)
    except Unsupported as error:
        unsupported.extend(str(operation) for operation in error.operations)
    return {
        "ok": not problems and not unsupported,
        "problems": problems,
        "unsupported": unsupported,
    }


def _show_check(result: Mapping[str, Any]) -> None:
    for problem in result["problems"]:
        click.echo(f"invalid: {problem}")
    for operation in result["unsupported"]:
        click.echo(f"unsupported: {operation}")
    if result["ok"]:
        click.echo("valid, and every operation is supported")


# plan


@command
@MODEL
@SHAPES
@click.option("--source", is_flag=True, help="The generated program instead of the plan.")
def plan(model: Path, shapes: Sequence[str], source: bool) -> dict[str, Any]:
    """How a model will run: its steps and their memory, or the generated program."""
    loaded = load(model)
    session = compile(loaded, shapes=_all_shapes(loaded, shapes))
    return {"text": session.source if source else session.explain()}


def _show_plan(result: Mapping[str, Any]) -> None:
    click.echo(result["text"], nl=False)


_SHOW: dict[str, Callable[[Mapping[str, Any]], None]] = {
    "run": _show_run,
    "info": _show_info,
    "check": _show_check,
    "plan": _show_plan,
}


def _table(headers: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, header_style="bold", pad_edge=False)
    for header in headers:
        table.add_column(header)
    for row in rows:
        table.add_row(*(Text(cell) for cell in row[: len(headers)]))
    Console().print(table)


if __name__ == "__main__":
    main()
