"""Rewrite TensorFlow's data movement, selection, rounding, boolean reductions and gradients of
convolutions for their images as ONNX operations, which have compiled kernels or are views::

SpaceToBatchND(x, [2], [[0, 0]])    becomes    Reshape(Transpose(Reshape(x)))
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from penstock.core.types import ShapeError, TensorType
from penstock.ir.graph import Graph, Node, Value
from penstock.ops.registry import TENSORFLOW
from penstock.ops.tensorflow.math import nudged
from penstock.ops.tensorflow.windows import backward_attrs
from penstock.passes.context import Pass, PassContext
from penstock.passes.rewrite import Expansion, dims_and_dtype, replace_nodes

_MOST_PLACES = 1 << 20  # most elements of a matrix mask

_Rule = Callable[[Expansion, Sequence[Value], Value], bool]

_RULES: dict[str, _Rule] = {}


def _expresses(*names: str) -> Callable[[_Rule], _Rule]:
    """Register the rewrite of operations, which returns whether it has written their nodes."""

    def register(rule: _Rule) -> _Rule:
        _RULES.update((f"{TENSORFLOW}.{name}", rule) for name in names)
        return rule

    return register


class DecomposeMoves(Pass):
    """Replace nodes of static shapes whose block shapes, crops and dims are constants."""

    def run(self, graph: Graph, context: PassContext) -> bool:
        return replace_nodes(graph, dict.fromkeys(_RULES, _nodes))


def _nodes(node: Node) -> Sequence[Node] | None:
    rule = _RULES[node.op.full_name]
    (result,) = node.outputs
    if result is None or not _is_plain(result):
        return None
    inputs = [value for value in node.inputs if value is not None and _is_plain(value)]
    parts = Expansion(node)
    return parts.nodes if len(inputs) == len(node.inputs) and rule(parts, inputs, result) else None


def _is_plain(value: Value) -> bool:
    """Whether a value is numeric or boolean, and its shape is static."""
    type_ = value.type
    known = isinstance(type_, TensorType) and type_.static and type_.dtype is not None
    return known and dims_and_dtype(value)[1].kind in "biuf"


def _blocks(sizes: Value, pairs: Value) -> tuple[list[int], np.ndarray] | None:
    """Return the block shape, and its paddings or crops; None if they are not constant, or invalid,
    which the node's kernel reports."""
    if sizes.const is None or pairs.const is None or pairs.const.shape != (sizes.const.size, 2):
        return None
    if (sizes.const < 1).any() or (pairs.const < 0).any():
        return None
    return [int(size) for size in sizes.const], pairs.const.astype(np.int64)


@_expresses("SpaceToBatchND")
def _space_to_batch(parts: Expansion, inputs: Sequence[Value], result: Value) -> bool:
    x, blocks = inputs[0], _blocks(*inputs[1:])
    batch, *dims = dims_and_dtype(x)[0]
    if blocks is None or len(blocks[0]) > len(dims):
        return False
    sides, pads = blocks
    n, rest = len(sides), dims[len(sides) :]
    dims = [dim + sum(pair) for dim, pair in zip(dims, pads.tolist(), strict=False)]
    if any(dim % side for dim, side in zip(dims, sides, strict=True)):
        return False
    if pads.any():
        ends = np.zeros((2, 1 + n + len(rest)), np.int64)
        ends[:, 1 : n + 1] = pads.T
        x = parts.add("Pad", [x, parts.constant(ends.reshape(-1))], mode="constant")
    inner = [part for d, s in zip(dims, sides, strict=True) for part in (d // s, s)]
    x = parts.reshaped(x, [batch, *inner, *rest])
    # In the new batch, the position in a block varies slower than the image.
    order = [*range(2, 2 * n + 1, 2), 0, *range(1, 2 * n, 2)]
    return _finish(parts, x, [*order, *range(2 * n + 1, 2 * n + 1 + len(rest))], result)


@_expresses("BatchToSpaceND")
def _batch_to_space(parts: Expansion, inputs: Sequence[Value], result: Value) -> bool:
    x, blocks = inputs[0], _blocks(*inputs[1:])
    batch, *dims = dims_and_dtype(x)[0]
    if blocks is None or len(blocks[0]) > len(dims) or batch % int(np.prod(blocks[0])):
        return False
    sides, crops = blocks
    n, rest = len(sides), dims[len(sides) :]
    images = batch // int(np.prod(sides))
    order = [n, *[axis for i in range(n) for axis in (n + 1 + i, i)]]
    order += range(2 * n + 1, 2 * n + 1 + len(rest))
    x = parts.reshaped(x, [*sides, images, *dims])
    if not crops.any():
        return _finish(parts, x, order, result)
    whole = [dim * side for dim, side in zip(dims, sides, strict=False)]
    x = parts.reshaped(parts.transposed(x, order), [images, *whole, *rest])
    bounds = [crops[:, 0], np.array(whole) - crops[:, 1], np.arange(1, n + 1)]
    parts.finish("Slice", [x, *map(parts.constant, bounds)], result)
    return True


@_expresses("DepthToSpace", "SpaceToDepth")
def _depth(parts: Expansion, inputs: Sequence[Value], result: Value) -> bool:
    """Decompose DepthToSpace and SpaceToDepth of channels-last images."""
    if parts.node.attrs["data_format"] != "NHWC":
        return False
    size, to_space = parts.node.attrs["block_size"], parts.node.op.name == "DepthToSpace"
    n, height, width, channels = dims_and_dtype(inputs[0])[0]
    if to_space:
        dims = [n, height, width, size, size, channels // size**2]
    else:
        dims = [n, height // size, size, width // size, size, channels]
    return _finish(parts, parts.reshaped(inputs[0], dims), [0, 1, 3, 2, 4, 5], result)


def _finish(parts: Expansion, x: Value, axes: Sequence[int], result: Value) -> bool:
    shape = parts.constant(np.array(dims_and_dtype(result)[0], np.int64))
    parts.finish("Reshape", [parts.transposed(x, axes), shape], result, allowzero=1)
    return True


@_expresses("Select")
def _select(parts: Expansion, inputs: Sequence[Value], result: Value) -> bool:
    """Decompose Select whose condition is a vector that selects rows."""
    condition, a, b = inputs
    shape, dims = dims_and_dtype(condition)[0], dims_and_dtype(a)[0]
    if dims_and_dtype(b)[0] != dims or shape not in ((), dims[:1], dims):
        return False
    if len(shape) == 1:
        condition = parts.reshaped(condition, [*shape, *[1] * (len(dims) - 1)])
    parts.finish("Where", [condition, a, b], result)
    return True


@_expresses("Fill")
def _fill(parts: Expansion, inputs: Sequence[Value], result: Value) -> bool:
    shape, value = inputs
    if shape.const is None or dims_and_dtype(value)[0]:
        return False
    parts.finish("Expand", [value, parts.constant(shape.const.astype(np.int64))], result)
    return True


@_expresses("All", "Any")
def _truths(parts: Expansion, inputs: Sequence[Value], result: Value) -> bool:
    """Decompose Any and All into the maximum and the minimum of bools."""
    x, axes = inputs
    if axes.const is None or not axes.const.size:
        return False
    name = "ReduceMax" if parts.node.op.name == "Any" else "ReduceMin"
    keepdims = int(parts.node.attrs.get("keep_dims", False))
    numbers = parts.constant(axes.const.astype(np.int64).reshape(-1))
    parts.finish(name, [x, numbers], result, keepdims=keepdims)
    return True


@_expresses("Pack")
def _pack(parts: Expansion, inputs: Sequence[Value], result: Value) -> bool:
    dims, dtype = dims_and_dtype(result)
    axis = parts.node.attrs.get("axis", 0) % len(dims)
    outer, (count, *inner) = dims[:axis], dims[axis:]
    if {dims_and_dtype(x)[0] for x in inputs} != {(*outer, *inner)}:
        return False
    if not inner:
        parts.finish("Concat", [parts.reshaped(x, (*outer, 1)) for x in inputs], result, axis=axis)
        return True
    # Along an axis that is there, the result alone is reshaped.
    joined = parts.emit("Concat", inputs, [*outer, count * inner[0], *inner[1:]], dtype, axis=axis)
    parts.finish("Reshape", [joined, parts.constant(np.array(dims, np.int64))], result, allowzero=1)
    return True


@_expresses("MatrixDiag", "MatrixDiagV3", "MatrixSetDiagV3")
def _main_diagonal(parts: Expansion, inputs: Sequence[Value], result: Value) -> bool:
    """Decompose diagonals into a masked Where with zeros, padding or a matrix."""
    sets, (*_, rows, columns) = "Set" in parts.node.op.name, dims_and_dtype(result)[0]
    k = inputs[2].const if sets else inputs[1].const if len(inputs) > 1 else np.zeros(1)
    if k is None or k.any() or k.size != 1 or rows * columns > _MOST_PLACES:
        return False
    diagonal = inputs[1] if sets else inputs[0]
    dims, dtype = dims_and_dtype(diagonal)
    other = inputs[0] if sets else inputs[4] if len(inputs) > 1 else parts.constant(dtype.type(0))
    if not dims or dims[-1] != min(rows, columns) or (not sets and dims_and_dtype(other)[0]):
        return False
    ends = (1, columns) if columns <= rows else (rows, 1)
    mask = parts.constant(np.eye(rows, columns, dtype=bool))
    wide = parts.reshaped(diagonal, [*dims[:-1], *ends])
    parts.finish("Where", [mask, wide, other], result)
    return True


@_expresses("FakeQuantWithMinMaxArgs")
def _rounded(parts: Expansion, inputs: Sequence[Value], result: Value) -> bool:
    (x,), attrs = inputs, parts.node.attrs
    dtype = dims_and_dtype(x)[1]
    numbers = nudged(*(attrs[name] for name in ("min", "max", "num_bits", "narrow_range")))
    low, high, step = (parts.constant(np.asarray(number, dtype)) for number in numbers)
    half = parts.constant(dtype.type(0.5))
    formula = (("Clip", low, high), ("Sub", low), ("Div", step), ("Add", half), ("Floor",))
    for name, *operands in (*formula, ("Mul", step)):
        x = parts.add(name, [x, *operands])
    parts.finish("Add", [x, low], result)
    return True


@_expresses("Conv2DBackpropInput", "Conv3DBackpropInputV2")
def _conv_transpose(parts: Expansion, inputs: Sequence[Value], result: Value) -> bool:
    x, weights, sizes = inputs
    (batch, filters, *counts), (rows, each, *window) = [dims_and_dtype(v)[0] for v in (x, weights)]
    images, channels, *image = dims_and_dtype(result)[0]
    # What does not match is left to the node's kernel, which reports it.
    if sizes.const is None or batch != images or filters != rows or channels % max(each, 1):
        return False
    try:
        attrs = backward_attrs(image, window, parts.node.attrs, counts)
    except ShapeError:
        return False
    groups = max(channels // max(each, 1), 1)
    parts.finish("ConvTranspose", [x, weights], result, **attrs, group=groups)
    return True
