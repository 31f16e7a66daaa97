"""``penstock bench``: how long a model takes, by threads and by executor."""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import click
import numpy as np

from penstock.cli.base import MODEL, command, show_table
from penstock.cli.run import INPUTS, SEED, read_feeds
from penstock.frontends.load import load
from penstock.host.threads import core_budget
from penstock.session.options import EXECUTORS
from penstock.session.session import Session, compile

_WARM = 3
_LEAST = 5


def _show_bench(result: Mapping[str, Any]) -> None:
    click.echo(f"{result['model']}: loaded in {result['load_ms']:.1f} ms")
    rows = [
        (
            row["executor"],
            str(row["threads"]),
            str(row["clients"]),
            f"{row['first_ms']:.2f}",
            f"{row['median_ms']:.3f}",
            f"{row['least_ms']:.3f}",
            f"{row['runs_per_s']:.1f}",
        )
        for row in result["rows"]
    ]
    headers = ("executor", "threads", "clients", "first ms", "median ms", "least ms", "runs/s")
    show_table(headers, rows)


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
    help="Who runs it; several may be given. auto, if none is.",
)
@click.option(
    "--threads",
    "-t",
    multiple=True,
    type=click.IntRange(min=1),
    help="Cores that a run may use; several may be given. 1 and all, if none is.",
)
@click.option(
    "--clients",
    "-c",
    multiple=True,
    type=click.IntRange(min=1),
    help="Threads that call the session at the same time; several may be given. 1, if none is.",
)
@click.option(
    "--seconds",
    type=click.FloatRange(min=0, max=3600),
    default=1.0,
    show_default=True,
    help="How long each combination runs, at least five times.",
)
def bench(
    model: Path,
    inputs: Sequence[str],
    seed: int,
    executors: Sequence[str],
    threads: Sequence[int],
    clients: Sequence[int],
    seconds: float,
) -> dict[str, Any]:
    """Time a model: its first run, the median and the least of many, and runs a second.

    Inputs that are not given are random.
    """
    begin = time.perf_counter()
    loaded = load(model)
    load_ms = 1e3 * (time.perf_counter() - begin)
    counts = sorted(set(threads) or {1, core_budget()})
    rows = []
    for executor, count, many in product(executors or ("auto",), counts, clients or (1,)):
        with compile(loaded, executor=executor, threads=count) as session:
            names = [port.name for port in session.inputs]
            left = [name for name in names if not any(t.startswith(f"{name}=") for t in inputs)]
            given = [*(f"{name}=random" for name in left), *inputs]
            feeds = read_feeds(session, given, np.random.default_rng(seed))
            begin = time.perf_counter()
            session.run(feeds)
            first = time.perf_counter() - begin
            for _ in range(_WARM):
                session.run(feeds)
            times, took = _timed(session, feeds, many, seconds)
        rows.append(
            {
                "executor": executor,
                "threads": count,
                "clients": many,
                "first_ms": 1e3 * first,
                "median_ms": 1e3 * statistics.median(times),
                "least_ms": 1e3 * min(times),
                "runs": len(times),
                "runs_per_s": len(times) / took,
            }
        )
    return {"model": str(model), "load_ms": load_ms, "rows": rows}


def _timed(
    session: Session, feeds: Mapping[str, Any], clients: int, seconds: float
) -> tuple[list[float], float]:
    """What each run took with so many clients at once, and all of them together, in seconds."""
    times: list[float] = []
    errors: list[BaseException] = []
    ready = threading.Barrier(clients + 1)

    def client() -> None:
        ready.wait()
        end = time.perf_counter() + seconds
        count = 0
        try:
            while count < _LEAST or time.perf_counter() < end:
                begin = time.perf_counter()
                session.run(feeds)
                times.append(time.perf_counter() - begin)
                count += 1
        except BaseException as error:
            errors.append(error)

    workers = [threading.Thread(target=client) for _ in range(clients)]
    for worker in workers:
        worker.start()
    ready.wait()
    begin = time.perf_counter()
    for worker in workers:
        worker.join()
    if errors:
        raise errors[0]
    return times, time.perf_counter() - begin
