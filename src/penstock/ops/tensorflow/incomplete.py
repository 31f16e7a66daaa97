"""Incomplete gamma and beta functions, computed in float64 by series and continued fractions.

Iterations end when no element changes: after tens of terms, or for large parameters after a small
multiple of their square root (Press et al., Numerical Recipes, 6.2 and 6.4).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from penstock.core.checkpoints import checkpoint
from penstock.core.types import Shape, ShapeError, TensorType, Type
from penstock.ir.op import Attrs, Consts, Types
from penstock.ops.common import shape_rules as rules
from penstock.ops.tensorflow.common import array_operator
from penstock.ops.tensorflow.special import log_gamma

_MOST_TERMS = 20_000
_TINY = 1e-300
_EPSILON = 2.0**-53


def _series(a: np.ndarray, x: np.ndarray) -> np.ndarray:
    """The lower function of x <= a + 1, by its power series."""
    term = total = 1 / a
    for n in range(1, _MOST_TERMS):
        checkpoint()
        term = term * x / (a + n)
        total = total + term
        if (np.abs(term) <= np.abs(total) * _EPSILON).all():
            break
    # In logarithms, as powers and gamma functions of large parameters overflow though their
    # quotient does not.
    return total * np.exp(a * np.log(x) - x - log_gamma(a))


def _away_from_zero(x: np.ndarray) -> np.ndarray:
    return np.where(np.abs(x) < _TINY, _TINY, x)


def _upper_fraction(a: np.ndarray, x: np.ndarray) -> np.ndarray:
    """The upper function of x >= a + 1, by its continued fraction (Lentz's method)."""
    b = x + 1 - a
    # Lentz's method replaces a leading 0 of the fraction by a tiny number.
    c, d = np.full_like(x, 1 / _TINY), 1 / _away_from_zero(b)
    result = d
    for n in range(1, _MOST_TERMS):
        checkpoint()
        factor = -n * (n - a)
        b = b + 2
        d = 1 / _away_from_zero(factor * d + b)
        c = _away_from_zero(b + factor / c)
        result = result * (c * d)
        if (np.abs(c * d - 1) <= 2 * _EPSILON).all():
            break
    return result * np.exp(a * np.log(x) - x - log_gamma(a))


def _gamma(a: np.ndarray, x: np.ndarray, lower: bool) -> np.ndarray:
    """The regularized function below, or else above, ``x``."""
    a, x = (np.array(side) for side in np.broadcast_arrays(a, x))
    out = np.full(x.shape, np.nan)
    for first, inside in (
        (True, (a > 0) & (x > 0) & (x <= a + 1) & np.isfinite(a)),
        (False, (a > 0) & (x > a + 1) & np.isfinite(x)),
    ):
        if inside.any():
            part = (_series if first else _upper_fraction)(a[inside], x[inside])
            out[inside] = part if first is lower else 1 - part
    out[(x == 0) & (a >= 0 if lower else a > 0)] = 0 if lower else 1
    out[np.isposinf(x) & (a > 0) & np.isfinite(a)] = 1 if lower else 0
    return out


def _register(name: str, lower: bool) -> None:
    @array_operator(name, infer=rules.broadcast_type)
    def compute(a: np.ndarray, x: np.ndarray) -> np.ndarray:
        return _gamma(a.astype(np.float64), x.astype(np.float64), lower).astype(x.dtype)


_register("Igamma", lower=True)
_register("Igammac", lower=False)


# Beta.


def _beta_fraction(a: np.ndarray, b: np.ndarray, x: np.ndarray) -> np.ndarray:
    """Return the incomplete beta function for x < (a + 1) / (a + b + 2), by Lentz's method."""
    c = np.ones_like(x)
    d = 1 / _away_from_zero(1 - (a + b) * x / (a + 1))
    result = d
    for n in range(1, _MOST_TERMS):
        checkpoint()
        even = n * (b - n) * x / ((a + 2 * n - 1) * (a + 2 * n))
        odd = -(a + n) * (a + b + n) * x / ((a + 2 * n) * (a + 2 * n + 1))
        change = np.ones_like(x)
        for factor in (even, odd):
            d = 1 / _away_from_zero(1 + factor * d)
            c = _away_from_zero(1 + factor / c)
            change = change * (c * d)
        result = result * change
        if (np.abs(change - 1) <= 4 * _EPSILON).all():
            break
    scale = log_gamma(a + b) - log_gamma(a) - log_gamma(b) + a * np.log(x) + b * np.log1p(-x)
    return result * np.exp(scale) / a


def _beta_shape(shapes: Sequence[Shape | None]) -> Shape | None:
    """The common shape of all parameters that are not scalars."""
    arrays = [shape for shape in shapes if shape != ()]
    for shape in arrays[1:]:
        if not rules.fits(shape, arrays[0]):
            raise ShapeError(
                f"parameters that are not scalars must have the same shape, but have {arrays[0]} "
                f"and {shape}"
            )
    return arrays[0] if arrays else ()


def _infer_beta(types: Types, attrs: Attrs, consts: Consts) -> Sequence[Type]:
    shape = _beta_shape([rules.tensor(types, i).shape for i in range(3)])
    return (TensorType(rules.same_dtype(types, range(3)), shape),)


@array_operator("Betainc", infer=_infer_beta)
def betainc(a: np.ndarray, b: np.ndarray, x: np.ndarray) -> np.ndarray:
    shape = rules.all_known(_beta_shape([a.shape, b.shape, x.shape])) or ()
    p, q, z = (np.broadcast_to(side, shape).astype(np.float64) for side in (a, b, x))
    out = np.full(z.shape, np.nan)
    valid = (p > 0) & (q > 0) & np.isfinite(p) & np.isfinite(q)
    out[valid & (z == 0)] = 0
    out[valid & (z == 1)] = 1
    inside = valid & (z > 0) & (z < 1)
    low = inside & (z <= (p + 1) / (p + q + 2))
    if low.any():
        out[low] = _beta_fraction(p[low], q[low], z[low])
    high = inside & ~low
    if high.any():
        # By symmetry, from the side on which the fraction converges quickly.
        out[high] = 1 - _beta_fraction(q[high], p[high], 1 - z[high])
    return out.astype(x.dtype)
