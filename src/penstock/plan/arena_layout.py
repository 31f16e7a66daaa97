"""The layout of the arena: slots that share memory, and their offsets, for an order or for tasks.

Every step has a time on one clock, nested blocks included. A slot is live from its step to its last
reader; if it has views, its memory is live until the last reader of a view. Outer values that the
body of a loop reads are live until the loop ends. A step may reuse the memory of an input that it
is the last to read (in place). The example of ``penstock.plan.plan``, where slot 1 is
``a = Exp(x)`` and slot 2 is ``b = Neg(a)``:

    >>> lifetimes = Intervals(plan, range(3))
    >>> lifetimes.first, lifetimes.last
    ({1: 0, 2: 1}, {1: 1, 2: 2})

::

    clock    0: Exp    1: Neg    2: Add
    slot 1   written   read
    slot 2             written   read

Neg can work in place, so slot 2 reuses the buffer of slot 1, and the arena has only 16 bytes:

    >>> arena_plan = plan_arena(plan)
    >>> arena_plan.buffer_of, arena_plan.offsets, arena_plan.size
    ({1: 1, 2: 1}, {1: 0, 2: 0}, 16)
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from operator import attrgetter

from penstock.algorithms.arena import Buffer, arena_size, lower_bound
from penstock.core.checkpoints import with_checkpoints
from penstock.core.records import dataclass, field, replace
from penstock.core.types import TensorType
from penstock.ops.internal.transfer import HOST
from penstock.plan.plan import Plan, Slot, SlotKind, Step, reads
from penstock.plan.tasks import Tasks


@dataclass(frozen=True, slots=True)
class ArenaPlan:
    """An order of a plan's outermost steps, and the memory that it needs.

    ``offsets`` maps arena slots to byte offsets in the arena; ``buffer_of`` maps them to buffers,
    which they may share. No arena for this order can be smaller than ``lower_bound``. ``planner``
    chose the offsets (``plan_memory``); ``by(planner)`` is the arena plan of another planner.
    """

    order: tuple[int, ...]
    offsets: dict[int, int]
    buffer_of: dict[int, int]
    size: int
    lower_bound: int
    planner: str = ""
    by: Callable[[str], ArenaPlan] | None = field(default=None, compare=False, repr=False)
    remote: Mapping[str, int] = field(default_factory=dict)
    """bytes of the arenas in device memories, by memory; ``size`` is for the host"""


def plan_arena(plan: Plan, planner: str = "quick") -> ArenaPlan:
    """Choose order and offsets: the given order or a memory-aware one, for the smaller arena."""
    # The given order is always a candidate: the memory-aware one is a heuristic, and may need more
    # memory.
    given = range(len(plan.steps))
    best = plan_arena_in_order(plan, given, planner)
    # A function instead of the arena plans of all planners: only reports compare planners, and a
    # search takes up to a second.
    best = replace(best, by=partial(plan_arena, plan))
    # Most plans are chains, or have a single step that needs as many bytes as the lower bound: no
    # other order can need less.
    if len(given) <= 2 or best.lower_bound <= _largest_step(plan):
        return best
    dag = plan.dag
    if max(map(len, (*dag.succ, *dag.pred))) <= 1:
        return best  # another order of a chain does not pay
    from penstock.algorithms.ordering import memory_order

    order = memory_order(dag, _released_outputs(plan))
    if order == [*given]:
        return best
    buffers = assign_buffers(plan, Intervals(plan, order))
    # The bound takes one walk, offsets take a search. On neural networks, the search comes within a
    # few percent of the bound, so an order with a larger bound would lose anyway.
    if lower_bound(buffers.live(plan)) >= best.lower_bound:
        return best
    other = replace(_arena_plan(plan, order, buffers, planner), by=best.by)
    return min(best, other, key=attrgetter("size"))


@dataclass(frozen=True, slots=True)
class SavedArena:
    """An arena plan in a file: the order of the steps, pairs of the slots that own buffers and
    their offsets, and the planner that chose them."""

    order: Sequence[int]
    offsets: Sequence[tuple[int, int]]
    planner: str


def restored_arena(plan: Plan, saved: SavedArena) -> ArenaPlan | None:
    """Return the saved arena plan, or None if it is not valid for this plan: a step would run
    before its predecessors, or buffers that are live at the same time overlap."""
    if plan.remote:
        return None  # files only have offsets in the host's arena
    # The file is not trusted: a wrong offset would silently overwrite a live value. The check takes
    # one walk, planning again would take a search.
    dag = plan.dag
    position = {step: i for i, step in enumerate(saved.order)}
    if len(saved.order) != dag.n or position.keys() != set(range(dag.n)):
        return None
    for step, followers in enumerate(dag.succ):
        if followers and min(map(position.__getitem__, followers)) < position[step]:
            return None
    # Buffers are not saved: they follow from the order, and depend on the kernels of this plan,
    # which may work in place where those of the saved plan did not.
    buffers = assign_buffers(plan, Intervals(plan, saved.order))
    offset_of = dict(saved.offsets)
    live = buffers.live(plan)
    if offset_of.keys() != set(buffers.owners):
        return None
    offsets = [offset_of[owner] for owner in buffers.owners]
    size = arena_size(live, offsets)
    if size is None:
        return None
    slots = {slot: offset_of[buffer] for slot, buffer in buffers.buffer_of.items()}
    by, bound = partial(plan_arena, plan), lower_bound(live)
    order = tuple(saved.order)
    return ArenaPlan(order, slots, buffers.buffer_of, size, bound, str(saved.planner), by)


def plan_arena_in_order(plan: Plan, order: Sequence[int], planner: str = "quick") -> ArenaPlan:
    """Choose offsets for the outermost steps in this order."""
    return _arena_plan(plan, order, assign_buffers(plan, Intervals(plan, order)), planner)


def plan_arena_for_tasks(plan: Plan, tasks: Tasks, planner: str = "quick") -> ArenaPlan:
    """Choose offsets for any order in which ``tasks`` may run, on any number of workers. With many
    buffers, the planner "reuse" replaces those that compare all pairs."""
    task_of = {step: number for number, task in enumerate(tasks.tasks) for step in task.steps}
    # The clock only orders steps within one task. Between tasks, only ``precedes`` is certain.
    order = range(len(plan.steps))
    precedes = partial_order(tasks)
    buffers = assign_buffers(plan, Intervals(plan, order, task_of), precedes)
    if len(buffers.owners) > _MOST_BUFFERS and planner != "bump":
        planner = "reuse"
        # "reuse" needs a transitive relation. ``precedes`` is not transitive if the tasks of two
        # branches of an If precede each other.
        precedes = partial_order(tasks, exclusive=False)
    arena_plan = _arena_plan(plan, order, buffers, planner, precedes)
    return replace(arena_plan, by=partial(plan_arena_for_tasks, plan, tasks))


def _arena_plan(
    plan: Plan,
    order: Sequence[int],
    buffers: Buffers,
    planner: str,
    precedes: Precedes | None = None,
) -> ArenaPlan:
    offset_of: dict[int, int] = {}
    sizes, bound = dict.fromkeys((HOST, *plan.remote), 0), 0
    # Many plans of a single step have no buffer.
    for memory in sizes if buffers.buffer_of else ():
        # Imported here: a session opened from a file has offsets, and needs no planner.
        from penstock.algorithms.arena_planner import plan_memory, plan_memory_dag

        part = buffers.in_memory(plan, memory)
        live = part.live(plan)
        if precedes is None:
            arena = plan_memory(live, planner)
        else:
            conflict = part.conflicts(precedes, both_ways=planner != "reuse")
            arena = plan_memory_dag([buffer.size for buffer in live], conflict, planner=planner)
        offset_of.update(zip(part.owners, arena.offsets, strict=True))
        sizes[memory] = arena.size
        # The bound is for the host, like ``size``; device memories only report their size.
        bound = lower_bound(live) if memory == HOST else bound
    offsets = {slot: offset_of[buffer] for slot, buffer in buffers.buffer_of.items()}
    size = sizes.pop(HOST)
    return ArenaPlan(tuple(order), offsets, buffers.buffer_of, size, bound, planner, remote=sizes)


# Up to this many buffers, all pairs are checked for conflicts, which takes a few seconds.
_MOST_BUFFERS = 2500


def _largest_step(plan: Plan) -> int:
    """The maximum over steps of the host bytes that one step reads and writes, which every order
    needs."""
    memory, largest, arena = plan.memory, 0, SlotKind.ARENA
    bytes_of = [s.nbytes if s.kind is arena and s.memory == HOST else 0 for s in plan.slots]
    bytes_of.append(0)  # at index -1, for omitted values
    for step in plan.walk():
        touched = {step.workspace}
        for slot in step.inputs:
            touched.update(memory[slot] if slot >= 0 else ())
        if step.kernel is None or not step.kernel.inplace:  # in place may reuse an input's memory
            touched.update(step.outputs)
        largest = max(largest, sum(map(bytes_of.__getitem__, touched)))
    return largest


def _released_outputs(plan: Plan) -> list[list[tuple[int, list[int]]]]:
    """For each outermost step, the bytes of its outputs, and the steps that read them."""
    # By the slots that own memory: a reader of a view keeps the memory of its base alive.
    readers: dict[int, set[int]] = {}
    for i, step in enumerate(plan.steps):
        for slot in reads(step) if step.blocks else step.inputs:
            for root in plan.memory[slot] if slot >= 0 else ():
                readers.setdefault(root, set()).add(i)
    leaving = {root for slot in plan.outputs for root in plan.memory[slot]}
    return [
        [
            (plan.slots[slot].nbytes, sorted(readers.get(slot, set()) - {i}))
            for slot in step.outputs
            if slot >= 0 and plan.slots[slot].kind is SlotKind.ARENA and slot not in leaving
        ]
        for i, step in enumerate(plan.steps)
    ]


# Lifetimes on one clock.


class Intervals:
    """Live intervals of arena slots if the outermost steps of ``plan`` run in ``order``: from
    ``first[slot]`` to ``last[slot]``, both included.

    ``touched[slot]`` maps each task that accesses the slot to the time of its last access; task -1
    is the end of the run, and without tasks, any step. ``task_of``: the task of a step, by default
    the task of the enclosing step. ``steps`` are the times of steps with kernels, and these steps.
    """

    def __init__(
        self, plan: Plan, order: Iterable[int], task_of: Mapping[Step, int] | None = None
    ) -> None:
        self.first: dict[int, int] = {}
        self.last: dict[int, int] = {}
        self.touched: dict[int, dict[int, int]] = {}
        self.steps: list[tuple[int, Step]] = []
        self._plan = plan
        self._task_of = task_of or {}
        self._now, self._task = 0, -1
        # For each enclosing step with blocks, the slots read so far.
        self._loops: list[set[int]] = []
        self._run([plan.steps[i] for i in order])
        self._touch(plan.outputs)

    def _touch(self, slots: Sequence[int]) -> None:
        for slot in slots:
            for root in self._plan.memory[slot] if slot >= 0 else ():
                self.last[root] = self._now
                self.touched[root][self._task] = self._now
                # For all enclosing loops: the end of each loop selects the slots from outside.
                for loop in self._loops:
                    loop.add(root)

    def _start(self, slots: Sequence[int]) -> None:
        for slot in slots:
            if slot >= 0 and self._plan.slots[slot].kind is SlotKind.ARENA:
                self.first[slot] = self.last[slot] = self._now
                self.touched[slot] = {self._task: self._now}

    def _run(self, steps: Sequence[Step]) -> None:
        outer_task = self._task
        for step in with_checkpoints(steps):
            self._task = self._task_of.get(step, outer_task) if self._task_of else outer_task
            self._touch(step.inputs)
            if step.kernel is None:
                self._run_blocks(step)
            else:
                self.steps.append((self._now, step))
                # After the inputs, at the same time: an output never shares memory with an input,
                # unless the step works in place (``_taken_over``).
                self._start((*step.outputs, step.workspace))
                self._touch(step.outputs)
            self._now += 1
        self._task = outer_task

    def _run_blocks(self, step: Step) -> None:
        # A carried value alternates between two buffers, which are live throughout the loop: the
        # body reads one and writes the other (decision 12).
        begin = self._now
        buffers = [slot for carry in step.carries for slot in carry.buffers or ()]
        self._start(buffers)
        self._loops.append(set())
        for block in step.blocks:
            self._now += 1
            self._run(block.steps)
            self._touch(block.outputs)
        self._now += 1
        roots = self._loops.pop()
        # The next iteration reads outer values again, so they are live until the loop ends; a
        # branch has no next iteration.
        if step.node.op.name != "If":
            for root in roots:
                if self.first[root] <= begin:
                    self.last[root] = self.touched[root][self._task] = self._now
        self._touch((*buffers, *step.inputs, *step.outputs))


# The partial order of tasks that is certain before the run.

Precedes = Callable[[int, int], bool]
"""Whether values that only the first task accesses are dead, or never live, when the second one
begins."""


def partial_order(tasks: Tasks, *, exclusive: bool = True) -> Precedes:
    """The partial order of tasks that is certain before the run.

    An expanded task runs before and after the tasks of its blocks, so it has no order with them.
    Only one block of an If runs, so values of its two blocks are never live together: for memory,
    their tasks count as ordered, unless ``exclusive`` is false.
    """
    # For each task, its predecessors in the block, as bits of an integer. The tasks of a block are
    # in topological order, so predecessors are complete before they are used.
    ancestors = [0] * len(tasks.tasks)
    for block in tasks.blocks:
        for t in block:
            for after in tasks.consumers[t]:
                ancestors[after] |= ancestors[t] | 1 << t
    # For a chain of 2,500 tasks, sets of all predecessors would take over 100 MB, bits take less
    # than 1 MB. A path has the tasks around a task, the outermost first, and the task itself.
    paths: list[tuple[int, ...]] = []
    for number, task in enumerate(tasks.tasks):
        parent = tasks.parent[task.block]
        paths.append((*(paths[parent] if parent >= 0 else ()), number))

    def precedes(a: int, b: int) -> bool:
        # Compare at the first difference of the paths: the innermost block that contains both.
        for x, y in zip(paths[a], paths[b], strict=False):
            if x != y:
                if tasks.tasks[x].block != tasks.tasks[y].block:
                    return exclusive
                return bool(ancestors[y] >> x & 1)
        return False

    return precedes


# Buffers that slots share.


@dataclass(frozen=True, eq=False)
class Buffers:
    """The buffer of each arena slot, named by the slot that owns it, and the lifetimes of buffers.
    The lifetime of an owner includes those of the slots that reuse its buffer in place."""

    buffer_of: dict[int, int]
    lifetimes: Intervals
    among: Collection[int] | None = None
    """the slots to consider, by default all"""

    def in_memory(self, plan: Plan, memory: str) -> Buffers:
        """The buffers in one memory."""
        if not plan.remote:
            return self
        among = {slot for slot in self.buffer_of if plan.slots[slot].memory == memory}
        return replace(self, among=among)

    @property
    def owners(self) -> list[int]:
        own = [slot for slot in self.lifetimes.first if self.buffer_of[slot] == slot]
        return own if self.among is None else [slot for slot in own if slot in self.among]

    def live(self, plan: Plan) -> list[Buffer]:
        """Size and lifetime of each buffer, in the order of ``owners``."""
        slots, first, last = plan.slots, self.lifetimes.first, self.lifetimes.last
        return [Buffer(slots[i].nbytes, first[i], last[i]) for i in self.owners]

    def gone_before(self, buffer: int, task: int, precedes: Precedes) -> bool:
        """Whether all tasks that access a buffer, except ``task`` itself, run before ``task``."""
        # Check all of them, not only the last: readers have no order among each other.
        touched = self.lifetimes.touched[buffer]
        # A buffer used by "task" -1, the end of the run, is live after all others.
        return all(t == task or (t >= 0 and precedes(t, task)) for t in touched)

    def conflicts(self, precedes: Precedes, *, both_ways: bool) -> Callable[[int, int], bool]:
        """Return a function of two indices into ``owners``: whether both buffers may be live at the
        same time. Without ``both_ways``: whether the first may be live when the second is written.
        """
        owners, lifetimes = self.owners, self.lifetimes

        def gone(a: int, b: int) -> bool:
            # The first task that accesses a buffer writes it. Steps within the task are ordered.
            task = next(iter(lifetimes.touched[b]))
            last = lifetimes.touched[a].get(task)
            if last is not None and last >= lifetimes.first[b]:
                return False
            return self.gone_before(a, task, precedes)

        def conflict(i: int, j: int) -> bool:
            a, b = owners[i], owners[j]
            return not (gone(a, b) or (both_ways and gone(b, a)))

        return conflict


def assign_buffers(plan: Plan, lifetimes: Intervals, precedes: Precedes | None = None) -> Buffers:
    """Assign each arena slot a new buffer, or the buffer of an input if its step works in place,
    and extend ``lifetimes`` to buffers. ``precedes``: the order of tasks, if tasks run the plan."""
    buffer_of: dict[int, int] = {}
    buffers = Buffers(buffer_of, lifetimes)
    for time, step in with_checkpoints(lifetimes.steps):
        inplace = step.into and step.kernel is not None and step.kernel.inplace
        taken_over = _taken_over(plan, buffers, precedes, time, step) if inplace else -1
        for slot in step.outputs:
            if slot in lifetimes.first and slot not in buffer_of:
                buffer_of[slot] = slot
                # In the order of the steps: the owner's lifetime already includes earlier steps in
                # place, so a chain of them shares one buffer.
                if taken_over >= 0 and slot == step.outputs[0]:
                    buffer = buffer_of[slot] = buffer_of[taken_over]
                    lifetimes.last[buffer] = lifetimes.last[slot]
                    lifetimes.touched[buffer] |= lifetimes.touched[slot]
    for slot in lifetimes.first:
        buffer_of.setdefault(slot, slot)
    return buffers


def _taken_over(
    plan: Plan, buffers: Buffers, precedes: Precedes | None, time: int, step: Step
) -> int:
    """The input slot whose memory the first output of ``step`` reuses, or -1."""
    kernel, output = step.kernel, step.outputs[0]
    assert kernel is not None
    if output < 0 or plan.slots[output].kind is not SlotKind.ARENA:
        return -1
    lifetimes, buffer_of, slots = buffers.lifetimes, buffers.buffer_of, plan.slots
    for i in kernel.inplace:
        candidate = step.inputs[i] if i < len(step.inputs) else -1
        if candidate < 0 or slots[candidate].kind is not SlotKind.ARENA:
            continue
        buffer = buffer_of[candidate]
        if lifetimes.last[buffer] != time or lifetimes.first[buffer] == time:
            continue  # it is live afterwards
        if precedes is not None:
            task = next(iter(lifetimes.touched[output]))
            # This is the last reader by the clock, but another task may read the slot later.
            if not buffers.gone_before(buffer, task, precedes):
                continue
        # Kernels work in place element by element: each is written to the place it was read from.
        source, target = slots[candidate], slots[output]
        if source.strides != target.strides or _shape_and_dtype(source) != _shape_and_dtype(target):
            continue
        # Another input may be the same value or a view of it, such as a transpose, which the kernel
        # may read after it has written the output.
        read = [
            buffer_of.get(root)
            for k, slot in enumerate(step.inputs)
            if slot >= 0 and (slot != candidate or k not in kernel.inplace)
            for root in plan.memory[slot]
        ]
        if buffer not in read:
            return candidate
    return -1


def _shape_and_dtype(slot: Slot) -> TensorType:
    assert isinstance(slot.type, TensorType)
    return slot.type.without_data()
