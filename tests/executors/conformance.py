"""What every executor must hold: each has a test class that inherits these."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import onnx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from onnx import parser

import penstock as ps
from penstock.interpret import interpret
from penstock.ir import Graph, Model, clone
from penstock.passes.infer import infer_types
from tests.random_graphs import feeds_for, graphs

HEADER = '<ir_version: 9, opset_import: ["" : 19]>\n'


def model(text: str) -> onnx.ModelProto:
    """A model from ONNX's textual form, header left out."""
    return parser.parse_model(HEADER + text)


ENDLESS = """endless (float[4] x, int64 n) => (float[4] y) {
    y = Loop (n, , x) <body = body (int64 i, bool c, float[4] v) => (bool d, float[4] w) {
        d = Identity (c)
        w = Add (v, v)
    }>
}"""


def leaves(value) -> Iterator[np.ndarray]:
    """The arrays in a value."""
    if isinstance(value, np.ndarray):
        yield value
    elif isinstance(value, list):
        for element in value:
            yield from leaves(element)


def assert_equal(got, want) -> None:
    """The same, to the last bit; any NaN equals any other."""
    assert type(got) is type(want)
    if isinstance(got, list):
        assert len(got) == len(want)
        for a, b in zip(got, want, strict=True):
            assert_equal(a, b)
    elif isinstance(got, np.ndarray):
        assert got.dtype == want.dtype
        assert got.shape == want.shape
        np.testing.assert_array_equal(got, want)
        if got.dtype.kind == "f":
            numbers = ~np.isnan(want)
            np.testing.assert_array_equal(np.signbit(got)[numbers], np.signbit(want)[numbers])
    else:
        assert got == want


class ExecutorConformance:
    """``executor``: its name; each test compiles with it."""

    executor = "auto"

    def compile(self, source, **options) -> ps.Session:
        return ps.compile(source, executor=self.executor, **options)

    def same_as_interpreter(self, graph: Graph, seed: int) -> None:
        given = feeds_for(seed)
        feeds = {value.name: given[value.name] for value in graph.inputs}
        plain = clone(graph)
        infer_types(plain)
        with np.errstate(all="ignore"):
            wanted = interpret(plain, list(feeds.values()))
        session = self.compile(Model({"random": graph}, "random"))
        for _ in range(2):  # what a first run leaves in memory must not show in a second
            outputs = list(session.run(feeds).values())
            assert_equal(outputs, wanted)
            arrays = list(leaves(outputs))
            for i, array in enumerate(arrays):
                others = [*arrays[:i], *feeds.values()]
                assert not any(np.shares_memory(array, other) for other in others)
        assert_equal(list(feeds.values()), [feeds_for(seed)[name] for name in feeds])

    @settings(max_examples=300, deadline=None, suppress_health_check=list(HealthCheck))
    @given(graph=graphs(), seed=st.integers(0, 3))
    def test_random_graphs_equal_the_interpreter(self, graph, seed):
        self.same_as_interpreter(graph, seed)

    def test_an_output_that_is_an_input_is_a_copy(self):
        session = self.compile(model("g (float[2] x) => (float[2] y) { y = Identity (x) }"))
        x = np.ones(2, np.float32)
        y = session.run({"x": x})["y"]
        y[0] = 5
        assert x[0] == 1

    def test_an_output_that_is_a_constant_is_a_copy(self):
        session = self.compile(
            model("g (float[2] x) => (float[2] y, float[2] z) <float[2] y = {1, 2}> { z = Abs(x) }")
        )
        x = np.ones(2, np.float32)
        session.run({"x": x})["y"][0] = 5
        assert session.run({"x": x})["y"].tolist() == [1, 2]

    def test_outputs_of_two_runs_share_nothing(self):
        session = self.compile(model("g (float[2] x) => (float[2] y) { t = Neg(x) y = Exp(t) }"))
        first = session.run({"x": np.zeros(2, np.float32)})["y"]
        session.run({"x": np.ones(2, np.float32)})
        assert first.tolist() == [1, 1]

    def test_one_value_as_two_outputs_gives_two_arrays(self):
        session = self.compile(
            model("g (float[2] x) => (float[2] y, float[2] z) { y = Neg(x) z = Identity(y) }")
        )
        outputs = session.run({"x": np.ones(2, np.float32)})
        assert not np.shares_memory(outputs["y"], outputs["z"])

    def test_a_failing_node_is_named_with_origin_and_shapes(self):
        session = self.compile(
            model("""g (float[3] x, int64[N] i) => (float[N] y) {
                t = Neg(x)
                [picker] y = Gather(t, i)
            }""")
        )
        x = np.zeros(3, np.float32)
        with pytest.raises(ps.RunError, match=r"Gather \(picker.*") as caught:
            session.run({"x": x, "i": np.array([7])})
        assert "int64[1]" in str(caught.value)
        # The session is as good as before.
        assert session.run({"x": x, "i": np.array([2])})["y"].shape == (1,)

    def test_a_loop_without_end_stops_at_the_deadline(self):
        session = self.compile(model(ENDLESS))
        feeds = {"x": np.zeros(4, np.float32), "n": np.array(2**62)}
        with pytest.raises(ps.DeadlineExceeded, match=r"0\.05 s"):
            session.run(feeds, timeout=0.05)
        feeds["n"] = np.array(3)
        assert session.run(feeds, timeout=60)["y"].tolist() == [0, 0, 0, 0]

    def test_a_timeout_of_zero_is_over_before_it_begins(self):
        session = self.compile(model(ENDLESS))
        feeds = {"x": np.zeros(4, np.float32), "n": np.array(1)}
        with pytest.raises(ps.DeadlineExceeded):
            session.run(feeds, timeout=0)

    def test_cancel_from_another_thread(self):
        session = self.compile(model(ENDLESS))
        feeds = {"x": np.zeros(4, np.float32), "n": np.array(2**62)}
        token = ps.CancelToken()
        timer = threading.Timer(0.05, token.cancel)
        timer.start()
        with pytest.raises(ps.Cancelled):
            session.run(feeds, cancel=token)
        timer.join()
        with pytest.raises(ps.Cancelled):
            session.run({"x": feeds["x"], "n": np.array(1)}, cancel=token)

    def test_limits_bound_iterations(self):
        session = self.compile(model(ENDLESS), limits=ps.Limits(max_iterations=10))
        x = np.zeros(4, np.float32)
        assert session.run({"x": x, "n": np.array(10)})["y"].tolist() == [0, 0, 0, 0]
        with pytest.raises(ps.LimitExceeded, match="10 iterations"):
            session.run({"x": x, "n": np.array(11)})

    def test_threads_get_the_answers_they_would_get_alone(self):
        session = self.compile(
            model("""g (float[N] x) => (float[N] y) {
                a = Sin(x) b = Mul(a, a) c = Add(b, x) d = Neg(c) e = Mul(d, a) y = Add(e, b)
            }""")
        )

        def job(seed: int) -> bool:
            rng = np.random.default_rng(seed)
            good = True
            for _ in range(40):
                x = rng.standard_normal(rng.integers(1, 5) * 1000).astype(np.float32)
                a = np.sin(x)
                want = -(a * a + x) * a + a * a
                good &= bool(np.array_equal(session.run({"x": x})["y"], want))
            return good

        with ThreadPoolExecutor(8) as pool:
            assert all(pool.map(job, range(8)))

    def test_a_chain_of_ten_thousand_nodes(self):
        nodes = [onnx.helper.make_node("Neg", [f"v{i}"], [f"v{i + 1}"]) for i in range(10_000)]
        info = onnx.helper.make_tensor_value_info
        graph = onnx.helper.make_graph(nodes, "g", [info("v0", 1, [3])], [info("v10000", 1, [3])])
        session = self.compile(onnx.helper.make_model(graph))
        x = np.arange(3, dtype=np.float32)
        np.testing.assert_array_equal(session.run({"v0": x})["v10000"], x)

    def test_a_session_leaves_no_memory_behind(self):
        session = self.compile(model(ENDLESS))
        session.run({"x": np.zeros(4, np.float32), "n": np.array(1)})
        gone = weakref.ref(session)
        del session
        gc.collect()
        assert gone() is None

    def test_failing_runs_leave_nothing_behind(self):
        session = self.compile(
            model("g (float[3] x, int64[N] i) => (float[N] y) { t = Neg(x) y = Gather(t, i) }")
        )
        feeds = {"x": np.zeros(3, np.float32), "i": np.array([7])}
        with pytest.raises(ps.RunError):
            session.run(feeds)
        arenas, threads = session.memory.arenas, threading.active_count()
        for _ in range(200):
            with pytest.raises(ps.RunError):
                session.run(feeds, timeout=60)
        assert session.memory.arenas == arenas
        assert threading.active_count() <= threads + 1  # the one that watches deadlines

    def test_numpy_settings_of_the_caller_stay(self):
        session = self.compile(model("g (float[1] x) => (float[1] y) { y = Log(x) }"))
        with np.errstate(all="raise"):
            y = session.run({"x": np.zeros(1, np.float32)})["y"]
            assert np.isneginf(y[0])
            assert np.geterr()["divide"] == "raise"
