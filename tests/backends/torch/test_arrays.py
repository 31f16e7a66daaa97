"""Kernels that move elements: views, joins, parts, borders, and tensors made from little, against NumPy's."""

from __future__ import annotations

import numpy as np
import pytest

import penstock as ps
from tests.support.tf_graphs import Builder, Type
from tests.support.torch_kernels import needs_torch
from tests.support.torch_official import check, floats, official_tests

pytestmark = needs_torch

test_torch_kernels_of_official_cases_agree_with_numpy = official_tests("arrays")


@pytest.mark.parametrize("mode", ["reflect", "edge", "wrap"])
@pytest.mark.parametrize("widths", [[0, 0, 3, 0, 0, 2], [1, 2, 0, 0, 1, 3], [0] * 6])
def test_torch_pads_with_elements_of_the_tensor(mode, widths):
    check("Pad", [floats(2, 4, 5), np.array(widths)], constants=(1,), mode=mode)


def test_torch_slices_backward():
    numbers = [np.array(x) for x in ([-1, 0], [-(2**63) + 1, 4], [2, 1], [-2, 1])]
    check("Slice", [floats(2, 4, 5), *numbers], constants=(1, 2, 3, 4))
    whole = [np.array(x) for x in ([9], [-9], [0], [-1])]
    check("Slice", [floats(3, 2), *whole], constants=(1, 2, 3, 4))


@pytest.mark.parametrize(("start", "end"), [(-7, -5), (-7, -9), (-4, -9), (7, 5), (2, -7)])
def test_torch_slices_backward_from_before_the_axis(start, end):
    """ONNX clamps the start to 0, where Python's slices are empty."""
    numbers = [np.array([x]) for x in (start, end, 0, -1)]
    check("Slice", [floats(3, 2), *numbers], constants=(1, 2, 3, 4))


@pytest.mark.parametrize("op", ["Gather", "GatherElements"])
def test_torch_gather_counts_negative_indices_from_the_end(op):
    check(op, [floats(4, 3), np.array([[-1, 0, 2], [1, -3, 0]], np.int64)], axis=0)


@pytest.mark.parametrize("rows", [0, 2])
def test_torch_reshapes_as_tensorflow_does_around_dims_of_zero(rows):
    builder = Builder()
    for name, dtype in {"x": "float32", "shape": "int64"}.items():
        builder.node("Placeholder", name=name, dtype=Type(dtype))
    types = {"T": Type("float32"), "Tshape": Type("int64")}
    builder.node("Reshape", "x", "shape", name="y", **types)
    session = ps.compile(builder.bytes(), backends=["torch"])
    y = session.run({"x": floats(rows, 3, 7), "shape": np.array([rows, -1])}, ["y"])["y"]
    assert y.shape == (rows, 21)
    session.run({"x": floats(2, 3), "shape": np.array([3, -1])}, ["y"])
    assert {step.backend for step in session.inspect.plan.walk()} == {"torch"}
