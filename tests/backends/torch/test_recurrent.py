"""Recurrent layers: LSTM, GRU and RNN with constant weights, as torch has them, against NumPy's."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest

from tests.support.timing import SOON
from tests.support.torch_kernels import needs_torch
from tests.support.torch_official import check, floats, official_tests

pytestmark = needs_torch

test_torch_kernels_of_official_cases_agree_with_numpy = official_tests("recurrent")


def on_gpu(tf32: bool) -> SimpleNamespace:
    """What wrappers of functions ask the site of a node on a GPU."""
    return SimpleNamespace(memory=SimpleNamespace(on_host=False), tf32=tf32)


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
    layer = rounded_layer(on_gpu(tf32), lambda: flags.fp32_precision)
    restored = flags.fp32_precision
    flags.fp32_precision = before
    try:
        assert (layer(), flags.fp32_precision) == (wanted, before)
    finally:
        flags.fp32_precision = restored


@pytest.mark.parametrize("before", [False, True])
@pytest.mark.parametrize("tf32", [False, True])
def test_product_on_a_gpu_rounds_operands_where_the_session_or_the_process_does(tf32, before):
    import torch

    from penstock.backends.torch.products import rounding

    flags = torch.backends.cuda.matmul
    product = rounding(on_gpu(tf32), lambda: flags.allow_tf32)
    restored = flags.allow_tf32
    flags.allow_tf32 = before
    try:
        assert (product(), flags.allow_tf32) == (tf32 or before, before)
    finally:
        flags.allow_tf32 = restored


def test_flag_is_put_back_where_calls_of_two_threads_would_overlap():
    from penstock.backends.torch.site import with_flag

    flags, begun = SimpleNamespace(on=False), threading.Semaphore(0)
    ends = [threading.Event(), threading.Event()]

    def function(end: threading.Event) -> None:
        assert flags.on
        begun.release()
        assert end.wait(SOON)

    call = with_flag(on_gpu(True), function, flags, "on", True)
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(call, ends[0])
        assert begun.acquire(timeout=SOON)
        second = pool.submit(call, ends[1])
        begun.acquire(timeout=0.2)  # the second has begun, unless it waits for the first
        ends[0].set()
        first.result()
        ends[1].set()
        second.result()
    assert not flags.on
