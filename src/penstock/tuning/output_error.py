"""The error of outputs beside those that are wanted, as a share of their spread."""

# tests: tests/quantizing/test_measuring.py tests/session/test_quantize_after.py

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from penstock.core.records import NamedTuple
from penstock.core.types import NamedValues


class OutputError(NamedTuple):
    """The error of one output, or the largest of all: ``rms``, the root of the mean of squared
    differences in the worst sample, and ``largest``, the largest difference of an element, both as
    shares of the spread of the float model's output: its largest element less its smallest."""

    rms: float
    largest: float


def spreads_of(outputs: Sequence[NamedValues]) -> dict[str, float]:
    """The spread of each output over all samples, of those that can be compared: tensors of finite
    real numbers."""
    spreads = {}
    for name in outputs[0]:
        arrays = [o[name] for o in outputs]
        if not all(_comparable(a) for a in arrays):
            continue
        low, high = min(float(a.min()) for a in arrays), max(float(a.max()) for a in arrays)
        # An output that is the same for all samples has no spread: its size stands for it.
        spread = high - low
        spreads[name] = spread if spread > 0 else max(abs(high), 1.0)
    return spreads


def _comparable(array: object) -> bool:
    if not isinstance(array, np.ndarray) or not array.size or array.dtype.kind not in "f":
        return False
    return bool(np.isfinite(array).all())


def output_error(wanted: np.ndarray, array: np.ndarray, spread: float) -> OutputError:
    """The error of an output in one sample."""
    # Such as the boxes of a detector, of which a candidate may find another number.
    if wanted.shape != array.shape:
        return OutputError(math.inf, math.inf)
    difference = np.abs(array.astype(np.float64) - wanted)
    if not np.isfinite(difference).all():
        return OutputError(math.inf, math.inf)
    rms = math.sqrt(float(np.mean(np.square(difference)))) / spread
    return OutputError(rms, float(difference.max()) / spread)
