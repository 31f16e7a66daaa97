"""Observers that compare the values of two runs: the first keeps them, the second compares.

Values are matched by their names. Of a value that is computed several times in a run, as in loops,
the first execution counts.
"""

from __future__ import annotations

import threading

import numpy as np

from penstock.core.records import dataclass
from penstock.core.types import RunValue, RunValues
from penstock.observers.base import ObservedRun, Observer, named_outputs
from penstock.observers.ranges import as_numbers
from penstock.plan.plan import Step

MOST_BYTES = 1 << 30
"""Copies of values that a ``ValueKeeper`` holds by default."""


@dataclass(frozen=True, slots=True)
class Difference:
    """The difference of two arrays of numbers. ``largest`` is the largest absolute difference of
    elements that are finite in both, at ``index``, where the arrays have ``one`` and ``other``;
    ``scale`` the largest absolute value of the first array. ``nonfinite`` counts the elements that
    are NaN or infinite in one array and not the same in the other."""

    largest: float
    scale: float
    index: tuple[int, ...]
    one: float
    other: float
    nonfinite: int

    @property
    def relative(self) -> float:
        """The largest difference as a share of the scale."""
        return self.largest / self.scale if self.scale else float(self.largest > 0)


def difference(one: np.ndarray, other: np.ndarray) -> Difference:
    """Compare two arrays of numbers of the same shape, in float64."""
    a, b = (x.astype(np.complex128 if x.dtype.kind == "c" else np.float64) for x in (one, other))
    with np.errstate(all="ignore"):
        finite = np.isfinite(a) & np.isfinite(b)
        same = (a == b) | (np.isnan(a) & np.isnan(b))
        gap = np.where(finite & ~same, np.abs(a - b), 0.0)
        scale = float(np.max(np.abs(a), where=np.isfinite(a), initial=0.0))
    if not gap.size:
        return Difference(0.0, 0.0, (), 0.0, 0.0, 0)
    at = np.unravel_index(int(np.argmax(gap)), gap.shape)
    nonfinite = int(np.count_nonzero(~finite & ~same))
    index = tuple(int(i) for i in at)
    return Difference(
        float(gap[at]), scale, index, abs_or_real(a[at]), abs_or_real(b[at]), nonfinite
    )


def abs_or_real(x: RunValue) -> float:
    """A real number as it is, the absolute value of a complex one."""
    return float(abs(x)) if isinstance(x, complex) else float(x)


class ValueKeeper(Observer):
    """Keeps a copy of each numeric tensor that a step of a run outputs: of up to ``most_bytes`` in
    all. ``dropped`` are the names of those that were too many."""

    def __init__(self, most_bytes: int = MOST_BYTES) -> None:
        self.values: dict[str, np.ndarray] = {}
        self.dropped: set[str] = set()
        self._left = most_bytes
        self._lock = threading.Lock()

    def step_end(self, run: ObservedRun, step: Step, outputs: RunValues) -> None:
        for name, value in named_outputs(run, step, outputs):
            numbers = comparable(value)
            if numbers is None:
                continue
            with self._lock:
                if name in self.values or name in self.dropped:
                    continue
                if numbers.nbytes > self._left:
                    self.dropped.add(name)
                    continue
                self._left -= numbers.nbytes
                self.values[name] = numbers.copy()


class ValueComparison(Observer):
    """Compares the values of a run with those that a ``ValueKeeper`` has: ``differences`` by name,
    None where the shapes are not the same; ``steps`` are those that computed them."""

    def __init__(self, kept: ValueKeeper) -> None:
        self.differences: dict[str, Difference | None] = {}
        self.steps: dict[str, Step] = {}
        self._kept = kept
        self._lock = threading.Lock()

    def step_end(self, run: ObservedRun, step: Step, outputs: RunValues) -> None:
        for name, value in named_outputs(run, step, outputs):
            one, other = self._kept.values.get(name), comparable(value)
            with self._lock:
                if one is None or other is None or name in self.steps:
                    continue
                self.steps[name] = step
            # Without the lock: comparing takes long, and the name is taken by this step.
            same = one.shape == other.shape
            self.differences[name] = difference(one, other) if same else None


def comparable(value: RunValue) -> np.ndarray | None:
    """``value`` as an array to compute with, booleans included; None if it is no such tensor."""
    if isinstance(value, np.ndarray) and value.dtype.kind == "b":
        return value
    return as_numbers(value)
