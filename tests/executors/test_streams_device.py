"""Streams of an asynchronous device: what waits for what, and on how many threads.

The device (``device.py``) is late at random, and refuses values that are read too early.
"""

from __future__ import annotations

import threading

import numpy as np
import pytest

import penstock as ps
from penstock.host.threads import Workers
from tests.executors.conformance import ExecutorConformance
from tests.support.cost_models import ScatteredCosts
from tests.support.device_backend import DelayedBackend, Moment
from tests.support.onnx_text import compile_text, model_from_text
from tests.support.timing import SOON

X = np.linspace(-1, 1, 16, dtype=np.float32).reshape(4, 4)


class OnDevices(ExecutorConformance):
    """The conformance tests of the host hold where nodes are spread over it and two devices."""

    leaves_threads = True
    sampled = True

    def compile(self, source, **options) -> ps.Session:
        backends = [DelayedBackend("one", most=5e-4), "numpy", DelayedBackend("two", most=5e-4)]
        costs = ScatteredCosts()
        return super().compile(source, backends=backends, cost_model=costs, **options)

    def test_error_of_a_submitted_run_is_raised_by_its_future(self):
        """The error appears where the missing value is copied to the host."""
        text = "g (float[3] x, int64[1] i) => (float[1] y) { y = Gather(x, i) }"
        session = self.compile(model_from_text(text))
        feeds = {"x": np.ones(3, np.float32), "i": np.array([3])}
        with pytest.raises(ps.RunError, match=r"Gather.*index 3 is out of bounds"):
            session.submit(feeds).result(SOON)


class TestStreamsOnDevices(OnDevices):
    executor = "streams"

    def compile(self, source, **options) -> ps.Session:
        return super().compile(source, max_streams=9, **options)


class TestLinearOnDevices(OnDevices):
    executor = "linear"


def compiled(text: str, backend: DelayedBackend, **options) -> ps.Session:
    """The session of a model whose operations run on ``backend`` if it has them."""
    return compile_text(
        text,
        executor="streams",
        backends=[backend, "numpy"],
        place=dict.fromkeys(backend.operations or (), backend.name),
        **options,
    )


def expected(text: str, feeds: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    return compile_text(text, executor="linear", backends=["numpy"]).run(feeds)


TWO_BRANCHES = """g (float[4, 4] x) => (float[4, 4] y) {
    a = Sin(x) b = Cos(x) c = MatMul(a, x) d = MatMul(b, x) y = Add(c, d) }"""


def test_streams_of_a_device_are_its_own():
    backend = DelayedBackend(operations={"Sin", "Cos", "MatMul"})
    session = compiled(TWO_BRANCHES, backend, max_streams=8)
    assert session.inspect.executor.tasks.signals.devices == ("late", "late")
    for _ in range(5):
        found = session.run({"x": X})
        np.testing.assert_array_equal(found["y"], expected(TWO_BRANCHES, {"x": X})["y"])


def test_streams_of_a_device_are_ordered_by_events_without_the_host():
    #  x -+- Sin -+- MatMul ---+- Add     the second stream waits for the first on the device
    #     +- Cos -+- MatMul ---+
    text = """g (float[4, 4] x) => (float[4, 4] y) {
        a = Sin(x) b = Cos(x) c = MatMul(a, b) d = MatMul(b, a) y = Add(c, d) }"""
    backend = DelayedBackend(operations={"Sin", "Cos", "MatMul", "Add"})
    session = compiled(text, backend, max_streams=8)
    source = session.source
    assert ".wait(S[" in source
    # The host waits for the end of each stream, and for the result.
    assert source.count(".query(): yield S[") == 1
    for _ in range(5):
        np.testing.assert_array_equal(session.run({"x": X})["y"], expected(text, {"x": X})["y"])


LOOP_AND_MORE = """g (int64 n, float[4, 4] x) => (float[4, 4] y, float[4, 4] z) {
    y = Loop <body = b (int64 i, bool c, float[4, 4] v) => (bool d, float[4, 4] w) {
        s = Sin(v) k = Cos(v) w = Mul(s, k)
        m = ReduceMax <keepdims = 0> (w) d = Greater(m, low) }> (n, , x)
    e = Exp(x) f = Neg(e) z = Abs(f) }"""


LOOP_AND_MORE = LOOP_AND_MORE.replace("z) {", "z) <float low = {-9}> {", 1)


def test_streams_loop_with_a_condition_computed_on_a_device():
    backend = DelayedBackend(operations={"Sin", "Mul", "ReduceMax"})
    session = compiled(LOOP_AND_MORE, backend, max_streams=4)
    for n in (0, 1, 2, 5):
        feeds = {"n": np.int64(n), "x": X}
        found, wanted = session.run(feeds), expected(LOOP_AND_MORE, feeds)
        for name in wanted:
            np.testing.assert_array_equal(found[name], wanted[name])


def test_streams_of_the_host_go_on_while_a_loop_waits_for_a_device(monkeypatch):
    #  while (on the device)      the device does nothing until the host has run all that does
    #  Exp -- Neg -- Abs          not follow the loop; one thread does both
    backend = DelayedBackend(operations={"Sin", "Mul", "ReduceMax"})
    beside = threading.Event()
    query = Moment.query

    def closed(self) -> bool:
        return beside.is_set() and query(self)

    class Watching(ps.Observer):
        def step_end(self, run, step, outputs):
            if step.node.op.name == "Abs":
                beside.set()

    session = compiled(LOOP_AND_MORE, backend, max_streams=4, threads=1)
    feeds = {"n": np.int64(3), "x": X}
    wanted = expected(LOOP_AND_MORE, feeds)
    monkeypatch.setattr(Moment, "query", closed)
    before = threading.active_count()
    found = session.run(feeds, observers=[Watching()])
    for name in wanted:
        np.testing.assert_array_equal(found[name], wanted[name])
    # Besides the device's, at most one more thread: the one that watches events.
    assert threading.active_count() - before <= backend.device.streams + 1


def test_runs_that_wait_for_a_device_hold_no_thread_of_the_pool(monkeypatch):
    opened = threading.Event()
    query = Moment.query
    backend = DelayedBackend(operations={"Sin"})
    text = "g (float[4, 4] x) => (float[4, 4] y) { s = Sin(x) y = Abs(s) }"
    pool = Workers("test", 1)
    try:
        session = compiled(text, backend, pool=pool)
        wanted = expected(text, {"x": X})["y"]
        session.run({"x": X})
        host = compile_text(text, executor="linear", backends=["numpy"], pool=pool)
        monkeypatch.setattr(Moment, "query", lambda moment: opened.is_set() and query(moment))
        runs = [ps.Stream().run(session, {"x": X}) for _ in range(8)]
        runs += [session.submit({"x": X}) for _ in range(8)]
        # The pool has one thread, and 16 runs wait for the device.
        np.testing.assert_array_equal(host.submit({"x": X}).result(SOON)["y"], wanted)
        assert not any(run.done() for run in runs)
        opened.set()
        for run in runs:
            np.testing.assert_array_equal(run.result(SOON)["y"], wanted)
    finally:
        pool.close()


def test_error_on_a_device_names_the_node_that_brought_it_to_the_host():
    backend = DelayedBackend(operations={"Gather"})
    text = """g (float[4, 4] x, int64[1] i) => (float[1, 4] y) { g = Gather(x, i) y = Abs(g) }"""
    session = compiled(text, backend)
    with pytest.raises(ps.RunError, match="Gather"):
        session.run({"x": X, "i": np.array([9])})
    found = session.run({"x": X, "i": np.array([2])})["y"]
    np.testing.assert_array_equal(found, np.abs(X[2:3]))
