"""Pad and CenterCropPad."""

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
    shape_of,
)
from tests.ops.harness import check_node

MODES = ["constant", "reflect", "edge", "wrap"]


def scalar(value: float) -> np.ndarray:
    return np.array(value, np.float32)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    "pads", [(0, 0, 0, 0), (1, 2, 0, 3), (0, 2, 0, 0), (2, 0, 1, 0), (2, 3, 2, 3), (7, 5, 6, 9)]
)
def test_pad_matches_the_reference(mode: str, pads: tuple[int, ...]) -> None:
    for x in (f32(3, 4), f32(4, 3).T, f32(3, 8)[:, ::2]):
        check_both("Pad", [x, i64(*pads)], {"mode": mode})


@pytest.mark.parametrize("mode", MODES)
def test_pad_some_axes_matches_the_reference(mode: str) -> None:
    inputs = [f32(2, 3, 4), i64(1, 2, 0, 3), None, i64(2, -3)]
    check_both("Pad", inputs, {"mode": mode}, constants=(1, 3))
    inputs[3] = np.array([1, 0], np.int32)
    check_both("Pad", inputs, {"mode": mode}, constants=(1, 3))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("pads", [(-1, 0, 0, -2), (-1, 2, 1, -1), (0, -1, 2, 2)])
def test_pad_with_negative_pads_crops(mode: str, pads: tuple[int, ...]) -> None:
    x = f32(4, 5)
    cut = x[max(-pads[0], 0) : 4 - max(-pads[2], 0), max(-pads[1], 0) : 5 - max(-pads[3], 0)]
    added = [(max(pads[i], 0), max(pads[i + 2], 0)) for i in range(2)]
    want = np.pad(cut, added, mode)  # type: ignore[call-overload]
    check_both("Pad", [x, i64(*pads)], {"mode": mode}, expected=[want])


def test_pad_values_and_of_every_dtype_matches_the_definition() -> None:
    check_both("Pad", [f32(2, 2), i64(1, 0, 0, 1), scalar(7)], constants=(1, 2))
    check_both("Pad", [f32(2, 2), i64(1, 0, 0, 1), np.array([7], np.float32)], constants=(1,))
    check_node("Pad", [np.array([True]), i64(1, 1)])
    check_node("Pad", [np.array([3], np.int8), i64(1, 1), np.array(-1, np.int8)])
    x = f32(2).astype(ml_dtypes.bfloat16)
    check_node("Pad", [x, i64(1, 1), np.array(2, ml_dtypes.bfloat16)])
    text = np.array(["a"], object)
    check_node("Pad", [text, i64(1, 0)], expected=[np.array(["", "a"], object)])
    check_node("Pad", [f32(0, 2), i64(1, 0, 0, 0), scalar(3)])
    check_node("Pad", [f32(1), i64(2, 2)], {"mode": "reflect"})
    check_node("Pad", [scalar(3), i64()], expected=[scalar(3)])
    # Cutting off more than there is on one side leaves only the constant.
    want = [np.zeros(4, np.float32)]
    check_both("Pad", [f32(3), i64(-4, 5)], expected=want)
    check_both("Pad", [f32(3), i64(5, -4)], expected=want)


def test_pad_with_bad_inputs_is_refused() -> None:
    fails("Pad", [f32(2, 2), i64(1, 1)], match="pads")
    fails("Pad", [f32(2), i64(-2, -1)], match="remove more")
    fails("Pad", [f32(2), i64(1, 1), None, i64(1)], match="axis 1")
    fails("Pad", [f32(0), i64(1, 1)], {"mode": "edge"}, "cannot pad an axis of dim")
    fails("Pad", [f32(2), i64(1, 1)], {"mode": "mirror"}, "none of")
    fails("Pad", [f32(2), i64(1, 1), f32(2)], match="scalar")


def test_pad_infers_its_types() -> None:
    x = float_type("N", 3, None, 8)
    assert shape_of("Pad", [x, i64(0, 1, 0, 2, 0, 1, 0, 2)]) == ("N", 5, None, 12)
    assert shape_of("Pad", [x, i64(1, 2), None, i64(3)]) == ("N", 3, None, 11)
    assert shape_of("Pad", [x, TensorType(INT64, (2,)), None, i64(1)]) == ("N", None, None, 8)
    assert shape_of("Pad", [x, int_type(0, None, 0, 0, 0, 1, 0, 0)]) == ("N", None, None, 8)
    assert shape_of("Pad", [x, i64(1, 2), None, TensorType(INT64, (1,))]) == (None,) * 4
    assert shape_of("Pad", [TensorType(F32), i64(1, 1)]) is None
    assert data_of("Pad", [int_type("N", 2), i64(1, 2)]) == (0, "N", 2, 0, 0)
    assert data_of("Pad", [int_type("N"), i64(0, 1), np.array(5)]) == ("N", 5)
    assert data_of("Pad", [int_type("N"), i64(0, 1), TensorType(INT64, ())]) == ("N", None)
    with pytest.raises(ShapeError, match="remove more"):
        infer("Pad", [float_type(2), i64(-2, -1)])
    with pytest.raises(ShapeError, match="it needs two per axis"):
        infer("Pad", [float_type(2, 3), i64(1, 1)])


@pytest.mark.parametrize("target", [(2, 3), (5, 8), (2, 9), (1, 2), (4, 7)])
def test_center_crop_pad_matches_the_reference(target: tuple[int, ...]) -> None:
    for x in (f32(4, 5), f32(5, 4).T, f32(3, 6)):
        check_both("CenterCropPad", [x, i64(*target)])


@pytest.mark.parametrize("axes", [[1], [-1], [2, 0], [-3, 1]])
def test_center_crop_pad_some_axes(axes: list[int]) -> None:
    target = np.array([7, 2][: len(axes)], np.int32)
    check_both("CenterCropPad", [f32(4, 5, 6), target], {"axes": axes})


def test_center_crop_pad_of_edge_cases_matches_the_definition() -> None:
    fails("CenterCropPad", [f32(2, 2), i64(1)], match="none of them negative")
    fails("CenterCropPad", [f32(2, 2), i64(1, -1)])
    attrs: dict[str, Any] = {"axes": [0, -1]}
    x = float_type("N", 3, None)
    assert shape_of("CenterCropPad", [x, i64(5, 6)], attrs) == (5, 3, 6)
    assert shape_of("CenterCropPad", [x, TensorType(INT64, (2,))], attrs) == (None, 3, None)
    assert shape_of("CenterCropPad", [x, int_type("A", "B", 2)]) == ("A", "B", 2)
