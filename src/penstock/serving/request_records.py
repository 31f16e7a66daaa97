"""Requests of replicas and sequences: their place in a queue, their batches, and their counts."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from time import monotonic
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

from penstock.core.errors import PenstockError
from penstock.core.records import dataclass, field
from penstock.core.types import NamedValues
from penstock.executors.control import NEVER, CancelToken
from penstock.host.spans import TracedSpan, span
from penstock.serving.histogram import ROWS, Histogram

if TYPE_CHECKING:
    from concurrent.futures import Future

Timed: TypeAlias = "Callable[[float, float], object]"
"""Takes the seconds of a request in the queue, and of its run."""


class Told(Protocol):
    """Callbacks for a request that runs on the thread of its caller."""

    def timed(self, queue: float, run: float) -> None:
        """Take the seconds in the queue, and of the run."""

    def late(self, error: Exception) -> None:
        """Take the error of a request that has met its deadline, or was cancelled."""


class ReplicasClosed(PenstockError):  # noqa: N818
    """A request was submitted after ``Replicas.close``."""


@dataclass(slots=True)
class ReplicaCounts:
    """Requests of ``Replicas``: ``queued`` and ``running`` now; ``succeeded``, ``failed`` and
    ``refused`` so far; and the number of ``batches`` and their ``rows`` in total. Without
    ``max_batch``, a request counts as one row."""

    queued: int = 0
    running: int = 0
    succeeded: int = 0
    failed: int = 0
    refused: int = 0
    batches: int = 0
    rows: int = 0


@dataclass(slots=True)
class ReplicaHistograms:
    """Histograms of the seconds of each request in the queue and in a replica, and of the rows of
    each batch. A request of a batch that failed, which runs again, counts twice."""

    queue_seconds: Histogram = field(default_factory=Histogram)
    compute_seconds: Histogram = field(default_factory=Histogram)
    batch_rows: Histogram = field(default_factory=partial(Histogram, ROWS))

    def copy(self) -> ReplicaHistograms:
        """What they count by now."""
        return ReplicaHistograms(
            self.queue_seconds.copy(), self.compute_seconds.copy(), self.batch_rows.copy()
        )


class QueuedRequest:
    """One request. Its ``control`` is stopped at the deadline and by cancellation, which ends the
    future, whether the request is queued or running. ``future`` is None once the request has ended.
    ``key`` is None if the request is not joined; ``tokens`` are counted if lengths may differ."""

    __slots__ = (
        *("batch", "control", "feeds", "fetches", "future", "key", "priority", "rows", "since"),
        *("span", "timed", "tokens"),
    )

    def __init__(
        self,
        feeds: NamedValues,
        fetches: tuple[str, ...] | None,
        future: Future[Any],
        priority: int,
        timed: Timed | None,
    ) -> None:
        self.priority = priority
        self.timed = timed
        self.feeds = feeds
        self.fetches = fetches
        self.future: Future[Any] | None = future
        self.batch: RequestBatch | None = None
        self.control = NEVER
        self.key: object = None
        self.rows, self.tokens = 1, 0
        self.since = monotonic()
        self.span = span("penstock.request", {"penstock.priority": priority})


class QueueTurn:
    """The place in the queue of a thread that runs its request itself. ``come``: a lock that is
    released when replica ``number`` is free for the thread, or when the wait ends with an
    ``error``."""

    __slots__ = ("come", "error", "number", "since")

    def __init__(self) -> None:
        # A single waiter is woken once; a Condition or an Event would need a lock, a list, and
        # another lock for each waiter.
        self.come = threading.Lock()
        self.come.acquire()
        self.since = monotonic()
        self.number: int | None = None
        self.error: BaseException | None = None


class RequestBatch:
    """Requests that run together, and the token that stops the run."""

    def __init__(self, requests: list[QueuedRequest]) -> None:
        self.requests = requests
        self.left = len(requests)
        self.cancel = CancelToken()
        self.since = 0.0
        """when a replica was given the batch"""
        self.span: TracedSpan | None = None

    def begin_span(self) -> AbstractContextManager[None]:
        """Make OpenTelemetry spans that begin on this thread children of the batch's span, or of
        the request's span if there is only one."""
        causes = [request.span for request in self.requests if request.span is not None]
        if len(causes) > 1:
            rows = sum([request.rows for request in self.requests])
            self.span = span("penstock.batch", {"penstock.rows": rows}, causes)
        own = self.span or next(iter(causes), None)
        return nullcontext() if own is None else own.current()
