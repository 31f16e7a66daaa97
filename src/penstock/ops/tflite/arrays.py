"""Parts of arrays that are replaced, joined or counted, and arithmetic on 8-bit codes."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np

from penstock.core.types import ShapeError, TensorType, Type
from penstock.ir.graph import Node
from penstock.ir.op import Attrs, Consts, Types
from penstock.ops import registry
from penstock.ops.common import fixed_point
from penstock.ops.common import shape_rules as rules
from penstock.ops.common.code_curves import on_lines, softmax_points
from penstock.ops.common.dtypes import INT32, dtype_info, is_half
from penstock.ops.common.fixed_point import (
    mean_multiplier,
    mean_scales,
    product_multiplier,
    rescaled,
    rescaled_product,
    softmax_multiplier,
)
from penstock.ops.onnx.reduce import compile_reduction, infer_reduction

COMPLEX64 = np.dtype(np.complex64)
array_operator = partial(registry.array_operator, domain=registry.TFLITE)


# ONNX's take no integers of 16 bits.
for _name in ("ReduceMax", "ReduceMin"):
    registry.operator(
        _name, domain=registry.TFLITE, infer=infer_reduction(None), traits={"total by parameters"}
    )(compile_reduction)


@array_operator("DynamicUpdateSlice", infer=rules.same_type, strings=True)
def dynamic_update_slice(x: np.ndarray, update: np.ndarray, start: np.ndarray) -> np.ndarray:
    """``x`` with ``update`` in it from ``start`` on, or from where it still fits."""
    sizes, given = update.shape, start.reshape(-1).tolist()
    room = [dim - size for dim, size in zip(x.shape, sizes, strict=False)]
    if start.shape != (len(room),) or x.ndim != update.ndim or min(room, default=0) < 0:
        raise ShapeError(f"an update of {sizes} at {start.shape} places in {x.shape}")
    places = [min(max(at, 0), most) for at, most in zip(given, room, strict=True)]
    out = x.copy()
    out[tuple([slice(at, at + size) for at, size in zip(places, sizes, strict=True)])] = update
    return out


@array_operator("NumericVerify", infer=lambda types, attrs, consts: (rules.tensor(types, 1),))
def numeric_verify(
    x: np.ndarray, reference: np.ndarray, *, most: float | None = None
) -> np.ndarray:
    """``x - reference``; raises ``ShapeError`` if one of the differences is above ``most``."""
    if x.shape != reference.shape:
        raise ShapeError(f"values of shape {x.shape}, but a reference of {reference.shape}")
    differences = x - reference
    if most is not None and (np.abs(differences) > most).any():
        raise ShapeError(f"a value differs by {np.abs(differences).max()}, above {most}")
    return differences


@array_operator("Bucketize", infer=rules.same_shape(INT32))
def bucketize(x: np.ndarray, *, boundaries: Sequence[float]) -> np.ndarray:
    """The number of boundaries that are not above each element."""
    # Boundaries of integers may lie between two of them.
    return np.searchsorted(np.array(boundaries, np.result_type(x, "f")), x, "right").astype(INT32)


def _table_dtype(node: Node) -> np.dtype | None:
    return rules.dtype_attribute(node.attrs, "to")


def _infer_table(types: Types, attrs: Attrs, consts: Consts) -> Sequence[Type]:
    x = rules.tensor(types, 0)
    return (TensorType(rules.dtype_attribute(attrs, "to") or x.dtype, x.shape),)


@array_operator(
    "CodeTable",
    infer=_infer_table,
    elementwise=True,
    prepared={"table": lambda node: np.array(node.attrs["table"]), "to": _table_dtype},
)
def code_table(x: np.ndarray, *, table: np.ndarray, to: np.dtype | None) -> np.ndarray:
    """The entry of ``table`` for each code of 8 or 16 bits, of which it has all: entry i is that of
    the code with the bits of the unsigned integer i. Results are codes of as many bits, by default
    of the same dtype."""
    return table[x.view(f"u{x.itemsize}")].astype(to or x.dtype)


def _multipliers(node: Node) -> Sequence[fixed_point.Multiplier]:
    return fixed_point.pair_multipliers(node.attrs["operation"], node.attrs["scales"])


@array_operator(
    "IntegerArithmetic",
    infer=rules.broadcast_type,
    elementwise=True,
    prepared={"multipliers": _multipliers},
)
def integer_arithmetic(
    a: np.ndarray,
    b: np.ndarray,
    *,
    operation: str,
    multipliers: Sequence[fixed_point.Multiplier],
    zero_points: Sequence[int],
    code_limits: Sequence[int],
) -> np.ndarray:
    """The codes of a + b, a - b, a * b or (a - b)^2 by integers alone, as TFLite's reference
    kernels compute them, from ``code_limits[0]`` to ``[1]``.

    ``operation`` is "Add", "Sub", "Mul" or "SquaredDifference"; ``multipliers`` are those of
    ``scales``, which, as ``zero_points``, are of a, b and the result.
    """
    *by, of_result = multipliers
    x, y = [v.astype(np.int64) - zero for v, zero in zip((a, b), zero_points, strict=False)]
    if by:
        x, y = [
            fixed_point.rescaled(v << fixed_point.bits_of_terms(operation), own)
            for v, own in zip((x, y), by, strict=True)
        ]
    totals = {"Add": np.add, "Mul": np.multiply, "Sub": np.subtract}
    total = totals[operation](x, y) if operation in totals else (x - y) ** 2
    codes = fixed_point.rescaled(total, of_result) + zero_points[2]
    low, high = code_limits
    return np.clip(codes, low, high).astype(a.dtype)


def _infer_mean(types: Types, attrs: Attrs, consts: Consts) -> Sequence[Type]:
    x, axes = rules.tensor(types, 0), attrs["axes"]
    if x.shape is None:
        return (TensorType(x.dtype),)
    kept = attrs["keepdims"]
    dims = [1 if i in axes else dim for i, dim in enumerate(x.shape) if kept or i not in axes]
    return (TensorType(x.dtype, tuple(dims)),)


@array_operator("IntegerMean", infer=_infer_mean)
def integer_mean(
    x: np.ndarray,
    *,
    axes: Sequence[int],
    keepdims: int,
    scales: Sequence[float],
    zero_points: Sequence[int],
    form: str,
) -> np.ndarray:
    """The codes of the mean over ``axes``, or of the sum; axes are not negative. ``scales`` and
    ``zero_points`` are of x and of the result. A ``form`` of "fixed point" is a mean that is
    rescaled in integers, as by TFLite's reference kernels; a "mean" or a "sum" is rounded in
    float32, as by ONNX's QuantizeLinear."""
    count = math.prod([x.shape[axis] for axis in axes])
    of_x, of_y = mean_scales(scales, count, form)
    sums = x.sum(tuple(axes), np.int64, keepdims=bool(keepdims)) - count * zero_points[0]
    if form == "fixed point":
        steps = rescaled(sums, mean_multiplier((of_x, of_y), count))
    else:
        steps = np.rint((sums / count).astype(np.float32) / (np.float32(of_y) / np.float32(of_x)))
    ends = np.iinfo(x.dtype)
    return np.clip(steps + zero_points[1], ends.min, ends.max).astype(x.dtype)


@array_operator("IntegerProduct", infer=_infer_mean)
def integer_product(
    x: np.ndarray,
    *,
    axes: Sequence[int],
    keepdims: int,
    scales: Sequence[float],
    zero_points: Sequence[int],
) -> np.ndarray:
    """The codes of the product over ``axes``, which are in order and not negative, as TFLite's
    reference kernels compute it: rescaled in integers behind each factor. ``scales`` and
    ``zero_points`` are of x and of the result."""
    count, kept = math.prod([x.shape[axis] for axis in axes]), [*range(x.ndim)]
    kept = [axis for axis in kept if axis not in axes]
    factors = x.transpose([*axes, *kept]).reshape(count, -1).astype(np.int64) - zero_points[0]
    by, product = product_multiplier(scales, count), np.ones(factors.shape[1], np.int64)
    for i, factor in enumerate(factors):
        product = factor if i == 0 else rescaled_product(product * factor, by)
    ends = np.iinfo(x.dtype)
    codes = np.clip(rescaled_product(product, by) + zero_points[1], ends.min, ends.max)
    dims = [1 if i in axes else dim for i, dim in enumerate(x.shape) if keepdims or i not in axes]
    return codes.astype(x.dtype).reshape(dims)


def _softmax_multiplier(node: Node) -> fixed_point.Multiplier:
    return softmax_multiplier(node.attrs["scale"], node.attrs["beta"])


@array_operator(
    "IntegerSoftmax",
    infer=rules.same_type,
    prepared={"by": _softmax_multiplier, "points": lambda node: softmax_points()},
)
def integer_softmax(x: np.ndarray, *, by: fixed_point.Multiplier, points: np.ndarray) -> np.ndarray:
    """The softmax along the last axis of codes of int16 in steps of ``scale``, times ``beta``: as
    TFLite's reference kernel computes it, by tables of exp(x) and 1 / (1 + x), with 15 bits behind
    the point."""
    if not x.size:
        return x.copy()
    less = x.astype(np.int64) - x.max(-1, keepdims=True)
    steps = np.clip(rescaled(less, by) + 32767, -32768, 32767)
    powers = on_lines(points[0], steps)
    total = powers.sum(-1, keepdims=True)
    # From 1 to 2, with 30 bits behind the point; then less 1, with 16.
    shift = 30 - np.floor(np.log2(total)).astype(np.int64)
    rest = (((total << shift) + (1 << 13)) >> 14) - (1 << 16) - (1 << 15)
    inverse = on_lines(points[1], np.clip(rest, -32768, 32767))
    right = 30 - shift
    codes = (powers * inverse + (1 << right >> 1)) >> right
    return np.clip(codes, 0, 32767).astype(x.dtype)


def _infer_dense(types: Types, attrs: Attrs, consts: Consts) -> Sequence[Type]:
    dims = rules.ints(types, consts, 1)
    if dims is not None and any(isinstance(dim, int) and dim < 0 for dim in dims):
        raise ShapeError(f"dims must not be negative: {list(dims)}")
    return (TensorType(rules.tensor(types, 2).dtype, None if dims is None else tuple(dims)),)


@array_operator("SparseToDense", infer=_infer_dense, strings=True)
def sparse_to_dense(
    indices: np.ndarray,
    dims: np.ndarray,
    values: np.ndarray,
    default: np.ndarray,
    *,
    sorted: bool = False,
) -> np.ndarray:
    """Values at their places, or one value at all of them, and the default elsewhere. A place is a
    row, or of one dim, a number. Raises ``ShapeError`` for places that are out of bounds, and if
    they are to be ``sorted``, for those that do not come behind the one before."""
    out = np.full(dims.tolist(), rules.one_element(default, "the default")[()], values.dtype)
    places = indices.reshape(-1, 1) if indices.ndim < 2 else indices
    if places.ndim != 2 or places.shape[1] != out.ndim:
        raise ShapeError(f"indices of shape {indices.shape} for dims {dims.tolist()}")
    if values.ndim and values.shape != places.shape[:1]:
        raise ShapeError(f"values of shape {values.shape} for {len(places)} places")
    if ((places < 0) | (places >= out.shape)).any():
        raise ShapeError(f"indices are out of bounds for shape {out.shape}")
    if sorted and len(places) > 1:
        steps = np.diff(np.ravel_multi_index(tuple(places.T), out.shape))
        if steps.min() <= 0:
            place = int(np.argmax(steps <= 0)) + 1
            fault = "repeated" if steps[place - 1] == 0 else "out of order"
            raise ShapeError(f"place {places[place].tolist()} at {place} is {fault}")
    out[tuple(places.T)] = values
    return out


_REDUCTIONS = {"sum": np.add, "prod": np.multiply, "max": np.maximum, "min": np.minimum}
IDENTITIES: dict[str, Callable[[np.dtype], Any]] = {
    "sum": lambda dtype: 0,
    "prod": lambda dtype: 1,
    "max": lambda dtype: dtype_info(dtype).min,
    "min": lambda dtype: dtype_info(dtype).max,
}
"""what a segment without elements has, by the name of the reduction"""


def _infer_segment(types: Types, attrs: Attrs, consts: Consts) -> Sequence[Type]:
    x, places = rules.tensor(types, 0), rules.tensor(types, 1).shape
    if x.shape is None or places is None:
        return (TensorType(x.dtype),)
    if not rules.fits(x.shape[: len(places)], places):
        raise ShapeError(f"segments of {places} for {x.shape}")
    counts = rules.ints(types, consts, 2)
    if counts and isinstance(counts[0], int) and counts[0] < 0:
        raise ShapeError(f"the number of segments must not be negative: {counts[0]}")
    return (TensorType(x.dtype, (counts[0] if counts else None, *x.shape[len(places) :])),)


@array_operator("Segment", infer=_infer_segment)
def segment(
    x: np.ndarray, segments: np.ndarray, count: np.ndarray, *, reduction: str
) -> np.ndarray:
    """Elements of one segment reduced to one; negative numbers stand for none."""
    if x.shape[: segments.ndim] != segments.shape:
        raise ShapeError(f"segments of {segments.shape} for {x.shape}")
    places = segments.reshape(-1)
    # Sums and products of 16-bit floats are computed in 32 bits.
    exact = reduction in ("max", "min") or not is_half(x.dtype)
    width = math.prod(x.shape[segments.ndim :])
    rows = (x if exact else x.astype(np.float32)).reshape(places.size, width)
    size = int(count.item())
    if size < 0:
        raise ShapeError(f"the number of segments must not be negative: {size}")
    if places.max(initial=-1) >= size:
        raise ShapeError(f"segments up to {places.max()} are not below {size}")
    out = np.full((size, rows.shape[1]), IDENTITIES[reduction](x.dtype), rows.dtype)
    used = places >= 0
    # Segments repeat in places: an indexed assignment would count each but once.
    _REDUCTIONS[reduction].at(out, places[used], rows[used])
    return out.reshape(size, *x.shape[segments.ndim :]).astype(x.dtype, copy=False)


array_operator("ToComplex", infer=rules.same_shape(COMPLEX64))(lambda x: x.astype(COMPLEX64))
array_operator("ComplexMul", infer=rules.broadcast_type)(np.multiply)


def _infer_view(types: Types, attrs: Attrs, consts: Consts) -> Sequence[Type]:
    dtype, x = rules.dtype_attribute(attrs, "to"), rules.tensor(types, 0)
    if dtype is None or x.dtype is None or x.shape is None:
        return (TensorType(dtype),)
    if dtype.itemsize < x.dtype.itemsize:
        return (TensorType(dtype, (*x.shape, x.dtype.itemsize // dtype.itemsize)),)
    parts = dtype.itemsize // x.dtype.itemsize
    if not x.shape or (isinstance(x.shape[-1], int) and x.shape[-1] != parts):
        raise ShapeError(f"elements of {dtype.itemsize} bytes out of {x.dtype}{[*x.shape]}")
    return (TensorType(dtype, x.shape[:-1]),)


@array_operator(
    "ViewAs",
    infer=_infer_view,
    view=True,
    prepared={"dtype": lambda node: rules.dtype_attribute(node.attrs, "to")},
)
def view_as(x: np.ndarray, *, dtype: np.dtype) -> np.ndarray:
    """The bytes of ``x`` as elements of another size: of smaller ones there is one more dim, of
    larger ones the last dim is that of the elements' parts."""
    larger = dtype.itemsize // x.itemsize
    if larger > 1 and x.shape[-1:] != (larger,):
        raise ShapeError(f"elements of {dtype.itemsize} bytes out of {x.dtype}{[*x.shape]}")
    # NumPy views only a contiguous last axis as elements of another size.
    x = np.ascontiguousarray(x if larger else x[..., np.newaxis])
    return x.view(dtype)[..., 0] if larger > 1 else x.view(dtype)
