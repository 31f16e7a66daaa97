"""Scales, zero points and biases of quantized convolutions."""

from __future__ import annotations

import numpy as np
import pytest

from tests.backends.onednn.quantized_nets import (
    F32,
    I8,
    I32,
    U8,
    Net,
    agree,
    codes,
    convolution,
    needs_int8,
    restart_rng,
    rng,
)

pytestmark = needs_int8


@pytest.fixture(autouse=True)
def _restart_rng() -> None:
    restart_rng()


@pytest.mark.parametrize("per_channel", [True, False])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("name", ["plain", "depthwise", "grouped"])
def test_quantized_conv_with_scales_and_biases_for_each_filter_equals_numpy(
    name, bias, per_channel
):
    net, result = convolution(name, bias=bias, per_channel=per_channel)
    agree(net.proto(result), net.feeds, [("Conv QuantizeLinear", "onednn")])


def test_quantized_conv_with_a_bias_of_another_scale_equals_numpy():
    """In units of their own they are no int32 of a QLinearConv: they are real numbers here."""
    net = Net()
    w = net.dequantize(net.constant(codes(I8, 16, 8, 3, 3)), 0.01, I8(0))
    b = net.dequantize(net.constant(rng.integers(-90, 90, 16), I32), 0.37, I32(0))
    x = net.dequantize(net.feed(codes(U8, 1, 8, 6, 6)), 0.02, U8(120))
    result = net.quantize(net.add("Conv", [x, w, b]), 0.2, U8(90))
    agree(net.proto(result), net.feeds, [("Conv QuantizeLinear", "onednn")])


def test_quantized_conv_with_a_float32_bias_equals_numpy():
    net = Net()
    w = net.dequantize(net.constant(codes(I8, 16, 8, 3, 3)), 0.01, I8(0))
    b = net.constant(rng.standard_normal(16) * 9, F32)
    x = net.dequantize(net.feed(codes(U8, 1, 8, 6, 6)), 0.02, U8(120))
    result = net.quantize(net.add("Conv", [x, w, b]), 0.2, U8(90))
    agree(net.proto(result), net.feeds, [("Conv QuantizeLinear", "onednn")])


@pytest.mark.parametrize(
    ("low", "high", "zero", "parts"),
    [(0, 256, 128, 1), (100, 200, 150, 1), (0, 100, 0, 1), (0, 256, 100, 2), (0, 256, 0, 0)],
)
def test_quantized_weights_of_uint8_run_on_onednn_if_int8_holds_them(low, high, zero, parts):
    """If neither they nor two parts of them fit int8 less their zero points, the operation runs in
    float32. No run dequantizes them."""
    net = Net()
    weights = rng.integers(low, high, (16, 8, 3, 3)).astype(U8)
    weights.reshape(-1)[:2] = low, high - 1
    w = net.dequantize(net.constant(weights), 0.01, U8(zero))
    x = net.dequantize(net.feed(codes(U8, 1, 8, 6, 6)), 0.02, U8(120))
    result = net.quantize(net.add("Conv", [x, w]), 0.2, U8(90))
    taken = [("Conv QuantizeLinear", "onednn")]
    apart = [("DequantizeLinear", "numpy"), ("Conv", "onednn"), ("QuantizeLinear", "numpy")]
    split = [("Concat", "numpy"), *taken]
    agree(net.proto(result), net.feeds, (apart, taken, split)[parts])


def test_quantized_weights_with_a_zero_point_for_each_filter_equal_numpy():
    net = Net()
    scales, zeros = rng.uniform(0.001, 0.01, 16), rng.integers(120, 136, 16).astype(U8)
    weights = rng.integers(10, 240, (16, 8, 3, 3)).astype(U8)
    w = net.dequantize(net.constant(weights), scales, zeros, axis=0)
    x = net.dequantize(net.feed(codes(U8, 1, 8, 6, 6)), 0.02, U8(120))
    result = net.quantize(net.add("Conv", [x, w]), 0.1, U8(90))
    agree(net.proto(result), net.feeds, [("Conv QuantizeLinear", "onednn")])


def test_quantized_weights_with_scales_along_another_axis_run_in_float32():
    net = Net()
    w = net.dequantize(
        net.constant(codes(I8, 16, 8, 3, 3)), rng.uniform(0.001, 0.01, 8), np.zeros(8, I8), axis=1
    )
    x = net.dequantize(net.feed(codes(U8, 1, 8, 6, 6)), 0.02, U8(120))
    result = net.quantize(net.add("Conv", [x, w]), 0.1, U8(90))
    apart = [("DequantizeLinear", "numpy"), ("Conv", "onednn"), ("QuantizeLinear", "numpy")]
    agree(net.proto(result), net.feeds, apart)


def test_quantized_conv_without_quantize_linear_gives_float32():
    net, _ = convolution("plain")
    net.nodes.pop()
    agree(net.proto("v3"), net.feeds, [("Conv", "onednn")])


def test_quantized_results_of_many_scales_are_quantized_on_numpy():
    net, _ = convolution("plain")
    net.nodes.pop()
    scales = rng.uniform(0.05, 0.2, 32)
    result = net.quantize("v3", scales, np.full(32, 99, U8), axis=1)
    agree(net.proto(result), net.feeds, [("Conv", "onednn"), ("QuantizeLinear", "numpy")])
