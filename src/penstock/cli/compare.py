"""``penstock compare``: where the values of a model differ that is compiled in two ways."""

from __future__ import annotations

import click

from penstock.cli.base import CompileArguments, command, show_table
from penstock.cli.options import changed, comparison_options, compile_options
from penstock.cli.run import ModelInputs, model_and_inputs
from penstock.cli.shapes import show_assumed
from penstock.core.types import JsonObject
from penstock.session.session import compile

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


@command(_show_comparison)
@model_and_inputs
@compile_options()
@comparison_options
@click.option(
    "--tolerance",
    type=click.FloatRange(min=0),
    help="Exit with 1 if a value differs by more than this share of its largest element, in NaN or "
    "infinities, or in shape.",
)
def compare(
    source: ModelInputs,
    options: CompileArguments,
    against: CompileArguments,
    tolerance: float | None,
) -> JsonObject:
    """Run a model that is compiled in two ways, and show how far each value is apart, the farthest
    first. Inputs that are not given are random."""
    if not against:
        raise click.UsageError("name what to compare with, as in --against backends=numpy")
    loaded, options = source.read(options)
    session = compile(loaded, **options)
    feeds = source.feeds(session)
    other = compile(loaded, **changed(options, against))
    compared = session.inspect.report(feeds, runs=1, against=other).document["comparison"]
    values = compared["values"]
    return {
        **source.describe(feeds),
        "first": compared["labels"][0],
        "second": compared["labels"][1],
        "values": values,
        "only": compared["only"],
        "tolerance": tolerance,
        "ok": tolerance is None or all(_within(row, tolerance) for row in values),
    }


def _within(row: JsonObject, tolerance: float) -> bool:
    return bool(row["same_shape"] and not row["nonfinite"] and row["relative"] <= tolerance)
