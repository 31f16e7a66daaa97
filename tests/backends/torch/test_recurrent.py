"""Recurrent layers: LSTM, GRU and RNN with constant weights, as torch has them, against NumPy's."""

from __future__ import annotations

import pytest

from tests.support.torch_kernels import needs_torch
from tests.support.torch_official import check, floats, official_tests

pytestmark = needs_torch

test_torch_kernels_of_official_cases_agree_with_numpy = official_tests("recurrent")


GATES = {"LSTM": 4, "GRU": 3, "RNN": 1}


@pytest.mark.parametrize("direction", ["forward", "reverse", "bidirectional"])
@pytest.mark.parametrize("cell", GATES)
def test_torch_recurrent_layer_agrees_in_every_direction(cell, direction):
    d, rows = 1 + (direction == "bidirectional"), 5 * GATES[cell]
    inputs = [floats(6, 2, 3), floats(d, rows, 3), floats(d, rows, 5), floats(d, 2 * rows)]
    inputs += [None, floats(d, 2, 5)]
    attrs = {"direction": direction, "hidden_size": 5}
    if cell == "LSTM":
        inputs.append(floats(d, 2, 5))
    if cell == "GRU":
        attrs["linear_before_reset"] = 1
    check(cell, inputs, (1, 2, 3), 3 if cell == "LSTM" else 2, **attrs)
