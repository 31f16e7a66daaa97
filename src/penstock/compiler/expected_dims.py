"""Dims that inference leaves open though they are the same in all runs.

A decoder cuts the rows of its step out of a mask of all positions: the part from ``total - 1`` to
``total``, of whose length inference knows nothing, and so of all that the mask is added to. What
has the same dims for two other lengths of the cache is expected to have these for all of them::

    mask = Slice(all, total - 1, total)      bool[?, ?]
    mask = Expected(Slice(...))              bool[1, ?]
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress

from penstock.analysis.type_inference import infer_types, node_types
from penstock.core.errors import PenstockError
from penstock.core.types import ANY, TensorType, Type
from penstock.ir.graph import Graph, Node, Value, clone
from penstock.ops.internal.expected import EXPECTED


def expect_dims(graph: Graph, samples: Sequence[Sequence[Type]]) -> bool:
    """Put Expected behind each node of ``graph`` with an output that has known dims with each of
    the ``samples`` of input types, always the same, and is open otherwise. Return whether there is
    any. A graph with effects is left as it is: a run that meets other dims is begun anew."""
    if any(not node.op.pure for node in graph.walk()):
        return False
    others = []
    with suppress(PenstockError):
        for types in samples:
            copy = clone(graph)
            for value, type_ in zip(copy.inputs, types, strict=True):
                value.type = type_
            infer_types(copy)
            others.append(copy.nodes)
    if len(others) < len(samples):
        return False
    nodes: list[Node] = []
    for node, *same in zip(list(graph.nodes), *others, strict=True):
        nodes.append(node)
        inferred = node_types(node)
        for i, value in enumerate(node.outputs):
            if value is None:
                continue
            value.type = inferred[i] if i < len(inferred) else ANY
            dims = _common_dims(value.type, [v.type for n in same if (v := n.outputs[i])])
            if dims is not None:
                raw = Value(f"{value.name}.any", value.type)
                node.outputs[i] = raw
                raw.producer = node
                nodes.append(Node(EXPECTED, [raw], [value], {"dims": dims}))
                (value.type,) = node_types(nodes[-1])
    changed = len(nodes) > len(graph.nodes)
    graph.nodes = nodes
    return changed


def _common_dims(open_type: Type, types: Sequence[Type]) -> list[int] | None:
    """The dims that tensors of ``types`` have in common, -1 where they differ; None if they tell
    no more than ``open_type``."""
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
