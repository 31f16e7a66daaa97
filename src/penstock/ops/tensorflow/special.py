"""Special functions, computed in float64: Erfinv, Ndtri, Lgamma, Digamma, Zeta, Polygamma and
Bessel functions.

Errors are about 1e-14, relative to max(1, abs(result)).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np

from penstock.ops.common import shape_rules as rules
from penstock.ops.tensorflow.common import array_operator

# Wichura, Algorithm AS 241: the percentage points of the normal distribution (Applied Statistics
# 37, 1988), routine PPND16. Numerators and denominators for the centre, the tails, and the far
# tails.
_MIDDLE = (
    (
        *(2509.0809287301226727, 33430.575583588128105, 67265.770927008700853),
        *(45921.953931549871457, 13731.693765509461125, 1971.5909503065514427),
        *(133.14166789178437745, 3.387132872796366608),
    ),
    (
        *(5226.495278852545925, 28729.085735721942674, 39307.89580009271061),
        *(21213.794301586595867, 5394.1960214247511077, 687.1870074920579083),
        *(42.313330701600911252, 1.0),
    ),
)
_TAIL = (
    (
        *(7.7454501427834140764e-4, 0.0227238449892691845833, 0.24178072517745061177),
        *(1.27045825245236838258, 3.64784832476320460504, 5.7694972214606914055),
        *(4.6303378461565452959, 1.42343711074968357734),
    ),
    (
        *(1.05075007164441684324e-9, 5.475938084995344946e-4, 0.0151986665636164571966),
        *(0.14810397642748007459, 0.68976733498510000455, 1.6763848301838038494),
        *(2.05319162663775882187, 1.0),
    ),
)
_FAR = (
    (
        *(2.01033439929228813265e-7, 2.71155556874348757815e-5, 0.0012426609473880784386),
        *(0.026532189526576123093, 0.29656057182850489123, 1.7848265399172913358),
        *(5.4637849111641143699, 6.6579046435011037772),
    ),
    (
        *(2.04426310338993978564e-15, 1.4215117583164458887e-7, 1.8463183175100546818e-5),
        *(7.868691311456132591e-4, 0.0148753612908506148525, 0.13692988092273580531),
        *(0.59983220655588793769, 1.0),
    ),
)


def _ratio(parts: tuple[tuple[float, ...], tuple[float, ...]], x: np.ndarray) -> np.ndarray:
    return np.polyval(parts[0], x) / np.polyval(parts[1], x)


def _quantile(centred: np.ndarray, tail: np.ndarray) -> np.ndarray:
    """The quantile of the normal distribution at probability ``p = 0.5 + centred``; ``tail`` is
    min(p, 1 - p)."""
    # The middle ends at 0.425, of which this is the square.
    middle = centred * _ratio(_MIDDLE, 0.180625 - centred * centred)
    depth = np.sqrt(-np.log(tail))
    # Values above 27 occur only for subnormal probabilities, and infinity for 0.
    far = np.where(depth <= 5, _ratio(_TAIL, depth - 1.6), _ratio(_FAR, np.minimum(depth, 27) - 5))
    far = np.where(tail == 0, np.inf, far)
    return np.where(np.abs(centred) <= 0.425, middle, np.copysign(far, centred))


def _ndtri(x: np.ndarray) -> np.ndarray:
    return np.where((x < 0) | (x > 1), np.nan, _quantile(x - 0.5, np.minimum(x, 1 - x)))


def _erfinv(x: np.ndarray) -> np.ndarray:
    size = np.abs(x)
    return np.where(size > 1, np.nan, _quantile(x / 2, (1 - size) / 2) / np.sqrt(2.0))


# The gamma function. From _SHIFT on, Stirling's series is exact in float64.
_SHIFT = 10
# B(2k) / (2k (2k - 1)) and B(2k) / (2k), with Bernoulli's numbers B, the highest k first.
_STIRLING = (-691 / 360360, 1 / 1188, -1 / 1680, 1 / 1260, -1 / 360, 1 / 12)
_PSI = (1 / 12, -691 / 32760, 1 / 132, -1 / 240, 1 / 252, -1 / 120, 1 / 12)


def log_gamma(x: np.ndarray) -> np.ndarray:
    """log(abs(Gamma(x))); by reflection for x < 1/2."""
    reflected = x < 0.5
    y = np.where(reflected, 1 - x, x)
    # Gamma(y) = Gamma(y + 1) / y shifts small arguments to where the series is exact.
    product = np.ones_like(y)
    for _ in range(_SHIFT):
        low = y < _SHIFT
        product = np.where(low, product * y, product)
        y = np.where(low, y + 1, y)
    series = np.polyval(_STIRLING, 1 / (y * y)) / y
    logarithm = (y - 0.5) * np.log(y) - y + 0.5 * np.log(2 * np.pi) + series - np.log(product)
    # Reduce x first: the remainder is exact, whereas x * pi loses its fraction for large x.
    sine = np.abs(np.sin(np.pi * np.fmod(x, 2)))
    mirrored = np.where(np.floor(x) == x, np.inf, np.log(np.pi / sine) - logarithm)
    return np.where(np.isinf(x), np.inf, np.where(reflected, mirrored, logarithm))


def _digamma(x: np.ndarray) -> np.ndarray:
    """The derivative of ``log_gamma``; NaN at poles."""
    reflected = x < 0
    y = np.where(reflected, 1 - x, x)
    # As above, by psi(y) = psi(y + 1) - 1 / y.
    terms = np.zeros_like(y)
    for _ in range(_SHIFT):
        low = y < _SHIFT
        terms = np.where(low, terms + 1 / y, terms)
        y = np.where(low, y + 1, y)
    inverse = 1 / (y * y)
    psi = np.log(y) - 0.5 / y - np.polyval(_PSI, inverse) * inverse - terms
    # The remainder is exact, as above.
    mirrored = psi - np.pi / np.tan(np.pi * np.fmod(x, 1))
    psi = np.where(reflected, mirrored, psi)
    return np.where((x <= 0) & (np.floor(x) == x), np.nan, psi)


# Hurwitz's zeta function, by the formula of Euler and Maclaurin: the sum of the first terms, and of
# a series in Bernoulli's numbers B(2k) / (2k)! for the rest.
_ZETA_TERMS = 12
_ZETA_SERIES = (
    *(1 / 12, -1 / 720, 1 / 30240, -1 / 1209600, 1 / 47900160, -691 / 1307674368000),
    *(1 / 74724249600, -3617 / 10670622842880000, 43867 / 5109094217170944000),
)


def _zeta_positive(x: np.ndarray, q: np.ndarray) -> np.ndarray:
    """The sum of (q + k) ** -x over k from 0 on, for x > 1 and q > 0."""
    total = np.zeros(x.shape)
    for _ in range(_ZETA_TERMS):
        total, q = total + q**-x, q + 1
    last = q**-x
    total = total + last * q / (x - 1) + last / 2
    factor, power = x, last / q
    for k, weight in enumerate(_ZETA_SERIES):
        total = total + weight * factor * power
        factor = factor * (x + 2 * k + 1) * (x + 2 * k + 2)
        power = power / (q * q)
    return np.where(np.isinf(x) | np.isinf(q), 0, total)


def _zeta(x: np.ndarray, q: np.ndarray) -> np.ndarray:
    """The sum above for all x and q: infinite at x = 1, and NaN below; poles at q = 0, -1 and so
    on; at other negative q, real for whole x only."""
    x, q = np.broadcast_arrays(x, q)
    whole, even = np.floor(x) == x, np.fmod(x, 2) == 0
    # Terms of negative q + k are a sum of its own, mirrored: from the last of them to abs(q).
    negative = np.where(q < 0, np.ceil(-q), 0)
    nearest = -q - negative + 1
    with np.errstate(all="ignore"):
        total = _zeta_positive(x, q + negative)
        mirrored = _zeta_positive(x, nearest) - _zeta_positive(x, nearest + negative)
        total = np.where(q < 0, total + np.where(even, mirrored, -mirrored), total)
    total = np.where((q < 0) & ~whole, np.nan, total)
    pole = np.where(whole & even, np.inf, np.nan)
    total = np.where((q <= 0) & (np.floor(q) == q), pole, total)
    total = np.where(x == 1, np.inf, np.where(x < 1, np.nan, total))
    return np.where(np.isnan(x) | np.isnan(q), np.nan, total)


def _polygamma(n: np.ndarray, x: np.ndarray) -> np.ndarray:
    """The derivative of order ``n`` of ``_digamma``."""
    n, x = np.broadcast_arrays(n, x)
    sign = np.where(np.fmod(n, 2) == 0, -1.0, 1.0)
    with np.errstate(all="ignore"):
        derivative = sign * np.exp(log_gamma(n + 1)) * _zeta(n + 1, x)
    valid = (n >= 0) & (np.floor(n) == n)
    return np.where(n == 0, _digamma(x), np.where(valid, derivative, np.nan))


# The modified Bessel functions: from _FAR_BESSEL on, an asymptotic series is exact in float64.
_FAR_BESSEL = 100
_NODES = 48


def _bessel_scaled(x: np.ndarray, order: int) -> np.ndarray:
    """exp(-abs(x)) times the modified Bessel function of order 0 or 1: below _FAR_BESSEL, the mean
    of exp(abs(x) (cos t - 1)) cos(order t) over nodes t, as that is periodic."""
    size = np.abs(x)
    near = np.minimum(size, _FAR_BESSEL)
    total = np.zeros_like(size)
    for node in range(_NODES + 1):
        cosine = np.cos(np.pi * node / _NODES)
        weight = (0.5 if node in (0, _NODES) else 1.0) / _NODES * cosine**order
        total += weight * np.exp(near * (cosine - 1))
    far = np.maximum(size, _FAR_BESSEL)
    term = series = np.ones_like(size)
    for k in range(1, 12):
        term = term * -(4 * order**2 - (2 * k - 1) ** 2) / (8 * k * far)
        series = series + term
    scaled = np.where(size < _FAR_BESSEL, total, series / np.sqrt(2 * np.pi * far))
    return np.where(np.isnan(x), x, np.where(np.isinf(x), 0, scaled)) * (np.sign(x) if order else 1)


def _bessel(x: np.ndarray, order: int) -> np.ndarray:
    size = np.abs(x)
    # In two steps, as the power alone may overflow. As in TensorFlow, NaN for an infinite x.
    return _bessel_scaled(x, order) * np.exp(size / 2) * np.exp(size / 2)


def _register(name: str, function: Callable[[np.ndarray], np.ndarray]) -> None:
    @array_operator(name, infer=rules.same_type)
    def compute(x: np.ndarray) -> np.ndarray:
        return function(x.astype(np.float64)).astype(x.dtype)


for _name, _function in (
    ("BesselI0", partial(_bessel, order=0)),
    ("BesselI0e", partial(_bessel_scaled, order=0)),
    ("BesselI1", partial(_bessel, order=1)),
    ("BesselI1e", partial(_bessel_scaled, order=1)),
    ("Digamma", _digamma),
    ("Erfinv", _erfinv),
    ("Lgamma", log_gamma),
    ("Ndtri", _ndtri),
):
    _register(_name, _function)


def _register_pair(name: str, function: Callable[[np.ndarray, np.ndarray], np.ndarray]) -> None:
    @array_operator(name, infer=rules.broadcast_type)
    def compute(a: np.ndarray, x: np.ndarray) -> np.ndarray:
        return function(a.astype(np.float64), x.astype(np.float64)).astype(x.dtype)


_register_pair("Polygamma", _polygamma)
_register_pair("Zeta", _zeta)
