"""``penstock compare``: where the values of a model differ that is compiled in two ways, and how
far the outputs of two models or runtimes are apart."""

from __future__ import annotations

import click

from penstock.cli.base import CompileArguments, command, read_model, show_table
from penstock.cli.options import changed, compile_options, runtime_or_options
from penstock.cli.run import ModelInputs, model_and_inputs
from penstock.cli.shapes import show_assumed
from penstock.core.types import JsonObject, NamedValues
from penstock.peers import comparison
from penstock.session.session import Session, compile

# Rows shown of the table.
_MAX_ROWS = 20


def _show_comparison(result: JsonObject) -> None:
    show_assumed(result)
    for name in ("first", "second"):
        click.echo(f"{name}: {result[name]}")
    values = result["values"]
    rows = [
        (
            row["name"],
            row["operation"],
            *(_figures(row) if row["same_shape"] else ("other shape", "", "", "", "")),
            f"{row['backend']}, {row['other_backend']}",
        )
        for row in values
    ]
    titles = ("relative", "largest", "at", "first", "second")
    show_table(("value", "operation", *titles, "backends"), rows, _MAX_ROWS)
    alone = result["only"]
    click.echo(
        f"{len(values)} values are computed by both, {alone[0]} by the first alone and {alone[1]} "
        "by the second, as values inside of fused steps are"
    )
    if not result["ok"]:
        click.echo(f"values differ by more than {result['tolerance']:g} of their scale", err=True)


def _figures(row: JsonObject) -> tuple[str, ...]:
    at = "[" + ", ".join(map(str, row["index"])) + "]"
    nonfinite = f", {row['nonfinite']} NaN or inf" if row["nonfinite"] else ""
    figures = [f"{row[key]:.6g}" for key in ("relative", "largest")]
    return (*figures, at + nonfinite, *(f"{row[key]:.6g}" for key in ("one", "other")))


def _show(result: JsonObject) -> None:
    if "values" in result:
        _show_comparison(result)
        return
    show_assumed(result)
    click.echo(result["text"])
    if not result["ok"]:
        click.echo(f"outputs differ by more than {result['tolerance']:g} of their scale", err=True)


@command(_show)
@model_and_inputs
@click.argument("other", required=False, type=click.Path())
@compile_options()
@runtime_or_options
@click.option(
    "--tolerance",
    type=click.FloatRange(min=0),
    help="Exit with 1 if a value differs by more than this share of its largest element, in NaN or "
    "infinities, or in shape.",
)
def compare(
    source: ModelInputs,
    other: str | None,
    options: CompileArguments,
    against: str | CompileArguments,
    tolerance: float | None,
) -> JsonObject:
    """Run a model in two ways, or two models, and show how far they are apart.

    With options of compiling in --against, all values of MODEL are compared, the farthest first.
    With another runtime in --against, or with OTHER, a second model, the outputs are compared.
    Inputs that are not given are random.
    """
    if not against and other is None:
        raise click.UsageError(
            "name a second model, or what to compare with, as in --against onnxruntime or "
            "--against backends=numpy"
        )
    loaded, options = source.read(options)
    session = compile(loaded, **options)
    feeds = source.feeds(session)
    if other is None and not isinstance(against, str):
        values = _compare_values(session, compile(loaded, **changed(options, against)), feeds)
        ok = tolerance is None or all(_within(row, tolerance) for row in values["values"])
        return {**source.describe(feeds), **values, "tolerance": tolerance, "ok": ok}
    if isinstance(against, str):
        compared = comparison.compare(session, other, feeds=feeds, against=against)
    else:
        model, others = read_model(other or source.model, None, changed(options, against))
        second = compile(model, **others)
        compared = comparison.compare(session, second, feeds=feeds)
    return {
        **source.describe(feeds),
        "first": compared.labels[0],
        "second": compared.labels[1],
        "outputs": [output.describe() for output in compared.outputs],
        "text": str(compared),
        "tolerance": tolerance,
        "ok": tolerance is None or compared.within(tolerance),
    }


def _compare_values(session: Session, other: Session, feeds: NamedValues) -> JsonObject:
    """The values of a model in two sessions, the farthest first."""
    compared = session.inspect.report(feeds, runs=1, against=other).document["comparison"]
    return {
        "first": compared["labels"][0],
        "second": compared["labels"][1],
        "values": compared["values"],
        "only": compared["only"],
    }


def _within(row: JsonObject, tolerance: float) -> bool:
    return bool(row["same_shape"] and not row["nonfinite"] and row["relative"] <= tolerance)
