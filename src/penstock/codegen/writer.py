"""A plan as a program: straight-line calls of bound kernels, control flow as Python's own.

The text is written once for a plan, from the plan and its arena plan alone, before any memory
exists; it names arrays and kernels, which each arena then binds (``names``). All of a plan is one
function, ``run``. The example of ``penstock.plan.plan``:

    >>> from penstock.plan.arena_layout import plan_arena
    >>> program = write_program(plan, plan_arena(plan))
    >>> print(program.source, end="")
    def run(control, v0):
        # v0: 'x', float32[4]
        exp(v0, b1)                                               # Exp
        negative(b1, b1)                                          # Neg
        v4 = add(b1, c3)                                          # Add
        return (v4,)

    >>> (run,) = program.bind(np.empty(program.arena_plan.size, np.uint8))
    >>> run(None, np.zeros(4, np.float32))
    (array([1., 1., 1., 1.], dtype=float32),)

Or each task is a function (``plan.tasks``): ``t0``, ``t1`` and so on, and ``results`` returns the
outputs. A task that may have to wait is a generator. It yields the number of each block that must
run before it goes on, and the complement (``~k``) of each signal that it needs and that has not
been emitted: ``S`` says which have been, ``emit`` emits one. A task whose steps run on a device
calls them through a stream of that device, ``d0``, ``d1`` and so on; a signal that it emits is an
event there, which a task of the host yields where it must wait for that event.
"""

from __future__ import annotations

import linecache
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import count
from types import CodeType, FunctionType
from typing import TYPE_CHECKING, Any

import numpy as np

from penstock.codegen.lifetimes import Allocations, Lifetimes, allocations
from penstock.codegen.names import (
    ProgramMemory,
    ProgramNames,
    TurnedInputs,
    bind_names,
    program_names,
)
from penstock.codegen.sequences import CallSequence
from penstock.codegen.steps import ProgramForm, StepWriter, printable
from penstock.core.checkpoints import checkpoint, with_checkpoints
from penstock.core.limits import DEFAULT_LIMITS, Limits
from penstock.core.records import cached_property, dataclass, field, replace
from penstock.core.types import RunValue
from penstock.host.malloc import LARGEST
from penstock.host.native import FREE_THREADED
from penstock.host.on_demand import imported
from penstock.ir.layout import is_plannable
from penstock.ops.internal.transfer import HOST
from penstock.plan.arena_layout import ArenaPlan
from penstock.plan.plan import Plan, SlotKind, Step, memory_of
from penstock.plan.tasks import Tasks

if TYPE_CHECKING:
    from penstock.codegen.captures import CapturedSteps, CaptureWriter

_write_control_flow = imported("penstock.codegen.control_flow.write_control_flow")
_capture_writer: Callable[[Plan], CaptureWriter] = imported(
    "penstock.codegen.captures.CaptureWriter"
)

# Approximate bytes of a step with its line of a program, its slots and its node; and additional
# bytes of a kernel bound to arrays.
_STEP_BYTES, _BOUND_BYTES = 2500, 6500

# Lines after which further functions are compiled separately.
_MANY_LINES = 2000

_AS_USUAL = ProgramForm()

# Numbers programs in tracebacks; it does not enter their text.
_SERIAL = count()

_CO_NESTED = 0x10  # `inspect.CO_NESTED`, without importing that


@dataclass(frozen=True, eq=False)
class Program:
    """The program of a plan, and what binds it to arenas.

    ``functions`` are the functions that ``source`` defines: ``run``, or each task and ``results``.
    ``steps[i]`` is the step that line ``i + 1`` runs, if any, or those of the ``sequences`` that it
    calls, or of ``captures``, which a graph of a device replays. ``constants`` are the values of
    names in every arena; ``names`` has those that differ between arenas. ``read`` are the names
    that the code refers to.
    """

    plan: Plan
    arena_plan: ArenaPlan
    tasks: Tasks | None
    allocations: Allocations
    limits: Limits
    form: ProgramForm
    names: ProgramNames
    functions: tuple[str, ...]
    source: str
    steps: tuple[Step | Sequence[Step] | None, ...]
    sequences: Mapping[str, CallSequence]
    constants: Mapping[str, Any]
    filename: str
    code: tuple[CodeType, ...]
    read: frozenset[str]
    captures: Mapping[str, CapturedSteps] = field(default_factory=dict)

    @cached_property
    def nbytes(self) -> int:
        """Approximate bytes of plan and program."""
        kernels = [step.kernel for step in self.plan.walk()]
        bound = [k for k in kernels if k is not None and k.binder is not None]
        return _STEP_BYTES * len(kernels) + _BOUND_BYTES * len(bound)

    @cached_property
    def observed(self) -> bool:
        """Whether the program notifies observers of its steps."""
        return self.form.observed

    def with_observers(self, inputs: bool = True) -> Program:
        """Return the program of the same plan that notifies observers of its steps, and of their
        ``inputs``, which reloads weights that kernels hold only in packed form."""
        form = ProgramForm(observed=True, inputs_observed=inputs)
        return write_program(self.plan, self.arena_plan, self.limits, tasks=self.tasks, form=form)

    def with_given(self, outputs: Sequence[int]) -> Program:
        """Return the single-function program of the same plan that takes arrays for these outputs
        after its inputs, and writes into them."""
        form = replace(self.form, given=tuple(outputs))
        return write_program(self.plan, self.arena_plan, self.limits, form=form)

    def remote_arenas(self) -> dict[str, Any]:
        """Return new arenas in device memories, by memory name."""
        backends: Mapping[str, Any] = self.plan.remote
        return {name: backends[name].arena(size) for name, size in self.arena_plan.remote.items()}

    def bind(
        self,
        memory: np.ndarray,
        streams: Mapping[str, Any] | None = None,
        workspaces: Mapping[Step, Any] | None = None,
        remote: Mapping[str, Any] | None = None,
    ) -> list[Callable[..., RunValue]]:
        """Return the ``functions`` bound to the arena ``memory`` (uint8, of the planned size).
        ``streams``: the device streams of tasks' steps, by name; ``workspaces``: their kernels'
        ``workspace=``; ``remote``: the arenas in other memories, by default new ones."""
        remote = self.remote_arenas() if remote is None else remote
        arenas = ProgramMemory(memory, remote, workspaces or {}, on_streams=bool(streams))
        namespace = bind_names(self.plan, self.names, self.sequences, self.read, arenas)
        # Constants of the text are equal in every arena.
        namespace.update(self.constants)
        namespace.update(streams or {})
        for code in self.code:
            exec(code, namespace)
        if self.captures:
            # Bodies have a separate namespace: graphs refer to them.
            names = {f"body_{n}": namespace.pop(f"body_{n}") for n in range(len(self.captures))}
            inner = dict(namespace)
            for (name, steps), body in zip(self.captures.items(), names.values(), strict=True):
                function = FunctionType(body.__code__, inner, body.__name__)
                capture = self.plan.captures[steps.backend]
                namespace[name] = capture(function, steps.fresh, steps)
        # Functions refer to the namespace: a reference back would be a cycle, which keeps them and
        # the arena alive until the next garbage collection.
        return [namespace.pop(name) for name in self.functions]


def _nested(code: CodeType) -> CodeType:
    """Mark code's functions as nested. Free-threaded builds leave others, with all that they refer
    to, to the garbage collector, and those of Python 3.13 never free them."""
    of_functions = (
        c.replace(co_flags=c.co_flags | _CO_NESTED) if isinstance(c, CodeType) else c
        for c in code.co_consts
    )
    return code.replace(co_consts=(*of_functions,))


def write_program(
    plan: Plan,
    arena_plan: ArenaPlan,
    limits: Limits = DEFAULT_LIMITS,
    *,
    tasks: Tasks | None = None,
    form: ProgramForm = _AS_USUAL,
) -> Program:
    """Write and compile the program of a plan, in this ``form``.

    Without ``tasks`` it is one function, ``run(control, *inputs) -> outputs``. With them each is a
    function ``t<number>(control, V)``, with ``S`` and ``emit`` if there are signals, and
    ``results(V)`` returns the outputs. Loops and allocations are within ``limits``. ``run`` takes
    the arrays of the outputs that are given, ``o<number>``, behind the inputs.
    """
    # The order that the offsets were planned for: no other is safe.
    order = [plan.steps[i] for i in arena_plan.order]
    # Steps in one function need no shared list: their values are local variables.
    shared = frozenset() if tasks is None else tasks.shared
    allocated = allocations(plan, arena_plan.size, limits)
    names = program_names(plan, arena_plan, shared, allocated.steps, _turned(plan, tasks, form))
    lifetimes = Lifetimes(plan, order, tasks)
    writer = StepWriter(plan, names, lifetimes, _write_control_flow, tasks, form)
    writer.counts, writer.max_iterations = allocated.counts, limits.max_iterations
    writer.given = _given_slots(plan, form.given)
    captures = None
    if plan.captures and form.capture and not form.observed and tasks is None:
        # Captures exclude observers, which see each step, and tasks, which have separate streams.
        writer.graphs = captures = _capture_writer(plan)
    functions = _write_tasks(writer, tasks) if tasks else _write_run(writer, order)
    for body in () if captures is None else captures.bodies:
        writer.text.append(body)
    lines = writer.text.lines
    filename = f"<penstock {printable(plan.name) or 'graph'} {next(_SERIAL)}>"
    code = tuple(_compiled(lines, filename))
    program = Program(
        plan,
        arena_plan,
        tasks,
        allocated,
        limits,
        form,
        names,
        functions=tuple(functions),
        source="\n".join(lines) + "\n",
        steps=tuple(writer.text.step_of_line),
        sequences=writer.gathering.sequences,
        constants=writer.constants,
        filename=filename,
        code=code,
        read=frozenset[str]().union(*map(_names_in, code)),
        captures={} if captures is None else captures.captures,
    )
    _show_lines(program)
    return program


def _turned(plan: Plan, tasks: Tasks | None, form: ProgramForm) -> TurnedInputs:
    """Find the transposed inputs that kernels read through (``codegen.turned``)."""
    alone = tasks is None and not form.observed and not plan.captures
    fed = (step for step in plan.steps if step.inputs and step.inputs[0] in plan.inputs)
    if not alone or all(step.node.op.name != "Transpose" for step in fed):
        return {}
    from penstock.codegen.turned import turned_inputs  # few plans have such steps

    return turned_inputs(plan)


def _show_lines(program: Program) -> None:
    """Let tracebacks through the program show its lines, for as long as it exists."""
    source, filename = program.source, program.filename
    linecache.cache[filename] = (len(source), None, source.splitlines(True), filename)
    weakref.finalize(program, linecache.cache.pop, filename, None).atexit = False


def _compiled(lines: Sequence[str], filename: str) -> Iterator[CodeType]:
    """Compile a program, a few functions at a time: Python's compiler cannot be interrupted."""
    begin = 0
    for end in range(1, len(lines) + 1):
        if end == len(lines) or (end - begin >= _MANY_LINES and lines[end].startswith("def ")):
            checkpoint()
            # Leading empty lines preserve the line numbers of the whole text.
            source = "\n" * begin + "\n".join(lines[begin:end]) + "\n"
            code = compile(source, filename, "exec", dont_inherit=True, optimize=2)
            yield _nested(code) if FREE_THREADED else code
            begin = end


def _names_in(code: CodeType) -> frozenset[str]:
    """Return the global names in code, and in the functions that it defines."""
    inner = [const for const in code.co_consts if const.__class__ is CodeType]
    return frozenset(code.co_names).union(*map(_names_in, inner))


def _given_slots(plan: Plan, given: Sequence[int]) -> dict[int, str]:
    """Map the slots that steps write directly into caller-provided arrays to the arrays' names."""
    written = {i for step in plan.steps if step.into for i in step.outputs}
    names: dict[int, str] = {}
    for number in given:
        i = plan.outputs[number]
        # Views of other values are copied into the array when the run returns.
        if i in written and plan.slots[i].owned and plan.slots[i].base < 0:
            names.setdefault(i, f"o{number}")
    return names


def _write_run(writer: StepWriter, order: Sequence[Step]) -> list[str]:
    inputs, given = writer.plan.inputs, writer.form.given
    parameters = [*[writer.name[i] for i in inputs], *[f"o{number}" for number in given]]
    writer.line(f"def run({', '.join(['control', *parameters])}):")
    with writer.indented():
        for i in inputs:
            slot = writer.slots[i]
            writer.line(f"# {writer.name[i]}: {printable(f'{slot.name!r}, {slot.type}')}")
        writer.block(order)
        _write_return(writer)
    return ["run"]


def _write_tasks(writer: StepWriter, tasks: Tasks) -> list[str]:
    """Write each task as a function, and one for the outputs; return their names."""
    parameters = "control, V, S, emit" if tasks.signals.count else "control, V"
    for number, task in enumerate(with_checkpoints(tasks.tasks)):
        writer.line(f"def t{number}({parameters}):")
        with writer.indented():
            # The loop over tasks checks for a stop before each.
            writer.work = 0
            writer.block(task.steps)
            for stream in tasks.signals.of_task.get(number, ()):
                end = tasks.signals.overlap.ends.get(stream)
                if end is not None:
                    writer.line(f"S[{end}] = d{stream}.record()")
                    continue
                # The step after the block waits for tasks, but not for their events.
                writer.line(f"e = d{stream}.record()")
                writer.line("if not e.query(): yield e")
    writer.line("def results(V):")
    with writer.indented():
        _write_return(writer)
    return [*(f"t{number}" for number in range(len(tasks.tasks))), "results"]


def _copied_at_once(writer: StepWriter) -> set[int]:
    """Return the outputs that are host arrays of a size that the allocator reuses."""
    steps = [step for step in writer.plan.steps if step.backend in ("native", "numpy")]
    results = {i for step in steps for i in step.outputs}
    found = set()
    for i in writer.plan.outputs:
        slot, roots = writer.slots[i], memory_of(writer.slots, i)
        if not is_plannable(slot.type) or slot.type.nbytes > LARGEST:
            continue
        in_arena = [writer.slots[root].memory for root in roots] == [HOST]
        # Rank 0 is excluded: NumPy's scalars are not arrays.
        if (in_arena and slot.kind is not SlotKind.DYNAMIC) or (i in results and slot.type.dims):
            found.add(i)
    return found


def _orders(writer: StepWriter) -> tuple[bool, set[int]]:
    """Return whether outputs may not be in C order, and the slots of arrays that grow in place."""
    kernels = [(step, step.kernel) for step in writer.plan.steps if step.kernel is not None]
    # Arena slots that are not row-major may have views among the outputs, and kernels of unknown
    # shapes choose an order in the run.
    reordered = bool([1 for s in writer.slots if s.strides and s.kind is SlotKind.ARENA])
    reordered |= bool([1 for _, kernel in kernels if kernel.shapes.cached_bytes is not None])
    # Arrays that grow in place are not views, and have spare capacity after each row.
    growing = [step for step, kernel in kernels if kernel.memory.capacity_bytes]
    return reordered, {i for step in growing for i in step.outputs}


def _write_return(writer: StepWriter) -> None:
    """Write the return of the outputs, as copies where they share memory with others."""
    reordered, grown = _orders(writer)
    returned: set[int] = set()
    texts, at_once = [], _copied_at_once(writer)
    for number, i in enumerate(writer.plan.outputs):
        slot = writer.slots[i]
        resident_in = slot.base if slot.base >= 0 else i
        if number in writer.form.given:
            name = f"o{number}"
            direct = writer.given.get(i) == name
            texts.append(name if direct else f"copied({name}, {writer.name[i]})")
            returned.add(resident_in)
            continue
        # The caller owns the outputs: none may change when another is written, or when the arena is
        # reused.
        kept = slot.owned and resident_in not in returned
        kept |= writer.plan.inner and not memory_of(writer.slots, i)
        returned.add(resident_in)
        if not kept and i in at_once:
            texts.append(f"copy({writer.name[i]})")
            continue
        text = writer.name[i] if kept else f"unshared({writer.name[i]})"
        texts.append(f"contiguous({text})" if reordered and i not in grown else text)
    if [text for text in texts if text.startswith("copy(")]:
        # Most runs have no memory budget, and charging it takes as long as a small copy.
        writer.line("copy = in_c_order if THREAD.run is None else unshared")
    writer.line(f"return ({', '.join(texts)}{',' if texts else ''})")
