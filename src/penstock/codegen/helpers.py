"""Functions besides kernels that generated programs call, by their names there.

A program can only reach these, the NumPy functions among them, and a few builtins: names from a
model file are never evaluated.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import count
from typing import Any, overload

import numpy as np

from penstock.core.checkpoints import THREAD
from penstock.core.errors import LimitExceeded
from penstock.core.types import RunValue
from penstock.host.current_run import copy_within_budget, keep
from penstock.host.malloc import LARGEST, empty
from penstock.host.native import contiguous, in_c_order, refilled
from penstock.ir.graph import Value
from penstock.ir.kernel import Outcome, array_of
from penstock.ops.internal.transfer import is_transfer
from penstock.ops.onnx.control_flow import (
    add_row,
    element_of,
    read_trip_count,
    rows_of,
    same_length,
    stack,
    truth,
)
from penstock.plan.plan import Step


class StepInputs(Sequence[RunValue]):
    """The inputs of a step for observers. Most do not read constants, which may only exist in the
    order of a kernel: those are converted back when they are read."""

    __slots__ = ("_given",)

    def __init__(self, given: Sequence[RunValue | Value]) -> None:
        self._given = given

    def __len__(self) -> int:
        return len(self._given)

    @overload
    def __getitem__(self, index: int) -> RunValue: ...

    @overload
    def __getitem__(self, index: slice) -> Sequence[RunValue]: ...

    def __getitem__(self, index: int | slice) -> RunValue | Sequence[RunValue]:
        if isinstance(index, slice):
            return StepInputs(self._given[index])
        value = self._given[index]
        return value.const if isinstance(value, Value) else value


def began(control: Any, step: Step, *inputs: RunValue | Value) -> None:
    """Notify the observer of a run that ``step`` begins; of ``inputs``, constants are values of
    the graph."""
    control.observer.step_begin(control.run, step, StepInputs(inputs))


def ended(control: Any, step: Step, *outputs: RunValue) -> None:
    """Notify the observer of a run that ``step`` has ended, with the bytes of its outputs."""
    observer, run = control.observer, control.run
    if is_transfer(step.node):
        observer.transfer(run, step, _nbytes(outputs[0]))
    observer.step_end(run, step, outputs)
    if not step.into:
        slots = run.table.slots
        values = zip(step.outputs, outputs, strict=True)
        # Views own no memory.
        own = [x for i, x in values if i >= 0 and slots[i].owned and slots[i].base < 0]
        if nbytes := sum(map(_nbytes, own)):
            observer.allocation(run, nbytes)


def begun(control: Any, begin: Callable[..., RunValue], *inputs: RunValue) -> Outcome:
    """Begin an asynchronous kernel, which also ends when the run is stopped."""
    outcome = Outcome(begin, inputs)
    control.add_listener(outcome.stop)
    return outcome


def awaited(control: Any, outcome: Outcome) -> Any:
    """Return the outputs of an asynchronous kernel, unless the run is stopped before."""
    try:
        return outcome.wait()
    finally:
        control.remove_listener(outcome.stop)


def freed(control: Any, *values: RunValue) -> None:
    """Notify the observer of a run that ``values``, which the run allocated, are released."""
    if nbytes := sum(map(_nbytes, values)):
        control.observer.allocation(control.run, -nbytes)


def _nbytes(value: RunValue) -> int:
    if isinstance(value, list):
        return sum(map(_nbytes, value))
    return getattr(value, "nbytes", 0)


def own(value: RunValue) -> RunValue:
    """Return a copy of a tensor. Lists are shared: their elements are never in an arena."""
    return value.copy() if isinstance(value, np.ndarray) else value


def _copy_to_reused(array: np.ndarray) -> np.ndarray:
    return refilled()(empty(array.shape, array.dtype), array)


def unshared(value: RunValue) -> RunValue:
    """Return a deep copy of ``value``, so that callers share no memory with the run."""
    if isinstance(value, np.ndarray):
        large = value.nbytes > LARGEST
        if not large and THREAD.run is None:  # no budget: looking it up takes as long
            return in_c_order()(value)
        return copy_within_budget(value, _copy_to_reused if large else in_c_order())
    if isinstance(value, list):
        return [unshared(element) for element in value]
    if isinstance(value, dict):
        return {key: x if x.__class__ is float else unshared(x) for key, x in value.items()}
    clone = getattr(value, "clone", None)  # a device tensor, which callers may have fed
    return value if clone is None else clone()


def sent(value: RunValue) -> RunValue:
    """Return a value for another process, which copies it: a tensor in C order."""
    return contiguous()(value)


def too_many(limit: int, label: str) -> None:
    """Raise ``LimitExceeded`` for a loop that reaches the limit of iterations."""
    raise LimitExceeded(
        f"{label} passed the limit of {limit} iterations; raise Limits.max_iterations if the "
        "model needs more"
    )


_FUNCTIONS = (
    *(array_of, awaited, began, begun, element_of, ended, freed, add_row, keep, own, rows_of),
    *(same_length, stack, too_many, truth, unshared),
)

_HELPERS: dict[str, Any] = {
    **{function.__name__: function for function in _FUNCTIONS},
    # Names of a model file are never code; should one get into the text, it reaches only these.
    "__builtins__": {"len": len, "map": map, "range": range},
    "THREAD": THREAD,
    "array": np.array,
    "asarray": np.asarray,
    "count": count,
    "empty": empty,
    "int64": np.int64,
    "scalar": read_trip_count,
    "true": np.array(True),
}


def helpers() -> dict[str, Any]:
    """Return a new dict of these functions, by name. ``contiguous`` returns a tensor in C order, as
    callers expect, and other values unchanged; ``in_c_order`` a copy; ``copied`` a buffer into
    which a value was copied."""
    compiled = {"contiguous": contiguous(), "in_c_order": in_c_order(), "copied": refilled()}
    return {**_HELPERS, **compiled}
