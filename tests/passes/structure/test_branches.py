"""Branches with known conditions are taken into the graph."""

from __future__ import annotations

import numpy as np
import pytest

import penstock as ps
from penstock.ir.graph import Graph, Node, Value
from penstock.ops import find
from penstock.passes.pipeline import optimize
from tests.passes.optimize.test_optimize import IF, node, optimized, value, waits
from tests.support.graphs import interpret
from tests.support.onnx_text import compile_text
from tests.support.passes import count_operations as ops


@pytest.mark.parametrize(
    ("condition", "left"), [("1", ["Exp", "Neg", "Sin"]), ("0", ["Exp", "Abs", "Sqrt", "Sin"])]
)
def test_if_with_a_constant_condition_becomes_its_branch(condition, left):
    graph = optimized(IF.replace("CONDITION", condition))
    assert [node.op.name for node in graph.nodes] == left
    x = np.array([0.5, 1], np.float32)
    (y,) = interpret(graph, [x])
    want = np.sin(-np.exp(x)) if condition == "1" else np.sin(np.sqrt(np.exp(x)))
    np.testing.assert_allclose(y, want, rtol=1e-6)


def test_nested_ifs_with_known_conditions_vanish():
    graph = optimized(
        """g (float[2] x) => (float[2] y) <bool c = {1}> {
        y = If (c) <then_branch = t () => (float[2] u) {
            d = Not(c)
            u = If (d) <then_branch = t2 () => (float[2] p) { p = Neg(x) },
                        else_branch = e2 () => (float[2] q) { q = Exp(x) }>
        }, else_branch = e () => (float[2] v) { v = Abs(x) }>
    }"""
    )
    assert ops(graph) == {"Exp": 1}


def test_control_input_of_a_folded_if_becomes_the_nodes_of_its_branch():
    x, y, b, t = value("x"), Value("y"), Value("b"), Value("t")
    taken = Graph([], [t], [node("Exp", [x], [t])])
    other = Graph([], [x], [])
    yes = Value("c", const=np.array(True))
    branch = Node(find("If"), [yes], [y], {"then_branch": taken, "else_branch": other})
    graph = Graph([x], [y, b], [branch, node("Sin", [x], [b], [branch])])
    optimize(graph)
    assert ops(graph) == {"Exp": 1, "Sin": 1}
    assert waits(graph, "b") == {"t"}


def test_a_condition_of_two_elements_is_an_error_only_where_it_is_reached():
    inner = """If (two) <then_branch = t2 () => (float[2] p) { p = Neg(x) },
                        else_branch = e2 () => (float[2] q) { q = Abs(x) }>"""
    text = f"""g (float[2] x, bool c) => (float[2] y) <bool[2] two = {{1, 0}}> {{
        y = If (c) <then_branch = t () => (float[2] u) {{ u = {inner} }},
                    else_branch = e () => (float[2] v) {{ v = Neg(x) }}>
    }}"""
    session = compile_text(text)
    x = np.ones(2, np.float32)
    assert session.run({"x": x, "c": np.array(False)})["y"].tolist() == [-1, -1]
    with pytest.raises(ps.RunError, match="one element"):
        session.run({"x": x, "c": np.array(True)})
    with pytest.raises(ps.InvalidModel, match="one element"):
        optimized(f"g (float[2] x) => (float[2] y) <bool[2] two = {{1, 0}}> {{ y = {inner} }}")
