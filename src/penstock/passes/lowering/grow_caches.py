"""Caches that grow from run to run, added to where they lie.

::

    present = Concat(past, new)      becomes      present = Append(past, new)

A decoder is fed what it returned as present as the past of its next step, so that a Concat would
copy all of the cache to add a row. Append adds the row where the past lies, if it lies in memory
with room behind it that no other present has taken. This holds where the past is fed, its length is
not known ahead, and the present is returned.
"""

from __future__ import annotations

from penstock.core.types import TensorType
from penstock.ir.graph import Graph, Node
from penstock.ops.common.shape_rules import normalize_axis
from penstock.ops.internal.arrays import APPEND
from penstock.passes.context import Pass, PassContext


class GrowCaches(Pass):
    """Replace such Concats of the outermost graph."""

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
    """The axis along which a Concat adds to something whose length is not known, but all other
    dims are."""
    past = node.inputs[0] if node.op.full_name == "Concat" and len(node.inputs) == 2 else None
    type_ = None if past is None else past.type
    if not isinstance(type_, TensorType) or not type_.shape or type_.dtype is None:
        return None
    axis = normalize_axis(node.attrs.get("axis", 1), len(type_.shape))
    open_axes = [i for i, dim in enumerate(type_.shape) if not isinstance(dim, int)]
    return axis if open_axes == [axis] else None
