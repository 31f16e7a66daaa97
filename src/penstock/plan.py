"""A graph compiled for given input types: steps and slots, integer-indexed.

A *slot* is a value of the graph, a *step* one of its nodes with its kernel. Each slot says where
its value lives (``Kind``); the plan does not say at which address: liveness and offsets are an
annotation for executors that run in a fixed order (``liveness.py``).
"""

from __future__ import annotations

import enum
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from penstock.backends.base import Backend
from penstock.errors import InternalError, InvalidModel
from penstock.ir import Graph, Node, Value
from penstock.ops.base import Kernel
from penstock.ops.control import CONTROL
from penstock.passes.infer import describe
from penstock.types import (
    STRING,
    OptionalType,
    SequenceType,
    ShapeError,
    TensorType,
    Type,
)


class Kind(enum.Enum):
    """Where the value of a slot lives."""

    CONSTANT = "constant"
    """known at compile time"""
    ARENA = "arena"
    """in planned memory of its own (which others share when it is dead)"""
    ALIAS = "alias"
    """a fixed view of an arena slot"""
    DYNAMIC = "dynamic"
    """known only during the run: fed by the caller, or allocated by its step"""


@dataclass(frozen=True, slots=True)
class Slot:
    """One value of a plan.

    ``base``, ``offset`` (bytes from the start of ``base``) and ``strides`` (bytes) place an alias.
    ``roots`` are the arena slots whose memory a dynamic value may share. An ``owned`` dynamic value
    shares memory with nobody (but its own views, whose ``base`` it is), so that it can be handed to
    the caller as it is.
    """

    name: str
    type: Type
    kind: Kind
    const: np.ndarray | None = None
    base: int = -1
    offset: int = 0
    strides: tuple[int, ...] = ()
    roots: tuple[int, ...] = ()
    owned: bool = False


@dataclass(frozen=True, slots=True)
class Carry:
    """A value that a loop hands from one iteration to the next.

    ``initial`` (slot before the loop), ``inside`` (the body's input), ``updated`` (the body's
    output), ``result`` (slot after the loop, -1 if nobody reads it). A value of fixed type
    alternates between two arena slots, ``buffers``, so that no iteration writes what it reads: the
    body's step writes straight into the free one where ``direct`` is set, else the update is copied
    there.
    """

    initial: int
    inside: int
    updated: int
    result: int
    buffers: tuple[int, int] | None = None
    direct: bool = False


@dataclass(frozen=True, slots=True)
class Block:
    """The steps of a nested graph, with the slots that enter and leave it."""

    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    steps: tuple[Step, ...]


@dataclass(frozen=True, slots=True)
class Step:
    """A node of the graph: a bound kernel or a control-flow construct with ``blocks``.

    ``inputs`` and ``outputs`` are slots, -1 where an optional one is left out. ``into``: outputs
    are written to the memory given, not allocated. ``workspace`` is an arena slot or -1. Inputs
    listed in ``copied`` outlive the step in its outputs and must be handed over as copies.
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

    @property
    def control(self) -> bool:
        return self.kernel is None


@dataclass(frozen=True, slots=True)
class Plan:
    """A compiled graph. ``steps`` are in an order in which they can run."""

    name: str
    steps: tuple[Step, ...]
    slots: tuple[Slot, ...]
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    views: int = field(default=0)
    """nodes that need no step because their outputs are fixed views"""

    def walk(self) -> Iterator[Step]:
        """Every step, those of blocks after the step that carries them."""
        stack = [iter(self.steps)]
        while stack:
            for step in stack[-1]:
                yield step
                if step.blocks:
                    stack.extend(iter(block.steps) for block in reversed(step.blocks))
                    break
            else:
                stack.pop()

    @property
    def constant_bytes(self) -> int:
        """Bytes of the memory behind the constants, each piece of memory counted once."""
        seen: dict[int, int] = {}
        for slot in self.slots:
            if slot.const is not None:
                array = slot.const
                while isinstance(array.base, np.ndarray):
                    array = array.base
                seen[array.__array_interface__["data"][0]] = array.nbytes
        return sum(seen.values())


def compile_plan(graph: Graph, backends: Sequence[Backend]) -> Plan:
    """Compile a sorted graph with inferred types into a plan.

    Each node gets the first of ``backends`` that supports it. Raises ``InvalidModel`` for a node
    that can never run.
    """
    return _Builder(backends).plan(graph)


class _Builder:
    def __init__(self, backends: Sequence[Backend]) -> None:
        self.backends = backends
        self.slots: list[Slot] = []
        self.slot_of: dict[Value, int] = {}
        self.constants: dict[int, int] = {}
        # Arrays of the right shape and strides, never read or written, to see what views do.
        self.models: dict[int, np.ndarray] = {}
        # Values that must come in memory of their own, because they outlive the run or iteration.
        self.leaving: set[Value] = set()
        # Values that are written into one of two alternating buffers.
        self.alternating: dict[Value, tuple[int, int]] = {}
        self.views = 0

    def plan(self, graph: Graph) -> Plan:
        self.leaving.update(graph.outputs)
        inputs = [self.define(value, Kind.DYNAMIC) for value in graph.inputs]
        steps = self.steps(graph, certain=True)
        outputs = [self.slot(value) for value in graph.outputs]
        return Plan(graph.name, steps, tuple(self.slots), tuple(inputs), tuple(outputs), self.views)

    def steps(self, graph: Graph, *, certain: bool) -> tuple[Step, ...]:
        kernels: dict[Node, Kernel] = {}
        for node in reversed(graph.nodes):
            if node.op.name not in CONTROL:
                kernels[node] = self.kernel(node, certain)
                if kernels[node].view and any(
                    v in self.leaving for v in node.outputs if v is not None
                ):
                    # A view of memory that leaves with it need not be copied.
                    source = node.inputs[0]
                    assert source is not None
                    self.leaving.add(source)
        made = []
        for node in graph.nodes:
            kernel = kernels.get(node)
            step = self.control(node) if kernel is None else self.step(node, kernel)
            if step is not None:
                made.append(step)
        return tuple(made)

    # Slots.

    def add(self, slot: Slot) -> int:
        self.slots.append(slot)
        return len(self.slots) - 1

    def define(self, value: Value, kind: Kind, **where: Any) -> int:
        index = self.add(Slot(value.name, value.type, kind, **where))
        self.slot_of[value] = index
        return index

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
            index = self.add(Slot(value.name, value.type, Kind.CONSTANT, value.const))
            self.constants[id(value.const)] = index
        self.slot_of[value] = index
        return index

    def roots(self, index: int) -> tuple[int, ...]:
        """The arena slots whose memory the value of a slot may be in."""
        if index < 0:
            return ()
        slot = self.slots[index]
        if slot.kind is Kind.ARENA:
            return (index,)
        return (slot.base,) if slot.kind is Kind.ALIAS else slot.roots

    # Steps with kernels.

    def step(self, node: Node, kernel: Kernel) -> Step | None:
        inputs = tuple([self.slot(value) for value in node.inputs])
        if kernel.view:
            return self.view(node, kernel, inputs)
        tensors = [v for v in node.outputs if v is not None]
        static = [_planned(value.type) for value in tensors]
        given = [v in self.alternating for v in tensors]
        into = (
            kernel.into is not None
            and bool(tensors)
            and all(static)
            and (all(given) or not any(v in self.leaving for v in tensors))
        )
        outputs = []
        for value in node.outputs:
            if value is None:
                outputs.append(-1)
            elif not into:
                self.alternating.pop(value, None)
                outputs.append(self.define(value, Kind.DYNAMIC, owned=_is_tensor(value.type)))
            elif value in self.alternating:
                buffers = self.alternating[value]
                outputs.append(self.define(value, Kind.DYNAMIC, roots=buffers))
            else:
                outputs.append(self.define(value, Kind.ARENA))
        workspace = -1
        if into and kernel.workspace:
            kind = TensorType(np.dtype(np.uint8), (kernel.workspace,))
            workspace = self.add(Slot(f"{node.name}/workspace", kind, Kind.ARENA))
        holders = any(isinstance(value.type, SequenceType | OptionalType) for value in tensors)
        copied: tuple[int, ...] = ()
        if holders:
            copied = tuple(
                i
                for i, value in enumerate(node.inputs)
                if value is not None and value.const is None and _is_tensor(value.type)
            )
        return Step(node, kernel, inputs, tuple(outputs), into, workspace, copied)

    def kernel(self, node: Node, certain: bool) -> Kernel:
        types = [None if value is None else value.type for value in node.inputs]
        for backend in self.backends:
            if backend.supports(node, types):
                try:
                    return backend.compile(node, types)
                except ShapeError as error:
                    message = f"{describe(node)}: {error}"
                    if certain:
                        raise InvalidModel(message) from error
                    return _failing(str(error))
        raise InternalError(f"no backend supports {describe(node)}")

    def view(self, node: Node, kernel: Kernel, inputs: tuple[int, ...]) -> Step | None:
        """A view of planned memory costs nothing at run time; of other memory, a NumPy call."""
        model = self.model(inputs[0])
        rest = [v.const if v is not None else None for v in node.inputs[1:]]
        fixed = all(c is not None or v is None for c, v in zip(rest, node.inputs[1:], strict=True))
        if model is not None and fixed:
            results = kernel.function(model, *rest)
            results = results if len(node.outputs) != 1 else (results,)
            start = model.__array_interface__["data"][0]
            base = self.roots(inputs[0])[0]
            offset = self.slots[inputs[0]].offset
            if all(_within(array, model) for array in results):
                for value, array in zip(node.outputs, results, strict=False):
                    if value is None:
                        continue
                    at = offset
                    if array.size:
                        at += array.__array_interface__["data"][0] - start
                    index = self.define(
                        value, Kind.ALIAS, base=base, offset=at, strides=array.strides
                    )
                    self.models[index] = array
                self.views += 1
                return None
            return self.copying(node, kernel, inputs)
        source = self.slots[inputs[0]]
        where: dict[str, Any] = {
            "roots": self.roots(inputs[0]),
            "base": source.base if source.base >= 0 else inputs[0],
            "owned": source.owned,
        }
        outputs = tuple(
            [
                -1 if value is None else self.define(value, Kind.DYNAMIC, **where)
                for value in node.outputs
            ]
        )
        return Step(node, kernel, inputs, outputs)

    def copying(self, node: Node, kernel: Kernel, inputs: tuple[int, ...]) -> Step:
        """A view that these strides do not allow: its one output is copied."""
        value = node.outputs[0]
        assert value is not None
        into = _planned(value.type) and value not in self.leaving and len(node.outputs) == 1
        if not into:
            outputs = tuple(
                -1 if v is None else self.define(v, Kind.DYNAMIC, owned=True) for v in node.outputs
            )
            return Step(node, kernel, inputs, outputs)
        copier = Kernel(kernel.function, kernel.into or _copy_of(kernel, len(inputs)))
        return Step(node, copier, inputs, (self.define(value, Kind.ARENA),), into=True)

    def model(self, index: int) -> np.ndarray | None:
        slot = self.slots[index] if index >= 0 else None
        if slot is None or slot.kind not in (Kind.ARENA, Kind.ALIAS):
            return None
        model = self.models.get(index)
        if model is None:
            assert isinstance(slot.type, TensorType)
            model = self.models[index] = np.empty(slot.type.dims, slot.type.dtype)
        return model if model.size else None

    # Control flow.

    def control(self, node: Node) -> Step:
        if node.op.name == "If":
            return self.branches(node)
        return self.loop(node)

    def branches(self, node: Node) -> Step:
        inputs = (self.slot(node.inputs[0]),)
        blocks = []
        for branch in (node.attrs["then_branch"], node.attrs["else_branch"]):
            for value, inner in zip(node.outputs, branch.outputs, strict=False):
                if value is not None and value in self.leaving:
                    self.leaving.add(inner)
            steps = self.steps(branch, certain=False)
            blocks.append(Block((), tuple([self.slot(v) for v in branch.outputs]), steps))
        outputs = []
        distinct = [len(set(block.outputs)) == len(block.outputs) for block in blocks]
        for i, value in enumerate(node.outputs):
            if value is None:
                outputs.append(-1)
                continue
            results = [block.outputs[i] for block in blocks]
            roots = tuple(dict.fromkeys(r for index in results for r in self.roots(index)))
            owned = all(distinct) and all(self.slots[index].owned for index in results)
            outputs.append(self.define(value, Kind.DYNAMIC, roots=roots, owned=owned))
        return Step(node, None, inputs, tuple(outputs), blocks=tuple(blocks))

    def loop(self, node: Node) -> Step:
        """Loop, Scan and SequenceMap: carried values, then what is collected each time."""
        body: Graph = node.attrs["body"]
        inputs = tuple([self.slot(value) for value in node.inputs])
        before, first, leading = _loop_layout(node)
        count = len(inputs) - before if node.op.name == "Loop" else first
        carried_in = (
            body.inputs[first : first + count] if node.op.name == "Loop" else (body.inputs[:count])
        )
        carried_out = body.outputs[leading : leading + count]
        initial = inputs[before : before + count]
        self.leaving.update(body.outputs[leading + count :])
        produced = set(body.nodes)
        pairs: list[tuple[int, int] | None] = []
        for inside, start, updated in zip(carried_in, initial, carried_out, strict=True):
            pair = None
            if _planned(inside.type) and updated is not inside:
                pair = (
                    self.add(Slot(f"{inside.name}/0", inside.type, Kind.ARENA)),
                    self.add(Slot(f"{inside.name}/1", inside.type, Kind.ARENA)),
                )
                producer = updated.producer
                own = producer is not None and producer in produced
                if own and updated not in self.alternating and _same(updated.type, inside.type):
                    self.alternating[updated] = pair
            elif updated is not inside:
                self.leaving.add(updated)
            pairs.append(pair)
            roots = (*self.roots(start), *(pair or ()))
            self.define(inside, Kind.DYNAMIC, roots=roots)
        for value in body.inputs:
            if value not in self.slot_of:
                self.define(value, Kind.DYNAMIC, roots=self.scanned_roots(node, value, inputs))
        steps = self.steps(body, certain=False)
        block = Block(
            tuple([self.slot(v) for v in body.inputs]),
            tuple([self.slot(v) for v in body.outputs]),
            steps,
        )
        carries, results = [], []
        for i, output in enumerate(node.outputs):
            if output is None:
                results.append(-1)
            elif i < count:
                pair = pairs[i]
                roots = (*self.roots(initial[i]), *(pair or ()))
                results.append(self.define(output, Kind.DYNAMIC, roots=roots))
            else:
                results.append(self.define(output, Kind.DYNAMIC, owned=_is_tensor(output.type)))
        for i in range(count):
            updated = carried_out[i]
            direct = pairs[i] is not None and self.alternating.get(updated) == pairs[i]
            carries.append(
                Carry(
                    initial[i],
                    self.slot(carried_in[i]),
                    self.slot(updated),
                    results[i] if i < len(results) else -1,
                    pairs[i],
                    direct,
                )
            )
        return Step(node, None, inputs, tuple(results), blocks=(block,), carries=tuple(carries))

    def scanned_roots(self, node: Node, value: Value, inputs: tuple[int, ...]) -> tuple[int, ...]:
        """A slice of a Scan's input, or an element of a sequence, is a view of the whole."""
        if node.op.name == "Loop":
            return ()
        body: Graph = node.attrs["body"]
        return self.roots(inputs[body.inputs.index(value)])


def _loop_layout(node: Node) -> tuple[int, int, int]:
    """Node inputs before the carried ones, body inputs before them, body outputs before them.

    For Scan and SequenceMap the middle one is the number of carried values.
    """
    if node.op.name == "Loop":
        return 2, 2, 1
    states = len(node.inputs) - node.attrs["num_scan_inputs"] if node.op.name == "Scan" else 0
    return 0, states, 0


def _planned(kind: Type) -> bool:
    """Whether memory for a value of this type can be set aside before the run."""
    return isinstance(kind, TensorType) and kind.static and kind.dtype != STRING


def _same(a: Type, b: Type) -> bool:
    both = isinstance(a, TensorType) and isinstance(b, TensorType)
    return both and a.without_data() == b.without_data()  # type: ignore[union-attr]


def _is_tensor(kind: Type) -> bool:
    return isinstance(kind, TensorType)


def _within(array: Any, model: np.ndarray) -> bool:
    """Whether ``array`` is a view of the memory of ``model``."""
    return array.size == 0 or np.may_share_memory(array, model)


def _copy_of(kernel: Kernel, n: int) -> Any:
    function = kernel.function

    def copy(*arguments: Any) -> None:
        np.copyto(arguments[n], function(*arguments[:n]))

    return copy


def _failing(message: str) -> Kernel:
    """A kernel that fails when it runs: its node may be in a branch that is never taken."""

    def fail(*inputs: Any) -> Any:
        raise ShapeError(message)

    return Kernel(fail)
