"""Move scalar factors from the operands of a product to its result.

Attention scales its queries and keys. A backend that fuses applies the factor in the epilogue of
the MatMul, which saves the multiplications of the operands::

    MatMul(Mul(q, 0.5), Transpose(Mul(k, 0.5)))      becomes      Mul(MatMul(q, Transpose(k)), 0.25)
"""

from __future__ import annotations

import numpy as np

from penstock.core.checkpoints import with_checkpoints
from penstock.core.types import FLOAT32
from penstock.ir.graph import Graph, Node, Readers, Value, readers_of
from penstock.ops.registry import standard
from penstock.passes.context import Pass, PassContext
from penstock.passes.dead_code import prune

_MOST_VIEWS = 8
# With these bounds, products of two factors and of scores neither underflow nor overflow float32.
_SMALLEST, _LARGEST = 1e-6, 1e6

_FACTORS = {"Mul": (1, 0), "Div": (1,)}
"""the inputs of each operation that may be the constant factor"""


class HoistScales(Pass):
    """Multiply the result of a MatMul instead of its operands, where a backend fuses nodes."""

    def run(self, graph: Graph, context: PassContext) -> bool:
        if context.fusion is None:
            return False
        readers = readers_of(graph)
        changed = False
        for inner in graph.graphs():
            inside = set(inner.nodes)
            nodes = []
            for node in with_checkpoints(inner.nodes):
                nodes.append(node)
                if node.op.name != "MatMul" or node.op.domain or node.control_inputs:
                    continue
                factor = _unscale(node, 0, readers, inside) * _unscale(node, 1, readers, inside)
                if factor != 1.0:
                    nodes.append(_scale_output(node, factor))
                    changed = True
            inner.nodes = nodes
        if changed:
            prune(graph)
        return changed


def _unscale(node: Node, i: int, readers: Readers, inside: set[Node]) -> float:
    """Bypass a multiplication by a constant, before views, at input ``i``; return the factor."""
    for _ in range(_MOST_VIEWS):
        value = node.inputs[i]
        before = None if value is None else value.producer
        if value is None or before is None or readers.get(value) != [node]:
            break
        if before not in inside or before.op.domain or before.control_inputs:
            break
        # A scalar factor commutes with views.
        if before.op.view:
            node, i = before, 0
            continue
        for j in _FACTORS.get(before.op.name, ()):
            factor, x = before.inputs[j], before.inputs[1 - j]
            const = None if factor is None else factor.const
            if x is None or const is None or const.size != 1 or const.dtype != FLOAT32:
                continue
            number = float(const.reshape(()))
            # A factor of higher rank than x would change the shape of the product.
            if not _SMALLEST < abs(number) < _LARGEST or x.shape is None or x.type != value.type:
                continue
            readers[x] = [node if reader is before else reader for reader in readers[x]]
            node.inputs[i] = x
            return number if before.op.name == "Mul" else 1 / number
        break
    return 1.0


def _scale_output(node: Node, factor: float) -> Node:
    """Return a node that scales the result of ``node``, and takes over its output."""
    (output,) = node.outputs
    assert output is not None
    product = Value(f"{output.name}/unscaled", output.type, node)
    node.outputs = [product]
    scale = Value(f"{output.name}/scale", const=np.array(factor, FLOAT32))
    return node.derived(
        [product, scale], [output], {}, op=standard("Mul"), name=f"{node.name}/scale"
    )
