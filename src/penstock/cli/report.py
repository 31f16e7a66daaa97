"""``penstock report``: a page that shows where the time and the memory of a model go."""

from __future__ import annotations

from pathlib import Path

import click

from penstock.cli.base import CompileArguments, command
from penstock.cli.options import (
    changed,
    check_writable,
    comparison_options,
    compile_options,
    file_option,
)
from penstock.cli.run import ModelInputs, model_and_inputs, runs_option
from penstock.cli.shapes import show_assumed
from penstock.core.types import JsonObject
from penstock.session.session import compile


def _show_report(result: JsonObject) -> None:
    show_assumed(result)
    click.echo(f"{result['steps']} steps in {result['output']} ({result['bytes']} bytes)")
    if result["largest"] is not None:
        largest = result["largest"]
        click.echo(
            f"largest relative difference: {largest['relative']:.3g} in {largest['name']!r} "
            f"({largest['operation']})"
        )


@command(_show_report)
@file_option("--output", "-o", help="File for the page. Default: MODEL.report.html in this folder.")
@model_and_inputs
@runs_option(5, "Runs to measure steps in.")
@compile_options()
@comparison_options
def report(
    source: ModelInputs,
    output: Path | None,
    runs: int,
    options: CompileArguments,
    against: CompileArguments,
) -> JsonObject:
    """Run a model a few times, and write a page about it: its graph, its time line, its arena, its
    steps, and the roofline of this machine, in one HTML file that needs no network.

    With --against options, all is run with these as well, and the values of both are compared.
    Inputs that are not given are random.
    """
    output = output or check_writable(Path(f"{Path(source.model).stem}.report.html"))
    loaded, options = source.read(options)
    session = compile(loaded, **options)
    feeds = source.feeds(session)
    other = compile(loaded, **changed(options, against)) if against else None
    made = session.inspect.report(feeds, runs=runs, against=other)
    made.save(output)
    compared = made.document.get("comparison", {"values": []})["values"]
    keys = ("name", "operation", "relative", "largest")
    return {
        **source.describe(feeds),
        "output": str(output),
        "bytes": output.stat().st_size,
        "steps": len(made.document["steps"].get("name", ())),
        "largest": next(({k: row[k] for k in keys} for row in compared if row["same_shape"]), None),
    }
