"""The buffers of the arena as plain data: their places and lifetimes, and the peak.

Time is the plan's own clock, which ticks once for each step: the order is known before a run, and
where tasks overlap, so may their buffers.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import Any

from penstock.core.types import JsonObject
from penstock.plan.arena_layout import ArenaPlan, Intervals
from penstock.plan.plan import Plan, Step


def arena_document(plan: Plan, arena_plan: ArenaPlan, number: Mapping[Step, int]) -> JsonObject:
    """``buffers``: slot that owns it, offset, bytes, first and last tick (included), and the slots
    that share it; ``clock``: the step of each tick, -1 between blocks; ``live``: bytes at each
    tick; ``peak``: its tick, its bytes, and the buffers that are live then, the largest first."""
    lifetimes = Intervals(plan, arena_plan.order)
    members: dict[int, list[int]] = defaultdict(list)
    for slot, owner in arena_plan.buffer_of.items():
        members[owner].append(slot)
    buffers: list[Any] = []
    for owner, slots in members.items():
        first = min(lifetimes.first[slot] for slot in slots)
        last = max(lifetimes.last[slot] for slot in slots)
        place = arena_plan.offsets[owner], plan.slots[owner].nbytes
        buffers.append([owner, *place, first, last, sorted(slots, key=lifetimes.first.__getitem__)])
    ticks = 1 + max([tick for tick, _ in lifetimes.steps] + [b[4] for b in buffers], default=-1)
    clock = [-1] * ticks
    for tick, step in lifetimes.steps:
        clock[tick] = number[step]
    change = [0] * (ticks + 1)
    for _, _, nbytes, first, last, _ in buffers:
        change[first] += nbytes
        # The last tick is included.
        change[last + 1] -= nbytes
    live, now = [], 0
    for tick in range(ticks):
        now += change[tick]
        live.append(now)
    peak: dict[str, Any] = {"tick": -1, "bytes": 0, "buffers": []}
    if live:
        at = max(range(ticks), key=live.__getitem__)
        there = [i for i, b in enumerate(buffers) if b[3] <= at <= b[4] and b[2]]
        there.sort(key=lambda i: -buffers[i][2])
        peak = {"tick": at, "bytes": live[at], "buffers": there}
    return {
        "size": arena_plan.size,
        "lower_bound": arena_plan.lower_bound,
        "planner": arena_plan.planner,
        "buffers": buffers,
        "clock": clock,
        "live": live,
        "peak": peak,
    }
