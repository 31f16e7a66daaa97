"""Append new keys and values together to a cache that holds both in one tensor.

::

    k = Concat(Gather(past, 0), new_k)              present = Concat(past, Stack(new_k, new_v))
    v = Concat(Gather(past, 1), new_v)   becomes    k, v = Split(present)
    present = Stack(k, v)

A Stack is a Concat of Unsqueezes. One copy of the cache replaces three and those of Gather; none is
left if the present grows in place (``grow_caches``). Keys may be transposed before new ones are
appended, and back before they are stacked.
"""

from __future__ import annotations

from collections.abc import Sequence

from penstock.core.records import NamedTuple
from penstock.core.types import Dim
from penstock.ir.graph import Graph, Node, Value, sort
from penstock.ops.registry import standard
from penstock.passes.context import Pass, PassContext, Property
from penstock.passes.dead_code import prune
from penstock.passes.rewrite import (
    Expansion,
    Substitution,
    nodes_before,
    number_of,
    produced_by,
    replace_nodes,
)


class JoinCaches(Pass):
    """Append new rows to both halves of a cache at once."""

    invalidates = frozenset({Property.TYPED})

    def run(self, graph: Graph, context: PassContext) -> bool:
        substitution = Substitution()
        changed = replace_nodes(graph, {"Concat": lambda node: _nodes(node, substitution)})
        if changed:
            substitution.apply_throughout(graph)
            sort(graph)
            prune(graph)
        return changed


class _Half(NamedTuple):
    """Keys, or values, of the ``past`` followed by ``new`` ones, along an ``axis`` of the operands
    of ``concat``. ``perm`` permutes the axes of these to those of ``whole``; ``back`` is the
    inverse."""

    past: Value
    new: Value
    axis: int
    concat: Node
    whole: Value
    perm: Sequence[int]
    back: Sequence[int]


def _nodes(node: Node, substitution: Substitution) -> Sequence[Node] | None:
    if len(node.inputs) != 2:
        return None
    present = node.outputs[0]
    k, v = (_half(value, i) for i, value in enumerate(node.inputs))
    if k is None or v is None or k.past is not v.past or present is None or not present.rank:
        return None
    axis = k.perm.index(k.axis)
    if node.attrs["axis"] % present.rank or axis != v.perm.index(v.axis):
        return None
    if not nodes_before([k.new, v.new], controls=True).isdisjoint((k.concat, v.concat)):
        return None
    parts = Expansion(node)
    first = parts.constant([0])
    rows = [parts.add("Unsqueeze", [_turned(parts, x.new, x.perm), first]) for x in (k, v)]
    new = parts.add("Concat", rows, axis=0)
    parts.finish("Concat", [k.past, new], present, axis=axis + 1)
    both = [Value(f"{present.name}/half{i}") for i in range(2)]
    op, attrs = standard("Split"), {"axis": 0, "num_outputs": 2}
    parts.nodes.append(node.derived([present], both, attrs, op=op))
    for x, half in zip((k, v), both, strict=True):
        whole = parts.add("Squeeze", [half, first])
        substitution[x.whole] = whole
        if x.concat.outputs[0] is not x.whole:
            substitution.replace(x.concat.outputs, [_turned(parts, whole, x.back)])
    return parts.nodes


def _turned(parts: Expansion, value: Value, perm: Sequence[int]) -> Value:
    return value if perm == sorted(perm) else parts.add("Transpose", [value], perm=perm)


def _half(value: Value | None, place: int) -> _Half | None:
    """Return the cache half, with new rows, that an Unsqueeze stacks; None if there is none."""
    stack = produced_by(value, "Unsqueeze")
    whole = None if stack is None or number_of(stack.inputs[1]) != 0 else stack.inputs[0]
    turn = produced_by(whole, "Transpose")
    concat = produced_by(whole if turn is None else turn.inputs[0], "Concat")
    if whole is None or concat is None or len(concat.inputs) != 2 or not whole.rank:
        return None
    old, new = concat.inputs
    perm = back = [*range(whole.rank)]
    if turn is not None:
        before = produced_by(old, "Transpose")
        if before is None:
            return None
        perm, back = ([*x.attrs.get("perm", perm[::-1])] for x in (turn, before))
        old = before.inputs[0]
        if [back[axis] for axis in perm] != sorted(perm):
            return None
    past = _past_of(old, place)
    if past is None or new is None:
        return None
    return _Half(past, new, concat.attrs["axis"] % whole.rank, concat, whole, perm, back)


def _past_of(value: Value | None, place: int) -> Value | None:
    """Return the tensor [2, ...] whose element ``place`` along axis 0 is ``value``."""
    node = produced_by(value, "Gather", "Squeeze")
    if node is None:
        return None
    past, index = node.inputs[:2]
    fits, chosen = index is not None and index.rank == 0, number_of(index)
    axis: float | None = node.attrs.get("axis", 0)
    if node.op.name == "Squeeze":
        part, node = past, None if past is None else past.producer
        if node is None or node.control_inputs or not node.inputs:
            return None
        past, fits = node.inputs[0], chosen == 0 and _first_dim(part) == 1
        if node.op.full_name == "Split" and len(node.outputs) == 2:
            chosen, axis = node.outputs.index(part), node.attrs.get("axis", 0)
        elif node.op.full_name == "Slice" and len(node.inputs) > 3:
            # For a slice of one row, only its start matters.
            chosen, axis = number_of(node.inputs[1]), number_of(node.inputs[3])
        else:
            return None
    is_half = fits and axis == 0 and chosen in (place, place - 2) and _first_dim(past) == 2
    return past if is_half else None


def _first_dim(value: Value | None) -> Dim:
    return value.shape[0] if value is not None and value.shape else None
