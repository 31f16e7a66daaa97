"""Unique, Bincount, HistogramFixedWidth, LowerBound, UpperBound and InTopK."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from penstock.core.checkpoints import checkpoint, with_checkpoints
from penstock.core.types import BOOL, Dim, ShapeError, TensorType, Type
from penstock.ir.op import Attrs, Consts, Types
from penstock.ops.common import shape_rules as rules
from penstock.ops.common.distinct import distinct_rows
from penstock.ops.registry import OUTPUT_COUNT
from penstock.ops.tensorflow import common

# Distinct values.


def _number_type(attrs: Attrs) -> np.dtype:
    return common.named_dtype(attrs, "out_idx", "int32", "iu")


def _infer_unique(types: Types, attrs: Attrs, consts: Consts) -> Sequence[Type]:
    """The types of the distinct values, their indices for each element, and their counts."""
    x, dtype = rules.tensor(types, 0), _number_type(attrs)
    dims: Sequence[Dim] | None = x.shape
    numbers: Dim = None
    if dims is not None and len(types) > 1:
        axes = rules.all_known(rules.ints(types, consts, 1))
        if not axes:
            dims = None if axes is None and len(dims) != 1 else dims
        else:
            axis = rules.normalize_axis(axes[0], len(dims))
            numbers = dims[axis]
            dims = (*dims[:axis], None, *dims[axis + 1 :])
    if dims is not None and len(dims) == 1:
        numbers, dims = (x.shape or (None,))[0], (None,)
    values = TensorType(x.dtype, None if dims is None else tuple(dims))
    return values, TensorType(dtype, (numbers,)), TensorType(dtype, (None,))


@common.array_operator(
    *("Unique", "UniqueWithCounts"),
    strings=True,
    infer=_infer_unique,
    prepared={**OUTPUT_COUNT, "dtype": lambda node: _number_type(node.attrs)},
)
def unique(
    x: np.ndarray, axes: np.ndarray | None = None, *, dtype: np.dtype, count: int
) -> tuple[np.ndarray, ...]:
    """Distinct elements in order of first occurrence, or distinct slices along the axis in the
    second input; the index of each element among them; and, as a third output, their counts. NaNs
    are distinct from one another.
    """
    axis = _slice_axis(x, axes)
    moved = np.moveaxis(x, axis, 0) if axis else x
    first, numbers = _distinct_rows(moved.reshape(len(moved), math.prod(moved.shape[1:])))
    parts = x.take(first, axis), numbers.astype(dtype)
    if count < 3:
        return parts[:count]
    return *parts, np.bincount(numbers, minlength=len(first)).astype(dtype)


@common.array_operator(
    "ListDiff",
    strings=True,
    infer=lambda types, attrs, consts: (
        TensorType(rules.tensor(types, 0).dtype, (None,)),
        TensorType(_number_type(attrs), (None,)),
    ),
    prepared={"dtype": lambda node: _number_type(node.attrs)},
)
def list_difference(x: np.ndarray, y: np.ndarray, *, dtype: np.dtype) -> tuple[np.ndarray, ...]:
    """The elements of x that are not in y, and their places."""
    if x.ndim != 1 or y.ndim != 1:
        raise ShapeError(f"two vectors are needed, not {x.shape} and {y.shape}")
    # A set holds strings and numbers alike, which NumPy's sorting sets do not.
    others = set(y.tolist())
    kept = np.flatnonzero([element not in others for element in with_checkpoints(x.tolist())])
    return x[kept], kept.astype(dtype)


def _slice_axis(x: np.ndarray, axes: np.ndarray | None) -> int:
    """The axis whose slices are compared."""
    if axes is None or not axes.size:
        if x.ndim != 1:
            raise ShapeError(f"without an axis, the input must have rank 1, not shape {x.shape}")
        return 0
    if axes.size > 1 or axes.ndim != 1:
        raise ShapeError(f"axis must be a vector of at most one element, not {axes.tolist()}")
    return rules.normalize_axis(int(axes[0]), x.ndim)


def _distinct_rows(rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The indices of rows that differ from all previous ones, and each row's index among these."""
    real = rows.dtype.kind == "f"
    if rows.size and (rows.dtype.kind in "biu" or (real and not np.isnan(rows).any())):
        return distinct_rows(rows + rows.dtype.type(0) if real else rows)[:2]  # -0 becomes 0
    places: dict[tuple[Any, ...], int] = {}
    first: list[int] = []
    numbers = np.empty(len(rows), np.int64)
    for i, row in enumerate(rows.tolist()):
        checkpoint()
        # Each NaN is a new object, so that tuples that contain one are never equal.
        numbers[i] = places.setdefault(tuple(row), len(places))
        if len(places) > len(first):
            first.append(i)
    return np.array(first, np.int64), numbers


# Bins.


def _infer_bins(types: Types, attrs: Attrs, consts: Consts) -> Sequence[Type]:
    """The shape [size], or [rows, size] for values of rank 2."""
    ragged = len(types) == 4
    dtype, shape = rules.tensor(types, 3 if ragged else 2).dtype, rules.tensor(types, 0).shape
    sizes = common.lengths(rules.ints(types, consts, 2 if ragged else 1))
    if shape is None:
        return (TensorType(dtype),)
    bins = sizes[0] if sizes else None
    if ragged:
        splits = shape[0] if shape else None
        rows = splits - 1 if isinstance(splits, int) else None
        return (TensorType(dtype, (rows, bins)),)
    return (TensorType(dtype, (*shape[:-1], bins)),)


def _binned(
    rows: np.ndarray, count: int, x: np.ndarray, size: np.ndarray, weights: np.ndarray, binary: bool
) -> np.ndarray:
    """Count the values of each row in each bin, or sum their weights, or, if ``binary``, return
    whether any exist. ``rows`` has the row of each value; values of ``size`` or more are
    ignored."""
    bins = common.count(size, "the number of bins")
    if weights.size and weights.shape != x.shape:
        raise ShapeError(f"weights of shape {weights.shape} must be empty or have shape {x.shape}")
    if x.size and x.min() < 0:
        raise ShapeError(f"values must not be negative, but the minimum is {x.min()}")
    out = np.zeros((count, bins), weights.dtype)
    inside = x < bins
    places = (rows * bins + x)[inside]
    if binary:
        out.reshape(-1)[places] = 1
    elif weights.size:
        np.add.at(out.reshape(-1), places, weights[inside])
    else:
        out[...] = np.bincount(places.reshape(-1), minlength=out.size).reshape(out.shape)
    return out


@common.array_operator("DenseBincount", infer=_infer_bins)
def dense_bincount(
    x: np.ndarray, size: np.ndarray, weights: np.ndarray, *, binary_output: bool = False
) -> np.ndarray:
    if x.ndim > 2:
        raise ShapeError(f"the values must have rank 1 or 2, but have shape {x.shape}")
    count = len(x) if x.ndim == 2 else 1
    rows = np.arange(count).reshape(-1, 1) if x.ndim == 2 else np.zeros(x.shape, np.int64)
    out = _binned(rows, count, x, size, weights, binary_output)
    return out if x.ndim == 2 else out[0]


@common.array_operator("RaggedBincount", infer=_infer_bins)
def ragged_bincount(
    splits: np.ndarray,
    x: np.ndarray,
    size: np.ndarray,
    weights: np.ndarray,
    *,
    binary_output: bool = False,
) -> np.ndarray:
    """DenseBincount for ragged rows, whose ``splits`` are the offsets of rows and the final end."""
    if splits.ndim != 1 or not splits.size or splits[0] != 0 or splits[-1] != x.size:
        raise ShapeError(f"splits {splits.tolist()} must start at 0 and end at {x.size}")
    rows = np.searchsorted(np.maximum.accumulate(splits), np.arange(x.size), "right") - 1
    return _binned(rows, splits.size - 1, x, size, weights, binary_output)


# Positions in sorted rows.


@common.array_operator(
    *("LowerBound", "UpperBound"),
    infer=rules.same_shape(common.out_type, 1),
    prepared={**common.OUT_TYPE, "lower": lambda node: node.op.name == "LowerBound"},
)
def bound(rows: np.ndarray, values: np.ndarray, *, out_type: np.dtype, lower: bool) -> np.ndarray:
    """The insertion index of each value in the same row of ``rows``, which is sorted: before
    (``lower``) or after equal elements."""
    if rows.ndim != 2 or values.ndim != 2 or len(rows) != len(values):
        raise ShapeError(
            f"values {values.shape} and sorted rows {rows.shape} must be matrices with equal "
            "numbers of rows"
        )
    out = np.empty(values.shape, out_type)
    for place, row, wanted in zip(out, rows, values, strict=True):
        checkpoint()
        place[:] = np.searchsorted(row, wanted, "left" if lower else "right")
    if lower:
        out[values != values] = 0  # no element is below NaN
    return out


@common.array_operator("InTopKV2", infer=rules.same_shape(BOOL, 1))
def in_top_k(predictions: np.ndarray, targets: np.ndarray, k: np.ndarray) -> np.ndarray:
    """Whether fewer than k classes have a greater prediction than the target. False for targets
    that are no class index, and for rows with non-finite predictions."""
    if predictions.ndim != 2 or targets.ndim != 1 or len(predictions) != len(targets):
        raise ShapeError(
            f"targets {targets.shape} and predictions {predictions.shape} must be [N] and [N, C]"
        )
    most = common.integer(k, "k")
    classes = predictions.shape[1]
    known = (targets >= 0) & (targets < classes)
    if not classes:
        return known
    # An invalid target reads class 0; its row becomes False below.
    own = predictions[np.arange(len(targets)), np.where(known, targets, 0)]
    ahead = (predictions > own[:, np.newaxis]).sum(axis=1)
    return known & np.isfinite(predictions).all(axis=1) & (ahead < most)


@common.array_operator(
    "HistogramFixedWidth",
    infer=lambda types, attrs, consts: (
        TensorType(
            common.named_dtype(attrs, "dtype", "int32", "iu"),
            (None if consts[2] is None else common.count(consts[2], "nbins"),),
        ),
    ),
    prepared={"dtype": lambda node: common.named_dtype(node.attrs, "dtype", "int32", "iu")},
)
def histogram_fixed_width(
    x: np.ndarray, ends: np.ndarray, bins: np.ndarray, *, dtype: np.dtype
) -> np.ndarray:
    """Counts of the elements in bins of equal width. Elements beyond the range are in the first
    and the last bin."""
    number = common.count(bins, "nbins")
    if ends.shape != (2,) or not ends[0] < ends[1] or not number:
        raise ShapeError(f"value_range {ends.tolist()} must ascend, and nbins {number} be positive")
    if x.dtype.kind == "f" and np.isnan(x).any():
        raise ShapeError("the values have NaN, which is in no bin")
    low, high = ends
    # The width is that of TensorFlow: of the difference in the type of the elements.
    width = float(high - low) / number
    # Clipped at both ends first, as infinite places are no integers.
    places = np.minimum((np.clip(x, low, high) - low).astype(np.float64) / width, number - 1)
    return np.bincount(places.astype(np.int64).reshape(-1), minlength=number).astype(dtype)
