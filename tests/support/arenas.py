"""Checks and measures of arenas."""

from __future__ import annotations

import math
from collections.abc import Sequence

from penstock.algorithms.arena import Arena, Buffer, lower_bound
from penstock.algorithms.arena_planner import plan_memory


def assert_sound(buffers: Sequence[Buffer], arena: Arena) -> None:
    """Aligned, of the size of the highest end, and disjoint while live (by a sweep over steps)."""
    assert len(arena.offsets) == len(buffers)
    ends = [offset + b.size for offset, b in zip(arena.offsets, buffers, strict=True)]
    assert all(offset >= 0 and offset % 64 == 0 for offset in arena.offsets)
    assert arena.size == max(ends, default=0) >= lower_bound(buffers)
    live: list[int] = []
    for i in sorted(range(len(buffers)), key=lambda i: buffers[i].first):
        live = [j for j in live if buffers[j].last >= buffers[i].first]
        if buffers[i].size:
            assert all(arena.offsets[i] >= ends[j] or arena.offsets[j] >= ends[i] for j in live)
            live.append(i)


def mean(ratios: Sequence[float]) -> float:
    """The geometric mean."""
    return math.prod(ratios) ** (1 / len(ratios))


def ratio(buffers: Sequence[Buffer], planner: str = "best") -> float:
    arena = plan_memory(buffers, planner)
    assert_sound(buffers, arena)
    return arena.size / lower_bound(buffers)
