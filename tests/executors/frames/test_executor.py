"""The frames executor: the conformance tests, and the behaviour of TensorFlow."""

from __future__ import annotations

import gc
import threading

import numpy as np
import pytest

import penstock as ps
from penstock.backends.numpy import NumpyBackend
from penstock.executors.frames.run import FramesRun
from penstock.frontends.tensorflow.file import read_graph
from penstock.host.threads import pool
from penstock.ir.kernel import Kernel
from tests.executors.conformance import ExecutorConformance, Recorder
from tests.support.onnx_text import compile_text, model_from_text
from tests.support.sweeps import drawn
from tests.support.tf_cases import Case, cases, check, feeds, follow
from tests.support.tf_graphs import Flow
from tests.support.timing import SOON, slow, wait_until


class TestFrames(ExecutorConformance):
    executor = "frames"

    def test_observer_sees_each_step_once_with_its_outputs(self):
        """A node with graphs of its own is one step, as it is in TensorFlow."""
        session = self.compile(
            model_from_text("""g (float[2] x, int64 n) => (float[2] y) {
                [first] a = Exp(x)
                [loop] l = Loop (n, , a) <body = b (int64 i, bool c, float[2] v) => (bool d, float[2] w)
                    { d = Identity(c) [inner] w = Neg(v) }>
                [last] y = Sin(l)
            }""")
        )
        x, seen = np.array([1, 2], np.float32), Recorder()
        outputs = session.run({"x": x, "n": np.array(3)}, observers=[seen])
        self.assert_same(outputs["y"], np.sin(-np.exp(x)))
        trace = ps.Trace()
        session.run({"x": x, "n": np.array(3)}, trace=trace)
        own = {"first": 1, "loop": 1, "last": 1}  # between devices there are further nodes
        for counts in (seen.begun, seen.ended, trace.counts):
            assert {name: counts[name] for name in own} == own
            assert "inner" not in counts
        assert seen.begun == seen.ended
        self.assert_same(seen.made["last"][0], outputs["y"])


# TensorFlow's corpus: outputs, errors, and how often each node ran.


RECORDED = [(case, executor) for case in cases() for executor in ("frames", "auto", "segments")]


@pytest.mark.whole
@pytest.mark.parametrize(
    ("case", "executor"),
    drawn(RECORDED, 100, always=lambda case: case[1] == "frames"),
    ids=lambda part: part.name if isinstance(part, Case) else part,
)
def test_frames_executor_matches_the_recorded_runs_of_tensorflow(case: Case, executor: str) -> None:
    """Observed runs have each node of the model, others segments on all backends."""
    segments = executor == "segments"
    options = {"executor": "frames"} if segments else {"executor": executor, "backends": ["numpy"]}
    follow(
        case,
        lambda: ps.compile(case.path, **options),
        counted=executor == "frames",
        traced=not segments,
    )


@pytest.mark.costly
@pytest.mark.parametrize("parallel", [1, 2, 32])
def test_parallel_iterations_do_not_change_outputs(parallel):
    text = [case for case in cases() if case.name.startswith("loop_")]
    for case in text:
        graph = read_graph(case.path)
        for node in graph.node:
            if node.op == "Enter":
                node.attr["parallel_iterations"].i = parallel
        session = ps.compile(graph.SerializeToString(), executor="frames", backends=["numpy"])
        for run in case.runs:
            if "error" not in run["expect"]:
                check(case, run, session.run(feeds(run), run["fetches"], run["targets"]))


def test_dead_fetch_error_names_its_switch():
    (case,) = [case for case in cases() if case.name == "prim_switch"]
    session = ps.compile(case.path, executor="frames", backends=["numpy"])
    feeds = {"x": np.array([1, 2], np.int32), "p": np.array(True)}
    with pytest.raises(
        ps.DeadTensor, match=r"'on_false:0'.*sw in prim_switch.pb chose its output 1"
    ):
        session.run(feeds, ["on_false"])


def test_concurrent_runs_have_frames_of_their_own():
    (case,) = [case for case in cases() if case.name == "loop_inner_independent"]
    session = ps.compile(case.path, executor="frames", backends=["numpy"])
    runs = [run for run in case.runs if "error" not in run["expect"]] * 10
    futures = [(r, session.submit(feeds(r), r["fetches"], r["targets"])) for r in runs]
    for run, future in futures:
        check(case, run, future.result(SOON))


def test_other_executors_refuse_frames_and_name_those_that_run_them():
    (case,) = [case for case in cases() if case.name == "prim_switch"]
    session = ps.compile(case.path, executor="linear", backends=["numpy"])
    with pytest.raises(ps.Unsupported, match=r"only executor=.frames. or .auto. runs it .*on_true"):
        session.run({"x": np.array([1, 2], np.int32), "p": np.array(True)}, ["on_true"])


@pytest.mark.parametrize("raised", [True, False])
def test_iterations_of_a_frame_obey_their_limit(raised):
    """``while i < n: i, v = i + 1, v + i``, in which the index of a Merge cannot be raised."""
    g = Flow()
    g.placeholder("n", "int32")
    zero = g.const(np.int32(0), "zero")
    g.loop("while", zero, "n")
    read = "while/i/body" if raised else "while/i/merge:1"
    left = g.carry("while", "v", zero, lambda v: g.op("AddV2", v, read))
    limits = ps.Limits(max_iterations=100)
    session = ps.compile(g.bytes(), executor="frames", backends=["numpy"], limits=limits)
    assert session.run({"n": np.int32(100)}, [left])[left] == (4950 if raised else 99)
    with pytest.raises(ps.LimitExceeded, match="max_iterations"):
        session.run({"n": np.int32(101)}, [left])


def test_ended_run_leaves_no_objects_behind():
    (case,) = [case for case in cases() if case.name == "loop_fetch_inside_error"]
    session = ps.compile(case.path, executor="frames", backends=["numpy"])
    gc.collect()
    gc.disable()
    try:
        for _ in range(3):
            session.run({"n": np.int32(5)}, ["while/Exit"])
            session.submit({"n": np.int32(5)}, ["while/Exit"]).result(SOON)
        wait_until(lambda: not any(issubclass(type(x), FramesRun) for x in gc.get_objects()))
    finally:
        gc.enable()


def test_long_kernels_run_in_parallel():
    # Two kernels of 10 ms, many times: on two threads once they are known to be slow.
    names: set[str] = set()

    class Slow(NumpyBackend):
        def kernel(self, node, types):
            kernel = super().kernel(node, types)
            if node.op.name not in ("Sin", "Cos"):
                return kernel

            def function(x):
                names.add(threading.current_thread().name)
                slow(0.01)
                return kernel.function(x)

            return Kernel(function)

    text = "g (float[2] x) => (float[2] y) { a = Sin(x) b = Cos(x) y = Add(a, b) }"
    session = compile_text(text, executor="frames", backends=[Slow()])
    x = np.ones(2, np.float32)
    for _ in range(40):
        np.testing.assert_allclose(session(x), np.sin(x) + np.cos(x), rtol=1e-6)
    if pool().size > 1:
        assert len(names) > 1
