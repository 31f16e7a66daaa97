"""A plan as Python: straight-line calls of bound kernels, control flow as itself.

All of it is one function, ``run``; or each task is one, ``t0``, ``t1`` and so on (``tasks.py``).
One that steps aside is a generator, which yields the number of each block where it must run, and
the complement (``~k``) of each signal that it needs and that has not been emitted: ``S`` says which
have been, ``emit`` emits one. A task whose steps run on a device calls them through a stream of it,
``d``, and a signal it emits is an event there, which a task of the host yields where it must wait
for that.

The text is made once for a plan, and refers to arrays and kernels by name (``binding.py``); each
arena gets a namespace of its own in which the same code runs, so that any number of runs go on at
once. Local variables: ``v`` values known only during the run; for each loop ``i`` its iteration,
``t`` and ``s`` the buffers that a carried value may use in this iteration and in the next, ``x``
scanned inputs and ``r`` collected rows.
"""

from __future__ import annotations

import linecache
import weakref
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import count
from types import CodeType
from typing import Any

from penstock.codegen.namespace import Binder
from penstock.errors import LimitExceeded
from penstock.ops.onnx.control_flow import ScanLayout, row_type
from penstock.ops.work_estimate import flops
from penstock.plan.arena_layout import ArenaPlan
from penstock.plan.plan import Block, Carry, Plan, SlotKind, Step, walk
from penstock.plan.tasks import NO_SIGNALS, Tasks
from penstock.types import MapType, SequenceType, TensorType, Type

# Estimated operations between two looks at the control: a few milliseconds of NumPy on one core.
_CHECK_EVERY = 50_000_000
# What a step of unknown shapes is taken for.
_UNKNOWN_WORK = 1_000_000
# What a line of a program takes in memory, with its step, its slots and its graph.
_LINE_BYTES = 1500
# CPython compiles at most 20 nested loops, and 100 levels of indentation.
_MOST_NESTED_LOOPS = 18
_MOST_LEVELS = 90

_SERIAL = count()


@dataclass(frozen=True, eq=False)
class Program:
    """Generated code.

    ``steps[i]`` is the step that line ``i + 1`` of ``source`` runs, if any. ``constants`` are names
    in it that mean the same in every arena.
    """

    source: str
    filename: str
    code: CodeType
    steps: tuple[Step | None, ...]
    constants: dict[str, Any]

    @property
    def nbytes(self) -> int:
        """About what plan and program take in memory."""
        return _LINE_BYTES * len(self.steps)


def generate(
    plan: Plan,
    arena_plan: ArenaPlan,
    binder: Binder,
    max_iterations: int | None,
    *,
    tasks: Tasks | None = None,
    observed: bool = False,
) -> Program:
    """The program of a plan, from the names that a first arena was given.

    Without ``tasks`` it is one function, ``run(control, *inputs) -> outputs``. With them each is a
    function ``t<number>(control, V)``, with ``S`` and ``emit`` where there are signals, and
    ``results(V)`` gives the outputs. In a program that is ``observed`` each step stands between
    calls of the control's observer.
    """
    writer = _Writer(plan, binder, max_iterations, observed)
    if tasks is None:
        writer.function([plan.steps[i] for i in arena_plan.order])
    else:
        writer.functions(tasks)
    source = "\n".join(writer.lines) + "\n"
    filename = f"<penstock {_one_line(plan.name) or 'graph'} {next(_SERIAL)}>"
    code = compile(source, filename, "exec", dont_inherit=True, optimize=2)
    program = Program(source, filename, code, tuple(writer.steps), writer.constants)
    # Tracebacks through the generated code show its lines, for as long as it is there.
    linecache.cache[filename] = (len(source), None, source.splitlines(True), filename)
    weakref.finalize(program, linecache.cache.pop, filename, None).atexit = False
    return program


class _Writer:
    def __init__(
        self, plan: Plan, binder: Binder, max_iterations: int | None, observed: bool
    ) -> None:
        self.slots = plan.slots
        self.plan = plan
        self.calls = binder.calls
        self.name = binder.names
        self.max_iterations = max_iterations
        self.observed = observed
        self.shared: frozenset[int] = frozenset()
        # Whether some values have their dims in another order in memory, and so may outputs.
        self.ordered = any(slot.kind is SlotKind.ARENA and slot.strides for slot in plan.slots)
        self.tasks: Tasks | None = None
        self.signals = NO_SIGNALS
        # The stream of a device that the task at hand puts its steps on, by name.
        self.device = ""
        self.constants: dict[str, Any] = {}
        self.checks: dict[Any, str] = {}
        self.lines: list[str] = []
        self.steps: list[Step | None] = []
        self.indent = 0
        self.loops = 0
        self.work = 0

    def line(self, text: str, step: Step | None = None, comment: str = "") -> None:
        text = "    " * self.indent + text
        self.lines.append(f"{text:<60}  # {comment}" if comment else text)
        self.steps.append(step)

    def names(self, slots: Iterable[int]) -> str:
        return ", ".join([self.name[i] for i in slots])

    def function(self, steps: Sequence[Step]) -> None:
        plan = self.plan
        self.line(f"def run({', '.join(['control', *[self.name[i] for i in plan.inputs]])}):")
        self.indent += 1
        for i in plan.inputs:
            slot = self.slots[i]
            self.line(f"# {self.name[i]}: {_one_line(f'{slot.name!r}, {slot.type}')}")
        self.block(steps, plan.outputs)
        self.results()
        self.indent -= 1

    def functions(self, tasks: Tasks) -> None:
        """Each task as a function, and one for the outputs."""
        self.shared = tasks.shared
        self.tasks, self.signals = tasks, tasks.signals
        parameters = "control, V, S, emit" if tasks.signals.count else "control, V"
        for number, task in enumerate(tasks.tasks):
            self.line(f"def t{number}({parameters}):")
            self.indent += 1
            self.work = 0
            self.device = f"d{number}" if number in self.signals.devices else ""
            self.block(task.steps, (), tasks.releases[number])
            if self.device:
                # What comes behind the block knows nothing of its signals.
                self.line(f"e = {self.device}.record()")
                self.line("if not e.query(): yield e")
            self.indent -= 1
        self.line("def results(V):")
        self.indent += 1
        self.results()
        self.indent -= 1

    def results(self) -> None:
        """Hand out the outputs, as copies where others know their memory."""
        returned: set[int] = set()
        texts = []
        for i in self.plan.outputs:
            slot = self.slots[i]
            holder = slot.base if slot.base >= 0 else i
            kept = slot.owned and holder not in returned
            text = self.name[i] if kept else f"unshared({self.name[i]})"
            texts.append(f"contiguous({text})" if self.ordered else text)
            returned.add(holder)
        self.line(f"return ({', '.join(texts)}{',' if texts else ''})")

    # Steps.

    def block(
        self, steps: Sequence[Step], kept: Iterable[int], released: Iterable[int] = ()
    ) -> None:
        """The steps of one block; dynamic values are released after their last use in it.

        ``kept`` are those that somebody behind the block asks for, ``released`` those that nobody
        else does, although they were made elsewhere.
        """
        dead = self.last_uses(steps, set(kept), released)
        for i, step in enumerate(steps):
            for signal in self.signals.waits.get(step, ()):
                self.wait(signal)
            if step.control:
                self.control(step)
            else:
                self.kernel(step)
            if i in dead:
                self.forget(dead[i])
            for signal in self.signals.emits.get(step, ()):
                event = f", {self.device}.record()" if self.device else ""
                self.line(f"emit({signal}{event})")

    def wait(self, signal: int) -> None:
        """Lines that wait for a signal, and for what an event stands for."""
        self.line(f"if not S[{signal}]: yield ~{signal}")
        if signal in self.signals.events:
            if self.device:
                self.line(f"{self.device}.wait(S[{signal}])")
            else:
                self.line(f"if not S[{signal}].query(): yield S[{signal}]")

    def forget(self, slots: Sequence[int]) -> None:
        """Release dynamic values."""
        if self.observed:
            counted = [i for i in slots if self.slots[i].owned and self.slots[i].base < 0]
            if counted:
                self.line(f"freed(control, {self.names(counted)})")
        local = [i for i in slots if i not in self.shared]
        if local:
            self.line(f"del {self.names(local)}")
        shared = [self.name[i] for i in slots if i in self.shared]
        if shared:
            self.line(f"{' = '.join(shared)} = None")

    def made(self, step: Step) -> list[int]:
        """The outputs of a step that are variables of their own.

        What it writes into one of a loop's alternating buffers is not: the loop names these.
        """
        return [
            i
            for i in step.outputs
            if i >= 0
            and self.slots[i].kind is SlotKind.DYNAMIC
            and not (step.into and self.slots[i].roots)
        ]

    def last_uses(
        self, steps: Sequence[Step], kept: set[int], released: Iterable[int]
    ) -> dict[int, list[int]]:
        """What can be released after which of ``steps``."""
        last: dict[int, int] = dict.fromkeys(released, 0)
        for i, step in enumerate(steps):
            for slot in self.made(step):
                if slot not in self.shared:
                    last[slot] = i
            for slot in _reads(step):
                if slot in last:
                    last[slot] = i
        dead: dict[int, list[int]] = {}
        for slot, i in last.items():
            if slot not in kept:
                dead.setdefault(i, []).append(slot)
        return dead

    def kernel(self, step: Step) -> None:
        self.work += flops(step.node) or _UNKNOWN_WORK
        if self.work > _CHECK_EVERY:
            self.work = 0
            self.stop_check(step)
        call = self.calls[step]
        if self.device:
            name, _, arguments = call.partition("(")
            call = f"{self.device}.call({name}, {arguments}"
        self.begin_step(step)
        if step.into:
            check = step.kernel.check if step.kernel is not None else None
            if check is not None:
                name = self.checks.setdefault(check, f"check{len(self.checks)}")
                self.constants[name] = check
                call = f"if status := {call}: {name}(status)"
            self.line(call, step, _comment(step))
            self.end_step(step)
            return
        kinds = [self.slots[i].type for i in step.outputs if i >= 0]
        if any(_may_be_scalar(kind) for kind in kinds):
            call = f"array_of({call})" if len(step.outputs) == 1 else f"map(array_of, {call})"
        targets = [self.name[i] if i >= 0 else "_" for i in step.outputs]
        self.line(f"{', '.join(targets) or '_'} = {call}", step, _comment(step))
        if "_" in targets:
            self.line("del _")
        self.end_step(step)

    def begin_step(self, step: Step) -> None:
        if self.observed:
            self.tell("began", step, step.inputs)

    def end_step(self, step: Step) -> None:
        if self.observed:
            self.tell("ended", step, step.outputs)

    def tell(self, what: str, step: Step, slots: Sequence[int]) -> None:
        """A line that tells the observer of ``step``."""
        name = f"n{len(self.steps)}"
        self.constants[name] = step
        self.line(
            f"{what}({', '.join(['control', name, *map(self.name.__getitem__, slots)])})", step
        )

    def stop_check(self, step: Step) -> None:
        self.line("if control.stopped: control.stop()", step)

    # Control flow.

    def control(self, step: Step) -> None:
        if self.indent > _MOST_LEVELS:
            raise LimitExceeded(f"{step.node.label}: more than {_MOST_LEVELS} branches nest")
        name = step.node.op.name
        self.begin_step(step)
        if name == "If":
            self.branches(step)
            self.end_step(step)
            return
        self.loops += 1
        if self.loops > _MOST_NESTED_LOOPS:
            raise LimitExceeded(f"{step.node.label}: more than {_MOST_NESTED_LOOPS} loops nest")
        self.line(f"# {_comment(step)}")
        {"Loop": self.loop, "Scan": self.scan, "SequenceMap": self.sequence_map}[name](step)
        self.loops -= 1
        self.end_step(step)

    def body(self, step: Step, number: int = 0) -> None:
        """The steps of a block in their place, or of an expanded step, the block's number."""
        block = step.blocks[number]
        expanded = self.tasks.expanded.get(step) if self.tasks is not None else None
        if expanded:
            self.line(f"yield {expanded[number]}")
        else:
            self.block(block.steps, block.outputs)

    def condition(self, slot: int) -> str:
        kind = self.slots[slot].type
        single = isinstance(kind, TensorType) and kind.static and set(kind.dims) <= {1}
        return self.name[slot] if single else f"truth({self.name[slot]})"

    def is_true(self, slot: int) -> bool:
        """Whether a condition is a constant that holds."""
        const = self.slots[slot].const
        return const is not None and const.size == 1 and bool(const.all())

    def branches(self, step: Step) -> None:
        self.line(f"if {self.condition(step.inputs[0])}:", step, _comment(step))
        work = self.work
        most = 0
        for number, block in enumerate(step.blocks):
            if number:
                self.line("else:")
            self.indent += 1
            before = len(self.lines)
            self.work = work
            self.body(step, number)
            most = max(most, self.work)
            self.assign(
                [
                    (self.name[result], self.handed(value, result))
                    for result, value in zip(step.outputs, block.outputs, strict=False)
                    if result >= 0
                ],
                step,
            )
            self.release(block)
            if len(self.lines) == before:
                self.line("pass")
            self.indent -= 1
        self.work = most

    def handed(self, value: int, result: int) -> str:
        """What an If makes its result of the value of a branch, as text."""
        return self.owned(value) if self.slots[result].owned else self.name[value]

    def release(self, block: Block) -> None:
        """Forget what the block has handed out under other names."""
        made = {i for step in block.steps for i in self.made(step)}
        handed = [i for i in dict.fromkeys(block.outputs) if i in made]
        if handed:
            self.forget(handed)

    def assign(self, pairs: Iterable[tuple[str, str]], step: Step) -> None:
        """All of the assignments at once: no right-hand side sees a new value."""
        pairs = [(target, value) for target, value in pairs if target != value]
        if pairs:
            targets = ", ".join([target for target, _ in pairs])
            self.line(f"{targets} = {', '.join([value for _, value in pairs])}", step)

    def loop(self, step: Step) -> None:
        limit, condition = step.inputs[:2]
        (block,) = step.blocks
        number, true = block.inputs[:2]
        scans = [(slot, 0, 0) for slot in step.outputs[len(step.carries) :]]
        self.begin(step, scans)
        guarded = condition >= 0 and not self.is_true(condition)
        if guarded:
            self.line(f"if {self.condition(condition)}:", step)
            self.indent += 1
        trips = "count()" if limit < 0 else f"range(scalar({self.name[limit]}))"
        i = self.iterate(step, trips)
        proceed = block.outputs[0]
        read = {i for each in block.steps for i in _reads(each)}
        read.update(block.outputs if proceed != true else block.outputs[1:])
        if number in read:
            self.line(f"{self.name[number]} = array({i}, int64)", step)
        if true in read:
            self.line(f"{self.name[true]} = true", step)
        self.body(step)
        self.collect(step, scans, block.outputs[1 + len(step.carries) :], i)
        test = "" if proceed == true or self.is_true(proceed) else self.condition(proceed)
        if test and any(proceed in (carry.inside, carry.updated) for carry in step.carries):
            # Its name will mean the next iteration's value.
            self.line(f"go{self.loops} = {test}", step)
            test = f"go{self.loops}"
        self.iterated(block)
        self.carry(step)
        if test:
            self.line(f"if not {test}: break", step)
        self.indent -= 2 if guarded else 1
        self.finish(step, scans)

    def scan(self, step: Step) -> None:
        (block,) = step.blocks
        layout = ScanLayout(step.node)
        n = len(step.carries)
        views = []
        sources = zip(step.inputs[n:], layout.input_axes, layout.input_backward, strict=True)
        for inner, (source, axis, backward) in zip(block.inputs[n:], sources, strict=True):
            view = f"x{inner}"
            self.line(f"{view} = rows_of({self.name[source]}, {axis}, {backward})", step)
            views.append(view)
        outputs = (step.outputs[n:], layout.output_axes, layout.output_backward)
        scans = list(zip(*outputs, strict=True))
        self.begin(step, scans)
        i = self.iterate(step, f"range(same_length({', '.join(views)}))")
        for inner, view in zip(block.inputs[n:], views, strict=True):
            self.line(f"{self.name[inner]} = {view}[{i}, ...]", step)
        self.body(step)
        self.collect(step, scans, block.outputs[n:], i)
        self.iterated(block)
        self.carry(step)
        self.indent -= 1
        self.finish(step, scans, views)

    def sequence_map(self, step: Step) -> None:
        (block,) = step.blocks
        for slot in step.outputs:
            if slot >= 0:
                self.line(f"{self.name[slot]} = []")
        i = self.iterate(step, f"range(len({self.name[step.inputs[0]]}))")
        for source, inner in zip(step.inputs, block.inputs, strict=True):
            self.line(f"{self.name[inner]} = element_of({self.name[source]}, {i})", step)
        self.body(step)
        for slot, value in zip(step.outputs, block.outputs, strict=True):
            if slot >= 0:
                self.line(f"{self.name[slot]}.append({self.owned(value)})", step)
        self.iterated(block)
        self.indent -= 1
        self.finish(step, ())

    def iterate(self, step: Step, trips: str) -> str:
        """The head of a loop; returns the name of the iteration's number."""
        i = f"i{self.loops}"
        self.line(f"for {i} in {trips}:", step)
        self.indent += 1
        self.stop_check(step)
        most = self.max_iterations
        if most is not None:
            self.line(f"if {i} >= {most}: too_many({most}, {step.node.label!r})", step)
        return i

    def iterated(self, block: Block) -> None:
        """Tell the observer that what an iteration hands on is no longer its own."""
        if self.observed:
            made = {i for step in block.steps for i in self.made(step)}
            handed = [i for i in dict.fromkeys(block.outputs) if i in made]
            counted = [i for i in handed if self.slots[i].owned and self.slots[i].base < 0]
            if counted:
                self.line(f"freed(control, {self.names(counted)})")

    def owned(self, slot: int) -> str:
        """A value that outlives the iteration, as text."""
        kind = self.slots[slot].type
        if self.slots[slot].owned or isinstance(kind, SequenceType | MapType):
            return self.name[slot]
        return f"own({self.name[slot]})"

    # Carried values, and rows that are collected.

    def begin(self, step: Step, scans: Sequence[tuple[int, int, int]]) -> None:
        """Rows go into the whole result if its shape is known, else into a list."""
        for slot, axis, backward in scans:
            if slot < 0:
                continue
            kind = self.slots[slot].type
            if _known(kind):
                self.constants[f"k{slot}"] = (kind.dims, kind.dtype)  # type: ignore[union-attr]
                whole = self.name[slot]
                self.line(f"{whole} = empty(*k{slot})", step)
                self.line(f"r{slot} = rows_of({whole}, {axis}, {backward})", step)
            else:
                self.constants[f"k{slot}"] = row_type(kind, axis)
                self.line(f"r{slot} = []", step)
        pairs = []
        for carry in step.carries:
            pairs.append((self.name[carry.inside], self.name[carry.initial]))
            if carry.buffers is not None:
                pairs.append((self.target(carry), self.name[carry.buffers[0]]))
                pairs.append((f"s{carry.inside}", self.name[carry.buffers[1]]))
        self.assign(pairs, step)

    def target(self, carry: Carry) -> str:
        """The variable that holds the buffer which the running iteration may write."""
        return self.name[carry.updated] if carry.direct else f"t{carry.inside}"

    def carry(self, step: Step) -> None:
        pairs = []
        for carry in step.carries:
            inside = self.name[carry.inside]
            if carry.buffers is not None:
                target, spare = self.target(carry), f"s{carry.inside}"
                if not carry.direct:
                    self.line(f"copyto({target}, {self.name[carry.updated]})", step)
                pairs += [(inside, target), (target, spare), (spare, target)]
            elif carry.updated != carry.inside:
                pairs.append((inside, self.owned(carry.updated)))
        self.assign(pairs, step)

    def collect(
        self, step: Step, scans: Sequence[tuple[int, int, int]], rows: Sequence[int], i: str
    ) -> None:
        for (slot, _, _), row in zip(scans, rows, strict=True):
            if slot < 0:
                continue
            if _known(self.slots[slot].type):
                self.line(f"r{slot}[{i}] = {self.name[row]}", step)
            else:
                self.line(f"r{slot}.append({self.owned(row)})", step)

    def finish(
        self, step: Step, scans: Sequence[tuple[int, int, int]], views: Sequence[str] = ()
    ) -> None:
        """Hand out the results, and forget what the iterations worked with."""
        for carry in step.carries:
            if carry.buffers is not None and carry.result >= 0:
                inside, buffer = self.name[carry.inside], self.name[carry.buffers[0]]
                text = f"if {inside} is {self.name[carry.initial]}:"
                self.line(f"{text} {inside} = copied({buffer}, {inside})", step)
        self.assign(
            [
                (self.name[carry.result], self.name[carry.inside])
                for carry in step.carries
                if carry.result >= 0
            ],
            step,
        )
        held = list(views)
        for slot, axis, backward in scans:
            if slot < 0:
                continue
            if not _known(self.slots[slot].type):
                rows = f"stack(r{slot}, {axis}, {backward}, k{slot})"
                self.line(f"{self.name[slot]} = {rows}", step)
            held.append(f"r{slot}")
        (block,) = step.blocks
        buffered = {carry.inside for carry in step.carries if carry.buffers}
        made = {i for each in block.steps for i in self.made(each)}
        entered = block.inputs[2:] if step.node.op.name == "Loop" else block.inputs
        held += [
            self.name[i]
            for i in dict.fromkeys((*entered, *(i for i in block.outputs if i in made)))
            if i not in buffered
        ]
        if held:
            # Of no iterations at all, some have no value yet.
            self.line(f"{' = '.join(held)} = None")


def _reads(step: Step) -> set[int]:
    """The slots that a step reads; those that its blocks make are not among them."""
    found = set(step.inputs)
    if step.blocks:
        made: set[int] = set()
        for each in walk((step,)):
            found.update(each.inputs)
            if each is not step:
                made.update(each.outputs)
            for block in each.blocks:
                found.update(block.outputs)
                made.update(block.inputs)
        found -= made
    found.discard(-1)
    return found


def _comment(step: Step) -> str:
    node = step.node
    return _one_line(node.origin or node.name or node.op.name)


def _one_line(text: str) -> str:
    """``text`` without anything that would end a comment: names come from files."""
    if text.isprintable():
        return text
    return "".join([c if c.isprintable() else ascii(c)[1:-1] for c in text])


def _known(kind: Type) -> bool:
    return isinstance(kind, TensorType) and kind.static


def _may_be_scalar(kind: Type) -> bool:
    """Whether NumPy may have returned a scalar for a value of this type."""
    return not isinstance(kind, TensorType) or not kind.shape
