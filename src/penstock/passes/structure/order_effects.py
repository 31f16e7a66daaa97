"""Order nodes with side effects as the model lists them, by control edges.

The nodes of an ONNX or TFLite model are topologically sorted, and other runtimes run them in this
order. Control edges preserve the order of side effects on every executor::

    Log(a), y = Neg(b), Log(c)      becomes      Log(a) ──> Log(c)

The pass runs after unfetched nodes were removed, so that no edge makes a node run. Control edges
order nodes within an iteration and a branch; structured loops run their iterations in sequence.
TensorFlow orders by edges alone: its operations, and graphs with frames, are left unchanged.
"""

from __future__ import annotations

from penstock.core.checkpoints import with_checkpoints
from penstock.ir.graph import Graph, Node, is_framed
from penstock.ir.op import Op
from penstock.ops.registry import TENSORFLOW
from penstock.passes.context import Pass, PassContext, Property


class OrderEffects(Pass):
    """Add control edges between nodes with side effects (see ``order_effects``)."""

    requires = frozenset({Property.STRUCTURED})

    def run(self, graph: Graph, context: PassContext) -> bool:
        return not is_framed(graph) and order_effects(graph)


def order_effects(graph: Graph) -> bool:
    """Add a control edge between consecutive nodes that ``keeps_order``, in nested graphs too.
    ``graph`` must be sorted. Return whether anything changed."""
    changed = False
    if True not in [_has_effect(op) for op in graph.ops if not op.pure]:
        return changed
    for inner in graph.graphs():
        before = None
        for node in with_checkpoints(inner.nodes):
            if keeps_order(node):
                if before is not None and before not in node.control_inputs:
                    node.control_inputs.append(before)
                    changed = True
                before = node
    return changed


def keeps_order(node: Node) -> bool:
    """Whether ``node``, or one in its graphs, takes part in the order of side effects."""
    return any(_has_effect(each.op) for each in (node, *node.inner))


def _has_effect(op: Op) -> bool:
    return not op.pure and op.domain != TENSORFLOW and "any order" not in op.traits
