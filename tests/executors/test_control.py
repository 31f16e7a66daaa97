"""The control of a run: deadlines and cancellation."""

from __future__ import annotations

import math
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

import penstock as ps
from penstock.executors.control import CancelToken, Control, Watchdog, begin_run, end_run
from tests.support.onnx_text import compile_text
from tests.support.timing import SOON

LOOP = """g (float[4] x, int64 n) => (float[4] y) {
    y = Loop (n, , x) <body = b (int64 i, bool c, float[4] v) => (bool d, float[4] w) {
        d = Identity (c) w = Add (v, v) }>
}"""


def loop() -> ps.Session:
    return compile_text(LOOP)


def feeds(n: int) -> dict[str, np.ndarray]:
    return {"x": np.ones(4, np.float32), "n": np.array(n)}


# Deadlines.


@pytest.fixture
def watchdog() -> Watchdog:
    """A watchdog whose thread never runs: nothing happens but what the test does."""
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

    # 40 times as many; with a walk over the others for each, 1600 times as long
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
