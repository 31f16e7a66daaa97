"""The cells of recurrent layers that are spelled out, as one node each: LstmCell and GruCell.

::

    i, f, n, o = Split(gates)                              becomes
    c' = Sigmoid(f + 1) * c + Sigmoid(i) * Tanh(n)              h', c' = LstmCell(gates, c)
    h' = Sigmoid(o) * Tanh(c')

    zx, rx, nx = Split(x);  zh, rh, nh = Split(h W)        becomes
    n = Tanh(nx + Sigmoid(rx + rh) * nh)                        h' = GruCell(x, h W, h)
    h' = (1 - z) * n + z * h, with z = Sigmoid(zx + zh)

Exporters of TensorFlow, Keras and torch write loops of such steps: as nodes of their own they read
and write several times what one of them would. Gates may be in any order, and operands of sums and
products too; what cuts the gates may be a Split, or a Slice for each; a number may be added to the
forget gate; h' of the second may be n + z * (h - n). What else reads one of the values between is
no obstacle.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from penstock.algorithms.checkpoints import paced
from penstock.ir.graph import Graph, Node, Value
from penstock.ops.internal.cells import GRU_CELL, LSTM_CELL
from penstock.passes.context import Pass, PassContext, Property
from penstock.passes.dead_code import prune
from penstock.passes.rewrite import argument, number_of, produced_by, swapped
from penstock.types import FLOAT32, TensorType


class RecomposeCells(Pass):
    """Replace the nodes that compute the next state, and cell, by one."""

    name = "recompose_cells"
    requires = frozenset({Property.TYPED})

    def run(self, graph: Graph, context: PassContext) -> bool:
        if context.framed:
            return False
        changed = False
        for inner in list(graph.graphs()):
            cells: dict[Node, Node] = {}
            ends: set[Node] = set()
            own = set(inner.nodes)
            for node in paced(inner.nodes):
                if (found := _lstm(node)) is not None:
                    first, cell = found
                    if first not in cells and first in own:
                        cells[first] = cell
                        ends.add(node)
                elif (replacement := _gru(node)) is not None:
                    cells[node] = replacement
            if cells:
                inner.nodes = [cells.get(node, node) for node in inner.nodes if node not in ends]
                changed = True
        if changed:
            prune(graph)
        return changed


def _lstm(node: Node) -> tuple[Node, Node] | None:
    """The sum that is the next cell, and an LstmCell in its place, if ``node`` computes the state
    from it."""
    for output, new in _operands_of(node, "Mul"):
        o, following = argument(output, "Sigmoid"), argument(new, "Tanh")
        total = produced_by(following, "Add")
        if o is None or following is None or total is None:
            continue
        for kept, added in _operands_of(total, "Add"):
            for forget, cell in _operands_of(produced_by(kept, "Mul"), "Mul"):
                for into, values in _operands_of(produced_by(added, "Mul"), "Mul"):
                    f, bias = _without_number(argument(forget, "Sigmoid"))
                    parts = argument(into, "Sigmoid"), f, o, argument(values, "Tanh")
                    gates, order = _split(parts, 4)
                    if gates is None or not _alike([cell, o, following, node.outputs[0]]):
                        continue
                    attrs = {"order": order, "forget_bias": bias}
                    outputs = [node.outputs[0], following]
                    return total, total.derived([gates, cell], outputs, attrs, op=LSTM_CELL)
    return None


def _gru(node: Node) -> Node | None:
    """A GruCell in the place of ``node``, if that computes the next state of one."""
    for new, update, state in _blends(node):
        for of_x, product in _operands_of(produced_by(argument(new, "Tanh"), "Add"), "Add"):
            for reset, of_h in _operands_of(produced_by(product, "Mul"), "Mul"):
                sums = [produced_by(argument(gate, "Sigmoid"), "Add") for gate in (update, reset)]
                for zx, zh in _operands_of(sums[0], "Add"):
                    for rx, rh in _operands_of(sums[1], "Add"):
                        x, order = _split((zx, rx, of_x), 3)
                        h, same = _split((zh, rh, of_h), 3)
                        if x is None or h is None or order != same:
                            continue
                        if _alike([state, zx, zh, node.outputs[0]]):
                            attrs = {"order": order}
                            return node.derived([x, h, state], node.outputs, attrs, op=GRU_CELL)
    return None


def _blends(node: Node) -> Iterator[tuple[Value | None, Value | None, Value | None]]:
    """a, z and b, if ``node`` computes (1 - z) * a + z * b, or a + z * (b - a)."""
    for left, right in _operands_of(node, "Add"):
        for z, b in _operands_of(produced_by(right, "Mul"), "Mul"):
            for rest, a in _operands_of(produced_by(left, "Mul"), "Mul"):
                difference = produced_by(rest, "Sub")
                one = None if difference is None else number_of(difference.inputs[0])
                if difference is not None and difference.inputs[1] is z and one == 1:
                    yield a, z, b
            difference = produced_by(b, "Sub")
            if difference is not None and difference.inputs[1] is left:
                yield left, z, difference.inputs[0]


def _operands_of(node: Node | None, name: str) -> Iterator[tuple[Value | None, Value | None]]:
    """The operands of a binary node in either order; none if it is another operation."""
    if node is not None and node.op.full_name == name and not node.control_inputs:
        yield from swapped(node)


def _without_number(value: Value | None) -> tuple[Value | None, float]:
    """x and a number, if ``value`` is their sum; else itself and 0."""
    for added, x in _operands_of(produced_by(value, "Add"), "Add"):
        if (bias := number_of(added)) is not None:
            return x, bias
    return value, 0.0


def _split(parts: Sequence[Value | None], count: int) -> tuple[Value | None, tuple[int, ...]]:
    """What ``parts`` are all equal parts of along the last axis, in float32, and their places; of
    one Split, or of a Slice for each."""
    places = [_place(part, count) for part in parts]
    whole = {x for x, _ in places}
    order = tuple([place for _, place in places])
    x = whole.pop()
    if whole or x is None or len(set(order)) < len(parts) or not _alike(parts):
        return None, ()
    return x, order


def _place(part: Value | None, count: int) -> tuple[Value | None, int]:
    """What ``part`` is one of ``count`` equal parts of along the last axis, and which of them."""
    node = None if part is None else part.producer
    if part is None or node is None or node.control_inputs or not part.rank:
        return None, 0
    if node.op.full_name == "Slice":
        begin = _begin_of(node, part.rank)
        width = 0 if begin is None else _width_of(part)
        if not width or node.inputs[0] is None or _width_of(node.inputs[0]) != count * width:
            return None, 0
        assert begin is not None
        begin += count * width if begin < 0 else 0
        return (None, 0) if begin < 0 or begin % width else (node.inputs[0], begin // width)
    split = node.op.full_name == "Split" and len(node.outputs) == count and _alike(node.outputs)
    if not split or node.attrs.get("axis", 0) not in (-1, part.rank - 1):
        return None, 0
    return node.inputs[0], node.outputs.index(part)


def _begin_of(node: Node, rank: int) -> int | None:
    """Where a Slice of neighbours along the last axis alone begins, if that is constant."""
    numbers = [node.const(i) for i in (1, 3, 4)]
    begin, axis, step = (None if n is None or n.size != 1 else int(n.item()) for n in numbers)
    last = axis in (-1, rank - 1) or (node.input(3) is None and rank == 1)
    return begin if last and (step == 1 or node.input(4) is None) else None


def _width_of(value: Value) -> int:
    """The last dim; 0 if it is not known."""
    width = value.shape[-1] if value.shape else None
    return width if isinstance(width, int) else 0


def _alike(values: Sequence[Value | None]) -> bool:
    """Whether all are of float32 and of one shape, with a last dim that is known."""
    types = [None if value is None else value.type for value in values]
    first = types[0]
    if not isinstance(first, TensorType) or first.dtype != FLOAT32 or not first.shape:
        return False
    known = all(dim is not None for dim in first.shape) and isinstance(first.shape[-1], int)
    return known and all(
        isinstance(t, TensorType) and t.dtype == FLOAT32 and t.shape == first.shape for t in types
    )
