"""Where elements are, as TensorFlow says it where ONNX says it otherwise.

Axes, begins and sizes are inputs here, and may be known only during the run.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from penstock.ir.graph import Node
from penstock.ir.op import Attrs, Consts, Infer, Kernel, Types
from penstock.ops.common.shape_rules import (
    all_known,
    ints,
    normalize_axes,
    normalize_axis,
    same_dtype,
    tensor,
)
from penstock.ops.registry import TENSORFLOW, operator
from penstock.types import BOOL, STRING, Dim, Shape, ShapeError, TensorType, Type, constant_type
from penstock.types import dtypes as all_dtypes


def named_dtype(attrs: Attrs, name: str, default: str, codes: str = "iu") -> np.dtype:
    """The dtype that an attribute names, which must be of one of these kinds."""
    dtype = all_dtypes().get(attrs.get(name) or default)
    if dtype is None or dtype.kind not in codes:
        raise ShapeError(f"{name} is {attrs.get(name)!r}, which is no element type to be had")
    return dtype


def _scalar(x: np.ndarray, what: str) -> int:
    if x.size != 1 or x.dtype.kind not in "iu":
        raise ShapeError(f"{what} must be one integer, not {x.dtype}{list(x.shape)}")
    return int(x.reshape(())[()])


def lengths(values: Sequence[Dim] | None) -> Shape | None:
    """Contents of a tensor that are dims, as far as they are known."""
    if values is None:
        return None
    if any(isinstance(value, int) and value < 0 for value in values):
        raise ShapeError(f"{list(values)} are no dims: none of them may be negative")
    return tuple(values)


def dtype_only(index: int = 0) -> Infer:
    """One output of the dtype of input ``index`` and a shape that only the run knows."""

    def infer(types: Types, attrs: Attrs, consts: Consts) -> Sequence[Type]:
        return (TensorType(tensor(types, index).dtype),)

    return infer


# Constants.


def _infer_const(types: Types, attrs: Attrs, consts: Consts) -> Sequence[Type]:
    return (constant_type(attrs["value"]),)


@operator("Const", domain=TENSORFLOW, infer=_infer_const, strings=True)
def const(node: Node, types: Types) -> Kernel:
    value = node.attrs["value"]
    return Kernel(lambda: value)


def _infer_fill(types: Types, attrs: Attrs, consts: Consts) -> Sequence[Type]:
    return (TensorType(tensor(types, 1).dtype, lengths(ints(types, consts, 0))),)


@operator("Fill", domain=TENSORFLOW, infer=_infer_fill, strings=True)
def fill(node: Node, types: Types) -> Kernel:
    def function(dims: np.ndarray, value: np.ndarray) -> np.ndarray:
        if value.size != 1:
            raise ShapeError(f"the value to fill with is a scalar, not of shape {value.shape}")
        return np.full(_shape_given(dims), value.reshape(())[()], value.dtype)

    return Kernel(function)


def _shape_given(dims: np.ndarray) -> tuple[int, ...]:
    """A shape that is given as a tensor."""
    if dims.ndim != 1 or (dims < 0).any():
        raise ShapeError(f"{dims.tolist()} is no shape")
    return tuple(dims.tolist())


@operator("LinSpace", domain=TENSORFLOW, infer=dtype_only())
def lin_space(node: Node, types: Types) -> Kernel:
    def function(start: np.ndarray, stop: np.ndarray, num: np.ndarray) -> np.ndarray:
        count = _scalar(num, "the number of points")
        if count < 1:
            raise ShapeError(f"there must be one point or more, not {count}")
        return np.linspace(start, stop, count, dtype=start.dtype)

    return Kernel(function)


def _infer_one_hot(types: Types, attrs: Attrs, consts: Consts) -> Sequence[Type]:
    shape, dtype = tensor(types, 0).shape, same_dtype(types, (2, 3))
    depth = lengths(ints(types, consts, 1))
    if shape is None:
        return (TensorType(dtype),)
    axis = normalize_axis(attrs.get("axis", -1), len(shape) + 1)
    dim = depth[0] if depth else None
    return (TensorType(dtype, (*shape[:axis], dim, *shape[axis:])),)


@operator("OneHot", domain=TENSORFLOW, infer=_infer_one_hot, strings=True)
def one_hot(node: Node, types: Types) -> Kernel:
    """Indices out of range, negative ones too, are nowhere hot."""
    axis = node.attrs.get("axis", -1)

    def function(x: np.ndarray, depth: np.ndarray, on: np.ndarray, off: np.ndarray) -> np.ndarray:
        place = normalize_axis(axis, x.ndim + 1)
        count = _scalar(depth, "the depth")
        numbers = np.arange(count).reshape([-1] + [1] * (x.ndim - place))
        return np.where(np.expand_dims(x, place) == numbers, on, off).astype(on.dtype)

    return Kernel(function)


# Shapes.


def _infer_shape(types: Types, attrs: Attrs, consts: Consts) -> Sequence[Type]:
    dtype = named_dtype(attrs, "out_type", "int32")
    shape = tensor(types, 0).shape
    if shape is None:
        return (TensorType(dtype, (None,)),)
    return (TensorType(dtype, (len(shape),), shape),)


@operator("Shape", domain=TENSORFLOW, infer=_infer_shape, strings=True)
def shape(node: Node, types: Types) -> Kernel:
    dtype = named_dtype(node.attrs, "out_type", "int32")
    return Kernel(lambda x: np.array(x.shape, dtype))


@operator("ShapeN", domain=TENSORFLOW, strings=True)
def shape_n(node: Node, types: Types) -> Kernel:
    dtype = named_dtype(node.attrs, "out_type", "int32")
    if len(node.outputs) == 1:
        return Kernel(lambda x: np.array(x.shape, dtype))
    return Kernel(lambda *inputs: tuple([np.array(x.shape, dtype) for x in inputs]))


def _infer_size(types: Types, attrs: Attrs, consts: Consts) -> Sequence[Type]:
    dtype = named_dtype(attrs, "out_type", "int32")
    dims = all_known(tensor(types, 0).shape)
    data = None if dims is None else (int(np.prod(dims, dtype=np.int64)),)
    return (TensorType(dtype, (), data),)


@operator("Size", domain=TENSORFLOW, infer=_infer_size, strings=True)
def size(node: Node, types: Types) -> Kernel:
    dtype = named_dtype(node.attrs, "out_type", "int32")
    return Kernel(lambda x: np.array(x.size, dtype))


def _infer_rank(types: Types, attrs: Attrs, consts: Consts) -> Sequence[Type]:
    shape = tensor(types, 0).shape
    return (TensorType(np.dtype(np.int32), (), None if shape is None else (len(shape),)),)


@operator("Rank", domain=TENSORFLOW, infer=_infer_rank, strings=True)
def rank(node: Node, types: Types) -> Kernel:
    return Kernel(lambda x: np.array(x.ndim, np.int32))


@operator("BroadcastArgs", domain=TENSORFLOW, infer=dtype_only())
def broadcast_args(node: Node, types: Types) -> Kernel:
    def function(a: np.ndarray, b: np.ndarray) -> np.ndarray:
        return np.array(np.broadcast_shapes(_shape_given(a), _shape_given(b)), a.dtype)

    return Kernel(function)


# Slices.


def _index(
    begin: Sequence[Dim], end: Sequence[Dim], strides: Sequence[int], attrs: Attrs
) -> tuple[Any, ...]:
    """What NumPy writes between brackets; of dims that are not known, None stands in slices."""
    dims: list[Any] = []
    for i, step in enumerate(strides):
        bit = 1 << i
        if attrs["ellipsis_mask"] & bit:
            dims.append(Ellipsis)
        elif attrs["new_axis_mask"] & bit:
            dims.append(np.newaxis)
        elif attrs["shrink_axis_mask"] & bit:
            if step <= 0:
                raise ShapeError("a dim that is taken away must have a positive stride")
            dims.append(begin[i])
        else:
            if step == 0:
                raise ShapeError("a stride must not be 0")
            first = None if attrs["begin_mask"] & bit else begin[i]
            last = None if attrs["end_mask"] & bit else end[i]
            dims.append(slice(first, last, step))
    if dims.count(Ellipsis) > 1:
        raise ShapeError("a slice has one ellipsis at most")
    return tuple(dims) if Ellipsis in dims else (*dims, Ellipsis)


def _infer_strided_slice(types: Types, attrs: Attrs, consts: Consts) -> Sequence[Type]:
    x = tensor(types, 0)
    begin, end, strides = (all_known(ints(types, consts, i)) for i in (1, 2, 3))
    if begin is None or end is None or strides is None or x.shape is None:
        return (TensorType(x.dtype),)
    if not len(begin) == len(end) == len(strides):
        raise ShapeError("begin, end and strides have different lengths")
    index = _index(begin, end, strides, attrs)
    dims = _sliced(x.shape, index)
    data: tuple[Dim, ...] | None = None
    if x.data is not None and len(x.shape) == 1 and len(dims) <= 1 and np.newaxis not in index:
        taken: Any = np.array(x.data, object)[index]
        data = tuple(taken.reshape(-1).tolist())
    return (TensorType(x.dtype, dims, data),)


def _sliced(dims: Shape, index: tuple[Any, ...]) -> Shape:
    used = sum(1 for item in index if item is not Ellipsis and item is not np.newaxis)
    if used > len(dims):
        raise ShapeError(f"{used} dims are sliced of {len(dims)}")
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
                everything = item == slice(None, None, item.step) and abs(item.step) == 1
                length = len(range(*item.indices(dim))) if isinstance(dim, int) else None
                result.append(dim if everything else length)
            elif isinstance(dim, int) and not -dim <= item < dim:
                raise ShapeError(f"slice index {item} of a dim of {dim} is out of bounds")
    return tuple(result)


@operator("StridedSlice", domain=TENSORFLOW, infer=_infer_strided_slice, strings=True, moves=True)
def strided_slice(node: Node, types: Types) -> Kernel:
    attrs = node.attrs

    def function(x: np.ndarray, begin: Any, end: Any, strides: Any) -> np.ndarray:
        index = _index(begin.tolist(), end.tolist(), strides.tolist(), attrs)
        try:
            return x[index]
        except IndexError as error:
            raise ShapeError(f"slice index out of bounds: {error}") from error

    return Kernel(function, view=True)


def _infer_slice(types: Types, attrs: Attrs, consts: Consts) -> Sequence[Type]:
    x = tensor(types, 0)
    begin, sizes = all_known(ints(types, consts, 1)), all_known(ints(types, consts, 2))
    if x.shape is None or begin is None or sizes is None:
        return (TensorType(x.dtype, None if x.shape is None else (None,) * len(x.shape)),)
    if not len(x.shape) == len(begin) == len(sizes):
        raise ShapeError(f"begin {begin} and size {sizes} do not fit shape {x.shape}")
    dims: list[Dim] = []
    for dim, first, count in zip(x.shape, begin, sizes, strict=True):
        if isinstance(dim, int):
            dims.append(_count(dim, first, count))
        else:
            if count < -1:
                raise ShapeError(f"a slice of {count}")
            dims.append(dim if count == -1 and first == 0 else None if count == -1 else count)
    return (TensorType(x.dtype, tuple(dims)),)


def _count(dim: int, first: int, count: int) -> int:
    wanted = dim - first if count == -1 else count
    if not (0 <= first <= dim and 0 <= wanted <= dim - first):
        raise ShapeError(f"a slice of {count} from {first} is not in a dim of {dim}")
    return wanted


@operator("Slice", domain=TENSORFLOW, infer=_infer_slice, strings=True, moves=True)
def slice_operator(node: Node, types: Types) -> Kernel:
    def function(x: np.ndarray, begin: np.ndarray, sizes: np.ndarray) -> np.ndarray:
        if not begin.size == sizes.size == x.ndim:
            raise ShapeError(f"a slice of {begin.size} dims of shape {x.shape}")
        places = zip(x.shape, begin.tolist(), sizes.tolist(), strict=True)
        return x[tuple([slice(b, b + _count(n, b, s)) for n, b, s in places])]

    return Kernel(function, view=True)


def _infer_reverse(types: Types, attrs: Attrs, consts: Consts) -> Sequence[Type]:
    return (tensor(types, 0).without_data(),)


@operator("ReverseV2", domain=TENSORFLOW, infer=_infer_reverse, strings=True, moves=True)
def reverse(node: Node, types: Types) -> Kernel:
    def function(x: np.ndarray, axes: np.ndarray) -> np.ndarray:
        return np.flip(x, normalize_axes(axes.reshape(-1).tolist(), x.ndim))

    return Kernel(function, view=True)


@operator("Transpose", domain=TENSORFLOW, infer=dtype_only(), strings=True, moves=True)
def transpose(node: Node, types: Types) -> Kernel:
    """With an order of dims that only the run knows."""

    def function(x: np.ndarray, order: np.ndarray) -> np.ndarray:
        if sorted(order.tolist()) != list(range(x.ndim)):
            raise ShapeError(f"{order.tolist()} is no order of {x.ndim} dims")
        return x.transpose(order.tolist())

    return Kernel(function, view=True)


def _infer_matrix_transpose(types: Types, attrs: Attrs, consts: Consts) -> Sequence[Type]:
    x = tensor(types, 0)
    if x.shape is None:
        return (TensorType(x.dtype),)
    if len(x.shape) < 2:
        raise ShapeError(f"matrices have two dims or more, not shape {x.shape}")
    return (TensorType(x.dtype, (*x.shape[:-2], x.shape[-1], x.shape[-2])),)


@operator("MatrixTranspose", domain=TENSORFLOW, infer=_infer_matrix_transpose, moves=True)
def matrix_transpose(node: Node, types: Types) -> Kernel:
    """The last two dims swapped, however many there are; conjugated where ``conjugate`` says so."""
    if node.attrs.get("conjugate"):
        return Kernel(lambda x: np.conjugate(np.swapaxes(x, -1, -2)))
    return Kernel(lambda x: np.swapaxes(x, -1, -2), view=True)


# Several as one, and one as several.


def _infer_pack(types: Types, attrs: Attrs, consts: Consts) -> Sequence[Type]:
    input_types = [tensor(types, i) for i in range(len(types))]
    dtype = same_dtype(types, range(len(types)))
    if any(type_.shape is None for type_ in input_types):
        return (TensorType(dtype),)
    shapes: list[Shape] = [type_.shape for type_ in input_types]  # type: ignore[misc]
    if any(len(dims_) != len(shapes[0]) for dims_ in shapes):
        raise ShapeError(f"tensors of shapes {shapes} cannot be packed into one")
    axis = normalize_axis(attrs.get("axis", 0), len(shapes[0]) + 1)
    dims = [_known_of(dims_) for dims_ in zip(*shapes, strict=True)]
    data: list[Dim] | None = []
    for type_ in input_types:
        if shapes[0] or data is None:
            data = None
            break
        data.append(type_.data[0] if type_.data else None)
    numbers = tuple(data) if data is not None and dtype is not None and dtype.kind in "iu" else None
    return (TensorType(dtype, (*dims[:axis], len(input_types), *dims[axis:]), numbers),)


def _known_of(dims: Sequence[Dim]) -> Dim:
    """What is known of dims that are equal."""
    return next((dim for dim in dims if isinstance(dim, int)), dims[0])


@operator("Pack", domain=TENSORFLOW, infer=_infer_pack, strings=True, moves=True)
def pack(node: Node, types: Types) -> Kernel:
    axis = node.attrs.get("axis", 0)

    def function(*inputs: np.ndarray) -> np.ndarray:
        first = inputs[0].shape
        if any(x.shape != first for x in inputs):
            raise ShapeError(f"shapes of all inputs must match: {[x.shape for x in inputs]}")
        return np.stack(inputs, normalize_axis(axis, len(first) + 1))

    return Kernel(function)


def _infer_unpack(types: Types, attrs: Attrs, consts: Consts) -> Sequence[Type]:
    x = tensor(types, 0)
    count = attrs["num"]
    if x.shape is None:
        return [TensorType(x.dtype)] * count
    axis = normalize_axis(attrs.get("axis", 0), len(x.shape))
    rest = (*x.shape[:axis], *x.shape[axis + 1 :])
    if x.data is not None and len(x.data) == count and len(x.shape) == 1:
        return [TensorType(x.dtype, (), (element,)) for element in x.data]
    return [TensorType(x.dtype, rest)] * count


@operator("Unpack", domain=TENSORFLOW, infer=_infer_unpack, strings=True, moves=True)
def unpack(node: Node, types: Types) -> Kernel:
    axis, count = node.attrs.get("axis", 0), node.attrs["num"]

    def function(x: np.ndarray) -> Any:
        place = normalize_axis(axis, x.ndim)
        if x.shape[place] != count:
            raise ShapeError(f"a dim of {x.shape[place]} cannot be unpacked into {count}")
        parts = tuple([x[(slice(None),) * place + (i, ...)] for i in range(count)])
        return parts[0] if count == 1 else parts

    return Kernel(function, view=True)


def _infer_split(types: Types, attrs: Attrs, consts: Consts) -> Sequence[Type]:
    x, axis = tensor(types, 0), all_known(ints(types, consts, 1))
    count = attrs["num_split"]
    if x.shape is None or axis is None:
        return [TensorType(x.dtype)] * count
    place = normalize_axis(axis[0], len(x.shape))
    dim = x.shape[place]
    if isinstance(dim, int) and dim % count:
        raise ShapeError(f"a dim of {dim} cannot be split into {count} equal parts")
    part = dim // count if isinstance(dim, int) else None
    return [TensorType(x.dtype, (*x.shape[:place], part, *x.shape[place + 1 :]))] * count


@operator("Split", domain=TENSORFLOW, infer=_infer_split, strings=True, moves=True)
def split(node: Node, types: Types) -> Kernel:
    """What is split comes first here, and then the axis."""
    count = node.attrs["num_split"]

    def function(x: np.ndarray, axis: np.ndarray) -> Any:
        place = normalize_axis(_scalar(axis, "the axis"), x.ndim)
        if x.shape[place] % count:
            raise ShapeError(f"a dim of {x.shape[place]} cannot be split into {count} equal parts")
        parts = tuple(np.split(x, count, place))
        return parts[0] if count == 1 else parts

    return Kernel(function, view=True)


@operator("SplitV", domain=TENSORFLOW, strings=True, moves=True)
def split_v(node: Node, types: Types) -> Kernel:
    def function(x: np.ndarray, sizes: np.ndarray, axis: np.ndarray) -> Any:
        place = normalize_axis(_scalar(axis, "the axis"), x.ndim)
        counts = sizes.tolist()
        if counts.count(-1) == 1:
            counts[counts.index(-1)] = x.shape[place] - sum(counts) - 1
        if sum(counts) != x.shape[place] or min(counts, default=0) < 0:
            raise ShapeError(f"sizes {sizes.tolist()} do not fit a dim of {x.shape[place]}")
        parts = tuple(np.split(x, np.cumsum(counts)[:-1], place))
        return parts[0] if len(parts) == 1 else parts

    return Kernel(function, view=True)


@operator("ConcatV2", domain=TENSORFLOW, infer=dtype_only(), strings=True, moves=True)
def concat(node: Node, types: Types) -> Kernel:
    def function(*inputs: np.ndarray) -> np.ndarray:
        *values, axis = inputs
        place = normalize_axis(_scalar(axis, "the axis"), values[0].ndim)
        try:
            return np.concatenate(values, place)
        except ValueError as error:
            raise ShapeError(str(error)) from error

    return Kernel(function)


@operator("ConcatOffset", domain=TENSORFLOW)
def concat_offset(node: Node, types: Types) -> Kernel:
    """Where each of several concatenated tensors begins."""

    def function(axis: np.ndarray, *shapes: np.ndarray) -> Any:
        place = normalize_axis(_scalar(axis, "the axis"), shapes[0].size)
        offsets, at = [], 0
        for shape in shapes:
            offset = np.zeros_like(shape)
            offset[place] = at
            at += int(shape[place])
            offsets.append(offset)
        return offsets[0] if len(offsets) == 1 else tuple(offsets)

    return Kernel(function)


@operator(
    "IdentityN",
    domain=TENSORFLOW,
    strings=True,
    infer=lambda types, attrs, consts: [
        kind if kind is not None else TensorType() for kind in types
    ],
)
def identity_n(node: Node, types: Types) -> Kernel:
    """All of them live, or all of them dead: one node, and so no views."""

    def function(*inputs: Any) -> Any:
        copies = [x.copy() if isinstance(x, np.ndarray) else x for x in inputs]
        return copies[0] if len(copies) == 1 else tuple(copies)

    return Kernel(function)


# Elements by their places.


def _infer_gather(types: Types, attrs: Attrs, consts: Consts) -> Sequence[Type]:
    x, places = tensor(types, 0), tensor(types, 1)
    axis = all_known(ints(types, consts, 2)) if len(types) > 2 else (0,)
    if x.shape is None or places.shape is None or axis is None:
        return (TensorType(x.dtype),)
    place = normalize_axis(axis[0], len(x.shape))
    batch = _batch(attrs, places.shape)
    dims = (*x.shape[:place], *places.shape[batch:], *x.shape[place + 1 :])
    data = None
    numbers = all_known(places.data)
    if x.data is not None and numbers is not None and len(dims) <= 1 and not batch:
        if any(not 0 <= i < len(x.data) for i in numbers):
            raise ShapeError(f"indices {numbers} are not in [0, {len(x.data)})")
        data = tuple([x.data[i] for i in numbers])
    return (TensorType(x.dtype, dims, data),)


def _batch(attrs: Attrs, places: Sequence[Any]) -> int:
    batch = attrs.get("batch_dims", 0)
    batch = batch + len(places) if batch < 0 else batch
    if not 0 <= batch <= len(places):
        raise ShapeError(f"batch_dims {batch} do not fit indices of rank {len(places)}")
    return batch


@operator("GatherV2", domain=TENSORFLOW, infer=_infer_gather, strings=True, moves=True)
def gather(node: Node, types: Types) -> Kernel:
    """Without an axis given, along the first."""

    def function(x: np.ndarray, places: np.ndarray, axis: np.ndarray | None = None) -> Any:
        place = 0 if axis is None else normalize_axis(_scalar(axis, "the axis"), x.ndim)
        if places.size and (places.min() < 0 or places.max() >= x.shape[place]):
            raise ShapeError(
                f"indices from {places.min()} to {places.max()} are not in [0, {x.shape[place]})"
            )
        batch = _batch(node.attrs, places.shape)
        if not batch:
            return np.take(x, places, place)
        return _gathered(x, places, place, batch)

    return Kernel(function)


def _gathered(x: np.ndarray, places: np.ndarray, axis: int, batch: int) -> np.ndarray:
    """Elements of each of a batch by places of their own."""
    if x.shape[:batch] != places.shape[:batch] or axis < batch:
        raise ShapeError(f"{batch} dims of {x.shape} and {places.shape} are no common batch")
    moved = np.moveaxis(x, axis, batch)
    rest = places.ndim - batch
    grids = np.ogrid[tuple([slice(n) for n in x.shape[:batch]])] if batch else []
    index = tuple([grid.reshape(grid.shape + (1,) * rest) for grid in grids])
    taken = moved[(*index, places)]
    # The dims of the places stand where the axis was.
    order = [*range(batch), *range(batch + rest, rest + axis)]
    order += [*range(batch, batch + rest), *range(rest + axis, taken.ndim)]
    return taken.transpose(order)


@operator("ScatterNd", domain=TENSORFLOW, infer=dtype_only(1), strings=True)
def scatter_nd(node: Node, types: Types) -> Kernel:
    """Updates of one place add up."""

    def function(indices: np.ndarray, updates: np.ndarray, dims: np.ndarray) -> np.ndarray:
        out = np.zeros(_shape_given(dims), updates.dtype)
        limits = np.array(out.shape[: indices.shape[-1]])
        if indices.size and ((indices < 0) | (indices >= limits)).any():
            raise ShapeError(f"indices are out of bounds for shape {out.shape}")
        np.add.at(out, tuple(np.moveaxis(indices, -1, 0)), updates)
        return out

    return Kernel(function)


@operator("InvertPermutation", domain=TENSORFLOW, infer=_infer_reverse)
def invert_permutation(node: Node, types: Types) -> Kernel:
    def function(x: np.ndarray) -> np.ndarray:
        if x.ndim != 1 or not np.array_equal(np.sort(x), np.arange(x.size)):
            raise ShapeError(f"{x.tolist()} is no permutation")
        out = np.empty_like(x)
        out[x] = np.arange(x.size, dtype=x.dtype)
        return out

    return Kernel(function)


@operator(
    "Where",
    domain=TENSORFLOW,
    infer=lambda types, attrs, consts: (
        TensorType(np.dtype(np.int64), (None, tensor(types, 0).rank)),
    ),
    strings=True,
)
def where(node: Node, types: Types) -> Kernel:
    """The places of what is not zero, one in a row."""
    return Kernel(lambda x: np.argwhere(x))


def _infer_select(types: Types, attrs: Attrs, consts: Consts) -> Sequence[Type]:
    a, b = tensor(types, 1), tensor(types, 2)
    return (TensorType(same_dtype(types, (1, 2)), a.shape if a.shape is not None else b.shape),)


@operator("Select", domain=TENSORFLOW, infer=_infer_select, strings=True)
def select(node: Node, types: Types) -> Kernel:
    """A vector of conditions chooses among rows."""

    def function(condition: np.ndarray, a: np.ndarray, b: np.ndarray) -> np.ndarray:
        if a.shape != b.shape:
            raise ShapeError(f"shapes {a.shape} and {b.shape} differ")
        if condition.ndim == 1 and a.ndim > 1:
            condition = condition.reshape(-1, *(1,) * (a.ndim - 1))
        return np.where(condition, a, b)

    return Kernel(function)


# Reductions to truth values, over axes that are an input.


def _infer_truths(types: Types, attrs: Attrs, consts: Consts) -> Sequence[Type]:
    dims, axes = tensor(types, 0).shape, all_known(ints(types, consts, 1))
    if dims is None or axes is None:
        return (TensorType(BOOL),)
    gone = normalize_axes(axes, len(dims))
    if attrs.get("keep_dims"):
        return (TensorType(BOOL, tuple([1 if i in gone else d for i, d in enumerate(dims)])),)
    return (TensorType(BOOL, tuple([d for i, d in enumerate(dims) if i not in gone])),)


def _truths(function: Callable[..., Any]) -> Callable[[Node, Types], Kernel]:
    def compile(node: Node, types: Types) -> Kernel:
        keep = bool(node.attrs.get("keep_dims"))

        def reduce(x: np.ndarray, axes: np.ndarray) -> Any:
            places = normalize_axes(axes.reshape(-1).tolist(), x.ndim)
            return function(x, axis=places, keepdims=keep)

        return Kernel(reduce)

    return compile


operator("All", domain=TENSORFLOW, infer=_infer_truths)(_truths(np.all))
operator("Any", domain=TENSORFLOW, infer=_infer_truths)(_truths(np.any))

# Values that are there once.


@operator("Unique", domain=TENSORFLOW, strings=True)
@operator("UniqueWithCounts", domain=TENSORFLOW, strings=True)
def unique(node: Node, types: Types) -> Kernel:
    """In the order in which they come first, with the place of each element among them."""
    dtype = named_dtype(node.attrs, "out_idx", "int32")
    counting = len(node.outputs) == 3

    def function(x: np.ndarray) -> tuple[np.ndarray, ...]:
        if x.ndim != 1:
            raise ShapeError(f"a vector is needed, not shape {x.shape}")
        places: dict[Any, int] = {}
        if x.dtype == STRING:
            indices = np.array(
                [places.setdefault(element, len(places)) for element in x.tolist()], dtype
            )
            values = np.array(list(places), STRING)
            counts = np.bincount(indices, minlength=len(places)) if x.size else np.empty(0)
        else:
            sorted_, first, inverse, counts = np.unique(
                x, return_index=True, return_inverse=True, return_counts=True
            )
            order = np.argsort(first)
            back = np.empty_like(order)
            back[order] = np.arange(order.size)
            values, indices, counts = sorted_[order], back[inverse].astype(dtype), counts[order]
        rest = (counts.astype(dtype),) if counting else ()
        return (values, indices, *rest)

    return Kernel(function)
