"""Fusion of the nodes of a recurrent cell into LstmCell, GruCell, or GruGates and GruState.

::

    i, f, n, o = Split(gates)                              becomes
    c' = Sigmoid(f + 1) * c + Sigmoid(i) * Tanh(n)              h', c' = LstmCell(gates, c)
    h' = Sigmoid(o) * Tanh(c')

    zx, rx, nx = Split(x);  zh, rh, nh = Split(h W)        becomes
    n = Tanh(nx + Sigmoid(rx + rh) * nh)                        h' = GruCell(x, h W, h)
    h' = (1 - z) * n + z * h, with z = Sigmoid(zx + zh)

    n = Tanh(nx + (Sigmoid(rx + rh) * h) W)                 z, a = GruGates(h V, h, x)
    h' = (1 - z) * n + z * h                                h' = GruState(a W, z, h, x)

Exporters of TensorFlow, Keras and torch write loops of such steps, whose separate nodes read and
write several times as much as one node. The gates, and the operands of sums and products, may be in
any order; the gates may come from one Split, or from a Slice for each; a constant may be added to
the forget gate; h' of a GRU may be n + z * (h - n). Other nodes may read the intermediate values.

A GRU that resets its state before the product has more forms: its sums may be split before or after
Sigmoid, or each gate may have products of its own. Therefore GruState represents any blend of a
state and a tanh, and GruGates represents the gates before it that are parts of the same tensors.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from penstock.core.checkpoints import with_checkpoints
from penstock.core.records import NamedTuple
from penstock.core.types import FLOAT32, TensorType
from penstock.ir.graph import Graph, Node, Value
from penstock.ops.internal.cells import GRU_CELL, GRU_GATES, GRU_STATE, LSTM_CELL
from penstock.passes.context import Pass, PassContext
from penstock.passes.dead_code import prune
from penstock.passes.rewrite import argument, names_of, new_name, number_of, produced_by, swapped

_Blend = tuple[Value | None, Value | None, Value | None]


class RecomposeCells(Pass):
    """Replace the nodes that compute the next state, and cell state, by one or two nodes."""

    def run(self, graph: Graph, context: PassContext) -> bool:
        if context.framed:
            return False
        changed, taken = False, None
        for inner in graph.graphs():
            cells: dict[Node, Node] = {}
            ends: set[Node] = set()
            blends: list[Node] = []
            own = set(inner.nodes)
            for node in with_checkpoints(inner.nodes):
                # An LstmCell replaces the node of the next cell state, since other nodes may read
                # this before the next state is computed.
                if node.op.full_name == "Mul" and (lstm := _lstm(node)) is not None:
                    first, cell = lstm
                    if first not in cells and first in own:
                        cells[first] = cell
                        ends.add(node)
                    continue
                parts = [*_blends(node)] if node.op.full_name == "Add" else []
                if parts and (replacement := _gru(node, parts)) is not None:
                    cells[node] = replacement
                elif parts and (replacement := _gru_state(node, parts)) is not None:
                    cells[node] = replacement
                    blends.append(replacement)
            if blends:
                taken = names_of(graph) if taken is None else taken
                cells |= _gates_of(blends, inner, cells, taken)
            if cells:
                inner.nodes = [cells.get(node, node) for node in inner.nodes if node not in ends]
                changed = True
        if changed:
            prune(graph)
        return changed


def _lstm(node: Node) -> tuple[Node, Node] | None:
    """Return the node of the next cell state and an LstmCell that replaces it, if ``node`` computes
    the next state of an LSTM; else None."""
    for parts in lstm_cells(node):
        # TensorFlow's cells add forget_bias to this gate, by default 1.
        f, bias = _without_number(parts.forget)
        gates, order = _split((parts.input, f, parts.output, parts.new), 4)
        total = parts.following.producer
        if gates is None or total is None:
            continue
        attrs = {"order": order, "forget_bias": bias}
        outputs = [node.outputs[0], parts.following]
        return total, total.derived([gates, parts.cell], outputs, attrs, op=LSTM_CELL)
    return None


class LstmParts(NamedTuple):
    """The arguments of the activations of an LSTM, its cell state, and the next cell state."""

    input: Value
    forget: Value
    output: Value
    new: Value
    cell: Value
    following: Value


def lstm_cells(node: Node) -> Iterator[LstmParts]:
    """Yield the LSTM cells whose next state ``node`` computes, for each assignment of operands."""
    for output, new in swapped(node, "Mul"):
        o = argument(output, "Sigmoid")
        following = None if o is None else argument(new, "Tanh")
        for kept, added in swapped(produced_by(following, "Add")):
            for forget, cell in swapped(produced_by(kept, "Mul")):
                f = argument(forget, "Sigmoid")
                for into, values in () if f is None else swapped(produced_by(added, "Mul")):
                    parts = [argument(into, "Sigmoid"), f, o, argument(values, "Tanh"), cell]
                    if _alike([*parts, following, node.outputs[0]]):
                        yield LstmParts(*parts, following)  # type: ignore[arg-type, call-arg]


def _gru(node: Node, blends: Sequence[_Blend]) -> Node | None:
    """Return a GruCell that replaces ``node``, if one of its ``blends`` is a GRU's next state."""
    for new, update, state in blends:
        for of_x, product in swapped(produced_by(argument(new, "Tanh"), "Add")):
            for reset, of_h in swapped(produced_by(product, "Mul")):
                sums = [produced_by(argument(gate, "Sigmoid"), "Add") for gate in (update, reset)]
                for zx, zh in swapped(sums[0]):
                    for rx, rh in swapped(sums[1]):
                        x, order = _split((zx, rx, of_x), 3)
                        h, same = _split((zh, rh, of_h), 3)
                        # GruCell has the same order of gates in both inputs.
                        if x is None or h is None or order != same:
                            continue
                        if _alike([state, zx, zh, node.outputs[0]]):
                            attrs = {"order": order}
                            return node.derived([x, h, state], node.outputs, attrs, op=GRU_CELL)
    return None


def _gru_state(node: Node, blends: Sequence[_Blend]) -> Node | None:
    """Return a GruState that replaces ``node``, if one of its ``blends`` has a tanh; else None."""
    for new, update, state in blends:
        total = argument(new, "Tanh")
        if total is None or not _alike([total, update, state, node.outputs[0]]):
            continue
        inputs, place = [total, update, state], 0
        for of_x, product in swapped(produced_by(total, "Add")):
            x, order = _split([of_x])
            if x is not None and _alike([product, total]):
                inputs, (place,) = [product, update, state, x], order
        return node.derived(inputs, node.outputs, {"order": (place,)}, op=GRU_STATE)
    return None


def _gates_of(
    blends: Sequence[Node], graph: Graph, cells: Mapping[Node, Node], taken: Counter[str]
) -> dict[Node, Node]:
    """Return a GruGates for each product of a reset gate and the state of one of ``blends``. The
    product must precede the blend, whose update gate the GruGates computes as well. ``cells`` maps
    nodes to their replacements."""
    by_state: dict[Value | None, list[Node]] = {}
    for blend in blends:
        by_state.setdefault(blend.inputs[2], []).append(blend)
    # The blends are new nodes, with the places of the nodes that they replace.
    ahead = {id(cell): node for node, cell in cells.items()}
    places = {node: i for i, node in enumerate(graph.nodes)}
    gates: dict[Node, Node] = {}
    for node in with_checkpoints(graph.nodes):
        for reset, state in swapped(node, "Mul"):
            for blend in by_state.get(state, ()) if node not in gates else ():
                update, inputs, order = blend.inputs[1], *_gate_parts(blend.inputs[1], reset)
                # A GruGates replaces the product, so the blend that reads its update gate must come
                # later.
                if not inputs or update is None or places[node] > places[ahead[id(blend)]]:
                    continue
                if not _alike([update, reset, state, node.outputs[0]]):
                    continue
                # Other nodes may read the old update gate, whose Sigmoid stays until pruning finds
                # it dead.
                own = Value(new_name(f"{update.name}/gate", taken), update.type)
                arrays, attrs = [inputs[0], state, *inputs[1:]], {"order": order}
                gates[node] = node.derived(arrays, [own, *node.outputs], attrs, op=GRU_GATES)
                blend.inputs[1] = own
                by_state[state].remove(blend)
                break
    return gates


def _gate_parts(update: Value | None, reset: Value | None) -> tuple[list[Value], tuple[int, ...]]:
    """Return the one or two tensors whose parts, added, are the arguments of both gates' sigmoids,
    and the places of both gates in each; no tensors if the gates have another form."""
    before = argument(update, "Sigmoid"), argument(reset, "Sigmoid")
    for zx, zh in swapped(produced_by(before[0], "Add")):
        for rx, rh in swapped(produced_by(before[1], "Add")):
            (x, of_x), (h, of_h) = _split((zx, rx)), _split((zh, rh))
            if x is not None and h is not None and _alike([zx, zh]):
                return [h, x], (*of_h, *of_x)
    x, order = _split(before)
    if x is not None:
        return [x], order
    whole, order = _split((update, reset))
    x = argument(whole, "Sigmoid")
    return ([], ()) if x is None else ([x], order)


def _blends(node: Node) -> Iterator[_Blend]:
    """Yield a, z and b, if ``node`` computes (1 - z) * a + z * b, or a + z * (b - a)."""
    for left, right in swapped(node, "Add"):
        for z, b in swapped(produced_by(right, "Mul")):
            for rest, a in swapped(produced_by(left, "Mul")):
                if rest is not None and z is not None and _complement(rest) is z:
                    yield a, z, b
            difference = produced_by(b, "Sub")
            if difference is not None and difference.inputs[1] is left:
                yield left, z, difference.inputs[0]


def _complement(value: Value) -> Value | None:
    """Return x, if ``value`` is 1 - x, or 1 + (-x); else None."""
    difference = produced_by(value, "Sub")
    if difference is not None and number_of(difference.inputs[0]) == 1:
        return difference.inputs[1]
    for negative, one in swapped(produced_by(value, "Add")):
        if number_of(one) == 1 and (x := argument(negative, "Neg")) is not None:
            return x
    return None


def _without_number(value: Value | None) -> tuple[Value | None, float]:
    """Return x and a constant, if ``value`` is their sum; else ``value`` and 0."""
    for added, x in swapped(produced_by(value, "Add")):
        if (bias := number_of(added)) is not None:
            return x, bias
    return value, 0.0


def _split(parts: Sequence[Value | None], count: int = 0) -> tuple[Value | None, tuple[int, ...]]:
    """Return the float32 value of which ``parts`` are equal parts along the last axis, and their
    places; None if there is no such value. Each part is an output of one Split, or of a Slice.
    ``count``: the number of equal parts; 0 for any."""
    count = count or _count(parts[0])
    places = [_place(part, count) for part in parts]
    whole = {x for x, _ in places}
    order = tuple([place for _, place in places])
    x = whole.pop()
    if whole or x is None or len(set(order)) < len(parts) or not _alike(parts):
        return None, ()
    return x, order


def _place(part: Value | None, count: int) -> tuple[Value | None, int]:
    """Return the value of which ``part`` is one of ``count`` equal parts along the last axis, and
    its place; None if there is no such value."""
    node = None if part is None else part.producer
    if part is None or node is None or node.control_inputs or not part.rank:
        return None, 0
    if node.op.full_name == "Slice":
        begin = begin_of(node, part.rank)
        width = 0 if begin is None else _width_of(part)
        if not width or node.inputs[0] is None or _width_of(node.inputs[0]) != count * width:
            return None, 0
        assert begin is not None
        # In ONNX, a negative start counts from the end.
        begin += count * width if begin < 0 else 0
        return (None, 0) if begin < 0 or begin % width else (node.inputs[0], begin // width)
    split = node.op.full_name == "Split" and len(node.outputs) == count and _alike(node.outputs)
    if not split or node.attrs.get("axis", 0) not in (-1, part.rank - 1):
        return None, 0
    return node.inputs[0], node.outputs.index(part)


def _count(part: Value | None) -> int:
    """Return how many parts of this width a Split's or Slice's input has; 1 if unknown."""
    node = None if part is None else part.producer
    if part is None or node is None or node.op.full_name not in ("Split", "Slice"):
        return 1
    width = _width_of(part)
    return _width_of(node.inputs[0]) // width if width and node.inputs[0] is not None else 1


def begin_of(node: Node, rank: int) -> int | None:
    """Return the start of a Slice with step 1 along the last axis, if the start is constant and the
    Slice takes all elements along other axes; else None."""
    numbers = [node.const(i) for i in (1, 3, 4)]
    begins, axes, steps = ([] if n is None else n.reshape(-1).tolist() for n in numbers)
    # In ONNX, starts without axes refer to the first axes.
    if node.input(3) is None:
        axes = list(range(len(begins)))
    x, (y,) = node.inputs[0], node.outputs
    # Steps that are not constant are an empty set here, and refused like steps other than 1.
    if len(axes) != len(begins) or (node.input(4) is not None and set(steps) != {1}):
        return None
    if x is None or y is None or x.shape is None or y.shape is None:
        return None
    axes = [axis % rank for axis in axes]
    others = [axis for axis in axes if axis != rank - 1]
    # Unknown dims (None) compare as equal although they may differ.
    if any(x.shape[axis] is None or x.shape[axis] != y.shape[axis] for axis in others):
        return None
    return int(begins[axes.index(rank - 1)]) if rank - 1 in axes else None


def _width_of(value: Value) -> int:
    """Return the last dim; 0 if unknown."""
    width = value.shape[-1] if value.shape else None
    return width if isinstance(width, int) else 0


def _alike(values: Sequence[Value | None]) -> bool:
    """Whether all values are float32 and have the same shape, with a known last dim."""
    if None in values:
        return False
    types = [value.type for value in values if value is not None]
    first = types[0]
    if not isinstance(first, TensorType) or first.dtype != FLOAT32 or not first.shape:
        return False
    # Unknown dims (None) compare as equal although they may differ; dims of one name are equal.
    known = None not in first.shape and isinstance(first.shape[-1], int)
    return known and False not in [
        isinstance(t, TensorType) and t.dtype == FLOAT32 and t.shape == first.shape for t in types
    ]
