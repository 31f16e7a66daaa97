"""Release of the values of a plan that are allocated during the run.

A value goes after the last step of its block that reads it. What a block hands out is released by
the If or loop that runs the block, or by the task that reads it last.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from penstock.core.checkpoints import with_checkpoints
from penstock.core.limits import Limits
from penstock.core.records import NamedTuple
from penstock.ir.layout import is_plannable
from penstock.plan.plan import Block, Plan, Slot, SlotKind, Step, reads
from penstock.plan.tasks import Tasks


class Lifetimes:
    """``after[step]``: the slots released after a step. ``handed_out[block]``: the outputs of a
    block that its own steps compute, each once. The outermost steps run in ``order``, or as
    ``tasks``."""

    def __init__(self, plan: Plan, order: Sequence[Step], tasks: Tasks | None = None) -> None:
        self.after: dict[Step, list[int]] = {}
        self.handed_out: dict[Block, list[int]] = {}
        self._slots = plan.slots
        self._shared = frozenset() if tasks is None else tasks.shared
        self._expanded = {} if tasks is None else tasks.expanded
        if tasks is None:
            self._block(order, plan.outputs)
        else:
            for task, released in zip(tasks.tasks, tasks.releases, strict=True):
                self._block(task.steps, (), released)

    def _block(
        self, steps: Sequence[Step], kept: Iterable[int], released: Iterable[int] = ()
    ) -> None:
        """Find the releases in a block, or in one task of it, and in inner blocks. ``kept`` are the
        values that outlive the steps, ``released`` values that were computed elsewhere and that
        only these steps read."""
        kept = set(kept)
        # A value that no step reads goes behind the first.
        last: dict[int, Step] = dict.fromkeys(released, steps[0]) if steps else {}
        for step in with_checkpoints(steps):
            for slot in local_outputs(self._slots, step):
                if slot not in self._shared:
                    last[slot] = step
            for slot in reads(step) if step.blocks else step.inputs:
                if slot in last:
                    last[slot] = step
            for block in step.blocks:
                computed = {i for inner in block.steps for i in local_outputs(self._slots, inner)}
                self.handed_out[block] = [i for i in dict.fromkeys(block.outputs) if i in computed]
                if step not in self._expanded:  # whose blocks have tasks of their own
                    self._block(block.steps, block.outputs)
        for slot, step in last.items():
            if slot not in kept:
                self.after.setdefault(step, []).append(slot)


def local_outputs(slots: Sequence[Slot], step: Step) -> list[int]:
    """The outputs of a step that are variables of their own: not those that it writes into one of a
    loop's alternating buffers, which the loop names."""
    return [
        i
        for i in step.outputs
        if i >= 0 and slots[i].kind is SlotKind.DYNAMIC and not (step.into and slots[i].roots)
    ]


# The bytes that the steps of a plan allocate during a run, outside of its arena.
#
# Values whose size is known are added up here, once. Only the steps whose results have sizes that
# follow from data are counted during the run, and all others only if what is known is too much
# already, as in a plan without an arena whose values do not all live at once.


class Allocations(NamedTuple):
    """If ``counts``, runs count what they allocate, from ``taken`` bytes on: the results of
    ``steps``, and all copies. ``known``: the bytes of the arena, and of all results and copies
    whose size is known; ``complete``: there are no others."""

    counts: bool = False
    taken: int = 0
    steps: frozenset[Step] = frozenset()
    known: int = 0
    complete: bool = True


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
    complete = not unknown and all(is_plannable(slot.type) for slot in copies)
    if fits and complete:
        return Allocations(known=total)
    # Sizes known now are summed here, so that runs add up only the rest.
    if fits:
        return Allocations(True, taken, frozenset(unknown), total, complete)
    steps = frozenset(unknown.union(known))
    return Allocations(True, arena_bytes, steps, total, complete)
