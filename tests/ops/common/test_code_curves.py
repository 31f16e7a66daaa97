"""Functions of 16-bit codes. That they are LiteRT's is told by
tests/frontends/tflite/test_quantized_operators.py."""

from __future__ import annotations

import numpy as np
import pytest

from penstock.ops.common.code_curves import curve_codes

CODES = np.arange(1 << 16).astype(np.uint16).view(np.int16).astype(np.float64)
FUNCTIONS = {"EXP": np.exp, "LOGISTIC": lambda x: 1 / (1 + np.exp(-x)), "TANH": np.tanh}


@pytest.mark.parametrize("operator", FUNCTIONS)
def test_curve_is_within_few_steps_of_the_function(operator):
    scale, step = 1e-4, 1e-3 if operator == "EXP" else 2**-15
    wanted = np.clip(FUNCTIONS[operator](CODES * scale) / step, -32768, 32767)
    np.testing.assert_allclose(curve_codes(operator, scale, step), wanted, 0, 4)


@pytest.mark.parametrize("operator", ["LOG", "RSQRT"])
def test_curve_where_there_is_no_number_is_an_end(operator):
    codes = curve_codes(operator, 1e-4, 1e-3)[CODES < -128]
    assert set(codes.tolist()) == {-32768 if operator == "LOG" else 32767}


def test_points_of_numbers_that_are_too_large_give_0():
    assert curve_codes("EXP", 0.1, 1e-3)[20000] == 0
