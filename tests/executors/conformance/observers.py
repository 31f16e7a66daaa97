"""What observers and traces see of a run."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import penstock as ps
from penstock.ir.graph import Model
from penstock.observers.base import Observer
from penstock.ops.internal.fused import parts
from tests.executors.conformance.base import INHERITED, ExecutorTests, Recorder
from tests.support.onnx_text import model_from_text
from tests.support.random_graphs import feeds_for, graphs
from tests.support.sweeps import examples
from tests.support.timing import SOON


class Failing(Observer):
    """Raises at its call ``number``, and in later calls if it ``keeps_failing``."""

    def __init__(self, number: int | None, keeps_failing: bool) -> None:
        self.number = number
        self.keeps_failing = keeps_failing
        self.calls = 0
        self.errors: list[Exception] = []

    def _call(self, *event: object) -> None:
        number, self.calls = self.calls, self.calls + 1
        if number == self.number or (self.errors and self.keeps_failing):
            self.errors.append(AssertionError(f"call {number}"))
            raise self.errors[-1]

    run_begin = run_end = step_ready = step_begin = step_end = transfer = allocation = _call


class Observers(ExecutorTests):
    """What observers and traces see of a run."""

    def test_observer_sees_each_step_once_with_its_outputs(self):
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
        assert seen.executor == session.inspect.executor.name
        # The next run is not observed, and another observer only sees its own runs.
        session.run({"x": x, "n": np.array(3)})
        other = Recorder()
        session.submit({"x": x, "n": np.array(0)}, trace=other).result(SOON)
        assert other.ended == {"first": 1, "loop": 1, "last": 1}
        assert sum(seen.ended.values()) == 6

    @settings(examples(1), suppress_health_check=INHERITED)
    @given(graph=graphs(), seed=st.integers(0, 3))
    def test_observed_or_traced_run_of_a_random_graph_equals_a_plain_run(self, graph, seed):
        given = feeds_for(seed)
        feeds = {value.name: given[value.name] for value in graph.inputs}
        session = self.compile(Model({"random": graph}, "random"))
        plain = session.run(feeds)
        seen = Recorder()
        self.assert_same(session.run(feeds, observers=[seen]), plain)
        assert seen.begun == seen.ended
        assert 0 <= seen.live <= seen.most
        trace, seen = ps.Trace(), Recorder()
        self.assert_same(session.run(feeds, trace=trace, observers=[seen]), plain)
        self.assert_well_formed(trace, seen)

    def assert_well_formed(self, trace: ps.Trace, seen: Recorder) -> None:
        """Spans of a track nest, waits have begun, arrows go forward in time, nothing is held."""
        counts = {
            name: n
            for name, n in trace.counts.items()
            if not name.endswith(("/one", "/two", "/torch cpu", "/host"))
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

    @pytest.mark.parametrize("submitted", [False, True])
    @pytest.mark.parametrize("error", [ps.RunError, ps.InvalidInput])
    def test_penstock_error_of_an_observer_ends_the_run_as_it_is(self, error, submitted):
        session = self.compile(
            model_from_text("g (float[2] x) => (float[2] y) { t = Neg(x) y = Exp(t) }")
        )
        x = np.ones(2, np.float32)

        class Refuses(Observer):
            def step_end(self, run, step, outputs):
                if "Neg" in [part.op.name for part in parts(step.node)]:
                    raise error("no Neg")

        seen, observers = Recorder(), [Refuses()]
        with pytest.raises(error, match="no Neg"):
            if submitted:
                session.submit({"x": x}, observers=[seen, *observers]).result(SOON)
            session.run({"x": x}, observers=[seen, *observers])
        assert [str(error) for error in seen.runs] == ["no Neg"]
        self.assert_same(session(x), np.exp(-x))

    @pytest.mark.parametrize("keeps_failing", [False, True])
    @pytest.mark.parametrize("submitted", [False, True])
    def test_observer_exception_is_the_cause_of_a_run_error(self, submitted, keeps_failing):
        session = self.compile(
            model_from_text("""g (float[2] x, int64 n) => (float[N] y) {
                l = Loop (n, , x) <body = b (int64 i, bool c, float[2] v) => (bool d, float[2] w)
                    { d = Identity(c) w = Neg(v) }>
                s = NonZero(l) f = Cast<to=1>(s) r = Reshape<allowzero=0>(f, m) y = Exp(r)
                m = Constant<value_ints=[-1]>() }""")
        )
        feeds = {"x": np.ones(2, np.float32), "n": np.array(2)}
        run = (lambda **o: session.submit(feeds, **o).result(SOON)) if submitted else None
        run = run or (lambda **o: session.run(feeds, **o))
        counting = Failing(None, False)
        run(observers=[counting])
        assert counting.calls > 10
        for number in range(counting.calls):
            failing, seen = Failing(number, keeps_failing), Recorder()
            with pytest.raises(ps.RunError, match=r"the observer .* failed in") as caught:
                run(observers=[failing, seen])
            assert type(caught.value) is ps.RunError
            assert caught.value.__cause__ is failing.errors[0]
            assert failing.calls >= number + 1
            assert len(seen.runs) == 1
        self.assert_same(session.run(feeds)["y"], np.exp(np.array([0, 1], np.float32)))

    def test_observer_is_told_the_error_of_a_failing_run(self):
        session = self.compile(
            model_from_text("g (float[3] x, int64[1] i) => (float[1] y) { y = Gather(x, i) }")
        )
        seen = Recorder()
        with pytest.raises(ps.RunError):
            session.run({"x": np.zeros(3, np.float32), "i": np.array([3])}, observers=[seen])
        (error,) = seen.runs
        assert isinstance(error, ps.RunError)
