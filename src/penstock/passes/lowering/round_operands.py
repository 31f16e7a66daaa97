"""Fuse the rounding of a product's or convolution's input to bfloat16 into its kernel.

::

    x -> Cast(bfloat16) -> Cast(float32) -> Conv(, w)    becomes one fused node of the three

Casts with other readers stay for these. Weights must be constants that bfloat16 represents exactly,
so that a kernel that rounds both operands computes the model's result.
"""

from __future__ import annotations

from penstock.core.types import FLOAT32
from penstock.ir.graph import Graph, Node, Value
from penstock.ops.common.constant_cache import is_held_by_bfloat16
from penstock.ops.common.shape_rules import element_number
from penstock.ops.internal.fused import fused_copies
from penstock.ops.registry import COMPUTING
from penstock.passes.context import Pass, PassContext
from penstock.passes.dead_code import prune
from penstock.passes.lowering.fuse import became
from penstock.passes.rewrite import forward

_BFLOAT16 = element_number("bfloat16")


class RoundOperands(Pass):
    """Fuse a product or convolution with the Casts that round its input, where a backend has a
    kernel for the fused node."""

    def run(self, graph: Graph, context: PassContext) -> bool:
        policy = context.fusion
        if policy is None:
            return False
        # A node that is a control input of others must stay.
        awaited = {before for node in graph.walk() for before in node.control_inputs}

        def visit(node: Node, value: Value, output: Value) -> bool:
            casts = () if node in awaited else _casts_before(node)
            if not casts or not is_held_by_bfloat16(node.inputs[1]):
                return False
            return became(node, fused_copies([*casts, node]), policy)

        changed = forward(graph, dict.fromkeys(COMPUTING, visit))
        if changed:
            prune(graph)
        return changed


def rounds_to_bfloat16(node: Node) -> bool:
    """Whether a node is a Cast from float32 to bfloat16."""
    x = node.inputs[0] if node.op.full_name == "Cast" else None
    return x is not None and x.dtype == FLOAT32 and node.attrs.get("to") == _BFLOAT16


def _casts_before(node: Node) -> tuple[Node, ...]:
    """Return the Casts of ``node``'s input to bfloat16 and back, or an empty tuple."""
    x = node.inputs[0]
    widen = None if x is None else x.producer
    if x is None or x.dtype != FLOAT32 or widen is None or widen.op.full_name != "Cast":
        return ()
    narrow = None if widen.inputs[0] is None else widen.inputs[0].producer
    if narrow is None or not rounds_to_bfloat16(narrow):
        return ()
    return () if narrow.control_inputs or widen.control_inputs else (narrow, widen)
