"""Compiled convolutions against NumPy's, whose sums have another order."""

from __future__ import annotations

import numpy as np
import pytest

import penstock as ps
from penstock.backends.native import convolution
from penstock.backends.native.backend import NativeBackend
from penstock.backends.numpy import NumpyBackend
from penstock.build import GraphBuilder
from tests.support.native_kernels import (  # noqa: F401
    LIBRARIES,
    check,
    check_within,
    expected,
    kernel_of,
    node_of,
    pytestmark,
)
from tests.support.onnx_text import compile_text

TOLERANCE = {"rtol": 1e-5, "atol": 1e-5}
CASES = [
    # dims of the input, filters, kernel, attributes
    ((2, 6, 9, 20), 6, (3, 3), {"group": 6, "pads": [1, 1, 1, 1]}),
    ((1, 3, 40, 33), 6, (5, 5), {"group": 3, "pads": [2, 2, 2, 2], "strides": [2, 2]}),
    ((2, 4, 13, 70), 10, (3, 2), {"group": 2, "strides": [1, 3], "dilations": [2, 2]}),
    ((1, 3, 11, 150), 7, (7, 7), {"pads": [3, 2, 1, 0], "strides": [2, 1]}),
    ((3, 5, 300), 5, (4,), {"group": 5, "pads": [3, 0]}),
    ((1, 2, 3000), 3, (9,), {"strides": [4], "auto_pad": "SAME_UPPER"}),
    ((2, 3, 5, 6, 7), 4, (2, 3, 3), {"pads": [1, 0, 1, 1, 2, 1], "strides": [1, 2, 1]}),
    ((1, 1, 2, 2), 1, (3, 3), {"pads": [4, 4, 4, 4]}),
    # Rows of nearly whole vectors.
    ((2, 3, 9, 62), 7, (3, 3), {"pads": [1, 1, 1, 1]}),
    ((1, 2, 9, 127), 5, (3, 3), {"pads": [1, 1, 1, 1], "strides": [2, 2]}),
]
TRANSPOSED = [
    ((2, 8, 6, 7), 16, (3, 3), {"pads": [1, 1, 1, 1], "strides": [2, 2]}),
    ((2, 6, 9, 40), 6, (4, 4), {"group": 6, "pads": [1, 1, 1, 1], "strides": [2, 2]}),
    ((1, 4, 5, 6), 10, (3, 2), {"group": 2, "strides": [3, 4], "output_padding": [2, 1]}),
    ((1, 3, 5, 30), 3, (3, 3), {"dilations": [2, 2], "strides": [2, 1], "pads": [1, 0, 2, 3]}),
    ((2, 4, 700), 5, (8,), {"strides": [4], "pads": [2, 2]}),
    ((1, 2, 3, 4, 5), 3, (2, 3, 3), {"strides": [2, 1, 3], "pads": [0, 1, 0, 1, 0, 1]}),
    ((1, 2, 4, 4), 2, (1, 1), {"strides": [3, 3]}),
    ((1, 2, 4, 4), 2, (3, 3), {"auto_pad": "SAME_LOWER", "strides": [2, 2]}),
    # Fewer elements than phases.
    ((1, 40, 5, 3), 16, (2, 5), {"strides": [2, 3], "pads": [0, 5, 4, 4]}),
    ((1, 4, 9, 3), 7, (7, 1), {"strides": [7, 6], "pads": [2, 5, 6, 5]}),
]


def draw(name, dims, filters, kernel, attrs):
    rng = np.random.default_rng(7)
    group = attrs.get("group", 1)
    filter_dims = (filters, dims[1] // group) if name == "Conv" else (dims[1], filters // group)
    x, w, bias = (rng.normal(size=s) for s in (dims, (*filter_dims, *kernel), (filters,)))
    return [x.astype(np.float32), w.astype(np.float32), bias.astype(np.float32)]


@pytest.mark.parametrize("biased", [True, False])
@pytest.mark.parametrize(
    ("name", "dims", "filters", "kernel", "attrs"),
    [*[("Conv", *case) for case in CASES], *[("ConvTranspose", *case) for case in TRANSPOSED]],
)
def test_convolution_of_few_channels_equals_numpy(name, dims, filters, kernel, attrs, biased):
    inputs = draw(name, dims, filters, kernel, attrs)[: 3 if biased else 2]
    check(node_of(name, inputs, [1], **attrs), inputs, TOLERANCE)


@pytest.mark.parametrize(("dims", "filters", "kernel", "attrs"), TRANSPOSED)
def test_small_transposed_convolution_by_phases_equals_numpy(
    dims, filters, kernel, attrs, monkeypatch
):
    monkeypatch.setattr(convolution, "_MOST_SCATTERED", 0)
    inputs = draw("ConvTranspose", dims, filters, kernel, attrs)
    check(node_of("ConvTranspose", inputs, [1, 2], **attrs), inputs, TOLERANCE)


@pytest.mark.parametrize("bias", [[], [1.0, 2.0, 3.0]])
def test_small_transposed_convolution_keeps_nan_to_its_windows(bias):
    x, w = np.ones((1, 2, 4, 4), np.float32), np.ones((2, 3, 3, 3), np.float32)
    x[0, 1, 1, 2], w[0, 1, 0, 0] = np.nan, np.inf
    inputs = [x, w, *[np.array(bias, np.float32)] * bool(bias)]
    node = node_of("ConvTranspose", inputs, [1, 2][: len(inputs) - 1], strides=[2, 2])
    check(node, inputs, TOLERANCE)
    for library in LIBRARIES:
        name = kernel_of(node, library).binder.implementation
        assert name.startswith("scattered_convolution")


@pytest.mark.parametrize("channels", [3, 16])
@pytest.mark.parametrize("kernel", [(1, 1), (3, 3), (2, 5)])
@pytest.mark.parametrize("strides", [(1, 1), (1, 2), (2, 1), (2, 2), (3, 4), (5, 1)])
@pytest.mark.parametrize("dims", [(1, 1), (2, 7), (9, 16), (33, 18), (3, 500), (130, 5)])
def test_convolution_of_each_channel_is_within_the_bound_of_its_sums(
    dims, strides, kernel, channels
):
    """Each of n products is rounded once, unless it is fused, and added once."""
    rng = np.random.default_rng(dims)
    x = rng.normal(size=(2, channels, *dims)).astype(np.float32)
    w, bias = rng.normal(size=(channels, 1, *kernel)), rng.normal(size=channels)
    inputs = [x, w.astype(np.float32), bias.astype(np.float32)]
    node = node_of("Conv", inputs, [1, 2], group=channels, strides=strides, pads=[2, 2, 0, 3])
    wide = [array.astype(np.float64) for array in inputs]
    attrs = node.attrs
    exact, sizes = [
        expected(node_of("Conv", given, [1, 2], **attrs), given)[0]
        for given in (wide, list(map(np.abs, wide)))
    ]
    bound = 1.01 * 2.0**-24 * (w[0].size + 2) * sizes
    check_within(node, inputs, exact, bound)


def test_small_images_are_copied_for_convolutions_of_each_channel_and_large_ones_are_not():
    def steps(batch, channels):
        w = np.ones((channels, 1, 3, 3), np.float32)
        b = GraphBuilder()
        x = b.input("x", np.float32, (batch, channels, 28, 28))
        b.output("y", b.op("Conv", x, w, group=channels, pads=[1] * 4))
        plan = ps.compile(b.model(), backends=["native", "numpy"], executor="linear").inspect.plan
        return [step.node.op.name for step in plan.steps]

    assert steps(2, 64) == ["Reorder", "Conv"]
    assert steps(64, 64) == steps(2, 4) == ["Conv"]


@pytest.mark.parametrize("constant", [[1, 2], [1], [2], []])
def test_convolution_of_windows_larger_than_a_cache_equals_numpy(constant):
    inputs = draw("Conv", (1, 1700, 5, 5), 4, (3, 3), {})
    tolerance = {"rtol": 1e-4, "atol": 1e-3}
    check(node_of("Conv", inputs, constant, pads=[1] * 4), inputs, tolerance)


@pytest.mark.parametrize("constant", [[1], [2], []])
@pytest.mark.parametrize(
    ("name", "dims", "filters", "kernel", "attrs"),
    [*[("Conv", *case) for case in CASES], *[("ConvTranspose", *case) for case in TRANSPOSED]],
)
def test_convolution_by_weights_of_a_run_equals_numpy(name, dims, filters, kernel, attrs, constant):
    inputs = draw(name, dims, filters, kernel, attrs)
    check(node_of(name, inputs, constant, **attrs), inputs, TOLERANCE)


def test_transposed_convolution_of_many_channels_to_few_equals_numpy():
    attrs = {"strides": [2, 2], "pads": [1, 1, 1, 1]}
    inputs = draw("ConvTranspose", (1, 128, 16, 32), 3, (4, 4), attrs)
    check(node_of("ConvTranspose", inputs, [1], **attrs), inputs, {"rtol": 1e-4, "atol": 1e-4})


@pytest.mark.parametrize("name", ["Conv", "ConvTranspose"])
def test_convolution_in_groups_of_an_input_is_placed_on_compiled_kernels(name):
    session = compile_text(
        "g (float[1, 4, 20, 20] x) => (y) <float[4, 1, 1, 1] w = {1, 2, 3, 4}> "
        f"{{ y = {name} <group = 4> (x, w) }}",
        executor="linear",
    )
    x = np.random.default_rng(8).normal(size=(1, 4, 20, 20)).astype(np.float32)
    profile = ps.Profile()
    y = session.run({"x": x}, observers=[profile])["y"]
    np.testing.assert_array_equal(y, x * np.arange(1, 5, dtype=np.float32)[:, None, None])
    assert [backend for _, backend in profile.entries] == ["native"]


def test_several_filters_of_one_channel_each_are_placed_on_compiled_kernels():
    inputs = draw("Conv", (1, 96, 8, 8), 192, (7, 7), {"group": 96})
    node = node_of("Conv", inputs, [1, 2], group=96, pads=[3] * 4)
    assert NativeBackend().seconds(node) < NumpyBackend().seconds(node)


@pytest.mark.parametrize("attrs", [{}, {"group": 4}])
def test_transposed_convolution_of_few_channels_is_placed_on_compiled_kernels(attrs):
    attrs = {"strides": [2, 2], "pads": [1] * 4, **attrs}
    inputs = draw("ConvTranspose", (1, 16, 24, 24), 16, (3, 3), attrs)
    node = node_of("ConvTranspose", inputs, [1, 2], **attrs)
    assert NativeBackend().seconds(node) < NumpyBackend().seconds(node)


@pytest.mark.parametrize(
    ("name", "dims", "filters", "kernel", "attrs"),
    [*[("Conv", *case) for case in CASES], *[("ConvTranspose", *case) for case in TRANSPOSED]],
)
def test_each_convolution_has_an_estimate(name, dims, filters, kernel, attrs):
    node = node_of(name, draw(name, dims, filters, kernel, attrs), [1, 2], **attrs)
    assert NativeBackend().seconds(node) > 0


@pytest.mark.parametrize(
    "text",
    [
        "(float[1, 4, 5, 5] x) => (y) <float[0, 4, 3, 3] w = {}> { y = Conv(x, w) }",
        "(float[1, 4, 5, 5] x) => (y) <float[4, 0, 3, 3] w = {}> { y = ConvTranspose(x, w) }",
        """(int8[1, 4, 5, 5] x) => (y) <int8[0, 4, 3, 3] w = {}, float s = {1}, int8 z = {0}> {
            a = DequantizeLinear(x, s, z) b = DequantizeLinear(w, s, z) c = Conv(a, b)
            y = QuantizeLinear(c, s, z) }""",
    ],
)
def test_convolution_without_filters_has_a_result_without_elements(text):
    session = compile_text("g " + text)
    x = np.zeros((1, 4, 5, 5), np.int8 if "int8" in text else np.float32)
    assert session.run({"x": x})["y"].size == 0
