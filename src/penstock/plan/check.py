"""A checker of schedules, which shares no code with what makes them.

A plan is right if, whatever order its steps run in, each reads what was written for it. That is
checked by running the plan without its kernels, beside the graph that it was compiled from::

    places      each slot of the arena lies within it; a view within what it views
    steps       each slot that a step reads has the value that its node reads there, of its type;
                blocks and carried values are those of the node; control edges hold
    memory      a step reads an arena slot that no other slot has been written over since, and
                writes over none of its inputs, but where its kernel works in place
    tasks       what one task writes and another one reads, or writes over, has an order; nothing
                waits for what never comes, and nothing is released before its last reader

Bodies of loops run twice, since an iteration reads what the one before has left. Saved plans are
checked when they are opened, and all plans of the tests.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from math import inf
from typing import TYPE_CHECKING

import numpy as np

from penstock.core.checkpoints import with_checkpoints
from penstock.core.errors import InvalidModel
from penstock.core.types import STRING, SequenceType, TensorType, Type
from penstock.ir.graph import Graph, Value
from penstock.ir.kernel import Kernel, LayoutHints
from penstock.ir.op import Role
from penstock.ops.internal.fused import FUSED
from penstock.ops.internal.transfer import HOST
from penstock.plan.plan import Block, Carry, Plan, Slot, SlotKind, Step

if TYPE_CHECKING:
    from penstock.plan.arena_layout import ArenaPlan
    from penstock.plan.tasks import Tasks

# Names of the module are faster than attributes of a class.
_ARENA, _ALIAS, _CONSTANT, _DYNAMIC = (
    SlotKind.ARENA,
    SlotKind.ALIAS,
    SlotKind.CONSTANT,
    SlotKind.DYNAMIC,
)
_ALIGNMENT = 64
_Held = tuple[tuple[int, int], ...]
"""the arena slots that a value is in, each with the number of the write that put it there"""


class UnsoundPlanError(Exception):
    """What is wrong with a plan."""


def check_schedule(plan: Plan, arena: ArenaPlan, tasks: Tasks | None = None) -> None:
    """Raise ``UnsoundPlanError`` unless the steps of ``plan`` can run in the order of ``arena``, or
    as ``tasks``, at its offsets."""
    try:
        places = _Places(plan, arena)
        order = None if tasks is None else _Order(tasks)
        _Run(plan, arena, _Memory(places), order).check()
        if tasks is not None and order is not None:
            _check_tasks(plan, places, tasks, order)
    except (AttributeError, LookupError, TypeError, ValueError) as error:
        # Numbers of slots and tasks are used before all of them have been looked at.
        raise UnsoundPlanError(
            f"it has other slots than its nodes have values: {error!r}"
        ) from error


def check_saved(plan: Plan, arena: ArenaPlan, tasks: Tasks | None) -> None:
    """``check_schedule`` of what a file has given. Raises ``InvalidModel``."""
    try:
        check_schedule(plan, arena, tasks)
    except UnsoundPlanError as error:
        raise InvalidModel(
            f"a plan of the saved session is unsound: {error}; save the session anew"
        ) from error


def _require(holds: bool, problem: str, *places: Step | Slot | int) -> None:
    """Raise an error unless something holds; its text is written only then."""
    if not holds:
        raise UnsoundPlanError(problem.format(*map(_name, places)))


def _name(place: Step | Slot | int) -> str:
    if isinstance(place, Step):
        return place.node.label
    return f"slot {place}" if isinstance(place, int) else f"{place.name!r} ({place.kind.value})"


# Places.


class _Places:
    """Where slots are: ``begin`` and ``end`` of those in an arena, each memory with numbers of its
    own. ``rooted`` has the arena slot that the value of each slot is in, -1 if that is known only
    during a run, and None for constants, which are always there; and, at its end, for -1."""

    def __init__(self, plan: Plan, arena: ArenaPlan) -> None:
        self.slots = plan.slots
        self.begin: dict[int, int] = {}
        self.end: dict[int, int] = {}
        self.rooted: list[int | None] = []
        self.order: dict[int, list[int]] = {}  # of dims, where they are not in their own
        self.constants: dict[int, Value] = {}  # that have the types of their slots
        self.strided: set[int] = set()  # slots outside of the arena that say what strides they have
        # Each memory has the numbers behind those of the ones before.
        first, start = 0, {}
        for memory, size in ((HOST, arena.size), *arena.remote.items()):
            start[memory] = first
            first += size
        sizes, offsets, rooted = {**arena.remote, HOST: arena.size}, arena.offsets, self.rooted
        for i, slot in enumerate(with_checkpoints(plan.slots)):
            # Without calls where it can be, as the steps below.
            kind, type_ = slot.kind, slot.type
            if kind is _ARENA:
                rooted.append(i)
                plain = type_.__class__ is TensorType and type_.static and type_.dtype is not STRING
                nbytes = type_.nbytes if plain else _bytes(slot)  # type: ignore[union-attr]
                at, memory = offsets.get(i, -1), slot.memory
                if at < 0 or at % _ALIGNMENT or at + nbytes > sizes.get(memory, -1):
                    _require(False, "{} is outside of the arena", slot)
                self.begin[i] = begin = at + start[memory]
                self.end[i] = begin + nbytes
                if slot.strides or slot.offset or slot.owned:
                    self._check_strides(i, slot)
            elif kind is _CONSTANT:
                rooted.append(None)
                constant = slot.constant
                if constant is None or slot.owned:
                    _require(False, "{} has no contents, or gives them away", slot)
                elif constant.type is type_:
                    self.constants[i] = constant
            elif kind is _ALIAS:
                rooted.append(slot.base)
                self._check_view(slot)
            else:
                rooted.append(-1)
                if slot.roots or slot.base != -1 or slot.strides:
                    self._check_roots(i, slot)
        rooted.append(None)

    def _check_strides(self, i: int, slot: Slot) -> None:
        order = _order(slot) if slot.strides else []
        if order is None or slot.offset or slot.owned:
            raise UnsoundPlanError(f"{_name(slot)} has strides with which elements share bytes")
        self.order |= {i: order} if slot.strides else {}

    def _check_view(self, slot: Slot) -> None:
        base = self.slots[slot.base] if 0 <= slot.base < len(self.slots) else None
        if base is None or base.kind is not _ARENA:
            raise UnsoundPlanError(f"{_name(slot)} views what is not in the arena")
        rank = len(slot.type.shape or ()) if isinstance(slot.type, TensorType) else -1
        if len(slot.strides) != rank or slot.owned:
            _require(False, "{} has strides of another rank", slot)
        low, high = _extent(slot)
        if slot.offset + low < 0 or slot.offset + high > _bytes(base):
            _require(False, "{} is outside of what it views", slot)

    def _check_roots(self, i: int, slot: Slot) -> None:
        count, slots = len(self.slots), self.slots
        for r in slot.roots:
            if not 0 <= r < count or slots[r].kind is not _ARENA:
                _require(False, "{} is in slots that there are not", slot)
        if slot.strides:
            self.strided.add(i)
        if slot.base != -1:
            base = slots[slot.base] if 0 <= slot.base < count and slot.base != i else None
            fits = base is not None and base.owned >= slot.owned
            _require(fits, "{} is in slots that there are not", slot)

    def overlaps(self, a: int, b: int) -> bool:
        return self.begin[a] < self.end[b] and self.begin[b] < self.end[a]

    def roots(self, i: int) -> Sequence[int]:
        """The arena slots that the value of a slot may be in."""
        root = self.rooted[i]
        return () if root is None else (root,) if root >= 0 else self.slots[i].roots


def _bytes(slot: Slot) -> int:
    """The bytes of a slot whose size must be known."""
    type_ = slot.type
    if type_.__class__ is TensorType and type_.static and type_.dtype is not STRING:
        return type_.nbytes
    raise UnsoundPlanError(f"{slot.name!r} is in the arena, but is {type_}")


def _extent(slot: Slot) -> tuple[int, int]:
    """The first byte and the one behind the last of a slot, from its place on."""
    nbytes = _bytes(slot)
    type_ = slot.type
    assert isinstance(type_, TensorType)
    if not slot.strides or not nbytes:
        return 0, nbytes
    _require(len(slot.strides) == len(type_.dims), "{} has strides of another rank", slot)
    low, high = 0, nbytes // type_.elements
    for n, stride in zip(type_.dims, slot.strides, strict=True):
        if stride < 0:
            low += (n - 1) * stride
        else:
            high += (n - 1) * stride
    return low, high


# Steps and memory.


class _Memory:
    """What the arena holds: for each of its slots that was not written over, the number of the
    write. These are disjoint, the slots ``at`` places that are sorted, but for what branches of one
    If have left, of which one has run: ``either``."""

    def __init__(self, places: _Places) -> None:
        self.of_slots = places
        self.begin, self.end = places.begin, places.end
        self.written: dict[int, int] = {}
        # Behind all places, infinity: searches need no test for the end.
        self.places: list[float] = [inf]
        self.at: list[int] = [-1]
        self.either: set[int] = set()
        self.writes = 0

    def write(self, slot: int) -> Sequence[int]:
        """Let a slot have a new value; returns those whose memory it takes, which have none now."""
        begin, end, places, at = self.begin[slot], self.end[slot], self.places, self.at
        lost: Sequence[int] = ()
        # A slot without bytes takes the memory of none.
        if begin < end:
            low = high = bisect_left(places, begin)
            # The slot that begins before may reach into this one.
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
        """Hold what was held before, or is held after one of several branches."""
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
"""stands for the value of a slot that has none yet"""


class _Run:
    """A run of a plan without its kernels, its outermost steps in the order of ``arena``, or the
    steps of each block in one that tasks allow."""

    def __init__(self, plan: Plan, arena: ArenaPlan, memory: _Memory, order: _Order | None) -> None:
        self.plan, self.slots = plan, plan.slots
        self.begin = memory.begin
        self.order = [plan.steps[i] for i in arena.order] if order is None else order.sorted[0]
        self.of_tasks = order
        self.memory, self.places = memory, memory.of_slots
        # The value of the graph that each slot has; slot -1 has what is left out.
        self.value_of: dict[int, Value | None] = {-1: None, **self.places.constants}
        self.held: dict[int, _Held] = {}  # of slots that are defined and not in the arena
        self.in_buffers: dict[int, tuple[int, ...]] = {}  # what loops are to carry
        # Whether a loop around is in its second iteration: those inside have shown theirs before,
        # and to run them twice again would take time without end where loops nest.
        self.again = False

    def check(self) -> None:
        plan = self.plan
        _require(_same(self.order, plan.steps), "the order does not have each step once")
        graph = plan.graph
        if graph is not None:
            self.enter(plan.inputs, graph.inputs)
            self.check_nodes(plan.steps, graph)
        for i in plan.inputs:
            self.held[i] = ()
        self.steps(self.order)
        _require(not self.places.strided, "it has values of strides that no step gives them")
        _require(not self.in_buffers, "it has values in buffers that no loop carries on")
        for i in plan.outputs:
            self.read(i, None)
        if graph is not None:
            self.leave(plan.outputs, graph)

    def check_nodes(self, steps: Sequence[Step], graph: Graph) -> None:
        """Nodes of a graph have a step each, but for views."""
        nodes = {step.node for step in steps}
        fits = len(nodes) == len(steps) and nodes <= {*graph.nodes}
        _require(fits, "it has steps of other nodes than the graph")

    def enter(self, slots: Sequence[int], values: Sequence[Value]) -> None:
        """Let the inputs of a graph have slots."""
        for i, value in zip(slots, values, strict=True):
            self.put(value, i)
            if self.slots[i].kind is not _DYNAMIC:
                _require(False, "{} is fed, but planned", self.slots[i])

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
            # Without further calls where it can be: each step of a plan that is opened is checked.
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
        """Let a slot have a value of the graph, of its type: one for the whole plan."""
        slot = self.slots[i] if 0 <= i < len(self.slots) else None
        if value is None or slot is None:
            _require(value is None and i == -1, "{} lacks a value or a slot", i)
            return
        if self.value_of.setdefault(i, value) is not value:
            _require(False, "{} has values of two nodes", slot)
        if slot.type is not value.type and not _is_type(slot.type, value.type):
            _require(False, "{} has another type than its value", slot)

    def meet(self, value: Value | None, i: int) -> None:
        """A slot that no step has written is read for a value: it has a constant, or is a view."""
        slot = self.slots[i] if 0 <= i < len(self.slots) else None
        if value is None or slot is None:
            _require(False, "{} lacks a value or a slot", i)
        elif slot.kind is _CONSTANT:
            # The same contents may be constants of several names, and have copies on devices.
            if slot.constant is not value or slot.type is not value.type:
                _require(_is_constant(slot, value), "{} is not the constant that is read", slot)
            self.value_of[i] = value
        elif slot.kind is _ALIAS:
            of_base, source = self.value_of.get(slot.base, _ABSENT), value
            while source is not None and source is not of_base and source.producer is not None:
                source = source.producer.inputs[0] if source.producer.inputs else None  # type: ignore[assignment]
            if source is not of_base:
                _require(False, "{} views another value", slot)
            self.put(value, i)
        else:
            _require(i in self.value_of, "{} is read, and has no value then", slot)
            _require(False, "{} has another value than is read", slot)

    def read(self, i: int, step: Step | None) -> None:
        """Check that a slot has its value still."""
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
            _require(False, "{} leaves the run, but has no value at its end", slot)
        elif not has_value:
            _require(False, "{} reads {}, which has no value then", step or i, slot)

    def held_in(self, slots: Iterable[int]) -> _Held:
        """Where values are that may be in the memory of these slots."""
        roots = {r for i in slots if i >= 0 for r in self.places.roots(i)}
        written = self.memory.written
        return tuple([(root, written[root]) for root in roots if root in written])

    def define(self, i: int, held: _Held) -> None:
        """Let a slot outside of the arena have a value."""
        if i >= 0:
            if self.slots[i].kind is not _DYNAMIC:
                _require(False, "{} is no place of a result", self.slots[i])
            self.held[i] = held

    # Steps.

    def kernel(self, step: Step) -> None:
        """A step of any number of outputs, whose inputs have been read."""
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
            _require(False, "{} writes to no memory that it is given", step)
        for number, i in enumerate(planned):
            _require(i in self.memory.begin, "{} writes {} to no place", step, slots[i])
            lost = self.memory.write(i)
            for j in planned[:number]:
                _require(j not in lost, "{} writes {} over its own results", step, slots[i])
            self.check_lost(step, i, lost)
        self.check_call(step, kernel)

    def check_given(self, step: Step, i: int) -> None:
        """Check the memory of a result that its kernel writes, but that is no slot of the arena."""
        slot = self.slots[i]
        if slot.roots:  # in a buffer of a loop, which nothing may have been written to
            free = all(root in self.memory.written for root in slot.roots)
            _require(free, "{} writes to a buffer that others have written to", step)
            self.in_buffers[i] = slot.roots
        else:  # in memory that the program allocates
            _require(slot.owned and _bytes(slot) >= 0, "{} is allocated by nothing", slot)

    def check_shared(self, step: Step, i: int) -> None:
        """Check what a slot says of the memory that an allocated result may share."""
        kernel, slot = step.kernel, self.slots[i]
        assert kernel is not None
        if kernel.begin is not None or not (kernel.view or isinstance(slot.type, TensorType)):
            # A list keeps the tensors that it is made of.
            kept = [k for k, j in enumerate(step.inputs) if j >= 0 and self.places.roots(j)]
            _require({*kept} <= {*step.copied}, "{} keeps what it does not copy", step)
        if slot.strides:
            # Kernels are bound to these strides before the run.
            perm = step.node.attrs.get("perm", ()) if step.node.op.name == "Transpose" else ()
            dims = slot.type.dims if isinstance(slot.type, TensorType) else ()
            order = [k for k in sorted(range(len(perm)), key=perm.__getitem__) if dims[k] != 1]
            # Those of an array without elements do not tell their order.
            fits = len(perm) == len(slot.strides) and (0 in dims or _order(slot) == order)
            _require(fits, "{} has strides that its node does not give it", slot)
            self.places.strided.discard(i)
        if kernel.view and step.inputs and step.inputs[0] >= 0 and not slot.owned:
            if not {*self.places.roots(step.inputs[0])} <= {*slot.roots}:
                _require(False, "{} is in memory that it does not name", slot)
        elif kernel.view and step.inputs and slot.base >= 0:
            source = step.inputs[0]
            holder = self.slots[source].base if self.slots[source].base >= 0 else source
            _require(holder == slot.base, "{} is a view of another value", slot)

    def check_call(self, step: Step, kernel: Kernel) -> None:
        """Check what a step gives to its kernel beside inputs and outputs."""
        if step.into:
            if step.workspace >= 0 or kernel.workspace:
                self.use_workspace(step)
            layout = kernel.layout
            ordered = layout.dims_order or (layout.contiguous and self.places.order)
            if ordered and not layout.any_layout:
                self.check_layout(step, layout)
            if kernel.into is None:
                _require(False, "{} cannot write to memory that it is given", step)
        if step.node.op is FUSED:
            _check_region(step)
        if step.copied or step.blocks or step.carries:
            fits = {*step.copied} <= {*range(len(step.inputs))}
            fits = fits and not step.blocks and not step.carries
            _require(fits, "{} copies inputs that it does not have, or has blocks", step)

    def check_layout(self, step: Step, layout: LayoutHints) -> None:
        """Check that results are in memory in the order in which their kernel writes them."""
        for i in step.outputs[:1] if layout.dims_order else step.outputs:
            if i >= 0 and self.slots[i].kind is _ARENA and not self.has_order(i, layout.dims_order):
                _require(False, "{} writes dims in another order than its slot has", step)

    def has_order(self, i: int, order: Sequence[int]) -> bool:
        """Whether a slot has its dims in this order, without gaps; in their own if that is of
        another rank."""
        type_, own = self.slots[i].type, self.places.order.get(i)
        if not isinstance(type_, TensorType):
            return False
        dims = type_.dims
        wanted = [k for k in order if dims[k] != 1] if len(order) == len(dims) else []
        return not type_.nbytes or (sorted(wanted) if own is None else own) == (
            wanted or sorted(own or ())
        )

    def use_workspace(self, step: Step) -> None:
        """Let the workspace of a step be written over."""
        kernel, i = step.kernel, step.workspace
        assert kernel is not None
        has_place = i in self.memory.end and i not in self.value_of
        nbytes = self.memory.end[i] - self.begin[i] if has_place else 0
        if not (has_place or i == -1) or nbytes < kernel.workspace:
            _require(False, "{} has too small a workspace, or in no place of its own", step)
        lost = self.memory.write(i) if i >= 0 else ()
        if lost:
            if not {*lost}.isdisjoint(step.outputs):
                _require(False, "{} has its workspace over its results", step)
            self.check_lost(step, i, lost)

    def check_lost(self, step: Step, i: int, lost: Sequence[int]) -> None:
        """A step has written slot ``i``, whose memory others have lost: none of its inputs, unless
        its kernel says so, and writes each element where it has read it."""
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
            _require(False, "{} writes {} over what it reads", step, target)

    # Control flow.

    def control(self, step: Step) -> None:
        """An If or a loop."""
        plain = step.workspace == -1 and not step.into and not step.copied
        _require(plain, "{} has no kernel to use memory", step)
        role = step.node.op.role
        _require(role in (Role.IF, *_LOOPS), "{} has neither a kernel nor blocks", step)
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
        _require(all(same), "{} has other steps in tasks than in its blocks", step)
        return lists

    def branches(self, step: Step) -> None:
        before, held = dict(self.memory.written), dict(self.held)
        after: list[dict[int, int]] = []
        results: list[list[_Held]] = []
        attrs = step.node.attrs
        graphs = [attrs["then_branch"], attrs["else_branch"]]
        _require(not step.carries, "{} carries values, but is no loop", step)
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
        # What held before must hold after each branch; of what a branch has written, any may.
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
                _require(roots <= {*self.slots[i].roots}, "{} is in other memory", self.slots[i])

    def loop(self, step: Step, is_loop: bool) -> None:
        (block,), (steps,), held = step.blocks, self.inside(step), dict(self.held)
        body = step.node.attrs["body"]
        self.check_nodes(block.steps, body)
        self.enter(block.inputs, body.inputs)
        _check_carries(step, block, self.slots, is_loop)
        carried = {carry.inside for carry in step.carries}
        for carry in step.carries:
            for i in carry.buffers or ():
                _require(i not in self.value_of, "{} is a buffer and has a value", self.slots[i])
                self.memory.write(i)
        for carry in step.carries:
            self.read(carry.initial, step)
            self.define(carry.inside, self.held_in((carry.initial,)))
        # What is scanned is read in each iteration.
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
        # Without an iteration all is as it was; buffers are of the loop alone.
        merged = {i: n for i, n in entered.items() if self.memory.written.get(i) == n}
        self.memory.restore(merged)
        self.held = held
        for number, (value, i) in enumerate(zip(step.node.outputs, step.outputs, strict=True)):
            self.put(value, i)
            buffers = next((c.buffers for c in step.carries[number : number + 1]), None) or ()
            lost = [b for b in buffers if b not in self.memory.written]
            _require(not lost, "{} lets its body write over a carried value", step)
            self.define(i, self.held_in(buffers))

    def hand_on(self, carry: Carry, step: Step) -> None:
        """The end of an iteration: the next one reads what this one has computed."""
        # What is in the buffers of a loop around stays there.
        written = self.in_buffers.pop(carry.updated, None) if carry.direct else carry.buffers
        _require(written == carry.buffers, "{} carries what is not written to its buffers", step)
        self.read(carry.updated, step)
        if carry.updated != carry.inside:
            self.define(carry.inside, self.held_in(carry.buffers or ()))


_LOOPS = (Role.LOOP, Role.SCAN, Role.SEQUENCE_MAP)


def _same(steps: Sequence[Step], wanted: Sequence[Step]) -> bool:
    """Whether two lists have the same steps, each once."""
    return len(steps) == len(wanted) and {*steps} == {*wanted}


def _is_type(of_slot: Type, of_value: Type) -> bool:
    """Whether the slot of a value has its type; what leaves a loop may be a list of its rows."""
    same = of_slot is of_value or of_slot == of_value
    return same or (isinstance(of_slot, SequenceType) and of_slot.element == of_value)


def _is_constant(slot: Slot, value: Value) -> bool:
    """Whether a slot has the contents of a constant, as far as these are held."""
    held = None if slot.constant is None else slot.constant.held
    same = held is None or held is value.held or not isinstance(held, np.ndarray)
    return same and value.is_constant and _is_type(slot.type, value.type)


def _order(slot: Slot) -> list[int] | None:
    """The dims of a slot that are not 1, the outermost in memory first; None if elements share
    bytes, or have others between them."""
    type_, strides = slot.type, slot.strides
    if not isinstance(type_, TensorType) or len(strides) != len(type_.dims):
        return None
    dims = type_.dims
    long = [k for k, n in enumerate(dims) if n != 1]
    order = sorted(long, key=strides.__getitem__, reverse=True)
    stride = type_.nbytes // max(type_.elements, 1)
    for k in reversed(order):
        if strides[k] != stride and type_.nbytes:
            return None
        stride *= dims[k]
    return order


def _alike(a: Slot, b: Slot) -> bool:
    x, y = a.type, b.type
    tensors = isinstance(x, TensorType) and isinstance(y, TensorType)
    return tensors and (x.shape, x.dtype) == (y.shape, y.dtype)  # type: ignore[union-attr]


def _check_control(step: Step, steps: Sequence[Step]) -> None:
    """Check that what a node waits for comes before it in its block: a node, or what one without a
    step reads and waits for."""
    place = {other.node: k for k, other in enumerate(steps)}
    waits, seen = list(step.node.control_inputs), set(step.node.control_inputs)
    while waits:
        node = waits.pop()
        if node in place:
            _require(place[node] < place[step.node], "{} comes before what it waits for", step)
            continue
        read = [v.producer for v in node.inputs if v is not None and v.producer is not None]
        further = {*read, *node.control_inputs} - seen
        seen |= further
        waits += further


def _check_carries(step: Step, block: Block, slots: Sequence[Slot], is_loop: bool) -> None:
    """Check that a loop carries the values that its node says."""
    node = step.node
    count = len(node.inputs) - (
        2 if is_loop else node.attrs.get("num_scan_inputs", len(node.inputs))
    )
    first, ahead = (2, 1) if is_loop else (0, 0)
    _require(len(step.carries) == count, "{} carries other values than its node", step)
    results = [*step.outputs, *[-1] * count]
    for k, carry in enumerate(step.carries):
        own = (carry.initial, carry.inside, carry.updated, carry.result) == (
            step.inputs[first + k],
            block.inputs[first + k],
            block.outputs[ahead + k],
            results[k],
        )
        _require(own, "{} carries other values than its node", step)
        _check_buffers(step, carry, slots)


def _check_buffers(step: Step, carry: Carry, slots: Sequence[Slot]) -> None:
    """Check the memory that a carried value is in."""
    if carry.buffers is None:
        _require(not carry.direct, "{} writes to buffers that there are not", step)
        return
    a, b = carry.buffers
    inside, updated = slots[carry.inside], slots[carry.updated]
    for i in (a, b):
        alike = slots[i].kind is _ARENA and _alike(slots[i], inside) and _alike(slots[i], updated)
        _require(alike, "{} has a buffer of another type than the value in it", step)
    _require(a != b and {a, b} <= {*inside.roots}, "{} has a buffer for two values", step)


def _check_region(step: Step) -> None:
    """Check the formula of a fused node: each part reads inputs, constants and parts before it."""
    node = step.node
    region = node.attrs["region"]
    known = {None, *region.inputs}
    for own, value in zip(region.inputs, node.inputs, strict=True):
        if value is None or (own.type is not value.type and own.type != value.type):
            _require(False, "{} has inputs of other types than its parts", step)
    for part in region.nodes:
        for value in part.inputs:
            if value not in known and not value.is_constant:
                _require(False, "{} has a part that reads what none before has computed", step)
        known.update(part.outputs)
    (result,), (value,) = region.nodes[-1].outputs, node.outputs
    fits = value is not None and (result.type is value.type or result.type == value.type)
    if not fits:
        _require(False, "{} has a result of another type than its last part", step)


# Tasks.


def _check_tasks(plan: Plan, places: _Places, tasks: Tasks, order: _Order) -> None:
    """Check that what tasks share has an order that is sure before the run, and is released after
    its last reader."""
    touched: dict[int, list[tuple[Step, bool]]] = {}
    writers: dict[int, Step] = {}
    for task in with_checkpoints(tasks.tasks):
        for step in task.steps:
            for i, writes in _accesses(step, inside=step not in tasks.expanded):
                if i < 0:
                    continue
                if writes:
                    writers.setdefault(i, step)
                slot = plan.slots[i]
                roots = (slot.base,) if slot.kind is _ALIAS else (i, *slot.roots)
                for root in roots:
                    touched.setdefault(root, []).append((step, writes))
    if plan.remote or tasks.signals.devices:
        return  # what runs on streams of devices is ordered there
    _check_releases(plan, tasks, order)
    for i, accesses in with_checkpoints(touched.items()):
        writer = writers.get(i)
        for step, _ in accesses if writer is not None else ():
            sure = step is writer or order.precedes(writer, step)  # type: ignore[arg-type]
            _require(sure, "{} may run before {} is written", step, plan.slots[i])
    among = sorted((places.begin[i], i) for i in places.end if i in touched and i in writers)
    for number, (_, a) in enumerate(with_checkpoints(among)):
        # They are sorted by where they begin: no later one reaches into this one.
        for at, b in among[number + 1 :]:
            if at >= places.end[a]:
                break
            if places.overlaps(a, b):
                apart = order.all_before(touched[a], writers[b]) or order.all_before(
                    touched[b], writers[a]
                )
                text = "{} and {} share memory at the same time"
                _require(apart, text, plan.slots[a], plan.slots[b])


def _check_releases(plan: Plan, tasks: Tasks, order: _Order) -> None:
    """Check that values that tasks share are where all of these find them, until all have."""
    touching: dict[int, dict[Step, int]] = {}
    for t, task in enumerate(with_checkpoints(tasks.tasks)):
        for step in task.steps:
            for i, _ in _accesses(step, inside=step not in tasks.expanded):
                if i >= 0 and plan.slots[i].kind is _DYNAMIC:
                    touching.setdefault(i, {})[step] = t
    shared = {i for i, steps in touching.items() if len({*steps.values()}) > 1}
    ends = {i for i in (*plan.inputs, *plan.outputs) if plan.slots[i].kind is _DYNAMIC}
    _require(tasks.shared == shared | ends, "tasks share other slots than they touch")
    kept = {0: plan.outputs}  # by block
    for step, numbers in tasks.expanded.items():
        kept |= {b: block.outputs for b, block in zip(numbers, step.blocks, strict=True)}
    until: dict[int, list[int]] = {}
    for t in range(len(tasks.tasks)):
        for i in (*tasks.releases[t], *tasks.counted[t]):
            until.setdefault(i, []).append(t)
    for i, last in with_checkpoints(until.items()):
        fits = len(last) == tasks.readers.get(i, 1) and i in shared
        fits = fits and not any(i in kept[tasks.tasks[t].block] for t in last)
        _require(fits and (i in tasks.readers) is (len(last) > 1), "{} is not released once", i)
        ends_of = [tasks.tasks[t].steps[-1] for t in last]
        for step in touching.get(i, ()):
            in_time = any(order.precedes(step, end) for end in ends_of)
            _require(in_time, "{} is released before {} has it", i, step)


def _accesses(step: Step, *, inside: bool) -> Iterator[tuple[int, bool]]:
    """The slots that a step touches, and whether it writes them."""
    yield from ((i, False) for i in step.inputs)
    yield from ((i, True) for i in (*step.outputs, step.workspace))
    for carry in step.carries:
        yield from ((i, True) for i in (*(carry.buffers or ()), carry.inside))
        yield from ((i, False) for i in (carry.initial, carry.updated))
    for block in step.blocks:
        yield from ((i, True) for i in block.inputs)
        yield from ((i, False) for i in block.outputs)
        for inner in block.steps if inside else ():
            yield from _accesses(inner, inside=True)


def _check_numbers(tasks: Tasks) -> None:
    """Check what tasks say of one another by numbers."""
    listed = [t for members in tasks.blocks for t in members]
    _require(sorted(listed) == [*range(len(tasks.tasks))], "a task is not in one block")
    for number, members in enumerate(tasks.blocks):
        own = all(tasks.tasks[t].block == number for t in members)
        _require(own, "block {} has tasks of others", number)
    waits, parent = [0] * len(tasks.tasks), [-1] * len(tasks.blocks)
    for task, consumers in with_checkpoints(zip(tasks.tasks, tasks.consumers, strict=True)):
        for c in consumers:
            waits[c] += 1
            _require(tasks.tasks[c].block == task.block, "tasks of several blocks wait")
    for t, task in enumerate(with_checkpoints(tasks.tasks)):
        inner = [b for step in task.steps for b in tasks.expanded.get(step, ())]
        _require(inner == [*task.blocks], "task {} has blocks of other steps", t)
        for b in inner:
            parent[b] = t
    _require(waits == [*tasks.waits], "tasks wait for other numbers of tasks than end before them")
    _require(parent == [*tasks.parent], "blocks are of other tasks than those that run them")
    emitted = [s for emits in tasks.signals.emits.values() for s in emits]
    _require(len({*emitted}) == len(emitted), "a signal is emitted by two steps")
    for step, waited in tasks.signals.waits.items():
        _require({*waited} <= {*emitted}, "{} waits for a signal that never comes", step)
    _require(all(0 <= s < tasks.signals.count for s in emitted), "there are less signals")


class _Order:
    """Which of two steps surely runs before the other: by their tasks, by what these wait for, and
    by signals. Raises ``UnsoundPlanError`` if steps wait for one another in a circle."""

    def __init__(self, tasks: Tasks) -> None:
        self.expanded = tasks.expanded
        self.sorted: list[list[Step]] = []
        """the steps of each block, in an order that obeys all this"""
        self.path: dict[Step, tuple[Step, ...]] = {}
        self.block: dict[Step, int] = {}
        self.after: dict[Step, int] = {}
        self.number: dict[Step, int] = {}
        _check_numbers(tasks)
        around: dict[int, Step] = {b: step for step, of in tasks.expanded.items() for b in of}
        for number, members in enumerate(tasks.blocks):
            outer = around.get(number)
            above = () if outer is None else self.path[outer]
            for t in members:
                for step in tasks.tasks[t].steps:
                    self.path[step], self.block[step] = (*above, step), number
            self._reach([tasks.tasks[t].steps for t in members], members, tasks)

    def _reach(self, lanes: Sequence[Sequence[Step]], members: Sequence[int], tasks: Tasks) -> None:
        """Find all steps that run after each of one block, as bits of an integer."""
        steps = [step for lane in lanes for step in lane]
        self.number.update((step, i) for i, step in enumerate(steps))
        following: dict[Step, list[Step]] = {step: [] for step in steps}
        for t, lane in zip(members, lanes, strict=True):
            for a, b in pairwise(lane):
                following[a].append(b)
            for c in tasks.consumers[t]:
                following[lane[-1]].append(tasks.tasks[c].steps[0])
        emitted = {s: step for step in steps for s in tasks.signals.emits.get(step, ())}
        for step in steps:
            for s in tasks.signals.waits.get(step, ()):
                _require(s in emitted, "{} waits for a signal that never comes", step)
                following[emitted[s]].append(step)
        waits = dict.fromkeys(steps, 0)
        for afters in following.values():
            for step in afters:
                waits[step] += 1
        ready: list[Step] = [step for step in steps if not waits[step]]
        ran: list[Step] = []
        while ready:
            ran.append(ready.pop())
            for step in following[ran[-1]]:
                waits[step] -= 1
                ready += [] if waits[step] else [step]
        _require(len(ran) == len(steps), "steps of tasks wait for one another in a circle")
        self.sorted.append(ran)
        # Backwards, so that all that follows a step is known when the step is reached.
        for step in reversed(ran):
            bits = 0
            for after in following[step]:
                bits |= self.after[after] | 1 << self.number[after]
            self.after[step] = bits

    def precedes(self, a: Step, b: Step) -> bool:
        """Whether ``a`` surely ends before ``b`` begins, or at most one of them runs."""
        for x, y in zip(self.path[a], self.path[b], strict=False):
            if x is not y:
                if self.block[x] != self.block[y]:
                    return True
                return bool(self.after[x] >> self.number[y] & 1)
        return True  # one of them is within the other, which runs in an order of its own

    def all_before(self, accesses: Iterable[tuple[Step, bool]], writer: Step) -> bool:
        return all(step is writer or self.precedes(step, writer) for step, _ in accesses)
