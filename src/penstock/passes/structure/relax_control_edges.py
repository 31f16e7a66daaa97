"""Who waits for nodes without effects need not: what these wait for themselves is enough.

TensorFlow has nodes wait for others so that a constant belongs to a branch, say, or so that a check
is made first. Where all of a graph runs, once, in some order, only effects can tell who was first.
Nodes that wait for nobody can then be folded, merged and fused.
"""

from __future__ import annotations

from penstock.ir.graph import Graph, Node
from penstock.ops.registry import TENSORFLOW
from penstock.ops.tensorflow.control_flow import is_framed
from penstock.passes.context import Pass, PassContext, Property

_NOTHING = frozenset({"NoOp", "ControlTrigger"})  # which do nothing at all


class RelaxControlEdges(Pass):
    """Drop control edges to nodes without side effects (see ``release``)."""

    name = "relax_control_edges"
    requires = frozenset({Property.STRUCTURED})

    def run(self, graph: Graph, context: PassContext) -> bool:
        return not is_framed(graph) and release(graph)


def release(graph: Graph) -> bool:
    """Let each node wait only for nodes with effects, instead of for nodes that come after these;
    ``graph`` must be sorted. Nested graphs too."""
    changed = False
    for each in graph.graphs():
        if any(node.control_inputs for node in each.nodes):
            changed |= _release(each)
    return changed


def _release(graph: Graph) -> bool:
    # For each node the nodes with effects that it comes after, as far as no other is between.
    behind: dict[Node, dict[Node, None]] = {}
    changed = False
    for node in graph.nodes:
        waits: dict[Node, None] = {}
        for source in node.control_inputs:
            waits.update({source: None} if effective(source) else behind.get(source, {}))
        if list(waits) != node.control_inputs:
            node.control_inputs = list(waits)
            changed = True
        found = dict(waits)
        for value in node.inputs:
            source_ = None if value is None else value.producer
            if source_ is not None:
                found.update({source_: None} if effective(source_) else behind.get(source_, {}))
        behind[node] = found
    return changed


def effective(node: Node) -> bool:
    """Whether anybody can tell when ``node`` runs, or whether it does."""
    if node.op.domain == TENSORFLOW and node.op.name in _NOTHING:
        return False
    if not node.op.pure:
        return True
    return any(not inner.op.pure for _, graph in node.graphs for inner in graph.walk())
