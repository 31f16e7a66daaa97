"""Passes: what is folded, merged, simplified and dropped, and what must stay."""

from __future__ import annotations

from collections import Counter

import numpy as np
import onnx
import pytest
from onnx import parser

import penstock as ps
from penstock.interpret import interpret
from penstock.ir import Graph
from penstock.limits import DEFAULT_LIMITS, Limits
from penstock.passes.fold import owned_bytes
from penstock.passes.pipeline import optimize
from penstock.passes.prune import cut, unfed
from penstock.types import TensorType


def graph_of(text: str, opset: int = 19) -> Graph:
    header = f'<ir_version: 9, opset_import: ["" : {opset}]>\n'
    return ps.load(parser.parse_model(header + text)).graph


def optimized(text: str, limits: Limits = DEFAULT_LIMITS) -> Graph:
    graph = graph_of(text)
    optimize(graph, limits)
    return graph


def ops(graph: Graph) -> Counter[str]:
    return Counter(node.op.name for node in graph.walk())


# Constant folding.


def test_operations_of_constants_become_constants():
    graph = optimized(
        "g (float[2] x) => (float[2] y) <float[2] a = {1, 2}> { b = Neg(a) c = Exp(b) y = Add(x, c) }"
    )
    assert ops(graph) == {"Add": 1}
    constant = graph.nodes[0].inputs[1].const
    np.testing.assert_allclose(constant, np.exp([-1, -2]), rtol=1e-6)


def test_shape_arithmetic_folds_with_partly_known_dims():
    #  x [N, 3, 4] -> Shape -> Gather 1, 2 -> Mul -> [12] -> Reshape (0, 12)
    graph = optimized(
        """g (float[N, 3, 4] x) => (float[N, M] y) <int64 one = {1}, int64 two = {2},
            int64[1] zero = {0}, int64[1] axes = {0}> {
            s = Shape(x)
            a = Gather(s, one)
            b = Gather(s, two)
            ab = Mul(a, b)
            abv = Unsqueeze(ab, axes)
            n = Slice(s, zero, axes_end, axes)
            axes_end = Constant <value_ints = [1]> ()
            target = Concat <axis = 0> (n, abv)
            y = Reshape(x, target)
        }"""
    )
    assert graph.outputs[0].type == TensorType(np.dtype(np.float32), ("N", 12))


def test_shapes_of_concrete_inputs_leave_one_reshape():
    text = """g (float[N, 3, 4] x) => (float[N, M] y) <int64 zero = {0}, int64[1] axes = {0},
            int64[1] rest = {-1}> {
            s = Shape(x)
            n = Gather(s, zero)
            nv = Unsqueeze(n, axes)
            target = Concat <axis = 0> (nv, rest)
            y = Reshape(x, target)
        }"""
    graph = graph_of(text)
    graph.inputs[0].type = TensorType(np.dtype(np.float32), (5, 3, 4))
    optimize(graph, DEFAULT_LIMITS)
    assert ops(graph) == {"Reshape": 1}
    assert graph.outputs[0].type == TensorType(np.dtype(np.float32), (5, 12))


def test_folding_never_makes_large_constants_out_of_small_ones():
    text = """g (float[1] x) => (float[N, M] y) <int64[2] reps = {4096, 4096}, float[1, 1] one = {1}> {
            big = Tile(one, reps)
            y = Add(big, x)
        }"""
    graph = optimized(text)
    assert ops(graph) == {"Tile": 1, "Add": 1}
    assert ops(optimized(text, Limits(max_folded_bytes=2**27))) == {"Add": 1}


def test_constant_of_shape_is_not_blown_up():
    graph = optimized(
        """g (float[1] x) => (float[N, M] y) <int64[2] dims = {30000, 30000}> {
            big = ConstantOfShape <value = float[1] {0.5}> (dims)
            y = Add(big, x)
        }"""
    )
    assert ops(graph) == {"Add": 1}
    constant = graph.nodes[0].inputs[0].const
    assert constant.shape == (30000, 30000)
    assert owned_bytes(constant) == 4


def test_random_numbers_are_not_folded():
    graph = optimized(
        "g () => (float[2] y) { a = RandomNormal <shape = [2]> () b = RandomNormal <shape = [2]> () "
        "y = Sub(a, b) }"
    )
    assert ops(graph) == {"RandomNormal": 2, "Sub": 1}


def test_a_node_that_can_never_run_is_an_error_with_its_origin():
    graph = graph_of(
        "g (float[2] x) => (float[2] y) <float[3] a = {1, 2, 3}> { [adder] y = Add(x, a) }"
    )
    with pytest.raises(ps.InvalidModel, match=r"Add \(adder in the model\).*float32\[2\]"):
        optimize(graph, DEFAULT_LIMITS)


def test_in_a_branch_it_is_an_error_only_if_it_runs():
    text = """g (float[2] x, bool c) => (float[2] y) <float[3] a = {1, 2, 3}> {
        y = If (c) <then_branch = t () => (float[2] u) { u = Add(x, a) },
                    else_branch = e () => (float[2] v) { v = Neg(x) }>
    }"""
    session = ps.compile(parser.parse_model('<ir_version: 9, opset_import: ["" : 19]>\n' + text))
    x = np.ones(2, np.float32)
    assert session.run({"x": x, "c": np.array(False)})["y"].tolist() == [-1, -1]
    with pytest.raises(ps.RunError, match="Add"):
        session.run({"x": x, "c": np.array(True)})


# If with a known condition.


IF = """g (float[2] x) => (float[2] y) <bool c = {CONDITION}> {
    a = Exp(x)
    b = If (c) <then_branch = t () => (float[2] u) { u = Neg(a) },
                else_branch = e () => (float[2] v) { w = Abs(a) v = Sqrt(w) }>
    y = Sin(b)
}"""


@pytest.mark.parametrize(
    ("condition", "left"), [("1", ["Exp", "Neg", "Sin"]), ("0", ["Exp", "Abs", "Sqrt", "Sin"])]
)
def test_an_if_with_a_known_condition_becomes_its_branch(condition, left):
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


# Simplification.


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
def test_what_changes_nothing_goes(body, left):
    text = f"""g (float[2, 2] x) => (float[M, N] y) <int64[2] shape = {{2, 2}}, int64[1] axes = {{0}},
        float one = {{1}}, int64[2] zero = {{0, 0}}, int64[2] many = {{9, 9}},
        int64[1] minus = {{-1}}, int64[1] far = {{-9}}, int64[4] none = {{0, 0, 0, 0}},
        int64[4] shift = {{1, 0, -1, 0}}, float[2] row = {{1, 2}}> {{ {body} }}"""
    plain = graph_of(text)
    x = np.arange(4, dtype=np.float32).reshape(2, 2)
    wanted = interpret(plain, [x])
    graph = optimized(text)
    assert ops(graph) == left
    for got, want in zip(interpret(graph, [x]), wanted, strict=True):
        np.testing.assert_array_equal(got, want)


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


# Common subexpressions.


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


# Dead code, feeds and fetches.


def test_what_no_output_needs_is_dropped_in_bodies_too():
    graph = optimized(
        """g (float[2] x, bool c) => (float[2] y) {
            dead = Exp(x)
            y = If (c) <then_branch = t () => (float[2] u) { gone = Sqrt(x) u = Neg(x) },
                        else_branch = e () => (float[2] v) { v = Abs(x) }>
        }"""
    )
    assert ops(graph) == {"If": 1, "Neg": 1, "Abs": 1}


def test_a_feed_cuts_off_what_is_upstream_of_it():
    graph = graph_of(
        "g (float[2] x, float[2] w) => (float[2] y) { a = Exp(x) b = Neg(a) y = Add(b, w) }"
    )
    values = {v.name: v for n in graph.nodes for v in (*n.inputs, *n.outputs)}
    part = cut(graph, [values["b"], values["w"]], [values["y"]])
    assert ops(part) == {"Add": 1}
    assert [v.name for v in unfed(cut(graph, [values["b"]], [values["y"]]))] == ["w"]
    assert ops(graph) == {"Exp": 1, "Neg": 1, "Add": 1}  # the model itself is untouched


def test_a_fed_value_that_is_fetched_comes_back():
    graph = graph_of("g (float[2] x) => (float[2] y) { a = Exp(x) y = Neg(a) }")
    values = {v.name: v for n in graph.nodes for v in (*n.inputs, *n.outputs)}
    part = cut(graph, [values["a"]], [values["a"], values["y"]])
    a = np.ones(2, np.float32)
    got = interpret(part, [a])
    assert got[0].tolist() == [1, 1]
    assert got[1].tolist() == [-1, -1]


def test_passes_are_idempotent():
    graph = optimized(IF.replace("CONDITION", "1"))
    before = [repr(node) for node in graph.nodes]
    optimize(graph, DEFAULT_LIMITS)
    assert [repr(node) for node in graph.nodes] == before


def test_vgg19_of_the_onnx_suite_folds_within_its_weights():
    # 548 MB of weights, made by ConstantOfShape nodes of a few bytes.
    path = onnx.__path__[0] + "/backend/test/data/light/light_vgg19.onnx"
    graph = ps.load(path).graph
    made = sum(node.op.name == "ConstantOfShape" for node in graph.nodes)
    assert made > 10
    for value in graph.inputs:
        dims = tuple(d if isinstance(d, int) else 1 for d in value.type.shape)
        value.type = TensorType(value.type.dtype, dims)
    optimize(graph, DEFAULT_LIMITS)
    consts = {id(v.const): v.const for n in graph.walk() for v in n.inputs if v is not None}
    held = sum(owned_bytes(c) for c in consts.values() if c is not None)
    assert held < 1.1 * 548 * 2**20
