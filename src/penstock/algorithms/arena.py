"""Buffers in an arena: what planners are given and return, and checks of what they return."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import accumulate

from penstock.core.checkpoints import with_checkpoints
from penstock.core.records import dataclass

MEMORY_PLANNERS = ("quick", "best", "wic", "first_fit", "bump")
"""The planners of ``arena_planner.plan_memory``, those of the smallest arenas first."""

ALIGNMENT = 64
"""Offsets are multiples of it."""


@dataclass(frozen=True, slots=True)
class Buffer:
    """``size`` bytes, live from step ``first`` to step ``last``, both included. A buffer of size 0
    takes no memory. Raises ``ValueError`` for a negative size or lifetime."""

    size: int
    first: int
    last: int

    def __post_init__(self) -> None:
        if self.size < 0:
            raise ValueError(f"a buffer cannot have {self.size} bytes")
        if self.last < self.first:
            raise ValueError(f"a buffer cannot live from step {self.first} to step {self.last}")


@dataclass(frozen=True, slots=True)
class Arena:
    """Buffer i is at ``offsets[i]`` in an arena of ``size`` bytes."""

    size: int
    offsets: tuple[int, ...]


def arena_size(buffers: Sequence[Buffer], offsets: Sequence[int]) -> int | None:
    """The size of an arena with buffers at these offsets; None if they are no multiples of 64, two
    buffers overlap that are live at once, or it is larger than all buffers beside one another."""
    places: list[tuple[int, int, int, int]] = []
    size = beside = 0
    for offset, buffer in zip(offsets, buffers, strict=True):
        if type(offset) is not int or offset < 0 or offset % ALIGNMENT:
            return None
        if buffer.size:
            places.append((buffer.first, buffer.last, offset, offset + buffer.size))
            size = max(size, offset + buffer.size)
            beside += -(-buffer.size // ALIGNMENT) * ALIGNMENT
    live: list[tuple[int, int, int, int]] = []
    for place in with_checkpoints(sorted(places)):
        first, _, begin, end = place
        # Sorted by first use, what has ended once never overlaps again.
        live = [other for other in live if other[1] >= first]
        for _, _, other_begin, other_end in live:
            if begin < other_end and other_begin < end:
                return None
        live.append(place)
    # A planner that leaves gaps beyond that is at fault, and would cost memory unseen.
    return size if size <= beside else None


def lower_bound(buffers: Iterable[Buffer]) -> int:
    """The largest sum of live sizes at any step, without alignment: no arena can be smaller."""
    return largest_load([(b, b.size) for b in buffers])


def largest_load(sized: Iterable[tuple[Buffer, int]]) -> int:
    """The largest sum over steps of the sizes of live buffers."""
    changes: list[tuple[int, int]] = []
    for b, size in sized:
        changes += ((b.first, size), (b.last + 1, -size))
    # When sorted, sizes that a step frees come before those that it allocates.
    changes.sort()
    return max(accumulate([change for _, change in changes]), default=0)
