"""Histograms of the measurements of a server: seconds, and rows of batches."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from itertools import accumulate

SECONDS = (
    *(0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05),
    *(0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, math.inf),
)
"""bucket bounds for request durations in seconds; small models take tenths of a millisecond"""
ROWS = (*(float(1 << i) for i in range(11)), math.inf)
"""bucket bounds for rows per batch"""


class Histogram:
    """The number of values in each bucket, and their sum. A value belongs to the first bucket whose
    bound it does not exceed; the last bound is infinity. Callers must hold a lock."""

    # prometheus_client's own histograms take a lock for each bucket of each value.

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: Sequence[float] = SECONDS) -> None:
        self.bounds = bounds
        self.counts = [0] * len(bounds)
        self.total = 0.0

    def add(self, value: float, times: int = 1) -> None:
        """Count a value."""
        self.counts[bisect_left(self.bounds, value)] += times
        self.total += value * times

    @property
    def count(self) -> int:
        """The number of values."""
        return sum(self.counts)

    def cumulative(self) -> list[int]:
        """Return each bound with the number of values up to it."""
        return [*accumulate(self.counts)]

    def copy(self) -> Histogram:
        """Return an independent histogram with the same values."""
        other = Histogram(self.bounds)
        other.counts, other.total = [*self.counts], self.total
        return other
