"""``penstock bench``: the time of a model's runs, by executor and number of threads."""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from typing import Any

import click
import numpy as np

from penstock.cli.base import command, read_model, show_assumed, show_table
from penstock.cli.options import compile_options
from penstock.cli.run import model_and_inputs, read_feeds
from penstock.compiler.options import EXECUTORS
from penstock.core.types import type_of
from penstock.executors.feeds import convert
from penstock.host.threads import core_budget
from penstock.session.session import Session, compile

_WARM_UP_RUNS = 3
_MIN_RUNS = 5

_COLUMNS = (
    ("executor", "executor", ""),
    ("effective", "effective", ""),
    ("threads", "threads", ""),
    ("clients", "clients", ""),
    ("prepare", "prepare_ms", ".1f"),
    ("first", "first_ms", ".2f"),
    ("mean", "mean_ms", ".3f"),
    ("min", "min_ms", ".3f"),
    ("max", "max_ms", ".3f"),
    ("geomean", "geomean_ms", ".3f"),
    ("runs/s", "runs_per_s", ".0f"),
)  # title, key and format
_STATISTICS: dict[str, Callable[[list[float]], float]] = {
    "mean_ms": statistics.fmean,
    "min_ms": min,
    "max_ms": max,
    "geomean_ms": statistics.geometric_mean,
    "median_ms": statistics.median,
}


def _show_bench(result: Mapping[str, Any]) -> None:
    click.echo(f"{result['model']}: loaded in {result['load_ms']:.1f} ms")
    show_assumed(result)
    several = any(row["clients"] > 1 for row in result["rows"])
    columns = [column for column in _COLUMNS if several or column[0] != "clients"]
    rows = [[format(row[key], form) for _, key, form in columns] for row in result["rows"]]
    show_table([title for title, _, _ in columns], rows)
    click.echo("times in ms")


@command(_show_bench)
@model_and_inputs
@click.option(
    "--executor",
    "-e",
    "executors",
    multiple=True,
    type=click.Choice(EXECUTORS),
    help="Executor to use; may be repeated. Default: auto.",
)
@compile_options("executor", "threads")
@click.option(
    "--threads",
    "-t",
    multiple=True,
    type=click.IntRange(min=1),
    help="Cores that a run may use; may be repeated. Default: 1 and all.",
)
@click.option(
    "--clients",
    "-c",
    multiple=True,
    type=click.IntRange(min=1),
    help="Threads that call the session concurrently; may be repeated. Default: 1.",
)
@click.option(
    "--seconds",
    type=click.FloatRange(min=0, max=3600),
    default=1.0,
    show_default=True,
    help="Seconds for which each combination runs, at least five times.",
)
def bench(
    model: str,
    inputs: Sequence[str],
    seed: int,
    signature: str | None,
    shapes: Sequence[str],
    executors: Sequence[str],
    options: Mapping[str, Any],
    threads: Sequence[int],
    clients: Sequence[int],
    seconds: float,
) -> dict[str, Any]:
    """Time a model: loading, preparing (compiling a plan for the inputs), the first run, and the
    mean, minimum, maximum, geometric mean and median of many runs.

    Inputs that are not given are random; an unknown first dim of theirs is 1.
    """
    begin = time.perf_counter()
    loaded, options = read_model(model, signature, options)
    load_ms = 1e3 * (time.perf_counter() - begin)
    with compile(loaded, **options) as session:
        assumed: dict[str, str] = {}
        feeds = read_feeds(session, inputs, seed, fill=True, shapes=shapes, assumed=assumed)
        fed = {p.name: convert(p.name, feeds[p.name], p.type) for p in session.inputs}
    feeds |= fed
    tensors = all(isinstance(value, np.ndarray) for value in fed.values())
    dims = {name: value.shape for name, value in fed.items()} if tensors else None
    counts = sorted(set(threads) or {1, core_budget()})
    rows = []
    for executor, count, client_count in product(executors or (None,), counts, clients or (1,)):
        chosen = {**options, "threads": count}
        chosen |= {} if executor is None else {"executor": executor}
        begin = time.perf_counter()
        with compile(loaded, shapes=dims, **chosen) as session:
            prepared = time.perf_counter()
            session.run(feeds)
            first = time.perf_counter()
            for _ in range(_WARM_UP_RUNS):
                session.run(feeds)
            times, elapsed = _timed(session, feeds, client_count, seconds)
            effective = session.effective.executor
        rows.append(
            {
                "executor": session.options.executor,
                "effective": effective,
                "threads": count,
                "clients": client_count,
                "prepare_ms": 1e3 * (prepared - begin),
                "first_ms": 1e3 * (first - prepared),
                **{key: 1e3 * function(times) for key, function in _STATISTICS.items()},
                "runs": len(times),
                "runs_per_s": len(times) / elapsed,
            }
        )
    types = {name: str(type_of(value)) for name, value in feeds.items()}
    result = {"model": str(model), "load_ms": load_ms, "inputs": types, "assumed": assumed}
    return {**result, "rows": rows}


def _timed(
    session: Session, feeds: Mapping[str, Any], clients: int, seconds: float
) -> tuple[list[float], float]:
    """The time of each run with this many concurrent clients, and of all together, in seconds."""
    times: list[float] = []
    ready = threading.Barrier(clients + 1)

    def client() -> None:
        ready.wait()
        end = time.perf_counter() + seconds
        count = 0
        while count < _MIN_RUNS or time.perf_counter() < end:
            begin = time.perf_counter()
            session.run(feeds)
            times.append(time.perf_counter() - begin)
            count += 1

    with ThreadPoolExecutor(clients) as pool:
        runs = [pool.submit(client) for _ in range(clients)]
        ready.wait()
        begin = time.perf_counter()
        for run in runs:
            run.result()
        return times, time.perf_counter() - begin
