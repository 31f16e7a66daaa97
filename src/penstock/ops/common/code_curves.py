"""Functions of 16-bit codes by tables of few points, as TFLite's reference kernels have them.

Each gives the codes of all 65,536 arguments: entry i is that of the code with the bits of the
unsigned integer i. Zero points are 0.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from penstock.core.types import FLOAT32

_POINTS, _BETWEEN, _STEPS = 512, 128, 255  # of a curve, codes from one to the next; of the sigmoid
_ROOT, _CUBIC = FLOAT32.type((2 / math.pi) ** 0.5), FLOAT32.type(0.044715)  # of GELU
# Points of the sigmoid that TFLite has one more for than is nearest, a bit each.
_MORE = 0x8000_0000_0000_0000_0000_0000_0000_0080_0011_0090_2044_0005_C046_7BAE_FA7B_D110
_ENDS = np.iinfo(np.int16)
_CODES = np.arange(1 << 16).astype(np.uint16).view(np.int16).astype(np.int64)

Function = Callable[[np.ndarray], np.ndarray]


def curve_codes(
    operator: str, scale: float, result_scale: float, *, approximate: bool = False
) -> np.ndarray:
    """The codes of TFLite's EXP, LOG, RSQRT, GELU, which may be ``approximate``, LOGISTIC or TANH:
    of arguments in steps of ``scale``, in steps of ``result_scale``. The last two have 15 bits
    behind the point, whatever that is."""
    if operator in ("LOGISTIC", "TANH"):
        return _sigmoid(scale, tangent=operator == "TANH")
    # At what has no logarithm and no root there is the end of the range.
    low, high = [FLOAT32.type(end) * FLOAT32.type(result_scale) for end in (_ENDS.min, _ENDS.max)]
    functions: dict[str, Function] = {
        "EXP": lambda x: np.exp(x.astype(np.float64)),
        "LOG": lambda x: np.where(x > 0, np.log(x.astype(np.float64)), low),
        "RSQRT": lambda x: np.where(x > 0, 1 / np.sqrt(x), high),
        "GELU": lambda x: 0.5 * x * _erfc(x * FLOAT32.type(-(0.5**0.5))),
    }
    if approximate:
        functions["GELU"] = lambda x: 0.5 * x * (1 + _tanh(_ROOT * (x + _CUBIC * x * x * x)))
    return _interpolated(functions[operator], scale, result_scale)


def _tanh(x: np.ndarray) -> np.ndarray:
    return np.tanh(x.astype(np.float64)).astype(FLOAT32)


def _erfc(x: np.ndarray) -> np.ndarray:
    return np.array([math.erfc(v) for v in x.tolist()], FLOAT32)


def softmax_points() -> np.ndarray:
    """The points [2, 513] of exp(x) from -10 to 0, and of 1 / (1 + x) from 0 to 1, with 15 bits
    behind the point."""
    part = 1 / np.float64(_POINTS)
    exponential = _points(lambda x: np.exp(x) * 32768, np.float64(-10), 10 * part)
    inverse = _points(lambda x: 32768 / (1 + x), np.float64(0), part)
    return np.stack([exponential, inverse])


def on_lines(points: np.ndarray, codes: np.ndarray) -> np.ndarray:
    """Interpolate linearly between 513 ``points`` at 16-bit ``codes``; int64, as both are."""
    place, offset = 256 + (codes >> 7), codes & (_BETWEEN - 1)
    slope = (points[place + 1] - points[place]).astype(np.int16).astype(np.int64)
    return points[place] + ((slope * offset + _BETWEEN // 2) >> 7)


def _interpolated(function: Function, scale: float, result_scale: float) -> np.ndarray:
    one = FLOAT32.type
    low, high = one(scale) * one(_ENDS.min), one(scale) * one(_ENDS.max)
    per = one(1 << 16) / (one(result_scale) * one(_ENDS.max) - one(result_scale) * one(_ENDS.min))
    with np.errstate(all="ignore"):
        step = (high - low) / one(_POINTS)
        points = _points(lambda x: function(x).astype(FLOAT32) * per, low, step, high)
    return on_lines(points, _CODES).astype(np.int16)


def _points(
    value: Function, low: np.floating, step: np.floating, high: np.floating | None = None
) -> np.ndarray:
    """The codes of 513 points of a curve, between which lines are drawn. A point is off the curve
    by half of what the line would be, at most, in the middle before the next."""
    one = type(step)
    at, after = (low + np.arange(n, _POINTS + n).astype(one) * step for n in (0, 1))
    here, middle = _rounded(value(at)), _rounded(value(at + step / one(2)))
    line = _rounded((value(after) + here) / one(2))
    last = _rounded(value(after[-1:] if high is None else np.array([high])))
    points = np.append(here - _rounded((line - middle) / one(2)), last)
    # Between numbers that are too large there is no line; what comes of it is 0.
    return np.clip(np.nan_to_num(points, nan=0.0), _ENDS.min, _ENDS.max).astype(np.int64)


def _rounded(x: np.ndarray) -> np.ndarray:
    """To the nearest, ties away from 0. A float32 is an integer where half of 1 is lost in it."""
    whole = np.trunc(x)
    return whole + np.where(np.abs(x - whole) >= 0.5, np.sign(x), 0).astype(x.dtype)


def _sigmoid(scale: float, *, tangent: bool) -> np.ndarray:
    """The codes of the logistic function, or of the hyperbolic tangent, with 15 bits behind the
    point: by lines between 256 points of the logistic function, which are 1 / 24 apart."""
    codes, shift = _CODES, _shift_of(scale)
    if shift is None:
        number, shift = _factor_of(scale)
        rounding = (1 << shift) >> 1
        codes = (codes * number + rounding) >> shift
    else:
        codes = 3 * (codes << shift)
    bits = 8 if tangent else 9
    table = np.rint(65536 / (1 + np.exp(-np.arange(_STEPS + 1) / 24))).astype(np.int64)
    table += [_MORE >> i & 1 for i in range(_STEPS + 1)]
    size = np.abs(codes)
    place, part = np.minimum(size >> bits, _STEPS - 1), size & ((1 << bits) - 1)
    value = (table[place] << bits) + part * (table[place + 1] - table[place])
    if tangent:
        value = np.where(size >> bits >= _STEPS, 65535 << bits, value)
        middle, half = 1 << 23, 1 << 7
        value = np.where(codes >= 0, value - middle + half, middle - value + half - 1)
        return (value >> 8).astype(np.int16)
    value = np.where(size >> bits >= _STEPS, 32767 << 10, value)
    value = np.where(codes >= 0, value + (1 << 9), (1 << 25) - value + (1 << 9) - 1)
    return (value >> 10).astype(np.int16)


def _shift_of(scale: float) -> int | None:
    """0 or 1: how many bits codes are shifted left by, to be in steps of 2**-12; None for scales
    that no shift by 0 or 1 bring there, within a thousandth of the logarithm."""
    power = math.log2(scale)
    near = round(power)
    return near + 12 if abs(power - near) < 1e-3 and near in (-12, -11) else None


def _factor_of(scale: float) -> tuple[int, int]:
    """A factor below 2**15 and a shift to the right, to steps of 1 / (3 * 2**12)."""
    factor, shift = scale * 3 * 4096, 0
    while factor <= 32767 / 2 and shift <= 30:
        factor, shift = factor * 2, shift + 1
    return int(factor), shift
