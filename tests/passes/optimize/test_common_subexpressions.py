"""Equal nodes run once."""

from __future__ import annotations

from penstock.ir.graph import Graph, Node, Value
from penstock.ops import find
from penstock.passes.pipeline import optimize
from penstock.textual.parser import parse_graph
from tests.passes.optimize.test_optimize import node, optimized, value, waits
from tests.support.passes import count_operations as ops


def test_equal_nodes_run_once():
    graph = optimized(
        """g (float[2] x) => (float[2] y) <float[2] a = {1, 2}, float[2] b = {1, 2}> {
            p = Add(x, a) q = Add(x, b) r = Neg(p) s = Neg(q) y = Mul(r, s) }"""
    )
    assert ops(graph) == {"Add": 1, "Neg": 1, "Mul": 1}


def test_nodes_that_differ_in_an_attribute_stay_apart():
    graph = optimized(
        """g (float[2] x) => (float[2] y) {
            p = LeakyRelu <alpha = 0.1> (x) q = LeakyRelu <alpha = 0.2> (x) y = Mul(p, q) }"""
    )
    assert ops(graph)["LeakyRelu"] == 2


def test_a_branch_uses_what_was_computed_outside_but_not_the_other_way():
    graph = optimized(
        """g (float[2] x, bool c) => (float[2] y, float[2] z) {
            a = Exp(x)
            y = If (c) <then_branch = t () => (float[2] u) { s = Exp(x) u = Sqrt(s) },
                        else_branch = e () => (float[2] v) { w = Abs(x) v = Neg(w) }>
            z = Abs(x)
        }"""
    )
    assert ops(graph) == {"Exp": 1, "If": 1, "Sqrt": 1, "Abs": 2, "Neg": 1}


def test_control_input_of_a_merged_node_becomes_the_remaining_one():
    x, a, b, c = value("x"), Value("a"), Value("b"), Value("c")
    second = node("Neg", [x], [b])
    second.op = find("Neg")
    first = Node(find("Neg"), [x], [a])
    graph = Graph([x], [a, b, c], [first, second, node("Exp", [x], [c], [second])])
    optimize(graph)
    assert ops(graph) == {"Neg": 1, "Exp": 1}
    assert waits(graph, "c") == {"a"}


def test_target_of_a_branch_that_equals_a_node_outside_is_no_target_any_more():
    graph = parse_graph("""graph g(c: bool[], x: float32[2]) -> (y, z) {
      y: float32[2] = Neg(x) as outside
      z = If(c) {
        then_branch: graph() -> (x) targets (inside) { a = Neg(x) as inside }
        else_branch: graph() -> (x) { }
      }
    }""")
    optimize(graph)
    assert [node.name for node in graph.walk() if node.op.name == "Neg"] == ["outside"]
    assert graph.nodes[1].attrs["then_branch"].targets == []
