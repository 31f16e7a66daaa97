"""Values that loops carry unchanged, read from outside of the loop instead.

::

    y, _ = loop(x, w):              y = loop(x):
        next = x @ w                    next = x @ w
        return next, w                  return next

Converters of TensorFlow's loops write the weights of a layer so. Read from outside they are the
constants that they are, which kernels and other passes can prepare.
"""

from __future__ import annotations

from penstock.algorithms.checkpoints import paced
from penstock.ir.graph import Graph, Node
from penstock.ir.op import Role
from penstock.ops.onnx.control_flow import loop_carried
from penstock.passes.context import Pass, PassContext
from penstock.passes.dead_code import keep_carried
from penstock.passes.rewrite import Substitution


class HoistInvariants(Pass):
    """Let loops read what they carry unchanged from outside; not among frames, where the end of a
    loop may be dead though what it began with is not."""

    name = "hoist_invariants"

    def run(self, graph: Graph, context: PassContext) -> bool:
        substitution = Substitution()
        # Outer loops come first, so that what an inner one begins with is replaced already.
        for inner in list(graph.graphs()) if not context.framed else ():
            for node in paced(inner.nodes):
                if node.op.role in (Role.LOOP, Role.SCAN):
                    _hoist(node, substitution)
        substitution.apply_throughout(graph)
        return bool(substitution)


def _hoist(node: Node, substitution: Substitution) -> None:
    entering, leaving = loop_carried(node)
    body: Graph = node.attrs["body"]
    places = zip(node.inputs[entering], body.inputs[entering], body.outputs[leaving], strict=True)
    live = []
    for place, (initial, inside, updated) in enumerate(places):
        live.append(initial is None or inside is not updated)
        if initial is not None and not live[-1]:
            initial = substitution.of(initial)
            for value in (inside, node.outputs[place]):
                if value is not None:
                    substitution[value] = initial
    if not all(live):
        keep_carried(node, live)
