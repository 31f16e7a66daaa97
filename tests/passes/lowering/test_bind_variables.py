"""Reads and assignments that name their variables, and the steps that are left of them."""

from __future__ import annotations

import re

import numpy as np
import pytest

import penstock as ps
from penstock.core.types import FLOAT32, TensorType
from penstock.host.native import library
from penstock.ops.tensorflow.state import Store
from tests.support.tf_graphs import Builder, Shape, Type

EXECUTORS = ("linear", "dataflow", "parallel", "streams", "frames", "interpret")


def window(**options: object) -> ps.Session:
    """A model whose variable holds the last three of the numbers that it is fed, zeros at first."""
    g, dtype = Builder(), Type("float32")
    g.node("Placeholder", name="x", dtype=dtype, shape=Shape([1]))
    g.node("VarHandleOp", name="v", dtype=dtype, shape=Shape([3]), shared_name="last")
    g.node("VarIsInitializedOp", "v", name="begun")
    g.const(np.zeros(3, np.float32), "zeros")
    g.node("AssignVariableOp", "v", "zeros", name="first", dtype=dtype)
    g.node("ReadVariableOp", "v", name="before", dtype=dtype)
    g.const(np.array(0, np.int32), "axis")
    g.node("ConcatV2", "before", "x", "axis", name="joined", T=dtype, N=2, Tidx=Type("int32"))
    g.const(np.array([1], np.int32), "one")
    g.const(np.array([3], np.int32), "three")
    g.node("Slice", "joined", "one", "three", name="kept", T=dtype, Index=Type("int32"))
    g.node("AssignVariableOp", "v", "kept", name="assign", dtype=dtype)
    g.node("Neg", "kept", "^assign", name="y", T=dtype)
    return ps.compile(g.bytes(), **options)


@pytest.mark.parametrize("backends", [None, ["numpy"]], ids=["all", "numpy"])
@pytest.mark.parametrize("executor", EXECUTORS)
def test_variable_that_is_named_keeps_its_values_between_runs(executor, backends):
    session = window(executor=executor, backends=backends)
    session.run({}, targets=["first"], fetches=[])
    results = [session.run({"x": np.float32([i])}, ["y"])["y"].tolist() for i in (1, 2, 3, 4)]
    assert results == [[0, 0, -1], [0, -1, -2], [-1, -2, -3], [-2, -3, -4]]


def test_result_of_a_read_is_the_callers_own():
    session = window()
    session.run({}, targets=["first"], fetches=[])
    session.run({"x": np.float32([5])}, ["before"])["before"][:] = 9
    assert session.run({"x": np.float32([5])}, ["y"])["y"].tolist() == [0, 0, -5]


def test_variable_that_is_read_first_is_an_error_that_names_the_node():
    with pytest.raises(ps.RunError, match=r"before in the model.*'last' is read before"):
        window().run({"x": np.float32([5])}, ["y"])


@pytest.mark.skipif(library() is None, reason="there are no compiled kernels")
def test_read_concat_and_assignment_are_steps_of_one_call_without_handles():
    session = window()
    session.run({}, targets=["first"], fetches=[])
    session.run({"x": np.float32([5])}, ["y"])
    (source,) = [e.source for e in session._plans.executors() if "concat" in e.source]
    assert "varhandle" not in source
    steps = re.findall(r"^    # (\w+)_\d+\(", source, re.MULTILINE)
    assert steps == ["readvariableop", "concat", "assignvariableop"]


@pytest.mark.skipif(library() is None, reason="there are no compiled kernels")
def test_compiled_assignment_writes_over_an_array_that_nothing_else_holds():
    assign = library().functions.variable_assign
    variable = Store().variable("v", TensorType(FLOAT32, (3,)))
    assign(variable, None, np.float32([1, 2, 3]))
    address = variable.value.ctypes.data
    assign(variable, None, np.float32([4, 5, 6]))
    assert variable.value.ctypes.data == address
    held = variable.read()
    assign(variable, None, np.float32([7, 8, 9]))
    assign(variable, None, np.arange(6, dtype=np.float32)[::2])
    assert held.tolist() == [4, 5, 6]
    assert variable.value.tolist() == [0, 2, 4]
    assert not variable.value.flags.writeable
