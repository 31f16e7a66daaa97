"""Checkpoints of long work on a thread."""

from __future__ import annotations

import pytest

from penstock.core.checkpoints import (
    CHECK_EVERY,
    THREAD,
    cancelled_by,
    checkpoint,
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


@pytest.mark.parametrize("count", [0, 1, CHECK_EVERY, CHECK_EVERY + 1, 5 * CHECK_EVERY])
def test_paced_items_have_a_checkpoint_before_every_batch(count: int) -> None:
    stop = Counting(60.0, None)
    with cancelled_by(stop):
        assert list(with_checkpoints(range(count))) == list(range(count))
    assert stop.looks == -(-count // CHECK_EVERY) + 1  # one at the end of the block
