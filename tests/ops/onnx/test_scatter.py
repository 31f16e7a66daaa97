"""Scatter, ScatterElements, ScatterND, TensorScatter."""

from typing import Any

import ml_dtypes
import numpy as np
import pytest

from penstock.core.types import INT64, ShapeError, TensorType
from penstock.ir.graph import Node, Value
from penstock.ops.registry import standard
from tests.ops.cases import F32, f32, fails, float_type, i64, infer, shape_of
from tests.ops.harness import check_node

REDUCTIONS = ["none", "add", "mul", "max", "min"]


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("axis", [0, 1, -1])
@pytest.mark.parametrize("dtype", [np.float32, np.int64, np.float16, ml_dtypes.bfloat16])
def test_scatter_elements_matches_the_reference(reduction: str, axis: int, dtype: Any) -> None:
    attrs = {"axis": axis, "reduction": reduction}
    indices = np.array([[0, -1], [2, 1]])
    if reduction != "none":
        indices = np.array([[0, 0], [-3, 1]])
    x, updates = f32(3, 3).astype(dtype), (f32(2, 2) + 5).astype(dtype)
    want = x.copy()
    apply = {"none": lambda a, b: b, "add": np.add, "mul": np.multiply} | {
        "max": np.maximum,
        "min": np.minimum,
    }
    for at in np.ndindex(indices.shape):
        to = tuple(indices[at] if i == axis % 2 else at[i] for i in range(2))
        want[to] = apply[reduction](want[to], updates[at])
    check_node("ScatterElements", [x, indices, updates], attrs, expected=[want])
    check_node(
        "ScatterElements", [x.T.copy().T, indices.astype(np.int32), updates], attrs, expected=[want]
    )


def test_scatter_elements_of_edge_cases_matches_the_definition() -> None:
    check_node(
        "Scatter", [f32(1, 5), np.array([[1, 3]]), f32(1, 2)], {"axis": 1}, opset=9, expected="ort"
    )
    check_node("ScatterElements", [f32(4), i64(3, -4), f32(2)])
    check_node("ScatterElements", [f32(4), i64(), f32(0)])
    check_node("ScatterElements", [f32(4), i64(), f32(0)], {"reduction": "add"})
    words = np.array(["a", "b"], object)
    check_node("ScatterElements", [words, i64(1), np.array(["c"], object)])
    nans = np.array([np.nan, 1, np.inf], np.float32)
    want = np.array([np.nan, np.nan, np.inf], np.float32)
    check_node("ScatterElements", [nans, i64(1, 1, 0), nans], {"reduction": "max"}, expected=[want])
    for reduction in ("none", "add"):
        attrs = {"reduction": reduction}
        error = (
            ("invalid entry in coordinates array", ShapeError)
            if reduction == "add"
            else ("of bounds", IndexError)
        )
        fails("ScatterElements", [f32(3), i64(3), f32(1)], attrs, *error)
        fails("ScatterElements", [f32(3), i64(-4), f32(1)], attrs, *error)
        longer = [f32(2, 2), np.zeros((3, 1), np.int64), f32(3, 1)]
        fails("ScatterElements", longer, {"axis": 1, **attrs}, *error)
        fails("ScatterElements", [f32(3), i64(0, 1), f32(1)], attrs, "updates")
        fails("ScatterElements", [f32(3, 3), i64(0), f32(1)], attrs, "but indices rank")
    fails("ScatterElements", [f32(3), i64(0), f32(1)], {"reduction": "mean"}, "none of")


def test_scatter_infers_its_types() -> None:
    x = float_type("N", 3)
    index = TensorType(INT64, (2, "M"))
    assert infer("ScatterElements", [x, index, float_type(2, "M")]) == [x]
    assert infer("ScatterND", [x, index, TensorType(F32)]) == [x]
    assert shape_of("ScatterND", [TensorType(F32), index, x]) is None
    with pytest.raises(ShapeError):
        infer("ScatterElements", [x, index, float_type(3, "M")])
    with pytest.raises(ShapeError):
        infer("ScatterND", [x, TensorType(INT64, (5, 1)), float_type(5, 4)])
    with pytest.raises(ShapeError):
        infer("ScatterND", [x, TensorType(INT64, (5, 3)), float_type(5)])


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("dtype", [np.float32, np.int32, ml_dtypes.bfloat16])
def test_scatter_nd_matches_the_reference(reduction: str, depth: int, dtype: Any) -> None:
    x = f32(2, 3, 4).astype(dtype)
    rows = [[0, 1, 2], [1, -1, -4], [0, 2, 2]] if reduction != "none" else [[0, 1, 2], [1, -1, -4]]
    indices = np.array([row[:depth] for row in rows])
    updates = (f32(len(rows), *x.shape[depth:]) + 1).astype(dtype)
    want = x.copy()
    for index, update in zip(indices, updates, strict=True):
        at = tuple(index)
        want[at] = {
            "none": lambda a, b: b,
            "add": np.add,
            "mul": np.multiply,
            "max": np.maximum,
            "min": np.minimum,
        }[reduction](want[at], update)
    check_node("ScatterND", [x, indices, updates], {"reduction": reduction}, expected=[want])


def test_scatter_nd_of_edge_cases_matches_the_definition() -> None:
    check_node("ScatterND", [f32(4), np.empty((0, 1), np.int64), f32(0)])
    check_node("ScatterND", [f32(4), i64(2), np.float32(9).reshape(())])
    words = np.array(["a", "b"], object)
    check_node("ScatterND", [words, np.array([[1]]), np.array(["c"], object)])
    for reduction in ("none", "mul"):
        attrs = {"reduction": reduction}
        error = (
            ("invalid entry in coordinates array", ShapeError)
            if reduction == "mul"
            else ("of bounds", IndexError)
        )
        fails("ScatterND", [f32(2, 2), np.array([[2, 0]]), f32(1)], attrs, *error)
        fails("ScatterND", [f32(2, 2), np.array([[0]]), f32(1, 3)], attrs, "updates")
        fails("ScatterND", [f32(2, 2), np.array([[0, 0, 0]]), f32(1)], attrs)


def test_scatter_large_takes_memory_over() -> None:
    x = f32(100, 100)
    indices, updates = np.array([[3], [5]]), f32(2, 100)
    want = x.copy()
    want[[3, 5]] = updates
    check_node("ScatterND", [x, indices, updates], expected=[want])


@pytest.mark.parametrize("mode", ["linear", "circular"])
def test_tensor_scatter_matches_the_reference(mode: str) -> None:
    cache, update = f32(2, 3, 4, 5), -f32(2, 3, 2, 5)
    check_node("TensorScatter", [cache, update], {"mode": mode})
    starts = i64(1, 2) if mode == "linear" else i64(3, 6)
    check_node("TensorScatter", [cache, update, starts], {"mode": mode})
    flat = [f32(2, 5), -f32(2, 2), i64(0, 3)]
    check_node("TensorScatter", flat, {"axis": 1, "mode": mode})


def test_tensor_scatter_of_edge_cases_matches_the_definition() -> None:
    cache = f32(2, 4, 3)
    fails(
        "TensorScatter",
        [cache, f32(2, 2, 3), i64(0, 3)],
        match="at write_indices exceeds the cache of",
    )
    fails(
        "TensorScatter",
        [cache, f32(2, 2, 3), i64(0, -1)],
        match="at write_indices exceeds the cache of",
    )
    fails("TensorScatter", [cache, f32(2, 5, 3)], match="length 5")
    fails("TensorScatter", [cache, f32(2, 2, 4)], match="update has shape")
    fails("TensorScatter", [cache, f32(2, 2, 3), i64(0)], match="write_indices has shape")
    fails("TensorScatter", [cache, f32(2, 2, 3)], {"axis": 0}, "batch")
    kinds = infer("TensorScatter", [float_type("N", 4, 3), float_type("N", 1, 3)])
    assert kinds == [float_type("N", 4, 3)]


def test_scatter_takes_the_last_of_places_that_are_named_twice_in_any_order_of_memory() -> None:
    node = Node(standard("ScatterElements"), [Value("x"), Value("i"), Value("u")], [Value("y")])
    node.attrs = {"axis": 1}
    backwards = np.arange(6.0)[::-1][None], np.zeros((1, 6), np.int64)[:, ::-1]
    x, updates, indices = np.zeros((1, 2)), backwards[0], backwards[1]
    kernel = node.op.compile(node, [None, None, None])
    assert kernel.function(x, indices, updates).tolist() == [[0.0, 0.0]]
    assert kernel.function(x, indices.copy(), updates[:, ::-1]).tolist() == [[5.0, 0.0]]
