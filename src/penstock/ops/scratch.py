"""Scratch memory of kernels: many small arrays carved out of one workspace."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

_ALIGN = 64


class Scratch:
    """Hands out uninitialised arrays, from ``workspace`` or, without one, newly allocated.

    A kernel asks for the same arrays in both of its forms, so that ``workspace`` is optional.
    """

    __slots__ = ("_offset", "_workspace")

    def __init__(self, workspace: np.ndarray | None = None) -> None:
        self._workspace = workspace
        self._offset = 0

    def take(self, shape: Sequence[int], dtype: np.dtype) -> np.ndarray:
        """A C-contiguous array, aligned to 64 bytes if the workspace is."""
        if self._workspace is None:
            return np.empty(shape, dtype)
        array: np.ndarray = np.ndarray(shape, dtype, self._workspace, self._offset)
        self._offset += _aligned(array.nbytes)
        return array


class Counted(Scratch):
    """Counts the bytes that a kernel takes, without any array behind what it hands out."""

    @property
    def nbytes(self) -> int:
        return self._offset

    def take(self, shape: Sequence[int], dtype: np.dtype) -> np.ndarray:
        self._offset += _aligned(math.prod(shape) * dtype.itemsize)
        # Strides of zero: any shape of an array that takes one element of memory.
        return np.broadcast_to(np.empty((), dtype), tuple(shape))


def _aligned(nbytes: int) -> int:
    return -(-nbytes // _ALIGN) * _ALIGN
