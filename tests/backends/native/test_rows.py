"""Compiled reductions of short rows against NumPy's: sums to the rounding of their dtype."""

from __future__ import annotations

import numpy as np
import pytest

import penstock as ps
from tests.support.native_kernels import (  # noqa: F401
    LIBRARIES,
    check,
    kernel_of,
    node_of,
    pytestmark,
)
from tests.support.onnx_text import compile_text

FLOATS = ["L1", "L2", "LogSum", "LogSumExp", "Max", "Mean", "Min", "Prod", "Sum", "SumSquare"]
TOLERANCE = {"float32": {"rtol": 2e-6, "atol": 1e-6}, "float64": {"rtol": 1e-13, "atol": 1e-13}}
SHAPES = [((3, 5), [1]), ((7,), [-1]), ((2, 3, 4), [1, 2]), ((4, 6, 1), [1]), ((200, 1), [1])]


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("name", FLOATS)
@pytest.mark.parametrize(("dims", "axes"), SHAPES)
@pytest.mark.parametrize("keepdims", [0, 1])
def test_reduction_of_floats_equals_numpy(keepdims, dims, axes, name, dtype):
    x = np.random.default_rng(3).uniform(0.1, 2, dims).astype(dtype)
    inputs = [x, np.array(axes)]
    check(node_of(f"Reduce{name}", inputs, [1], keepdims=keepdims), inputs, TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", ["int32", "int64"])
@pytest.mark.parametrize("name", ["Max", "Min", "Prod", "Sum", "SumSquare"])
def test_reduction_of_integers_equals_numpy(name, dtype):
    x = np.random.default_rng(4).integers(-(2**30), 2**30, (5, 9)).astype(dtype)
    check(node_of(f"Reduce{name}", [x, np.array([1])], [1]), [x, np.array([1])])


@pytest.mark.parametrize("name", ["Max", "Min", "LogSumExp"])
def test_reduction_of_values_that_are_not_finite_equals_numpy(name):
    x = np.array([[1, np.nan], [np.nan, 1], [np.inf, -np.inf], [-np.inf, -np.inf]], np.float32)
    with np.errstate(all="ignore"):
        check(node_of(f"Reduce{name}", [x, np.array([1])], [1]), [x, np.array([1])], {"rtol": 1e-6})


@pytest.mark.parametrize("dtype", ["float32", "float64", "int32", "int64"])
@pytest.mark.parametrize("name", ["ArgMax", "ArgMin"])
@pytest.mark.parametrize("last", [0, 1])
def test_place_of_an_extreme_equals_numpy(last, name, dtype):
    x = np.random.default_rng(5).integers(-2, 3, (40, 6)).astype(dtype)
    if dtype[0] == "f":
        x[3, 2:4] = x[4, 5] = x[5, 0] = np.nan
    for keepdims in (0, 1):
        check(node_of(name, [x], axis=-1, keepdims=keepdims, select_last_index=last), [x])


@pytest.mark.parametrize(("dims", "axes"), [((3, 5), [0]), ((3, 65), [1]), ((3, 0), [1])])
def test_reduction_of_other_or_longer_axes_has_no_compiled_kernel(dims, axes):
    inputs = [np.zeros(dims, np.float32), np.array(axes)]
    assert kernel_of(node_of("ReduceSum", inputs, [1]), LIBRARIES[0]) is None


def test_reduction_of_short_rows_is_placed_on_compiled_kernels():
    session = compile_text(
        "g (float[200, 5] x) => (float[200, 1] y) <int64[1] axes = {1}> { y = ReduceSum(x, axes) }",
        executor="linear",
    )
    profile = ps.Profile()
    y = session.run({"x": np.ones((200, 5), np.float32)}, observers=[profile])["y"]
    assert y.tolist() == [[5.0]] * 200
    assert [backend for _, backend in profile.entries] == ["native"]
