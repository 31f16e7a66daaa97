"""Speculation on dims: in a plan with unknown dims, assume those that are equal for sample inputs.

A decoder slices its step's rows from a mask of all positions: from ``total - 1`` to ``total``,
whose length inference cannot determine, nor that of anything the mask is added to. Dims that are
equal for two other cache lengths are expected for all of them::

    mask = Slice(all, total - 1, total)      bool[?, ?]
    mask = Expected(Slice(...))              bool[1, ?]

The expected dims become part of the types: kernels, fusion and the arena treat them as known. They
may be wrong, as a slice at the end of a table is shorter, so each run checks them
(``ops.internal.expected``), and a run with other dims is restarted without them.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress

from penstock.analysis.type_inference import infer_types, node_types
from penstock.core.errors import PenstockError
from penstock.core.types import ANY, TensorType, Type
from penstock.ir.graph import Graph, Node, Value
from penstock.ops.internal.expected import EXPECTED
from penstock.passes.context import Pass, PassContext, Property


class ExpectDims(Pass):
    """Insert Expected after each node with an output of unknown dims that are known and equal for
    all ``samples`` of input types. A graph with side effects is left as it is, since a run with
    other dims is restarted."""

    requires = frozenset()
    establishes = frozenset({Property.TYPED})

    def __init__(self, samples: Sequence[Sequence[Type]]) -> None:
        self.samples = samples

    def run(self, graph: Graph, context: PassContext) -> bool:
        if any(not node.op.pure for node in graph.walk()):
            return False
        own, sampled = [value.type for value in graph.inputs], []
        with suppress(PenstockError):  # the model may reject these shapes
            sampled = [_types_with(graph, types) for types in self.samples]
        _set_types(graph, own)
        # The walk resets the types of the graph, which may be those of a sample.
        return _expect(graph, sampled or [[[None] * len(n.outputs) for n in graph.nodes]])


def _types_with(graph: Graph, types: Sequence[Type]) -> list[list[Type | None]]:
    """Return the output types of each node, given these input types of ``graph``."""
    _set_types(graph, types)
    infer_types(graph)
    return [[None if v is None else v.type for v in node.outputs] for node in graph.nodes]


def _set_types(graph: Graph, types: Sequence[Type]) -> None:
    for value, type_ in zip(graph.inputs, types, strict=True):
        value.type = type_


def _expect(graph: Graph, sampled: Sequence[Sequence[Sequence[Type | None]]]) -> bool:
    """Infer the types of ``graph``, with the dims that the ``sampled`` types of its nodes share;
    return whether any of these would be unknown otherwise."""
    nodes: list[Node] = []
    for node, *types in zip(graph.nodes, *sampled, strict=True):
        nodes.append(node)
        inferred = node_types(node)
        for i, value in enumerate(node.outputs):
            if value is None:
                continue
            value.type = inferred[i] if i < len(inferred) else ANY
            dims = _common_dims(value.type, [own[i] for own in types])
            if dims is not None:
                # The guard produces the value itself, so that all readers and outputs follow it.
                raw = Value(f"{value.name}.any", value.type)
                node.outputs[i] = raw
                raw.producer = node
                nodes.append(Node(EXPECTED, [raw], [value], {"dims": dims}))
                (value.type,) = node_types(nodes[-1])
    changed = len(nodes) > len(graph.nodes)
    graph.nodes = nodes
    return changed


def _common_dims(open_type: Type, types: Sequence[Type | None]) -> list[int] | None:
    """Return the dims that ``types`` share, -1 where they differ; None if they are no more precise
    than ``open_type``."""
    shapes = {t.shape for t in types if isinstance(t, TensorType)}
    if not isinstance(open_type, TensorType) or len({s and len(s) for s in shapes}) != 1:
        return None
    first = next(iter(shapes))
    if first is None or (len(shapes) > 1 and None in shapes):
        return None
    columns = zip(*[s for s in shapes if s is not None], strict=True)
    same = [c[0] if len(set(c)) == 1 and isinstance(c[0], int) else -1 for c in columns]
    known = (None,) * len(same) if open_type.shape is None else open_type.shape
    tell = any(d >= 0 and not isinstance(k, int) for d, k in zip(same, known, strict=True))
    return same if tell else None
