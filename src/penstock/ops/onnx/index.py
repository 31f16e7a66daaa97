"""Gather, GatherElements, GatherND, Slice, NonZero, Unique and ReverseSequence."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from penstock.core.checkpoints import checkpoint
from penstock.core.types import INT64, Dim, ShapeError, TensorType, Type
from penstock.ir.graph import Node
from penstock.ir.kernel import Kernel, returning
from penstock.ir.op import Attrs, Consts, Types
from penstock.ops.common import shape_rules as rules
from penstock.ops.common.distinct import distinct_rows, in_order, of_equal_bytes
from penstock.ops.onnx.shape import unknown_shape, view_kernel
from penstock.ops.registry import OUTPUT_COUNT, array_operator, operator

_LARGE = 32 * 1024  # output bytes above which checking the indices costs less than a second copy


def check_range(low: int, high: int, axis: int, dim: int) -> None:
    """Raise ``ShapeError`` unless indices from ``low`` to ``high`` are in range for ``axis``."""
    if low < -dim or high >= dim:
        index = low if low < -dim else high
        raise ShapeError(f"index {index} is out of range for axis {axis} with dim {dim}")


def _infer_gather(types: Types, attrs: Attrs, consts: Consts) -> tuple[TensorType]:
    data, indices = rules.tensor(types, 0), rules.tensor(types, 1)
    if data.shape is None:
        return (TensorType(data.dtype),)
    axis = rules.normalize_axis(attrs.get("axis", 0), len(data.shape))
    if not data.shape:
        raise ShapeError("data is a scalar: Gather requires rank 1 or more")
    dim, picked = data.shape[axis], consts[1]
    if isinstance(dim, int) and picked is not None and picked.size:
        check_range(int(picked.min()), int(picked.max()), axis, dim)
    if indices.shape is None:
        return (TensorType(data.dtype),)
    shape = (*data.shape[:axis], *indices.shape, *data.shape[axis + 1 :])
    type_ = TensorType(data.dtype, shape)
    positions = rules.ints(types, consts, 1, None)
    if data.data is None or positions is None or len(shape) > 1:
        return (type_,)
    contents: list[Dim] = []
    for i in positions:
        if isinstance(i, int):
            check_range(i, i, axis, len(data.data))
        contents.append(data.data[i] if isinstance(i, int) else None)
    return (rules.with_data(type_, lambda: tuple(contents)),)


@operator("Gather", infer=_infer_gather, moves=True, strings=True, traits={"selects", "may fail"})
def gather(node: Node, types: Types) -> Kernel:
    axis = node.attrs.get("axis", 0)
    shape = rules.tensor(types, 0).shape
    if shape:
        axis = rules.normalize_axis(axis, len(shape))
    dim = shape[axis] if shape else None
    constant = None if node.inputs[1] is None else node.inputs[1].const
    if constant is not None and constant.size:
        picked = _basic_index(constant, dim)
        if picked is not None:
            return _gather_view(constant, picked, axis, dim)
    if constant is not None and isinstance(dim, int):
        return _gather_checked(constant, axis, dim)

    def run(x: np.ndarray, indices: np.ndarray) -> np.ndarray:
        # np.take copies a strided x as a whole
        return x.take(indices, axis) if x.flags.c_contiguous else x[_index(axis, indices)]

    def into_large(x: np.ndarray, indices: np.ndarray, out: np.ndarray) -> None:
        if indices.size:
            check_range(indices.min(), indices.max(), axis, x.shape[axis])
        if x.flags.c_contiguous:
            # np.take buffers its output unless the mode makes all indices valid; "wrap" allows
            # negative ones.
            x.take(indices, axis, out, "wrap")
        else:
            out[...] = x[_index(axis, indices)]

    (type_,) = _infer_gather(types, node.attrs, (None, None))
    large = type_.static and type_.nbytes >= _LARGE
    return Kernel(run, into_large) if large else returning(run)


def _index(axis: int, picked: int | slice | np.ndarray) -> rules.Index:
    """The index tuple that selects ``picked`` along ``axis``, for any rank."""
    if axis < 0:
        return (..., picked, *(slice(None),) * (-axis - 1))
    return (*(slice(None),) * axis, picked, ...)


def _basic_index(indices: np.ndarray, dim: Dim) -> int | slice | None:
    """The int or slice equivalent to constant ``indices``, if one exists."""
    if indices.dtype.kind not in "iu" or indices.ndim > 1:
        return None
    if indices.ndim == 0:
        return int(indices)
    if isinstance(dim, int):
        indices = np.where(indices < 0, indices + dim, indices)
    first, last = int(indices[0]), int(indices[-1])
    step = int(indices[1]) - first if len(indices) > 1 else 1
    # The indices of a slice must all have the same sign.
    if step < 1 or (first < 0) != (last < 0) or (np.diff(indices) != step).any():
        return None
    # After -1, an end of 0 would mean the beginning of the axis.
    return slice(first, last + 1 if last != -1 else None, step)


def _gather_view(constant: np.ndarray, picked: int | slice, axis: int, dim: Dim) -> Kernel:
    index = _index(axis, picked)
    low, high = int(constant.min()), int(constant.max())
    if isinstance(dim, int) and -dim <= low and high < dim:
        return view_kernel(lambda x, _: x[index])

    def run(x: np.ndarray, _: np.ndarray) -> np.ndarray:
        check_range(low, high, axis, x.shape[axis] if -x.ndim <= axis < x.ndim else 0)
        return x[index]

    return view_kernel(run)


def _gather_checked(constant: np.ndarray, axis: int, dim: int) -> Kernel:
    """Gather at constant indices, which are checked here rather than in each run."""
    if constant.size:
        check_range(int(constant.min()), int(constant.max()), axis, dim)
    # The indices are known to be valid: "clip" avoids the check and the output buffer.
    indices = np.where(constant < 0, constant + dim, constant).astype(np.intp)
    index = _index(axis, indices)

    def run(x: np.ndarray, _: np.ndarray) -> np.ndarray:
        return x.take(indices, axis, None, "clip") if x.flags.c_contiguous else x[index]

    def into(x: np.ndarray, _: np.ndarray, out: np.ndarray) -> None:
        if x.flags.c_contiguous:
            x.take(indices, axis, out, "clip")
        else:
            out[...] = x[index]

    return Kernel(run, into)


def _infer_gather_elements(types: Types, attrs: Attrs, consts: Consts) -> Sequence[Type]:
    data, indices = rules.tensor(types, 0), rules.tensor(types, 1)
    check_same_rank(data, indices)
    if data.shape is not None:
        rules.normalize_axis(attrs.get("axis", 0), len(data.shape))
    return (TensorType(data.dtype, indices.shape),)


def check_same_rank(data: TensorType, indices: TensorType) -> None:
    if data.shape is not None and indices.shape is not None:
        if len(data.shape) != len(indices.shape):
            raise ShapeError("data and indices must have the same rank")
        if not data.shape:
            raise ShapeError("data is a scalar: it must have rank 1 or more")


def _open_grid(dims: Sequence[int], rank: int | None = None) -> list[np.ndarray]:
    """Positions along each axis of ``dims``, to broadcast with arrays of ``rank`` dims."""
    rank = len(dims) if rank is None else rank
    return [np.arange(n).reshape(n, *[1] * (rank - 1 - i)) for i, n in enumerate(dims)]


def element_index(
    indices: np.ndarray, axis: int, grid: Sequence[np.ndarray] | None = None
) -> tuple[np.ndarray, ...]:
    """The index of GatherElements: ``indices`` along ``axis``, positions (``grid``) elsewhere."""
    index = _open_grid(indices.shape) if grid is None else list(grid)
    index[axis] = indices
    return tuple(index)


_MOST_PICKED = 2**20
"""elements gathered per call, which takes NumPy up to 0.1 s"""


def _in_parts(pick: Callable[[slice], np.ndarray], rows: int, size: int) -> np.ndarray:
    """Assemble a result of ``size`` elements from parts of its rows, computed by ``pick``."""
    if size <= _MOST_PICKED or rows < 2:
        return pick(slice(None))
    step = max(rows * _MOST_PICKED // size, 1)
    first = pick(slice(step))
    result = np.empty((rows, *first.shape[1:]), first.dtype)
    result[:step] = first
    for begin in range(step, rows, step):
        checkpoint()
        part = slice(begin, begin + step)
        result[part] = pick(part)
    return result


@operator(
    "GatherElements",
    since=11,
    infer=_infer_gather_elements,
    moves=True,
    strings=True,
    traits={"selects", "may fail"},
)
def gather_elements(node: Node, types: Types) -> Kernel:
    axis, dims = node.attrs.get("axis", 0), rules.all_known(rules.tensor(types, 1).shape)
    grid = None if dims is None else _open_grid(dims)

    def run(x: np.ndarray, indices: np.ndarray) -> np.ndarray:
        if x.ndim != indices.ndim:
            raise ShapeError(f"data has rank {x.ndim}, but indices rank {indices.ndim}")
        if indices.size <= _MOST_PICKED:
            return x[element_index(indices, axis, grid)]
        split = axis not in (0, -x.ndim)  # each row of indices refers to the same row of x
        return _in_parts(
            lambda part: (x[part] if split else x)[element_index(indices[part], axis)],
            len(indices),
            indices.size,
        )

    return returning(run)


def _infer_gather_nd(types: Types, attrs: Attrs, consts: Consts) -> Sequence[Type]:
    data, indices = rules.tensor(types, 0), rules.tensor(types, 1)
    batch = attrs.get("batch_dims", 0)
    if data.shape is None or indices.shape is None or not indices.shape:
        return (TensorType(data.dtype),)
    if not 0 <= batch < min(len(data.shape), len(indices.shape)):
        raise ShapeError(f"batch_dims {batch} must be less than the ranks of data and indices")
    depth = indices.shape[-1]
    if not isinstance(depth, int):
        return (TensorType(data.dtype),)
    check_depth(depth, batch, len(data.shape))
    return (TensorType(data.dtype, (*indices.shape[:-1], *data.shape[batch + depth :])),)


def check_depth(depth: int, batch: int, rank: int) -> None:
    if depth < 1 or batch + depth > rank:
        raise ShapeError(f"the last dim of indices is {depth}: it must be 1 to {rank - batch}")


def index_columns(indices: np.ndarray) -> list[np.ndarray]:
    """The indices along each axis that a tensor of index tuples indexes."""
    return [indices[..., i] for i in range(indices.shape[-1])]


@array_operator(
    "GatherND",
    since=11,
    infer=_infer_gather_nd,
    copied=True,
    moves=True,
    strings=True,
    traits={"selects", "may fail"},
)
def gather_nd(x: np.ndarray, indices: np.ndarray, *, batch_dims: int = 0) -> np.ndarray:
    batch = batch_dims
    if not 0 <= batch < min(x.ndim, indices.ndim):
        raise ShapeError(f"batch_dims {batch} must be less than the ranks of data and indices")
    if x.shape[:batch] != indices.shape[:batch]:
        raise ShapeError(
            f"the batch dims of data {x.shape[:batch]} and indices {indices.shape[:batch]} differ"
        )
    check_depth(indices.shape[-1], batch, x.ndim)

    def pick(part: slice) -> np.ndarray:
        rows = indices[part]
        index: list[Any] = _open_grid(rows.shape[:batch], rows.ndim - 1)
        # The ellipsis yields a 0-d array rather than a scalar.
        return (x[part] if batch else x)[(*index, *index_columns(rows), ...)]

    slices = math.prod(indices.shape[:-1])
    size = slices * math.prod(x.shape[batch + indices.shape[-1] :])
    return pick(slice(None)) if indices.ndim < 2 else _in_parts(pick, len(indices), size)


def _infer_slice(types: Types, attrs: Attrs, consts: Consts) -> Sequence[Type]:
    x = rules.tensor(types, 0)
    if x.shape is None:
        return (TensorType(x.dtype),)
    rank = len(x.shape)
    starts, ends = rules.ints(types, consts, 1), rules.ints(types, consts, 2)
    given = [v for v in (starts, ends, unknown_shape(types, 1)) if v is not None]
    count = len(given[0]) if given else None
    axes = None
    if count is not None:
        spelled = rules.ints(types, consts, 3) if rules.given(types, 3) else range(count)
        axes = rules.all_known(spelled)
    if axes is None or count is None:
        return (TensorType(x.dtype, (None,) * rank),)
    steps = rules.ints(types, consts, 4) if rules.given(types, 4) else (1,) * count
    dims, data = list(x.shape), x.data
    bounds = [(None,) * count if bound is None else bound for bound in (starts, ends, steps)]
    if {*map(len, bounds)} != {len(axes)}:
        raise ShapeError("starts, ends, axes and steps must have the same length")
    for axis, start, end, step in zip(axes, *bounds, strict=True):
        i = rules.normalize_axis(axis, rank)
        whole = rules.all_known((start, end, step, x.shape[i]))
        if whole is not None:
            window = slice(*slice_bounds(*whole))
            dims[i] = len(range(whole[3])[window])
            data = None if data is None else data[window]
        else:
            dims[i] = _sliced_dim(x.shape[i], start, end, step)
            data = data if dims[i] == x.shape[i] and dims[i] is not None else None
    return (rules.with_data(TensorType(x.dtype, tuple(dims)), lambda: data),)


def _sliced_dim(dim: Dim, start: Dim, end: Dim, step: Dim) -> Dim:
    """The dim of a slice whose bounds or dim are not all known, or None."""
    if dim == 0:
        return 0
    if start == 0 and step == 1 and dim is not None:
        # ONNX recommends INT_MAX as the end of an axis of unknown dim.
        to_the_end = isinstance(end, int) and end >= 2**31 - 1
        return dim if to_the_end or end == dim else None
    return None


def slice_bounds(start: int, end: int, step: int, dim: int) -> tuple[int, int, int]:
    """Return the start, end and step of Slice along an axis as those of a Python slice: with a
    negative step, a start before the axis is clamped to 0."""
    if step == 0:
        raise ShapeError("steps must not contain 0")
    if step < 0 and start < -dim:
        start = 0
    return start, end, step


@operator("Slice", since=10, infer=_infer_slice, moves=True, strings=True, traits={"selects"})
def slice_(node: Node, types: Types) -> Kernel:
    fixed = [rules.known_ints(node, types, i) for i in range(1, 5)]
    shape = rules.tensor(types, 0).shape

    def index(dims: Sequence[Dim], values: Sequence[Sequence[int] | None]) -> Any:
        starts, ends, axes, steps = values
        assert starts is not None and ends is not None
        axes = range(len(starts)) if axes is None else axes
        steps = (1,) * len(starts) if steps is None else steps
        if not len(starts) == len(ends) == len(axes) == len(steps):
            raise ShapeError("starts, ends, axes and steps must have the same length")
        result = [slice(None)] * len(dims)
        for start, end, axis, step in zip(starts, ends, axes, steps, strict=True):
            i = rules.normalize_axis(axis, len(dims))
            dim = dims[i]
            if not isinstance(dim, int) and step < 0 and start < -1:
                return None  # depends on the dim
            # Slices that depend on an unknown dim have returned above.
            limit = dim if isinstance(dim, int) else sys.maxsize
            result[i] = slice(*slice_bounds(start, end, step, limit))
        return (*result, ...)

    if shape is not None and all(
        bound is not None for i, bound in enumerate(fixed, 1) if rules.given(node.inputs, i)
    ):
        picked = index(shape, fixed)
        if picked is not None:
            return view_kernel(lambda x, *_: x[picked])

    def run(x: np.ndarray, *bounds: np.ndarray | None) -> np.ndarray:
        values = [None if v is None else v.reshape(-1).tolist() for v in bounds]
        return x[index(x.shape, rules.pad_with_none(values, 4))]

    return view_kernel(run)


def _infer_compress(types: Types, attrs: Attrs, consts: Consts) -> Sequence[Type]:
    x = rules.tensor(types, 0)
    axis = attrs.get("axis")
    if axis is None:
        return (TensorType(x.dtype, (None,)),)
    if x.shape is None:
        return (TensorType(x.dtype),)
    i = rules.normalize_axis(axis, len(x.shape))
    return (TensorType(x.dtype, (*x.shape[:i], None, *x.shape[i + 1 :])),)


@array_operator("Compress", since=9, infer=_infer_compress, strings=True, moves=True)
def compress(x: np.ndarray, condition: np.ndarray, *, axis: int | None = None) -> np.ndarray:
    return x.compress(condition.reshape(-1), axis)


@array_operator(
    "NonZero",
    since=9,
    infer=lambda types, attrs, consts: (TensorType(INT64, (rules.tensor(types, 0).rank, None)),),
    strings=True,
)
def nonzero(x: np.ndarray) -> np.ndarray:
    if x.ndim == 0:  # a scalar has no axes, and one column if it is nonzero
        return np.empty((0, np.count_nonzero(x)), np.int64)
    if x.size < 1024 or x.dtype.kind not in "biuf":
        return np.array(x.nonzero(), np.int64)
    # np.nonzero is vectorized only for one-dimensional booleans.
    places = np.flatnonzero(x.astype(bool))
    y = np.empty((x.ndim, places.size), np.int64)
    for row, dim in zip(y[:0:-1], x.shape[:0:-1], strict=True):
        places, row[:] = np.divmod(places, dim)
    y[0] = places
    return y


def _infer_unique(types: Types, attrs: Attrs, consts: Consts) -> Sequence[Type]:
    shape, axis = rules.tensor(types, 0).shape, attrs.get("axis")
    (type_,) = _infer_compress(types, attrs, consts)
    total: Dim = None
    if shape is not None:
        total = rules.dim_product(shape)
        if axis is not None:
            total = shape[rules.normalize_axis(axis, len(shape))]
    one = TensorType(INT64, (None,))
    return (type_, one, TensorType(INT64, (total,)), one)


_MOST_COLUMNS = 16
"""slices with at most this many elements are sorted column by column"""


def _distinct(x: np.ndarray, axis: int | None, ascending: bool) -> tuple[np.ndarray, ...]:
    """Find the distinct elements, or slices along an axis. Return the index of the first occurrence
    of each, the index of each element among the distinct ones, and their counts, in ascending
    order or in order of first occurrence."""
    hashed = x.size and x.dtype.kind in ("biu" if axis is not None else "biuf")
    if not hashed:
        found = np.unique(x, True, True, True, axis=axis)[1:]
        return found if ascending else in_order(np.argsort(found[0]), *found)
    rows = x.reshape(-1, 1) if axis is None else np.moveaxis(x, axis, 0).reshape(x.shape[axis], -1)
    found = distinct_rows(of_equal_bytes(rows))
    if not ascending:
        return found
    kept = rows[found[0]]
    if rows.shape[1] == 1:
        order = np.argsort(kept[:, 0])
    elif rows.shape[1] <= _MOST_COLUMNS:
        order = np.lexsort(kept.T[::-1])
    else:
        order = np.unique(kept, True, axis=0)[1]
    return in_order(order, *found)


@array_operator("Unique", since=11, infer=_infer_unique, strings=True, prepared=OUTPUT_COUNT)
def unique(x: np.ndarray, *, axis: int | None = None, sorted: int = 1, count: int) -> Any:
    values = x
    if x.dtype == object and axis is not None and x.ndim > 1:
        # NumPy cannot compare rows of strings: replace the strings by their ranks.
        values = np.unique(x, return_inverse=True)[1].reshape(x.shape)
    try:
        first, inverse, counts = _distinct(values, axis, bool(sorted))
    except np.exceptions.AxisError as error:
        raise ShapeError(str(error)) from None
    inverse = inverse.reshape(-1)
    distinct = x.reshape(-1).take(first) if axis is None else x.take(first, axis)
    numbers = [v.astype(np.int64, copy=False) for v in (first, inverse, counts)]
    return (distinct, *numbers)[:count] if count != 1 else distinct


@array_operator("ReverseSequence", since=10, infer=rules.same_type, copied=True, strings=True)
def reverse_sequence(
    x: np.ndarray, lengths: np.ndarray, *, time_axis: int = 0, batch_axis: int = 1
) -> np.ndarray:
    if {time_axis, batch_axis} != {0, 1}:
        raise ShapeError(
            f"time_axis {time_axis} and batch_axis {batch_axis} must be 0 and 1 in either order"
        )
    if x.ndim < 2 or lengths.shape != (x.shape[batch_axis],):
        raise ShapeError(f"sequence_lens {lengths.shape} must have one entry per sample")
    n = x.shape[time_axis]
    if lengths.size and (lengths.min() < 0 or lengths.max() > n):
        raise ShapeError(f"sequence_lens must be in [0, {n}]")
    times, batches = np.ogrid[:n, : len(lengths)]
    source = np.where(times < lengths, lengths - 1 - times, times)
    return x[source, batches] if time_axis == 0 else x[batches.T, source.T]
