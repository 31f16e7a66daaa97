"""Batches that are too large for the memory of a session run in parts, with the same answers."""

from __future__ import annotations

import threading
import weakref

import numpy as np
import pytest

import penstock as ps
from tests.session.test_padding import feeds_of, model_of
from tests.support.bounded import WIDE, least, rows, session_of, wants, whole
from tests.support.processes import in_child
from tests.support.timing import SOON, uncollected, wait_until


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
    memory = int(whole(text, {"x": x}) * share)
    session = wants(text, {"x": x}, memory)
    assert "rows of" in session.source
    again = x[::-1].copy()
    for feed in (again, x[:2], again):
        expected = session_of(text).run({"x": feed})["y"]
        np.testing.assert_allclose(session.run({"x": feed})["y"], expected, 1e-5, 1e-6)


def test_parts_are_observed_timed_and_written_into_given_arrays():
    x = rows(50)
    session = session_of(WIDE, memory=whole(WIDE, {"x": x}) // 2)
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
    session = session_of(WIDE, memory=whole(WIDE, {"x": feeds[0]}) // 2)
    jobs = [session.submit({"x": x}) for x in feeds]
    for job, other in zip(jobs, expected, strict=True):
        np.testing.assert_allclose(job.result(SOON)["y"], other, 1e-5)


def most_held(session: ps.Session, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Record the most bytes that a session with ``memory=`` holds at a time, from now on."""
    memory, most = session._plans.memory, [0]
    assert memory is not None
    makes_room = type(memory)._makes_room

    def noting(self, nbytes, *others):
        fits = makes_room(self, nbytes, *others)
        taken = sum([pool.count * pool.needs for pool in self._alive()])
        most[0] = max(most[0], self.held + self.results + taken + nbytes * fits)
        return fits

    monkeypatch.setattr(type(memory), "_makes_room", noting)
    return most


@pytest.mark.parametrize("executor", ["linear", "parallel"])
def test_runs_beside_one_in_parts_leave_its_results_their_memory(executor, monkeypatch):
    text = WIDE.replace("float[N, 4] y", "float[N, 1024] y").replace("Mul(m, w)", "Mul(e, m)")
    feeds = [rows(count, count) for count in (100, 90, 3, 40, 10, 60)]
    expected = [session_of(text).run({"x": x})["y"] for x in feeds]
    session = session_of(text, memory=whole(text, {"x": feeds[0]}) * 7 // 10, executor=executor)
    for x in feeds:
        session.run({"x": x})
    most = most_held(session, monkeypatch)
    wrong, threads = [], []

    def run(x: np.ndarray, wanted: np.ndarray) -> None:
        found = [session.run({"x": x}, timeout=SOON)["y"] for _ in range(10)]
        wrong.extend([len(x) for y in found if not np.allclose(y, wanted, 1e-5, 1e-6)])

    for x, wanted in zip(feeds, expected, strict=True):
        threads.append(threading.Thread(target=run, args=(x, wanted)))
        threads[-1].start()
    for thread in threads:
        thread.join(SOON)
    assert not wrong
    assert not any(thread.is_alive() for thread in threads)
    # A plan may be compiled between the moments when another one is found and when it runs.
    late = max(executor.plan_bytes for executor in session._plans.executors())
    assert 0 < most[0] <= session._plans.memory.limit + late
    assert session._plans.memory.results == 0


@pytest.mark.parametrize(("name", "samples"), [("WIDE", 3), ("WIDE", 200), ("ATTENTION", 500)])
def test_least_memory_that_is_named_is_that_of_the_smallest_parts(name, samples):
    text, dims = BY_FIRST[name]
    x = np.random.default_rng(1).normal(size=(samples, *dims)).astype(np.float32)
    named = least(text, {"x": x})
    assert named < whole(text, {"x": x})
    wants(text, {"x": x}, named)
    with pytest.raises(ps.LimitExceeded, match=rf"{named} are needed.*parts of 2 rows"):
        session_of(text, memory=named - 3000).run({"x": x})


@pytest.mark.costly
@pytest.mark.parametrize("name", ["BertModel_script", "DebertaV2Model_script"])
@pytest.mark.parametrize("share", [1.0, 1.2, 1.5, 2.0])
def test_padded_batch_runs_with_any_memory_from_the_least_that_is_named_on(name, share):
    model, options = model_of(name), {"dead_rows": "any"}
    plain = session_of(model, **options)
    mask = np.arange(38) < np.r_[38, np.arange(1, 64) % 37 + 1][:, None]
    feeds = feeds_of(plain, mask)
    memory = int(least(model, feeds, **options) * share)
    for got, want in zip(
        session_of(model, memory=memory, **options).run(feeds).values(),
        plain.run(feeds).values(),
        strict=True,
    ):
        live = mask if want.shape[:2] == mask.shape else slice(None)
        np.testing.assert_allclose(got[live], want[live], 1e-4, 1e-5)


def test_batch_larger_than_the_machine_s_memory_runs_in_parts():
    x, limits = rows(200), ps.Limits(max_bytes=300_000)
    session = session_of(WIDE, memory="1GB", limits=limits)
    expected = session_of(WIDE).run({"x": x})["y"]
    np.testing.assert_allclose(session.run({"x": x})["y"], expected, 1e-5, 1e-6)
    assert "rows of 200" in session.source


def test_worker_that_waited_for_memory_forgets_its_run():
    x, gone = rows(34), []
    session = session_of(WIDE, memory=whole(WIDE, {"x": x}) + 3000)
    with uncollected():
        jobs = [session.submit({"x": x}) for _ in range(8)]
        for job in jobs:
            job.result(SOON)
        weakref.finalize(session, gone.append, True)
        del session, jobs, job
        wait_until(lambda: gone)


def test_run_that_waits_for_another_in_parts_ends_at_its_deadline():
    x = rows(40)
    session = session_of(WIDE, memory=whole(WIDE, {"x": x}) // 2)
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
    session = session_of(WIDE, memory=whole(WIDE, {"x": x}) // 2)
    with pytest.raises(ps.PenstockError, match="a run in parts"):
        session.run({"x": x}, observers=[Calls()])
    assert session.run({"x": x})["y"].shape == (40, 4)


def test_forked_child_runs_in_parts_though_another_thread_did():
    x = rows(40)
    session = session_of(WIDE, memory=whole(WIDE, {"x": x}) // 2)
    session.run({"x": x})
    memory = session._plans.memory
    assert memory is not None
    with memory.turn:
        assert in_child(lambda: session.run({"x": x}, timeout=SOON))


def test_sequences_of_a_recurrent_layer_run_in_parts_along_their_batch():
    x = np.random.default_rng(0).normal(size=(5, 40, 64)).astype(np.float32)
    with pytest.raises(ps.LimitExceeded, match="at least"):  # the first dim is time
        session_of(RECURRENT, memory=whole(RECURRENT, {"x": x}) * 2 // 3).run({"x": x})
    text = RECURRENT.replace("(float[5, N, 64] x) =>", "(float[N, 5, 64] x) =>")
    text = text.replace("(float[5, 1, N, 16] y, float[1, N, 16] h)", "(float[N, 16] z)")
    text = text.replace("u = Transpose<perm = [1, 0, 2]>(t)", "")
    text = text.replace("(u, w, r) }", "(t, w, r) z = Squeeze(h, zero) }")
    text = text.replace("{\n    w", "{ zero = Constant<value = int64[1] {0}> ()\n    w")
    feed = {"x": np.ascontiguousarray(x.transpose(1, 0, 2))}
    wants(text, feed, whole(text, feed) * 9 // 10)
