"""Memory of the caches that kernels return: rooms (``c/rooms.c``), larger than what they show."""

from __future__ import annotations

import math
from weakref import WeakValueDictionary

import numpy as np

from penstock.host.current_run import BudgetError, keep, reserve


class Rooms:
    """The rooms of one kernel. A call allocates one, all of which is memory of the current run:
    with the dims ``most`` or, where the run has not as much left, ``least``. Raises ``BudgetError``
    if it has not even that. A room lives as long as an array in it, which callers may hold longer
    than the session."""

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
        """Bytes of the rooms that live."""
        return sum([memory.nbytes for memory in self._live.values()])
