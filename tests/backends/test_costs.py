"""The estimate of times from rates, and rates that were measured on the machine."""

from __future__ import annotations

import json
from math import inf

import pytest

from penstock.backends.costs import FILE, Rates, on_this_machine
from penstock.backends.numpy import NumpyBackend
from penstock.backends.numpy_rates import RATES
from penstock.host.machine import machine_name
from tests.support.onnx_text import compile_text


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("PENSTOCK_CACHE", str(tmp_path))
    return tmp_path


def test_seconds_add_up_what_each_kind_of_work_takes():
    rates = Rates(1.0, 2.0, 4.0, 8.0, 16.0, 32.0)
    assert rates.seconds() == 1.0
    assert rates.seconds(nbytes=2, flops=4, weights=8, elements=1, items=1) == 4 + 16 + 32


def test_scaled_rates_make_calls_and_work_slower():
    rates = Rates(1.0, 2.0, 4.0, 8.0, 16.0, 32.0).scaled(3.0, 2.0)
    assert rates == (3.0, 1.0, 2.0, 4.0, 32.0, 64.0)


def test_rates_of_no_file_are_those_of_the_table(cache):
    assert on_this_machine("numpy", RATES) is RATES


def written(cache, machine: str, rates: object) -> None:
    (cache / FILE).write_text(json.dumps({"machine": machine, "rates": rates}))


def test_measured_rates_take_the_place_of_the_table(cache):
    written(cache, machine_name(), {"numpy": {"Exp": [0.5, 1e9, 1e9, inf, 0.0, 0.0]}})
    rates = on_this_machine("numpy", RATES)
    assert rates["Exp"] == Rates(0.5, 1e9, 1e9)
    assert rates["Softmax"] == RATES["Softmax"]
    session = compile_text("g (float[2] x) => (float[2] y) { y = Exp(x) }", shapes={})
    (step,) = session.plan.steps
    assert NumpyBackend().seconds(step.node) == pytest.approx(0.5, rel=1e-6)


def test_rates_of_another_machine_are_not_used(cache):
    written(cache, "another machine", {"numpy": {"Exp": [0.5, 1e9, 1e9]}})
    assert on_this_machine("numpy", RATES) is RATES


@pytest.mark.parametrize("fields", [[-1.0], [1e-6, 0.0], ["fast"], [1] * 7, 5])
def test_damaged_file_of_rates_is_ignored_with_a_warning(cache, fields):
    written(cache, machine_name(), {"numpy": {"Exp": fields}})
    with pytest.warns(UserWarning, match="is ignored"):
        assert on_this_machine("numpy", RATES) is RATES
