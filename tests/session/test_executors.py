"""Which executor runs a session."""

from __future__ import annotations

import numpy as np
import pytest

from penstock.host.native import library
from penstock.host.threads import core_budget
from penstock.tuning.measure import GraphProfiler
from tests.executors.test_parallel import TWO_BRANCHES
from tests.support.cost_models import EqualCosts
from tests.support.onnx_text import compile_text


def test_auto_is_linear_where_a_second_worker_has_nothing_to_do():
    chain = "g (float[9] x) => (float[9] y) { a = Exp(x) b = Sin(a) c = Neg(b) y = Abs(c) }"
    tiny = "g (float[9] x) => (float[9] y) { a = Exp(x) b = Sin(x) c = Neg(x) y = Sum(a, b, c) }"
    for text in (chain, tiny):
        for executor in ("auto", "parallel"):
            session = compile_text(text, executor=executor)
            session.run({"x": np.ones(9, np.float32)})
            assert session.inspect.executor.name == "linear"


def test_auto_is_parallel_where_the_simulated_schedule_wins():
    session = compile_text(
        TWO_BRANCHES, executor="auto", shapes={}, backends=["numpy"], cost_model=EqualCosts()
    )
    assert session.inspect.executor.name == ("parallel" if core_budget() > 1 else "linear")


@pytest.mark.skipif(library() is None, reason="there are no compiled kernels")
def test_auto_without_autotune_measures_nothing_if_kernels_have_threads(monkeypatch):
    large = """g (float[512, 512] x) => (float[512, 512] y) {
        n = Sin(x) a = MatMul(x, x) b = Cos(a) c = MatMul(n, x) d = Sin(c) y = Add(b, d) }"""
    measured = []
    monkeypatch.setattr(
        GraphProfiler, "_measure", lambda self, *arguments: measured.append(arguments)
    )
    session = compile_text(large, executor="auto", shapes={})
    assert session.inspect.executor.name == "linear"
    assert not measured
    compile_text(large, executor="auto", shapes={}, autotune=True)
    assert measured
