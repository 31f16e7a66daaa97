"""Lifetimes: where a program releases the values that a run allocates.

A value is released after the last step of its block that reads it. Outputs of a block are released
by the If or loop that runs the block, or by the task that reads them last.
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
    """``after[step]``: the slots released after a step. ``handed_out[block]``: the distinct outputs
    of a block that its own steps compute. The outermost steps run in ``order``, or as ``tasks``."""

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
        """Find the releases in a block, or in one of its tasks, and in inner blocks. ``kept`` are
        values that outlive the steps, ``released`` values that were computed elsewhere and are read
        only by these steps."""
        kept = set(kept)
        # A value that no step reads is released after the first step.
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
                if step not in self._expanded:  # blocks of expanded steps have separate tasks
                    self._block(block.steps, block.outputs)
        for slot, step in last.items():
            if slot not in kept:
                self.after.setdefault(step, []).append(slot)


def local_outputs(slots: Sequence[Slot], step: Step) -> list[int]:
    """Return the outputs of a step that are separate variables: not those in alternating buffers of
    a loop, which the loop names."""
    return [
        i
        for i in step.outputs
        if i >= 0 and slots[i].kind is SlotKind.DYNAMIC and not (step.into and slots[i].roots)
    ]


# Bytes that the steps of a plan allocate during a run, outside of its arena.
#
# Static sizes are summed here, once. During a run, only steps with data-dependent result sizes are
# counted; all steps are counted only if the static sum exceeds the limit, as in a plan without an
# arena whose values are not all live at once.


class Allocations(NamedTuple):
    """If ``counts``, runs count their allocations, starting from ``taken`` bytes: the results of
    ``steps``, and all copies. ``known``: the bytes of the arena, and of all results and copies of
    static size; ``complete``: all sizes are static."""

    counts: bool = False
    taken: int = 0
    steps: frozenset[Step] = frozenset()
    known: int = 0
    complete: bool = True


def allocations(plan: Plan, arena_bytes: int, limits: Limits) -> Allocations:
    """Return the allocations of a plan that its runs must count."""
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
                # Only Expand views have more elements than their base, which readers may
                # materialize.
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
    # Static sizes are summed here, so that runs only add the others.
    if fits:
        return Allocations(True, taken, frozenset(unknown), total, complete)
    steps = frozenset(unknown.union(known))
    return Allocations(True, arena_bytes, steps, total, complete)
