"""ConstantOfShape, Range, EyeLike, OneHot and Trilu."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from penstock.core.types import BOOL, MAX_DATA, STRING, Dim, Shape, ShapeError, TensorType, Type
from penstock.ir.graph import Node
from penstock.ir.kernel import Kernel
from penstock.ir.op import Attrs, Consts, Types
from penstock.ops.common import shape_rules as rules
from penstock.ops.common.dtypes import BITS, is_half
from penstock.ops.onnx.pad import zero
from penstock.ops.onnx.shape import unknown_shape
from penstock.ops.registry import array_operator, operator


def _fill_value(attrs: Attrs) -> np.ndarray:
    value = attrs.get("value")
    value = np.zeros((), np.float32) if value is None else np.asarray(value)
    return rules.one_element(value, "value")


def _infer_constant_of_shape(types: Types, attrs: Attrs, consts: Consts) -> Sequence[Type]:
    value = _fill_value(attrs)
    shape: Shape | None = rules.ints(types, consts, 0)
    if shape is None:
        return (TensorType(value.dtype, unknown_shape(types, 0)),)
    if any(isinstance(d, int) and d < 0 for d in shape):
        raise ShapeError(f"input {list(shape)} is not a valid shape: its dims must not be negative")

    def contents() -> tuple[Dim, ...] | None:
        dims = rules.all_known(shape)
        if dims is None or math.prod(dims) > MAX_DATA:
            return None
        return (int(value),) * math.prod(dims)

    return (rules.with_data(TensorType(value.dtype, shape), contents),)


@operator("ConstantOfShape", since=9, infer=_infer_constant_of_shape)
def constant_of_shape(node: Node, types: Types) -> Kernel:
    value = _fill_value(node.attrs)
    # The operating system provides zeroed pages on first access.
    zeros = value.dtype != object and not any(value.tobytes())

    def run(shape: np.ndarray) -> np.ndarray:
        try:
            # NumPy takes longer to read the dims from an array, and np.full several times as long.
            dims = tuple(shape.reshape(-1).tolist())
            if zeros:
                return np.zeros(dims, value.dtype)
            out = np.empty(dims, value.dtype)
        except ValueError as error:
            raise ShapeError(f"input {shape.tolist()} is not a valid shape: {error}") from None
        out[...] = value
        return out

    def into(_: np.ndarray, out: np.ndarray) -> None:
        out[...] = value

    return Kernel(run, into)


_DOUBLE = 11  # the number of float64 among ONNX's element types


def _range_length(start: float, limit: float, delta: float) -> int:
    if delta == 0:
        raise ShapeError("the delta of Range must not be 0")
    # A division in float64 would round integers above 2**53.
    if isinstance(start, int) and isinstance(limit, int) and isinstance(delta, int):
        return max(-((start - limit) // delta), 0)
    try:
        return max(math.ceil((limit - start) / delta), 0)
    except (ValueError, OverflowError):
        raise ShapeError(
            f"start {start}, limit {limit} and delta {delta} must be finite and give a finite "
            "length"
        ) from None


def _number(x: np.ndarray) -> int | float:
    one = rules.one_element(x, "an input of Range")
    return int(one) if x.dtype.kind in "iu" else float(one)


def _infer_range(types: Types, attrs: Attrs, consts: Consts) -> Sequence[Type]:
    dtype = rules.same_dtype(types, range(3))
    bounds: list[Any] = []
    for i in range(3):
        const = consts[i] if i < len(consts) else None
        data = rules.tensor(types, i).data
        bounds.append(_number(const) if const is not None else data[0] if data else None)
    start, limit, delta = bounds
    if all(isinstance(x, int | float) for x in bounds):
        n = _range_length(start, limit, delta)
        type_ = TensorType(dtype, (n,))
        if n > MAX_DATA:
            return (type_,)
        return (rules.with_data(type_, lambda: tuple(range(start, start + n * delta, delta))),)
    # Symbolic dims occur here only as the positions along an axis of that size.
    return (TensorType(dtype, (limit if start == 0 and delta == 1 else None,)),)


@array_operator("Range", since=11, infer=_infer_range, copied=True)
def range_(
    start: np.ndarray, limit: np.ndarray, delta: np.ndarray, *, stash_type: int = 1
) -> np.ndarray:
    dtype = start.dtype
    first, step = _number(start), _number(delta)
    n = _range_length(first, _number(limit), step)
    if dtype.kind in "iu":
        return np.arange(first, first + n * step, step, dtype=dtype)
    single = is_half(dtype) and stash_type != _DOUBLE
    steps: Any = np.arange(n, dtype=np.float32 if single else np.float64)
    # As in ONNX's definition; np.arange uses the rounded difference of the first two elements.
    return (steps * step + first).astype(dtype, copy=False)


def _infer_eye_like(types: Types, attrs: Attrs, consts: Consts) -> tuple[TensorType]:
    x = rules.tensor(types, 0)
    if x.shape is not None and len(x.shape) != 2:
        raise ShapeError(f"the input must have rank 2, but has shape {list(x.shape)}")
    return (TensorType(rules.dtype_attribute(attrs, "dtype") or x.dtype, x.shape or (None, None)),)


@array_operator("EyeLike", since=9, infer=_infer_eye_like, copied=True)
def eye_like(x: np.ndarray, *, k: int = 0, dtype: int = 0) -> np.ndarray:
    (type_,) = _infer_eye_like([TensorType(x.dtype, x.shape)], {"dtype": dtype}, ())
    rows, columns = type_.dims
    return np.eye(rows, columns, k, type_.dtype)


def _infer_one_hot(types: Types, attrs: Attrs, consts: Consts) -> Sequence[Type]:
    indices, values = rules.tensor(types, 0), rules.tensor(types, 2)
    classes = rules.one_integer(types, consts, 1, "depth", 0)
    if indices.shape is None:
        return (TensorType(values.dtype),)
    axis = rules.normalize_axis(attrs.get("axis", -1), len(indices.shape) + 1)
    shape = (*indices.shape[:axis], classes, *indices.shape[axis:])
    return (TensorType(values.dtype, shape),)


MAX_CLASSES = 2**16  # up to which a kernel keeps the class indices as a constant


@operator("OneHot", since=11, infer=_infer_one_hot, strings=True, traits={"exact"})
@operator("OneHot", since=9, version=10, infer=_infer_one_hot, strings=True, traits={"exact"})
def one_hot(node: Node, types: Types) -> Kernel:
    """Negative indices count from the end since version 11; before, they select no class."""
    axis, from_the_end = node.attrs.get("axis", -1), node.op.since == 11
    contents = rules.known_ints(node, types, 1)
    fixed = None if contents is None or contents[0] > MAX_CLASSES else np.arange(contents[0])

    def hot(indices: np.ndarray, depth: np.ndarray, values: np.ndarray) -> np.ndarray:
        if values.shape != (2,):
            raise ShapeError(
                f"values must be [off_value, on_value], but has shape {list(values.shape)}"
            )
        if depth.size != 1 or not 0 <= depth.item() < np.inf:
            raise ShapeError(f"depth {depth.tolist()} must be one number of classes, at least 0")
        where, count = rules.normalize_axis(axis, indices.ndim + 1), int(depth.item())
        if not indices.size:
            return np.empty((*indices.shape[:where], count, *indices.shape[where:]), np.bool_)
        classes = np.arange(count) if fixed is None else fixed
        picked = indices.astype(np.int64, copy=False)
        if from_the_end:
            picked = np.where(picked < 0, picked + count, picked)
        picked = picked.reshape(*indices.shape[:where], 1, *indices.shape[where:])
        return picked == classes.reshape(-1, *[1] * (indices.ndim - where))

    def run(indices: np.ndarray, depth: np.ndarray, values: np.ndarray) -> np.ndarray:
        return np.where(hot(indices, depth, values), values[1, ...], values[0, ...])

    def into(indices: np.ndarray, depth: np.ndarray, values: np.ndarray, out: np.ndarray) -> None:
        mask = hot(indices, depth, values)
        out[...] = values[0, ...]
        np.copyto(out, values[1, ...], where=mask)

    return Kernel(run, into)


@operator("Trilu", since=14, infer=rules.same_type, strings=True, traits={"exact"})
def trilu(node: Node, types: Types) -> Kernel:
    upper = bool(node.attrs.get("upper", 1))
    contents = rules.known_ints(node, types, 1) if rules.given(node.inputs, 1) else (0,)

    def mask(dims: Sequence[int], k: int, dtype: np.dtype) -> np.ndarray:
        """A bit mask of the elements to keep, which is faster than selection; booleans for item
            sizes
        without an integer type."""
        if len(dims) < 2:
            raise ShapeError(f"the input must have rank 2 or more, but has shape {list(dims)}")
        diagonal = np.arange(dims[-1]) - np.arange(dims[-2])[:, None]
        kept: np.ndarray = diagonal >= k if upper else diagonal <= k
        if dtype == STRING or dtype.itemsize not in BITS:
            return kept
        bits = BITS[dtype.itemsize]
        return np.where(kept, np.array(-1, bits), np.array(0, bits))

    x = rules.tensor(types, 0)
    dims = rules.all_known(x.shape)
    fixed = None
    if dims is not None and contents and x.dtype is not None:
        fixed = mask(dims, contents[0], x.dtype)

    def run(
        x: np.ndarray, k: np.ndarray | None = None, out: np.ndarray | None = None
    ) -> np.ndarray:
        offset = 0 if k is None else int(rules.one_element(k, "k"))
        bits = mask(x.shape, offset, x.dtype) if fixed is None else fixed
        out = np.empty_like(x) if out is None else out
        if bits.dtype == BOOL:
            out[...] = np.where(bits, x, zero(x.dtype))
        else:
            np.bitwise_and(x.view(bits.dtype), bits, out.view(bits.dtype))
        return out

    if len(node.inputs) > 1:
        return Kernel(run, run, inplace=(0,))
    return Kernel(run, lambda x, out: run(x, None, out), inplace=(0,))
