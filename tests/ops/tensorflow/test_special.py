"""Special functions beside those of Python's ``math`` and ``statistics``."""

from __future__ import annotations

import math
from statistics import NormalDist

import numpy as np
import pytest

from penstock.ops.registry import TENSORFLOW
from penstock.testing import check_node
from tests.support.tf_operations import operation_tests


def checked(name: str, x: list[float], expected: list[float], rtol: float) -> None:
    arrays = [np.array(x)], [np.array(expected)]
    check_node(name, arrays[0], domain=TENSORFLOW, expected=arrays[1], rtol=rtol, atol=1e-13)


def test_lgamma_has_thirteen_digits() -> None:
    x = [-9.5, -3.25, -0.1, 1e-10, 0.3, 0.5, 0.999, 1.5, 2.5, 9.9, 10.1, 33, 1e8]
    checked("Lgamma", x, [math.lgamma(each) for each in x], 1e-13)


def test_digamma_steps_by_the_inverse() -> None:
    x = np.array([-3.3, -0.2, 0.1, 0.7, 2, 9.5, 40])
    euler = 0.57721566490153286061
    checked("Digamma", [1, 0.5, 2], [-euler, -euler - 2 * math.log(2), 1 - euler], 1e-13)
    (after,) = check_node("Digamma", [x + 1], domain=TENSORFLOW, expected=[gamma_slope(x + 1)])
    (before,) = check_node("Digamma", [x], domain=TENSORFLOW, expected=[gamma_slope(x)])
    np.testing.assert_allclose(after - before, 1 / x, rtol=1e-12)


def gamma_slope(x: np.ndarray) -> np.ndarray:
    """The derivative of ``math.lgamma``, to some six digits."""
    step = 1e-6
    values = [(math.lgamma(each + step) - math.lgamma(each - step)) / (2 * step) for each in x]
    return np.array(values)


def test_ndtri_and_erfinv_undo_distributions() -> None:
    chances = [1e-300, 1e-40, 1e-9, 0.01, 0.074, 0.076, 0.4, 0.5, 0.7, 0.99]
    checked("Ndtri", chances, [NormalDist().inv_cdf(each) for each in chances], 1e-13)
    x = np.array([-4, -1, -1e-8, 0, 1e-20, 0.25, 3])
    checked("Erfinv", [math.erf(each) for each in x], list(x), 1e-6)
    checked("Erfinv", [math.erf(each) for each in x[2:6]], list(x[2:6]), 1e-13)


@pytest.mark.parametrize(
    ("name", "x", "expected"),
    [
        ("Erfinv", [-1, 1, 1.1, -2], [-math.inf, math.inf, math.nan, math.nan]),
        ("Ndtri", [0, 1, 1.1, -2], [-math.inf, math.inf, math.nan, math.nan]),
        ("Lgamma", [0, -3, math.inf, -math.inf, math.nan], [math.inf] * 4 + [math.nan]),
        ("Digamma", [0, -3, math.inf, -math.inf], [math.nan, math.nan, math.inf, math.nan]),
    ],
)
def test_special_function_at_its_ends_is_infinite_or_nan(
    name: str, x: list[float], expected: list[float]
) -> None:
    checked(name, x, expected, 0)


def test_incomplete_gamma_has_twelve_digits() -> None:
    """Beside the exponential and the error function, whose special cases they are."""
    x = np.array([1e-12, 0.01, 0.9, 1.4, 2.1, 6, 30])
    for a, lower in (
        (1.0, [-math.expm1(-each) for each in x]),
        (0.5, [math.erf(math.sqrt(each)) for each in x]),
    ):
        inputs = [np.full(x.shape, a), x]
        check_node("Igamma", inputs, domain=TENSORFLOW, expected=[np.array(lower)], rtol=1e-12)
        upper = [1 - np.array(lower)]
        check_node("Igammac", inputs, domain=TENSORFLOW, expected=upper, rtol=1e-12, atol=1e-14)


def test_incomplete_beta_has_twelve_digits() -> None:
    """Beside a polynomial, and the arc sine."""
    x = np.array([1e-9, 0.05, 0.3, 0.5, 0.8, 0.999])
    inputs = [np.full(x.shape, 2.0), np.full(x.shape, 3.0), x]
    wanted = x**2 * (6 - 8 * x + 3 * x**2)
    check_node("Betainc", inputs, domain=TENSORFLOW, expected=[wanted], rtol=1e-12, atol=0)
    halves = [np.full(x.shape, 0.5), np.full(x.shape, 0.5), x]
    wanted = 2 / np.pi * np.arcsin(np.sqrt(x))
    check_node("Betainc", halves, domain=TENSORFLOW, expected=[wanted], rtol=1e-12, atol=0)


def test_incomplete_gamma_of_large_parameters_is_near_its_normal_limit() -> None:
    a = np.array([1e4, 1e6])
    wanted = [0.5 + 1 / (3 * np.sqrt(2 * np.pi * a))]
    check_node("Igamma", [a, a], domain=TENSORFLOW, expected=wanted, rtol=1e-6)


test_operation_matches_tensorflow, test_reversed_nodes_match_tensorflow = operation_tests(
    "ops.tensorflow.special"
)
