"""A plan as tasks: pieces of a program that are scheduled during the run.

A *task* is one or more steps of one block that run one after the other without interruption. It is
ready when the tasks that it waits for have ended; of the ready tasks the most urgent runs first.
The dataflow executor has a task for each step; a plan as one task is what the linear executor runs.
The example of ``penstock.plan.plan``, a task for each step:

    >>> from penstock.plan.arrangement import arrange
    >>> tasks = arrange(plan, Grouping())
    >>> [[step.node.op.name for step in task.steps] for task in tasks.tasks]
    [['Exp'], ['Neg'], ['Add']]
    >>> tasks.waits, tasks.consumers
    ((0, 1, 1), ((1,), (2,), ()))

The blocks of an *expanded* If or loop have tasks of their own. Its task runs until a block must
run, yields the number of that block, and continues when the tasks of the block have ended::

    block 0    t0 Exp ---> t1 If ---> t4 Neg        t1 waits for t0, t4 for t1
                           |    |
    block 1    t2 Sin <----+    |                   when t1 yields 1
    block 2    t3 Cos <---------+                   when t1 yields 2

A task also yields when it needs a signal that another task has not emitted yet. No worker blocks.
Within one run a block is active once at a time, so that each of its values has one place in ``V``,
a list with an entry for each slot.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from penstock.algorithms.dag import Dag
from penstock.core.records import dataclass, field
from penstock.ops.work_estimate import host_seconds
from penstock.plan.plan import Plan, Step, walk


@dataclass(frozen=True, slots=True, eq=False)
class Task:
    """Steps that run one after the other, in the order given. ``block``: the number of its block; 0
    is the plan's own. ``blocks``: the numbers of the blocks of its expanded steps. ``queue``: the
    queue whose workers run it. ``seconds``: its estimated time."""

    steps: tuple[Step, ...]
    block: int
    blocks: tuple[int, ...]
    queue: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Overlap:
    """Events of loops whose iterations overlap on devices (``plan.overlap``), as ``signals`` more:
    these are not reset, and no task waits until they are emitted.

    ``ends[s]``: set where an iteration ends on stream s, which the host does not wait for then.
    ``marks``: set behind a step, with the first of its streams, which waits for the others.
    ``moved``: what a loop hands to the next iteration, (target, source). ``last``: of these, what
    the host waits for before it replaces it. ``awaited``: the events that a step waits for if they
    are set, with the stream, -1 the host's.
    """

    signals: int = 0
    ends: Mapping[int, int] = field(default_factory=dict)
    moved: Mapping[Step, Sequence[tuple[int, int]]] = field(default_factory=dict)
    last: Mapping[Step, Sequence[int]] = field(default_factory=dict)
    marks: Mapping[Step, Sequence[tuple[int, int]]] = field(default_factory=dict)
    awaited: Mapping[Step, Sequence[tuple[int, int]]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Signals:
    """Orderings between steps of different tasks: ``waits`` has the signals that must have been
    emitted before a step runs, ``emits`` those that it emits afterwards. The signals of block k are
    those from ``of_block[k][0]`` up to, not including, ``of_block[k][1]``.

    Streams of devices are numbered: ``devices`` has the device of each, by name, ``on`` those that
    a step is put on, ``of_task`` those of a task. ``events``: the signals that such a stream emits,
    with the stream: work has been put there, but need not be done. ``behind``: the streams of a
    step that must wait for an event, each with the signal.
    """

    waits: Mapping[Step, tuple[int, ...]]
    emits: Mapping[Step, tuple[int, ...]]
    of_block: tuple[tuple[int, int], ...]
    devices: tuple[str, ...] = ()
    on: Mapping[Step, tuple[int, ...]] = field(default_factory=dict)
    of_task: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    events: Mapping[int, int] = field(default_factory=dict)
    behind: Mapping[Step, tuple[tuple[int, int], ...]] = field(default_factory=dict)
    overlap: Overlap = Overlap()

    @property
    def count(self) -> int:
        """The number of signals."""
        return max((end for _, end in self.of_block), default=0) + self.overlap.signals

    @property
    def workspaces(self) -> list[int]:
        """Bytes of the workspace of each stream of a device, which all kernels on it share."""
        # Kernels on one stream run one after the other, so that they can share it.
        nbytes = [0] * len(self.devices)
        for step, streams in self.on.items():
            if step.kernel is not None and not step.into:
                for stream in streams:
                    nbytes[stream] = max(nbytes[stream], step.kernel.workspace)
        return nbytes


NO_SIGNALS = Signals({}, {}, ())


@dataclass(frozen=True, slots=True, eq=False)
class Tasks:
    """The tasks of a plan, the most urgent first.

    ``waits[t]``: the number of tasks of its block that task t waits for. ``consumers[t]``: the
    tasks that wait for it. ``blocks[k]``: the tasks of block k. ``parent[k]``: the expanded task
    that runs block k, -1 for block 0. ``shared``: slots that more than one task touches, and which
    are therefore in ``V``; others are local variables of their task. ``releases[t]``: shared slots
    that only task t reads, and releases itself. ``counted[t]``: other shared slots that it reads,
    released when the last of their ``readers[slot]`` tasks has ended. ``expanded``: the numbers of
    the blocks of each expanded step.
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


ONE_FUNCTION = Tasks((), (), (), (), (), frozenset(), (), (), {})
"""stands for tasks where all steps of a plan run in one function"""


class Grouping:
    """Decides which steps form a task, and which queue runs it. This one has a task for each step,
    with every If and loop expanded: the tasks of the dataflow executor."""

    def expands(self, step: Step) -> bool:
        """Whether the blocks of an If or a loop have tasks of their own."""
        return step.control

    def groups(self, dag: Dag, steps: Sequence[Step]) -> list[list[int]]:
        """The steps of a block in groups, each in an order in which they can run, such that no two
        groups wait for each other. An expanded step has a group of its own."""
        return [[i] for i in range(dag.n)]

    def orders(self, steps: Sequence[Step]) -> Iterable[tuple[int, int]]:
        """Pairs (before, after) of steps of a block that always run in this order, although they do
        not depend on each other."""
        return ()

    def queue(self, step: Step) -> int:
        """The queue whose workers run a step."""
        return 0

    def seconds(self, step: Step) -> float:
        """The estimated time of a step."""
        return sum(host_seconds(inner.node) for inner in walk((step,)) if not inner.control)


def are_asynchronous(steps: Sequence[Step]) -> bool:
    """Whether one of ``steps``, or of the steps of their blocks, has an asynchronous kernel."""
    if True in [step.kernel is not None and step.kernel.begin is not None for step in steps]:
        return True
    blocks = [block for step in steps if step.blocks for block in step.blocks]
    return any(are_asynchronous(block.steps) for block in blocks)


# CPython compiles at most 20 nested loops, and 100 levels of indentation.
_MOST_LOOPS, _MOST_LEVELS = 18, 88


def in_one_function(plan: Plan) -> bool:
    """Whether one function can run a whole plan, its steps one by one."""
    deep = [step for step in plan.steps if step.kernel is None and nests_deep(step)]
    return not deep and not are_asynchronous(plan.steps)


def nests_deep(step: Step) -> bool:
    """Whether the blocks of a step nest too deep for one function of Python, so that they must
    have tasks, and so functions, of their own."""
    loops, levels = _nesting(step)
    return loops > _MOST_LOOPS or levels > _MOST_LEVELS


def _nesting(step: Step) -> tuple[int, int]:
    """The depth of loops in a step, itself included, and that of levels of indentation."""
    inner = [_nesting(s) for block in step.blocks for s in block.steps if s.blocks]
    loops, levels = (max((pair[i] for pair in inner), default=0) for i in (0, 1))
    return (loops, levels + 1) if step.node.op.name == "If" else (loops + 1, levels + 2)
