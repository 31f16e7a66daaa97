"""Compiled convolutions and products of codes against NumPy's kernels of their parts, bit by bit.

Scales are powers of two, so that NumPy's sums of real numbers are exact.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from onnx import ModelProto

import penstock as ps
from penstock.ir.graph import Node
from penstock.passes.context import PassContext
from penstock.passes.lowering.quantize import Quantize
from penstock.passes.pipeline import optimize
from tests.support.native_kernels import LIBRARIES, check, kernel_of, node_of, pytestmark  # noqa: F401
from tests.support.onnx_text import model_from_text
from tests.support.passes import fusing_context

RNG = np.random.default_rng(4)
BOUNDS = {
    "none": "y = QuantizeLinear(c, sy, zy)",
    "relu": "r = Relu(c) y = QuantizeLinear(r, sy, zy)",
    "clip": "r = Clip(c, low, high) y = QuantizeLinear(r, sy, zy)",
}


def _text(array: np.ndarray) -> str:
    return "{" + ", ".join(map(str, array.reshape(-1).tolist())) + "}"


def quantized(model: ModelProto, dims: Sequence[int], dtype: str) -> tuple[Node, list[np.ndarray]]:
    """The node that a model becomes, and its inputs, of which the one that is fed is random."""
    graph = ps.load(model).graph
    optimize(graph, PassContext(fold_quantized_weights=False))
    Quantize().run(graph, fusing_context())
    (node,) = graph.nodes
    ends = np.iinfo(dtype)
    x = RNG.integers(ends.min, ends.max, dims, dtype, endpoint=True)
    return node, [x if value.const is None else value.const for value in node.inputs]


def _convolution(
    x_dims: tuple[int, ...],
    w_dims: tuple[int, ...],
    attrs: str = "",
    dtypes: tuple[str, str] = ("int8", "int8"),
    bounds: str = "relu",
    *,
    bias: bool = True,
) -> tuple[Node, list[np.ndarray]]:
    """The fused node of a convolution of codes, or of a product with a matrix of weights, and random
    codes for it."""
    op, attrs = ("Conv", attrs) if len(w_dims) > 2 else ("Gemm", "<transB = 1>")
    filters, (x_dtype, w_dtype) = w_dims[0], dtypes
    zero = 0 if w_dtype == "int8" else 128
    w = RNG.integers(-128, 128, w_dims) + zero
    zeros, zx, zy = np.full(filters, zero), *((-3, 5) if x_dtype == "int8" else (120, 131))
    scales = 2.0 ** -RNG.integers(3, 6, filters)
    model = model_from_text(
        f"""g ({x_dtype}{list(x_dims)} x) => ({x_dtype}{["n"] * len(x_dims)} y)
        <{w_dtype}{list(w_dims)} w = {_text(w)}, float[{filters}] sw = {_text(scales)},
         {w_dtype}[{filters}] zw = {_text(zeros)}, float sx = {{0.5}}, {x_dtype} zx = {{{zx}}},
         int32[{filters}] b = {_text(RNG.integers(-2000, 2000, filters))},
         float sb = {{0.0625}}, float sy = {{8}}, {x_dtype} zy = {{{zy}}},
         float low = {{-60}}, float high = {{300}}>
        {{ dx = DequantizeLinear(x, sx, zx) dw = DequantizeLinear <axis = 0> (w, sw, zw)
        db = DequantizeLinear(b, sb) c = {op} {attrs} (dx, dw{", db" * bias}) {BOUNDS[bounds]} }}""".replace(
            "'n'", "n"
        ),
        opset=21,
    )
    return quantized(model, x_dims, x_dtype)


def onnx_attributes(text: str) -> dict[str, Any]:
    """The attributes of ``<name = [1, 2], group = 3>``."""
    named = re.findall(r"(\w+) = \[([^]]*)\]", text)
    attributes: dict[str, Any] = {
        name: [int(value) for value in values.split(",")] for name, values in named
    }
    group = re.search(r"group = (\d+)", text)
    return attributes if group is None else {**attributes, "group": int(group[1])}


SHAPES = {
    "positions": ((2, 8, 4, 4), (40, 8, 1, 1), ""),
    "positions of odd channels": ((1, 7, 4, 5), (3, 7, 1, 1), ""),
    "an image": ((2, 3, 9, 7), (5, 3, 3, 3), "<strides = [2, 2], pads = [0, 1, 1, 1]>"),
    "many channels": ((1, 70, 5, 5), (140, 70, 3, 3), "<pads = [1, 1, 1, 1]>"),
    "dilations": ((1, 5, 8, 9), (6, 5, 2, 3), "<dilations = [2, 3]>"),
    "a signal": ((1, 6, 30), (4, 6, 5), "<pads = [2, 2]>"),
    "each channel": ((2, 16, 6, 5), (16, 1, 3, 3), "<group = 16, pads = [1, 1, 1, 1]>"),
    "several filters of each": (
        (1, 4, 7, 9),
        (8, 1, 3, 4),
        "<group = 4, strides = [2, 3], dilations = [1, 2], pads = [1, 4, 0, 3]>",
    ),
    "channels of a signal": ((1, 6, 30), (6, 1, 5), "<group = 6, strides = [2]>"),
    "channels of one column": ((1, 16, 21, 1), (16, 1, 21, 1), "<group = 16>"),
    "long rows of channels": ((1, 64, 3, 300), (64, 1, 3, 3), "<group = 64, pads = [1, 1, 1, 1]>"),
    "a row": ((1, 320), (1, 320), ""),
    "rows": ((70, 33), (40, 33), ""),
    "groups": ((2, 12, 6, 7), (8, 3, 3, 3), "<group = 4, pads = [1, 1, 1, 1]>"),
    "groups of a vector": ((1, 64, 5, 6), (96, 32, 3, 2), "<group = 2, strides = [2, 1]>"),
    "many small groups": ((1, 66, 6, 5), (132, 2, 3, 3), "<group = 33, dilations = [1, 2]>"),
    "positions of groups": ((3, 20, 4, 4), (12, 5, 1, 1), "<group = 4>"),
    "groups of a signal": ((1, 6, 30), (9, 2, 5), "<group = 3, pads = [2, 2]>"),
    "planes": (
        (2, 5, 4, 6, 7),
        (7, 5, 2, 3, 3),
        "<pads = [1, 0, 1, 0, 1, 1], strides = [1, 2, 1]>",
    ),
    "planes apart": ((1, 9, 7, 5, 5), (6, 3, 3, 2, 1), "<group = 3, dilations = [2, 1, 1]>"),
    "planes of each channel": ((1, 8, 4, 5, 6), (8, 1, 2, 2, 2), "<group = 8>"),
    "planes of one element": ((1, 16, 3, 4, 4), (32, 16, 1, 1, 1), ""),
    "high kernels of channels": ((1, 48, 40, 6), (48, 1, 9, 3), "<group = 48, strides = [3, 1]>"),
}


@pytest.mark.parametrize("bounds", BOUNDS)
@pytest.mark.parametrize("dtypes", [("int8", "int8"), ("uint8", "uint8"), ("uint8", "int8")])
@pytest.mark.parametrize("name", SHAPES)
def test_convolution_of_codes_equals_numpy(name, dtypes, bounds):
    node, inputs = _convolution(*SHAPES[name], dtypes, bounds)
    check(node, inputs)


def test_convolution_of_codes_without_bias_equals_numpy():
    check(*_convolution((1, 8, 4, 4), (8, 8, 3, 3), bias=False))


@pytest.mark.parametrize("zero", ["none", "one", "by filter"])
@pytest.mark.parametrize("dtypes", [("int8", "int8"), ("uint8", "uint8"), ("uint8", "int8")])
@pytest.mark.parametrize("name", SHAPES)
def test_integer_convolution_equals_numpy(name, dtypes, zero):
    x_dims, w_dims, attrs = SHAPES[name]
    if len(x_dims) < 3:
        x_dims, w_dims = (*x_dims, 1), (*w_dims, 1)
    x, w = (
        RNG.integers(np.iinfo(dtype).min, 256 + np.iinfo(dtype).min, dims).astype(dtype)
        for dtype, dims in zip(dtypes, (x_dims, w_dims), strict=True)
    )
    inputs, given = [x, w], onnx_attributes(attrs)
    if zero != "none":
        inputs += [x.flat[0].reshape(()), w.reshape(-1)[: 1 if zero == "one" else len(w)]]
    for constants in ([1, 2, 3], [1, 3]):
        check(node_of("ConvInteger", inputs, constants[: len(inputs) - 1], **given), inputs)


EXTREMES = {
    "random": lambda ends, dims: RNG.integers(ends.min, ends.max, dims, endpoint=True),
    # Sums of two such products leave int16, in which some instructions add pairs.
    "largest": lambda ends, dims: np.full(dims, ends.max),
    "smallest": lambda ends, dims: np.full(dims, ends.min),
}


def _operation_of_codes(
    x_dims: tuple[int, ...],
    w_dims: tuple[int, ...],
    dtypes: tuple[str, str] = ("uint8", "int8"),
    values: tuple[str, str] = ("random", "random"),
    zeros: tuple[int, int] | None = None,
    **attrs: int | list[int],
) -> tuple[Node, list[np.ndarray]]:
    """A QLinearConv with a scale for each filter, and its inputs."""
    ends = [np.iinfo(dtype) for dtype in dtypes]
    x, w = (
        EXTREMES[name](end, dims).astype(end.dtype)
        for name, end, dims in zip(values, ends, (x_dims, w_dims), strict=True)
    )
    zero, y_zero = zeros or (ends[0].max - 100, ends[0].min + 100)
    inputs = [
        *(x, np.float32(0.023), np.array(zero, x.dtype)),
        *(w, RNG.uniform(0.001, 0.1, w_dims[0]).astype(np.float32)),
        np.full(w_dims[0], 0 if w.dtype == np.int8 else 128, w.dtype),
        *(np.float32(w[0].size * 0.01), np.array(y_zero, x.dtype)),
        RNG.integers(-70000, 70000, w_dims[0], np.int32),
    ]
    return node_of("QLinearConv", inputs, range(1, 9), **attrs), inputs


@pytest.mark.parametrize(
    "values", [("random", "random"), ("largest", "largest"), ("largest", "smallest")]
)
@pytest.mark.parametrize("dtypes", [("int8", "int8"), ("uint8", "uint8"), ("uint8", "int8")])
@pytest.mark.parametrize("name", [name for name in SHAPES if len(SHAPES[name][0]) > 2])
def test_convolution_of_an_operation_equals_numpy(name, dtypes, values):
    x_dims, w_dims, text = SHAPES[name]
    check(*_operation_of_codes(x_dims, w_dims, dtypes, values, **onnx_attributes(text)))


@pytest.mark.parametrize("zero", [0, 1, 113, 254, 255])
@pytest.mark.parametrize("name", ["an image", "groups", "each channel", "planes of each channel"])
def test_convolution_of_weights_of_nine_bits_equals_numpy(name, zero):
    x_dims, w_dims, text = SHAPES[name]
    _, inputs = _operation_of_codes(x_dims, w_dims, ("uint8", "uint8"), **onnx_attributes(text))
    inputs[5] = np.full_like(inputs[5], zero)
    inputs[3].reshape(-1)[:2] = 0, 255
    check(node_of("QLinearConv", inputs, range(1, 9), **onnx_attributes(text)), inputs)


@pytest.mark.parametrize("group", [False, True])
@pytest.mark.parametrize("dtype", ["int8", "uint8"])
def test_convolution_with_zero_points_at_the_ends_equals_numpy(dtype, group):
    ends = np.iinfo(dtype)
    w_dims, attrs = ((12, 1, 3, 3), {"group": 12}) if group else ((20, 12, 3, 3), {})
    for zeros in ((ends.min, ends.max), (ends.max, ends.min), (ends.max, ends.max)):
        pads = {"pads": [1, 2, 2, 0], "strides": [1, 2]}
        check(
            *_operation_of_codes(
                (1, 12, 6, 9), w_dims, (dtype, "int8"), zeros=zeros, **pads, **attrs
            )
        )


@pytest.mark.parametrize("channels", [1, 2, 3, 5, 15, 16, 17, 31, 33, 63, 65, 130])
@pytest.mark.parametrize("filters", [1, 7, 16, 17, 33, 48, 80, 129, 150])
def test_convolution_of_odd_numbers_of_channels_and_filters_equals_numpy(channels, filters):
    for kernel, stride, width in ((1, 1, 9), (3, 2, 11), (2, 1, 40)):
        check(
            *_operation_of_codes(
                (1, channels, 5, width),
                (filters, channels, kernel, kernel),
                pads=[kernel // 2, kernel // 2, 0, 1],
                strides=[stride, stride],
            )
        )


def test_convolution_of_wide_and_high_images_in_blocks_equals_numpy():
    check(*_operation_of_codes((1, 40, 70, 90), (24, 40, 3, 3), pads=[1, 1, 1, 1]))
    check(*_operation_of_codes((2, 300, 9, 130), (5, 300, 3, 3), dilations=[2, 3], strides=[3, 2]))
    check(*_operation_of_codes((1, 500, 3, 140), (500, 1, 3, 3), group=500, pads=[1, 1, 1, 1]))


@pytest.mark.parametrize("width", [5, 7, 8])
@pytest.mark.parametrize("stride", [2, 3])
def test_rows_that_are_no_number_of_strides_apart_equal_numpy(stride, width):
    """An image with its channels innermost is read as it lies, several rows at once where these are
    whole strides apart; not by tiles, since weights have zero points."""
    _, inputs = _operation_of_codes((1, 8, 16, width), (23, 8, 3, 3), ("uint8", "uint8"))
    inputs[5] = np.arange(23, dtype=np.uint8)
    check(node_of("QLinearConv", inputs, range(1, 9), strides=[1, stride]), inputs)


@pytest.mark.parametrize("low", [-128, -9])  # results below the zero point are seen, or not
@pytest.mark.parametrize("filters", [3, 8, 16, 20, 40, 64])
@pytest.mark.parametrize("group", [False, True])
def test_sums_at_and_near_ties_are_rescaled_as_numpy_does(group, filters, low):
    """Where products are rounded to float32 first, some of these come out on the other side."""
    dims = (1, filters, 40, 50) if group else (1, 2, 40, 50)
    attrs = {"group": filters} if group else {}
    _, inputs = _operation_of_codes(
        dims, (filters, 1 if group else 2, 1, 1), ("int8", "int8"), zeros=(0, -9), **attrs
    )
    inputs[3][...] = RNG.integers(1, 5, inputs[3].shape)
    offsets = RNG.choice([0.0, 2.0**-23, -(2.0**-23), 2.0**-12, 0.3], filters)
    inputs[4] = (2.0 ** -RNG.integers(1, 9, filters) * (1 + offsets)).astype(np.float32)
    inputs[1], inputs[6] = np.float32(1), np.float32(1)
    inputs[8][...] = RNG.integers(-200, 200, filters)
    attrs |= {"fixed_point": 1, "code_limits": [low, 120]}
    check(node_of("QLinearConv", inputs, range(1, 9), **attrs), inputs)


def test_convolution_of_an_operation_with_late_scales_has_no_kernel():
    _, inputs = _operation_of_codes((1, 4, 5, 5), (4, 4, 3, 3))
    late = node_of("QLinearConv", inputs, [2, 3, 4, 5, 6, 7, 8])
    assert all(kernel_of(late, library) is None for library in LIBRARIES)


@pytest.mark.parametrize("dtypes", [("int8", "int8"), ("uint8", "uint8"), ("uint8", "int8")])
@pytest.mark.parametrize(
    "shapes", [((3, 33), (33, 20)), ((2, 9, 70), (70, 130)), ((1, 4, 5, 8), (8, 3))]
)
def test_product_of_codes_between_conversions_equals_numpy(shapes, dtypes):
    (x_dims, (k, n)), (x_dtype, w_dtype) = shapes, dtypes
    zero = 0 if w_dtype == "int8" else 128
    w = RNG.integers(-128, 128, (k, n)) + zero
    model = model_from_text(
        f"""g ({x_dtype}{list(x_dims)} x) => ({x_dtype}[{", ".join("n" * len(x_dims))}] y)
        <{w_dtype}{[k, n]} w = {_text(w)}, float[{n}] sw = {_text(2.0 ** -RNG.integers(3, 6, n))},
         {w_dtype}[{n}] zw = {_text(np.full(n, zero))}, float sx = {{0.5}}, {x_dtype} zx = {{3}},
         float sy = {{8}}, {x_dtype} zy = {{5}}>
        {{ dx = DequantizeLinear(x, sx, zx) dw = DequantizeLinear <axis = 1> (w, sw, zw)
        c = MatMul(dx, dw) r = Relu(c) y = QuantizeLinear(r, sy, zy) }}""",
        opset=21,
    )
    check(*quantized(model, x_dims, x_dtype))


def test_result_of_a_convolution_of_codes_that_leaves_the_run_is_written_to_planned_memory():
    node, _ = _convolution((1, 8, 6, 6), (16, 8, 3, 3))
    assert all(kernel_of(node, library).layout.prefer_bound for library in LIBRARIES)
