"""Removal of operations that change nothing: identities, Dropout in inference, chains of views.

``RULES`` has a rule for each operation. A rule takes a node, its first input and its first output,
and returns the values that replace the node's outputs, or ``None``; or whether it changed the node
in place.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from penstock.core.types import Shape, TensorType
from penstock.ir.graph import Graph, Node, Value
from penstock.ops.common.shape_rules import known_ints
from penstock.ops.registry import TENSORFLOW, standard
from penstock.passes.context import Pass, PassContext
from penstock.passes.dead_code import prune
from penstock.passes.rewrite import Replacement, forward

Rule = Callable[[Node, Value, Value], "Replacement | bool"]


class Simplify(Pass):
    """Apply the rule of its operation once to every node, in order."""

    def run(self, graph: Graph, context: PassContext) -> bool:
        changed = forward(graph, dict.fromkeys(RULES, _visit))
        if changed:
            # Remove dead nodes here: another round would run all passes again. Folding alone also
            # runs where graphs have been cut for devices.
            prune(graph)
        return changed


def _visit(node: Node) -> Replacement | bool:
    value = node.inputs[0] if node.inputs else None
    output = node.outputs[0] if node.outputs else None
    if value is None or output is None:
        return None
    return RULES[node.op.full_name](node, value, output)


def identity(node: Node, value: Value, output: Value) -> Replacement:
    """Identity, and TensorFlow's IdentityN, which it has around a function with a gradient."""
    return node.inputs


def dropout(node: Node, value: Value, output: Value) -> Replacement:
    """In inference mode the output of Dropout is its input; the mask must not be an output."""
    if len(node.outputs) > 1 and node.outputs[1] is not None:
        return None
    training = node.const(2)
    inference = node.input(2) is None or (training is not None and not np.all(training))
    return (value,) if inference else None


def unchanged_type(node: Node, value: Value, output: Value) -> Replacement:
    """A view, cast or pad whose output has the type of its input changes nothing."""
    before, after = value.type, output.type
    if not isinstance(before, TensorType) or not isinstance(after, TensorType):
        return None
    same = before.static and after.static and before.dtype == after.dtype
    return (value,) if same and before.shape == after.shape else None


def repeat(node: Node, value: Value, output: Value) -> Replacement:
    """An Expand or a Tile to the shape that its input has. What runs compute may not fit the input:
    then they fail."""
    return unchanged_type(node, value, output) if _known(node, 1) else None


def whole_slice(node: Node, value: Value, output: Value) -> Replacement:
    """A slice of everything; a backward slice has the same type, too, and stays."""
    steps = node.const(4)
    if node.input(4) is not None and (steps is None or not np.all(steps > 0)):
        return None
    return unchanged_type(node, value, output)


def no_pad(node: Node, value: Value, output: Value) -> Replacement:
    """Pads of zero; others may leave the type as it is, if they crop as much as they add."""
    pads = node.const(1)
    if pads is None or np.any(pads) or not _fixed(node, 3):
        return None
    return unchanged_type(node, value, output)


def cast(node: Node, value: Value, output: Value) -> Replacement:
    # NumPy says that float64 equals None.
    known = value.dtype is not None and output.dtype is not None
    return (value,) if known and value.dtype == output.dtype else None


def single(node: Node, value: Value, output: Value) -> Replacement:
    """Concat, Sum, Max, Min or Mean of one input."""
    # Concat of opset 1 has axis 1 by default. An axis out of range is left to the kernel to report.
    axis, rank = node.attrs.get("axis", 1), value.rank or 0
    checked = node.op.name != "Concat" or -rank <= axis < rank
    return (value,) if len(node.inputs) == 1 and checked else None


def transpose(node: Node, value: Value, output: Value) -> Replacement | bool:
    """Remove an identity permutation; merge two Transposes in a row into one."""
    perm, rank = node.attrs.get("perm"), value.rank
    before = value.producer
    if before is not None and before.op is node.op and not before.control_inputs:
        first, second = before.attrs.get("perm"), perm
        # Reversed twice, axes of any number are as they were.
        if rank is None and first is None and second is None:
            return (before.inputs[0],)
        if rank is not None:
            backwards = list(range(rank))[::-1]
            first, second = first or backwards, second or backwards
            merged = [first[axis] for axis in second]
            if merged == backwards[::-1]:  # else it would take all passes another round
                return (before.inputs[0],)
            node.attrs["perm"] = merged
            node.inputs[0] = before.inputs[0]
            return True
    return (value,) if perm is not None and list(perm) == list(range(rank or 0)) else None


RESHAPES = ("Flatten", "Reshape", "Squeeze", "Unsqueeze")


def reshape(node: Node, value: Value, output: Value) -> Replacement | bool:
    """A chain of reshapes with a known result is one reshape; to the same shape it is none."""
    unchanged = unchanged_type(node, value, output) if _known(node, 1) else None
    before, after = value.producer, output.type
    if unchanged is not None or not isinstance(after, TensorType) or not after.static:
        return unchanged
    if before is None or "reshapes" not in before.op.traits or before.control_inputs:
        return None
    if not _fixed(before, 1):
        return None
    if max(after.dims, default=0) > np.iinfo(np.int64).max:
        return None  # too large for any array, which planning reports
    return _become_reshape(node, before.inputs[0], after.dims)


def reduction(node: Node, value: Value, output: Value) -> bool:
    """The sum, mean or extreme of one element is that element: only the shape changes."""
    before, after = value.type, output.type
    if not isinstance(before, TensorType) or not isinstance(after, TensorType):
        return False
    if not (before.static and after.static) or before.dtype != after.dtype:
        return False
    elements = math.prod(before.dims)
    if elements == 0 or elements != math.prod(after.dims) or not _fixed(node, 1):
        return False
    return _become_reshape(node, value, after.dims)


def _fixed(node: Node, index: int) -> bool:
    """Whether an input that says axes or a shape is a constant, which types were checked with, or
    left out. What a run computes may be out of range, which the node's kernel finds."""
    return node.input(index) is None or node.const(index) is not None


def _known(node: Node, index: int) -> bool:
    """Whether an input of integers is left out or known, also from the shapes of tensors."""
    types = [None if value is None else value.type for value in node.inputs]
    return node.input(index) is None or known_ints(node, types, index) is not None


def _become_reshape(node: Node, source: Value | None, dims: Shape) -> bool:
    output = node.outputs[0]
    assert output is not None
    node.op = standard("Reshape")
    node.inputs = [source, Value(f"{output.name}/shape", const=np.array(dims, np.int64))]
    node.attrs = {"allowzero": 1}
    return True


def times(node: Node, value: Value, output: Value) -> Replacement | bool:
    """Mul or Div by a constant of ones that does not broadcast its input."""
    # One divided by x is not x.
    for i in (1, 0) if node.op.name == "Mul" else (1,):
        const, other = node.const(i), node.inputs[1 - i]
        if const is None or not 0 < const.size <= 1024 or const.dtype == object:
            continue
        # The first element says no for nearly all constants, without a look at the others.
        if const.item(0) != 1 or not (const == 1).all():
            continue
        # A constant of higher rank gives the result more axes.
        if other is None or other.shape is None or const.ndim > len(other.shape):
            continue
        same = isinstance(other.type, TensorType) and other.type.static
        if const.size == 1 or (same and output.shape == other.shape):
            return (other,)
    return rank_zero(node, value, output)


def rank_zero(node: Node, value: Value, output: Value) -> bool:
    """Constants of one element take rank 0, where that leaves the result's rank as it is. NumPy
    adds a scalar three times as fast as an array of shape (1,)."""
    changed = False
    for i, operand in enumerate(node.inputs):
        const, other = None if operand is None else operand.const, node.inputs[1 - i]
        if operand is None or const is None or const.size != 1 or const.ndim == 0 or other is None:
            continue
        # The other operand alone gives the result its rank then.
        if (other.rank or 0) >= const.ndim:
            node.inputs[i] = Value(operand.name, const=const.reshape(()))
            changed = True
    return changed


RULES: dict[str, Rule] = {
    **dict.fromkeys(("Identity", f"{TENSORFLOW}.IdentityN"), identity),
    **dict.fromkeys(("Cast", "CastLike"), cast),
    **dict.fromkeys(("Concat", "Max", "Mean", "Min", "Sum"), single),
    **dict.fromkeys(("Expand", "Tile"), repeat),
    **dict.fromkeys(("ReduceMax", "ReduceMean", "ReduceMin", "ReduceProd", "ReduceSum"), reduction),
    **dict.fromkeys(RESHAPES, reshape),
    **dict.fromkeys(("Add", "Pow", "Sub"), rank_zero),
    **dict.fromkeys(("Div", "Mul"), times),
    "Dropout": dropout,
    "Slice": whole_slice,
    "Pad": no_pad,
    "Transpose": transpose,
}
