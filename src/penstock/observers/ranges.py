"""An observer that records the range of every value, for quantization."""

from __future__ import annotations

import json
import math
import os
import threading
import zipfile
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from penstock.core.records import dataclass
from penstock.core.types import RunValue, RunValues
from penstock.host.on_demand import imported
from penstock.observers.base import ObservedRun, Observer, named_outputs
from penstock.plan.plan import Step

if TYPE_CHECKING:
    from penstock.ir.tables import DisplayTable


@dataclass(frozen=True, slots=True)
class Range:
    """The range of a value's finite elements over all observations. ``min`` is inf and ``max`` is
    -inf if no element was finite. ``count`` is the number of observations, ``nonfinite`` the number
    of elements that were NaN or infinite."""

    min: float = math.inf
    max: float = -math.inf
    count: int = 0
    nonfinite: int = 0

    def __or__(self, other: Range) -> Range:
        """The range over the observations of both."""
        low, high = min(self.min, other.min), max(self.max, other.max)
        return Range(low, high, self.count + other.count, self.nonfinite + other.nonfinite)


class Ranges(Observer):
    """Records the range of every value, for quantization: ``session.run(x, observers=[ranges])``.

    Covers the numeric tensors that steps output and, once a run, the inputs of the model that steps
    read. Values without a step are not covered: folded ones, and views of planned memory, whose
    range is within that of the value they view. Strings, booleans, complex numbers and sequences
    have no range. One object may observe any number of runs, also concurrent ones.
    """

    def __init__(self) -> None:
        self._ranges: dict[str, Range] = {}
        self._lock = threading.RLock()
        # Inputs of the model that no step of the run has read yet.
        self._unread: dict[ObservedRun, set[int]] = {}

    @property
    def ranges(self) -> dict[str, Range]:
        """The range of each value by its name."""
        with self._lock:
            return dict(self._ranges)

    def update(self, other: Ranges | Mapping[str, Range]) -> None:
        """Add other observations.

        Args:
            other: Ranges, or a mapping of names to ``Range``.
        """
        for name, range_ in (other.ranges if isinstance(other, Ranges) else other).items():
            self._add(name, range_)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the ranges to a file, which ``load`` reads. Raises ``ValueError`` for a suffix that
        is neither.

        Args:
            path: A ``.json`` or an ``.npz`` file.
        """
        ranges = self.ranges
        if _suffix(path) == ".json":
            # JSON has no infinity: an empty range has null ends.
            entries = {
                name: {k: v if math.isfinite(v) else None for k, v in asdict(range_).items()}
                for name, range_ in ranges.items()
            }
            text = json.dumps({"format": _FORMAT, "ranges": entries}, indent=1, allow_nan=False)
            Path(path).write_text(text + "\n", encoding="ascii")
            return
        # As bytes: NumPy's strings lose trailing zeros.
        names = json.dumps([_FORMAT, *ranges]).encode()
        columns: dict[str, Any] = {
            key: np.array([getattr(range_, key) for range_ in ranges.values()], dtype)
            for key, dtype in _COLUMNS.items()
        }
        # Given a path, np.savez would add an ending to one in capitals.
        with open(path, "wb") as file:
            np.savez(file, names=np.frombuffer(names, np.uint8), **columns)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Ranges:
        """Read a file that ``save`` has written; more ranges may be added. Raises ``ValueError``
        for a file of another format, ``OSError`` for one that cannot be read.

        Args:
            path: The file.
        """
        loaded, suffix = cls(), _suffix(path)
        rows: Iterable[tuple[Any, ...]]
        try:
            if suffix == ".json":
                content = json.loads(Path(path).read_bytes())
                written, entries = content["format"], content["ranges"].items()
                rows = [(name, *(entry[key] for key in _COLUMNS)) for name, entry in entries]
            else:
                with open(path, "rb") as file, np.load(file, allow_pickle=False) as arrays:
                    written, *names = json.loads(arrays["names"].tobytes())
                    columns = [arrays[key].tolist() for key in _COLUMNS]
                rows = zip(names, *columns, strict=True)
            if written != _FORMAT:
                raise ValueError(f"its format is {written!r}, not {_FORMAT!r}")
            loaded.update({str(name): _parsed_range(*row) for name, *row in rows})
        except _FORMAT_ERRORS as error:
            message = f"{os.fspath(path)} does not hold ranges: {error}"
            raise ValueError(f"{message}. Load a file that Ranges.save has written") from error
        return loaded

    _repr_html_ = imported("penstock.ir.tables.show_html")
    _repr_pretty_ = imported("penstock.ir.tables.show_text")

    def _as_table(self) -> DisplayTable:
        from penstock.ir.tables import DisplayTable

        rows = [
            (name, f"{r.min:.6g}", f"{r.max:.6g}", r.count, r.nonfinite)
            for name, r in self.ranges.items()
        ]
        titles = ("value", "min", "max", "times", "not finite")
        return DisplayTable(f"ranges of {len(rows)} values", titles, rows)

    def __repr__(self) -> str:
        return f"Ranges({len(self._ranges)} values)"

    def run_begin(self, run: ObservedRun) -> None:
        self._unread[run] = set(run.table.inputs)

    def run_end(self, run: ObservedRun, error: BaseException | None) -> None:
        self._unread.pop(run, None)

    def step_begin(self, run: ObservedRun, step: Step, inputs: RunValues) -> None:
        unread = self._unread.get(run)
        if not unread:
            return
        for slot, value in zip(step.inputs, inputs, strict=True):
            if slot not in unread:
                continue
            try:
                unread.remove(slot)
            except KeyError:  # another thread was faster
                continue
            self._observe(run.table.slots[slot].name, value)

    def step_end(self, run: ObservedRun, step: Step, outputs: RunValues) -> None:
        for name, value in named_outputs(run, step, outputs):
            self._observe(name, value)

    def _observe(self, name: str, value: RunValue) -> None:
        numbers = as_numbers(value)
        if numbers is not None and numbers.dtype.kind != "c":
            self._add(name, range_of(numbers))

    def _add(self, name: str, range_: Range) -> None:
        with self._lock:
            self._ranges[name] = self._ranges.get(name, Range()) | range_


def as_numbers(value: RunValue) -> np.ndarray | None:
    """``value`` in a dtype that NumPy computes with; None if it is not a numeric tensor."""
    if not isinstance(value, np.ndarray):
        return None
    # The mark of dtypes that other packages register with NumPy.
    if value.dtype.isbuiltin == 2:
        # Small floats and integers of ml_dtypes: float32 represents all of them.
        with np.errstate(all="ignore"):
            return value.astype(np.float32)
    return value if value.dtype.kind in "fiuc" else None


def range_of(numbers: np.ndarray) -> Range:
    """The range of one observation of real numbers."""
    if not numbers.size:
        return Range(count=1)
    with np.errstate(all="ignore"):
        # NaN is passed on by both, so that finite ends prove that all is finite.
        low, high = float(numbers.min()), float(numbers.max())
        if math.isfinite(low) and math.isfinite(high):
            return Range(low, high, 1)
        finite = numbers[np.isfinite(numbers)]
        nonfinite = numbers.size - finite.size
        if not finite.size:
            return Range(count=1, nonfinite=nonfinite)
        return Range(float(finite.min()), float(finite.max()), 1, nonfinite)


_FORMAT = "penstock ranges 1"
_COLUMNS = {"min": np.float64, "max": np.float64, "count": np.int64, "nonfinite": np.int64}

# Errors that reading a file of another format, or a truncated one, may raise.
_FORMAT_ERRORS = (
    *(ArithmeticError, AttributeError, EOFError, LookupError, NotImplementedError, RecursionError),
    *(TypeError, ValueError, zipfile.BadZipFile, zlib.error),
)


def _suffix(path: str | os.PathLike[str]) -> str:
    suffix = Path(path).suffix.lower()
    if suffix not in (".json", ".npz"):
        raise ValueError(f"{os.fspath(path)}: give ranges a file name that ends in .json or .npz")
    return suffix


def _parsed_range(low: Any, high: Any, count: Any, nonfinite: Any) -> Range:
    low, high = math.inf if low is None else low, -math.inf if high is None else high
    if math.isnan(low) or math.isnan(high):
        raise ValueError("a range ends in NaN")
    return Range(float(low), float(high), int(count), int(nonfinite))
