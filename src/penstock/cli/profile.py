"""``penstock profile``: measure nodes on each backend, and show where the time of a plan goes."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import click

from penstock.cli.base import CompileArguments, command, show_table
from penstock.cli.options import check_writable, compile_options, file_option
from penstock.cli.run import ModelInputs, model_and_inputs, runs_option
from penstock.cli.shapes import show_assumed
from penstock.core.types import JsonObject
from penstock.observers.profile import Row, StepRow
from penstock.observers.trace import Trace
from penstock.session.session import compile
from penstock.tuning.cost_table import cost_table
from penstock.tuning.machine_peak import MachinePeak, machine_peak

# Rows shown of each table.
_MAX_ROWS = 20


def _show_profile(result: JsonObject) -> None:
    show_assumed(result)
    click.echo(f"{result['effective_line']}")
    headers = ("step", "operation", "backend", "dtype", "times", "ms a run", "share")
    rows = [
        (
            row["origin"],
            row["operation"],
            row["backend"],
            row["precision"],
            str(row["count"]),
            f"{row['ms']:.3f}",
            f"{row['share']:.1%}",
            _rate(row["gflops_per_s"]),
            _rate(row["gbytes_per_s"]),
            _share(row["share_of_peak"] if row["flops"] else None),
        )
        for row in result["steps"]
    ]
    show_table((*headers, "GFLOP/s", "GB/s", "of peak"), rows, _MAX_ROWS)
    click.echo()
    for title, key in (("operation", "operations"), ("backend", "backends")):
        shown = [
            (row["name"], str(row["count"]), f"{row['ms']:.3f}", f"{row['share']:.1%}")
            for row in result[key]
        ]
        show_table((title, "times", "ms a run", "share"), shown, _MAX_ROWS)
        click.echo()
    peak = result["peak"]
    click.echo(
        f"{result['ms']:.3f} ms a run, {result['outside_ms']:.3f} ms of it outside kernels; "
        f"{result['observed_ms']:.3f} ms while its steps are observed"
    )
    click.echo(
        f"peak: {peak['gflops_per_s']:.0f} GFLOP/s in float32 ({peak['threads']} times the fastest "
        f"product on one thread, or the fastest step), {peak['gbytes_per_s']:.1f} GB/s (a copy)"
    )
    if result["trace"]:
        click.echo(f"trace in {result['trace']}, for https://ui.perfetto.dev")
    click.echo(f"costs in {result['costs']}" if result["costs"] else _no_costs(result))


def _no_costs(result: JsonObject) -> str:
    if result["effective"]["executor"] == "frames":
        return "no costs were kept: a graph that only frames can run is not measured ahead"
    return f"no costs could be kept: {result['costs_path']} cannot be written"


def _share(share: float | None) -> str:
    return "" if share is None else f"{share:.1%}"


def _rate(giga: float) -> str:
    return f"{giga:.1f}" if giga else ""


@command(_show_profile)
@model_and_inputs
@runs_option(10, "Runs to measure: on each backend, and then of the plan.")
@compile_options("autotune")
@file_option(
    "--trace", help="File to write the trace to. Default: MODEL.trace.json in this folder."
)
@click.option("--no-trace", is_flag=True, help="Write no trace.")
def profile(
    source: ModelInputs, runs: int, options: CompileArguments, trace: Path | None, no_trace: bool
) -> JsonObject:
    """Measure every node on every backend; then show where the time of the plan goes that runs from
    then on, and write a trace of it.

    The costs are kept in the user's cache folder; from then on they decide where nodes run and
    what runs in parallel. Inputs that are not given are random.
    """
    if no_trace and trace is not None:
        raise click.UsageError("--trace names a file, and --no-trace says to write none")
    if not no_trace:
        trace = trace or check_writable(Path(f"{Path(source.model).stem}.trace.json"))
    session = compile(source.model, signature=source.signature, **options)
    feeds = source.feeds(session)
    measured = session.profile(feeds, runs=runs)
    # A run of its own, as recording would slow down those that are measured.
    if trace is not None:
        recording = Trace()
        session.run(feeds, trace=recording)
        recording.save(trace)
    rows = measured.steps()
    peak = machine_peak(session.effective.threads).with_steps(rows)
    count, path = measured.runs or 1, cost_table().path
    return {
        **source.describe(feeds),
        "asked": {name: str(value) for name, value in options.items()},
        "effective": asdict(session.effective),
        "effective_line": session.effective.line(session.options),
        "steps": [_step(row, count, peak) for row in rows],
        "operations": _rows(measured.by_operation(), count),
        "backends": _rows(measured.by_backend(), count),
        "runs": measured.runs,
        "ms": measured.wall / count * 1e3,
        "outside_ms": measured.outside / count * 1e3,
        "observed_ms": measured.observed / count * 1e3,
        "peak": {
            "threads": peak.threads,
            "gflops_per_s": peak.flops_per_s * 1e-9,
            "gbytes_per_s": peak.bytes_per_s * 1e-9,
        },
        "trace": None if trace is None else str(trace),
        "costs": path if os.path.exists(path) else None,
        "costs_path": path,
    }


def _step(row: StepRow, runs: int, peak: MachinePeak) -> JsonObject:
    return {
        **row.describe(runs),
        "gflops_per_s": row.flops_per_s * 1e-9,
        "gbytes_per_s": row.bytes_per_s * 1e-9,
        "share_of_peak": peak.share(row),
    }


def _rows(table: Sequence[Row], runs: int) -> list[JsonObject]:
    total = sum(row.seconds for row in table) or 1.0
    keys = ("name", "count", "ms", "share")
    cells = [(r.name, r.count, r.seconds / runs * 1e3, r.seconds / total) for r in table]
    return [dict(zip(keys, row, strict=True)) for row in cells]
