"""Gates and normalizations of ONNX Runtime that are written as operations of ONNX."""

from __future__ import annotations

from functools import partial
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import penstock as ps
from penstock.core.errors import Unsupported
from tests.support.contrib import check_contrib, contrib_model
from tests.support.random_arrays import normal

F32, F16 = np.float32, np.float16
rng = np.random.default_rng(0)
draw = partial(normal, rng)


def loose(dtype: Any) -> dict[str, Any]:
    return {} if dtype == F32 else {"rtol": 4e-3, "atol": 4e-3}


@pytest.mark.parametrize("dtype", [F32, F16])
def test_gated_add_matches_onnx_runtime(dtype: Any) -> None:
    inputs = [draw(2, 3, 8, dtype=dtype), draw(2, 3, 8, dtype=dtype), draw(2, 3, 1, dtype=dtype)]
    check_contrib("GatedAdd", inputs, **loose(dtype))


@pytest.mark.parametrize("dtype", [F32, F16])
@pytest.mark.parametrize("scale", [None, np.array(0.3, F32)])
def test_scaled_silu_matches_onnx_runtime(dtype: Any, scale: Any) -> None:
    inputs = [draw(2, 3, 8, dtype=dtype)] + ([] if scale is None else [scale])
    check_contrib("ScaledSiLU", inputs, {"alpha": 0.7}, **loose(dtype))


@pytest.mark.parametrize("dtype", [F32, F16])
@pytest.mark.parametrize("flat", [True, False])
@pytest.mark.parametrize("scale", [None, (12,), (3, 4), (4,)])
def test_branchwise_rms_norm_matches_onnx_runtime(dtype: Any, flat: bool, scale: Any) -> None:
    inputs = [draw(2, 5, *([12] if flat else [3, 4]), dtype=dtype)]
    inputs += [] if scale is None else [draw(*scale)]
    attrs = {"num_branches": 3} if flat else {"epsilon": 1e-3}
    check_contrib("BranchwiseRMSNorm", inputs, attrs, **loose(dtype))


@pytest.mark.parametrize("dtype", [F32, F16])
@pytest.mark.parametrize("activation", ["silu", "swish", "sigmoid"])
@pytest.mark.parametrize("size", [12, 4])
def test_gated_rms_norm_matches_onnx_runtime(dtype: Any, activation: str, size: int) -> None:
    inputs = [draw(2, 5, 12, dtype=dtype), draw(size, dtype=dtype), draw(2, 5, 12, dtype=dtype)]
    attrs = {"activation": activation, "epsilon": 1e-3}
    check_contrib("GatedRMSNorm", inputs, attrs, constants=[1], **loose(dtype))


@pytest.mark.parametrize("flat", [True, False])
@pytest.mark.parametrize("gates", [(3,), (3, 1), (3, 4), (12,)])
@pytest.mark.parametrize("dtype", [F32, F16])
def test_hyper_connection_pre_mix_matches_onnx_runtime(flat: bool, gates: Any, dtype: Any) -> None:
    if flat or gates != (12,):
        inputs = [draw(2, 5, *([12] if flat else [3, 4]), dtype=dtype), draw(2, 5, *gates)]
        attrs = {"reduction_scale": 0.5, "num_branches": 3 if flat else 0}
        check_contrib("HyperConnectionPreMix", inputs, attrs, **loose(dtype))


@pytest.mark.parametrize("flat", [True, False])
@pytest.mark.parametrize("gates", [(3,), (3, 1), (3, 4)])
@pytest.mark.parametrize("mixed", [True, False])
def test_hyper_connection_post_mix_matches_onnx_runtime(
    flat: bool, gates: Any, mixed: bool
) -> None:
    inputs = [draw(2, 5, *([12] if flat else [3, 4])), draw(2, 5, 4), draw(2, 5, *gates)]
    inputs += [draw(2, 5, 3, 3)] if mixed else []
    check_contrib("HyperConnectionPostMix", inputs, {"num_branches": 3} if flat else {})


@pytest.mark.parametrize("dtype", [F32, F16])
@pytest.mark.parametrize("outputs", [1, 2])
def test_engram_gate_matches_onnx_runtime(dtype: Any, outputs: int) -> None:
    tensors = [
        draw(2, 5, 3, 8, dtype=dtype),
        draw(2, 5, 3, 8, dtype=dtype),
        draw(2, 5, 8, dtype=dtype),
    ]
    scales = [draw(3, 8, dtype=dtype) for _ in range(1 + outputs)]
    check_contrib("EngramGate", [*tensors, *scales], outputs=outputs, **loose(dtype))


@pytest.mark.parametrize("last", [0, 1, 2])
@pytest.mark.parametrize("bias, past", [(0, 0), (1, 0), (0, 1), (1, 1)])
@pytest.mark.parametrize("activation", ["none", "silu"])
@pytest.mark.parametrize("dilation", [1, 3])
def test_causal_conv_with_state_matches_onnx_runtime(
    last: int, bias: int, past: int, activation: str, dilation: int
) -> None:
    x, state = draw(2, 6, 7), draw(2, 6, 3 * dilation)
    if last:
        x, state = (np.ascontiguousarray(a.transpose(0, 2, 1)) for a in (x, state))
    if last > 1:
        x, state = (a.reshape(*a.shape[:2], 2, 3) for a in (x, state))
    inputs = [x, draw(6, 1, 4), draw(6) if bias else None, state if past else None]
    while inputs[-1] is None:
        inputs.pop()
    attrs = {"channels_last": min(last, 1), "activation": activation, "dilation": dilation}
    check_contrib("CausalConvWithState", inputs, attrs, outputs=2)


@pytest.mark.parametrize("rule", ["linear", "gated", "delta", "gated_delta"])
@pytest.mark.parametrize(("heads", "kv_heads"), [(2, 2), (4, 2), (2, 4)])
@pytest.mark.parametrize("past", [False, True])
@pytest.mark.parametrize("per_key", [False, True])
def test_linear_attention_matches_onnx_runtime(
    rule: str, heads: int, kv_heads: int, past: bool, per_key: bool
) -> None:
    q, k, v = draw(2, 3, heads * 8), draw(2, 3, kv_heads * 8), draw(2, 3, kv_heads * 4)
    decay = -np.abs(draw(2, 3, kv_heads * (8 if per_key else 1)))
    inputs = [q, k, v, draw(2, kv_heads, 8, 4) if past else None]
    inputs += [decay if "gated" in rule else None]
    inputs += [draw(2, 3, kv_heads) if "delta" in rule else None]
    while inputs[-1] is None:
        inputs.pop()
    attrs = {"q_num_heads": heads, "kv_num_heads": kv_heads, "update_rule": rule}
    check_contrib("LinearAttention", inputs, attrs, outputs=2, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", [F32, F16])
@pytest.mark.parametrize("outputs", [1, 2])
def test_linear_attention_gate_matches_onnx_runtime(dtype: Any, outputs: int) -> None:
    inputs = [draw(2, 3, 4, dtype=dtype), draw(4), draw(4)]
    inputs += [draw(2, 3, 4, dtype=dtype)] if outputs > 1 else []
    check_contrib("LinearAttentionGate", inputs, outputs=outputs, **loose(dtype))


def test_forms_that_are_not_supported_are_refused() -> None:
    x = draw(2, 6, 7)
    window = {"q_num_heads": 1, "kv_num_heads": 1, "update_rule": "linear", "state_window": 2}
    for op, inputs, attrs in (
        ("LinearAttention", [x, x, x], window),
        ("CausalConvWithState", [x, draw(6, 1, 4)], {"state_window": 2}),
        ("CausalConvWithState", [draw(2, 6, 7, 8), draw(6, 1, 4, 3)], {"ndim": 2}),
        ("GatedRMSNorm", [x, draw(7), x], {"activation": "tanh"}),
    ):
        with pytest.raises(Unsupported):
            ps.load(contrib_model(op, inputs, attrs, outputs=1 if "Norm" in op else 2))


def test_bfloat16_is_computed_in_float32_and_rounded_once() -> None:
    x, scale = draw(2, 12).astype(ml_dtypes.bfloat16), draw(4)
    groups = x.astype(F32).reshape(2, 3, 4)
    root = np.sqrt((groups * groups).mean(-1, keepdims=True) + F32(1e-5))
    want = (groups / root * scale).reshape(2, 12).astype(ml_dtypes.bfloat16)
    check_contrib("BranchwiseRMSNorm", [x, scale], {"num_branches": 3}, expected=[want], rtol=1e-2)
