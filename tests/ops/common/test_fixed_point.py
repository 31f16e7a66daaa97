"""Integers rescaled by integers: each rounding is compared with exact fractions."""

from __future__ import annotations

from fractions import Fraction
from math import floor

import numpy as np
import pytest

from penstock.ops.common.fixed_point import (
    Multiplier,
    multiplier,
    of_products,
    rescaled,
    store_rescaled,
)

RNG = np.random.default_rng(11)
SCALES = [1.0, 0.5, 0.75, 1 - 2**-40, 3.7, 1e-3, 2.0**-31, 1e-9, 123.4, *RNG.uniform(0, 1, 40)]


def nearest(x: Fraction, *, ties_up: bool) -> int:
    """The nearest integer; of two, the upper one or the one further from zero."""
    if ties_up or x >= 0:
        return floor(x + Fraction(1, 2))
    return -floor(-x + Fraction(1, 2))


@pytest.mark.parametrize("scale", SCALES)
def test_multiplier_is_as_near_as_31_bits_allow(scale: float) -> None:
    number, shift = map(int, multiplier(scale))
    assert 2**30 <= number < 2**31
    assert abs(Fraction(number, 2**31) / Fraction(2) ** shift / Fraction(scale) - 1) <= Fraction(
        1, 2**31
    )


def test_scales_without_bits_are_zero() -> None:
    for scale in (2.0**-33, 1e-300, 0.0):
        assert int(multiplier(scale).numbers) == 0
        assert rescaled(np.array([2**31 - 1]), multiplier(scale)).tolist() == [0]


@pytest.mark.parametrize("scale", SCALES)
def test_products_are_rounded_twice(scale: float) -> None:
    by = multiplier(scale)
    number, shift = map(int, by)
    most = 2**31 - 1 if shift >= 0 else (2**31 - 1) >> -shift
    x = RNG.integers(-most, most + 1, 300)
    x[:5] = 0, most, -most, 1, -1
    x[5:100] = RNG.integers(-300, 300, 95)
    for one, got in zip(x.tolist(), rescaled(x.astype(np.int32), by).tolist(), strict=True):
        left = one * 2 ** max(-shift, 0)
        high = nearest(Fraction(left * number, 2**31), ties_up=True)
        assert got == nearest(Fraction(high, 2 ** max(shift, 0)), ties_up=False)


def test_scales_of_any_size_have_a_multiplier() -> None:
    for scale in (2.0**31, 1e300, np.inf):
        assert tuple(map(int, multiplier(scale))) == (1 << 30, -31)


def test_ties() -> None:
    half = Multiplier(np.array(1 << 30), np.array(0))
    assert rescaled(np.array([-3, -1, 1, 3]), half).tolist() == [-1, 0, 1, 2]  # up
    quarter = Multiplier(np.array(1 << 30), np.array(1))
    assert rescaled(np.array([-6, -2, 2, 6]), quarter).tolist() == [-2, -1, 1, 2]  # from zero


def test_integers_shifted_beyond_32_bits_wrap() -> None:
    assert rescaled(np.array([1 << 30]), Multiplier(np.array(1 << 30), np.array(-2))).tolist() == [
        0
    ]


def test_product_of_scales_may_be_rounded_to_float32() -> None:
    x, w, y = (np.array(number, np.float32) for number in (0.1, 0.3, 0.7))
    exact = float(x) * float(w) / float(y)
    rounded = float(np.float32(x * w)) / float(y)
    assert of_products(x, w, y, rounded=False) == multiplier(exact)
    assert of_products(x, w, y, rounded=True) == multiplier(rounded)
    assert multiplier(exact) != multiplier(rounded)


def test_codes_saturate_after_the_zero_point() -> None:
    out = np.empty(4, np.int8)
    store_rescaled(np.array([-900, -5, 5, 235]), multiplier(0.5), np.array(10, np.int8), out)
    assert out.tolist() == [-128, 8, 13, 127]
