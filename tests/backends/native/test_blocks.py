"""Compiled products with weights of a few bits in blocks against NumPy's."""

from __future__ import annotations

import numpy as np
import pytest
from onnx import TensorProto, helper, numpy_helper
from onnxruntime import InferenceSession

import penstock as ps
from penstock.backends.native import blocks
from penstock.backends.native.kernel import site_of
from penstock.core.types import FLOAT32, TensorType
from penstock.ops.registry import MICROSOFT
from tests.support.native_kernels import LIBRARIES, check, kernel_of, node_of, pytestmark  # noqa: F401

TOLERANCE = {"rtol": 2e-5, "atol": 2e-4}


def _product(rows, k, n, bits, block, zeros="none", bias=False):
    rng = np.random.default_rng(5)
    blocks = -(-k // block)
    inputs = [
        rng.standard_normal((*rows, k), np.float32),
        rng.integers(0, 256, (n, blocks, block * bits // 8), np.uint8),
        rng.random((n, blocks), np.float32) / 2**bits,
        None,
        None,
        rng.standard_normal(n, np.float32) if bias else None,
    ]
    if zeros == "packed":
        inputs[3] = rng.integers(0, 256, (n, -(-blocks * bits // 8)), np.uint8)
    elif zeros == "float":
        inputs[3] = rng.random((n, blocks), np.float32) * 15
    attrs = {"K": k, "N": n, "bits": bits, "block_size": block}
    return node_of("MatMulNBits", inputs, [1, 2, 3], domain=MICROSOFT, **attrs), inputs


@pytest.mark.parametrize("bits", [2, 4, 8])
@pytest.mark.parametrize("zeros", ["none", "packed", "float"])
@pytest.mark.parametrize("rows", [(1,), (3,), (2, 9)])
@pytest.mark.parametrize(
    ("k", "n", "block"), [(32, 32, 16), (64, 5, 32), (40, 33, 16), (528, 70, 256)]
)
def test_block_product_equals_numpy(rows, k, n, block, bits, zeros):
    check(*_product(rows, k, n, bits, block, zeros), TOLERANCE)


@pytest.mark.parametrize("rows", [(4,), (30,)])
def test_block_product_adds_a_bias(rows):
    check(*_product(rows, 64, 48, 4, 32, bias=True), TOLERANCE)


def test_block_product_of_odd_depth_is_left_to_numpy():
    node, _ = _product((2,), 36, 32, 4, 16)
    assert kernel_of(node, LIBRARIES[0]) is None


@pytest.mark.parametrize("bits", [4, 8])
def test_large_weights_whose_last_block_is_padded_give_what_onnxruntime_gives(bits):
    """Their padding is not in panels, from which such weights could be converted back."""
    rng, (k, n, block) = np.random.default_rng(6), (192, 1024, 128)
    codes = rng.integers(0, 256, (n, 2, block * bits // 8), np.uint8)
    scales = rng.random((n, 2), np.float32) / 2**bits
    attrs = {"K": k, "N": n, "bits": bits, "block_size": block}
    graph = helper.make_graph(
        [helper.make_node("MatMulNBits", ["x", "b", "s"], ["y"], domain=MICROSOFT, **attrs)],
        "product",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["rows", k])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)],
        [numpy_helper.from_array(codes, "b"), numpy_helper.from_array(scales, "s")],
    )
    opsets = [helper.make_opsetid("", 20), helper.make_opsetid(MICROSOFT, 1)]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=9).SerializeToString()
    session, peer = ps.compile(model, backends=["native", "numpy"]), InferenceSession(model)
    for rows in (1, 5):
        x = rng.standard_normal((rows, k), np.float32)
        np.testing.assert_allclose(session(x), peer.run(None, {"x": x})[0], rtol=1e-4, atol=1e-3)


TOKENS, EXPERTS, HIDDEN, INNER = 45, 5, 32, 64


def _experts(layers, bits=4, block=0, *, zeros=False, bias=False, shares=False, **attrs):
    """A QMoE whose fc1 may be of both parts of a gated activation."""
    rng = np.random.default_rng(9)
    inputs = [None] * 15
    inputs[0] = rng.standard_normal((3, TOKENS // 3, HIDDEN), np.float32)
    inputs[1] = rng.standard_normal((TOKENS, EXPERTS), np.float32)
    inputs[1][4] = 0.5  # of equal scores the last comes first
    constants = []
    for place, (rows, columns) in layers.items():
        size = (EXPERTS, rows, columns * bits // 8)
        blocks = columns // block if block else 1
        scales = rng.random((EXPERTS, rows, blocks), np.float32) / 2**bits / 4
        inputs[place] = rng.integers(0, 256, size, np.uint8)
        inputs[place + 1] = scales if block else scales[..., 0]
        inputs[place + 2] = rng.standard_normal((EXPERTS, rows), np.float32) if bias else None
        constants += [place, place + 1, *([place + 2] if bias else [])]
        if zeros:
            at = 11 + (2, 5, 8).index(place)
            size = (EXPERTS, rows, -(-blocks * bits // 8))
            inputs[at] = rng.integers(0, 256, size, np.uint8)
            constants.append(at)
    if shares:
        inputs[14] = rng.random((TOKENS, EXPERTS), np.float32)
    attrs |= {"expert_weight_bits": bits, "k": 2} | ({"block_size": block} if block else {})
    return node_of("QMoE", inputs, constants, domain=MICROSOFT, **attrs), inputs


PLAIN = {2: (INNER, HIDDEN), 5: (HIDDEN, INNER)}
GATED = {**PLAIN, 8: (INNER, HIDDEN)}
SWIGLU = {"activation_type": "swiglu", "activation_alpha": 1.7, "swiglu_limit": 2.0}


@pytest.mark.parametrize("activation", ["relu", "gelu", "silu", "identity"])
@pytest.mark.parametrize("layers", [PLAIN, GATED], ids=["plain", "gated"])
def test_experts_equal_numpy(layers, activation):
    check(*_experts(layers, activation_type=activation), TOLERANCE)


@pytest.mark.parametrize("fusion", [0, 1, 2])
def test_experts_with_a_gate_in_their_first_layer_equal_numpy(fusion):
    layers = {**PLAIN, 2: (2 * INNER, HIDDEN)} if fusion else GATED
    check(*_experts(layers, swiglu_fusion=fusion, activation_beta=1.0, **SWIGLU), TOLERANCE)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("normalized", [0, 1])
def test_experts_of_blocks_with_zero_points_and_given_shares_equal_numpy(bits, normalized):
    given = {"zeros": True, "bias": True, "shares": True}
    attrs = {"activation_type": "silu", "normalize_routing_weights": normalized}
    check(*_experts(PLAIN, bits, 16, **given, **attrs), TOLERANCE)


@pytest.mark.parametrize(
    "attrs", [{}, {"normalize_routing_weights": 1}, SWIGLU | {"swiglu_fusion": 1}]
)
@pytest.mark.parametrize("bias", [False, True])
def test_experts_of_floats_equal_numpy(bias, attrs):
    rng = np.random.default_rng(3)
    inner = INNER * (2 if attrs.get("swiglu_fusion") else 1)
    x, scores = rng.standard_normal((TOKENS, HIDDEN)), rng.standard_normal((TOKENS, EXPERTS))
    scores[4] = 0.5
    layers = [rng.standard_normal(of) / 8 for of in ((EXPERTS, inner, HIDDEN), (EXPERTS, inner))]
    layers += [rng.standard_normal(of) / 8 for of in ((EXPERTS, HIDDEN, INNER), (EXPERTS, HIDDEN))]
    inputs = [array.astype(np.float32) for array in (x, scores, *layers)]
    if not bias:
        inputs[3] = inputs[5] = None
    constants = [i for i in range(2, 6) if inputs[i] is not None]
    check(node_of("MoE", inputs, constants, domain=MICROSOFT, k=2, **attrs), inputs, TOLERANCE)


def test_experts_chosen_by_nan_equal_numpy():
    node, inputs = _experts(PLAIN, shares=True)
    inputs[1][2, 1:3] = np.nan
    check(node, inputs, TOLERANCE)


def test_experts_of_parts_of_the_tokens_equal_numpy(monkeypatch):
    """An item is an expert for 32 tokens, of which there are 45."""
    monkeypatch.setattr(blocks, "_MOST_FLOPS", 1)
    check(*_experts(PLAIN), TOLERANCE)


def test_item_of_experts_is_bounded_though_all_tokens_may_choose_one():
    node, _ = _experts(PLAIN)
    types = [None if value is None else value.type for value in node.inputs]
    types[0] = TensorType(FLOAT32, (1_000_000, HIDDEN))
    types[1] = TensorType(FLOAT32, (1_000_000, EXPERTS))
    site = site_of(LIBRARIES[0], node, types, data_dependent=True)
    call = blocks.experts_call(site)
    assert call.items * 6_000_000_000 >= EXPERTS * 1_000_000 * 2 * 4 * INNER * HIDDEN


def test_experts_of_odd_sizes_are_left_to_numpy():
    node, _ = _experts({2: (40, HIDDEN), 5: (HIDDEN, 40)})
    assert kernel_of(node, LIBRARIES[0]) is None
