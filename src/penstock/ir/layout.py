"""Tensors in memory: addresses, and layouts, which are orders of dims. Strides are in bytes."""

from __future__ import annotations

import math
from functools import lru_cache
from typing import TypeGuard

import numpy as np

from penstock.core.records import dataclass
from penstock.core.types import STRING, TensorType, Type
from penstock.host.malloc import weight_bytes

_PLAIN = frozenset([int])
ALIGNMENT = 64
"""bytes: a cache line, and the widest vector register"""


def address(array: np.ndarray) -> int:
    """Return the address of the first element of ``array``."""
    start = array.__array_interface__["data"][0]
    assert isinstance(start, int)
    return start


def unbroadcast(array: np.ndarray) -> np.ndarray:
    """Return an array without the axes along which it is broadcast."""
    if 0 not in array.strides:
        return array
    return array[tuple([slice(None) if stride else slice(1) for stride in array.strides])]


def line_aligned(array: np.ndarray) -> np.ndarray:
    """Return an array whose vectors never span two cache lines, which processors read half as fast:
    the given array, or a copy."""
    if array.flags.c_contiguous and not address(array) % ALIGNMENT:
        return array
    copy = new_lines(array.shape, array.dtype)
    copy[...] = array
    return copy


def new_lines(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """Return an uninitialized array with the alignment of ``line_aligned``."""
    nbytes = math.prod(shape) * dtype.itemsize
    return weight_bytes(nbytes).view(dtype).reshape(shape)


def is_plannable(type_: Type) -> TypeGuard[TensorType]:
    """Whether memory for a value of this type can be planned before the run."""
    return isinstance(type_, TensorType) and type_.static and type_.dtype != STRING


@dataclass(frozen=True, slots=True, eq=False)
class RuntimeArray:
    """A placeholder for an array that is known only during the run, when a kernel is bound. It may
    have any strides; the expected ones are given if its dims are not in memory in C order.
    """

    strides: tuple[int, ...] = ()
    turned: tuple[int, ...] = ()
    """the axes by which the array is yet to be transposed, empty for none; ``strides`` cannot
    express this, since those of dims of 1 are ambiguous"""

    @property
    def order(self) -> tuple[int, ...] | None:
        """The dims in the order that is expected in memory, or None for C order."""
        return tuple(sorted(range(len(self.strides)), key=lambda i: -self.strides[i])) or None


@lru_cache(maxsize=1024)  # the tensors of a model are of few shapes
def packed_strides(
    dims: tuple[int, ...], itemsize: int, order: tuple[int, ...] = ()
) -> tuple[int, ...]:
    """Return the strides of a tensor without gaps, with its dims in memory in ``order``, outermost
    first, by default in C order.

    >>> packed_strides((2, 3, 5, 7), 4), packed_strides((2, 3, 5, 7), 4, channels_last(4))
    ((420, 140, 28, 4), (420, 4, 84, 12))
    """
    strides, step = [0] * len(dims), itemsize
    for axis in reversed(order or range(len(dims))):
        strides[axis] = step
        step *= dims[axis]
    return tuple(strides)


def strides_of(
    dims: tuple[int, ...], itemsize: int, order: tuple[int, ...] = ()
) -> tuple[int, ...]:
    """Return ``packed_strides``, also of traced dims (``core/traced.py``), which are no keys."""
    strides = packed_strides if _PLAIN.issuperset(map(type, dims)) else packed_strides.__wrapped__
    return strides(dims, itemsize, order)


def channels_last(rank: int) -> tuple[int, ...]:
    """Return the order of dims with axis 1, the channels, innermost (NHWC); empty below 3 dims."""
    return (0, *range(2, rank), 1) if rank > 2 else ()


def order_in_memory(x: object) -> tuple[int, ...]:
    """Return the dims of an array in the order in which they are in memory, if they are dense in
    another order than C's; otherwise ()."""
    if not isinstance(x, np.ndarray) or x.flags.c_contiguous or not x.flags.aligned or not x.size:
        return ()
    last = channels_last(x.ndim)
    if last and x.transpose(last).flags.c_contiguous and x.dtype.isnative:  # most images
        return last
    order = tuple(sorted(range(x.ndim), key=lambda i: (-x.strides[i], x.shape[i])))
    dense = packed_strides(x.shape, x.itemsize, order) == x.strides
    return order if dense and x.dtype.isnative else ()
