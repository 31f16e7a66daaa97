"""Compiled Softmax, LogSoftmax and Hardmax against NumPy's."""

from __future__ import annotations

import numpy as np
import pytest

from tests.support.native_kernels import check, check_within, node_of, pytestmark  # noqa: F401

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


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("columns", [1, 2, 3, 7, 16, 21, 33, 128, 129, 300])
@pytest.mark.parametrize("length", [1, 2, 5, 86, 257])
def test_softmax_of_columns_is_within_the_bound_of_its_roundings(length, columns, dtype):
    """Differences from the highest element are rounded once, which powers and logarithms carry on,
    and these to 2 units in the last place; sums of n elements are rounded n - 1 times at most."""
    info, x = np.finfo(dtype), numbers((2, length, columns), dtype)
    x[1, : length // 2] = x[1, :1]  # equal elements, and the highest ones only behind the first
    exact = x.astype(np.longdouble)
    less = exact - exact.max(1, keepdims=True)
    total = np.exp(less).sum(1, keepdims=True)
    reach, unit = -less.min(1, keepdims=True), info.eps / 2
    power = 4 + reach  # roundings of a power
    y = np.exp(less) / total
    bound = 1.01 * unit * y * (2 * power + length + 1) + 2 * info.tiny
    check_within(node_of("Softmax", [x], axis=1), [x], y.astype("float64"), bound)
    y = less - np.log(total)
    of_log = power + length - 1 + 4 * np.log(total)
    bound = 1.01 * unit * (np.abs(less) + of_log + np.abs(y)) + 2 * info.tiny
    check_within(node_of("LogSoftmax", [x], axis=1), [x], y.astype("float64"), bound)


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
    x = numbers((400, 5), "float32")
    x[7, 1], x[399, 2], x[:, 4] = special, special, special
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
    few = np.random.default_rng(3).integers(0, 50, (2, 150, 3)).astype(dtype)
    few[1, [70, 140], 1] = np.nan
    check(node_of("Hardmax", [few], axis=axis), [few])


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("length", [15, 16, 17, 32, 56, 100])
def test_hardmax_of_long_rows_with_nans_equals_numpy(length, dtype):
    rng = np.random.default_rng(length)
    x = rng.integers(0, 6, (200, length)).astype(dtype)
    for special in (np.nan, -np.inf):  # before and behind the maxima
        x[rng.random(x.shape) < 0.02] = special
    check(node_of("Hardmax", [x], axis=-1), [x])
