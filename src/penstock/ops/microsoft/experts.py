"""Mixture of experts: MoE and QMoE.

A router scores the experts for each token; the best ``k`` run, and their outputs are summed,
weighted by the softmax of the scores. An expert is ``fc2(activation(fc1(x)))``, or, if gated,
``fc2(activation(fc1(x)) * fc3(x))``, where fc1 may contain both layers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from penstock.core.records import NamedTuple
from penstock.core.types import FLOAT32, Dim, RunValue, RunValues, ShapeError, Type, dtype_name
from penstock.ir.graph import Node
from penstock.ir.op import Attrs, Consts, Dims, Types
from penstock.ops.common import shape_rules as rules
from penstock.ops.common.dtypes import is_float
from penstock.ops.common.elementwise import plain_sigmoid
from penstock.ops.common.products import product_in_parts
from penstock.ops.common.shape_rules import check_shape, given, tensor
from penstock.ops.common.specialize import Routine, Tensors, by_shape
from penstock.ops.microsoft.quantized_weights import PackedWeights, unpack
from penstock.ops.onnx.attention import share
from penstock.ops.registry import MICROSOFT, operator


class ExpertLayer(NamedTuple):
    """The input indices of one layer of all experts."""

    name: str
    weights: int
    bias: int
    scales: int = -1
    zeros: int = -1


MOE = (ExpertLayer("fc1", 2, 3), ExpertLayer("fc2", 4, 5), ExpertLayer("fc3", 6, 7))
QMOE = (
    ExpertLayer("fc1", 2, 4, 3, 11),
    ExpertLayer("fc2", 5, 7, 6, 12),
    ExpertLayer("fc3", 8, 10, 9, 13),
)
ROUTER_WEIGHTS = 14  # of QMoE


_ACTIVATIONS: Mapping[str, Callable[[np.ndarray], np.ndarray]] = {
    "relu": lambda x: np.maximum(x, 0),
    # tanh(u) = 2 sigmoid(2 u) - 1; the factor is 2 sqrt(2 / pi).
    "gelu": lambda x: x * plain_sigmoid(1.5957691216 * (x + 0.044715 * x**3)),  # with tanh
    "silu": lambda x: x * plain_sigmoid(x),
    "identity": lambda x: x,
}


def _swiglu(attrs: Attrs, gate: np.ndarray, x: np.ndarray) -> np.ndarray:
    limit = attrs.get("swiglu_limit", np.inf)
    gate, x = np.minimum(gate, limit), np.clip(x, -limit, limit)
    alpha, beta = attrs.get("activation_alpha", 1.0), attrs.get("activation_beta", 0.0)
    return gate * plain_sigmoid(alpha * gate) * (x + beta)


def fusion_of(attrs: Attrs) -> int:
    """The order of the two layers of a gated activation in fc1: 1 interleaved by row, 2
    concatenated; 0: not in fc1.
    """
    name = rules.choice(attrs, "activation_type", "relu", (*_ACTIVATIONS, "swiglu"))
    fusion = int(attrs.get("swiglu_fusion", 0)) if name == "swiglu" else 0
    if fusion not in (0, 1, 2):
        raise ShapeError(f"swiglu_fusion must be 0, 1 or 2, not {fusion}")
    return fusion


def _weights_of(
    layer: ExpertLayer, expert: int, rows: int, size: int, attrs: Attrs, inputs: RunValues
) -> np.ndarray:
    """The weights [rows, size] of one expert in a layer, dequantized to float32."""
    weights = inputs[layer.weights]
    if layer.scales < 0:
        return weights[expert].astype(FLOAT32, copy=False)
    packed = packed_experts(layer, len(weights) * rows, size, attrs)
    scales, zeros = inputs[layer.scales], inputs[layer.zeros]
    if zeros is not None and zeros.ndim == 2:  # packed along the rows of an expert
        zeros = unpack(zeros, packed.bits)[:, :rows]
    start = expert * rows
    return packed.rows(start, start + rows, weights, scales, zeros, None)


def packed_experts(layer: ExpertLayer, rows: int, size: int, attrs: Attrs) -> PackedWeights:
    """The packed weights [rows, size] of a layer."""
    sizes = rows, size, _bits(attrs, layer), _block(attrs, size)
    return PackedWeights(dict(zip(("N", "K", "bits", "block_size"), sizes, strict=True)))


def _bits(attrs: Attrs, layer: ExpertLayer) -> int:
    return int(attrs.get(f"{layer.name}_expert_weight_bits", attrs.get("expert_weight_bits", 4)))


def _block(attrs: Attrs, size: Any) -> Any:
    """The number of columns that share a scale, out of ``size``."""
    block = attrs.get("block_size", 0) or size
    if isinstance(size, int) and (block < 1 or size % block):
        raise ShapeError(f"block_size {block} must divide the {size} columns of the weights")
    return block


def _check_layer(
    layer: ExpertLayer, types: Types, attrs: Attrs, experts: Dim, rows: Dim, columns: Dim
) -> None:
    """Check a layer [experts, rows, columns]."""
    check_shape(f"{layer.name}_experts_bias", tensor(types, layer.bias).shape, (experts, rows))
    weights = tensor(types, layer.weights).shape
    if layer.scales < 0:
        check_shape(f"{layer.name}_experts_weights", weights, (experts, rows, columns))
        return
    if not given(types, layer.scales):
        raise ShapeError(f"{layer.name}_experts_weights requires the input {layer.name}_scales")
    bits, block = _bits(attrs, layer), _block(attrs, columns)

    def packed(count: Dim) -> Dim:
        return -(-count * bits // 8) if isinstance(count, int) else None

    check_shape(f"{layer.name}_experts_weights", weights, (experts, rows, packed(columns)))
    scales, zeros = tensor(types, layer.scales).shape, tensor(types, layer.zeros).shape
    if not attrs.get("block_size", 0):
        check_shape(f"{layer.name}_scales", scales, (experts, rows))
        check_shape(f"{layer.name}_zero_points", zeros, (experts, packed(rows)))
        return
    blocks = columns // block if isinstance(columns, int) else None
    check_shape(f"{layer.name}_scales", scales, (experts, rows, blocks))
    dtype = tensor(types, layer.zeros).dtype
    # Float zero points are not packed.
    columns = blocks if dtype is not None and is_float(dtype) else packed(blocks)
    check_shape(f"{layer.name}_zero_points", zeros, (experts, rows, columns))


def _infer(
    layers: tuple[ExpertLayer, ...], types: Types, attrs: Attrs, consts: Consts
) -> Sequence[Type]:
    x, router = tensor(types, 0), tensor(types, 1).shape
    if x.dtype is not None and not is_float(x.dtype):
        raise ShapeError(f"the input must be floating-point, not {dtype_name(x.dtype)}")
    check_shape("input", x.shape, (None, None), (None, None, None))
    *rows, hidden = x.shape or (None, None)
    tokens = rules.dim_product(rows)
    check_shape("router_probs", router, (tokens, None))
    experts = router[1] if router else None
    k = attrs.get("k", 1)
    if k < 1 or (isinstance(experts, int) and k > experts):
        raise ShapeError(f"k is {k}: it must be from 1 to {experts}, the number of experts")
    if attrs.get("quant_type", "int") != "int" or attrs.get("weights_prepacked", -1) > 0:
        raise ShapeError("only quant_type 'int' without prepacked weights is supported")
    if any(given(types, i) for i in range(ROUTER_WEIGHTS + 1, 21)):
        raise ShapeError("inputs with activation scales are not supported")
    check_shape("router_weights", tensor(types, ROUTER_WEIGHTS).shape, (tokens, experts))
    first, second, third = layers
    fused, gated = fusion_of(attrs), given(types, third.weights)
    swiglu = attrs.get("activation_type") == "swiglu"
    if (fused and gated) or (swiglu and not fused and not gated):
        raise ShapeError(
            "a gated activation requires either fc3, or both layers in fc1 (swiglu_fusion 1 or 2)"
        )
    both = tensor(types, first.weights).shape
    inner = both[1] if both and len(both) == 3 else None
    _check_layer(first, types, attrs, experts, inner, hidden)
    if fused:
        inner = share(inner, 2, "fc1")
    _check_layer(second, types, attrs, experts, hidden, inner)
    if gated:
        _check_layer(third, types, attrs, experts, inner, hidden)
    return (x.without_data(),)


def _work(attrs: Attrs, inputs: Dims, output: tuple[int, ...]) -> int:
    """The work of two layers with the inner rows of the first."""
    first = inputs[2]
    return 4 * math.prod(output) * attrs.get("k", 1) * (first[1] if first else 0)


@operator("MoE", domain=MICROSOFT, infer=partial(_infer, MOE), work=_work)
@operator("QMoE", domain=MICROSOFT, infer=partial(_infer, QMOE), work=_work)
@by_shape(arity=(15, 1), widen=False)
def mixture_of_experts(node: Node, inputs: Tensors, outputs: Tensors, consts: Consts) -> Routine:
    attrs, quantized = node.attrs, node.op.name == "QMoE"
    layers = QMOE if quantized else MOE
    hidden, count, fused = tensor(inputs, 0).dims[-1], attrs.get("k", 1), fusion_of(attrs)
    rows = [t.dims[1] if (t := inputs[layer.weights]) else 0 for layer in layers]
    sizes = hidden, rows[0] // (2 if fused else 1), hidden
    name = attrs.get("activation_type", "relu")
    normalized = bool(attrs.get("normalize_routing_weights", 0))

    def layer(at: int, expert: int, x: np.ndarray, arguments: RunValues) -> np.ndarray:
        weights = _weights_of(layers[at], expert, rows[at], sizes[at], attrs, arguments).T
        y = np.empty((len(x), weights.shape[1]), FLOAT32)
        product_in_parts(x, weights, y)
        bias = arguments[layers[at].bias]
        return y if bias is None else y + bias[expert].astype(FLOAT32, copy=False)

    def run(expert: int, x: np.ndarray, arguments: RunValues) -> np.ndarray:
        y = layer(0, expert, x, arguments)
        if fused:
            gate, y = (y[:, ::2], y[:, 1::2]) if fused == 1 else np.split(y, 2, axis=1)
            y = _swiglu(attrs, gate, y)
        elif name == "swiglu":
            y = _swiglu(attrs, y, layer(2, expert, x, arguments))
        else:
            y = _ACTIVATIONS[name](y)
            if rows[2]:
                y = y * layer(2, expert, x, arguments)
        return layer(1, expert, y, arguments)

    def into(*arguments: RunValue) -> None:
        x = arguments[0].reshape(-1, hidden).astype(FLOAT32, copy=False)
        scores = arguments[1].astype(FLOAT32, copy=False)
        # Of equal scores, the last expert is preferred, as in ONNX Runtime.
        chosen = np.argsort(scores, axis=1, kind="stable")[:, ::-1][:, :count]
        shares = arguments[ROUTER_WEIGHTS]
        given_shares = shares is not None
        if shares is None:
            shares = np.exp(scores - scores.max(axis=1, keepdims=True))
            shares /= shares.sum(axis=1, keepdims=True)
        shares = np.take_along_axis(shares, chosen, 1).astype(FLOAT32, copy=False)
        # ONNX Runtime's QMoE always normalizes the softmax, regardless of the attribute.
        if normalized or (quantized and not given_shares):
            shares /= shares.sum(axis=1, keepdims=True)
        # An expert processes all of its tokens in one matrix product.
        total = np.zeros_like(x)
        for expert in np.unique(chosen).tolist():
            tokens, place = np.nonzero(chosen == expert)
            total[tokens] += run(expert, x[tokens], arguments) * shares[tokens, place, None]
        np.copyto(arguments[-1], total.reshape(arguments[-1].shape), casting="unsafe")

    return Routine(into)
