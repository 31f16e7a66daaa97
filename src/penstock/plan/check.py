"""A checker of schedules, which shares no code with the planner.

A plan is sound if each step reads the values written for it, in any possible order of the steps.
This is checked by running the plan without its kernels, together with its graph::

    places      each arena slot is within the arena; a view is within its base
    steps       each slot that a step reads has the value and type of the node's input; blocks and
                carried values are those of the node; control edges hold
    memory      no other slot has overwritten an arena slot that a step reads; a step overwrites its
                own inputs only if its kernel works in place
    tasks       two tasks that access the same memory are ordered if one of them writes; no wait is
                endless, and nothing is released before its last reader

Bodies of loops run twice, since an iteration reads results of the previous one. Saved plans are
checked when they are opened, and so are all plans in the tests.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from math import inf
from typing import TYPE_CHECKING

import numpy as np

from penstock.core.checkpoints import with_checkpoints
from penstock.core.errors import InvalidModel
from penstock.core.types import SequenceType, TensorType, Type
from penstock.ir.graph import Graph, Value
from penstock.ir.kernel import Kernel, LayoutHints
from penstock.ir.op import Role
from penstock.ops.internal.fused import FUSED
from penstock.plan.check_places import (
    SlotPlaces,
    UnsoundPlanError,
    bytes_of,
    order_of_dims,
    require,
)
from penstock.plan.plan import Block, Carry, Plan, Slot, SlotKind, Step

if TYPE_CHECKING:
    from penstock.plan.arena_layout import ArenaPlan
    from penstock.plan.check_tasks import TaskOrder
    from penstock.plan.tasks import Tasks

# Names of the module are faster than attributes of a class.
_ARENA, _ALIAS = SlotKind.ARENA, SlotKind.ALIAS
_CONSTANT, _DYNAMIC = SlotKind.CONSTANT, SlotKind.DYNAMIC
_Held = tuple[tuple[int, int], ...]
"""the arena slots that hold a value, each with the number of the write that stored it"""


def check_schedule(plan: Plan, arena: ArenaPlan, tasks: Tasks | None = None) -> None:
    """Raise ``UnsoundPlanError`` unless the steps of ``plan`` can run in the order of ``arena``, or
    as ``tasks``, at its offsets."""
    try:
        places = SlotPlaces(plan, arena)
        if tasks is None:
            _Run(plan, arena, _Memory(places)).check()
            return
        # Most plans are one function, and have no tasks to order.
        from penstock.plan.check_tasks import TaskOrder, check_tasks

        order = TaskOrder(tasks)
        _Run(plan, arena, _Memory(places), order).check()
        check_tasks(plan, places, tasks, order)
    except (AttributeError, LookupError, TypeError, ValueError) as error:
        # Indices of slots and tasks are used before all of them are validated.
        raise UnsoundPlanError(
            f"its slots, steps or tasks do not match the values of its nodes: {error!r}"
        ) from error


def check_saved(plan: Plan, arena: ArenaPlan, tasks: Tasks | None) -> None:
    """``check_schedule`` for a plan from a file. Raises ``InvalidModel``."""
    try:
        check_schedule(plan, arena, tasks)
    except UnsoundPlanError as error:
        raise InvalidModel(
            f"a plan of the saved session is unsound: {error}; save the session anew"
        ) from error


# Steps and memory.


class _Memory:
    """Contents of the arena: for each slot that was not overwritten, the number of its write.
    ``places`` are the sorted offsets of the slots ``at``, which do not overlap. ``either``: slots
    that do, written by different branches of an If, only one of which runs."""

    def __init__(self, places: SlotPlaces) -> None:
        self.of_slots = places
        self.begin, self.end = places.begin, places.end
        self.written: dict[int, int] = {}
        # Infinity is a sentinel: searches need no test for the end.
        self.places: list[float] = [inf]
        self.at: list[int] = [-1]
        self.either: set[int] = set()
        self.writes = 0

    def write(self, slot: int) -> Sequence[int]:
        """Write a slot. Returns the slots that this overwrites, which have no value any more."""
        begin, end, places, at = self.begin[slot], self.end[slot], self.places, self.at
        lost: Sequence[int] = ()
        # An empty slot overwrites nothing.
        if begin < end:
            low = high = bisect_left(places, begin)
            # The previous slot may overlap this one.
            if low and self.end[at[low - 1]] > begin:
                low -= 1
            while places[high] < end:
                high += 1
            lost = at[low:high]
            for other in lost:
                del self.written[other]
            places[low:high], at[low:high] = [begin], [slot]
        if self.either:
            over = [i for i in self.either if self.of_slots.overlaps(i, slot)]
            self.either.difference_update(over)
            lost = [*lost, *[i for i in over if self.written.pop(i, None) is not None]]
        self.writes += 1
        self.written[slot] = self.writes
        return lost

    def restore(self, written: Mapping[int, int]) -> None:
        """Restore the contents before a branch, or set those after one of several branches."""
        written = dict(written)
        self.written.clear()
        self.written.update(written)
        self.either.clear()
        places, at, behind = [], [], 0
        for begin, i in sorted((self.begin[i], i) for i in written):
            if begin < behind:
                self.either.add(i)
            elif begin < self.end[i]:
                places.append(begin)
                at.append(i)
                behind = self.end[i]
        self.places[:], self.at[:] = [*places, inf], [*at, -1]


_ABSENT = object()
"""stands for the value of a slot that was not written yet"""


class _Run:
    """A run of a plan without its kernels. Its outermost steps run in the order of ``arena``, or
    the steps of each block in an ``order`` that tasks allow."""

    def __init__(
        self, plan: Plan, arena: ArenaPlan, memory: _Memory, order: TaskOrder | None = None
    ) -> None:
        self.plan, self.slots = plan, plan.slots
        self.begin = memory.begin
        self.order = [plan.steps[i] for i in arena.order] if order is None else order.sorted[0]
        self.of_tasks = order
        self.memory, self.places = memory, memory.of_slots
        # The graph value of each slot; slot -1 is for omitted values.
        self.value_of: dict[int, Value | None] = {-1: None, **self.places.constants}
        self.held: dict[int, _Held] = {}  # of slots that are defined and not in the arena
        self.in_buffers: dict[int, tuple[int, ...]] = {}  # values that loops must carry
        # Whether an outer loop is in its second iteration: inner loops then run once, since two
        # iterations at each level of nesting would take exponential time.
        self.again = False

    def check(self) -> None:
        plan = self.plan
        require(_same(self.order, plan.steps), "the order must contain each step exactly once")
        graph = plan.graph
        if graph is not None:
            self.enter(plan.inputs, graph.inputs)
            self.check_nodes(plan.steps, graph)
        for i in plan.inputs:
            self.held[i] = ()
        self.steps(self.order)
        require(not self.places.strided, "it declares strides that no step writes")
        require(not self.in_buffers, "it writes loop buffers that no loop reads")
        for i in plan.outputs:
            self.read(i, None)
        if graph is not None:
            self.leave(plan.outputs, graph)

    def check_nodes(self, steps: Sequence[Step], graph: Graph) -> None:
        """Check that each node of a graph has at most one step, and there are no other steps."""
        nodes = {step.node for step in steps}
        fits = len(nodes) == len(steps) and nodes <= {*graph.nodes}
        require(fits, "its steps do not match the graph's nodes")

    def enter(self, slots: Sequence[int], values: Sequence[Value]) -> None:
        """Assign slots to the inputs of a graph."""
        for i, value in zip(slots, values, strict=True):
            self.put(value, i)
            if self.slots[i].kind is not _DYNAMIC:
                require(False, "{} is a graph input, but its slot is not dynamic", self.slots[i])

    def leave(self, slots: Sequence[int], graph: Graph) -> None:
        """Check that slots have the outputs of a graph."""
        for i, value in zip(slots, graph.outputs, strict=True):
            if self.value_of.get(i, _ABSENT) is not value:
                self.meet(value, i)

    def steps(self, steps: Sequence[Step]) -> None:
        """Run the steps of a block."""
        written, rooted, value_of = self.memory.written, self.places.rooted, self.value_of
        value_in = value_of.get
        end, write, slots = self.memory.end, self.memory.write, self.slots
        for step in with_checkpoints(steps):
            # Inlined where possible: opening a plan checks every step.
            node, kernel, outputs = step.node, step.kernel, step.outputs
            for value, i in zip(node.inputs, step.inputs, strict=True):
                if value_in(i, _ABSENT) is not value:
                    self.meet(value, i)
                root = rooted[i]
                if root is not None and root not in written:
                    self.read(i, step)
            if node.control_inputs:
                _check_control(step, steps)
            if kernel is None:
                self.control(step)
                continue
            output = outputs[0] if step.into and len(outputs) == 1 else -1
            if output not in end:
                self.kernel(step)
                continue
            (value,) = node.outputs
            own = value_of.setdefault(output, value) is value and value is not None
            if not own or slots[output].type is not value.type:  # type: ignore[union-attr]
                self.put(value, output)
            lost = write(output)
            if lost:
                self.check_lost(step, output, lost)
            self.check_call(step, kernel)

    # Values.

    def put(self, value: Value | None, i: int) -> None:
        """Assign a value of the graph to a slot, once for the whole plan, and check its type."""
        slot = self.slots[i] if 0 <= i < len(self.slots) else None
        if value is None or slot is None:
            require(value is None and i == -1, "a value has no slot, or {} has no value", i)
            return
        if self.value_of.setdefault(i, value) is not value:
            require(False, "{} is assigned two different values", slot)
        if slot.type is not value.type and not _is_type(slot.type, value.type):
            require(False, "the type of {} differs from the type of its value", slot)

    def meet(self, value: Value | None, i: int) -> None:
        """Check a read of a slot that no step has written: it must be a constant or a view."""
        slot = self.slots[i] if 0 <= i < len(self.slots) else None
        if value is None or slot is None:
            require(False, "a value has no slot, or {} has no value", i)
        elif slot.kind is _CONSTANT:
            # Several constants may have the same contents, and copies on devices.
            if slot.constant is not value or slot.type is not value.type:
                require(_is_constant(slot, value), "{} holds another constant", slot)
            self.value_of[i] = value
        elif slot.kind is _ALIAS:
            of_base, source = self.value_of.get(slot.base, _ABSENT), value
            while source is not None and source is not of_base and source.producer is not None:
                source = source.producer.inputs[0] if source.producer.inputs else None  # type: ignore[assignment]
            if source is not of_base:
                require(False, "{} is not a view of the value that its reader expects", slot)
            self.put(value, i)
        else:
            require(i in self.value_of, "{} is read before it is written", slot)
            require(False, "{} holds another value than its reader expects", slot)

    def read(self, i: int, step: Step | None) -> None:
        """Check that a slot still holds its value."""
        slot, written = self.slots[i], self.memory.written
        root = self.places.rooted[i]
        if root is None:
            return
        if root >= 0:
            has_value = root in written
        else:
            held = self.held.get(i)
            has_value = held is not None
            for r, n in held or ():
                has_value = has_value and written.get(r) == n
        if not has_value and step is None:
            require(False, "{} is an output, but was overwritten or never written", slot)
        elif not has_value:
            require(False, "{} reads {}, which was overwritten or never written", step or i, slot)

    def held_in(self, slots: Iterable[int]) -> _Held:
        """The arena slots that may hold the values of these slots, with the numbers of their
        writes.
        """
        written, held = self.memory.written, {}
        for i in slots:
            for root in self.places.roots(i) if i >= 0 else ():
                if root in written:
                    held[root] = written[root]
        return tuple(held.items())

    def define(self, i: int, held: _Held) -> None:
        """Assign a value to a slot outside of the arena."""
        if i >= 0:
            if self.slots[i].kind is not _DYNAMIC:
                require(False, "{} is a result, but not dynamic", self.slots[i])
            self.held[i] = held

    # Steps.

    def kernel(self, step: Step) -> None:
        """Check a step with any number of outputs, after its inputs were read."""
        kernel, slots = step.kernel, self.slots
        assert kernel is not None
        planned: list[int] = []
        for value, i in zip(step.node.outputs, step.outputs, strict=True):
            self.put(value, i)
            if i >= 0 and slots[i].kind is _ARENA:
                planned.append(i)
                continue
            if i >= 0 and step.into:
                self.check_given(step, i)
            elif i >= 0:
                self.check_shared(step, i)
            self.define(i, self.held_in((i,)))
        if planned and not step.into:
            require(False, "{} does not write its outputs into the arena", step)
        for number, i in enumerate(planned):
            require(i in self.memory.begin, "{} writes {}, which has no offset", step, slots[i])
            lost = self.memory.write(i)
            for j in planned[:number]:
                require(j not in lost, "{} overwrites its outputs by writing {}", step, slots[i])
            self.check_lost(step, i, lost)
        self.check_call(step, kernel)

    def check_given(self, step: Step, i: int) -> None:
        """Check the memory of a result that its kernel writes outside of the arena."""
        slot = self.slots[i]
        if slot.roots:  # in a buffer of a loop, which no other slot may have overwritten
            free = all(root in self.memory.written for root in slot.roots)
            require(free, "{} writes to a loop buffer that another step has overwritten", step)
            self.in_buffers[i] = slot.roots
        else:  # in memory that the program allocates
            require(slot.owned and bytes_of(slot) >= 0, "no step allocates {}", slot)

    def check_shared(self, step: Step, i: int) -> None:
        """Check the memory that an allocated result may share."""
        kernel, slot = step.kernel, self.slots[i]
        assert kernel is not None
        if kernel.begin is not None or not (kernel.view or isinstance(slot.type, TensorType)):
            # A list keeps references to its tensors.
            kept = [k for k, j in enumerate(step.inputs) if j >= 0 and self.places.roots(j)]
            require({*kept} <= {*step.copied}, "{} keeps an input without copying it", step)
        if slot.strides:
            # Kernels are bound to these strides before the run.
            perm = step.node.attrs.get("perm", ()) if step.node.op.name == "Transpose" else ()
            dims = slot.type.dims if isinstance(slot.type, TensorType) else ()
            order = [k for k in sorted(range(len(perm)), key=perm.__getitem__) if dims[k] != 1]
            # Strides of an array without elements do not tell its order.
            fits = len(perm) == len(slot.strides) and (0 in dims or order_of_dims(slot) == order)
            require(fits, "{} has strides that its node does not produce", slot)
            self.places.strided.discard(i)
        if kernel.view and step.inputs and step.inputs[0] >= 0 and not slot.owned:
            if not {*self.places.roots(step.inputs[0])} <= {*slot.roots}:
                require(False, "{} is a view whose arena slots are not among its roots", slot)
        elif kernel.view and step.inputs and slot.base >= 0:
            source = step.inputs[0]
            holder = self.slots[source].base if self.slots[source].base >= 0 else source
            require(holder == slot.base, "{} is a view of another value", slot)

    def check_call(self, step: Step, kernel: Kernel) -> None:
        """Check the workspace, layout and copied inputs of a step."""
        if step.into:
            if step.workspace >= 0 or kernel.workspace:
                self.use_workspace(step)
            layout = kernel.layout
            ordered = layout.dims_order or (layout.contiguous and self.places.order)
            if ordered and not layout.any_layout:
                self.check_layout(step, layout)
            if kernel.into is None:
                require(False, "{} has no kernel that writes into memory", step)
        if step.node.op is FUSED:
            _check_region(step)
        if step.copied or step.blocks or step.carries:
            fits = {*step.copied} <= {*range(len(step.inputs))}
            fits = fits and not step.blocks and not step.carries
            require(fits, "{} copies inputs that do not exist, or has blocks", step)

    def check_layout(self, step: Step, layout: LayoutHints) -> None:
        """Check that results have the memory order in which their kernel writes them."""
        for i in step.outputs[:1] if layout.dims_order else step.outputs:
            if i >= 0 and self.slots[i].kind is _ARENA and not self.has_order(i, layout.dims_order):
                require(False, "{} writes dims in another memory order", step)

    def has_order(self, i: int, order: Sequence[int]) -> bool:
        """Whether a slot is dense and its dims have this memory order, or the default order if
        ``order`` has another rank."""
        type_, own = self.slots[i].type, self.places.order.get(i)
        if not isinstance(type_, TensorType):
            return False
        dims = type_.dims
        wanted = [k for k in order if dims[k] != 1] if len(order) == len(dims) else []
        return not type_.nbytes or (sorted(wanted) if own is None else own) == (
            wanted or sorted(own or ())
        )

    def use_workspace(self, step: Step) -> None:
        """Overwrite the workspace of a step."""
        kernel, i = step.kernel, step.workspace
        assert kernel is not None
        has_place = i in self.memory.end and i not in self.value_of
        nbytes = self.memory.end[i] - self.begin[i] if has_place else 0
        if not (has_place or i == -1) or nbytes < kernel.workspace:
            require(False, "the workspace of {} is too small, or shares a slot with a value", step)
        lost = self.memory.write(i) if i >= 0 else ()
        if lost:
            if not {*lost}.isdisjoint(step.outputs):
                require(False, "the workspace of {} overlaps its outputs", step)
            self.check_lost(step, i, lost)

    def check_lost(self, step: Step, i: int, lost: Sequence[int]) -> None:
        """Check that the slots overwritten by a write to slot ``i`` are not inputs of the step,
        unless its kernel works in place and both have the same layout."""
        inputs, rooted = step.inputs, self.places.rooted
        over = []
        for k, j in enumerate(inputs):
            root = rooted[j]
            if root in lost or (root == -1 and not {*self.slots[j].roots}.isdisjoint(lost)):
                over.append(k)
        if not over:
            return
        first, inplace = inputs[over[0]], step.kernel.inplace if step.kernel is not None else ()
        source, target = self.slots[first], self.slots[i]
        fits = i == step.outputs[0] and self.begin.get(first) == self.begin[i]
        for k in over:
            fits = fits and k in inplace and inputs[k] == first
        alike = source.type is target.type or _alike(source, target)
        if not fits or not alike or source.strides != target.strides:
            require(False, "{} overwrites an input by writing {}", step, target)

    # Control flow.

    def control(self, step: Step) -> None:
        """An If or a loop."""
        plain = step.workspace == -1 and not step.into and not step.copied
        require(plain, "{} has a workspace or output memory, but no kernel", step)
        role = step.node.op.role
        require(role in (Role.IF, *_LOOPS), "{} has neither a kernel nor blocks", step)
        if role is Role.IF:
            self.branches(step)
        else:
            self.loop(step, role is Role.LOOP)

    def inside(self, step: Step) -> Sequence[Sequence[Step]]:
        """The steps of each block of a step."""
        expanded = () if self.of_tasks is None else self.of_tasks.expanded.get(step, ())
        if self.of_tasks is None or not expanded:
            return [block.steps for block in step.blocks]
        lists = [self.of_tasks.sorted[number] for number in expanded]
        same = [_same(a, b.steps) for a, b in zip(lists, step.blocks, strict=True)]
        require(all(same), "the steps of {} in tasks differ from those in its blocks", step)
        return lists

    def branches(self, step: Step) -> None:
        before, held = dict(self.memory.written), dict(self.held)
        after: list[dict[int, int]] = []
        results: list[list[_Held]] = []
        attrs = step.node.attrs
        graphs = [attrs["then_branch"], attrs["else_branch"]]
        require(not step.carries, "{} has loop-carried values, but is not a loop", step)
        for block, graph, steps in zip(step.blocks, graphs, self.inside(step), strict=True):
            self.check_nodes(block.steps, graph)
            self.memory.restore(before)
            self.held = dict(held)
            self.steps(steps)
            for i in block.outputs:
                self.read(i, step)
            self.leave(block.outputs, graph)
            results.append([self.held_in((i,)) for i in block.outputs])
            after.append(dict(self.memory.written))
        # Earlier values must be held after each branch; values written in a branch may be held.
        merged = {i: n for i, n in before.items() if all(w.get(i) == n for w in after)}
        merged |= {i: n for w in after for i, n in w.items() if before.get(i) != n}
        self.memory.restore(merged)
        self.held = held
        for number, (value, i) in enumerate(zip(step.node.outputs, step.outputs, strict=True)):
            self.put(value, i)
            owned = i >= 0 and self.slots[i].owned
            self.define(i, () if owned else tuple([x for held in results for x in held[number]]))
            if i >= 0 and not owned:
                roots = {r for b in step.blocks for r in self.places.roots(b.outputs[number])}
                require(
                    roots <= {*self.slots[i].roots}, "{} lacks roots of branches", self.slots[i]
                )

    def loop(self, step: Step, is_loop: bool) -> None:
        (block,), (steps,), held = step.blocks, self.inside(step), dict(self.held)
        body = step.node.attrs["body"]
        self.check_nodes(block.steps, body)
        self.enter(block.inputs, body.inputs)
        _check_carries(step, block, self.slots, is_loop)
        carried = {carry.inside for carry in step.carries}
        for carry in step.carries:
            for i in carry.buffers or ():
                require(i not in self.value_of, "{} is a buffer and has a value", self.slots[i])
                self.memory.write(i)
        for carry in step.carries:
            self.read(carry.initial, step)
            self.define(carry.inside, self.held_in((carry.initial,)))
        # Scanned values are read in each iteration.
        scanned = () if is_loop else step.inputs[len(step.carries) :]
        for i in block.inputs:
            if i not in carried:
                self.define(i, self.held_in((i,)))
        entered = dict(self.memory.written)
        again = self.again
        for self.again in (True,) if again else (False, True):
            for i in scanned:
                self.read(i, step)
            self.steps(steps)
            for i in block.outputs:
                self.read(i, step)
            for carry in step.carries:
                self.hand_on(carry, step)
        self.leave(block.outputs, body)
        self.again = again
        # Without an iteration, nothing changes; only the loop uses its buffers.
        merged = {i: n for i, n in entered.items() if self.memory.written.get(i) == n}
        self.memory.restore(merged)
        self.held = held
        for number, (value, i) in enumerate(zip(step.node.outputs, step.outputs, strict=True)):
            self.put(value, i)
            buffers = next((c.buffers for c in step.carries[number : number + 1]), None) or ()
            lost = [b for b in buffers if b not in self.memory.written]
            require(not lost, "the body of {} overwrites a loop-carried value", step)
            self.define(i, self.held_in(buffers))

    def hand_on(self, carry: Carry, step: Step) -> None:
        """Pass a carried value to the next iteration."""
        # Values in the buffers of an outer loop stay there.
        written = self.in_buffers.pop(carry.updated, None) if carry.direct else carry.buffers
        require(written == carry.buffers, "{} carries a value outside its buffers", step)
        self.read(carry.updated, step)
        if carry.updated != carry.inside:
            self.define(carry.inside, self.held_in(carry.buffers or ()))


_LOOPS = (Role.LOOP, Role.SCAN, Role.SEQUENCE_MAP)


def _same(steps: Sequence[Step], wanted: Sequence[Step]) -> bool:
    """Whether two lists have the same steps, each once."""
    return len(steps) == len(wanted) and {*steps} == {*wanted}


def _is_type(of_slot: Type, of_value: Type) -> bool:
    """Whether the type of a slot matches its value; a result of a loop may be a list of rows."""
    same = of_slot is of_value or of_slot == of_value
    return same or (isinstance(of_slot, SequenceType) and of_slot.element == of_value)


def _is_constant(slot: Slot, value: Value) -> bool:
    """Whether a slot has the contents of a constant, if these are held."""
    held = None if slot.constant is None else slot.constant.held
    same = held is None or held is value.held or not isinstance(held, np.ndarray)
    return same and value.is_constant and _is_type(slot.type, value.type)


def _alike(a: Slot, b: Slot) -> bool:
    x, y = a.type, b.type
    tensors = isinstance(x, TensorType) and isinstance(y, TensorType)
    return tensors and (x.shape, x.dtype) == (y.shape, y.dtype)  # type: ignore[union-attr]


def _check_control(step: Step, steps: Sequence[Step]) -> None:
    """Check that the control predecessors of a node precede it in its block. For a predecessor
    without a step, check the nodes that it reads and waits for."""
    place = {other.node: k for k, other in enumerate(steps)}
    waits, seen = list(step.node.control_inputs), set(step.node.control_inputs)
    while waits:
        node = waits.pop()
        if node in place:
            require(place[node] < place[step.node], "{} runs before a control input", step)
            continue
        read = [v.producer for v in node.inputs if v is not None and v.producer is not None]
        further = {*read, *node.control_inputs} - seen
        seen |= further
        waits += further


def _check_carries(step: Step, block: Block, slots: Sequence[Slot], is_loop: bool) -> None:
    """Check that a loop carries the values of its node."""
    node = step.node
    count = len(node.inputs) - (
        2 if is_loop else node.attrs.get("num_scan_inputs", len(node.inputs))
    )
    first, ahead = (2, 1) if is_loop else (0, 0)
    require(len(step.carries) == count, "{} has other loop-carried values than its node", step)
    results = [*step.outputs, *[-1] * count]
    for k, carry in enumerate(step.carries):
        own = (carry.initial, carry.inside, carry.updated, carry.result) == (
            step.inputs[first + k],
            block.inputs[first + k],
            block.outputs[ahead + k],
            results[k],
        )
        require(own, "{} has other loop-carried values than its node", step)
        _check_buffers(step, carry, slots)


def _check_buffers(step: Step, carry: Carry, slots: Sequence[Slot]) -> None:
    """Check the buffers of a carried value."""
    if carry.buffers is None:
        require(not carry.direct, "{} writes to loop buffers that do not exist", step)
        return
    a, b = carry.buffers
    inside, updated = slots[carry.inside], slots[carry.updated]
    for i in (a, b):
        alike = slots[i].kind is _ARENA and _alike(slots[i], inside) and _alike(slots[i], updated)
        require(alike, "{} has a loop buffer whose type differs from that of its value", step)
    require(a != b and {a, b} <= {*inside.roots}, "{} uses one loop buffer for two values", step)


def _check_region(step: Step) -> None:
    """Check the region of a fused node: each of its nodes reads inputs, constants and results of
    earlier nodes."""
    node = step.node
    region = node.attrs["region"]
    known = {None, *region.inputs}
    for own, value in zip(region.inputs, node.inputs, strict=True):
        if value is None or (own.type is not value.type and own.type != value.type):
            require(False, "the inputs of {} differ in type from those of its fused region", step)
    for part in region.nodes:
        for value in part.inputs:
            if value not in known and not value.is_constant:
                require(False, "the fused region of {} reads a value before it is computed", step)
        known.update(part.outputs)
    (result,), (value,) = region.nodes[-1].outputs, node.outputs
    fits = value is not None and (result.type is value.type or result.type == value.type)
    if not fits:
        require(False, "the output of {} differs in type from the result of its fused region", step)
