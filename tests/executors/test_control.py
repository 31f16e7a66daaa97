"""The control of a run: deadlines and cancellation."""

from __future__ import annotations

import math
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

import penstock as ps
from penstock.executors.control import CancelToken, Control, Watchdog, begin_run, end_run
from tests.support.long_loop import feeds, loop
from tests.support.timing import SOON

# Deadlines.


@pytest.fixture
def watchdog() -> Watchdog:
    """A watchdog whose thread never runs, so that only the test acts."""
    watchdog = Watchdog()
    watchdog.thread = threading.current_thread()
    return watchdog


def test_watchdog_drops_entries_of_ended_runs(watchdog):
    for _ in range(1000):
        end_run(begin_run(1000, None, watchdog), watchdog)
    assert not watchdog.runs
    assert len(watchdog.queue) < 100


def test_watchdog_scales_to_10_000_deadlines(watchdog):
    def seconds(n: int) -> float:
        start = time.thread_time()
        for control in [begin_run(1000 + i % 7, None, watchdog) for i in range(n)]:
            end_run(control, watchdog)
        return time.thread_time() - start

    # 40 times as many; if each searched the others, it would take 1600 times as long
    few = min(seconds(250) for _ in range(5))
    assert seconds(10_000) < 400 * few
    assert len(watchdog.queue) < 100


def test_watchdog_is_woken_only_for_an_earlier_deadline(watchdog, monkeypatch):
    woken = []
    monkeypatch.setattr(watchdog.changed, "notify", lambda: woken.append(True))
    for timeout in (5.0, 6.0, 4.0, 7.0):
        begin_run(timeout, None, watchdog)
    assert len(woken) == 2


def test_each_run_stops_at_its_own_deadline():
    session = loop()

    def run(timeout: float) -> float:
        start = time.monotonic()
        with pytest.raises(ps.DeadlineExceeded, match=str(timeout)):
            session.run(feeds(2**62), timeout=timeout)
        return time.monotonic() - start

    timeouts = [0.05, 0.3, 0.1, 0.2, 0.15]
    with ThreadPoolExecutor(5) as pool:
        for timeout, took in zip(timeouts, pool.map(run, timeouts), strict=True):
            assert timeout <= took < timeout + SOON


@pytest.mark.parametrize("timeout", [0, -1, -math.inf])
def test_timeout_of_zero_or_less_stops_run_at_once(timeout):
    with pytest.raises(ps.DeadlineExceeded):
        loop().run(feeds(1), timeout=timeout)


@pytest.mark.parametrize("timeout", [math.inf, 1e300, threading.TIMEOUT_MAX * 2, 10**12])
def test_infinite_timeout_never_stops_run(timeout):
    session = loop()
    assert session.run(feeds(1), timeout=timeout)["y"][0] == 2
    # The thread that watches still does.
    with pytest.raises(ps.DeadlineExceeded):
        session.run(feeds(2**62), timeout=0.02)


# Cancellation.


def test_first_stop_of_run_wins():
    control = Control()
    control.set(ps.Cancelled("first"))
    control.set(ps.DeadlineExceeded("second"))
    with pytest.raises(ps.Cancelled, match="first"):
        control.stop()


def test_cancelling_parent_cancels_token_but_not_conversely():
    parent = CancelToken()
    children = [CancelToken(parent) for _ in range(2)]
    controls = [begin_run(None, child) for child in children]
    children[0].cancel()
    assert [control.stopped for control in controls] == [True, False]
    assert not parent.cancelled
    parent.cancel()
    assert all(control.stopped for control in controls)
    assert all(child.cancelled for child in children)
    assert begin_run(None, CancelToken(parent)).stopped


def test_token_forgets_ended_runs():
    parent = CancelToken()
    child = CancelToken(parent)
    for control in [begin_run(None, child) for _ in range(10)]:
        end_run(control)
    assert not child._controls
    assert not parent._controls
