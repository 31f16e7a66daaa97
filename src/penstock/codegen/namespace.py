"""What the names of generated code stand for in one arena: arrays, bound kernels, helpers.

Names: ``c`` constants, ``b`` buffers in the arena and views of them, ``v`` values known only during
the run (in ``V``, which the tasks of a run share, if more than one of them touches a value); ufuncs
by their own names, other kernels by their operation and the number of their step.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import count
from typing import Any

import numpy as np

from penstock.errors import LimitExceeded
from penstock.ir.op import Outcome, array_of
from penstock.ops.internal.transfer import is_transfer
from penstock.ops.onnx.control_flow import element_of, scalar, stack, truth
from penstock.plan.arena_layout import ArenaPlan
from penstock.plan.plan import Plan, Slot, SlotKind, Step
from penstock.types import ShapeError, TensorType


class RuntimeArgument:
    """Stands for an array that is known only during the run: the name of a local variable."""

    __slots__ = ("name",)

    def __init__(self, name: str) -> None:
        self.name = name


class Binder:
    """The names of one arena: every slot's array and every step's bound kernel.

    ``names[i]`` is what slot i is called (-1, for what is left out, is ``None``), ``calls`` has the
    text of each step's call. Both are the same in every arena of a plan, ``namespace`` is not.
    """

    def __init__(
        self,
        plan: Plan,
        arena_plan: ArenaPlan,
        memory: np.ndarray,
        shared: frozenset[int] = frozenset(),
    ) -> None:
        self.namespace: dict[str, Any] = dict(_HELPERS)
        self.names: list[str] = []
        self.calls: dict[Step, str] = {}
        self._memory = memory
        self._arena_plan = arena_plan
        self._shared = shared
        self._values: list[Any] = []
        self._name_of: dict[int, str] = {}
        seen: dict[tuple[Any, ...], int] = {}
        for index, slot in enumerate(plan.slots):
            name, value = self._place(index, slot, seen)
            self.names.append(name)
            self._values.append(value)
            if slot.kind is not SlotKind.DYNAMIC:
                self.namespace[name] = value
                self._name_of[id(value)] = name
        self.names.append("None")
        for number, step in enumerate(plan.walk()):
            if step.kernel is not None:
                self.calls[step] = self._bind(number, step)

    def _place(self, index: int, slot: Slot, seen: dict[tuple[Any, ...], int]) -> tuple[str, Any]:
        if slot.kind is SlotKind.CONSTANT:
            return f"c{index}", slot.const
        if slot.kind is SlotKind.DYNAMIC:
            name = f"V[{index}]" if index in self._shared else f"v{index}"
            return name, RuntimeArgument(name)
        kind = slot.type
        assert isinstance(kind, TensorType)
        alias = slot.kind is SlotKind.ALIAS
        strides = slot.strides if alias or slot.strides else None
        offset = self._arena_plan.offsets[slot.base if alias else index] + slot.offset
        # Slots that share memory and look at it alike share the array and its name.
        first = seen.setdefault((offset, kind.shape, kind.dtype, strides), index)
        if first != index:
            return self.names[first], self._values[first]
        memory = self._memory
        if memory.size:
            array = np.ndarray(kind.dims, kind.dtype, memory, offset, strides)
        else:
            array = np.empty(kind.dims, kind.dtype)
            if strides:
                array = np.ndarray(kind.dims, kind.dtype, array, 0, strides)
        return f"b{index}", array

    def _bind(self, number: int, step: Step) -> str:
        """The call of a step as text; its function and arguments go into the namespace."""
        assert step.kernel is not None
        inputs = [None if i < 0 else self._values[i] for i in step.inputs]
        function, arguments = step.kernel.function, tuple(inputs)
        if step.into:
            outputs = [None if i < 0 else self._values[i] for i in step.outputs]
            workspace = self._values[step.workspace] if step.workspace >= 0 else None
            function, arguments = step.kernel.bind(inputs, outputs, workspace)
        if step.kernel.begin is not None:
            function = step.kernel.begin
        name = function.__name__ if isinstance(function, np.ufunc) else ""
        if not name.isidentifier() or self.namespace.get(name, function) is not function:
            name = f"{step.node.op.name.lower()}_{number}"
        self.namespace[name] = function
        texts = [self._argument(number, i, value) for i, value in enumerate(arguments)]
        for i in step.copied:
            texts[i] = f"own({texts[i]})"
        if step.kernel.begin is not None:
            return f"awaited({', '.join(('control', name, *texts))})"
        return f"{name}({', '.join(texts)})"

    def _argument(self, number: int, position: int, value: Any) -> str:
        if isinstance(value, RuntimeArgument):
            return value.name
        known = self._name_of.get(id(value))
        if known is not None:
            return known
        if value is None or isinstance(value, bool | int | str):
            return repr(value)
        name = f"a{number}_{position}"
        self.namespace[name] = value
        return name


# What generated code calls beside kernels.


def began(control: Any, step: Step, *inputs: Any) -> None:
    """Tell the observer of a run that ``step`` begins."""
    control.observer.step_begin(control.run, step, inputs)


def ended(control: Any, step: Step, *outputs: Any) -> None:
    """Tell the observer of a run that ``step`` has ended, and what memory it took."""
    observer, run = control.observer, control.run
    if is_transfer(step.node):
        observer.transfer(run, step, _nbytes(outputs[0]))
    observer.step_end(run, step, outputs)
    if not step.into:
        slots = run.plan.slots
        owned = zip(step.outputs, outputs, strict=True)
        taken = sum([_nbytes(x) for i, x in owned if i >= 0 and _allocated(slots[i])])
        if taken:
            observer.allocation(run, taken)


def awaited(control: Any, begin: Callable[..., Any], *inputs: Any) -> Any:
    """The outputs of an asynchronous kernel, unless the run is stopped before they come."""
    outcome = Outcome(begin, inputs)
    control.add_listener(outcome.stop)
    try:
        return outcome.wait()
    finally:
        control.remove_listener(outcome.stop)


def freed(control: Any, *values: Any) -> None:
    """Tell the observer of a run that it is about to forget ``values``, which it allocated."""
    given = sum(map(_nbytes, values))
    if given:
        control.observer.allocation(control.run, -given)


def _allocated(slot: Slot) -> bool:
    """Whether the memory of a dynamic value is its own."""
    return slot.owned and slot.base < 0


def _nbytes(value: Any) -> int:
    if isinstance(value, list):
        return sum(map(_nbytes, value))
    return getattr(value, "nbytes", 0)


def own(value: Any) -> Any:
    """A tensor in memory of its own. Lists are shared: they never hold memory of the arena."""
    return value.copy() if isinstance(value, np.ndarray) else value


def unshared(value: Any) -> Any:
    """``value`` in memory that nobody else refers to, as the caller of a run gets it."""
    if isinstance(value, np.ndarray):
        return value.copy()
    if isinstance(value, list):
        return [unshared(element) for element in value]
    if isinstance(value, dict):
        return {key: unshared(element) for key, element in value.items()}
    return value


def contiguous(value: Any) -> Any:
    """A tensor with its dims in their own order in memory, as callers expect it."""
    return np.ascontiguousarray(value) if isinstance(value, np.ndarray) and value.ndim else value


def copied(target: np.ndarray, value: np.ndarray) -> np.ndarray:
    """``target``, with the elements of ``value``."""
    np.copyto(target, value)
    return target


def rows_of(array: np.ndarray, axis: int, backward: int) -> np.ndarray:
    """A view of ``array`` whose first axis is ``axis``, in the direction asked for."""
    if not -array.ndim <= axis < array.ndim:
        raise ShapeError(f"scan axis {axis} is out of range for shape {list(array.shape)}")
    view = np.moveaxis(array, axis, 0) if axis else array
    return view[::-1] if backward else view


def same_length(*arrays: np.ndarray) -> int:
    """The number of rows that all scanned inputs have."""
    lengths = {len(array) for array in arrays}
    if len(lengths) != 1:
        raise ShapeError(f"Scan's inputs have different lengths {sorted(lengths)}")
    return lengths.pop()


def too_many(limit: int, label: str) -> None:
    """Stop a loop at the bound on iterations."""
    raise LimitExceeded(
        f"{label} passed the limit of {limit} iterations; raise Limits.max_iterations if that is "
        "what the model should do"
    )


_HELPERS: dict[str, Callable[..., Any] | Any] = {
    "__builtins__": {"len": len, "map": map, "range": range},
    "array": np.array,
    "array_of": array_of,
    "asarray": np.asarray,
    "awaited": awaited,
    "began": began,
    "copied": copied,
    "copyto": np.copyto,
    "count": count,
    "element_of": element_of,
    "empty": np.empty,
    "ended": ended,
    "freed": freed,
    "int64": np.int64,
    "own": own,
    "rows_of": rows_of,
    "same_length": same_length,
    "scalar": scalar,
    "contiguous": contiguous,
    "stack": stack,
    "too_many": too_many,
    "true": np.array(True),
    "truth": truth,
    "unshared": unshared,
}
