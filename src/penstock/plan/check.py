"""A checker of schedules, which shares no code with what makes them.

A plan is right if, whatever order its steps run in, each reads what was written for it. That is
checked by running the plan without its kernels::

    places      each slot of the arena lies within it; a view within what it views
    steps       inputs are defined before, of the types of the node's values; blocks and carried
                values fit their step
    memory      a step reads an arena slot that no other slot has been written over since, and
                writes over none of its inputs, but where its kernel works in place
    tasks       what one task writes and another one reads, or writes over, has an order; nothing
                waits for what never comes

Bodies of loops run twice, since an iteration reads what the one before has left. Saved plans are
checked when they are opened, and all plans of the tests.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from math import inf
from typing import TYPE_CHECKING, Any

from penstock.core.checkpoints import with_checkpoints
from penstock.core.errors import InvalidModel
from penstock.core.types import STRING, TensorType
from penstock.ops.internal.fused import FUSED
from penstock.ops.internal.transfer import HOST
from penstock.plan.plan import Carry, Plan, Slot, SlotKind, Step

if TYPE_CHECKING:
    from penstock.plan.arena_layout import ArenaPlan
    from penstock.plan.tasks import Tasks

_ALIGNMENT = 64
_Held = tuple[tuple[int, int], ...]
"""the arena slots that a value is in, each with the number of the write that put it there"""


class UnsoundPlanError(Exception):
    """What is wrong with a plan."""


def check_schedule(plan: Plan, arena: ArenaPlan, tasks: Tasks | None = None) -> None:
    """Raise ``UnsoundPlanError`` unless the steps of ``plan`` can run in the order of ``arena``, or
    as ``tasks``, at its offsets."""
    ends = _check_places(plan, arena)
    order = None if tasks is None else _Order(tasks)
    _Run(plan, arena, _Memory(plan, arena.offsets, ends), order).check()
    if tasks is not None and order is not None and not plan.remote and not tasks.signals.devices:
        _check_tasks(plan, _Memory(plan, arena.offsets, ends), tasks, order)


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


def _check_places(plan: Plan, arena: ArenaPlan) -> dict[int, int]:
    """Check where slots are; returns where those of the arena end."""
    sizes, offsets, ends = {**arena.remote, HOST: arena.size}, arena.offsets, {}
    for i, slot in enumerate(with_checkpoints(plan.slots)):
        if slot.kind is SlotKind.ARENA and i in offsets:
            begin, nbytes = offsets[i], _bytes(slot)
            ends[i] = begin + nbytes
            inside = slot.memory in sizes and begin >= 0 and ends[i] <= sizes[slot.memory]
            if not inside or begin % _ALIGNMENT:
                _require(False, "{} is outside of the arena", slot)
            if slot.strides:
                low, high = _extent(slot)
                fits = low >= 0 and high <= nbytes
                _require(fits, "{} has strides beyond its bytes", slot)
        elif slot.kind is SlotKind.ALIAS:
            base = plan.slots[slot.base] if 0 <= slot.base < len(plan.slots) else None
            of_arena = base is not None and base.kind is SlotKind.ARENA
            _require(of_arena, "{} views what is not in the arena", slot)
            low, high = _extent(slot)
            fits = base is not None and slot.offset + low >= 0 <= _bytes(base) - slot.offset - high
            _require(fits, "{} is outside of what it views", slot)
        elif slot.kind is SlotKind.CONSTANT:
            _require(slot.constant is not None, "{} has no contents", slot)
        elif slot.roots or slot.base != -1:
            roots = [r for r in (*slot.roots, slot.base) if not -1 <= r < len(plan.slots)]
            _require(not roots, "{} is in slots that there are not", slot)
    return ends


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
    spans = [(n - 1) * stride for n, stride in zip(type_.dims, slot.strides, strict=True)]
    itemsize = nbytes // type_.elements
    return sum(min(span, 0) for span in spans), sum(max(span, 0) for span in spans) + itemsize


# Steps and memory.


class _Memory:
    """What the arena holds: for each of its slots that was not written over, the number of the
    write. In each memory these are disjoint, the slots ``at`` places that are sorted, but for what
    branches of one If have left, of which one has run: ``either``."""

    def __init__(self, plan: Plan, begin: Mapping[int, int], end: Mapping[int, int]) -> None:
        self.written: dict[int, int] = {}
        self.begin, self.end = begin, end
        self.memory = {i: plan.slots[i].memory for i in end}
        # Behind all places, infinity: searches need no test for the end.
        self.places: dict[str, list[float]] = {memory: [inf] for memory in self.memory.values()}
        self.at: dict[str, list[int]] = {memory: [-1] for memory in self.places}
        self.either: set[int] = set()
        self.writes = 0

    def overlaps(self, a: int, b: int) -> bool:
        same = self.memory[a] == self.memory[b]
        return same and self.begin[a] < self.end[b] and self.begin[b] < self.end[a]

    def write(self, slot: int) -> None:
        """Let a slot have a new value; those whose memory it takes have none."""
        memory, begin, end, written = (
            self.memory[slot],
            self.begin[slot],
            self.end[slot],
            self.written,
        )
        places, at = self.places[memory], self.at[memory]
        # A slot without bytes takes the memory of none.
        if begin < end:
            low = high = bisect_left(places, begin)
            # The slot that begins before may reach into this one.
            if low and self.end[at[low - 1]] > begin:
                low -= 1
            while places[high] < end:
                high += 1
            for other in at[low:high]:
                del written[other]
            places[low:high], at[low:high] = [begin], [slot]
        for other in [i for i in self.either if self.overlaps(i, slot)] if self.either else ():
            self.either.remove(other)
            written.pop(other, None)
        self.writes += 1
        written[slot] = self.writes

    def restore(self, written: Mapping[int, int]) -> None:
        """Hold what was held before, or is held after one of several branches."""
        written = dict(written)
        self.written.clear()
        self.written.update(written)
        self.either.clear()
        for memory in self.places:
            among = sorted((self.begin[i], i) for i in written if self.memory[i] == memory)
            places, at, behind = [], [], 0
            for begin, i in among:
                if begin < behind:
                    self.either.add(i)
                elif begin < self.end[i]:
                    places.append(begin)
                    at.append(i)
                    behind = self.end[i]
            self.places[memory][:], self.at[memory][:] = [*places, inf], [*at, -1]


class _Run:
    """A run of a plan without its kernels, its outermost steps in the order of ``arena``, or the
    steps of each block in one that tasks allow."""

    def __init__(self, plan: Plan, arena: ArenaPlan, memory: _Memory, order: _Order | None) -> None:
        self.plan, self.slots = plan, plan.slots
        self.order = [plan.steps[i] for i in arena.order] if order is None else order.sorted[0]
        self.of_tasks = order
        self.memory = memory
        self.values: dict[int, _Held] = {}  # of slots that are defined and not in the arena
        # The arena slot that the value of each slot is in, if that is one and fixed; None for
        # constants, which are always there.
        self.rooted: dict[int, int | None] = {}
        for i, slot in enumerate(plan.slots):
            root: int | None = i if slot.kind is SlotKind.ARENA else slot.base
            root = -1 if slot.kind is SlotKind.DYNAMIC else root
            self.rooted[i] = None if slot.kind is SlotKind.CONSTANT else root
        # Whether a loop around is in its second iteration: those inside have shown theirs before,
        # and to run them twice again would take time without end where loops nest.
        self.again = False

    def check(self) -> None:
        plan = self.plan
        whole = len(self.order) == len(plan.steps) and {*self.order} == {*plan.steps}
        _require(whole, "the order does not have each step once")
        for i in plan.inputs:
            self.define(i, ())
        try:
            self.steps(self.order)
        except (KeyError, ValueError) as error:
            problem = f"a step has other slots than its node has values: {error!r}"
            raise UnsoundPlanError(problem) from error
        for i in plan.outputs:
            self.read(i, None)

    def steps(self, steps: Sequence[Step]) -> None:
        written, rooted = self.memory.written, self.rooted
        begin, end, slots = self.memory.begin, self.memory.end, self.slots
        for step in with_checkpoints(steps):
            # Without further calls where it can be: each step of a plan that is opened is checked.
            output = step.outputs[0] if step.into and step.workspace < 0 else -1
            kernel, of_parts = step.kernel, step.node.op is FUSED
            plain = kernel is not None and not kernel.workspace and output in begin and not of_parts
            for k, (value, i) in enumerate(zip(step.node.inputs, step.inputs, strict=True)):
                if i < 0 or value is None:
                    _require(i < 0 and value is None, "{} lacks a value or a slot", step)
                elif (root := rooted[i]) is None:
                    continue
                elif root not in written:
                    self.read(i, step)
                elif plain and begin[root] < end[output] and begin[output] < end[root]:
                    a: Any = slots[i].type
                    b: Any = slots[output].type
                    alike = a.dtype == b.dtype and a.shape == b.shape
                    alike = alike and slots[i].strides == slots[output].strides
                    taken = i == root and begin[i] == begin[output] and alike
                    plain = taken and kernel is not None and k in kernel.inplace
            if plain and step.outputs == (output,):
                self.memory.write(output)
            else:
                self.step(step)

    def step(self, step: Step) -> None:
        """A step whose inputs have been read."""
        _check_step(step, self.slots)
        if step.kernel is not None:
            self.kernel(step)
        elif len(step.blocks) == 1:
            self.loop(step)
        else:
            self.branches(step)

    # Values.

    def read(self, i: int, step: Step | None) -> None:
        """Check that a slot has its value still."""
        slot, written = self.slots[i], self.memory.written
        if slot.kind is SlotKind.CONSTANT:
            return
        if slot.kind in (SlotKind.ARENA, SlotKind.ALIAS):
            has_value = (slot.base if slot.kind is SlotKind.ALIAS else i) in written
        else:
            held = self.values.get(i)
            has_value = held is not None and all(written.get(r) == n for r, n in held)
        if step is None:
            _require(has_value, "{} leaves the run, but has no value at its end", slot)
        else:
            _require(has_value, "{} reads {}, which has no value then", step, slot)

    def held(self, slots: Iterable[int]) -> _Held:
        """Where values are that may be in the memory of these slots."""
        roots = {r for i in slots for r in self.roots(i)}
        written = self.memory.written
        return tuple([(root, written[root]) for root in roots if root in written])

    def roots(self, i: int) -> Sequence[int]:
        slot = self.slots[i]
        if slot.kind is SlotKind.ARENA:
            return (i,)
        return (slot.base,) if slot.kind is SlotKind.ALIAS else slot.roots

    def define(self, i: int, held: _Held) -> None:
        """Let a slot outside of the arena have a value."""
        if i >= 0:
            self.values[i] = held

    # Steps.

    def kernel(self, step: Step) -> None:
        written = [i for i in step.outputs if i >= 0 and self.slots[i].kind is SlotKind.ARENA]
        _require(step.into or not written, "{} writes to no memory that it is given", step)
        written += [step.workspace] if step.workspace >= 0 else []
        for number, i in enumerate(written):
            _require(i in self.memory.begin, "{} writes {} to no place", step, self.slots[i])
            for j in written[:number]:
                apart = not self.memory.overlaps(i, j)
                _require(apart, "{} writes {} over its own results", step, self.slots[i])
            over = []
            for k, j in enumerate(step.inputs):
                root = None if j < 0 else self.rooted[j]
                if root is not None and self.is_over(
                    i, (root,) if root >= 0 else self.slots[j].roots
                ):
                    over.append(k)
            if over:
                fits = i == step.outputs[0] and self.in_place(step, i, over)
                _require(fits, "{} writes {} over what it reads", step, self.slots[i])
        for i in step.outputs:
            if i >= 0 and self.slots[i].kind is SlotKind.DYNAMIC:
                if step.into:  # into a buffer of a loop, which nothing may have been written to
                    free = all(root in self.memory.written for root in self.slots[i].roots)
                    _require(free, "{} writes to a buffer that others have written to", step)
                self.define(i, self.held(self.slots[i].roots))
        for i in written:
            self.memory.write(i)

    def is_over(self, slot: int, roots: Iterable[int]) -> bool:
        """Whether a slot is in memory that one of these has its value in."""
        memory = self.memory
        return any(root in memory.written and memory.overlaps(slot, root) for root in roots)

    def in_place(self, step: Step, output: int, over: Sequence[int]) -> bool:
        """Whether a kernel may write over these inputs: it says so, and each element is written
        where it was read."""
        assert step.kernel is not None
        same = {step.inputs[k] for k in over}
        source, target = self.slots[step.inputs[over[0]]], self.slots[output]
        starts = {self.memory.begin.get(i) for i in (*same, output)}
        alike = source.strides == target.strides and _alike(source, target)
        return set(over) <= set(step.kernel.inplace) and len(same) == len(starts) == 1 and alike

    def inside(self, step: Step) -> Sequence[Sequence[Step]]:
        """The steps of each block of a step."""
        expanded = () if self.of_tasks is None else self.of_tasks.expanded.get(step, ())
        if self.of_tasks is None or not expanded:
            return [block.steps for block in step.blocks]
        return [self.of_tasks.sorted[number] for number in expanded]

    def branches(self, step: Step) -> None:
        before, values = dict(self.memory.written), dict(self.values)
        after: list[dict[int, int]] = []
        results: list[list[_Held]] = []
        for block, steps in zip(step.blocks, self.inside(step), strict=True):
            self.memory.restore(before)
            self.values = dict(values)
            self.steps(steps)
            for i in block.outputs:
                self.read(i, step)
            results.append([self.held((i,)) for i in block.outputs])
            after.append(dict(self.memory.written))
        # What held before must hold after each branch; of what a branch has written, any may.
        merged = {i: n for i, n in before.items() if all(w.get(i) == n for w in after)}
        merged |= {i: n for w in after for i, n in w.items() if before.get(i) != n}
        self.memory.restore(merged)
        self.values = values
        for number, i in enumerate(step.outputs):
            owned = i >= 0 and self.slots[i].owned
            self.define(i, () if owned else tuple([x for held in results for x in held[number]]))

    def loop(self, step: Step) -> None:
        (block,), (steps,), values = step.blocks, self.inside(step), dict(self.values)
        carried = {carry.inside for carry in step.carries}
        for carry in step.carries:
            for i in carry.buffers or ():
                self.memory.write(i)
            self.define(carry.inside, self.held((carry.initial,)))
        for i in block.inputs:
            if i not in carried:
                self.define(i, self.held(self.slots[i].roots))
        entered = dict(self.memory.written)
        again = self.again
        for self.again in (True,) if again else (False, True):
            self.steps(steps)
            for i in block.outputs:
                self.read(i, step)
            for carry in step.carries:
                self.hand_on(carry, step)
        self.again = again
        # Without an iteration all is as it was; buffers are of the loop alone.
        merged = {i: n for i, n in entered.items() if self.memory.written.get(i) == n}
        self.memory.restore(merged)
        self.values = values
        for number, i in enumerate(step.outputs):
            buffers = next((c.buffers for c in step.carries[number : number + 1]), None) or ()
            lost = [b for b in buffers if b not in self.memory.written]
            _require(not lost, "{} lets its body write over a carried value", step)
            self.define(i, self.held(buffers))

    def hand_on(self, carry: Carry, step: Step) -> None:
        """The end of an iteration: the next one reads what this one has computed."""
        self.read(carry.updated, step)
        if carry.updated != carry.inside:
            self.define(carry.inside, self.held(carry.buffers or ()))


def _alike(a: Slot, b: Slot) -> bool:
    x, y = a.type, b.type
    tensors = isinstance(x, TensorType) and isinstance(y, TensorType)
    return tensors and (x.dims, x.dtype) == (y.dims, y.dtype)  # type: ignore[union-attr]


def _check_step(step: Step, slots: Sequence[Slot]) -> None:
    """Check what a step says of itself, apart from when it runs."""
    node = step.node
    outputs = [i for i in (*step.outputs, step.workspace) if not -1 <= i < len(slots)]
    _require(not outputs, "{} writes slots that there are not", step)
    fits = len(step.inputs) == len(node.inputs) and len(step.outputs) == len(node.outputs)
    _require(fits, "{} has other numbers of slots than its node of values", step)
    for value, i in zip(node.outputs, step.outputs, strict=True):
        _require((value is None) == (i < 0), "{} lacks a value or a slot", step)
    kernel = step.kernel
    if kernel is not None:
        _require(not step.blocks and not step.carries, "{} has a kernel and blocks", step)
        size = slots[step.workspace].nbytes if step.workspace >= 0 else 0
        enough = not step.into or size >= kernel.workspace
        _require(enough, "{} has too small a workspace", step)
    if node.op is FUSED:
        _check_region(step, slots)
    for block in step.blocks if len(step.blocks) > 1 else ():
        _require(len(block.outputs) == len(step.outputs), "{} has another number of results", step)
    for carry in step.carries:
        for i in carry.buffers or ():
            alike = _alike(slots[i], slots[carry.inside]) and _alike(slots[i], slots[carry.updated])
            _require(alike, "{} has a buffer of another type than the value in it", step)


def _check_region(step: Step, slots: Sequence[Slot]) -> None:
    """Check the formula of a fused node: each part reads inputs, constants and parts before it."""
    region = step.node.attrs["region"]
    known = set(region.inputs)
    _require(len(region.inputs) == len(step.inputs), "{} has other inputs than its parts", step)
    for part in region.nodes:
        for value in part.inputs:
            if value is not None and value not in known and not value.is_constant:
                _require(False, "{} has a part that reads what none before has computed", step)
        for value in part.outputs:
            known.add(value)
    results = [value for value in region.nodes[-1].outputs if value is not None]
    output, types = slots[step.outputs[0]], [value.type for value in results]
    alike = isinstance(output.type, TensorType) and len(types) == 1
    found = types[0] if alike else None
    fits = isinstance(found, TensorType) and found.dtype == output.type.dtype  # type: ignore[union-attr]
    _require(fits, "{} has a result of another type than its last part", step)


# Tasks.


def _check_tasks(plan: Plan, memory: _Memory, tasks: Tasks, order: _Order) -> None:
    """Check that what tasks share has an order that is sure before the run."""
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
                roots = (slot.base,) if slot.kind is SlotKind.ALIAS else (i, *slot.roots)
                for root in roots:
                    touched.setdefault(root, []).append((step, writes))
    for i, accesses in with_checkpoints(touched.items()):
        writer = writers.get(i)
        for step, _ in accesses if writer is not None else ():
            sure = step is writer or order.precedes(writer, step)  # type: ignore[arg-type]
            _require(sure, "{} may run before {} is written", step, plan.slots[i])
    among = sorted((memory.begin[i], i) for i in memory.end if i in touched and i in writers)
    for number, (_, a) in enumerate(with_checkpoints(among)):
        # They are sorted by where they begin: no later one reaches into this one.
        for at, b in among[number + 1 :]:
            if at >= memory.end[a]:
                break
            if memory.overlaps(a, b):
                apart = order.all_before(touched[a], writers[b]) or order.all_before(
                    touched[b], writers[a]
                )
                text = "{} and {} share memory at the same time"
                _require(apart, text, plan.slots[a], plan.slots[b])


def _accesses(step: Step, *, inside: bool) -> Iterator[tuple[int, bool]]:
    """The slots that a step touches, and whether it writes them."""
    yield from ((i, False) for i in step.inputs)
    yield from ((i, True) for i in (*step.outputs, step.workspace))
    for carry in step.carries:
        yield from ((i, True) for i in carry.buffers or ())
        yield from ((i, False) for i in (carry.initial, carry.updated))
    for block in step.blocks:
        yield from ((i, False) for i in block.outputs)
        for inner in block.steps if inside else ():
            yield from _accesses(inner, inside=True)


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
