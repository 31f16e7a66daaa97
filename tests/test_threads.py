"""Threads, deadlines and cancellation: what the process shares, and what a fork leaves of it."""

from __future__ import annotations

import gc
import math
import os
import threading
import time
import warnings
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from onnx import parser

import penstock as ps
from penstock import garbage, threads
from penstock.executors import base
from penstock.executors.base import CancelToken, Control, _Watchdog, begin, end

LOOP = """<ir_version: 9, opset_import: ["" : 20]>
    g (float[4] x, int64 n) => (float[4] y) {
        y = Loop (n, , x) <body = b (int64 i, bool c, float[4] v) => (bool d, float[4] w) {
            d = Identity (c) w = Add (v, v) }>
    }"""


def loop() -> ps.Session:
    return ps.compile(parser.parse_model(LOOP))


def feeds(n: int) -> dict[str, np.ndarray]:
    return {"x": np.ones(4, np.float32), "n": np.array(n)}


# The core budget.


def test_the_budget_is_the_least_of_affinity_quota_and_openmp(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)), raising=False)
    monkeypatch.setattr(threads, "_quota", lambda: None)

    def budget(openmp: str | None, quota: int | None = None) -> int:
        monkeypatch.setattr(threads, "_quota", lambda: quota)
        if openmp is None:
            monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
        else:
            monkeypatch.setenv("OMP_NUM_THREADS", openmp)
        return threads.core_budget.__wrapped__()

    assert budget(None) == 8
    assert budget("3") == 3
    assert budget("5,2") == 5
    assert budget("16") == 8
    assert budget("") == budget("many") == budget("0") == 8
    assert budget("6", quota=2) == 2
    assert budget(None, quota=0) == 1


def test_there_are_no_more_threads_than_the_budget():
    session = loop()
    before = {thread for thread in threading.enumerate() if thread.name.startswith("penstock_")}
    futures = [session.submit(feeds(3)) for _ in range(50)]
    assert all(future.result()["y"][0] == 8 for future in futures)
    now = {thread for thread in threading.enumerate() if thread.name.startswith("penstock_")}
    assert len(now) <= threads.core_budget()
    assert before <= now


# Deadlines.


@pytest.fixture
def watchdog(monkeypatch) -> _Watchdog:
    """A watchdog whose thread never runs: nothing happens but what the test does."""
    made = _Watchdog()
    made.thread = threading.current_thread()
    monkeypatch.setattr(base, "_WATCHDOG", made)
    return made


def test_runs_that_end_in_time_leave_little_behind(watchdog):
    for _ in range(1000):
        end(begin(1000, None), 1000, None)
    assert not watchdog.timeouts
    assert len(watchdog.queue) < 100


def test_ten_thousand_deadlines_at_once_take_no_longer_each(watchdog):
    def seconds(n: int) -> float:
        start = time.perf_counter()
        for control in [begin(1000 + i % 7, None) for i in range(n)]:
            end(control, 1, None)
        return time.perf_counter() - start

    # 40 times as many; with a walk over the others for each, 1600 times as long
    few = min(seconds(250) for _ in range(5))
    assert seconds(10_000) < 400 * few
    assert len(watchdog.queue) < 100


def test_the_watchdog_is_woken_only_for_an_earlier_deadline(watchdog, monkeypatch):
    woken = []
    monkeypatch.setattr(watchdog.changed, "notify", lambda: woken.append(True))
    for timeout in (5.0, 6.0, 4.0, 7.0):
        begin(timeout, None)
    assert len(woken) == 2


def test_each_run_is_stopped_at_its_own_deadline():
    session = loop()

    def run(timeout: float) -> float:
        start = time.monotonic()
        with pytest.raises(ps.DeadlineExceeded, match=str(timeout)):
            session.run(feeds(2**62), timeout=timeout)
        return time.monotonic() - start

    timeouts = [0.05, 0.3, 0.1, 0.2, 0.15]
    with ThreadPoolExecutor(5) as pool:
        for timeout, took in zip(timeouts, pool.map(run, timeouts), strict=True):
            assert timeout <= took < timeout + 10


@pytest.mark.parametrize("timeout", [0, -1, -math.inf, math.nan])
def test_no_time_at_all(timeout):
    with pytest.raises(ps.DeadlineExceeded):
        loop().run(feeds(1), timeout=timeout)


@pytest.mark.parametrize("timeout", [math.inf, 1e300, threading.TIMEOUT_MAX * 2, 10**12])
def test_all_the_time_in_the_world(timeout):
    session = loop()
    assert session.run(feeds(1), timeout=timeout)["y"][0] == 2
    # The thread that watches still does.
    with pytest.raises(ps.DeadlineExceeded):
        session.run(feeds(2**62), timeout=0.02)


# Cancellation.


def test_the_first_to_stop_a_run_is_the_reason():
    control = Control()
    control.set(ps.Cancelled("first"))
    control.set(ps.DeadlineExceeded("second"))
    with pytest.raises(ps.Cancelled, match="first"):
        control.stop()


def test_a_token_is_cancelled_with_its_parent_and_not_the_other_way_round():
    parent = CancelToken()
    children = [CancelToken(parent) for _ in range(2)]
    controls = [begin(None, child) for child in children]
    children[0].cancel()
    assert [control.stopped for control in controls] == [True, False]
    assert not parent.cancelled
    parent.cancel()
    assert all(control.stopped for control in controls)
    assert all(child.cancelled for child in children)
    assert begin(None, CancelToken(parent)).stopped


def test_a_token_forgets_runs_that_have_ended():
    parent = CancelToken()
    child = CancelToken(parent)
    for control in [begin(None, child) for _ in range(10)]:
        end(control, None, child)
    assert not child._controls
    assert not parent._controls


# Garbage.


def test_collection_is_paused_until_the_last_has_built_its_graph():
    assert gc.isenabled()
    with garbage.paused():
        with garbage.paused():
            assert not gc.isenabled()
        assert not gc.isenabled()
    assert gc.isenabled()


def test_collection_stays_off_where_it_was_off():
    gc.disable()
    try:
        with garbage.paused():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_what_was_built_is_old_and_goes_when_nobody_holds_it():
    class Node:
        pass

    with garbage.paused():
        node = Node()
        node.circle = node
        frozen = gc.get_freeze_count()
    assert any(each is node for each in gc.get_objects(generation=2))
    assert gc.get_freeze_count() == frozen
    gone = weakref.ref(node)
    del node
    gc.collect()
    assert gone() is None


def test_what_the_user_has_frozen_stays_frozen():
    gc.freeze()
    try:
        with garbage.paused():
            pass
        assert gc.get_freeze_count() > 0
    finally:
        gc.unfreeze()


# Forks.


def in_child(job: Callable[[], object]) -> bool:
    """Whether ``job`` runs in a forked child without an exception."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of forks where there are threads
        child = os.fork()
    if not child:
        done = 1
        try:
            job()
            done = 0
        finally:
            os._exit(done)
    return os.waitpid(child, 0)[1] == 0


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_child_runs_with_threads_of_its_own():
    session = loop()
    session.submit(feeds(1)).result()
    session.run(feeds(1), timeout=60)
    token = CancelToken()
    endless = session.submit(feeds(2**62), cancel=token, timeout=120)

    def job() -> None:
        assert session.submit(feeds(1)).result(60)["y"][0] == 2
        with pytest.raises(ps.DeadlineExceeded):
            session.run(feeds(2**62), timeout=0.05)
        assert not base._WATCHDOG.timeouts

    assert in_child(job)
    token.cancel()
    with pytest.raises(ps.Cancelled):
        endless.result()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_child_collects_garbage_though_its_parent_builds_a_graph():
    def job() -> None:
        assert gc.isenabled()
        assert loop().run(feeds(1))["y"][0] == 2
        assert gc.isenabled()

    with garbage.paused():
        assert in_child(job)
        assert not gc.isenabled()
    assert gc.isenabled()
