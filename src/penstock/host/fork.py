"""What a forked child must make anew: it has its parent's memory, but none of its other threads.

A lock that one of them held stays locked there, and what it was about to give back never comes.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable
from typing import Protocol


class Forkable(Protocol):
    """Something with locks, or counts of what threads hold."""

    def forked(self) -> None:
        """Become as if no thread but the calling one had ever been."""
        ...


def in_child(function: Callable[[], None]) -> Callable[[], None]:
    """Have ``function`` called in every child; a decorator."""
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=function)
    return function


def renewed(each: Forkable) -> None:
    """Have ``each.forked()`` called in every child, as long as somebody holds it."""
    _EACH.add(each)


_EACH: weakref.WeakSet[Forkable] = weakref.WeakSet()


@in_child
def _renew() -> None:
    for each in list(_EACH):
        each.forked()
