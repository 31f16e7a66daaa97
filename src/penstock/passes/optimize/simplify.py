"""Algebraic simplification: removal of identities, Dropout in inference, and chains of views.

``RULES`` maps operations to rules. A rule takes a node, its first input and its first output, and
returns the values that replace the node's outputs, or ``None``; or whether it changed the node in
place.
"""

from __future__ import annotations

import math

import numpy as np

from penstock.core.types import Shape, TensorType
from penstock.ir.graph import Graph, Node, Value
from penstock.ops.common.shape_rules import known_ints, normalize_axes
from penstock.ops.registry import TENSORFLOW, standard
from penstock.passes.context import Pass, PassContext
from penstock.passes.dead_code import prune
from penstock.passes.rewrite import Replacement, Visit, forward


class Simplify(Pass):
    """Apply the rule of its operation to every node once, in order."""

    def run(self, graph: Graph, context: PassContext) -> bool:
        changed = forward(graph, RULES)
        if changed:
            # Remove dead nodes here, as another round would run all passes again. Folding also runs
            # alone on graphs partitioned by device.
            prune(graph)
        return changed


def identity(node: Node, value: Value, output: Value) -> Replacement:
    """Remove Identity and IdentityN, as TensorFlow writes around custom gradients."""
    return node.inputs


def dropout(node: Node, value: Value, output: Value) -> Replacement:
    """Remove Dropout in inference mode, if its mask is not an output."""
    if len(node.outputs) > 1 and node.outputs[1] is not None:
        return None
    training = node.const(2)
    inference = node.input(2) is None or (training is not None and not np.all(training))
    return (value,) if inference else None


def unchanged_type(value: Value, output: Value) -> Replacement:
    """Remove a view, cast or pad whose output type equals its input type."""
    before, after = value.type, output.type
    if not isinstance(before, TensorType) or not isinstance(after, TensorType):
        return None
    same = before.static and after.static and before.dtype == after.dtype
    return (value,) if same and before.shape == after.shape else None


def repeat(node: Node, value: Value, output: Value) -> Replacement:
    """Remove an Expand or a Tile to its input's shape. A shape computed at run time may be invalid
    for the input, which must remain an error."""
    return unchanged_type(value, output) if _known(node, 1) else None


def whole_slice(node: Node, value: Value, output: Value) -> Replacement:
    """Remove a slice of all elements; a reversing slice has the same type, but stays."""
    steps = node.const(4)
    if node.input(4) is not None and (steps is None or not np.all(steps > 0)):
        return None
    return unchanged_type(value, output)


def no_pad(node: Node, value: Value, output: Value) -> Replacement:
    """Remove a Pad by zeros only; other pads may keep the type by cropping as much as they add."""
    pads = node.const(1)
    if pads is None or np.any(pads) or not _fixed(node, 3):
        return None
    return unchanged_type(value, output)


def cast(node: Node, value: Value, output: Value) -> Replacement:
    # In NumPy, float64 == None is true.
    known = value.dtype is not None and output.dtype is not None
    return (value,) if known and value.dtype == output.dtype else None


def single(node: Node, value: Value, output: Value) -> Replacement:
    """Remove Concat, Sum, Max, Min or Mean of one input."""
    # Concat's axis is 1 by default in opset 1. The kernel reports an axis out of range.
    axis, rank = node.attrs.get("axis", 1), value.rank or 0
    checked = node.op.name != "Concat" or -rank <= axis < rank
    return (value,) if len(node.inputs) == 1 and checked else None


def transpose(node: Node, value: Value, output: Value) -> Replacement | bool:
    """Remove an identity permutation; merge two Transposes in a row into one."""
    perm, rank = node.attrs.get("perm"), value.rank
    before = value.producer
    if before is not None and before.op is node.op and not before.control_inputs:
        first, second = before.attrs.get("perm"), perm
        # Two reversals of axes cancel for any rank.
        if rank is None and first is None and second is None:
            return (before.inputs[0],)
        if rank is not None:
            backwards = list(range(rank))[::-1]
            first, second = first or backwards, second or backwards
            merged = [first[axis] for axis in second]
            if merged == backwards[::-1]:  # saves another round of all passes
                return (before.inputs[0],)
            node.attrs["perm"] = merged
            node.inputs[0] = before.inputs[0]
            return True
    return (value,) if perm is not None and list(perm) == list(range(rank or 0)) else None


RESHAPES = ("Flatten", "Reshape", "Squeeze", "Unsqueeze")


def reshape(node: Node, value: Value, output: Value) -> Replacement | bool:
    """Merge a chain of reshapes with a known result; remove it if the shape is unchanged."""
    unchanged = unchanged_type(value, output) if _known(node, 1) else None
    before, after = value.producer, output.type
    if unchanged is not None or not isinstance(after, TensorType) or not after.static:
        return unchanged
    if before is None or "reshapes" not in before.op.traits or before.control_inputs:
        return None
    if not _fixed(before, 1):
        return None
    if max(after.dims, default=0) > np.iinfo(np.int64).max:
        return None  # too large for an array, which planning reports
    return _become_reshape(node, before.inputs[0], after.dims)


def reduction(node: Node, value: Value, output: Value) -> bool:
    """Replace the reduction of one element by a reshape."""
    before, after = value.type, output.type
    if not isinstance(before, TensorType) or not isinstance(after, TensorType):
        return False
    if not (before.static and after.static) or before.dtype != after.dtype:
        return False
    elements = math.prod(before.dims)
    if elements == 0 or elements != math.prod(after.dims) or not _fixed(node, 1):
        return False
    return _become_reshape(node, value, after.dims)


def whole_gather(node: Node, value: Value, output: Value) -> bool:
    """Replace a Gather of all elements in order by a reshape, and a ScatterND to all of them by one
    of its updates."""
    index, before, after = node.const(1), value.type, output.type
    if not isinstance(before, TensorType) or not isinstance(after, TensorType) or index is None:
        return False
    if (
        not index.size
        or not (before.static and after.static)
        or math.prod(before.dims) != math.prod(after.dims)
    ):
        return False
    dims, name = before.dims, node.op.full_name
    if name == "Gather":
        (axis,) = normalize_axes([node.attrs.get("axis", 0)], len(dims))
        index, dims = index[..., None], dims[axis : axis + 1]
    elif node.attrs.get("batch_dims", 0) or node.attrs.get("reduction", "none") != "none":
        return False
    # All coordinates along these axes, in C order.
    dims, places = dims[: index.shape[-1]], index.reshape(-1, index.shape[-1])
    if math.prod(dims) != len(places) or not np.array_equal(places, np.argwhere(np.ones(dims))):
        return False
    return _become_reshape(node, node.inputs[2 if name == "ScatterND" else 0], after.dims)


def _fixed(node: Node, index: int) -> bool:
    """Whether an input of axes or a shape is omitted or a constant, which type inference has
    checked. One computed at run time may be out of range, which the node's kernel reports."""
    return node.input(index) is None or node.const(index) is not None


def _known(node: Node, index: int) -> bool:
    """Whether an integer input is omitted or known, also by shape arithmetic."""
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
    """Remove Mul or Div by a constant of ones that does not broadcast its input."""
    # One divided by x is not x.
    for i in (1, 0) if node.op.name == "Mul" else (1,):
        const, other = node.const(i), node.inputs[1 - i]
        if const is None or not 0 < const.size <= 1024 or const.dtype == object:
            continue
        # The first element rules out nearly all constants.
        if const.item(0) != 1 or not (const == 1).all():
            continue
        # A constant of higher rank increases the result's rank.
        if other is None or other.shape is None or const.ndim > len(other.shape):
            continue
        same = isinstance(other.type, TensorType) and other.type.static
        if const.size == 1 or (same and output.shape == other.shape):
            return (other,)
    return rank_zero(node, value, output)


def rank_zero(node: Node, value: Value, output: Value) -> bool:
    """Reshape one-element constants to rank 0, if that keeps the result's rank. NumPy adds a scalar
    three times as fast as an array of shape (1,)."""
    changed = False
    for i, operand in enumerate(node.inputs):
        const, other = None if operand is None else operand.const, node.inputs[1 - i]
        if operand is None or const is None or const.ndim == 0 or other is None:
            continue
        # Then the other operand determines the result's rank.
        if const.size == 1 and (other.rank or 0) >= const.ndim:
            node.inputs[i] = Value(operand.name, const=const.reshape(()))
            changed = True
        elif const.size > 1 and 0 in const.strides and other.shape is not None:
            changed |= _repeat_once(node, i, operand.name, const, other.shape)
    return changed


def _repeat_once(node: Node, index: int, name: str, const: np.ndarray, other: Shape) -> bool:
    """Keep one of a constant's elements along the axes where strides of 0 repeat it as often as the
    ``other`` operand has elements: that operand then determines the result's dims."""
    dims = (None,) * (const.ndim - len(other)) + other[-const.ndim :]
    pairs = zip(const.shape, const.strides, dims, strict=True)
    once = [stride == 0 and 1 < size == dim for size, stride, dim in pairs]
    if True in once:
        kept = tuple(slice(1) if one else slice(None) for one in once)
        node.inputs[index] = Value(name, const=const[kept])
    return True in once


RULES: dict[str, Visit] = {
    **dict.fromkeys(("Identity", f"{TENSORFLOW}.IdentityN"), identity),
    **dict.fromkeys(("Cast", "CastLike"), cast),
    **dict.fromkeys(("Concat", "Max", "Mean", "Min", "Sum"), single),
    **dict.fromkeys(("Expand", "Tile"), repeat),
    **dict.fromkeys(("ReduceMax", "ReduceMean", "ReduceMin", "ReduceProd", "ReduceSum"), reduction),
    **dict.fromkeys(RESHAPES, reshape),
    **dict.fromkeys(("Add", "Pow", "Sub"), rank_zero),
    **dict.fromkeys(("Div", "Mul"), times),
    **dict.fromkeys(("Gather", "GatherND", "ScatterND"), whole_gather),
    "Dropout": dropout,
    "Slice": whole_slice,
    "Pad": no_pad,
    "Transpose": transpose,
}
