"""Costs by rates that were measured on this machine."""

from __future__ import annotations

import json
from math import inf

import pytest

import penstock as ps
from penstock.backends.numpy import RATES, NumpyBackend
from penstock.core.errors import PenstockError
from penstock.host.machine import machine_name
from penstock.ops.work_estimate import Rates
from penstock.tuning.calibrated import CalibratedCosts
from tests.support.onnx_text import compile_text

EXP = "g (float[2] x) => (float[2] y) { y = Exp(x) }"


def exp_node():
    (step,) = compile_text(EXP, backends=["numpy"], shapes={}).inspect.plan.steps
    return step.node


def test_cost_is_that_of_the_rates():
    costs = CalibratedCosts({"numpy": {"Exp": Rates(0.5, flops_per_s=inf)}})
    backend = NumpyBackend()
    assert costs.cost(exp_node(), backend).seconds == 0.5
    assert backend.rates is RATES


def test_backend_without_rates_has_its_own_estimate():
    backend = NumpyBackend()
    assert CalibratedCosts({}).cost(exp_node(), backend).seconds == backend.seconds(exp_node())


def test_read_returns_what_was_written(tmp_path):
    rates = {"numpy": {"Exp": Rates(1e-6, 1e9, inf, 2e9, 3.0, 4.0), "": Rates(2e-6)}}
    CalibratedCosts(rates).write(tmp_path / "rates.json")
    assert CalibratedCosts.read(tmp_path / "rates.json").rates == rates


def test_session_places_nodes_by_calibrated_costs():
    rates = {"numpy": {"": Rates(1e-9), "Exp": Rates(1e-9)}, "native": {"": Rates(1.0)}}
    expert = ps.ExpertOptions(cost_model=CalibratedCosts(rates))
    session = compile_text(EXP, shapes={}, expert=expert)
    (step,) = session.inspect.plan.steps
    assert step.backend == "numpy"


def test_read_of_another_machine_raises(tmp_path):
    path = tmp_path / "rates.json"
    path.write_text(json.dumps({"machine": "another", "rates": {}}))
    with pytest.raises(PenstockError, match="measured on another"):
        CalibratedCosts.read(path)


@pytest.mark.parametrize("numbers", [[-1.0], [1e-6, 0.0], ["fast"], [1] * 7, 5])
def test_read_of_damaged_rates_raises(tmp_path, numbers):
    path = tmp_path / "rates.json"
    rates = {"numpy": {"Exp": numbers}}
    path.write_text(json.dumps({"machine": machine_name(), "rates": rates}))
    with pytest.raises(PenstockError, match="has no rates"):
        CalibratedCosts.read(path)
