"""An observer that ends a run at the first step that computes NaN."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from penstock.analysis.interpreter import evaluate
from penstock.core.errors import RunError
from penstock.core.records import dataclass, field
from penstock.core.types import RunValue, RunValues, TensorType, accepts, type_of
from penstock.ir.graph import Node
from penstock.observers.base import ObservedRun, Observer
from penstock.observers.ranges import as_numbers, range_of
from penstock.ops.internal.fused import is_fused, operation_name, parts
from penstock.plan.plan import SlotKind, Step


@dataclass(frozen=True, slots=True)
class _Inspection:
    """A value's type and range as text, and how many of its ``size`` elements are faults."""

    text: str
    size: int = 0
    faults: int = 0
    first: tuple[int, ...] = ()

    def describe(self, fault: str) -> str:
        return f"{fault} in {self.faults} of its {self.size} elements, first at {list(self.first)}"


@dataclass(slots=True)
class _RunState:
    """Inspections of one run. ``fixed``: of constants and of inputs of the model, by slot; these do
    not change during the run. ``begun``: of the inputs of steps in progress, by step and thread; a
    step may overwrite its inputs. ``copies``: these inputs themselves, of fused steps."""

    fixed: dict[int, _Inspection] = field(default_factory=dict)
    begun: dict[tuple[Step, int], list[_Inspection | None]] = field(default_factory=dict)
    copies: dict[tuple[Step, int], list[RunValue]] = field(default_factory=dict)


class NanGuard(Observer):
    """Ends a run with ``RunError`` at the first step that computes NaN: ``observers=[NanGuard()]``.

    The error names the step and its output, the number of NaN elements and the first of them, and
    the ranges of the step's inputs. If an input of the step held NaN already, the error names the
    source of it: an input of the model or a constant. NaN that no step passes on, such as the input
    of ``Where(IsNaN(x), 0, x)``, is not an error.

    In a step of several fused operations, the error names the one that computes NaN. To find it,
    these operations are computed again, one by one, on NumPy.

    Every input and output of every step is read: runs may take several times as long.

    Args:
        infinities: Whether infinite elements count as NaN does.
    """

    def __init__(self, *, infinities: bool = False) -> None:
        self.infinities = infinities
        self._fault = "NaN or infinity" if infinities else "NaN"
        self._runs: dict[ObservedRun, _RunState] = {}

    def __repr__(self) -> str:
        return f"NanGuard(infinities={self.infinities})"

    def run_begin(self, run: ObservedRun) -> None:
        self._runs[run] = _RunState()

    def run_end(self, run: ObservedRun, error: BaseException | None) -> None:
        self._runs.pop(run, None)

    def step_begin(self, run: ObservedRun, step: Step, inputs: RunValues) -> None:
        state = self._runs[run]
        inspections = [
            None if slot < 0 else self._inspect_input(run, state, slot, value)
            for slot, value in zip(step.inputs, inputs, strict=True)
        ]
        if step.control:  # the steps inside of it compute its values
            return
        key = step, threading.get_ident()
        state.begun[key] = inspections
        if is_fused(step.node):
            # Kernels may work in place, but never on what was fed, nor on constants.
            state.copies[key] = [
                value.copy() if isinstance(value, np.ndarray) and slot not in state.fixed else value
                for slot, value in zip(step.inputs, inputs, strict=True)
            ]

    def step_end(self, run: ObservedRun, step: Step, outputs: RunValues) -> None:
        """Raises ``RunError`` if an output holds NaN."""
        if step.control:
            return
        state = self._runs[run]
        # A step of an asynchronous kernel may end on another thread than it began on.
        key = step, threading.get_ident()
        inspections = state.begun.pop(key, [None] * len(step.inputs))
        inputs = state.copies.pop(key, [])
        for slot, value in zip(step.outputs, outputs, strict=True):
            if slot < 0 or not (inspection := _inspect(value, self.infinities)).faults:
                continue
            if not any(own is not None and own.faults for own in inspections):
                self._raise_for_part(step, inputs)
            raise RunError(self._message(run, state, step, inspections, slot, inspection))

    def _raise_for_part(self, step: Step, inputs: RunValues) -> None:
        """Raise ``RunError`` for the first operation in a fused ``step`` that computes NaN on
        NumPy. Do nothing if none does, as where the kernel rounds otherwise, or without ``inputs``
        as the operations take them."""
        for part, values, output in _recomputed(step.node, inputs):
            if not (inspection := _inspect(output, self.infinities)).faults:
                continue
            read = {
                value.name: _inspect(x, self.infinities)
                for value, x in zip(part.inputs, values, strict=True)
                if value is not None
            }
            (made,) = part.outputs
            assert made is not None
            others = ", ".join([_place(other) for other in parts(step.node) if other is not part])
            where = f"{_place(part)}, fused with {others},"
            error = RunError(self._origin_message(where, made.name, inspection, read))
            error.operation, error.node = operation_name(part), part.label
            error.inputs = tuple([f"{name}: {own.text}" for name, own in read.items()])
            raise error

    def _origin_message(
        self, where: str, output: str, made: _Inspection, inputs: Mapping[str, _Inspection]
    ) -> str:
        """The message of an operation that computes NaN of ``inputs`` that hold none."""
        ranges = ", ".join([f"{name!r}, {own.text}" for name, own in inputs.items()])
        return (
            f"{where} makes {self._fault}: output {output!r}, {made.text}, holds "
            f"{made.describe(self._fault)}, while its inputs hold none: "
            f"{ranges or 'there are no inputs'}"
        )

    def _inspect_input(
        self, run: ObservedRun, state: _RunState, slot: int, value: RunValue
    ) -> _Inspection:
        if run.table.slots[slot].kind is not SlotKind.CONSTANT and slot not in run.table.inputs:
            return _inspect(value, self.infinities)
        if slot not in state.fixed:
            state.fixed[slot] = _inspect(value, self.infinities)
        return state.fixed[slot]

    def _message(
        self,
        run: ObservedRun,
        state: _RunState,
        step: Step,
        inspections: Sequence[_Inspection | None],
        faulty_slot: int,
        inspection: _Inspection,
    ) -> str:
        slots = run.table.slots
        fault = inspection.describe(self._fault)
        where = " + ".join(map(_place, parts(step.node)))
        output = f"output {slots[faulty_slot].name!r}, {inspection.text},"
        pairs = zip(step.inputs, inspections, strict=True)
        inputs = {slot: own for slot, own in pairs if own is not None and slot >= 0}
        faulty = {slot: own for slot, own in inputs.items() if own.faults}
        if not faulty:
            named = {slots[i].name: own for i, own in inputs.items()}
            return self._origin_message(where, slots[faulty_slot].name, inspection, named)
        sources = {slot: own for slot, own in faulty.items() if slot in state.fixed}
        # A value that a loop passes to its body comes from an input or a constant of the run.
        sources = sources or {slot: own for slot, own in state.fixed.items() if own.faults}
        origins = []
        for slot, own in (sources or faulty).items():
            name = f"{'constant' if slot in sources else 'value'} {slots[slot].name!r}"
            if slot in run.table.inputs:
                name = f"input {slots[slot].name!r} of the model"
            origins.append(f"{name} holds {own.describe(self._fault)}")
        return f"{'; '.join(origins)}: {where} hands it on, and {output} holds {fault}"


def _place(node: Node) -> str:
    return f"{operation_name(node)} ({node.label})"


def _recomputed(node: Node, inputs: RunValues) -> Iterator[tuple[Node, list[RunValue], RunValue]]:
    """The operations in a fused node, each with its inputs and its output as NumPy computes them;
    none if ``inputs`` are not those of the operations, but packed for a kernel, say."""
    if not is_fused(node):
        return
    region = node.attrs["region"]
    values = dict(zip(region.inputs, inputs, strict=False))
    if len(values) < len(region.inputs) or not all(
        accepts(value.type, type_of(x)) for value, x in values.items()
    ):
        return
    for part in region.nodes:
        read = [None if value is None else values[value] for value in part.inputs]
        with np.errstate(all="ignore"):
            (output,) = evaluate(part, read)
        values[part.outputs[0]] = output
        yield part, read, output


def _inspect(value: RunValue, infinities: bool) -> _Inspection:
    if isinstance(value, list):
        elements = [_inspect(element, infinities) for element in value]
        first = next((element.first for element in elements if element.faults), ())
        size, faults = sum(e.size for e in elements), sum(e.faults for e in elements)
        return _Inspection(f"a sequence of {len(value)}", size, faults, first)
    if not isinstance(value, np.ndarray):
        return _Inspection(f"a {type(value).__name__}")
    text = f"{TensorType(value.dtype, value.shape)}"
    numbers = as_numbers(value)
    if numbers is None:
        return _Inspection(text)
    if numbers.dtype.kind != "c":
        range_ = range_of(numbers)
        if range_.min <= range_.max:
            text += f" from {range_.min + 0.0:.6g} to {range_.max + 0.0:.6g}"  # no negative zeros
        if not range_.nonfinite:
            return _Inspection(text, numbers.size)
        infinite = range_.nonfinite - int(np.count_nonzero(np.isnan(numbers)))
        if infinite:
            text += f" with {infinite} infinite"
    faulty = ~np.isfinite(numbers) if infinities else np.isnan(numbers)
    indices = np.unravel_index(int(faulty.argmax()), faulty.shape) if faulty.any() else ()
    count = int(np.count_nonzero(faulty))
    return _Inspection(text, numbers.size, count, tuple(map(int, indices)))
