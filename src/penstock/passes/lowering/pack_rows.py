"""Remove padding rows from computation: pack a padded batch into one sample of its live rows.

A batch of texts [batch, rows] is padded to the longest one. Attention adds a bias to the scores
that masks padding rows. Their results are not read if outputs are sums multiplied by a mask, or the
first row of each text. Then row-wise operations are computed for the concatenated live rows only,
and attention within each text (``ops.internal.packed``)::

    x = Gather(table, ids)                 x = Gather(table, Gather(ids, rows))      [1, T, width]
    y = Attention(x w, x u, x v, bias)     y = PackedAttention(x w, x u, x v, ranges, bias)
    z = ReduceSum(y * mask)                z = ReduceSum(UnpackRows(y * mask, ranges))

In each run, the values of bias and mask decide which rows are live, however they were computed. The
pass proves, node by node, that a row affects other rows through attention alone (``row_rules``),
and outputs in these ways alone. Attention that is not recognized as one node is computed for all
rows, unpacked, if the proof holds for its scores, and its result is packed again
(``padded_attention``). ``penstock plan --reasons`` shows which node prevented packing.
"""

from __future__ import annotations

from collections.abc import Iterator

from penstock.core.errors import RowsStay
from penstock.ir.graph import Graph
from penstock.passes.context import Pass, PassContext, Property
from penstock.passes.dead_code import prune
from penstock.passes.lowering.lift_heads import lift_heads
from penstock.passes.lowering.packed_writer import PackedWriter
from penstock.passes.lowering.recognize_attention import RecognizeAttention
from penstock.passes.lowering.row_packing import RowPacking, row_sizes


def packings_of(graph: Graph, context: PassContext) -> Iterator[RowPacking]:
    """Yield a row packing for each number of rows in a graph, such as those of two encoders, in
    which attention is fused wherever possible. Raises ``RowsStay`` if there is no attention."""
    lift_all_heads(graph)
    # Fuse attention whatever it costs: the omitted rows save more.
    RecognizeAttention(always=True).run(graph, context)
    for sizes in row_sizes(graph):
        yield RowPacking(graph, sizes, reproducible=context.numerics.reproducible)


def lift_all_heads(graph: Graph) -> None:
    """Split merged samples-and-heads axes of attention (see ``lift_heads``)."""
    shapes = [value.shape for value in graph.inputs]
    sizes = {dims[0] for dims in shapes if dims is not None and len(dims) > 1}
    samples = sizes.pop() if len(sizes) == 1 else None
    if isinstance(samples, int):
        lift_heads(graph, samples)


class PackRows(Pass):
    """Omit rows that a mask hides: only if nothing reads them ("proven"), or also if outputs
    contain them, as zeros ("any"). Raises ``RowsStay`` if a node prevents packing."""

    invalidates = frozenset({Property.TYPED})

    def __init__(self, which: str = "proven") -> None:
        self.which = which

    def run(self, graph: Graph, context: PassContext) -> bool:
        reasons: list[RowsStay] = []
        changed = False
        for packing in packings_of(graph, context):
            try:
                packing.find(self.which == "any")
                if context.numerics.reproducible:
                    packing.refuse_all_rows()
            except RowsStay as reason:
                reasons.append(reason)
            else:
                PackedWriter(packing).write()
                changed = True
        if not changed:
            raise reasons[0]
        prune(graph)
        return True
