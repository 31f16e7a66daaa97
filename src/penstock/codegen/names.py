"""Names for the slots of a plan, the text of each step's call, and the objects they are bound to.

Names depend on the plan and its arena plan alone, never on an address or an ``id``, so that a plan
has the same text in every process:

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
"""most kernels that the host may enqueue ahead of a device; twice as many for large results"""
# Operations of a fused node in the name of its function.
_MOST_NAMED = 4
# Results of at most this size are read quickly.
_SMALL_BYTES = 1 << 16

TurnedInputs: TypeAlias = "Mapping[int, tuple[int, tuple[int, ...]]]"
"""as found by ``codegen.turned``"""


class Call(NamedTuple):
    """The name of a kernel's function, and the text of its arguments. ``begins``: the function only
    begins an asynchronous kernel, and returns its ``Outcome``. ``runtime``: the slots whose arrays
    are passed at run time to a kernel that is bound ahead."""

    function: str
    arguments: str
    begins: bool = False
    runtime: tuple[int, ...] = ()

    def text(self, streams: Sequence[int] = ()) -> str:
        """Return the text of the call, through device streams if their numbers are given."""
        function, arguments = self.function, self.arguments
        if self.begins:
            function, arguments = "begun", _joined("control", function, arguments)
        for stream in streams:
            function, arguments = f"d{stream}.call", _joined(function, arguments)
        return f"{function}({arguments})"


@dataclass(frozen=True, eq=False)
class ProgramNames:
    """``slots[i]`` is the name of slot i; ``slots[-1]``, for an omitted slot, is ``"None"``.
    ``turned`` maps slots of transposed inputs (``codegen.turned``) to the input and the
    permutation. ``views`` maps names to places in arenas (``_view_key``). ``calls`` has the call of
    each step with a kernel; results of ``counted`` steps count against the budget of a run."""

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
    """Return the names of a plan's slots and calls. ``shared``: slots used by several tasks;
    ``counted``: steps whose results are counted during a run; ``turned``: from
    ``turned_inputs``."""
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
    # Index -1 stands for an omitted value.
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
            else:  # the kernel prepares its arguments
                arguments = ", ".join([slots[i] for i in runtime]) if runtime else f"*a{number}"
            calls[step] = Call(function, arguments, begins, runtime)
    return ProgramNames(tuple(slots), turned, first_name, calls, counted)


def _view_key(plan: Plan, arena_plan: ArenaPlan, slot: Slot, index: int) -> tuple[Any, ...]:
    """Return the offset, dims, dtype, strides (None: C order) and memory of a slot in an arena:
    slots with equal keys are the same array."""
    assert isinstance(slot.type, TensorType)
    alias = slot.kind is SlotKind.ALIAS
    start = arena_plan.offsets[slot.base if alias else index]
    strides = slot.strides if alias or slot.strides else None
    memory = slot.memory if slot.base < 0 else plan.slots[slot.base].memory
    place = start + slot.offset if memory == HOST else (start, slot.offset)
    return place, slot.type.dims, slot.type.dtype, strides, memory


def bound_slots(step: Step) -> tuple[int, ...]:
    """Return the slots that a step's kernel is called with, in the order of its parameters: inputs,
    and for destination-passing kernels outputs and workspace."""
    if not step.into:
        return step.inputs
    workspace = (step.workspace,) if step.workspace >= 0 else ()
    return (*step.inputs, *step.outputs, *workspace)


def runtime_slots(plan: Plan, step: Step) -> tuple[int, ...]:
    """Return the slots of ``bound_slots`` whose arrays are known only at run time."""
    slots, dynamic = plan.slots, SlotKind.DYNAMIC
    bound = (*step.inputs, *step.outputs) if step.into else step.inputs
    return tuple([i for i in bound if i >= 0 and slots[i].kind is dynamic])


def _function_name(number: int, step: Step, kernel: Kernel, is_counted: bool) -> str:
    function = kernel.into if step.into else kernel.function
    # A counting or checking wrapper is specific to this step, so it cannot have the ufunc's name.
    own = is_counted or step.contract is not None
    if isinstance(function, np.ufunc) and not own and not step.prepares:
        # Only NumPy's own: other functions may have arbitrary, or equal, names.
        name = function.__name__
        if getattr(np, name, None) is function:
            return name
    name = step.node.op.name.lower()  # arbitrary text for users' operations
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


# Binding of names to arrays and kernels in one arena.


@dataclass(frozen=True)
class ProgramMemory:
    """Memory to which a program is bound: the arena in ``host`` memory (uint8, of the planned
    size), the ``remote`` arenas by memory name, and the ``workspaces`` of device streams.
    ``on_streams``: device kernels are called through streams."""

    host: np.ndarray
    remote: Mapping[str, Any]
    workspaces: Mapping[Step, Any]
    on_streams: bool


def bind_names(
    plan: Plan,
    names: ProgramNames,
    sequences: Mapping[str, CallSequence],
    read: Collection[str],
    memory: ProgramMemory,
) -> dict[str, Any]:
    """Return the namespace of a program in this ``memory``, with the constants that the program has
    ``read`` by name, and the functions of its ``sequences``."""
    host = memory.host
    namespace: dict[str, Any] = helpers()
    ahead: dict[str, int] = defaultdict(int)
    for (offset, dims, dtype, strides, place), name in with_checkpoints(names.views.items()):
        if place != HOST:
            backend: Any = plan.remote[place]
            type_ = TensorType(dtype, dims)
            namespace[name] = backend.view(memory.remote[place], *offset, type_, strides)
            continue
        # Arenas of 0 bytes hold empty values, for which ndarray still requires a buffer.
        buffer, start = (host, offset) if host.size else (np.empty(dims, dtype), 0)
        namespace[name] = np.ndarray(dims, dtype, buffer, start, strides)
    values = _bind_slots(plan, names, read, namespace)
    # Until run time, placeholders (``RuntimeArray``) stand for arrays, by identity.
    bind = partial(_bound, plan, values)
    for name, sequence in with_checkpoints(sequences.items()):
        namespace[name] = bound_sequence(sequence, values, bind)
    in_sequences = {step for sequence in sequences.values() for step in sequence.steps}
    for number, step in enumerate(with_checkpoints(plan.walk())):
        kernel = step.kernel
        # Steps of a sequence are bound by it, and have no name in the text.
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
        # Kernels whose arguments are exactly the arrays of the call need no wrapper.
        elif list(map(id, arguments)) != list(map(id, given)):
            function = _with_prepared(function, arguments, given)
        namespace[name] = function
    return namespace


def _bind_slots(
    plan: Plan, names: ProgramNames, read: Collection[str], namespace: dict[str, RunValue]
) -> list[RunValue]:
    """Return the value that kernels are bound to for each slot; ``read`` constants get names."""
    values: list[RunValue] = []
    unread = RuntimeArray()  # stands for constants that kernel calls do not read
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
    values.append(None)  # for omitted slots, whose index is -1
    return values


def _bound(plan: Plan, values: RunValues, step: Step) -> Any:
    """Return the kernel of ``step``, bound to the memory of its slots."""
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
    """Return the value of ``name``: the function of a kernel that does not prepare its arguments.
    ``ahead``: the number of enqueued kernels of each device, by backend, outside of streams."""
    function = kernel.begin or (kernel.into if step.into else kernel.function)
    assert function is not None
    if workspace is not None:
        function = partial(function, workspace=workspace)
    # On streams, the program itself waits periodically (``StepWriter``).
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
    """Wrap ``function`` to wait for one of its results if the host is far ahead of the device; for
    a large result, which is slow to read, only if it is very far ahead."""
    backend, several = step.backend, len(step.outputs) > 1
    types = [None if value is None else value.type for value in step.node.outputs]
    bounds = [t.nbytes if isinstance(t, TensorType) and t.static else inf for t in types]
    smallest = min(bounds, default=inf)
    # A read waits for all earlier kernels; a large result also for its copy.
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
    """Replace a kernel's guard by the kernel's function in the program that calls it. The guard
    must not refer to the namespace: the cycle would keep both alive."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_globals.get(name) is not guard:
        frame = frame.f_back
    if frame is not None:
        frame.f_globals[name] = guard.function


def _with_prepared(
    function: Callable[..., RunValue], arguments: RunValues, runtime: RunValues
) -> Callable[..., RunValue]:
    """Wrap ``function``, which takes ``arguments``, as a function of the run-time arrays among
    them, in the order of the call."""
    # By identity: comparing arrays would compare elements.
    place = {id(argument): i for i, argument in enumerate(runtime)}
    places = [place.get(id(argument), -1) for argument in arguments]

    def call(*arrays: RunValue) -> RunValue:
        values = zip(places, arguments, strict=True)
        return function(*[argument if i < 0 else arrays[i] for i, argument in values])

    return call
