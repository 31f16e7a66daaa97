"""Deadlines and tokens as conditions of threads."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from penstock.core.checkpoints import THREAD, await_release, cancelled_by, checkpoint, hold_lock
from penstock.core.errors import DeadlineExceeded
from penstock.host.stop_condition import StopCondition
from tests.core.test_checkpoints import Counting


def test_condition_without_timeout_and_token_leaves_the_outer_one_in_force() -> None:
    outer = Counting(60.0, None)
    with cancelled_by(outer):
        with cancelled_by(StopCondition(None, None)):
            assert THREAD.run is outer
        inner = StopCondition(60.0, None)
        with cancelled_by(inner):
            assert THREAD.run is inner
        assert THREAD.run is outer


def test_condition_of_one_thread_does_not_stop_another() -> None:
    late = pytest.raises(DeadlineExceeded)
    with ThreadPoolExecutor(1) as pool, late, cancelled_by(StopCondition(0.0, None)):
        pool.submit(checkpoint).result()


def test_thread_that_waits_for_a_lock_can_be_stopped() -> None:
    lock = threading.Lock()
    stop = StopCondition(0.01, None)
    with lock, pytest.raises(DeadlineExceeded), cancelled_by(stop), hold_lock(lock):
        pytest.fail("it is held by another")
    with hold_lock(lock):
        assert lock.locked()
    assert not lock.locked()


def test_await_release_looks_for_signals_while_it_waits():
    """Python would not handle one that came just before the thread blocked for good."""

    timeouts = []

    class Lock:
        def acquire(self, timeout: float = -1) -> bool:
            timeouts.append(timeout)
            return len(timeouts) == 3

    await_release(Lock())
    assert len(timeouts) == 3
    assert all(0 < timeout <= 1 for timeout in timeouts)
