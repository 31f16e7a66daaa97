"""Tile, Concat, Split, DepthToSpace, SpaceToDepth."""

from typing import Any

import ml_dtypes
import numpy as np
import pytest

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
    run,
    shape_of,
)
from tests.ops.harness import check_node


@pytest.mark.parametrize("repeats", [(1, 1), (2, 3), (0, 2), (3, 1)])
def test_tile_matches_the_reference(repeats: tuple[int, ...]) -> None:
    check_both("Tile", [f32(2, 3), i64(*repeats)])
    check_both("Tile", [f32(3, 4)[:, ::2].T, i64(*repeats)])


def test_tile_of_edge_cases_matches_the_definition() -> None:
    check_both("Tile", [np.array(["a", "b"], object), i64(2)])
    check_both("Tile", [f32(2, 0), i64(2, 2)])
    check_both("Tile", [np.float32(1).reshape(()), i64()])
    check_both("Tile", [f32(2, 2).astype(ml_dtypes.bfloat16), i64(2, 1)])
    fails("Tile", [f32(2, 3), i64(2)], match="repeats")
    fails("Tile", [f32(2), i64(-1)], match="negative")


def test_tile_infers_its_types() -> None:
    x = float_type("N", 1, 4, None)
    assert shape_of("Tile", [x, int_type(1, "M", 2, 2)]) == ("N", "M", 8, None)
    assert shape_of("Tile", [x, int_type(None, 0, 1, 1)]) == (None, 0, 4, None)
    assert shape_of("Tile", [x, TensorType(INT64, (4,))]) == (None,) * 4
    assert shape_of("Tile", [TensorType(F32), i64(1, 2)]) == (None, None)
    assert data_of("Tile", [int_type("N", 2), i64(2)]) == ("N", 2, "N", 2)
    with pytest.raises(ShapeError):
        infer("Tile", [x, i64(1)])


@pytest.mark.parametrize("axis", [0, 1, -1, -2])
@pytest.mark.parametrize("count", [1, 2, 3])
def test_concat_matches_the_reference(axis: int, count: int) -> None:
    inputs = [f32(*[n + 1 if i == axis % 2 else 3 for i in range(2)]) + n for n in range(count)]
    check_node("Concat", inputs, {"axis": axis})


def test_concat_dtypes_and_of_edge_cases_matches_the_definition() -> None:
    check_node("Concat", [f32(0, 2), f32(3, 2)], {"axis": 0})
    check_node("Concat", [np.array(["a"], object), np.array(["b", "c"], object)], {"axis": 0})
    for dtype in (ml_dtypes.bfloat16, np.bool_, np.float16):
        check_node("Concat", [f32(2).astype(dtype)] * 3, {"axis": 0})
    # The first version has a default axis.
    check_node(
        "Concat", [f32(2, 1), f32(2, 2)], opset=1, expected=[np.hstack([f32(2, 1), f32(2, 2)])]
    )
    fails("Concat", [f32(2, 3), f32(3, 2)], {"axis": 0}, "must match exactly", ValueError)
    fails("Concat", [f32(2), f32(2)], {"axis": 1}, "out of bounds|out of range", ValueError)
    fails("Concat", [np.float32(1).reshape(())] * 2, {"axis": 0}, "zero-dim", ValueError)


def test_concat_infers_its_types() -> None:
    a, b = float_type("N", 3, None), float_type(None, 4, 8)
    assert shape_of("Concat", [a, b], {"axis": 1}) == ("N", 7, 8)
    assert shape_of("Concat", [a, float_type(2, None, 8)], {"axis": -2}) == (2, None, 8)
    assert shape_of("Concat", [a, TensorType(F32)], {"axis": 1}) == ("N", None, None)
    assert shape_of("Concat", [float_type("N"), float_type(0)], {"axis": 0}) == ("N",)
    parts = [int_type("N"), i64(3), TensorType(INT64, (2,)), int_type(None)]
    assert data_of("Concat", parts, {"axis": 0}) == ("N", 3, None, None, None)
    assert data_of("Concat", [int_type("N"), TensorType(INT64, (None,))], {"axis": 0}) is None
    assert data_of("Concat", [TensorType(INT64, (1,))] * 2, {"axis": 0}) is None
    assert data_of("Concat", [int_type(*[1] * 100)] * 2, {"axis": 0}) is None
    with pytest.raises(ShapeError, match="axis 2 differs"):
        infer("Concat", [float_type(1, 2, 3), float_type(1, 2, 4)], {"axis": 1})
    with pytest.raises(ShapeError, match="different dtypes"):
        infer("Concat", [float_type(1), int_type(1)], {"axis": 0})


@pytest.mark.parametrize("axis", [0, 1, -1])
def test_split_evenly_matches_the_reference(axis: int) -> None:
    check_node("Split", [f32(6, 6)], {"axis": axis, "num_outputs": 3}, outputs=3)
    check_node("Split", [f32(7, 7)], {"axis": axis, "num_outputs": 3}, outputs=3)
    check_node("Split", [f32(2, 2)], {"axis": axis, "num_outputs": 1}, outputs=1)


def test_split_by_sizes_matches_the_reference() -> None:
    check_both("Split", [f32(6, 2), i64(1, 0, 5)], outputs=3)
    check_both("Split", [f32(2, 6), i64(2, 4)], {"axis": -1}, outputs=2)
    check_both("Split", [f32(2, 6), i64(6)], {"axis": 1})
    check_both("Split", [np.array(["a", "b"], object), i64(1, 1)], outputs=2)
    check_node("Split", [f32(4, 2), i64(1, 3)], outputs=[False, True], expected=[f32(4, 2)[1:]])
    # Without either, the number of outputs counts.
    check_node("Split", [f32(6)], outputs=3, opset=13, expected=list(f32(6).reshape(3, 2)))


def test_split_with_bad_inputs_is_refused() -> None:
    fails("Split", [f32(6), i64(1, 2)], match="add up", outputs=2)
    fails("Split", [f32(6), i64(7, -1)], match="negative", outputs=2)
    fails("Split", [f32(6), i64(2, 2, 2)], match="outputs", outputs=2)
    fails("Split", [f32(5)], {"num_outputs": 4}, "only the last", outputs=4)
    fails("Split", [f32(5)], {"axis": 1, "num_outputs": 1})


def test_split_infers_its_types() -> None:
    x = float_type("N", 7)
    kinds = infer("Split", [x], {"axis": 1, "num_outputs": 3})
    assert kinds == [float_type("N", 3), float_type("N", 3), float_type("N", 1)]
    assert infer("Split", [x], {"num_outputs": 2}) == [float_type(None, 7)] * 2
    assert infer("Split", [x], {"num_outputs": 1}) == [x]
    assert infer("Split", [x, int_type("N", None)]) == [float_type("N", 7), float_type(None, 7)]
    assert infer("Split", [x, TensorType(INT64, (2,))]) == [float_type(None, 7)] * 2
    assert infer("Split", [x, TensorType(INT64)]) == []
    assert infer("Split", [int_type("N", 3, 8), i64(1, 2)]) == [int_type("N"), int_type(3, 8)]
    assert infer("Split", [TensorType(F32), i64(1, 2)]) == [TensorType(F32)] * 2


@pytest.mark.parametrize("mode", ["DCR", "CRD"])
def test_depth_to_space_and_back_match_the_reference(mode: str) -> None:
    x = f32(2, 8, 3, 5)
    (deep,) = check_node("DepthToSpace", [x], {"blocksize": 2, "mode": mode})
    (back,) = check_node(
        "SpaceToDepth", [deep], {"blocksize": 2, "mode": mode}, expected=[x], opset=28
    )
    assert back.flags.c_contiguous
    check_node("DepthToSpace", [f32(5, 3, 8, 2).T], {"blocksize": 2, "mode": mode})
    check_node("SpaceToDepth", [f32(4, 6, 3, 2).T], {"blocksize": 2})
    for dims in ((0, 4, 2, 2), (150, 8, 12, 12)):
        check_node("DepthToSpace", [f32(*dims)], {"blocksize": 2, "mode": mode})


def test_depth_and_space_of_edge_cases_matches_the_definition() -> None:
    fails("DepthToSpace", [f32(1, 6, 2, 2)], {"blocksize": 2}, "divisible")
    fails("SpaceToDepth", [f32(1, 1, 3, 2)], {"blocksize": 2}, "divisible")
    fails("DepthToSpace", [f32(4, 2, 2)], {"blocksize": 2}, "the input must have rank")
    fails("DepthToSpace", [f32(1, 4, 2, 2)], {"blocksize": 0}, "positive")
    attrs: dict[str, Any] = {"blocksize": 2}
    assert shape_of("DepthToSpace", [float_type("N", 8, None, 5)], attrs) == ("N", 2, None, 10)
    assert shape_of("SpaceToDepth", [float_type("N", 3, 8, "W")], attrs) == ("N", 12, 4, None)
    assert shape_of("SpaceToDepth", [TensorType(F32)], attrs) == (None,) * 4
    with pytest.raises(ShapeError):
        infer("SpaceToDepth", [float_type(1, 1, 3, 3)], attrs)


def test_outputs_do_not_share_memory() -> None:
    x = f32(2, 2)
    for name, inputs in (("Concat", [x]), ("Tile", [x, i64(1, 1)])):
        (y,) = run(name, inputs, {"axis": 0} if name == "Concat" else {})
        assert not np.shares_memory(x, y)
