"""Variables whose declarations do not fit."""

from __future__ import annotations

import numpy as np
import pytest

import penstock as ps
from penstock.core.types import FLOAT32, ShapeError, TensorType
from penstock.ops.tensorflow.state import Store
from tests.support.tf_graphs import Builder, Shape, Type


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
    with pytest.raises(ps.PenstockError, match="variable 'v' is both"):
        ps.compile(g.bytes(), executor=executor).run({}, ["read"])
