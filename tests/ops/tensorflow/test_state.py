"""Variables: steps of training as TensorFlow makes them, and declarations and gradients that do not
fit."""

from __future__ import annotations

import numpy as np
import pytest

import penstock as ps
from penstock.core.types import FLOAT32, ShapeError, TensorType
from penstock.ops.tensorflow.state import Store
from tests.support.tf_graphs import Builder, Shape, Type
from tests.support.tf_operations import operation_tests

test_operation_matches_tensorflow, test_reversed_nodes_match_tensorflow = operation_tests(
    "ops.tensorflow.state"
)


def test_saved_value_of_another_type_is_refused():
    store = Store({"w": np.zeros((2, 3), np.float32)})
    for type_ in (TensorType(FLOAT32, (3, 2)), TensorType(np.dtype(np.int32), (2, 3))):
        with pytest.raises(ShapeError, match=r"but float32\[2, 3\] in the checkpoint"):
            store.variable("w", type_)
    assert store.variable("w", TensorType(FLOAT32, (None, 3))).read().shape == (2, 3)


@pytest.mark.parametrize(
    "executor", ["linear", "dataflow", "parallel", "streams", "frames", "interpret"]
)
def test_variable_of_two_types_is_refused(executor):
    g = Builder()
    for name, dims in (("a", [2]), ("b", [3])):
        attrs = {"dtype": Type("float32"), "shape": Shape(dims), "shared_name": "v"}
        g.node("VarHandleOp", name=name, **attrs)
    g.const(np.zeros(2, np.float32), "zeros")
    g.node("AssignVariableOp", "a", "zeros", name="assign", dtype=Type("float32"))
    g.node("ReadVariableOp", "b", "^assign", name="read", dtype=Type("float32"))
    with pytest.raises(ps.PenstockError, match="is declared as float"):
        ps.compile(g.bytes(), executor=executor).run({}, ["read"])


def step(rate: np.ndarray, gradient: np.ndarray) -> tuple[ps.Session, list[str]]:
    """A step of a variable of shape [2] down a gradient, and what to fetch."""
    g = Builder()
    kind = Type("float32")
    g.node("VarHandleOp", name="v", dtype=kind, shape=Shape((2,)))
    g.node("AssignVariableOp", "v", g.const(np.ones(2, np.float32)), name="assign", dtype=kind)
    inputs = ["v", g.const(rate), g.const(gradient), "^assign"]
    g.node("ResourceApplyGradientDescent", *inputs, name="step", T=kind)
    g.node("ReadVariableOp", "v", "^step", name="y", dtype=kind)
    return ps.compile(g.bytes()), ["y:0"]


def test_step_of_a_gradient_of_another_shape_is_refused():
    half = np.float32(0.5)
    session, fetches = step(half, np.ones(2, np.float32))
    np.testing.assert_array_equal(session.run({}, fetches)["y:0"], [0.5, 0.5])
    session, fetches = step(half, np.ones(1, np.float32))
    with pytest.raises(ps.RunError, match=r"'v' and its slots have shapes \[\(2,\)\].*has \(1,\)"):
        session.run({}, fetches)


def test_step_at_a_rate_that_is_no_scalar_is_refused():
    session, fetches = step(np.ones(2, np.float32), np.ones(2, np.float32))
    with pytest.raises(ps.RunError, match="of ResourceApplyGradientDescent must be a scalar"):
        session.run({}, fetches)
