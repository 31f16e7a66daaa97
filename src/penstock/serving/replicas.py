"""Data parallel replicas of a model behind one bounded queue.

::

    submit ──> queue ──> batch ──> the replica with the least load ──> rows of each request
       └── QueueFull                (in this process, or an actor of a cluster)

A request waits in the queue until a replica is free, and up to ``max_delay`` seconds for others to
join its batch. No thread waits here: replicas call back when a batch has ended, and the watchdog of
runs calls back when a request has waited for ``max_delay``. With ``run_here``, the calling thread
waits for its turn and runs the request itself, so that no other thread must be woken.
"""

from __future__ import annotations

import math
import threading
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from threading import get_ident
from time import monotonic
from typing import TYPE_CHECKING, Any

import numpy as np

from penstock.compiler.options import RunOptions
from penstock.core.errors import (
    Cancelled,
    InvalidInput,
    PenstockError,
    QueueFull,
    RunError,
    check_count,
    wrong_type,
)
from penstock.core.records import replace
from penstock.core.types import NamedValues, RunValue, RunValues
from penstock.executors.control import CancelToken, Control, begin_run, end_run
from penstock.executors.feeds import convert
from penstock.host.threads import Line, Workers, pool
from penstock.serving.batching import check_rows, joined, kind, split
from penstock.serving.batching import warm_up as run_ahead
from penstock.serving.replica import MOST_ON_WORKERS, replicas_of, shared_loops, worker_sessions
from penstock.serving.request_records import (
    QueuedRequest,
    QueueTurn,
    ReplicaCounts,
    ReplicaHistograms,
    ReplicasClosed,
    RequestBatch,
    Timed,
    Told,
)
from penstock.serving.unequal import UnequalRequests, tried_lengths
from penstock.session.artifact import has_state
from penstock.session.session import Session, compile

if TYPE_CHECKING:
    from concurrent.futures import Future

    from penstock.session.value_stream import ValueStream

_BY_CALLER = Cancelled("the request was cancelled by its caller")


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


def _tried(
    session: Session, sample: NamedValues | None, max_batch: int, max_batch_tokens: int | None
) -> UnequalRequests | None:
    """Return how to batch requests of unequal lengths, or None. Raises ``ValueError``."""
    unequal = None
    if max_batch_tokens is not None:
        unequal = tried_lengths(session, sample)
    elif max_batch > 1:
        check_rows(session, sample)
    if max_batch > 1:
        session._join()
    return unequal


# One lock guards queue, loads and counts, since each decision reads and changes several of them. It
# is never held while user code runs: futures end, and replicas begin, after its release. It is
# re-entrant, since registering ``_waited`` may call it at once if the time has passed, and a signal
# handler may submit a request while its thread holds the lock.
#
# The queue has no thread: every event that may let a request begin calls ``_dispatch``. Waking a
# dedicated thread would add tens of us to each small request. For the same reason, ``run_here``
# runs a request on the calling thread.


class Replicas:
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
        if workers is not None:
            weakref.finalize(self, _close_later, workers).atexit = False
        self.session: Session = self._sessions[0]
        if has_state(self.session.model):
            raise ValueError("a model with variables cannot have replicas, which would share them")
        self._unequal = _tried(self.session, sample, max_batch, max_batch_tokens)
        if warm_up:
            run_ahead(self._sessions, max_batch)
        if freezes:
            self.session._freeze()
        self.count = n
        self._most = queue
        self.max_batch = max_batch
        self.max_batch_tokens = max_batch_tokens or 0
        self.max_delay = max_delay
        self._replicas = replicas_of(self._sessions, loops, n, most, workers)
        self._workers = workers
        # The number of batches in progress on each replica; a worker may have several.
        self._load = [0] * n
        self._lock = threading.RLock()
        self._idle = threading.Condition(self._lock)
        self._queue: Line[QueuedRequest | QueueTurn] = Line()
        self._counts = ReplicaCounts()
        self._histograms = ReplicaHistograms()
        self._waits = self._closed = False
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
            self._enqueue(request, future, timeout, cancel)
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
            number, ok = self._wait_for_turn(control), False
            begin = monotonic()
            # From now on this thread has the replica, and must return it in every case.
            try:
                outputs = self.session._run_under(control, feeds, fetches)
                ok = True
                if told is not None:
                    told.timed(begin - came, monotonic() - begin)
                return outputs
            finally:
                self._end_turn(number, ok, begin)
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
            number, begin = self._wait_for_turn(control), monotonic()
            options: dict[str, Any] = {"cancel": cancel, "priority": control.priority}
            left = control.seconds_left
            try:
                values = self.session.stream(feeds, fetches, timeout=left, **options)
            except BaseException:
                self._end_turn(number, False, begin)
                raise
            # Released at the end of the run, not when its values are read: they may never be read.
            values.then(lambda error: self._end_turn(number, error is None, begin))
            with values:
                yield values
        finally:
            end_run(control)

    @property
    def runs_here(self) -> bool:
        """Whether a thread that calls ``run_here`` runs the request itself."""
        alone = self._workers is not None and self.max_batch == 1
        return alone and self._replicas[0].runs_here

    def _wait_for_turn(self, control: Control) -> int:
        """Wait for the turn of the calling thread, and return the number of its replica."""
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
        leave = partial(self._leave_queue, turn)
        control.add_listener(leave)
        try:
            turn.come.acquire()
        except BaseException as error:  # KeyboardInterrupt, for example
            leave(error)
            # The turn may have come just before: then this thread must return the replica.
            if turn.number is not None:
                self._end_turn(turn.number, False, monotonic())
            raise
        control.remove_listener(leave)
        if turn.number is None:
            assert turn.error is not None
            raise turn.error
        return turn.number

    def _leave_queue(self, turn: QueueTurn, error: BaseException) -> None:
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

    def _end_turn(self, number: int, ok: bool, begin: float) -> None:
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

    def _enqueue(
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
        if len(self._queue) >= self._most and not self._free():
            self._counts.refused += 1
            raise QueueFull(
                f"the queue is full: {len(self._queue)} requests wait, and queue={self._most} is "
                "the limit; try again later"
            )

    def run(self, *arguments: Any, **options: Any) -> dict[str, RunValue]:
        """Submit a request as ``submit`` does, and wait for its outputs."""
        return self.submit(*arguments, **options).result()

    async def arun(self, *arguments: Any, **options: Any) -> dict[str, RunValue]:
        """Submit a request and await its outputs. Cancelling the task cancels the request."""
        import asyncio

        return await asyncio.wrap_future(self.submit(*arguments, **options))

    def __repr__(self) -> str:
        counts, model = self.counts, self.session.model
        return (
            f"Replicas({model.path or model.entry!r}, {self.count}, max_batch={self.max_batch}: "
            f"{counts.running} requests run, {counts.queued} of at most {self._most} wait)"
        )

    @property
    def counts(self) -> ReplicaCounts:
        """Counts of requests so far."""
        with self._lock:
            return replace(self._counts, queued=len(self._queue))

    @property
    def histograms(self) -> ReplicaHistograms:
        """Times and sizes so far of requests that have begun or ended."""
        of = self._histograms
        with self._lock:
            copies = [h.copy() for h in (of.queue_seconds, of.compute_seconds, of.batch_rows)]
        return ReplicaHistograms(*copies)

    def close(self, *, wait: bool = True) -> None:
        """Refuse further requests, and wait for those that were accepted. Closes the session if
        this object has compiled it.

        Args:
            wait: Whether to run queued requests; if not, they end with ``Cancelled``.
        """
        with self._lock:
            self._closed = True
            queued = [] if wait else [*self._queue]
        error = Cancelled("the replicas were closed")
        for one in queued:  # without the lock, since the end of a request runs user callbacks
            if isinstance(one, QueueTurn):
                self._leave_queue(one, error)
            else:
                self._end(one, None, error)
        self._dispatch()
        with self._idle:
            self._idle.wait_for(lambda: not self._queue and not any(self._load))
        # At the end, since queued requests run on these threads and sessions.
        if self._workers is not None:
            self._workers.close()
        if self._own:
            for session in self._sessions:
                session.close()

    def __enter__(self) -> Replicas:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    # Requests.

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
            own = kind(feeds) if self._unequal is None else self._unequal.key(feeds)
            request.key = own and (request.fetches, own)
        if request.key is not None and self._unequal is not None:
            request.tokens = request.rows * next(iter(feeds.values())).shape[1]

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
        first = self._queue.first
        if isinstance(first, QueueTurn) or first.key is None or not self.max_delay or self._closed:
            return 0.0
        joinable = self._joinable(first)
        full = sum([request.rows for request in joinable]) >= self.max_batch
        full |= sum([request.tokens for request in joinable]) > self.max_batch_tokens
        return 0.0 if full else first.since + self.max_delay - monotonic()

    def _waited(self, error: Exception) -> None:
        with self._lock:
            self._waits = False
        self._dispatch()

    def _joinable(self, first: QueuedRequest) -> list[QueuedRequest]:
        """Return the queued requests with the same key."""
        # A search of the bounded queue. Separate queues by key would lose the order of arrival.
        return [r for r in self._queue if isinstance(r, QueuedRequest) and r.key == first.key]

    def _take(self, first: QueuedRequest) -> RequestBatch:
        """Remove the requests from the queue that are joined with a request, and return them."""
        requests, rows, tokens = [first], first.rows, first.tokens
        if first.key is not None:
            for request in self._joinable(first):
                fits = tokens + request.tokens <= self.max_batch_tokens
                if rows + request.rows <= self.max_batch and fits:
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
            join = joined if self._unequal is None else self._unequal.joined
            feeds = first.feeds if len(requests) == 1 else join([r.feeds for r in requests])
            priority = max([request.priority for request in requests])
            options = RunOptions(feeds, first.fetches, cancel=batch.cancel, priority=priority)
            replica, check = self._replicas[number], None
            if len(requests) > 1 and self._unequal is not None:
                check = partial(self._unequal.check, replica.session, feeds)
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
        if len(requests) > 1 and self._unequal is not None:
            feeds = [request.feeds for request in requests]
            parts = None if outputs is None else self._unequal.split(outputs, feeds)
            if isinstance(error, InvalidInput | RunError) and not isinstance(error, Cancelled):
                self._unequal.rounds = False  # the rounded length may exceed the model's limit
        elif len(requests) > 1:
            parts = None if outputs is None else split(outputs, [r.rows for r in requests])
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
