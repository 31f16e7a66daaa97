"""The executor of the reference interpreter, which checks every value."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

import penstock as ps
from penstock.executors import interpret
from penstock.ops import find
from tests.executors.conformance import ExecutorConformance, Recorder
from tests.support.onnx_text import model_from_text as model

X = np.array([1, 2], np.float32)
LOOP = """g (float[2] x, int64 n) => (float[2] y) {
    [first] a = Exp(x)
    [loop] l = Loop (n, , a) <body = b (int64 i, bool c, float[2] v) => (bool d, float[2] w)
        { [go_on] d = Identity(c) [inner] w = Neg(v) }>
    [last] y = Sin(l)
}"""


class TestInterpret(ExecutorConformance):
    executor = "interpret"

    def test_concurrent_runs_stay_within_the_limit_of_bytes(self):
        """It plans no memory, and so has no arenas to bound."""
        session = self.compile(model("g (float[4] x) => (float[4] y) { y = Neg(x) }"))
        session.run({"x": np.zeros(4, np.float32)})
        assert session.memory.arenas == 0

    def test_observer_sees_each_step_once_with_its_outputs(self):
        """Also of nodes that other executors simplify away."""
        session, seen, trace = self.compile(model(LOOP)), Recorder(), ps.Trace()
        feeds = {"x": X, "n": np.array(3)}
        outputs = session.run(feeds, observers=[seen])
        session.run(feeds, trace=trace)
        expected = {"first": 1, "loop": 1, "go_on": 3, "inner": 3, "last": 1}
        assert seen.begun == seen.ended == trace.counts == expected
        assert seen.executor == "interpret"
        self.assert_same(seen.made["last"][0], outputs["y"])


def test_interpret_runs_every_node_of_the_model():
    session = ps.compile(
        model("g (float[2] x) => (float[2] y) { a = Identity(x) b = Identity(a) y = Neg(b) }"),
        executor="interpret",
    )
    assert [step.node.op.name for step in session.inspect.plan.steps] == [
        "Identity",
        "Identity",
        "Neg",
    ]
    assert session.source.count("Identity") == 2
    assert session.run({"x": X})["y"].tolist() == [-1, -2]


@pytest.mark.parametrize(
    ("result", "actual"),
    [
        (lambda x: np.negative(x, dtype=np.float64), r"float64\[2\]"),
        (lambda x: -x[:1], r"float32\[1\]"),
        (lambda x: -x[None], r"float32\[1, 2\]"),
        (lambda x: [-x], r"seq"),
    ],
    ids=["dtype", "dim", "rank", "sequence"],
)
def test_value_that_breaks_its_declared_type_raises_internal_error(monkeypatch, result, actual):
    op = find("Neg")

    def compile_broken(node, types):
        return replace(op.compile(node, types), function=result)

    compile_broken.__module__ = "penstock.ops"  # a user's operation breaks its contract earlier
    loaded = ps.load(model(LOOP))
    for node in loaded.graph.walk():
        if node.op.name == "Neg":
            node.op = replace(node.op, compile=compile_broken)
    session = ps.compile(loaded, executor="interpret")
    with pytest.raises(ps.InternalError, match=rf"Neg \(inner.*\) computed a {actual}.* as 'w'"):
        session.run({"x": X, "n": np.array(1)})


def test_interpret_looks_at_the_ends_of_sequences_that_grow(monkeypatch):
    grow = """g (float[2] x, int64 n) => (int64 y) {
        empty = SequenceEmpty <dtype = 1> ()
        s = Loop (n, , empty) <body = b (int64 i, bool c, seq(float[2]) v) => (bool d, seq(float[2]) w)
            { d = Identity(c) w = SequenceInsert(v, x) }>
        y = SequenceLength(s)
    }"""
    lengths, type_of = [], interpret.type_of

    def recorded(value):
        lengths.append(len(value) if isinstance(value, list) else 0)
        return type_of(value)

    session = ps.compile(model(grow), executor="interpret")
    monkeypatch.setattr(interpret, "type_of", recorded)
    assert session.run({"x": X, "n": np.array(100)})["y"] == 100
    assert len(lengths) > 200
    assert max(lengths) == 16


def test_loop_beyond_the_limit_of_iterations_raises():
    session = ps.compile(model(LOOP), executor="interpret", limits=ps.Limits(max_iterations=3))
    session.run({"x": X, "n": np.array(3)})
    with pytest.raises(ps.LimitExceeded, match="limit of 3 iterations"):
        session.run({"x": X, "n": np.array(4)})
