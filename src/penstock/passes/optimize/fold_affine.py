"""Folding of scales and shifts into the weights and the bias of the convolution before them, such
as those of a BatchNormalization.

The weights are computed once, in float64, and rounded once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from penstock.ir.graph import Graph, Node, Value, readers_of
from penstock.passes.context import Pass, PassContext, Property
from penstock.passes.rewrite import forward
from penstock.types import FLOAT32, TensorType


class _Affine(NamedTuple):
    """A scale and a shift, in float64: one of each for each channel, or for all of them."""

    scale: np.ndarray
    shift: np.ndarray


class FoldAffine(Pass):
    """Fold scales and shifts of channels into the convolutions whose results they alone use."""

    name = "fold_affine"
    requires = frozenset({Property.TYPED})

    def run(self, graph: Graph, context: PassContext) -> bool:
        if not any(node.op.name in _CHANNELS for node in graph.walk()):
            return False
        readers = readers_of(graph)

        def visit(node: Node) -> Sequence[Value | None] | None:
            rule = _RULES.get(node.op.name)
            if rule is None or node.op.domain or node.control_inputs or len(node.outputs) != 1:
                return None
            for i, value in enumerate(node.inputs[:2]):
                if value is None or readers.get(value) != [node] or value.const is not None:
                    continue
                convolution = value.producer
                if convolution is None or convolution.op.name not in _CHANNELS:
                    continue
                if convolution.op.domain or len(convolution.outputs) != 1:
                    continue
                affine = rule(node, i)
                inputs = None if affine is None else _folded(convolution, affine)
                if inputs is not None:
                    convolution.inputs = inputs
                    # The readers of the node now read the convolution's output.
                    output = node.outputs[0]
                    readers[value] = [] if output is None else readers.get(output, [])
                    return (value,)
            return None

        return forward(graph, visit)


_CHANNELS = {"Conv": 0, "ConvTranspose": 1}
"""by operation, the axis of the weights that channels of the result are along"""


def _constant(value: Value | None) -> np.ndarray | None:
    if value is None or value.const is None or value.const.dtype != FLOAT32:
        return None
    return value.const


def _normalization(node: Node, i: int) -> _Affine | None:
    """BatchNormalization in inference mode."""
    if i or node.attrs.get("training_mode", 0):
        return None
    found = [_constant(value) for value in node.inputs[1:5]]
    if len(found) < 4 or any(each is None for each in found):
        return None
    scale, shift, mean, variance = (np.asarray(each, np.float64) for each in found)
    scale = scale / np.sqrt(variance + node.attrs.get("epsilon", 1e-5))
    if not np.all(np.isfinite(scale)):
        return None
    return _Affine(scale, shift - mean * scale)


def _per_channel(node: Node, i: int) -> np.ndarray | None:
    """The other operand of input ``i``, if it is a constant of one element, or one per channel."""
    known = _constant(node.inputs[1 - i])
    kind = node.outputs[0].type if node.outputs[0] is not None else None
    if known is None or not isinstance(kind, TensorType) or kind.rank is None:
        return None
    value = node.inputs[i]
    if value is None or not isinstance(value.type, TensorType) or value.type.shape != kind.shape:
        return None
    if known.size == 1:
        return known.reshape(1).astype(np.float64)
    dims = (1,) * (kind.rank - known.ndim) + known.shape
    if any(n != 1 for axis, n in enumerate(dims) if axis != 1):
        return None
    return known.reshape(-1).astype(np.float64)


def _mul(node: Node, i: int) -> _Affine | None:
    scale = _per_channel(node, i)
    return None if scale is None else _Affine(scale, np.zeros(1))


def _div(node: Node, i: int) -> _Affine | None:
    scale = None if i else _per_channel(node, i)
    return None if scale is None or not np.all(scale) else _Affine(1 / scale, np.zeros(1))


def _add(node: Node, i: int) -> _Affine | None:
    shift = _per_channel(node, i)
    return None if shift is None else _Affine(np.ones(1), shift)


def _sub(node: Node, i: int) -> _Affine | None:
    shift = _per_channel(node, i)
    if shift is None:
        return None
    return _Affine(-np.ones(1), shift) if i else _Affine(np.ones(1), -shift)


def _folded(node: Node, affine: _Affine) -> list[Value | None] | None:
    """The inputs with which convolution ``node`` applies ``affine`` to its result."""
    weights = _constant(node.inputs[1])
    bias = node.inputs[2] if len(node.inputs) > 2 else None
    known = _constant(bias)
    if weights is None or (bias is not None and known is None):
        return None
    group = node.attrs.get("group", 1)
    axis = _CHANNELS[node.op.name]
    channels = weights.shape[0] if axis == 0 else weights.shape[1] * group
    if any(len(each) not in (1, channels) for each in affine):
        return None
    scale = np.broadcast_to(affine.scale, channels)
    shift = np.broadcast_to(affine.shift, channels)
    if known is not None:
        shift = shift + scale * known
    name = node.outputs[0].name if node.outputs[0] is not None else node.name
    values = list(node.inputs[:2])
    if np.any(scale != 1):
        values[1] = Value(f"{name}/weights", const=_scaled(weights, scale, axis, group))
    values.append(Value(f"{name}/bias", const=shift.astype(FLOAT32)))
    return values


def _scaled(weights: np.ndarray, scale: np.ndarray, axis: int, group: int) -> np.ndarray:
    if axis == 0:
        by_channel = scale.reshape(-1, *[1] * (weights.ndim - 1))
    else:
        # Weights of a transposed convolution: (input channels by group, channels of a group, ...).
        by_group = scale.reshape(group, 1, -1)
        rows = weights.shape[0] // group
        by_channel = np.broadcast_to(by_group, (group, rows, by_group.shape[-1]))
        by_channel = by_channel.reshape(weights.shape[:2] + (1,) * (weights.ndim - 2))
    return (weights * by_channel).astype(FLOAT32)


_RULES: dict[str, Callable[[Node, int], _Affine | None]] = {
    "Add": _add,
    "BatchNormalization": _normalization,
    "Div": _div,
    "Mul": _mul,
    "Sub": _sub,
}
