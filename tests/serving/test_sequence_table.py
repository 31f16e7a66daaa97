"""Open sequences, and those that end since no request comes."""

from __future__ import annotations

from typing import Any

import pytest

import penstock as ps
from penstock.core.errors import OptionError
from penstock.serving import sequence_table
from penstock.serving.request_records import ReplicasClosed
from penstock.serving.sequence_table import (
    SequenceConflict,
    SequenceTable,
    TooManySequences,
    UnknownSequence,
)
from tests.support.streams import stream_model

LATE = ps.DeadlineExceeded("the timer")


@pytest.fixture(scope="module")
def stepper() -> ps.Stepper:
    return ps.Stepper(ps.load(stream_model("lstm")))


@pytest.fixture
def clock(monkeypatch) -> list[float]:
    now = [100.0]
    monkeypatch.setattr(sequence_table, "perf_counter", lambda: now[0])
    return now


def is_closed(own: Any) -> bool:
    return own.sequence._state.closed


def test_only_sequences_without_requests_for_a_while_end(stepper, clock):
    table = SequenceTable(idle=10)
    own = {key: table.start(key, stepper.sequence()) for key in "abc"}
    for key in "ab":
        assert table.release(key, own[key], ends=False)
    clock[0] += 6
    assert table.resume("a") is own["a"]
    table.release("a", own["a"], ends=False)
    clock[0] += 6
    table._expire(LATE)
    assert {key: is_closed(one) for key, one in own.items()} == {"a": False, "b": True, "c": False}
    assert (table.counts.open, table.counts.idle) == (2, 1)
    clock[0] += 6
    table._expire(LATE)  # c has had a request since it began, however long ago that was
    assert is_closed(own["a"]) and not is_closed(own["c"])
    with pytest.raises(UnknownSequence, match="sequence 'a' does not exist"):
        table.resume("a")
    table.release("c", own["c"], ends=True)
    assert is_closed(own["c"])
    assert table.counts.open == 0
    table.close()


def test_timer_is_set_for_the_sequence_that_was_used_first(stepper, clock):
    table = SequenceTable(idle=10)
    first, second = (table.start(key, stepper.sequence()) for key in (1, 2))
    table.release(2, second, ends=False)
    clock[0] += 4
    table.release(1, first, ends=False)
    table._expire(LATE)
    assert table._timer is not None and table._timer.timeout == 6
    table.end(2, second)
    table._expire(LATE)
    assert table._timer is not None and table._timer.timeout == 10
    table.end(1, first)
    table._expire(LATE)
    assert table._timer is None


def test_sequence_has_one_request_at_a_time(stepper):
    table = SequenceTable()
    own = table.start(7, stepper.sequence())
    with pytest.raises(SequenceConflict, match="another request of sequence 7"):
        table.resume(7)
    with pytest.raises(UnknownSequence):
        table.resume("7")
    again = table.start(7, stepper.sequence())
    assert is_closed(own) and not is_closed(again)
    assert not table.release(7, own, ends=False)
    table.release(7, again, ends=False)
    assert table.resume(7) is again
    table.release(7, again, ends=True)


def test_sequences_are_bounded(stepper):
    table = SequenceTable(most=1)
    table.release(1, table.start(1, stepper.sequence()), ends=False)
    with pytest.raises(TooManySequences, match="1 sequences are open"):
        table.start(2, stepper.sequence())
    table.release(1, table.start(1, stepper.sequence()), ends=True)
    table.release(2, table.start(2, stepper.sequence()), ends=True)
    assert (table.counts.begun, table.counts.refused) == (3, 1)


def test_closed_table_takes_no_request(stepper):
    table = SequenceTable()
    own = table.start(1, stepper.sequence())
    table.release(1, own, ends=False)
    table.close()
    for call in (lambda: table.resume(1), lambda: table.start(2, own.sequence), table.check_open):
        with pytest.raises(ReplicasClosed):
            call()


@pytest.mark.parametrize(
    ("most", "idle", "error"),
    [(0, 1.0, OptionError), (2.5, 1.0, TypeError), (1, 0.0, TypeError), (1, "1", TypeError)],
)
def test_wrong_sizes_are_refused(most, idle, error):
    with pytest.raises(error):
        SequenceTable(most, idle)
