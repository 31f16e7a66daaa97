"""The frames executor, on graphs without frames: what every executor must hold."""

from __future__ import annotations

import numpy as np

import penstock as ps
from tests.executors.conformance import ExecutorConformance, Recorder, model


class TestFrames(ExecutorConformance):
    executor = "frames"

    def test_runs_at_once_are_as_many_as_memory_allows(self):
        """It plans no memory, and so has no arenas to bound."""
        session = self.compile(model("g (float[4] x) => (float[4] y) { y = Neg(x) }"))
        session.run({"x": np.zeros(4, np.float32)})
        assert session.memory.arenas == 0

    def test_observers_see_each_step_once_and_what_it_makes(self):
        """A node with graphs of its own is one step, as it is in TensorFlow."""
        session = self.compile(
            model("""g (float[2] x, int64 n) => (float[2] y) {
                [first] a = Exp(x)
                [loop] l = Loop (n, , a) <body = b (int64 i, bool c, float[2] v) => (bool d, float[2] w)
                    { d = Identity(c) [inner] w = Neg(v) }>
                [last] y = Sin(l)
            }""")
        )
        x, seen = np.array([1, 2], np.float32), Recorder()
        outputs = session.run({"x": x, "n": np.array(3)}, observers=[seen])
        self.assert_same(outputs["y"], np.sin(-np.exp(x)))
        assert seen.begun == seen.ended == {"first": 1, "loop": 1, "last": 1}
        self.assert_same(seen.made["last"][0], outputs["y"])
        trace = ps.Trace()
        session.run({"x": x, "n": np.array(3)}, trace=trace)
        assert trace.counts == {"first": 1, "loop": 1, "last": 1}
