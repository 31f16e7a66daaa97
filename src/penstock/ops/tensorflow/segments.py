"""Segment reductions: rows with equal segment ids, which ascend, are reduced to one."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from penstock.core.types import STRING, Dim, ShapeError, TensorType, Type
from penstock.host.current_run import reserve
from penstock.ir.op import Attrs, Consts, Types
from penstock.ops.common import shape_rules as rules
from penstock.ops.common.dtypes import is_half
from penstock.ops.onnx.text import strings
from penstock.ops.tensorflow import common, text

# The ufunc that combines rows, and its value for empty segments.
_REDUCTIONS: dict[str, tuple[np.ufunc, int]] = {
    "sum": (np.add, 0),
    "mean": (np.add, 0),
    "sqrtn": (np.add, 0),
    "prod": (np.multiply, 1),
    "max": (np.maximum, 0),
    "min": (np.minimum, 0),
}


def _infer(types: Types, attrs: Attrs, consts: Consts) -> Sequence[Type]:
    x, places = rules.tensor(types, 0), rules.tensor(types, 1).shape
    if x.shape is None:
        return (TensorType(x.dtype),)
    if not x.shape or not rules.fits(places, x.shape[:1]):
        raise ShapeError(
            f"segment_ids of shape {places} must have one entry per row of the data, {x.shape}"
        )
    count: Dim = None
    if len(types) > 2:
        counts = common.lengths(rules.ints(types, consts, 2))
        count = counts[0] if counts else None
    return (TensorType(x.dtype, (count, *x.shape[1:])),)


def _checked(x: np.ndarray, places: np.ndarray, count: np.ndarray | None) -> int:
    """The number of segments. Raises ``ShapeError`` unless ``places`` has one id per row, in
    ascending order."""
    if places.ndim != 1 or x.shape[:1] != places.shape:
        raise ShapeError(f"segment_ids {places.shape} must have one entry per row of {x.shape}")
    if (places[1:] < places[:-1]).any():
        row = int(np.argmax(places[1:] < places[:-1])) + 1
        raise ShapeError(
            f"segment_ids must not decrease, but entry {row} is {places[row]} after "
            f"{places[row - 1]}"
        )
    if places.size and places[0] < 0:
        raise ShapeError(f"segment_ids must not be negative, but entry 0 is {places[0]}")
    last = int(places[-1]) + 1 if places.size else 0
    if count is None:
        return last
    size = common.count(count, "the number of segments")
    if last > size:
        raise ShapeError(f"segment_ids up to {last - 1} must be less than num_segments, {size}")
    return size


@common.array_operator("Segment", infer=_infer)
def segment(
    x: np.ndarray, places: np.ndarray, count: np.ndarray | None = None, *, reduction: str
) -> np.ndarray:
    """Reduce segments; ``sqrtn`` divides sums by the square root of the number of rows. The
    optional third input is the number of segments.
    """
    function, missing = _REDUCTIONS[reduction]
    out = np.full((_checked(x, places, count), *x.shape[1:]), missing, x.dtype)
    if not places.size:
        return out
    starts = np.flatnonzero(np.concatenate(([True], places[1:] != places[:-1])))
    # 16-bit floats accumulate in float32.
    wide = x.astype(np.float32) if is_half(x.dtype) else x
    # Without the dtype, NumPy would accumulate small integers in int64.
    rows = function.reduceat(wide, starts, axis=0, dtype=wide.dtype)
    if reduction in ("mean", "sqrtn"):
        counts = np.diff(starts, append=len(places)).astype(rows.real.dtype)
        counts = counts.reshape(-1, *(1,) * (x.ndim - 1))
        rows = _divided(rows, counts if reduction == "mean" else np.sqrt(counts))
    out[places[starts]] = rows
    return out


def _divided(sums: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """Means of integers are rounded towards zero."""
    if sums.dtype.kind in "iu":
        return (sums - np.fmod(sums, counts)) // counts
    return sums / counts


def _infer_join(types: Types, attrs: Attrs, consts: Consts) -> Sequence[Type]:
    shape, places = rules.tensor(types, 0).shape, rules.tensor(types, 1).shape
    counts = common.lengths(rules.ints(types, consts, 2))
    if shape is None or places is None or counts is None:
        return (TensorType(STRING),)
    return (TensorType(STRING, (counts[0], *shape[len(places) :])),)


@text.array_operator("UnsortedSegmentJoin", infer=_infer_join)
def unsorted_segment_join(
    x: np.ndarray, places: np.ndarray, count: np.ndarray, *, separator: str = ""
) -> np.ndarray:
    """Join the texts of each segment in their order."""
    size = common.count(count, "the number of segments")
    if x.shape[: places.ndim] != places.shape or not places.ndim:
        raise ShapeError(f"segment_ids {places.shape} must be the first dims of {x.shape}")
    if places.size and not 0 <= places.min() <= places.max() < size:
        raise ShapeError(f"segment_ids {places.tolist()} must be from 0 to {size - 1}")
    rest = x.shape[places.ndim :]
    columns = math.prod(rest)
    parts: list[list[str]] = [[] for _ in range(size * columns)]
    flat = iter(text.texts(x))
    for place in places.reshape(-1).tolist():
        for column in range(columns):
            parts[place * columns + column].append(next(flat))
    reserve(sum(len(part) for part in x.reshape(-1).tolist()))
    return strings([text.valid(separator.join(part)) for part in parts], (size, *rest))
