"""What loops carry unchanged is read from outside of them."""

from __future__ import annotations

import numpy as np
import onnxruntime
import pytest

import penstock as ps
from penstock.ir.op import Role
from penstock.passes.pipeline import optimize
from tests.support.graphs import interpret
from tests.support.onnx_text import graph_from_text, model_from_text

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
    """How many values the loops of an optimised graph carry."""
    graph = graph_from_text(LOOPS[name])
    optimize(graph)
    loops = [node for node in graph.walk() if node.op.role in (Role.LOOP, Role.SCAN)]
    skipped = {Role.LOOP: 2, Role.SCAN: 1}
    return [len(node.inputs) - skipped[node.op.role] for node in loops]


@pytest.mark.parametrize("name", LOOPS)
def test_loop_carries_only_what_it_changes(name: str) -> None:
    assert set(carried(name)) == {1}


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
