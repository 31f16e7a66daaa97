"""A dropped or closed session frees what it holds at once, without the garbage collector."""

from __future__ import annotations

import gc
import os
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from weakref import ref

import numpy as np
import pytest

import penstock as ps
from penstock.host.native import library
from penstock.session.facts import Memory
from tests.support.onnx_text import compile_text
from tests.support.processes import end_of
from tests.support.sweeps import drawn
from tests.support.tf_graphs import Builder, Func, Type
from tests.support.tf_loops import counting

TEXT = """
    g (float[N, 4] x, int64 n) => (float[N, 4] y) {
        true = Constant<value = bool {1}> ()
        a = Loop (n, true, x) <body = body (int64 i, bool go, float[N, 4] s) => (bool on, float[N, 4] t) {
            on = Identity (go)
            t = Add (s, s)
        }>
        y = Softmax (a)
    }
"""
SAVED = Path(__file__).parents[1] / "models" / "tf_saved" / "frozen"
EXECUTORS = ["auto", "linear", "dataflow", "parallel", "streams", "frames", "interpret"]


def loop(executor: str) -> ps.Session:
    session = compile_text(TEXT, executor=executor)
    for rows in (1, 2):
        session.run({"x": np.ones((rows, 4), np.float32), "n": np.array(3)})
    return session


def failing(executor: str) -> ps.Session:
    session = compile_text(
        "g (float[N] x, int64[1] s) => (float[M] y) { y = Reshape (x, s) }", executor=executor
    )
    with pytest.raises(ps.RunError):
        session.run({"x": np.ones(3, np.float32), "s": np.array([2])})
    return session


def refused(executor: str) -> ps.Session:
    session = compile_text(
        "g (float[N] x, float[M] z) => (float[K] y) { y = Add (x, z) }", executor=executor
    )
    with pytest.raises(ps.PenstockError):
        session.run({"x": np.ones(3, np.float32), "z": np.ones(2, np.float32)})
    return session


def observed(executor: str) -> ps.Session:
    session = compile_text(TEXT, executor=executor)
    feeds = {"x": np.ones((2, 4), np.float32), "n": np.array(3)}
    session.run(feeds, trace=ps.Trace(), timeout=60)
    session.submit(feeds).result(60)
    return session


def stopped(executor: str) -> ps.Session:
    session = compile_text(TEXT, executor=executor)
    feeds = {"x": np.ones((2, 4), np.float32), "n": np.array(2**62)}
    session.run(feeds | {"n": np.array(1)})
    with pytest.raises(ps.DeadlineExceeded):
        session.run(feeds, timeout=0.01)
    token = ps.CancelToken()
    cancelled = session.submit(feeds, cancel=token)
    token.cancel()
    assert isinstance(cancelled.exception(60), ps.Cancelled)
    late = session.submit(feeds, timeout=0.01)
    assert isinstance(late.exception(60), ps.DeadlineExceeded)
    return session


def framed(executor: str) -> ps.Session:
    builder = Builder()
    total = counting(builder, builder.placeholder("n", "int32"))
    session = ps.compile(builder.proto.SerializeToString(), executor=executor)
    session.run({"n": np.int32(5)}, [total])
    return session


def nested(executor: str) -> ps.Session:
    """A run that fails in an endlessly recursive function, which only frames can run."""
    builder = Builder()
    types = {"Tin": [Type("int32")], "Tout": [Type("int32")]}
    builder.function("F", {"x": "int32"}, {"y": "int32"}, {"y": "again:output:0"})
    builder.node("Neg", "x", name="z", T=Type("int32"))
    builder.node("PartitionedCall", "z:y:0", name="again", f=Func("F"), **types)
    builder.main()
    builder.placeholder("x", "int32")
    builder.node("PartitionedCall", "x", name="call", f=Func("F"), **types)
    framed = executor if executor in ("auto", "frames") else "auto"
    session = ps.compile(builder.proto.SerializeToString(), executor=framed)
    with pytest.raises(ps.LimitExceeded):
        session.run({"x": 5}, ["call"])
    return session


def saved(executor: str) -> ps.Session:
    return ps.compile(SAVED, executor=executor)


def leftovers(use: Callable[[str], object], executor: str) -> Counter[str]:
    """Return the package's objects that only the garbage collector can free after ``use``."""
    use(executor)  # objects that are created once stay
    gc.collect()
    gc.disable()
    use(executor)
    gc.set_debug(gc.DEBUG_SAVEALL)
    gc.collect()
    gc.set_debug(0)
    names = Counter(f"{type(x).__module__}.{type(x).__qualname__}" for x in gc.garbage)
    gc.garbage.clear()
    gc.enable()
    return Counter({name: n for name, n in names.items() if name.startswith(("penstock", "numpy"))})


# Plans stay tracked here, so that the collector sees what holds them.
PROGRAM = """
from penstock.host import collector
from tests.session import test_release as tests
collector.untrack = lambda root: None
for executor in tests.EXECUTORS:
    left = tests.leftovers(tests.{use}, executor)
    if left:
        print(executor, left)
"""


# In a separate process, where no other test leaves anything to collect.
@pytest.mark.costly
@pytest.mark.parametrize(
    "use",
    drawn(["loop", "failing", "refused", "observed", "stopped", "framed", "nested", "saved"], 4),
)
def test_dropped_session_leaves_nothing_to_collect(use):
    assert end_of(PROGRAM.format(use=use)) == ""


@pytest.mark.parametrize("executor", ["auto", "linear", "dataflow", "parallel", "streams"])
def test_dropped_session_frees_plans_that_the_collector_does_not_track(executor):
    gc.disable()
    try:
        session = loop(executor)
        plan = session.inspect.plan
        held = [plan, *plan.graph.nodes, *[step.node for step in plan.walk()]]
        tracked = [gc.is_tracked(x) for x in held]
        parts = [ref(x) for x in held]
        del plan, held, session
        assert [part() for part in parts if part() is not None] == []
        assert library() is None or not any(tracked)
    finally:
        gc.enable()


@pytest.mark.parametrize("map_weights", [False, True])
def test_loading_a_saved_model_again_and_again_leaves_no_descriptor_open(map_weights):
    def load(_: int) -> int:
        ps.compile(SAVED, map_weights=map_weights).close()
        return len(os.listdir("/proc/self/fd"))

    gc.disable()
    try:
        assert len({load(i) for i in range(5)}) == 1
    finally:
        gc.enable()


@pytest.mark.parametrize("use", [loop, saved])
def test_closed_session_holds_no_plans_and_constants(use):
    session = use("auto")
    session.close()
    assert session.memory == Memory(0, 0, 0, 0)
