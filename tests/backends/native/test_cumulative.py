"""Compiled cumulative sums and products against NumPy's, bit by bit."""

from __future__ import annotations

import numpy as np
import pytest

from tests.support.native_kernels import LIBRARIES, check, kernel_of, node_of, pytestmark  # noqa: F401


@pytest.mark.parametrize("dtype", ["float32", "float64", "int32", "int64", "uint32", "uint64"])
@pytest.mark.parametrize("exclusive", [0, 1])
@pytest.mark.parametrize("reverse", [0, 1])
@pytest.mark.parametrize("name", ["CumSum", "CumProd"])
@pytest.mark.parametrize(
    ("dims", "axis"),
    [
        *[((7,), 0), ((1,), 0), ((3, 5, 4), 1), ((9, 30), -1)],
        *[((17, 1), 0), ((2, 6, 2300), 1), ((0, 3), 1)],
    ],
)
def test_cumulative_kernel_equals_numpy(name, dims, axis, reverse, exclusive, dtype):
    x = np.random.default_rng(3).normal(0, 3, dims).astype(dtype if dtype[0] == "f" else "int8")
    inputs = [x.astype(dtype), np.array(axis)]
    check(node_of(name, inputs, [1], exclusive=exclusive, reverse=reverse), inputs)


def test_cumulative_sum_of_an_empty_axis_is_empty():
    inputs = [np.zeros((2, 0, 3), np.float32), np.array([1])]
    check(node_of("CumSum", inputs, [1]), inputs)


def test_cumulative_sum_keeps_the_sign_of_a_first_zero_and_spreads_nan():
    inputs = [np.array([[-0.0, 1, np.nan, 2]], np.float32), np.array(1)]
    for exclusive in (0, 1):
        check(node_of("CumSum", inputs, [1], exclusive=exclusive), inputs)


@pytest.mark.parametrize("dims", [(3, 0), (2, 0, 3)])
def test_exclusive_sum_of_an_empty_axis_writes_nothing(dims):
    x, axis = np.zeros(dims), np.array(1)
    node = node_of("CumSum", [x, axis], [1], exclusive=1)
    memory = np.full(20, 7.0)
    for library in LIBRARIES:
        kernel = kernel_of(node, library)
        assert kernel is not None and kernel.into is not None
        kernel.into(x, axis, memory[8:8].reshape(dims))
    np.testing.assert_array_equal(memory, 7)
