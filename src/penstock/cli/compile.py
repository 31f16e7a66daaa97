"""``penstock compile``: compile a model ahead, into a file that ``penstock.open`` opens."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

import click

from penstock.cli.base import MODEL, SIGNATURE, CompileArguments, command, read_model
from penstock.cli.options import check_writable, compile_options, file_option
from penstock.cli.shapes import Assumed, read_shapes, shape_option
from penstock.core.types import JsonObject, TensorType
from penstock.ir.describe import format_bytes
from penstock.session import session as sessions


def _show_compiled(result: JsonObject) -> None:
    click.echo(f"{result['output']}: {format_bytes(result['bytes'])}, plans for")
    for shapes in result["plans"]:
        dims = [f"{name}={'x'.join(map(str, shape))}" for name, shape in shapes.items()]
        click.echo(f"  {' '.join(dims) or 'no inputs'}")
    for name, note in result["assumed"].items():
        click.echo(f"input {name}: {note}; --shape names others")
    if not result["plans"]:
        click.echo("  nothing yet: name dims with --shape")


def _beside(model: Path) -> Path:
    """The file that a model is compiled into by default."""
    path = model.with_suffix(".penstock")
    if path == model:
        raise click.UsageError(
            f"{model} is a compiled model already; name another file with --output, or the same "
            "one to replace it"
        )
    return check_writable(path)


@command(_show_compiled)
@MODEL
@SIGNATURE
@file_option("--output", "-o", help="File to write. Default: MODEL.penstock beside the model.")
@shape_option("Several for one name are for plans each. An unknown first dim counts as 1.")
@compile_options()
def compile(
    model: str,
    signature: str | None,
    output: Path | None,
    shapes: Sequence[str],
    options: CompileArguments,
) -> JsonObject:
    """Compile a model ahead, with plans for inputs of these shapes, into a file that starts fast.

    Without --shape there is a plan if the model says all dims of its inputs.
    """
    path = output or _beside(Path(model))
    loaded, options = read_model(model, signature, options)
    types = {value.name: value.type for value in loaded.graph.inputs}
    static = all(isinstance(t, TensorType) and t.static for t in types.values())
    assumed: Assumed = {}
    given = read_shapes(loaded, shapes) if shapes or static else []
    plans = [one.resolve(types, assumed) for one in given]
    begin = time.perf_counter()
    with sessions.compile(loaded, shapes=plans, **options) as session:
        session.save(path)
    return {
        "output": str(path),
        "bytes": path.stat().st_size,
        "plans": [{name: list(shape) for name, shape in plan.items()} for plan in plans],
        "assumed": assumed,
        "seconds": time.perf_counter() - begin,
    }
