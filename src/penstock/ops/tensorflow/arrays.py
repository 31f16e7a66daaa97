"""Slicing, concatenation, gathering and shapes, where TensorFlow differs from ONNX.

Axes, begins and sizes are inputs, and may be known only at run time.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from penstock.core.types import (
    BOOL,
    INT64,
    Dim,
    RunValue,
    Shape,
    ShapeError,
    TensorType,
    Type,
    constant_type,
)
from penstock.ir.graph import Node
from penstock.ir.kernel import Kernel, returning
from penstock.ir.op import Attrs, Consts, Types
from penstock.ops.common import shape_rules as rules
from penstock.ops.common.distinct import distinct_rows
from penstock.ops.common.dtypes import INT32
from penstock.ops.registry import ArrayFunction
from penstock.ops.tensorflow import common

_FEW = 1024  # elements below which NumPy finds indices faster per axis than as flat indices


def _axis(axis: np.ndarray, rank: int) -> int:
    return rules.normalize_axis(common.integer(axis, "the axis"), rank)


# Constants.


@common.operator("Const", infer=lambda t, attrs, c: (constant_type(attrs["value"]),), strings=True)
def const(node: Node, types: Types) -> Kernel:
    value = node.attrs["value"]
    return Kernel(lambda: value)


def _infer_fill(types: Types, attrs: Attrs, consts: Consts) -> Sequence[Type]:
    return (TensorType(rules.tensor(types, 1).dtype, common.lengths(rules.ints(types, consts, 0))),)


@common.array_operator("Fill", infer=_infer_fill, strings=True)
def fill(dims: np.ndarray, value: np.ndarray) -> np.ndarray:
    return np.full(_shape_of(dims), rules.one_element(value, "the value")[()], value.dtype)


def _shape_of(dims: np.ndarray) -> tuple[int, ...]:
    """Convert a tensor of dims to a shape."""
    if dims.ndim != 1 or (dims < 0).any():
        raise ShapeError(f"{dims.tolist()} is not a valid shape: a vector of nonnegative dims")
    return tuple(dims.tolist())


def _points(num: np.ndarray) -> int:
    count = common.integer(num, "the number of points")
    if count < 1:
        raise ShapeError(f"the number of points must be at least 1, not {count}")
    return count


@common.array_operator("LinSpace", infer=common.sized(lambda a, b, n: (_points(n), *a), 2))
def lin_space(start: np.ndarray, stop: np.ndarray, num: np.ndarray) -> np.ndarray:
    if start.shape != stop.shape:
        raise ShapeError(
            f"start of shape {start.shape} and stop of shape {stop.shape} must have the same shape"
        )
    return np.linspace(start, stop, _points(num), dtype=start.dtype)


def _infer_one_hot(types: Types, attrs: Attrs, consts: Consts) -> Sequence[Type]:
    shape, dtype = rules.tensor(types, 0).shape, rules.same_dtype(types, (2, 3))
    depth = common.lengths(rules.ints(types, consts, 1))
    if shape is None:
        return (TensorType(dtype),)
    axis = rules.normalize_axis(attrs.get("axis", -1), len(shape) + 1)
    return (TensorType(dtype, (*shape[:axis], depth[0] if depth else None, *shape[axis:])),)


@common.array_operator("OneHot", infer=_infer_one_hot, strings=True)
def one_hot(
    x: np.ndarray, depth: np.ndarray, on: np.ndarray, off: np.ndarray, *, axis: int = -1
) -> np.ndarray:
    """``on`` at each index, ``off`` elsewhere; indices out of range select nothing."""
    place = rules.normalize_axis(axis, x.ndim + 1)
    numbers = np.arange(common.integer(depth, "the depth")).reshape([-1] + [1] * (x.ndim - place))
    return np.where(np.expand_dims(x, place) == numbers, on, off).astype(on.dtype)


# Shapes.


def _infer_shape(types: Types, attrs: Attrs, consts: Consts) -> Sequence[Type]:
    shape = rules.tensor(types, 0).shape
    dims = (None,) if shape is None else (len(shape),)
    return (TensorType(common.out_type(attrs), dims, shape),)


@common.array_operator("Shape", infer=_infer_shape, strings=True, prepared=common.OUT_TYPE)
def shape(x: np.ndarray, *, out_type: np.dtype) -> np.ndarray:
    return np.array(x.shape, out_type)


def _infer_shapes(types: Types, attrs: Attrs, consts: Consts) -> Sequence[Type]:
    return [_infer_shape([type_], attrs, [None])[0] for type_ in types]


@common.array_operator("ShapeN", infer=_infer_shapes, strings=True, prepared=common.OUT_TYPE)
def shape_n(*inputs: np.ndarray, out_type: np.dtype) -> common.Outputs:
    return common.outputs([np.array(x.shape, out_type) for x in inputs])


def _infer_size(types: Types, attrs: Attrs, consts: Consts) -> Sequence[Type]:
    dims = rules.all_known(rules.tensor(types, 0).shape)
    data = None if dims is None else (int(np.prod(dims, dtype=np.int64)),)
    return (TensorType(common.out_type(attrs), (), data),)


@common.array_operator("Size", infer=_infer_size, strings=True, prepared=common.OUT_TYPE)
def size(x: np.ndarray, *, out_type: np.dtype) -> np.ndarray:
    return np.array(x.size, out_type)


def _infer_rank(types: Types, attrs: Attrs, consts: Consts) -> Sequence[Type]:
    rank = rules.tensor(types, 0).rank
    return (TensorType(INT32, (), None if rank is None else (rank,)),)


@common.array_operator("Rank", infer=_infer_rank, strings=True)
def rank(x: np.ndarray) -> np.ndarray:
    return np.array(x.ndim, np.int32)


def _infer_ensured(types: Types, attrs: Attrs, consts: Consts) -> Sequence[Type]:
    x, wanted = rules.tensor(types, 0), common.dims_of(attrs["shape"])
    rules.check_shape("the tensor", x.shape, wanted)
    own = x.shape or (None,) * len(wanted or ())
    dims = [a if b is None else b for a, b in zip(own, wanted or (), strict=True)]
    return (TensorType(x.dtype, tuple(dims), x.data),)


@common.operator("EnsureShape", infer=_infer_ensured, strings=True, moves=True)
def ensure_shape(node: Node, types: Types) -> Kernel:
    wanted = common.dims_of(node.attrs["shape"])

    def run(x: np.ndarray) -> np.ndarray:
        rules.check_shape("the tensor", x.shape, wanted)
        return x

    return returning(run, view=True)


@common.array_operator("BroadcastArgs", infer=common.dtype_only)
def broadcast_args(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    return np.array(np.broadcast_shapes(_shape_of(a), _shape_of(b)), a.dtype)


# Slices.


def _index(
    begin: Sequence[Dim], end: Sequence[Dim], strides: Sequence[int], attrs: Attrs
) -> rules.Index:
    """The equivalent NumPy index, with None as slice bounds of unknown dims."""
    dims: list[Any] = []
    for i, step in enumerate(strides):
        bit = 1 << i
        if attrs["ellipsis_mask"] & bit:
            dims.append(Ellipsis)
        elif attrs["new_axis_mask"] & bit:
            dims.append(np.newaxis)
        elif attrs["shrink_axis_mask"] & bit:
            if step <= 0:
                raise ShapeError("strides must be positive where shrink_axis_mask is set")
            dims.append(begin[i])
        else:
            if step == 0:
                raise ShapeError("strides must not contain 0")
            first = None if attrs["begin_mask"] & bit else begin[i]
            last = None if attrs["end_mask"] & bit else end[i]
            dims.append(slice(first, last, step))
    if dims.count(Ellipsis) > 1:
        raise ShapeError("ellipsis_mask must have at most one bit set")
    # Axes without an entry are kept whole.
    return tuple(dims) if Ellipsis in dims else (*dims, Ellipsis)


def _infer_strided_slice(types: Types, attrs: Attrs, consts: Consts) -> Sequence[Type]:
    x = rules.tensor(types, 0)
    _check_vectors(*[rules.tensor(types, i).rank for i in (1, 2, 3)])
    begin, end, strides = (rules.all_known(rules.ints(types, consts, i)) for i in (1, 2, 3))
    if begin is None or end is None or strides is None or x.shape is None:
        return (TensorType(x.dtype),)
    if not len(begin) == len(end) == len(strides):
        raise ShapeError("begin, end and strides must have the same length")
    index = _index(begin, end, strides, attrs)
    dims = _sliced(x.shape, index)
    data: tuple[Dim, ...] | None = None
    if x.data is not None and len(x.shape) == 1 and len(dims) <= 1 and np.newaxis not in index:
        # An object array, since contents may be symbolic dims.
        taken: Any = np.array(x.data, object)[index]
        data = tuple(taken.reshape(-1).tolist())
    return (TensorType(x.dtype, dims, data),)


def _check_vectors(*ranks: int | None) -> None:
    if not {*ranks} <= {None, 1}:
        raise ShapeError("begin, end and strides must have rank 1")


def _sliced(dims: Shape, index: rules.Index) -> Shape:
    used = len([i for i in index if i is not Ellipsis and i is not np.newaxis])
    if used > len(dims):
        raise ShapeError(f"the slice indexes {used} dims of an input of rank {len(dims)}")
    result: list[Dim] = []
    left = list(dims)
    for item in index:
        if item is Ellipsis:
            whole = len(dims) - used
            result += left[:whole]
            left = left[whole:]
        elif item is np.newaxis:
            result.append(1)
        else:
            dim = left.pop(0)
            if isinstance(item, slice):
                # A full slice keeps the dim, even if it is unknown.
                everything = item == slice(None, None, item.step) and abs(item.step) == 1
                length = len(range(*item.indices(dim))) if isinstance(dim, int) else None
                result.append(dim if everything else length)
            elif isinstance(dim, int) and not -dim <= item < dim:
                raise ShapeError(f"slice index {item} is out of bounds for dim {dim}")
    return tuple(result)


@common.operator("StridedSlice", infer=_infer_strided_slice, strings=True, moves=True)
def strided_slice(node: Node, types: Types) -> Kernel:
    def index(begin: np.ndarray, end: np.ndarray, strides: np.ndarray) -> rules.Index:
        _check_vectors(begin.ndim, end.ndim, strides.ndim)
        return _index(begin.tolist(), end.tolist(), strides.tolist(), node.attrs)

    bounds = [None if value is None else value.const for value in node.inputs[1:]]
    known = [bound for bound in bounds if bound is not None]
    if len(known) == 3:
        fixed = index(*known)
        return Kernel(lambda x, *_: x[fixed], view=True)
    return Kernel(lambda x, *bounds: x[index(*bounds)], view=True)


def _infer_strided_slice_grad(types: Types, attrs: Attrs, consts: Consts) -> Sequence[Type]:
    shape = common.lengths(rules.ints(types, consts, 0))
    return (TensorType(rules.tensor(types, 4).dtype, shape),)


@common.operator("StridedSliceGrad", infer=_infer_strided_slice_grad)
def strided_slice_grad(node: Node, types: Types) -> Kernel:
    """The gradient of StridedSlice: zeros of the input's shape, with ``dy`` in the slice."""
    attrs = node.attrs

    def function(
        shape: np.ndarray, begin: np.ndarray, end: np.ndarray, strides: np.ndarray, dy: np.ndarray
    ) -> np.ndarray:
        _check_vectors(begin.ndim, end.ndim, strides.ndim)
        index = _index(begin.tolist(), end.tolist(), strides.tolist(), attrs)
        result = np.zeros(shape.tolist(), dy.dtype)
        place = result[index]
        # The assignment would silently broadcast a smaller gradient.
        if place.shape != dy.shape:
            raise ShapeError(f"the gradient has shape {dy.shape}, but the slice has {place.shape}")
        result[index] = dy
        return result

    return Kernel(function)


@common.operator("TensorStridedSliceUpdate", infer=rules.same_type, strings=True)
def strided_slice_update(node: Node, types: Types) -> Kernel:
    """A copy of the first input with ``value`` in the slice."""

    def function(
        x: np.ndarray, begin: np.ndarray, end: np.ndarray, strides: np.ndarray, value: np.ndarray
    ) -> np.ndarray:
        _check_vectors(begin.ndim, end.ndim, strides.ndim)
        index = _index(begin.tolist(), end.tolist(), strides.tolist(), node.attrs)
        _sliced(x.shape, index)
        result = x.copy()
        place = result[index]
        # The assignment would silently broadcast other values than scalars.
        if value.shape and place.shape != value.shape:
            raise ShapeError(f"the value has shape {value.shape}, but the slice has {place.shape}")
        result[index] = value
        return result

    return Kernel(function)


@common.array_operator("XlaDynamicUpdateSlice", infer=rules.same_type, strings=True)
def dynamic_update_slice(x: np.ndarray, update: np.ndarray, indices: np.ndarray) -> np.ndarray:
    """A copy of ``x`` with ``update`` from ``indices`` on, moved to where it is inside."""
    if not x.ndim == update.ndim == indices.size or (np.array(update.shape) > x.shape).any():
        raise ShapeError(
            f"an update of shape {update.shape} at {indices.tolist()} does not fit into {x.shape}"
        )
    result = x.copy()
    most = [dim - size for dim, size in zip(x.shape, update.shape, strict=True)]
    begin = np.clip(indices.reshape(-1), 0, most).tolist()
    result[tuple(map(slice, begin, np.add(begin, update.shape).tolist()))] = update
    return result


def _infer_slice(types: Types, attrs: Attrs, consts: Consts) -> Sequence[Type]:
    x = rules.tensor(types, 0)
    begin, sizes = (rules.all_known(rules.ints(types, consts, i)) for i in (1, 2))
    if x.shape is None or begin is None or sizes is None:
        return (TensorType(x.dtype, None if x.shape is None else (None,) * len(x.shape)),)
    if not len(x.shape) == len(begin) == len(sizes):
        raise ShapeError(
            f"begin {begin} and size {sizes} must have one entry per axis of shape {x.shape}"
        )
    return (TensorType(x.dtype, tuple(map(_slice_length, x.shape, begin, sizes))),)


def _slice_length(dim: Dim, first: int, count: int) -> Dim:
    """The length of a slice of ``count`` elements from ``first``; -1 takes the rest of the dim."""
    if not isinstance(dim, int):
        if count < -1:
            raise ShapeError(f"size {count} must be at least -1")
        return count if count != -1 else dim if first == 0 else None
    length = dim - first if count == -1 else count
    if not (0 <= first <= dim and 0 <= length <= dim - first):
        raise ShapeError(f"a slice of size {count} from {first} is out of bounds for dim {dim}")
    return length


@common.operator("Slice", infer=_infer_slice, strings=True, moves=True)
def slice_operator(node: Node, types: Types) -> Kernel:
    def index(dims: Sequence[int], begin: np.ndarray, sizes: np.ndarray) -> rules.Index:
        if not begin.size == sizes.size == len(dims):
            raise ShapeError(
                f"begin has {begin.size} and size {sizes.size} entries, not {len(dims)}"
            )
        places = zip(dims, begin.tolist(), sizes.tolist(), strict=True)
        return tuple([slice(b, b + _slice_length(n, b, s)) for n, b, s in places])

    x, values = rules.tensor(types, 0), node.inputs[1:]
    bounds = [value.const for value in values if value is not None and value.const is not None]
    if len(bounds) == len(values) and x.static:
        fixed = index(x.dims, *bounds)
        return Kernel(lambda x, *_: x[fixed], view=True)
    return Kernel(lambda x, *bounds: x[index(x.shape, *bounds)], view=True)


@common.array_operator("ReverseV2", infer=rules.same_type, view=True, strings=True, moves=True)
def reverse(x: np.ndarray, axes: np.ndarray) -> np.ndarray:
    return np.flip(x, rules.normalize_axes(axes.reshape(-1).tolist(), x.ndim))


@common.array_operator("Transpose", infer=common.dtype_only, view=True, strings=True, moves=True)
def transpose(x: np.ndarray, order: np.ndarray) -> np.ndarray:
    """Transpose with a permutation that is known only at run time."""
    if sorted(order.tolist()) != list(range(x.ndim)):
        raise ShapeError(f"perm {order.tolist()} is not a permutation of {x.ndim} axes")
    return x.transpose(order.tolist())


def _infer_matrix_transpose(types: Types, attrs: Attrs, consts: Consts) -> Sequence[Type]:
    x = rules.tensor(types, 0)
    if x.shape is None:
        return (TensorType(x.dtype),)
    if len(x.shape) < 2:
        raise ShapeError(f"the input must have rank 2 or more, but has shape {x.shape}")
    return (TensorType(x.dtype, (*x.shape[:-2], x.shape[-1], x.shape[-2])),)


@common.operator("MatrixTranspose", infer=_infer_matrix_transpose, moves=True)
def matrix_transpose(node: Node, types: Types) -> Kernel:
    """Swap the last two axes, and conjugate the elements if attribute ``conjugate`` is set."""
    if node.attrs.get("conjugate"):
        return Kernel(lambda x: np.conjugate(np.swapaxes(x, -1, -2)))
    return Kernel(lambda x: np.swapaxes(x, -1, -2), view=True)


# Joins and splits.


def _infer_pack(types: Types, attrs: Attrs, consts: Consts) -> Sequence[Type]:
    input_types = [rules.tensor(types, i) for i in range(len(types))]
    dtype = rules.same_dtype(types, range(len(types)))
    shapes = [type_.shape for type_ in input_types if type_.shape is not None]
    if len(shapes) < len(types):
        return (TensorType(dtype),)
    if any(len(dims) != len(shapes[0]) for dims in shapes):
        raise ShapeError(f"the inputs of Pack must have the same rank, but have shapes {shapes}")
    axis = rules.normalize_axis(attrs.get("axis", 0), len(shapes[0]) + 1)
    # The inputs have the same shape: a dim is known if it is known for any input.
    rows = zip(*shapes, strict=True)
    dims = [next((d for d in row if isinstance(d, int)), row[0]) for row in rows]
    data = None
    if not shapes[0] and dtype is not None and dtype.kind in "iu":
        data = tuple([type_.data[0] if type_.data else None for type_ in input_types])
    return (TensorType(dtype, (*dims[:axis], len(types), *dims[axis:]), data),)


@common.array_operator("Pack", infer=_infer_pack, strings=True, moves=True)
def pack(*inputs: np.ndarray, axis: int = 0) -> np.ndarray:
    return np.stack(inputs, axis)


def _infer_unpack(types: Types, attrs: Attrs, consts: Consts) -> Sequence[Type]:
    x, count = rules.tensor(types, 0), attrs["num"]
    if x.shape is None:
        return [TensorType(x.dtype)] * count
    axis = rules.normalize_axis(attrs.get("axis", 0), len(x.shape))
    if x.data is not None and len(x.data) == count and len(x.shape) == 1:
        return [TensorType(x.dtype, (), (element,)) for element in x.data]
    return [TensorType(x.dtype, (*x.shape[:axis], *x.shape[axis + 1 :]))] * count


@common.array_operator("Unpack", infer=_infer_unpack, view=True, strings=True, moves=True)
def unpack(x: np.ndarray, *, num: int, axis: int = 0) -> common.Outputs:
    place = rules.normalize_axis(axis, x.ndim)
    if x.shape[place] != num:
        raise ShapeError(f"num is {num}, but axis {axis} has dim {x.shape[place]}")
    moved = np.moveaxis(x, place, 0) if place else x
    # For vectors, the ellipsis yields 0-d arrays rather than scalars, but is slower.
    return common.outputs([moved[i] if x.ndim > 1 else moved[i, ...] for i in range(num)])


def _infer_split(types: Types, attrs: Attrs, consts: Consts) -> Sequence[Type]:
    x, axis = rules.tensor(types, 0), rules.all_known(rules.ints(types, consts, 1))
    count = attrs["num_split"]
    if x.shape is None or axis is None:
        return [TensorType(x.dtype)] * count
    place = rules.normalize_axis(axis[0], len(x.shape))
    dim = x.shape[place]
    part = _equal_part(dim, count) if isinstance(dim, int) else None
    return [TensorType(x.dtype, (*x.shape[:place], part, *x.shape[place + 1 :]))] * count


def _equal_part(dim: int, count: int) -> int:
    if dim % count:
        raise ShapeError(f"dim {dim} cannot be split into {count} equal parts")
    return dim // count


@common.array_operator("Split", infer=_infer_split, view=True, strings=True, moves=True)
def split(x: np.ndarray, axis: np.ndarray, *, num_split: int) -> common.Outputs:
    """Unlike in TensorFlow, input 0 is the tensor and input 1 the axis."""
    place = _axis(axis, x.ndim)
    _equal_part(x.shape[place], num_split)
    return common.outputs(np.split(x, num_split, place))


@common.array_operator("SplitV", view=True, strings=True, moves=True)
def split_v(x: np.ndarray, sizes: np.ndarray, axis: np.ndarray) -> common.Outputs:
    place, counts = _axis(axis, x.ndim), sizes.tolist()
    if counts.count(-1) == 1:
        # sum(counts) includes the -1.
        counts[counts.index(-1)] = x.shape[place] - sum(counts) - 1
    if sum(counts) != x.shape[place] or min(counts, default=0) < 0:
        raise ShapeError(f"size_splits {sizes.tolist()} must add up to {x.shape[place]}")
    return common.outputs(np.split(x, np.cumsum(counts)[:-1], place))


def _concat_dims(first: Sequence[int], *rest: Any) -> list[int]:
    place, dims = _axis(rest[-1], len(first)), list(first)
    if any(len(other) != len(first) for other in rest[:-1]):
        raise ShapeError(f"the inputs must have the same rank, not shapes {(first, *rest[:-1])}")
    dims[place] = sum(other[place] for other in (first, *rest[:-1]))
    return dims


@common.array_operator("ConcatV2", infer=common.sized(_concat_dims, -1), strings=True, moves=True)
def concat(*inputs: np.ndarray) -> np.ndarray:
    *values, axis = inputs
    place = _axis(axis, values[0].ndim)
    return np.concatenate(values, place)


@common.array_operator("ConcatOffset")
def concat_offset(axis: np.ndarray, *shapes: np.ndarray) -> common.Outputs:
    """The offset of each of several concatenated tensors, as vectors [rank]."""
    place = _axis(axis, shapes[0].size)
    offsets, at = [np.zeros_like(shape) for shape in shapes], 0
    for offset, shape in zip(offsets, shapes, strict=True):
        offset[place] = at
        at += int(shape[place])
    return common.outputs(offsets)


@common.array_operator(
    "IdentityN",
    strings=True,
    infer=lambda types, attrs, consts: [TensorType() if t is None else t for t in types],
)
def identity_n(*inputs: RunValue) -> common.Outputs:
    """Copy all inputs: the outputs of one node are all live or all dead."""
    return common.outputs([x.copy() if isinstance(x, np.ndarray) else x for x in inputs])


@common.array_operator("Roll", infer=rules.same_type, strings=True, moves=True)
def roll(x: np.ndarray, shift: np.ndarray, axis: np.ndarray) -> np.ndarray:
    if not x.ndim:
        raise ShapeError("the input of Roll must have rank 1 or more, but is a scalar")
    if shift.ndim > 1 or shift.shape != axis.shape:
        raise ShapeError(
            f"shift of shape {shift.shape} and axis of shape {axis.shape} must be equal scalars "
            "or vectors"
        )
    axes = tuple([rules.normalize_axis(place, x.ndim) for place in axis.reshape(-1).tolist()])
    return np.roll(x, shift.reshape(-1).tolist(), axes)


# Gather and scatter.


def _infer_gather(types: Types, attrs: Attrs, consts: Consts) -> Sequence[Type]:
    x, places = rules.tensor(types, 0), rules.tensor(types, 1)
    axis = rules.all_known(rules.ints(types, consts, 2)) if len(types) > 2 else (0,)
    if x.shape is None or places.shape is None or axis is None:
        return (TensorType(x.dtype),)
    place = rules.normalize_axis(axis[0], len(x.shape))
    batch = _batch(attrs.get("batch_dims", 0), places.shape)
    dims = (*x.shape[:place], *places.shape[batch:], *x.shape[place + 1 :])
    data = None
    numbers = rules.all_known(places.data)
    if x.data is not None and numbers is not None and len(dims) <= 1 and not batch:
        if any(not 0 <= i < len(x.data) for i in numbers):
            raise ShapeError(f"indices {numbers} must be in [0, {len(x.data)})")
        data = tuple([x.data[i] for i in numbers])
    return (TensorType(x.dtype, dims, data),)


def _batch(batch: int, places: Sequence[Any]) -> int:
    batch = batch + len(places) if batch < 0 else batch
    if not 0 <= batch <= len(places):
        raise ShapeError(f"batch_dims {batch} is out of range for indices of rank {len(places)}")
    return batch


@common.array_operator("GatherV2", infer=_infer_gather, strings=True, moves=True)
def gather(
    x: np.ndarray, places: np.ndarray, axis: np.ndarray | None = None, *, batch_dims: int = 0
) -> np.ndarray:
    """Gather along ``axis``, by default the first one."""
    place = 0 if axis is None else _axis(axis, x.ndim)
    # Negative indices are errors in TensorFlow; NumPy would count them from the end.
    if places.size and (places.min() < 0 or places.max() >= x.shape[place]):
        raise ShapeError(
            f"indices {places.min()} to {places.max()} must be in [0, {x.shape[place]})"
        )
    batch = _batch(batch_dims, places.shape)
    return _gathered(x, places, place, batch) if batch else np.take(x, places, place)


def _gathered(x: np.ndarray, places: np.ndarray, axis: int, batch: int) -> np.ndarray:
    """Gather with ``batch`` leading batch dims, each entry with its own indices."""
    if x.shape[:batch] != places.shape[:batch] or axis < batch:
        raise ShapeError(
            f"the first {batch} dims of {x.shape} and {places.shape} must be equal, and precede "
            "the axis"
        )
    moved = np.moveaxis(x, axis, batch)
    rest = places.ndim - batch
    grids = np.ogrid[tuple([slice(n) for n in x.shape[:batch]])]
    index = tuple([grid.reshape(grid.shape + (1,) * rest) for grid in grids])
    taken = moved[(*index, places)]
    # The dims of the indices replace the axis.
    order = [*range(batch), *range(batch + rest, rest + axis)]
    order += [*range(batch, batch + rest), *range(rest + axis, taken.ndim)]
    return taken.transpose(order)


_scatter_type = common.sized(lambda indices, updates, dims: _shape_of(dims), 2, index=1)


@common.array_operator("ScatterNd", infer=_scatter_type, strings=True)
def scatter_nd(indices: np.ndarray, updates: np.ndarray, dims: np.ndarray) -> np.ndarray:
    """Scatter updates into zeros; updates with equal indices are summed."""
    out = np.zeros(_shape_of(dims), updates.dtype)
    limits = np.array(out.shape[: indices.shape[-1]])
    if indices.size and ((indices < 0) | (indices >= limits)).any():
        raise ShapeError(f"indices are out of bounds for shape {out.shape}")
    places, depth = tuple(np.moveaxis(indices, -1, 0)), indices.shape[-1]
    if depth and len(distinct_rows(indices.reshape(-1, depth))[0]) == indices.size // depth:
        out[places] = updates
    else:  # += would apply only one of several updates with equal indices
        np.add.at(out, places, updates)
    return out


@common.array_operator(
    "NonNegative",
    moves=True,
    view=True,
    copied=True,
    infer=lambda types, attrs, consts: [rules.tensor(types, 0)],
)
def non_negative(x: np.ndarray) -> np.ndarray:
    """Return indices unchanged after checking that none is negative, as ONNX would count these
    from the end."""
    if x.size and x.min() < 0:
        raise ShapeError(f"index {x.min()} must not be negative")
    return x


def _scattered(name: str, function: np.ufunc) -> None:
    """Register an operation that applies the ufunc ``function`` to elements at given indices, once
    per occurrence of an index."""

    @common.array_operator(name, infer=rules.same_type)
    def scatter(x: np.ndarray, indices: np.ndarray, updates: np.ndarray) -> np.ndarray:
        depth = indices.shape[-1] if indices.ndim else 0
        if not indices.ndim or depth > x.ndim:
            raise ShapeError(f"indices of shape {indices.shape} do not match shape {x.shape}")
        wanted = indices.shape[:-1] + x.shape[depth:]
        if updates.shape != wanted:
            raise ShapeError(f"updates must have shape {wanted}, not {updates.shape}")
        if ((indices < 0) | (indices >= np.array(x.shape[:depth], np.int64))).any():
            raise ShapeError(f"indices are out of bounds for shape {x.shape}")
        out = x.copy()
        function.at(out, tuple(np.moveaxis(indices, -1, 0)), updates)
        return out


for _name, _function in (
    ("TensorScatterSub", np.subtract),
    ("TensorScatterMax", np.maximum),
    ("TensorScatterMin", np.minimum),
):
    _scattered(_name, _function)


@common.array_operator("InvertPermutation", infer=rules.same_type)
def invert_permutation(x: np.ndarray) -> np.ndarray:
    if x.ndim != 1 or not np.array_equal(np.sort(x), np.arange(x.size)):
        raise ShapeError(f"{x.tolist()} is not a permutation of 0 to {x.size - 1}")
    return np.argsort(x).astype(x.dtype)


@common.array_operator(
    "Where",
    infer=lambda types, attrs, consts: (TensorType(INT64, (None, rules.tensor(types, 0).rank)),),
    strings=True,
)
def where(x: np.ndarray) -> np.ndarray:
    """Like ``np.argwhere``, but faster."""
    if x.ndim and x.size <= _FEW:
        columns = x.nonzero()
        out = np.empty((columns[0].size, x.ndim), np.int64)
        for axis, column in enumerate(columns):
            out[:, axis] = column
        return out
    rest: Any = np.flatnonzero(x if x.dtype.kind in "bO" else x != 0)
    out = np.empty((rest.size, x.ndim), np.int64)
    for axis in range(x.ndim - 1, -1, -1):
        outer = rest // x.shape[axis] if axis else 0
        np.subtract(rest, outer * x.shape[axis], out[:, axis])
        rest = outer
    return out


def _infer_select(types: Types, attrs: Attrs, consts: Consts) -> Sequence[Type]:
    a, b = rules.tensor(types, 1), rules.tensor(types, 2)
    shape = a.shape if a.shape is not None else b.shape
    rules.check_shape("the second choice", b.shape, shape)
    if shape is not None:
        rules.check_shape("condition", rules.tensor(types, 0).shape, (), shape[:1], shape)
    return (TensorType(rules.same_dtype(types, (1, 2)), shape),)


@common.array_operator("Select", infer=_infer_select, strings=True)
def select(condition: np.ndarray, a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Select elements; a vector condition selects whole rows."""
    if a.shape != b.shape:
        raise ShapeError(f"both values must have the same shape, but have {a.shape} and {b.shape}")
    if condition.shape not in ((), a.shape[:1], a.shape):
        raise ShapeError(
            f"a condition of shape {condition.shape} must be a scalar, have shape {a.shape}, or "
            "one entry per row"
        )
    if condition.ndim == 1 and a.ndim > 1:
        condition = condition.reshape(-1, *(1,) * (a.ndim - 1))
    return np.where(condition, a, b)


# Boolean reductions, whose axes are an input.


def _infer_truths(types: Types, attrs: Attrs, consts: Consts) -> Sequence[Type]:
    given, reduced = rules.tensor(types, 1).dtype, rules.tensor(types, 0)
    if given is not None and given.kind not in "iu":  # a TFLite file may declare any type
        raise ShapeError(f"axes must be integers, not {given}")
    if reduced.dtype not in (None, BOOL):
        raise ShapeError(f"the input must be bool, not {reduced.dtype}; compare it with 0 first")
    dims, axes = reduced.shape, rules.all_known(rules.ints(types, consts, 1))
    if dims is None or axes is None:
        return (TensorType(BOOL),)
    return (TensorType(BOOL, rules.reduced_shape(dims, axes, bool(attrs.get("keep_dims")))),)


def _truths(function: ArrayFunction) -> ArrayFunction:
    def reduce(x: np.ndarray, axes: np.ndarray, *, keep_dims: bool = False) -> np.ndarray:
        places = rules.normalize_axes(axes.reshape(-1).tolist(), x.ndim)
        return function(x, axis=places, keepdims=bool(keep_dims))

    return reduce


common.array_operator("All", infer=_infer_truths)(_truths(np.all))
common.array_operator("Any", infer=_infer_truths)(_truths(np.any))
