"""The tasks of a plan, of steps that a ``Grouping`` puts together."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from penstock.algorithms.dag import Dag
from penstock.algorithms.ordering import ranks, topological_order
from penstock.core.checkpoints import checkpoint, with_checkpoints
from penstock.core.records import dataclass, field
from penstock.plan.plan import Plan, SlotKind, Step, reads, step_dag, walk
from penstock.plan.tasks import NO_SIGNALS, Grouping, Signals, Task, Tasks


def arrange(plan: Plan, grouping: Grouping) -> Tasks:
    """The tasks of ``plan``, with its steps grouped by ``grouping``."""
    return Arranger(plan, grouping).arrange()


def touches(step: Step, *, inside: bool = True) -> Iterator[int]:
    """The slots that the code of a step names; with ``inside``, also the code of its blocks."""
    for inner in walk((step,)) if inside else (step,):
        yield from (slot for slot in (*inner.inputs, *inner.outputs) if slot >= 0)
        for block in inner.blocks:
            yield from block.inputs
            yield from block.outputs
        for carry in inner.carries:
            yield from (carry.initial, carry.inside, carry.updated)
            if carry.result >= 0:
                yield carry.result


@dataclass(eq=False)
class Draft:
    """A task that has no number yet."""

    steps: tuple[Step, ...]
    block: int
    queue: int
    seconds: float
    blocks: list[int] = field(default_factory=list)
    waits: int = 0
    consumers: list[Draft] = field(default_factory=list)
    number: int = -1


class Arranger:
    """Arranges a plan as tasks. Subclasses may override ``pieces``, the tasks of one block."""

    overlapping = False
    """whether a task may continue after other tasks have read its values"""

    def __init__(self, plan: Plan, grouping: Grouping) -> None:
        self.plan = plan
        self.grouping = grouping
        self.drafts: list[Draft] = []
        self.blocks: list[list[Draft]] = []
        self.parents: list[Draft | None] = []
        # By block, the slots that are read after the block has ended.
        self.kept: list[set[int]] = []
        self.expanded: dict[Step, tuple[int, ...]] = {}

    def arrange(self) -> Tasks:
        self.block(self.plan.steps, self.plan.outputs, None)
        for number, draft in enumerate(self.drafts):
            draft.number = number
        shared = self.shared_slots()
        readers = self.readers(shared)
        releases: list[list[int]] = [[] for _ in self.drafts]
        counted: list[list[int]] = [[] for _ in self.drafts]
        for i, tasks in readers.items():
            for task in tasks:
                (releases if len(tasks) == 1 else counted)[task].append(i)
        return Tasks(
            tuple(
                [Task(d.steps, d.block, tuple(d.blocks), d.queue, d.seconds) for d in self.drafts]
            ),
            tuple([d.waits for d in self.drafts]),
            tuple([tuple([c.number for c in d.consumers]) for d in self.drafts]),
            tuple([tuple([d.number for d in block]) for block in self.blocks]),
            tuple([-1 if d is None else d.number for d in self.parents]),
            frozenset(shared),
            tuple(map(tuple, releases)),
            tuple(map(tuple, counted)),
            {i: len(tasks) for i, tasks in readers.items() if len(tasks) > 1},
            self.expanded,
            self.signals(),
        )

    def signals(self) -> Signals:
        """The orderings between steps of different tasks."""
        return NO_SIGNALS

    def block(self, steps: Sequence[Step], outputs: Sequence[int], parent: Draft | None) -> int:
        """Add the tasks of a block, the most urgent first; nested tasks follow their task."""
        number = len(self.blocks)
        self.blocks.append([])
        self.kept.append(set(outputs))
        self.parents.append(parent)
        for draft in self.pieces(steps, number):
            self.blocks[number].append(draft)
            self.drafts.append(draft)
            checkpoint()
            for step in draft.steps:
                if step.control and self.grouping.expands(step):
                    blocks = [self.block(b.steps, b.outputs, draft) for b in step.blocks]
                    self.expanded[step] = tuple(blocks)
                    draft.blocks += blocks
        return number

    def pieces(self, steps: Sequence[Step], number: int) -> list[Draft]:
        """The tasks of block ``number``, the most urgent first."""
        dag = step_dag(self.plan.slots, steps)
        # In the order of the plan: memory is planned for it.
        groups = [sorted(group) for group in self.grouping.groups(dag, steps)]
        group_of = {i: g for g, group in enumerate(groups) for i in group}
        assert len(group_of) == len(steps)
        pairs = [(group_of[a], group_of[b]) for a, b in (*dag.edges, *self.grouping.orders(steps))]
        over = Dag(len(groups), [(a, b) for a, b in pairs if a != b])
        seconds = [self.grouping.seconds(step) for step in with_checkpoints(steps)]
        cost = [sum(seconds[i] for i in group) for group in groups]
        drafts = [
            Draft(tuple([steps[i] for i in group]), number, self.grouping.queue(steps[group[0]]), c)
            for group, c in with_checkpoints(zip(groups, cost, strict=True))
        ]
        for draft, before, after in zip(drafts, over.pred, over.succ, strict=True):
            draft.waits = len(before)
            draft.consumers = [drafts[g] for g in after]
        # The urgency of a task: the time of the longest chain that begins with it.
        urgency = [own + rest for own, rest in zip(cost, ranks(over, cost), strict=True)]
        return [drafts[g] for g in topological_order(over, urgency)]

    def shared_slots(self) -> set[int]:
        """The dynamic slots that several tasks touch, or that enter or leave the plan."""
        slots = self.plan.slots
        ends = (*self.plan.inputs, *self.plan.outputs)
        shared = {i for i in ends if slots[i].kind is SlotKind.DYNAMIC}
        first: dict[int, Draft] = {}
        for draft in with_checkpoints(self.drafts):
            for step in draft.steps:
                for i in touches(step, inside=step not in self.expanded):
                    # Values in the arena have fixed offsets, known to all tasks.
                    dynamic = slots[i].kind is SlotKind.DYNAMIC
                    if dynamic and first.setdefault(i, draft) is not draft:
                        shared.add(i)
        return shared

    def readers(self, shared: set[int]) -> dict[int, list[int]]:
        """For each of the ``shared`` slots, the readers in its own block, after which it can be
        released. A read in a nested block counts as a read of the task that runs the block."""
        writers = {
            i: draft
            for draft in self.drafts
            for step in draft.steps
            for i in step.outputs
            if i in shared and i not in self.kept[draft.block]
        }
        readers: dict[int, list[int]] = {}
        for draft in with_checkpoints(self.drafts):
            for i in sorted({i for step in draft.steps for i in reads(step)}):
                writer = writers.get(i)
                if writer is None or writer.block != draft.block:
                    continue
                if writer is not draft or self.overlapping:
                    readers.setdefault(i, []).append(draft.number)
        return readers
