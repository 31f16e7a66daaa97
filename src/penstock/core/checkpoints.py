"""Checkpoints: points at which long work on a thread, such as a kernel or a compilation, checks
whether it must stop, and reports its progress.

::

    with cancelled_by(StopCondition(timeout=2.0, cancel=token)):
        for node in with_checkpoints(nodes):  # raises DeadlineExceeded or Cancelled
            ...

The stop condition belongs to the thread, so that functions need not pass it on. Work between two
checkpoints is at most some hundred nodes, or one call of a library.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from itertools import chain, islice
from typing import Any, Protocol, TypeVar

T = TypeVar("T")

Progress = Callable[[str, int, int], object]
"""Called with the progress of long work: the step that begins, the steps done, and all steps."""

CHECK_EVERY = 128
"""Nodes between two checkpoints of a walk; no step of compiling takes longer than 0.2 ms a node."""

# Times that no option sets, in seconds.

LOOK_S = 0.02
"""Between two checkpoints while a thread waits for a lock, or for memory of another run."""
WAKE_S = 0.5
"""After which a thread that waits for another looks for signals. Python handles one that comes just
before the thread blocks only when it next runs code of Python."""
EVENT_S = (2e-5, 1e-3)
"""Between two looks whether an event of a device has come: at first, and at most."""
UNCHECKED_S = 1.0
"""Largest estimated time of one of our kernels without a checkpoint; NumPy's may take as long."""
SHORT_RUN_S = 8e-3
"""A run that takes less does not wait for others: to hand a core over takes up to 0.3 ms, as a
thread must come awake, and each has its core for a few ms at a time anyway."""
UNSEEN_RUN_S = 1e-3
"""A run that takes less is not even told of others, nor they of it."""


class Work(Protocol):
    """The work of a thread: a run, or compiling. ``budget`` counts what it allocates, if that is
    not known before."""

    budget: Any

    @property
    def limited(self) -> bool:
        """Whether anything ever stops it."""

    def check(self) -> None:
        """Raise an error if it must stop."""


class _Thread(threading.local):
    run: Work | None = None
    progress: Progress | None = None


THREAD = _Thread()
"""``run``: the run that the calling thread works for, or other work, or None; ``progress``: what is
told how far it has come"""


def checkpoint() -> None:
    """Raise the pending stop error of this thread's work, if any."""
    run = THREAD.run
    if run is not None:
        run.check()


def report_progress(step: str, done: int, total: int) -> None:
    """Report the progress of this thread's work. The receiver may raise, to stop it."""
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


@contextmanager
def cancelled_by(stop: Work) -> Iterator[None]:
    """Let checkpoints on this thread, and the end of the block, obey ``stop``; if that is not
    limited, what they have obeyed so far."""
    outer = THREAD.run
    if stop.limited:
        THREAD.run = stop
    try:
        yield
        stop.check()
    finally:
        THREAD.run = outer


_COLLECTIONS: tuple[type, ...] = (list, tuple, dict, type({}.items()))


def with_checkpoints(items: Iterable[T]) -> Iterator[T]:
    """``items``, which must not change meanwhile, with a checkpoint before each ``CHECK_EVERY``."""
    collection: Any = items
    if isinstance(items, _COLLECTIONS) and len(collection) <= CHECK_EVERY:  # of most models all
        if (run := THREAD.run) is not None:  # as in ``checkpoint``
            run.check()
        return iter([*items])
    return chain.from_iterable(_batches(items))


def _batches(items: Iterable[T]) -> Iterator[list[T]]:
    rest = iter(items)
    while batch := list(islice(rest, CHECK_EVERY)):
        if (run := THREAD.run) is not None:  # as in ``checkpoint``
            run.check()
        yield batch


def await_release(lock: threading.Lock) -> None:
    """Acquire a lock that another thread releases when there is something to do, and that a signal
    handler may interrupt."""
    while not lock.acquire(timeout=WAKE_S):
        pass


@contextmanager
def hold_lock(lock: threading.RLock) -> Iterator[None]:
    """Hold a lock, with checkpoints while another thread has it."""
    while not lock.acquire(timeout=LOOK_S):
        checkpoint()
    try:
        yield
    finally:
        lock.release()
