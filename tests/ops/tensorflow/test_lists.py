"""Lists of tensors and optionals: what TensorFlow computed, the shapes of elements, and what does not
add up."""

from __future__ import annotations

import numpy as np
import pytest

import penstock as ps
from tests.support.tf_graphs import Builder, Shape, Type
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
    with pytest.raises(ps.RunError, match="element 1 has shape"):
        element([3]).run({"x": np.ones((3, 2), np.float32)}, ["y:0"])


@pytest.mark.parametrize("op", ["TensorListFromTensor", "TensorListScatterV2"])
def test_list_holds_strings_as_they_are(op: str) -> None:
    g = Builder()
    kinds = {"element_dtype": Type("object"), "shape_type": Type("int32")}
    inputs = [g.placeholder("x", "object", 2)]
    shape = g.const(np.array([], np.int32))
    if op == "TensorListScatterV2":
        inputs += [g.const(np.array([1, 0], np.int32)), shape, g.const(np.int32(2))]
    else:
        inputs += [shape]
    strings = g.node(op, *inputs, **kinds)
    own = {"element_dtype": Type("object")}
    item = g.node("TensorListGetItem", strings, g.const(np.int32(1)), shape, **own)
    g.node("Pack", item, item, name="y", N=2, T=Type("object"))
    out = ps.compile(g.bytes()).run({"x": np.array(["a", "bc"], object)})["y:0"]
    assert (out.dtype, out.tolist()) == (object, ["a" if "Scatter" in op else "bc"] * 2)


# Optionals, sums and lists of lists.


def reading(g: Builder, variant: str) -> bytes:
    """A graph that reads a float32[2] out of an optional."""
    wanted = {"output_types": [Type("float32")], "output_shapes": [Shape((2,))]}
    g.node("OptionalGetValue", variant, name="y", **wanted)
    return g.bytes()


def optional_of(g: Builder, x: str) -> str:
    return g.node("OptionalFromValue", x, Toutput_types=[Type("float32")])


def test_optional_value_is_declared_with_its_shape() -> None:
    """What follows can then be planned."""
    g = Builder()
    session = ps.compile(reading(g, optional_of(g, g.placeholder("x", "float32", -1))))
    assert [str(port.type) for port in session.outputs] == ["float32[2]"]
    np.testing.assert_array_equal(session.run({"x": np.ones(2, np.float32)})["y:0"], [1, 1])
    with pytest.raises(ps.RunError, match="the optional contains float"):
        session.run({"x": np.ones(3, np.float32)})


def test_optional_without_value_has_none_to_get() -> None:
    g = Builder()
    with pytest.raises(ps.RunError, match="the optional has no value"):
        ps.compile(reading(g, g.node("OptionalNone"))).run({})


def test_optionals_with_and_without_value_do_not_add_up() -> None:
    g = Builder()
    x = g.placeholder("x", "float32", 2)
    total = g.node("AddN", optional_of(g, x), g.node("OptionalNone"), N=2, T=Type("variant"))
    with pytest.raises(ps.RunError, match="their numbers of components differ"):
        ps.compile(reading(g, total)).run({"x": np.ones(2, np.float32)})


def test_optionals_of_different_shapes_do_not_add_up() -> None:
    g = Builder()
    x, y = g.placeholder("x", "float32", 2), g.placeholder("z", "float32", 1)
    total = g.node("AddN", optional_of(g, x), optional_of(g, y), N=2, T=Type("variant"))
    with pytest.raises(ps.RunError, match="dtypes and shapes must be equal"):
        ps.compile(reading(g, total)).run({"x": np.ones(2, np.float32), "z": np.ones(1, "f")})


def test_lists_of_different_lengths_do_not_add_up() -> None:
    g = Builder()
    kinds = {"element_dtype": Type("float32"), "shape_type": Type("int32")}
    shape = g.const(np.zeros(0, np.int32))
    lists = [
        g.node("TensorListFromTensor", g.placeholder(name, "float32", -1), shape, **kinds)
        for name in ("x", "y")
    ]
    total = g.node("AddN", *lists, N=2, T=Type("variant"))
    g.node("TensorListLength", total, name="n")
    session = ps.compile(g.bytes())
    assert session.run({"x": np.ones(2, np.float32), "y": np.ones(2, np.float32)})["n:0"] == 2
    with pytest.raises(ps.RunError, match="types and lengths differ"):
        session.run({"x": np.ones(2, np.float32), "y": np.ones(3, np.float32)})


def test_list_of_variants_makes_no_tensor() -> None:
    g = Builder()
    shape, kind = g.const(np.zeros(0, np.int32)), Type("variant")
    kinds = {"element_dtype": kind, "shape_type": Type("int32")}
    empty = g.node("EmptyTensorList", shape, g.const(np.int32(-1)), **kinds)
    handle = g.node("TensorListPushBack", empty, empty, element_dtype=kind)
    index = g.const(np.zeros(1, np.int32))
    g.node("TensorListGather", handle, index, shape, name="y", element_dtype=kind)
    with pytest.raises(ps.RunError, match="a list of variants cannot be"):
        ps.compile(g.bytes()).run({}, ["y:0"])


def test_list_refuses_a_list_among_tensors() -> None:
    g = Builder()
    shape, kind = g.const(np.zeros(0, np.int32)), Type("float32")
    kinds = {"element_dtype": kind, "shape_type": Type("int32")}
    empty = g.node("EmptyTensorList", shape, g.const(np.int32(-1)), **kinds)
    handle = g.node("TensorListPushBack", empty, empty, element_dtype=kind)
    g.node("TensorListLength", handle, name="n")
    with pytest.raises(ps.RunError, match="the list elements have type float"):
        ps.compile(g.bytes()).run({}, ["n:0"])
