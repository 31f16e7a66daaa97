"""Checkpoints: points at which long work on a thread, such as a kernel or a compilation, checks
whether it must stop, and reports its progress.

::

    with cancelled_by(StopCondition(timeout=2.0, cancel=token)):
        for node in with_checkpoints(nodes):  # raises DeadlineExceeded or Cancelled
            ...

The stop condition belongs to the thread, so that functions need not pass it on. Between two
checkpoints there are at most some hundred nodes, or one call of a library.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from itertools import chain, islice
from typing import Any, Protocol, TypeVar

T = TypeVar("T")

Progress = Callable[[str, int, int], object]
"""called with the progress of long work: the next step, the number of steps done, and of all"""

CHECK_EVERY = 128
"""nodes between two checkpoints of a walk; no step of compiling takes over 0.2 ms per node"""

# Time constants that no option sets, in seconds.

LOOK_S = 0.02
"""between two checkpoints while a thread waits for a lock, or for memory of another run"""
WAKE_S = 0.5
"""the interval at which a waiting thread checks for signals: Python handles a signal that arrives
just before the thread blocks only when the thread next runs Python code"""
EVENT_S = (2e-5, 1e-3)
"""the interval between two polls of a device's event: the first, and the longest"""
UNCHECKED_S = 1.0
"""the largest estimated time of one of our kernels without a checkpoint; NumPy's may take longer"""
SHORT_RUN_S = 8e-3
"""A shorter run does not wait for others: handing over a core takes up to 0.3 ms, since a thread
must wake up, and each run keeps its core only for a few ms anyway."""
UNSEEN_RUN_S = 1e-3
"""A shorter run does not even register with other runs."""


class Work(Protocol):
    """The work of a thread: a run, or compiling. ``budget`` counts its allocations if their size is
    not known in advance."""

    budget: Any

    @property
    def limited(self) -> bool:
        """Whether anything can ever stop it."""

    def check(self) -> None:
        """Raise an error if the work must stop."""


class _Thread(threading.local):
    run: Work | None = None
    progress: Progress | None = None


THREAD = _Thread()
"""``run``: the run, or other work, that the calling thread works for, or None. ``progress``: the
callback for its progress, or None."""


def checkpoint() -> None:
    """Raise the pending stop error of this thread's work, if any."""
    run = THREAD.run
    if run is not None:
        run.check()


def report_progress(step: str, done: int, total: int) -> None:
    """Report the progress of this thread's work. The callback may raise to stop it."""
    progress = THREAD.progress
    if progress is not None:
        progress(step, done, total)


class reporting:  # noqa: N801
    """Report the progress of this thread's work in the block to ``progress``, if given."""

    def __init__(self, progress: Progress | None) -> None:
        self._progress = progress

    def __enter__(self) -> None:
        self._outer = THREAD.progress
        THREAD.progress = self._outer if self._progress is None else self._progress

    def __exit__(self, *error: object) -> None:
        THREAD.progress = self._outer


class cancelled_by:  # noqa: N801
    """Let checkpoints on this thread, and the end of the block, obey ``stop``. If nothing limits
    ``stop``, they obey the current condition as before."""

    def __init__(self, stop: Work) -> None:
        self._stop = stop

    def __enter__(self) -> None:
        self._outer = THREAD.run
        if self._stop.limited:
            THREAD.run = self._stop

    def __exit__(self, kind: object, *error: object) -> None:
        try:
            if kind is None:
                self._stop.check()
        finally:
            THREAD.run = self._outer


_COLLECTIONS: tuple[type, ...] = (list, tuple, dict, type({}.items()))


def with_checkpoints(items: Iterable[T]) -> Iterator[T]:
    """Yield ``items``, which must not change meanwhile, with a checkpoint every ``CHECK_EVERY``."""
    collection: Any = items
    if isinstance(items, _COLLECTIONS) and len(collection) <= CHECK_EVERY:  # most models
        if (run := THREAD.run) is not None:  # inlined ``checkpoint``
            run.check()
        return iter([*items])
    return chain.from_iterable(_batches(items))


def _batches(items: Iterable[T]) -> Iterator[list[T]]:
    rest = iter(items)
    while batch := list(islice(rest, CHECK_EVERY)):
        if (run := THREAD.run) is not None:  # inlined ``checkpoint``
            run.check()
        yield batch


def await_release(lock: threading.Lock) -> None:
    """Acquire a lock that another thread releases to wake this one. Signal handlers may run during
    the wait."""
    while not lock.acquire(timeout=WAKE_S):
        pass


@contextmanager
def hold_lock(lock: threading.RLock) -> Iterator[None]:
    """Hold a lock in the block, with checkpoints while another thread has it."""
    while not lock.acquire(timeout=LOOK_S):
        checkpoint()
    try:
        yield
    finally:
        lock.release()
