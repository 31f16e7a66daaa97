"""Compiled Softmax, LogSoftmax and Hardmax against NumPy's."""

from __future__ import annotations

import numpy as np
import pytest

from tests.support.native_kernels import check, node_of, pytestmark  # noqa: F401

DIMS = [(3, 4, 9), (1, 5, 1), (2, 3, 70, 5), (4, 1, 300, 2), (2, 5000), (60, 3), (7,)]


def numbers(dims, dtype):
    x = np.random.default_rng(3).normal(size=dims) * 20
    return x.astype(dtype)


def tolerance(name, dtype):
    """Powers of e below the least normal number are 0; logarithms near 0 are as exact as 1 is."""
    info = np.finfo(dtype)
    return {"rtol": 40 * info.eps, "atol": 4 * info.eps if name == "LogSoftmax" else 4 * info.tiny}


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("dims", DIMS)
@pytest.mark.parametrize("name", ["Softmax", "LogSoftmax"])
def test_softmax_along_any_axis_is_close_to_numpy(name, dims, dtype):
    for axis in range(len(dims)):
        x = numbers(dims, dtype)
        check(node_of(name, [x], axis=axis), [x], tolerance(name, dtype))


@pytest.mark.parametrize("axis", [0, 1, 2, 3])
@pytest.mark.parametrize("name", ["Softmax", "LogSoftmax", "Hardmax"])
def test_softmax_of_version_12_takes_all_axes_from_one_on(name, axis):
    x = numbers((3, 4, 5), "float32")
    check(node_of(name, [x], version=12, axis=axis), [x], tolerance(name, "float32"))


@pytest.mark.parametrize("axis", [0, -1])
@pytest.mark.parametrize("name", ["Softmax", "LogSoftmax"])
@pytest.mark.parametrize("special", [np.nan, np.inf, -np.inf])
def test_softmax_of_special_numbers_is_that_of_numpy(name, special, axis):
    x = numbers((40, 35), "float32")
    x[3, [2, 20]], x[[1, 30], 7], x[11], x[:, 9] = special, special, special, special
    check(node_of(name, [x], axis=axis), [x], tolerance(name, "float32"))


@pytest.mark.parametrize("axis", [-1, 1])
def test_softmax_of_masked_scores_is_close_to_numpy(axis):
    x = numbers((6, 40, 24), "float32")
    x[np.random.default_rng(1).random(x.shape) < 0.4] = np.finfo(np.float32).min
    check(node_of("Softmax", [x], axis=axis), [x], tolerance("Softmax", "float32"))


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("axis", [0, 1, 2])
def test_hardmax_along_any_axis_equals_numpy(axis, dtype):
    x = np.random.default_rng(2).integers(0, 5, (3, 4, 9)).astype(dtype)
    x[0, 1, 3], x[1, 2, [4, 6]] = np.nan, [-np.inf, np.nan]
    check(node_of("Hardmax", [x], axis=axis), [x])


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("length", [15, 16, 17, 32, 56, 100])
def test_hardmax_of_long_rows_with_nans_equals_numpy(length, dtype):
    rng = np.random.default_rng(length)
    x = rng.integers(0, 6, (200, length)).astype(dtype)
    for special in (np.nan, -np.inf):  # before and behind the maxima
        x[rng.random(x.shape) < 0.02] = special
    check(node_of("Hardmax", [x], axis=-1), [x])
