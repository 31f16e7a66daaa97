"""Positions from token counts: count all tokens, since an unpadded text has no padding tokens.

M2M100, NLLB, XGLM and others count only non-padding tokens, to support left padding::

    present = Cast(Not(Equal(ids, 1)))
    places = (CumSum(present) + past) * present + 1     becomes     (CumSum(1) + past) * present + 1

Then positions depend on lengths alone, and are the same for rows that are computed one by one:
``past`` counts everything before a row, padding or not.
"""

from __future__ import annotations

from collections.abc import Collection

import numpy as np

from penstock.core.types import TensorType
from penstock.ir.graph import Graph, Node, Value
from penstock.passes.rewrite import Expansion

_MOST_NODES = 8
"""operations between token ids and the flags of non-padding tokens"""
_OF_TOKENS = 2


def count_tokens(graph: Graph, rows: Collection[str]) -> None:
    """Replace counts of non-padding tokens of the inputs ``rows`` by counts of all tokens."""
    nodes: list[Node] = []
    for node in graph.nodes:
        tokens = _counted(node, rows)
        if tokens is not None:
            flags = node.inputs[0]
            assert flags is not None
            parts = Expansion(node)
            dims = parts.add("Shape", [tokens])
            ones = parts.add("ConstantOfShape", [dims], value=np.ones(1, flags.dtype))
            nodes += parts.nodes
            node.inputs = [ones, *node.inputs[1:]]
        nodes.append(node)
    graph.nodes = nodes


def _counted(node: Node, rows: Collection[str]) -> Value | None:
    """Return the token ids whose non-padding elements a CumSum counts; None for other nodes."""
    axis = node.const(1) if node.op.full_name == "CumSum" else None
    if axis is None or node.attrs.get("exclusive") or node.attrs.get("reverse"):
        return None
    if axis.reshape(-1).tolist() not in ([1], [-1]):
        return None
    chain: list[tuple[Node, int]] = []
    value = node.inputs[0]
    while value is not None and (source := value.producer) is not None:
        others = [v for v in source.inputs if v is not None and v.const is None]
        # Exporters flatten batches of token ids to two dims.
        moved = source.op.full_name == "Reshape" and len(value.shape or ()) == _OF_TOKENS
        if moved:
            others = others[:1]
        elif not source.op.elementwise or len(chain) == _MOST_NODES:
            return None
        if len(others) != 1 or others[0] is None:
            return None
        if not moved:
            chain.insert(0, (source, source.inputs.index(others[0])))
        value = others[0]
    if value is None or value.name not in rows or len(value.shape or ()) != _OF_TOKENS:
        return None
    return value if chain and _are_flags(chain, value) else None


def _are_flags(chain: list[tuple[Node, int]], tokens: Value) -> bool:
    """Whether elementwise nodes give 1 for all token ids except at most one, which gives 0."""
    consts = [v.const for node, _ in chain for v in node.inputs if v is not None]
    numbers = {0, 1, 2}
    for const in consts:
        if const is None:
            continue
        if const.size != 1:
            return False
        numbers |= {int(const.item()) + i for i in (-1, 0, 1)}
    x = np.array(sorted(n for n in numbers if n >= 0), tokens.dtype)[None]
    for node, place in chain:
        types = [None if v is None else v.type for v in node.inputs]
        types[place] = TensorType(x.dtype, x.shape)
        given = [None if v is None else v.const for v in node.inputs]
        given[place] = x
        x = np.asarray(node.op.compile(node, types).function(*given))
    x = x.astype(np.int64)
    return bool(np.isin(x, (0, 1)).all() and (x == 0).sum() <= 1)
