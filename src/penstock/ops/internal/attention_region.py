"""Attention among the nodes of a fused node: a product, what changes its result, a softmax, and a
product of that."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from penstock.core.records import dataclass
from penstock.core.types import FLOAT32, TensorType, Type
from penstock.ir.graph import Node, Value
from penstock.ops.internal.zero_nan import ZERO_NAN
from penstock.ops.onnx.softmax import SINGLE_AXIS


@dataclass(frozen=True, slots=True, eq=False)
class AttentionRegion:
    """softmax(f(``query`` @ ``key``)) @ ``value``, by the indices of the fused node's inputs, which
    have these ``types``: stacks of matrices with the same leading dims. f are the nodes
    ``between``, which follow ``product``; ``place`` has the index of each input. ``guarded``: rows
    of NaN become 0."""

    types: tuple[TensorType, ...]
    query: int
    key: int
    value: int
    product: Node
    between: tuple[Node, ...]
    guarded: bool
    place: Mapping[Value, int]

    @property
    def lead(self) -> tuple[int, ...]:
        """The leading dims."""
        return self.types[self.query].dims[:-2]

    @property
    def dims(self) -> tuple[int, int, int, int, int]:
        """Heads, queries, the width of a query, keys, and the width of a value."""
        q, v = self.types[self.query].dims, self.types[self.value].dims
        return math.prod(q[:-2]), q[-2], q[-1], v[-2], v[-1]


def attention_region(node: Node, types: Sequence[Type | None]) -> AttentionRegion | None:
    """The attention that a fused node computes, given the types of its inputs; None unless all are
    of float32 and known shapes."""
    region = node.attrs["region"]
    nodes = list(region.nodes)
    guarded = nodes[-2].op is ZERO_NAN
    if guarded:
        del nodes[-2]
    if [node.op.name for node in (nodes[0], *nodes[-2:])] != ["MatMul", "Softmax", "MatMul"]:
        return None
    first, *between, softmax, last = nodes
    tensors = [t for t in types if isinstance(t, TensorType) and t.static and t.dtype == FLOAT32]
    place = {value: i for i, value in enumerate(region.inputs)}
    query, key, value = [place.get(v, -1) for v in (*first.inputs, last.inputs[1])]
    if len(tensors) < len(types) or -1 in (query, key, value):
        return None
    q, k, v = (tensors[i].dims for i in (query, key, value))
    rank = len(q)
    if not 3 <= rank == len(k) == len(v) or not q[:-2] == k[:-2] == v[:-2] or not all(q + k + v):
        return None
    if softmax.op.since < SINGLE_AXIS or softmax.attrs.get("axis", -1) not in (-1, rank - 1):
        return None
    chain = first, tuple(between)
    return AttentionRegion(tuple(tensors), query, key, value, *chain, guarded, place)
