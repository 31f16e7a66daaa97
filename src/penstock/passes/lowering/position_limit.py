"""Position limit of a decoder, from the tables that it gathers from by position."""

from __future__ import annotations

from penstock.ir.graph import Graph, Node, Value
from penstock.ops.internal.joined_steps import POSITIONS
from penstock.ops.onnx.rotary import cache_places


def position_limit(graph: Graph) -> tuple[int, str] | None:
    """Return the maximum length, in positions, of a sequence of joined steps, and the name of the
    table that sets it; None if no table does."""
    # Upper bounds of values, relative to the positions, as far as they are known.
    beyond = {value: 0 for value in graph.inputs if value.name == POSITIONS}
    tables: list[tuple[int, str]] = []
    for node in graph.nodes:
        known = [(i, beyond[v]) for i, v in enumerate(node.inputs) if v is not None and v in beyond]
        # Sums of positions and the like are not indices into a table.
        if len(known) != 1:
            continue
        ((place, offset),) = known
        table = _table_of(node, place)
        if table is not None:
            tables.append((table[1] - offset, table[0].name))
        change = _change(node, place)
        if change is not None and node.outputs[0] is not None:
            beyond[node.outputs[0]] = offset + change
    return min(tables, default=None)


def _table_of(node: Node, place: int) -> tuple[Value, int] | None:
    """Return the constant table that input ``place`` indexes, and its number of entries."""
    name, axis = node.op.full_name, 0
    if name.endswith("RotaryEmbedding"):
        cos, _, positions = cache_places(node.op)
        table = node.input(cos) if place == positions else None
    else:
        table = node.input(0) if place == 1 else None
        if name in ("Gather", "GatherElements"):
            axis = node.attrs.get("axis", 0)
        elif name != "GatherND" or node.attrs.get("batch_dims"):
            table = None
    shape = None if table is None or not table.is_constant else table.shape
    size = shape[axis] if shape else None
    return (table, size) if table is not None and isinstance(size, int) else None


def _change(node: Node, place: int) -> int | None:
    """Return an upper bound of the offset that a node adds to input ``place``; None if unknown."""
    if node.op.moves or node.op.full_name == "Cast":
        return 0 if place == 0 else None
    other = node.inputs[1 - place] if len(node.inputs) == 2 else None
    if other is None:
        return None
    # Flags of non-padding tokens.
    source = other.producer
    if node.op.full_name == "Mul" and source is not None and source.op.full_name == "Cast":
        flags = source.inputs[0]
        return 0 if flags is not None and flags.dtype == bool else None
    number = other.const
    if number is None or number.size != 1 or node.op.full_name not in ("Add", "Sub"):
        return None
    if node.op.full_name == "Add":
        return int(number.item())
    return -int(number.item()) if place == 0 else None
