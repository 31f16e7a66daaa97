"""What loops carry unchanged is read from outside of them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import onnxruntime
import pytest
from hypothesis import given
from hypothesis import strategies as st

import penstock as ps
from penstock.ir.graph import Graph, Node, all_reads
from penstock.ir.op import Role
from penstock.passes.dead_code import cut
from penstock.passes.pipeline import CHECK_PASSES, optimize
from penstock.passes.structure.raise_control_flow import raise_control_flow
from tests.support.graphs import interpret
from tests.support.onnx_text import graph_from_text, model_from_text
from tests.support.tf_graphs import Builder
from tests.support.tf_loops import INT, add, const, enter, while_loop

EXECUTORS = ("linear", "dataflow", "parallel", "streams", "frames", "interpret")
BODY = """<body = b (int64 i, bool c, float[2] v, float[2, 2] u) => (bool d, float[2] t, float[2, 2] r) {
    d = Identity(c) r = Identity(u) s = MatMul(v, u) t = Tanh(s) }>"""
LOOPS = {
    "loop": f"g (int64 n, float[2] x, float[2, 2] w) => (float[2] y, float[2, 2] z) "
    f"{{ y, z = Loop (n, , x, w) {BODY} }}",
    "constant": f"g (int64 n, float[2] x) => (float[2] y) <float[2, 2] w = {{0.5, 1, -1, 0.25}}> "
    f"{{ y, z = Loop (n, , x, w) {BODY} }}",
    "nested": "g (int64 n, float[2] x, float[2, 2] w) => (float[2] y, float[2, 2] z) {"
    " y, z = Loop (n, , x, w) <body = o (int64 j, bool e, float[2] p, float[2, 2] q)"
    f" => (bool f, float[2] m, float[2, 2] l) {{ f = Identity(e) m, l = Loop (n, , p, q) {BODY}}}> }}",
    "in turns": f"g (int64 n, float[2] x, float[2, 2] w) => (float[2] y, float[2, 2] z) {{"
    f" a, k = Loop (n, , x, w) {BODY} y, z = Loop (n, , a, k) {BODY.replace('b (', 'h (')} }}",
    "scan": "g (float[2] x, float[2, 2] w, float[3, 2] a) => (float[2] y, float[2, 2] z, float[3, 2] o)"
    " { y, z, o = Scan <num_scan_inputs = 1, body = b (float[2] v, float[2, 2] u, float[2] e)"
    " => (float[2] t, float[2, 2] r, float[2] k) { r = Identity(u) s = MatMul(v, u) t = Add(s, e)"
    " k = Identity(t) }> (x, w, a) }",
}  # fmt: skip
FEEDS = {
    "n": np.array(3), "x": np.array([1, -0.5], np.float32), "a": np.ones((3, 2), np.float32),
    "w": np.array([[0.5, 1], [-1, 0.25]], np.float32),
}  # fmt: skip


def carried(name: str) -> list[int]:
    """How many values the loops of an optimized graph carry."""
    graph = graph_from_text(LOOPS[name])
    optimize(graph)
    loops = [node for node in graph.walk() if node.op.role in (Role.LOOP, Role.SCAN)]
    skipped = {Role.LOOP: 2, Role.SCAN: 1}
    return [len(node.inputs) - skipped[node.op.role] for node in loops]


@pytest.mark.parametrize("name", LOOPS)
def test_loop_carries_only_what_it_changes(name: str) -> None:
    assert set(carried(name)) == {1}


@pytest.mark.parametrize("executor", EXECUTORS)
@pytest.mark.parametrize("given", ["int64[] n, bool c", "int64 n, bool[] c"])
def test_loop_that_changes_nothing_still_refuses_what_is_not_one_element(
    given: str, executor: str
) -> None:
    """How many elements there are is not known when the graph is optimized."""
    model = model_from_text(
        f"g ({given}, float[2] x) => (float[2] y) {{ y = Loop (n, c, x) <body = b (int64 i, bool e,"
        " float[2] v) => (bool d, float[2] u) { d = Identity(e) u = Identity(v) }> }"
    )
    session = ps.compile(model, executor=executor)
    feeds = {"n": np.array(3), "c": np.array(True), "x": FEEDS["x"]}
    np.testing.assert_array_equal(session.run(feeds)["y"], FEEDS["x"])
    several = "n" if "[] n" in given else "c"
    with pytest.raises(ps.PenstockError, match=r"must (be|have) one"):
        session.run({**feeds, several: np.repeat(feeds[several], 2)})


@pytest.mark.parametrize("count", [0, 1, 3])
@pytest.mark.parametrize("name", LOOPS)
def test_loop_that_reads_from_outside_answers_as_onnx_runtime(name: str, count: int) -> None:
    proto = model_from_text(LOOPS[name])
    feeds = {i.name: FEEDS[i.name] for i in proto.graph.input} | {"n": np.array(count)}
    feeds = {i.name: feeds[i.name] for i in proto.graph.input}
    wanted = onnxruntime.InferenceSession(proto.SerializeToString()).run(None, feeds)
    model = ps.load(proto)
    for executor in EXECUTORS:
        results = ps.compile(model, executor=executor).run(feeds).values()
        for result, want in zip(results, wanted, strict=True):
            np.testing.assert_allclose(result, want, rtol=1e-6, err_msg=executor)


def test_loop_keeps_what_another_value_replaces() -> None:
    text = """g (int64 n, float[2] x, float[2] w) => (float[2] y, float[2] z) {
        y, z = Loop (n, , x, w) <body = b (int64 i, bool c, float[2] v, float[2] u)
            => (bool d, float[2] t, float[2] r) { d = Identity(c) t = Identity(u) r = Identity(v) }>
    }"""
    graph = graph_from_text(text)
    optimize(graph)
    (loop,) = (node for node in graph.nodes if node.op.role is Role.LOOP)
    assert len(loop.inputs) == 4
    x, w = np.array([1, 2], np.float32), np.array([3, 4], np.float32)
    swapped = interpret(graph, [np.array(3), x, w])
    assert np.array_equal(swapped[0], w) and np.array_equal(swapped[1], x)


# Nodes that the loop does not change.

LOOP = """g (int64 n, float[2] x, float[2, 2] w) => (float[2] y) <TRIPS, int64 three = {3}, bool yes = {1}> {
    y = Loop (LIMIT, yes, x) <body = b (int64 i, bool c, float[2] v) => (bool d, float[2] t) {
    d = Identity(c) LINES }> }"""


def loop_of(lines: str, limit: str = "three") -> str:
    trips = "int64[1] rest = {-1}, float[1] half = {0.5}, int64 one = {1}"
    return LOOP.replace("TRIPS", trips).replace("LINES", lines).replace("LIMIT", limit)


INVARIANT = {
    "view": "u = Transpose(w) t = MatMul(v, u)",
    "product": "u = MatMul(w, w) t = MatMul(v, u)",
    "chain": "a = Mul(w, half) u = Tanh(a) t = MatMul(v, u)",
    "shape": "a = Shape(w) b = Cast <to = 1>(a) t = Add(v, b)",
    "parameters": "a = ReduceSum <keepdims = 0>(w, rest) t = Add(v, a)",
}
FAILING = {
    "index": "a = Gather(w, n) t = Add(v, a)",
    "division": "a = Div(three, n) b = Cast <to = 1>(a) t = Add(v, b)",
}


def steps_of(text: str) -> tuple[list[str], list[str]]:
    """The operations before a loop, and in its body."""
    graph = graph_from_text(text)
    optimize(graph)
    (loop,) = [node for node in graph.nodes if node.op.role is Role.LOOP]
    inside = [node.op.name for node in loop.attrs["body"].nodes]
    return [node.op.name for node in graph.nodes if node is not loop], inside


@pytest.mark.parametrize("limit", ["three", "n"])
@pytest.mark.parametrize("name", INVARIANT)
def test_body_keeps_only_what_the_loop_changes(name: str, limit: str) -> None:
    _, inside = steps_of(loop_of(INVARIANT[name], limit))
    assert len(inside) == 1


@pytest.mark.parametrize("name", FAILING)
def test_node_that_can_fail_leaves_only_a_loop_that_runs(name: str) -> None:
    assert len(steps_of(loop_of(FAILING[name]))[1]) == 1
    before, inside = steps_of(loop_of(FAILING[name], "n"))
    assert not before
    assert len(inside) > 1


@pytest.mark.parametrize("executor", EXECUTORS)
def test_node_that_would_fail_does_not_in_a_loop_that_never_runs(executor: str) -> None:
    lines = "m = Sub(n, one) a = Div(three, n) b = Cast <to = 1>(a) t = Add(v, b)"
    session = ps.compile(ps.load(model_from_text(loop_of(lines, "n"))), executor=executor)
    feeds = {name: FEEDS[name] for name in ("x", "w")}
    (y,) = session.run(feeds | {"n": np.array(0)}).values()
    np.testing.assert_array_equal(y, FEEDS["x"])


def test_random_numbers_and_targets_stay_in_the_loop() -> None:
    _, inside = steps_of(loop_of("r = RandomNormal <shape = [2]> () t = Add(v, r)"))
    assert sorted(inside) == ["Add", "RandomNormal"]


def test_node_leaves_all_loops_that_do_not_change_it() -> None:
    text = """g (float[2] x, float[2, 2] w) => (float[2] y) <int64 three = {3}, bool yes = {1}> {
        y = Loop (three, yes, x) <body = o (int64 j, bool e, float[2] p) => (bool f, float[2] q) {
            f = Identity(e) q = Loop (three, yes, p) <body = b (int64 i, bool c, float[2] v)
                => (bool d, float[2] t) { d = Identity(c) u = Transpose(w) a = Tanh(p)
                m = MatMul(v, u) t = Add(m, a) }> }> }"""
    graph = graph_from_text(text)
    optimize(graph)
    names = [[node.op.name for node in inner.nodes] for inner in graph.graphs()]
    assert names == [["Transpose", "Loop"], ["Tanh", "Loop"], ["MatMul", "Add"]]


def test_names_of_what_leaves_two_loops_stay_unique(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(CHECK_PASSES, "1")
    body = loop_of("u = Transpose(w) t = MatMul(v, u)").partition("<body")[2].rpartition("}> }")[0]
    text = f"""g (float[2] x, float[2, 2] w, float[2, 2] k) => (float[2] y) <int64 three = {{3}}, bool yes = {{1}}> {{
        z = Loop (three, yes, x) <body{body}}}>
        y = Loop (three, yes, z) <body{body.replace("Transpose(w)", "Exp(k)")}}}> }}"""
    graph = graph_from_text(text)
    optimize(graph)
    names = [value.name for node in graph.nodes for value in node.outputs if value]
    assert len(names) == len(set(names)) == 4


OPERATIONS = (
    "Add({0}, {1})", "Mul({0}, {1})", "Tanh({0})", "Transpose({0})", "MatMul({0}, {1})", "Neg({0})",
    "Reshape({0}, dims)", "Where(flag, {0}, {1})", "Softmax <axis = 0>({0})",
)  # fmt: skip
LEAVES = ("x", "w", "ones", "h", "rows")


@st.composite
def random_loops(draw: st.DrawFn) -> str:
    """A Loop or a Scan in a Loop, of operations on what it carries and on what is outside."""
    scans = draw(st.booleans())

    def body(prefix: str, leaves: tuple[str, ...]) -> tuple[list[str], str]:
        lines, values = [], list(leaves)
        for number in range(draw(st.integers(1, 6))):
            operation = draw(st.sampled_from(OPERATIONS))
            operands = [draw(st.sampled_from(values)) for _ in range(2)]
            values.append(f"{prefix}{number}")
            lines.append(f"{values[-1]} = {operation.format(*operands)}")
        return lines, values[-1]

    lines, end = body("a", LEAVES)
    if scans:
        inner, result = body("b", (*LEAVES[:4], end, "s", "e"))
        lines.append(
            "s1, ys = Scan <num_scan_inputs = 1, body = n (float[2, 2] s, float[2, 2] e) => "
            f"(float[2, 2] r, float[2, 2] k) {{ {' '.join(inner)} r = Tanh({result}) "
            f"k = Add(r, ones) }}> ({end}, stacked)"
        )
        lines.append("ys0 = ReduceSum <keepdims = 0>(ys, zeroth) z = Add(s1, ys0)")
        end = "z"
    limit = draw(st.sampled_from(["0", "1", "3", "n"]))
    go = draw(st.sampled_from(["Identity(c)", "Less(i, n)"]))
    limit = limit if limit == "n" else f"trips{limit}"
    return f"""g (int64 n, bool flag, float[2, 2] x, float[2, 2] w, float[3, 2, 2] stacked)
        => (float[2, 2] y, float[m, 2, 2] each) <float[2, 2] ones = {{1, 1, 1, 1}}, int64[2] dims = {{2, 2}},
        int64[1] zeroth = {{0}}, int64 trips0 = {{0}}, int64 trips1 = {{1}}, int64 trips3 = {{3}},
        int64 first = {{0}}, bool yes = {{1}}> {{
        y, each = Loop ({limit}, yes, x) <body = b (int64 i, bool c, float[2, 2] h)
            => (bool d, float[2, 2] t, float[2, 2] u) {{ d = {go} rows = Gather(stacked, first)
            {" ".join(lines)} t = Tanh({end}) u = Add(t, x) }}> }}"""


@given(random_loops(), st.integers(0, 3), st.booleans(), st.sampled_from(EXECUTORS))
def test_random_loops_answer_as_onnx_runtime(
    text: str, count: int, flag: bool, executor: str
) -> None:
    proto, rng = model_from_text(text), np.random.default_rng(count)
    feeds = {"n": np.array(count), "flag": np.array(flag)}
    feeds |= {name: rng.standard_normal((2, 2)).astype(np.float32) for name in "xw"}
    feeds["stacked"] = rng.standard_normal((3, 2, 2)).astype(np.float32)
    wanted = onnxruntime.InferenceSession(proto.SerializeToString()).run(None, feeds)
    results = ps.compile(ps.load(proto), executor=executor).run(feeds)
    for result, want in zip(results.values(), wanted, strict=True):
        np.testing.assert_allclose(result, want, rtol=1e-4, atol=1e-5)
    graph = graph_from_text(text)
    optimize(graph)
    for loop in [node for node in graph.walk() if node.op.role is Role.SCAN]:
        assert all(reads_inside(node, loop.attrs["body"]) for node in loop.attrs["body"].nodes)


def reads_inside(node: Node, body: Graph) -> bool:
    own = {*body.inputs, *[value for inner in body.nodes for value in inner.outputs]}
    return not own.isdisjoint(all_reads(node))


# Loops of other formats.


def loops_of(graph: Graph) -> list[Node]:
    raised, _ = raise_control_flow(cut(graph, graph.inputs, graph.outputs))
    optimize(raised)
    return [node for node in raised.walk() if node.op.role is Role.LOOP]


def test_invariant_nodes_leave_the_loops_of_tensorflow() -> None:
    b = Builder()
    n = b.placeholder("n", "int32")
    entered = [enter(b, "while", value, 10, True) for value in (n, b.placeholder("x", "int32"))]

    def body(values: Sequence[str]) -> Sequence[str]:
        i, total = values
        square = b.node("Mul", entered[1], entered[1], T=INT)
        return [add(b, i, const(b, 1, i)), add(b, total, square)]

    def less(values: Sequence[str]) -> str:
        return b.node("Less", values[0], entered[0], T=INT)

    zero = b.const(np.int32(0))
    b.node("Identity", while_loop(b, "while", [zero, zero], less, body)[1], name="y", T=INT)
    source = b.proto.SerializeToString()
    graph = ps.load(source).graph
    graph.outputs = [v for node in graph.nodes if node.name == "y" for v in node.outputs if v]
    (loop,) = loops_of(graph)
    assert [node.op.name for node in loop.attrs["body"].nodes] == ["Add"]
    for count in (0, 3):
        feeds = {"n": np.int32(count), "x": np.int32(5)}
        (y,) = ps.compile(source).run(feeds, fetches=["y:0"]).values()
        assert y == 25 * count


def test_invariant_nodes_leave_the_loops_of_tflite() -> None:
    path = Path("tests/models/tflite/control/while_loop_invariant.tflite")
    (loop,) = loops_of(ps.load(path).graph)
    assert all(reads_inside(node, loop.attrs["body"]) for node in loop.attrs["body"].nodes)
