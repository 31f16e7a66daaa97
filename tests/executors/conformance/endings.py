"""Failures, deadlines, cancellation, interrupts and limits."""

from __future__ import annotations

import asyncio
import gc
import signal
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import numpy as np
import pytest

import penstock as ps
from penstock.executors.control import Watchdog
from tests.executors.conformance.base import ENDLESS, ExecutorTests
from tests.support.onnx_text import model_from_text
from tests.support.tf_graphs import Builder, TensorProto, Type
from tests.support.timing import SOON

MOST_BYTES = 2**22
COUNT = np.array(10**6)
ROW = np.ones(1000, np.float32)
GROWING = {
    "ConstantOfShape": (
        "g (int64[1] n) => (float[N] y) { y = ConstantOfShape(n) }",
        {"n": np.array([10**10])},
    ),
    "Expand": (
        "g (float x, int64[2] s) => (float[A, B] y) { y = Expand(x, s) }",
        {"x": np.float32(1), "s": np.array([2**12, 2**12])},
    ),
    "Expand|ReduceSum": (
        "g (float x, int64[2] s) => (float y) { z = Expand(x, s) y = ReduceSum<keepdims=0>(z) }",
        {"x": np.float32(1), "s": np.array([2**12, 2**12])},
    ),
    "Range": (
        "g (float d) => (float[N] y) <float a = {0}, float b = {1}> { y = Range(a, b, d) }",
        {"d": np.float32(1e-9)},
    ),
    "Add": (
        """g (float[N] x) => (float[A, B] y) {
            k = NonZero(x) t = Transpose(k) z = Add(k, t) y = Cast<to=1>(z) }""",
        {"x": np.ones(20_000, np.float32)},
    ),
    "Concat": (
        """g (float[M] x, int64 n) => (float[A] y) {
            y = Loop(n, , x) <body = b (int64 i, bool t, float[M] v) => (bool u, float[K] w) {
                u = Identity(t) w = Concat<axis=0>(v, v) }> }""",
        {"x": ROW, "n": COUNT},
    ),
    "Loop|Neg": (
        """g (float[1000] x, int64 n) => (float[A, B] y) {
            y = Loop(n, ,) <body = b (int64 i, bool t) => (bool u, float[1000] w) {
                u = Identity(t) w = Neg(x) }> }""",
        {"x": ROW, "n": COUNT},
    ),
    "Loop": (
        """g (float[1000] x, int64 n) => (float[A, B] y) {
            y = Loop(n, ,) <body = b (int64 i, bool t) => (bool u, float[1000] w) {
                u = Identity(t) w = Identity(x) }> }""",
        {"x": ROW, "n": np.array(2**62)},
    ),
    "SequenceInsert|Add": (
        """g (float[1000] x, int64 n) => (int64 y) {
            e = SequenceEmpty() y = SequenceLength(s)
            s = Loop(n, , e) <body = b (int64 i, bool t, seq(float[M]) v)
                    => (bool u, seq(float[M]) w) {
                u = Identity(t) f = Cast<to=1>(i) z = Add(x, f) w = SequenceInsert(v, z) }> }""",
        {"x": ROW, "n": np.array(10_000)},
    ),
    "StringConcat": (
        """g (string[N] x, int64 n) => (string[A] y) {
            y = Loop(n, , x) <body = b (int64 i, bool t, string[M] v) => (bool u, string[K] w) {
                u = Identity(t) w = StringConcat(v, v) }> }""",
        {"x": np.array(["a" * 1000], object), "n": COUNT},
    ),
    "StringSplit": (
        "g (string[N] x) => (string[A, B] y, int64[A] z) { y, z = StringSplit(x) }",
        {"x": np.array(["a " * 2000] + ["b"] * 2000, object)},
    ),
    "Exp|Neg|Abs": (
        """g (float[N] x) => (float[N] a, float[N] b, float[N] c) {
            a = Neg(x) b = Abs(x) c = Exp(x) }""",
        {"x": np.ones(MOST_BYTES // 8 - 1000, np.float32)},
    ),
}


@contextmanager
def interrupts(thread: int) -> Iterator[None]:
    """Interrupt a thread soon, and again after a while: Python drops what a signal handler raises
    within a finalizer or a callback of the garbage collector."""
    left = threading.Event()

    def interrupt() -> None:
        patience_s = 0.02
        while not left.wait(patience_s):
            signal.pthread_kill(thread, signal.SIGINT)
            patience_s = 20.0

    sender = threading.Thread(target=interrupt)
    try:
        sender.start()
        yield
    finally:
        left.set()
        sender.join()


class Endings(ExecutorTests):
    """Failures, deadlines, cancellation, interrupts and limits."""

    def test_error_of_a_node_names_its_origin_and_shapes(self):
        session = self.compile(
            model_from_text("""g (float[3] x, int64[N] i) => (float[N] y) {
                t = Neg(x)
                [picker] y = Gather(t, i)
            }""")
        )
        x = np.zeros(3, np.float32)
        with pytest.raises(ps.RunError, match=r"Gather \(picker.*") as caught:
            session.run({"x": x, "i": np.array([7])})
        assert "int64[1]" in str(caught.value)
        # The session must work as before.
        assert session.run({"x": x, "i": np.array([2])})["y"].shape == (1,)

    def test_endless_loop_stops_at_the_deadline(self):
        session = self.compile(model_from_text(ENDLESS))
        feeds = {"x": np.zeros(4, np.float32), "n": np.array(2**62)}
        with pytest.raises(ps.DeadlineExceeded, match=r"0\.05 s"):
            session.run(feeds, timeout=0.05)
        feeds["n"] = np.array(3)
        assert session.run(feeds, timeout=60)["y"].tolist() == [0, 0, 0, 0]

    @pytest.mark.parametrize("way", ["run", "observed", "submit", "arun", "stream"])
    def test_run_that_ends_late_fails_without_the_watchdog(self, way, monkeypatch):
        monkeypatch.setattr(Watchdog, "add", lambda self, control: None)
        session = self.compile(model_from_text(ENDLESS))
        feeds = {"x": np.zeros(4, np.float32), "n": np.array(1)}
        ways = {
            "run": partial(session.run, feeds),
            "observed": partial(session.run, feeds, trace=ps.Trace()),
            "submit": lambda **late: session.submit(feeds, **late).result(SOON),
            "arun": lambda **late: asyncio.run(session.arun(feeds, **late)),
            "stream": lambda **late: ps.Stream().run(session, feeds, **late).result(SOON),
        }
        assert ways[way](timeout=SOON)["y"].tolist() == [0, 0, 0, 0]
        with pytest.raises(ps.DeadlineExceeded, match="1e-09 s"):
            ways[way](timeout=1e-9)

    @pytest.mark.parametrize("names", GROWING)
    def test_run_stays_within_max_bytes_and_names_the_node(self, names, most_bytes):
        text, feeds = GROWING[names]
        session = self.compile(model_from_text(text), limits=ps.Limits(max_bytes=MOST_BYTES))
        if not all(
            isinstance(b, str) or b.memory == "host" for b in session.options.backends or ()
        ):
            pytest.skip("only Penstock's kernels ask the budget before they allocate")

        def job():
            with pytest.raises(ps.LimitExceeded, match=rf"^({names}|Fused) \(.*Limits.max_bytes"):
                session.run(feeds)

        assert most_bytes(job) < 3 * MOST_BYTES

    def test_memory_that_a_loop_has_freed_does_not_count(self):
        text = """g (float[1000] x, int64 n) => (float[A] y) {
            y = Loop(n, , x) <body = b (int64 i, bool t, float[M] v) => (bool u, float[K] w) {
                u = Identity(t) w = Concat<axis=0>(x, x) }> }"""
        session = self.compile(model_from_text(text), limits=ps.Limits(max_bytes=2**17))
        assert session.run({"x": ROW, "n": np.array(2000)})["y"].shape == (2000,)

    @pytest.mark.parametrize("shape", ["int64[3] s", "int64[N] s"])
    def test_result_of_more_than_max_dims_fails(self, shape):
        text = f"g (float[1] x, {shape}) => (float y) {{ r = Reshape(x, s) y = ReduceMax<keepdims=0>(r) }}"
        limits = ps.Limits(max_dims=2)
        with pytest.raises(
            ps.LimitExceeded, match=r"Reshape.*3 dims, more than Limits.max_dims = 2"
        ):
            session = self.compile(model_from_text(text), limits=limits)
            session.run({"x": np.ones(1, np.float32), "s": np.ones(3, np.int64)})

    def test_timeout_of_zero_fails_before_the_run_begins(self):
        session = self.compile(model_from_text(ENDLESS))
        feeds = {"x": np.zeros(4, np.float32), "n": np.array(1)}
        with pytest.raises(ps.DeadlineExceeded):
            session.run(feeds, timeout=0)

    def test_cancel_from_another_thread_ends_the_run(self):
        session = self.compile(model_from_text(ENDLESS))
        feeds = {"x": np.zeros(4, np.float32), "n": np.array(2**62)}
        token = ps.CancelToken()
        timer = threading.Timer(0.05, token.cancel)
        timer.start()
        with pytest.raises(ps.Cancelled):
            session.run(feeds, cancel=token)
        timer.join()
        with pytest.raises(ps.Cancelled):
            session.run({"x": feeds["x"], "n": np.array(1)}, cancel=token)

    def test_stopped_run_names_the_node_it_had_reached(self):
        session = self.compile(model_from_text(ENDLESS))
        feeds = {"x": np.zeros(4, np.float32), "n": np.array(2**62)}
        session.run(feeds | {"n": np.array(1)})  # compiled before the time counts
        with pytest.raises(ps.DeadlineExceeded) as caught:
            session.run(feeds, timeout=0.2)
        assert caught.value.__cause__ is None
        assert "Loop_0" in caught.value.__notes__[0]

    # Python reports an interrupt that it drops within a finalizer, and ``interrupts`` repeats it.
    @pytest.mark.filterwarnings(
        "ignore:Exception ignored in:pytest.PytestUnraisableExceptionWarning"
    )
    @pytest.mark.skipif(not hasattr(signal, "pthread_kill"), reason="needs signals to threads")
    def test_session_runs_again_after_a_keyboard_interrupt(self):
        session = self.compile(model_from_text(ENDLESS))
        feeds = {"x": np.ones(4, np.float32), "n": np.array(2**62)}
        short = feeds | {"n": np.array(2)}
        session.run(short)
        arenas = session.memory.arenas
        # Python ignores interrupts if its parent process did (a shell, in the background).
        before = signal.signal(signal.SIGINT, signal.default_int_handler)
        try:
            for _ in range(5):
                with pytest.raises(KeyboardInterrupt), interrupts(threading.get_ident()):
                    session.run(feeds)
        finally:
            signal.signal(signal.SIGINT, before)
        assert session.run(short)["y"].tolist() == [4] * 4
        assert session.memory.arenas == arenas

    def test_limit_of_iterations_ends_the_run(self):
        session = self.compile(model_from_text(ENDLESS), limits=ps.Limits(max_iterations=10))
        x = np.zeros(4, np.float32)
        assert session.run({"x": x, "n": np.array(10)})["y"].tolist() == [0, 0, 0, 0]
        with pytest.raises(ps.LimitExceeded, match=r"Loop_0 in the model.* 10 iterations"):
            session.run({"x": x, "n": np.array(11)})

    def test_output_beyond_the_machine_is_a_run_error(self):
        g = Builder()
        splat = TensorProto(dtype=1, float_val=[1])
        splat.tensor_shape.dim.add(size=2**44)
        g.node("Const", name="y", dtype=Type("float32"))
        g.proto.node[0].attr["value"].tensor.CopyFrom(splat)
        limits = ps.Limits(max_bytes=None)
        session = self.compile(ps.load(g.bytes(), limits=limits), limits=limits)
        try:
            assert session.run({}, ["y"])["y"].size == 2**44  # a view of one element
        except ps.RunError as error:
            assert "Unable to allocate" in str(error)

    def test_deleted_session_is_collected(self):
        session = self.compile(model_from_text(ENDLESS))
        session.run({"x": np.zeros(4, np.float32), "n": np.array(1)})
        gone = weakref.ref(session)
        del session
        gc.collect()
        assert gone() is None

    def test_failing_runs_leak_neither_arenas_nor_threads(self):
        session = self.compile(
            model_from_text(
                "g (float[3] x, int64[N] i) => (float[N] y) { t = Neg(x) y = Gather(t, i) }"
            )
        )
        feeds = {"x": np.zeros(3, np.float32), "i": np.array([7])}
        with pytest.raises(ps.RunError):
            session.run(feeds)
        arenas, threads = session.memory.arenas, threading.active_count()
        for _ in range(1000):
            with pytest.raises(ps.RunError):
                session.run(feeds, timeout=60)
        assert session.memory.arenas == arenas
        assert threading.active_count() <= threads + 1  # the thread that watches deadlines
