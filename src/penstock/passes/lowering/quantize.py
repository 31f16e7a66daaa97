"""Operations of real numbers that are there as 8-bit codes: DequantizeLinear before them, and
QuantizeLinear behind, as tools that quantise models write it.

What only moves codes is asked for codes. Convolutions, products and sums become one node with the
conversions around them, which a backend may have a kernel of integers for; to all others such a
node means what it is made of.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

import numpy as np

from penstock.ir.graph import Graph, Node, Value, readers_of
from penstock.ops.common.dtypes import INT8, UINT8
from penstock.ops.internal.fused import fused
from penstock.passes.context import Pass, PassContext, Property
from penstock.passes.dead_code import prune
from penstock.passes.quantized_weights import COMPUTING, is_conversion, producer
from penstock.passes.rewrite import Substitution, forward
from penstock.types import FLOAT32, TensorType

BOUNDING = frozenset({"Clip", "Relu"})
"""what may stand between these and the conversion of their results"""
MOVING = {
    **dict.fromkeys(
        """
        DepthToSpace Expand Flatten Gather GatherElements GatherND Identity MaxPool Reshape Slice
        SpaceToDepth Squeeze Tile Transpose Unsqueeze
        """.split(),  # noqa: SIM905 - names are easier to read without quotes
        1,
    ),
    "Concat": 0,
}
"""what gives elements of its first inputs as they are, and of how many: 0 stands for all"""

_MOST_BOUNDS = 2
_SMALLEST, _LARGEST = 1e-30, 1e30


class Quantize(Pass):
    """Rewrite operations on dequantised values as operations on their 8-bit codes: as the same
    operation if it only moves elements, and as a fused node where a backend has a kernel for it."""

    name = "quantize"
    requires = frozenset({Property.TYPED})

    def run(self, graph: Graph, context: PassContext) -> bool:
        policy = context.fusion
        if policy is None or not any(is_conversion(n, "DequantizeLinear") for n in graph.walk()):
            return False
        changed = forward(graph, _Moving(graph))
        # An operation whose result is not quantised again may still have an integer kernel.
        for last in ({"QuantizeLinear"}, COMPUTING):
            changed |= _Computing(
                graph, lambda node: policy.is_faster(node) and policy.has_kernel(node), last
            ).run(graph)
            if changed:
                prune(graph)
        return changed


def _is_alone(node: Node, apart: Collection[Node]) -> bool:
    """Whether a node waits for what it reads only, and only who reads it waits for it."""
    return not node.control_inputs and node not in apart and len(node.outputs) == 1


def _apart(graph: Graph) -> set[Node]:
    """The nodes that others wait for without reading anything of them."""
    return {before for node in graph.walk() for before in node.control_inputs}


class _Moving:
    """A visit of each QuantizeLinear: what it reads may be had of codes that are the same."""

    def __init__(self, graph: Graph) -> None:
        self.readers = readers_of(graph)
        self.apart = _apart(graph)

    def __call__(self, node: Node) -> Sequence[Value | None] | None:
        if not is_conversion(node, "QuantizeLinear") or node in self.apart:
            return None
        value, output = node.inputs[0], node.outputs[0]
        moving = None if value is None else value.producer
        if value is None or output is None or moving is None or moving.op.domain:
            return None
        if len(self.readers.get(value, ())) != 1 or not _is_alone(moving, self.apart):
            return None
        if moving.op.name not in MOVING:
            return None
        count = MOVING[moving.op.name] or len(moving.inputs)
        before = [producer(each, "DequantizeLinear") for each in moving.inputs[:count]]
        if not all(each is not None and _are_inverse(each, node) for each in before):
            return None
        moving.inputs[:count] = [each.inputs[0] for each in before if each is not None]
        value.type = output.type
        self.readers[value] = self.readers.get(output, [])
        return (value,)


def _are_inverse(before: Node, after: Node) -> bool:
    """Whether codes that are dequantised and then quantised come back as they were."""
    kinds = [
        each.type for node in (before, after) for each in (node.inputs[0], node.outputs[0]) if each
    ]
    dtypes = [kind.dtype if isinstance(kind, TensorType) else None for kind in kinds]
    if dtypes not in ([INT8, FLOAT32, FLOAT32, INT8], [UINT8, FLOAT32, FLOAT32, UINT8]):
        return False
    one, other = _parameters(before), _parameters(after)
    # Of a scale that is no denormal number, nor near infinity, products and quotients are right.
    return one is not None and one == other and _SMALLEST < one[0] < _LARGEST


def _parameters(node: Node) -> tuple[float, int] | None:
    """The scale and zero point of a conversion, if they are known and one for all elements."""
    scale, zero = [*node.inputs, None][1:3]
    if scale is None or scale.const is None or scale.const.dtype != FLOAT32:
        return None
    if scale.const.size != 1 or (zero is not None and zero.const is None):
        return None
    known = np.zeros(1) if zero is None or zero.const is None else zero.const
    return (float(scale.const.item()), int(known.item())) if known.size == 1 else None


class _Computing:
    """A walk that puts one node in the place of an operation and the conversions around it, which
    ends with one of the operations ``last``."""

    def __init__(
        self, graph: Graph, accepts: Callable[[Node], bool], last: Collection[str]
    ) -> None:
        self.readers = readers_of(graph)
        self.apart = _apart(graph)
        self.accepts = accepts
        self.last = last
        self.substitution = Substitution()

    def run(self, graph: Graph) -> bool:
        inside, kept = set(graph.nodes), []
        for node in graph.nodes:
            self.substitution.apply(node)
            for _, inner in node.graphs:
                self.run(inner)
            made = self.instead(node, inside) if node.op.name in self.last else None
            if made is not None:
                (old,), (new,) = node.outputs, made.outputs
                assert old is not None and new is not None
                self.substitution[old] = new
            kept.append(node if made is None else made)
        graph.nodes = kept
        self.substitution.apply_outputs(graph)
        return len(self.substitution) > 0

    def instead(self, last: Node, inside: Collection[Node]) -> Node | None:
        """The node that does what ``last``, those that it alone follows, and conversions before
        them do; None if there is none that is accepted."""
        chain = self.chain(last, inside)
        if chain is None:
            return None
        found = [producer(value, "DequantizeLinear") for value in chain[0].inputs]
        before = dict.fromkeys([each for each in found if each is not None])
        if not before or not all(_is_alone(each, self.apart) for each in before):
            return None
        copies: list[Node] = []
        instead: dict[Value | None, Value | None] = {}
        for node in (*before, *chain):
            output = node.outputs[0]
            assert output is not None
            inputs = [instead.get(value, value) for value in node.inputs]
            instead[output] = made = Value(output.name, output.type)
            copies.append(
                Node(node.op, inputs, [made], node.attrs, name=node.name, origin=node.origin)
            )
        candidate = fused(copies)
        return candidate if self.accepts(candidate) else None

    def chain(self, last: Node, inside: Collection[Node]) -> list[Node] | None:
        """The nodes from one that computes up to the ``last``."""
        chain = [last]
        while chain[0].op.name not in COMPUTING:
            value = chain[0].inputs[0]
            node = None if value is None else value.producer
            if node is None or len(self.readers.get(value, ())) != 1:  # type: ignore[arg-type]
                return None
            if node.op.name not in COMPUTING | BOUNDING or len(chain) > _MOST_BOUNDS + 1:
                return None
            chain.insert(0, node)
        fits = all(each in inside and _is_alone(each, self.apart) for each in chain)
        return chain if fits and not any(each.op.domain for each in chain[:-1]) else None
