"""The helpers of structured control flow; the operations themselves run in tests of executors."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from penstock.core.types import FLOAT32, INT64, SequenceType, ShapeError, TensorType
from penstock.ops.onnx.control_flow import (
    ScanLayout,
    element_of,
    read_trip_count,
    row_type,
    rows_of,
    same_length,
    stack,
    truth,
)


def scan(**attrs):
    body = SimpleNamespace(outputs=["state", "row"])
    return SimpleNamespace(
        attrs={"body": body, "num_scan_inputs": 2, **attrs}, inputs=["state", "a", "b"]
    )


@pytest.mark.parametrize("value", [np.array(True), np.array([True]), np.array([[1]])])
def test_truth_of_one_element_is_its_value(value):
    assert truth(value) is True
    assert truth(np.logical_not(value)) is False


@pytest.mark.parametrize("shape", [(0,), (2,), (1, 2)])
def test_truth_of_other_than_one_element_raises(shape):
    with pytest.raises(ShapeError, match="one element"):
        truth(np.ones(shape, bool))


def test_trip_count_reads_one_integer():
    assert read_trip_count(np.array([7], np.int32)) == 7


@pytest.mark.parametrize("value", [np.array([1, 2]), np.array(1.5)])
def test_trip_count_of_other_values_raises(value):
    with pytest.raises(ShapeError, match="the trip count must be an"):
        read_trip_count(value)


def test_element_of_tensor_is_the_tensor_in_every_step():
    x = np.zeros(2)
    assert element_of(x, 5) is x
    assert element_of([x, 1], 1) == 1


def test_element_of_shorter_sequence_raises():
    with pytest.raises(ShapeError, match="the input sequences of SequenceMap must"):
        element_of([1, 2], 2)


def test_scan_layout_without_attributes_scans_first_axes_forward():
    layout = ScanLayout(scan())
    assert layout.states == 1
    assert (layout.input_axes, layout.output_axes) == ([0, 0], [0])
    assert (layout.input_backward, layout.output_backward) == ([0, 0], [0])


@pytest.mark.parametrize(("axis", "backward"), [(0, 0), (1, 0), (-1, 1)])
def test_rows_of_are_slices_along_the_axis_in_its_direction(axis, backward):
    x = np.arange(6).reshape(2, 3)
    want = np.moveaxis(x, axis, 0)[:: -1 if backward else 1]
    np.testing.assert_array_equal(rows_of(x, axis, backward), want)


def test_rows_of_axis_out_of_range_raises():
    with pytest.raises(ShapeError, match="out of range"):
        rows_of(np.zeros((2, 3)), 2, 0)


def test_same_length_of_different_lengths_raises():
    assert same_length(np.zeros((3, 2)), np.zeros(3)) == 3
    with pytest.raises(ShapeError, match="the scan inputs of Scan must"):
        same_length(np.zeros(3), np.zeros(4))


def test_row_type_drops_the_stacked_axis():
    assert row_type(TensorType(INT64, (2, "n", 4)), -2) == TensorType(INT64, (2, 4))
    assert row_type(TensorType(INT64), 0) == TensorType(INT64)
    assert row_type(SequenceType(TensorType(INT64)), 0) == TensorType()


@pytest.mark.parametrize("axis", [0, 1, -1])
@pytest.mark.parametrize("backward", [0, 1])
def test_stack_joins_rows_in_their_direction(axis, backward):
    rows = [np.full(3, i) for i in range(4)]
    want = np.stack(rows[::-1] if backward else rows, axis)
    np.testing.assert_array_equal(stack(rows, axis, backward, TensorType(INT64, (3,))), want)


@pytest.mark.parametrize(
    ("type_", "axis", "shape", "dtype"),
    [
        (TensorType(INT64, (3, None)), 1, (3, 0, 0), np.int64),
        (TensorType(INT64, (3,)), -1, (3, 0), np.int64),
        (TensorType(), 0, (0,), np.float32),
        (SequenceType(TensorType(FLOAT32)), 0, (0,), np.float32),
    ],
)
def test_stack_without_rows_is_empty_of_their_type(type_, axis, shape, dtype):
    result = stack([], axis, 0, type_)
    assert (result.shape, result.dtype) == (shape, dtype)
