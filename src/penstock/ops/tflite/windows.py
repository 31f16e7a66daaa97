"""Arrays spread out, reduced over windows, gathered and scattered, as StableHLO defines it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from penstock.core.types import ShapeError, TensorType, Type
from penstock.ir.op import Attrs, Consts, Types
from penstock.ops import registry
from penstock.ops.common import shape_rules as rules

array_operator = partial(registry.array_operator, domain=registry.TFLITE)


def _infer_spread(types: Types, attrs: Attrs, consts: Consts) -> Sequence[Type]:
    x, steps = rules.tensor(types, 0), rules.all_known(rules.ints(types, consts, 1))
    dims = None
    if x.shape is not None and steps is not None and len(steps) == len(x.shape):
        low, high = (attrs.get(name) or [0] * len(steps) for name in ("low", "high"))
        dims = tuple(
            max(((dim - 1) * step + 1 if dim else 0) + a + b, 0) if isinstance(dim, int) else None
            for dim, step, a, b in zip(x.shape, steps, low, high, strict=True)
        )
    return (TensorType(x.dtype, dims),)


@array_operator("Spread", infer=_infer_spread)
def spread(
    x: np.ndarray,
    steps: np.ndarray,
    value: np.ndarray,
    *,
    low: Sequence[int] = (),
    high: Sequence[int] = (),
) -> np.ndarray:
    """``x`` with its elements ``steps`` apart along each axis, ``value`` between them, and borders
    of ``low`` and ``high`` elements; negative ones cut elements off."""
    low, high = low or [0] * x.ndim, high or [0] * x.ndim
    if not steps.size == x.ndim == len(low) == len(high) or steps.min(initial=1) < 1:
        raise ShapeError(f"steps {steps.tolist()}, borders {low} and {high} for {x.shape}")
    inner = [(d - 1) * s + 1 if d else 0 for d, s in zip(x.shape, steps.tolist(), strict=True)]
    dims = [max(a, 0) + d + max(b, 0) for d, a, b in zip(inner, low, high, strict=True)]
    out = np.full(dims, value.item(), x.dtype)
    begins = [max(a, 0) for a in low]
    places = zip(begins, inner, steps.tolist(), strict=True)
    out[tuple(slice(begin, begin + d, step) for begin, d, step in places)] = x
    cuts = (
        slice(max(-a, 0), max(d - max(-b, 0), 0)) for d, a, b in zip(dims, low, high, strict=True)
    )
    return out[tuple(cuts)].copy()


_REDUCTIONS: dict[str, Any] = {
    "add": np.add,
    "multiply": np.multiply,
    "minimum": np.minimum,
    "maximum": np.maximum,
    "and": np.logical_and,
    "or": np.logical_or,
}


@array_operator("ReduceWindow", infer=lambda t, a, c: (TensorType(rules.tensor(t, 0).dtype),))
def reduce_window(
    x: np.ndarray,
    initial: np.ndarray,
    sizes: np.ndarray,
    strides: np.ndarray,
    dilations: np.ndarray,
    *,
    reduction: str,
) -> np.ndarray:
    """``initial`` and the elements of each window, reduced to one."""
    numbers = [sizes.tolist(), strides.tolist(), dilations.tolist()]
    if any(len(n) != x.ndim or min(n, default=1) < 1 for n in numbers):
        raise ShapeError(f"windows {numbers[0]} with strides and dilations for {x.shape}")
    extents = [(size - 1) * step + 1 for size, step in zip(numbers[0], numbers[2], strict=True)]
    # NumPy has no view of windows that are larger than the array.
    outside = any(extent > dim for extent, dim in zip(extents, x.shape, strict=True))
    if outside:
        counts = [
            max((d - e) // s + 1, 0) for d, e, s in zip(x.shape, extents, numbers[1], strict=True)
        ]
        return np.empty(counts, x.dtype)
    windows = sliding_window_view(x, extents)
    ends = [slice(None, None, step) for step in numbers[1] + numbers[2]]
    axes = tuple(range(x.ndim, 2 * x.ndim))
    reduced = _REDUCTIONS[reduction].reduce(windows[tuple(ends)], axis=axes, initial=initial.item())
    return np.asarray(reduced).astype(x.dtype)


def _starts(indices: np.ndarray, axis: int, axes: Sequence[int], rank: int) -> np.ndarray:
    """The first place of each slice, [slices, rank], from vectors of indices along ``axis``."""
    vectors = indices[..., np.newaxis] if axis == indices.ndim else np.moveaxis(indices, axis, -1)
    if vectors.shape[-1] != len(axes) or any(not 0 <= a < rank for a in axes):
        raise ShapeError(f"indices {indices.shape} for axes {list(axes)} of {rank}")
    starts = np.zeros((math.prod(vectors.shape[:-1]), rank), np.int64)
    starts[:, list(axes)] = vectors.reshape(-1, len(axes))
    return starts


def _places(starts: np.ndarray, sizes: Sequence[int]) -> list[np.ndarray]:
    """The places along each axis, to be broadcast to [slices, *sizes]."""
    rank = len(sizes)
    return [
        starts[:, axis].reshape(-1, *[1] * rank)
        + np.arange(size).reshape(*[1] * (axis + 1), -1, *[1] * (rank - axis - 1))
        for axis, size in enumerate(sizes)
    ]


@array_operator("SliceGather", infer=lambda t, a, c: (TensorType(rules.tensor(t, 0).dtype),))
def gather(
    x: np.ndarray,
    indices: np.ndarray,
    *,
    offset_dims: Sequence[int],
    collapsed_slice_dims: Sequence[int],
    start_index_map: Sequence[int],
    index_vector_dim: int,
    slice_sizes: Sequence[int],
) -> np.ndarray:
    """Slices of ``x`` from where ``indices`` say, or from where they still fit."""
    room = [dim - size for dim, size in zip(x.shape, slice_sizes, strict=True)]
    if min(room, default=0) < 0 or min(slice_sizes, default=0) < 0:
        raise ShapeError(f"slices of {list(slice_sizes)} out of {x.shape}")
    starts = _starts(indices, index_vector_dim, start_index_map, x.ndim).clip(0, room)
    slices = x[tuple(_places(starts, slice_sizes))] if x.ndim else np.full(len(starts), x)
    kept = [size for axis, size in enumerate(slice_sizes) if axis not in collapsed_slice_dims]
    batch = [dim for axis, dim in enumerate(indices.shape) if axis != index_vector_dim]
    result = slices.reshape([*batch, *kept])
    return np.moveaxis(result, range(len(batch), result.ndim), offset_dims).copy()


@array_operator("SliceScatter", infer=rules.same_type)
def scatter(
    x: np.ndarray,
    indices: np.ndarray,
    updates: np.ndarray,
    *,
    update_window_dims: Sequence[int],
    inserted_window_dims: Sequence[int],
    scatter_dims_to_operand_dims: Sequence[int],
    index_vector_dim: int,
    reduction: str,
) -> np.ndarray:
    """``x`` with slices replaced by updates, or reduced with them. What lies outside is ignored."""
    starts = _starts(indices, index_vector_dim, scatter_dims_to_operand_dims, x.ndim)
    windows = [updates.shape[axis] for axis in update_window_dims]
    sizes = iter(windows)
    inserted = [1 if axis in inserted_window_dims else next(sizes, 1) for axis in range(x.ndim)]
    moved = np.moveaxis(
        updates, update_window_dims, range(updates.ndim - len(windows), updates.ndim)
    )
    values = moved.reshape(len(starts), *inserted)
    places = np.broadcast_arrays(*_places(starts, inserted))
    inside = np.all([(p >= 0) & (p < dim) for p, dim in zip(places, x.shape, strict=True)], axis=0)
    out = x.copy()
    target = tuple(place[inside] for place in places)
    if reduction:
        # Updates of several slices may meet in one place, and each of them counts.
        _REDUCTIONS[reduction].at(out, target, values[inside])
    else:
        out[target] = values[inside]
    return out
