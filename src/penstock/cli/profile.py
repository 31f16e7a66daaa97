"""``penstock profile``: measure what the nodes of a model take, and where the time goes."""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import click
import numpy as np

from penstock.cli.base import EXECUTOR, MODEL, command, show_table
from penstock.cli.run import INPUTS, SEED, read_feeds
from penstock.frontends.load import load
from penstock.observers.profile import Row
from penstock.observers.trace import Trace
from penstock.session.session import compile
from penstock.tuning import cost_table

# Rows of each table that are shown.
_MOST_ROWS = 20


def _show_profile(result: Mapping[str, Any]) -> None:
    for title, key in (("node", "nodes"), ("operation", "operations"), ("backend", "backends")):
        rows = result[key]
        shown = [
            (row["name"], str(row["count"]), f"{row['ms']:.3f}", f"{row['share']:.1%}")
            for row in rows[:_MOST_ROWS]
        ]
        show_table((title, "times", "ms a run", "share"), shown)
        if len(rows) > _MOST_ROWS:
            click.echo(f"and {len(rows) - _MOST_ROWS} more; --json has all")
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
@click.option(
    "--runs",
    type=click.IntRange(min=1),
    default=10,
    show_default=True,
    help="Runs to measure on each backend.",
)
@EXECUTOR
@click.option(
    "--trace", type=click.Path(path_type=Path), help="File of the trace; MODEL.trace.json here."
)
@click.option("--no-trace", is_flag=True, help="Write no trace.")
def profile(
    model: Path,
    inputs: Sequence[str],
    seed: int,
    runs: int,
    executor: str,
    trace: Path | None,
    no_trace: bool,
) -> dict[str, Any]:
    """Measure every node on every backend, show where time goes, and write a trace.

    What is measured is kept in the user's cache folder, and decides from then on where nodes run
    and what runs in parallel. Inputs that are not given are random.
    """
    loaded = load(model)
    session = compile(loaded, executor="dataflow")
    names = [port.name for port in session.inputs]
    left = [name for name in names if not any(text.startswith(f"{name}=") for text in inputs)]
    # First, so that what comes in files takes the place of what is random.
    made = [f"{name}=random" for name in left]
    feeds = read_feeds(session, [*made, *inputs], np.random.default_rng(seed))
    found = session.profile(feeds, runs=runs)
    session = compile(loaded, executor=executor)
    session.run(feeds)
    times = []
    for _ in range(runs):
        begin = time.perf_counter()
        session.run(feeds)
        times.append(time.perf_counter() - begin)
    if not no_trace:
        trace = trace or Path(f"{model.stem}.trace.json")
        recorded = Trace()
        session.run(feeds, trace=recorded)
        recorded.save(trace)
    each = found.runs or 1

    def rows(table: Sequence[Row]) -> list[dict[str, Any]]:
        total = sum(row.seconds for row in table) or 1.0
        return [
            {
                "name": row.name,
                "count": row.count,
                "ms": row.seconds / each * 1e3,
                "share": row.seconds / total,
            }
            for row in table
        ]

    return {
        "nodes": rows(found.by_node()),
        "operations": rows(found.by_operation()),
        "backends": rows(found.by_backend()),
        "runs": found.runs,
        "ms": found.wall / each * 1e3,
        "outside_ms": found.outside / each * 1e3,
        "executor": session.latest.name,
        "run_ms": statistics.median(times) * 1e3,
        "trace": None if no_trace else str(trace),
        "costs": str(cost_table.table().path),
    }
