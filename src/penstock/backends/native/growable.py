"""Growable buffers (``host/c/growable.c``) for caches that kernels return: memory with spare
capacity after the array, so that the next call can append in place."""

from __future__ import annotations

import math
from weakref import WeakValueDictionary

import numpy as np

from penstock.host.current_run import BudgetError, keep, reserve


class GrowableBuffers:
    """The growable buffers of one kernel. A call allocates one, charged to the current run's memory
    budget: like ``past``, but with ``most`` rows along an axis or, if the budget does not allow
    that, ``least``. Raises ``BudgetError`` if it allows neither. A buffer lives as long as any
    array in it, which callers may hold longer than the session."""

    def __init__(self) -> None:
        self._live: WeakValueDictionary[int, np.ndarray] = WeakValueDictionary()

    def __call__(self, past: np.ndarray, axis: int, most: int, least: int) -> np.ndarray:
        dims = [*past.shape[:axis], most, *past.shape[axis + 1 :]]
        try:
            reserve(math.prod(dims) * past.itemsize)
        except BudgetError:
            dims[axis] = least
            reserve(math.prod(dims) * past.itemsize)
        memory = keep(np.empty(dims, past.dtype))
        self._live[id(memory)] = memory
        return memory

    def nbytes(self) -> int:
        """Bytes of the live buffers."""
        # A snapshot of references, as other threads may add buffers.
        live = [reference() for reference in self._live.valuerefs()]
        return sum([memory.nbytes for memory in live if memory is not None])
