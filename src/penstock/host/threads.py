"""The core budget of the process, pools of worker threads, priority queues, and semaphores."""

from __future__ import annotations

import atexit
import math
import os
import sys
import threading
import weakref
from collections import deque
from collections.abc import Callable, Hashable, Iterator, Set
from contextlib import contextmanager, suppress
from functools import cache
from itertools import repeat
from queue import SimpleQueue
from time import monotonic
from typing import TYPE_CHECKING, Generic, TypeVar

from penstock.core.checkpoints import WAKE_S
from penstock.core.records import NamedTuple
from penstock.host.fork import in_child, shared_lock

if TYPE_CHECKING:
    from concurrent.futures import Future

T = TypeVar("T")
Waiting = TypeVar("Waiting", bound=Hashable)

Job = Callable[[], object]

HOST = "host"


class Overheads(NamedTuple):
    """Overheads of executors in seconds, measured with threads of CPython 3.12."""

    dispatch_s: float
    """the overhead of the task loop for each task"""
    hand_over_s: float
    """the time to hand a task to another worker and to see its result"""
    python_s: float
    """the part of a step's time in which it holds Python's lock"""
    worth_s: float
    """a second worker pays off only for plans that take longer than this"""
    long_s: float
    """a kernel that takes longer is worth a thread of its own, and overlapping the iterations of
    its loop"""


OVERHEADS = Overheads(2.5e-6, 30e-6, 2e-6, 4 * 30e-6, 200e-6)


@cache
def core_budget() -> int:
    """Return the number of cores that this process may keep busy: the lesser of the usable cores
    and ``OMP_NUM_THREADS``."""
    omp = os.environ.get("OMP_NUM_THREADS", "").split(",")[0].strip()
    cores = usable_cores()
    return max(1, min(cores, int(omp) if omp.isdigit() and int(omp) > 0 else cores))


@cache
def usable_cores() -> int:
    """Return the number of cores that the system gives this process: the lesser of its CPU affinity
    and its cgroup's CPU quota, at least one."""
    cores, quota = len(cores_of_thread()) or os.cpu_count() or 1, _quota()
    return max(1, cores if quota is None else min(cores, quota))


def cores_of_thread() -> Set[int]:
    """Return the cores on which the calling thread may run; empty if the system does not tell."""
    try:
        return os.sched_getaffinity(0)
    except AttributeError:
        return frozenset()


def _quota() -> int | None:
    """Return the whole cores of the cgroup's quota, rounded up (cgroup v2, then v1)."""
    with suppress(OSError, ValueError):
        quota, period = _cgroup("cpu.max").split()
        return None if quota == "max" else math.ceil(int(quota) / int(period))
    with suppress(OSError, ValueError):
        quota_us, period_us = map(
            int, map(_cgroup, ("cpu/cpu.cfs_quota_us", "cpu/cpu.cfs_period_us"))
        )
        return math.ceil(quota_us / period_us) if quota_us > 0 else None
    return None


def _cgroup(name: str) -> str:
    with open(f"/sys/fs/cgroup/{name}") as file:
        return file.read()


SHARE = 8
"""one in this many served items has a lower priority than others that wait"""


class Line(Generic[Waiting]):
    """A queue of waiting items, served by priority and then in the order of arrival. The caller
    must ensure that only one thread at a time uses it.

    >>> line = Line[str]()
    >>> for name, priority in (("a", 0), ("b", 5), ("c", 0), ("d", 5)):
    ...     line.append(name, priority)
    >>> [line.popleft() for _ in range(4)]
    ['b', 'd', 'a', 'c']
    """

    def __init__(self) -> None:
        self._levels: dict[int, deque[Waiting]] = {}  # by priority, none of them empty
        # Items served ahead of those of each priority since one of these was served.
        self._passed: dict[int, int] = {}

    def __len__(self) -> int:
        return sum(map(len, self._levels.values()))

    def __iter__(self) -> Iterator[Waiting]:
        """Iterate over the waiting items, higher priorities first."""
        for level in sorted(self._levels, reverse=True):
            yield from tuple(self._levels[level])

    @property
    def first(self) -> Waiting:
        """The item that is served next. Raises ``IndexError`` if none waits."""
        return self._levels[self._next()][0]

    def append(self, item: Waiting, priority: int = 0, *, front: bool = False) -> None:
        """Add an item after the others of its priority, or in ``front`` of them."""
        level = self._levels.setdefault(priority, deque())
        if front:
            level.appendleft(item)
        else:
            level.append(item)

    def popleft(self) -> Waiting:
        """Remove and return the item that is served next. Raises ``IndexError`` if none waits."""
        priority = self._next()
        if len(self._levels) > 1:
            for other in self._levels:
                if other < priority:
                    self._passed[other] = self._passed.get(other, 0) + 1
        self._passed.pop(priority, None)
        level = self._levels[priority]
        item = level.popleft()
        if not level:
            del self._levels[priority]
        return item

    def remove(self, item: Waiting) -> None:
        """Remove an item. Raises ``ValueError`` if it does not wait."""
        for priority, level in self._levels.items():
            if item in level:
                level.remove(item)
                if not level:
                    del self._levels[priority]
                    self._passed.pop(priority, None)
                return
        raise ValueError(f"{item!r} does not wait")

    def clear(self) -> None:
        """Remove all items."""
        self._levels.clear()
        self._passed.clear()

    def _next(self) -> int:
        """Return the priority of the item that is served next."""
        if not self._levels:
            raise IndexError("none waits")
        if len(self._levels) == 1:
            return next(iter(self._levels))
        due = [level for level, count in self._passed.items() if count >= SHARE - 1]
        return max(due or self._levels)


class Workers:
    """Up to ``size`` threads that run jobs. A thread is started if there is a job and none is idle.

    A job is a function without arguments that handles its own results and errors. If it raises, the
    exception is reported through ``threading.excepthook``, and the worker continues. Idle workers
    block, and live until ``close`` or the end of the process, which waits for running and queued
    jobs. A forked child has the pool without its threads and queued jobs. While a job waits for
    an action of the program (``waiting_for_program``), another thread takes its place.

    ``concurrent.futures.ThreadPoolExecutor`` has no ``offer``: a caller looking for help learns at
    once that no worker is idle, and leaves no stale job behind. Also, no futures are created for
    jobs that need none. All methods are thread-safe, and may be called by jobs.
    """

    def __init__(self, name: str, size: int) -> None:
        if size < 1:
            raise ValueError(f"a pool of {size} threads cannot run anything")
        self.name = name
        self.size = size
        self._lock = shared_lock()
        self._reset()
        with _LOCK:
            _ALL.add(self)

    def _reset(self) -> None:
        # A token for each queued job, so that workers need not wait for another lock.
        self._jobs: SimpleQueue[bool] = SimpleQueue()
        self._line: Line[_Queued] = Line()
        self._running: dict[int, int] = {}  # priorities, by thread
        self._threads: list[threading.Thread] = []
        self._outside = 0  # workers that wait for the program
        self._most = self.size  # the limit on other threads, with those for higher priorities
        # Idle workers minus queued jobs. Counted here, because neither the queue nor the threads
        # tell whether a worker is about to take the job that was queued last.
        self._free = 0
        self._finishing: set[int] = set()  # threads that count as idle while their jobs return
        self._closing = False

    @property
    def threads(self) -> int:
        """The number of threads that were started."""
        return len(self._threads)

    def submit(self, job: Job, priority: int = 0) -> None:
        """Queue ``job``. Jobs start in the order of their ``priority`` and of submission; beside
        running jobs of a lower priority, as many additional threads may start. Raises
        ``RuntimeError`` if the pool is closed, the process exits, or no thread can be started."""
        with self._lock:
            if self._refuses():
                raise RuntimeError(f"the pool {self.name!r} is closed and takes no more jobs")
            lower = [running for running in self._running.values() if running < priority]
            most = self.size + min(len(lower), self.size)
            if self._free <= 0 and not self._start(most) and not self._threads:
                raise RuntimeError(f"the system has no thread for the pool {self.name!r}")
            self._put(job, priority)

    def offer(self, job: Job) -> bool:
        """Run ``job`` if a worker is idle or can be started, else return False; never queue it."""
        with self._lock:
            if self._refuses() or (self._free <= 0 and not self._start()):
                return False
            self._put(job, 0)
            return True

    def finishing(self) -> None:
        """Count the calling worker as idle, since its job is about to return. A caller that learns
        from the job that it ends may submit the next one before it has returned."""
        me = threading.get_ident()
        with self._lock:
            if me not in self._finishing:
                self._finishing.add(me)
                self._freed()

    def grow(self, size: int) -> None:
        """Raise the maximum to ``size`` threads; start those that queued jobs need at once."""
        with self._lock:
            self.size = max(self.size, size)
            self._most = max(self._most, self.size)
            while self._free < 0 and self._start():
                pass

    def close(self, *, wait: bool = True) -> None:
        """End all threads after running and queued jobs, and the jobs that these submit. Jobs from
        other threads are refused from now on. A job of the pool must not ``wait``, or it would wait
        for itself."""
        with self._lock:
            if not self._closing:
                self._closing = True
                self._end_if_idle()
            threads = list(self._threads) if wait else []
        for thread in threads:
            thread.join()

    def step_out(self, workers: int) -> None:
        """Let another thread replace each of ``workers`` that wait for the program. -1 undoes this
        for one worker."""
        with self._lock:
            self._outside += workers
            while self._free < 0 and self._start():
                pass

    # Called with the lock held, except for _work.

    def _refuses(self) -> bool:
        if not self._closing:
            return False
        # Jobs submitted by a job belong to it, and are accepted until the last worker is idle.
        return self._free == len(self._threads) or threading.current_thread() not in self._threads

    def _put(self, job: Job, priority: int) -> None:
        self._free -= 1
        self._line.append(_Queued(job, priority), priority)
        self._jobs.put(True)

    def _start(self, most: int = 0) -> bool:
        most = max(most, self.size)
        if len(self._threads) >= most + self._outside:
            return False
        name = f"penstock-{self.name}-{len(self._threads)}"
        # Python joins threads that are not daemons before it calls atexit handlers, and would wait
        # for idle workers forever.
        thread = threading.Thread(target=self._work, args=(self._jobs,), name=name, daemon=True)
        try:
            thread.start()
        except RuntimeError:  # the system has no more threads, or Python is shutting down
            return False
        self._threads.append(thread)
        self._free += 1
        self._most = max(self._most, most)
        return True

    def _is_surplus(self) -> bool:
        """Whether the calling worker replaced one that has stopped waiting, and must end."""
        if len(self._threads) <= self._most + self._outside:
            return False
        self._threads.remove(threading.current_thread())
        return True

    def _end_if_idle(self) -> None:
        if self._free == len(self._threads):
            for _ in self._threads:
                self._jobs.put(False)

    def _freed(self) -> None:
        self._free += 1
        if self._closing:
            self._end_if_idle()

    def _work(self, jobs: SimpleQueue[bool]) -> None:
        me = threading.get_ident()
        _HERE.workers = self
        while jobs.get():
            with self._lock:
                queued = self._line.popleft()
                self._running[me] = queued.priority
            job = queued.job
            del queued
            try:
                job()
            except BaseException:
                report_thread_exception()
            del job  # with all its references, since the next job may never come
            if jobs is not self._jobs:
                return  # the job forked, and this is the child, which has a new queue
            with self._lock:
                del self._running[me]
                finishing = me in self._finishing
                self._finishing.discard(me)
                if self._is_surplus():
                    self._free -= finishing
                    if self._closing:
                        self._end_if_idle()
                    return
                if not finishing:
                    self._freed()


class _Queued:
    """A job in the queue. Compared by identity, since jobs may define equality."""

    __slots__ = ("job", "priority")

    def __init__(self, job: Job, priority: int) -> None:
        self.job = job
        self.priority = priority


def report_thread_exception() -> None:
    """Report the current exception through ``threading.excepthook``. Errors of the hook are
    suppressed, so that the calling thread survives."""
    with suppress(BaseException):
        error_type, error, trace = sys.exc_info()
        assert error_type is not None
        thread = threading.current_thread()
        threading.excepthook(threading.ExceptHookArgs((error_type, error, trace, thread)))


_LOCK = shared_lock()
_ALL: weakref.WeakSet[Workers] = weakref.WeakSet()
_POOLS: dict[str, Workers] = {}
_HERE = threading.local()  # has ``workers`` on threads of pools


def pool(name: str = HOST, size: int | None = None) -> Workers:
    """Return the pool ``name`` of this process, created on first use. ``size`` is the maximum
    number of its threads, by default the core budget. Backends whose threads wait for a device may
    request more. An existing pool grows to the largest size requested, and never shrinks."""
    size = core_budget() if size is None else size
    workers = _POOLS.get(name)
    if workers is None:
        with _LOCK:
            workers = _POOLS.get(name) or _POOLS.setdefault(name, Workers(name, size))
    if size > workers.size:
        workers.grow(size)
    return workers


def on_worker() -> bool:
    """Whether the calling thread belongs to a pool."""
    return getattr(_HERE, "workers", None) is not None


@contextmanager
def waiting_for_program() -> Iterator[None]:
    """Let other jobs of the pool run while the calling thread, if it is a worker, waits for an
    action of the program."""
    workers: Workers | None = getattr(_HERE, "workers", None)
    if workers is None:
        yield
        return
    workers.step_out(1)
    try:
        yield
    finally:
        workers.step_out(-1)


def fulfil(future: Future[T], function: Callable[[], T]) -> None:
    """Set ``future`` to the result or the exception of ``function``, unless it was cancelled."""
    try:
        if future.set_running_or_notify_cancel():
            try:
                result = function()
            except BaseException as error:
                future.set_exception(error)
            else:
                future.set_result(result)
    finally:
        # The error refers to this frame; a reference back to it would be a cycle, which keeps all
        # objects of a failed run alive until the next garbage collection.
        del future


def _finish() -> None:
    """Finish all jobs, those of the host's pool first, since they may submit to other pools."""
    with _LOCK:
        pools = sorted(_ALL, key=lambda workers: workers.name != HOST)
    for workers in pools:
        workers.close()


@in_child
def _reset_in_child() -> None:
    """Reset the pools in a forked child, which has none of its parent's other threads."""
    _HERE.workers = None
    for workers in _ALL:
        workers._reset()


atexit.register(_finish)


class Places:
    """A place for each run that may be submitted. Unlike a semaphore, it may be used by a signal
    handler that interrupts its use, since all operations are atomic. ``SimpleQueue.get`` is atomic
    too, but in Python 3.11 it waits for ever if its timeout ends when it is woken for an item that
    another thread has taken."""

    def __init__(self, count: int) -> None:
        self._count = count
        self.forked()

    def forked(self) -> None:
        """Return all places in a forked child, which has none of its parent's runs."""
        self._free = deque(repeat(None, self._count))
        self._was_given = threading.Lock()  # released when there is a place for waiting threads

    def take(self, *, block: bool, timeout: float | None) -> bool:
        """Take a place, if necessary after waiting for one. Return whether there was one."""
        end = math.inf if timeout is None else monotonic() + timeout
        while not self._took():
            rest = end - monotonic()
            if not block or rest <= 0:
                return False
            self._was_given.acquire(timeout=min(rest, WAKE_S))
        if self._free:  # two places may have been returned before one thread was woken
            self._wake()
        return True

    def _took(self) -> bool:
        with suppress(IndexError):
            self._free.pop()
            return True
        return False

    def give(self) -> None:
        """Return a place."""
        self._free.append(None)
        self._wake()

    def _wake(self) -> None:
        with suppress(RuntimeError):  # the lock is already released
            self._was_given.release()

    @property
    def taken(self) -> int:
        """The number of places that are taken."""
        return self._count - len(self._free)

    @property
    def all_taken(self) -> bool:
        return not self._free
