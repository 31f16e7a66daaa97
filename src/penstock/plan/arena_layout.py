"""Which slots share memory, and where in the arena, when a plan runs in an order, or as tasks.

Every step has a place on one clock, nested blocks included. A slot lives from its step to its last
reader's; through a view, its memory lives as long as the view. What a loop body reads from outside
lives until the loop ends. A step may take over the memory of an input that dies with it (in place).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from penstock.algorithms.arena_planner import (
    Arena,
    Buffer,
    lower_bound,
    plan_memory,
    plan_memory_dag,
)
from penstock.algorithms.dag import Dag
from penstock.algorithms.ordering import memory_order
from penstock.plan.plan import Plan, SlotKind, Step, memory_of
from penstock.plan.tasks import Tasks, dependencies, reads
from penstock.types import TensorType


@dataclass(frozen=True, slots=True)
class ArenaPlan:
    """An order of a plan's outermost steps, and the memory that it needs.

    ``offsets`` maps arena slots to bytes from the start of the arena; ``buffer_of`` to the buffer
    they share with others. ``lower_bound`` is the largest sum of live bytes over the steps: no
    arena for this order can be smaller. ``planner`` chose the offsets (``plan_memory``).
    """

    order: tuple[int, ...]
    offsets: dict[int, int]
    buffer_of: dict[int, int]
    size: int
    lower_bound: int
    planner: str = ""


def plan_arena(plan: Plan, planner: str = "quick") -> ArenaPlan:
    """Choose order and offsets: of the given order and memory-aware ones, the smallest arena."""
    best = _Liveness(plan, range(len(plan.steps))).arena_plan(planner)
    for order in _other_orders(plan):
        other = _Liveness(plan, order)
        if lower_bound(other.buffers()) < best.lower_bound:
            candidate = other.arena_plan(planner)
            if candidate.size < best.size:
                best = candidate
    return best


def plan_arena_for_tasks(plan: Plan, tasks: Tasks, planner: str = "quick") -> ArenaPlan:
    """Offsets for any order in which ``tasks`` may run, on any number of workers.

    With many buffers, the planner "reuse" takes the place of those that compare all pairs.
    """
    order = _Order(tasks)
    liveness = _Liveness(plan, range(len(plan.steps)), order)
    if len(liveness.owners()) > _MOST_BUFFERS and planner != "bump":
        order.exclusive = False
        planner = "reuse"
    return liveness.arena_plan(planner)


def _other_orders(plan: Plan) -> Iterator[list[int]]:
    dag = dependencies(plan.slots, plan.steps)
    if all(len(dag.succ[i]) <= 1 and len(dag.pred[i]) <= 1 for i in range(dag.n)):
        return  # chains: there is no other order worth trying
    yield memory_order(dag, _produced(plan, dag))


def _produced(plan: Plan, dag: Dag) -> list[list[tuple[int, list[int]]]]:
    """For each outermost step, the bytes it makes and the steps after which they can go."""
    readers: dict[int, set[int]] = {}
    for i, step in enumerate(plan.steps):
        for slot in reads(step):
            for root in memory_of(plan.slots, slot):
                readers.setdefault(root, set()).add(i)
    leaving = {root for slot in plan.outputs for root in memory_of(plan.slots, slot)}
    made = []
    for i, step in enumerate(plan.steps):
        outputs = []
        for slot in step.outputs:
            if slot >= 0 and plan.slots[slot].kind is SlotKind.ARENA and slot not in leaving:
                after = sorted(readers.get(slot, set()) - {i})
                outputs.append((_bytes(plan, slot), after))
        made.append(outputs)
    return made


def _bytes(plan: Plan, slot: int) -> int:
    kind = plan.slots[slot].type
    assert isinstance(kind, TensorType)
    return kind.nbytes


# Buffers whose conflicts are asked for pair by pair: a few seconds.
_MOST_BUFFERS = 2500


class _Order:
    """Which tasks are sure to run before which, where their order is decided during the run.

    An expanded task runs before and after the tasks of its blocks, and so has no order with them.
    Of the blocks of an If only one runs: nothing in one is ever there together with what is in the
    other, which for memory is as good as an order, unless ``exclusive`` is unset.
    """

    exclusive = True

    def __init__(self, tasks: Tasks) -> None:
        self.tasks = tasks.tasks
        self.task_of = {
            step: number for number, task in enumerate(self.tasks) for step in task.steps
        }
        # As bits of whole numbers, those of a block that come before each task; in a block, tasks
        # are listed such that these are known first.
        self.ancestors = [0] * len(self.tasks)
        for block in tasks.blocks:
            for t in block:
                for after in tasks.consumers[t]:
                    self.ancestors[after] |= self.ancestors[t] | 1 << t
        # Each task behind those that it is in, outermost first.
        self.paths: list[tuple[int, ...]] = []
        for number, task in enumerate(self.tasks):
            around = tasks.parent[task.block]
            self.paths.append((*(self.paths[around] if around >= 0 else ()), number))

    def precedes(self, a: int, b: int) -> bool:
        """Whether what only task ``a`` touches is gone, or was never there, when ``b`` begins."""
        for x, y in zip(self.paths[a], self.paths[b], strict=False):
            if x != y:
                if self.tasks[x].block != self.tasks[y].block:
                    return self.exclusive
                return bool(self.ancestors[y] >> x & 1)
        return False


class _Liveness:
    def __init__(self, plan: Plan, order: Sequence[int], tasks: _Order | None = None) -> None:
        self.plan = plan
        self.order = tuple(order)
        self.tasks = tasks
        # The task at hand, and when each task touches each arena slot last.
        self.task = -1
        self.touched: dict[int, dict[int, int]] = {}
        self.clock = 0
        self.first: dict[int, int] = {}
        self.last: dict[int, int] = {}
        # What each loop that is being walked has read so far; it lives until that loop ends.
        self.loops: list[set[int]] = []
        # Steps by time, to go through them again when it is known what dies where.
        self.at: list[tuple[int, Step]] = []
        self.walk([plan.steps[i] for i in order])
        for slot in plan.outputs:
            self.touch(slot)
        self.buffer_of: dict[int, int] = {}
        self.merge()

    def touch(self, index: int) -> None:
        for root in memory_of(self.plan.slots, index):
            self.last[root] = self.clock
            self.touched[root][self.task] = self.clock
            for loop in self.loops:
                loop.add(root)

    def start(self, index: int) -> None:
        if index >= 0 and self.plan.slots[index].kind is SlotKind.ARENA:
            self.first[index] = self.last[index] = self.clock
            self.touched[index] = {self.task: self.clock}

    def walk(self, steps: Sequence[Step]) -> None:
        around = self.task
        for step in steps:
            if self.tasks is not None:
                self.task = self.tasks.task_of.get(step, around)
            if step.control:
                self.control(step)
            else:
                self.at.append((self.clock, step))
                for slot in step.inputs:
                    if slot >= 0:
                        self.touch(slot)
                for slot in step.outputs:
                    self.start(slot)
                    if slot >= 0:
                        self.touch(slot)
                self.start(step.workspace)
            self.clock += 1
        self.task = around

    def control(self, step: Step) -> None:
        for slot in step.inputs:
            if slot >= 0:
                self.touch(slot)
        begin = self.clock
        looping = step.node.op.name != "If"
        for carry in step.carries:
            for slot in carry.buffers or ():
                self.start(slot)
        if looping:
            self.loops.append(set())
        for block in step.blocks:
            self.clock += 1
            self.walk(block.steps)
            for slot in block.outputs:
                self.touch(slot)
        self.clock += 1
        if looping:
            for root in self.loops.pop():
                if self.first[root] <= begin:
                    self.last[root] = self.clock
                    self.touched[root][self.task] = self.clock
        for carry in step.carries:
            for slot in carry.buffers or ():
                self.touch(slot)
        for slot in (*step.inputs, *step.outputs):
            if slot >= 0:
                self.touch(slot)

    def merge(self) -> None:
        """Give each slot a buffer, or that of an input that dies where the slot is born."""
        slots = self.plan.slots
        for time, step in self.at:
            taken = self.takeover(time, step)
            for slot in step.outputs:
                if slot in self.first and slot not in self.buffer_of:
                    if taken >= 0 and slot == step.outputs[0]:
                        buffer = self.buffer_of[taken]
                        self.buffer_of[slot] = buffer
                        self.last[buffer] = self.last[slot]
                        self.touched[buffer] |= self.touched[slot]
                    else:
                        self.buffer_of[slot] = slot
        for slot in self.first:
            self.buffer_of.setdefault(slot, slot)
        assert all(slots[b].kind is SlotKind.ARENA for b in self.buffer_of.values())

    def takeover(self, time: int, step: Step) -> int:
        """The input slot whose memory the first output of ``step`` may take, or -1."""
        kernel, slots = step.kernel, self.plan.slots
        if not step.into or kernel is None or not kernel.inplace:
            return -1
        output = step.outputs[0]
        if output < 0 or slots[output].kind is not SlotKind.ARENA:
            return -1
        kind = slots[output].type
        assert isinstance(kind, TensorType)
        for i in kernel.inplace:
            candidate = step.inputs[i] if i < len(step.inputs) else -1
            if candidate < 0 or slots[candidate].kind is not SlotKind.ARENA:
                continue
            buffer = self.buffer_of[candidate]
            other = slots[candidate].type
            if self.last[buffer] != time or self.first[buffer] == time:
                continue
            if self.tasks is not None and not self.all_before(buffer, self.task_at(step)):
                continue
            if not isinstance(other, TensorType) or other.without_data() != kind.without_data():
                continue
            if slots[candidate].strides != slots[output].strides:
                continue
            # Another input may see the same memory differently (a transpose of it, say), or be the
            # very value, where the kernel reads it after it has written.
            rest = [
                s
                for j, s in enumerate(step.inputs)
                if s >= 0 and (s != candidate or j not in kernel.inplace)
            ]
            if any(self.buffer_of.get(r) == buffer for s in rest for r in self.memory(s)):
                continue
            return candidate
        return -1

    def task_at(self, step: Step) -> int:
        return next(iter(self.touched[step.outputs[0]]))

    def all_before(self, buffer: int, task: int) -> bool:
        """Whether all that touch a buffer run before ``task``, but for that itself."""
        assert self.tasks is not None
        # What is read at the end (by "task" -1) is read after all others.
        return all(
            t == task or (t >= 0 and self.tasks.precedes(t, task)) for t in self.touched[buffer]
        )

    def ordered(self, a: int, b: int) -> bool:
        """Whether buffer ``a`` is surely gone before ``b`` is written first."""
        task = next(iter(self.touched[b]))
        same = self.touched[a].get(task)
        if same is not None and same >= self.first[b]:
            return False
        return self.all_before(a, task)

    def memory(self, slot: int) -> tuple[int, ...]:
        return memory_of(self.plan.slots, slot)

    def buffers(self) -> list[Buffer]:
        return [
            Buffer(self.size(slot), self.first[slot], self.last[slot]) for slot in self.owners()
        ]

    def owners(self) -> list[int]:
        return [slot for slot in self.first if self.buffer_of[slot] == slot]

    def size(self, slot: int) -> int:
        return _bytes(self.plan, slot)

    def arena_plan(self, planner: str) -> ArenaPlan:
        buffers = self.buffers()
        if self.tasks is None:
            arena: Arena = plan_memory(buffers, planner)
        else:
            owners = self.owners()

            def conflict(i: int, j: int) -> bool:
                a, b = owners[i], owners[j]
                gone = self.ordered(a, b)
                return not (gone or (planner != "reuse" and self.ordered(b, a)))

            arena = plan_memory_dag([b.size for b in buffers], conflict, planner=planner)
        at = dict(zip(self.owners(), arena.offsets, strict=True))
        offsets = {slot: at[buffer] for slot, buffer in self.buffer_of.items()}
        return ArenaPlan(
            self.order, offsets, self.buffer_of, arena.size, lower_bound(buffers), planner
        )
