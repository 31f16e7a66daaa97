"""Graphs: walking them, who consumes what, what nested graphs take from outside, and order."""

from __future__ import annotations

import pytest

from penstock.core.errors import InvalidModel
from penstock.core.types import constant_type
from penstock.ir.graph import Graph, Node, Value, captures, dependencies, ordered, readers_of, sort
from tests.support.graphs import any_op, chain, graph, nest, node_named, value_named

NESTED = """
graph main(x, b) -> (z) {
  one: int64[] = const 1
  y = Neg(x) as first
  z = If(b) as choice {
    then_branch: graph() -> (p) {
      p = Loop(one, b, y) as loop {
        body: graph(i, c, s) -> (c, t) { t = Add(s, x, one) as add }
      }
    }
    else_branch: graph() -> (x) { q = Neg(x) as unused }
  }
  w = Neg(z) as last
}
"""


def in_order(graph: Graph) -> list[Node]:
    """The nodes of ``graph`` itself, each after those that it depends on."""
    *_, (_, edges) = dependencies(graph)
    return ordered(graph, edges)


def names(nodes: list[Node | None]) -> str:
    return " ".join("output" if node is None else node.name for node in nodes)


def test_walk_visits_nested_nodes_after_their_carrier() -> None:
    assert names(list(graph(NESTED).walk())) == "first choice loop add unused last"


def test_graphs_visits_outer_graphs_first() -> None:
    main = graph(NESTED)
    choice, loop = node_named(main, "choice"), node_named(main, "loop")
    branches = [branch for _, branch in choice.graphs]
    assert list(main.graphs()) == [main, *branches, loop.attrs["body"]]


def test_walk_does_not_recurse_in_deep_nesting() -> None:
    deep = nest(5000)
    assert len(list(deep.walk())) == 4999
    assert captures(deep) == []
    assert len(list(dependencies(deep))) == 5000
    sort(deep)


def test_readers_of_value_read_twice_lists_the_node_twice() -> None:
    main = graph("graph main(x) -> (y) { y = Mul(x, x) as square  z = Neg(x) as minus }")
    assert names(readers_of(main)[main.inputs[0]]) == "square square minus"


def test_readers_of_includes_nested_graphs() -> None:
    main = graph(NESTED)
    readers = readers_of(main)
    assert names(readers[value_named(main, "x")]) == "first add unused output"
    assert names(readers[value_named(main, "one")]) == "loop add"
    assert value_named(main, "w") not in readers


def test_captures_are_outer_values_without_constants() -> None:
    main = graph(NESTED)
    then, other = (branch for _, branch in node_named(main, "choice").graphs)
    assert captures(main) == []
    assert [v.name for v in captures(then)] == ["b", "y", "x"]
    assert [v.name for v in captures(other)] == ["x"]
    assert [v.name for v in captures(node_named(main, "loop").attrs["body"])] == ["x"]


def test_captures_include_outer_values_that_are_outputs() -> None:
    main = graph("graph main(x, b) -> (y) { y = If(b) as i { a: graph() -> (x) {} } }")
    assert captures(node_named(main, "i").attrs["a"]) == [main.inputs[0]]


def test_value_refers_to_its_producer() -> None:
    main = graph(NESTED)
    assert value_named(main, "y").producer is node_named(main, "first")
    assert value_named(main, "x").producer is None
    one = value_named(main, "one")
    assert one.const is not None and one.type == constant_type(one.const)


def test_label_is_origin_else_name_else_output() -> None:
    y = Value("y")
    op = any_op("Add")
    assert Node(op, [], [y], name="n", origin="n in m.onnx").label == "n in m.onnx"
    assert Node(op, [], [y], name="n").label == "n"
    assert Node(op, [], [None, y]).label == "Add that makes 'y'"
    assert Node(op, [], []).label == "Add"


def test_repr_shows_names_and_operations() -> None:
    main = graph("graph main(x: int8[3]) -> (y) { y, _ = Add(x, _) }")
    assert repr(main) == "Graph('main', 1 nodes)"
    assert repr(main.nodes[0]) == "y, _ = Add(x, _)"
    assert repr(main.inputs[0]) == "x: int8[3]"


# Order


def test_ordered_keeps_a_valid_order() -> None:
    """
        a -> c -> e
        b -> d
    """  # fmt: skip
    main = graph("""graph main(x) -> (r) {
      p = Neg(x) as a   q = Neg(x) as b   r = Neg(p) as c   s = Neg(q) as d   t = Neg(r) as e
    }""")
    assert names(in_order(main)) == "a b c d e"


def test_ordered_changes_an_invalid_order_only_where_needed() -> None:
    main = graph("""graph main(x) -> (t) {
      t = Neg(s) as late   p = Neg(x) as a   s = Neg(q) as b   q = Neg(x) as c   u = Neg(x) as d
    }""")
    assert names(in_order(main)) == "a c b late d"
    assert names(main.nodes) == "late a b c d"
    sort(main)
    assert names(main.nodes) == "a c b late d"


def test_ordered_respects_control_inputs() -> None:
    main = graph("graph main(x) -> () { y = Neg(x) as a after(b)  z = Neg(x) as b }")
    assert names(in_order(main)) == "b a"


def test_ordered_respects_captures_of_nested_graphs() -> None:
    main = graph("""graph main(b, x) -> (y) {
      y = If(b) as carrier {
        then_branch: graph() -> (w) {
          w = If(b) as inner { then_branch: graph() -> (v) { v = Neg(u) as v } }
        }
        else_branch: graph() -> (r) { }
      }
      u = Neg(x) as u
      r = Neg(x) as r
    }""")
    assert names(in_order(main)) == "u r carrier"


def test_sort_sorts_nested_graphs() -> None:
    main = graph("""graph main(b, x) -> (y) {
      y = If(b) as i { then_branch: graph() -> (q) { q = Neg(p) as late  p = Neg(x) as early } }
    }""")
    sort(main)
    assert names(list(main.walk())) == "i early late"


def test_ordered_names_the_nodes_of_a_cycle() -> None:
    main = graph("""graph main(x) -> (p) {
      o = Neg(x) as before
      p = Add(o, r) as a in m.onnx   q = Neg(p) as b in m.onnx   r = Neg(q) as c
      s = Neg(r) as behind
    }""")
    with pytest.raises(InvalidModel) as error:
        in_order(main)
    assert str(error.value) == (
        "graph 'main': each of these nodes waits for the one before it, so that none can run "
        "first: a in m.onnx -> b in m.onnx -> c -> a in m.onnx. Remove one of these dependencies"
    )


def test_ordered_names_a_cycle_through_a_nested_graph() -> None:
    main = graph("""graph main(b) -> (y) {
      y = If(b) as choice { then_branch: graph() -> (v) { v = Neg(u) } }
      u = Neg(y) as after_it
    }""")
    with pytest.raises(InvalidModel, match="first: choice -> after_it -> choice"):
        in_order(main)


def test_ordered_refuses_a_node_whose_graph_reads_its_output() -> None:
    main = graph("graph main(b) -> (y) { y = If(b) as i { a: graph() -> (v) { v = Neg(y) } } }")
    with pytest.raises(InvalidModel, match="first: i -> i"):
        in_order(main)


def test_ordered_abbreviates_a_long_cycle() -> None:
    ring = chain(1000)
    ring.nodes[0].inputs[1] = ring.outputs[0]
    with pytest.raises(InvalidModel) as error:
        in_order(ring)
    assert "n6 -> n7 -> ... 985 more ... -> n993" in str(error.value)
    assert len(str(error.value)) < 400


def test_ordered_ignores_producers_outside_of_the_graph() -> None:
    """They are another check's business."""
    stray = Value("stray", producer=Node(any_op("Gone"), [], []))
    node = Node(any_op("Neg"), [stray], [])
    assert in_order(Graph([], [stray], [node])) == [node]


def test_ordered_of_an_empty_graph_is_empty() -> None:
    empty = Graph([], [], [])
    sort(empty)
    assert in_order(empty) == [] == list(empty.walk()) == captures(empty)
