"""The stage that compiles graphs with frames, and all graphs for ``executor="frames"``.

::

    graph ──> loops and conditions raised ──> partition by device ──> segments ──> FramesExecutor
      └─────────────────────── of observed runs, every node as it is ─────────────────┘

A loop that is not raised becomes one node (``Frame``) where no token of it can be observed. The
graph of a segment goes through the same stages as other graphs; a node in no segment runs on
the backend that is expected to be fastest for it. Runs with observers use a second form of the
graph, which is compiled when the first of them begins and has each node of the model.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from weakref import WeakKeyDictionary

import numpy as np

from penstock.analysis.frames import FramePath, Frames, GraphPart
from penstock.analysis.sizes import check_sizes
from penstock.analysis.type_inference import infer_types, node_types
from penstock.backends.base import Backend, TakesTensors
from penstock.backends.dynamic_shapes import plausible
from penstock.backends.kernels import KernelTable
from penstock.backends.registry import backend_of
from penstock.compiler import stages
from penstock.compiler.lowering import lower_graph, optimize_for_shapes
from penstock.compiler.stages import CompileContext, Feeds
from penstock.core.capability import capability
from penstock.core.checkpoints import checkpoint
from penstock.core.errors import InvalidModel, LimitExceeded, Unsupported
from penstock.core.records import replace
from penstock.core.types import TensorType
from penstock.executors.base import Executor, may_use_threads
from penstock.executors.frames.builder import FrameGraphBuilder
from penstock.executors.frames.device_segment import DeviceSegment
from penstock.executors.frames.executor import FramesExecutor
from penstock.executors.frames.frame_writer import FrameForm
from penstock.host.threads import OVERHEADS
from penstock.ir.contract import contract_of, guarded
from penstock.ir.graph import Graph, Node, Value, all_reads, captures, clone, is_framed
from penstock.ir.kernel import Kernel
from penstock.ir.op import FRAMED, Role
from penstock.ops.internal.segment import is_frame
from penstock.ops.internal.transfer import HOST, Ports
from penstock.ops.onnx.control_flow import collects_rows, is_control
from penstock.ops.work_estimate import host_seconds
from penstock.passes.dead_code import prune
from penstock.passes.lowering.assign_devices import assign_devices
from penstock.passes.lowering.partition import partition
from penstock.passes.optimize.fold_constants import FoldConstants
from penstock.passes.pipeline import run_passes
from penstock.passes.structure.branches import UnraisedError
from penstock.passes.structure.conditions import LIVES, is_switch
from penstock.passes.structure.loops import FrameLoop
from penstock.passes.structure.lower_control_flow import lower_control_flow, spans_devices
from penstock.passes.structure.raise_control_flow import raise_control_flow
from penstock.passes.structure.relax_control_edges import RelaxControlEdges, has_side_effects
from penstock.passes.structure.segments import group_segments
from penstock.plan.builder import failing
from penstock.tuning.placement import NODE, Placement

# Times that segments are formed anew, without the nodes of one that cannot be compiled.
_MOST_ATTEMPTS = 4


def build_frames(feeds: Feeds, context: CompileContext) -> Executor:
    """The frames executor of a graph. Raises ``Unsupported`` if another one was asked for."""
    graph = feeds.graph
    if context.devices:
        assign_devices(graph, context.devices)
        infer_types(graph, certain=not is_framed(graph))
        lower_control_flow(graph, _FramesCompiler(graph, context).parted)
    if not is_framed(graph):
        infer_types(graph)
    check_sizes(graph, context.limits)
    Frames(graph)  # first, since an invalid graph is not unsupported but invalid
    if context.executor not in ("auto", "frames"):
        reason = 'so that only executor="frames" or "auto" runs it'
        raise Unsupported.of(
            (p.node.op.full_name, f"{p.reason}, {reason}", p.node.label) for p in feeds.unraised
        )
    if is_framed(graph):
        infer_types(graph, certain=False)
    if context.devices:
        assign_devices(graph, context.devices)
    return _FramesCompiler(graph, context).segmented()


def build_part(graph: Graph, context: CompileContext) -> FramesExecutor:
    """The executor of a part of a graph, whose other parts are on other workers of a cluster."""
    infer_types(graph, certain=False)
    check_sizes(graph, context.limits)
    return _FramesCompiler(graph, context).segmented()


class _SegmentError(Exception):
    """A segment, or a frame as one node, cannot be compiled, perhaps since it would never run."""

    def __init__(self, graph: Graph) -> None:
        super().__init__(graph.name)
        self.names = {node.name for node in graph.nodes}


class _FramesCompiler:
    """Compiles one graph, whose types are known, in both of its forms. ``kept`` has the kernels of
    nodes with side effects: both forms share their state. ``originals`` has the nodes of the model
    by their copies. ``refused``: the names of nodes that must be in no segment, nor in a frame that
    is one node. ``one_partition``: whether devices gain nothing from parts of their own, since no
    kernel waits or takes long."""

    def __init__(self, graph: Graph, context: CompileContext) -> None:
        self.graph = graph
        self.context = context
        self.kept: dict[Node, tuple[Kernel, str]] = {}
        self.originals = WeakKeyDictionary[Node, Node]()
        self.refused: set[str] = set()
        self.kernels = KernelTable()
        self.overlapping = context.passes().must_stay  # of "auto", which has raised what it can
        self.contexts = _contexts(graph, context, self.kernels)
        self.one_partition = bool(context.devices) and not self.separate()

    def segmented(self) -> FramesExecutor:
        """The executor of runs without observers."""
        for node, frame in Frames(self.graph).of.items():
            if node.op.role is Role.NEXT_ITERATION and frame.parent is None:
                return self.observed()  # even constants are tokens of the first iteration
        for _ in range(_MOST_ATTEMPTS):
            graph = self.copy(self.graph)
            self.fold_constants(graph)
            if lower_control_flow(graph, self.overlaps):
                infer_types(graph, certain=False)
            if not self.in_parts(graph) and is_framed(graph):
                stay = self.overlapping or self.must_stay
                graph, _ = raise_control_flow(graph, stay, self.may_be_whole, self.copy)
                infer_types(graph, certain=False)
            try:
                return self.build(graph, segments=True)
            except _SegmentError as error:
                self.refused |= error.names
        return self.observed()

    def observed(self) -> FramesExecutor:
        """The executor of runs with observers, each node as the model has it."""
        return self.build(self.copy(self.graph), segments=False)

    def build(self, graph: Graph, segments: bool) -> FramesExecutor:
        context = self.context
        frames = Frames(graph)
        inputs, outputs = tuple(range(len(graph.inputs))), tuple(range(len(graph.outputs)))
        parts = [GraphPart("", graph, inputs, outputs, frames.paths())]
        if not (segments and self.one_partition) and context.devices:
            split = partition(graph, frames, {node: node.device for node in graph.nodes})
            if len(split) > 1:
                parts = split
                for part in parts:
                    self.originals.update(part.originals)
        builder = FrameGraphBuilder(
            self.kernel,
            partial(self.executor, segments),
            partial(self.function, segments),
            partial(self.called, segments),
            _frame_form,
            context.limits,
            context.workers,
        )
        if segments:
            parts = [replace(part, paths=self.grouped(part)) for part in parts]
            return builder.build(graph, parts, len(context.devices), self.observed)
        return builder.build(graph, parts, len(context.devices))

    def function(self, segments: bool, name: str) -> Graph:
        """A copy of a function's graph, without dead code."""
        graph = self.copy(self.context.functions[name])
        prune(graph)
        check_sizes(graph, self.context.limits)
        infer_types(graph, certain=False)
        return self.called(segments, graph)

    def called(self, segments: bool, graph: Graph, inputs: list[Value] | None = None) -> Graph:
        """A copy of a graph that a node calls, with these inputs."""
        graph = self.copy(graph, inputs)
        if segments and not self.in_parts(graph):
            self.fold_constants(graph)
            self.group(graph)
        return graph

    def fold_constants(self, graph: Graph) -> None:
        transfers = any(node.op.role in (Role.SEND, Role.RECV) for node in graph.nodes)
        passes = replace(self.context.passes(), framed=is_framed(graph) or transfers)
        run_passes((FoldConstants(),), graph, passes)

    def in_parts(self, graph: Graph) -> bool:
        """Whether the nodes of a graph are on several devices that have parts of their own, or it
        is such a part."""
        if any(node.op.role in (Role.SEND, Role.RECV) for node in graph.nodes):
            return True
        several = self.context.devices and len({node.device for node in graph.nodes}) > 1
        return bool(several) and not self.one_partition

    def copy(self, graph: Graph, inputs: list[Value] | None = None) -> Graph:
        """A copy of a graph, of which the nodes with side effects keep their kernels."""
        copy = clone(graph, inputs)
        nodes = zip(copy.walk(), graph.walk(), strict=True)
        self.originals.update((new, node) for new, node in nodes if not node.op.pure)
        return copy

    # Segments.

    def grouped(self, part: GraphPart) -> Mapping[Node, FramePath]:
        """Group the nodes of a part into segments; returns the frame of each node."""
        for node in [*part.graph.walk()]:
            if is_frame(node) and not captures(node.attrs["body"]):
                self.group(node.attrs["body"])
        segments = self.group(part.graph)
        return {**part.paths, **{new: part.paths[node] for new, node in segments.items()}}

    def group(self, graph: Graph) -> dict[Node, Node]:
        """Group the nodes of a graph into segments; returns a node of each."""
        frames = Frames(graph)
        looping = {frames.of[n] for n in graph.nodes if n.op.role is Role.NEXT_ITERATION}
        overlapping = {frame for frame in looping if frame.parallel_iterations > 1}

        def is_slow(node: Node) -> bool:
            return self.is_slow(node) or (frames.of[node] in overlapping and self.is_long(node))

        return group_segments(graph, frames, self.joins, is_slow)

    def joins(self, node: Node) -> bool:
        """Whether a node may be part of a segment."""
        ordinary = node.op.role in (None, Role.LOOP_COND) or is_control(node)
        if not ordinary or node.name in self.refused or has_side_effects(node):
            return False
        if self.is_slow(node) or any(is_framed(graph) for _, graph in node.graphs):
            return False
        values = [*all_reads(node), *node.outputs]
        types = [value.type for value in values if value is not None]
        return all(isinstance(t, TensorType) and t.dtype is not None for t in types)

    def must_stay(self, nodes: Sequence[Node], loop: bool) -> Node | None:
        """A node because of which a frame, or the graph around all frames, is not raised: what it
        does can be seen from outside, or other nodes may run at the same time."""
        for node in nodes:
            if has_side_effects(node) or self.is_slow(node) or (loop and self.is_long(node)):
                return node
        return None

    def may_be_whole(self, node: Node) -> bool:
        """Whether a node may be in a loop that is one node: no other node, of any iteration, had
        better run at the same time."""
        if node.name in self.refused or (self.overlapping and self.overlapping([node], True)):
            return False
        primitive = node.op.role in FRAMED and node.op.role not in (Role.ENTER, Role.CALL)
        if primitive or is_frame(node):
            return node.op.role is not Role.SWITCH or is_switch(node)
        framed = any(is_framed(graph) for _, graph in node.graphs)
        return not (framed or node.op.role in FRAMED or self.is_slow(node) or self.is_long(node))

    def separate(self) -> bool:
        """Whether devices need parts of their own: some kernel may keep one busy, backends of one
        name are not one, or kernels are asynchronous."""
        own = {each.backends[0] for each in self.contexts.values()}
        alike = len({backend.name for backend in own}) < len(own)
        away = any(backend.device is not None for backend in own)
        return alike or away or any(map(self.occupies, self.graph.walk()))

    def parted(self, node: Node) -> bool:
        """Whether the nodes in the graphs of ``node`` must run on devices of their own."""
        return spans_devices(node) and not (self.one_partition and collects_rows(node))

    def overlaps(self, node: Node) -> bool:
        """Whether nodes in the graphs of ``node`` had better run at the same time as others; those
        with state stay, which have it in both forms of the graph."""
        inner = [each for _, graph in node.graphs for each in graph.walk()]
        return self.is_slow(node) and all(each.op.pure for each in inner)

    def occupies(self, node: Node) -> bool:
        """Whether a node may keep its device busy for long, those of functions included."""
        if node.op.role is Role.CALL:
            inner = self.context.functions[node.attrs["function"]].walk()
            return any(self.is_slow(each) for each in inner)
        return self.is_slow(node) or self.is_long(node)

    def is_slow(self, node: Node) -> bool:
        """Whether a kernel may wait for something: those of users may, on the host."""
        if is_control(node):
            return any(map(self.is_slow, _kernels(node)))
        context = self.contexts.get(node.device, self.context)
        if node.op.role is not None or all(_is_own(node, b) for b in context.backends):
            return False
        try:
            backend = self.backend(node)
            kernel = self.kernels.kernel(backend, node)
        except Exception:  # it is raised later, unless the node never runs
            return True
        asynchronous = kernel is not None and kernel.begin is not None
        return asynchronous or (backend.memory == HOST and not _is_own(node, backend))

    def is_long(self, node: Node) -> bool:
        """Whether a kernel is expected to take so long that others had better run meanwhile."""
        if is_control(node):
            return any(map(self.is_long, _kernels(node)))
        return host_seconds(plausible(node)) >= OVERHEADS.long_s

    # Kernels and plans.

    def backend(self, node: Node) -> Backend:
        """The backend of a node: the fastest, or the last of the host that has constants."""
        if not node.inputs:
            hosts = self.context.hosts[::-1]
            return next((host for host in hosts if self.kernels.accepts(host, node)), hosts[0])
        context = self.contexts.get(node.device, self.context)
        place = context.options.place or {}
        placement = Placement(context.backends, place, self.kernels, context.costs)
        return placement.fastest(Graph([], [], [node]))[node]

    def kernel(self, node: Node) -> tuple[Kernel, str] | None:
        """The kernel of a node with the name of its backend; None if the node needs a plan: for its
        graphs, for transfers, or for kernels that share threads."""
        if node.graphs:
            return None
        original = node
        while original in self.originals:
            original = self.originals[original]
        if original in self.kept:
            return self.kept[original]
        try:
            node_types(node)
        except InvalidModel as error:
            cause = error.__cause__
            return failing(node, cause if isinstance(cause, Exception) else error, False), ""
        backend = self.backend(node)
        away = backend.threads_of_caller or backend.memory != HOST or may_use_threads(node)
        if node.inputs and away:
            return None
        compiled = self._compiled(node, backend), backend.name
        if not node.op.pure:
            self.kept[original] = compiled
        return compiled

    def _compiled(self, node: Node, backend: Backend) -> Kernel:
        checkpoint()
        try:
            kernel = self.kernels.kernel(backend, node)
        except Exception as error:
            return failing(node, error, certain=False)
        if kernel is None:
            reason = f"no kernel is available for it on {backend.name}"
            raise Unsupported.of([(node.op.full_name, reason, node.label)])
        contract = contract_of(node, backend)
        return kernel if contract is None else guarded(contract, kernel)

    def executor(self, segments: bool, graph: Graph) -> Executor:
        """The executor of a graph without frames, all of it on one device."""
        context = self.contexts.get(graph.nodes[0].device if graph.nodes else "", self.context)
        values = [_placeholder(value) for value in graph.inputs]
        if any(value is None for value in values):
            # What is not known cannot be measured.
            options = context.options
            expert = options.expert.changed(cost_model=context.costs)
            context = replace(context, options=replace(options, expert=expert))
        own = context.backends[0]
        on_streams = own.device is not None and capability(own, TakesTensors) is not None
        ports = Ports({}, stay=True) if on_streams else None
        feeds = Feeds(graph, values, refined=True, ports=ports)
        try:
            run_passes((RelaxControlEdges(),), graph, context.passes())
            lowered = lower_graph(optimize_for_shapes(feeds, context), context)
            planned = stages.plan_slots(lowered, context, inner=True)
            executor = stages.executor_in_order(planned, context, "linear")
            return DeviceSegment(executor, own) if on_streams else executor
        except (InvalidModel, LimitExceeded) as error:
            if not segments:
                raise
            raise _SegmentError(graph) from error


def _contexts(
    graph: Graph, context: CompileContext, kernels: KernelTable
) -> dict[str, CompileContext]:
    """The contexts of devices that stand for backends, by name: nodes are placed there, as far as
    the backends have kernels for them and the user does not say otherwise."""
    devices = context.options.devices
    if not isinstance(devices, Mapping):
        return {}
    chosen = {each: backend_of(each, context.options.precision) for each in devices.values()}
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


def _frame_form(node: Node) -> FrameForm:
    """The form of a frame that is one node."""
    body = node.attrs["body"]
    frames = Frames(body)
    (frame,) = frames.by_name.values()
    try:
        loop = FrameLoop(frame, [node for node in body.nodes if frames.of[node] is frame])
    except UnraisedError as error:
        raise _SegmentError(body) from error
    conditions = loop.deadness.conditions
    edge = {*loop.variables, *loop.next_iterations, *loop.exits}
    return FrameForm(
        body,
        frame.enters,
        [(merge, v.enter, v.next) for merge, v in loop.variables.items()],
        [node for node in loop.nodes if node not in edge],
        conditions,
        loop.deadness.of,
        [node for node, condition in conditions.items() if (node, LIVES) in condition],
        loop.deadness.predicate,
        frozenset({(loop.predicate, 1 - loop.side)}),
    )


def _kernels(node: Node) -> list[Node]:
    """The nodes of the graphs of ``node`` that have kernels."""
    return [inner for _, graph in node.graphs for inner in graph.walk() if not inner.graphs]


def _is_own(node: Node, backend: Backend) -> bool:
    return contract_of(node, backend, types=()) is None


def _placeholder(value: Value) -> np.ndarray | None:
    """An array of the type of a value, if that is known."""
    type_ = value.type
    if not isinstance(type_, TensorType) or not type_.static or type_.dtype is None:
        return None
    return np.broadcast_to(np.zeros((), type_.dtype), type_.dims)
