"""Names of values in graphs and the graphs in them."""

from __future__ import annotations

import numpy as np
import pytest

import penstock as ps
from penstock.analysis.verify import verify
from penstock.core.errors import InvalidModel
from penstock.core.types import ANY
from penstock.frontends.load import load
from penstock.frontends.onnx.importer import load_onnx
from penstock.ir.graph import Graph
from tests.frontends.onnx.test_importer import X
from tests.support.onnx_models import graph_of, interpret_model, model_of, node, problems, tensor


def test_nodes_in_any_order_are_connected() -> None:
    model = load_onnx(model_of(node("Neg", "h", "y"), node("Relu", "x", "h")))
    neg, relu = model.graph.nodes
    assert neg.inputs[0] is not None
    assert neg.inputs[0].producer is relu


def test_undefined_name_is_reported_by_verify() -> None:
    model = load_onnx(model_of(node("Add", "x missing", "y")))
    with pytest.raises(InvalidModel, match="reads 'missing', which nothing makes"):
        verify(model)


def test_duplicate_name_is_reported_by_verify() -> None:
    model = load_onnx(model_of(node("Relu", "x", "y", "a"), node("Neg", "x", "y", "b")))
    a, b = model.graph.nodes
    assert model.graph.outputs == [b.outputs[0]]
    assert a.outputs[0] is not b.outputs[0]
    with pytest.raises(InvalidModel, match="two values of graph 'g' are named 'y'"):
        verify(model)


def test_outputs_can_be_inputs_or_constants() -> None:
    model = load_onnx(model_of(outputs=("x", "w"), initializers=[tensor("w", X)]))
    assert model.graph.outputs[0] is model.graph.inputs[0]
    assert np.array_equal(interpret_model(model, X)[1], X)


def test_initializer_that_is_also_an_input_is_a_constant() -> None:
    proto = model_of(node("Add", "x w", "y"), inputs=("x", "w"), initializers=[tensor("w", X)])
    model = load_onnx(proto)
    assert [v.name for v in model.graph.inputs] == ["x"]
    weight = model.graph.nodes[0].inputs[1]
    assert weight is not None
    assert weight.name == "w"
    assert np.array_equal(weight.const, X)


def test_initializers_without_unique_names_are_refused() -> None:
    proto = model_of(node("Relu", "x", "y"), initializers=[tensor("w", X), tensor("w", X)])
    assert problems(proto) == ("the model has initializer 'w' twice; remove one",)
    proto = model_of(node("Relu", "x", "y"), initializers=[tensor("", X)])
    assert problems(proto) == ("the model has an initializer without a name; name it",)


def test_nested_graph_reads_outer_values() -> None:
    inner = graph_of([node("Add", "h late", "t")], (), ("t",), name="inner")
    middle = graph_of([node("If", "c", "m", "deep", then_branch=inner, else_branch=inner)], (), "m")
    proto = model_of(
        node("If", "c", "y", "outer", then_branch=middle, else_branch=graph_of([], (), ("h",))),
        node("Relu", "x", "h"),
        node("Neg", "h", "late"),
        initializers=[tensor("c", True)],
    )
    model = load_onnx(proto)
    outer, relu, neg = model.graph.nodes
    deep = outer.attrs["then_branch"].nodes[0]
    add = deep.attrs["then_branch"].nodes[0]
    assert add.inputs == [relu.outputs[0], neg.outputs[0]]
    assert outer.attrs["else_branch"].outputs == [relu.outputs[0]]
    assert add.origin == ("Add_0 in then_branch of deep in then_branch of outer in the model")


def test_nested_input_types_are_not_trusted() -> None:
    body = graph_of([node("Identity", "c", "c2"), node("Relu", "s", "t")], "ics", ("c2", "t"))
    proto = model_of(node("Loop", "n  x", "y", body=body), initializers=[tensor("n", 3)])
    graph: Graph = load_onnx(proto).graph.nodes[0].attrs["body"]
    assert [v.type for v in graph.inputs] == [ANY] * 3


def test_branches_may_name_values_as_the_node_around_them_names_its_outputs() -> None:
    """Which it has made only when they have run: optimum writes both steps of a decoder so."""
    inner = graph_of([node("Relu", "x", "h"), node("Neg", "h", "y")], (), ("y",))
    other = graph_of([node("Identity", "x", "y")], (), ("y",))
    nested = graph_of([node("If", "c", "y", then_branch=inner, else_branch=other)], (), ("y",))
    proto = model_of(
        node("If", "c", "y", then_branch=nested, else_branch=other),
        initializers=[tensor("c", True)],
    )
    model = load(proto.SerializeToString())
    names = [v.name for graph in model.graph.graphs() for n in graph.nodes for v in n.outputs if v]
    assert len({*names}) == len(names)
    assert "y" in [value.name for value in model.graph.outputs]
    assert np.array_equal(interpret_model(model, X)[0], -np.maximum(X, 0))


def test_nodes_in_a_branch_may_not_hide_values_that_were_made_before() -> None:
    branch = graph_of([node("Neg", "x", "h")], (), ("h",))
    proto = model_of(
        node("Relu", "x", "h"),
        node("If", "c", "y", then_branch=branch, else_branch=branch),
        initializers=[tensor("c", True)],
    )
    with pytest.raises(InvalidModel, match=r"'h', made by .* hides it"):
        load(proto.SerializeToString())


def test_inputs_of_nested_graphs_may_hide_values_around_them() -> None:
    """The innermost value of a name is the one that is read, as in ONNX Runtime."""
    body = graph_of(
        [node("Identity", "c", "go"), node("Mul", "x h", "t")], ("i", "c", "x"), ("go", "t")
    )
    proto = model_of(
        node("Neg", "x", "h"),
        node("Loop", "n c h", "l", body=body),
        node("Add", "l x", "y"),
        initializers=[tensor("n", 2), tensor("c", True)],
    )
    model = load(proto.SerializeToString())
    assert np.array_equal(interpret_model(model, X)[0], -X * -X * -X + X)


@pytest.mark.parametrize("ir_version", [3, 8])
def test_initializer_that_nothing_reads_can_be_fed_if_the_format_lets_it_be_overridden(
    ir_version: int,
) -> None:
    proto = model_of(
        node("Add", "x w", "y"),
        inputs=("x", "w", "unread"),
        initializers=[tensor("w", X), tensor("unread", X)],
    )
    proto.ir_version = ir_version
    session = ps.compile(proto, cache=False)
    assert [port.name for port in session.inputs] == ["x"]
    assert np.array_equal(session.run({"x": X, "w": -X})["y"], X - X)
    if ir_version < 4:
        with pytest.raises(ps.InvalidInput, match="'unread': the model has no such value"):
            session.run({"x": X, "unread": X})
    else:
        assert np.array_equal(session.run({"x": X, "unread": X})["y"], X + X)
