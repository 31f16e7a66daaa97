"""ArgMax, ArgMin and TopK."""

from __future__ import annotations

import math
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from penstock.core.types import INT64, ShapeError, TensorType
from penstock.ops import find
from tests.ops.harness import check_node

BF16 = np.dtype(ml_dtypes.bfloat16)
DTYPES = ["u1", "u2", "u4", "u8", "i1", "i2", "i4", "i8", "f2", "f4", "f8", BF16]
F32 = np.dtype("f4")


def few(*shape: int, dtype: Any, seed: int = 0) -> np.ndarray:
    """Elements with many ties, at both ends of the dtype where it is one of integers."""
    dtype = np.dtype(dtype)
    rng = np.random.default_rng(seed)
    if dtype.kind in "iu":
        info = np.iinfo(dtype)
        pool = np.array([info.min, info.min + 1, 0, 1, 5, info.max - 1, info.max], dtype)
    else:
        pool = np.array([-math.inf, -2, -1, -0.0, 0.0, 1, 2, math.inf], dtype)
    return pool[rng.integers(0, len(pool), shape)]


# ArgMax, ArgMin


@pytest.mark.parametrize("op", ["ArgMax", "ArgMin"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("last", [0, 1])
def test_arg_max_and_arg_min_match_the_reference(op: str, dtype: Any, last: int) -> None:
    x = few(3, 4, 5, dtype=dtype)
    find_place = np.argmax if op == "ArgMax" else np.argmin
    for axis in (0, 1, -1):
        flipped = np.flip(x, axis) if last else x
        wanted = np.expand_dims(find_place(flipped, axis), axis)
        wanted = x.shape[axis] - 1 - wanted if last else wanted
        for keepdims in (0, 1):
            attrs = {"axis": axis, "keepdims": keepdims, "select_last_index": last}
            result = wanted if keepdims else wanted.squeeze(axis)
            check_node(op, [x], attrs, expected=[result])


def test_arg_extremes_by_default_and_of_a_scalar() -> None:
    check_node("ArgMax", [few(3, 4, dtype="f4")])
    check_node("ArgMax", [np.array(3, np.float32)], expected=[np.array(0)])
    check_node("ArgMin", [few(3, 4, dtype="f4")], expected="ort", opset=11)


def test_arg_extremes_of_empty_axis_are_refused() -> None:
    x = np.zeros((0, 3), np.float32)
    check_node("ArgMax", [x], {"axis": 1}, expected=[np.zeros((0, 1), np.int64)])
    with pytest.raises(ShapeError, match="must not have dim"):
        check_node("ArgMax", [x], {"axis": 0}, expected=[])


def test_arg_extremes_axis_out_of_range_is_refused() -> None:
    with pytest.raises(ShapeError, match="out of range"):
        check_node("ArgMax", [few(2, 3, dtype="f4")], {"axis": 2}, expected=[])


# TopK


def sorted_places(x: np.ndarray, k: int, axis: int, largest: int) -> np.ndarray:
    """By Python's stable sort, one line after the other."""
    moved = np.moveaxis(x, axis, -1)
    lines = moved.reshape(-1, moved.shape[-1]).astype(object)
    sign = -1 if largest else 1
    found = [sorted(range(len(line)), key=lambda i: sign * line[i])[:k] for line in lines]
    result = np.array(found, np.int64).reshape(*moved.shape[:-1], k)
    return np.moveaxis(result, -1, axis)


def check_top(x: np.ndarray, k: int, axis: int = -1, largest: int = 1, **attrs: int) -> None:
    places = sorted_places(x, k, axis, largest)
    check_node(
        "TopK",
        [x, np.array([k])],
        {"axis": axis, "largest": largest, **attrs},
        expected=[np.take_along_axis(x, places, axis), places],
        outputs=2,
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("largest", [0, 1])
def test_top_k_matches_the_definition(dtype: Any, largest: int) -> None:
    for shape, axis in (((4, 5), -1), ((3, 30, 4), 1), ((50, 3), 0), ((200,), 0)):
        x = few(*shape, dtype=dtype)
        n = shape[axis]
        for k in (0, 1, 3, n - 1, n):
            check_top(x, k, axis, largest)


@pytest.mark.parametrize("largest", [0, 1])
@pytest.mark.parametrize("n", [5, 1000])
def test_top_k_nan_is_the_greatest(largest: int, n: int) -> None:
    x = np.random.default_rng(0).standard_normal(n).astype(np.float32)
    x[[1, 3]] = math.nan
    x[3] = -x[3]  # sets the sign
    x[0] = math.inf
    inputs = [x, np.array([n])]
    model = {"axis": 0, "largest": largest}
    order = np.argsort(x, kind="stable")
    if largest:
        order = np.concatenate([[1, 3], order[:-2][::-1]])
    wanted = [x[order], order]
    check_node("TopK", inputs, model, expected=wanted, outputs=2)


def test_top_k_of_distinct_floats_equals_onnx_runtime() -> None:
    x = np.random.default_rng(0).permutation(3000).astype(np.float32).reshape(3, 1000) - 1500
    check_node("TopK", [x, np.array([17])], expected="ort", outputs=2, opset=11)
    check_top(x, 17)
    check_node("TopK", [x, np.array([4])], expected="ort", outputs=2, opset=10)


def test_top_k_unsorted_is_sorted_too() -> None:
    check_top(few(3, 40, dtype="f4"), 7, sorted=0)


def test_top_k_with_one_output_only() -> None:
    x = few(3, 40, dtype="f4")
    places = sorted_places(x, 5, -1, 1)
    inputs = [x, np.array([5])]
    check_node("TopK", inputs, expected=[places], outputs=[False, True])
    values = [np.take_along_axis(x, places, -1)]
    check_node("TopK", inputs, expected=values, outputs=[True, False])


def test_top_k_of_empty_axis_is_empty() -> None:
    x = np.zeros((0, 5), np.float32)
    empty = np.zeros((0, 2), np.int64)
    check_node("TopK", [x, np.array([2])], expected=[x[:, :2], empty], outputs=2)


@pytest.mark.parametrize("k", [-1, 6])
def test_top_k_of_too_many_is_refused(k: int) -> None:
    with pytest.raises(ShapeError, match="it must be from"):
        check_node("TopK", [few(2, 5, dtype="f4"), np.array([k])], expected=[], outputs=2)


# Inference


def infer(op: str, *types: Any, **attrs: Any) -> Any:
    found = find(op)
    assert found is not None
    return found.infer(types, attrs, [None] * len(types))


def test_arg_max_and_arg_min_infer_their_types() -> None:
    x = TensorType(F32, ("n", 3))
    assert infer("ArgMax", x) == (TensorType(INT64, (1, 3)),)
    assert infer("ArgMax", x, axis=-1, keepdims=0) == (TensorType(INT64, ("n",)),)
    assert infer("ArgMax", TensorType(F32)) == (TensorType(INT64),)
    with pytest.raises(ShapeError, match="out of range"):
        infer("ArgMax", x, axis=2)


def test_top_k_infers_its_types() -> None:
    x = TensorType(F32, ("n", 3))
    k = TensorType(INT64, (1,), (2,))
    assert infer("TopK", x, k) == (TensorType(F32, ("n", 2)), TensorType(INT64, ("n", 2)))
    named = TensorType(INT64, (1,), ("k",))
    assert infer("TopK", x, named, axis=0)[1].shape == ("k", 3)
    assert infer("TopK", x, TensorType(INT64, (1,)))[0].shape == ("n", None)
    assert infer("TopK", TensorType(F32), k)[0].shape is None
    for wrong in (4, -1):
        with pytest.raises(ShapeError, match="it must be from"):
            infer("TopK", x, TensorType(INT64, (1,), (wrong,)))
    with pytest.raises(ShapeError, match="rank"):
        infer("TopK", TensorType(F32, ()), k)
