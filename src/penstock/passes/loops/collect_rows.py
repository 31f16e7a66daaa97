"""Conversion of sequences that a Loop only appends to into scan outputs of the Loop.

::

    s = SequenceEmpty()                             ys = rows that the Loop collects
    for i in range(n):
        s = SequenceInsert(s, y)
    ys = ConcatFromSequence(s, new_axis=1)

TorchScript models that append to a list are exported in this way. The pass skips Loops that may run
zero times, which have no rows to concatenate.
"""

from __future__ import annotations

from collections import Counter

from penstock.core.checkpoints import with_checkpoints
from penstock.core.types import TensorType
from penstock.ir.graph import Graph, Node, Readers, Value, readers_of
from penstock.ir.op import Role
from penstock.ops.common.shape_rules import normalize_axis
from penstock.ops.onnx.control_flow import loop_carried
from penstock.passes.context import Pass, PassContext
from penstock.passes.dead_code import prune
from penstock.passes.loops.loop_rows import trips_of
from penstock.passes.rewrite import Expansion, names_of, new_name


class CollectRows(Pass):
    """Replace such sequences, and the ConcatFromSequence nodes that read them."""

    def run(self, graph: Graph, context: PassContext) -> bool:
        if context.framed:
            return False
        readers, taken, joined = readers_of(graph), names_of(graph), dict[Node, list[Node]]()
        for inner in graph.graphs():
            for node in with_checkpoints(inner.nodes):
                if node.op.role is Role.LOOP and (trips_of(node) or 0) > 0:
                    _collect(node, readers, taken, joined)
        if not joined:
            return False
        for inner in graph.graphs():
            inner.nodes = [part for node in inner.nodes for part in joined.get(node, (node,))]
        prune(graph)
        return True


def _collect(
    loop: Node, readers: Readers, taken: Counter[str], joined: dict[Node, list[Node]]
) -> None:
    """Collect the rows of ``loop`` as scan outputs; add the replaced nodes to ``joined``."""
    body: Graph = loop.attrs["body"]
    entering, leaving = loop_carried(loop)
    pairs = zip(body.inputs[entering], body.outputs[leaving], strict=True)
    for place, (inside, after) in enumerate(list(pairs)):
        before, insert = loop.inputs[entering][place], after.producer
        result = loop.outputs[place]
        if before is None or result is None or insert is None or before.producer is None:
            continue
        names = before.producer.op.full_name, insert.op.full_name
        # With a position, SequenceInsert may insert elsewhere than at the end.
        if names != ("SequenceEmpty", "SequenceInsert") or insert.input(2) is not None:
            continue
        row = insert.inputs[1]
        alone = insert.inputs[0] is inside and len(readers.get(inside, ())) == 1
        # Other readers of the sequence need it as a sequence.
        if not alone or len(readers.get(after, ())) != 1 or row is None:
            continue
        type_, joins = row.type, readers.get(result, [])
        # A Loop stacks rows of equal shapes, while a sequence may hold any shapes.
        if not isinstance(type_, TensorType) or not type_.static or insert.control_inputs:
            continue
        if not joins or any(n is None or n.op.full_name != "ConcatFromSequence" for n in joins):
            continue
        dims = trips_of(loop) or 0, *type_.dims
        rows = Value(new_name(f"{row.name}/rows", taken), TensorType(type_.dtype, dims))
        # Rows come last: a Loop's scan outputs follow the carried values.
        rows.producer = loop
        loop.outputs.append(rows)
        body.outputs.append(row)
        for node in joins:
            assert node is not None
            joined[node] = _joined(node, rows)


def _joined(node: Node, rows: Value) -> list[Node]:
    """Return the nodes that replace a ConcatFromSequence, given rows [trips, ...]."""
    (y,) = node.outputs
    assert y is not None and isinstance(rows.type, TensorType) and rows.dtype is not None
    expansion, (trips, *row) = Expansion(node), rows.type.dims
    new_axis = bool(node.attrs.get("new_axis", 0))
    axis = normalize_axis(node.attrs["axis"], len(row) + new_axis)
    # Move the trips axis next to the concatenation axis, where Reshape merges both.
    order = [*range(1, axis + 1), 0, *range(axis + 1, len(row) + 1)]
    moved = expansion.transposed(rows, order)
    dims = [*row[:axis], trips, *row[axis:]]
    if not new_axis:
        dims[axis : axis + 2] = [trips * row[axis]]
    shape = expansion.constant(dims)
    y.type = TensorType(rows.dtype, tuple(dims))
    # Without allowzero, a dim of 0 would be copied from the input.
    expansion.finish("Reshape", [moved, shape], y, allowzero=1)
    return expansion.nodes
