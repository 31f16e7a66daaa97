"""The run that the calling thread works for: kernels check it for stops and its memory budget.

An executor calls kernels within ``working_for``, on each thread of a run that has a
deadline, a token or a budget. A kernel that takes long calls ``checkpoint`` at intervals. A kernel
whose memory depends on data calls ``reserve`` before it allocates, and ``keep`` for what it stores.
Outside of such a run these functions do nothing.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from typing import TypeVar

import numpy as np

from penstock.core.checkpoints import THREAD, Work

T = TypeVar("T")


class BudgetError(MemoryError):
    """A run asked for more memory than its budget has left; an executor names the node."""


def working_for(run: Work | None, function: Callable[..., T], *arguments: object) -> T:
    """Call ``function`` for a run, or for none."""
    outer, THREAD.run = THREAD.run, run
    try:
        return function(*arguments)
    finally:
        THREAD.run = outer


def reserve(nbytes: int) -> None:
    """Raise ``BudgetError`` unless the current run may allocate ``nbytes`` more."""
    run = THREAD.run
    if run is not None and run.budget is not None:
        run.budget.reserve(nbytes)


def copy_within_budget(
    array: np.ndarray, copy: Callable[[np.ndarray], np.ndarray] = np.ndarray.copy
) -> np.ndarray:
    """Return a copy of ``array``, by ``copy``, that counts as memory of the current run."""
    reserve(array.nbytes)
    return keep(copy(array))


def keep(value: T, nbytes: int = -1) -> T:
    """Return ``value``. If it is an array, count it for the current run until it is freed."""
    run = THREAD.run
    if run is not None and run.budget is not None and isinstance(value, np.ndarray):
        run.budget.keep(value, nbytes)
    return value


class Budget:
    """The bytes that one run may allocate: ``limit``, of which ``taken`` are known in advance.
    ``name`` stands for the limit in errors.

    Arrays count from ``keep`` until they are freed, which is not noticed at once. ``left`` assumes
    that none has been freed since the last scan. Only if that is not enough, or after as many calls
    of ``keep`` as there were arrays, a scan counts the arrays that are still alive.

        >>> budget = Budget(1000)
        >>> first = np.zeros(50)
        >>> budget.keep(first, 400)
        >>> budget.left
        600
        >>> del first
        >>> budget.reserve(1000)
        >>> budget.left
        1000
    """

    __slots__ = ("_arrays", "_lock", "_most", "_taken", "left", "limit", "max_dims", "name")

    def __init__(
        self, limit: int, taken: int = 0, max_dims: int = 64, name: str = "Limits.max_bytes"
    ) -> None:
        self.name = name
        self.limit = limit
        self.max_dims = max_dims
        self.left = limit - taken
        self._taken = taken
        self._arrays: dict[int, tuple[weakref.ref[np.ndarray], int]] = {}
        self._most = _FEW_ARRAYS
        self._lock = threading.Lock()

    def reserve(self, nbytes: int) -> None:
        """Raise ``BudgetError`` unless ``nbytes`` more are left. Count nothing."""
        if nbytes > self.left:
            self._look()
            if nbytes > self.left:
                raise BudgetError(
                    f"the run needs {nbytes} bytes more, but of {self.name} = {self.limit} "
                    f"only {max(self.left, 0)} are left; raise the limit if you trust the model "
                    "and have the memory"
                )

    def keep(self, array: np.ndarray, nbytes: int = -1) -> None:
        """Count ``array``, or the array whose view it is, until it is freed; as ``nbytes`` if it
        keeps more than its own elements alive. A ``base`` that says it was ``counted`` is not
        counted again."""
        # A view may be freed while the array that it shows lives on.
        while isinstance(array.base, np.ndarray):
            array = array.base
        if getattr(array.base, "counted", False):
            return
        if nbytes < 0:
            nbytes = array.nbytes + _ARRAY_BYTES
        # Without the lock: a count that is lost to another thread is corrected by the next scan.
        known = self._arrays.get(id(array))
        # The same array may be kept twice, and an id may be that of one that was freed.
        if known is None or known[0]() is not array:
            if nbytes > self.left:
                self.reserve(nbytes)
            # Programs, lists and frames drop values in many places, none of which informs the
            # run.
            self._arrays[id(array)] = weakref.ref(array), nbytes
            self.left -= nbytes
            if len(self._arrays) > self._most:
                self._look()

    def _look(self) -> None:
        """Forget the arrays that have been freed."""
        with self._lock:
            arrays, live = self._arrays, 0
            # A copy, made by one atomic call: other threads add arrays meanwhile.
            for key, entry in list(arrays.items()):
                if entry[0]() is not None:
                    live += entry[1]
                elif arrays.get(key) is entry:
                    del arrays[key]
            self._most = 2 * len(arrays) + _FEW_ARRAYS
            self.left = self.limit - self._taken - live


# The number of arrays up to which there are no scans.
_FEW_ARRAYS = 1000
# Size of an array besides its elements: the object, a reference to it, and an entry here.
_ARRAY_BYTES = 256
