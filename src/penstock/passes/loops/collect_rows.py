"""Conversion of what a Loop only adds rows to into scan outputs of the Loop.

::

    s = SequenceEmpty()                             ys = rows that the Loop collects
    for i in range(n):
        s = SequenceInsert(s, y)
    ys = ConcatFromSequence(s, new_axis=1)

    for i in range(n):                              ys = rows that the Loop collects
        ys = Concat(ys[:i], y, ys[i + 1 :])

TorchScript models that append to a list are exported in the first way. TFLite's converter writes
the second for lists of TensorFlow, such as the outputs of recurrent layers. The pass skips Loops
that may run zero times, which have no rows to concatenate.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from penstock.core.checkpoints import with_checkpoints
from penstock.core.records import NamedTuple
from penstock.core.types import TensorType, is_static
from penstock.ir.graph import Graph, Node, Readers, Value, readers_of
from penstock.ir.op import Role
from penstock.ops.common.shape_rules import normalize_axis
from penstock.ops.onnx.control_flow import loop_carried
from penstock.passes.context import Pass, PassContext
from penstock.passes.dead_code import prune
from penstock.passes.loops.loop_rows import Count, count_of, trips_of
from penstock.passes.rewrite import Expansion, dims_and_dtype, names_of, new_name, produced_by


class CollectRows(Pass):
    """Replace such sequences, the ConcatFromSequence nodes that read them, and such tensors."""

    def run(self, graph: Graph, context: PassContext) -> bool:
        if context.framed:
            return False
        readers, taken, joined = readers_of(graph), names_of(graph), dict[Node, list[Node]]()
        for inner in graph.graphs():
            for node in with_checkpoints(inner.nodes):
                if node.op.role is Role.LOOP and (trips_of(node) or 0) > 0:
                    _collect(node, readers, taken, joined)
                    _collect_written(node, readers, taken, joined)
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
        rows = _scan_output(loop, row, taken)
        for node in joins:
            assert node is not None
            joined[node] = _joined(node, rows)


def _scan_output(loop: Node, row: Value, taken: Counter[str]) -> Value:
    """Add a scan output to ``loop`` for ``row``, a value of its body of a static type."""
    dims, dtype = dims_and_dtype(row)
    every = TensorType(dtype, (trips_of(loop) or 0, *dims))
    rows = Value(new_name(f"{row.name}/rows", taken), every)
    # Rows come last: a Loop's scan outputs follow the carried values.
    rows.producer = loop
    loop.outputs.append(rows)
    loop.attrs["body"].outputs.append(row)
    return rows


def _collect_written(
    loop: Node, readers: Readers, taken: Counter[str], joined: dict[Node, list[Node]]
) -> None:
    """Collect the rows of tensors of which each iteration writes another row, until all are
    written; add the nodes that follow ``loop`` to ``joined``."""
    body: Graph = loop.attrs["body"]
    entering, leaving = loop_carried(loop)
    after = Expansion(loop)
    for place, inside in enumerate(body.inputs[entering]):
        before, result = loop.inputs[entering][place], loop.outputs[place]
        written = body.outputs[leaving][place]
        if before is None or result is None or not is_static(before.type):
            continue
        row = _written_row(loop, before, inside, written, readers)
        if row is None:
            continue
        dims, dtype = dims_and_dtype(before)
        rows = after.reshaped(_scan_output(loop, row.value, taken), dims)
        ends = (0, dims[0], 1) if row.place.sign > 0 else (-1, -dims[0] - 1, -1)
        begin, end, step = [after.constant([number]) for number in ends]
        result.type = TensorType(dtype, dims)
        after.finish("Slice", [rows, begin, end, after.constant([0]), step], result)
        loop.outputs[place] = None
        body.outputs[leaving.start + place] = inside
    if after.nodes:
        joined[loop] = [loop, *after.nodes]


class _WrittenRow(NamedTuple):
    """The row ``value`` [1, ...], which each iteration writes at the position ``place``."""

    value: Value
    place: Count


def _written_row(
    loop: Node, before: Value, inside: Value, written: Value, readers: Readers
) -> _WrittenRow | None:
    """Return what ``written``, the next value of ``inside``, has in place of a row; None if it is
    anything else, or if other nodes read these values, or if some rows are never written."""
    join = produced_by(written, "Concat")
    if join is None or len(join.inputs) != 3 or join.attrs["axis"] != 0:
        return None
    head, tail = [produced_by(join.inputs[i], "tensorflow.Slice") for i in (0, 2)]
    row, (trips, *rest) = join.inputs[1], before.dims
    if head is None or tail is None or {head.inputs[0], tail.inputs[0]} != {inside}:
        return None
    # Other readers need the tensor as it is between two iterations.
    if len(readers.get(inside, ())) != 2 or len(readers.get(written, ())) != 1:
        return None
    if row is None or not is_static(row.type) or row.type != TensorType(before.dtype, (1, *rest)):
        return None
    first = count_of(loop, _leading(head.inputs[2], [-1], rest))
    second = count_of(loop, _leading(tail.inputs[1], [0], [0] * len(rest)))
    if first is None or second != (first.sign, first.start + 1):
        return None
    zero, size = head.inputs[1], tail.inputs[2]
    if zero is None or zero.const is None or zero.const.any() or size is None:
        return None
    if size.const is None or size.const[0] != -1 or not _among(size.const[1:].tolist(), [-1], rest):
        return None
    all_written = first.start == (0 if first.sign > 0 else trips - 1) and trips_of(loop) == trips
    return _WrittenRow(row, first) if all_written else None


def _leading(vector: Value | None, filler: list[int], rest: list[int]) -> Value | None:
    """Return the first number of a vector of which the others are constants: ``filler`` or those
    of ``rest``."""
    parts = produced_by(vector, "Concat")
    if parts is None:
        return None
    number, *others = parts.inputs
    consts = [None if part is None else part.const for part in others]
    if None in [None if const is None else 0 for const in consts]:
        return None
    numbers = [n for const in consts if const is not None for n in const.tolist()]
    return number if _among(numbers, filler, rest) else None


def _among(numbers: Sequence[int], filler: list[int], rest: list[int]) -> bool:
    pairs = zip(numbers, rest, strict=False)
    return len(numbers) == len(rest) and all(n in (*filler, dim) for n, dim in pairs)


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
