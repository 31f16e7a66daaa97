"""Let kernels round the input of a product or convolution to bfloat16, where the model does.

::

    x -> Cast(bfloat16) -> Cast(float32) -> Conv(, w)    becomes one fused node of the three

Casts that others read as well stay for these. Weights must be constants that bfloat16 holds, so
that a kernel which rounds both operands computes what the model says.
"""

from __future__ import annotations

import numpy as np

from penstock.core.types import FLOAT32
from penstock.ir.graph import Graph, Node, Value
from penstock.ops.common.shape_rules import element_number
from penstock.ops.internal.fused import fused_copies
from penstock.ops.registry import COMPUTING
from penstock.passes.context import Pass, PassContext
from penstock.passes.dead_code import prune
from penstock.passes.lowering.fuse import became
from penstock.passes.rewrite import forward

_BFLOAT16, _LOW_BITS = element_number("bfloat16"), np.uint32(0xFFFF)


class RoundOperands(Pass):
    """Make one fused node of a product or convolution and the Casts that round its input, where a
    backend has a kernel for it."""

    def run(self, graph: Graph, context: PassContext) -> bool:
        policy = context.fusion
        if policy is None:
            return False
        # A node that others wait for must stay to be waited for.
        awaited = {before for node in graph.walk() for before in node.control_inputs}

        def visit(node: Node) -> bool:
            casts = () if node in awaited else _casts_before(node)
            if not casts or not _is_held_by_bfloat16(node.inputs[1]):
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
    """The Casts of the input of ``node`` to bfloat16 and back to float32; none if it has others."""
    x = node.inputs[0]
    widen = None if x is None else x.producer
    if x is None or x.dtype != FLOAT32 or widen is None or widen.op.full_name != "Cast":
        return ()
    narrow = None if widen.inputs[0] is None else widen.inputs[0].producer
    if narrow is None or not rounds_to_bfloat16(narrow):
        return ()
    return () if narrow.control_inputs or widen.control_inputs else (narrow, widen)


def _is_held_by_bfloat16(value: Value | None) -> bool:
    """Whether a value is a constant of float32, all of whose elements bfloat16 has."""
    array = value.peek if value is not None and value.is_constant else None
    if array is None or array.dtype != FLOAT32:
        return False
    return not (np.ascontiguousarray(array).view(np.uint32) & _LOW_BITS).any()
