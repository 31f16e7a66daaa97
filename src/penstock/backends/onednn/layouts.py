"""Shapes and strides of tensors as primitives see them."""

from __future__ import annotations

from collections.abc import Sequence

from penstock.backends.onednn.library import UNIMPLEMENTED, DnnlError
from penstock.core.types import FLOAT32
from penstock.ir.layout import channels_last, packed_strides

ITEM = FLOAT32.itemsize


def canonical_strides(
    dims: Sequence[int], strides: Sequence[int], order: Sequence[int] = (), itemsize: int = ITEM
) -> tuple[int, ...]:
    """``strides`` with those of dims of 1, which mean nothing, as in a layout that primitives know:
    that of ``order``, or of dims in their own, or channels last. Without change if the tensor has
    none of these. ``order`` may be channels last of another number of dims."""
    rank = len(dims)
    last = channels_last(rank)
    if len(order) != rank:
        order = last if order and order == channels_last(len(order)) else ()
    for candidate in (order, (), last):
        packed = packed_strides(dims, itemsize, candidate)
        pairs = zip(dims, strides, packed, strict=True)
        if packed == strides or False not in [a == b for n, a, b in pairs if n > 1]:
            return packed
    return tuple(strides)


def padded(dims: Sequence[int], rank: int) -> tuple[int, ...]:
    """``dims`` with leading dims of 1 up to ``rank``."""
    return (1,) * (rank - len(dims)) + tuple(dims)


def broadcasts(dims: Sequence[int], result: Sequence[int]) -> bool:
    """Whether ``dims`` broadcast to ``result``."""
    if len(dims) > len(result):
        return False
    return all(a in (1, b) for a, b in zip(padded(dims, len(result)), result, strict=True))


def with_leading_strides(strides: Sequence[int], rank: int) -> tuple[int, ...]:
    """``strides`` with those of leading dims of 1 up to ``rank``."""
    return (max(strides, default=ITEM),) * (rank - len(strides)) + tuple(strides)


def regrouped_strides(
    dims: Sequence[int], strides: Sequence[int], target: Sequence[int], item: int = ITEM
) -> tuple[int, ...]:
    """The strides of the same memory viewed with the dims ``target``: dims joined, or dims of 1
    added. Raises ``DnnlError`` (unimplemented) if no strides express the view."""
    if tuple(dims) == tuple(target):
        return tuple(strides)
    # Dims above 1 with their strides, to be joined where they are adjacent in memory.
    rest = [(n, step) for n, step in zip(dims, strides, strict=True) if n != 1]
    joined: list[int] = []
    for n in target:
        size, step = 1, -1  # for a dim of 1
        while size < n and rest:
            m, step = rest.pop(0)
            size *= m
            if size < n and (not rest or step != rest[0][0] * rest[0][1]):
                raise DnnlError(UNIMPLEMENTED)
        if size != n:
            raise DnnlError(UNIMPLEMENTED)
        joined.append(step)
    # A dim of 1 gets the stride that it would have if there were no gaps.
    step = item
    for i in reversed(range(len(joined))):
        if joined[i] < 0:
            joined[i] = step
        step = joined[i] * target[i]
    return tuple(joined)
