"""Variables as inputs and outputs: runs that are fed what they returned equal those of LiteRT, and
of sessions with variables."""

from __future__ import annotations

import numpy as np
import pytest

import penstock as ps
from penstock.passes.structure.carry_variables import assigns_variables, carry_variables
from tests.support.tf_graphs import Builder, Shape, Type
from tests.support.variable_models import MODELS, by_litert, frames_of


@pytest.mark.parametrize("name", MODELS)
def test_runs_that_are_fed_their_state_equal_litert(name: str) -> None:
    model = ps.load(MODELS[name]())
    assert assigns_variables(model.graph)
    carried = carry_variables(model)
    assert not assigns_variables(carried.model.graph)
    assert carried.state == {"sum": "sum/next"}
    session, state = ps.compile(carried.model), dict(carried.initial)
    np.testing.assert_array_equal(state["sum"], np.full((1, 3), 10))
    frames = frames_of(name, 0, 6)
    for frame, want in zip(frames, by_litert(name, frames), strict=True):
        outputs = session.run({**frame, **state})
        np.testing.assert_allclose(outputs["y"], want, rtol=0, atol=1e-6)
        state = {"sum": outputs["sum/next"]}


def graph_of(more: str = "") -> Builder:
    """y = the sum of x so far, in a variable of references, times one that nothing assigns."""
    g = Builder()
    g.node("Placeholder", name="x", dtype=Type("float32"), shape=Shape((2,)))
    g.node("VariableV2", name="v", dtype=Type("float32"), shape=Shape((2,)))
    g.node("AssignAdd", "v", "x", name="sum", T=Type("float32"))
    g.node("Mul", "sum", "x", name="y", T=Type("float32"))
    if more:
        zeros = g.const(np.zeros(2, np.float32), "zeros")
        g.node("Assign", "v", zeros, name="init", T=Type("float32"))
    return g


def test_references_are_carried_and_assignments_that_no_run_makes_are_not() -> None:
    model = ps.load(graph_of("init").bytes())
    carried = carry_variables(model)
    assert (carried.state, carried.initial) == ({"v": "v/next"}, {})
    session, total = ps.compile(carried.model), np.float32([1, 2])
    for x in np.random.default_rng(0).standard_normal((3, 2)).astype(np.float32):
        outputs = session.run({"x:0": x, "v": total})
        total = total + x
        np.testing.assert_allclose(outputs["v/next"], total, rtol=1e-6)
        np.testing.assert_allclose(outputs["y:0"], total * x, rtol=1e-6)


def test_variables_that_are_used_in_other_ways_are_named() -> None:
    g = Builder()
    g.node("Placeholder", name="x", dtype=Type("float32"), shape=Shape((2,)))
    attrs = {"dtype": Type("float32"), "shape": Shape((2,))}
    g.node("VarHandleOp", name="v", shared_name="v", **attrs)
    g.node("AssignAddVariableOp", "v", "x", name="sum", dtype=Type("float32"))
    rate = g.const(np.float32(1), "rate")
    g.node("ResourceApplyGradientDescent", "v", rate, "x", "^sum", name="learn", T=Type("float32"))
    g.node("ReadVariableOp", "v", "^learn", name="y", dtype=Type("float32"))
    with pytest.raises(ps.InvalidInput, match=r"learn.* in a way that is not carried"):
        carry_variables(ps.load(g.bytes()))
