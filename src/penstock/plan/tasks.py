"""A plan as tasks: pieces of a program that are scheduled during the run.

A *task* is a sequence of steps of one block that run without interruption. It is ready when the
tasks that it waits for have ended; the most urgent ready task runs first. The dataflow executor has
a task for each step, the linear executor a single task for the plan. The example of
``penstock.plan.plan``, with a task for each step:

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
Within one run, a block is active at most once at a time, so each of its values has one entry in
``V``, a list with an entry for each slot.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from penstock.algorithms.dag import Dag
from penstock.core.records import dataclass, field
from penstock.ops.work_estimate import host_seconds
from penstock.plan.plan import Plan, Step, walk


@dataclass(frozen=True, slots=True, eq=False)
class Task:
    """Steps that run sequentially in this order. ``block``: the index of its block; 0 is the plan.
    ``blocks``: the indices of the blocks of its expanded steps. ``queue``: the index of the queue
    whose workers run it. ``seconds``: its estimated time."""

    steps: tuple[Step, ...]
    block: int
    blocks: tuple[int, ...]
    queue: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Overlap:
    """Events of loops whose iterations overlap on devices (``plan.streams.Overlaps``). They add
    ``signals`` to the signals of tasks, but are not reset, and no task waits until they are
    emitted.

    ``ends[s]``: the event at the end of an iteration on stream s, for which the host does not wait
    at once. ``marks``: events after a step, with the first of its streams, which waits for the
    others. ``moved``: pairs (target, source) of events that a loop passes to the next iteration.
    ``last``: the targets for which the host waits before it replaces them. ``awaited``: the events
    that a step waits for if they are set, each with the stream that waits, -1 for the host.
    """

    signals: int = 0
    ends: Mapping[int, int] = field(default_factory=dict)
    moved: Mapping[Step, Sequence[tuple[int, int]]] = field(default_factory=dict)
    last: Mapping[Step, Sequence[int]] = field(default_factory=dict)
    marks: Mapping[Step, Sequence[tuple[int, int]]] = field(default_factory=dict)
    awaited: Mapping[Step, Sequence[tuple[int, int]]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Signals:
    """Orderings between steps of different tasks: ``waits`` has the signals that must be emitted
    before a step runs, ``emits`` the signals that it emits afterwards. The signals of block k are
    ``of_block[k][0]`` up to, not including, ``of_block[k][1]``.

    Device streams are numbered: ``devices`` has the device name of each stream, ``on`` the streams
    on which a step is enqueued, ``of_task`` the streams of a task. ``events``: the signals that a
    device stream emits, with the stream: the work is enqueued, but may not be done. ``behind``: the
    streams of a step that must wait for an event, each with the signal.
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
        """Bytes of the workspace of each device stream."""
        # Kernels on one stream run sequentially, so they can share the workspace.
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
    that runs block k, -1 for block 0. ``shared``: the slots that several tasks access, stored in
    ``V``; all others are local variables of their task. ``releases[t]``: shared slots that only
    task t reads, and releases itself. ``counted[t]``: other shared slots that it reads, released
    when the last of their ``readers[slot]`` tasks has ended. ``expanded``: the indices of the
    blocks of each expanded step.
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
"""the tasks of a plan whose steps all run in one function"""


class Grouping:
    """Decides which steps form a task, and which queue runs it. This one has a task for each step,
    with every If and loop expanded: the tasks of the dataflow executor."""

    def expands(self, step: Step) -> bool:
        """Whether the blocks of an If or a loop have their own tasks."""
        return step.control

    def groups(self, dag: Dag, steps: Sequence[Step]) -> list[list[int]]:
        """Group the steps of a block such that no two groups wait for each other. Each group is in
        topological order. An expanded step is a separate group."""
        return [[i] for i in range(dag.n)]

    def orders(self, steps: Sequence[Step]) -> Iterable[tuple[int, int]]:
        """Pairs (before, after) of steps of a block that always run in this order, although the
        second does not depend on the first."""
        return ()

    def queue(self, step: Step) -> int:
        """The index of the queue of a step."""
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
    """Whether one function can run a whole plan sequentially."""
    deep = [step for step in plan.steps if step.kernel is None and nests_deep(step)]
    return not deep and not are_asynchronous(plan.steps)


def nests_deep(step: Step) -> bool:
    """Whether the blocks of a step nest too deep for one Python function, so that they need
    separate tasks, each with its own function."""
    loops, levels = _nesting(step)
    return loops > _MOST_LOOPS or levels > _MOST_LEVELS


def _nesting(step: Step) -> tuple[int, int]:
    """The depth of nested loops in a step, itself included, and the levels of indentation."""
    inner = [_nesting(s) for block in step.blocks for s in block.steps if s.blocks]
    loops, levels = (max((pair[i] for pair in inner), default=0) for i in (0, 1))
    return (loops, levels + 1) if step.node.op.name == "If" else (loops + 1, levels + 2)
