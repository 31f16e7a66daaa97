"""Stages of a compilation: looks at whether it must end, and workers of backends."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

import penstock as ps
from penstock.compiler.options import EXECUTORS
from penstock.plan.grouping import ClusteredGrouping
from tests.compiler.test_stopped_compile import FEEDS, NODES, CountingToken, chain
from tests.executors.test_parallel import OfAllSteps
from tests.support.far_backend import MeetingBackend, TanhIsFar
from tests.support.onnx_text import model_from_text
from tests.support.tf_graphs import Builder, Type

# Calls of functions, in Python or not, between two looks at the control. A call takes a tenth of a
# microsecond to a few, so that these take some milliseconds.
MOST_CALLS = 20_000


def graph_def(nodes: int = NODES) -> bytes:
    builder = Builder()
    value = builder.placeholder("x", "float32", 4)
    for i in range(nodes):
        value = builder.node(("Neg", "Exp", "Sin", "Relu")[i % 4], value, T=Type("float32"))
    return builder.bytes()


@pytest.mark.costly
@pytest.mark.parametrize("executor", EXECUTORS)
def test_looks_at_the_control_follow_one_another_closely(executor: str) -> None:
    session = ps.compile(chain(), executor=executor, backends=["numpy"])
    token = CountingToken()
    token.counting(session.run, FEEDS)
    assert token.looks > NODES / 100
    assert token.calls < MOST_CALLS


def test_looks_at_the_control_follow_one_another_closely_with_fusion() -> None:
    token = CountingToken()
    token.counting(ps.compile(chain(500)).run, FEEDS)
    assert token.calls < MOST_CALLS


@pytest.mark.parametrize("source", [chain, graph_def])
def test_looks_at_the_control_follow_one_another_closely_in_front_ends(
    source: Callable[..., Any],
) -> None:
    ps.compile(source(3))  # imports its modules
    model, token = source(), CountingToken()
    token.counting(ps.compile, model)
    assert token.looks > NODES / 100
    assert token.calls < MOST_CALLS


class Separate(OfAllSteps):
    queue = ClusteredGrouping.queue


@pytest.mark.parametrize("executor", ["parallel", "streams"])
def test_runs_at_the_same_time_have_workers_each_on_a_far_backend(executor: str) -> None:
    text = "g (float[2] x) => (float[2] y) { a = Neg(x) b = Tanh(a) c = Abs(x) y = Add(b, c) }"
    far = MeetingBackend("meeting", ["Tanh"], workers=1)
    own = {"max_streams": 3} if executor == "streams" else {"grouping": Separate}
    session = ps.compile(
        model_from_text(text),
        executor=executor,
        backends=[far, "numpy"],
        expert=ps.ExpertOptions(cost_model=TanhIsFar(), **own),
    )
    x = np.ones(2, np.float32)
    with ThreadPoolExecutor(2) as threads:
        for answers in threads.map(session.run, [{"x": x}] * 4):
            np.testing.assert_allclose(answers["y"], np.tanh(-x) + x, rtol=1e-6)
    assert session.inspect.effective.executor == executor
