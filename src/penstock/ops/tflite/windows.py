"""Arrays spread out, reduced over windows, gathered and scattered, as StableHLO defines it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from penstock.core.types import FLOAT32, RunValue, ShapeError, TensorType, Type
from penstock.ir.graph import Node
from penstock.ir.kernel import Kernel
from penstock.ir.op import Attrs, Consts, Types
from penstock.ops import registry
from penstock.ops.common import shape_rules as rules
from penstock.ops.common.dtypes import FLOAT64, UINT8
from penstock.ops.onnx.resize import infer_resize, resize

array_operator = partial(registry.array_operator, domain=registry.TFLITE)


@registry.operator("IntegerResize", domain=registry.TFLITE, infer=infer_resize)
def integer_resize(node: Node, types: Types) -> Kernel:
    """Resize of codes, rounded away from zero. Positions have ``fraction_bits`` bits behind the
    point, as those of LiteRT's integer kernels have, or, for 0, are real numbers."""
    x = rules.tensor(types, 0)
    # Sums of signed codes have 27 or 35 bits; those of unsigned ones are of float32 in LiteRT, too.
    reals = TensorType(FLOAT32 if x.dtype == UINT8 else FLOAT64, x.shape)
    kernel = resize(node, [reals, *types[1:]])

    def run(codes: np.ndarray, *parameters: RunValue) -> np.ndarray:
        sums: Any = kernel.function(codes.astype(reals.dtype), *parameters)
        return (sums + np.copysign(sums.dtype.type(0.5), sums)).astype(codes.dtype)

    return Kernel(run)


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


def _infer_windows(types: Types, attrs: Attrs, consts: Consts) -> Sequence[Type]:
    x = rules.tensor(types, 0)
    known = (x.shape, *(rules.ints(types, consts, i) for i in (2, 3, 4)))
    numbers = [dims for dims in map(rules.all_known, known) if dims is not None]
    return (TensorType(x.dtype, tuple(_counts(*numbers)) if len(numbers) == 4 else None),)


def _counts(
    dims: Sequence[int], sizes: Sequence[int], strides: Sequence[int], dilations: Sequence[int]
) -> list[int]:
    """The number of windows along each axis."""
    numbers = [sizes, strides, dilations]
    if any(len(n) != len(dims) or min(n, default=1) < 1 for n in numbers):
        raise ShapeError(f"windows {sizes} with strides and dilations for {dims}")
    return [
        max((dim - (size - 1) * step - 1) // stride + 1, 0)
        for dim, size, stride, step in zip(dims, *numbers, strict=True)
    ]


@array_operator("ReduceWindow", infer=_infer_windows)
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
    counts = _counts(x.shape, *numbers)
    # NumPy has no view of windows that are larger than the array.
    if 0 in counts:
        return np.empty(counts, x.dtype)
    extents = [(size - 1) * step + 1 for size, step in zip(numbers[0], numbers[2], strict=True)]
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


def _infer_gather(types: Types, attrs: Attrs, consts: Consts) -> Sequence[Type]:
    x, indices = rules.tensor(types, 0), rules.tensor(types, 1).shape
    if indices is None:
        return (TensorType(x.dtype),)
    collapsed, offsets = attrs["collapsed_slice_dims"], attrs["offset_dims"]
    kept = iter([size for i, size in enumerate(attrs["slice_sizes"]) if i not in collapsed])
    batch = iter([dim for i, dim in enumerate(indices) if i != attrs["index_vector_dim"]])
    rank = len(offsets) + len(indices) - (attrs["index_vector_dim"] < len(indices))
    dims = [next(kept, None) if axis in offsets else next(batch, None) for axis in range(rank)]
    return (TensorType(x.dtype, tuple(dims)),)


@array_operator("SliceGather", infer=_infer_gather)
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
