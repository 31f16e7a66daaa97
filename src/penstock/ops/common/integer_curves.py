"""The logistic function, the hyperbolic tangent and HardSwish of integers, by integers alone.

The first two are those of gemmlowp's ``fixedpoint.h``, bit by bit, which the integer LSTM of TFLite
is defined with: arguments have some bits before the point, results none. An exponential is a
polynomial of degree 4 around -1/8, times powers of e for the bits of what is left, and a quotient
is found by three steps of Newton's method for 1 / d. All values are held in int32.
"""

from __future__ import annotations

import numpy as np

from penstock.ops.common.fixed_point import multiplier, shifted_right

_ONE, _LEAST = 32767, -32768
# Of numbers without bits before the point: exp(-1/8), 1/3, and exp(-2^n) from n = -2 on.
_EIGHTH, _THIRD = 28918, 10923
_POWERS = (25520, 19875, 12055, 4435, 600, 11, 0)
# Of numbers with two bits before it: 1, 48/17 and -32/17, a first guess of 1 / d.
_ONE_2, _GUESS, _SLOPE = 8192, 23130, -15420


def integer_logistic(x: np.ndarray) -> np.ndarray:
    """1 / (1 + exp(-x)), x with 3 bits before the point."""
    d = _half_sum(_exp(-np.abs(x), 3))
    positive = _shifted(_reciprocal(d), 1)
    return np.where(x == 0, 1 << 14, np.where(x > 0, positive, _ONE - positive))


def integer_tanh(x: np.ndarray, bits: int) -> np.ndarray:
    """The tangent of x with as many bits before the point, 0 to 6."""
    d = _half_sum(_exp(-np.abs(x), bits + 1))
    size = _shifted(_reciprocal(d) - _ONE_2, 2)
    return np.where(x == 0, 0, np.sign(x) * size)


def integer_hard_swish(x: np.ndarray, scale: float, result_scale: float) -> np.ndarray:
    """x * min(max(x / 6 + 1 / 2, 0), 1) in steps of ``result_scale``, for codes less their zero
    point in steps of ``scale``: as TFLite's reference kernel, with multipliers of 16 bits."""
    fine = np.float32(scale) / np.float32(128)
    result, gate = [
        multiplier(float(fine / np.float32(step))) for step in (result_scale, 3 / 32768)
    ]
    of_result, of_gate = [min(int(m.numbers) + (1 << 15) >> 16, _ONE) for m in (result, gate)]
    x = x * 128
    # From -1 to 1 where x is from -3 to 3; beyond, these.
    left, right = max(-int(gate.shifts), 0), max(int(gate.shifts), 0)
    inner = _product(_shifted(x, max(left - 1, 0)), of_gate)
    inner = shifted_right(_shifted(inner, min(left, 1)), right)
    product = (inner + (1 << 15) >> 1) * _product(x, of_result)
    whole = np.sign(product) * (np.abs(product) >> 15)
    return shifted_right(whole, int(result.shifts))


def _product(a: np.ndarray, b: np.ndarray | int) -> np.ndarray:
    """Their product with 15 bits less, rounded, ties up."""
    return np.minimum((a * b + (1 << 14)) >> 15, _ONE)


def _shifted(x: np.ndarray, bits: int) -> np.ndarray:
    return np.clip(x << bits, _LEAST, _ONE)


def _half_sum(x: np.ndarray) -> np.ndarray:
    """(x + 1) / 2 of numbers that are not negative."""
    return (x + _ONE + 1) >> 1


def _exp(x: np.ndarray, bits: int) -> np.ndarray:
    """The exponential of numbers that are not positive, with bits before the point."""
    quarter = 1 << (13 - bits)
    part = (x & (quarter - 1)) - quarter
    rest = part - x
    y = _shifted(part, bits) + (1 << 12)
    square = _product(y, y)
    cube, fourth = _product(square, y), _product(square, square)
    tail = shifted_right(_product(shifted_right(fourth, 2) + cube, _THIRD) + square, 1)
    result = np.minimum(_EIGHTH + _product(y + tail, _EIGHTH), _ONE)
    for place, power in enumerate(_POWERS[: bits + 2]):
        bit = 1 << (13 - bits + place)
        result = np.where(rest & bit, _product(result, power), result)
    if bits > 5:
        result = np.where(x < -(1 << (20 - bits)), 0, result)
    return np.where(x == 0, _ONE, result)


def _reciprocal(d: np.ndarray) -> np.ndarray:
    """1 / d for d from a half to 1, with two bits before the point."""
    x = _GUESS + _product(d, _SLOPE)
    for _ in range(3):
        x = x + _shifted(_product(x, _ONE_2 - _product(d, x)), 2)
    return x
