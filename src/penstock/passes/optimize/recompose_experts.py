"""Fusion of MatMul with the Gather of its matrices, as in mixtures of experts: ChosenMatMul.

::

    MatMul(x, Gather(matrices, indices))                   becomes
    MatMul(x, Transpose(Gather(matrices, indices)))        ChosenMatMul(x, matrices, indices)
    MatMul(Gather(matrices, indices), column)

Mixtures of experts are exported in this way: each token selects the weights of a few experts, which
a Gather, or a GatherND with indices of length 1, would copy for each token.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from penstock.core.records import NamedTuple
from penstock.core.types import Dim, TensorType
from penstock.ir.graph import Graph, Node, Value
from penstock.ops.internal.chosen_product import CHOSEN_MATMUL
from penstock.passes.context import Pass, PassContext
from penstock.passes.rewrite import produced_by, replace_nodes

# With more rows, copying the matrix is cheap beside the product; so is copying small matrices.
_MOST_ROWS, _LEAST_ELEMENTS = 4, 1024


class RecomposeExperts(Pass):
    """Multiply by selected matrices in place, without copying them."""

    def run(self, graph: Graph, context: PassContext) -> bool:
        return replace_nodes(graph, {"MatMul": _product})


class _Chosen(NamedTuple):
    """Gather of ``matrices``, possibly ``transposed``, with indices of dims ``lead``."""

    matrices: Value
    indices: Value
    lead: tuple[Dim, ...]
    transposed: bool


def _product(node: Node) -> Sequence[Node] | None:
    left, right = node.inputs
    for x, other, columns in ((left, right, False), (right, left, True)):
        chosen = _chosen_by(other)
        if x is None or chosen is None or not _fits(x, chosen, columns):
            continue
        transposed = chosen.transposed != columns  # a column vector is multiplied from the right
        attrs = {"transposed": transposed, "columns": columns}
        inputs = [x, chosen.matrices, chosen.indices]
        return (node.derived(inputs, node.outputs, attrs, op=CHOSEN_MATMUL),)
    return None


def _chosen_by(value: Value | None) -> _Chosen | None:
    turn = produced_by(value, "Transpose")
    if turn is not None:
        rank = None if value is None else value.rank
        if rank is None or rank < 2:
            return None
        usual = [*range(rank - 2), rank - 1, rank - 2]
        if list(turn.attrs.get("perm") or range(rank)[::-1]) != usual:
            return None
        value = turn.inputs[0]
    gather = produced_by(value, "Gather", "GatherND")
    if gather is None or gather.attrs.get("batch_dims", 0):
        return None
    matrices, indices = gather.inputs
    if matrices is None or indices is None or matrices.rank != 3 or indices.shape is None:
        return None
    lead = indices.shape
    if gather.op.name == "GatherND":
        # Longer indices select rows or elements of matrices.
        if lead[-1:] != (1,):
            return None
        lead = lead[:-1]
    elif gather.attrs.get("axis", 0) not in (0, -3):
        return None
    return _Chosen(matrices, indices, lead, turn is not None)


def _fits(x: Value, chosen: _Chosen, columns: bool) -> bool:
    """Whether x has few rows or is a column, and its matrices have (shared) indices."""
    type_, other = x.type, chosen.matrices.type
    if not isinstance(type_, TensorType) or not isinstance(other, TensorType):
        return False
    if type_.dtype != other.dtype or str(type_.dtype) not in ("float32", "float64"):
        return False
    dims, shape = x.shape, chosen.matrices.shape
    if dims is None or shape is None or len(dims) != len(chosen.lead) + 2:
        return False
    rows = dims[-1 if columns else -2]
    # Unknown dims need not be equal.
    if any(
        dim != 1 and (dim is None or dim != to) for dim, to in zip(dims, chosen.lead, strict=False)
    ):
        return False
    if not isinstance(rows, int) or not 0 < rows <= (1 if columns else _MOST_ROWS):
        return False
    sizes = [size for size in shape[1:] if isinstance(size, int)]
    return len(sizes) == 2 and math.prod(sizes) >= _LEAST_ELEMENTS
