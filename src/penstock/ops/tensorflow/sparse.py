"""Sparse tensors: indices [n, rank] of int64, values [n], and a shape [rank] of int64."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import pairwise

import numpy as np

from penstock.core.types import BOOL, INT64, ShapeError, TensorType, Type
from penstock.host.current_run import reserve
from penstock.ir.op import Attrs, Consts, Types
from penstock.ops.common import shape_rules as rules
from penstock.ops.tensorflow import common
from penstock.ops.tensorflow.text import array_operator


def _checked(indices: np.ndarray, values: np.ndarray | None, shape: np.ndarray) -> list[int]:
    """The shape of a sparse tensor. Raises ``ShapeError`` where its parts do not fit together."""
    if indices.ndim != 2 or shape.shape != indices.shape[1:]:
        raise ShapeError(
            f"a sparse tensor has indices [n, rank] and a shape [rank], not {indices.shape} and "
            f"{shape.shape}"
        )
    if values is not None and values.shape != indices.shape[:1]:
        raise ShapeError(f"{len(indices)} indices need as many values, not {values.shape}")
    dims = [int(dim) for dim in shape]
    if min(dims, default=0) < 0 or math.prod(dims) >= 2**63:
        raise ShapeError(f"the dense shape {dims} is negative or too large")
    outside = (indices < 0) | (indices >= shape)
    if outside.any():
        row = int(outside.any(1).argmax())
        raise ShapeError(f"index {indices[row].tolist()} is outside of the dense shape {dims}")
    return dims


def _infer_parts(rank: int | None, dtype: np.dtype | None) -> tuple[TensorType, ...]:
    of_dtype = TensorType(dtype, (None,))
    return TensorType(INT64, (None, rank)), of_dtype, TensorType(INT64, (rank,))


def _rank(type_: TensorType, axis: int) -> int | None:
    dim = type_.shape[axis] if type_.shape is not None and len(type_.shape) > axis else None
    return dim if isinstance(dim, int) else None


def _infer_reshape(types: Types, attrs: Attrs, consts: Consts) -> Sequence[Type]:
    rank = _rank(rules.tensor(types, 2), 0)
    indices, _, shape = _infer_parts(rank, None)
    return indices, shape


@array_operator("SparseReshape", infer=_infer_reshape)
def sparse_reshape(
    indices: np.ndarray, shape: np.ndarray, new_shape: np.ndarray
) -> tuple[np.ndarray, ...]:
    """Return indices and shape of the same values in row-major order; one new dim may be -1."""
    dims, wanted = _checked(indices, None, shape), new_shape.tolist()
    if new_shape.ndim != 1 or wanted.count(-1) > 1 or min(wanted, default=0) < -1:
        raise ShapeError(f"new_shape must be a list of dims with at most one -1, not {wanted}")
    count = math.prod(dims)
    if -1 in wanted:
        known = math.prod([dim for dim in wanted if dim != -1])
        if not known:
            raise ShapeError(f"the dim -1 of {wanted} can be anything, as another dim is 0")
        wanted[wanted.index(-1)] = count // known
    if math.prod(wanted) != count:
        raise ShapeError(f"{dims} cannot be reshaped to {new_shape.tolist()}")
    places = np.zeros(len(indices), np.int64)
    for axis, dim in enumerate(dims):
        places = places * dim + indices[:, axis]
    result = np.empty((len(indices), len(wanted)), np.int64)
    for axis in range(len(wanted) - 1, -1, -1):
        # Without values, dims may be 0.
        places, result[:, axis] = np.divmod(places, max(wanted[axis], 1))
    return result, np.array(wanted, np.int64)


def _infer_filled(types: Types, attrs: Attrs, consts: Consts) -> Sequence[Type]:
    values, rank = rules.tensor(types, 1), _rank(rules.tensor(types, 0), 1)
    indices, filled, _ = _infer_parts(rank, values.dtype)
    dims = values.shape if values.shape is not None and len(values.shape) == 1 else (None,)
    return indices, filled, TensorType(BOOL, (None,)), TensorType(INT64, dims)


@array_operator("SparseFillEmptyRows", infer=_infer_filled)
def sparse_fill_empty_rows(
    indices: np.ndarray, values: np.ndarray, shape: np.ndarray, default: np.ndarray
) -> tuple[np.ndarray, ...]:
    """Return indices and values by row, with ``default`` at column 0 of rows that have none; which
    rows had none; and the place of each given value in the result."""
    dims = _checked(indices, values, shape)
    if not dims or default.ndim:
        raise ShapeError("a sparse tensor with rows and a scalar as default value are needed")
    # Rows that a shape only claims to have take memory: for their counts, indices and order.
    reserve((4 + 2 * len(dims)) * 8 * dims[0])
    counts = np.bincount(indices[:, 0], minlength=dims[0])
    empty = counts == 0
    first = np.zeros((int(empty.sum()), len(dims)), np.int64)
    first[:, 0] = np.flatnonzero(empty)
    joined = np.concatenate([indices, first])
    order = np.argsort(joined[:, 0], kind="stable")
    added = np.full(len(first), default.item() if values.dtype == object else default, values.dtype)
    places = np.empty(len(joined), np.int64)
    places[order] = np.arange(len(joined))
    filled = np.concatenate([values, added])[order]
    return joined[order], filled, empty, places[: len(values)]


def _in_order(indices: np.ndarray) -> np.ndarray:
    """The places of indices in row-major order."""
    return np.lexsort(indices.T[::-1]) if indices.size else np.arange(len(indices))


def _infer_order(types: Types, attrs: Attrs, consts: Consts) -> Sequence[Type]:
    return rules.tensor(types, 0), rules.tensor(types, 1)


@array_operator("SparseReorder", infer=_infer_order)
def sparse_reorder(
    indices: np.ndarray, values: np.ndarray, shape: np.ndarray
) -> tuple[np.ndarray, ...]:
    """Return indices and values in row-major order."""
    _checked(indices, values, shape)
    order = _in_order(indices)
    return indices[order], values[order]


def _infer_concat(types: Types, attrs: Attrs, consts: Consts) -> Sequence[Type]:
    count = attrs["N"]
    return _infer_parts(_rank(rules.tensor(types, 0), 1), rules.tensor(types, count).dtype)


@array_operator("SparseConcat", infer=_infer_concat)
def sparse_concat(*inputs: np.ndarray, concat_dim: int, N: int) -> tuple[np.ndarray, ...]:
    """Return indices, values and shape of sparse tensors joined along an axis, in row-major order;
    ``inputs`` are the indices of all, then their values, then their shapes."""
    parts = [*zip(inputs[:N], inputs[N : 2 * N], inputs[2 * N :], strict=True)]
    shapes = [_checked(*part) for part in parts]
    axis = rules.normalize_axis(concat_dim, len(shapes[0]))
    others = {(*dims[:axis], *dims[axis + 1 :]) for dims in shapes}
    if len(others) > 1 or any(len(dims) != len(shapes[0]) for dims in shapes):
        raise ShapeError(f"the shapes {shapes} differ in other dims than {axis}")
    begin, moved = 0, []
    for (indices, _, _), dims in zip(parts, shapes, strict=True):
        own = indices.copy()
        own[:, axis] += begin
        moved.append(own)
        begin += dims[axis]
    indices = np.concatenate(moved)
    order = _in_order(indices)
    values = np.concatenate([values for _, values, _ in parts])
    shape = [*shapes[0][:axis], begin, *shapes[0][axis + 1 :]]
    return indices[order], values[order], np.array(shape, np.int64)


def _infer_slice(types: Types, attrs: Attrs, consts: Consts) -> Sequence[Type]:
    return _infer_parts(_rank(rules.tensor(types, 0), 1), rules.tensor(types, 1).dtype)


@array_operator("SparseSlice", infer=_infer_slice)
def sparse_slice(
    indices: np.ndarray, values: np.ndarray, shape: np.ndarray, start: np.ndarray, size: np.ndarray
) -> tuple[np.ndarray, ...]:
    """Return indices, values and shape of a part, which ends where the tensor ends."""
    _checked(indices, values, shape)
    if not start.shape == size.shape == shape.shape or (start < 0).any() or (size < 0).any():
        raise ShapeError(
            f"start {start.tolist()} and size {size.tolist()} must have a number for each of "
            f"{len(shape)} axes, none of them negative"
        )
    kept = np.maximum(np.minimum(size, shape - start), 0)
    inside = ((indices >= start) & (indices - start < kept)).all(1)
    return indices[inside] - start, values[inside], kept


def _infer_product(types: Types, attrs: Attrs, consts: Consts) -> Sequence[Type]:
    b = rules.tensor(types, 3)
    columns = None if b.shape is None or len(b.shape) != 2 else b.shape[not attrs["adjoint_b"]]
    return (TensorType(b.dtype, (None, columns)),)


@common.array_operator("SparseTensorDenseMatMul", infer=_infer_product)
def sparse_matmul(
    indices: np.ndarray,
    values: np.ndarray,
    shape: np.ndarray,
    b: np.ndarray,
    *,
    adjoint_a: bool,
    adjoint_b: bool,
) -> np.ndarray:
    """The product of a sparse matrix and a dense one, each perhaps conjugated and transposed."""
    dims = _checked(indices, values, shape)
    b = b.conj().T if adjoint_b else b
    rows, inner = dims[::-1] if adjoint_a else dims if len(dims) == 2 else (0, 0)
    if len(dims) != 2 or b.ndim != 2 or len(b) != inner:
        raise ShapeError(f"a sparse matrix of shape {dims} cannot be multiplied by {b.shape}")
    to, source = indices.T[::-1] if adjoint_a else indices.T
    reserve(rows * b.shape[1] * b.itemsize)
    result = np.zeros((rows, b.shape[1]), b.dtype)
    np.add.at(result, to, (values.conj() if adjoint_a else values)[:, None] * b[source])
    return result


def _infer_sum(types: Types, attrs: Attrs, consts: Consts) -> Sequence[Type]:
    return _infer_parts(_rank(rules.tensor(types, 2), 0), rules.tensor(types, 1).dtype)


@array_operator("SparseAdd", infer=_infer_sum)
def sparse_add(
    a: np.ndarray, x: np.ndarray, a_shape: np.ndarray, *rest: np.ndarray
) -> tuple[np.ndarray, ...]:
    """The sum of two sparse tensors in row-major order, without sums of two elements that are below
    ``least``."""
    (b, y, b_shape, least), dims = rest, _checked(a, x, a_shape)
    if _checked(b, y, b_shape) != dims:
        raise ShapeError(f"tensors of dims {dims} and {b_shape.tolist()} cannot be added")
    indices = np.concatenate([a, b])
    places = np.ravel_multi_index(tuple(indices.T), dims) if dims else np.zeros(len(indices), int)
    # Distinct places ascend, as elements of a sparse tensor must.
    _, first, numbers, counts = np.unique(places, True, True, True)
    values = np.zeros(len(first), x.dtype)
    np.add.at(values, numbers, np.concatenate([x, y]))
    kept = (counts == 1) | (np.abs(values) >= rules.one_element(least, "thresh"))
    return indices[first[kept]], values[kept], a_shape


@array_operator(
    "SparseTensorDenseAdd", infer=lambda types, *_: [rules.tensor(types, 3).without_data()]
)
def sparse_dense_add(
    indices: np.ndarray, values: np.ndarray, shape: np.ndarray, dense: np.ndarray
) -> np.ndarray:
    if tuple(_checked(indices, values, shape)) != dense.shape:
        raise ShapeError(f"tensors of dims {shape.tolist()} and {dense.shape} cannot be added")
    out = dense.copy()
    np.add.at(out, tuple(indices.T), values)
    return out


def _infer_values(types: Types, attrs: Attrs, consts: Consts) -> Sequence[Type]:
    return (rules.tensor(types, 1).without_data(),)


def _elementwise(name: str, function: Callable[[np.ndarray, np.ndarray], np.ndarray]) -> None:
    @array_operator(name, infer=_infer_values)
    def compute(
        indices: np.ndarray, values: np.ndarray, shape: np.ndarray, dense: np.ndarray
    ) -> np.ndarray:
        dims = _checked(indices, values, shape)
        try:
            whole = np.broadcast_to(dense, dims)
        except ValueError as error:
            raise ShapeError(f"{dense.shape} does not broadcast to {dims}") from error
        return function(values, whole[tuple(indices.T)])


_elementwise("SparseDenseCwiseAdd", np.add)
_elementwise("SparseDenseCwiseMul", np.multiply)


def _reduction(name: str, function: np.ufunc) -> None:
    @array_operator(name, infer=lambda types, *_: [TensorType(rules.tensor(types, 1).dtype)])
    def reduce(
        indices: np.ndarray,
        values: np.ndarray,
        shape: np.ndarray,
        axes: np.ndarray,
        *,
        keep_dims: bool = False,
    ) -> np.ndarray:
        """A dense tensor of reductions along the axes, with 0 where there are no values."""
        dims = _checked(indices, values, shape)
        gone = rules.normalize_axes(axes.reshape(-1).tolist(), len(dims))
        kept = [axis for axis in range(len(dims)) if axis not in gone]
        out = _zeros([dims[axis] for axis in kept], values.dtype)
        places = indices[:, kept]
        # Elements start with one of their values, as 0 may be more than all of them.
        out[tuple(places.T)] = values if kept else values[-1:].sum() if len(values) else 0
        if function is np.add:
            out[...] = 0
        # Without kept axes, the dots are the only index.
        whole = function.reduce(values) if not kept and len(values) else values
        if len(values):
            function.at(out, (..., *places.T), whole)
        if keep_dims:
            return out.reshape([1 if i in gone else dim for i, dim in enumerate(dims)])
        return out


_reduction("SparseReduceSum", np.add)
_reduction("SparseReduceMax", np.maximum)


def _infer_parts_of_split(types: Types, attrs: Attrs, consts: Consts) -> Sequence[Type]:
    rank, count = _rank(rules.tensor(types, 1), 1), attrs["num_split"]
    parts = _infer_parts(rank, rules.tensor(types, 2).dtype)
    return [part for part in parts for _ in range(count)]


@array_operator("SparseSplit", infer=_infer_parts_of_split)
def sparse_split(
    axis: np.ndarray, indices: np.ndarray, values: np.ndarray, shape: np.ndarray, *, num_split: int
) -> tuple[np.ndarray, ...]:
    """Indices, then values, then shapes of parts along an axis; the first ones have one row more if
    it cannot be divided."""
    dims = _checked(indices, values, shape)
    (place,) = rules.normalize_axes([common.integer(axis, "split_dim")], len(dims))
    if not 1 <= num_split <= dims[place]:
        raise ShapeError(f"{dims[place]} rows cannot be split into {num_split} parts")
    size, more = divmod(dims[place], num_split)
    starts = [i * size + min(i, more) for i in range(num_split + 1)]
    parts = []
    for first, last in pairwise(starts):
        inside = (indices[:, place] >= first) & (indices[:, place] < last)
        own, part = indices[inside], shape.copy()
        own[:, place] -= first
        part[place] = last - first
        parts.append((own, values[inside], part))
    return tuple(part for kind in zip(*parts, strict=True) for part in kind)


def _zeros(dims: list[int], dtype: np.dtype) -> np.ndarray:
    reserve(math.prod(dims) * dtype.itemsize)
    return np.zeros(dims, dtype)


@array_operator("SparseSoftmax", infer=_infer_values)
def sparse_softmax(indices: np.ndarray, values: np.ndarray, shape: np.ndarray) -> np.ndarray:
    """The softmax of the elements that each row of the last dim has."""
    _checked(indices, values, shape)
    if indices.shape[1] < 2:
        raise ShapeError(f"a softmax of rows needs two dims or more, not {shape.tolist()}")
    _, rows = np.unique(indices[:, :-1], axis=0, return_inverse=True)
    count = int(rows.max(initial=-1)) + 1
    # Less the maximum of its row, no exponential overflows.
    top = np.full(count, -np.inf, values.dtype)
    np.maximum.at(top, rows, values)
    powers = np.exp(values - top[rows])
    total = np.zeros(count, values.dtype)
    np.add.at(total, rows, powers)
    return powers / total[rows]
