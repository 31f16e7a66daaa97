"""The cores on which threads run.

Linux may leave two threads on one core for seconds while another is idle, and may wake a thread on
the core of one that computes. Nothing here stays bound: a thread is sent to other cores, and then
allowed on all of them again.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Set
from contextlib import suppress
from functools import cache


def core_of_thread() -> int:
    """The core on which the calling thread runs, -1 if the system does not tell."""
    return _current()()


def allow(thread: int, cores: Set[int]) -> None:
    """Let a thread run on ``cores`` only; it goes there at once. ``thread`` is the number that the
    system has given it, 0 the calling one. Where that is not possible, nothing changes."""
    with suppress(AttributeError, OSError):
        os.sched_setaffinity(thread, cores)


@cache
def _current() -> Callable[[], int]:
    import ctypes

    try:
        # With the interpreter's lock held: the call takes 50 ns.
        function: Callable[[], int] = ctypes.PyDLL(None).sched_getcpu
    except (AttributeError, OSError, TypeError):
        return lambda: -1
    return function
