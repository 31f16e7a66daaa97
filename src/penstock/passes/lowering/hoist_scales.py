"""Numbers that the operands of a product are multiplied by, as attention does with its queries and
keys: what is multiplied by them instead is the product, where a backend does it on the way.
"""

from __future__ import annotations

import numpy as np

from penstock.ir.graph import Graph, Node, Readers, Value, readers_of
from penstock.ops import find
from penstock.passes.context import Pass, PassContext, Property
from penstock.passes.dead_code import prune
from penstock.types import FLOAT32, TensorType

_MOST_VIEWS = 8


class HoistScales(Pass):
    """Multiply the result of a MatMul instead of its operands, for backends that do it in the same
    kernel."""

    name = "hoist_scales"
    requires = frozenset({Property.TYPED})

    def run(self, graph: Graph, context: PassContext) -> bool:
        if context.fusion is None:
            return False
        readers = readers_of(graph)
        changed = False
        for inner in graph.graphs():
            inside = set(inner.nodes)
            nodes = []
            for node in inner.nodes:
                nodes.append(node)
                if node.op.name != "MatMul" or node.op.domain or node.control_inputs:
                    continue
                factor = _unscale(node, 0, readers, inside) * _unscale(node, 1, readers, inside)
                if factor != 1.0:
                    nodes.append(_times(node, factor))
                    changed = True
            inner.nodes = nodes
        if changed:
            prune(graph)
        return changed


def _unscale(node: Node, i: int, readers: Readers, inside: set[Node]) -> float:
    """Let ``node`` read what its input ``i`` is a multiple of; return the factor, 1 if none."""
    for _ in range(_MOST_VIEWS):
        value = node.inputs[i]
        before = None if value is None else value.producer
        if value is None or before is None or readers.get(value) != [node]:
            return 1.0
        if before not in inside:
            return 1.0
        if before.op.domain or before.control_inputs:
            return 1.0
        if before.op.view:
            node, i = before, 0
            continue
        for j in (1, 0) if before.op.name == "Mul" else (1,) if before.op.name == "Div" else ():
            known, x = before.inputs[j], before.inputs[1 - j]
            if known is None or x is None or known.const is None or known.const.size != 1:
                continue
            number = float(known.const.reshape(()))
            if known.const.dtype != FLOAT32 or not 1e-6 < abs(number) < 1e6 or not _same(x, value):
                continue
            readers[x] = [node if reader is before else reader for reader in readers[x]]
            node.inputs[i] = x
            return number if before.op.name == "Mul" else 1 / number
        return 1.0
    return 1.0


def _same(a: Value, b: Value) -> bool:
    kinds = a.type, b.type
    return isinstance(kinds[0], TensorType) and kinds[0].shape is not None and kinds[0] == kinds[1]


def _times(node: Node, factor: float) -> Node:
    """A node that multiplies what ``node`` makes, under the name that this had."""
    (output,) = node.outputs
    op = find("Mul")
    assert output is not None and op is not None
    product = Value(f"{output.name}/unscaled", output.type, node)
    node.outputs = [product]
    scale = Value(f"{output.name}/scale", const=np.array(factor, FLOAT32))
    return Node(op, [product, scale], [output], name=f"{node.name}/scale", origin=node.origin)
