"""Observers that look at values: the ranges they take, and the first NaN among them."""

from __future__ import annotations

import json
import math
import os
import threading
import zipfile
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from penstock.errors import RunError
from penstock.observers.base import ObservedRun, Observer
from penstock.plan.plan import Slot, SlotKind, Step
from penstock.types import TensorType


@dataclass(frozen=True, slots=True)
class Range:
    """What has been seen of a value: the range of its finite elements, over all observations.

    ``min`` is inf and ``max`` is -inf where there was no finite element. ``count`` is the number of
    observations, ``nonfinite`` that of elements which were NaN or infinite.
    """

    min: float = math.inf
    max: float = -math.inf
    count: int = 0
    nonfinite: int = 0

    def __or__(self, other: Range) -> Range:
        """The range of the observations of both."""
        return Range(
            min(self.min, other.min),
            max(self.max, other.max),
            self.count + other.count,
            self.nonfinite + other.nonfinite,
        )


class Ranges(Observer):
    """Records the range of every value, for quantisation: ``session.run(x, observers=[ranges])``.

    Seen are the tensors of numbers that steps output, and those inputs of the model that steps
    read, once a run. Not so what is folded, or a view of planned memory that needs no step: its
    range is within that of the value it looks at. Strings, truth values, complex numbers and
    sequences have no ranges. One object may watch any number of runs, also at once.
    """

    def __init__(self) -> None:
        self._ranges: dict[str, Range] = {}
        self._lock = threading.Lock()
        # Inputs of the model that no step of a run has read yet.
        self._unread: dict[ObservedRun, set[int]] = {}

    @property
    def ranges(self) -> dict[str, Range]:
        """The range of each value by its name."""
        with self._lock:
            return dict(self._ranges)

    def update(self, other: Ranges | Mapping[str, Range]) -> None:
        """Add the observations of ``other``."""
        added = other.ranges if isinstance(other, Ranges) else other
        with self._lock:
            for name, seen in added.items():
                self._ranges[name] = self._ranges.get(name, Range()) | seen

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the ranges to a ``.json`` or an ``.npz`` file, as the name says.

        Raises ``ValueError`` for a name that ends otherwise.
        """
        ranges = self.ranges
        if _suffix(path) == ".json":
            # JSON has no infinity: a range of nothing has no ends.
            entries = {
                name: {k: v if math.isfinite(v) else None for k, v in asdict(seen).items()}
                for name, seen in ranges.items()
            }
            text = json.dumps({"format": _FORMAT, "ranges": entries}, indent=1, allow_nan=False)
            Path(path).write_text(text + "\n", encoding="ascii")
            return
        # As bytes: NumPy's strings lose what is zero at their ends.
        names = json.dumps([_FORMAT, *ranges]).encode()
        columns: dict[str, Any] = {
            key: np.array([getattr(seen, key) for seen in ranges.values()], dtype)
            for key, dtype in _COLUMNS.items()
        }
        with open(path, "wb") as file:
            np.savez(file, names=np.frombuffer(names, np.uint8), **columns)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Ranges:
        """The ranges that ``save`` has written to a file, to which more may be added.

        Raises ``ValueError`` for a file of another kind, ``OSError`` for one that cannot be read.
        """
        read = _read_json if _suffix(path) == ".json" else _read_npz
        try:
            ranges = read(path)
        except _FOREIGN as error:
            told = f"{os.fspath(path)} does not hold ranges: {error}"
            raise ValueError(f"{told}. Load what Ranges.save has written") from error
        loaded = cls()
        loaded.update(ranges)
        return loaded

    def __repr__(self) -> str:
        return f"Ranges({len(self._ranges)} values)"

    def run_begin(self, run: ObservedRun) -> None:
        self._unread[run] = set(run.table.inputs)

    def run_end(self, run: ObservedRun, error: BaseException | None) -> None:
        self._unread.pop(run, None)

    def step_begin(self, run: ObservedRun, step: Step, inputs: Sequence[Any]) -> None:
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
            self._see(run.table.slots[slot], value)

    def step_end(self, run: ObservedRun, step: Step, outputs: Sequence[Any]) -> None:
        for slot, value in zip(step.outputs, outputs, strict=True):
            if slot >= 0:
                self._see(run.table.slots[slot], value)

    def _see(self, slot: Slot, value: Any) -> None:
        numbers = _numbers(value)
        if numbers is not None and numbers.dtype.kind != "c":
            seen = _range(numbers)
            with self._lock:
                self._ranges[slot.name] = self._ranges.get(slot.name, Range()) | seen


# Numbers.


def _numbers(value: Any) -> np.ndarray | None:
    """``value`` in a dtype that NumPy computes with; None if it is no tensor of numbers."""
    if not isinstance(value, np.ndarray):
        return None
    if value.dtype.isbuiltin == 2:
        # The small floats and integers of ml_dtypes, all of which float32 represents.
        with np.errstate(all="ignore"):
            return value.astype(np.float32)
    return value if value.dtype.kind in "fiuc" else None


def _range(numbers: np.ndarray) -> Range:
    """The range of one observation, of real numbers."""
    if not numbers.size:
        return Range(count=1)
    with np.errstate(all="ignore"):
        low, high = float(numbers.min()), float(numbers.max())
        if math.isfinite(low) and math.isfinite(high):
            return Range(low, high, 1)
        finite = numbers[np.isfinite(numbers)]
        nonfinite = numbers.size - finite.size
        if not finite.size:
            return Range(count=1, nonfinite=nonfinite)
        return Range(float(finite.min()), float(finite.max()), 1, nonfinite)


# Files.

_FORMAT = "penstock ranges 1"
_COLUMNS = {"min": np.float64, "max": np.float64, "count": np.int64, "nonfinite": np.int64}

# What reading a file of another kind, or half of one, may come to.
_FOREIGN = (
    *(ArithmeticError, AttributeError, EOFError, LookupError, NotImplementedError, RecursionError),
    *(TypeError, ValueError, zipfile.BadZipFile, zlib.error),
)


def _suffix(path: str | os.PathLike[str]) -> str:
    suffix = Path(path).suffix.lower()
    if suffix not in (".json", ".npz"):
        raise ValueError(f"{os.fspath(path)}: give ranges a file name that ends in .json or .npz")
    return suffix


def _read_json(path: str | os.PathLike[str]) -> dict[str, Range]:
    content = json.loads(Path(path).read_bytes())
    if content["format"] != _FORMAT:
        raise ValueError(f"its format is {content['format']!r}, not {_FORMAT!r}")
    return {
        name: _made_range(entry["min"], entry["max"], entry["count"], entry["nonfinite"])
        for name, entry in content["ranges"].items()
    }


def _read_npz(path: str | os.PathLike[str]) -> dict[str, Range]:
    with open(path, "rb") as file, np.load(file, allow_pickle=False) as content:
        kind, *names = json.loads(content["names"].tobytes())
        if kind != _FORMAT:
            raise ValueError(f"its format is {kind!r}, not {_FORMAT!r}")
        columns = [content[key].tolist() for key in _COLUMNS]
    return {str(name): _made_range(*row) for name, *row in zip(names, *columns, strict=True)}


def _made_range(low: Any, high: Any, count: Any, nonfinite: Any) -> Range:
    low, high = math.inf if low is None else low, -math.inf if high is None else high
    if math.isnan(low) or math.isnan(high):
        raise ValueError("a range ends in NaN")
    return Range(float(low), float(high), int(count), int(nonfinite))


# The guard.


@dataclass(frozen=True, slots=True)
class _Look:
    """What the guard saw in a value: its type and range as text, and what is wrong with it."""

    text: str
    size: int = 0
    faults: int = 0
    first: tuple[int, ...] = ()

    def found(self, what: str) -> str:
        return f"{what} in {self.faults} of its {self.size} elements, first at {list(self.first)}"


_Key: TypeAlias = tuple[Step, int]


@dataclass(slots=True)
class _Watched:
    """What the guard knows of a run.

    ``fixed``: constants and inputs of the model, by slot, which do not change while it goes on.
    ``begun``: the inputs of steps under way, by step and thread; a step may overwrite its inputs.
    """

    fixed: dict[int, _Look] = field(default_factory=dict)
    begun: dict[_Key, list[_Look | None]] = field(default_factory=dict)


class NanGuard(Observer):
    """Ends a run with ``RunError`` at the first step that makes NaN: ``observers=[NanGuard()]``.

    The error names the step, its output, how much of it is NaN and where, and the ranges of the
    step's inputs. Where NaN was in an input already, so that the step only hands it on, the error
    names its source: an input of the model or a constant. NaN that goes no further (what
    ``Where(IsNaN(x), 0, x)`` reads) is no error. With ``infinities``, all of this is true of
    infinite elements also.

    It reads every input and output of every step: runs may take several times as long.
    """

    def __init__(self, *, infinities: bool = False) -> None:
        self.infinities = infinities
        self._what = "NaN or infinity" if infinities else "NaN"
        self._runs: dict[ObservedRun, _Watched] = {}

    def __repr__(self) -> str:
        return f"NanGuard(infinities={self.infinities})"

    def run_begin(self, run: ObservedRun) -> None:
        self._runs[run] = _Watched()

    def run_end(self, run: ObservedRun, error: BaseException | None) -> None:
        self._runs.pop(run, None)

    def step_begin(self, run: ObservedRun, step: Step, inputs: Sequence[Any]) -> None:
        watched = self._runs[run]
        looks = [
            None if slot < 0 else self._look_in(run, watched, slot, value)
            for slot, value in zip(step.inputs, inputs, strict=True)
        ]
        if not step.control:  # which makes no values: steps within it do
            watched.begun[step, threading.get_ident()] = looks

    def step_end(self, run: ObservedRun, step: Step, outputs: Sequence[Any]) -> None:
        """Raises ``RunError`` if an output holds NaN."""
        if step.control:
            return
        watched = self._runs[run]
        looks = watched.begun.pop((step, threading.get_ident()), [None] * len(step.inputs))
        for slot, value in zip(step.outputs, outputs, strict=True):
            look = _look(value, self.infinities) if slot >= 0 else None
            if look is not None and look.faults:
                raise RunError(self._message(run, watched, step, looks, slot, look))

    def _look_in(self, run: ObservedRun, watched: _Watched, slot: int, value: Any) -> _Look:
        if run.table.slots[slot].kind is not SlotKind.CONSTANT and slot not in run.table.inputs:
            return _look(value, self.infinities)
        look = watched.fixed.get(slot)
        if look is None:
            look = watched.fixed[slot] = _look(value, self.infinities)
        return look

    def _message(
        self,
        run: ObservedRun,
        watched: _Watched,
        step: Step,
        looks: Sequence[_Look | None],
        made: int,
        look: _Look,
    ) -> str:
        slots = run.table.slots
        where = f"{step.node.op.name} ({step.node.label})"
        output = f"output {slots[made].name!r}, {look.text},"
        inputs = {
            slot: seen
            for slot, seen in zip(step.inputs, looks, strict=True)
            if seen is not None and slot >= 0
        }
        faulty = {slot: seen for slot, seen in inputs.items() if seen.faults}
        if not faulty:
            ranges = ", ".join([f"{slots[i].name!r}, {seen.text}" for i, seen in inputs.items()])
            return (
                f"{where} makes {self._what}: {output} holds {look.found(self._what)}, while its "
                f"inputs hold none: {ranges or 'there are no inputs'}"
            )
        sources = {slot: seen for slot, seen in faulty.items() if slot in watched.fixed}
        # What a loop hands to its body, say, comes from something that the run began with.
        sources = sources or {slot: seen for slot, seen in watched.fixed.items() if seen.faults}
        told = []
        for slot, seen in (sources or faulty).items():
            name = repr(slots[slot].name)
            if slot in run.table.inputs:
                name = f"input {name} of the model"
            else:
                name = f"{'constant' if slot in sources else 'value'} {name}"
            told.append(f"{name} holds {seen.found(self._what)}")
        return (
            f"{'; '.join(told)}: {where} hands it on, and {output} holds {look.found(self._what)}"
        )


def _look(value: Any, infinities: bool) -> _Look:
    if isinstance(value, list):
        looks = [_look(element, infinities) for element in value]
        bad = next((look for look in looks if look.faults), _Look(""))
        return _Look(
            f"a sequence of {len(value)}",
            sum(look.size for look in looks),
            sum(look.faults for look in looks),
            bad.first,
        )
    if not isinstance(value, np.ndarray):
        return _Look(f"a {type(value).__name__}")
    text = f"{TensorType(value.dtype, value.shape)}"
    numbers = _numbers(value)
    if numbers is None:
        return _Look(text)
    if numbers.dtype.kind != "c":
        seen = _range(numbers)
        if seen.min <= seen.max:
            text += f" from {seen.min + 0.0:.6g} to {seen.max + 0.0:.6g}"  # and not to -0
        if not seen.nonfinite:
            return _Look(text, numbers.size)
        infinite = seen.nonfinite - int(np.count_nonzero(np.isnan(numbers)))
        if infinite:
            text += f" with {infinite} infinite"
    bad = ~np.isfinite(numbers) if infinities else np.isnan(numbers)
    count = int(np.count_nonzero(bad))
    if not count:
        return _Look(text, numbers.size)
    first = np.unravel_index(int(bad.argmax()), bad.shape)
    return _Look(text, numbers.size, count, tuple([int(i) for i in first]))
