"""Layout assignment: insert copies where a kernel requires one order of dims in memory."""

from __future__ import annotations

from collections.abc import Sequence, Set

from penstock.analysis.value_memory import Order, ValueMemory, value_memory
from penstock.core.checkpoints import with_checkpoints
from penstock.core.records import dataclass, field
from penstock.ir.graph import Graph, Node, Value
from penstock.ir.kernel import Kernel
from penstock.ir.op import Role
from penstock.ops.internal.transfer import HOST, REORDER
from penstock.ops.onnx.control_flow import is_control
from penstock.passes.context import Pass, PassContext, Placing, Property

_LOOPS = (Role.LOOP, Role.SCAN, Role.SEQUENCE_MAP)


class AssignLayouts(Pass):
    """Insert a Reorder before each input that a kernel requires contiguous, in its output's order
    of dims, and before each Reshape that the strides of its input do not allow as a view: compiled
    code copies it as part of a sequence of calls.

    The layout of a value follows from the kernel that writes it (``analysis.value_memory``). A
    value is copied into a layout once for all nodes that read it in that layout, in its graph and
    in graphs nested after the copy; copies are hoisted out of loops that only read the value.
    Values that are allocated during the run are assumed to be row-major: kernels check their
    strides themselves.
    """

    requires = frozenset({Property.PLACED, Property.TYPED})

    def run(self, graph: Graph, context: PassContext) -> bool:
        if not context.placing.plans_layouts:
            return False
        kernels: dict[Node, Kernel] = {}
        for node in graph.walk():
            is_run = node.nests and is_control(node)
            answer = None if is_run else context.placing.compiled(node)
            if answer is not None:
                kernels[node] = answer[1]
        # If no kernel requires a layout, layouts need not be propagated.
        if not any(k.view or k.layout.contiguous_inputs for k in kernels.values()):
            return False
        placement = context.placing.placement
        away = {node for node, place in placement.items() if place.memory != HOST}
        memory = value_memory(graph, kernels, away)
        inserter = _Inserter(kernels, memory, context.placing)
        inserter.graph(graph)
        if not inserter.count and not away:  # the plan can reuse it
            context.placing.memory = memory
        return inserter.count > 0


@dataclass(eq=False)
class _Scope:
    """State of the walk over one graph: its ``own`` values, the ``nodes`` so far, and the
    ``copies`` among them, by value and order. ``repeats``: it is a loop body in ``outer``."""

    outer: _Scope | None
    own: Set[Value]
    repeats: bool
    nodes: list[Node] = field(default_factory=list)
    copies: dict[tuple[Value, Order], Value] = field(default_factory=dict)

    def home(self, value: Value) -> _Scope:
        """Return the scope in which to copy ``value``: outside of loops where possible."""
        if self.outer is None or not self.repeats or value in self.own:
            return self
        return self.outer.home(value)

    def copy_of(self, value: Value, order: Order) -> Value | None:
        """Return the copy of ``value`` with dims in ``order`` visible in this scope, or None."""
        copy = self.copies.get((value, order))
        return copy if copy or self.outer is None else self.outer.copy_of(value, order)


@dataclass(eq=False)
class _Inserter:
    kernels: dict[Node, Kernel]
    memory: ValueMemory
    placing: Placing
    count: int = 0
    """number of copies"""

    def graph(self, graph: Graph, outer: _Scope | None = None, repeats: bool = False) -> None:
        """Insert copies into ``graph``, the body of a loop in ``outer`` if it ``repeats``."""
        results = [value for node in graph.nodes for value in node.outputs if value is not None]
        scope = _Scope(outer, {*graph.inputs, *results}, repeats)
        for node in with_checkpoints(graph.nodes):
            for _, inner in node.graphs if node.nests else ():
                self.graph(inner, scope, node.op.role in _LOOPS)
            kernel, copied = self.kernels.get(node), self.memory.copied
            order = self.memory.orders.get(node, () if node in copied else None)
            if order is not None and kernel is not None and kernel.layout.any_layout:
                order = kernel.layout.dims_order  # any order, the same as the output's
            for i in () if kernel is None or order is None else self.contiguous(node, kernel):
                value = node.input(i)
                if value is None or order is None or self.memory.has_order(value, order):
                    continue
                copy = scope.copy_of(value, order)
                if copy is None:
                    reorder = self.reorder(value, order)
                    (copy,) = reorder.outputs
                    assert copy is not None
                    home = scope.home(value)
                    home.nodes.append(reorder)
                    home.copies[value, order] = copy
                node.inputs[i] = copy
            scope.nodes.append(node)
        graph.nodes[:] = scope.nodes

    def contiguous(self, node: Node, kernel: Kernel) -> Sequence[int]:
        """Return which inputs of a node must be contiguous."""
        if node in self.memory.copied and len(node.outputs) == 1:
            return () if node.outputs[0] in self.memory.alternating else (0,)
        return kernel.layout.contiguous_inputs

    def reorder(self, value: Value, order: Order) -> Node:
        """Return a Reorder that copies ``value`` to memory with its dims in ``order``."""
        view = self.memory.views.get(value)
        self.count += 1
        name = f"{value.name}/reordered_{self.count}"
        copy = Value(name, value.type if view is None else view.type)
        # Make the order explicit: kernels that write any layout take None for their input's order.
        order = order or tuple(range(copy.rank or 0))
        node = Node(REORDER, [value], [copy], {"order": order}, name=name)
        answer = self.placing.compiled(node)
        if answer is not None:
            self.placing.placement[node] = answer[0]
        return node
