"""Tensors in memory: addresses, and layouts, which are orders of dims. Strides are in bytes."""

from __future__ import annotations

import math
from functools import lru_cache
from typing import TypeGuard

import numpy as np

from penstock.core.records import dataclass
from penstock.core.types import STRING, TensorType, Type
from penstock.host.malloc import weight_bytes

ALIGNMENT = 64
"""bytes: a cache line, and the widest vector register"""


def address(array: np.ndarray) -> int:
    """The address of the first element of ``array``."""
    start = array.__array_interface__["data"][0]
    assert isinstance(start, int)
    return start


def unbroadcast(array: np.ndarray) -> np.ndarray:
    """An array without the axes along which it is broadcast."""
    if 0 not in array.strides:
        return array
    return array[tuple([slice(None) if stride else slice(1) for stride in array.strides])]


def line_aligned(array: np.ndarray) -> np.ndarray:
    """An array whose vectors never lie in two lines of the cache, where processors read them half
    as fast: the given one, or a copy."""
    if array.flags.c_contiguous and not address(array) % ALIGNMENT:
        return array
    copy = new_lines(array.shape, array.dtype)
    copy[...] = array
    return copy


def new_lines(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """An array as ``line_aligned`` gives, to be written."""
    nbytes = math.prod(shape) * dtype.itemsize
    return weight_bytes(nbytes).view(dtype).reshape(shape)


def is_plannable(type_: Type) -> TypeGuard[TensorType]:
    """Whether memory for a value of this type can be set aside before the run."""
    return isinstance(type_, TensorType) and type_.static and type_.dtype != STRING


@dataclass(frozen=True, slots=True, eq=False)
class RuntimeArray:
    """Stands for an array that is given during the run, when a kernel is bound. It may have any
    strides; the ones that are expected are given if its dims are not in memory in their own order.
    """

    strides: tuple[int, ...] = ()
    turned: tuple[int, ...] = ()
    """the axes by which what is given is still to be transposed, empty if it is not; ``strides`` do
    not tell them, since dims of 1 may have those of others"""

    @property
    def order(self) -> tuple[int, ...] | None:
        """The dims in the order that is expected in memory, None if that is their own."""
        return tuple(sorted(range(len(self.strides)), key=lambda i: -self.strides[i])) or None


@lru_cache(maxsize=1024)  # the tensors of a model are of few shapes
def packed_strides(
    dims: tuple[int, ...], itemsize: int, order: tuple[int, ...] = ()
) -> tuple[int, ...]:
    """The strides of a tensor without gaps, its dims in memory in ``order``, the outermost first;
    by default in their own.

    >>> packed_strides((2, 3, 5, 7), 4), packed_strides((2, 3, 5, 7), 4, channels_last(4))
    ((420, 140, 28, 4), (420, 4, 84, 12))
    """
    strides, step = [0] * len(dims), itemsize
    for axis in reversed(order or range(len(dims))):
        strides[axis] = step
        step *= dims[axis]
    return tuple(strides)


def channels_last(rank: int) -> tuple[int, ...]:
    """The order of dims with axis 1, the channels, innermost (NHWC); empty below 3 dims."""
    return (0, *range(2, rank), 1) if rank > 2 else ()
