"""QuantizeLinear, DequantizeLinear, DynamicQuantizeLinear."""

import ml_dtypes
import numpy as np
import onnx
import pytest
from onnx import TensorProto

from penstock.core.types import ShapeError, TensorType
from penstock.ops import find
from tests.ops.harness import check_node

F32 = np.dtype(np.float32)
INTS = ["int8", "uint8", "int16", "uint16", "int4", "uint4", "int2", "uint2"]
FLOAT8 = ["float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz"]
SMALL = ["float4_e2m1fn", "float6_e2m3fn", "float6_e3m2fn"]
rng = np.random.default_rng(7)


def dtype_of(name: str) -> np.dtype:
    return np.dtype(getattr(ml_dtypes, name, name))


def normal(*shape: int, scale: float = 3.0) -> np.ndarray:
    return np.asarray(rng.normal(size=shape) * scale, np.float32)


def scales(*shape: int) -> np.ndarray:
    return np.asarray(rng.uniform(0.01, 0.2, shape), np.float32)


def zeros_for(name: str, *shape: int) -> np.ndarray:
    dtype = dtype_of(name)
    if name in FLOAT8:
        return np.zeros(shape, dtype)
    if name in SMALL:
        return np.asarray(rng.integers(0, 2, shape), np.float32).astype(dtype)
    info = ml_dtypes.iinfo(dtype)
    low, high = max(int(info.min), -100), min(int(info.max), 100)
    return np.asarray(rng.integers(low, high, shape, endpoint=True), np.int32).astype(dtype)


@pytest.mark.parametrize("name", INTS + FLOAT8 + SMALL)
@pytest.mark.parametrize("layout", ["scalar", "axis", "blocks", "partial blocks"])
def test_quantize_every_target_matches_the_reference(name: str, layout: str) -> None:
    shape = {"scalar": (), "axis": (4,), "blocks": (2, 4, 5), "partial blocks": (2, 2, 5)}[layout]
    attrs = {"axis": 1}
    if "blocks" in layout:
        attrs["block_size"] = 1 if layout == "blocks" else 3
    inputs = [normal(2, 4, 5), scales(*shape), zeros_for(name, *shape)]
    check_node("QuantizeLinear", inputs, attrs)
    check_node("QuantizeLinear", inputs, attrs, constants=[1, 2])


@pytest.mark.parametrize("name", [*INTS, "int32", *FLOAT8, *SMALL])
@pytest.mark.parametrize("out", [None, TensorProto.FLOAT16, TensorProto.BFLOAT16])
@pytest.mark.parametrize("layout", ["scalar", "axis", "blocks", "partial blocks"])
def test_dequantize_every_source_matches_the_reference(
    name: str, out: int | None, layout: str
) -> None:
    shape = {"scalar": (), "axis": (6,), "blocks": (2, 3), "partial blocks": (2, 2)}[layout]
    attrs: dict[str, int] = {"axis": -1}
    if "blocks" in layout:
        attrs["block_size"] = 2 if layout == "blocks" else 4
    if out is not None:
        attrs["output_dtype"] = out
    zero = np.zeros(shape, np.int32) if name == "int32" else zeros_for(name, *shape)
    if name in ("int32", *FLOAT8, *SMALL):
        x = normal(2, 6).astype(np.int32 if name == "int32" else dtype_of(name))
    else:
        x = zeros_for(name, 2, 6)
    if name == "float4_e2m1fn" or name in FLOAT8:  # the reference ignores the zero point of these
        zero = np.zeros(shape, dtype_of(name))
    check_node("DequantizeLinear", [x, scales(*shape), zero], attrs)
    check_node("DequantizeLinear", [x, scales(*shape)], attrs, constants=[1])


@pytest.mark.parametrize("name", ["int8", "uint8", "int16", "uint16"])
def test_quantize_like_onnx_runtime(name: str) -> None:
    inputs = [normal(3, 7, 5, scale=30), scales(7), zeros_for(name, 7)]
    check_node("QuantizeLinear", inputs, {"axis": 1}, expected="ort", opset=21)
    specials = np.array([np.nan, np.inf, -np.inf, 0.5, 1.5, 2.5, -0.5, 1e30, -1e30], np.float32)
    inputs = [specials, np.array(1, np.float32), zeros_for(name)]
    check_node("QuantizeLinear", inputs, expected="ort", opset=21)


@pytest.mark.parametrize("name", ["int8", "uint16", "int4", "float8_e4m3fn", "float4_e2m1fn"])
def test_quantize_tensors_of_many_blocks(name: str) -> None:
    x, scale, zero = normal(7, 5003), scales(), zeros_for(name)
    (y,) = check_node("QuantizeLinear", [x, scale, zero])
    (z,) = check_node("QuantizeLinear", [x[::2, ::-1], scale, zero])
    np.testing.assert_array_equal(z.astype(np.float32), y[::2, ::-1].astype(np.float32))
    check_node("DequantizeLinear", [y, scale, zeros_for(name) if name == "int8" else None])
    half = scale.astype(np.float16)
    check_node("QuantizeLinear", [x.astype(np.float16), half, zero])
    check_node("DequantizeLinear", [y, half])
    check_node("DynamicQuantizeLinear", [x], outputs=3, expected="ort", opset=21)


def test_quantize_target_is_output_dtype_or_uint8() -> None:
    x, scale = normal(6, scale=30), np.array(0.5, np.float32)
    (y,) = check_node("QuantizeLinear", [x, scale])
    assert y.dtype == np.uint8
    (y,) = check_node("QuantizeLinear", [x, scale], {"output_dtype": TensorProto.INT4})
    assert y.dtype == ml_dtypes.int4
    assert set(y.view(np.uint8)) <= set(range(16))  # as ml_dtypes itself stores them


def test_quantize_float8_without_saturation() -> None:
    x = np.array([0.0, 1.0, 500.0, -1e6, np.inf, np.nan], np.float32)
    for name in FLOAT8:
        inputs = [x, np.array(1, np.float32), np.zeros((), dtype_of(name))]
        check_node("QuantizeLinear", inputs, {"saturate": 0})
        (y,) = check_node("QuantizeLinear", inputs, {"saturate": 1})
        assert np.isfinite(y.astype(np.float32)[:5]).all()


def test_quantize_precision_of_the_division() -> None:
    x = np.linspace(-40, 40, 1001, dtype=np.float32)
    scale = np.array(0.37, np.float32)
    for code in (TensorProto.FLOAT16, TensorProto.BFLOAT16, TensorProto.FLOAT):
        check_node("QuantizeLinear", [x, scale, np.array(3, np.int8)], {"precision": code})
    for dtype in (np.float16, ml_dtypes.bfloat16):
        check_node("QuantizeLinear", [x.astype(dtype), scale.astype(dtype), np.array(3, np.int8)])


def test_quantize_other_input_types() -> None:
    scale = np.array(2.5, np.float32)
    x = np.array([[7, -3, 2**30], [5, 0, 2]], np.int32)
    check_node("QuantizeLinear", [x, scale, np.array(1, np.int8)])
    check_node("QuantizeLinear", [x, np.array(2, np.int32), np.array(1, np.int16)])
    power = np.array([0.5, 4.0], ml_dtypes.float8_e8m0fnu)
    check_node("QuantizeLinear", [normal(2, 3), power, np.zeros(2, np.int8)], {"axis": 0})
    attrs = {"axis": 0, "output_dtype": TensorProto.FLOAT}
    check_node("DequantizeLinear", [np.ones((2, 3), np.int8), power], attrs)


@pytest.mark.parametrize("shape", [(), (0,), (3, 0, 2), (1,)])
def test_quantize_empty_and_scalar_tensors(shape: tuple[int, ...]) -> None:
    scale, zero = np.array(0.1, np.float32), np.array(3, np.uint8)
    check_node("QuantizeLinear", [normal(*shape), scale, zero])
    check_node("DequantizeLinear", [zeros_for("uint8", *shape), scale, zero])
    x = normal(*shape)
    _, y_scale, _ = check_node("DynamicQuantizeLinear", [x], outputs=3, expected="ort", opset=21)
    assert y_scale.shape == ()


def test_quantize_vector_ignores_axis() -> None:
    x, scale, zero = normal(5), scales(5), zeros_for("int8", 5)
    (y,) = check_node("QuantizeLinear", [x, scale, zero], {"axis": 0})
    node = find("QuantizeLinear")
    assert node is not None
    (again,) = check_node("QuantizeLinear", [x, scale, zero], expected=[y])
    assert again.shape == (5,)


@pytest.mark.parametrize("low, high", [(-3, 5), (1, 9), (-9, -1), (0, 0), (-1e-30, 1e-30)])
def test_dynamic_quantize_matches_the_reference(low: float, high: float) -> None:
    x = np.linspace(low, high, 37, dtype=np.float32).reshape(37, 1)
    check_node("DynamicQuantizeLinear", [x], outputs=3, expected="ort", opset=21)


def test_quantize_microsoft_variants_matches_the_reference() -> None:
    ms = {"domain": "com.microsoft", "opset": 1, "expected": "ort"}
    for name in ("int8", "uint8", "int16", "uint16"):
        x, scale, zero = normal(4, 6, scale=30), scales(4), zeros_for(name, 4)
        (y,) = check_node("QuantizeLinear", [x, scale, zero], {"axis": 0}, **ms)
        check_node("DequantizeLinear", [y, scale, zero], {"axis": 0}, **ms)
        scale, zero = np.array(0.3, np.float32), zeros_for(name)
        (y,) = check_node("QuantizeLinear", [x, scale, zero], **ms)
        check_node("DequantizeLinear", [y, scale, zero], **ms)
    check_node("DequantizeLinear", [normal(3).astype(np.int32), np.array(0.3, np.float32)], **ms)


@pytest.mark.parametrize(
    "x, scale, zero, attrs",
    [
        ((2, 3), (4,), (4,), {"axis": 1}),
        ((2, 3), (3,), (3,), {"axis": 2}),
        ((2, 3), (2, 3), (2, 3), {"axis": 1}),
        ((2, 6), (2, 2), (2, 2), {"axis": 1, "block_size": 2}),
        ((2, 6), (6,), (6,), {"axis": 1, "block_size": 2}),
        ((), (3,), (3,), {}),
        ((2, 3), (3,), (2,), {}),
        ((2, 3), (), (), {"block_size": -1}),
    ],
)
def test_quantize_scales_of_wrong_shape_are_refused(
    x: tuple[int, ...], scale: tuple[int, ...], zero: tuple[int, ...], attrs: dict[str, int]
) -> None:
    inputs = [normal(*x), scales(*scale), zeros_for("int8", *zero)]
    with pytest.raises(ShapeError):
        check_node("QuantizeLinear", inputs, attrs, expected=[inputs[2]])
    inputs = [zeros_for("int8", *x), scales(*scale), zeros_for("int8", *zero)]
    with pytest.raises(ShapeError):
        check_node("DequantizeLinear", inputs, attrs, expected=[inputs[1]])


def test_quantize_infer_of_partly_known_types() -> None:
    quantize, dequantize = find("QuantizeLinear"), find("DequantizeLinear")
    assert quantize is not None
    assert dequantize is not None
    x = TensorType(F32, ("n", None, 3))
    int8 = TensorType(np.dtype(np.int8), ())
    none = [None, None, None]
    assert quantize.infer([x, TensorType()], {}, none) == (
        TensorType(np.dtype(np.uint8), ("n", None, 3)),
    )
    assert quantize.infer([x, TensorType(), int8], {}, none)[0].dtype == np.int8
    assert quantize.infer([x, TensorType(), TensorType()], {}, none)[0].dtype is None
    assert dequantize.infer([TensorType(), TensorType(F32)], {}, none) == (TensorType(F32),)
    with pytest.raises(ShapeError, match="does not match axis"):
        quantize.infer([x, TensorType(F32, (2,))], {"axis": 2}, none)
    with pytest.raises(ShapeError, match="output_dtype"):
        quantize.infer([x, TensorType(), int8], {"output_dtype": TensorProto.UINT8}, none)
    with pytest.raises(ShapeError, match="is not a quantized type"):
        quantize.infer([x, TensorType()], {"output_dtype": TensorProto.DOUBLE}, none)
    with pytest.raises(ShapeError, match="require the attribute output_dtype"):
        dequantize.infer([int8, TensorType(np.dtype(ml_dtypes.float8_e8m0fnu), ())], {}, none)
    with pytest.raises(ShapeError, match="is not a quantized type; these"):
        dequantize.infer([x, TensorType(F32, ())], {}, none)


def test_quantize_old_versions_share_the_kernel() -> None:
    for version in (10, 13, 19, 21, 23, onnx.defs.onnx_opset_version()):
        assert find("QuantizeLinear", "", version) is find("QuantizeLinear")
        assert find("DequantizeLinear", "", version) is find("DequantizeLinear")
