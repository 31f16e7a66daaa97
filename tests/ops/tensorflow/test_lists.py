"""Lists of tensors: what TensorFlow computed, and the shapes of elements."""

from __future__ import annotations

import numpy as np
import pytest

import penstock as ps
from tests.support.tf_graphs import Builder, Type
from tests.support.tf_operations import operation_tests

test_operation_matches_tensorflow, test_reversed_nodes_match_tensorflow = operation_tests(
    "ops.tensorflow.lists"
)


def element(shape: list[int]) -> ps.Session:
    """Reads an element of a list of float32[2], as one of ``shape``."""
    g = Builder()
    x = g.placeholder("x", "float32", 3, 2)
    kinds = {"element_dtype": Type("float32"), "shape_type": Type("int32")}
    tensor_list = g.node("TensorListFromTensor", x, g.const(np.array([2], np.int32)), **kinds)
    wanted = g.const(np.array(shape, np.int32))
    del kinds["shape_type"]
    g.node("TensorListGetItem", tensor_list, g.const(np.int32(1)), wanted, name="y", **kinds)
    stacked = g.node("TensorListStack", tensor_list, wanted, name="z", num_elements=3, **kinds)
    g.node("Neg", stacked, name="n", T=Type("float32"))
    return ps.compile(g.bytes())


def test_list_elements_take_the_shape_of_their_reader() -> None:
    """What follows in a loop can then be planned."""
    session = element([2])
    x = np.arange(6, dtype=np.float32).reshape(3, 2)
    assert {port.name: str(port.type) for port in session.outputs} == {
        "y:0": "float32[2]",
        "n:0": "float32[?, 2]",
    }
    out = session.run({"x": x})
    np.testing.assert_array_equal(out["y:0"], x[1])
    np.testing.assert_array_equal(out["n:0"], -x)


def test_list_elements_merge_known_dims() -> None:
    session = element([-1])
    assert {str(port.type) for port in session.outputs} == {"float32[?]", "float32[?, ?]"}
    np.testing.assert_array_equal(session.run({"x": np.ones((3, 2), np.float32)})["y:0"], [1, 1])


def test_list_element_of_another_shape_is_refused() -> None:
    with pytest.raises(ps.RunError, match=r"element 1 has shape \(2,\), which is not \(3,\)"):
        element([3]).run({"x": np.ones((3, 2), np.float32)}, ["y:0"])
