"""Layouts: no value is overwritten while somebody still reads it, as an independent replay sees."""

from __future__ import annotations

import onnx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import penstock as ps
from penstock.backends.numpy import NumpyBackend
from penstock.ir import Graph, clone
from penstock.limits import DEFAULT_LIMITS
from penstock.liveness import Layout, dependencies, lay_out
from penstock.ops.base import array_of  # noqa: F401
from penstock.order import topological_order
from penstock.passes.pipeline import optimize
from penstock.plan import Kind, Plan, compile_plan
from penstock.types import TensorType
from tests.random_graphs import graphs, seeded
from tests.replay import Overwritten, replay


def plan_of(graph: Graph) -> Plan:
    copy = clone(graph)
    optimize(copy, DEFAULT_LIMITS)
    return compile_plan(copy, [NumpyBackend()])


@settings(max_examples=200, deadline=None, suppress_health_check=list(HealthCheck))
@given(graph=graphs(), planner=st.sampled_from(["best", "first_fit", "wic", "bump"]))
def test_nothing_is_overwritten_while_it_is_read(graph, planner):
    plan = plan_of(graph)
    replay(plan, lay_out(plan, planner))


@pytest.mark.parametrize("seed", range(60))
def test_nothing_is_overwritten_in_larger_graphs(seed):
    plan = plan_of(seeded(seed, 40))
    replay(plan, lay_out(plan))
