"""Code generation for If, Loop, Scan and SequenceMap as Python control flow, with inline blocks.

A Loop of ``n`` iterations that carries ``v`` and collects ``rows``, with its carried value in two
alternating buffers (``b3``, ``b4``), becomes:

    r12 = []                                rows, one for each iteration
    v5, v8, s5 = v0, b3, b4                 carried value, buffer to write, spare buffer
    for i1 in range(scalar(v1)):
        if control.stopped: control.stop()
        multiply(v5, v5, v8)                the body's steps
        r12.append(own(v5))
        v5, v8, s5 = v8, s5, v8             the next iteration reads v8 and writes s5
    if v5 is v0: v5 = copied(b3, v5)        no iteration: the result is in a buffer all the same
    v11 = v5
    v12 = stack(r12, 0, 0, k12)
    r12 = None

Variables besides those of ``names``, each numbered by its slot or loop depth: ``i`` the iteration,
``go`` whether another follows, ``t`` and ``s`` the buffers of a carried value in this iteration and
in the next, ``x`` the view of a scanned input, ``r`` collected rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from penstock.codegen.steps import StepWriter, comment
from penstock.core.records import NamedTuple
from penstock.core.types import STRING, MapType, SequenceType, is_static
from penstock.ops.onnx.control_flow import ScanLayout, row_type
from penstock.plan.plan import Carry, Step, reads


def write_control_flow(writer: StepWriter, step: Step) -> None:
    """Write an If or a loop, nested no deeper than CPython compiles (``nests_deep``)."""
    # An If is not counted as a loop: the loop depth is part of variable names.
    if step.node.op.name == "If":
        _write_if(writer, step)
        return
    writer.loops += 1
    writer.line(f"# {comment(step)}")
    _LOOPS[step.node.op.name](writer, step)
    writer.wait_for_last(step)
    writer.loops -= 1


def _write_if(writer: StepWriter, step: Step) -> None:
    writer.line(f"if {_condition(writer, step.inputs[0])}:", step, comment(step))
    # Only one branch runs: the one with the most work counts towards the next stop check.
    work_before, work_after = writer.work, 0
    for number, block in enumerate(step.blocks):
        if number:
            writer.line("else:")
        with writer.indented():
            lines_before = len(writer.text.lines)
            writer.work = work_before
            _write_body(writer, step, number)
            work_after = max(work_after, writer.work)
            pairs = []
            for result, value in zip(step.outputs, block.outputs, strict=False):
                if result >= 0:
                    owned = writer.slots[result].owned
                    text = _owned(writer, value) if owned else writer.name[value]
                    pairs.append((writer.name[result], text))
            writer.assign(pairs, step)
            # The results now have names outside of the branch.
            writer.release(writer.lifetimes.handed_out[block])
            if len(writer.text.lines) == lines_before:
                writer.line("pass")
    writer.work = work_after


def _write_loop(writer: StepWriter, step: Step) -> None:
    limit, condition = step.inputs[:2]
    (block,) = step.blocks
    number, true = block.inputs[:2]
    proceed, rows = block.outputs[0], block.outputs[1 + len(step.carries) :]
    collected = zip(step.outputs[len(step.carries) :], rows, strict=True)
    outputs = _ScanOutputs(writer, step, [_ScanOutput(*slots, 0, 0) for slots in collected])
    outputs.begin()
    _begin_carries(writer, step)
    guarded = condition >= 0 and not _is_true(writer, condition)
    if guarded:
        writer.line(f"if {_condition(writer, condition)}:", step)
        writer.text.depth += 1
    trips = "count()" if limit < 0 else f"range(scalar({writer.name[limit]}))"
    iteration = _begin_iteration(writer, step, trips)
    with writer.indented():
        # Most bodies read neither the iteration number nor the condition.
        slots_read = {slot for inner in block.steps for slot in reads(inner)}
        slots_read.update(block.outputs if proceed != true else block.outputs[1:])
        if number in slots_read:
            writer.line(f"{writer.name[number]} = array({iteration}, int64)", step)
        if true in slots_read:
            writer.line(f"{writer.name[true]} = true", step)
        _write_body(writer, step)
        outputs.collect(iteration)
        test = "" if proceed == true or _is_true(writer, proceed) else _condition(writer, proceed)
        if test and any(proceed in (carry.inside, carry.updated) for carry in step.carries):
            # The carried variable is about to hold the next iteration's value.
            writer.line(f"go{writer.loops} = {test}", step)
            test = f"go{writer.loops}"
        _end_iteration(writer, step)
        if test:
            writer.line(f"if not {test}: break", step)
    if guarded:
        writer.text.depth -= 1
    _end_carries(writer, step)
    _drop(writer, step, outputs.end(), entered=block.inputs[2:])


def _write_scan(writer: StepWriter, step: Step) -> None:
    (block,) = step.blocks
    scan = ScanLayout(step.node)
    n = len(step.carries)
    views = []
    sources = zip(step.inputs[n:], scan.input_axes, scan.input_backward, strict=True)
    for inner, (source, axis, backward) in zip(block.inputs[n:], sources, strict=True):
        views.append(f"x{inner}")
        writer.line(f"x{inner} = rows_of({writer.name[source]}, {axis}, {backward})", step)
    collected = map(
        _ScanOutput, step.outputs[n:], block.outputs[n:], scan.output_axes, scan.output_backward
    )
    outputs = _ScanOutputs(writer, step, list(collected))
    outputs.begin()
    _begin_carries(writer, step)
    iteration = _begin_iteration(writer, step, f"range(same_length({', '.join(views)}))")
    with writer.indented():
        for inner, view in zip(block.inputs[n:], views, strict=True):
            writer.line(f"{writer.name[inner]} = {view}[{iteration}, ...]", step)
        _write_body(writer, step)
        outputs.collect(iteration)
        _end_iteration(writer, step)
    _end_carries(writer, step)
    _drop(writer, step, [*views, *outputs.end()], entered=block.inputs)


def _write_sequence_map(writer: StepWriter, step: Step) -> None:
    (block,) = step.blocks
    for slot in step.outputs:
        if slot >= 0:
            writer.line(f"{writer.name[slot]} = []")
    iteration = _begin_iteration(writer, step, f"range(len({writer.name[step.inputs[0]]}))")
    with writer.indented():
        for source, inner in zip(step.inputs, block.inputs, strict=True):
            element = f"element_of({writer.name[source]}, {iteration})"
            writer.line(f"{writer.name[inner]} = {element}", step)
        _write_body(writer, step)
        for slot, value in zip(step.outputs, block.outputs, strict=True):
            if slot >= 0:
                writer.line(f"{writer.name[slot]}.append({_counted(writer, value)})", step)
        _end_iteration(writer, step)
    _drop(writer, step, (), entered=block.inputs)


_LOOPS: dict[str, Callable[[StepWriter, Step], None]] = {
    "Loop": _write_loop,
    "Scan": _write_scan,
    "SequenceMap": _write_sequence_map,
}


# Shared parts of the constructs.


def _write_body(writer: StepWriter, step: Step, number: int = 0) -> None:
    """Write the steps of a block; for an expanded step, a line that yields the block's number."""
    expanded = writer.tasks.expanded.get(step)
    if expanded:
        writer.line(f"yield {expanded[number]}")
    else:
        writer.block(step.blocks[number].steps)


def _condition(writer: StepWriter, slot: int) -> str:
    type_, name = writer.slots[slot].type, writer.name[slot]
    # A one-element array can be tested directly, which saves a call in each iteration.
    single = is_static(type_) and set(type_.dims) <= {1}
    return name if single else f"truth({name})"


def _is_true(writer: StepWriter, slot: int) -> bool:
    """Whether a condition is constant and true."""
    const = writer.slots[slot].const
    return const is not None and const.size == 1 and bool(const.all())


def _owned(writer: StepWriter, slot: int) -> str:
    """Return the expression of a value that outlives the iteration or the branch."""
    # Their elements are never in an arena, so nothing overwrites them.
    shared = isinstance(writer.slots[slot].type, SequenceType | MapType)
    if writer.slots[slot].owned or shared:
        return writer.name[slot]
    return f"own({writer.name[slot]})"


def _counted(writer: StepWriter, slot: int) -> str:
    """Return the expression of a value that is appended to a list in each iteration."""
    text = _owned(writer, slot)
    return f"keep({text})" if writer.counts else text


def _begin_iteration(writer: StepWriter, step: Step, trips: str) -> str:
    """Write the head of a loop; return the name of its iteration variable."""
    # Nested loops share the variables of one function, so each has a number.
    iteration = f"i{writer.loops}"
    writer.line(f"for {iteration} in {trips}:", step)
    with writer.indented():
        # An iteration may take any time, so each checks once.
        writer.check_for_stop(step)
        most = writer.max_iterations
        if most is not None:
            label = repr(step.node.label)
            writer.line(f"if {iteration} >= {most}: too_many({most}, {label})", step)
    return iteration


def _end_iteration(writer: StepWriter, step: Step) -> None:
    """Write the assignments of carried values for the next iteration."""
    (block,) = step.blocks
    writer.observe_release(writer.lifetimes.handed_out[block])
    pairs = []
    for carry in step.carries:
        inside = writer.name[carry.inside]
        if carry.buffers is not None:
            target, spare = _target(writer, carry), f"s{carry.inside}"
            # The body could not write to the buffer directly.
            if not carry.direct:
                writer.line(f"copied({target}, {writer.name[carry.updated]})", step)
            pairs += [(inside, target), (target, spare), (spare, target)]
        elif carry.updated != carry.inside:
            pairs.append((inside, _owned(writer, carry.updated)))
    writer.assign(pairs, step)
    writer.hand_on(step)


def _target(writer: StepWriter, carry: Carry) -> str:
    """Return the variable of the buffer that the current iteration may write."""
    return writer.name[carry.updated] if carry.direct else f"t{carry.inside}"


def _begin_carries(writer: StepWriter, step: Step) -> None:
    pairs = []
    for carry in step.carries:
        pairs.append((writer.name[carry.inside], writer.name[carry.initial]))
        if carry.buffers is not None:
            pairs.append((_target(writer, carry), writer.name[carry.buffers[0]]))
            pairs.append((f"s{carry.inside}", writer.name[carry.buffers[1]]))
    writer.assign(pairs, step)


def _end_carries(writer: StepWriter, step: Step) -> None:
    """Write the assignments of carried values to results."""
    results = [carry for carry in step.carries if carry.result >= 0]
    for carry in results:
        if carry.buffers is not None:
            inside, buffer = writer.name[carry.inside], writer.name[carry.buffers[0]]
            # Without iterations, the value is still the initial one, which a later step may
            # overwrite.
            text = f"if {inside} is {writer.name[carry.initial]}:"
            writer.line(f"{text} {inside} = copied({buffer}, {inside})", step)
    writer.assign([(writer.name[c.result], writer.name[c.inside]) for c in results], step)


def _drop(writer: StepWriter, step: Step, held: Sequence[str], entered: Sequence[int]) -> None:
    """Release the variables of iterations; without iterations, some were never assigned."""
    (block,) = step.blocks
    buffered = {carry.inside for carry in step.carries if carry.buffers}
    slots = dict.fromkeys((*entered, *writer.lifetimes.handed_out[block]))
    variables = [*held, *(writer.name[i] for i in slots if i not in buffered)]
    if variables:
        writer.line(f"{' = '.join(variables)} = None")


class _ScanOutput(NamedTuple):
    """A scan output that collects ``row`` in each iteration; ``slot`` is -1 if it is omitted."""

    slot: int
    row: int
    axis: int
    backward: int


class _ScanOutputs:
    """Scan outputs: rows are written to the result if its shape is known, else to a list, which is
    itself the result for rows on a device."""

    def __init__(self, writer: StepWriter, step: Step, outputs: Iterable[_ScanOutput]) -> None:
        self.writer, self.step = writer, step
        self.outputs = [output for output in outputs if output.slot >= 0]

    def begin(self) -> None:
        writer, step = self.writer, self.step
        for slot, _, axis, backward in self.outputs:
            type_, result = writer.slots[slot].type, writer.name[slot]
            if is_static(type_):
                writer.constants[f"k{slot}"] = (type_.dims, type_.dtype)
                writer.line(f"{result} = empty(*k{slot})", step)
                writer.line(f"r{slot} = rows_of({result}, {axis}, {backward})", step)
            else:
                writer.line(f"r{slot} = []", step)

    def collect(self, iteration: str) -> None:
        writer = self.writer
        for slot, row, _, _ in self.outputs:
            type_ = writer.slots[slot].type
            if is_static(type_):
                # An array of objects would hold a row of rank 0 itself, not the string in it.
                at = f"{iteration}, ..." if type_.dtype == STRING else iteration
                writer.line(f"r{slot}[{at}] = {writer.name[row]}", self.step)
            else:
                added = f"r{slot}.append({{}})" if not writer.counts else f"add_row(r{slot}, {{}})"
                writer.line(added.format(_owned(writer, row)), self.step)

    def end(self) -> list[str]:
        """Write the stacking of listed rows; return the variables that held rows."""
        writer = self.writer
        for slot, _, axis, backward in self.outputs:
            type_, rows = writer.slots[slot].type, f"r{slot}"
            if is_static(type_):
                continue
            if not isinstance(type_, SequenceType):
                writer.constants[f"k{slot}"] = row_type(type_, axis)
                rows = f"stack({rows}, {axis}, {backward}, k{slot})"
            writer.line(f"{writer.name[slot]} = {rows}", self.step)
        return [f"r{output.slot}" for output in self.outputs]
