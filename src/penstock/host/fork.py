"""State that a forked child must reset: it has its parent's memory, but only the calling thread.

A lock that another thread of the parent held stays locked in the child, and resources that such a
thread was using are never returned.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable
from typing import Protocol


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
