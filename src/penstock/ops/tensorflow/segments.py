"""Rows of one segment reduced to one, where the numbers of segments rise from row to row."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from penstock.core.types import Dim, ShapeError, TensorType, Type
from penstock.ir.op import Attrs, Consts, Types
from penstock.ops.common import shape_rules as rules
from penstock.ops.common.dtypes import is_half
from penstock.ops.tensorflow import common

# The ufunc that joins rows, and the element that stands in segments without any.
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
        raise ShapeError(f"segments of shape {places} for {x.shape}; each row needs one")
    count: Dim = None
    if len(types) > 2:
        counts = common.lengths(rules.ints(types, consts, 2))
        count = counts[0] if counts else None
    return (TensorType(x.dtype, (count, *x.shape[1:])),)


def _checked(x: np.ndarray, places: np.ndarray, count: np.ndarray | None) -> int:
    """The number of segments. Raises ``ShapeError`` unless ``places`` has one for each row, and
    they rise."""
    if places.ndim != 1 or x.shape[:1] != places.shape:
        raise ShapeError(f"segments of shape {places.shape} for {x.shape}; each row needs one")
    if (places[1:] < places[:-1]).any():
        row = int(np.argmax(places[1:] < places[:-1])) + 1
        raise ShapeError(
            f"segment {places[row]} of row {row} is below that before it; segments must not fall"
        )
    if places.size and places[0] < 0:
        raise ShapeError(f"segment {places[0]} of row 0 is negative")
    last = int(places[-1]) + 1 if places.size else 0
    if count is None:
        return last
    size = common.count(count, "the number of segments")
    if last > size:
        raise ShapeError(f"segments up to {last - 1} are not below {size}")
    return size


@common.array_operator("Segment", infer=_infer)
def segment(
    x: np.ndarray, places: np.ndarray, count: np.ndarray | None = None, *, reduction: str
) -> np.ndarray:
    """``sqrtn`` divides sums by the root of their number of rows. A third input has the number of
    segments; without it, the last row's is the last."""
    function, missing = _REDUCTIONS[reduction]
    out = np.full((_checked(x, places, count), *x.shape[1:]), missing, x.dtype)
    if not places.size:
        return out
    starts = np.flatnonzero(np.concatenate(([True], places[1:] != places[:-1])))
    # 16-bit floats are added up in 32 bits.
    wide = x.astype(np.float32) if is_half(x.dtype) else x
    # Without the dtype, NumPy would add small integers up in 64 bits.
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
