"""The bytes that the steps of a plan allocate during a run, outside of its arena.

Values whose size is known are added up here, once. Only the steps whose results have sizes that
follow from data are counted during the run, and all others only if what is known is too much
already, as in a plan without an arena whose values do not all live at once.
"""

from __future__ import annotations

from penstock.core.limits import Limits
from penstock.core.records import NamedTuple
from penstock.ir.layout import is_plannable
from penstock.plan.plan import Plan, Step


class Allocations(NamedTuple):
    """If ``counts``, runs count what they allocate, from ``taken`` bytes on: the results of
    ``steps``, and all copies."""

    counts: bool = False
    taken: int = 0
    steps: frozenset[Step] = frozenset()


def allocations(plan: Plan, arena_bytes: int, limits: Limits) -> Allocations:
    """The allocations of a plan, as far as its runs must count them."""
    if not limits.count_runs:
        return Allocations()
    known: dict[Step, int] = {}
    unknown: set[Step] = set()
    for step in plan.walk():
        for i in step.outputs:
            slot = plan.slots[i]
            if i < 0 or (step.into and not slot.owned):
                continue
            if slot.base >= 0:
                # No other view has more elements than what it views, which readers may write out.
                if step.node.op.name == "Expand" and not is_plannable(slot.type):
                    unknown.add(step)
            elif is_plannable(slot.type):
                known[step] = known.get(step, 0) + slot.nbytes
            else:
                unknown.add(step)
    taken = arena_bytes + sum(known.values())
    copies = [plan.slots[i] for i in plan.outputs if not plan.slots[i].owned]
    total = taken + sum(slot.nbytes for slot in copies if is_plannable(slot.type))
    fits = limits.max_bytes is None or total <= limits.max_bytes
    if fits and not unknown and all(is_plannable(slot.type) for slot in copies):
        return Allocations()
    # What is known is added up already, so that runs count only the rest.
    if fits:
        return Allocations(True, taken, frozenset(unknown))
    return Allocations(True, arena_bytes, frozenset(unknown.union(known)))
