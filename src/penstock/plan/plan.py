"""A graph compiled for given input types: steps and slots, integer-indexed.

A *slot* is a value of the graph, a *step* one of its nodes with its kernel. Each slot has a kind of
memory (``SlotKind``). The plan has no offsets in the arena: they depend on the order in which its
steps or tasks run (``arena_layout``).

    >>> from penstock.analysis.type_inference import infer_types
    >>> from penstock.backends.numpy import NumpyBackend
    >>> from penstock.plan.builder import compile_plan
    >>> from penstock.textual.parser import parse_graph
    >>> graph = parse_graph('''graph g(x: float32[4]) -> (y) {
    ...   k: float32[] = const 2.0
    ...   a = Exp(x)
    ...   b = Neg(a)
    ...   y = Add(b, k)
    ... }''')
    >>> infer_types(graph)
    >>> plan = compile_plan(graph, [NumpyBackend()])
    >>> for i, slot in enumerate(plan.slots):
    ...     print(i, slot.name, slot.kind.value, slot.type)
    0 x dynamic float32[4]
    1 a arena float32[4]
    2 b arena float32[4]
    3 k constant float32[]
    4 y dynamic float32[4]
    >>> for step in plan.steps:
    ...     print(step.node.op.name, step.inputs, "->", step.outputs, step.into)
    Exp (0,) -> (1,) True
    Neg (1,) -> (2,) True
    Add (2, 3) -> (4,) False
    >>> plan.inputs, plan.outputs
    ((0,), (4,))

``y`` is an output, so its step allocates it; the other steps write into the arena.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping, Sequence
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import numpy as np

from penstock.algorithms.dag import Dag
from penstock.backends.base import Backend
from penstock.core.checkpoints import with_checkpoints
from penstock.core.records import cached_property, dataclass, field
from penstock.core.shared_arrays import mapping_of
from penstock.core.types import TensorType, Type
from penstock.host.on_demand import imported
from penstock.ir.contract import Contract
from penstock.ir.graph import Graph, Node, Value
from penstock.ir.kernel import Kernel
from penstock.ir.layout import address
from penstock.ops.internal.fused import operation_name
from penstock.ops.internal.transfer import HOST
from penstock.ops.work_estimate import flops

if TYPE_CHECKING:
    from penstock.ir.tables import DisplayTable


_BLOCKS = attrgetter("blocks")


class SlotKind(enum.Enum):
    """The kind of memory of a slot's value."""

    CONSTANT = "constant"
    """known at compile time"""
    ARENA = "arena"
    """at an offset of the arena, which other slots may use before and after"""
    ALIAS = "alias"
    """a fixed view of an arena slot"""
    DYNAMIC = "dynamic"
    """known only during the run: fed by the caller, or allocated by its step"""


@dataclass(frozen=True, slots=True, eq=False)
class Slot:
    """One value of a plan.

    ``base``, ``offset`` (bytes from the start of ``base``) and ``strides`` (bytes) locate an alias.
    An arena slot has ``strides`` if the memory order of its dims is not the default, a dynamic slot
    if it is expected not to be. ``roots`` are the arena slots whose memory a dynamic value may
    share. An ``owned`` dynamic value shares memory only with its own views, whose ``base`` it is,
    so the caller can take it without a copy. ``memory``: the memory of an arena slot; each memory
    has its own arena.
    """

    name: str
    type: Type
    kind: SlotKind
    constant: Value | None = None
    base: int = -1
    offset: int = 0
    strides: tuple[int, ...] = ()
    roots: tuple[int, ...] = ()
    owned: bool = False
    memory: str = HOST

    @property
    def const(self) -> np.ndarray | None:
        """The contents of a constant."""
        return None if self.constant is None else self.constant.const

    if TYPE_CHECKING:

        @property
        def nbytes(self) -> int:
            """Bytes of a tensor of known size."""

    else:
        # Asked for all slots several times: without a function of Python.
        nbytes = property(attrgetter("type.nbytes"))


@dataclass(frozen=True, slots=True, eq=False)
class Carry:
    """A loop-carried value.

    ``initial`` (slot before the loop), ``inside`` (the body's input), ``updated`` (the body's
    output), ``result`` (slot after the loop, -1 if unused). A value of fixed type alternates
    between two arena slots, ``buffers``, so that no iteration overwrites its input: if ``direct``,
    the step of the body writes into the free buffer, otherwise the update is copied there. The
    result is in one of the buffers even without an iteration, so the memory of the initial value is
    free after the loop.
    """

    initial: int
    inside: int
    updated: int
    result: int
    buffers: tuple[int, int] | None = None
    direct: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class Block:
    """The steps of a nested graph, with the slots that enter and leave it."""

    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    steps: tuple[Step, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Step:
    """A node of the graph: a kernel, or an If or a loop with ``blocks``.

    ``inputs`` and ``outputs`` are slots, -1 for an omitted one. ``into``: the kernel writes its
    outputs into given memory instead of allocating them. ``workspace`` is an arena slot or -1.
    ``copied``: the indices of inputs that must be copied, since the outputs keep references to
    them. ``backend`` is the name of the kernel's backend; ``contract`` has the checks of a user's
    kernel.
    """

    node: Node
    kernel: Kernel | None
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    into: bool = False
    workspace: int = -1
    copied: tuple[int, ...] = ()
    blocks: tuple[Block, ...] = ()
    carries: tuple[Carry, ...] = ()
    backend: str = ""
    contract: Contract | None = None

    @property
    def control(self) -> bool:
        return self.kernel is None

    @property
    def prepares(self) -> bool:
        """Whether the kernel prepares its arguments when it is bound."""
        return self.into and self.kernel is not None and self.kernel.binder is not None

    def __repr__(self) -> str:
        """Omit the kernel, whose repr would be long."""
        return f"Step({self.node!r}, backend={self.backend!r})"


@dataclass(frozen=True, eq=False)
class StepTable:
    """The steps of a graph and the slots that they read and write, as observers see them: in no
    particular order, and with any kind of memory. ``constants`` includes those of called graphs."""

    name: str
    steps: tuple[Step, ...]
    slots: tuple[Slot, ...]
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    constants: tuple[Value | np.ndarray, ...] = ()

    def walk(self) -> Sequence[Step]:
        """All steps; steps of blocks follow the step that contains them."""
        return walk(self.steps) if any(map(_BLOCKS, self.steps)) else self.steps

    @cached_property
    def flops_of(self) -> Mapping[Step, int]:
        """The estimated floating-point operations of each step in one run, from known shapes."""
        return {step: flops(step.node) for step in self.walk()}

    def packed_inputs(self, step: Step) -> tuple[int, ...]:
        """The constant inputs of a step that its kernel reads only in packed form
        (``PackedConstants``)."""
        kernel, inputs = step.kernel, step.inputs
        if kernel is None or (step.into and not step.prepares):
            return ()
        given = [i for i in kernel.packed.inputs if inputs[i] >= 0]
        return tuple([i for i in given if self.slots[inputs[i]].kind is SlotKind.CONSTANT])

    @cached_property
    def memory(self) -> list[tuple[int, ...]]:
        """For each slot, the arena slots that may contain its value (``memory_of``)."""
        arena, alias = SlotKind.ARENA, SlotKind.ALIAS
        return [
            (i,) if slot.kind is arena else (slot.base,) if slot.kind is alias else slot.roots
            for i, slot in enumerate(self.slots)
        ]

    @cached_property
    def dag(self) -> Dag:
        """The dependencies between the outermost steps."""
        return step_dag(self.slots, self.steps)

    _repr_html_ = imported("penstock.ir.tables.show_html")
    _repr_pretty_ = imported("penstock.ir.tables.show_text")

    def _as_table(self) -> DisplayTable:
        from penstock.ir.tables import DisplayTable

        rows = []
        for number, step in enumerate(self.walk(), 1):
            values = [self.slots[i] for i in step.outputs if i >= 0]
            outputs = ", ".join(f"{slot.name}: {slot.type}" for slot in values)
            name = operation_name(step.node)
            rows.append((number, name, outputs, step.backend, step.node.origin or step.node.name))
        caption = f"plan {self.name!r}: {len(rows)} steps, {self.constant_bytes} bytes of constants"
        return DisplayTable(caption, ("step", "operation", "outputs", "backend", "from"), rows)

    @property
    def constant_bytes(self) -> int:
        """Bytes of the memory of constants; shared memory counts once."""
        return sum(self.constant_memory().values())

    def constant_memory(self) -> dict[int, int]:
        """The bytes of each piece of memory of constants, by a unique key."""
        seen: dict[int, int] = {}
        constants = [x for step in self.walk() for x in step.node.attrs.values()]
        constants += [slot.constant for slot in self.slots]
        for constant in [*constants, *self.constants]:
            array = constant
            if isinstance(constant, Value):
                array = constant.held
                packed = getattr(constant.resident_in, "arrays", None)
                if packed is not None:
                    seen.update({address(own): own.nbytes for own in packed})
                elif array is None and isinstance(constant.type, TensorType):  # held by kernels
                    # Other keys are addresses, which are not negative.
                    seen[-1 - id(constant)] = constant.type.nbytes
            if isinstance(array, np.ndarray):
                # A view keeps its whole base alive, but not the rest of a mapped file.
                while isinstance(array.base, np.ndarray) and mapping_of(array) is None:
                    array = array.base
                seen[address(array)] = array.nbytes
            elif (nbytes := getattr(array, "nbytes", None)) is not None:  # on a device
                seen[-1 - id(array)] = nbytes
        return seen

    @property
    def step_constant_bytes(self) -> int:
        """The maximum of constant bytes that one step reads. Operations such as Gather, which read
        few elements, do not count."""
        sizes = [0]
        for step in self.walk():
            slots = {i for i in step.inputs if i >= 0 and self.slots[i].kind is SlotKind.CONSTANT}
            if not step.node.op.moves:
                sizes.append(sum([self.slots[i].nbytes for i in slots]))
        return max(sizes)

    @property
    def capacity_bytes(self) -> int:
        """Bytes of caches that kernels returned and callers hold (``MemoryUse.capacity_bytes``)."""
        kernels = [step.kernel for step in self.walk()]
        return sum(
            [
                use.capacity_bytes()
                for use in (k.memory for k in kernels if k is not None)
                if use.capacity_bytes is not None
            ]
        )

    def __repr__(self) -> str:
        """Omit the steps, of which there may be thousands; ``Session.explain`` lists them."""
        sizes = f"{len(self.steps)} steps, {len(self.slots)} slots"
        return f"{type(self).__name__}({self.name!r}, {sizes})"


@dataclass(frozen=True, eq=False, repr=False)
class Plan(StepTable):
    """A compiled graph. ``steps`` are in an order in which they can run."""

    views: int = 0
    """nodes that need no step because their outputs are fixed views"""
    inner: bool = False
    """whether it is part of another plan, so that outputs may share memory with inputs"""
    graph: Graph | None = None
    """the graph that it was compiled from"""
    remote: Mapping[str, Backend] = field(default_factory=dict)
    """the backends that have arenas in memories other than the host's, by memory"""
    scopes: tuple[Callable[..., Any], ...] = ()
    """functions of backends that wrap the functions of a program, to run with their settings"""
    captures: Mapping[str, Callable[..., Any]] = field(default_factory=dict)
    """functions of device backends that capture functions into graphs, by the backend's name"""


def walk(steps: Sequence[Step]) -> list[Step]:
    """All of ``steps`` and nested steps; steps of blocks follow the step that contains them."""
    walked, stack = [], [iter(steps)]
    while stack:
        for step in stack[-1]:
            walked.append(step)
            if step.blocks:
                stack.extend([iter(block.steps) for block in reversed(step.blocks)])
                break
        else:
            stack.pop()
    return walked


def memory_of(slots: Sequence[Slot], index: int) -> tuple[int, ...]:
    """The arena slots that may contain the value of slot ``index``."""
    slot = slots[index]
    if slot.kind is SlotKind.ARENA:
        return (index,)
    return (slot.base,) if slot.kind is SlotKind.ALIAS else slot.roots


def step_dag(slots: Sequence[Slot], steps: Sequence[Step]) -> Dag:
    """The dependencies between steps of one block, which have cycles only in frames."""
    return Dag(len(steps), step_edges(slots, steps))


def step_edges(slots: Sequence[Slot], steps: Sequence[Step]) -> list[tuple[int, int]]:
    """The dependencies between steps of one block by slots and control inputs, as pairs of indices,
    possibly with duplicates."""
    producer = {slot: i for i, step in enumerate(steps) for slot in step.outputs if slot >= 0}
    place = {step.node: i for i, step in enumerate(steps)}
    edges = []
    for i, step in enumerate(with_checkpoints(steps)):
        for slot in reads(step) if step.blocks else step.inputs:
            # A fixed view has no step: it depends on the step of its base.
            source = producer.get(slot, producer.get(slots[slot].base, -1)) if slot >= 0 else -1
            if source >= 0 and source != i:
                edges.append((source, i))
        if step.node.control_inputs:
            edges += [(a, i) for a in _waits(step.node, place)]
    return edges


def has_effect(step: Step) -> bool:
    """Whether a step must stay in order with other steps with effects."""
    return not step.node.op.pure and (step.kernel is None or step.kernel.begin is None)


def _waits(node: Node, place: Mapping[Node, int]) -> list[int]:
    """The steps that ``node`` waits for by its control inputs. A control input without a step is
    replaced by the steps that it reads or waits for."""
    stack, waits = list(node.control_inputs), []
    seen = set(stack)
    while stack:
        before = stack.pop()
        if before in place:
            waits.append(place[before])
            continue
        producers = [v.producer for v in before.inputs if v is not None and v.producer is not None]
        for source in (*producers, *before.control_inputs):
            if source not in seen:
                seen.add(source)
                stack.append(source)
    return waits


def reads(step: Step) -> Sequence[int]:
    """The slots that a step and its blocks read, including the outputs of blocks."""
    slots = [slot for slot in step.inputs if slot >= 0]
    for block in step.blocks:
        # A branch may return an outer value that none of its steps reads.
        slots += block.outputs
    for block in step.blocks:
        for inner in block.steps:
            slots += reads(inner)
    return slots
