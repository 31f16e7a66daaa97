"""Find the inputs of a graph that are masks."""

from __future__ import annotations

from collections.abc import Sequence

from penstock.ir.graph import Graph, Node, Value


def _counts(node: Node) -> bool:
    """Whether a node may count the elements of a mask, since lengths carry the same information."""
    return node.op.name.startswith("Reduce") or node.op.name == "CumSum"


def _mask_inputs(node: Node) -> tuple[int, ...]:
    """Return the inputs of attention that hide positions: masks and lengths. Examining caches too
    would take longer in each run than a step."""
    if node.op.name == "MultiHeadAttention":
        return 4, 5
    return (3, 5) if node.op.domain else (3, 6)


def masks_of(graph: Graph, inputs: Sequence[int]) -> tuple[int, ...]:
    """Return the ``inputs`` from which, or from whose lengths, scores of attention are computed
    element by element."""
    reached: dict[Value, frozenset[int]] = {graph.inputs[i]: frozenset([i]) for i in inputs}
    masks: frozenset[int] = frozenset()
    none: frozenset[int] = frozenset()
    for node in graph.nodes:
        of = [none if value is None else reached.get(value, none) for value in node.inputs]
        if node.op.name == "Softmax":
            masks |= of[0]
        elif node.op.name in ("Attention", "MultiHeadAttention"):
            masks = masks.union(*[of[i] for i in _mask_inputs(node) if i < len(of)])
        elif node.op.elementwise or node.op.moves or node.op.view or _counts(node):
            # The first input holds the moved elements; the others are indices.
            first = len(of) if node.op.elementwise or node.op.name == "Concat" else 1
            sources = none.union(*of[:first])
            if sources:
                reached.update({value: sources for value in node.outputs if value is not None})
    return tuple(sorted(masks))
