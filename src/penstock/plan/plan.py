"""A graph compiled for given input types: steps and slots, integer-indexed.

A *slot* is a value of the graph, a *step* one of its nodes with its kernel. Each slot says where
its value lives (``SlotKind``). The plan does not say at which offset of the arena: that is for the
order in which its steps run, or its tasks, to decide (``arena_layout``).

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

``y`` leaves the run, so that its step allocates it; the other steps write into the arena.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping, Sequence
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


class SlotKind(enum.Enum):
    """The kind of memory that the value of a slot is in."""

    CONSTANT = "constant"
    """known at compile time"""
    ARENA = "arena"
    """at an offset of the arena, which other slots may have before and after it"""
    ALIAS = "alias"
    """a fixed view of an arena slot"""
    DYNAMIC = "dynamic"
    """known only during the run: fed by the caller, or allocated by its step"""


@dataclass(frozen=True, slots=True, eq=False)
class Slot:
    """One value of a plan.

    ``base``, ``offset`` (bytes from the start of ``base``) and ``strides`` (bytes) place an alias.
    An arena slot has ``strides`` if its dims are not in memory in their own order, a dynamic one if
    they are expected not to be. ``roots`` are the arena slots whose memory a dynamic value may
    share. An ``owned`` dynamic value shares memory with its own views alone (whose ``base`` it is),
    so that the caller can have it without a copy. ``memory``: that of an arena slot, each of
    which has an arena of its own.
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

    @property
    def nbytes(self) -> int:
        """Bytes of a tensor of known size."""
        assert isinstance(self.type, TensorType)
        return self.type.nbytes


@dataclass(frozen=True, slots=True, eq=False)
class Carry:
    """A value that a loop hands from one iteration to the next.

    ``initial`` (slot before the loop), ``inside`` (the body's input), ``updated`` (the body's
    output), ``result`` (slot after the loop, -1 if it is not used). A value of fixed type
    alternates between two arena slots, ``buffers``, so that no iteration writes what it reads: if
    ``direct``, the body's step writes straight into the free one, else the update is copied there.
    The result is in one of the buffers even without an iteration, so that the memory of the initial
    value is free after the loop.
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

    ``inputs`` and ``outputs`` are slots, -1 where an optional one is left out. ``into``: outputs
    are written into given memory, not allocated. ``workspace`` is an arena slot or -1. Inputs
    listed in ``copied`` live on in the outputs of the step, which must get copies. ``backend`` is
    the name of the backend of the kernel; ``contract`` what a kernel of a user must hold to.
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
        """Whether the kernel prepares arguments of its own when it is bound."""
        return self.into and self.kernel is not None and self.kernel.binder is not None

    def __repr__(self) -> str:
        """Without the kernel, which holds all that it needs."""
        return f"Step({self.node!r}, backend={self.backend!r})"


@dataclass(frozen=True, eq=False)
class StepTable:
    """The steps of a graph and the slots that they read and write, as observers see them: in no
    particular order, and wherever values live. ``constants`` has those of the graphs that it calls,
    too."""

    name: str
    steps: tuple[Step, ...]
    slots: tuple[Slot, ...]
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    constants: tuple[Value | np.ndarray, ...] = ()

    def walk(self) -> Sequence[Step]:
        """Every step, those of blocks after the step that carries them."""
        return walk(self.steps)

    @cached_property
    def flops_of(self) -> Mapping[Step, int]:
        """The floating-point operations of each step in one run, by estimate, as far as shapes are
        known."""
        return {step: flops(step.node) for step in self.walk()}

    def packed_inputs(self, step: Step) -> tuple[int, ...]:
        """The constants among the inputs of a step that the call of its kernel does not read
        (``PackedConstants``)."""
        kernel, inputs = step.kernel, step.inputs
        if kernel is None or (step.into and not step.prepares):
            return ()
        given = [i for i in kernel.packed.inputs if inputs[i] >= 0]
        return tuple([i for i in given if self.slots[inputs[i]].kind is SlotKind.CONSTANT])

    @cached_property
    def memory(self) -> list[tuple[int, ...]]:
        """The arena slots whose memory the value of each slot may be in (``memory_of``)."""
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
        """Bytes of the memory behind the constants, each piece of memory counted once."""
        return sum(self.constant_memory().values())

    def constant_memory(self) -> dict[int, int]:
        """The bytes of each piece of memory behind the constants, by what tells it apart."""
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
                # Of a mapped file, what lies beside an array is not held for it.
                while isinstance(array.base, np.ndarray) and mapping_of(array) is None:
                    array = array.base
                seen[address(array)] = array.nbytes
            elif (nbytes := getattr(array, "nbytes", None)) is not None:  # on a device
                seen[-1 - id(array)] = nbytes
        return seen

    @property
    def step_constant_bytes(self) -> int:
        """The most bytes of constants that one step reads; what picks some elements reads few."""
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
        """Short: a plan has thousands of steps; ``Session.explain`` tells of them."""
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
    """what it was compiled from"""
    remote: Mapping[str, Backend] = field(default_factory=dict)
    """the backends that have arenas in memories other than the host's, by memory"""
    scopes: tuple[Callable[..., Any], ...] = ()
    """what backends have to make functions of programs run in their settings"""
    captures: Mapping[str, Callable[..., Any]] = field(default_factory=dict)
    """what backends on devices have to capture functions into graphs, by the backend's name"""


def walk(steps: Sequence[Step]) -> list[Step]:
    """``steps``, and those of blocks after the step that carries them."""
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
    """The arena slots whose memory the value of slot ``index`` may be in."""
    slot = slots[index]
    if slot.kind is SlotKind.ARENA:
        return (index,)
    return (slot.base,) if slot.kind is SlotKind.ALIAS else slot.roots


def step_dag(slots: Sequence[Slot], steps: Sequence[Step]) -> Dag:
    """The dependencies between steps of one block, which have no circles but in frames."""
    return Dag(len(steps), step_edges(slots, steps))


def step_edges(slots: Sequence[Slot], steps: Sequence[Step]) -> list[tuple[int, int]]:
    """The dependencies between steps of one block, through slots and control inputs, as pairs of
    indices, some more than once."""
    producer = {slot: i for i, step in enumerate(steps) for slot in step.outputs if slot >= 0}
    place = {step.node: i for i, step in enumerate(steps)}
    edges = []
    for i, step in enumerate(with_checkpoints(steps)):
        for slot in reads(step) if step.blocks else step.inputs:
            # A fixed view has no step: its value is there once that of its base is.
            source = producer.get(slot, producer.get(slots[slot].base, -1)) if slot >= 0 else -1
            if source >= 0 and source != i:
                edges.append((source, i))
        if step.node.control_inputs:
            edges += [(a, i) for a in _waits(step.node, place)]
    return edges


def has_effect(step: Step) -> bool:
    """Whether a step must keep its place among others with effects."""
    return not step.node.op.pure and (step.kernel is None or step.kernel.begin is None)


def _waits(node: Node, place: Mapping[Node, int]) -> list[int]:
    """The steps that ``node`` waits for by its control inputs; for a control input without a step,
    the steps that the control input reads or waits for."""
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
    """The slots that a step reads, and those that steps and outputs of its blocks read."""
    slots = [slot for slot in step.inputs if slot >= 0]
    for block in step.blocks:
        # A branch may hand out a value from outside that no step in it reads.
        slots += block.outputs
    for block in step.blocks:
        for inner in block.steps:
            slots += reads(inner)
    return slots
