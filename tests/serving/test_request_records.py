"""Requests in a queue and in batches, without replicas."""

from __future__ import annotations

from concurrent.futures import Future
from contextlib import nullcontext
from time import monotonic

import numpy as np

from penstock.executors.control import NEVER
from penstock.serving.request_records import (
    QueuedRequest,
    QueueTurn,
    ReplicaCounts,
    ReplicaHistograms,
    RequestBatch,
)


def request() -> QueuedRequest:
    return QueuedRequest({"x": np.zeros(2)}, None, Future(), 3, None)


def test_request_that_is_not_joined_has_one_row_and_no_limit() -> None:
    before = monotonic()
    one = request()
    assert (one.rows, one.tokens, one.priority, one.key, one.batch) == (1, 0, 3, None, None)
    assert one.control is NEVER
    assert before <= one.since <= monotonic()


def test_batch_of_untraced_requests_has_no_span() -> None:
    batch = RequestBatch([request(), request()])
    assert batch.left == 2
    assert isinstance(batch.begin_span(), nullcontext)
    assert batch.span is None
    assert not batch.cancel.cancelled


def test_turn_blocks_until_it_has_come() -> None:
    turn = QueueTurn()
    assert not turn.come.acquire(blocking=False)
    turn.number = 1
    turn.come.release()
    assert turn.come.acquire(blocking=False)


def test_histograms_of_two_models_are_apart() -> None:
    one, other = ReplicaHistograms(), ReplicaHistograms()
    assert one.queue_seconds is not other.queue_seconds
    assert one.batch_rows.bounds != one.queue_seconds.bounds
    assert ReplicaCounts() == ReplicaCounts(queued=0, rows=0)
