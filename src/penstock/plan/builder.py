"""From a graph to a plan: kernels, then annotations, then slots and steps.

The memory of each value is chosen before (``analysis.value_memory``); the builder gives every value
a slot and every node a step, or no step if its outputs are fixed views.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from penstock.analysis.value_memory import ValueMemory, dense_strides, has_buffers, value_memory
from penstock.backends.base import Backend, CapturesGraphs, EntersRuns, has_arenas, transfer_kernel
from penstock.backends.kernels import KernelTable
from penstock.core import capability
from penstock.core.checkpoints import with_checkpoints
from penstock.core.errors import InternalError
from penstock.core.records import NamedTuple, replace
from penstock.core.types import MapType, SequenceType, ShapeError, TensorType, Type
from penstock.ir.contract import Contract, contract_of
from penstock.ir.describe import compile_error, describe_node
from penstock.ir.graph import Graph, Node, Value
from penstock.ir.kernel import Kernel
from penstock.ops.internal.transfer import HOST, STACK, TRANSFER
from penstock.ops.onnx.control_flow import is_control, loop_carried
from penstock.plan.plan import Block, Carry, Plan, Slot, SlotKind, Step, memory_of


class CompiledNode(NamedTuple):
    """The kernel of a node, and its backend. ``on_host``: whether the outputs are in host memory;
    ``remote``: whether they may be in an arena in the backend's memory."""

    kernel: Kernel
    backend: Backend
    contract: Contract | None
    on_host: bool
    remote: bool


def compile_plan(
    graph: Graph,
    backends: Sequence[Backend],
    placed: Mapping[Node, Backend] | None = None,
    *,
    planned: bool | ValueMemory = True,
    inner: bool = False,
    kernels: KernelTable | None = None,
) -> Plan:
    """Compile a sorted graph with inferred types into a plan.

    Each node gets the backend it is ``placed`` on, else the first of ``backends`` that has a kernel
    for it. ``kernels`` caches the answers of the backends. If ``planned`` is false, every value is
    dynamic, and the plan can run in any topological order; it may also be the memory of values, if
    that was chosen before. An ``inner`` plan may never run, and may return its inputs. Raises
    ``InvalidModel`` for a node that can never run, unless the plan is an inner one.
    """
    table = kernels or KernelTable()
    compiled: dict[Node, CompiledNode] = {}
    for nested in graph.graphs():
        for node in with_checkpoints(nested.nodes[::-1]):
            if not (node.nests and is_control(node)):
                certain = nested is graph and not inner
                compiled[node] = _compile(node, backends, placed or {}, table, certain)
    if isinstance(planned, ValueMemory):
        return _Builder(compiled, planned, planned=True).plan(graph, inner)
    of_nodes = {node: entry.kernel for node, entry in compiled.items()}
    away = {node for node, entry in compiled.items() if not entry.on_host}
    remote = {node for node in away if compiled[node].remote}
    memory = value_memory(graph, of_nodes, away, remote, planned=planned)
    return _Builder(compiled, memory, planned).plan(graph, inner)


def _compile(
    node: Node,
    backends: Sequence[Backend],
    placed: Mapping[Node, Backend],
    table: KernelTable,
    certain: bool,
) -> CompiledNode:
    """Compile a node. ``certain``: the node runs in every run, so errors are raised at once."""
    backend = placed.get(node) or next((b for b in backends if table.accepts(b, node)), None)
    if backend is None:
        raise InternalError(f"no backend has a kernel for {describe_node(node)}")
    if node.op is TRANSFER:
        transfer = transfer_kernel(node, backends)
        remote = {b.name: b for b in backends if b.memory != HOST}
        source, to_host = remote.get(node.attrs["source"]), node.attrs["target"] not in remote
        contract = contract_of(node, source) if to_host else None
        away = not to_host and backend.memory != HOST
        return CompiledNode(transfer, backend, contract, not away, away and has_arenas(backend))
    kernel, error = table.answer(backend, node)
    if error is not None:
        kernel = failing(node, error, certain, backend)
    if kernel is None:
        raise InternalError(f"{backend.name} has no kernel for {describe_node(node)}")
    if backend.device is not None:
        kernel = replace(kernel, device=replace(kernel.device, synchronize=backend.to_host))
    own = backend.memory != HOST
    contract = contract_of(node, backend, on_host=not own)
    away = own and not kernel.device.host_outputs
    return CompiledNode(kernel, backend, contract, not away, away and has_arenas(backend))


# A dynamic value that may be in more arena slots than this is copied.
_MOST_ROOTS = 8


class _Builder:
    """Gives values slots and nodes steps. ``buffers``: the pairs of slots that carried values
    alternate between, by the body's input. ``copies``: the slots of constants in device memories,
    by slot and memory. ``in_rows``: values that leave a loop as a list of rows."""

    def __init__(
        self, compiled: Mapping[Node, CompiledNode], memory: ValueMemory, planned: bool
    ) -> None:
        self.compiled = compiled
        self.memory = memory
        self.planned = planned
        self.slots: list[Slot] = []
        self.slot_of: dict[Value | None, int] = {None: -1}
        self.constants: dict[int, tuple[int, np.ndarray | Value]] = {}
        self.copies: dict[tuple[int, str], int] = {}
        self.in_rows = {node.inputs[0] for node in compiled if node.op is STACK}
        self.buffers: dict[Value, tuple[int, int]] = {}
        self.views = 0

    def plan(self, graph: Graph, inner: bool) -> Plan:
        inputs = self.define_all(graph.inputs)
        steps = self.steps(graph, certain=not inner)
        outputs, slots = self.read(graph.outputs), tuple(self.slots)
        used = {slot.memory for slot in slots if slot.kind is SlotKind.ARENA}
        backends = [compiled.backend for compiled in self.compiled.values() if compiled.remote]
        remote = {backend.memory: backend for backend in backends if backend.memory in used}
        # Once for each backend, not for each node: a plan has thousands of nodes on a few.
        of_names = {c.backend.name: c.backend for c in self.compiled.values()}
        entered = [capability(backend, EntersRuns) for backend in of_names.values()]
        scopes = tuple(dict.fromkeys([scope.in_runs for scope in entered if scope is not None]))
        captures = {}
        for name, backend in of_names.items():
            if (capturing := capability(backend, CapturesGraphs)) is not None:
                captures[name] = capturing.captured
        return Plan(
            graph.name,
            steps,
            slots,
            inputs,
            outputs,
            views=self.views,
            inner=inner,
            graph=graph,
            remote=remote,
            scopes=scopes,
            captures=captures,
        )

    def steps(self, graph: Graph, *, certain: bool) -> tuple[Step, ...]:
        steps: list[Step | None] = []
        for node in with_checkpoints(graph.nodes):
            compiled = self.compiled.get(node)
            if compiled is None:  # control flow
                steps.append(self.branches(node) if node.op.name == "If" else self.loop(node))
            elif compiled.kernel.view:
                steps.append(self.view(node, compiled, certain))
            else:
                steps.append(self.step(node, compiled))
        self.views += steps.count(None)
        return tuple(filter(None, steps))

    # Slots.

    def add(self, slot: Slot) -> int:
        self.slots.append(slot)
        return len(self.slots) - 1

    def define(self, value: Value, kind: SlotKind, type_: Type | None = None, **place: Any) -> int:
        index = self.slot_of[value] = len(self.slots)
        self.slots.append(Slot(value.name, type_ or value.type, kind, **place))
        return index

    def define_all(self, values: Sequence[Value | None], **place: Any) -> tuple[int, ...]:
        """Dynamic slots, -1 for each value left out."""
        return tuple(
            [-1 if v is None else self.define(v, SlotKind.DYNAMIC, **place) for v in values]
        )

    def constant(self, value: Value | None) -> int:
        """A slot for a value without one, which must be a constant."""
        assert value is not None
        if not value.is_constant:
            raise InternalError(f"value {value.name!r} is used before it is computed")
        # Reading a constant that is held in another form would convert it back: use its value.
        held = value.const if value.is_held else value
        assert held is not None
        # The object is kept alive with its slot, since the id of a deleted object may be reused.
        index, _ = self.constants.setdefault(id(held), (len(self.slots), held))
        if index == len(self.slots):
            self.slots.append(Slot(value.name, value.type, SlotKind.CONSTANT, value))
        self.slot_of[value] = index
        return index

    def read(self, values: Sequence[Value | None]) -> tuple[int, ...]:
        known, slots = self.slot_of, []
        for value in values:
            if value in known:
                slots.append(known[value])
            else:
                slots.append(self.constant(value))
        return tuple(slots)

    def roots(self, index: int) -> tuple[int, ...]:
        """The arena slots whose memory the value of a slot may be in."""
        return memory_of(self.slots, index) if index >= 0 else ()

    def resident_in(self, index: int) -> int:
        """The slot that holds the memory of a dynamic value: itself, or the one it is a view of."""
        base = self.slots[index].base
        return base if base >= 0 else index

    def written(self, value: Value | None, compiled: CompiledNode) -> int:
        """The slot of an output that its step writes: in the arena, its own or one of the two
        buffers of a loop; or allocated before the step."""
        if value is None:
            return -1
        if value in self.memory.results:
            return self.define(value, SlotKind.DYNAMIC, owned=True)
        inside = self.memory.alternating.get(value)
        if inside is not None:
            return self.define(value, SlotKind.DYNAMIC, roots=self.buffers[inside])
        memory = compiled.backend.memory if compiled.remote else HOST
        return self.define(value, SlotKind.ARENA, strides=self.memory.strides[value], memory=memory)

    def allocated(self, value: Value | None) -> int:
        """The slot of an output that its step allocates during the run."""
        if value is None:
            return -1
        return self.define(value, SlotKind.DYNAMIC, owned=_is_fresh(value))

    # Steps with kernels.

    def step(self, node: Node, compiled: CompiledNode) -> Step:
        kernel, backend, contract, *_ = compiled
        inputs = self.read(node.inputs) if compiled.on_host else self.inputs_of(node, compiled)
        into, outputs, are_tensors = node in self.memory.orders, [], True
        for value in node.outputs:
            outputs.append(self.written(value, compiled) if into else self.allocated(value))
            are_tensors &= value is None or isinstance(value.type, TensorType)
        workspace = -1
        if into and kernel.workspace:
            # As a slot of the arena, it shares memory with values that are not live meanwhile.
            type_ = TensorType(np.dtype(np.uint8), (kernel.workspace,))
            workspace = self.add(Slot(f"{node.name}/workspace", type_, SlotKind.ARENA))
        copied: tuple[int, ...] = ()
        if not are_tensors or kernel.begin is not None:
            # A list or an optional keeps the tensors that it is made of; and an asynchronous kernel
            # may read its inputs after its run was stopped.
            copied = tuple([i for i, index in enumerate(inputs) if self.roots(index)])
        return Step(
            node,
            kernel,
            inputs,
            tuple(outputs),
            into=into,
            workspace=workspace,
            copied=copied,
            backend=backend.name,
            contract=contract,
        )

    def inputs_of(self, node: Node, compiled: CompiledNode) -> tuple[int, ...]:
        """The slots that ``node`` reads away from the host; constants in the memory of its
        backend."""
        inputs = self.read(node.inputs)
        if node.op is TRANSFER:
            return inputs
        work = compiled.kernel.device
        slots = list(inputs)
        for i, index in enumerate(inputs):
            spread = work.backends_of_values
            backend = spread[i] if spread else compiled.backend
            if i not in work.host_inputs and backend.memory != HOST:
                slots[i] = self.constant_on(backend, index)
        return tuple(slots)

    def constant_on(self, backend: Backend, index: int) -> int:
        """Slot ``index``; for a constant, one with a copy in the memory of ``backend``."""
        if index < 0 or self.slots[index].kind is not SlotKind.CONSTANT:
            return index
        key = (index, backend.memory)
        if key not in self.copies:
            slot = self.slots[index]
            copy = Value(slot.name, slot.type, const=backend.from_host(slot.const))
            self.copies[key] = self.add(Slot(slot.name, slot.type, SlotKind.CONSTANT, copy))
        return self.copies[key]

    def view(self, node: Node, compiled: CompiledNode, certain: bool) -> Step | None:
        """A view of the arena needs no step; a view of other memory is a call during the run."""
        kernel, backend, contract, *_ = compiled
        inputs = self.read(node.inputs) if compiled.on_host else self.inputs_of(node, compiled)
        if node in self.memory.copied:
            return self.copying(node, compiled, inputs)
        error = self.memory.invalid.get(node)
        if error is not None:
            kernel = failing(node, error, certain)
            return Step(node, kernel, inputs, self.define_all(node.outputs), backend=backend.name)
        outputs = [value for value in node.outputs if value is not None]
        if outputs and self.memory.views.keys() >= {*outputs}:
            for value in outputs:
                view = self.memory.views[value]
                base, offset = self.slot_of[view.base], view.offset
                place = {"base": base, "offset": offset, "strides": view.strides}
                self.define(value, SlotKind.ALIAS, view.type, **place)
            return None
        source = inputs[0]
        roots, base, owned = self.roots(source), self.resident_in(source), self.slots[source].owned
        place = {"roots": roots, "base": base, "owned": owned}
        if outputs and (order := self.memory.expected.get(outputs[0])):
            place["strides"] = dense_strides(outputs[0].type, order)
        slots = self.define_all(node.outputs, **place)
        return Step(node, kernel, inputs, slots, backend=backend.name, contract=contract)

    def copying(self, node: Node, compiled: CompiledNode, inputs: tuple[int, ...]) -> Step:
        """A view that the strides of its source do not allow."""
        kernel, name = compiled.kernel, compiled.backend.name
        if node in self.memory.orders:
            function = kernel.function

            def copy(*arguments: Any) -> None:
                np.copyto(arguments[-1], function(*arguments[:-1]))

            kernel = Kernel(function, kernel.into or copy)
            target = self.written(node.outputs[0], compiled)
            return Step(node, kernel, inputs, (target,), into=True, backend=name)
        if len(node.outputs) > 1 or node.outputs[0] is None:
            # Some outputs may be views nevertheless.
            outputs = self.define_all(node.outputs, roots=self.roots(inputs[0]))
        else:
            outputs = self.define_all(node.outputs, owned=True)
        return Step(node, kernel, inputs, outputs, backend=name, contract=compiled.contract)

    # Control flow.

    def branches(self, node: Node) -> Step:
        inputs = self.read(node.inputs)
        blocks: list[Block] = []
        owned_by_branch: list[list[bool]] = []
        for branch in (node.attrs["then_branch"], node.attrs["else_branch"]):
            before = len(self.slots)
            steps = self.steps(branch, certain=False)
            results = self.read(branch.outputs)
            blocks.append(Block((), results, steps))
            # The If owns values that its branch computed (in later slots) and hands out only once.
            holders = [self.resident_in(index) for index in results]
            pairs = zip(results, holders, strict=True)
            flags = [
                self.slots[i].owned and h >= before and holders.count(h) == 1 for i, h in pairs
            ]
            owned_by_branch.append(flags)
        outputs = [-1] * len(node.outputs)
        for i, value in enumerate(node.outputs):
            if value is None:
                continue
            roots = dict.fromkeys(r for block in blocks for r in self.roots(block.outputs[i]))
            # The roots of a long chain of Ifs would add up without end.
            owned = all(flags[i] for flags in owned_by_branch) or len(roots) > _MOST_ROOTS
            place: dict[str, Any] = {"owned": True} if owned else {"roots": tuple(roots)}
            outputs[i] = self.define(value, SlotKind.DYNAMIC, **place)
        return Step(node, None, inputs, tuple(outputs), blocks=tuple(blocks))

    def loop(self, node: Node) -> Step:
        """Loop, Scan and SequenceMap: carried values, then outputs that collect rows."""
        body: Graph = node.attrs["body"]
        inputs = self.read(node.inputs)
        entering, leaving = loop_carried(node)
        initial, inside, updated = inputs[entering], body.inputs[entering], body.outputs[leaving]
        pairs = [self.buffer_pair(a, b) for a, b in zip(inside, updated, strict=True)]
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
            if output is not None and output in self.in_rows:
                results.append(self.define(output, SlotKind.DYNAMIC, SequenceType(output.type)))
            elif output is None or i >= len(pairs):
                results.append(self.allocated(output))
            else:
                # Without an iteration, or buffers, the result may be the initial value itself.
                roots = pairs[i] or self.roots(initial[i])
                results.append(self.define(output, SlotKind.DYNAMIC, roots=roots))
        updates = self.read(updated)
        carries = [
            Carry(
                initial[i],
                self.slot_of[inside[i]],
                updates[i],
                results[i] if i < len(results) else -1,
                pair,
                # Whether a step of the body writes the updated value straight into a buffer.
                direct=value.producer in self.memory.orders
                and self.memory.alternating.get(value) is inside[i],
            )
            for i, (value, pair) in enumerate(zip(updated, pairs, strict=True))
        ]
        return Step(node, None, inputs, tuple(results), blocks=(block,), carries=tuple(carries))

    def buffer_pair(self, inside: Value, updated: Value) -> tuple[int, int] | None:
        """Two alternating buffers for a carried value, if its type is fixed and it changes."""
        if not (self.planned and has_buffers(inside, updated)):
            return None
        producer = None if updated.producer is None else self.compiled.get(updated.producer)
        # The buffers are in the arena of the host.
        if producer is not None and not producer.on_host:
            return None
        first, second = [
            self.add(Slot(f"{inside.name}/{i}", inside.type, SlotKind.ARENA)) for i in (0, 1)
        ]
        self.buffers[inside] = first, second
        return first, second


def _is_fresh(value: Value) -> bool:
    """Whether a new value shares memory with no other: tensors, and maps made of tensors."""
    type_, node = value.type, value.producer
    if isinstance(type_, SequenceType) and isinstance(type_.element, MapType) and node is not None:
        return all(x is None or _is_tensor(x.type) for x in node.inputs)
    return _is_tensor(type_)


def _is_tensor(type_: Type) -> bool:
    return isinstance(type_, TensorType)


def failing(node: Node, error: Exception, certain: bool, backend: Backend | None = None) -> Kernel:
    """A kernel that fails when it runs, if its node may never run; else the error is raised."""
    if certain or not isinstance(error, ShapeError):
        raise compile_error(node, error, backend) from error
    message = str(error)

    def fail(*inputs: Any) -> Any:
        raise ShapeError(message)

    return Kernel(fail)
