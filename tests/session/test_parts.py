"""Batches that are too large for the memory of a session run in parts, with the same answers."""

from __future__ import annotations

import numpy as np
import pytest

import penstock as ps
from tests.support.bounded import WIDE, least, rows, session_of, wants
from tests.support.processes import in_child
from tests.support.timing import SOON


def numbers(count: int) -> str:
    return ", ".join([str(n % 11 / 11 - 0.4) for n in range(count)])


CONVOLUTION = """g (float[N, 2, 24, 24] x) => (float[N, 2] y) {
    f = Constant<value = float[2, 2, 3, 3] {F}> () flat = Constant<value = int64[2] {0, -1}> ()
    a = Conv<pads = [1, 1, 1, 1]>(x, f) b = Relu(a) p = MaxPool<kernel_shape = [2, 2]>(b)
    g = GlobalAveragePool(p) y = Reshape(g, flat) }""".replace("F}", numbers(36) + "}")
RECURRENT = """g (float[5, N, 64] x) => (float[5, 1, N, 16] y, float[1, N, 16] h) {
    w = Constant<value = float[1, 48, 64] {W}> () r = Constant<value = float[1, 48, 16] {R}> ()
    t = Transpose<perm = [1, 0, 2]>(x) u = Transpose<perm = [1, 0, 2]>(t)
    y, h = GRU<hidden_size = 16>(u, w, r) }"""
RECURRENT = RECURRENT.replace("W}", numbers(48 * 64) + "}").replace("R}", numbers(48 * 16) + "}")
ATTENTION = """g (float[N, 48, 32] x) => (float[N, 32] y) { one = Constant<value = int64[1] {1}> ()
    t = Transpose<perm = [0, 2, 1]>(x) s = MatMul(x, t) p = Softmax(s) a = MatMul(p, x)
    y = ReduceMax<keepdims = 0>(a, one) }"""
BY_FIRST = {"WIDE": (WIDE, (1024,)), "CONVOLUTION": (CONVOLUTION, (2, 24, 24))}
BY_FIRST["ATTENTION"] = (ATTENTION, (48, 32))


@pytest.mark.parametrize("name", BY_FIRST)
@pytest.mark.parametrize("samples", [33, 64])
@pytest.mark.parametrize("share", [0.7, 0.45])
def test_batch_that_is_too_large_runs_in_parts(name, samples, share):
    text, dims = BY_FIRST[name]
    x = np.random.default_rng(1).normal(size=(samples, *dims)).astype(np.float32)
    memory = int(least(text, {"x": x}) * share)
    session = wants(text, {"x": x}, memory)
    assert "rows of" in session.source
    again = x[::-1].copy()
    for feed in (again, x[:2], again):
        expected = session_of(text).run({"x": feed})["y"]
        np.testing.assert_allclose(session.run({"x": feed})["y"], expected, 1e-5, 1e-6)


def test_parts_are_observed_timed_and_written_into_given_arrays():
    x = rows(50)
    session = session_of(WIDE, memory=least(WIDE, {"x": x}) // 2)
    expected = session_of(WIDE).run({"x": x})["y"]
    trace, out = ps.Trace(), np.empty((50, 4), np.float32)
    given = session.run({"x": x}, out={"y": out}, trace=trace, timeout=SOON)["y"]
    assert given is out
    np.testing.assert_allclose(out, expected, 1e-5)
    assert trace.to_dict()["traceEvents"]
    np.testing.assert_allclose(session.submit({"x": x}).result(SOON)["y"], expected, 1e-5)
    with pytest.raises(ps.DeadlineExceeded):
        session.run({"x": x}, timeout=0)


def test_parts_of_runs_at_the_same_time_do_not_mix():
    feeds = [rows(40 + seed % 3, seed) for seed in range(12)]
    expected = [session_of(WIDE).run({"x": x})["y"] for x in feeds]
    session = session_of(WIDE, memory=least(WIDE, {"x": feeds[0]}) // 2)
    jobs = [session.submit({"x": x}) for x in feeds]
    for job, other in zip(jobs, expected, strict=True):
        np.testing.assert_allclose(job.result(SOON)["y"], other, 1e-5)


def test_run_that_waits_for_another_in_parts_ends_at_its_deadline():
    x = rows(40)
    session = session_of(WIDE, memory=least(WIDE, {"x": x}) // 2)
    session.run({"x": x})
    assert session._plans.memory is not None
    with session._plans.memory.turn, pytest.raises(ps.DeadlineExceeded):
        session.run({"x": x}, timeout=0.02)
    assert session.run({"x": x})["y"].shape == (40, 4)


def test_run_within_a_run_in_parts_is_refused():
    class Calls(ps.Observer):
        def step_begin(self, run, step, inputs):
            session.run({"x": x})

    x = rows(40)
    session = session_of(WIDE, memory=least(WIDE, {"x": x}) // 2)
    with pytest.raises(ps.PenstockError, match="a run in parts"):
        session.run({"x": x}, observers=[Calls()])
    assert session.run({"x": x})["y"].shape == (40, 4)


def test_forked_child_runs_in_parts_though_another_thread_did():
    x = rows(40)
    session = session_of(WIDE, memory=least(WIDE, {"x": x}) // 2)
    session.run({"x": x})
    memory = session._plans.memory
    assert memory is not None
    with memory.turn:
        assert in_child(lambda: session.run({"x": x}, timeout=SOON))


def test_sequences_of_a_recurrent_layer_run_in_parts_along_their_batch():
    x = np.random.default_rng(0).normal(size=(5, 40, 64)).astype(np.float32)
    with pytest.raises(ps.LimitExceeded, match="for parts of a batch"):  # the first dim is time
        session_of(RECURRENT, memory=least(RECURRENT, {"x": x}) * 2 // 3).run({"x": x})
    text = RECURRENT.replace("(float[5, N, 64] x) =>", "(float[N, 5, 64] x) =>")
    text = text.replace("(float[5, 1, N, 16] y, float[1, N, 16] h)", "(float[N, 16] z)")
    text = text.replace("u = Transpose<perm = [1, 0, 2]>(t)", "")
    text = text.replace("(u, w, r) }", "(t, w, r) z = Squeeze(h, zero) }")
    text = text.replace("{\n    w", "{ zero = Constant<value = int64[1] {0}> ()\n    w")
    feed = {"x": np.ascontiguousarray(x.transpose(1, 0, 2))}
    wants(text, feed, least(text, feed) * 9 // 10)
