"""Nodes that nothing needs are dropped, and what feeds cut off."""

from __future__ import annotations

import numpy as np
import pytest

from penstock.ir.graph import Graph, Value, captures
from penstock.passes.dead_code import cut
from penstock.passes.pipeline import optimize
from tests.passes.optimize.test_optimize import node, optimized, value, waits
from tests.support.graphs import interpret
from tests.support.onnx_text import graph_from_text
from tests.support.passes import count_operations as ops


def test_dead_code_is_dropped_in_bodies_too():
    graph = optimized(
        """g (float[2] x, bool c) => (float[2] y) {
            dead = Exp(x)
            y = If (c) <then_branch = t () => (float[2] u) { gone = Sqrt(x) u = Neg(x) },
                        else_branch = e () => (float[2] v) { v = Abs(x) }>
        }"""
    )
    assert ops(graph) == {"If": 1, "Neg": 1, "Abs": 1}


def test_a_feed_cuts_off_what_is_upstream_of_it():
    graph = graph_from_text(
        "g (float[2] x, float[2] w) => (float[2] y) { a = Exp(x) b = Neg(a) y = Add(b, w) }"
    )
    values = {v.name: v for n in graph.nodes for v in (*n.inputs, *n.outputs)}
    part = cut(graph, [values["b"], values["w"]], [values["y"]])
    assert ops(part) == {"Add": 1}
    assert [v.name for v in captures(cut(graph, [values["b"]], [values["y"]]))] == ["w"]
    assert ops(graph) == {"Exp": 1, "Neg": 1, "Add": 1}  # the model itself is untouched


def test_a_fed_value_that_is_fetched_comes_back():
    graph = graph_from_text("g (float[2] x) => (float[2] y) { a = Exp(x) y = Neg(a) }")
    values = {v.name: v for n in graph.nodes for v in (*n.inputs, *n.outputs)}
    part = cut(graph, [values["a"]], [values["a"], values["y"]])
    a = np.ones(2, np.float32)
    got = interpret(part, [a])
    assert got[0].tolist() == [1, 1]
    assert got[1].tolist() == [-1, -1]


def test_dead_code_drops_unread_outputs_of_branches_and_bodies():
    graph = optimized(
        """g (float[3, 2] x, bool c, int64 n) => (float[2] y, float[3, 2] z, float[3] w) {
            y, unread = If (c) <then_branch = t () => (float[2] p, float[2] q)
                    { p = ReduceMax <keepdims = 0> (x, zero) q = Exp(p) },
                else_branch = e () => (float[2] r, float[2] s)
                    { r = ReduceMin <keepdims = 0> (x, zero) s = Sin(r) }>
            z, rows = Loop (n, , x) <body = b (int64 i, bool d, float[3, 2] v) => (bool f, float[3, 2] o, float[3, 2] m)
                { f = Identity(d) o = Neg(v) m = Sqrt(v) }>
            lost, w = Scan <num_scan_inputs = 1, scan_output_axes = [0, 0], scan_output_directions = [0, 1], body = k (float[2] a)
                => (float[2] aa, float bb) { aa = Log(a) bb = ReduceMax <keepdims = 0> (a) }> (x)
        }""".replace(
            "=> (float[2] y, float[3, 2] z, float[3] w) {",
            "=> (float[2] y, float[3, 2] z, float[3] w) <int64[1] zero = {0}> {",
        )
    )
    left = ops(graph)
    assert not {"Exp", "Sin", "Sqrt", "Log"} & left.keys()
    x = np.array([[1, 2], [3, 4], [6, 5]], np.float32)
    y, z, w = interpret(graph, [x, np.array(True), np.array(1)])
    assert (y.tolist(), z.tolist(), w.tolist()) == ([6, 5], (-x).tolist(), [6, 4, 2])


@pytest.mark.parametrize("op", ["Identity", "Neg", "If"])
def test_a_node_that_waits_stays_whatever_it_computes(op):
    #  in a frame that has died it makes nothing, though its inputs are constants
    x, a, y = value("x"), Value("a"), Value("y")
    first = node("Exp", [x], [a])
    k = Value("k", const=np.ones(2, np.float32))
    if op == "If":
        yes = Value("c", const=np.array(True))
        attrs = {"then_branch": Graph([], [k], []), "else_branch": Graph([], [x], [])}
        last = node(op, [yes], [y], [first], attrs)
    else:
        last = node(op, [k], [y], [first])
    graph = Graph([x], [y], [first, last])
    optimize(graph)
    assert ops(graph) == {"Exp": 1, op: 1}
    assert waits(graph, "y") == {"a"}
    (result,) = interpret(graph, [np.zeros(2, np.float32)])
    assert result.tolist() == ([-1, -1] if op == "Neg" else [1, 1])
