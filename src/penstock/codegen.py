"""A plan as one Python function: straight-line calls of bound kernels, control flow as itself.

Names: ``c`` constants, ``b`` buffers in the arena and views of them, ``v`` values known only during
the run; kernels by their operation. The text is made once for a plan; each arena gets a namespace
of its own in which the same code runs, so that any number of runs go on at once.
"""

from __future__ import annotations

import linecache
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import count
from types import CodeType
from typing import Any

import numpy as np

from penstock.errors import LimitExceeded
from penstock.liveness import Layout
from penstock.ops.control import ScanLayout, element_of, scalar, stack, truth
from penstock.ops.cost import flops
from penstock.plan import Block, Kind, Plan, Slot, Step
from penstock.types import ShapeError, TensorType, Type

# Estimated operations between two looks at the control: a few milliseconds of NumPy on one core.
_CHECK_EVERY = 50_000_000
# Steps in one generated function, at most.
_MOST_STEPS = 2000
# CPython compiles at most 20 nested loops.
_MOST_NESTED_LOOPS = 18

_SERIAL = count()


class Late:
    """Stands for an array that is known only during the run: the name of a local variable."""

    __slots__ = ("name",)

    def __init__(self, name: str) -> None:
        self.name = name


@dataclass(frozen=True)
class Program:
    """Generated code; ``steps[i]`` is the step that line ``i + 1`` of ``source`` runs, if any."""

    source: str
    filename: str
    code: CodeType
    steps: tuple[Step | None, ...]


class Binder:
    """The names of one arena: every slot's array and every step's bound kernel."""

    def __init__(self, plan: Plan, layout: Layout, memory: np.ndarray) -> None:
        self.plan = plan
        self.namespace: dict[str, Any] = dict(_HELPERS)
        self.names: list[str] = []
        self.values: list[Any] = []
        self.by_id: dict[int, str] = {}
        shared: dict[tuple[Any, ...], int] = {}
        for index, slot in enumerate(plan.slots):
            name, value = self.place(index, slot, layout, memory, shared)
            self.names.append(name)
            self.values.append(value)
            if slot.kind is not Kind.DYNAMIC:
                self.namespace[name] = value
                self.by_id[id(value)] = name
        self.calls: dict[int, str] = {}
        for number, step in enumerate(plan.walk()):
            if step.kernel is not None:
                self.calls[id(step)] = self.bind(number, step)

    def place(
        self,
        index: int,
        slot: Slot,
        layout: Layout,
        memory: np.ndarray,
        shared: dict[tuple[Any, ...], int],
    ) -> tuple[str, Any]:
        if slot.kind is Kind.CONSTANT:
            return f"c{index}", slot.const
        if slot.kind is Kind.DYNAMIC:
            return f"v{index}", Late(f"v{index}")
        kind = slot.type
        assert isinstance(kind, TensorType)
        strides = slot.strides if slot.kind is Kind.ALIAS else None
        root = slot.base if slot.kind is Kind.ALIAS else index
        offset = layout.offsets[root] + (slot.offset if slot.kind is Kind.ALIAS else 0)
        # Slots that share memory and look at it alike share the array and its name.
        key = (offset, kind.shape, kind.dtype, strides)
        first = shared.setdefault(key, index)
        if first != index:
            return self.names[first], self.values[first]
        array = (
            np.ndarray(kind.dims, kind.dtype, buffer=memory, offset=offset, strides=strides)
            if memory.size or kind.nbytes
            else np.empty(kind.dims, kind.dtype)
        )
        return f"b{index}", array

    def bind(self, number: int, step: Step) -> str:
        """The call of a step as text; its function and arguments go into the namespace."""
        assert step.kernel is not None
        inputs = [None if i < 0 else self.values[i] for i in step.inputs]
        if step.into:
            outputs = [None if i < 0 else self.values[i] for i in step.outputs]
            workspace = self.values[step.workspace] if step.workspace >= 0 else None
            function, arguments = step.kernel.bind(inputs, outputs, workspace)
        else:
            function, arguments = step.kernel.function, tuple(inputs)
        if isinstance(function, np.ufunc):
            name = function.__name__
        else:
            name = f"{step.node.op.name.lower()}_{number}"
        self.namespace[name] = function
        texts = [self.argument(number, i, value) for i, value in enumerate(arguments)]
        for i in step.copied:
            texts[i] = f"own({texts[i]})"
        return f"{name}({', '.join(texts)})"

    def argument(self, number: int, position: int, value: Any) -> str:
        if isinstance(value, Late):
            return value.name
        known = self.by_id.get(id(value))
        if known is not None:
            return known
        if value is None or isinstance(value, bool | int | str):
            return repr(value)
        name = f"a{number}_{position}"
        self.namespace[name] = value
        return name


def generate(plan: Plan, layout: Layout, binder: Binder, max_iterations: int | None) -> Program:
    """The program of a plan, from the names that a first arena was given."""
    writer = _Writer(plan, binder, max_iterations)
    writer.function([plan.steps[i] for i in layout.order])
    source = "\n".join(writer.lines) + "\n"
    filename = f"<penstock {plan.name or 'graph'} {next(_SERIAL)}>"
    code = compile(source, filename, "exec", dont_inherit=True, optimize=2)
    # Tracebacks through the generated code show its lines.
    linecache.cache[filename] = (len(source), None, source.splitlines(True), filename)
    return Program(source, filename, code, tuple(writer.steps))


def instantiate(program: Program, binder: Binder) -> Callable[..., tuple[Any, ...]]:
    """The function that runs ``program`` in the arena of ``binder``."""
    exec(program.code, binder.namespace)
    run = binder.namespace["run"]
    assert callable(run)
    return run


class _Writer:
    def __init__(self, plan: Plan, binder: Binder, max_iterations: int | None) -> None:
        self.plan = plan
        self.binder = binder
        self.name = binder.names
        self.max_iterations = max_iterations
        self.lines: list[str] = []
        self.steps: list[Step | None] = []
        self.indent = 0
        self.loops = 0
        self.work = 0

    def line(self, text: str, step: Step | None = None, comment: str = "") -> None:
        text = "    " * self.indent + text
        self.lines.append(f"{text:<60}  # {comment}" if comment else text)
        self.steps.append(step)

    def function(self, steps: Sequence[Step]) -> None:
        plan = self.plan
        parts = [steps[i : i + _MOST_STEPS] for i in range(0, len(steps), _MOST_STEPS)]
        calls = self.parts(parts) if len(parts) > 1 else []
        parameters = "".join(f", {self.name[i]}" for i in plan.inputs)
        self.line(f"def run(control{parameters}):")
        self.indent += 1
        for i in plan.inputs:
            self.line(f"# {self.name[i]}: {plan.slots[i].name!r}, {plan.slots[i].type}")
        if calls:
            for call in calls:
                self.line(call)
        else:
            self.block(steps, plan.outputs)
        returned: set[int] = set()
        texts = []
        for i in plan.outputs:
            slot = plan.slots[i]
            owner = slot.base if slot.base >= 0 else i
            text = self.name[i] if slot.owned and owner not in returned else f"own({self.name[i]})"
            returned.add(owner)
            texts.append(text)
        self.line(f"return ({', '.join(texts)}{',' if texts else ''})")

    def parts(self, parts: Sequence[Sequence[Step]]) -> list[str]:
        """Write a function for each part of a long plan; returns the lines that call them.

        A part takes the dynamic values that it reads and returns those that later parts read. The
        time that CPython takes to compile a function grows faster than its length.
        """
        local = {i for i, slot in enumerate(self.plan.slots) if slot.kind is Kind.DYNAMIC}
        used = [{i for step in part for i in _used(step)} & local for part in parts]
        made = [{i for step in part for i in step.outputs} & local for part in parts]
        later = [set(self.plan.outputs) & local]
        for reads in reversed(used[1:]):
            later.append(later[-1] | reads)
        later.reverse()
        calls = []
        held: set[int] = set()
        for n, part in enumerate(parts):
            arguments = ", ".join(["control", *(self.name[i] for i in sorted(used[n] - made[n]))])
            leaving = sorted(made[n] & later[n])
            leave = [self.name[i] for i in leaving]
            self.line(f"def part{n}({arguments}):")
            self.indent += 1
            self.block(part, leaving)
            self.line(f"return ({', '.join(leave)}{',' if leave else ''})")
            self.indent -= 1
            self.line("")
            targets = f"{', '.join(leave)}{',' if len(leave) == 1 else ''} = " if leave else ""
            calls.append(f"{targets}part{n}({arguments})")
            held.update(leaving)
            dead = sorted(held - later[n])
            held.difference_update(dead)
            if dead:
                calls.append(f"del {', '.join(self.name[i] for i in dead)}")
        return calls

    def block(self, steps: Sequence[Step], kept: Sequence[int]) -> None:
        """The steps of one block; dynamic values are released after their last use in it."""
        last = self.last_uses(steps, kept)
        for i, step in enumerate(steps):
            if step.control:
                self.control(step)
            else:
                self.kernel(step)
            dead = last.get(i)
            if dead:
                self.line(f"del {', '.join(self.name[s] for s in dead)}")

    def last_uses(self, steps: Sequence[Step], kept: Sequence[int]) -> dict[int, list[int]]:
        slots = self.plan.slots
        last: dict[int, int] = {}
        for i, step in enumerate(steps):
            for slot in step.outputs:
                # A loop's alternating buffers have names of their own, which stay.
                given = step.into and slot >= 0 and bool(slots[slot].roots)
                if slot >= 0 and slots[slot].kind is Kind.DYNAMIC and not given:
                    last[slot] = i
            for slot in _used(step):
                if slot in last:
                    last[slot] = i
        dead: dict[int, list[int]] = {}
        for slot, i in last.items():
            if slot not in kept:
                dead.setdefault(i, []).append(slot)
        return dead

    def kernel(self, step: Step) -> None:
        self.check(step)
        call = self.binder.calls[id(step)]
        comment = _comment(step)
        if step.into:
            self.line(call, step, comment)
            return
        outputs = [self.name[i] if i >= 0 else "_" for i in step.outputs]
        if len(outputs) == 1 and step.outputs[0] >= 0:
            kind = self.plan.slots[step.outputs[0]].type
            # Ufuncs return scalars, not arrays, where all their inputs have rank 0.
            if isinstance(kind, TensorType) and not kind.shape:
                call = f"asarray({call})"
        self.line(f"{', '.join(outputs) or '_'} = {call}", step, comment)

    def check(self, step: Step) -> None:
        """A look at the control, where enough work has gone by."""
        self.work += flops(step.node)
        if self.work > _CHECK_EVERY:
            self.work = 0
            self.stop_check(step)

    def stop_check(self, step: Step) -> None:
        self.line("if control.stopped: control.stop()", step)

    # Control flow.

    def control(self, step: Step) -> None:
        name = step.node.op.name
        if name == "If":
            self.branches(step)
            return
        self.loops += 1
        if self.loops > _MOST_NESTED_LOOPS:
            raise LimitExceeded(
                f"{step.node.origin or step.node.name}: more than {_MOST_NESTED_LOOPS} loops nest"
            )
        {"Loop": self.loop, "Scan": self.scan, "SequenceMap": self.sequence_map}[name](step)
        self.loops -= 1

    def condition(self, slot: int) -> str:
        kind = self.plan.slots[slot].type
        single = isinstance(kind, TensorType) and kind.shape is not None and kind.static
        if single and all(dim == 1 for dim in kind.dims):  # type: ignore[union-attr]
            return self.name[slot]
        return f"truth({self.name[slot]})"

    def branches(self, step: Step) -> None:
        self.line(f"if {self.condition(step.inputs[0])}:", step, _comment(step))
        for keyword, block in zip(("", "else:"), step.blocks, strict=True):
            if keyword:
                self.line(keyword)
            self.indent += 1
            before = len(self.lines)
            work = self.work
            self.block(block.steps, block.outputs)
            self.work = max(work, self.work)
            pairs = [
                (self.name[result], self.name[value])
                for result, value in zip(step.outputs, block.outputs, strict=False)
                if result >= 0
            ]
            self.assign(pairs, step)
            if len(self.lines) == before:
                self.line("pass")
            self.indent -= 1

    def assign(self, pairs: Sequence[tuple[str, str]], step: Step) -> None:
        """All of the assignments at once: no right-hand side sees a new value."""
        pairs = [(target, value) for target, value in pairs if target != value]
        if pairs:
            targets = ", ".join(target for target, _ in pairs)
            self.line(f"{targets} = {', '.join(value for _, value in pairs)}", step)

    def loop(self, step: Step) -> None:
        limit, condition = step.inputs[0], step.inputs[1]
        block = step.blocks[0]
        slots = self.plan.slots
        guarded = condition >= 0 and not _is_true(slots[condition])
        trips = "count()" if limit < 0 else f"range(scalar({self.name[limit]}))"
        constant = slots[limit].const if limit >= 0 else None
        if constant is not None:
            trips = f"range({scalar(constant)})"
        self.line(f"# {_comment(step)}")
        scans = self.begin_scans(step, [0] * len(step.outputs), [0] * len(step.outputs))
        self.begin_carries(step)
        if guarded:
            self.line(f"if {self.condition(condition)}:", step)
            self.indent += 1
        i = f"i{self.loops}"
        self.line(f"for {i} in {trips}:", step)
        self.indent += 1
        self.loop_top(step, i)
        read = _reads(block)
        if block.inputs[0] in read:
            self.line(f"{self.name[block.inputs[0]]} = array({i}, int64)", step)
        if block.inputs[1] in read:
            self.line(f"{self.name[block.inputs[1]]} = true", step)
        self.block(block.steps, block.outputs)
        self.collect(step, scans, block.outputs[1 + len(step.carries) :], i)
        self.carry(step)
        proceed = block.outputs[0]
        if proceed != block.inputs[1] and not _is_true(slots[proceed]):
            self.line(f"if not {self.condition(proceed)}: break", step)
        self.indent -= 2 if guarded else 1
        self.finish(step, scans)

    def scan(self, step: Step) -> None:
        block, layout = step.blocks[0], ScanLayout(step.node)
        n = len(step.carries)
        self.line(f"# {_comment(step)}")
        views = []
        sources = zip(step.inputs[n:], layout.input_axes, layout.input_backward, strict=True)
        for inner, (source, axis, backward) in zip(block.inputs[n:], sources, strict=True):
            view = f"x{inner}"
            self.line(f"{view} = rows_of({self.name[source]}, {axis}, {backward})", step)
            views.append((self.name[inner], view))
        axes, backward_flags = layout.output_axes, layout.output_backward
        scans = self.begin_scans(step, [0] * n + axes, [0] * n + backward_flags)
        self.begin_carries(step)
        i = f"i{self.loops}"
        lengths = ", ".join(view for _, view in views)
        self.line(f"for {i} in range(same_length({lengths})):", step)
        self.indent += 1
        self.loop_top(step, i)
        for name, view in views:
            self.line(f"{name} = {view}[{i}, ...]", step)
        self.block(block.steps, block.outputs)
        self.collect(step, scans, block.outputs[n:], i)
        self.carry(step)
        self.indent -= 1
        self.finish(step, scans)

    def sequence_map(self, step: Step) -> None:
        block = step.blocks[0]
        self.line(f"# {_comment(step)}")
        for slot in step.outputs:
            if slot >= 0:
                self.line(f"{self.name[slot]} = []")
        i = f"i{self.loops}"
        self.line(f"for {i} in range(len({self.name[step.inputs[0]]})):", step)
        self.indent += 1
        self.loop_top(step, i)
        for source, inner in zip(step.inputs, block.inputs, strict=True):
            self.line(f"{self.name[inner]} = element_of({self.name[source]}, {i})", step)
        self.block(block.steps, block.outputs)
        for slot, value in zip(step.outputs, block.outputs, strict=True):
            if slot >= 0:
                self.line(f"{self.name[slot]}.append(own({self.name[value]}))", step)
        self.indent -= 1

    def loop_top(self, step: Step, i: str) -> None:
        self.stop_check(step)
        if self.max_iterations is not None:
            self.line(f"if {i} >= {self.max_iterations}: too_many({self.max_iterations})", step)

    def begin_carries(self, step: Step) -> None:
        pairs = []
        for carry in step.carries:
            pairs.append((self.name[carry.inside], self.name[carry.initial]))
            if carry.buffers is not None:
                pairs.append((self.target(carry), self.name[carry.buffers[0]]))
                pairs.append((f"s{carry.inside}", self.name[carry.buffers[1]]))
        self.assign(pairs, step)

    def target(self, carry: Any) -> str:
        """The variable that holds the buffer which the running iteration may write."""
        return self.name[carry.updated] if carry.direct else f"t{carry.inside}"

    def carry(self, step: Step) -> None:
        pairs = []
        for carry in step.carries:
            inside, updated = self.name[carry.inside], self.name[carry.updated]
            if carry.buffers is not None:
                target, spare = self.target(carry), f"s{carry.inside}"
                if not carry.direct:
                    self.line(f"copyto({target}, {updated})", step)
                pairs += [(inside, target), (target, spare), (spare, target)]
            elif carry.updated != carry.inside:
                owned = self.plan.slots[carry.updated].owned
                pairs.append((inside, updated if owned else f"own({updated})"))
        self.assign(pairs, step)

    def begin_scans(
        self, step: Step, axes: Sequence[int], backward: Sequence[int]
    ) -> list[tuple[int, int, int]]:
        """Where each iteration's rows go: into the whole result if its shape is known."""
        scans = []
        for k, slot in enumerate(step.outputs):
            if k < len(step.carries):
                continue
            scans.append((slot, axes[k], backward[k]))
            if slot < 0:
                continue
            kind = self.plan.slots[slot].type
            if _known(kind):
                name = f"k{slot}"
                self.binder.namespace[name] = (kind.dims, kind.dtype)  # type: ignore[union-attr]
                self.line(f"{self.name[slot]} = empty(*{name})", step)
                whole = f"rows_of({self.name[slot]}, {axes[k]}, {backward[k]})"
                self.line(f"r{slot} = {whole}", step)
            else:
                self.line(f"r{slot} = []", step)
        return scans

    def collect(
        self, step: Step, scans: Sequence[tuple[int, int, int]], rows: Sequence[int], i: str
    ) -> None:
        for (slot, _, _), row in zip(scans, rows, strict=True):
            if slot < 0:
                continue
            value = self.name[row]
            if _known(self.plan.slots[slot].type):
                self.line(f"r{slot}[{i}] = {value}", step)
            else:
                text = value if self.plan.slots[row].owned else f"own({value})"
                self.line(f"r{slot}.append({text})", step)

    def finish(self, step: Step, scans: Sequence[tuple[int, int, int]]) -> None:
        pairs = [
            (self.name[carry.result], self.name[carry.inside])
            for carry in step.carries
            if carry.result >= 0
        ]
        self.assign(pairs, step)
        for slot, axis, backward in scans:
            if slot >= 0 and not _known(self.plan.slots[slot].type):
                name = f"k{slot}"
                self.binder.namespace[name] = _row_type(self.plan.slots[slot].type, axis)
                rows = f"stack(r{slot}, {axis}, {backward}, {name})"
                self.line(f"{self.name[slot]} = {rows}", step)


def _used(step: Step) -> list[int]:
    """The slots that a step or anything in its blocks reads."""
    used = list(step.inputs)
    stack_ = list(step.blocks)
    while stack_:
        block = stack_.pop()
        used.extend(block.outputs)
        for inner in block.steps:
            used.extend(inner.inputs)
            used.extend(carry.initial for carry in inner.carries)
            stack_.extend(inner.blocks)
    return used


def _reads(block: Block) -> set[int]:
    used = set(block.outputs[1:])
    for step in block.steps:
        used.update(_used(step))
    return used


def _comment(step: Step) -> str:
    node = step.node
    return node.origin.replace("\n", " ") or node.name or node.op.name


def _is_true(slot: Slot) -> bool:
    return slot.const is not None and bool(np.all(slot.const))


def _known(kind: Type) -> bool:
    return isinstance(kind, TensorType) and kind.static


def _row_type(kind: Type, axis: int) -> TensorType:
    if not isinstance(kind, TensorType):
        return TensorType()
    if kind.shape is None:
        return TensorType(kind.dtype)
    axis %= len(kind.shape)
    return TensorType(kind.dtype, kind.shape[:axis] + kind.shape[axis + 1 :])


def own(value: Any) -> Any:
    """``value`` in memory that nobody else refers to."""
    if isinstance(value, np.ndarray):
        return value.copy()
    return list(value) if isinstance(value, list) else value


def rows_of(array: np.ndarray, axis: int, backward: int) -> np.ndarray:
    """A view of ``array`` whose first axis is ``axis``, in the direction asked for."""
    if not -array.ndim <= axis < array.ndim:
        raise ShapeError(f"scan axis {axis} is out of range for shape {array.shape}")
    view = np.moveaxis(array, axis, 0) if axis else array
    return view[::-1] if backward else view


def same_length(*arrays: np.ndarray) -> int:
    """The number of rows that all scanned inputs have."""
    lengths = {len(array) for array in arrays}
    if len(lengths) != 1:
        raise ShapeError(f"Scan's inputs have different lengths {sorted(lengths)}")
    return lengths.pop()


def too_many(limit: int) -> None:
    """Stop a loop at the bound on iterations."""
    raise LimitExceeded(f"a loop passed the limit of {limit} iterations (Limits.max_iterations)")


_HELPERS: dict[str, Any] = {
    "__builtins__": {"range": range, "len": len},
    "array": np.array,
    "asarray": np.asarray,
    "copyto": np.copyto,
    "count": count,
    "element_of": element_of,
    "empty": np.empty,
    "int64": np.int64,
    "own": own,
    "rows_of": rows_of,
    "same_length": same_length,
    "scalar": scalar,
    "stack": stack,
    "too_many": too_many,
    "true": np.array(True),
    "truth": truth,
}
