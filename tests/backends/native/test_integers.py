"""Compiled products of 8-bit integers against NumPy's, bit by bit."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from penstock.backends.native import RATES, integers
from penstock.ops.registry import MICROSOFT
from penstock.ops.work_estimate import estimate
from tests.support.native_kernels import (  # noqa: F401
    LIBRARIES,
    check,
    kernel_of,
    node_of,
    pytestmark,
    threads_of,
)

RNG = np.random.default_rng(11)
DTYPES = ["uint8", "int8"]


def _codes(dtype, *dims):
    ends = np.iinfo(dtype)
    return RNG.integers(ends.min, ends.max, dims, dtype, endpoint=True)


@pytest.mark.parametrize("w_dtype", DTYPES)
@pytest.mark.parametrize("x_dtype", DTYPES)
@pytest.mark.parametrize("rows", [(), (1,), (3,), (2, 9), (70,)])
@pytest.mark.parametrize(("k", "n"), [(1, 1), (7, 5), (64, 32), (130, 33), (1030, 140)])
def test_integer_product_equals_numpy(k, n, rows, x_dtype, w_dtype):
    x, w = _codes(x_dtype, *rows, k), _codes(w_dtype, k, n)
    inputs = [x, w, _codes(x_dtype), _codes(w_dtype, n)]
    check(node_of("MatMulInteger", inputs, [1, 3]), inputs)


@pytest.mark.parametrize("n", [40, 48])
@pytest.mark.parametrize("rows", range(2, 27))
def test_integer_product_with_any_tiles_of_rows_equals_numpy(rows, n):
    inputs = [_codes("uint8", rows, 22), _codes("int8", 22, n), _codes("uint8"), _codes("int8")]
    check(node_of("MatMulInteger", inputs, [1, 3]), inputs)


def test_integer_product_without_zero_points_equals_numpy():
    inputs = [_codes("int8", 4, 20), _codes("int8", 20, 40)]
    check(node_of("MatMulInteger", inputs, [1]), inputs)


@pytest.mark.skipif(not hasattr(LIBRARIES[0].functions, "team_counts"), reason="there is no team")
@pytest.mark.parametrize(("n", "divided"), [(256, 0), (3072, 1)])
def test_threads_share_the_product_of_a_row_by_weights_that_take_long_to_read(n, divided):
    inputs = [_codes("uint8", 1, 768), _codes("int8", 768, n), np.array(3, np.uint8)]
    kernel = kernel_of(node_of("MatMulInteger", inputs, [1]), LIBRARIES[0])
    before = sum(LIBRARIES[0].functions.team_counts()[:2])
    with threads_of(LIBRARIES[0], 2):
        result = kernel.function(*inputs)
    assert sum(LIBRARIES[0].functions.team_counts()[:2]) - before == divided
    wanted = (inputs[0].astype(np.int32) - 3) @ inputs[1].astype(np.int32)
    np.testing.assert_array_equal(result, wanted)


@pytest.mark.parametrize(("x_dtype", "extreme"), [("uint8", 255), ("int8", -128)])
@pytest.mark.parametrize("rows", [2, 40])
def test_integer_product_of_extreme_codes_does_not_saturate(rows, x_dtype, extreme):
    x, w = np.full((rows, 600), extreme, x_dtype), np.full((600, 64), -128, np.int8)
    inputs = [x, w, np.array(0, x_dtype), np.array(127, np.int8)]
    check(node_of("MatMulInteger", inputs, [1, 2, 3]), inputs)


def _scaled(x_dtype, w_dtype, rows, k, n):
    """Codes of x and w with scales, by column for w, and zero points."""
    x = [_codes(x_dtype, rows, k), np.array(0.02, np.float32), _codes(x_dtype)]
    scales = RNG.uniform(0.001, 0.01, n).astype(np.float32)
    return x, [_codes(w_dtype, k, n), scales, _codes(w_dtype, n)]


@pytest.mark.parametrize("w_dtype", DTYPES)
@pytest.mark.parametrize("x_dtype", DTYPES)
@pytest.mark.parametrize(("rows", "k", "n"), [(1, 6, 40), (50, 130, 260)])
def test_scaled_product_equals_numpy(rows, k, n, x_dtype, w_dtype):
    x, w = _scaled(x_dtype, w_dtype, rows, k, n)
    inputs = [*x, *w, np.array(0.1, np.float32), _codes(x_dtype)]
    check(node_of("QLinearMatMul", inputs, [1, *range(3, 8)]), inputs)


@pytest.mark.parametrize("fixed_point", [0, 1])
@pytest.mark.parametrize("dtype", ["int8", "uint8"])
@pytest.mark.parametrize(
    ("rows", "k", "n"), [(3, 64, 80), (33, 64, 80), (97, 64, 10), (40, 71, 99)]
)
def test_product_with_zero_points_at_the_ends_equals_numpy(rows, k, n, dtype, fixed_point):
    """Of rows with and without a remainder, which are read in place or copied."""
    rng, ends = np.random.default_rng(rows), np.iinfo(dtype)
    x = rng.integers(ends.min, ends.max, (rows, k), dtype, endpoint=True)
    w = rng.integers(-128, 127, (k, n), np.int8, endpoint=True)
    for zero in (ends.min, ends.max):
        for left in (x, np.full_like(x, ends.min), np.full_like(x, ends.max)):
            point = np.array(zero, dtype)
            inputs = [
                left,
                np.float32(0.02),
                point,
                w,
                np.float32(0.011),
                np.int8(0),
                np.float32(0.23),
                point,
            ]
            attrs = {"fixed_point": fixed_point}
            check(node_of("QLinearMatMul", inputs, range(1, 8), **attrs), inputs)


@pytest.mark.parametrize("has_scale", [True, False])
@pytest.mark.parametrize("dtype", DTYPES)
def test_scaled_product_with_bias_equals_numpy(dtype, has_scale):
    x, w = _scaled(dtype, "uint8", 20, 90, 36)
    w[0] = np.ascontiguousarray(w[0].T)
    bias = RNG.integers(-(10**6), 10**6, 36, np.int32)
    y = [np.array(0.3, np.float32), _codes(dtype)] if has_scale else []
    inputs = [*x, *w, bias, *y]
    attrs = {"transB": 1, "alpha": 0.5}
    constants = [1, *range(3, len(inputs))]
    check(node_of("QGemm", inputs, constants, domain=MICROSOFT, **attrs), inputs)


def test_product_with_zero_points_of_columns_that_are_not_known_has_no_kernel():
    inputs = [_codes("uint8", 2, 4), _codes("int8", 4, 5), _codes("uint8"), _codes("int8", 5)]
    assert kernel_of(node_of("MatMulInteger", inputs, [1]), LIBRARIES[0]) is None


@pytest.mark.parametrize("dims", [(), (0,), (7,), (64,), (3, 5, 100)])
def test_dynamic_codes_equal_numpy(dims):
    x = RNG.normal(1, 3, dims).astype(np.float32)
    check(node_of("DynamicQuantizeLinear", [x], outputs=3), [x])


@pytest.mark.parametrize("odd", [0, -1, 3e38, -np.inf, np.nan, 1e-45])
def test_dynamic_codes_of_odd_numbers_equal_numpy(odd):
    for base in (0.0, 1.0):
        x = np.full(70, base, np.float32)
        x[[0, 3, 69]] = odd
        check(node_of("DynamicQuantizeLinear", [x], outputs=3), [x])


def test_estimate_of_a_product_is_of_this_processors_instructions(monkeypatch):
    x, w = np.zeros((128, 64), np.uint8), np.zeros((64, 96), np.int8)
    node = node_of("MatMulInteger", [x, w], [1])
    seconds = []
    for speed in (40, 80, 1000):
        loaded = SimpleNamespace(integer_speed=speed)
        monkeypatch.setattr(integers, "library", lambda loaded=loaded: loaded)
        seconds.append(estimate(RATES, integers.integer_workload(node)))
    work = 2 * x.size * w.shape[1] * 1e-9
    assert seconds[0] - seconds[1] == pytest.approx(work / 80)
    assert seconds[1] - seconds[2] == pytest.approx(work / 80 - work / 1000)
    assert all(library.integer_speed >= 40 for library in LIBRARIES)
