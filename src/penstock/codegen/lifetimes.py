"""When the values of a plan that are allocated during the run are released.

A value goes after the last step of its block that reads it. What a block hands out is released by
whoever takes it: the If or loop that runs the block, or the task that reads it last.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from penstock.plan.plan import Block, Plan, SlotKind, Step
from penstock.plan.tasks import Tasks, reads


@dataclass(frozen=True, eq=False)
class Lifetimes:
    """``after[step]``: the slots released after a step. ``handed_out[block]``: the outputs of a
    block that its own steps compute, each once."""

    after: Mapping[Step, Sequence[int]]
    handed_out: Mapping[Block, Sequence[int]]


def value_lifetimes(plan: Plan, order: Sequence[Step], tasks: Tasks | None = None) -> Lifetimes:
    """The lifetimes of a plan whose outermost steps run in ``order``, or as ``tasks``."""
    finder = _LifetimeFinder(plan, tasks)
    if tasks is None:
        finder.block(order, plan.outputs)
    else:
        for task, released in zip(tasks.tasks, tasks.releases, strict=True):
            finder.block(task.steps, (), released)
    return Lifetimes(finder.after, finder.handed_out)


def local_outputs(plan: Plan, step: Step) -> list[int]:
    """The outputs of a step that are variables of their own.

    An output written into one of a loop's alternating buffers is not: the loop names these.
    """
    return [
        i
        for i in step.outputs
        if i >= 0
        and plan.slots[i].kind is SlotKind.DYNAMIC
        and not (step.into and plan.slots[i].roots)
    ]


@dataclass
class _LifetimeFinder:
    plan: Plan
    tasks: Tasks | None
    after: dict[Step, list[int]] = field(default_factory=dict)
    handed_out: dict[Block, list[int]] = field(default_factory=dict)

    def block(
        self, steps: Sequence[Step], kept: Iterable[int], released: Iterable[int] = ()
    ) -> None:
        """Find what is released in a block, or in one task of it, and in blocks inside.

        ``kept`` are the values that outlive the steps, ``released`` values that were computed
        elsewhere and that only these steps read.
        """
        shared = frozenset() if self.tasks is None else self.tasks.shared
        expanded = {} if self.tasks is None else self.tasks.expanded
        kept = set(kept)
        last: dict[int, Step] = dict.fromkeys(released, steps[0]) if steps else {}
        for step in steps:
            for slot in local_outputs(self.plan, step):
                if slot not in shared:
                    last[slot] = step
            for slot in reads(step):
                if slot in last:
                    last[slot] = step
            for block in step.blocks:
                computed = {i for inner in block.steps for i in local_outputs(self.plan, inner)}
                self.handed_out[block] = [i for i in dict.fromkeys(block.outputs) if i in computed]
                if step not in expanded:  # whose blocks have tasks of their own
                    self.block(block.steps, block.outputs)
        for slot, step in last.items():
            if slot not in kept:
                self.after.setdefault(step, []).append(slot)
