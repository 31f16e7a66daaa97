"""Text form of graphs: golden files, round trips, and the errors of the parser."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from penstock.core.types import ANY, FLOAT32, INT64, TensorType
from penstock.ir.graph import Graph, Node, Value
from penstock.ops.internal.fused import fused, is_fused, parts
from penstock.textual.parser import parse_graph
from penstock.textual.printer import format_graph, format_type
from tests.support.graphs import (
    TYPES,
    any_op,
    arrays,
    assert_same,
    graph,
    graphs,
    same_value,
    value_named,
)
from tests.support.sweeps import examples

GOLDEN = Path(__file__).parents[1] / "golden"


def linear() -> Graph:
    """Two layers, as an exporter writes them: types, constants, names with slashes."""
    x = Value("x", TensorType(FLOAT32, ("batch", 3)))
    w = Value("w", const=np.arange(6, dtype=np.float32).reshape(3, 2) / 10)
    b = Value("b", const=np.zeros(20, np.float32))
    h = Value("/layer/MatMul_output_0", TensorType(FLOAT32, ("batch", 2)))
    y = Value("y:0", TensorType(FLOAT32, (None, 2)))
    nodes = [
        Node(any_op("MatMul"), [x, w], [h], name="/layer/MatMul", origin="/layer/MatMul in m.onnx"),
        Node(any_op("Add"), [h, b], [y], name="add", origin="add, fused from two nodes"),
    ]
    return Graph([x], [y], nodes, "main")


@examples(3)
@given(graphs())
def test_random_graph_round_trip_gives_an_equal_graph(original: Graph) -> None:
    text = format_graph(original)
    back = parse_graph(text, any_op)
    assert_same(original, back)
    assert format_graph(back) == text


@given(TYPES)
def test_type_round_trip_gives_an_equal_type(kind: object) -> None:
    back = graph(f"graph(x: {format_type(kind)}) -> () {{ }}")  # type: ignore[arg-type]
    assert back.inputs[0].type == kind


@given(arrays(), st.booleans())
def test_constant_round_trip_gives_equal_elements(array: np.ndarray, vague: bool) -> None:
    kind = TensorType(array.dtype, None) if vague else ANY
    value = Value("c", kind, const=array)
    back = graph(format_graph(Graph([], [value], []))).outputs[0]
    assert same_value(value, back)


def test_fused_node_round_trip_gives_an_equal_node() -> None:
    x, h, y = (Value(name, TensorType(FLOAT32, (2,))) for name in "xhy")
    bias = Value("bias", const=np.ones(2, np.float32))
    node = fused([Node(any_op("Add"), [x, bias], [h]), Node(any_op("Relu"), [h], [y])])
    text = format_graph(Graph([x], node.outputs, [node], "g"))
    assert 'penstock.Fused-1{ops="Add Relu"}(x, bias)' in text
    assert "= Relu(h)" in text
    back = parse_graph(text)
    assert format_graph(back) == text
    (again,) = back.nodes
    assert is_fused(again)
    assert again.attrs["region"].inputs == tuple(again.inputs)
    assert [part.op.name for part in parts(again)] == ["Add", "Relu"]


def test_constant_round_trip_keeps_known_contents() -> None:
    parsed = graph("graph(n) -> (r) { c: int64[2] = const [1, 12]  r = Reshape(n, c) }")
    assert value_named(parsed, "c").type == TensorType(INT64, (2,), (1, 12))
