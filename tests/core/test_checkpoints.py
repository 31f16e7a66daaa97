"""Checkpoints of long work on a thread."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from penstock.core.checkpoints import (
    CHECK_EVERY,
    THREAD,
    await_release,
    cancelled_by,
    checkpoint,
    hold_lock,
    with_checkpoints,
)
from penstock.core.errors import Cancelled, DeadlineExceeded
from penstock.executors.control import CancelToken
from penstock.host.stop_condition import StopCondition


class Counting(StopCondition):
    """Counts how often it is asked."""

    looks = 0

    def check(self) -> None:
        self.looks += 1


def test_checkpoint_without_a_condition_does_nothing() -> None:
    assert THREAD.run is None
    checkpoint()


def test_checkpoint_after_the_deadline_raises() -> None:
    stop = StopCondition(0.0, None, "reading")
    expected = pytest.raises(DeadlineExceeded, match=r"reading did not end within its timeout of 0")
    with expected, cancelled_by(stop):
        checkpoint()
        pytest.fail("the checkpoint let the work go on")
    assert THREAD.run is None


def test_checkpoint_with_a_cancelled_token_raises() -> None:
    token = CancelToken()
    with pytest.raises(Cancelled), cancelled_by(StopCondition(None, token)):
        checkpoint()
        token.cancel()
        checkpoint()


def test_work_that_ends_after_its_deadline_without_a_checkpoint_fails() -> None:
    with pytest.raises(DeadlineExceeded), cancelled_by(StopCondition(0.0, None)):
        pass


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


@pytest.mark.parametrize("count", [0, 1, CHECK_EVERY, CHECK_EVERY + 1, 5 * CHECK_EVERY])
def test_paced_items_have_a_checkpoint_before_every_batch(count: int) -> None:
    stop = Counting(60.0, None)
    with cancelled_by(stop):
        assert list(with_checkpoints(range(count))) == list(range(count))
    assert stop.looks == -(-count // CHECK_EVERY) + 1  # one at the end of the block


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
