"""Data parallel replicas of a model behind one bounded queue.

::

    submit ──> queue ──> batch ──> the replica with the least load ──> rows of each request
       └── QueueFull                (in this process, or an actor of a cluster)

A request waits in the queue (``replica_queue``) until a replica is free, and up to ``max_delay``
seconds for others to join its batch. No thread waits here: replicas call back when a batch has
ended, and the watchdog of runs calls back when a request has waited for ``max_delay``. With
``run_here``, the calling thread waits for its turn and runs the request itself, so that no other
thread must be woken.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from threading import get_ident
from time import monotonic
from typing import TYPE_CHECKING, Any

import numpy as np

from penstock.core import Closeable
from penstock.core.errors import InvalidInput, PenstockError, check_count, wrong_type
from penstock.core.types import NamedValues, RunValue
from penstock.executors.control import CancelToken, begin_run, end_run
from penstock.executors.feeds import convert
from penstock.host.threads import Workers, pool
from penstock.serving.batching import EqualRequests, check_rows
from penstock.serving.batching import warm_up as run_shapes
from penstock.serving.replica import MOST_ON_WORKERS, replicas_of, shared_loops, worker_sessions
from penstock.serving.replica_queue import QueueLimits, ReplicaQueue
from penstock.serving.request_records import (
    QueuedRequest,
    ReplicaCounts,
    ReplicaHistograms,
    Timed,
    Told,
)
from penstock.serving.unequal import tried_lengths
from penstock.session.ahead import freeze
from penstock.session.saving import has_state
from penstock.session.session import Session, compile

if TYPE_CHECKING:
    from concurrent.futures import Future

    from penstock.session.value_stream import ValueStream


def _close_later(workers: Workers) -> None:
    """End the threads of replicas that were deleted without ``close``, from any thread."""
    # Garbage may be collected on one of these threads, which cannot wait for itself: another one,
    # of the pool of the process, ends them.
    with suppress(RuntimeError):  # the process ends
        pool().submit(workers.close)


def _check_sizes(counts: Sequence[int], max_batch_tokens: int | None, max_delay: float) -> None:
    """Check the sizes of a queue and a batch. ``counts``: replicas, waiting requests, and rows of a
    batch. Raises ``ValueError`` or ``TypeError``."""
    for name, count in zip(("n", "queue", "max_batch"), counts, strict=True):
        check_count(name, count)
    if max_batch_tokens is not None:
        check_count("max_batch_tokens", max_batch_tokens)
        if counts[-1] == 1:
            raise ValueError("max_batch_tokens= requires max_batch= above 1")
    if not isinstance(max_delay, int | float) or not 0 <= max_delay < math.inf:
        raise wrong_type("max_delay", max_delay, "a number of seconds")


def _check_options(own: bool, options: Mapping[str, object], cluster: object) -> None:
    """Raise ``TypeError`` if options are given with a session, which has its own."""
    names = [*options, *(["cluster"] if cluster is not None else [])]
    if names and not own:
        raise TypeError(f"a session is already compiled: {', '.join(names)} cannot be changed")


def _freezes(options: dict[str, object], max_batch_tokens: int | None) -> bool:
    """Remove ``compile_in_run`` from ``options``, and return whether it is False, which applies
    from the first request on. Sets ``dead_rows`` for padding, whose results nothing reads."""
    if max_batch_tokens is not None:
        options.setdefault("dead_rows", "any")
    return options.pop("compile_in_run", True) is False


def _batching(
    session: Session, sample: NamedValues | None, max_batch: int, max_batch_tokens: int | None
) -> EqualRequests:
    """Return how to batch requests. Raises ``ValueError`` if the model does not support that."""
    batching = EqualRequests()
    if max_batch_tokens is not None:
        batching = tried_lengths(session, sample)
    elif max_batch > 1:
        check_rows(session, sample)
    if max_batch > 1:
        session._join()
    return batching


class Replicas(Closeable):
    """``n`` replicas of ``model`` behind one queue; each runs one request, or one batch, at a time.

    The replicas of a process share one session, with its weights and threads. With ``max_batch``
    above 1, requests whose feeds have the same dtypes, and the same shapes but for the first dim,
    are joined into batches. A trial when the replicas are made checks that rows are independent.
    With ``max_batch_tokens``, requests of different lengths are joined, too, if the model has a
    mask (``[rows, tokens]``) and it is proven that masked rows do not affect others; padding is not
    computed. If a batch fails, its requests run one by one.

    With ``cluster=``, each worker of the ``penstock.Cluster`` is a replica, and ``n`` is their
    number. If a worker dies, its request is repeated or ends with ``WorkerLost``, as the cluster's
    ``retries`` say. The other workers continue, and a new worker replaces it.

    Raises ``ValueError`` for a model with variables, whose state requests would share, and for a
    model that cannot be batched; with ``max_batch_tokens`` the error names the node that prevents
    it.

    Args:
        model: A session, or a model as ``penstock.compile`` takes it.
        n: The number of replicas, and so of requests or batches that run at the same time; by
            default 1, or all workers of ``cluster=``.
        queue: The maximum number of waiting requests; a further one raises ``QueueFull``.
        max_batch: The maximum number of rows of a batch; with 1, requests are not joined.
        max_batch_tokens: The maximum number of tokens of a batch of requests of any lengths,
            counted as rows times length. Needs ``max_batch`` above 1. The session is then compiled
            with ``dead_rows="any"``, unless that option is given.
        max_delay: Seconds that a request waits for others to join its batch; a full batch starts as
            soon as a replica is free.
        sample: Inputs by name for the trial of batches; generated by default.
        warm_up: Whether the constructor runs each shape of ``shapes=`` on generated values, and
            with ``max_batch`` also the batches that requests of that shape can form. Raises
            ``InvalidInput`` if inputs have open dims that ``shapes=`` does not give.
        options: Options of ``penstock.compile``, unless ``model`` is a session. Replicas of a
            process that run at the same time divide its ``threads``. ``compile_in_run=False``
            applies from the first request on.
    """

    def __init__(
        self,
        model: Any,
        n: int | None = None,
        *,
        queue: int = 128,
        max_batch: int = 1,
        max_batch_tokens: int | None = None,
        max_delay: float = 0.0,
        sample: NamedValues | None = None,
        warm_up: bool = False,
        **options: Any,
    ) -> None:
        cluster = options.pop("cluster", None)
        if cluster is not None and not hasattr(cluster, "each_worker"):
            raise wrong_type("cluster", cluster, "a penstock.Cluster")
        if n is None:
            n = 1 if cluster is None else cluster.workers
        # Checked first, before anything is compiled or started that would have to be undone.
        _check_sizes([n, queue, max_batch], max_batch_tokens, max_delay)
        loops = shared_loops(model, max_batch)
        model = model if loops is None else loops.session
        self._own = not isinstance(model, Session)
        _check_options(self._own, options, cluster)
        freezes = _freezes(options, max_batch_tokens)
        self._sessions: list[Session] = [model]
        most = 1
        if self._own and cluster is not None:
            self._sessions, most = worker_sessions(model, n, cluster, options), MOST_ON_WORKERS
        elif self._own:
            self._sessions = [compile(model, **options)]
        # Each run has a thread. The pool of the process has only one for each core, which the runs
        # of all other sessions need.
        workers = Workers("replicas", n) if cluster is None else None
        self.session: Session = self._sessions[0]
        if has_state(self.session.model):
            raise ValueError("a model with variables cannot have replicas, which would share them")
        self._batching = _batching(self.session, sample, max_batch, max_batch_tokens)
        if warm_up:
            run_shapes(self._sessions, max_batch)
        if freezes:
            freeze(self.session)
        self.count, self.max_batch, self.max_delay = n, max_batch, max_delay
        limits = QueueLimits(queue, max_batch, max_batch_tokens or 0, max_delay)
        replicas = replicas_of(self._sessions, loops, n, most, workers)
        self._queue = ReplicaQueue(replicas, self._batching, limits)
        # Requests may outlive this object, and so do threads, which end with the queue.
        if workers is not None:
            weakref.finalize(self._queue, _close_later, workers).atexit = False
        self._workers = workers
        self.runs_here = workers is not None and max_batch == 1 and replicas[0].runs_here
        """whether a thread that calls ``run_here`` runs the request itself"""
        self._here: set[int] = set()  # threads that call ``run_here``

    def submit(
        self,
        feeds: NamedValues | None = None,
        fetches: Sequence[str] | None = None,
        *,
        timeout: float | None = None,
        cancel: CancelToken | None = None,
        priority: int | None = None,
        timed: Timed | None = None,
    ) -> Future[dict[str, RunValue]]:
        """Queue a request and return a future of its outputs by name. Raises ``QueueFull``, and
        ``InvalidInput`` for feeds that cannot be joined with other requests.

        Args:
            feeds: Inputs by name, as ``Session.run`` takes them.
            fetches: Names of the values to return, by default the model's outputs.
            timeout: Seconds from now after which the request ends, including its time in the queue.
            cancel: A token that ends the request.
            priority: Requests of higher priority are served first; by default the session's
                priority.
            timed: Called at the end with the seconds in the queue and the seconds of the run.
        """
        from penstock.session.future import RunFuture

        future: Future[dict[str, RunValue]] = RunFuture()
        own = self.session.options.priority if priority is None else priority
        names = None if fetches is None else tuple(fetches)
        request = QueuedRequest(feeds or {}, names, future, own, timed)
        try:
            # On the caller's thread, before the queue: invalid feeds raise an error at once, and do
            # not get into a batch with other requests.
            if self.max_batch > 1:
                self._prepare(request)
            self._queue.put(request, future, timeout, cancel)
        except BaseException as error:
            if request.span is not None:
                request.span.end(error)
            raise
        return future

    def run_here(
        self,
        feeds: NamedValues,
        fetches: Sequence[str] | None = None,
        *,
        timeout: float | None = None,
        cancel: CancelToken | None = None,
        priority: int | None = None,
        told: Told | None = None,
    ) -> dict[str, RunValue]:
        """Wait for a free replica, run a request on the calling thread, and return its outputs.
        Raises ``QueueFull`` at once, and as ``Session.run`` does.

        Replicas of a cluster, and those that join requests, do not run it on the calling thread.

        Args:
            feeds: As ``submit`` takes them.
            fetches: As ``submit`` takes them.
            timeout: Seconds from now until the request ends with ``DeadlineExceeded``.
            cancel: A token that ends the request with ``Cancelled``.
            priority: As ``submit`` takes it.
            told: Callbacks for the times of the request and, on another thread, for the error at
                its deadline: kernels that cannot be stopped may run on.
        """
        if not self.runs_here:
            timed = None if told is None else told.timed
            options: dict[str, Any] = {"cancel": cancel, "priority": priority, "timed": timed}
            return self.submit(feeds, fetches, timeout=timeout, **options).result()
        me = get_ident()
        # This thread holds a replica and could wait forever for another one, if such threads hold
        # all of them.
        if me in self._here:
            raise PenstockError("a run of a replica must not call its replicas: it could deadlock")
        # The timeout begins here and not with the run, since the time in the queue counts.
        came, control = monotonic(), begin_run(timeout, cancel)
        control.priority = self.session.options.priority if priority is None else priority
        self._here.add(me)
        try:
            if told is not None:
                control.add_listener(told.late)
            number, ok = self._queue.wait_for_turn(control), False
            begin = monotonic()
            # From now on this thread has the replica, and must return it in every case.
            try:
                outputs = self.session._run_under(control, feeds, fetches)
                ok = True
                if told is not None:
                    told.timed(begin - came, monotonic() - begin)
                return outputs
            finally:
                self._queue.end_turn(number, ok, begin)
        finally:
            self._here.discard(me)
            end_run(control)

    @contextmanager
    def stream(
        self,
        feeds: NamedValues,
        fetches: Sequence[str],
        *,
        timeout: float | None = None,
        cancel: CancelToken | None = None,
        priority: int | None = None,
    ) -> Iterator[ValueStream]:
        """Stream the values of a run, as ``Session.stream`` does. The run takes a replica of this
        process until it has ended. Raises ``QueueFull`` at once, and as ``Session.stream`` does.

        Args:
            feeds: As ``submit`` takes them.
            fetches: Names of values, also of graphs of loops.
            timeout: Seconds from now until the run ends with ``DeadlineExceeded``.
            cancel: A token that ends the run with ``Cancelled``.
            priority: As ``submit`` takes it.
        """
        if self._workers is None:
            raise InvalidInput("replicas on a cluster do not support streaming")
        control = begin_run(timeout, cancel)
        control.priority = self.session.options.priority if priority is None else priority
        try:
            number, begin = self._queue.wait_for_turn(control), monotonic()
            options: dict[str, Any] = {"cancel": cancel, "priority": control.priority}
            left = control.seconds_left
            try:
                values = self.session.stream(feeds, fetches, timeout=left, **options)
            except BaseException:
                self._queue.end_turn(number, False, begin)
                raise
            # Released at the end of the run, not when its values are read: they may never be read.
            values.then(lambda error: self._queue.end_turn(number, error is None, begin))
            with values:
                yield values
        finally:
            end_run(control)

    def run(self, *arguments: Any, **options: Any) -> dict[str, RunValue]:
        """Submit a request as ``submit`` does, and wait for its outputs."""
        return self.submit(*arguments, **options).result()

    async def arun(self, *arguments: Any, **options: Any) -> dict[str, RunValue]:
        """Submit a request and await its outputs. Cancelling the task cancels the request."""
        import asyncio

        return await asyncio.wrap_future(self.submit(*arguments, **options))

    def __repr__(self) -> str:
        counts, model, most = self.counts, self.session.model, self._queue.limits.queue
        return (
            f"Replicas({model.path or model.entry!r}, {self.count}, max_batch={self.max_batch}: "
            f"{counts.running} requests run, {counts.queued} of at most {most} wait)"
        )

    @property
    def counts(self) -> ReplicaCounts:
        """Counts of requests so far."""
        return self._queue.counts

    @property
    def histograms(self) -> ReplicaHistograms:
        """Times and sizes so far of requests that have begun or ended."""
        return self._queue.histograms

    def close(self, *, wait: bool = True) -> None:
        """Refuse further requests, and wait for those that were accepted. Closes the session if
        this object has compiled it.

        Args:
            wait: Whether to run queued requests; if not, they end with ``Cancelled``.
        """
        self._queue.close(wait=wait)
        # At the end, since queued requests run on these threads and sessions.
        if self._workers is not None:
            self._workers.close()
        if self._own:
            for session in self._sessions:
                session.close()

    def _prepare(self, request: QueuedRequest) -> None:
        """Convert the feeds of a request that may be joined with others."""
        ports = self.session.inputs
        if request.feeds.keys() != {port.name for port in ports}:
            return  # the run raises the error, or it accepts other values of the model
        feeds = {
            port.name: convert(port.name, request.feeds[port.name], port.type) for port in ports
        }
        rows = {len(x) if isinstance(x, np.ndarray) and x.ndim else -1 for x in feeds.values()}
        if len(rows) != 1 or min(rows) < 0:
            raise InvalidInput("the inputs of a request must have the same number of rows")
        (request.rows,) = rows
        request.feeds = feeds
        # A request that fills a batch does not wait for others. Without rows, outputs cannot be
        # split.
        if 0 < request.rows < self.max_batch:
            own = self._batching.key(feeds)
            request.key = own and (request.fetches, own)
        if request.key is not None:
            request.tokens = self._batching.tokens(feeds)
