"""Name variables in their reads and assignments, so that no step computes a handle.

::

    h = VarHandleOp(); y = ReadVariableOp(h)      becomes      y = ReadVariableOp(_)
"""

from __future__ import annotations

from penstock.ir.graph import Graph
from penstock.ops.registry import TENSORFLOW
from penstock.ops.tensorflow.state import NAMED
from penstock.passes.context import Pass, PassContext
from penstock.passes.dead_code import prune


class BindVariables(Pass):
    """Move the name of a variable from its handle to the nodes that read and assign it."""

    def run(self, graph: Graph, context: PassContext) -> bool:
        changed = False
        nodes = [node for inner in graph.graphs() for node in inner.nodes if node.op.name in NAMED]
        for node in nodes:
            if node.op.domain != TENSORFLOW:
                continue
            handle = None if node.inputs[0] is None else node.inputs[0].producer
            if handle is not None and handle.op.name == "VarHandleOp":
                # TensorFlow names a variable by its node if shared_name is empty.
                name = handle.attrs.get("shared_name") or handle.name
                node.attrs = {**handle.attrs, **node.attrs, "shared_name": name}
                node.inputs[0] = None
                changed = True
        # Handles that are no longer read would otherwise still be created in each run.
        if changed:
            prune(graph)
        return changed
