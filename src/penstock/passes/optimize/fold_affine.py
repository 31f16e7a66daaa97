"""Folding of per-channel scales and shifts, such as those of a BatchNormalization, into the weights
and bias of the preceding convolution or matrix product.

The weights are computed once, in float64, and rounded once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias

import numpy as np

from penstock.core.types import FLOAT32
from penstock.ir.graph import Graph, Node, Value, readers_of
from penstock.ops.registry import standard
from penstock.passes.context import Pass, PassContext
from penstock.passes.rewrite import forward

_Affine: TypeAlias = tuple[np.ndarray, np.ndarray]
"""A scale and a shift, in float64, each per channel or scalar."""


class FoldAffine(Pass):
    """Fold scales and shifts into the convolutions and products that they alone read."""

    def run(self, graph: Graph, context: PassContext) -> bool:
        present = {op.full_name for op in graph.ops}
        # Behind a MatMul alone, normalizations are folded and no other arithmetic.
        concerned = _RULES if not _CHANNELS.keys().isdisjoint(present) else ("BatchNormalization",)
        if present.isdisjoint(concerned):
            return False
        readers = readers_of(graph)

        def visit(node: Node, first: Value, output: Value) -> Sequence[Value | None] | bool | None:
            rule = _RULES[node.op.name]
            if len(node.outputs) != 1:
                return None
            if rule is _normalization and _folded_into_matmul(node, readers):
                return True
            for i, value in enumerate(node.inputs[:2]):
                convolution = None if value is None else value.producer
                # Other readers need the result without the scale and shift.
                if value is None or convolution is None or readers.get(value) != [node]:
                    continue
                if convolution.op.full_name not in _CHANNELS or len(convolution.outputs) != 1:
                    continue
                affine = rule(node, i)
                inputs = None if affine is None else _folded(convolution, affine)
                if inputs is not None:
                    convolution.inputs = inputs
                    # Readers of the node now read the convolution's output.
                    readers[value] = readers.get(output, [])
                    return (value,)
            return None

        return forward(graph, dict.fromkeys(concerned, visit))


_CHANNELS = {"Conv": 0, "ConvTranspose": 1, "Gemm": 1}
"""by operation, the axis of the result's channels in the weights"""


def _constant(node: Node, index: int) -> np.ndarray | None:
    const = node.const(index)
    return const if const is not None and const.dtype == FLOAT32 else None


def _normalization(node: Node, i: int) -> _Affine | None:
    """Return the scale and shift of a BatchNormalization in inference mode."""
    if i or node.attrs.get("training_mode", 0):
        return None
    constants = [_constant(node, i) for i in range(1, 5)]
    arrays = [array.astype(np.float64) for array in constants if array is not None]
    if len(arrays) < 4:
        return None
    scale, shift, mean, variance = arrays
    scale = scale / np.sqrt(variance + node.attrs.get("epsilon", 1e-5))
    # A variance of -epsilon or less would make all weights of a channel infinite or NaN.
    return (scale, shift - mean * scale) if np.isfinite(scale).all() else None


def _arithmetic(node: Node, i: int) -> _Affine | None:
    """Return the scale and shift of arithmetic with a scalar or per-channel constant."""
    const, value, output = _constant(node, 1 - i), node.inputs[i], node.outputs[0]
    if const is None or value is None or output is None or output.shape is None:
        return None
    # A constant that broadcasts the result adds axes that weights do not have.
    if value.shape != output.shape:
        return None
    dims = (1,) * (len(output.shape) - const.ndim) + const.shape
    # In ONNX, channels are axis 1.
    if const.size != 1 and any(n != 1 for axis, n in enumerate(dims) if axis != 1):
        return None
    operand, zero, one = const.reshape(-1).astype(np.float64), np.zeros(1), np.ones(1)
    match node.op.name:
        case "Add":
            return one, operand
        case "Sub":
            return (-one, operand) if i else (one, -operand)
        case "Mul":
            return operand, zero
    # A constant divided by the result is not affine. Weights cannot be divided by zero.
    return None if i or not np.all(operand) else (1 / operand, zero)  # Div


def _folded(node: Node, affine: _Affine) -> list[Value | None] | None:
    """Return the inputs with which ``node`` applies ``affine`` to its result."""
    weights, bias = _constant(node, 1), _constant(node, 2)
    if weights is None or (node.input(2) is not None and bias is None):
        return None
    if node.attrs.get("beta", 1.0) != 1:  # a Gemm's factor of its third input
        return None
    group = node.attrs.get("group", 1)
    axis = 0 if node.attrs.get("transB", 0) else _CHANNELS[node.op.name]
    channels = weights.shape[0] if axis == 0 else weights.shape[1] * group
    if not {*map(len, affine)} <= {1, channels}:
        return None
    scale, shift = [v if len(v) == channels else v.repeat(channels) for v in affine]
    if bias is not None:
        if bias.size not in (1, *bias.shape[-1:]):  # of a Gemm
            return None
        shift = shift + scale * bias.reshape(-1)
    name = node.outputs[0].name if node.outputs[0] is not None else node.name
    values = list(node.inputs[:2])
    # A shift alone only changes the bias: the weights need no scaled copy, which would take as much
    # memory as they do.
    if (scale != 1).any():
        values[1] = Value(f"{name}/weights", const=_scaled(weights, scale, axis, group))
    values.append(Value(f"{name}/bias", const=shift.astype(FLOAT32)))
    return values


def _folded_into_matmul(node: Node, readers: Mapping[Value, Sequence[Node | None]]) -> bool:
    """Fold a normalization into the preceding MatMul if possible; the normalization becomes a bias
    Add. A Reshape or Flatten in between that keeps the last dim is swapped with it."""
    value, affine, reshape = node.inputs[0], _normalization(node, 0), None
    if value is None or affine is None or value.rank != 2 or readers.get(value) != [node]:
        return False
    product = value.producer
    if product is not None and product.op.full_name in ("Flatten", "Reshape"):
        value, reshape = product.inputs[0], product
        if value is None or readers.get(value) != [reshape] or reshape.control_inputs:
            return False
        product = value.producer
    if value is None or product is None or product.op.full_name != "MatMul":
        return False
    weights, (scale, shift) = _constant(product, 1), affine
    if weights is None or weights.ndim != 2 or len(scale) != weights.shape[1]:
        return False
    scaled = (weights * scale).astype(FLOAT32)
    product.inputs[1] = Value(f"{value.name}/weights", const=scaled)
    bias = Value(f"{value.name}/bias", const=shift.astype(FLOAT32))
    if reshape is not None:
        (between,) = reshape.outputs
        assert between is not None
        between.type = value.type
        node.op, node.inputs, node.attrs = reshape.op, [between, *reshape.inputs[1:]], reshape.attrs
        # Swap names and origins as well, as errors and profiles name nodes by their function.
        node.name, reshape.name = reshape.name, node.name
        node.origin, reshape.origin = reshape.origin, node.origin
        node = reshape
    node.op, node.inputs, node.attrs = standard("Add"), [value, bias], {}
    return True


def _scaled(weights: np.ndarray, scale: np.ndarray, axis: int, group: int) -> np.ndarray:
    if axis == 0:
        by_channel = scale.reshape(-1, *[1] * (weights.ndim - 1))
    else:
        # Weights of a transposed convolution: [input channels by group, channels per group, ...].
        by_group = scale.reshape(group, 1, -1)
        rows = weights.shape[0] // group
        by_channel = np.broadcast_to(by_group, (group, rows, by_group.shape[-1]))
        by_channel = by_channel.reshape(weights.shape[:2] + (1,) * (weights.ndim - 2))
    return (weights * by_channel).astype(FLOAT32)


_RULES: dict[str, Callable[[Node, int], _Affine | None]] = {
    "BatchNormalization": _normalization,
    **dict.fromkeys(("Add", "Div", "Mul", "Sub"), _arithmetic),
}
