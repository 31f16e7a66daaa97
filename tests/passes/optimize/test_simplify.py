"""Operations that change nothing are removed, others take a simpler form."""

from __future__ import annotations

import numpy as np
import pytest

from penstock.ir.graph import Graph, Value
from penstock.passes.pipeline import optimize
from tests.passes.optimize.test_optimize import node, optimized, value, waits
from tests.support.graphs import interpret
from tests.support.onnx_text import compile_text, graph_from_text
from tests.support.passes import count_operations as ops


@pytest.mark.parametrize(
    ("body", "left"),
    [
        ("t = Identity(x) y = Neg(t)", {"Neg": 1}),
        ("t = Dropout(x) y = Neg(t)", {"Neg": 1}),
        ("t = Cast <to = 1> (x) y = Neg(t)", {"Neg": 1}),
        ("t = Concat <axis = 0> (x) y = Neg(t)", {"Neg": 1}),
        (
            "t = Transpose <perm = [1, 0]> (x) u = Transpose <perm = [1, 0]> (t) y = Neg(u)",
            {"Neg": 1},
        ),
        ("t = Transpose (x) u = Transpose (t) y = Neg(u)", {"Neg": 1}),
        ("t = Flatten(x) u = Reshape(t, shape) y = Neg(u)", {"Neg": 1}),
        ("t = Unsqueeze(x, axes) u = Squeeze(t, axes) y = Neg(u)", {"Neg": 1}),
        ("t = Unsqueeze(x, axes) u = Flatten(t) y = Neg(u)", {"Reshape": 1, "Neg": 1}),
        ("t = Mul(x, one) y = Neg(t)", {"Neg": 1}),
        ("t = Div(x, one) y = Neg(t)", {"Neg": 1}),
        ("t = Expand(x, shape) y = Neg(t)", {"Neg": 1}),
        ("t = Slice(x, zero, many) y = Neg(t)", {"Neg": 1}),
        ("t = Pad(x, none) y = Neg(t)", {"Neg": 1}),
        # What looks alike but is not:
        ("t = Slice(x, minus, far, axes, minus) y = Neg(t)", {"Slice": 1, "Neg": 1}),
        ("t = Pad(x, shift) y = Neg(t)", {"Pad": 1, "Neg": 1}),
        ("t = Mul(x, row) y = Neg(t)", {"Mul": 1, "Neg": 1}),
        ("t = Transpose <perm = [1, 0]> (x) y = Neg(t)", {"Transpose": 1, "Neg": 1}),
    ],
)
def test_optimize_removes_operations_that_change_nothing(body, left):
    text = f"""g (float[2, 2] x) => (float[M, N] y) <int64[2] shape = {{2, 2}}, int64[1] axes = {{0}},
        float one = {{1}}, int64[2] zero = {{0, 0}}, int64[2] many = {{9, 9}},
        int64[1] minus = {{-1}}, int64[1] far = {{-9}}, int64[4] none = {{0, 0, 0, 0}},
        int64[4] shift = {{1, 0, -1, 0}}, float[2] row = {{1, 2}}> {{ {body} }}"""
    plain = graph_from_text(text)
    x = np.arange(4, dtype=np.float32).reshape(2, 2)
    wanted = interpret(plain, [x])
    graph = optimized(text)
    assert ops(graph) == left
    for got, want in zip(interpret(graph, [x]), wanted, strict=True):
        np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize(
    ("body", "left"),
    [
        ("t = Gather <axis = 0> (x, order) y = Neg(t)", {"Neg": 1}),
        ("t = Gather <axis = -1> (x, order) y = Neg(t)", {"Neg": 1}),
        ("t = Gather (x, columns) y = Neg(t)", {"Reshape": 1, "Neg": 1}),
        ("t = GatherND (x, columns) y = Neg(t)", {"Neg": 1}),
        ("t = GatherND (x, grid) y = Neg(t)", {"Neg": 1}),
        ("t = Neg (x) y = ScatterND (zeros, grid, t)", {"Neg": 1}),
        ("t = Neg (x) y = ScatterND (zeros, columns, t)", {"Neg": 1}),
        # What looks alike but is not:
        ("t = Gather (x, backwards) y = Neg(t)", {"Gather": 1, "Neg": 1}),
        ("t = Gather (x, below) y = Neg(t)", {"Gather": 1, "Neg": 1}),
        ("t = GatherND <batch_dims = 1> (x, columns) y = Neg(t)", {"GatherND": 1, "Neg": 1}),
        ("t = GatherND (x, swapped) y = Neg(t)", {"GatherND": 1, "Neg": 1}),
        ("t = Neg (x) y = ScatterND <reduction = \"add\"> (ones, columns, t)", {"ScatterND": 1, "Neg": 1}),
        ("t = Neg (x) y = ScatterND (zeros, swapped, t)", {"ScatterND": 1, "Neg": 1}),
    ],
)  # fmt: skip
def test_gather_of_all_elements_in_order_becomes_a_reshape(body, left):
    text = f"""g (float[2, 2] x) => (float y) <int64[2] order = {{0, 1}},
        int64[2, 1] columns = {{0, 1}}, int64[2, 2, 2] grid = {{0, 0, 0, 1, 1, 0, 1, 1}},
        int64[2, 2, 2] swapped = {{0, 0, 1, 0, 0, 1, 1, 1}}, int64[2] backwards = {{1, 0}},
        int64[2] below = {{-2, -1}}, float[2, 2] zeros = {{0, 0, 0, 0}},
        float[2, 2] ones = {{1, 1, 1, 1}}> {{ {body} }}"""
    x = np.arange(4, dtype=np.float32).reshape(2, 2)
    (wanted,) = interpret(graph_from_text(text), [x])
    graph = optimized(text)
    assert ops(graph) == left
    np.testing.assert_array_equal(interpret(graph, [x])[0], wanted)


def test_constants_of_one_element_take_rank_zero():
    graph = optimized(
        "g (float[2, 2] x, float[N] v) => (float[2, 2] y, float[M, N] z) <float[1, 1] k = {2}> "
        "{ y = Add(x, k) z = Sub(v, k) }"
    )
    assert [node.inputs[1].const.shape for node in graph.nodes] == [(), (1, 1)]


def test_dropout_in_training_stays():
    graph = optimized(
        "g (float[2] x) => (float[2] y) <float r = {0.5}, bool t = {1}> { y = Dropout(x, r, t) }"
    )
    assert ops(graph) == {"Dropout": 1}


def test_control_input_of_a_simplified_node_becomes_its_producers():
    #  A -> Identity <- B: B waits for A
    x, a, i, b = value("x"), Value("a"), Value("i"), Value("b")
    first = node("RandomNormalLike", [x], [a], pure=False)
    identity = node("Identity", [a], [i])
    graph = Graph([x], [a, b], [first, identity, node("Exp", [x], [b], [identity])])
    optimize(graph)
    assert ops(graph) == {"RandomNormalLike": 1, "Exp": 1}
    assert waits(graph, "b") == {"a"}


def test_optimize_keeps_values_that_other_nodes_read():
    #  Conv -- Add -+- Mul -- y    the sum goes into the convolution, which both then read
    #               +- Neg -- z
    text = """g (float[1, 2, 3, 3] x) => (float[1, 2, 3, 3] y, float[1, 2, 3, 3] z)
        <float[2, 2, 1, 1] w = {1, 2, 3, 4}, float three = {3}, float two = {2}> {
        c = Conv(x, w) a = Add(c, three) y = Mul(a, two) z = Neg(a) }"""
    graph = optimized(text)
    assert ops(graph) == {"Conv": 1, "Mul": 1, "Neg": 1}
    x = np.random.default_rng(0).standard_normal((1, 2, 3, 3)).astype(np.float32)
    y, z = compile_text(text, backends=["numpy"])(x)
    a = np.einsum("oi,nihw->nohw", np.array([[1, 2], [3, 4]]), x) + 3
    np.testing.assert_allclose(y, 2 * a, rtol=1e-5)
    np.testing.assert_allclose(z, -a, rtol=1e-5)
