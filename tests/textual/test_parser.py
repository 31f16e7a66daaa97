"""Text as graphs: what it says, and what is refused with its place."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.core.errors import InvalidModel
from penstock.ir.graph import Model
from penstock.ops import find
from penstock.ops.internal.arrays import ZERO_NAN
from penstock.textual.parser import parse_graph, parse_model
from penstock.textual.printer import format_graph, format_model
from tests.support.graphs import any_op, assert_same, graph, nest
from tests.support.sweeps import examples
from tests.textual.test_textual import GOLDEN, linear


def test_find_operation_of_registered_name_is_the_registered_operation() -> None:
    graph = parse_graph("graph(x, y) -> (z) { z = Add(x, y) }")
    assert graph.nodes[0].op is find("Add")


def test_parse_graph_nested_deeper_than_64_is_refused() -> None:
    assert format_graph(graph(format_graph(nest(64)))) == format_graph(nest(64))
    with pytest.raises(InvalidModel, match="this nests deeper than 64"):
        graph(format_graph(nest(65)))


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
        ("graph(x: int8[1.5]) -> () {}", "line 1, column 18: expected a dim, found ']'"),
        ("graph() -> () { Addd() }", "line 1, column 17: there is no operation Addd; is it 'Add'?"),
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


@examples(8)
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
