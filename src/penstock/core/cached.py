"""Properties that are computed once."""

from __future__ import annotations

import functools
from typing import TypeVar

T = TypeVar("T")


class cached_property(functools.cached_property[T]):  # noqa: N801, TID251
    """``functools.cached_property`` without the lock that it has in Python 3.11, for all objects of
    a class: a signal handler that interrupts a thread there, and waits for one that waits for it,
    would wait without end. Several threads may compute a value; all get the one stored first."""

    def __get__(self, instance: object, owner: type | None = None) -> T:  # type: ignore[override]
        if instance is None:
            return self  # type: ignore[return-value]
        assert self.attrname is not None
        # Atomic.
        value: T = instance.__dict__.setdefault(self.attrname, self.func(instance))
        return value
