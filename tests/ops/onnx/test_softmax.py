"""Softmax, LogSoftmax and Hardmax, in their present and in their old meaning."""

from __future__ import annotations

import math
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from penstock.core.types import ShapeError, TensorType
from penstock.ops import find
from tests.ops.harness import check_node

BF16 = np.dtype(ml_dtypes.bfloat16)
F32, F64, F16 = np.dtype("f4"), np.dtype("f8"), np.dtype("f2")
TOLERANCE = {F32: 1e-6, F64: 1e-13, F16: 1e-3, BF16: 8e-3}
OPS = ["Softmax", "LogSoftmax", "Hardmax"]


def normal(*shape: int, dtype: Any = np.float32) -> np.ndarray:
    return np.asarray(3 * np.random.default_rng(0).standard_normal(shape), dtype)


def exact(op: str, x: np.ndarray, axis: int) -> np.ndarray:
    wide = x.astype(np.float64)
    if op == "Hardmax":
        places = np.expand_dims(wide.argmax(axis), axis)
        result = np.zeros_like(wide)
        np.put_along_axis(result, places, 1, axis)
        return result
    shifted = wide - wide.max(axis, keepdims=True)
    sums = np.exp(shifted).sum(axis, keepdims=True)
    return shifted - np.log(sums) if op == "LogSoftmax" else np.exp(shifted) / sums


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("dtype", [F32, F64, F16, BF16])
@pytest.mark.parametrize(
    ("shape", "axis"),
    [
        *[((3, 4, 5), axis) for axis in (0, 1, 2, -1, -3)],
        *[((7,), 0), ((1, 9), 1), ((20, 9), 1), ((20, 9), 0), ((300, 700), -1), ((4, 1), 1)],
    ],
)
def test_softmax_along_axis_matches_the_reference(
    op: str, dtype: Any, shape: tuple[int, ...], axis: int
) -> None:
    x = normal(*shape, dtype=dtype)
    close = TOLERANCE[dtype]
    wanted = exact(op, x, axis).astype(dtype)
    check_node(op, [x], {"axis": axis}, expected=[wanted], rtol=4 * close, atol=close / 4)


@pytest.mark.parametrize("op", OPS)
def test_softmax_default_axis_is_the_last(op: str) -> None:
    x = normal(2, 3, 4)
    check_node(op, [x], expected=[exact(op, x, -1).astype(F32)])


@pytest.mark.parametrize("op", OPS)
def test_softmax_transposed_memory_matches_the_reference(op: str) -> None:
    x = normal(40, 30).T
    check_node(op, [x], expected=[exact(op, x, -1).astype(F32)])


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("shape", [(0, 3), (3, 0), (2, 0, 4)])
def test_softmax_empty_matches_the_reference(op: str, shape: tuple[int, ...]) -> None:
    x = np.zeros(shape, np.float32)
    for axis in range(len(shape)):
        check_node(op, [x], {"axis": axis}, expected=[x])
    check_node(op, [x], {"axis": 1}, expected=[x], opset=11)


@pytest.mark.parametrize("rows", [1, 50])
def test_softmax_extreme_values_matches_the_reference(rows: int) -> None:
    inf, nan = math.inf, math.nan
    x = np.array([[1e30, -1e30, 1e30], [-inf, 0, -inf], [nan, 0, 1], [-inf] * 3] * rows, F32)
    wanted = np.array([[0.5, 0, 0.5], [0, 1, 0], [nan] * 3, [nan] * 3] * rows, F32)
    check_node("Softmax", [x], expected=[wanted])
    check_node("Softmax", [x.T.copy()], {"axis": 0}, expected=[wanted.T])
    log = np.log(wanted)
    log[::4] = [-math.log(2), -2e30, -math.log(2)]
    check_node("LogSoftmax", [x], expected=[log])


def test_softmax_float16_sums_do_not_overflow_or_stall() -> None:
    x = np.zeros((2, 100_000), np.float16)
    check_node("Softmax", [x], expected=[np.full_like(x, 1e-5)], rtol=1e-2, atol=0)
    wanted = np.full_like(x, -math.log(100_000))
    check_node("LogSoftmax", [x], expected=[wanted], rtol=1e-3)


def test_hardmax_marks_the_first_of_equals() -> None:
    x = np.array([[1, 3, 3], [2, 2, 2]], np.float32)
    check_node("Hardmax", [x], expected=[np.array([[0, 1, 0], [1, 0, 0]], np.float32)])


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("opset", [1, 11, 12])
@pytest.mark.parametrize("axis", [None, 0, 1, 2])
def test_softmax_before_version_13_joins_trailing_axes(
    op: str, opset: int, axis: int | None
) -> None:
    x = normal(2, 3, 4)
    first = 1 if axis is None else axis
    flat = x.reshape(math.prod(x.shape[:first]), -1)
    wanted = exact(op, flat, 1).reshape(x.shape).astype(F32)
    attrs = {} if axis is None else {"axis": axis}
    check_node(op, [x], attrs, expected=[wanted], opset=opset)


def test_softmax_negative_axis_before_version_13() -> None:
    x = normal(2, 3, 4)
    check_node("Softmax", [x], {"axis": -1}, opset=11)
    check_node("Softmax", [x], {"axis": -2}, expected="ort", opset=11)


def test_softmax_like_onnx_runtime() -> None:
    for op in OPS:
        for opset in (11, 13):
            check_node(op, [normal(3, 8, 10)], {"axis": 1}, expected="ort", opset=opset)


@pytest.mark.parametrize("version", [11, 13])
def test_softmax_axis_out_of_range_is_refused(version: int) -> None:
    op = find("Softmax", "", version)
    assert op is not None
    kind = TensorType(F32, ("n", 3))
    assert op.infer([kind], {"axis": 1}, [None])[0] == kind
    with pytest.raises(ShapeError, match="out of range"):
        op.infer([kind], {"axis": 3}, [None])
    with pytest.raises(ShapeError, match="out of range"):
        check_node("Softmax", [normal(2, 3)], {"axis": 5}, expected=[], opset=version)
