"""Differences between the values of two runs."""

from __future__ import annotations

import math

import numpy as np
import pytest

from penstock.observers.values import ValueComparison, ValueKeeper, difference
from tests.support.onnx_text import compile_text

TWO = "g (float[4] x) => (float[4] y) { a = Exp(x) y = Neg(a) }"


def test_difference_has_the_place_of_the_largest():
    one = np.array([[1, 2], [3, 4]], np.float32)
    found = difference(one, one + np.array([[0, 0], [0.5, 0.25]], np.float32))
    assert (found.largest, found.index, found.one, found.other) == (0.5, (1, 0), 3, 3.5)
    assert (found.scale, found.relative, found.nonfinite) == (4, 0.125, 0)


def test_difference_counts_elements_that_are_not_finite_in_one_array_alone():
    one = np.array([math.nan, math.nan, math.inf, math.inf, 1.0])
    other = np.array([math.nan, 0.0, math.inf, -math.inf, 1.0])
    found = difference(one, other)
    assert (found.nonfinite, found.largest) == (2, 0)


@pytest.mark.parametrize("dtype", [np.bool_, np.int8, np.uint64, np.float16, np.complex64])
def test_difference_of_equal_arrays_is_zero(dtype):
    x = np.array([0, 1, 1], dtype)
    found = difference(x, x.copy())
    assert (found.largest, found.relative, found.nonfinite) == (0, 0, 0)


def test_difference_of_scalars_and_of_nothing():
    assert difference(np.float32(2), np.float32(3)).largest == 1
    assert difference(np.zeros((0, 3)), np.zeros((0, 3))).index == ()


def test_values_beyond_the_budget_are_named_and_not_kept():
    session = compile_text(TWO, backends=["numpy"])
    kept = ValueKeeper(most_bytes=16)
    session.run({"x": np.ones(4, np.float32)}, observers=[kept])
    assert set(kept.values) == {"a"}
    assert kept.dropped == {"y"}


def test_other_shapes_are_no_difference_of_numbers():
    text = "g (float[N] x) => (float[N] y) { y = Neg(x) }"
    session = compile_text(text, backends=["numpy"])
    kept = ValueKeeper()
    session.run({"x": np.ones(4, np.float32)}, observers=[kept])
    compared = ValueComparison(kept)
    session.run({"x": np.ones(5, np.float32)}, observers=[compared])
    assert compared.differences == {"y": None}
