"""Whole models on torch's CPU device agree with ONNX Runtime; nothing is transferred inside."""

from __future__ import annotations

import numpy as np
import pytest
from bench.zoo.check import difference
from bench.zoo.sample import samples
from bench.zoo.store import flat

import penstock as ps
from tests.models.fetch import RealModel, fetch, real_models
from tests.models.test_zoo import answers
from tests.support.sweeps import drawn
from tests.support.torch_kernels import needs_torch
from tests.test_models import assert_agree, onnxruntime_session, resnet50

pytestmark = needs_torch

TOLERANCE = 1e-4


def transfers_inside(session: ps.Session) -> int:
    """The transfers of a plan beside those of its inputs and outputs."""
    plan = session.inspect.plan
    moved = [step for step in plan.walk() if step.node.op.name == "Transfer"]
    ends = {*plan.inputs, *plan.outputs}
    # Conditions of branches and loops are read on the host.
    ends.update(i for step in plan.walk() if step.control for i in step.inputs)
    return sum(1 for step in moved if ends.isdisjoint((*step.inputs, *step.outputs)))


def on_torch_alone(session: ps.Session) -> bool:
    backends = {s.backend for s in session.inspect.plan.walk() if s.backend}
    return backends == {"torch"}


@pytest.mark.costly
@pytest.mark.models
@pytest.mark.parametrize("model", drawn(real_models(), 6), ids=lambda model: model.name)
def test_real_model_on_torch_agrees_with_onnx_runtime(model: RealModel):
    path = fetch(model)
    feeds = model.feeds()
    wanted = onnxruntime_session(str(path)).run(None, feeds)
    session = ps.compile(path, backends=["torch"])
    for _ in range(2):
        for got, want in zip(session.run(feeds).values(), wanted, strict=True):
            assert_agree(got, want, TOLERANCE)
    if on_torch_alone(session):
        assert transfers_inside(session) == 0


ZOO = [each for each in samples() if each[0].name.startswith("torch-modules")]


@pytest.mark.parametrize(("one", "model", "feeds"), ZOO, ids=[one.name for one, _, _ in ZOO])
def test_zoo_model_on_torch_agrees_with_onnx_runtime(one, model: bytes, feeds: dict):
    session = ps.compile(model, backends=["torch"])
    wanted = flat(answers(model, feeds))
    for _ in range(2):  # the second run uses the memory of the first
        got = flat(session.run(feeds).values())
        assert difference(got, wanted, same_types=True) <= max(one.tolerance, TOLERANCE)
    if on_torch_alone(session):
        assert transfers_inside(session) == 0


@pytest.mark.costly
def test_resnet_runs_on_torch_alone_and_transfers_nothing_inside():
    model = resnet50()
    x = np.random.default_rng(0).standard_normal((1, 3, 224, 224)).astype(np.float32)
    (want,) = onnxruntime_session(model.SerializeToString()).run(None, {"x": x})
    session = ps.compile(model, backends=["torch"])
    assert_agree(session(x), want, TOLERANCE)
    assert on_torch_alone(session)
    assert transfers_inside(session) == 0
