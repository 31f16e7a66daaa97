"""The queue of replicas alone: which requests run together, in which order, and where."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, cast

import numpy as np
import pytest

import penstock as ps
from penstock.compiler.options import RunOptions
from penstock.executors.control import begin_run, end_run
from penstock.serving.batching import EqualRequests
from penstock.serving.replica import SessionReplica
from penstock.serving.replica_queue import QueueLimits, ReplicaQueue
from penstock.serving.request_records import QueuedRequest, ReplicasClosed


class HeldReplica:
    """Notes the runs that begin, which end when a test calls ``done``."""

    most, session = 1, None

    def __init__(self) -> None:
        self.begun: list[tuple[RunOptions, Callable[..., object]]] = []

    def begin(self, options: RunOptions, done: Callable[..., object], check: object) -> None:
        self.begun.append((options, done))

    def end(self) -> None:
        """End the last run that has begun, with its input as the output."""
        options, done = self.begun[-1]
        done(options.feeds, None)

    @property
    def inputs(self) -> list[list[float]]:
        return [cast(Any, options.feeds)["x"].tolist() for options, _ in self.begun]


def queue_of(*replicas: HeldReplica, queue: int = 9, rows: int = 1) -> ReplicaQueue:
    limits = QueueLimits(queue, rows, 0, 0.0)
    return ReplicaQueue(cast("list[SessionReplica]", [*replicas]), EqualRequests(), limits)


def put(queue: ReplicaQueue, number: float, priority: int = 0) -> Future[Any]:
    future: Future[Any] = Future()
    request = QueuedRequest({"x": np.array([number])}, None, future, priority, None)
    request.key = "all"
    queue.put(request, future, None, None)
    return future


def test_waiting_requests_of_one_key_are_joined_up_to_the_rows_of_a_batch() -> None:
    replica = HeldReplica()
    queue = queue_of(replica, rows=2)
    futures = [put(queue, i) for i in range(4)]
    for _ in range(3):
        replica.end()
    assert replica.inputs == [[0.0], [1.0, 2.0], [3.0]]
    assert [future.result()["x"].tolist() for future in futures] == [[0.0], [1.0], [2.0], [3.0]]
    counts = queue.counts
    assert (counts.succeeded, counts.batches, counts.rows, counts.queued) == (4, 3, 4, 0)


def test_requests_of_a_batch_that_fails_run_alone() -> None:
    replica = HeldReplica()
    queue = queue_of(replica, rows=2)
    futures = [put(queue, i) for i in range(3)]
    replica.end()
    replica.begun[-1][1](None, ps.RunError("one of them is at fault"))
    replica.begun[-1][1](None, ps.RunError("it is this one"))
    replica.end()
    assert replica.inputs == [[0.0], [1.0, 2.0], [1.0], [2.0]]
    with pytest.raises(ps.RunError, match="this one"):
        futures[1].result()
    assert futures[2].result()["x"].tolist() == [2.0]


def test_higher_priority_begins_first_on_the_replica_with_least_work() -> None:
    first, second = HeldReplica(), HeldReplica()
    queue = queue_of(first, second)
    for number, priority in ((0, 0), (1, 0), (2, 0), (3, 5)):
        put(queue, number, priority)
    assert (first.inputs, second.inputs) == ([[0.0]], [[1.0]])
    second.end()
    first.end()
    assert (first.inputs, second.inputs) == ([[0.0], [2.0]], [[1.0], [3.0]])


def test_share_of_a_lower_priority_is_a_whole_batch() -> None:
    replica = HeldReplica()
    queue = queue_of(replica, queue=99, rows=2)
    put(queue, -1, 5)
    for number in range(10):
        put(queue, number)
    for number in range(100, 130):
        put(queue, number, 5)
    for _ in range(16):
        replica.end()
    low = [i for i, batch in enumerate(replica.inputs[1:]) if batch[0] < 100]
    assert low == [7, 15]
    assert [replica.inputs[1 + i] for i in low] == [[0.0, 1.0], [2.0, 3.0]]


def test_turn_of_a_thread_occupies_a_replica_until_it_ends() -> None:
    replica = HeldReplica()
    queue, control = queue_of(replica), begin_run(None, None)
    assert queue.wait_for_turn(control) == 0
    put(queue, 1)
    assert not replica.begun
    queue.end_turn(0, True, 0.0)
    assert replica.inputs == [[1.0]]
    end_run(control)


def test_full_or_closed_queue_refuses_requests() -> None:
    replica = HeldReplica()
    queue = queue_of(replica, queue=1)
    put(queue, 0)
    waiting = put(queue, 1)
    with pytest.raises(ps.QueueFull, match="queue=1 is the limit"):
        put(queue, 2)
    assert queue.counts.refused == 1
    waiting.cancel()
    replica.end()
    queue.close(wait=True)
    with pytest.raises(ReplicasClosed):
        put(queue, 3)
