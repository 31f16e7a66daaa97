"""User streams: order, signals, errors, and what no thread waits for."""

from __future__ import annotations

import os
import threading
from concurrent.futures import CancelledError

import numpy as np
import pytest

import penstock as ps
from penstock.host.threads import Workers, pool
from penstock.observers.base import Observer
from tests.support.onnx_text import compile_text
from tests.support.timing import SOON


def compiled(text: str, **options) -> ps.Session:
    return compile_text(text, backends=["numpy"], **options)


@pytest.fixture(scope="module")
def double() -> ps.Session:
    return compiled("g (float[n] x) => (float[n] y) { y = Add(x, x) }")


@pytest.fixture
def gate():
    created = threading.Event()
    yield created
    created.set()


def ones(n: int = 3) -> dict[str, np.ndarray]:
    return {"x": np.ones(n, np.float32)}


def test_stream_of_the_host_has_no_stream_of_torch():
    with pytest.raises(ps.PenstockError, match="device="):
        _ = ps.Stream().torch


def test_stream_runs_in_order(double, gate):
    stream, seen = ps.Stream(), []
    stream.call(gate.wait)
    futures = [stream.run(double, ones(n)) for n in (1, 2, 3)]
    for n, future in enumerate(futures, 1):
        future.add_done_callback(lambda _, n=n: seen.append(n))
    assert not stream.query() and not futures[0].done()
    gate.set()
    assert stream.wait(SOON)
    assert stream.query()
    assert seen == [1, 2, 3]
    assert [future.result()["y"].tolist() for future in futures] == [[2] * n for n in (1, 2, 3)]


def test_stream_run_returns_before_its_turn(double, gate):
    stream, here = ps.Stream(), threading.current_thread()
    where = []
    stream.call(lambda: (gate.wait(), where.append(threading.current_thread())))
    run = stream.run(double, ones())
    assert not run.done()
    gate.set()
    run.result(SOON)
    assert where != [here]


def test_two_streams_run_at_the_same_time():
    one, other = ps.Stream(), ps.Stream()
    meet = threading.Barrier(2)
    futures = [stream.call(lambda: meet.wait(SOON)) for stream in (one, other)]
    if pool().size < 2:
        pytest.skip("needs two threads")
    assert sorted(future.result(SOON) for future in futures) == [0, 1]


def test_a_stream_waits_for_a_signal_of_another(double, gate):
    one, other, seen = ps.Stream(), ps.Stream(), []
    one.call(gate.wait)
    one.call(lambda: seen.append("one"))
    other.wait_for(one.signal())
    other.call(lambda: seen.append("other"))
    one.call(lambda: None)
    assert not other.query()
    gate.set()
    assert other.wait(SOON)
    assert seen == ["one", "other"]


def test_streams_that_wait_hold_no_thread(gate):
    #  fifty streams wait for one without threads of their own, and others run meanwhile
    first, free = ps.Stream(), ps.Stream()
    first.call(gate.wait)
    signal = first.signal()
    waiting = [ps.Stream() for _ in range(50)]
    before = threading.active_count()
    done = []
    for stream in waiting:
        stream.wait_for(signal)
        stream.call(lambda: done.append(1))
    if pool().size > 1:
        assert free.call(lambda: "ran").result(SOON) == "ran"
    assert threading.active_count() <= max(before, pool().size + before)
    assert len(done) == 0
    gate.set()
    assert all(stream.wait(SOON) for stream in waiting)
    assert len(done) == 50


def test_wait_for_a_signal_never_emitted_returns_at_once():
    signal, stream = ps.Signal(), ps.Stream()
    stream.wait_for(signal)
    assert stream.query() and signal.query() and signal.wait(0)


def test_wait_sees_the_signal_as_it_was_when_it_began(gate):
    # A later emission does not affect a wait that has begun.
    one, other, signal = ps.Stream(), ps.Stream(), ps.Signal()
    one.signal(signal)
    assert signal.wait(SOON)
    other.wait_for(signal)
    one.call(gate.wait)
    one.signal(signal)
    assert other.call(lambda: 1).result(SOON) == 1
    assert not signal.query()
    gate.set()
    assert signal.wait(SOON) and signal.query()


def test_stream_wait_ends_at_its_timeout(gate):
    stream = ps.Stream()
    stream.call(gate.wait)
    assert not stream.wait(0.01)
    assert not stream.signal().wait(0.01)


def test_failed_run_of_a_stream_does_not_stop_the_next(double):
    stream = ps.Stream()
    bad = stream.run(double, {"x": np.ones((2, 2), np.float32)})
    broken = stream.call(lambda: 1 // 0)
    good = stream.run(double, ones())
    with pytest.raises(ps.InvalidInput):
        bad.result(SOON)
    with pytest.raises(ZeroDivisionError):
        broken.result(SOON)
    assert good.result(SOON)["y"].tolist() == [2, 2, 2]


def test_stream_run_stopped_before_its_turn_never_begins(double, gate):
    stream, token = ps.Stream(), ps.CancelToken()
    stream.call(gate.wait)
    stopped = stream.run(double, ones(), cancel=token)
    late = stream.run(double, ones(), timeout=0.01)
    dropped = stream.run(double, ones())
    last = stream.run(double, ones())
    token.cancel()
    with pytest.raises(ps.Cancelled):
        stopped.result(SOON)
    with pytest.raises(ps.DeadlineExceeded):
        late.result(SOON)
    assert dropped.cancel()
    gate.set()
    assert last.result(SOON)["y"].tolist() == [2, 2, 2]
    with pytest.raises(CancelledError):
        dropped.result(SOON)


def test_stream_runs_several_sessions_in_order(double):
    negate = compiled("g (float[n] x) => (float[n] y) { y = Neg(x) }")
    one, other = ps.Stream(), ps.Stream()
    futures = []
    for _ in range(20):
        for stream in (one, other):
            futures += [stream.run(double, ones()), stream.run(negate, ones())]
    for i, future in enumerate(futures):
        assert future.result(SOON)["y"].tolist() == ([-1] * 3 if i % 2 else [2] * 3)


def test_callback_on_a_stream_cannot_wait_for_a_signal(gate):
    stream, other = ps.Stream(), ps.Stream()
    other.call(gate.wait)
    signal = other.signal()
    with pytest.raises(ps.PenstockError, match="wait_for"):
        stream.call(lambda: signal.wait(5)).result(SOON)
    gate.set()


def test_callback_may_submit_to_its_own_stream(double):
    stream = ps.Stream()
    inner = stream.call(lambda: stream.run(double, ones())).result(SOON)
    assert inner.result(SOON)["y"].tolist() == [2, 2, 2]


def test_two_streams_run_one_session_at_once():
    #  a while of n turns: each run has its own signals and state
    text = """g (int64 n, float[64, 64] x) => (float[64, 64] y) {
        y = Loop <body = b (int64 i, bool c, float[64, 64] v) => (bool d, float[64, 64] w) {
            d = Identity(c) p = Sin(v) q = Cos(v) w = Mul(p, q) }> (n, , x) }"""
    session = compiled(text, executor="streams", max_streams=2)
    x = np.random.default_rng(0).standard_normal((64, 64)).astype(np.float32)
    expected = []
    for n in range(8):
        y = x
        for _ in range(n):
            y = np.sin(y) * np.cos(y)
        expected.append(y)
    streams = [ps.Stream(), ps.Stream()]
    runs = [
        (n, stream.run(session, {"n": np.int64(n), "x": x})) for n in range(8) for stream in streams
    ]
    for n, future in runs:
        np.testing.assert_array_equal(future.result(SOON)["y"], expected[n])


def test_stream_runs_larger_shapes_after_smaller_ones(double, gate):
    #  memory that must grow while earlier work is still queued
    stream = ps.Stream()
    stream.call(gate.wait)
    futures = [stream.run(double, ones(n)) for n in (10, 100_000, 5, 1_000_000, 10)]
    gate.set()
    sizes = [future.result(SOON)["y"].sum() for future in futures]
    assert sizes == [20, 200_000, 10, 2_000_000, 20]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_stream_of_a_forked_child_is_empty(double, gate):
    stream = ps.Stream()
    stream.call(gate.wait)
    child = os.fork()
    if not child:
        good = stream.query() and stream.run(double, ones()).result(SOON)["y"].tolist() == [2, 2, 2]
        os._exit(0 if good else 1)
    assert os.waitpid(child, 0)[1] == 0


def test_stream_run_is_on_the_pool_of_its_session(double):
    class Threads(Observer):
        def step_begin(self, run, step, inputs):
            names.append(threading.current_thread().name)

    names: list[str] = []
    workers = Workers("own", 1)
    own = compiled("g (float[n] x) => (float[n] y) { y = Add(x, x) }", pool=workers)
    stream = ps.Stream()
    for session in (own, double, own):
        stream.run(session, ones(), observers=[Threads()])
    assert stream.wait(SOON)
    assert [name.rsplit("-", 1)[0] for name in names] == [
        "penstock-own",
        "penstock-host",
        "penstock-own",
    ]
    workers.close()


def test_runs_of_a_stream_on_a_closed_pool_fail_and_the_next_run_goes_on(double, gate):
    workers = Workers("closed", 1)
    closed, stream = (
        compiled("g (float[n] x) => (float[n] y) { y = Neg(x) }", pool=workers),
        ps.Stream(),
    )
    before = stream.call(gate.wait)
    first, second = stream.run(closed, ones(2)), stream.run(closed, ones(2))
    after = stream.run(double, ones(2))
    workers.close()
    gate.set()
    before.result(SOON)
    for future in (first, second):
        with pytest.raises(ps.RunError, match="the pool 'closed' is closed"):
            future.result(SOON)
    assert after.result(SOON)["y"].tolist() == [2, 2]
    assert stream.wait(SOON)
    with pytest.raises(ps.RunError, match="the pool 'closed' is closed"):
        stream.run(closed, ones(2)).result(SOON)
