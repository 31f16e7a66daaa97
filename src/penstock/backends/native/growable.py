"""Growable buffers (``host/c/growable.c``) for the caches that kernels return: memory that is
larger than the array in it, so that the next call can append in place."""

from __future__ import annotations

import math
from weakref import WeakValueDictionary

import numpy as np

from penstock.host.current_run import BudgetError, keep, reserve


class GrowableBuffers:
    """The growable buffers of one kernel. A call allocates one, charged to the current run: with
    the dims ``most`` or, if the budget of the run does not allow that, ``least``. Raises
    ``BudgetError`` if it does not allow either. A buffer lives as long as an array in it, which
    callers may hold longer than the session."""

    def __init__(self) -> None:
        self._live: WeakValueDictionary[int, np.ndarray] = WeakValueDictionary()

    def __call__(
        self, dtype: np.dtype, most: tuple[int, ...], least: tuple[int, ...]
    ) -> np.ndarray:
        try:
            reserve(math.prod(most) * dtype.itemsize)
        except BudgetError:
            most = least
            reserve(math.prod(least) * dtype.itemsize)
        memory = keep(np.empty(most, dtype))
        self._live[id(memory)] = memory
        return memory

    def nbytes(self) -> int:
        """Bytes of the buffers that are alive."""
        # References do not change while other threads add buffers.
        live = [reference() for reference in self._live.valuerefs()]
        return sum([memory.nbytes for memory in live if memory is not None])
