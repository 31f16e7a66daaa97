"""Kernels of nodes in graphs with frames, and executors of their segments."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from weakref import WeakKeyDictionary

import numpy as np

from penstock.analysis.type_inference import node_types
from penstock.backends.base import Backend, TakesTensors
from penstock.backends.kernels import KernelTable
from penstock.backends.registry import backend_of
from penstock.compiler import stages
from penstock.compiler.lowering import lower_graph, optimize_for_shapes, pass_context
from penstock.compiler.scheduling import observed_executor, schedule_tasks
from penstock.compiler.stages import CompileContext, Feeds
from penstock.core import capability
from penstock.core.checkpoints import checkpoint
from penstock.core.errors import InvalidModel, Unsupported
from penstock.core.records import replace
from penstock.core.types import TensorType
from penstock.executors.base import Executor, may_use_threads
from penstock.executors.frames.device_segment import DeviceSegment
from penstock.executors.frames.frame_graph import isolate
from penstock.host.threads import Workers
from penstock.ir.contract import contract_of, guarded
from penstock.ir.graph import Graph, Node, Value, clone
from penstock.ir.kernel import Kernel
from penstock.ops.internal.transfer import HOST, Ports
from penstock.passes.pipeline import run_passes
from penstock.passes.structure.relax_control_edges import RelaxControlEdges
from penstock.plan.builder import failing
from penstock.tuning.measure import GraphProfiler
from penstock.tuning.node_signature import NodeSignature, node_signature
from penstock.tuning.placement import NODE, Placement
from penstock.tuning.trial import BUDGET

_CALLER = Workers("segment", 1)
"""the pool for tasks of segments on the host: only the thread that runs the segment"""


class FrameKernels:
    """Compiles the nodes of one graph with known types for both of its forms: for runs with
    observers and for runs without. ``_kept`` holds the kernels of nodes with side effects, since
    both forms share their state; ``_originals`` maps copies to the model's nodes. ``contexts``:
    those of devices that stand for backends, by name."""

    def __init__(self, graph: Graph, context: CompileContext) -> None:
        self.graph = graph
        self.context = context
        self.table = KernelTable()
        self.contexts = _contexts(graph, context, self.table)
        self._kept: dict[Node, tuple[Kernel, str]] = {}
        # Weak keys: copies live as long as the form of the graph to which they belong.
        self._originals = WeakKeyDictionary[Node, Node]()

    def measure(self) -> None:
        """Measure each node of the graph alone, on zeros, if the user asks for measurements or if
        backends have memories of their own, whose estimates are not comparable. Nodes whose types
        are known only during runs are left out."""
        options = self.context.options
        is_requested = options.autotune or not self.context.one_memory
        if not self.context.measures or not is_requested:
            return
        measured = set[NodeSignature]()
        for node in self.graph.nodes:
            signature = node_signature(node)
            if node.op.role is None and node.op.pure and signature and signature not in measured:
                measured.add(signature)
                self._measure(isolate(node)[0], self.context_of(node.device))

    def _measure(self, graph: Graph, context: CompileContext) -> None:
        values = [_placeholder(value) for value in graph.inputs]
        profiler = GraphProfiler(
            graph, context.costs, values, self.table, partial(observed_executor, context)
        )
        place = context.options.place or {}
        placement = Placement(context.backends, place, self.table, context.placing_costs)
        profiler.allowed = placement.candidates(graph)
        runs = None if context.options.autotune else BUDGET - 2
        # Tokens are placed by times with all threads, tasks of segments by times with one thread.
        for single in (False,) if context.one_memory else (False, True):
            profiler.complete(single_threaded=single, brief_runs=runs)

    def copy(self, graph: Graph, inputs: list[Value] | None = None) -> Graph:
        """Return a copy of a graph whose nodes with side effects keep their kernels."""
        copy = clone(graph, inputs)
        self.copied(dict(zip(copy.walk(), graph.walk(), strict=True)))
        return copy

    def copied(self, originals: Mapping[Node, Node]) -> None:
        """Let copies of nodes with side effects share the kernels of these ``originals``."""
        self._originals.update((new, old) for new, old in originals.items() if not old.op.pure)

    def context_of(self, device: str) -> CompileContext:
        """Return the context that compiles the nodes of a device."""
        return self.contexts.get(device, self.context)

    def backend(self, node: Node) -> Backend:
        """Return the fastest backend of a node, or the last host backend for a constant node."""
        if not node.inputs:
            hosts = self.context.hosts[::-1]
            return next((host for host in hosts if self.table.accepts(host, node)), hosts[0])
        context = self.context_of(node.device)
        place = context.options.place or {}
        placement = Placement(context.backends, place, self.table, context.placing_costs)
        return placement.fastest(Graph([], [], [node]))[node]

    def kernel(self, node: Node) -> tuple[Kernel, str] | None:
        """Return the kernel of a node and the name of its backend, or None if the node needs a
        plan: for its graphs, for transfers, or for kernels that share threads."""
        if node.graphs:
            return None
        # A node may be a copy of a copy, such as a function's graph in one form of the model's.
        original = node
        while original in self._originals:
            original = self._originals[original]
        if original in self._kept:
            return self._kept[original]
        try:
            node_types(node)
        except InvalidModel as error:
            cause = error.__cause__
            return failing(node, cause if isinstance(cause, Exception) else error, False), ""
        backend = self.backend(node)
        needs_plan = backend.threads_of_caller or backend.memory != HOST or may_use_threads(node)
        if node.inputs and needs_plan:
            return None
        compiled = self._compiled(node, backend), backend.name
        # Both forms of the graph share the node's state, such as its random numbers.
        if not node.op.pure:
            self._kept[original] = compiled
        return compiled

    def _compiled(self, node: Node, backend: Backend) -> Kernel:
        checkpoint()
        try:
            kernel = self.table.kernel(backend, node)
        except Exception as error:
            return failing(node, error, certain=False)
        if kernel is None:
            reason = f"no kernel is available for it on {backend.name}"
            raise Unsupported.of([(node.op.full_name, reason, node.label)])
        if self.context.options.reproducible and backend.name != "native":
            from penstock.ops.exactness import check_exact

            check_exact([node])
        contract = contract_of(node, backend)
        return kernel if contract is None else guarded(contract, kernel)

    def executor(self, graph: Graph) -> Executor:
        """Return the executor of a graph without frames on one device. Raises ``InvalidModel`` or
        ``LimitExceeded`` for a graph that cannot run, even if no run would reach it."""
        context = self.context_of(graph.nodes[0].device if graph.nodes else "")
        values = [_placeholder(value) for value in graph.inputs]
        if context.measures and any(value is None for value in values):
            # Nodes of unknown types cannot be measured.
            options = context.options
            expert = options.expert.changed(cost_model=context.costs)
            context = replace(context, options=replace(options, expert=expert))
        own = context.backends[0]
        on_streams = own.device is not None and capability(own, TakesTensors) is not None
        # Tokens may stay on the device between segments: only values the host reads are copied.
        ports = Ports({}, stay=True) if on_streams else None
        feeds = Feeds(graph, values, refined=True, ports=ports)
        run_passes((RelaxControlEdges(),), graph, pass_context(context))
        schedule = stages.schedule_in_order
        if not (context.one_memory or on_streams):
            context, schedule = _on_far_workers(context), schedule_tasks
        lowered = lower_graph(optimize_for_shapes(feeds, context), context)
        planned = stages.plan_slots(lowered, context, inner=True)  # runs raise its errors
        programmed = stages.generate_program(schedule(planned, context), context)
        executor = stages.bind(programmed, context)
        return DeviceSegment(executor, own) if on_streams else executor


def _contexts(
    graph: Graph, context: CompileContext, kernels: KernelTable
) -> dict[str, CompileContext]:
    """Return the contexts of devices that stand for backends, by name. Nodes of such a device run
    on its backend if it has kernels for them and the user does not say otherwise."""
    devices = context.options.devices
    if not isinstance(devices, Mapping):
        return {}
    chosen = {spec: backend_of(spec, context.options.precision) for spec in devices.values()}
    backends = {n: chosen[d] for n, d in zip(context.devices, devices.values(), strict=True)}
    place = {
        f"{NODE}{node.name}": backends[node.device].name
        for node in graph.walk()
        if node.device in backends and node.name and node.op.role is None
        if kernels.accepts(backends[node.device], node)
    }
    options = replace(context.options, place={**place, **(context.options.place or {})})
    contexts: dict[str, CompileContext] = {}
    for name, own in backends.items():
        others = {b.name: b for b in (*context.backends, *backends.values()) if b.name != own.name}
        contexts[name] = replace(context, backends=(own, *others.values()), options=options)
    return contexts


def _on_far_workers(context: CompileContext) -> CompileContext:
    """Return the context of a segment whose nodes may run at the same time on backends with
    memories of their own. On the host it has one worker: the others run other tokens."""
    options = context.options
    expert = options.expert.changed(pool=_CALLER)
    own = replace(options, executor="parallel", expert=expert, devices=None, cluster=None)
    return replace(context, options=own)


def _placeholder(value: Value) -> np.ndarray | None:
    """Return an array of the type of a value, or None if the type is not known."""
    type_ = value.type
    if not isinstance(type_, TensorType) or not type_.static or type_.dtype is None:
        return None
    # One element with strides of 0, so that the placeholder of a large value takes no memory.
    return np.broadcast_to(np.zeros((), type_.dtype), type_.dims)
