"""MoE and QMoE, against ONNX Runtime and, where it refuses a form, a plain definition."""

from __future__ import annotations

import itertools
import math
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from penstock.core.types import ShapeError
from penstock.ops.microsoft.quantized_weights import unpack
from penstock.ops.registry import standard
from tests.ops.harness import check_node
from tests.support.sweeps import sweep

rng = np.random.default_rng(11)


TOKENS, EXPERTS, HIDDEN, INNER = 6, 4, 32, 64


SWIGLU = {"activation_type": "swiglu", "activation_alpha": 1.702, "activation_beta": 1.0}


LAYERS = {"fc1": (INNER, HIDDEN), "fc2": (HIDDEN, INNER), "fc3": (INNER, HIDDEN)}


def normal(*shape: int) -> np.ndarray:
    return rng.normal(size=shape).astype(np.float32)


def check(name: str, values: list[Any], attrs: dict[str, Any], **options: Any) -> None:
    while values[-1] is None:
        values = values[:-1]
    options = {"expected": "ort", "rtol": 1e-4, "atol": 1e-4, **options}
    check_node(name, values, attrs, domain="com.microsoft", opset=1, **options)


def sizes(layer: str, fused: bool) -> tuple[int, int]:
    rows, columns = LAYERS[layer]
    return (2 * rows if fused and layer == "fc1" else rows), columns


def moe_inputs(*, fused: bool = False, gate: bool = False, bias: bool = True) -> list[Any]:
    values = [normal(TOKENS, HIDDEN), normal(TOKENS, EXPERTS)]
    for layer in ("fc1", "fc2", "fc3") if gate else ("fc1", "fc2"):
        rows, columns = sizes(layer, fused)
        weights = normal(EXPERTS, rows, columns) / np.float32(math.sqrt(columns))
        values += [weights, normal(EXPERTS, rows) if bias else None]
    return values


def experts(values: list[Any], attrs: dict[str, Any], shares: np.ndarray) -> np.ndarray:
    """The definition, for inputs of MoE and the share of each expert in each token."""
    x, layers = values[0].astype(np.float64), list(zip(values[2::2], values[3::2], strict=True))
    limit, total = attrs.get("swiglu_limit", np.inf), np.zeros_like(x)
    for (token, expert), share in np.ndenumerate(shares):
        if not share:
            continue
        parts = [w[expert] @ x[token] + b[expert] for w, b in layers[::2]]
        if attrs.get("swiglu_fusion") == 1:
            parts = [parts[0][::2], parts[0][1::2]]
        elif attrs.get("swiglu_fusion") == 2:
            parts = np.split(parts[0], 2)
        gate, y = parts if len(parts) > 1 else (parts[0], np.ones(1))
        if attrs["activation_type"] == "swiglu":
            gate, y = np.minimum(gate, limit), np.clip(y, -limit, limit)
            y = y + attrs["activation_beta"]
        swish = gate / (1 + np.exp(-attrs.get("activation_alpha", 1.0) * gate))
        weights, bias = layers[1]
        total[token] += share * (weights[expert] @ (swish * y) + bias[expert])
    return total.astype(np.float32)


def softmax_of_best(router: np.ndarray, k: int) -> np.ndarray:
    shares = np.exp(router) / np.exp(router).sum(-1, keepdims=True)
    return np.where(router >= np.sort(router)[:, -k][:, None], shares, 0)


@pytest.mark.parametrize("activation", ["relu", "gelu", "silu", "identity"])
@pytest.mark.parametrize("k", [1, 2, 4])
@pytest.mark.parametrize("normalized", [0, 1])
@pytest.mark.parametrize("bias", [False, True])
def test_moe_matches_onnx_runtime(activation: str, k: int, normalized: int, bias: bool) -> None:
    attrs = {"activation_type": activation, "k": k, "normalize_routing_weights": normalized}
    check("MoE", moe_inputs(bias=bias), attrs)


@pytest.mark.parametrize("limit", [None, 0.5])
def test_moe_of_swiglu_matches_onnx_runtime(limit: float | None) -> None:
    attrs = SWIGLU | {"k": 2, "swiglu_fusion": 1} | ({"swiglu_limit": limit} if limit else {})
    check("MoE", moe_inputs(fused=True), attrs)


@pytest.mark.parametrize("fusion", [0, 1, 2])
@pytest.mark.parametrize("activation", ["swiglu", "silu"])
@pytest.mark.parametrize("limit", [None, 0.5])
def test_moe_with_a_gate_matches_its_definition(
    fusion: int, activation: str, limit: float | None
) -> None:
    if activation == "silu":
        fusion = 0
    values = moe_inputs(fused=bool(fusion), gate=not fusion)
    attrs = {**SWIGLU, "activation_type": activation, "k": 2, "swiglu_fusion": fusion}
    if activation == "silu":
        attrs["activation_alpha"] = 1.0
    elif limit:
        attrs["swiglu_limit"] = limit
    want = experts(values, attrs, softmax_of_best(values[1], 2))
    check("MoE", values, attrs, expected=[want])


def test_moe_of_three_dims_and_of_no_tokens_matches_onnx_runtime() -> None:
    values = moe_inputs()
    check("MoE", [values[0].reshape(2, 3, HIDDEN), *values[1:]], {"k": 2})
    empty = [values[0][:0], values[1][:0], *values[2:]]
    check("MoE", empty, {"k": 2}, expected=[values[0][:0]])


def test_moe_works_on_the_experts_of_each_token() -> None:
    work = standard("MoE", "com.microsoft").work
    assert work is not None
    dims = [(TOKENS, HIDDEN), (TOKENS, EXPERTS), (EXPERTS, INNER, HIDDEN)]
    assert work({"k": 2}, dims, (TOKENS, HIDDEN)) == 4 * TOKENS * HIDDEN * 2 * INNER


def test_moe_of_equal_scores_chooses_as_onnx_runtime() -> None:
    values = moe_inputs()
    values[1] = rng.integers(0, 2, (TOKENS, EXPERTS)).astype(np.float32)
    for k in (1, 2, 3):
        check("MoE", values, {"k": k})


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
def test_moe_of_16_bits_matches_wide_one(dtype: Any) -> None:
    narrow = [x.astype(dtype) for x in moe_inputs()]
    tolerance = 1e-2 if dtype is np.float16 else 5e-2
    (want,) = check_node(
        "MoE",
        [x.astype(np.float32) for x in narrow],
        {"k": 2},
        domain="com.microsoft",
        opset=1,
        expected="ort",
        rtol=1e-4,
        atol=1e-4,
    )
    check("MoE", narrow, {"k": 2}, expected=[want.astype(dtype)], rtol=tolerance, atol=tolerance)


def pack(codes: np.ndarray, bits: int) -> np.ndarray:
    """Codes along the last axis in bytes, the first in the lowest bits."""
    count = 8 // bits
    padded = np.pad(codes, [(0, 0)] * (codes.ndim - 1) + [(0, -codes.shape[-1] % count)])
    places = padded.reshape(*codes.shape[:-1], -1, count) << bits * np.arange(count)
    return places.sum(-1).astype(np.uint8)


def quantized(
    layer: str, fused: bool, bits: int, block: int, zero_points: bool
) -> tuple[np.ndarray, np.ndarray, np.ndarray | None, np.ndarray]:
    """Packed weights, scales, zero points, and the weights that they stand for."""
    rows, columns = sizes(layer, fused)
    size = block or columns
    codes = rng.integers(0, 1 << bits, (EXPERTS, rows, columns))
    scales = ((1 + rng.random((EXPERTS, rows, columns // size))) / (1 << bits) / 4).astype(
        np.float32
    )
    zeros = np.full(scales.shape, 1 << (bits - 1))
    if zero_points:
        zeros = rng.integers(0, 1 << bits, scales.shape)
    blocks = codes.reshape(*scales.shape, size) - zeros[..., None]
    weights = (blocks * scales[..., None]).reshape(codes.shape).astype(np.float32)
    if not block:
        scales, zeros = scales[..., 0], zeros[..., 0]
    return pack(codes, bits), scales, pack(zeros, bits) if zero_points else None, weights


def qmoe_inputs(
    bits: dict[str, int], block: int, zero_points: bool, fused: bool = False, gate: bool = False
) -> tuple[list[Any], list[Any]]:
    """Inputs of QMoE, and those of MoE that mean the same."""
    values: list[Any] = [normal(TOKENS, HIDDEN), normal(TOKENS, EXPERTS), *[None] * 12]
    plain = values[:2]
    for i, layer in enumerate(("fc1", "fc2", "fc3") if gate else ("fc1", "fc2")):
        packed, scales, zeros, weights = quantized(layer, fused, bits[layer], block, zero_points)
        bias = normal(EXPERTS, sizes(layer, fused)[0])
        values[2 + 3 * i : 5 + 3 * i] = [packed, scales, bias]
        values[11 + i] = zeros
        plain += [weights, bias]
    return values, plain


FORMS = itertools.product([2, 4, 8], [0, 16, 32], [False, True], [False, True], [False, True])


@pytest.mark.parametrize("form", sweep(FORMS, 24))
def test_qmoe_matches_onnx_runtime(form: tuple[int, int, bool, bool, bool]) -> None:
    bits, block, zero_points, fused, half = form
    values, plain = qmoe_inputs(dict.fromkeys(LAYERS, bits), block, zero_points, fused)
    attrs: dict[str, Any] = {"k": 2, "expert_weight_bits": bits, "activation_type": "silu"}
    if fused:
        attrs |= SWIGLU | {"swiglu_fusion": 1}
    if block:
        attrs["block_size"] = block
    if half:
        values = [
            x.astype(np.float16) if x is not None and x.dtype == np.float32 else x for x in values
        ]
    else:
        shares = softmax_of_best(plain[1], 2)
        want = experts(plain, attrs, shares / shares.sum(-1, keepdims=True))
        check("QMoE", values, attrs, expected=[want])
    # ONNX Runtime may quantize tokens to 8 bits before it multiplies.
    tolerance = 3e-2 if block and bits != 4 else 1e-2 if half else 1e-4
    check("QMoE", values, attrs, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("zero_points", [False, True])
@pytest.mark.parametrize("block", [0, 16])
def test_qmoe_of_constant_weights_is_dequantized_when_compiled(
    zero_points: bool, block: int
) -> None:
    values, plain = qmoe_inputs(dict.fromkeys(LAYERS, 4), block, zero_points)
    attrs = {"k": 2, "activation_type": "silu"} | ({"block_size": block} if block else {})
    shares = softmax_of_best(plain[1], 2)
    want = experts(plain, attrs, shares / shares.sum(-1, keepdims=True))
    packed = [2, 3, 5, 6, *([11, 12] if zero_points else [])]
    check("QMoE", values, attrs, expected=[want], constants=packed)
    check("QMoE", values, attrs, expected=[want], constants=packed[:3])


@pytest.mark.parametrize("normalized", [0, 1])
def test_qmoe_with_router_weights_matches_onnx_runtime(normalized: int) -> None:
    values, _ = qmoe_inputs(dict.fromkeys(LAYERS, 4), 16, True)
    values.append(rng.random((TOKENS, EXPERTS)).astype(np.float32))
    attrs = {"k": 2, "block_size": 16, "normalize_routing_weights": normalized}
    check("QMoE", values, attrs)


@pytest.mark.parametrize("fusion", [0, 2])
def test_qmoe_of_mixed_bits_with_a_gate_equals_moe_of_the_same_weights(fusion: int) -> None:
    bits = {"fc1": 8, "fc2": 4, "fc3": 2}
    values, plain = qmoe_inputs(bits, 16, True, bool(fusion), not fusion)
    attrs = SWIGLU | {"k": 2, "swiglu_fusion": fusion}
    shares = softmax_of_best(plain[1], 2)
    want = experts(plain, attrs, shares / shares.sum(-1, keepdims=True))
    own = {f"{layer}_expert_weight_bits": count for layer, count in bits.items()}
    check("QMoE", values, attrs | own | {"block_size": 16}, expected=[want])


def test_zero_points_of_qmoe_may_be_floats() -> None:
    values, plain = qmoe_inputs(dict.fromkeys(LAYERS, 4), 16, True)
    for i in (11, 12):
        values[i] = unpack(values[i], 4)
    shares = softmax_of_best(plain[1], 2)
    want = experts(plain, {"activation_type": "silu"}, shares / shares.sum(-1, keepdims=True))
    attrs = {"k": 2, "activation_type": "silu", "block_size": 16}
    check("QMoE", values, attrs, expected=[want])


@pytest.mark.parametrize(
    ("index", "value", "attrs"),
    [
        (0, normal(HIDDEN), {}),
        (0, np.ones((TOKENS, HIDDEN), np.int32), {}),
        (0, normal(TOKENS, HIDDEN + 1), {}),
        (1, normal(TOKENS + 1, EXPERTS), {}),
        (1, normal(TOKENS, EXPERTS + 1), {}),
        (2, normal(EXPERTS, INNER + 1, HIDDEN), {}),
        (3, normal(EXPERTS, INNER + 1), {}),
        (4, normal(EXPERTS, HIDDEN, INNER + 1), {}),
        (0, normal(TOKENS, HIDDEN), {"k": 5}),
        (0, normal(TOKENS, HIDDEN), {"k": 0}),
        (0, normal(TOKENS, HIDDEN), {"activation_type": "tanh"}),
        (0, normal(TOKENS, HIDDEN), SWIGLU),
        (0, normal(TOKENS, HIDDEN), SWIGLU | {"swiglu_fusion": 1}),
        (0, normal(TOKENS, HIDDEN), SWIGLU | {"swiglu_fusion": -2}),
    ],
)
def test_moe_with_misfit_inputs_is_refused(
    index: int, value: np.ndarray, attrs: dict[str, Any]
) -> None:
    values = moe_inputs()
    values[index] = value
    with pytest.raises(ShapeError):
        check("MoE", values, attrs, expected=[None])


@pytest.mark.parametrize(
    ("index", "value", "attrs"),
    [
        (3, None, {}),
        (3, normal(EXPERTS, INNER), {}),
        (2, np.zeros((EXPERTS, INNER, HIDDEN), np.uint8), {}),
        (11, np.zeros((EXPERTS, INNER, 2), np.uint8), {}),
        (0, normal(TOKENS, HIDDEN), {"block_size": 24}),
        (0, normal(TOKENS, HIDDEN), {"expert_weight_bits": 3}),
        (0, normal(TOKENS, HIDDEN), {"quant_type": "fp4"}),
        (0, normal(TOKENS, HIDDEN), {"weights_prepacked": 1}),
    ],
)
def test_qmoe_with_misfit_inputs_is_refused(index: int, value: Any, attrs: dict[str, Any]) -> None:
    values, _ = qmoe_inputs(dict.fromkeys(LAYERS, 4), 16, True)
    values[index] = value
    with pytest.raises(ShapeError):
        check("QMoE", values, {"block_size": 16} | attrs, expected=[None])
