"""Graphs as text: against golden files, and whatever the graph is."""

from __future__ import annotations

import os

import numpy as np
import pytest

from penstock.analysis.verify import verify
from penstock.core.errors import InvalidModel
from penstock.core.types import FLOAT32, TensorType
from penstock.ir.graph import Graph, Model, Node, Value
from penstock.ops import find
from penstock.textual.parser import find_operation, parse_graph, parse_model
from penstock.textual.printer import format_graph, format_model
from tests.support.graphs import any_op, assert_same, graph, nest, node_named
from tests.textual.test_textual import GOLDEN, linear


def check_golden(name: str, text: str) -> None:
    """``text`` is that of the golden file; with UPDATE_GOLDEN=1 the file becomes that text."""
    path = GOLDEN / f"{name}.txt"
    if os.environ.get("UPDATE_GOLDEN"):
        path.write_text(text + "\n")
    assert path.read_text() == text + "\n", f"to accept: UPDATE_GOLDEN=1 pytest {__file__}"


def attributes() -> Graph:
    """An attribute of every kind."""
    y = Value("y")
    attrs = {
        "int": 1,
        "float": 0.5,
        "whole": 2.0,
        "not a number": float("nan"),
        "least": float("-inf"),
        "text": 'say "#"\n',
        "flag": True,
        "nothing": None,
        "ints": [1, -2],
        "empty": [],
        "texts": ["a", "b"],
        "pair": (1, 2.5),
        "raw": b"\x00\xff",
        "array": np.array([[1, 2], [3, 4]], np.int64),
        "scalar": np.array(0.1, np.float32),
        "strings": np.array(["a", "b"], object),
        "type": TensorType(FLOAT32, ("N", None)),
        "dtype": np.dtype(np.int8),
    }
    return Graph([], [y], [Node(any_op("Make", "com.example", 3), [], [y], attrs)], "attributes")


CONTROL = """
graph main(n: int64[], x: float32[N]) -> (total, all) {
  yes: bool[] = const true
  total, all: float32[?, N] = Loop(n, yes, start) as loop in m.onnx {
    body: graph body(i: int64[], c: bool[], sum: float32[N]) -> (c, next, next) {
      odd = Odd(i)
      next: float32[N] = If(odd) as choice {
        then_branch: graph () -> (a) { a = Add(sum, x) }   # x from two graphs further out
        else_branch: graph () -> (sum) { }
      }
    }
  }
  start: float32[N] = Neg(x) on "/device:CPU:1"
  NoOp() after(loop, 1)
}
"""


def test_format_graph_of_linear_graph_equals_golden_text() -> None:
    text = format_graph(linear())
    check_golden("linear", text)
    assert_same(linear(), graph(text))


def test_format_graph_with_max_elements_equals_golden_text() -> None:
    """Cut short to be looked at."""
    check_golden("linear_shown", format_graph(linear(), max_elements=4))


def test_format_graph_of_all_attributes_equals_golden_text() -> None:
    text = format_graph(attributes())
    check_golden("attributes", text)
    assert_same(attributes(), graph(text))


def test_format_graph_of_control_flow_equals_golden_text() -> None:
    text = format_graph(graph(CONTROL))
    check_golden("control_flow", text)
    assert_same(graph(CONTROL), graph(text))
    verify(Model({"main": graph(text)}, "main"))


def test_format_model_equals_golden_text() -> None:
    main, other = linear(), graph("graph other(x) -> (y) { y = local.Twice(x) }")
    twice = graph("graph Twice(x) -> (y) { y = Add(x, x) }")
    metadata = {"producer": "a tool", "author's note": 'with "quotes"'}
    functions = {"local.Twice": twice}
    model = Model({"main": main, "second": other}, "main", functions, metadata, "models/m.onnx")
    text = format_model(model)
    check_golden("model", text)
    back = parse_model(text, any_op)
    assert format_model(back) == text
    assert (back.entry, back.metadata, back.path) == ("main", metadata, "models/m.onnx")
    assert list(back.graphs) == ["main", "second"] and list(back.functions) == ["local.Twice"]
    verify(back)


def test_format_graph_of_older_operation_writes_its_version() -> None:
    old = find_operation("Softmax", "", 12)
    assert old is not None and old is not find("Softmax")
    x, y = Value("x"), Value("y")
    text = format_graph(Graph([x], [y], [Node(old, [x], [y])]))
    assert "y = Softmax-12(x)" in text
    assert parse_graph(text).nodes[0].op is old


def test_format_graph_of_nested_graph_lists_its_captures() -> None:
    body = node_named(graph(CONTROL), "loop").attrs["body"]
    text = format_graph(body)
    assert ") uses (x: float32[N]) -> (c, next, next) {" in text
    assert format_graph(graph(text)) == text


def test_constant_is_written_in_the_innermost_graph_around_its_uses() -> None:
    main = graph("""graph main(b) -> (y) {
      y = If(b) {
        then_branch: graph() -> (s) { s = Neg(one) c: int64[] = const 5  t = Neg(c) }
        else_branch: graph() -> (one) { }
      }
      one: int64[] = const 1
    }""")
    lines = format_graph(main).splitlines()
    assert "  one: int64[] = const 1" in lines
    assert "      c: int64[] = const 5" in lines


def test_constant_with_the_name_of_a_value_gets_a_suffix() -> None:
    x, y = Value("x"), Value("y")
    twins = [Value("y", const=np.array(i)) for i in range(2)]
    text = format_graph(Graph([x], [y], [Node(any_op("Sum"), [x, *twins], [y])]))
    assert "y = Sum(x, y.1, y.2)" in text
    assert format_graph(graph(text)) == text


def test_control_input_without_unique_name_is_written_by_position() -> None:
    a, b = (Node(any_op("NoOp"), [], [], name="same") for _ in range(2))
    waiting = Node(any_op("NoOp"), [], [], control_inputs=[b, a])
    text = format_graph(Graph([], [], [a, b, waiting]))
    assert "NoOp() after(1, 0)" in text
    back = graph(text)
    assert back.nodes[2].control_inputs == [back.nodes[1], back.nodes[0]]


def test_targets_are_written_after_the_outputs() -> None:
    checks = [Node(any_op("NoOp"), [], [], name=name) for name in ("a", "b", "b")]
    whole = Graph([], [], checks, "g", [checks[2], checks[0]])
    text = format_graph(whole)
    assert text.startswith("graph g() -> () targets (2, a) {")
    assert_same(graph(text), whole)
    with pytest.raises(InvalidModel, match="0 nodes of this graph are 'c'"):
        graph("graph g() -> () targets (c) {\n}")


def test_format_graph_of_invalid_graph_does_not_fail() -> None:
    x, lost = Value("x"), Value("lost", producer=Node(any_op("Gone"), [], []))
    other = Node(any_op("NoOp"), [], [], name="elsewhere")
    odd = Value("odd", const=np.array([1, None], object))
    node = Node(any_op("Add"), [x, lost, odd], [x], {"k": object()}, control_inputs=[other])
    text = format_graph(Graph([x, x], [x, lost], [node, node]))
    assert "Add{k=... " in text and "after(elsewhere)" in text


def test_format_graph_of_deep_nesting_does_not_recurse() -> None:
    assert format_graph(nest(3000)).count("graph") == 3000
