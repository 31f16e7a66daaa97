"""A graph compiled for given input types: steps and slots, integer-indexed.

A *slot* is a value of the graph, a *step* one of its nodes with its kernel. Each slot says where
its value lives (``SlotKind``). The plan does not say at which offset of the arena: that is for the
order in which its steps run, or its tasks, to decide (``arena_layout``).

    >>> from penstock.analysis.type_inference import infer_types
    >>> from penstock.backends.numpy import NumpyBackend
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
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from penstock.backends.base import Backend, transfer_kernel
from penstock.backends.kernels import KernelTable
from penstock.errors import InternalError, LimitExceeded
from penstock.ir.describe import compile_error, describe_node
from penstock.ir.graph import Graph, Node, Value
from penstock.ir.op import Kernel
from penstock.ops.internal.transfer import HOST, REORDER, is_transfer
from penstock.ops.onnx.control_flow import LoopCarried, is_control
from penstock.types import STRING, ShapeError, TensorType, Type


class SlotKind(enum.Enum):
    """Where the value of a slot lives."""

    CONSTANT = "constant"
    """known at compile time"""
    ARENA = "arena"
    """in planned memory of its own (which others share when it is dead)"""
    ALIAS = "alias"
    """a fixed view of an arena slot"""
    DYNAMIC = "dynamic"
    """known only during the run: fed by the caller, or allocated by its step"""


@dataclass(frozen=True, slots=True, eq=False)
class Slot:
    """One value of a plan.

    ``base``, ``offset`` (bytes from the start of ``base``) and ``strides`` (bytes) place an alias.
    An arena slot has ``strides`` where its dims are not in memory in their own order.
    ``roots`` are the arena slots whose memory a dynamic value may share. An ``owned`` dynamic value
    shares memory with nobody (but its own views, whose ``base`` it is), so that it can be handed to
    the caller as it is.
    """

    name: str
    type: Type
    kind: SlotKind
    const: np.ndarray | None = None
    base: int = -1
    offset: int = 0
    strides: tuple[int, ...] = ()
    roots: tuple[int, ...] = ()
    owned: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class Carry:
    """A value that a loop hands from one iteration to the next.

    ``initial`` (slot before the loop), ``inside`` (the body's input), ``updated`` (the body's
    output), ``result`` (slot after the loop, -1 if nobody reads it). A value of fixed type
    alternates between two arena slots, ``buffers``, so that no iteration writes what it reads: the
    body's step writes straight into the free one where ``direct`` is set, else the update is copied
    there. So is the initial value if there was no iteration: the result is in one of the buffers in
    any case, and nobody need keep the initial value for it.
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
    """A node of the graph: a bound kernel or a control-flow construct with ``blocks``.

    ``inputs`` and ``outputs`` are slots, -1 where an optional one is left out. ``into``: outputs
    are written to the memory given, not allocated. ``workspace`` is an arena slot or -1. Inputs
    listed in ``copied`` outlive the step in its outputs and must be handed over as copies.
    ``backend`` is the name of the one that has compiled the kernel.
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

    @property
    def control(self) -> bool:
        return self.kernel is None


@dataclass(frozen=True, slots=True, eq=False)
class StepTable:
    """The steps of a graph and the slots that they read and write, as observers see them.

    It promises neither an order of the steps nor where values live.
    """

    name: str
    steps: tuple[Step, ...]
    slots: tuple[Slot, ...]
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]

    def walk(self) -> Iterator[Step]:
        """Every step, those of blocks after the step that carries them."""
        return walk(self.steps)

    @property
    def constant_bytes(self) -> int:
        """Bytes of the memory behind the constants, each piece of memory counted once."""
        seen: dict[int, int] = {}
        for slot in self.slots:
            array = slot.const
            if isinstance(array, np.ndarray):
                while isinstance(array.base, np.ndarray):
                    array = array.base
                seen[address(array)] = array.nbytes
        return sum(seen.values())


@dataclass(frozen=True, slots=True, eq=False)
class Plan(StepTable):
    """A compiled graph. ``steps`` are in an order in which they can run."""

    views: int = field(default=0)
    """nodes that need no step because their outputs are fixed views"""


def walk(steps: Sequence[Step]) -> Iterator[Step]:
    """``steps``, and those of blocks after the step that carries them."""
    stack = [iter(steps)]
    while stack:
        for step in stack[-1]:
            yield step
            if step.blocks:
                stack.extend(iter(block.steps) for block in reversed(step.blocks))
                break
        else:
            stack.pop()


def compile_plan(
    graph: Graph,
    backends: Sequence[Backend],
    placed: Mapping[Node, Backend] | None = None,
    *,
    planned: bool = True,
    kernels: KernelTable | None = None,
) -> Plan:
    """Compile a sorted graph with inferred types into a plan.

    Each node gets the backend it is ``placed`` on, else the first of ``backends`` that has a kernel
    for it. ``kernels`` remembers what the backends have answered so far. Without ``planned``, no
    memory is set aside before the run: every value is dynamic, and the plan can run in any order
    that obeys its dependencies. Raises ``InvalidModel`` for a node that can never run.
    """
    return _Builder(backends, placed or {}, planned, kernels or KernelTable()).plan(graph)


# Arena slots that a value may be in: one that may be in more is copied.
_MOST_ROOTS = 8


class _Builder:
    def __init__(
        self,
        backends: Sequence[Backend],
        placed: Mapping[Node, Backend],
        planned: bool,
        kernels: KernelTable,
    ) -> None:
        self.backends = backends
        self.answers = kernels
        self.placed = placed
        self.in_advance = planned
        self.slots: list[Slot] = []
        self.slot_of: dict[Value, int] = {}
        self.constants: dict[int, int] = {}
        # Arrays of the right shape and strides, never read or written, to see what views do.
        self.models: dict[int, np.ndarray] = {}
        # Values that must come in memory of their own, because they outlive the run or iteration.
        self.leaving: set[Value] = set()
        # Carried values that may be written straight into the free one of two alternating buffers,
        # and those of them that a step does write there.
        self.alternating: dict[Value, tuple[int, int]] = {}
        self.direct: set[Value] = set()
        self.views = 0
        self.chosen: dict[Node, Backend] = {}
        # Values that all readers want with their dims in another order, and in which.
        self.transposed: dict[Value | None, tuple[int, ...]] = {}
        # Slots whose values are there in another order too, by slot and order.
        self.reordered: dict[tuple[int, tuple[int, ...]], int] = {}
        # Constants in other memories, by the slot that has them in the host's.
        self.elsewhere: dict[tuple[int, str], int] = {}

    def plan(self, graph: Graph) -> Plan:
        self.leaving.update(graph.outputs)
        self.transposed.update(_transposed(graph))
        inputs = [self.define(value, SlotKind.DYNAMIC) for value in graph.inputs]
        steps = self.steps(graph, certain=True)
        outputs = [self.slot(value) for value in graph.outputs]
        return Plan(graph.name, steps, tuple(self.slots), tuple(inputs), tuple(outputs), self.views)

    def steps(self, graph: Graph, *, certain: bool) -> tuple[Step, ...]:
        kernels: dict[Node, Kernel] = {}
        for node in reversed(graph.nodes):
            if is_control(node):
                continue
            kernels[node] = kernel = self.kernel(node, certain)
            if kernel.view and not self.leaving.isdisjoint(node.outputs):
                # A view of memory that leaves with it need not be copied.
                source = node.inputs[0]
                assert source is not None
                self.leaving.add(source)
        made: list[Step | None] = []
        around, self.reordered = self.reordered, dict(self.reordered)
        for node in graph.nodes:
            if node in kernels:
                made.append(self.step(node, kernels[node], certain, made))
            elif node.op.name == "If":
                made.append(self.branches(node))
            else:
                made.append(self.loop(node))
        self.reordered = around
        return tuple([step for step in made if step is not None])

    # Slots.

    def add(self, slot: Slot) -> int:
        self.slots.append(slot)
        return len(self.slots) - 1

    def define(self, value: Value, kind: SlotKind, **where: Any) -> int:
        index = self.add(Slot(value.name, where.pop("type", value.type), kind, **where))
        self.slot_of[value] = index
        return index

    def define_all(self, values: Sequence[Value | None], **where: Any) -> tuple[int, ...]:
        """Dynamic slots, -1 for each value left out."""
        return tuple(
            [
                -1 if value is None else self.define(value, SlotKind.DYNAMIC, **where)
                for value in values
            ]
        )

    def slot(self, value: Value | None) -> int:
        if value is None:
            return -1
        index = self.slot_of.get(value)
        if index is not None:
            return index
        if value.const is None:
            raise InternalError(f"value {value.name!r} is used before it is computed")
        index = self.constants.get(id(value.const))
        if index is None:
            index = self.add(Slot(value.name, value.type, SlotKind.CONSTANT, value.const))
            self.constants[id(value.const)] = index
        self.slot_of[value] = index
        return index

    def read(self, values: Sequence[Value | None]) -> tuple[int, ...]:
        return tuple([self.slot(value) for value in values])

    def roots(self, index: int) -> tuple[int, ...]:
        """The arena slots whose memory the value of a slot may be in."""
        return memory_of(self.slots, index) if index >= 0 else ()

    # Steps with kernels.

    def step(
        self, node: Node, kernel: Kernel, certain: bool, before: list[Step | None]
    ) -> Step | None:
        inputs = self.read(node.inputs)
        backend = self.chosen[node]
        if backend.memory != HOST and not is_transfer(node):
            inputs = tuple([self.constant_on(backend, i) for i in inputs])
        if kernel.view:
            return self.view(node, kernel, inputs, certain)
        values = [v for v in node.outputs if v is not None]
        into = (
            self.in_advance
            and kernel.into is not None
            and self.placed_in_host(node)
            and bool(values)
            and all(_planned(value.type) for value in values)
            and (
                all(value in self.alternating for value in values)
                or self.leaving.isdisjoint(values)
                or kernel.bound
            )
        )
        if into:
            order = self.order(node, kernel, inputs)
            if kernel.dense:
                inputs = tuple(
                    [
                        self.in_order(index, order, before) if i in kernel.dense else index
                        for i, index in enumerate(inputs)
                    ]
                )
            outputs = tuple([-1 if v is None else self.planned(v, order) for v in node.outputs])
        else:
            outputs = tuple(
                [
                    -1 if v is None else self.define(v, SlotKind.DYNAMIC, owned=_is_tensor(v.type))
                    for v in node.outputs
                ]
            )
        workspace = -1
        if into and kernel.workspace:
            kind = TensorType(np.dtype(np.uint8), (kernel.workspace,))
            workspace = self.add(Slot(f"{node.name}/workspace", kind, SlotKind.ARENA))
        copied: tuple[int, ...] = ()
        if not all(_is_tensor(value.type) for value in values):
            # What makes a list or an optional keeps the tensors that it was given.
            copied = tuple([i for i, index in enumerate(inputs) if self.roots(index)])
        name = self.chosen[node].name
        return Step(node, kernel, inputs, outputs, into, workspace, copied, backend=name)

    def constant_on(self, backend: Backend, index: int) -> int:
        """Slot ``index``, or if it is a constant, one that has it in the memory of ``backend``."""
        if index < 0 or self.slots[index].kind is not SlotKind.CONSTANT:
            return index
        key = (index, backend.memory)
        if key not in self.elsewhere:
            slot = self.slots[index]
            copy = backend.from_host(slot.const)
            self.elsewhere[key] = self.add(Slot(slot.name, slot.type, SlotKind.CONSTANT, copy))
        return self.elsewhere[key]

    def in_order(self, index: int, order: tuple[int, ...], before: list[Step | None]) -> int:
        """Slot ``index``, or a copy of it without gaps and with its dims in ``order`` in memory,
        made once."""
        slot = self.slots[index]
        if not _planned(slot.type) or slot.kind is SlotKind.CONSTANT or _lies(slot, order):
            return index
        key = (index, order)
        if key not in self.reordered:
            source = Value(slot.name, slot.type)
            copy = Value(f"{slot.name}/reordered", slot.type)
            node = Node(REORDER, [source], [copy], {"order": order}, name=copy.name)
            kernel = self.kernel(node, True)
            self.reordered[key] = made = self.planned(copy, order)
            name = self.chosen[node].name
            before.append(Step(node, kernel, (index,), (made,), into=True, backend=name))
        return self.reordered[key]

    def order(self, node: Node, kernel: Kernel, inputs: Sequence[int]) -> tuple[int, ...]:
        """In which order what a kernel makes has its dims in memory: as it likes, or as what it
        reads, so that a layout stays until somebody wants another."""
        if kernel.free:
            return self.transposed.get(node.outputs[0]) or kernel.layout
        if kernel.layout or kernel.contiguous:
            return kernel.layout
        orders = (_order(self.slots[i]) for i in inputs if i >= 0)
        return next((order for order in orders if order), ())

    def planned(self, value: Value, order: tuple[int, ...] = ()) -> int:
        """A slot in memory set aside before the run: a loop's free buffer, or its own, with dims in
        the ``order`` given if there are as many."""
        buffers = self.alternating.get(value)
        if buffers is None:
            return self.define(value, SlotKind.ARENA, strides=_strides(value.type, order))
        self.direct.add(value)
        return self.define(value, SlotKind.DYNAMIC, roots=buffers)

    def kernel(self, node: Node, certain: bool) -> Kernel:
        backend = self.placed.get(node)
        if backend is None:
            accepting = (b for b in self.backends if self.answers.accepts(b, node))
            backend = next(accepting, None)
        if backend is None:
            raise InternalError(f"no backend has a kernel for {describe_node(node)}")
        self.chosen[node] = backend
        if is_transfer(node):
            return transfer_kernel(node, self.backends)
        try:
            kernel = self.answers.kernel(backend, node)
        except Exception as error:
            return _failing(node, error, certain)
        if kernel is None:
            raise InternalError(f"{backend.name} has no kernel for {describe_node(node)}")
        return kernel

    def placed_in_host(self, node: Node) -> bool:
        """Whether what ``node`` makes is in the memory that arenas are in."""
        return self.chosen[node].memory == HOST

    def view(
        self, node: Node, kernel: Kernel, inputs: tuple[int, ...], certain: bool
    ) -> Step | None:
        """A view of planned memory costs nothing at run time; of other memory, a NumPy call."""
        model = self.model(inputs[0])
        rest = [None if v is None else v.const for v in node.inputs[1:]]
        fixed = all(c is not None or v is None for c, v in zip(rest, node.inputs[1:], strict=True))
        # A step is what others wait for: without one, nobody would wait for what a view waits for.
        if model is not None and fixed and not node.control_inputs:
            try:
                results = kernel.function(model, *rest)
            except Exception as error:
                # The constants are the model's: what NumPy says of them, it would say in a run.
                if isinstance(error, IndexError | TypeError | ValueError):
                    error = ShapeError(str(error))
                failing = _failing(node, error, certain)
                outputs = self.define_all(node.outputs)
                return Step(node, failing, inputs, outputs, backend=self.chosen[node].name)
            results = results if len(node.outputs) != 1 else (results,)
            if not all(_within(array, model) for array in results):
                return self.copying(node, kernel, inputs)
            for value, array in zip(node.outputs, results, strict=False):
                if value is not None:
                    self.alias(value, array, inputs[0], model)
            self.views += 1
            return None
        source = self.slots[inputs[0]]
        where: dict[str, Any] = {
            "roots": self.roots(inputs[0]),
            "base": self.holder(inputs[0]),
            "owned": source.owned,
        }
        outputs = self.define_all(node.outputs, **where)
        return Step(node, kernel, inputs, outputs, backend=self.chosen[node].name)

    def alias(self, value: Value, array: np.ndarray, source: int, model: np.ndarray) -> None:
        """Place ``value`` where ``array`` lies in ``model``, which stands for slot ``source``."""
        (base,) = self.roots(source)
        offset = self.slots[source].offset
        if array.size:
            offset += address(array) - address(model)
        # The view may say more than inference could.
        kind = value.type if _planned(value.type) else TensorType(array.dtype, array.shape)
        index = self.define(
            value, SlotKind.ALIAS, type=kind, base=base, offset=offset, strides=array.strides
        )
        self.models[index] = array

    def copying(self, node: Node, kernel: Kernel, inputs: tuple[int, ...]) -> Step:
        """A view that these strides do not allow: its one output is copied."""
        value, name = node.outputs[0], self.chosen[node].name
        if len(node.outputs) > 1 or value is None:
            # Some outputs may be views nevertheless.
            outputs = self.define_all(node.outputs, roots=self.roots(inputs[0]))
            return Step(node, kernel, inputs, outputs, backend=name)
        if value not in self.alternating and (value in self.leaving or not _planned(value.type)):
            outputs = self.define_all(node.outputs, owned=True)
            return Step(node, kernel, inputs, outputs, backend=name)
        copier = Kernel(kernel.function, kernel.into or _copy_of(kernel, len(inputs)))
        return Step(node, copier, inputs, (self.planned(value),), into=True, backend=name)

    def model(self, index: int) -> np.ndarray | None:
        slot = self.slots[index] if index >= 0 else None
        if slot is None or slot.kind not in (SlotKind.ARENA, SlotKind.ALIAS):
            return None
        model = self.models.get(index)
        if model is None:
            assert isinstance(slot.type, TensorType)
            try:
                model = np.empty(slot.type.dims, slot.type.dtype)
                if slot.strides and slot.kind is SlotKind.ARENA:
                    model = np.ndarray(model.shape, model.dtype, model, 0, slot.strides)
            except (MemoryError, ValueError) as error:
                raise LimitExceeded(
                    f"value {slot.name!r} of type {slot.type} does not fit into memory"
                ) from error
            self.models[index] = model
        return model if model.size else None

    # Control flow.

    def branches(self, node: Node) -> Step:
        inputs = self.read(node.inputs)
        blocks: list[Block] = []
        apart: list[list[bool]] = []
        for branch in (node.attrs["then_branch"], node.attrs["else_branch"]):
            for value, inner in zip(node.outputs, branch.outputs, strict=False):
                if value is not None and value in self.leaving:
                    self.leaving.add(inner)
            before = len(self.slots)
            steps = self.steps(branch, certain=False)
            results = self.read(branch.outputs)
            blocks.append(Block((), results, steps))
            # The If owns what its branch made, which has later slots, and handed out only once.
            holders = [self.holder(index) for index in results]
            apart.append(
                [
                    self.slots[index].owned and holder >= before and holders.count(holder) == 1
                    for index, holder in zip(results, holders, strict=True)
                ]
            )
        outputs = []
        for i, value in enumerate(node.outputs):
            if value is None:
                outputs.append(-1)
                continue
            roots = dict.fromkeys(r for block in blocks for r in self.roots(block.outputs[i]))
            # Through a long chain of these, what one of them may be would never end.
            owned = all(flags[i] for flags in apart) or len(roots) > _MOST_ROOTS
            where: dict[str, Any] = {"owned": True} if owned else {"roots": tuple(roots)}
            outputs.append(self.define(value, SlotKind.DYNAMIC, **where))
        return Step(node, None, inputs, tuple(outputs), blocks=tuple(blocks))

    def holder(self, index: int) -> int:
        """The slot that holds the memory of a dynamic value: itself, or what it is a view of."""
        base = self.slots[index].base
        return base if base >= 0 else index

    def loop(self, node: Node) -> Step:
        """Loop, Scan and SequenceMap: carried values, then what is collected each time."""
        body: Graph = node.attrs["body"]
        inputs = self.read(node.inputs)
        carried = LoopCarried(node)
        initial = inputs[carried.node]
        inside, updated = body.inputs[carried.inputs], body.outputs[carried.outputs]
        self.leaving.update(body.outputs[carried.outputs.stop :])
        pairs = [self.buffers(body, a, b) for a, b in zip(inside, updated, strict=True)]
        for value, start, pair in zip(inside, initial, pairs, strict=True):
            self.define(value, SlotKind.DYNAMIC, roots=(*self.roots(start), *(pair or ())))
        for i, value in enumerate(body.inputs):
            if value not in self.slot_of:
                # A slice of a Scan's input, or an element of a sequence, is a view of the whole.
                whole = inputs[i] if node.op.name != "Loop" else -1
                self.define(value, SlotKind.DYNAMIC, roots=self.roots(whole))
        steps = self.steps(body, certain=False)
        block = Block(self.read(body.inputs), self.read(body.outputs), steps)
        results = []
        for i, output in enumerate(node.outputs):
            if output is None:
                results.append(-1)
            elif i < len(pairs):
                roots = pairs[i] or self.roots(initial[i])
                results.append(self.define(output, SlotKind.DYNAMIC, roots=roots))
            else:
                results.append(self.define(output, SlotKind.DYNAMIC, owned=_is_tensor(output.type)))
        carries = [
            Carry(
                initial[i],
                self.slot(inside[i]),
                self.slot(value),
                results[i] if i < len(results) else -1,
                pair,
                direct=value in self.direct and self.alternating[value] == pair,
            )
            for i, (value, pair) in enumerate(zip(updated, pairs, strict=True))
        ]
        return Step(node, None, inputs, tuple(results), blocks=(block,), carries=tuple(carries))

    def buffers(self, body: Graph, inside: Value, updated: Value) -> tuple[int, int] | None:
        """Two alternating buffers for a carried value, if its type is fixed and it changes."""
        if updated is inside:
            return None
        if not (self.in_advance and _planned(inside.type)):
            self.leaving.add(updated)
            return None
        pair = (
            self.add(Slot(f"{inside.name}/0", inside.type, SlotKind.ARENA)),
            self.add(Slot(f"{inside.name}/1", inside.type, SlotKind.ARENA)),
        )
        if _same(updated.type, inside.type):
            self.alternating.setdefault(updated, pair)
        return pair


def memory_of(slots: Sequence[Slot], index: int) -> tuple[int, ...]:
    """The arena slots whose memory the value of slot ``index`` may be in."""
    slot = slots[index]
    if slot.kind is SlotKind.ARENA:
        return (index,)
    return (slot.base,) if slot.kind is SlotKind.ALIAS else slot.roots


def address(array: np.ndarray) -> int:
    """Where the first element of ``array`` lies in memory."""
    start = array.__array_interface__["data"][0]
    assert isinstance(start, int)
    return start


def _planned(kind: Type) -> bool:
    """Whether memory for a value of this type can be set aside before the run."""
    return isinstance(kind, TensorType) and kind.static and kind.dtype != STRING


def _same(a: Type, b: Type) -> bool:
    both = isinstance(a, TensorType) and isinstance(b, TensorType)
    return both and a.without_data() == b.without_data()  # type: ignore[union-attr]


def _is_tensor(kind: Type) -> bool:
    return isinstance(kind, TensorType)


def _strides(kind: Type, order: Sequence[int], *, always: bool = False) -> tuple[int, ...]:
    """The strides, in bytes, of a tensor whose dims are in memory in ``order``; none, unless they
    are asked for ``always``, if that is their own, or is of another rank."""
    assert isinstance(kind, TensorType) and kind.dtype is not None
    if not always and (len(order) != len(kind.dims) or list(order) == sorted(order)):
        return ()
    strides, step = [0] * len(order), kind.dtype.itemsize
    for axis in reversed(order):
        strides[axis] = step
        step *= kind.dims[axis]
    return tuple(strides)


def _order(slot: Slot) -> tuple[int, ...]:
    """In which order a planned value has its dims in memory; none if that is their own."""
    if not slot.strides or slot.kind not in (SlotKind.ARENA, SlotKind.ALIAS):
        return ()
    assert isinstance(slot.type, TensorType)
    rank = len(slot.type.dims)
    # Where a dim of 1 lies means nothing, so that several orders may say the same.
    by_stride = sorted(range(rank), key=lambda axis: -slot.strides[axis])
    for order in (tuple(range(rank)), (0, *range(2, rank), 1), tuple(by_stride)):
        if len(order) == rank and _lies(slot, order):
            return () if order == tuple(range(rank)) else order
    return ()


def _lies(slot: Slot, order: Sequence[int]) -> bool:
    """Whether a value is sure to lie without gaps, with its dims in ``order`` in memory."""
    if slot.kind is SlotKind.DYNAMIC:
        # Of what is known only during the run, kernels see for themselves.
        return list(order) == sorted(order)
    kind = slot.type
    assert isinstance(kind, TensorType)
    own = _strides(kind, range(len(kind.dims)), always=True)
    wanted = _strides(kind, order, always=True) if len(order) == len(kind.dims) else own
    dims = zip(kind.dims, slot.strides or own, wanted, strict=True)
    return all(a == b for n, a, b in dims if n > 1)


def _transposed(graph: Graph) -> Iterator[tuple[Value, tuple[int, ...]]]:
    """The values that nothing reads but one Transpose, and in which order of their dims its result
    has its own in their order."""
    for value, readers in graph.consumers().items():
        node = readers[0]
        if len(readers) == 1 and node.op.name == "Transpose" and isinstance(value.type, TensorType):
            perm = node.attrs.get("perm") or reversed(range(value.type.rank or 0))
            yield value, tuple(perm)


def _within(array: Any, model: np.ndarray) -> bool:
    """Whether ``array`` is a view of the memory of ``model``."""
    return array.size == 0 or np.may_share_memory(array, model)


def _copy_of(kernel: Kernel, n: int) -> Any:
    function = kernel.function

    def copy(*arguments: Any) -> None:
        np.copyto(arguments[n], function(*arguments[:n]))

    return copy


def _failing(node: Node, error: Exception, certain: bool) -> Kernel:
    """A kernel that fails when it runs, if its node may never run; else the error is raised."""
    if certain or not isinstance(error, ShapeError):
        raise compile_error(node, error) from error
    message = str(error)

    def fail(*inputs: Any) -> Any:
        raise ShapeError(message)

    return Kernel(fail)
