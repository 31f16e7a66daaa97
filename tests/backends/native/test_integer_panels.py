"""Matrices of integers in panels, against the formula of what compiled code computes with them."""

from __future__ import annotations

import numpy as np
import pytest

from penstock.backends.native.integer_panels import integer_panels, panel_types, unpacked

RNG = np.random.default_rng(3)


def _codes(dtype: str, *dims: int) -> np.ndarray:
    ends = np.iinfo(dtype)
    return RNG.integers(ends.min, ends.max, dims, dtype, endpoint=True)


@pytest.mark.parametrize("dtype", ["int8", "uint8"])
@pytest.mark.parametrize(("k", "n"), [(1, 1), (7, 33), (64, 32), (130, 65)])
def test_unpacked_panels_equal_their_matrix(k, n, dtype):
    w = _codes(dtype, k, n)
    size = -(-k // 4) * 4
    panels = integer_panels(w, _codes(dtype, n))
    assert [(a.dtype, a.shape) for a in panels] == [(t.dtype, t.dims) for t in panel_types(k, n)]
    np.testing.assert_array_equal(unpacked((k, n), size, w.dtype, False, *panels), w)
    np.testing.assert_array_equal(unpacked((k, n), size, w.dtype, True, *panels), w.T)


@pytest.mark.parametrize("dtype", ["int8", "uint8"])
def test_sums_and_zero_points_give_the_sums_of_codes_less_their_zero_points(dtype):
    x, w, zero = _codes("uint8", 5, 30).astype(int), _codes(dtype, 30, 9), _codes(dtype, 9)
    panels = integer_panels(w, zero)
    multiplied = unpacked((30, 9), 32, np.dtype("int8"), False, panels.panels)
    found = x @ multiplied - 77 * panels.sums - x.sum(axis=1)[:, None] * panels.zeros
    np.testing.assert_array_equal(found, (x - 77) @ (w.astype(int) - zero))


def test_each_part_is_padded_to_its_size():
    w = _codes("uint8", 3 * 5, 4)
    panels = integer_panels(w, np.zeros(4, np.uint8), (5, 8))
    padded = unpacked((24, 4), 24, np.dtype("int8"), False, *panels).reshape(3, 8, 4)
    np.testing.assert_array_equal(padded[:, :5].reshape(15, 4), w.astype(int) - 128)
    assert not padded[:, 5:].any()
