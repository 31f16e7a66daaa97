"""Names for the slots of a plan, the text of each step's call, and the objects they are bound to.

Names follow from the plan and its arena plan alone, never from an address or an ``id``, so that the
same plan gives the same text in every process:

=========  =====================================================================================
``c3``     the constant of slot 3
``b3``     slot 3 in the arena; slots with equal offset, shape, dtype and strides share a name
``v3``     slot 3, known only during the run: a local variable
``V[3]``   the same, if several tasks touch it: an entry of the list that the run's tasks share
``add``    a ufunc, by its own name
``gelu_7`` another kernel: its operation, or those of a fused node, and the number of its step
``a7``     the arguments of step 7, if its kernel prepares them itself (``Kernel.prepares``)
=========  =====================================================================================

The example of ``penstock.plan.plan``:

    >>> from penstock.plan.arena_layout import plan_arena
    >>> names = program_names(plan, plan_arena(plan))
    >>> names.slots
    ('v0', 'b1', 'b1', 'c3', 'v4', 'None')
    >>> [names.calls[step].text() for step in plan.steps]
    ['exp(v0, b1)', 'negative(b1, b1)', 'add(b1, c3)']

``bind_names`` binds them to the arrays and kernels that they stand for in one arena.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from math import inf
from types import FrameType, MappingProxyType
from typing import Any, TypeAlias

import numpy as np

from penstock.codegen.helpers import helpers
from penstock.codegen.sequences import CallSequence, bound_sequence
from penstock.core.checkpoints import with_checkpoints
from penstock.core.records import NamedTuple, dataclass
from penstock.core.types import RunValue, RunValues, TensorType
from penstock.ir.contract import Guard
from penstock.ir.kernel import Kernel
from penstock.ir.layout import RuntimeArray
from penstock.ops.internal.fused import FUSED, parts
from penstock.ops.internal.transfer import HOST
from penstock.plan.arena_layout import ArenaPlan
from penstock.plan.plan import Plan, Slot, SlotKind, Step

MOST_AHEAD = 256
"""kernels that the host may put on a device ahead of it; twice as many if results are large"""
# Operations of a fused node that the name of its function has.
_MOST_NAMED = 4
# Results of at most this size are quick to read.
_SMALL_BYTES = 1 << 16

TurnedInputs: TypeAlias = "Mapping[int, tuple[int, tuple[int, ...]]]"
"""as ``codegen.turned`` finds them"""


class Call(NamedTuple):
    """The name of a kernel's function, and the text of its arguments. ``begins``: the function
    only begins an asynchronous kernel, and the call gives its ``Outcome``. ``runtime``: the slots
    whose arrays a kernel that can be bound ahead of the run is given during it."""

    function: str
    arguments: str
    begins: bool = False
    runtime: tuple[int, ...] = ()

    def text(self, streams: Sequence[int] = ()) -> str:
        """The call; through streams of devices, if their numbers are given."""
        function, arguments = self.function, self.arguments
        if self.begins:
            function, arguments = "begun", _joined("control", function, arguments)
        for stream in streams:
            function, arguments = f"d{stream}.call", _joined(function, arguments)
        return f"{function}({arguments})"


@dataclass(frozen=True, eq=False)
class ProgramNames:
    """``slots[i]`` is the name of slot i; ``slots[-1]``, for a slot left out, is ``"None"``.
    ``turned`` has the slots for which kernels are given an input (``codegen.turned``), with that
    and the axes by which it is transposed.
    ``views`` has the places in arenas that have names (``_view_key``). ``calls`` has the call of
    each step with a kernel; the results of the steps in ``counted`` count against the budget of a
    run."""

    slots: tuple[str, ...]
    turned: TurnedInputs
    views: Mapping[tuple[Any, ...], str]
    calls: Mapping[Step, Call]
    counted: frozenset[Step]


def program_names(
    plan: Plan,
    arena_plan: ArenaPlan,
    shared: frozenset[int] = frozenset(),
    counted: frozenset[Step] = frozenset(),
    turned: TurnedInputs = MappingProxyType({}),
) -> ProgramNames:
    """The names of a plan's slots and calls. ``shared``: the slots that several tasks touch;
    ``counted``: the steps whose results are counted during a run; ``turned``: as
    ``turned_inputs`` gives it."""
    slots: list[str] = []
    first_name: dict[tuple[Any, ...], str] = {}
    for index, slot in enumerate(with_checkpoints(plan.slots)):
        if slot.kind is SlotKind.CONSTANT:
            name = f"c{index}"
        elif slot.kind is SlotKind.DYNAMIC:
            name = f"V[{index}]" if index in shared else f"v{index}"
        else:
            key = _view_key(plan, arena_plan, slot, index)
            name = first_name.setdefault(key, f"b{index}")
        slots.append(name)
    for index, (source, _) in turned.items():
        slots[index] = slots[source]
    # At index -1, which stands for a value that is left out.
    slots.append("None")
    calls: dict[Step, Call] = {}
    for number, step in enumerate(with_checkpoints(plan.walk())):
        if step.kernel is not None:
            is_counted = step in counted
            function = _function_name(number, step, step.kernel, is_counted)
            begins = step.kernel.begin is not None
            runtime = () if step.kernel.binder is None else runtime_slots(plan, step)
            if step.kernel.binder is None or not step.into:
                arguments = _arguments(plan, step, slots, is_counted)
            else:  # it prepares its arguments
                arguments = ", ".join([slots[i] for i in runtime]) if runtime else f"*a{number}"
            calls[step] = Call(function, arguments, begins, runtime)
    return ProgramNames(tuple(slots), turned, first_name, calls, counted)


def _view_key(plan: Plan, arena_plan: ArenaPlan, slot: Slot, index: int) -> tuple[Any, ...]:
    """Offset, dims, dtype, strides (None: C order) and memory of a slot in an arena: slots with
    equal keys are the same value."""
    assert isinstance(slot.type, TensorType)
    alias = slot.kind is SlotKind.ALIAS
    start = arena_plan.offsets[slot.base if alias else index]
    strides = slot.strides if alias or slot.strides else None
    memory = slot.memory if slot.base < 0 else plan.slots[slot.base].memory
    place = start + slot.offset if memory == HOST else (start, slot.offset)
    return place, slot.type.dims, slot.type.dtype, strides, memory


def bound_slots(step: Step) -> tuple[int, ...]:
    """The slots that a step's kernel is called with, in the order of its parameters: inputs, and if
    it writes into given memory, outputs and workspace."""
    if not step.into:
        return step.inputs
    workspace = (step.workspace,) if step.workspace >= 0 else ()
    return (*step.inputs, *step.outputs, *workspace)


def runtime_slots(plan: Plan, step: Step) -> tuple[int, ...]:
    """The slots of ``bound_slots`` whose arrays are known only during the run."""
    slots, dynamic = plan.slots, SlotKind.DYNAMIC
    bound = (*step.inputs, *step.outputs) if step.into else step.inputs
    return tuple([i for i in bound if i >= 0 and slots[i].kind is dynamic])


def _function_name(number: int, step: Step, kernel: Kernel, is_counted: bool) -> str:
    function = kernel.into if step.into else kernel.function
    # A function that counts or checks is this step's, and must not have the name of the ufunc.
    own = is_counted or step.contract is not None
    if isinstance(function, np.ufunc) and not own and not step.prepares:
        # Only NumPy's own: others may have any name, the same one several times.
        name = function.__name__
        if getattr(np, name, None) is function:
            return name
    name = step.node.op.name.lower()  # of users' operations, any text
    if step.node.op is FUSED:
        names = [part.op.name.lower() for part in parts(step.node)]
        if len(names) > _MOST_NAMED:
            names[_MOST_NAMED - 1 :] = ["more"]
        name = "_".join(names)
    return f"{name if name.isascii() and name.isidentifier() else 'operation'}_{number}"


def _arguments(plan: Plan, step: Step, names: list[str], is_counted: bool) -> str:
    texts = [names[i] for i in bound_slots(step)]
    if not is_counted:  # else a bound of the results is one of the inputs' sizes
        for i in plan.packed_inputs(step):
            texts[i] = "None"
    for i in step.copied:
        texts[i] = f"own({texts[i]})"
    return ", ".join(texts)


def _joined(*texts: str) -> str:
    return ", ".join(filter(None, texts))


# The arrays and kernels that names stand for in one arena.


@dataclass(frozen=True)
class ProgramMemory:
    """Memory to which a program is bound: the arena in the ``host``'s memory (uint8, of the planned
    size), the ``remote`` arenas by the name of their memory, and the ``workspaces`` that device
    streams have for steps. ``on_streams``: kernels of devices are called through streams."""

    host: np.ndarray
    remote: Mapping[str, Any]
    workspaces: Mapping[Step, Any]
    on_streams: bool


def bind_names(
    plan: Plan,
    arena_plan: ArenaPlan,
    names: ProgramNames,
    sequences: Mapping[str, CallSequence],
    read: Collection[str],
    memory: ProgramMemory,
) -> dict[str, Any]:
    """The namespace of a program in this ``memory``; of constants, it has those that the program
    has ``read`` by name. ``sequences`` are what the program calls in place of their steps."""
    host = memory.host
    namespace: dict[str, Any] = helpers()
    ahead: dict[str, int] = defaultdict(int)
    for (offset, dims, dtype, strides, place), name in with_checkpoints(names.views.items()):
        if place != HOST:
            backend: Any = plan.remote[place]
            type_ = TensorType(dtype, dims)
            namespace[name] = backend.view(memory.remote[place], *offset, type_, strides)
            continue
        # Arenas of no bytes hold values of no elements, for which ndarray still wants a buffer.
        buffer, start = (host, offset) if host.size else (np.empty(dims, dtype), 0)
        namespace[name] = np.ndarray(dims, dtype, buffer, start, strides)
    values = _bind_slots(plan, names, read, namespace)
    # Compiled calls know their arrays by identity (``RuntimeArray``) until a run has them.
    bind = partial(_bound, plan, values)
    for name, sequence in with_checkpoints(sequences.items()):
        namespace[name] = bound_sequence(sequence, values, bind)
    in_sequences = {step for sequence in sequences.values() for step in sequence.steps}
    for number, step in enumerate(with_checkpoints(plan.walk())):
        kernel = step.kernel
        # A step of a sequence is bound there, and has no name in the text.
        if kernel is None or step in in_sequences:
            continue
        name, *_, of_run = names.calls[step]
        if kernel.begin is not None or not step.prepares:
            workspace = memory.workspaces.get(step)
            settled = None if memory.on_streams else ahead
            namespace[name] = _function_of(
                step, kernel, name, step in names.counted, workspace, settled
            )
            continue
        function, arguments = bind(step)
        given = [values[i] for i in of_run]
        if not given:
            namespace[f"a{number}"] = arguments
        # Kernels whose arguments are the arrays themselves are called without a wrapper.
        elif list(map(id, arguments)) != list(map(id, given)):
            function = _with_prepared(function, arguments, given)
        namespace[name] = function
    return namespace


def _bind_slots(
    plan: Plan, names: ProgramNames, read: Collection[str], namespace: dict[str, RunValue]
) -> list[RunValue]:
    """What kernels are bound to for each slot; constants that are ``read`` get their names."""
    values: list[RunValue] = []
    unread = RuntimeArray()  # a constant that the call of a kernel does not read
    for index, slot in enumerate(with_checkpoints(plan.slots)):
        name = names.slots[index]
        if slot.kind is SlotKind.CONSTANT:
            values.append(unread)
            if name in read:
                assert slot.constant is not None
                namespace[name] = slot.constant.peek
        elif slot.kind is SlotKind.DYNAMIC:
            axes = names.turned[index][1] if index in names.turned else ()
            values.append(RuntimeArray(slot.strides, axes))
        else:
            values.append(namespace[name])
    values.append(None)  # for slots left out, whose index is -1
    return values


def _bound(plan: Plan, values: RunValues, step: Step) -> Any:
    """The bound form of the kernel of ``step``, on the memory of its slots."""
    kernel, inputs = step.kernel, []
    assert kernel is not None and kernel.binder is not None
    for i, index in enumerate(step.inputs):
        slot = plan.slots[index]
        constant = slot.constant if index >= 0 and slot.kind is SlotKind.CONSTANT else None
        if constant is None or i in kernel.packed.inputs:
            inputs.append(values[index])
        else:
            inputs.append(constant.const if constant.is_held else constant.peek)
    outputs = tuple(map(values.__getitem__, step.outputs))
    bound = kernel.binder.bind(inputs, outputs, values[step.workspace])
    if step.contract is not None:
        step.contract.check_bound(bound)
    return bound


def _function_of(
    step: Step,
    kernel: Kernel,
    name: str,
    is_counted: bool,
    workspace: Any,
    ahead: dict[str, int] | None,
) -> Callable[..., RunValue]:
    """The value of ``name``: the function of a kernel that does not prepare its arguments.
    ``ahead``: how many kernels the host is ahead of each device, by backend, outside of streams."""
    function = kernel.begin or (kernel.into if step.into else kernel.function)
    assert function is not None
    if workspace is not None:
        function = partial(function, workspace=workspace)
    # On streams the program itself waits now and then (``StepWriter``).
    if kernel.device.synchronize is not None and ahead is not None and not step.into:
        function = _synchronizing(step, function, kernel.device.synchronize, ahead)
    if is_counted and not step.into:
        from penstock.ops.result_bytes import counted  # few plans have such steps

        function = counted(step.node, function, kernel.memory.checks_budget)
    if step.contract is not None and not step.into:
        function = Guard(step.contract, function, kernel.begin is not None)
        function.replace = partial(_replace, name)
    return function


def _synchronizing(
    step: Step,
    function: Callable[..., RunValue],
    synchronize: Callable[[Any], object],
    ahead: dict[str, int],
) -> Callable[..., RunValue]:
    """``function``, which waits for one of its results if the host is far ahead of the device; one
    that is large, and takes long to read, only if it is very far ahead."""
    backend, several = step.backend, len(step.outputs) > 1
    types = [None if value is None else value.type for value in step.node.outputs]
    bounds = [t.nbytes if isinstance(t, TensorType) and t.static else inf for t in types]
    smallest = min(bounds, default=inf)
    # A read waits for all kernels before it, and a large result for its copy as well.
    most = MOST_AHEAD if smallest <= _SMALL_BYTES else 2 * MOST_AHEAD

    def call(*inputs: RunValue, **options: Any) -> Any:
        result = function(*inputs, **options)
        ahead[backend] += 1
        if ahead[backend] >= most:
            ahead[backend] = 0
            synchronize(result[bounds.index(smallest)] if several else result)
        return result

    return call


def _replace(name: str, guard: Guard) -> None:
    """Put a kernel's function in the place of its guard, in the program that calls it. A guard that
    referred to the namespace, which refers to it, would keep both."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_globals.get(name) is not guard:
        frame = frame.f_back
    if frame is not None:
        frame.f_globals[name] = guard.function


def _with_prepared(
    function: Callable[..., RunValue], arguments: RunValues, runtime: RunValues
) -> Callable[..., RunValue]:
    """``function`` as a function of the arrays known only during the run, in the order of the call,
    where ``arguments`` has other values among them, or has them in another order."""
    # By identity: arrays would be compared element by element.
    place = {id(argument): i for i, argument in enumerate(runtime)}
    places = [place.get(id(argument), -1) for argument in arguments]

    def call(*arrays: RunValue) -> RunValue:
        values = zip(places, arguments, strict=True)
        return function(*[argument if i < 0 else arrays[i] for i, argument in values])

    return call
