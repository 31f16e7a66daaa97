"""An observer that ends a run at the first step that computes NaN."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import numpy as np

from penstock.core.errors import RunError
from penstock.core.records import dataclass, field
from penstock.core.types import RunValue, RunValues, TensorType
from penstock.observers.base import ObservedRun, Observer
from penstock.observers.ranges import as_numbers, range_of
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
    step may overwrite its inputs."""

    fixed: dict[int, _Inspection] = field(default_factory=dict)
    begun: dict[tuple[Step, int], list[_Inspection | None]] = field(default_factory=dict)


class NanGuard(Observer):
    """Ends a run with ``RunError`` at the first step that computes NaN: ``observers=[NanGuard()]``.

    The error names the step and its output, the number of NaN elements and the first of them, and
    the ranges of the step's inputs. If an input of the step held NaN already, the error names the
    source of it: an input of the model or a constant. NaN that no step passes on, such as the input
    of ``Where(IsNaN(x), 0, x)``, is not an error.

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
        if not step.control:  # the steps inside of it compute its values
            state.begun[step, threading.get_ident()] = inspections

    def step_end(self, run: ObservedRun, step: Step, outputs: RunValues) -> None:
        """Raises ``RunError`` if an output holds NaN."""
        if step.control:
            return
        state = self._runs[run]
        # A step of an asynchronous kernel may end on another thread than it began on.
        inspections = state.begun.pop((step, threading.get_ident()), [None] * len(step.inputs))
        for slot, value in zip(step.outputs, outputs, strict=True):
            if slot >= 0 and (inspection := _inspect(value, self.infinities)).faults:
                raise RunError(self._message(run, state, step, inspections, slot, inspection))

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
        where = f"{step.node.op.name} ({step.node.label})"
        output = f"output {slots[faulty_slot].name!r}, {inspection.text},"
        pairs = zip(step.inputs, inspections, strict=True)
        inputs = {slot: own for slot, own in pairs if own is not None and slot >= 0}
        faulty = {slot: own for slot, own in inputs.items() if own.faults}
        if not faulty:
            ranges = ", ".join([f"{slots[i].name!r}, {own.text}" for i, own in inputs.items()])
            return (
                f"{where} makes {self._fault}: {output} holds {fault}, while its inputs hold none: "
                f"{ranges or 'there are no inputs'}"
            )
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
