"""Passes: what is folded, merged, simplified and dropped, and what must stay."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import numpy as np
import onnx
import pytest

import penstock as ps
from penstock.analysis.type_inference import infer_types
from penstock.core.limits import DEFAULT_LIMITS, Limits
from penstock.core.types import ShapeError, TensorType
from penstock.ir.graph import Graph, Model, Node, Value, captures, clone
from penstock.ir.kernel import Kernel
from penstock.ir.op import Op
from penstock.ops import find
from penstock.ops.common.shape_rules import same_type
from penstock.passes.context import PassContext
from penstock.passes.dead_code import cut, prune
from penstock.passes.optimize.common_subexpressions import CommonSubexpressions
from penstock.passes.optimize.fold_constants import FoldConstants, owned_bytes
from penstock.passes.optimize.simplify import Simplify
from penstock.passes.pipeline import optimize
from penstock.textual.parser import parse_graph
from tests.support.graphs import interpret
from tests.support.onnx_text import compile_text, graph_from_text
from tests.support.random_graphs import seeded

EXECUTORS = ("linear", "dataflow", "parallel", "streams", "frames", "interpret")


def optimized(text: str, limits: Limits = DEFAULT_LIMITS) -> Graph:
    graph = graph_from_text(text)
    optimize(graph, PassContext(limits=limits))
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
    graph = graph_from_text(text)
    graph.inputs[0].type = TensorType(np.dtype(np.float32), (5, 3, 4))
    optimize(graph)
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
    graph = graph_from_text(
        "g (float[2] x) => (float[2] y) <float[3] a = {1, 2, 3}> { [adder] y = Add(x, a) }"
    )
    with pytest.raises(ps.InvalidModel, match=r"Add \(adder in the model\).*float32\[2\]"):
        optimize(graph)


def test_in_a_branch_it_is_an_error_only_if_it_runs():
    text = """g (float[2] x, bool c) => (float[2] y) <float[3] a = {1, 2, 3}> {
        y = If (c) <then_branch = t () => (float[2] u) { u = Add(x, a) },
                    else_branch = e () => (float[2] v) { v = Neg(x) }>
    }"""
    session = compile_text(text)
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


# Simplification.


@pytest.mark.parametrize("executor", EXECUTORS)
@pytest.mark.parametrize(
    ("x", "body", "numbers"),
    [
        ("float x", "Tile(x, n)", [2]),
        ("float[2, 3] x", "Tile(x, n)", [-1, 1]),
        ("float x", "Squeeze(x, n)", [0]),
        ("float[6] x", "Reshape(x, n)", [5]),
        ("float[3] x", "Expand(x, n)", [2]),
        ("float x", "Pad(x, n)", [0, 0]),
    ],
)
def test_operations_that_runs_may_refuse_stay(x, body, numbers, executor):
    session = compile_text(
        f"g ({x}, int64[N] n) => ({x[:-1]}y) {{ y = {body} }}", executor=executor
    )
    shape = session.inputs[0].type.dims
    with pytest.raises((ps.InvalidInput, ps.RunError)):
        session.run({"x": np.zeros(shape, np.float32), "n": np.array(numbers)})


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


def test_passes_are_idempotent():
    graph = optimized(IF.replace("CONDITION", "1"))
    before = [repr(node) for node in graph.nodes]
    optimize(graph)
    assert [repr(node) for node in graph.nodes] == before


@pytest.mark.parametrize("seed", range(50))
def test_after_all_passes_none_finds_more_to_do(seed):
    graph = clone(seeded(seed, 30))
    optimize(graph)
    assert not FoldConstants().run(graph, PassContext())
    assert not Simplify().run(graph, PassContext())
    assert not CommonSubexpressions().run(graph, PassContext())
    assert not prune(graph)


def test_vgg19_of_the_onnx_suite_folds_within_its_weights():
    # 548 MB of weights, made by ConstantOfShape nodes of a few bytes.
    path = onnx.__path__[0] + "/backend/test/data/light/light_vgg19.onnx"
    graph = ps.load(path).graph
    made = sum(node.op.name == "ConstantOfShape" for node in graph.nodes)
    assert made > 10
    for value in graph.inputs:
        dims = tuple(d if isinstance(d, int) else 1 for d in value.type.shape)
        value.type = TensorType(value.type.dtype, dims)
    optimize(graph)
    consts = {id(v.const): v.const for n in graph.walk() for v in n.inputs if v is not None}
    held = sum(owned_bytes(c) for c in consts.values() if c is not None)
    assert held < 1.1 * 548 * 2**20


# Control inputs: nodes that must have run before.


def value(name: str, *dims: int) -> Value:
    return Value(name, TensorType(np.dtype(np.float32), dims or (2,)))


def node(op: str, inputs, outputs, after=(), attrs=None, *, pure=True) -> Node:
    found = find(op)
    assert found is not None
    return Node(replace(found, pure=pure), inputs, outputs, attrs, control_inputs=after)


def waits(graph: Graph, output: str) -> set[str]:
    """What the node that makes ``output`` waits for, by the names of what these make."""
    (found,) = [n for n in graph.nodes if n.outputs[0].name == output]
    assert all(n in graph.nodes for n in found.control_inputs)
    return {n.outputs[0].name for n in found.control_inputs}


def test_control_input_of_a_folded_node_is_dropped():
    x, y, k = value("x"), Value("y"), Value("k", const=np.ones(2, np.float32))
    folded = node("Neg", [k], [Value("n")])
    graph = Graph([x], [y], [folded, node("Exp", [x], [y], [folded])])
    optimize(graph)
    assert ops(graph) == {"Exp": 1}
    assert waits(graph, "y") == set()


def test_control_input_of_a_simplified_node_becomes_its_producers():
    #  A -> Identity <- B: B waits for A
    x, a, i, b = value("x"), Value("a"), Value("i"), Value("b")
    first = node("RandomNormalLike", [x], [a], pure=False)
    identity = node("Identity", [a], [i])
    graph = Graph([x], [a, b], [first, identity, node("Exp", [x], [b], [identity])])
    optimize(graph)
    assert ops(graph) == {"RandomNormalLike": 1, "Exp": 1}
    assert waits(graph, "b") == {"a"}


def test_control_input_of_a_merged_node_becomes_the_remaining_one():
    x, a, b, c = value("x"), Value("a"), Value("b"), Value("c")
    second = node("Neg", [x], [b])
    second.op = find("Neg")
    first = Node(find("Neg"), [x], [a])
    graph = Graph([x], [a, b, c], [first, second, node("Exp", [x], [c], [second])])
    optimize(graph)
    assert ops(graph) == {"Neg": 1, "Exp": 1}
    assert waits(graph, "c") == {"a"}


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


# Types in loops.


def test_a_loop_that_may_not_begin_has_no_known_number_of_rows():
    text = """g (float[2] x, bool z) => (float[2] y, float[K, 2] k) <int64 n = {3}> {
        y, k = Loop (n, START, x) <body = b (int64 i, bool c, float[2] v) => (bool d, float[2] w, float[2] v)
            { d = Identity(c) w = Add(v, v) }> }"""
    rows = {
        start: optimized(text.replace("START", start)).outputs[1].type.shape for start in ("", "z")
    }
    assert rows == {"": (3, 2), "z": (None, 2)}


@pytest.mark.parametrize("limit", ["float n = {2}", "int64[2] n = {1, 2}", "int64[0] n = {}"])
def test_a_trip_count_is_one_integer(limit):
    text = f"""g (float[2] x) => (float[2] y) <{limit}> {{
        y = Loop (n, , x) <body = b (int64 i, bool c, float[2] v) => (bool d, float[2] w)
            {{ d = Identity(c) w = Add(v, v) }}> }}"""
    with pytest.raises(ps.InvalidModel, match=r"one integer|reads tensor\(float\)"):
        compile_text(text)


def test_inference_in_nested_loops_does_not_grow_with_every_level():
    #  each loop's carried value widens once, and the loop inside reads it: with every level
    #  beginning anew in each round of the one around it, 2**depth rounds
    x = value("x", 1)
    rounds = 0

    def infer(types, attrs, consts):
        nonlocal rounds
        rounds += 1
        return concat.infer(types, attrs, consts)

    concat = find("Concat")
    assert concat is not None
    op = replace(concat, infer=infer)

    def loop(depth: int, outer: Value) -> Node:
        number, proceed, inside, wide = (Value(f"{name}{depth}") for name in "ncvw")
        nodes = [loop(depth - 1, inside)] if depth else []
        read = [inside, outer, *[each.outputs[0] for each in nodes]]
        nodes.append(Node(op, read, [wide], {"axis": 0}))
        body = Graph([number, proceed, inside], [proceed, wide], nodes, f"body{depth}")
        one = Value("one", const=np.ones(1, np.float32))
        trips = Value("trips", const=np.array(1))
        return Node(find("Loop"), [trips, None, one], [Value(f"r{depth}")], {"body": body})

    depth = 30
    outermost = loop(depth, x)
    infer_types(Graph([x], outermost.outputs, [outermost], "nest"))
    assert rounds < 10 * depth**2
    assert outermost.outputs[0].type == TensorType(np.dtype(np.float32), (None,))


# What operations raise.


def broken(error: Exception, *, infers: bool, domain: str = "") -> Graph:
    def fail(*arguments):
        raise error

    op = Op("Broken", domain, 1, 1, fail if infers else same_type, fail)
    x, y = value("x"), Value("y")
    return Graph([x], [y], [Node(op, [x], [y], origin="culprit in m")], "g")


@pytest.mark.parametrize("infers", [True, False])
@pytest.mark.parametrize(
    ("raised", "wanted"),
    [
        (ShapeError("no such shape"), ps.InvalidModel),
        (MemoryError(), ps.LimitExceeded),
        (KeyError("axis"), ps.InternalError),
        (IndexError("list index out of range"), ps.InternalError),
    ],
)
def test_whatever_an_operation_raises_names_its_node(raised, wanted, infers):
    graph = broken(raised, infers=infers)
    with pytest.raises(wanted, match="culprit in m") as caught:
        ps.compile(Model({"g": graph}, "g"), shapes={})
    assert caught.value.__cause__ is raised


@pytest.mark.parametrize("infers", [True, False])
def test_missing_attribute_of_an_operation_without_schema_is_a_fault_of_the_model(infers):
    graph = broken(KeyError("axis"), infers=infers, domain="test")
    with pytest.raises(ps.InvalidModel, match=r"culprit in m.*needs the attribute 'axis'"):
        ps.compile(Model({"g": graph}, "g"), shapes={})


def test_a_constant_that_an_operation_fails_on_fails_when_it_is_run():
    graph = broken(KeyError("axis"), infers=False)
    graph.nodes[0].op = replace(
        graph.nodes[0].op, compile=lambda node, types: Kernel(lambda x: {}["axis"])
    )
    graph.nodes[0].inputs = [Value("k", const=np.ones(2, np.float32))]
    session = ps.compile(Model({"g": graph}, "g"))
    with pytest.raises(ps.RunError, match=r"Broken \(culprit in m\)"):
        session(np.zeros(2, np.float32))


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


def test_a_view_that_can_never_be_is_an_error_only_if_it_runs():
    text = """g (float[2, 3] x, bool c) => (float[N] y) <int64[1] five = {5}, int64[1] flat = {-1}> {
        a = Abs(x)
        y = If (c) <then_branch = t () => (float[N] p) { p = Reshape(a, five) },
                    else_branch = e () => (float[N] q) { q = Reshape(a, flat) }> }"""
    session = compile_text(text)
    x = np.ones((2, 3), np.float32)
    assert session.run({"x": x, "c": np.array(False)})["y"].shape == (6,)
    with pytest.raises(ps.RunError, match=r"Reshape \(.*float32\[2, 3\]"):
        session.run({"x": x, "c": np.array(True)})


def test_a_large_constant_with_many_readers_is_not_folded_for_each():
    k = Value("k", const=np.ones(1000, np.float32))
    x = value("x", 1000)

    def graph(names: list[str]) -> Graph:
        nodes = []
        for name in names:
            folded = Node(find(name), [k], [Value(f"{name}0")])
            nodes += [folded, Node(find("Add"), [folded.outputs[0], x], [Value(f"{name}1")])]
        return Graph([x], [n.outputs[0] for n in nodes[1::2]], nodes, "g")

    small = Limits(max_folded_bytes=100)
    for names, left in (["Neg"], {"Add": 1}), (["Neg", "Exp"], {"Add": 2, "Neg": 1, "Exp": 1}):
        made = graph(names)
        optimize(made, PassContext(limits=small))
        assert ops(made) == left
    made = graph(["Neg", "Exp"])
    optimize(made)
    assert ops(made) == {"Add": 2}


def test_a_partly_known_split_settles():
    #  one of two outputs is a constant; the node stays for the other, and nothing changes further
    graph = graph_from_text(
        """g (float[N, 3] x) => (int64[1] y, int64[1] z) <int64 zero = {0}> {
            s = Shape(x) y, z = Split <axis = 0, num_outputs = 2> (s) }"""
    )
    optimize(graph)
    assert not FoldConstants().run(graph, PassContext())
    assert graph.outputs[1].const.tolist() == [3]


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
