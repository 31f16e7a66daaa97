"""ConvInteger and QLinearConv."""

from typing import Any

import numpy as np
import pytest

from penstock.core.types import ShapeError, TensorType
from penstock.ops import find
from tests.ops.harness import check_node, unsaturated

F32, I8, U8, I32 = (np.dtype(t) for t in (np.float32, np.int8, np.uint8, np.int32))
ATTRS: list[dict[str, Any]] = [
    {},
    {"pads": [1, 0, 2, 1], "strides": [2, 1]},
    {"dilations": [2, 1], "kernel_shape": [3, 2]},
    {"auto_pad": "SAME_UPPER", "strides": [2, 2]},
    {"auto_pad": "SAME_LOWER"},
    {"auto_pad": "VALID"},
]
rng = np.random.default_rng(5)


def codes(dtype: np.dtype, *shape: int, spread: int = 128) -> np.ndarray:
    middle = 0 if dtype == I8 else 128
    return unsaturated(np.asarray(rng.integers(middle - spread, middle + spread, shape), dtype))


def scales(*shape: int, low: float = 0.01) -> np.ndarray:
    return np.asarray(rng.uniform(low, 3 * low, shape), np.float32)


def exactly(x: np.ndarray, w: np.ndarray, x_zero: Any = 0, w_zero: Any = 0) -> np.ndarray:
    """A convolution without padding or strides, in integers."""
    wide = np.asarray(x, np.int64) - np.asarray(x_zero, np.int64)
    kernel = np.asarray(w, np.int64) - np.asarray(w_zero, np.int64)
    windows = np.lib.stride_tricks.sliding_window_view(wide, w.shape[2:], (2, 3))
    return np.einsum("nchwij,mcij->nmhw", windows, kernel).astype(np.int32)


# ConvInteger


@pytest.mark.parametrize("attrs", ATTRS)
@pytest.mark.parametrize("constants", [(), (1,), (1, 2, 3)])
def test_conv_integer_like_onnx_runtime(attrs: dict[str, Any], constants: tuple[int, ...]) -> None:
    inputs = [codes(U8, 2, 3, 7, 6), codes(U8, 4, 3, 3, 2), codes(U8), codes(U8)]
    check_node("ConvInteger", inputs, attrs, expected="ort", opset=21, constants=constants)
    inputs = [codes(U8, 2, 3, 7, 6), codes(I8, 4, 3, 3, 2), codes(U8)]
    constants = tuple(i for i in constants if i < 3)
    check_node("ConvInteger", inputs, attrs, expected="ort", opset=21, constants=constants)


@pytest.mark.parametrize("group", [1, 2, 4])
@pytest.mark.parametrize("shape", [(5,), (3, 5), (3, 4, 5)])
def test_quantized_conv_groups_and_ranks(group: int, shape: tuple[int, ...]) -> None:
    x, w = codes(U8, 2, 4, *shape), codes(I8, 8, 4 // group, *(2,) * len(shape))
    attrs = {"group": group}
    check_node("ConvInteger", [x, w, codes(U8)], attrs, expected="ort", opset=21)
    check_node("ConvInteger", [x, w, codes(U8)], attrs, expected="ort", opset=21, constants=[1, 2])


@pytest.mark.parametrize("channels, kernel", [(40, 3), (300, 1), (2, 17)])
@pytest.mark.parametrize("constants", [(), (1, 3)])
def test_quantized_conv_long_sums_are_exact(
    channels: int, kernel: int, constants: tuple[int, ...]
) -> None:
    x, w = codes(U8, 1, channels, 20, 20), codes(U8, 3, channels, kernel, kernel)
    x[:, :, :5], w[0] = 255, 255
    zeros = [np.array(0, np.uint8), np.array(0, np.uint8)]
    want = exactly(x, w)
    assert want.max() > 2**24
    check_node("ConvInteger", [x, w, *zeros], expected=[want], constants=constants)


def test_quantized_conv_long_sums_in_groups() -> None:
    x, w = codes(U8, 1, 600, 4, 4), codes(U8, 4, 300, 2, 1)
    halves = [exactly(x[:, :300], w[:2]), exactly(x[:, 300:], w[2:])]
    want = np.concatenate(halves, axis=1)
    check_node("ConvInteger", [x, w], {"group": 2}, expected=[want])
    check_node("ConvInteger", [x, w], {"group": 2}, expected=[want], constants=[1])


def test_quantized_conv_zero_points_of_filters() -> None:
    x, w, zeros = codes(U8, 1, 3, 5, 5), codes(I8, 4, 3, 2, 2), codes(I8, 4)
    want = exactly(x, w, 7, zeros.reshape(4, 1, 1, 1))
    inputs = [x, w, np.array(7, np.uint8), zeros]
    check_node("ConvInteger", inputs, expected=[want])
    check_node("ConvInteger", inputs, expected=[want], constants=[1, 2, 3])


# QLinearConv


def quantized(x: np.ndarray, w: np.ndarray, filters: bool) -> list[Any]:
    shape = (w.shape[0],) if filters else ()
    return [
        *(x, scales(), codes(x.dtype)),
        *(w, scales(*shape), codes(w.dtype, *shape) if w.dtype == U8 else np.zeros(shape, I8)),
        *(scales(low=0.3), codes(x.dtype)),
    ]


@pytest.mark.parametrize("attrs", ATTRS)
@pytest.mark.parametrize("x_dtype, w_dtype", [(U8, U8), (U8, I8), (I8, I8)])
def test_qlinear_conv_like_onnx_runtime(
    attrs: dict[str, Any], x_dtype: np.dtype, w_dtype: np.dtype
) -> None:
    inputs = quantized(codes(x_dtype, 2, 3, 7, 6), codes(w_dtype, 4, 3, 3, 2), False)
    check_node("QLinearConv", inputs, attrs, expected="ort", opset=21)
    inputs.append(np.asarray(rng.integers(-1000, 1000, 4), np.int32))
    check_node("QLinearConv", inputs, attrs, expected="ort", opset=21)
    constants = [1, 2, 3, 4, 5, 6, 7, 8]
    check_node("QLinearConv", inputs, attrs, expected="ort", opset=21, constants=constants)


@pytest.mark.parametrize("group, channels", [(1, 8), (8, 8), (2, 8), (1, 80)])
def test_qlinear_conv_with_scales_of_filters(group: int, channels: int) -> None:
    w = codes(I8, 16, channels // group, 3, 3)
    inputs = quantized(codes(U8, 1, channels, 6, 6), w, True)
    inputs.append(np.asarray(rng.integers(-(2**26), 2**26, 16), np.int32))
    attrs = {"group": group, "pads": [1, 1, 1, 1]}
    check_node("QLinearConv", inputs, attrs, expected="ort", opset=21)
    constants = [1, 2, 3, 4, 5, 6, 7, 8]
    check_node("QLinearConv", inputs, attrs, expected="ort", opset=21, constants=constants)


def test_quantized_conv_channels_last() -> None:
    inputs = quantized(codes(U8, 2, 3, 7, 6), codes(I8, 4, 3, 3, 2), True)
    (y,) = check_node("QLinearConv", inputs, expected="ort", opset=21)
    inputs[0] = np.ascontiguousarray(np.moveaxis(inputs[0], 1, -1))
    ms = {"domain": "com.microsoft", "opset": 1}
    check_node("QLinearConv", inputs, {"channels_last": 1}, expected="ort", **ms)
    want = np.moveaxis(y, 1, -1)
    check_node("QLinearConv", inputs, {"channels_last": 1}, expected=[want], **ms)


def test_quantized_conv_infers_its_types() -> None:
    op = find("ConvInteger")
    assert op is not None
    types = [TensorType(U8, ("n", 3, "h", 9)), TensorType(I8, (4, 3, 3, 3))]
    attrs = {"pads": [1, 1, 1, 1], "group": 1}
    assert op.infer(types, attrs, [None] * 2) == (TensorType(I32, ("n", 4, "h", 9)),)
    for bad in (
        [types[0], TensorType(I8, (4, 5, 3, 3))],
        [*types, TensorType(U8, (3,))],
        [*types, TensorType(U8, ()), TensorType(I8, (3,))],
    ):
        with pytest.raises(ShapeError):
            op.infer(bad, attrs, [None] * 4)
    linear = find("QLinearConv")
    assert linear is not None
    nine = [TensorType()] * 9
    nine[0], nine[3], nine[7] = types[0], types[1], TensorType(U8, ())
    assert linear.infer(nine, attrs, [None] * 9) == (TensorType(U8, ("n", 4, "h", 9)),)
    nine[8] = TensorType(I32, (5,))
    with pytest.raises(ShapeError):
        linear.infer(nine, attrs, [None] * 9)
