"""Which slots share memory when a plan runs in the order of its steps, and where in the arena.

Every step has a place on one clock, nested blocks included. A slot lives from its step to its last
reader's; through a view, its memory lives as long as the view. What a loop body reads from outside
lives until the loop ends. A step may take over the memory of an input that dies with it (in place).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from penstock.dag import Dag
from penstock.ir import Node
from penstock.memory import Arena, Buffer, lower_bound, plan_memory
from penstock.order import memory_order
from penstock.plan import Kind, Plan, Step, memory_of, walk
from penstock.types import TensorType


@dataclass(frozen=True, slots=True)
class Layout:
    """An order of a plan's outermost steps, and the memory that it needs.

    ``offsets`` maps arena slots to bytes from the start of the arena; ``buffer_of`` to the buffer
    they share with others. ``lower_bound`` is the largest sum of live bytes over the steps: no
    arena for this order can be smaller.
    """

    order: tuple[int, ...]
    offsets: dict[int, int]
    buffer_of: dict[int, int]
    size: int
    lower_bound: int


def lay_out(plan: Plan, planner: str = "best") -> Layout:
    """Choose order and offsets: of the given order and memory-aware ones, the smallest arena."""
    best = _Liveness(plan, range(len(plan.steps))).layout(planner)
    for order in _other_orders(plan):
        other = _Liveness(plan, order)
        if lower_bound(other.buffers()) < best.lower_bound:
            candidate = other.layout(planner)
            if candidate.size < best.size:
                best = candidate
    return best


def _other_orders(plan: Plan) -> Iterator[list[int]]:
    dag = dependencies(plan)
    if all(len(dag.succ[i]) <= 1 and len(dag.pred[i]) <= 1 for i in range(dag.n)):
        return  # chains: there is no other order worth trying
    yield memory_order(dag, _produced(plan, dag))


def dependencies(plan: Plan) -> Dag:
    """Which outermost steps must run before which: by slots, by control inputs, by effects."""
    producer: dict[int, int] = {}
    for i, step in enumerate(plan.steps):
        for slot in step.outputs:
            if slot >= 0:
                producer[slot] = i
    place = {step.node: i for i, step in enumerate(plan.steps)}
    edges = []
    effect = -1
    for i, step in enumerate(plan.steps):
        for slot in reads(step):
            source = producer.get(slot, producer.get(plan.slots[slot].base, -1))
            if source >= 0 and source != i:
                edges.append((source, i))
        if step.node.control_inputs:
            edges.extend((a, i) for a in _waits(step.node, place))
        if any(not each.node.op.pure for each in walk((step,))):
            if effect >= 0:
                edges.append((effect, i))
            effect = i
    return Dag(len(plan.steps), edges)


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
    """Slots that a step reads, those its blocks take from outside included."""
    for each in walk((step,)):
        yield from (slot for slot in each.inputs if slot >= 0)
        for block in each.blocks:
            yield from block.outputs


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
            if slot >= 0 and plan.slots[slot].kind is Kind.ARENA and slot not in leaving:
                after = sorted(readers.get(slot, set()) - {i})
                outputs.append((_bytes(plan, slot), after))
        made.append(outputs)
    return made


def _bytes(plan: Plan, slot: int) -> int:
    kind = plan.slots[slot].type
    assert isinstance(kind, TensorType)
    return kind.nbytes


class _Liveness:
    def __init__(self, plan: Plan, order: Sequence[int]) -> None:
        self.plan = plan
        self.order = tuple(order)
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
            for loop in self.loops:
                loop.add(root)

    def start(self, index: int) -> None:
        if index >= 0 and self.plan.slots[index].kind is Kind.ARENA:
            self.first[index] = self.last[index] = self.clock

    def walk(self, steps: Sequence[Step]) -> None:
        for step in steps:
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
                    else:
                        self.buffer_of[slot] = slot
        for slot in self.first:
            self.buffer_of.setdefault(slot, slot)
        assert all(slots[b].kind is Kind.ARENA for b in self.buffer_of.values())

    def takeover(self, time: int, step: Step) -> int:
        """The input slot whose memory the first output of ``step`` may take, or -1."""
        kernel, slots = step.kernel, self.plan.slots
        if not step.into or kernel is None or not kernel.inplace:
            return -1
        output = step.outputs[0]
        if output < 0 or slots[output].kind is not Kind.ARENA:
            return -1
        kind = slots[output].type
        assert isinstance(kind, TensorType)
        for i in kernel.inplace:
            candidate = step.inputs[i] if i < len(step.inputs) else -1
            if candidate < 0 or slots[candidate].kind is not Kind.ARENA:
                continue
            buffer = self.buffer_of[candidate]
            other = slots[candidate].type
            if self.last[buffer] != time or self.first[buffer] == time:
                continue
            if not isinstance(other, TensorType) or other.without_data() != kind.without_data():
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

    def layout(self, planner: str) -> Layout:
        buffers = self.buffers()
        arena: Arena = plan_memory(buffers, planner)
        at = dict(zip(self.owners(), arena.offsets, strict=True))
        offsets = {slot: at[buffer] for slot, buffer in self.buffer_of.items()}
        return Layout(self.order, offsets, self.buffer_of, arena.size, lower_bound(buffers))
