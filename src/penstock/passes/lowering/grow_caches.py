"""In-place growth of key-value caches from run to run.

::

    present = Concat(past, new)      becomes      present = Append(past, new)

The present that a decoder returns is fed as the past of its next step, so a Concat would copy the
whole cache to add a row. Append adds the row in place if the past's buffer has spare capacity after
it that no other present uses. The pass applies where the past is fed, its length is unknown at
compile time, and the present is returned.
"""

from __future__ import annotations

from penstock.core.types import TensorType
from penstock.ir.graph import Graph, Node
from penstock.ops.common.shape_rules import normalize_axis
from penstock.ops.internal.arrays import APPEND
from penstock.passes.context import Pass, PassContext


class GrowCaches(Pass):
    """Replace Concats that grow caches in the outermost graph."""

    def run(self, graph: Graph, context: PassContext) -> bool:
        changed = False
        fed, returned = set(graph.inputs), set(graph.outputs)
        for node in graph.nodes:
            axis = _axis(node)
            if axis is not None and node.inputs[0] in fed and node.outputs[0] in returned:
                node.op, node.attrs = APPEND, {"axis": axis}
                changed = True
        return changed


def _axis(node: Node) -> int | None:
    """Return the axis of a Concat if only its length is unknown, else None."""
    past = node.inputs[0] if node.op.full_name == "Concat" and len(node.inputs) == 2 else None
    type_ = None if past is None else past.type
    if not isinstance(type_, TensorType) or not type_.shape or type_.dtype is None:
        return None
    axis = normalize_axis(node.attrs.get("axis", 1), len(type_.shape))
    open_axes = [i for i, dim in enumerate(type_.shape) if not isinstance(dim, int)]
    return axis if open_axes == [axis] else None
