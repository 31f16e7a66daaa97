"""Compute no rows that a mask hides: a padded batch becomes one sample of the rows that matter.

A batch of texts [batch, rows] is padded to the longest one. Its attention adds a bias to scores,
by which no row sees those that pad; what these are computed to is not read, if outputs are sums
that a mask multiplies, or the first row of each text. Then all that works row by row is computed
for the rows that matter, one behind another, and attention within each text
(``ops.internal.packed``)::

    x = Gather(table, ids)                 x = Gather(table, Gather(ids, rows))      [1, T, width]
    y = Attention(x w, x u, x v, bias)     y = PackedAttention(x w, x u, x v, ranges, bias)
    z = ReduceSum(y * mask)                z = ReduceSum(UnpackRows(y * mask, ranges))

The values of bias and mask decide in each run which rows matter, however they were computed.
The pass proves, node by node, that a row acts on other rows by attention alone
(``row_rules``), and on outputs in these ways alone. Attention that is not recognized as one node is
computed for all rows, in their places, if that is proven of its scores, and its result is packed
again (``padded_attention``). ``penstock plan --reasons`` tells which node stood in the way.
"""

from __future__ import annotations

from penstock.ir.graph import Graph
from penstock.passes.context import Pass, PassContext, Property
from penstock.passes.dead_code import prune
from penstock.passes.lowering.lift_heads import lift_heads
from penstock.passes.lowering.packed_writer import PackedWriter
from penstock.passes.lowering.recognize_attention import RecognizeAttention
from penstock.passes.lowering.row_packing import RowPacking


def packing_of(graph: Graph, context: PassContext) -> RowPacking:
    """The row packing of a graph, in which attention is one node wherever possible."""
    lift_all_heads(graph)
    # Whatever attention as one node costs: rows that are left out save more.
    RecognizeAttention(always=True).run(graph, context)
    return RowPacking(graph)


def lift_all_heads(graph: Graph) -> None:
    """Write attention of the heads of all samples along one axis with an axis of samples."""
    shapes = [value.shape for value in graph.inputs]
    sizes = {dims[0] for dims in shapes if dims is not None and len(dims) > 1}
    samples = sizes.pop() if len(sizes) == 1 else None
    if isinstance(samples, int):
        lift_heads(graph, samples)


class PackRows(Pass):
    """Leave out rows that a mask hides: where nothing reads them ("proven"), or also where outputs
    have them, which are 0 there ("any"). Raises ``RowsStay`` if a node stands in the way."""

    invalidates = frozenset({Property.TYPED})

    def __init__(self, which: str = "proven") -> None:
        self.which = which

    def run(self, graph: Graph, context: PassContext) -> bool:
        packing = packing_of(graph, context)
        packing.find(self.which == "any")
        if context.numerics.reproducible:
            packing.refuse_all_rows()
        PackedWriter(packing).write()
        prune(graph)
        return True
