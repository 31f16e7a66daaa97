"""Maxima and sums of the rows of a matrix, several times faster than NumPy's reductions."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from penstock.core.types import RunValue

# Called as (x, axis, dtype, out, keepdims, initial): keywords cost as much as a short row.
_add: Callable[..., RunValue] = np.add.reduce
_maximum: Callable[..., RunValue] = np.maximum.reduce

MANY = 4  # rows
SHORT = 2048  # elements


def maxima(
    x: np.ndarray, out: np.ndarray | None = None, places: np.ndarray | None = None
) -> np.ndarray:
    """The maximum of each row of a contiguous matrix, as a column; NaN where there is one.
    ``places`` are those of the maxima, if they are known."""
    rows, width = x.shape
    if out is None:
        out = np.empty((rows, 1), x.dtype)
    if places is not None or (rows >= MANY and 0 < width <= SHORT):
        # NumPy finds the place of a maximum of a short row faster than the maximum itself.
        places = x.argmax(1) if places is None else places
        # All places are in range; to raise for others NumPy would buffer the output.
        np.take(x.reshape(-1), places + np.arange(0, x.size, width), None, out[:, 0], "clip")
    else:
        _maximum(x, 1, None, out, True, -math.inf)
    return out


def sums(x: np.ndarray, out: np.ndarray | None = None) -> np.ndarray:
    """The sum of each row of a matrix of float32 or float64, as a column: a product with ones."""
    if out is None:
        out = np.empty((len(x), 1), x.dtype)
    if len(x) >= MANY:
        np.matmul(x, np.ones(x.shape[1], x.dtype), out[:, 0])
    else:
        _add(x, 1, None, out, True)
    return out
