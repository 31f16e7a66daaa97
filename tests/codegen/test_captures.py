"""Steps that are captured together, and those that are not."""

from __future__ import annotations

import numpy as np

from tests.backends.torch.test_capture import TEXT, X, expected, late, launches, run_on_a_stream
from tests.support.onnx_text import compile_text
from tests.support.torch_kernels import needs_torch

pytestmark = needs_torch


LOOP = """g (int64 n, float[4, 4] x) => (float[4, 4] y, float[K, 4, 4] all) <float low = {-9}> {
    y, all = Loop <body = b (int64 i, bool c, float[4, 4] v)
        => (bool d, float[4, 4] w, float[4, 4] r) {
        s = Sin(v) k = Cos(v) w = Mul(s, k) r = Exp(w)
        m = ReduceMax <keepdims = 0> (w) d = Greater(m, low) }> (n, , x) }"""


def test_body_of_a_loop_with_a_condition_of_the_host_is_a_graph_of_its_own():
    backend = late()
    session = compile_text(LOOP, backends=[backend], executor="linear")
    for n in (1, 2, 5, 0, 4):
        feeds = {"n": np.int64(n), "x": X}
        results = run_on_a_stream(session, backend, feeds)
        for name, want in expected(LOOP, feeds).items():
            np.testing.assert_allclose(results[name], want, rtol=1e-4, atol=1e-6)
    graphs, _ = launches(session, backend, {"n": np.int64(6), "x": X})
    assert graphs == 6


BRANCH = """g (bool c, float[4, 4] x) => (float[4, 4] y) {
    a = Sin(x) b = Cos(a)
    y = If (c) <then_branch = t () => (float[4, 4] p) { q = Exp(b) p = Neg(q) },
                else_branch = e () => (float[4, 4] r) { s = Tanh(b) r = Abs(s) }> }"""


def test_each_branch_is_a_graph_of_its_own():
    backend = late()
    session = compile_text(BRANCH, backends=[backend], executor="linear")
    for i in range(12):
        feeds = {"c": np.array(i % 2 == 0), "x": X * i}
        results = run_on_a_stream(session, backend, feeds)
        np.testing.assert_allclose(results["y"], expected(BRANCH, feeds)["y"], rtol=1e-4, atol=1e-6)
    assert launches(session, backend, feeds)[0] == 2
    assert len(session.inspect.describe()["graphs"]) == 3


def test_capture_can_be_turned_off():
    backend = late()
    session = compile_text(TEXT, backends=[backend], executor="linear", capture=False)
    for _ in range(4):
        run_on_a_stream(session, backend, {"x": X})
    assert backend.device.runtime.counts["capture"] == 0
    assert session.inspect.describe()["graphs"] == []


def test_device_without_graphs_captures_nothing():
    session = compile_text(TEXT, backends=["torch"], executor="linear")
    session(X)
    assert "graph_0" not in session.source
    assert session.inspect.describe()["graphs"] == []


def test_steps_of_open_shapes_and_shapes_read_on_the_host_are_not_captured():
    text = """g (float[N] x) => (float[K, 2] y) {
        a = NonZero(x) two = Constant<value_ints = [-1, 2]>() b = Cast<to = 1>(a)
        r = Reshape(b, two) s = Sin(r) y = Exp(s) }"""
    backend = late()
    session = compile_text(text, backends=[backend], executor="linear")
    for _ in range(4):
        x = np.array([1, 0, 2, 3, 4], np.float32)
        got = run_on_a_stream(session, backend, {"x": x})["y"]
        want = np.exp(np.sin(np.flatnonzero(x).reshape(-1, 2)))
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-6)
    assert session.inspect.describe()["graphs"] == []
