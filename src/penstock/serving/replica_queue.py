"""The queue of replicas: which requests wait, which of them run together, and on which replica.

The queue has no thread: every event that may let a request begin (it has come, it has waited long
enough, a replica is free) calls ``_dispatch``. Waking a dedicated thread would add tens of us to
each small request. For the same reason, a thread may wait for its turn and run its request itself.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from time import monotonic
from typing import TYPE_CHECKING, Any

from penstock.compiler.options import RunOptions
from penstock.core.errors import Cancelled, QueueFull
from penstock.core.records import NamedTuple, replace
from penstock.core.types import RunValue, RunValues
from penstock.executors.control import CancelToken, Control, begin_run, end_run
from penstock.host.threads import Line
from penstock.serving.batching import EqualRequests
from penstock.serving.replica import SessionReplica
from penstock.serving.request_records import (
    QueuedRequest,
    QueueTurn,
    ReplicaCounts,
    ReplicaHistograms,
    ReplicasClosed,
    RequestBatch,
)

if TYPE_CHECKING:
    from concurrent.futures import Future

_BY_CALLER = Cancelled("the request was cancelled by its caller")


class QueueLimits(NamedTuple):
    """The most requests that wait; the most rows and, of requests of unequal lengths, tokens of a
    batch; and the seconds that a request waits for others to join its batch."""

    queue: int
    max_batch: int
    max_batch_tokens: int
    max_delay: float


class ReplicaQueue:
    """Hands requests to ``replicas``, joined to batches as ``batching`` says."""

    # One lock guards queue, loads and counts, since each decision reads and changes several of
    # them. It is never held while user code runs: futures end, and replicas begin, after its
    # release. It is re-entrant, since registering ``_waited`` may call it at once if the time has
    # passed, and a signal handler may submit a request while its thread holds the lock.

    def __init__(
        self, replicas: Sequence[SessionReplica], batching: EqualRequests, limits: QueueLimits
    ) -> None:
        self._replicas, self._batching, self.limits = replicas, batching, limits
        # The number of batches in progress on each replica; a worker may have several.
        self._load = [0] * len(replicas)
        self._lock = threading.RLock()
        self._idle = threading.Condition(self._lock)
        self._queue: Line[QueuedRequest | QueueTurn] = Line()
        self._counts = ReplicaCounts()
        self._histograms = ReplicaHistograms()
        self._waits = self._closed = False

    @property
    def counts(self) -> ReplicaCounts:
        """Counts of requests so far."""
        with self._lock:
            return replace(self._counts, queued=len(self._queue))

    @property
    def histograms(self) -> ReplicaHistograms:
        """Times and sizes so far of requests that have begun or ended."""
        with self._lock:
            return self._histograms.copy()

    def close(self, *, wait: bool) -> None:
        """Refuse further requests, and return when the others have ended: those in the queue with
        ``Cancelled`` unless ``wait`` is true."""
        with self._lock:
            self._closed = True
            queued = [] if wait else [*self._queue]
        error = Cancelled("the replicas were closed")
        for one in queued:  # without the lock, since the end of a request runs user callbacks
            if isinstance(one, QueueTurn):
                self._leave(one, error)
            else:
                self._end(one, None, error)
        self._dispatch()
        with self._idle:
            self._idle.wait_for(lambda: not self._queue and not any(self._load))

    # Threads that run their request themselves.

    def wait_for_turn(self, control: Control) -> int:
        """Return the number of the replica that the calling thread may run a request on, until it
        calls ``end_turn``. Raises ``QueueFull``, ``ReplicasClosed``, and what stops ``control``."""
        with self._lock:
            self._admit()
            # In FIFO order: a thread that submits its next request at once must not overtake
            # waiting requests, some of which would starve for seconds (decision 64).
            if not self._queue and self._free():
                return self._replica_for([0.0])
            turn = QueueTurn()
            self._queue.append(turn, control.priority)
        # After the lock: the listener is called at once for a run that was stopped, and releases
        # ``come``, so that the acquire below does not wait.
        leave = partial(self._leave, turn)
        control.add_listener(leave)
        try:
            turn.come.acquire()
        except BaseException as error:  # KeyboardInterrupt, for example
            leave(error)
            # The turn may have come just before: then this thread must return the replica.
            if turn.number is not None:
                self.end_turn(turn.number, False, monotonic())
            raise
        control.remove_listener(leave)
        if turn.number is None:
            assert turn.error is not None
            raise turn.error
        return turn.number

    def _leave(self, turn: QueueTurn, error: BaseException) -> None:
        """End the wait of a thread, unless its turn has come."""
        with self._lock:
            # Either ``_dispatch`` or this takes the turn out of the queue, so that exactly one of
            # them releases ``come``.
            try:
                self._queue.remove(turn)
            except ValueError:
                return
            self._counts.failed += 1
            turn.error = error
            self._idle.notify_all()
        turn.come.release()

    def end_turn(self, number: int, ok: bool, begin: float) -> None:
        """Give a replica back, whose run began at ``begin`` and has ended ``ok`` or in an error."""
        seconds = monotonic() - begin
        with self._lock:
            self._histograms.compute_seconds.add(seconds)
            self._load[number] -= 1
            counts = self._counts
            counts.running -= 1
            counts.succeeded += ok
            counts.failed += not ok
            if self._closed:
                self._idle.notify_all()
            others = bool(self._queue)
        # Mostly no request waits, and the thread returns without taking the lock again.
        if others:
            self._dispatch()

    # Requests that replicas run.

    def put(
        self,
        request: QueuedRequest,
        future: Future[dict[str, RunValue]],
        timeout: float | None,
        cancel: CancelToken | None,
    ) -> None:
        """Queue a request, and begin it if a replica is free. Raises ``QueueFull``."""
        with self._lock:
            self._admit()
            request.control = begin_run(timeout, cancel)
            self._queue.append(request, request.priority)
        # Without the lock: both call at once if the request was stopped or has ended, which runs
        # user callbacks. ``_mark_ended`` then takes it out of the queue.
        request.control.add_listener(partial(self._end, request, None))
        future.add_done_callback(lambda _: self._mark_ended(request, _BY_CALLER))
        self._dispatch()

    def _admit(self) -> None:
        """Raise ``QueueFull`` or ``ReplicasClosed`` if no request is accepted."""
        if self._closed:
            raise ReplicasClosed("the replicas are closed")
        # With a free replica, the queue is about to be dispatched: requests that wait for others to
        # join their batch do not count as a full queue.
        most = self.limits.queue
        if len(self._queue) >= most and not self._free():
            self._counts.refused += 1
            raise QueueFull(
                f"the queue is full: {len(self._queue)} requests wait, and queue={most} is the "
                "limit; try again later"
            )

    def _end(self, request: QueuedRequest, outputs: RunValue, error: BaseException | None) -> None:
        """End a request, unless it has ended."""
        # On any thread. Counted first, before a thread that waits for the future continues.
        from concurrent.futures import InvalidStateError

        future = self._mark_ended(request, error)
        if future is not None:
            with suppress(InvalidStateError):  # cancelled by the user meanwhile
                future.set_exception(error) if error is not None else future.set_result(outputs)

    def _mark_ended(
        self, request: QueuedRequest, error: BaseException | None
    ) -> Future[Any] | None:
        """Count a request as ended. Return its future, or None if it has already ended."""
        with self._lock:
            future, request.future = request.future, None
            if future is None:
                return None
            self._counts.failed += error is not None
            self._counts.succeeded += error is None
            with suppress(ValueError):
                self._queue.remove(request)
                self._idle.notify_all()
            batch = request.batch
            if batch is not None:
                self._counts.running -= 1
                batch.left -= 1
        end_run(request.control)
        if request.span is not None:
            request.span.end(error)
        # A batch continues for its remaining requests, and is stopped when there are none.
        if batch is not None and not batch.left:
            batch.cancel.cancel()
        return future

    # Batches.

    def _free(self) -> bool:
        loads = zip(self._load, self._replicas, strict=True)
        return any(load < replica.most for load, replica in loads)

    def _dispatch(self) -> None:
        """Hand batches to free replicas."""
        # Called when a request arrives or has waited long enough, and when a replica is free.
        while True:
            with self._lock:
                if not self._queue or not self._free():
                    return
                seconds = self._seconds_to_wait()
                if seconds > 0:
                    # The watchdog of runs is the timer, of a control that is only stopped by its
                    # deadline.
                    if not self._waits:
                        self._waits = True
                        begin_run(seconds, None).add_listener(self._waited)
                    return
                first = self._queue.popleft()
                if isinstance(first, QueueTurn):
                    first.number = self._replica_for([monotonic() - first.since])
                    first.come.release()
                    continue
                batch = self._take(first)
                batch.since = now = monotonic()
                waited = [now - request.since for request in batch.requests]
                number = self._replica_for(waited, sum(r.rows for r in batch.requests))
            # Without the lock: joining copies, and a replica may call back before it returns.
            self._begin(number, batch)

    def _replica_for(self, waited: Sequence[float], rows: int = 1) -> int:
        """Choose the replica with the least load, and count the batch that it gets. ``waited``: the
        seconds that each of the batch's requests has waited."""
        number = min(range(len(self._load)), key=self._load.__getitem__)
        self._load[number] += 1
        counts = self._counts
        counts.running += len(waited)
        counts.batches += 1
        counts.rows += rows
        histograms = self._histograms
        histograms.batch_rows.add(rows)
        for seconds in waited:
            histograms.queue_seconds.add(seconds)
        return number

    def _seconds_to_wait(self) -> float:
        """Return the seconds for which the first request still waits for others to join it."""
        first, limits = self._queue.first, self.limits
        if isinstance(first, QueueTurn) or first.key is None:
            return 0.0
        if not limits.max_delay or self._closed:
            return 0.0
        joinable = self._joinable(first)
        full = sum([request.rows for request in joinable]) >= limits.max_batch
        full |= sum([request.tokens for request in joinable]) > limits.max_batch_tokens
        return 0.0 if full else first.since + limits.max_delay - monotonic()

    def _waited(self, error: Exception) -> None:
        with self._lock:
            self._waits = False
        self._dispatch()

    def _joinable(self, first: QueuedRequest) -> list[QueuedRequest]:
        """Return the queued requests with the same key, those of the same priority first: others
        would leave low ones a single place in their share of batches."""
        # A search of the bounded queue. Separate queues by key would lose the order of arrival.
        found = [r for r in self._queue if isinstance(r, QueuedRequest) and r.key == first.key]
        return sorted(found, key=lambda request: request.priority != first.priority)

    def _take(self, first: QueuedRequest) -> RequestBatch:
        """Remove the requests from the queue that are joined with a request, and return them."""
        requests, rows, tokens, limits = [first], first.rows, first.tokens, self.limits
        if first.key is not None:
            for request in self._joinable(first):
                fits = tokens + request.tokens <= limits.max_batch_tokens
                if rows + request.rows <= limits.max_batch and fits:
                    requests.append(request)
                    rows, tokens = rows + request.rows, tokens + request.tokens
                    self._queue.remove(request)
                # A request that is too large stays, and later, smaller ones may fill the batch.
        batch = RequestBatch(requests)
        for request in requests:
            request.batch = batch
        return batch

    def _begin(self, number: int, batch: RequestBatch) -> None:
        requests, first = batch.requests, batch.requests[0]
        done = partial(self._finished, number, batch)
        try:
            feeds = first.feeds
            if len(requests) > 1:
                feeds = self._batching.joined([request.feeds for request in requests])
            priority = max([request.priority for request in requests])
            options = RunOptions(feeds, first.fetches, cancel=batch.cancel, priority=priority)
            replica, check = self._replicas[number], None
            if len(requests) > 1:
                check = partial(self._batching.check, replica.session, feeds)
            with batch.begin_span():
                replica.begin(options, done, check)
        except Exception as error:
            done(None, error)

    def _finished(
        self,
        number: int,
        batch: RequestBatch,
        outputs: dict[str, RunValue] | None,
        error: BaseException | None,
    ) -> None:
        """End the requests of a batch that a replica has ended."""
        requests = batch.requests
        if batch.span is not None:
            batch.span.end(error)
        parts: RunValues | None = [outputs]
        if len(requests) > 1:
            feeds = [request.feeds for request in requests]
            parts = None if outputs is None else self._batching.split(outputs, feeds)
            if error is not None:
                self._batching.note_failure(error)
        seconds = monotonic() - batch.since
        with self._lock:
            self._load[number] -= 1
            self._histograms.compute_seconds.add(seconds, len(requests))
            # One request may be at fault, but the others must get their outputs. Each now runs
            # alone, at the head of the queue, since they have already waited.
            if parts is None:
                again = [request for request in requests if request.future is not None]
                for request in again:
                    request.key, request.batch, request.since = None, None, monotonic()
                self._counts.running -= len(again)
                for request in reversed(again):
                    self._queue.append(request, request.priority, front=True)
            self._idle.notify_all()
        # Without the lock: futures run user callbacks on this thread of the replica.
        if parts is not None:
            for request, part in zip(requests, parts, strict=True):
                if request.timed is not None:
                    request.timed(batch.since - request.since, seconds)
                self._end(request, part, error)
        batch.requests = []  # a replica may keep ``done``, and with it the feeds
        self._dispatch()
