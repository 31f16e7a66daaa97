"""A sequence of rows of one request, with its state in a stepper."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from sys import maxsize
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

from penstock.core.errors import InvalidInput
from penstock.core.records import dataclass, field

if TYPE_CHECKING:
    from penstock.host.stop_condition import StopCondition

_TOLERANCE = 1e-5
Rows: TypeAlias = "Mapping[str, np.ndarray]"
"""rows by the names of inputs, [1, rows, ...]"""
Done: TypeAlias = "Callable[[Rows | None, BaseException | None], object]"
"""takes the outputs of some rows by name, or else the error that they ended with"""


class RowHistory:
    """All rows that a sequence was given, by input, in arrays with room for more. ``together``: the
    most rows of a sequence in one step."""

    together = maxsize

    def __init__(self) -> None:
        self._arrays: dict[str, np.ndarray] = {}
        self.count = 0

    def size_of(self, rows: Rows) -> int:
        """Return how many rows are fed. Raises ``InvalidInput``."""
        counts = {array.shape[1] if array.ndim > 1 else 0 for array in rows.values()}
        if len(counts) > 1 or 0 in counts or any(len(array) != 1 for array in rows.values()):
            shapes = {name: array.shape for name, array in rows.items()}
            raise InvalidInput(f"rows are [1, rows, ...], at least one, of all inputs: {shapes}")
        return counts.pop()

    def add(self, rows: Rows) -> None:
        """Append rows [1, n, ...]."""
        count = next(iter(rows.values())).shape[1]
        for name, new in rows.items():
            old = self._arrays.get(name)
            if old is None or self.count + count > len(old):
                room = max(2 * self.count, self.count + count, 64)
                array = np.empty((room, *new.shape[2:]), new.dtype)
                if old is not None:
                    array[: self.count] = old[: self.count]
                self._arrays[name] = array
            self._arrays[name][self.count : self.count + count] = new[0]
        self.count += count

    def part(self, name: str, begin: int, end: int) -> np.ndarray:
        """Return some rows [n, ...] of an input."""
        return self._arrays[name][begin:end]

    def content(self, begin: int, end: int) -> bytes:
        """Return the contents of some rows, for comparisons with other rows."""
        return b"".join([array[begin:end].tobytes() for _, array in sorted(self._arrays.items())])

    def cut(self, count: int) -> None:
        """Remove the rows from ``count`` on."""
        self.count = count

    def copied(self) -> RowHistory:
        """Return a copy with the same rows."""
        copy = RowHistory()
        copy._arrays = {name: array[: self.count].copy() for name, array in self._arrays.items()}
        copy.count = self.count
        return copy


@dataclass(eq=False)
class SequenceState:
    """State of a sequence in a stepper: its ``rows``; the first ``computed`` of them are in its
    state. ``done`` is called with the outputs of the last ``wanted`` rows when they are computed.
    ``pages`` hold a state in pages; ``digests`` are the digests of full pages. ``arrays`` are a
    state in arrays, or the initial state if it is in rows. ``fixed``: the inputs that do not
    change; if they are in pages, ``fixed_pages`` hold them, in ``present`` positions.
    """

    number: int
    priority: int = 0
    rows: RowHistory = field(default_factory=RowHistory)
    computed: int = 0
    wanted: int = 1
    done: Done | None = None
    stop: StopCondition | None = None
    pages: list[int] = field(default_factory=list)
    digests: list[bytes] = field(default_factory=list)
    arrays: dict[str, np.ndarray] = field(default_factory=dict)
    fixed: Mapping[str, np.ndarray] = field(default_factory=dict)
    fixed_pages: list[int] = field(default_factory=list)
    present: int = 0
    outputs: list[Rows] = field(default_factory=list)
    """outputs of wanted rows so far, if they are computed in several steps"""
    served: int = 0
    """the last step with rows of this sequence"""
    begun: float = 0.0
    """when the first step of the waiting rows began (``perf_counter``); 0 before"""
    returns: bool = False
    """whether the client is likely to feed the next rows as soon as it gets results"""
    closed: bool = False

    @property
    def waiting(self) -> int:
        """The number of rows that are not computed yet."""
        return self.rows.count - self.computed

    @property
    def has_state(self) -> bool:
        """Whether it holds cache memory."""
        return bool(self.pages or self.fixed_pages or self.arrays)

    @property
    def rank(self) -> tuple[int, int]:
        """The sort key among sequences: higher priority first, then earlier arrival."""
        return -self.priority, self.number


def same_but_for_rounding(alone: np.ndarray, together: np.ndarray) -> bool:
    """Whether results differ only by the rounding of sums in another order."""
    if alone.shape != together.shape:
        return False
    if alone.dtype.kind != "f":
        return bool((alone == together).all())
    # Sums are taken in another order in batches.
    largest = max(1.0, float(np.abs(alone[np.isfinite(alone)]).max(initial=0)))
    return np.allclose(alone, together, 0, _TOLERANCE * largest, equal_nan=True)
