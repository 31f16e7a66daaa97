"""Why steps run where they do."""

from __future__ import annotations

import numpy as np

import penstock as ps
from penstock.tuning.measure import costs_of
from penstock.tuning.reasons import Candidate, Reason, Reasons
from tests.support.cost_models import PreferredBackendCosts
from tests.support.onnx_text import model_from_text

TEXT = "g (float[2, 3] x) => (float[2, 3] y) { y = Exp(x) }"


def test_reason_without_candidates_is_its_text():
    assert str(Reason("place= says so")) == "place= says so"


def test_reason_lists_what_each_candidate_takes():
    costs = (Candidate("numpy", 2.5e-6, True), Candidate("native", 1e-6, False))
    text = "takes least (numpy 2.5 us, native 1.0 us, measured and estimated)"
    assert str(Reason("takes least", costs)) == text


def test_step_on_the_only_backend_says_so():
    session = ps.compile(model_from_text(TEXT), backends=["numpy"])
    session.run({"x": np.zeros((2, 3), np.float32)})
    costs = costs_of(PreferredBackendCosts("numpy"), session.inspect.backends)
    reasons = Reasons(session.inspect.backends, {}, costs)
    (step,) = session.inspect.plan.walk()
    reason = reasons.of(step)
    assert reason.text == "the only backend with a kernel for it"
    assert [c.backend for c in reason.candidates] == ["numpy"]
    placed = Reasons(session.inspect.backends, {"Exp": "numpy"}, costs).of(step)
    assert placed == Reason("place= says so")
