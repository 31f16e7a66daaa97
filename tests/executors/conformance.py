"""What every executor must hold: each has a test class that inherits these."""

from __future__ import annotations

import asyncio
import gc
import json
import random
import signal
import threading
import weakref
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import onnx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import penstock as ps
from penstock.analysis.interpreter import interpret
from penstock.analysis.type_inference import infer_types
from penstock.backends.base import Backend
from penstock.host.threads import core_budget
from penstock.ir.graph import Graph, Model, clone
from penstock.observers.base import Observer
from tests.support.onnx_text import model_from_text
from tests.support.random_graphs import feeds_for, graphs, seeded

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
    if isinstance(got, dict):
        assert list(got) == list(want)
        for name in got:
            assert_equal(got[name], want[name])
    elif isinstance(got, list):
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


class Recorder(Observer):
    """Counts steps by the names of their nodes, and remembers what they made last."""

    def __init__(self) -> None:
        self.begun: Counter[str] = Counter()
        self.ended: Counter[str] = Counter()
        self.made: dict[str, list] = {}
        self.runs: list[BaseException | None] = []
        self.executor = ""
        self.live = self.most = 0
        self.lock = threading.Lock()

    def run_begin(self, run):
        self.executor = run.executor

    def run_end(self, run, error):
        self.runs.append(error)

    def step_begin(self, run, step, inputs):
        if step.node.op.name == "Transfer":
            return
        with self.lock:
            assert len(inputs) == len(step.inputs)
            self.begun[step.node.name] += 1

    def step_end(self, run, step, outputs):
        if step.node.op.name == "Transfer":
            return
        with self.lock:
            assert len(outputs) == len(step.outputs)
            self.ended[step.node.name] += 1
            self.made[step.node.name] = [
                x.copy() if isinstance(x, np.ndarray) else getattr(x, "array", x) for x in outputs
            ]

    def allocation(self, run, nbytes):
        with self.lock:
            self.live += nbytes
            self.most = max(self.live, self.most)


class ExecutorConformance:
    """``executor``: its name; each test compiles with it, and with ``backends``."""

    executor = "auto"
    backends: Sequence[str | Backend] = ("numpy",)
    leaves_threads = False

    def compile(self, source, **options) -> ps.Session:
        options.setdefault("backends", self.backends)
        return ps.compile(source, executor=self.executor, **options)

    def assert_same(self, got, want) -> None:
        """What a run gives is what it must be: by default, to the last bit."""
        assert_equal(got, want)

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
            self.assert_same(outputs, wanted)
            arrays = list(leaves(outputs))
            for i, array in enumerate(arrays):
                others = [*arrays[:i], *feeds.values()]
                assert not any(np.shares_memory(array, other) for other in others)
        self.assert_same(list(feeds.values()), [feeds_for(seed)[name] for name in feeds])

    @settings(max_examples=300, deadline=None, suppress_health_check=list(HealthCheck))
    @given(graph=graphs(), seed=st.integers(0, 3))
    def test_random_graphs_equal_the_interpreter(self, graph, seed):
        self.same_as_interpreter(graph, seed)

    def test_an_output_that_is_an_input_is_a_copy(self):
        session = self.compile(
            model_from_text("g (float[2] x) => (float[2] y) { y = Identity (x) }")
        )
        x = np.ones(2, np.float32)
        y = session.run({"x": x})["y"]
        y[0] = 5
        assert x[0] == 1

    def test_an_output_that_is_a_constant_is_a_copy(self):
        session = self.compile(
            model_from_text(
                "g (float[2] x) => (float[2] y, float[2] z) <float[2] y = {1, 2}> { z = Abs(x) }"
            )
        )
        x = np.ones(2, np.float32)
        session.run({"x": x})["y"][0] = 5
        assert session.run({"x": x})["y"].tolist() == [1, 2]

    def test_outputs_of_two_runs_share_nothing(self):
        session = self.compile(
            model_from_text("g (float[2] x) => (float[2] y) { t = Neg(x) y = Exp(t) }")
        )
        first = session.run({"x": np.zeros(2, np.float32)})["y"]
        session.run({"x": np.ones(2, np.float32)})
        assert first.tolist() == [1, 1]

    def test_one_value_as_two_outputs_gives_two_arrays(self):
        session = self.compile(
            model_from_text(
                "g (float[2] x) => (float[2] y, float[2] z) { y = Neg(x) z = Identity(y) }"
            )
        )
        outputs = session.run({"x": np.ones(2, np.float32)})
        assert not np.shares_memory(outputs["y"], outputs["z"])

    @pytest.mark.parametrize("seed", range(100))
    def test_larger_random_graphs_equal_the_interpreter(self, seed):
        self.same_as_interpreter(seeded(seed), seed % 4)

    # What leaves a run.

    def test_a_branch_that_hands_an_output_on_gives_two_arrays(self):
        session = self.compile(
            model_from_text("""g (float[2] x, bool c) => (float[2] a, float[2] y) {
                a = Exp(x)
                y = If (c) <then_branch = t () => (float[2] p) { p = Identity(a) },
                            else_branch = e () => (float[2] q) { q = Neg(a) }>
            }""")
        )
        outputs = session.run({"x": np.ones(2, np.float32), "c": np.array(True)})
        self.assert_same(outputs["a"], outputs["y"])
        assert not np.shares_memory(outputs["a"], outputs["y"])

    def test_views_of_one_value_that_leave_a_branch_are_arrays_of_their_own(self):
        session = self.compile(
            model_from_text("""g (float[2, 3] x, bool c) => (float[2, 3] a, float[3, 2] y) {
                a, y = If (c) <then_branch = t () => (float[2, 3] p, float[3, 2] pt)
                        { p = Exp(x) pt = Transpose(p) },
                    else_branch = e () => (float[2, 3] q, float[3, 2] qt)
                        { q = Neg(x) qt = Transpose(q) }>
            }""")
        )
        outputs = session.run({"x": np.ones((2, 3), np.float32), "c": np.array(False)})
        assert not np.shares_memory(outputs["a"], outputs["y"])

    def test_sequences_that_leave_hold_arrays_of_their_own(self):
        session = self.compile(
            model_from_text("""g (seq(float[2]) s, float[2] x) => (seq(float[2]) y, seq(float[2]) z) {
                a = Neg(x) b = Exp(a) y = SequenceInsert(s, b) z = Identity(y)
            }""")
        )
        x = np.ones(2, np.float32)
        first = session.run({"s": [x], "x": x})
        arrays = [*first["y"], *first["z"], x]
        copies = [array.copy() for array in arrays]
        session.run({"s": [x], "x": 5 * x})
        for i, array in enumerate(arrays):
            self.assert_same(array, copies[i])
            assert not any(np.shares_memory(array, other) for other in arrays[:i])

    # Loops.

    def test_a_condition_that_is_itself_carried_ends_the_loop_in_time(self):
        #  d is both the condition and what the next iteration gets as f
        session = self.compile(
            model_from_text("""g (int64 x, bool z) => (int64 y, bool last) <int64 one = {1}, int64 three = {3}, int64 n = {9}> {
                y, last = Loop (n, , x, z) <body = b (int64 i, bool c, int64 v, bool f) => (bool d, int64 w, bool d)
                    { w = Add(v, one) d = Less(w, three) }>
            }""")
        )
        for start in (True, False):
            assert session(np.array(0), np.array(start)) == (3, False)

    def test_a_condition_that_was_handed_over_is_the_old_one(self):
        #  the condition is f, not the d that takes its place in the next iteration
        session = self.compile(
            model_from_text("""g (int64 x, bool z) => (int64 y, bool last) <int64 one = {1}, int64 three = {3}, int64 n = {9}> {
                y, last = Loop (n, , x, z) <body = b (int64 i, bool c, int64 v, bool f) => (bool g, int64 w, bool d)
                    { w = Add(v, one) d = Less(w, three) g = Identity(f) }>
            }""")
        )
        assert session(np.array(0), np.array(True)) == (4, False)
        assert session(np.array(0), np.array(False)) == (1, True)

    def test_a_carried_value_that_is_a_view_of_what_the_body_computes(self):
        session = self.compile(
            model_from_text("""g (float[2, 2] x, int64 n) => (float[2, 2] y) {
                y = Loop (n, , x) <body = b (int64 i, bool c, float[2, 2] v) => (bool d, float[2, 2] w)
                    { d = Identity(c) s = Add(v, v) w = Transpose(s) }>
            }""")
        )
        x = np.array([[1, 2], [3, 4]], np.float32)
        for n in range(4):
            want = x.T * 2**n if n % 2 else x * 2**n
            self.assert_same(session(x, np.array(n)), want)

    @pytest.mark.parametrize("outputs", ["w, v", "v, v", "x, w", "w, w", "v, x", "t, w"])
    def test_carried_values_that_change_places(self, outputs):
        session = self.compile(
            model_from_text(f"""g (float[2] x, float[2] z, int64 n) => (float[2] a, float[2] b, float[K, 2] k) {{
                p = Exp(x) q = Neg(z)
                a, b, k = Loop (n, , p, q) <body = b (int64 i, bool c, float[2] v, float[2] w)
                    => (bool d, float[2] e, float[2] f, float[2] v)
                    {{ d = Identity(c) t = Add(v, w) e = Identity({outputs.split(", ")[0]})
                      f = Identity({outputs.split(", ")[1]}) }}>
            }}""")
        )
        x, z = np.array([0.5, 1], np.float32), np.array([2, 3], np.float32)
        v, w, rows = np.exp(x), -z, []
        for n in range(5):
            a, b, k = session(x, z, np.array(n))
            self.assert_same(a, v)
            self.assert_same(b, w)
            self.assert_same(k, np.array(rows, np.float32).reshape(n, 2))
            known = {"v": v, "w": w, "x": x, "t": v + w}
            rows.append(v)
            v, w = (known[name] for name in outputs.split(", "))

    def test_rows_of_a_loop_that_does_not_begin(self):
        session = self.compile(
            model_from_text("""g (float[2] x, bool z) => (float[2] y, float[K, 2] k) <int64 n = {3}> {
                y, k = Loop (n, z, x) <body = b (int64 i, bool c, float[2] v) => (bool d, float[2] w, float[2] v)
                    { d = Identity(c) w = Add(v, v) }>
            }""")
        )
        x = np.ones(2, np.float32)
        assert session(x, np.array(False))[1].shape == (0, 2)
        assert session(x, np.array(True))[1].tolist() == [[1, 1], [2, 2], [4, 4]]

    def test_rank_zero_is_an_array_whatever_is_known_of_it(self):
        session = self.compile(
            model_from_text("""g (float a, float b, string s, string t) => (float y, string z) {
                y = Add(a, b) z = StringConcat(s, t) }""")
        )
        y, z = session(1.0, 2.0, "p", "q")
        assert (y.shape, y.dtype, z.shape, z.dtype) == ((), np.float32, (), object)
        assert z.item() == "pq"

    # Errors.

    def test_a_failing_node_is_named_with_origin_and_shapes(self):
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
        # The session is as good as before.
        assert session.run({"x": x, "i": np.array([2])})["y"].shape == (1,)

    def test_a_loop_without_end_stops_at_the_deadline(self):
        session = self.compile(model_from_text(ENDLESS))
        feeds = {"x": np.zeros(4, np.float32), "n": np.array(2**62)}
        with pytest.raises(ps.DeadlineExceeded, match=r"0\.05 s"):
            session.run(feeds, timeout=0.05)
        feeds["n"] = np.array(3)
        assert session.run(feeds, timeout=60)["y"].tolist() == [0, 0, 0, 0]

    def test_a_timeout_of_zero_is_over_before_it_begins(self):
        session = self.compile(model_from_text(ENDLESS))
        feeds = {"x": np.zeros(4, np.float32), "n": np.array(1)}
        with pytest.raises(ps.DeadlineExceeded):
            session.run(feeds, timeout=0)

    def test_cancel_from_another_thread(self):
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

    def test_a_run_that_is_stopped_says_how_far_it_came(self):
        session = self.compile(model_from_text(ENDLESS))
        feeds = {"x": np.zeros(4, np.float32), "n": np.array(2**62)}
        with pytest.raises(ps.DeadlineExceeded) as caught:
            session.run(feeds, timeout=0.02)
        assert caught.value.__cause__ is None
        assert "Loop_0" in caught.value.__notes__[0]

    @pytest.mark.skipif(not hasattr(signal, "pthread_kill"), reason="needs signals to threads")
    def test_an_interrupt_leaves_the_session_as_it_was(self):
        session = self.compile(model_from_text(ENDLESS))
        feeds = {"x": np.ones(4, np.float32), "n": np.array(2**62)}
        short = feeds | {"n": np.array(2)}
        session.run(short)
        arenas = session.memory.arenas
        me = threading.get_ident()
        # Python ignores interrupts where whoever started it did (a shell, in the background).
        before = signal.signal(signal.SIGINT, signal.default_int_handler)
        try:
            for _ in range(5):
                timer = threading.Timer(0.02, signal.pthread_kill, (me, signal.SIGINT))
                timer.start()
                with pytest.raises(KeyboardInterrupt):
                    session.run(feeds)
                timer.join()
        finally:
            signal.signal(signal.SIGINT, before)
        assert session.run(short)["y"].tolist() == [4] * 4
        assert session.memory.arenas == arenas

    def test_limits_bound_iterations(self):
        session = self.compile(model_from_text(ENDLESS), limits=ps.Limits(max_iterations=10))
        x = np.zeros(4, np.float32)
        assert session.run({"x": x, "n": np.array(10)})["y"].tolist() == [0, 0, 0, 0]
        with pytest.raises(ps.LimitExceeded, match=r"Loop_0 in the model.* 10 iterations"):
            session.run({"x": x, "n": np.array(11)})

    def test_runs_at_once_are_as_many_as_memory_allows(self):
        text = ENDLESS.replace("y = Loop (n, , x)", "a = Neg(x) b = Exp(a) y = Loop (n, , b)")
        session = self.compile(model_from_text(text), limits=ps.Limits(max_bytes=1000))
        size = 4 * 64  # two buffers, a and b, or fewer
        session.run({"x": np.zeros(4, np.float32), "n": np.array(1)})
        if self.executor != "dataflow":  # which has no arenas
            assert 0 < session.memory.arenas <= size
        token = ps.CancelToken()
        feeds = {"x": np.zeros(4, np.float32), "n": np.array(2**62)}

        def job(_) -> type[BaseException] | None:
            try:
                session.run(feeds, cancel=token)
            except ps.PenstockError as error:
                return type(error)
            return None

        with ThreadPoolExecutor(20) as pool:
            runs = pool.map(job, range(20))
            with pytest.raises(ps.DeadlineExceeded):
                session.run(feeds, timeout=0.1)
            assert session.memory.arenas <= 1000
            token.cancel()
            assert set(runs) == {ps.Cancelled}
        session.run({"x": np.zeros(4, np.float32), "n": np.array(1)})

    def test_threads_get_the_answers_they_would_get_alone(self):
        session = self.compile(
            model_from_text("""g (float[N] x) => (float[N] y) {
                a = Sin(x) b = Mul(a, a) c = Add(b, x) d = Neg(c) e = Mul(d, a) y = Add(e, b)
            }""")
        )

        def job(seed: int) -> None:
            rng = np.random.default_rng(seed)
            for _ in range(40):
                x = rng.standard_normal(rng.integers(1, 5) * 1000).astype(np.float32)
                a = np.sin(x)
                want = -(a * a + x) * a + a * a
                self.assert_same(session.run({"x": x})["y"], want)

        with ThreadPoolExecutor(8) as pool:
            list(pool.map(job, range(8)))

    def test_runs_of_all_kinds_at_once(self):
        """Shapes, fetches, failures and trims in any mix, while plans are dropped and made again."""
        session = self.compile(
            model_from_text("""g (float[N] x, int64 n, int64[1] i) => (float[N] y, float[1] z, float[K, N] rows) {
                a = Sin(x) b = Mul(a, a)
                y, rows = Loop (n, , b) <body = l (int64 k, bool c, float[N] v) => (bool d, float[N] w, float[N] r)
                    { d = Identity(c) e = Neg(v) w = Add(e, a) r = Mul(w, v) }>
                z = Gather(b, i)
            }"""),
            limits=ps.Limits(max_plans_bytes=150_000),
        )

        def wanted(x: np.ndarray, n: int, i: int) -> dict[str, np.ndarray]:
            a = np.sin(x)
            v, rows = a * a, []
            for _ in range(n):
                w = -v + a
                rows.append(w * v)
                v = w
            stacked = np.array(rows, np.float32).reshape(n, len(x))
            return {"a": a, "z": (a * a)[i : i + 1], "y": v, "rows": stacked}

        def job(seed: int) -> int:
            choose = random.Random(seed)
            for _ in range(60):
                x = np.random.default_rng(seed).standard_normal(choose.randint(1, 9))
                x, n, fails = x.astype(np.float32), choose.randrange(5), choose.random() < 0.1
                i = len(x) if fails else choose.randrange(len(x))
                feeds = {"x": x, "n": np.array(n), "i": np.array([i])}
                fetches = choose.choice([None, ["y"], ["z", "a"], ["rows"], ["a"]])
                try:
                    outputs = session.run(feeds, fetches, timeout=choose.choice([None, 60]))
                except ps.RunError as error:
                    assert fails
                    assert "Gather" in str(error)
                    continue
                assert not (fails and "z" in outputs)
                for name, value in outputs.items():
                    self.assert_same(value, wanted(x, n, i)[name])
                if choose.random() < 0.05:
                    session.trim()
            return session.memory.arenas

        with ThreadPoolExecutor(8) as pool:
            assert max(pool.map(job, range(8))) <= 150_000

    def test_a_chain_of_ten_thousand_nodes(self):
        nodes = [onnx.helper.make_node("Neg", [f"v{i}"], [f"v{i + 1}"]) for i in range(10_000)]
        info = onnx.helper.make_tensor_value_info
        graph = onnx.helper.make_graph(nodes, "g", [info("v0", 1, [3])], [info("v10000", 1, [3])])
        session = self.compile(onnx.helper.make_model(graph))
        x = np.arange(3, dtype=np.float32)
        self.assert_same(session.run({"v0": x})["v10000"], x)

    def test_a_fan_out_a_thousand_wide(self):
        make, info = onnx.helper.make_node, onnx.helper.make_tensor_value_info
        nodes = [make("Exp", ["x"], ["e"])]
        nodes += [make(("Neg", "Sin", "Abs")[i % 3], ["e"], [f"w{i}"]) for i in range(1000)]
        nodes.append(make("Sum", [f"w{i}" for i in range(1000)], ["y"]))
        graph = onnx.helper.make_graph(nodes, "g", [info("x", 1, [5])], [info("y", 1, [5])])
        session = self.compile(onnx.helper.make_model(graph))
        x = np.linspace(-1, 1, 5, dtype=np.float32)
        e = np.exp(x)
        want = -334 * e + 333 * np.sin(e) + 333 * np.abs(e)
        for _ in range(3):
            np.testing.assert_allclose(session(x), want, rtol=1e-4)

    # Feeds and fetches.

    def test_any_value_can_be_fed_and_fetched(self):
        session = self.compile(
            model_from_text("""g (float[2] x, bool c) => (float[2] y) {
                a = Exp(x) b = Neg(a)
                z = If (c) <then_branch = t () => (float[2] p) { p = Add(a, b) },
                            else_branch = e () => (float[2] q) { q = Mul(b, b) }>
                y = Abs(z)
            }""")
        )
        x, c = np.array([1, 2], np.float32), np.array(False)
        a = np.exp(x)
        outputs = session.run({"x": x, "c": c}, ["b", "x", "y", "b"])
        self.assert_same(outputs["b"], -a)
        self.assert_same(outputs["x"], x)
        self.assert_same(outputs["y"], a * a)
        assert session.run({"a": x, "b": x, "c": c}, ["z"])["z"].tolist() == [1, 4]
        assert session.run({"z": -x}, ["y"])["y"].tolist() == [1, 2]
        assert session.run({"x": x}, ["a"], targets=["b"]).keys() == {"a"}

    # On pools of threads.

    def test_submitted_runs_get_the_answers_they_would_get_alone(self):
        session = self.compile(
            model_from_text("""g (float[N] x, int64 n) => (float[N] y) {
                a = Sin(x) b = Mul(a, a)
                y = Loop (n, , b) <body = l (int64 k, bool c, float[N] v) => (bool d, float[N] w)
                    { d = Identity(c) e = Neg(v) w = Add(e, a) }>
            }""")
        )
        feeds = [
            {"x": np.arange(1 + i % 3, dtype=np.float32), "n": np.array(i % 4)} for i in range(60)
        ]
        futures = [session.submit(each) for each in feeds]
        for each, future in zip(feeds, futures, strict=True):
            self.assert_same(future.result(), session.run(each))

    def test_asynchronous_runs_leave_the_event_loop_free(self):
        session = self.compile(model_from_text(ENDLESS))
        feeds = {"x": np.ones(4, np.float32), "n": np.array(2**62)}

        async def main() -> list[np.ndarray]:
            endless = asyncio.ensure_future(session.arun(feeds))
            short = [session.arun(feeds | {"n": np.array(n)}) for n in range(3)]
            # The endless one may keep one of the threads, or the only one, until it is cancelled.
            asyncio.get_running_loop().call_later(0.05, endless.cancel)
            outputs = await asyncio.gather(*short)
            with pytest.raises(asyncio.CancelledError):
                await endless
            return [each["y"] for each in outputs]

        assert [y.tolist() for y in asyncio.run(main())] == [[1] * 4, [2] * 4, [4] * 4]

    def test_deadlines_and_tokens_reach_runs_that_are_queued(self):
        if self.leaves_threads:
            pytest.skip("a run that waits for another backend leaves its thread to the next")
        session = self.compile(model_from_text(ENDLESS))
        feeds = {"x": np.ones(4, np.float32), "n": np.array(2**62)}
        short = feeds | {"n": np.array(1)}
        session.run(short)
        token, other = ps.CancelToken(), ps.CancelToken()
        running = [session.submit(feeds, cancel=token) for _ in range(core_budget() + 1)]
        late = session.submit(short, timeout=0.02)
        cancelled = session.submit(short, cancel=other)
        dropped = session.submit(short)
        kept = session.submit(short)
        with pytest.raises(ps.DeadlineExceeded):
            late.result(10)
        other.cancel()
        with pytest.raises(ps.Cancelled):
            cancelled.result(10)
        assert dropped.cancel()
        assert not any(each.done() for each in running)
        token.cancel()
        for each in running:
            with pytest.raises(ps.Cancelled):
                each.result(10)
        assert kept.result(10)["y"].tolist() == [2] * 4

    def test_closing_lets_submitted_runs_end(self):
        session = self.compile(model_from_text(ENDLESS))
        futures = [
            session.submit({"x": np.ones(4, np.float32), "n": np.array(n)}) for n in range(20)
        ]
        session.close()
        for n, future in enumerate(futures):
            assert future.result(10)["y"].tolist() == [2.0**n] * 4
        with pytest.raises(ps.PenstockError, match="closed"):
            session.submit({"x": np.ones(4, np.float32), "n": np.array(1)})
        assert session.memory.arenas == 0

    def test_an_error_on_the_pool_is_the_futures(self):
        session = self.compile(
            model_from_text("g (float[3] x, int64[1] i) => (float[1] y) { y = Gather(x, i) }")
        )
        x = np.zeros(3, np.float32)
        with pytest.raises(ps.RunError, match=r"Gather.*float32\[3\].*int64\[1\]"):
            session.submit({"x": x, "i": np.array([3])}).result(10)
        with pytest.raises(ps.InvalidInput, match="float64"):
            session.submit({"x": x.astype(float), "i": np.array([3])}).result(10)
        assert session.submit({"x": x, "i": np.array([2])}).result(10)["y"].tolist() == [0]

    # Observers.

    def test_observers_see_each_step_once_and_what_it_makes(self):
        session = self.compile(
            model_from_text("""g (float[2] x, int64 n) => (float[2] y) {
                [first] a = Exp(x)
                [loop] l = Loop (n, , a) <body = b (int64 i, bool c, float[2] v) => (bool d, float[2] w)
                    { d = Identity(c) [inner] w = Neg(v) }>
                [last] y = Sin(l)
            }""")
        )
        x = np.array([1, 2], np.float32)
        seen = Recorder()
        with np.errstate(all="raise"):
            outputs = session.run({"x": x, "n": np.array(3)}, observers=[seen])
        self.assert_same(outputs["y"], np.sin(-np.exp(x)))
        assert seen.begun == seen.ended == {"first": 1, "loop": 1, "inner": 3, "last": 1}
        self.assert_same(seen.made["first"][0], np.exp(x))
        self.assert_same(seen.made["last"][0], outputs["y"])
        assert seen.runs == [None]
        assert seen.executor == session.latest.name
        # The next run is not observed, and another observer sees its own runs only.
        session.run({"x": x, "n": np.array(3)})
        other = Recorder()
        session.submit({"x": x, "n": np.array(0)}, trace=other).result(10)
        assert other.ended == {"first": 1, "loop": 1, "last": 1}
        assert sum(seen.ended.values()) == 6

    @settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
    @given(graph=graphs(), seed=st.integers(0, 3))
    def test_watched_runs_of_random_graphs_give_the_same(self, graph, seed):
        given = feeds_for(seed)
        feeds = {value.name: given[value.name] for value in graph.inputs}
        session = self.compile(Model({"random": graph}, "random"))
        seen = Recorder()
        self.assert_same(session.run(feeds, observers=[seen]), session.run(feeds))
        assert seen.begun == seen.ended
        assert 0 <= seen.live <= seen.most

    @settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
    @given(graph=graphs(), seed=st.integers(0, 3))
    def test_traces_of_random_graphs_are_sound(self, graph, seed):
        """Spans of a track nest, what waits is begun, arrows go forward in time, nothing is held."""
        given = feeds_for(seed)
        session = self.compile(Model({"random": graph}, "random"))
        trace, seen = ps.Trace(), Recorder()
        feeds = {value.name: given[value.name] for value in graph.inputs}
        session.run(feeds, trace=trace, observers=[seen])
        counts = {
            name: n
            for name, n in trace.counts.items()
            if not name.endswith(("/one", "/two", "/host"))
        }
        assert counts == dict(seen.ended)
        events = json.loads(json.dumps(trace.to_dict(), allow_nan=False))["traceEvents"]
        tracks: dict[int, list[tuple[float, float]]] = {}
        for event in events:
            if event["ph"] == "X":
                tracks.setdefault(event["tid"], []).append(
                    (event["ts"], event["ts"] + event["dur"])
                )
        for spans in tracks.values():
            open_until: list[float] = []
            for begin, end in sorted(spans, key=lambda span: (span[0], -span[1])):
                while open_until and open_until[-1] <= begin:
                    open_until.pop()
                assert not open_until or end <= open_until[-1] + 1e-3
                open_until.append(end)
        assert sum(e["ph"] == "b" for e in events) == sum(e["ph"] == "e" for e in events)
        starts = {e["id"]: e["ts"] for e in events if e["ph"] == "s"}
        assert all(starts[e["id"]] <= e["ts"] for e in events if e["ph"] == "f")

    def test_what_an_observer_raises_ends_the_run(self):
        session = self.compile(
            model_from_text("g (float[2] x) => (float[2] y) { t = Neg(x) y = Exp(t) }")
        )
        x = np.ones(2, np.float32)

        class Refuses(Observer):
            def step_end(self, run, step, outputs):
                raise ps.RunError(f"no {step.node.op.name}")

        seen = Recorder()
        with pytest.raises(ps.RunError, match="no Neg"):
            session.run({"x": x}, observers=[seen, Refuses()])
        assert [str(error) for error in seen.runs] == ["no Neg"]
        self.assert_same(session(x), np.exp(-x))

    def test_a_failing_run_is_reported_to_observers(self):
        session = self.compile(
            model_from_text("g (float[3] x, int64[1] i) => (float[1] y) { y = Gather(x, i) }")
        )
        seen = Recorder()
        with pytest.raises(ps.RunError):
            session.run({"x": np.zeros(3, np.float32), "i": np.array([3])}, observers=[seen])
        (error,) = seen.runs
        assert isinstance(error, ps.RunError)

    def test_a_session_leaves_no_memory_behind(self):
        session = self.compile(model_from_text(ENDLESS))
        session.run({"x": np.zeros(4, np.float32), "n": np.array(1)})
        gone = weakref.ref(session)
        del session
        gc.collect()
        assert gone() is None

    def test_failing_runs_leave_nothing_behind(self):
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
        assert threading.active_count() <= threads + 1  # the one that watches deadlines

    def test_numpy_settings_of_the_caller_stay(self):
        session = self.compile(model_from_text("g (float[1] x) => (float[1] y) { y = Log(x) }"))
        with np.errstate(all="raise"):
            y = session.run({"x": np.zeros(1, np.float32)})["y"]
            assert np.isneginf(y[0])
            assert np.geterr()["divide"] == "raise"
