"""Maxima and sums of rows are those of NumPy."""

from __future__ import annotations

import numpy as np
import pytest

from penstock.ops.common.row_reduce import MANY, SHORT, maxima, sums

SHAPES = [(1, 5), (MANY, 1), (MANY, SHORT), (MANY, SHORT + 1), (MANY + 3, 17), (0, 4)]


@pytest.mark.parametrize("given", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
def test_maxima_and_sums_of_rows_equal_those_of_numpy(shape, given):
    x = np.random.default_rng(3).standard_normal(shape).astype(np.float32)
    for function, wanted in ((maxima, x.max(1, keepdims=True)), (sums, x.sum(1, keepdims=True))):
        out = np.full((len(x), 1), 7, np.float32) if given else None
        result = function(x, out)
        assert out is None or result is out
        np.testing.assert_allclose(result, wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("rows", [1, MANY])
def test_maximum_of_a_row_with_nan_is_nan(rows):
    x = np.zeros((rows, 3), np.float32)
    x[0, 1] = np.nan
    assert np.isnan(maxima(x)[0, 0])
    assert (maxima(x)[1:] == 0).all()


def test_maximum_of_an_empty_row_is_negative_infinity_and_its_sum_0():
    x = np.zeros((MANY, 0), np.float32)
    assert (maxima(x) == -np.inf).all()
    assert (sums(x) == 0).all()
