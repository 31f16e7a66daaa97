"""The estimate of times from rates."""

from __future__ import annotations

import pytest

from penstock.backends.costs import Rates, host_seconds, moved_bytes
from penstock.backends.numpy import RATES, NumpyBackend
from tests.support.onnx_text import compile_text


def test_seconds_add_up_what_each_kind_of_work_takes():
    rates = Rates(1.0, 2.0, 4.0, 8.0, 16.0, 32.0)
    assert rates.seconds() == 1.0
    assert rates.seconds(nbytes=2, flops=4, weights=8, elements=1, items=1) == 4 + 16 + 32


def test_bytes_that_move_are_those_of_no_constants():
    text = "g (float[4] x) => (float[4] y) <float[4] c = {1, 2, 3, 4}> { y = Add(x, c) }"
    (step,) = compile_text(text, backends=["numpy"], shapes={}).plan.steps
    assert moved_bytes(step.node) == 2 * 4 * 4


def test_estimates_of_numpy_are_those_of_its_table():
    text = "g (float[8, 8] x) => (float[8, 8] y) { y = MatMul(x, x) }"
    (step,) = compile_text(text, backends=["numpy"], shapes={}).plan.steps
    expected = RATES["MatMul"].seconds(3 * 256, 2 * 8**3)
    assert NumpyBackend().seconds(step.node) == pytest.approx(expected)
    assert host_seconds(step.node) == pytest.approx(1e-6 + 768 / 5e9 + 1024 / 20e9)
