"""The one core budget of the process, and the threads that serve it."""

from __future__ import annotations

import atexit
import math
import os
import sys
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from functools import cache, partial
from pathlib import Path
from queue import SimpleQueue
from typing import ParamSpec, TypeVar

from penstock.host.fork import in_child

P = ParamSpec("P")
T = TypeVar("T")

Job = Callable[[], object]

HOST = "host"


@cache
def core_budget() -> int:
    """How many cores this process may keep busy.

    The least of its affinity, its cgroup's CPU quota and ``OMP_NUM_THREADS``.
    """
    try:
        cores = len(os.sched_getaffinity(0))
    except AttributeError:
        cores = os.cpu_count() or 1
    for limit in (_quota(), _omp()):
        if limit is not None:
            cores = min(cores, max(1, limit))
    return cores


def _quota() -> int | None:
    """Whole cores of the cgroup's quota, rounded up (cgroup v2, then v1)."""
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        return None if quota == "max" else math.ceil(int(quota) / int(period))
    except (OSError, ValueError):
        pass
    try:
        folder = Path("/sys/fs/cgroup/cpu")
        micros = int((folder / "cpu.cfs_quota_us").read_text())
        period_us = int((folder / "cpu.cfs_period_us").read_text())
        return math.ceil(micros / period_us) if micros > 0 else None
    except (OSError, ValueError):
        return None


def _omp() -> int | None:
    first = os.environ.get("OMP_NUM_THREADS", "").split(",")[0].strip()
    return int(first) if first.isdigit() and int(first) > 0 else None


class Workers:
    """Up to ``size`` threads that run jobs, each started when there is a job and none is idle.

    A job is a function without arguments, and sees to its own results and errors: one that raises
    is reported as ``threading.excepthook`` reports a thread, and costs the worker nothing. Idle
    workers block, and stay until ``close`` or the end of the process, which waits for jobs that run
    or are queued. A forked child has the pool without its threads and its queued jobs.

    Instead of ``concurrent.futures.ThreadPoolExecutor``, because of ``offer``: who looks for help
    learns at once that nobody is idle, and leaves no stale job behind. Nor does it make a future
    for a job that needs none. Methods may be called from any thread, jobs included.
    """

    def __init__(self, name: str, size: int) -> None:
        if size < 1:
            raise ValueError(f"a pool of {size} threads cannot run anything")
        self.name = name
        self.size = size
        self._reset()
        with _LOCK:
            _ALL.add(self)

    def _reset(self) -> None:
        self._lock = threading.Lock()
        self._jobs: SimpleQueue[Job | None] = SimpleQueue()
        self._threads: list[threading.Thread] = []
        # Idle workers less queued jobs. Counted here, because neither the queue nor the threads
        # can be asked whether somebody is about to take the job that was queued last.
        self._free = 0
        self._closing = False

    @property
    def threads(self) -> int:
        """How many threads were started."""
        return len(self._threads)

    def has(self, thread: threading.Thread) -> bool:
        """Whether a thread is one of these."""
        return thread in self._threads

    def submit(self, job: Job) -> None:
        """Queue ``job``; jobs start in the order in which they were queued.

        Raises:
            RuntimeError: the pool is closed, or the process ends; the system has not even one
                thread for this pool.
        """
        with self._lock:
            if self._refuses():
                raise RuntimeError(f"the pool {self.name!r} is closed and takes no more jobs")
            if self._free <= 0 and not self._start() and not self._threads:
                raise RuntimeError(f"the system has no thread for the pool {self.name!r}")
            self._free -= 1
            self._jobs.put(job)

    def offer(self, job: Job) -> bool:
        """Whether a worker was idle, or could be started, and so has ``job``; never queues it."""
        with self._lock:
            if self._refuses() or (self._free <= 0 and not self._start()):
                return False
            self._free -= 1
            self._jobs.put(job)
            return True

    def grow(self, size: int) -> None:
        """Allow ``size`` threads, if that is more than now; queued jobs get theirs at once."""
        with self._lock:
            self.size = max(self.size, size)
            while self._free < 0 and self._start():
                pass

    def close(self) -> None:
        """End all threads, after the jobs that run or are queued, and those that these queue.

        Jobs that others submit from now on are refused. Not to be called by a job of the pool,
        which would wait for itself.
        """
        with self._lock:
            if not self._closing:
                self._closing = True
                self._end_if_idle()
            threads = list(self._threads)
        for thread in threads:
            thread.join()

    # All that follows runs with the lock held, but for _work.

    def _refuses(self) -> bool:
        if not self._closing:
            return False
        # Until the last is idle, what a job needs of its own pool is part of that job.
        return self._free == len(self._threads) or threading.current_thread() not in self._threads

    def _start(self) -> bool:
        if len(self._threads) >= self.size:
            return False
        thread = threading.Thread(
            target=self._work,
            args=(self._jobs,),
            name=f"penstock-{self.name}-{len(self._threads)}",
            # The interpreter waits for other threads before it calls what atexit has, and would
            # wait for idle workers for good.
            daemon=True,
        )
        try:
            thread.start()
        except RuntimeError:  # the system has no more threads, or the interpreter is at its end
            return False
        self._threads.append(thread)
        self._free += 1
        return True

    def _end_if_idle(self) -> None:
        if self._free == len(self._threads):
            for _ in self._threads:
                self._jobs.put(None)

    def _work(self, jobs: SimpleQueue[Job | None]) -> None:
        while (job := jobs.get()) is not None:
            try:
                job()
            except BaseException:
                report_thread_exception()
            del job  # nor what it holds: the next one may come in an hour, or never
            if jobs is not self._jobs:
                return  # the job forked, and this is the child, to which the queue means nothing
            with self._lock:
                self._free += 1
                if self._closing:
                    self._end_if_idle()


def report_thread_exception() -> None:
    """Report the exception at hand, as that of a thread. A hook that fails is not heard of: it must
    not take a worker with it."""
    with suppress(BaseException):
        kind, error, trace = sys.exc_info()
        assert kind is not None
        thread = threading.current_thread()
        threading.excepthook(threading.ExceptHookArgs((kind, error, trace, thread)))


_LOCK = threading.RLock()
_ALL: weakref.WeakSet[Workers] = weakref.WeakSet()
_POOLS: dict[str, Workers] = {}


def pool(name: str = HOST, size: int | None = None) -> Workers:
    """The pool of that name, one for the process, made when it is first asked for.

    ``size`` is the number of its threads, as many as the core budget if not given: so many keep
    the cores busy. Backends whose threads wait for a device may ask for more. A pool that is there
    grows to the largest size that was asked for, and never shrinks.
    """
    size = core_budget() if size is None else size
    with _LOCK:
        found = _POOLS.get(name)
        if found is None:
            found = _POOLS[name] = Workers(name, size)
    found.grow(size)
    return found


def run_on(
    workers: Workers, function: Callable[P, T], /, *arguments: P.args, **options: P.kwargs
) -> Future[T]:
    """The future of ``function(*arguments, **options)``, submitted to ``workers``."""
    future: Future[T] = Future()
    workers.submit(partial(fulfil, future, partial(function, *arguments, **options)))
    return future


def fulfil(future: Future[T], function: Callable[[], T]) -> None:
    """Give ``future`` what ``function`` returns or raises, unless it was cancelled."""
    try:
        if future.set_running_or_notify_cancel():
            try:
                result = function()
            except BaseException as error:
                future.set_exception(error)
            else:
                future.set_result(result)
    finally:
        # An error holds this frame, and must not find itself again in it: such a circle, with all
        # that a failed run holds, would stay until the next collection of garbage.
        del future


def _finish() -> None:
    """Let what was submitted come to its end. What runs for a session may still hand work to
    pools of backends, and so comes first."""
    with _LOCK:
        pools = sorted(_ALL, key=lambda workers: workers.name != HOST)
    for workers in pools:
        workers.close()


@in_child
def _forget() -> None:
    """After a fork the child has none of its parent's threads."""
    global _LOCK
    _LOCK = threading.RLock()
    for workers in _ALL:
        workers._reset()


atexit.register(_finish)
