"""A plan as tasks: pieces of a program whose turn is decided during the run.

A *task* is one or more steps of one block that run one after the other, without a look at anything
else. It becomes ready when the tasks that it waits for have ended; of ready ones the most urgent
runs first. One step a task gives the dataflow executor, all of a plan in one the linear one.

The step of an If or a loop that is *expanded* has blocks with tasks of their own. Its task runs up
to where a block must run, steps aside, and goes on when the tasks of that block have ended; so it
does where it needs a signal that another task has not emitted yet. No worker waits. Of one run a
block is active once at a time, so that all its values have one place each in ``V``, a list with an
entry for each slot.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from penstock.algorithms.dag import Dag
from penstock.algorithms.ordering import ranks, topological_order
from penstock.ir.graph import Node
from penstock.plan.plan import Plan, Slot, SlotKind, Step, walk


@dataclass(frozen=True, slots=True, eq=False)
class Task:
    """Steps that run one after the other, in the order given.

    ``block``: the number of the block that it belongs to; 0 is the plan's own. ``blocks``: the
    numbers of the blocks of its expanded steps. ``queue``: which workers run it. ``seconds``: about
    what it takes.
    """

    steps: tuple[Step, ...]
    block: int
    blocks: tuple[int, ...]
    queue: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Signals:
    """What tasks tell one another in the middle of their steps: ``waits`` has the signals that must
    have been emitted before a step runs, ``emits`` those that it emits when it has.
    ``of_block[k]``: the first of block k's signals, and the first that is not.

    ``devices``: the backends on whose devices tasks (by number) put their steps; ``events``: the
    signals that these emit, and which say that the device has been told, not that it is done.
    """

    waits: Mapping[Step, tuple[int, ...]]
    emits: Mapping[Step, tuple[int, ...]]
    of_block: tuple[tuple[int, int], ...]
    devices: Mapping[int, str] = field(default_factory=dict)
    events: frozenset[int] = frozenset()

    @property
    def count(self) -> int:
        """How many signals there are."""
        return max((end for _, end in self.of_block), default=0)


NO_SIGNALS = Signals({}, {}, ())


@dataclass(frozen=True, slots=True, eq=False)
class Tasks:
    """The tasks of a plan, the more urgent the lower their number.

    ``waits[t]``: how many tasks of its block task t waits for. ``consumers[t]``: those that wait
    for it. ``blocks[k]``: the tasks of block k. ``parent[k]``: the expanded task that runs block k,
    -1 for block 0. ``shared``: slots that more than one task touches, and so live in ``V``; what
    one task alone touches are variables of its own. ``releases[t]``: shared slots that nobody but
    task t reads, so that it forgets them itself. ``counted[t]``: others that it reads, which go
    when the last of ``readers[slot]`` has ended. ``expanded``: by expanded step,
    the numbers of its blocks.
    """

    tasks: tuple[Task, ...]
    waits: tuple[int, ...]
    consumers: tuple[tuple[int, ...], ...]
    blocks: tuple[tuple[int, ...], ...]
    parent: tuple[int, ...]
    shared: frozenset[int]
    releases: tuple[tuple[int, ...], ...]
    counted: tuple[tuple[int, ...], ...]
    readers: Mapping[int, int]
    expanded: Mapping[Step, tuple[int, ...]] = field(default_factory=dict)
    signals: Signals = NO_SIGNALS


class Grouping(Protocol):
    """What decides which steps make a task."""

    def expands(self, step: Step) -> bool:
        """Whether the blocks of an If or a loop have tasks of their own."""
        ...

    def groups(self, dag: Dag, steps: Sequence[Step]) -> list[list[int]]:
        """The steps of a block in groups, each in an order in which they can run, such that no two
        groups wait for each other. An expanded step is alone."""
        ...

    def orders(self, steps: Sequence[Step]) -> Iterable[tuple[int, int]]:
        """Pairs of the steps of a block of which one always runs before the other, beside those
        that depend on each other."""
        ...

    def queue(self, step: Step) -> int:
        """Which workers run a step."""
        ...

    def seconds(self, step: Step) -> float:
        """About what a step takes."""
        ...


def arrange(plan: Plan, grouping: Grouping) -> Tasks:
    """The tasks of ``plan``, with steps grouped as ``grouping`` says."""
    return Arranger(plan, grouping).arrange()


def dependencies(slots: Sequence[Slot], steps: Sequence[Step]) -> Dag:
    """Which steps of one block must run before which: by slots, by control inputs, by effects."""
    producer: dict[int, int] = {}
    for i, step in enumerate(steps):
        for slot in step.outputs:
            if slot >= 0:
                producer[slot] = i
    place = {step.node: i for i, step in enumerate(steps)}
    edges = []
    effect = -1
    for i, step in enumerate(steps):
        for slot in reads(step):
            source = producer.get(slot, producer.get(slots[slot].base, -1))
            if source >= 0 and source != i:
                edges.append((source, i))
        if step.node.control_inputs:
            edges.extend((a, i) for a in _waits(step.node, place))
        if any(not each.node.op.pure for each in walk((step,))):
            if effect >= 0:
                edges.append((effect, i))
            effect = i
    return Dag(len(steps), edges)


def _waits(node: Node, place: Mapping[Node, int]) -> Iterator[int]:
    """The steps that ``node`` has as control inputs; for a node without one, what it reads."""
    stack = list(node.control_inputs)
    seen = set(stack)
    while stack:
        before = stack.pop()
        if before in place:
            yield place[before]
            continue
        made = [v.producer for v in before.inputs if v is not None and v.producer is not None]
        further = {*made, *before.control_inputs} - seen
        seen |= further
        stack.extend(further)


def reads(step: Step) -> Iterator[int]:
    """Slots that a step reads, those its blocks take from outside and from each other included."""
    for each in walk((step,)):
        yield from (slot for slot in each.inputs if slot >= 0)
        for block in each.blocks:
            yield from block.outputs


def touches(step: Step, *, inside: bool = True) -> Iterator[int]:
    """All slots that a step's own code names; with ``inside`` that of its blocks, too."""
    for each in walk((step,)) if inside else (step,):
        yield from (slot for slot in (*each.inputs, *each.outputs) if slot >= 0)
        for block in each.blocks:
            yield from block.inputs
            yield from block.outputs
        for carry in each.carries:
            yield from (carry.initial, carry.inside, carry.updated)
            if carry.result >= 0:
                yield carry.result


class Draft:
    """A task before it has a number."""

    def __init__(self, steps: tuple[Step, ...], block: int, queue: int, seconds: float) -> None:
        self.steps = steps
        self.block = block
        self.queue = queue
        self.seconds = seconds
        self.blocks: list[int] = []
        self.waits = 0
        self.consumers: list[Draft] = []
        self.number = -1


class Arranger:
    """Makes tasks of a plan; what the tasks of one block are, ``pieces`` says."""

    overlapping = False
    """whether tasks go on when others have read what they have made"""

    def __init__(self, plan: Plan, grouping: Grouping) -> None:
        self.plan = plan
        self.grouping = grouping
        self.drafts: list[Draft] = []
        self.blocks: list[list[Draft]] = []
        self.parents: list[Draft | None] = []
        # By block, the slots that stay for whoever goes on after it.
        self.kept: list[set[int]] = []
        self.expanded: dict[Step, tuple[int, ...]] = {}

    def arrange(self) -> Tasks:
        self.block(self.plan.steps, self.plan.outputs, None)
        for number, draft in enumerate(self.drafts):
            draft.number = number
        shared, readers, releases, counted = self.slots()
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
            readers,
            self.expanded,
            self.signals(),
        )

    def signals(self) -> Signals:
        """What the tasks tell one another."""
        return NO_SIGNALS

    def block(self, steps: Sequence[Step], outputs: Sequence[int], parent: Draft | None) -> int:
        """Add the tasks of a block, by urgency, those of blocks inside right after their task."""
        number = len(self.blocks)
        self.blocks.append([])
        self.kept.append(set(outputs))
        self.parents.append(parent)
        for draft in self.pieces(steps, number):
            self.blocks[number].append(draft)
            self.drafts.append(draft)
            for step in draft.steps:
                if step.control and self.grouping.expands(step):
                    blocks = [self.block(b.steps, b.outputs, draft) for b in step.blocks]
                    self.expanded[step] = tuple(blocks)
                    draft.blocks += blocks
        return number

    def pieces(self, steps: Sequence[Step], number: int) -> list[Draft]:
        """The tasks of block ``number``, the most urgent first."""
        dag = dependencies(self.plan.slots, steps)
        # In the order of the plan, which memory is planned for.
        groups = [sorted(group) for group in self.grouping.groups(dag, steps)]
        group_of = {i: g for g, group in enumerate(groups) for i in group}
        assert len(group_of) == len(steps)
        pairs = [(group_of[a], group_of[b]) for a, b in (*dag.edges, *self.grouping.orders(steps))]
        over = Dag(len(groups), [(a, b) for a, b in pairs if a != b])
        seconds = [self.grouping.seconds(step) for step in steps]
        cost = [sum(seconds[i] for i in group) for group in groups]
        drafts = [
            Draft(tuple([steps[i] for i in group]), number, self.grouping.queue(steps[group[0]]), c)
            for group, c in zip(groups, cost, strict=True)
        ]
        for g, draft in enumerate(drafts):
            draft.waits = len(over.pred[g])
            draft.consumers = [drafts[s] for s in over.succ[g]]
        # The urgency of a task: what the longest chain takes that begins with it.
        urgency = [own + rest for own, rest in zip(cost, ranks(over, cost), strict=True)]
        return [drafts[g] for g in topological_order(over, urgency)]

    def slots(
        self,
    ) -> tuple[set[int], dict[int, int], list[list[int]], list[list[int]]]:
        """What is shared, how many tasks read it, and what each task releases and counts down."""
        slots = self.plan.slots
        first: dict[int, int] = {}
        shared = {
            i for i in (*self.plan.inputs, *self.plan.outputs) if slots[i].kind is SlotKind.DYNAMIC
        }
        for draft in self.drafts:
            for step in draft.steps:
                for i in touches(step, inside=step not in self.expanded):
                    if slots[i].kind is SlotKind.DYNAMIC and first.setdefault(i, draft.number) != (
                        draft.number
                    ):
                        shared.add(i)
        # A slot goes after the tasks of the block in which it is made, so that what a block inside
        # reads is read by the task that runs that block.
        maker: dict[int, int] = {}
        for draft in self.drafts:
            for step in draft.steps:
                for i in step.outputs:
                    if i in shared and i not in self.kept[draft.block]:
                        maker[i] = draft.number
        readers: dict[int, list[int]] = {}
        for draft in self.drafts:
            found = {i for step in draft.steps for i in reads(step)}
            for i in sorted(found):
                made = maker.get(i)
                if made is None or self.drafts[made].block != draft.block:
                    continue
                if made != draft.number or self.overlapping:
                    readers.setdefault(i, []).append(draft.number)
        releases: list[list[int]] = [[] for _ in self.drafts]
        counted: list[list[int]] = [[] for _ in self.drafts]
        for i, tasks in readers.items():
            for task in tasks:
                (releases if len(tasks) == 1 else counted)[task].append(i)
        counts = {i: len(tasks) for i, tasks in readers.items() if len(tasks) > 1}
        return shared, counts, releases, counted
