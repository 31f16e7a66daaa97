"""Activations behind quantized products, done in the same primitive."""

from __future__ import annotations

import pytest

from tests.backends.onednn.quantized_nets import (
    F32,
    I8,
    U8,
    agree,
    convolution,
    needs_int8,
    restart_rng,
)

pytestmark = needs_int8


@pytest.fixture(autouse=True)
def _restart_rng() -> None:
    restart_rng()


@pytest.mark.parametrize("zero", [0, 40])
def test_quantized_relu_bounds_the_codes(zero):
    net, result = convolution("padded", y=(U8, zero), tail="Relu")
    session = agree(net.proto(result), net.feeds, [("Conv Relu QuantizeLinear", "onednn")])
    (got,) = session.run(net.feeds).values()
    assert got.min() == zero  # some sums are negative


def test_quantized_clip_inside_the_range_bounds_the_codes():
    net, _ = convolution("plain", bias=False)
    net.nodes.pop()
    inside = net.add("Clip", ["v2", net.constant(-2.5, F32), net.constant(3.1, F32)])
    result = net.quantize(inside, 0.11, U8(77))
    session = agree(net.proto(result), net.feeds, [("Conv Clip QuantizeLinear", "onednn")])
    (got,) = session.run(net.feeds).values()
    assert (got.min(), got.max()) == (77 - 23, 77 + 28)


def test_quantized_results_beyond_the_range_saturate():
    net, _ = convolution("plain", bias=False)
    net.nodes.pop()
    result = net.quantize("v2", 0.0003, I8(-3))
    session = agree(net.proto(result), net.feeds, [("Conv QuantizeLinear", "onednn")])
    (got,) = session.run(net.feeds).values()
    assert (got.min(), got.max()) == (-128, 127)
