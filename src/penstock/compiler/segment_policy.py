"""Policies that group nodes of graphs with frames: into segments, raised loops and parts."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from penstock.backends.base import Backend
from penstock.backends.specializing import plausible
from penstock.compiler.frame_kernels import FrameKernels
from penstock.compiler.stages import CompileContext
from penstock.core.records import cached_property
from penstock.core.types import TensorType
from penstock.host.threads import OVERHEADS
from penstock.ir.contract import contract_of
from penstock.ir.graph import Graph, Node, all_reads, is_framed
from penstock.ir.op import FRAMED, Role
from penstock.ops.internal.segment import is_frame
from penstock.ops.internal.transfer import HOST
from penstock.ops.onnx.control_flow import collects_rows, is_control
from penstock.ops.work_estimate import host_seconds
from penstock.passes.context import FramePolicy
from penstock.passes.structure.conditions import is_switch
from penstock.passes.structure.lower_control_flow import spans_devices
from penstock.passes.structure.relax_control_edges import has_side_effects
from penstock.tuning.overlap import OverlapPolicy


class SlowNodes:
    """Finds the nodes of a graph with known types whose kernels wait or take long, and so whether
    ``devices`` need parts of their own."""

    def __init__(self, graph: Graph, kernels: FrameKernels) -> None:
        self._graph = graph
        self._kernels = kernels
        self._context = kernels.context

    @cached_property
    def need_parts(self) -> bool:
        """Whether devices need parts of their own: a kernel may keep one busy, several backends
        share a name, or kernels are asynchronous."""
        if not self._context.devices:
            return False
        own = {device_context.backends[0] for device_context in self._kernels.contexts.values()}
        # A node's backend is found by name, which must mean one device within a part.
        alike = len({backend.name for backend in own}) < len(own)
        # A part that waits for its device must not delay the parts of other devices.
        asynchronous = any(backend.device is not None for backend in own)
        return alike or asynchronous or any(map(self._occupies, self._graph.walk()))

    def _occupies(self, node: Node) -> bool:
        """Whether a node, or a node of its functions, may keep its device busy for long."""
        if node.op.role is Role.CALL:
            inner = self._context.functions[node.attrs["function"]].walk()
            return any(self.is_slow(inner_node) for inner_node in inner)
        return self.is_slow(node) or self.is_long(node)

    def is_slow(self, node: Node) -> bool:
        """Whether a kernel may wait for something: user-defined kernels on the host may."""
        if is_control(node):
            return any(map(self.is_slow, _with_kernels(node)))
        context = self._kernels.context_of(node.device)
        if node.op.role is not None or all(_is_own(node, b) for b in context.backends):
            return False
        try:
            backend = self._kernels.backend(node)
            kernel = self._kernels.table.kernel(backend, node)
        except Exception:  # compiling raises it later, unless the node never runs
            return True
        asynchronous = kernel is not None and kernel.begin is not None
        return asynchronous or (backend.memory == HOST and not _is_own(node, backend))

    def is_long(self, node: Node) -> bool:
        """Whether a kernel is expected to take so long that others should run meanwhile."""
        if is_control(node):
            return any(map(self.is_long, _with_kernels(node)))
        return host_seconds(plausible(node)) >= OVERHEADS.long_s


class DevicePolicy(FramePolicy):
    """The policy for devices of a session before the nodes on them are known. Structured nodes that
    span devices are lowered, but loops that collect rows only if devices need parts of their
    own."""

    def __init__(self, graph: Graph, context: CompileContext) -> None:
        super().__init__()
        self.devices = context.devices
        self._graph = graph
        self._context = context

    @cached_property
    def _need_parts(self) -> bool:
        return SlowNodes(self._graph, FrameKernels(self._graph, self._context)).need_parts

    def runs_apart(self, node: Node) -> bool:
        need_parts = self._need_parts  # read before the first node is lowered
        return spans_devices(node) and (need_parts or not collects_rows(node))


class ObservedPolicy(FramePolicy):
    """The policy for runs with observers: each node runs on its own, and each device has a part."""

    def __init__(self, context: CompileContext) -> None:
        super().__init__()
        self.separates = bool(context.devices)


class SegmentPolicy(FramePolicy):
    """The policy for runs without observers: nodes run as one wherever that cannot be observed and
    costs no time. ``refused``: the names of nodes that must be neither in a segment nor in a frame
    that is one node."""

    def __init__(
        self, kernels: FrameKernels, slow: SlowNodes, refused: Collection[str] = ()
    ) -> None:
        super().__init__()
        self.separates = slow.need_parts
        self._kernels = kernels
        self._slow = slow
        self._refused = refused
        context = kernels.context
        self._overlap = None
        if context.executor == "auto":
            self._overlap = OverlapPolicy(
                context.hosts, context.costs, context.workers, context.long
            )

    def copy(self, graph: Graph) -> Graph:
        return self._kernels.copy(graph)

    def is_slow(self, node: Node) -> bool:
        return self._slow.is_slow(node)

    def is_long(self, node: Node) -> bool:
        return self._slow.is_long(node)

    def runs_apart(self, node: Node) -> bool:
        """Whether nodes in the graphs of ``node`` should run at the same time as others. Stateful
        nodes stay in place, since both forms of the graph share their state."""
        return self.is_slow(node) and all(inner_node.op.pure for inner_node in node.inner)

    def must_stay(self, nodes: Sequence[Node], loop: bool) -> Node | None:
        """Return a node that prevents raising a frame, or the graph around all frames: its effects
        can be observed outside, or other nodes may run at the same time. "auto" has already raised
        the frames that it can."""
        if self._overlap is not None:
            return self._overlap.must_stay(nodes, loop)
        for node in nodes:
            if has_side_effects(node) or self.is_slow(node) or (loop and self.is_long(node)):
                return node
        return None

    def may_be_whole(self, node: Node) -> bool:
        """Whether a node may be in a loop that is one node: no other node, of any iteration, should
        run at the same time."""
        if node.name in self._refused:
            return False
        if self._overlap is not None and self._overlap.must_stay([node], True):
            return False
        # A call has a graph with tokens of its own, and an Enter begins another frame.
        primitive = node.op.role in FRAMED and node.op.role not in (Role.ENTER, Role.CALL)
        if primitive or is_frame(node):
            return node.op.role is not Role.SWITCH or is_switch(node)
        framed = any(is_framed(graph) for _, graph in node.graphs)
        return not (framed or node.op.role in FRAMED or self.is_slow(node) or self.is_long(node))

    def joins(self, node: Node) -> bool:
        """Whether a node may be part of a segment."""
        ordinary = node.op.role in (None, Role.LOOP_COND) or is_control(node)
        if not ordinary or node.name in self._refused or has_side_effects(node):
            return False
        if self.is_slow(node) or any(is_framed(graph) for _, graph in node.graphs):
            return False
        values = [*all_reads(node), *node.outputs]  # planning a segment requires dtypes
        types = [value.type for value in values if value is not None]
        return all(isinstance(t, TensorType) and t.dtype is not None for t in types)


def _with_kernels(node: Node) -> list[Node]:
    """Return the nodes of the graphs of ``node`` that have kernels."""
    return [inner for inner in node.inner if not inner.graphs]


def _is_own(node: Node, backend: Backend) -> bool:
    return contract_of(node, backend, types=()) is None
