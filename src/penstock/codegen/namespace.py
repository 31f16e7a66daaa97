"""The arrays and kernels that the names of a program stand for in one arena.

The text of a program is the same for all arenas of a plan; each arena has a namespace of its own in
which that text is executed, so that several runs can go on at once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from penstock.codegen.helpers import HELPERS
from penstock.codegen.names import ProgramNames, prepares, runtime_slots, view_key
from penstock.plan.arena_layout import ArenaPlan
from penstock.plan.plan import Plan, SlotKind, Step


def bind_names(
    plan: Plan, arena_plan: ArenaPlan, names: ProgramNames, memory: np.ndarray
) -> dict[str, Any]:
    """The namespace of a program whose arena is ``memory`` (uint8)."""
    namespace: dict[str, Any] = dict(HELPERS)
    values: list[Any] = []
    for index, slot in enumerate(plan.slots):
        name = names.slots[index]
        if slot.kind is SlotKind.DYNAMIC:
            values.append(object())  # a placeholder, for ``Kernel.bind``
            continue
        if slot.kind is SlotKind.CONSTANT:
            namespace[name] = slot.const
        elif name not in namespace:
            namespace[name] = _array(memory, *view_key(arena_plan, slot, index))
        values.append(namespace[name])
    values.append(None)  # for slots left out, whose index is -1
    for number, step in enumerate(plan.walk()):
        if step.kernel is not None:
            _bind_step(plan, number, step, names, values, namespace)
    return namespace


def _array(
    memory: np.ndarray,
    offset: int,
    dims: tuple[int, ...],
    dtype: np.dtype,
    strides: tuple[int, ...] | None,
) -> np.ndarray:
    if memory.size:
        return np.ndarray(dims, dtype, memory, offset, strides)
    return np.ndarray(dims, dtype, np.empty(dims, dtype), 0, strides)


def _bind_step(
    plan: Plan,
    number: int,
    step: Step,
    names: ProgramNames,
    values: Sequence[Any],
    namespace: dict[str, Any],
) -> None:
    """Add the function of a step, and the arguments that its kernel prepares."""
    kernel = step.kernel
    assert kernel is not None
    name = names.calls[step].function
    if kernel.begin is not None:
        namespace[name] = kernel.begin
    elif not step.into:
        namespace[name] = kernel.function
    elif not prepares(step):
        assert kernel.into is not None
        namespace[name] = kernel.into
    else:
        inputs, outputs = ([values[i] for i in part] for part in (step.inputs, step.outputs))
        workspace = values[step.workspace] if step.workspace >= 0 else None
        function, arguments = kernel.bind(inputs, outputs, workspace)
        runtime = [values[i] for i in runtime_slots(plan, step)]
        if not runtime:
            namespace[f"a{number}"] = arguments
        elif list(map(id, arguments)) != list(map(id, runtime)):
            function = _with_prepared(function, arguments, runtime)
        namespace[name] = function


def _with_prepared(
    function: Callable[..., Any], arguments: Sequence[Any], runtime: Sequence[Any]
) -> Callable[..., Any]:
    """``function`` as a function of the arrays known only during the run, in the order of the call,
    where ``arguments`` has other values among them, or has them in another order."""
    place = {id(argument): i for i, argument in enumerate(runtime)}
    places = [place.get(id(argument), -1) for argument in arguments]

    def call(*arrays: Any) -> Any:
        values = zip(places, arguments, strict=True)
        return function(*[argument if i < 0 else arrays[i] for i, argument in values])

    return call
