"""Recurrent layers: LSTM, GRU and RNN with constant weights, as torch has them, against NumPy's."""

from __future__ import annotations

from types import SimpleNamespace

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


@pytest.mark.parametrize("before", ["none", "ieee", "tf32"])
@pytest.mark.parametrize(("tf32", "wanted"), [(False, "ieee"), (True, "tf32")])
def test_layer_on_a_gpu_rounds_operands_only_where_the_session_allows_it(tf32, wanted, before):
    import torch

    from penstock.backends.torch.recurrent import rounded_layer

    flags = torch.backends.cudnn.rnn
    site = SimpleNamespace(memory=SimpleNamespace(on_host=False), tf32=tf32)
    layer = rounded_layer(site, lambda: flags.fp32_precision)
    restored = flags.fp32_precision
    flags.fp32_precision = before
    try:
        assert (layer(), flags.fp32_precision) == (wanted, before)
    finally:
        flags.fp32_precision = restored
