"""``penstock bench``: the time of a model's runs, by executor and number of threads."""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import product

import click
import numpy as np

from penstock.cli.base import CompileArguments, command, count_option, show_table
from penstock.cli.options import compile_options, gathered
from penstock.cli.run import ModelInputs, model_and_inputs
from penstock.cli.shapes import show_assumed
from penstock.compiler.options import EXECUTORS
from penstock.core.records import dataclass
from penstock.core.types import JsonObject, NamedValues
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


def _show_bench(result: JsonObject) -> None:
    click.echo(f"{result['model']}: loaded in {result['load_ms']:.1f} ms")
    show_assumed(result)
    several = any(row["clients"] > 1 for row in result["rows"])
    columns = [column for column in _COLUMNS if several or column[0] != "clients"]
    rows = [[format(row[key], form) for _, key, form in columns] for row in result["rows"]]
    show_table([title for title, _, _ in columns], rows)
    click.echo("times in ms")


@dataclass(frozen=True)
class _Trials:
    """The combinations that are timed, each for this number of ``seconds``."""

    executors: Sequence[str]
    threads: Sequence[int]
    clients: Sequence[int]
    seconds: float

    def __iter__(self) -> Iterator[tuple[str | None, int, int]]:
        """The executor (None: that of the options), the threads and the clients of each."""
        counts = sorted(set(self.threads) or {1, core_budget()})
        return product(self.executors or (None,), counts, self.clients or (1,))


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
@count_option(
    "--threads",
    "-t",
    multiple=True,
    help="Cores that a run may use; may be repeated. Default: 1 and all.",
)
@count_option(
    "--clients",
    "-c",
    multiple=True,
    help="Threads that call the session concurrently; may be repeated. Default: 1.",
)
@click.option(
    "--seconds",
    type=click.FloatRange(min=0, max=3600),
    default=1.0,
    show_default=True,
    help="Seconds for which each combination runs, at least five times.",
)
@gathered("trials", _Trials)
def bench(source: ModelInputs, options: CompileArguments, trials: _Trials) -> JsonObject:
    """Time a model: loading, preparing (compiling a plan for the inputs), the first run, and the
    mean, minimum, maximum, geometric mean and median of many runs.

    Inputs that are not given are random; an unknown first dim of theirs is 1.
    """
    begin = time.perf_counter()
    loaded, options = source.read(options)
    load_ms = 1e3 * (time.perf_counter() - begin)
    with compile(loaded, **options) as session:
        feeds = source.feeds(session)
        # Lists are made arrays here, lest each run that is timed converts them anew.
        fed = {p.name: convert(p.name, feeds[p.name], p.type) for p in session.inputs}
    feeds |= fed
    tensors = all(isinstance(value, np.ndarray) for value in fed.values())
    dims = {name: value.shape for name, value in fed.items()} if tensors else None
    rows = []
    for executor, count, clients in trials:
        chosen = {**options, "threads": count}
        chosen |= {} if executor is None else {"executor": executor}
        begin = time.perf_counter()
        with compile(loaded, shapes=dims, **chosen) as session:
            prepared = time.perf_counter()
            session.run(feeds)
            first = time.perf_counter()
            # Not counted: caches are cold, and the number of threads may be tried out.
            for _ in range(_WARM_UP_RUNS):
                session.run(feeds)
            times, elapsed = _timed(session, feeds, clients, trials.seconds)
            effective = session.effective.executor
        rows.append(
            {
                "executor": session.options.executor,
                "effective": effective,
                "threads": count,
                "clients": clients,
                "prepare_ms": 1e3 * (prepared - begin),
                "first_ms": 1e3 * (first - prepared),
                **{key: 1e3 * function(times) for key, function in _STATISTICS.items()},
                "runs": len(times),
                "runs_per_s": len(times) / elapsed,
            }
        )
    return {**source.describe(feeds), "load_ms": load_ms, "rows": rows}


def _timed(
    session: Session, feeds: NamedValues, clients: int, seconds: float
) -> tuple[list[float], float]:
    """The time of each run with this many concurrent clients, and of all together, in seconds."""
    times: list[float] = []
    # The one more is this thread, whose clock begins when all clients do.
    ready = threading.Barrier(clients + 1)

    def client() -> None:
        ready.wait()
        end = time.perf_counter() + seconds
        count = 0
        while count < _MIN_RUNS or time.perf_counter() < end:
            begin = time.perf_counter()
            session.run(feeds)
            # Clients share the list: an append of CPython is atomic.
            times.append(time.perf_counter() - begin)
            count += 1

    with ThreadPoolExecutor(clients) as pool:
        runs = [pool.submit(client) for _ in range(clients)]
        ready.wait()
        begin = time.perf_counter()
        for run in runs:
            run.result()
        return times, time.perf_counter() - begin
