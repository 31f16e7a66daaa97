"""Runs that share the iterations of loops: each is answered as ONNX Runtime does it alone."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import cache

import numpy as np
import onnxruntime
import pytest

import penstock as ps
from tests.support.onnx_text import model_from_text
from tests.support.timing import SOON

# A cell that halves until its input is small: as many iterations as its numbers take.
CELL = """g (float[n, 3] x, float[3, 3] w) => (float[n, 3] y, float[t, n, 3] ys, float total)
    <int64 most = {40}, float bound = {0.5}, float half = {0.8}> {
    b = Mul (x, half) start = ReduceMax <keepdims = 0> (x) go = Greater (start, bound)
    y0, ys = Loop (most, go, b) <body = body (int64 i, bool c, float[n, 3] v)
        => (bool d, float[n, 3] z, float[n, 3] row) {
            p = MatMul (v, w) q = Tanh (p) r = Add (q, v) z = Mul (r, half)
            f = Cast <to = 1> (i) row = Add (z, f)
            top = ReduceMax <keepdims = 0> (z) d = Greater (top, bound) }>
    y = Add (y0, x) total = ReduceSum <keepdims = 0> (ys) }"""
# Two loops, the first of which grows what it carries, and the second of which has its own trips.
GROWING = """g (float[1, 2] x, int64 n) => (float[m, 2] y, float[1, 2] z) <bool yes = {1}, float k = {0.5}> {
    y = Loop (n, yes, x) <body = grow (int64 i, bool c, float[m, 2] v) => (bool d, float[m2, 2] more) {
        d = Identity (c) f = Cast <to = 1> (i) t = Add (x, f) more = Concat <axis = 0> (v, t) }>
    s = ReduceSum <keepdims = 0> (y) a = Add (x, s)
    z = Loop (n, , a) <body = next (int64 j, bool e, float[1, 2] u) => (bool g, float[1, 2] o) {
        g = Identity (e) o = Mul (u, k) }> }"""


@cache
def runtime_of(text: str) -> onnxruntime.InferenceSession:
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    return onnxruntime.InferenceSession(model_from_text(text).SerializeToString(), options)


def by_runtime(text: str, feeds: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    runtime = runtime_of(text)
    names = [port.name for port in runtime.get_outputs()]
    return dict(zip(names, runtime.run(None, feeds), strict=True))


def check(got: dict[str, np.ndarray], want: dict[str, np.ndarray]) -> None:
    assert got.keys() == want.keys()
    for name, array in want.items():
        assert got[name].dtype == array.dtype
        if not array.size:  # rows of no iteration, whose dims ONNX Runtime does not know
            assert not got[name].size
            continue
        largest = max(1.0, float(np.abs(array).max(initial=0)))
        np.testing.assert_allclose(got[name], array, rtol=0, atol=1e-5 * largest)


def feeds_of(text: str, seed: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    if text == GROWING:
        x = rng.standard_normal((1, 2)).astype(np.float32)
        return {"x": x, "n": np.array(1 + seed % 4)}
    rows, scale = 1 + seed % 2, (4.0, 1.0, 0.1)[seed % 3]
    x = rng.standard_normal((rows, 3)).astype(np.float32) * np.float32(scale)
    return {"x": x, "w": np.random.default_rng(9).standard_normal((3, 3)).astype(np.float32)}


@pytest.mark.parametrize("text", [CELL, GROWING], ids=["cell", "growing"])
def test_runs_of_many_threads_are_those_of_each_alone(text: str) -> None:
    cases = [feeds_of(text, seed) for seed in range(24)]
    wanted = [by_runtime(text, feeds) for feeds in cases]
    shared = ps.SharedLoops(model_from_text(text))
    with ThreadPoolExecutor(8) as threads:
        for got, want in zip(threads.map(shared.run, cases), wanted, strict=True):
            check(got, want)
    assert shared.reasons == {}
    assert shared.stats.steps <= shared.stats.iterations


def test_runs_join_and_leave_at_each_iteration() -> None:
    """Steps of runs that begin together are as many as the longest run has iterations."""
    shared = ps.SharedLoops(model_from_text(GROWING))
    shared.run(feeds_of(GROWING, 0))  # which is compared with itself
    before = shared.stats
    (_, loops), *_ = shared._parts
    engine, gate = loops[0].engine, threading.Barrier(4)
    step = engine.step

    def together() -> bool:
        with engine.lock:
            ready = len(engine.waiting) == 4 or engine.steps > before.steps // 2
        return step() if ready else False

    engine.step = together  # type: ignore[method-assign]

    def client(count: int) -> dict[str, np.ndarray]:
        gate.wait(SOON)
        feeds = {"x": np.full((1, 2), count, np.float32), "n": np.array(count)}
        return shared.run(feeds)

    with ThreadPoolExecutor(4) as threads:
        results = [*threads.map(client, [1, 2, 3, 4])]
    for count, got in enumerate(results, 1):
        feeds = {"x": np.full((1, 2), count, np.float32), "n": np.array(count)}
        check(got, by_runtime(GROWING, feeds))
    assert engine.steps - before.steps // 2 == 4
    assert engine.rows - before.iterations // 2 == 1 + 2 + 3 + 4


def test_loop_without_an_iteration_is_that_of_the_model_alone() -> None:
    feeds = {"x": np.zeros((2, 3), np.float32), "w": np.eye(3, dtype=np.float32)}
    shared = ps.SharedLoops(model_from_text(CELL))
    check(shared.run(feeds), by_runtime(CELL, feeds))
    assert shared.stats.iterations == 0


def test_runs_of_tasks_are_those_of_each_alone() -> None:
    shared = ps.SharedLoops(model_from_text(CELL))
    cases = [feeds_of(CELL, seed) for seed in range(6)]

    async def all_of_them() -> list[dict[str, np.ndarray]]:
        return await asyncio.gather(*[shared.arun(feeds) for feeds in cases])

    for feeds, got in zip(cases, asyncio.run(all_of_them()), strict=True):
        check(got, by_runtime(CELL, feeds))


def test_deadlines_and_cancelled_runs_end_alone() -> None:
    shared = ps.SharedLoops(model_from_text(CELL))
    feeds, token = feeds_of(CELL, 0), ps.CancelToken()
    token.cancel()
    with pytest.raises(ps.Cancelled):
        shared.run(feeds, cancel=token)
    with pytest.raises(ps.DeadlineExceeded):
        shared.run(feeds, timeout=0.0)
    check(shared.run(feeds, timeout=SOON), by_runtime(CELL, feeds))


def test_number_of_iterations_is_bounded() -> None:
    shared = ps.SharedLoops(model_from_text(GROWING), limits=ps.Limits(max_iterations=2))
    shared.run(feeds_of(GROWING, 0))
    with pytest.raises(ps.LimitExceeded, match="limit of 2 iterations"):
        shared.run(feeds_of(GROWING, 2))


def test_what_loops_carry_is_bounded() -> None:
    shared = ps.SharedLoops(model_from_text(GROWING), cache_bytes=2 * 2 * 4)
    shared.run(feeds_of(GROWING, 0))
    with pytest.raises(ps.LimitExceeded, match="cache_bytes"):
        shared.run(feeds_of(GROWING, 3))


def test_runs_go_on_beside_those_that_fail() -> None:
    text = """g (float[4] x, int64 n) => (float[4] y) <bool yes = {1}> {
        y = Loop (n, yes, x) <body = b (int64 i, bool c, float[4] v) => (bool d, float[4] z) {
            d = Identity (c) e = Gather (v, i) z = Add (v, e) }> }"""
    shared = ps.SharedLoops(model_from_text(text))

    def client(count: int) -> bool:
        feeds = {"x": np.arange(4, dtype=np.float32) + count, "n": np.array(count)}
        if count > 4:
            with pytest.raises(ps.PenstockError, match="Gather"):
                shared.run(feeds)
        else:
            check(shared.run(feeds), by_runtime(text, feeds))
        return True

    with ThreadPoolExecutor(6) as threads:
        assert all(threads.map(client, [1, 2, 3, 4, 9, 4, 2, 7, 3] * 3))


def test_inputs_that_do_not_fit_are_named() -> None:
    shared = ps.SharedLoops(model_from_text(GROWING))
    with pytest.raises(
        ps.InvalidInput, match=r"a value is missing for each of these inputs: 'n' .int64"
    ):
        shared.run({"x": np.zeros((1, 2), np.float32)})
    with pytest.raises(ps.InvalidInput, match=r"cannot feed 'N': .* did you mean 'n'"):
        shared.run({**feeds_of(GROWING, 0), "N": np.zeros(1)})
    with pytest.raises(ps.InvalidInput, match=r"cannot fetch 'q': .* outputs of the model alone"):
        shared.run(feeds_of(GROWING, 0), ["q"])


def test_models_without_loops_are_refused() -> None:
    with pytest.raises(ps.InvalidInput, match="no loop that runs can share"):
        ps.SharedLoops(model_from_text("g (float[2] x) => (float[2] y) { y = Neg (x) }"))
    text = """g (int64 n) => (float[2] y) <bool yes = {1}> {
        s0 = SequenceEmpty () s = Loop (n, yes, s0) <body = b (int64 i, bool c, seq(float[2]) v)
            => (bool d, seq(float[2]) z) { d = Identity (c) e = Constant <value_floats = [1.0, 2.0]> ()
            z = SequenceInsert (v, e) }>
        y = ConcatFromSequence <axis = 0> (s) }"""
    with pytest.raises(ps.InvalidInput, match=r"carries or reads .* not a tensor"):
        ps.SharedLoops(model_from_text(text))
