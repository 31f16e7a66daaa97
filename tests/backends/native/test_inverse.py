"""Compiled inverses and determinants of matrices, against NumPy's in float64."""

from __future__ import annotations

import numpy as np
import pytest

from tests.support.error_bounds import gamma, unit
from tests.support.native_kernels import (
    LIBRARIES,
    check,
    check_threads,
    check_within,
    kernel_of,
    node_of,
    pytestmark,  # noqa: F401
)


def inverse_node(x):
    return node_of("Inverse", [x], domain="com.microsoft", version=1)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("side", [1, 2, 5, 16, 31, 130])
def test_inverse_is_within_its_bound(side, dtype):
    x = np.random.default_rng(3).normal(size=(3, side, side)).astype(dtype)
    exact = np.linalg.inv(x.astype(np.float64))
    size = np.abs(exact).sum(-1).max(-1)
    condition = size * np.abs(x).sum(-1).max(-1)
    # Of Gauss and Jordan, without growth: N. Higham, Accuracy and Stability of Numerical Algorithms,
    # section 14.4; and that of the exact result, which is of float64.
    bound = 8 * gamma(side, unit(np.dtype(dtype))) * condition * size
    check_within(inverse_node(x), [x], exact, bound[:, None, None])
    check_threads(inverse_node(x), [x])


def test_permutations_are_inverted_exactly():
    x = np.eye(9, dtype=np.float32)[np.random.default_rng(4).permutation(9)] * 4
    check(inverse_node(x), [x])


def test_matrices_without_an_inverse_are_nan_and_others_are_not():
    x = np.array([[[1, 2], [2, 4]], [[2, 0], [0, 4]], [[0, 0], [0, 0]]], np.float32)
    for library in LIBRARIES:
        y = kernel_of(inverse_node(x), library).function(x)
        assert np.isnan(y[[0, 2]]).all()
        np.testing.assert_array_equal(y[1], [[0.5, 0], [0, 0.25]])


@pytest.mark.parametrize("count", [1, 3, 65, 200])
def test_determinants_of_stacks_are_numpy_s(count):
    x = np.random.default_rng(5).integers(-3, 4, (count, 3, 3)).astype(np.float64)
    x[0] = 1
    node = node_of("Det", [x])
    exact = np.round(np.linalg.det(x))
    check_within(node, [x], exact, 1e-12 * np.abs(x).sum((-1, -2)) ** 3)
    check_threads(node, [x])


def test_a_determinant_of_rows_in_another_order_changes_its_sign():
    x = np.diag(np.float32([2, 3, 4]))
    for order, sign in (([0, 1, 2], 1), ([1, 0, 2], -1), ([1, 2, 0], 1)):
        for library in LIBRARIES:
            assert kernel_of(node_of("Det", [x]), library).function(x[order]) == sign * 24


def test_large_matrices_are_left_to_lapack():
    for side, is_native in ((256, True), (257, False)):
        x = np.zeros((side, side), np.float32)
        assert (kernel_of(inverse_node(x), LIBRARIES[0]) is not None) is is_native
