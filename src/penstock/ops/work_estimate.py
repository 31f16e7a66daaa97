"""How much work a node is: floating-point operations, from its types alone."""

from __future__ import annotations

import math

import numpy as np

from penstock.ir.graph import Node
from penstock.ops.internal.fused import is_fused, parts
from penstock.types import TensorType, Type

_OBJECT = np.dtype(object)

_PRODUCTS = {
    "MatMul",
    "FusedMatMul",
    "Gemm",
    "MatMulInteger",
    "MatMulIntegerToFloat",
    "MatMulNBits",
    "DynamicQuantizeMatMul",
    "QGemm",
    "QLinearMatMul",
}


def flops(node: Node) -> int:
    """Estimated operations of one run of ``node``; 0 where its shapes are unknown.

    A multiplication and an addition count as two, as in the published figures of networks.
    """
    try:
        return _flops(node)
    except IndexError:  # shapes that the operation does not take: the node fails if it ever runs
        return 0


# Of one core, about: multiplications and additions a second in products, bytes a second through
# memory, and what a call takes that does nothing.
_FLOPS_PER_S = 20e9
_BYTES_PER_S = 5e9
_CALL_S = 1e-6


def seconds(node: Node) -> float:
    """Roughly what ``node`` takes on one core, for where nothing has been measured."""
    values = [*node.inputs, *node.outputs]
    kinds = [v.type for v in values if v is not None and v.const is None]
    moved = sum(k.nbytes for k in kinds if isinstance(k, TensorType) and k.static)
    return _CALL_S + moved / _BYTES_PER_S + flops(node) / _FLOPS_PER_S


def _flops(node: Node) -> int:
    outputs = [_dims(v.type) for v in node.outputs if v is not None]
    if not outputs or outputs[0] is None:
        return 0
    elements = math.prod(outputs[0])
    inputs = [None if v is None else _dims(v.type) for v in node.inputs]
    name = node.op.name
    if is_fused(node):
        return sum(_flops(part) for part in parts(node))
    if name in {"Conv", "ConvInteger", "QLinearConv", "FusedConv"}:
        weights = inputs[1 if name != "QLinearConv" else 3]
        return 2 * elements * math.prod(weights[1:]) if weights else 0
    if name == "ConvTranspose" and inputs[0] and inputs[1]:
        return 2 * math.prod(inputs[0]) * math.prod(inputs[1][1:])
    if name in _PRODUCTS and inputs[0]:
        inner = inputs[0][-2 if node.attrs.get("transA") and len(inputs[0]) > 1 else -1]
        return 2 * elements * inner
    if (
        name in {"LSTM", "GRU", "RNN", "DynamicQuantizeLSTM"}
        and inputs[0]
        and inputs[1]
        and inputs[2]
    ):
        steps = inputs[0][0] * inputs[0][1]
        return 2 * steps * (math.prod(inputs[1]) + math.prod(inputs[2]))
    if name == "Attention" and inputs[0] and inputs[1]:
        return 4 * elements * inputs[1][-2]
    read = max((math.prod(dims) for dims in inputs if dims), default=0)
    return max(elements, read)


def _dims(kind: Type) -> tuple[int, ...] | None:
    if isinstance(kind, TensorType) and kind.static and kind.dtype != _OBJECT:
        return kind.shape  # type: ignore[return-value] # all of it is known
    return None
