"""Rewrite float32 operations between DequantizeLinear and QuantizeLinear to 8-bit arithmetic.

Data-movement operations move the quantized codes instead. Convolutions and matrix products are
fused with the conversions around them into one node, for which a backend may have an integer
kernel; on other backends its parts run in sequence.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np

from penstock.analysis.quantized_weights import is_conversion, producer
from penstock.core.types import FLOAT32
from penstock.ir.graph import Graph, Node, Value, readers_of
from penstock.ops.common.dtypes import INT8, UINT8
from penstock.ops.internal.fused import fused_copies
from penstock.ops.registry import COMPUTING, MICROSOFT
from penstock.passes.context import FusionPolicy, Pass, PassContext
from penstock.passes.dead_code import prune
from penstock.passes.lowering.fuse import became
from penstock.passes.rewrite import forward

BOUNDING = frozenset({"Clip", "Relu"})
"""operations allowed between one of ``COMPUTING`` and the conversion of its result"""

_QUANTIZING = ("QuantizeLinear", f"{MICROSOFT}.QuantizeLinear")
_MOST_BOUNDS = 2
_SMALLEST, _LARGEST = 1e-30, 1e30


class Quantize(Pass):
    """Rewrite operations on dequantized values as operations on their 8-bit codes: data movement as
    the same operation, computation as a fused node where a backend has a kernel for it."""

    def run(self, graph: Graph, context: PassContext) -> bool:
        policy = context.fusion
        if policy is None or not any(is_conversion(n, "DequantizeLinear") for n in graph.walk()):
            return False
        # Data movement first: once it moves codes, operations are adjacent to their conversions.
        changed = forward(graph, dict.fromkeys(_QUANTIZING, _Moving(graph)))
        # An operation whose result is not requantized may still have an integer kernel.
        for last in (_QUANTIZING, COMPUTING):
            changed |= forward(graph, dict.fromkeys(last, _Computing(graph, policy)))
            if changed:
                prune(graph)
        return changed


def _is_alone(node: Node, awaited: Collection[Node]) -> bool:
    """Whether a node has one output and no control edges."""
    return not node.control_inputs and node not in awaited and len(node.outputs) == 1


def _awaited(graph: Graph) -> set[Node]:
    """Return the nodes with outgoing control edges."""
    return {before for node in graph.walk() for before in node.control_inputs}


class _Moving:
    """Visitor of each QuantizeLinear: drop it if its input only moves dequantized elements whose
    codes equal those that it would compute."""

    def __init__(self, graph: Graph) -> None:
        self.readers = readers_of(graph)
        self.awaited = _awaited(graph)

    def __call__(self, node: Node, value: Value, output: Value) -> Sequence[Value | None] | None:
        # A node that others wait for must stay to be waited for.
        moving = None if node in self.awaited else value.producer
        if moving is None:
            return None
        if is_conversion(moving, "DequantizeLinear") and _are_inverse(moving, node):
            return (moving.inputs[0],)
        if moving.op.domain:
            return None
        alone = len(self.readers.get(value, ())) == 1 and _is_alone(moving, self.awaited)
        if not alone or moving.op.traits.isdisjoint(("selects", "reshapes")):
            return None
        # The other inputs of nodes that move elements are indices and shapes, which have no codes.
        count = len(moving.inputs) if moving.op.name == "Concat" else 1
        sources = [producer(operand, "DequantizeLinear") for operand in moving.inputs[:count]]
        if not all(source is not None and _are_inverse(source, node) for source in sources):
            return None
        moving.inputs[:count] = [source.inputs[0] for source in sources if source is not None]
        value.type = output.type
        self.readers[value] = self.readers.get(output, [])
        return (value,)


def _are_inverse(before: Node, after: Node) -> bool:
    """Whether dequantizing and then quantizing leaves codes unchanged."""
    values = [v for node in (before, after) for v in (node.inputs[0], node.outputs[0]) if v]
    dtypes = [v.dtype for v in values]
    if dtypes not in ([INT8, FLOAT32, FLOAT32, INT8], [UINT8, FLOAT32, FLOAT32, UINT8]):
        return False
    parameters = _parameters(before)
    if parameters is None or parameters != _parameters(after):
        return False
    # With a scale near infinity or subnormal, products and quotients lose precision, so that
    # requantization may return other codes.
    return _SMALLEST < parameters[0] < _LARGEST


def _parameters(node: Node) -> tuple[float, int] | None:
    """Return the scale and zero point of a conversion, if both are constant and per tensor."""
    scale, zero = [*node.inputs, None][1:3]
    scales = None if scale is None else scale.const
    # ONNX: the zero point is 0 by default.
    zeros = np.zeros(1) if zero is None else zero.const
    if scales is None or zeros is None or scales.dtype != FLOAT32:
        return None
    return (float(scales.item()), int(zeros.item())) if scales.size == zeros.size == 1 else None


class _Computing:
    """Visitor of each of the operations ``last``: fuse it with an operation and the conversions
    around that, where ``policy`` accepts the fused node."""

    def __init__(self, graph: Graph, policy: FusionPolicy) -> None:
        self.readers = readers_of(graph)
        self.awaited = _awaited(graph)
        self.policy = policy
        self.home = {node: inner for inner in graph.graphs() for node in inner.nodes}

    def __call__(self, node: Node, value: Value, output: Value) -> bool:
        candidate = self.fused(node)
        return candidate is not None and became(node, candidate, self.policy)

    def fused(self, last: Node) -> Node | None:
        """Return the fused node of copies of the operands' conversions, the operation, and the
        nodes after it up to ``last``; None if they do not match."""
        chain = self.chain(last)
        if chain is None:
            return None
        sources = [producer(value, "DequantizeLinear") for value in chain[0].inputs]
        before = dict.fromkeys([source for source in sources if source is not None])
        if not before or not all(_is_alone(source, self.awaited) for source in before):
            return None
        return fused_copies([*before, *chain])

    def chain(self, last: Node) -> list[Node] | None:
        """Return the nodes from one of ``COMPUTING`` to ``last``, without other readers."""
        chain = [last]
        while chain[0].op.name not in COMPUTING:
            value = chain[0].inputs[0]
            node = None if value is None else value.producer
            if value is None or node is None or len(self.readers.get(value, ())) != 1:
                return None
            if node.op.name not in COMPUTING | BOUNDING or len(chain) > _MOST_BOUNDS + 1:
                return None
            chain.insert(0, node)
        home = self.home[last]
        fits = all(self.home[n] is home and _is_alone(n, self.awaited) for n in chain)
        return chain if fits and not any(node.op.domain for node in chain[:-1]) else None
