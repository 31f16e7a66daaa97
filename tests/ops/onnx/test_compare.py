"""Comparisons, logic, bits and selection."""

from __future__ import annotations

import math
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from penstock.core.types import BOOL, STRING, ShapeError, TensorType
from penstock.ops import find
from tests.ops.harness import check_node

BF16 = np.dtype(ml_dtypes.bfloat16)
I64 = np.dtype(np.int64)
INTEGERS = ["u1", "u2", "u4", "u8", "i1", "i2", "i4", "i8"]
FLOATS = ["f2", "f4", "f8", BF16]


def values(*shape: int, dtype: Any, seed: int = 0) -> np.ndarray:
    return np.asarray(np.random.default_rng(seed).integers(0, 5, shape)).astype(dtype)


COMPARISONS = {
    "Equal": np.equal,
    "Less": np.less,
    "LessOrEqual": np.less_equal,
    "Greater": np.greater,
    "GreaterOrEqual": np.greater_equal,
}


@pytest.mark.parametrize("op", list(COMPARISONS))
@pytest.mark.parametrize("dtype", [*INTEGERS, *FLOATS])
def test_comparisons_of_every_dtype_equal_numpy(op: str, dtype: Any) -> None:
    for shapes in (((3, 4), (3, 4)), ((2, 1, 4), (3, 1)), ((), ()), ((0, 2), (2,))):
        a, b = (values(*s, dtype=dtype, seed=i) for i, s in enumerate(shapes))
        check_node(op, [a, b], expected=[np.asarray(COMPARISONS[op](a, b))])


@pytest.mark.parametrize("op", list(COMPARISONS))
def test_nan_compares_to_nothing(op: str) -> None:
    x = np.array([math.nan, math.inf, 0], np.float32)
    y = np.array([math.nan, math.inf, -0.0], np.float32)
    check_node(op, [x, y], expected=[COMPARISONS[op](x, y)])


def test_equality_of_strings_and_truth_values() -> None:
    a, b = np.array(["x", "y", ""], object), np.array(["x", "z", ""], object)
    check_node("Equal", [a, b], expected=[np.array([True, False, True])])
    check_node("Equal", [a, b[:1]], expected=[np.array([True, False, False])])
    check_node("Equal", [np.array([True, False]), np.array([True, True])])


@pytest.mark.parametrize("op", ["And", "Or", "Xor"])
def test_logical_operations_equal_numpy(op: str) -> None:
    a, b = (values(3, 4, dtype=bool, seed=i) for i in (0, 1))
    check_node(op, [a, b])
    check_node(op, [a, b[0]])
    check_node("Not", [a])
    check_node("Not", [np.array(True)])


@pytest.mark.parametrize("op", ["BitwiseAnd", "BitwiseOr", "BitwiseXor"])
@pytest.mark.parametrize("dtype", INTEGERS)
def test_bitwise_operations_equal_numpy(op: str, dtype: str) -> None:
    a, b = (values(3, 4, dtype=dtype, seed=i) for i in (0, 1))
    function = {"BitwiseAnd": np.bitwise_and, "BitwiseOr": np.bitwise_or}
    check_node(op, [a, b[0]], expected=[function.get(op, np.bitwise_xor)(a, b[0])])
    check_node("BitwiseNot", [a], expected=[np.invert(a)])


@pytest.mark.parametrize("dtype", INTEGERS)
def test_bit_shifts_of_every_amount_equal_numpy(dtype: str) -> None:
    x, y = np.array([16, 4, 1, 100], dtype), np.array([1, 2, 3, 0], dtype)
    left, right = np.array([32, 16, 8, 100], dtype), np.array([8, 1, 0, 100], dtype)
    check_node("BitShift", [x, y], {"direction": "LEFT"}, expected=[left])
    check_node("BitShift", [x, y], {"direction": "RIGHT"}, expected=[right])


def test_shifts_out_of_range_leave_the_sign() -> None:
    x = np.array([5, -5, 5, -5, -5], np.int8)
    y = np.array([8, 8, -1, -1, 100], np.int8)
    right = np.array([0, -1, 0, -1, -1], np.int8)
    check_node("BitShift", [x, y], {"direction": "RIGHT"}, expected=[right])
    check_node("BitShift", [x, y], {"direction": "LEFT"}, expected=[np.zeros(5, np.int8)])
    high = np.array([0x55], np.int8)
    moved = np.array([-86], np.int8)  # a bit moves into the sign
    check_node("BitShift", [high, np.array([1], np.int8)], {"direction": "LEFT"}, expected=[moved])


FLOAT8 = [
    *(ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e4m3fnuz),
    *(ml_dtypes.float8_e5m2, ml_dtypes.float8_e5m2fnuz),
]


@pytest.mark.parametrize("dtype", [*FLOATS, *FLOAT8])
def test_is_nan_and_is_inf_find_special_values(dtype: Any) -> None:
    x = np.array([math.nan, 1, -2, math.inf, -math.inf, 0], dtype)
    wide = x.astype(np.float32)
    check_node("IsNaN", [x], expected=[np.isnan(wide)])
    for positive in (0, 1):
        for negative in (0, 1):
            wanted = (wide == math.inf) & bool(positive) | (wide == -math.inf) & bool(negative)
            attrs = {"detect_positive": positive, "detect_negative": negative}
            check_node("IsInf", [x], attrs, expected=[wanted])


# Where

ALL = [*INTEGERS, *FLOATS, "?", "c8", "c16"]


@pytest.mark.parametrize("dtype", ALL)
@pytest.mark.parametrize(
    "shapes",
    [
        ((3, 4), (3, 4), (3, 4)),
        ((3, 1), (4,), ()),
        ((), (2, 3), (1, 3)),
        ((), (), ()),
        ((0, 1), (3,), (1, 3)),
        ((1, 1, 200), (3, 40, 1), ()),
        ((3, 100, 100), (3, 100, 100), (3, 100, 100)),
    ],
)
def test_where_matches_the_reference(dtype: Any, shapes: tuple[tuple[int, ...], ...]) -> None:
    c = values(*shapes[0], dtype=np.int64, seed=2) > 2
    x, y = (values(*s, dtype=dtype, seed=i) for i, s in enumerate(shapes[1:]))
    check_node("Where", [c, x, y], expected=[np.where(c, x, y)])


def test_where_keeps_bits() -> None:
    x = np.array([math.nan, -0.0, math.inf, 1e-45] * 5000, np.float32)
    c = np.arange(x.size) % 3 == 0
    (got,) = check_node("Where", [c, x, -x], expected=[np.where(c, x, -x)])
    np.testing.assert_array_equal(got.view(np.int32), np.where(c, x, -x).view(np.int32))


def test_where_of_strings_matches_the_reference() -> None:
    a, b = np.array(["x", "y"], object), np.array("z", object)
    wanted = np.array(["x", "z"], object)
    check_node("Where", [np.array([True, False]), a, b], expected=[wanted])


# Inference


def infer(op: str, *types: Any) -> TensorType:
    found = find(op)
    assert found is not None
    kind = found.infer(types, {}, [None] * len(types))[0]
    assert isinstance(kind, TensorType)
    return kind


def known(*data: Any) -> TensorType:
    return TensorType(I64, (len(data),), data)


def test_comparisons_infer_contents() -> None:
    kind = infer("Equal", known(1, 2, "n", "n", "n", None), known(1, 3, "n", -1, 2, -1))
    assert kind.dtype == BOOL
    assert kind.data == (1, 0, 1, 0, None, None)


def test_where_infers_contents() -> None:
    condition = TensorType(BOOL, (4,), (1, 0, None, None))
    assert infer("Where", condition, known("a", 2, 3, 4), known(5, "b", 3, 7)).data == (
        *("a", "b", 3, None),
    )


def test_where_infers_the_shape_of_an_expand_with_minus_ones() -> None:
    """Exporters write ``Where(Equal(shape, -1), given, shape)``."""
    shape = known("batch", -1, 64)
    kind = infer("Where", infer("Equal", shape, known(-1, -1, -1)), known(9, 9, 9), shape)
    assert kind.data == ("batch", 9, 64)


def test_comparisons_and_where_infer_types() -> None:
    x = TensorType(np.dtype("f4"), ("n", 3))
    assert infer("Less", x, TensorType()) == TensorType(BOOL, None)
    assert infer("IsNaN", x) == TensorType(BOOL, ("n", 3))
    assert infer("Where", TensorType(BOOL, ("n", 1)), x, x) == x
    assert infer("Equal", TensorType(STRING, (2,)), TensorType(STRING, ())).dtype == BOOL


@pytest.mark.parametrize("op", ["Less", "And", "BitwiseOr"])
def test_shapes_and_dtypes_that_do_not_fit(op: str) -> None:
    with pytest.raises(ShapeError, match="do not broadcast"):
        infer(op, TensorType(I64, (2,)), TensorType(I64, (3,)))
    with pytest.raises(ShapeError, match="different dtypes"):
        infer(op, TensorType(I64, ()), TensorType(np.dtype("i4"), ()))


def test_where_of_shapes_that_do_not_broadcast_raises() -> None:
    x, y = TensorType(I64, (2,)), TensorType(np.dtype("f4"), (2,))
    with pytest.raises(ShapeError, match="different dtypes"):
        infer("Where", TensorType(BOOL, (2,)), x, y)
    with pytest.raises(ShapeError, match="do not broadcast"):
        infer("Where", TensorType(BOOL, (3,)), x, x)
