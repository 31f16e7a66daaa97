"""State that a forked child must reset: it has its parent's memory, but only the calling thread.

A lock that another thread of the parent held stays locked in the child, and resources that such a
thread was using are never returned.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable
from typing import Protocol

from penstock.core.errors import PenstockError


class Forkable(Protocol):
    """An object with locks, or with counts of resources that threads hold."""

    def forked(self) -> None:
        """Reset the state to that of a process whose only thread is the calling one."""
        ...


def in_child(function: Callable[[], None]) -> Callable[[], None]:
    """Call ``function`` in every forked child; a decorator."""
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=function)
    return function


def renewed(state: Forkable) -> None:
    """Call ``state.forked()`` in every forked child, as long as ``state`` is alive."""
    _STATES.add(state)


_STATES: weakref.WeakSet[Forkable] = weakref.WeakSet()


@in_child
def _renew() -> None:
    for state in list(_STATES):
        state.forked()


# Locks that runs of many threads take for a moment, and calls that must not wait for these.


_LOCKS: list[weakref.ref[threading.RLock]] = []


def shared_lock() -> threading.RLock:
    """Return a lock that a signal handler or finalizer may find held by the thread it interrupts,
    while other threads need it: see ``refuse_reentry``. It is free in a forked child."""
    lock = threading.RLock()
    # Both calls are atomic, since threads may create and drop locks at the same time.
    _LOCKS.append(weakref.ref(lock, _LOCKS.remove))
    return lock


def refuse_reentry() -> None:
    """Raise ``PenstockError`` if the calling thread holds one of these locks: the caller has
    interrupted it, and would wait for a thread that waits for that lock."""
    for known in tuple(_LOCKS):
        lock = known()
        if lock is not None and lock._is_owned():  # type: ignore[attr-defined]
            raise PenstockError(
                "a session is called by a signal handler or a finalizer while this thread hands "
                "work or memory to others; call it again when that has returned"
            )


@in_child
def _free_all() -> None:
    for known in _LOCKS:
        lock = known()
        if lock is not None and not lock._is_owned():  # type: ignore[attr-defined]
            lock._at_fork_reinit()  # type: ignore[attr-defined]
