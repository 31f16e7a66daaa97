"""Costs that a profile measured."""

from __future__ import annotations

import numpy as np
import pytest

from penstock.backends.numpy import NumpyBackend
from penstock.backends.registry import backends_of
from penstock.ir.kernel import Kernel
from penstock.ops.internal.fused import is_fused, operation_name
from penstock.tuning import trial
from penstock.tuning.cost_table import cost_table
from penstock.tuning.measure import CostModel
from penstock.tuning.node_signature import node_signature
from tests.support.costs import measured_variants
from tests.support.far_backend import FarBackend
from tests.support.timing import slow
from tests.tuning.test_measure import X, compiled


@pytest.fixture(autouse=True)
def empty_cache(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("PENSTOCK_CACHE", str(tmp_path / "cache"))


def test_session_profile_measures_every_backend():
    far = FarBackend("far", ["Exp", "Sin"])
    session = compiled(backends=["numpy", far], executor="dataflow")
    session.profile({"x": X}, runs=3)
    machine = measured_variants(cost_table().path)
    assert machine["numpy"].keys() >= {"Exp", "Neg", "Sin", "Add", "to far"}
    assert machine["far"].keys() == {"Exp", "Sin", "to numpy"}


def test_profile_measures_the_fused_steps_of_plans():
    text = """g (float[1, 4, 16, 16] x) => (float[1, 4, 16, 16] y)
        <float[4, 4, 1, 1] w = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15}> {
        a = Conv(x, w) b = Relu(a) c = Conv(b, w) d = Sin(a) e = Exp(d) f = Neg(e) y = Add(c, f) }"""
    session = compiled(text)
    feeds = {"x": np.ones((1, 4, 16, 16), np.float32)}
    profile = session.profile(feeds, runs=1)
    # What is shown are the steps of the plan that runs from now on.
    plan = {
        operation_name(step.node) for step in session.inspect.plan.walk() if step.kernel is not None
    }
    assert {row.name for row in profile.by_operation()} == plan
    assert any("+" in name for name in plan)
    assert {row.facts.operation for row in profile.steps()} == plan
    session.run(feeds)
    steps = [step for step in session.inspect.plan.walk() if not step.node.op.moves]
    assert any(is_fused(step.node) for step in steps)
    costs = CostModel(backends_of(None))
    by_name = {backend.name: backend for backend in costs.backends}
    for step in steps:
        for single in (True, False):
            threads = 1 if single else None
            assert costs.is_measured(step.node, by_name[step.backend], threads), step.node


def test_profile_keeps_backends_apart():
    #   both are of the host's memory, so that both run the very same nodes
    class Slow(NumpyBackend):
        name = "slow"

        def kernel(self, node, types):
            kernel = super().kernel(node, types)

            def function(*inputs):
                slow(1e-3)
                return kernel.function(*inputs)

            return Kernel(function)

    profile = compiled(backends=[Slow(), "numpy"]).profile({"x": X}, runs=2)
    assert {row.name: row.count for row in profile.by_backend()} == {"numpy": 8}
    threads = NumpyBackend().threads
    for entry in profile:
        signature = node_signature(entry.step.node)
        of = {name: cost_table().lookup(name, signature, threads) for name in ("numpy", "slow")}
        assert of["numpy"] < 1e-3 <= of["slow"]


@pytest.mark.parametrize(("executor", "measured"), [("dataflow", "dataflow"), ("auto", "linear")])
def test_profile_runs_the_executor_of_a_dataflow_session(monkeypatch, executor, measured):
    names = []
    profile_in_turn = trial.profile_in_turn

    def recorded(executor, *arguments):
        names.append(executor.name)
        return profile_in_turn(executor, *arguments)

    monkeypatch.setattr(trial, "profile_in_turn", recorded)
    profile = compiled(executor=executor, backends=["numpy"]).profile({"x": X}, runs=2)
    assert set(names) == {measured}
    assert {entry.count for entry in profile} == {2}
