"""``penstock profile``: measure the nodes of a model on each backend, and show where time goes."""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import click

from penstock.cli.base import EXECUTOR, MODEL, SIGNATURE, chosen, command, show_table
from penstock.cli.run import INPUTS, SEED, read_feeds
from penstock.frontends.load import load
from penstock.observers.profile import Row
from penstock.observers.trace import Trace
from penstock.session.session import compile
from penstock.tuning.cost_table import cost_table

# Rows shown of each table.
_MAX_ROWS = 20


def _show_profile(result: Mapping[str, Any]) -> None:
    for title, key in (("node", "nodes"), ("operation", "operations"), ("backend", "backends")):
        rows = result[key]
        shown = [
            (row["name"], str(row["count"]), f"{row['ms']:.3f}", f"{row['share']:.1%}")
            for row in rows[:_MAX_ROWS]
        ]
        show_table((title, "times", "ms a run", "share"), shown)
        if len(rows) > _MAX_ROWS:
            click.echo(f"and {len(rows) - _MAX_ROWS} more; --json has all")
        click.echo()
    click.echo(
        f"{result['ms']:.3f} ms a run step by step, {result['outside_ms']:.3f} ms of it outside "
        f"kernels; {result['executor']}: {result['run_ms']:.3f} ms"
    )
    if result["trace"]:
        click.echo(f"trace in {result['trace']}, for https://ui.perfetto.dev")
    click.echo(f"costs in {result['costs']}")


@command(_show_profile)
@MODEL
@INPUTS
@SEED
@SIGNATURE
@click.option(
    "--runs",
    type=click.IntRange(min=1),
    default=10,
    show_default=True,
    help="Runs to measure on each backend.",
)
@EXECUTOR
@click.option(
    "--trace",
    type=click.Path(path_type=Path),
    help="File to write the trace to. Default: MODEL.trace.json in this folder.",
)
@click.option("--no-trace", is_flag=True, help="Write no trace.")
def profile(
    model: str,
    inputs: Sequence[str],
    seed: int,
    signature: str | None,
    runs: int,
    executor: str | None,
    trace: Path | None,
    no_trace: bool,
) -> dict[str, Any]:
    """Measure every node on every backend, show where time goes, and write a trace.

    The costs are kept in the user's cache folder; from then on they decide where nodes run and
    what runs in parallel. Inputs that are not given are random.
    """
    loaded = load(model, signature=signature)
    session = compile(loaded)
    feeds = read_feeds(session, inputs, seed, fill=True)
    measured = session.profile(feeds, runs=runs)
    session = compile(loaded, **chosen(executor=executor))
    session.run(feeds)
    times = []
    for _ in range(runs):
        begin = time.perf_counter()
        session.run(feeds)
        times.append(time.perf_counter() - begin)
    if not no_trace:
        trace = trace or Path(f"{Path(model).stem}.trace.json")
        recording = Trace()
        session.run(feeds, trace=recording)
        recording.save(trace)
    count = measured.runs or 1

    def rows(table: Sequence[Row]) -> list[dict[str, Any]]:
        total = sum(row.seconds for row in table) or 1.0
        keys = ("name", "count", "ms", "share")
        cells = [(r.name, r.count, r.seconds / count * 1e3, r.seconds / total) for r in table]
        return [dict(zip(keys, row, strict=True)) for row in cells]

    return {
        "nodes": rows(measured.by_node()),
        "operations": rows(measured.by_operation()),
        "backends": rows(measured.by_backend()),
        "runs": measured.runs,
        "ms": measured.wall / count * 1e3,
        "outside_ms": measured.outside / count * 1e3,
        "executor": session.latest.name,
        "run_ms": statistics.median(times) * 1e3,
        "trace": None if no_trace else str(trace),
        "costs": str(cost_table().path),
    }
