"""Removal of operations that change nothing: identities, Dropout in inference, chains of views.

``RULES`` has a rule for each operation. A rule returns the values that replace a node's outputs, or
``None``; or whether it changed the node in place.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from penstock.ir.graph import Graph, Node, Value
from penstock.ir.op import Op
from penstock.ops import find
from penstock.ops.registry import TENSORFLOW
from penstock.passes.context import Pass, PassContext, Property
from penstock.passes.rewrite import Replacement, forward
from penstock.types import TensorType

Rule = Callable[[Node], "Replacement | bool"]


class Simplify(Pass):
    """Apply the rule of its operation once to every node, in order."""

    name = "simplify"
    requires = frozenset({Property.TYPED})

    def run(self, graph: Graph, context: PassContext) -> bool:
        def visit(node: Node) -> Replacement | bool:
            rule = RULES.get(node.op.full_name)
            return None if rule is None or node.control_inputs else rule(node)

        return forward(graph, visit)


def _input(node: Node, index: int = 0) -> Value:
    value = node.inputs[index]
    assert value is not None
    return value


def _is_const(node: Node, index: int) -> np.ndarray | None:
    if index >= len(node.inputs):
        return None
    value = node.inputs[index]
    return None if value is None else value.const


def identity(node: Node) -> Replacement:
    return (node.inputs[0],)


def identities(node: Node) -> Replacement:
    """TensorFlow's IdentityN, which it has around a function with a gradient of its own."""
    return node.inputs


def dropout(node: Node) -> Replacement:
    """In inference mode the output of Dropout is its input; the mask must not be an output."""
    training = node.inputs[2] if len(node.inputs) > 2 else None
    if len(node.outputs) > 1 and node.outputs[1] is not None:
        return None
    if training is not None and (training.const is None or bool(np.all(training.const))):
        return None
    return (node.inputs[0],)


def unchanged_type(node: Node) -> Replacement:
    """A view, cast or pad whose output has the type of its input changes nothing."""
    value, output = _input(node), node.outputs[0]
    if output is None or not isinstance(value.type, TensorType) or not value.type.static:
        return None
    equal = isinstance(output.type, TensorType) and (
        output.type.without_data() == value.type.without_data()
    )
    return (value,) if equal else None


def whole_slice(node: Node) -> Replacement:
    """A slice of everything; a backward slice has the same type, too, and stays."""
    if len(node.inputs) > 4 and node.inputs[4] is not None:
        steps = _is_const(node, 4)
        if steps is None or not np.all(steps > 0):
            return None
    return unchanged_type(node)


def no_pad(node: Node) -> Replacement:
    """Pads of zero; others may leave the type as it is, if they crop as much as they add."""
    pads = _is_const(node, 1)
    return unchanged_type(node) if pads is not None and not np.any(pads) else None


def cast(node: Node) -> Replacement:
    value, output = _input(node), node.outputs[0]
    if output is None:
        return None
    if isinstance(value.type, TensorType) and isinstance(output.type, TensorType):
        # NumPy says that float64 equals None.
        before, after = value.type.dtype, output.type.dtype
        if before is not None and after is not None and before == after:
            return (value,)
    return None


def single(node: Node) -> Replacement:
    """Concat, Sum, Max, Min or Mean of one input."""
    return (node.inputs[0],) if len(node.inputs) == 1 else None


def transpose(node: Node) -> Replacement | bool:
    """Remove an identity permutation; merge two Transposes in a row into one."""
    value = _input(node)
    perm = node.attrs.get("perm")
    before = value.producer
    if before is not None and before.op is node.op and not before.control_inputs:
        rank = value.type.rank if isinstance(value.type, TensorType) else None
        first, second = before.attrs.get("perm"), perm
        if rank is None and first is None and second is None:
            return (before.inputs[0],)
        if rank is not None:
            backwards = list(range(rank))[::-1]
            first, second = first or backwards, second or backwards
            node.attrs["perm"] = [first[axis] for axis in second]
            node.inputs[0] = before.inputs[0]
            return True
    if perm is not None and list(perm) == list(range(len(perm))):
        return (value,)
    return None


RESHAPES = {"Reshape", "Flatten", "Squeeze", "Unsqueeze"}


def reshape(node: Node) -> Replacement | bool:
    """A chain of reshapes with a known result is one reshape; to the same shape it is none."""
    unchanged = unchanged_type(node)
    if unchanged is not None:
        return unchanged
    output = node.outputs[0]
    if output is None or not isinstance(output.type, TensorType) or not output.type.static:
        return None
    value = _input(node)
    before = value.producer
    chained = before is not None and before.op.name in RESHAPES and not before.op.domain
    if not chained or before is None or before.control_inputs:
        return None
    if max(output.type.dims, default=0) > np.iinfo(np.int64).max:
        return None  # too large for any array, which planning reports
    shape = np.array(output.type.dims, np.int64)
    node.op = _reshape_op()
    node.inputs = [before.inputs[0], Value(f"{output.name}/shape", const=shape)]
    node.attrs = {"allowzero": 1}
    return True


def reduction(node: Node) -> bool:
    """The sum, mean or extreme of one element is that element: only the shape changes."""
    value, output = _input(node), node.outputs[0]
    before, after = value.type, None if output is None else output.type
    if not isinstance(before, TensorType) or not isinstance(after, TensorType) or output is None:
        return False
    if not (before.static and after.static) or before.dtype != after.dtype:
        return False
    elements = math.prod(before.dims)
    if elements == 0 or elements != math.prod(after.dims):
        return False
    shape = np.array(after.dims, np.int64)
    node.op = _reshape_op()
    node.inputs = [value, Value(f"{output.name}/shape", const=shape)]
    node.attrs = {"allowzero": 1}
    return True


def _reshape_op() -> Op:
    op = find("Reshape")
    assert op is not None
    return op


def times_one(node: Node) -> Replacement:
    """Mul or Div by a constant of ones that does not broadcast its input."""
    for i in (1, 0) if node.op.name == "Mul" else (1,):
        const = _is_const(node, i)
        if const is None or not 0 < const.size <= 1024 or const.dtype == object:
            continue
        if const.item(0) != 1 or not (const == 1).all():
            continue
        value, output = node.inputs[1 - i], node.outputs[0]
        if value is None or output is None or not isinstance(value.type, TensorType):
            continue
        if value.type.shape is None or const.ndim > len(value.type.shape):
            continue
        same = isinstance(output.type, TensorType) and output.type.shape == value.type.shape
        if const.size == 1 or (same and value.type.static):
            return (value,)
    return None


def rank_zero(node: Node) -> bool:
    """Constants of one element take rank 0, where that leaves the result's rank as it is.

    NumPy adds a scalar three times as fast as an array of shape (1,).
    """
    changed = False
    for i, value in enumerate(node.inputs):
        other = node.inputs[1 - i]
        const = None if value is None else value.const
        if value is None or const is None or const.size != 1 or const.ndim == 0 or other is None:
            continue
        if isinstance(other.type, TensorType) and (other.type.rank or 0) >= const.ndim:
            node.inputs[i] = Value(value.name, const=const.reshape(()))
            changed = True
    return changed


def times(node: Node) -> Replacement | bool:
    return times_one(node) or rank_zero(node)


RULES: dict[str, Rule] = {
    "Identity": identity,
    f"{TENSORFLOW}.IdentityN": identities,
    "Dropout": dropout,
    "Cast": cast,
    "CastLike": cast,
    "Concat": single,
    "Sum": single,
    "Max": single,
    "Min": single,
    "Mean": single,
    "Expand": unchanged_type,
    "Tile": unchanged_type,
    "Slice": whole_slice,
    "Pad": no_pad,
    **dict.fromkeys(("ReduceMax", "ReduceMean", "ReduceMin", "ReduceProd", "ReduceSum"), reduction),
    "Transpose": transpose,
    "Reshape": reshape,
    "Flatten": reshape,
    "Squeeze": reshape,
    "Unsqueeze": reshape,
    "Mul": times,
    "Div": times,
    "Add": rank_zero,
    "Sub": rank_zero,
    "Pow": rank_zero,
}
