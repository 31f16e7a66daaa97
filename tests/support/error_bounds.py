"""Bounds of rounding errors, derived from what is computed: a running error analysis.

A ``Rounded`` is a number that is computed in floats of unit roundoff ``u``: its exact ``value`` in
float64, and an ``error`` that the computed one is at most away from it, in whatever order sums are
taken. Operations on such numbers propagate the errors of their operands and add that of their own
rounding; a formula that is written in them is a proof of its bound (N. Higham, Accuracy and
Stability of Numerical Algorithms, sections 3.1 to 3.3):

>>> x = Rounded.exact(np.array([1.0, 2.0, 3.0]), np.dtype("float32"))
>>> total = (x * x).sum(0)
>>> float(total.value), bool(total.error < 5 * 2.0**-24 * 14)
(14.0, True)

Sums and products of n terms have the error ``gamma(n)`` of the sum of their magnitudes. Functions
have the errors that ``c/core/math32.h`` states; those of float64 come from the same formulas, or from
glibc, whose manual lists at most 2 units in the last place ("Known Maximum Errors in Math
Functions").
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

import ml_dtypes
import numpy as np

Operand: TypeAlias = "Rounded | np.ndarray | float"

_UNITS = {
    "float16": (11, -24),
    "bfloat16": (8, -133),
    "float32": (24, -149),
    "float64": (53, -1074),
}


def unit(dtype: np.dtype) -> float:
    """The unit roundoff: half the distance from 1 to the next number."""
    return 2.0 ** -_UNITS[dtype.name][0]


def smallest(dtype: np.dtype) -> float:
    """The least positive number, which is the distance of subnormal ones."""
    return 2.0 ** _UNITS[dtype.name][1]


def gamma(n: float, u: float) -> float:
    """What n roundings in a row, or a sum of n products, are wrong by at most, relatively."""
    return n * u / (1 - n * u)


@dataclass(frozen=True, eq=False)
class Rounded:
    value: np.ndarray
    error: np.ndarray
    dtype: np.dtype

    @staticmethod
    def exact(x: Any, dtype: np.dtype) -> Rounded:
        """Numbers without an error, such as inputs."""
        value = np.asarray(x).astype(np.float64)
        return Rounded(value, np.zeros(value.shape), dtype)

    def like(self, x: Operand) -> Rounded:
        return x if isinstance(x, Rounded) else Rounded.exact(x, self.dtype)

    def rounded(self, value: Any, error: Any, roundings: float = 1) -> Rounded:
        """A result of operands that are wrong by what makes it wrong by ``error``, rounded itself;
        below the normal numbers by a part of the least one."""
        # An infinity of operands is exact; NaN has no bound.
        with np.errstate(invalid="ignore"):
            own = gamma(roundings, unit(self.dtype)) * (np.abs(value) + error)
        tiny = roundings * smallest(self.dtype)
        error = np.where(np.isinf(value), 0, error + own + tiny)
        return Rounded(np.asarray(value), self._unless_infinite(value, error), self.dtype)

    def summed(self, value: Any, error: Any, most: Any, terms: float) -> Rounded:
        """A sum of as many terms, whose magnitudes add up to ``most``; each may be subnormal."""
        error = error + terms * smallest(self.dtype)
        return Rounded(value, np.where(most < self._most, error, np.inf), self.dtype)

    @property
    def _most(self) -> float:
        return float(ml_dtypes.finfo(self.dtype.name).max)

    def _unless_infinite(self, value: Any, error: Any) -> np.ndarray:
        """No bound holds for what may overflow."""
        may = np.isfinite(value) & ~(np.abs(value) + error < self._most)
        return np.asarray(np.where(may, np.inf, error))

    def inexact(self, by: np.ndarray | float) -> Rounded:
        """The same with this much more error."""
        return Rounded(self.value, self.error + by, self.dtype)

    def cast(self, dtype: np.dtype) -> Rounded:
        """Rounded to another dtype."""
        return Rounded(self.value, self.error, dtype).rounded(self.value, self.error)

    def map(self, function: Callable[[np.ndarray], np.ndarray]) -> Rounded:
        """A view or a choice of elements."""
        return Rounded(function(self.value), function(self.error), self.dtype)

    def __getitem__(self, key: Any) -> Rounded:
        return self.map(lambda x: x[key])

    def __neg__(self) -> Rounded:
        return Rounded(-self.value, self.error, self.dtype)

    def __abs__(self) -> Rounded:
        return Rounded(np.abs(self.value), self.error, self.dtype)

    def __add__(self, other: Operand) -> Rounded:
        y = self.like(other)
        return self.rounded(self.value + y.value, self.error + y.error)

    def __sub__(self, other: Operand) -> Rounded:
        return self + -self.like(other)

    def __rsub__(self, other: Operand) -> Rounded:
        return self.like(other) - self

    def __mul__(self, other: Operand) -> Rounded:
        y = self.like(other)
        a, b = np.abs(self.value), np.abs(y.value)
        error = _times(a, y.error) + _times(b, self.error) + self.error * y.error
        return self.rounded(self.value * y.value, error)

    def __truediv__(self, other: Operand) -> Rounded:
        y = self.like(other)
        quotient, least = self.value / y.value, np.abs(y.value) - y.error
        error = (self.error + _times(np.abs(quotient), y.error)) / np.maximum(least, 0)
        error = np.where((self.error == 0) & (y.error == 0), 0, error)
        return self.rounded(quotient, error)

    def __rtruediv__(self, other: Operand) -> Rounded:
        return self.like(other) / self

    __radd__, __rmul__ = __add__, __mul__

    def __matmul__(self, other: Operand) -> Rounded:
        y, a = self.like(other), np.abs(self.value)
        n, b = self.value.shape[-1], np.abs(y.value)
        error = a @ y.error + self.error @ (b + y.error)
        most = (a + self.error) @ (b + y.error)
        own = gamma(n + 1, unit(self.dtype)) * most
        return self.summed(self.value @ y.value, error + own, most, n + 1)

    def sum(self, axis: Any, keepdims: bool = False, roundings: int = 0) -> Rounded:
        """Sums along axes, in any order; ``roundings`` more, such as those of a mean."""
        options: Any = {"axis": axis, "keepdims": keepdims}
        value, error = self.value.sum(**options), self.error.sum(**options)
        most = (np.abs(self.value) + self.error).sum(**options)
        n = self.value.size // max(value.size, 1) + roundings
        return self.summed(value, error + gamma(n, unit(self.dtype)) * most, most, n)

    def mean(self, axis: Any, keepdims: bool = False) -> Rounded:
        total = self.sum(axis, keepdims)
        return total / float(self.value.size // max(total.value.size, 1))

    def maximum(self, other: Operand) -> Rounded:
        y = self.like(other)
        return Rounded(np.maximum(self.value, y.value), np.maximum(self.error, y.error), self.dtype)

    def minimum(self, other: Operand) -> Rounded:
        return -(-self).maximum(-self.like(other))

    def max(self, axis: Any) -> Rounded:
        """The highest along an axis, which is kept."""
        options: Any = {"axis": axis, "keepdims": True}
        return Rounded(self.value.max(**options), self.error.max(**options), self.dtype)

    def sqrt(self) -> Rounded:
        root = np.sqrt(self.value)
        below = np.sqrt(np.maximum(self.value - self.error, 0))
        error = self.error / np.maximum(root + below, np.finfo(float).tiny)
        return self.rounded(root, error)

    def exp(self) -> Rounded:
        """2 units in the last place; results below 2^-125 (float64: 2^-1021) may be 0."""
        y = np.exp(self.value)
        least = 2.0**-125 if self.dtype.itemsize < 8 else 2.0**-1021
        small = y * np.expm1(np.minimum(self.error, 1))
        error = np.where(self.error < 1, small, np.exp(self.value + self.error) - y)
        return self.rounded(y, error + least, 4)

    def expm1(self) -> Rounded:
        y = np.expm1(self.value)
        return self.rounded(y, (y + 1) * np.expm1(self.error), 4)

    def log(self) -> Rounded:
        least = np.maximum(self.value - self.error, 0)
        error = np.where(self.error == 0, 0, self.error / least)
        return self.rounded(np.log(self.value), error, 4)

    def log1p(self) -> Rounded:
        least = np.maximum(1 + self.value - self.error, 0)
        error = np.where(self.error == 0, 0, self.error / least)
        return self.rounded(np.log1p(self.value), error, 4)

    def lipschitz(
        self,
        function: Callable[[np.ndarray], Any],
        slope: float,
        *,
        ulps: float = 2,
        most: float = np.inf,
    ) -> Rounded:
        """A function whose derivative is at most ``slope`` and whose values change by at most
        ``most``, computed within these units in the last place."""
        error = np.minimum(slope * self.error, most)
        return self.rounded(np.asarray(function(self.value)), error, 2 * ulps)

    def tanh(self) -> Rounded:
        return self.lipschitz(np.tanh, 1, most=2)

    def sigmoid(self) -> Rounded:
        """1 / (1 + exp(-x)): that exp, a sum and a quotient are three units."""
        wide = lambda x: np.exp(-np.logaddexp(0, -x))  # noqa: E731
        y = self.lipschitz(wide, 0.25, ulps=3, most=1)
        return y.inexact(2.0**-125 if self.dtype.itemsize < 8 else 2.0**-1021)

    def powers(self, axis: int) -> Rounded:
        """exp of what is less than the highest along an axis: 0 if the difference may overflow."""
        difference = self - self.max(axis)
        far = difference.value < -self._most / 2
        value, error = np.where(far, -np.inf, difference.value), np.where(far, 0, difference.error)
        return Rounded(value, error, self.dtype).exp()

    def softmax(self, axis: int) -> Rounded:
        powers = self.powers(axis)
        return powers / powers.sum(axis, keepdims=True)


def _times(a: np.ndarray, error: np.ndarray) -> np.ndarray:
    """A product in which no error outweighs infinity."""
    with np.errstate(invalid="ignore"):
        return np.where(error == 0, 0, a * error)
