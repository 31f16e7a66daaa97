"""Codes rescaled by integers alone, as the reference kernels of TFLite do.

A scale is a multiplier of 31 bits, at least 2**30, and a shift. The product with the multiplier is
rounded to an integer, ties up, and that is rounded once more when it is shifted, ties away from
zero: what these two roundings give may differ by one from a single one of the real number. Method:
Jacob et al., "Quantization and Training of Neural Networks for Efficient Integer-Arithmetic-Only
Inference", 2018, section 2.2; the rounding is that of gemmlowp's fixedpoint.h.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from penstock.core.records import NamedTuple


class Multiplier(NamedTuple):
    """A scale, or one for each element of an array: multipliers, and shifts to the right."""

    numbers: np.ndarray
    shifts: np.ndarray

    def mapped(self, function: Callable[[np.ndarray], np.ndarray]) -> Multiplier:
        return Multiplier(*map(function, self))


def multiplier(scale: np.ndarray | float) -> Multiplier:
    """The multiplier of scales in float64, which are not negative; of what is below 2**-32, 0, and
    of what is above 2**30, which gives no codes but the ends, that."""
    fractions, exponents = np.frexp(np.minimum(np.asarray(scale, np.float64), 2.0**30))
    numbers = np.floor(fractions * 2.0**31 + 0.5).astype(np.int64)
    carry = numbers >> 31  # 1 for what was rounded to 2**31
    shifts = -(exponents + carry)
    return Multiplier((numbers >> carry) * (shifts <= 31), np.minimum(shifts, 31))


def of_products(x: np.ndarray, w: np.ndarray, y: np.ndarray, *, rounded: bool) -> Multiplier:
    """The multipliers of sums of products of codes, by the scales in float32 of both and of the
    result. ``rounded``: the product of scales is rounded to float32, as TFLite's kernels do for
    codes of uint8."""
    scale = np.multiply(x, w, dtype=np.float32 if rounded else np.float64)
    return multiplier(scale.astype(np.float64) / y)


def mean_scales(scales: Sequence[float], count: int, form: str) -> Sequence[float]:
    """The scales of codes and of means; a "sum" of ``count`` is a mean of larger steps."""
    return (scales[0] * count, scales[1]) if form == "sum" else scales


def mean_multiplier(scales: Sequence[float], count: int) -> Multiplier:
    """The multiplier of sums of ``count`` codes of which means are made. It is divided by the
    count without rounding, and so may be below 2**30. ``scales`` are of codes and of means."""
    x, y = np.array(scales, np.float32).astype(np.float64)
    by, count = multiplier(x / y), max(count, 1)
    bits = min(count.bit_length() - 1, 31 - int(by.shifts))
    return Multiplier((by.numbers << bits) // count, by.shifts + bits)


def product_multiplier(scales: Sequence[float], count: int) -> Multiplier:
    """The multiplier of each product of two of ``count`` codes, so that all of them come to steps
    of the result; below 2**14, which gives no codes of 8 bits but the ends. ``scales`` are of
    codes and of the result."""
    x, y = np.array(scales, np.float32).astype(np.float64)
    return multiplier(min(x / y ** (1 / max(count, 1)), 2**14 - 1))


def softmax_multiplier(scale: float, beta: float) -> Multiplier:
    """The multiplier of differences of codes in steps of ``scale``, times ``beta``, to 65,535 steps
    of 10."""
    return multiplier(np.float64(np.float32(scale) * np.float32(beta)) / (10 / 65535))


def short_multiplier(by: Multiplier) -> tuple[int, int]:
    """15 of the 31 bits of a multiplier, and the shift to the right of products with them."""
    return min((int(by.numbers) + (1 << 15)) >> 16, (1 << 15) - 1), 15 + int(by.shifts)


def rescaled_product(x: np.ndarray, by: Multiplier) -> np.ndarray:
    """Products of at most 47 bits times a scale below 2**14, rounded once, ties up, as int64 that
    wrap at 32 bits."""
    number, bits = short_multiplier(by)
    return ((x * number + (1 << (bits - 1))) >> bits).astype(np.int32).astype(np.int64)


TERM_BITS, _BITS_OF_SQUARES = 20, 7


def bits_of_terms(operation: str) -> int:
    """Return by how many bits both terms of a sum, difference or SquaredDifference of codes are
    shifted left, so that they keep a fraction."""
    return _BITS_OF_SQUARES if operation == "SquaredDifference" else TERM_BITS


def pair_multipliers(operation: str, scales: Sequence[float]) -> list[Multiplier]:
    """The multipliers of the product of two codes, or of both terms of a sum or difference, shifted
    left by ``bits_of_terms``, and of what they come to; by the scales of both and of the result."""
    a, b, y = np.array(scales, np.float32)
    if operation == "Mul":
        return [multiplier(a * b / y)]  # in float32, as in TFLite
    most = 2 * np.float64(max(a, b))
    step = most / 2.0 ** bits_of_terms(operation)
    step *= step if operation == "SquaredDifference" else 1
    return [*map(Multiplier, *multiplier(np.array([a / most, b / most, step / y])))]


def inverse_roots(x: np.ndarray) -> Multiplier:
    """The multipliers of 1 / sqrt(x) of integers from 1 to 2**29, by five steps of Newton's method
    with 28 bits behind the point, as TFLite computes them."""
    bits = np.frexp(x)[1]  # 1 for 1
    pairs = (31 - bits) // 2 - 1
    half = ((x << 2 * pairs) + 2) >> 2  # x / 4 to 1, halved and rounded

    def times(a: np.ndarray, b: np.ndarray) -> np.ndarray:
        return (a * b + (1 << 30)) >> 31

    near = np.full(x.shape, 1 << 28)
    for _ in range(5):
        cube = times(times(near, near), near) << 6
        near = (times(np.array(3 << 27), near) - times(half, cube)) << 3
    # Times half the root of two.
    numbers, shifts = times(near, np.array(1518500250)), 11 - pairs
    is_one = x == 1
    return Multiplier(np.where(is_one, (1 << 31) - 1, numbers), np.where(is_one, 0, shifts))


def rescaled(x: np.ndarray, by: Multiplier) -> np.ndarray:
    """Integers of 32 bits times scales, as int64; beyond 32 bits they wrap before they are
    multiplied."""
    left, right = np.maximum(-by.shifts, 0), np.maximum(by.shifts, 0)
    whole = (x.astype(np.int64) << left).astype(np.int32).astype(np.int64)
    high = (whole * by.numbers + (1 << 30)) >> 31
    return shifted_right(high, right)


def shifted_right(x: np.ndarray, bits: np.ndarray | int) -> np.ndarray:
    """Integers shifted right by ``bits``, rounded to the nearest, ties away from zero."""
    return np.where(np.equal(bits, 0), x, (x + ((1 << bits) >> 1) - (x < 0)) >> bits)


def store_rescaled(x: np.ndarray, by: Multiplier, zero: np.ndarray, out: np.ndarray) -> None:
    """The codes of integers times scales, plus the zero point."""
    limits = np.iinfo(out.dtype)
    np.copyto(out, np.clip(rescaled(x, by) + zero, limits.min, limits.max), casting="unsafe")
