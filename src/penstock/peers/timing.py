"""The times of runs, and what is said of them."""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np

MIN_RUNS = 5
"""runs of each client that are timed at least"""

STATISTICS: dict[str, Callable[[Sequence[float]], float]] = {
    "mean_ms": statistics.fmean,
    "min_ms": min,
    "max_ms": max,
    "geomean_ms": statistics.geometric_mean,
    "median_ms": statistics.median,
    "p95_ms": lambda times: float(np.percentile(times, 95)),
    "p99_ms": lambda times: float(np.percentile(times, 99)),
}


def time_runs(run: Callable[[], object], clients: int, seconds: float) -> tuple[list[float], float]:
    """The time of each run with this many concurrent clients, and of all together, in seconds."""
    times: list[float] = []
    # The one more is this thread, whose clock begins when all clients do.
    ready = threading.Barrier(clients + 1)

    def client() -> None:
        ready.wait()
        end = time.perf_counter() + seconds
        count = 0
        while count < MIN_RUNS or time.perf_counter() < end:
            begin = time.perf_counter()
            run()
            # Clients share the list: an append of CPython is atomic.
            times.append(time.perf_counter() - begin)
            count += 1

    with ThreadPoolExecutor(clients) as pool:
        runs = [pool.submit(client) for _ in range(clients)]
        ready.wait()
        begin = time.perf_counter()
        for each in runs:
            each.result()
        return times, time.perf_counter() - begin


def describe_times(times: Sequence[float], elapsed: float) -> dict[str, float]:
    """Statistics of the times of runs, in milliseconds, and runs a second."""
    figures = {key: 1e3 * function(times) for key, function in STATISTICS.items()}
    return {**figures, "runs": len(times), "runs_per_s": len(times) / elapsed}
