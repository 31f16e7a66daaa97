"""``penstock bench``: the time of a model's runs, by executor and number of threads."""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from pathlib import Path
from typing import Any

import click

from penstock.cli.base import MODEL, PLANNER, command, show_table
from penstock.cli.run import INPUTS, SEED, read_feeds
from penstock.frontends.load import load
from penstock.host.threads import core_budget
from penstock.session.options import EXECUTORS
from penstock.session.session import Session, compile

_WARM_UP_RUNS = 3
_MIN_RUNS = 5

_COLUMNS = (
    ("executor", "executor", ""),
    ("threads", "threads", ""),
    ("clients", "clients", ""),
    ("first ms", "first_ms", ".2f"),
    ("median ms", "median_ms", ".3f"),
    ("least ms", "least_ms", ".3f"),
    ("runs/s", "runs_per_s", ".1f"),
)  # title, key and format


def _show_bench(result: Mapping[str, Any]) -> None:
    click.echo(f"{result['model']}: loaded in {result['load_ms']:.1f} ms")
    rows = [[format(row[key], form) for _, key, form in _COLUMNS] for row in result["rows"]]
    show_table([title for title, _, _ in _COLUMNS], rows)


@command(_show_bench)
@MODEL
@INPUTS
@SEED
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
    model: Path,
    inputs: Sequence[str],
    seed: int,
    executors: Sequence[str],
    planner: str,
    threads: Sequence[int],
    clients: Sequence[int],
    seconds: float,
) -> dict[str, Any]:
    """Time a model: its first run, the median and the minimum of many runs, and runs a second.

    Inputs that are not given are random.
    """
    begin = time.perf_counter()
    loaded = load(model)
    load_ms = 1e3 * (time.perf_counter() - begin)
    counts = sorted(set(threads) or {1, core_budget()})
    rows = []
    for executor, count, client_count in product(executors or ("auto",), counts, clients or (1,)):
        with compile(loaded, executor=executor, threads=count, memory_planner=planner) as session:
            feeds = read_feeds(session, inputs, seed, fill=True)
            begin = time.perf_counter()
            session.run(feeds)
            first = time.perf_counter() - begin
            for _ in range(_WARM_UP_RUNS):
                session.run(feeds)
            times, elapsed = _timed(session, feeds, client_count, seconds)
        rows.append(
            {
                "executor": executor,
                "threads": count,
                "clients": client_count,
                "first_ms": 1e3 * first,
                "median_ms": 1e3 * statistics.median(times),
                "least_ms": 1e3 * min(times),
                "runs": len(times),
                "runs_per_s": len(times) / elapsed,
            }
        )
    return {"model": str(model), "load_ms": load_ms, "rows": rows}


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
