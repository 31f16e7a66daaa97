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

from penstock.cli.base import MODEL, PLANNER, SIGNATURE, chosen, command, show_table
from penstock.cli.run import INPUTS, SEED, read_feeds
from penstock.frontends.load import load
from penstock.host.threads import core_budget
from penstock.session.feeds import convert
from penstock.session.options import EXECUTORS
from penstock.session.session import Session, compile
from penstock.types import type_of

_WARM_UP_RUNS = 3
_MIN_RUNS = 5

_COLUMNS = (
    ("executor", "executor", ""),
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
    click.echo(
        f"inputs {', '.join(f'{name}: {type_}' for name, type_ in result['inputs'].items())}"
    )
    several = any(row["clients"] > 1 for row in result["rows"])
    columns = [column for column in _COLUMNS if several or column[0] != "clients"]
    rows = [[format(row[key], form) for _, key, form in columns] for row in result["rows"]]
    show_table([title for title, _, _ in columns], rows)
    click.echo("times in ms")


@command(_show_bench)
@MODEL
@INPUTS
@SEED
@SIGNATURE
@click.option(
    "--executor",
    "-e",
    "executors",
    multiple=True,
    type=click.Choice(EXECUTORS),
    help="Executor to use; may be repeated. Default: auto.",
)
@PLANNER
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
    executors: Sequence[str],
    planner: str | None,
    threads: Sequence[int],
    clients: Sequence[int],
    seconds: float,
) -> dict[str, Any]:
    """Time a model: loading, preparing (compiling a plan for the inputs), the first run, and the
    mean, minimum, maximum, geometric mean and median of many runs.

    Inputs that are not given are random, with 1 for dims that are not known.
    """
    begin = time.perf_counter()
    loaded = load(model, signature=signature)
    load_ms = 1e3 * (time.perf_counter() - begin)
    with compile(loaded) as session:
        feeds = read_feeds(session, inputs, seed, fill=True)
        fed = {p.name: convert(p.name, feeds[p.name], p.type) for p in session.inputs}
    feeds |= fed
    tensors = all(isinstance(value, np.ndarray) for value in fed.values())
    shapes = {name: value.shape for name, value in fed.items()} if tensors else None
    counts = sorted(set(threads) or {1, core_budget()})
    rows = []
    for executor, count, client_count in product(executors or (None,), counts, clients or (1,)):
        options = chosen(executor=executor, threads=count, memory_planner=planner)
        begin = time.perf_counter()
        with compile(loaded, shapes=shapes, **options) as session:
            prepared = time.perf_counter()
            session.run(feeds)
            first = time.perf_counter()
            for _ in range(_WARM_UP_RUNS):
                session.run(feeds)
            times, elapsed = _timed(session, feeds, client_count, seconds)
        rows.append(
            {
                "executor": session.options.executor,
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
    return {"model": str(model), "load_ms": load_ms, "inputs": types, "rows": rows}


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
