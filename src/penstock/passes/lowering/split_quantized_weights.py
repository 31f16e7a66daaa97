"""Split weights of convolutions that int8 does not hold.

Integer kernels take int8 weights without a zero point. uint8 weights less theirs lie in -255..255,
and are the sum of two int8 tensors. Side by side along the input channels these multiply the input
twice, which gives the same sums of integers. Convolutions in groups become two, whose sums float32
holds, or one of real numbers, the codes less their zero points, where the result is rounded::

    Cast(ConvInteger(x, w))    becomes   Cast(ConvInteger(Concat(x, x), [high, low]))
    or, in groups,                       Add(Cast(ConvInteger(x, high)), Cast(ConvInteger(x, low)))
    QLinearConv(x, w)          becomes   QuantizeLinear(Mul(Conv(DequantizeLinear(x), w), factors))
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from penstock.analysis.quantized_weights import producer
from penstock.core.checkpoints import with_checkpoints
from penstock.core.records import NamedTuple
from penstock.core.types import FLOAT32, TensorType
from penstock.ir.graph import Graph, Node, Value
from penstock.ir.op import Op
from penstock.ops.common.dtypes import INT8, UINT8
from penstock.ops.common.shape_rules import element_number
from penstock.ops.internal.fused import fused
from penstock.ops.onnx.quantized import EXACT
from penstock.ops.registry import standard
from penstock.passes.context import Pass, PassContext, Property
from penstock.passes.dead_code import prune

_PLACES = {"ConvInteger": (0, 1, 3), "QLinearConv": (0, 3, 5)}
"""where operations of codes have the input, the weights, and the zero points of these"""


_TO_FLOAT32 = {"to": element_number("float32")}


class SplitQuantizedWeights(Pass):
    """Split weights where a backend has a kernel for that."""

    name = "split_quantized_weights"
    requires = frozenset({Property.TYPED})

    def run(self, graph: Graph, context: PassContext) -> bool:
        policy = context.fusion
        if policy is None:
            return False
        changed = False
        for inner in list(graph.graphs()):
            nodes: list[Node] = []
            for node in with_checkpoints(inner.nodes):
                split = _split(node, context)
                if split is not None and policy.has_kernel(split.candidate):
                    nodes += split.before
                    node.inputs, node.op = list(split.inputs), split.op or node.op
                    node.attrs = node.attrs if split.op is None else {}
                    changed = True
                nodes.append(node)
            inner.nodes = nodes
        if changed:
            prune(graph)
        return changed


class _Split(NamedTuple):
    """New inputs of a node, nodes that compute them, what a backend must have a kernel for, and
    another operation of the node."""

    inputs: Sequence[Value | None]
    before: Sequence[Node]
    candidate: Node
    op: Op | None = None


def _split(node: Node, context: PassContext) -> _Split | None:
    """The split of a convolution with weights that int8 does not hold."""
    if node.op.domain or node.control_inputs or len(node.outputs) != 1:
        return None
    if node.op.name == "Cast":
        return _of_integers(node, context)
    if node.attrs.get("group", 1) != 1:
        return _in_real_numbers(node) if node.op.name == "QLinearConv" else None
    if node.op.name == "Conv":
        return _of_real_numbers(node, context)
    return _of_quantized(node, context) if node.op.name == "QLinearConv" else None


def _of_quantized(node: Node, context: PassContext) -> _Split | None:
    x, w, zero = _PLACES[node.op.name]
    doubled = _doubled(node, node.input(x), node.input(w), node.input(zero), context)
    if doubled is None:
        return None
    *values, concat = doubled
    # Inputs that are left out at the end are omitted from the list; the zero point needs its place.
    inputs = [*node.inputs, *[None] * (zero + 1 - len(node.inputs))]
    for i, value in zip((x, w, zero), values, strict=True):
        inputs[i] = value
    return _Split(inputs, [concat], _copy(node, inputs))


def _of_integers(node: Node, context: PassContext) -> _Split | None:
    """The split of a Cast of a ConvInteger. Integers that no Cast reads are left as they are."""
    source = None if node.inputs[0] is None else node.inputs[0].producer
    output = node.outputs[0]
    if source is None or source.op.full_name != "ConvInteger" or source.control_inputs:
        return None
    if output is None or output.dtype != FLOAT32:
        return None
    if source.attrs.get("group", 1) != 1:
        return _in_groups(source, output, context)
    split = _of_quantized(source, context)
    if split is None:
        return None
    product = _copy(source, split.inputs, f"{output.name}/sums")
    candidate = fused([product, _to_float32(product)])
    return _Split([product.outputs[0]], [*split.before, product], candidate)


def _in_groups(source: Node, output: Value, context: PassContext) -> _Split | None:
    """A Cast of a ConvInteger in groups as the sum of two, if their sums are exact in float32."""
    weights = _weights(source.input(1), source.input(3), context)
    if weights is None or weights.const is None:
        return None
    # Codes and their differences from a zero point are at most 255 in size.
    if weights.const[0].size * 255 * 255 > EXACT:
        return None
    before: list[Node] = []
    parts = np.split(weights.const, 2, axis=1)
    for name, part in zip(("high", "low"), parts, strict=True):
        weight = Value(f"{output.name}/{name}/weights", const=np.ascontiguousarray(part))
        inputs = [source.inputs[0], weight, source.input(2)]
        product = _copy(source, inputs, f"{output.name}/{name}")
        before += [product, _to_float32(product)]
    return _Split(
        [before[1].outputs[0], before[3].outputs[0]], before, fused(before[:2]), standard("Add")
    )


def _in_real_numbers(node: Node) -> _Split | None:
    """A QLinearConv in groups by a Conv, whose sums of integers are exact in float32."""
    x, output = node.input(0), node.outputs[0]
    scales = [scale for i in (1, 4, 6) if (scale := node.const(i)) is not None]
    w, zero = node.const(3), node.const(5)
    if x is None or output is None or w is None or zero is None or len(scales) < 3 or w.ndim < 3:
        return None
    by_channel, name = (-1, *[1] * (w.ndim - 2)), output.name
    numbers = w.astype(np.int16) - zero.reshape((*by_channel, 1))
    # One int8 tensor holds these: integer kernels take them as they are.
    if not numbers.size or (numbers.min() >= -128 and numbers.max() <= 127):
        return None
    added = np.zeros(len(w)) if node.input(8) is None else node.const(8)
    # The bias is added to the same sums, which must stay exact.
    if added is None or w[0].size * 255 * 255 + np.abs(added.astype(float)).max() > EXACT:
        return None
    x_scale, w_scale, y_scale = (scale.reshape(by_channel) for scale in scales)
    factors = np.asarray(x_scale * w_scale / y_scale, np.float32)
    one, weights, offsets, factor = (
        Value(f"{name}/{title}", const=np.asarray(array, np.float32))
        for title, array in (("one", 1), ("weights", numbers), ("bias", added), ("factor", factors))
    )
    codes, sums, product = (
        Value(f"{name}/{title}", TensorType(FLOAT32, like.shape))
        for title, like in (("codes", x), ("sums", output), ("product", output))
    )
    zeros = [node.input(2)] if node.input(2) is not None else []
    before = [
        node.derived([x, one, *zeros], [codes], {}, op=standard("DequantizeLinear")),
        node.derived([codes, weights, offsets], [sums], op=standard("Conv")),
        node.derived([sums, factor], [product], {}, op=standard("Mul")),
    ]
    return _Split([product, one, node.input(7)], before, before[1], standard("QuantizeLinear"))


def _copy(node: Node, inputs: Sequence[Value | None], name: str = "") -> Node:
    """The node with other inputs, and a value of its own."""
    (output,) = node.outputs
    assert output is not None
    return node.derived(inputs, [Value(name or output.name, output.type)])


def _to_float32(product: Node) -> Node:
    """A Cast of a product of integers."""
    (output,) = product.outputs
    assert output is not None
    number = Value(f"{output.name}/number", TensorType(FLOAT32, output.shape))
    return product.derived([output], [number], _TO_FLOAT32, op=standard("Cast"))


def _of_real_numbers(node: Node, context: PassContext) -> _Split | None:
    """The split of a Conv of dequantized codes."""
    x, w, bias = (producer(node.input(i), "DequantizeLinear") for i in range(3))
    if x is None or w is None or any(v is None or v.const is None for v in w.inputs):
        return None
    scale, scales = x.const(1), w.const(1)
    if scale is None or scales is None or scale.size > 1:
        return None
    # Only scales of output channels, axis 0 of weights, leave the sums of a channel one factor;
    # DequantizeLinear's axis is 1 by default.
    if scales.size > 1 and w.attrs.get("axis", 1) != 0:
        return None
    doubled = _doubled(node, x.inputs[0], w.inputs[0], w.input(2), context)
    if doubled is None:
        return None
    codes, weights, zeros, concat = doubled
    before = [concat]
    for source, inputs in ((x, [codes, *x.inputs[1:]]), (w, [weights, w.inputs[1], zeros])):
        first = inputs[0]
        assert first is not None
        number = Value(f"{first.name}/numbers", TensorType(FLOAT32, first.shape))
        before.append(source.derived(inputs, [number]))
    inputs = [*[new.outputs[0] for new in before[1:]], *node.inputs[2:]]
    parts = before[1:]
    if bias is not None:
        parts.append(_copy(bias, bias.inputs))
    operands = [part.outputs[0] for part in parts]
    whole = _copy(node, [*operands, *node.inputs[len(operands) :]])
    return _Split(inputs, before, fused([*parts, whole]))


def _doubled(
    node: Node, x: Value | None, w: Value | None, zero: Value | None, context: PassContext
) -> tuple[Value, Value, Value, Node] | None:
    """The input twice, the weights in two parts, zero points of these, and the Concat."""
    if x is None or w is None:
        return None
    type_, name = x.type, node.name if node.outputs[0] is None else node.outputs[0].name
    if not isinstance(type_, TensorType) or not type_.static or len(type_.dims) < 3:
        return None
    halves = _weights(w, zero, context)
    if halves is None:
        return None
    batch, channels, *spatial = type_.dims
    twice = Value(f"{name}/twice", TensorType(type_.dtype, (batch, 2 * channels, *spatial)))
    concat = node.derived([x, x], [twice], {"axis": 1}, op=standard("Concat"), name=twice.name)
    # The codes less their zero point are split, so that zero is what both halves have.
    shape = () if zero is None or zero.const is None else zero.const.shape
    return twice, halves, Value(f"{name}/zero", const=np.zeros(shape, INT8)), concat


def _weights(w: Value | None, zero: Value | None, context: PassContext) -> Value | None:
    """The weights in two parts, computed once."""
    if w is None or w.const is None or zero is None or zero.const is None:
        return None
    halves = context.weights.halves
    if (w, zero) not in halves:
        parts = _halves(w.const, zero.const)
        halves[w, zero] = None if parts is None else Value(f"{w.name}/halves", const=parts)
    return halves[w, zero]


def _halves(weights: np.ndarray, zero: np.ndarray) -> np.ndarray | None:
    """Two int8 tensors side by side whose sum are the codes less their zero point; None if one is
    enough, or two are not."""
    if weights.dtype not in (INT8, UINT8) or zero.ndim > 1 or weights.ndim < 3:
        return None
    along = zero.reshape(-1, *[1] * (weights.ndim - 1))
    if along.shape[0] not in (1, weights.shape[0]):
        return None
    difference = weights.astype(np.int16) - along
    high = difference.clip(-128, 127)
    low = difference - high
    # 255 - 127 is 128, which int8 does not hold; -255 + 128 is -127, which it does.
    if not np.any(low) or low.max() > 127:
        return None
    return np.concatenate([high, low], axis=1).astype(INT8)
