"""Text form of graphs: golden files, round trips, and the errors of the parser."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.analysis.verify import verify
from penstock.core.errors import InvalidModel
from penstock.core.types import ANY, FLOAT32, INT64, TensorType
from penstock.ir.graph import Graph, Model, Node, Value
from penstock.ops import find
from penstock.ops.internal.fused import fused, is_fused, parts
from penstock.ops.internal.zero_nan import ZERO_NAN
from penstock.textual.parser import find_operation, parse_graph, parse_model
from penstock.textual.printer import format_graph, format_model, format_type
from tests.support.graphs import (
    TYPES,
    any_op,
    arrays,
    assert_same,
    graph,
    graphs,
    nest,
    node_named,
    same_value,
    value_named,
)

GOLDEN = Path(__file__).parents[1] / "golden"


def check_golden(name: str, text: str) -> None:
    """``text`` is that of the golden file; with UPDATE_GOLDEN=1 the file becomes that text."""
    path = GOLDEN / f"{name}.txt"
    if os.environ.get("UPDATE_GOLDEN"):
        path.write_text(text + "\n")
    assert path.read_text() == text + "\n", f"to accept: UPDATE_GOLDEN=1 pytest {__file__}"


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


# Round trips


@settings(max_examples=200)
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


def test_find_operation_of_registered_name_is_the_registered_operation() -> None:
    graph = parse_graph("graph(x, y) -> (z) { z = Add(x, y) }")
    assert graph.nodes[0].op is find("Add")


def test_format_graph_of_older_operation_writes_its_version() -> None:
    old = find_operation("Add", "", 6)
    assert old is not None and old is not find("Add")
    x, y = Value("x"), Value("y")
    text = format_graph(Graph([x], [y], [Node(old, [x, x], [y])]))
    assert "y = Add-6(x, x)" in text
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


def test_parse_graph_nested_deeper_than_64_is_refused() -> None:
    assert format_graph(graph(format_graph(nest(64)))) == format_graph(nest(64))
    with pytest.raises(InvalidModel, match="this nests deeper than 64"):
        graph(format_graph(nest(65)))


# What the parser refuses


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "line 1, column 1: expected 'graph', found the end of the text"),
        ("graph(x) -> (x) {\n  }}", "line 2, column 4: expected the end of the text, found '}'"),
        ("graph(x) -> (y) {}", "line 1, column 14: there is no value 'y'"),
        (
            "graph(input) -> (inputs) {}",
            "line 1, column 18: there is no value 'inputs'; is it 'input'?",
        ),
        ("graph(x, x) -> () {}", "line 1, column 10: there is a value 'x' already"),
        ("graph(x y) -> () {}", "line 1, column 9: expected ',' or ')', found 'y'"),
        ("graph(_) -> () {}", "line 1, column 7: '_' is a word of its own; put quotes around it"),
        ("graph(x: float33[2]) -> () {}", "line 1, column 10: expected a type, found 'float33'"),
        (
            "graph(x: int8[1.5]) -> () {}",
            "line 1, column 18: expected a dim, found ']'",
        ),
        (
            "graph() -> () { Addd() }",
            "line 1, column 17: there is no operation Addd; is it 'Add'?",
        ),
        ("graph() -> () { Addd-9() }", "there is no operation Addd-9; is it 'Add'?"),
        ("graph() -> () { Add{a=1, a=2}() }", "line 1, column 26: there is an attribute 'a' alr"),
        ("graph() -> () { Add{a=}() }", "line 1, column 23: expected a value, found '}'"),
        ('graph() -> () { Add{a=bytes "x"}() }', "line 1, column 29: this is not base64"),
        ("graph() -> () { Add() as a as b }", "line 1, column 28: a node has only one 'as'"),
        ("graph() -> () { Add() in m }", "line 1, column 23: 'in' comes after 'as'"),
        ("graph() -> () { Add() after(7) }", "line 1, column 29: 0 nodes of this graph are 7"),
        ("graph() -> () { c = const 1 }", "line 1, column 21: an array needs its dtype and all"),
        ("graph() -> () { c, d = const 1 }", "line 1, column 24: a constant is one value"),
        (
            "graph() -> () { c: int8[] = const 300 }",
            "line 1, column 29: some elements are no values of int8",
        ),
        (
            "graph() -> () { c: int4[1] = const [8] }",
            "line 1, column 30: some elements are no values of int4",
        ),
        (
            "graph() -> () { c: int8[3] = const [1, 2] }",
            "line 1, column 30: these elements do not fit the shape [3]",
        ),
        (
            'graph() -> () { c: int8[99999999999999] = const base64 "AA==" }',
            "line 1, column 43: 1 bytes do not fit int8[99999999999999]",
        ),
        (
            "graph() -> () { c: float32[2] = const [1, true] }",
            "line 1, column 33: True is no element of a float32 array",
        ),
        ("graph() -> () { c: float32[9] = const [1.0, ...] }", "cannot be read back"),
        ('graph "x', "line 1, column 7: this string does not end"),
        ("graph() -> () { ; }", "line 1, column 17: ';' cannot stand here"),
        (f"graph(x: {'seq(' * 99}any{')' * 99}) -> () {{}}", "this nests deeper than 64"),
        (f"graph(x: int8[{'9' * 9999}]) -> () {{}}", "a number has at most 400 digits"),
    ],
)
def test_parse_graph_of_invalid_text_names_line_and_column(text: str, message: str) -> None:
    with pytest.raises(InvalidModel) as error:
        parse_graph(text)
    assert message in str(error.value)


def test_parse_model_of_a_lone_graph_is_a_model_of_it() -> None:
    text = format_graph(linear())
    model = parse_model(f"# a comment\n{text}")
    assert model.entry == "main"
    assert_same(model.graph, parse_graph(text))
    with pytest.raises(InvalidModel, match="expected the end of the text"):
        parse_model(f"{text}\n{text}")


def test_internal_operation_of_a_pass_is_read_back() -> None:
    text = "graph g(x: float32[2]) -> (y) {\n  y: float32[2] = penstock.ZeroNaN(x)\n}"
    assert parse_graph(text).nodes[0].op is ZERO_NAN


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


@pytest.mark.parametrize(
    "region",
    [
        "",
        "{ region: graph() -> (y) { y = Relu(x) } }",
        "{ region: graph(x) -> (x) { } }",
        "{ region: graph(x) -> (y) { y, z = Relu(x) } }",
    ],
)
def test_fused_node_of_another_form_is_refused(region: str) -> None:
    with pytest.raises(InvalidModel, match=r"a fused node has|a region has"):
        parse_graph(f"graph(x) -> (f) {{ f = penstock.Fused(x) {region} }}")


def test_parse_model_of_invalid_text_says_what_it_expected() -> None:
    with pytest.raises(InvalidModel, match="there is a graph or function 'a' already"):
        parse_model("model a { graph a() -> () {} graph a() -> () {} }")
    with pytest.raises(InvalidModel, match="expected 'metadata', 'function', a graph or '}'"):
        parse_model("model a { = }")


SEEDS = [path.read_text() for path in sorted(GOLDEN.glob("*.txt"))]


@settings(max_examples=400)
@given(st.data())
def test_parser_of_mutated_text_raises_only_invalid_model(data: st.DataObject) -> None:
    """Golden texts with pieces cut out, moved or replaced."""
    text = data.draw(st.sampled_from(SEEDS))
    for _ in range(data.draw(st.integers(1, 4))):
        start = data.draw(st.integers(0, len(text)))
        stop = min(len(text), start + data.draw(st.integers(0, 12)))
        origin = data.draw(st.integers(0, len(text)))
        piece = data.draw(
            st.sampled_from(["", text[origin : origin + 12], "{", ")", '"', "-1", "9" * 30, "inf"])
            | st.text(max_size=3)
        )
        text = text[:start] + piece + text[stop:]
    parse = parse_model if text.startswith("model") else parse_graph
    try:
        parsed = parse(text, any_op)
    except InvalidModel:
        return
    assert format_model(parsed) if isinstance(parsed, Model) else format_graph(parsed)


@given(st.text(alphabet='graph(){}[]->:=,_?x1" \n', max_size=40))
def test_parser_of_random_text_raises_only_invalid_model(text: str) -> None:
    with pytest.raises(InvalidModel):
        parse_graph(text + ";", any_op)


def test_constant_round_trip_keeps_known_contents() -> None:
    parsed = graph("graph(n) -> (r) { c: int64[2] = const [1, 12]  r = Reshape(n, c) }")
    assert value_named(parsed, "c").type == TensorType(INT64, (2,), (1, 12))
