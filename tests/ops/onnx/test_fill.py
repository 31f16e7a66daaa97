"""ConstantOfShape, Range, EyeLike, OneHot, Trilu."""

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from onnx import TensorProto, numpy_helper

from penstock.core.types import INT64, ShapeError, TensorType
from tests.ops.cases import (
    F32,
    check_both,
    data_of,
    f32,
    fails,
    float_type,
    i64,
    infer,
    int_type,
    shape_of,
)
from tests.ops.harness import check_node


def value_of(x: np.ndarray) -> dict[str, Any]:
    return {"value": numpy_helper.from_array(x)}


@pytest.mark.parametrize("shape", [(), (0,), (2, 3), (1, 0, 2)])
def test_constant_of_shape_matches_the_reference(shape: tuple[int, ...]) -> None:
    check_node("ConstantOfShape", [i64(*shape)])
    for value in (np.array([3], np.int32), np.array([1.5], np.float16), np.array([True])):
        check_node("ConstantOfShape", [i64(*shape)], value_of(value))


def test_constant_of_shape_of_edge_cases_matches_the_definition() -> None:
    half = np.array([1.5], ml_dtypes.bfloat16)
    check_node("ConstantOfShape", [i64(2)], value_of(half), expected=[half.repeat(2)])
    fails("ConstantOfShape", [i64(2, -1)], match="negative dimensions are not allowed")
    fails("ConstantOfShape", [i64(2)], value_of(i64(1, 2)), "scalar")


def test_constant_of_shape_infers_its_types() -> None:
    (kind,) = infer("ConstantOfShape", [int_type("N", None, 3)])
    assert kind == TensorType(F32, ("N", None, 3))
    ones = {"value": i64(1)}
    assert data_of("ConstantOfShape", [i64(3)], ones) == (1, 1, 1)
    assert infer("ConstantOfShape", [i64()], ones) == [TensorType(INT64, (), (1,))]
    assert data_of("ConstantOfShape", [int_type("N")], ones) is None
    assert data_of("ConstantOfShape", [i64(10**9)], ones) is None
    assert shape_of("ConstantOfShape", [TensorType(INT64, (2,))]) == (None, None)
    assert shape_of("ConstantOfShape", [TensorType(INT64, (None,))]) is None
    with pytest.raises(ShapeError):
        infer("ConstantOfShape", [int_type("N", -1)])


@pytest.mark.parametrize(
    "bounds", [(0, 5, 1), (10, 4, -2), (3, 9, 3), (1, 1, 1), (5, 1, 1), (1, 8, 3), (-3, 4, 2)]
)
@pytest.mark.parametrize(
    "dtype", [np.int16, np.int32, np.int64, np.float32, np.float64, np.float16, "bfloat16"]
)
def test_range_matches_the_reference(bounds: tuple[int, int, int], dtype: Any) -> None:
    kind = ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype
    check_both("Range", [np.array(v, kind) for v in bounds], constants=(0, 1, 2))


def test_range_of_floats_matches_the_reference() -> None:
    check_node("Range", [np.array(v, np.float32) for v in (0.1, 1, 0.1)], rtol=1e-6)
    check_node("Range", [np.array(v, np.float64) for v in (1, -0.5, -0.25)])
    # In float16 alone the steps beyond 2048 would be lost.
    (y,) = check_node("Range", [np.array(v, np.float16) for v in (2040, 2060, 1)])
    assert len(y) == 20
    double = {"stash_type": int(TensorProto.DOUBLE)}
    check_node("Range", [np.array(v, np.float16) for v in (0, 1, 0.1)], double)


def test_range_with_bad_inputs_is_refused() -> None:
    fails("Range", [np.array(v) for v in (0, 3, 0)], match="delta")
    fails("Range", [np.array(v, np.float32) for v in (0, np.inf, 1)], match="length")
    fails("Range", [np.array(v, np.float32) for v in (0, np.nan, 1)], match="length")
    fails("Range", [np.array(0), i64(1, 2), np.array(1)], match="scalar")


def test_range_infers_its_types() -> None:
    zero, one = np.array(0), np.array(1)
    named = TensorType(INT64, (), ("N",))
    assert infer("Range", [zero, named, one]) == [TensorType(INT64, ("N",))]
    assert shape_of("Range", [one, named, one]) == (None,)
    assert shape_of("Range", [zero, TensorType(INT64, ()), one]) == (None,)
    known = TensorType(INT64, (), (4,))
    assert infer("Range", [one, known, one]) == [TensorType(INT64, (3,), (1, 2, 3))]
    assert infer("Range", [zero, np.array(-3), np.array(-1)]) == [
        TensorType(INT64, (3,), (0, -1, -2))
    ]
    assert infer("Range", [zero, np.array(1000), one]) == [TensorType(INT64, (1000,))]
    floats = [np.array(v, np.float32) for v in (0, 1, 0.25)]
    assert infer("Range", floats) == [float_type(4)]
    with pytest.raises(ShapeError):
        infer("Range", [zero, one, zero])


@pytest.mark.parametrize("k", [-5, -1, 0, 1, 2, 5])
def test_eye_like_matches_the_reference(k: int) -> None:
    for shape in ((3, 4), (4, 3), (0, 2)):
        x = f32(*shape)
        check_node("EyeLike", [x], {"k": k}, expected=[np.eye(*shape, k, dtype=np.float32)])
    attrs = {"k": k, "dtype": int(TensorProto.INT64)}
    check_node("EyeLike", [f32(3, 3)], attrs, expected=[np.eye(3, k=k, dtype=np.int64)])


def test_eye_like_of_edge_cases_matches_the_definition() -> None:
    brain = int(TensorProto.BFLOAT16)
    want = np.eye(2).astype(ml_dtypes.bfloat16)
    check_node("EyeLike", [f32(2, 2)], {"dtype": brain}, expected=[want])
    fails("EyeLike", [f32(2)], match="the input must have rank")
    assert infer("EyeLike", [float_type("N", 3)]) == [float_type("N", 3)]
    assert infer("EyeLike", [TensorType(F32)], {"dtype": 7}) == [TensorType(INT64, (None, None))]


@pytest.mark.parametrize("axis", [0, 1, 2, -1, -2, -3])
@pytest.mark.parametrize("dtype", [np.int64, np.int32, np.uint8, np.float32])
def test_one_hot_matches_the_reference(axis: int, dtype: Any) -> None:
    indices = np.array([[0, 2], [1, 7]], dtype)
    values = np.array([2, 5], np.float32)
    hot = np.zeros((2, 2, 3), np.int64)
    hot[0, 0, 0] = hot[0, 1, 2] = hot[1, 0, 1] = 1  # 7 is no class
    want = values[np.moveaxis(hot, -1, axis)]
    attrs = {"axis": axis}
    check_both("OneHot", [indices, np.array(3), values], attrs, expected=[want])
    small = values.astype(np.int8)
    check_both("OneHot", [indices, i64(3), small], attrs, expected=[want.astype(np.int8)])


def test_one_hot_of_edge_cases_matches_the_definition() -> None:
    values = np.array([0, 1], np.int64)
    indices = i64(-1, -3, -4, 3, 0)
    check_node("OneHot", [indices, np.array(3.0, np.float32), values])
    check_node("OneHot", [np.array(1), np.array(3), values], expected=[i64(0, 1, 0)])
    old = [[0, 0, 0], [0, 0, 0], [0, 0, 0], [0, 0, 0], [1, 0, 0]]
    check_node("OneHot", [indices, np.array(3), values], opset=9, expected=[np.array(old)])
    words = np.array(["off", "on"], object)
    check_node("OneHot", [i64(1), np.array(2), words], expected=[np.array([["off", "on"]], object)])
    check_node("OneHot", [i64(1, 2), np.array(0), values])
    fails("OneHot", [indices, np.array(-1), values], match="depth")
    fails("OneHot", [indices, i64(1, 2), values], match="depth")
    fails("OneHot", [indices, np.array(np.nan, np.float32), values], match="depth")
    fails("OneHot", [indices, np.array(3), i64(1, 2, 3)], match="values must be")
    fails("OneHot", [indices, np.array(3), values], {"axis": 2})
    x = TensorType(INT64, ("N", 4))
    pair = float_type(2)
    assert infer("OneHot", [x, np.array(3), pair], {"axis": 1}) == [float_type("N", 3, 4)]
    assert shape_of("OneHot", [x, TensorType(INT64, (), ("C",)), pair]) == ("N", 4, "C")
    assert shape_of("OneHot", [x, TensorType(INT64), pair]) == ("N", 4, None)


@pytest.mark.parametrize("upper", [0, 1])
@pytest.mark.parametrize("k", [None, -4, -1, 0, 1, 2, 9])
def test_trilu_matches_the_reference(upper: int, k: int | None) -> None:
    for x in (f32(3, 4) + 1, f32(2, 4, 3) + 1, f32(4, 3).T + 1, np.ones((2, 0, 3), np.float32)):
        inputs = [x] if k is None else [x, np.array(k)]
        want = (np.triu if upper else np.tril)(x, k or 0)
        attrs = {"upper": upper}
        check_node("Trilu", inputs, attrs, expected=[want])
        if k is not None:
            check_node("Trilu", inputs, attrs, expected=[want], constants=(1,))


def test_trilu_of_edge_cases_matches_the_definition() -> None:
    x = np.array([[np.nan, np.inf], [np.inf, np.nan]], np.float32)
    check_node("Trilu", [x])
    check_node("Trilu", [np.ones((2, 2), np.bool_)])
    check_node("Trilu", [f32(2, 2).astype(ml_dtypes.bfloat16)])
    for dtype in (np.float64, np.float16, np.int8, np.uint16):
        check_node("Trilu", [(f32(2, 3) + 1).astype(dtype)])
    words = np.array([["a", "b"], ["c", "d"]], object)
    want = np.array([["a", "b"], ["", "d"]], object)
    check_node("Trilu", [words], expected=[want])
    for dtype in (np.complex64, np.complex128):
        x = f32(2, 3).astype(dtype) + 1j
        check_node("Trilu", [x], expected=[np.triu(x)])
    fails("Trilu", [f32(2)], match="the input must have rank")
    assert infer("Trilu", [float_type("N", 3)]) == [float_type("N", 3)]
