"""Numbers that the operands of a product are multiplied by, as attention does with its queries and
keys: what is multiplied by them instead is the product, where a backend does it on the way.
"""

from __future__ import annotations

import numpy as np

from penstock.ir.graph import Graph, Node, Value
from penstock.ops import find
from penstock.passes.rewrite import readers_of
from penstock.types import FLOAT32, TensorType

_MOST_VIEWS = 8


def pull_scales(graph: Graph) -> bool:
    """Move numbers behind MatMul nodes, in ``graph`` and every nested one; returns whether any."""
    readers = {value: len(each) for value, each in readers_of(graph).items()}
    for each in graph.graphs():
        for value in each.outputs:
            readers[value] = readers.get(value, 0) + 1
    changed = False
    for each in graph.graphs():
        inside = set(each.nodes)
        nodes = []
        for node in each.nodes:
            nodes.append(node)
            if node.op.name != "MatMul" or node.op.domain or node.control_inputs:
                continue
            factor = 1.0
            for i in range(2):
                factor *= _pulled(node, i, readers, inside)
            if factor != 1.0:
                nodes.append(_times(node, factor))
                changed = True
        each.nodes = nodes
    return changed


def _pulled(node: Node, i: int, readers: dict[Value, int], inside: set[Node]) -> float:
    """The number that input ``i`` was multiplied by until now; 1 if there is none."""
    for _ in range(_MOST_VIEWS):
        value = node.inputs[i]
        before = None if value is None else value.producer
        if value is None or before is None or readers.get(value) != 1 or before not in inside:
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
            readers[x] = readers.get(x, 0)  # one reader in the place of another
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
