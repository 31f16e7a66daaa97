"""The times of runs, and their statistics."""

from __future__ import annotations

import threading

import pytest

from penstock.peers.timing import MIN_RUNS, describe_times, time_runs
from tests.support.timing import SOON


def test_every_client_runs_at_least_a_few_times_and_all_at_once() -> None:
    together = threading.Barrier(3)  # times out unless three clients run at once
    times, elapsed = time_runs(lambda: together.wait(SOON), 3, 0)
    assert len(times) == 3 * MIN_RUNS
    assert elapsed >= max(times) > 0


def test_error_of_a_run_is_raised() -> None:
    def run() -> None:
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        time_runs(run, 2, 0)


def test_statistics_are_in_milliseconds() -> None:
    figures = describe_times([i / 1000 for i in range(1, 102)], 2.0)
    assert figures["median_ms"] == pytest.approx(51)
    assert figures["p95_ms"] == pytest.approx(96)
    assert figures["p99_ms"] == pytest.approx(100)
    assert (figures["min_ms"], figures["max_ms"]) == pytest.approx((1, 101))
    assert figures["mean_ms"] == pytest.approx(51)
    assert (figures["runs"], figures["runs_per_s"]) == (101, 50.5)
