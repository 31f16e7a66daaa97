"""The error of outputs beside those that are wanted, as a share of their spread."""

# tests: tests/quantizing/test_measuring.py tests/session/test_quantize_after.py

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from penstock.core.records import NamedTuple
from penstock.core.types import NamedValues
from penstock.observers.ranges import Range, range_of
from penstock.ops.common.dtypes import is_float


class OutputError(NamedTuple):
    """The error of one output, or the largest of all: ``rms``, the root of the mean of squared
    differences in the worst sample, and ``largest``, the largest difference of an element, both as
    shares of the spread of the float model's output: its largest element less its smallest."""

    rms: float
    largest: float


def spreads_of(outputs: Sequence[NamedValues]) -> dict[str, float]:
    """The spread of each output over all samples, of those that can be compared: tensors with
    finite real numbers."""
    ranges: dict[str, Range] = {}
    for own in outputs:
        for name, array in own.items():
            if isinstance(array, np.ndarray) and is_float(array.dtype):
                # Of some samples there may be no elements, such as boxes of a detector, and some
                # may be infinite, such as what a mask hides.
                finite = range_of(array[np.isfinite(array)].astype(np.float64))
                ranges[name] = ranges.get(name, Range()) | finite
    spreads = {}
    for name, whole in ranges.items():
        if whole.min <= whole.max:
            # An output that is the same for all samples has no spread: its size stands for it.
            spread = whole.max - whole.min
            spreads[name] = spread if spread > 0 else max(abs(whole.max), 1.0)
    return spreads


def output_error(wanted: np.ndarray, array: np.ndarray, spread: float) -> OutputError:
    """The error of an output in one sample."""
    # Such as the boxes of a detector, of which a candidate may find another number.
    if wanted.shape != array.shape:
        return OutputError(math.inf, math.inf)
    # Elements that are infinite or NaN must be equal.
    finite = np.isfinite(wanted)
    if not finite.all():
        if not np.array_equal(wanted[~finite], array[~finite], equal_nan=True):
            return OutputError(math.inf, math.inf)
        wanted, array = wanted[finite], array[finite]
    if not array.size:
        return OutputError(0.0, 0.0)
    difference = np.abs(array.astype(np.float64) - wanted)
    if not np.isfinite(difference).all():
        return OutputError(math.inf, math.inf)
    rms = math.sqrt(float(np.mean(np.square(difference)))) / spread
    return OutputError(rms, float(difference.max()) / spread)
