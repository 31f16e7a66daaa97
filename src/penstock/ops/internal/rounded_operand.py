"""A product or convolution whose input the model rounds to bfloat16, as a fused node::

    x -> Cast(bfloat16) -> Cast(float32) -> Conv(, w) -> Relu        are the parts of one node

``fused.rounds_operand`` recognizes it. Its parts define the computation. A backend whose kernel
rounds the input itself uses the node ``without_rounding``.
"""

from __future__ import annotations

from penstock.ir.graph import Node, Value
from penstock.ops.internal.fused import fused, parts


def without_rounding(node: Node) -> Node:
    """The fused node of the parts after the Casts, with the same inputs."""
    narrow, widen, *others = parts(node)
    copies: dict[Value | None, Value | None] = {widen.outputs[0]: narrow.inputs[0]}
    nodes = []
    for part in others:
        (output,) = part.outputs
        assert output is not None
        # New values, so that those of the node keep their producers.
        copy = copies[output] = Value(output.name, output.type)
        nodes.append(part.derived([copies.get(value, value) for value in part.inputs], [copy]))
    plain = fused(nodes)
    plain.inputs, plain.name, plain.origin = node.inputs, node.name, node.origin
    return plain
