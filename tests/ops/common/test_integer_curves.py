"""Functions of 16-bit integers: near the real ones, for every argument."""

from __future__ import annotations

import numpy as np
import pytest

from penstock.ops.common.integer_curves import integer_logistic, integer_tanh

EVERY = np.arange(-(1 << 15), 1 << 15)
NEAR = 2**-11  # the results have 15 bits behind the point, of which polynomials get about 11 right


def test_logistic_is_near_the_real_one() -> None:
    got = integer_logistic(EVERY)
    assert got.min() >= 0
    assert got.max() < 1 << 15
    np.testing.assert_allclose(got / 2**15, 1 / (1 + np.exp(-EVERY / 2**12)), rtol=0, atol=NEAR)
    assert integer_logistic(np.zeros(1, int)).tolist() == [1 << 14]


@pytest.mark.parametrize("bits", range(7))
def test_tangent_is_near_the_real_one(bits: int) -> None:
    got = integer_tanh(EVERY, bits)
    np.testing.assert_allclose(got / 2**15, np.tanh(EVERY / 2 ** (15 - bits)), rtol=0, atol=NEAR)
    np.testing.assert_array_equal(got[1:], -got[1:][::-1])
