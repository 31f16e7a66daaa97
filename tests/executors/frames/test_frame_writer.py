"""Frames that run as one node: loops that cannot be raised, or have side effects.

In the drawings ``─>`` is a value, T and F are the outputs of a Switch.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from itertools import count
from typing import Any

import numpy as np
import pytest

import penstock as ps
from penstock.backends.numpy import NumpyBackend
from penstock.host.threads import core_budget
from penstock.ir.kernel import Kernel
from penstock.ops import asynchronous
from tests.executors.frames.test_segments import BACKENDS, FEEDS, outcome
from tests.support.frame_runs import inputs, ran
from tests.support.random_frames import RandomGraph
from tests.support.sweeps import sweep
from tests.support.tf_graphs import Flow, Shape, Type
from tests.support.timing import SOON, slow


def whole(session: ps.Session) -> int:
    """Return how many frames run as one node in runs without observers."""
    return sum(executor.source.count("number += 1") for executor in session._plans.executors())


def reading_index() -> Flow:
    """``while i < n: v += (is this an iteration after the first); i += 1``."""
    g = inputs(n="int32")
    g.loop("while", g.const(np.int32(0), "zero"), "n")
    g.carry("while", "v", "zero", lambda v: g.op("AddV2", v, "while/i/merge:1", name="counted"))
    return g


@pytest.mark.parametrize("n", [0, 1, 2, 100])
@pytest.mark.parametrize("executor", ["auto", "frames"])
def test_loop_that_reads_the_index_of_a_merge_is_one_node(executor: str, n: int) -> None:
    session = ps.compile(reading_index().bytes(), executor=executor)
    outputs = session.run({"n": n}, ["while/i/exit", "while/v/exit"])
    assert [x.tolist() for x in outputs.values()] == [max(n, 0), max(n - 1, 0)]
    assert whole(session) == 1


@pytest.mark.costly
@pytest.mark.parametrize("seed", sweep([602, 606, 609, 617, 618, 623], 2))
def test_random_loops_compute_the_same_as_single_nodes_on_every_backend(seed: int) -> None:
    graph = RandomGraph(seed, unraised=True)
    count = 0
    for fetch in graph.fetches:
        nodes = ps.compile(graph.b.bytes(), executor="frames", backends=["numpy"])
        expected = [outcome(nodes, x, fetch, trace=ps.Trace()) for x in FEEDS]
        for executor in ("frames", "auto"):
            for names in BACKENDS:
                session = ps.compile(graph.b.bytes(), executor=executor, backends=names)
                assert [outcome(session, x, fetch) for x in FEEDS] == expected, (names, fetch)
                count += whole(session)
    assert count


def digits(extra: int = 0) -> Flow:
    """A loop that pushes 0, 1, ..., n - 1, and one that pops them, and ``extra`` ones: ``digits * 10
    + popped``."""
    g = inputs(n="int32")
    g.const(np.int32(-1), "size")
    g.const(np.int32(0), "zero")
    g.node("StackV2", "size", name="stack", elem_type=Type("int32"), stack_name="digits")
    left = g.loop("while", "zero", "n", parallel=1)
    handle = g.enter("stack", frame="while", constant=True, parallel=1, T="resource")
    g.op("StackPushV2", handle, "while/i/body", name="push")
    g.op("AddV2", left, g.const(np.int32(extra), "extra"), name="pops")
    g.loop("back", "zero", "pops", parallel=1)
    held = g.enter("stack", frame="back", constant=True, parallel=1, T="resource")
    ten = g.enter(g.const(np.int32(10), "ten"), frame="back", constant=True, parallel=1)

    def step(value: str) -> str:
        popped = g.node("StackPopV2", held, f"^{value}", name="pop", elem_type=Type("int32"))
        return g.op("AddV2", g.op("Mul", value, ten), popped)

    g.carry("back", "digits", "zero", step, parallel=1)
    return g


def test_loops_with_side_effects_run_them_in_order_as_one_node_each() -> None:
    session = ps.compile(digits().bytes(), executor="frames")
    for options in ({}, {"trace": ps.Trace()}, {}):
        outputs = session.run({"n": 5}, ["back/digits/exit"], ["push"], **options)
        assert outputs["back/digits/exit"] == 43210
    assert whole(session) == 2


def test_runs_at_once_have_iterations_and_stacks_of_their_own() -> None:
    session = ps.compile(digits().bytes(), executor="frames")
    tokens = [ps.CancelToken() for _ in range(12)]
    feeds = [{"n": 100_000 if i % 3 == 0 else 5} for i in range(len(tokens))]
    futures = [
        session.submit(feed, ["back/digits/exit"], ["push"], cancel=token)
        for feed, token in zip(feeds, tokens, strict=True)
    ]
    for token in tokens[::3]:
        token.cancel()
    for i, future in enumerate(futures):
        if i % 3 == 0:
            with pytest.raises(ps.Cancelled):
                future.result(SOON)
        else:
            assert future.result(SOON)["back/digits/exit"] == 43210
    assert whole(session) == 2


def nested() -> Flow:
    """A loop that cannot be raised inside another one; a third loop begins with their results."""
    g = inputs(n="int32")
    g.const(np.int32(0), "zero")
    g.loop("outer", "zero", "n")
    bound = g.enter("n", frame="outer", constant=True)

    def inner(value: str) -> str:
        start = g.const(np.int32(0), "inner/start", f"^{value}")
        g.loop("inner", start, bound)
        return g.carry("inner", "v", value, lambda v: g.op("AddV2", v, "inner/i/merge:1"))

    left = g.carry("outer", "v", "zero", inner)
    g.carry("outer", "w", "zero", lambda w: g.op("AddV2", w, "outer/i/merge:1"))
    g.loop("third", "outer/w/exit", left)
    g.carry("third", "u", "zero", lambda u: g.op("AddV2", u, "third/i/merge:1"))
    return g


def test_frames_in_frames_and_behind_frames_are_one_node_each() -> None:
    values, counts = ran(nested(), {"n": 4}, "outer/v/exit", "third/i/exit", "third/u/exit")
    assert values == [12, 12, 8]
    assert counts["inner/less"] == 4 * 5
    session = ps.compile(nested().bytes(), executor="frames")
    session.run({"n": 4}, ["third/u/exit"])
    assert whole(session) == 3


def test_frame_behind_a_switch_is_dead_with_it() -> None:
    g = inputs(n="int32", p="bool")
    g.switch("n", "p", "choice")
    g.loop("while", g.op("Sub", "choice:1", "choice:1", name="zero"), "choice:1")
    g.carry("while", "v", "zero", lambda v: g.op("AddV2", v, "while/i/merge:1"))
    g.merge("choice:0", "while/v/exit", name="y")
    session = ps.compile(g.bytes(), executor="frames")
    for p, expected in ((True, 5), (False, 6), (True, 5)):
        assert session.run({"n": 6, "p": p}, ["y"])["y"] == expected
    assert whole(session) == 1
    with pytest.raises(ps.DeadTensor, match=r"choice .*chose its output 0"):
        session.run({"n": 6, "p": False}, ["while/v/exit"])


def test_frame_within_the_limit_of_iterations_runs_and_another_is_refused() -> None:
    limits = ps.Limits(max_iterations=4)
    session = ps.compile(reading_index().bytes(), executor="frames", limits=limits)
    assert session.run({"n": 4}, ["while/v/exit"])["while/v/exit"] == 3
    with pytest.raises(ps.LimitExceeded, match=r"'while' passed the limit of 4 iterations"):
        session.run({"n": 5}, ["while/v/exit"])


def test_frame_that_does_not_end_stops_at_the_deadline() -> None:
    session = ps.compile(reading_index().bytes(), executor="frames")
    with pytest.raises(ps.DeadlineExceeded):
        session.run({"n": 2**31 - 1}, ["while/v/exit"], timeout=0.05)
    assert session.run({"n": 4}, ["while/v/exit"])["while/v/exit"] == 3


def test_error_in_a_segment_of_a_frame_names_the_node_and_its_inputs() -> None:
    g = inputs(n="int32")
    g.loop("while", g.const(np.int32(-2), "start"), "n")
    ten = g.enter(g.const(np.int32(10), "ten"), frame="while", constant=True)

    def step(value: str) -> str:
        made = g.op("FloorDiv", ten, "while/i/body", name="divided")
        return g.op("AddV2", g.op("AddV2", value, made), "while/v/merge:1")

    left = g.carry("while", "v", "start", step)
    session = ps.compile(g.bytes(), executor="frames")
    assert session.run({"n": -1}, [left])[left] == -7
    with pytest.raises(ps.RunError, match=r"divided in the model.*int32"):
        session.run({"n": 3}, [left])
    assert whole(session) == 1


def test_error_of_a_node_alone_in_a_frame_names_the_node() -> None:
    """The stack is empty when the second loop begins its last iteration."""
    g = digits(extra=1)
    session = ps.compile(g.bytes(), executor="frames")
    with pytest.raises(ps.RunError, match=r"pop in the model"):
        session.run({"n": 5}, ["back/digits/exit"], ["push"])
    assert whole(session) == 2


def test_predicate_of_several_elements_is_refused_with_the_switch() -> None:
    g = Flow()
    g.placeholder("n", "int32", -1)
    g.loop("while", g.const(np.int32(0), "zero"), "n")
    g.carry("while", "v", "zero", lambda v: g.op("AddV2", v, "while/i/merge:1"))
    session = ps.compile(g.bytes(), executor="frames")
    with pytest.raises(ps.RunError, match=r"switch.*one element, not shape \[2\]"):
        session.run({"n": [1, 2]}, ["while/v/exit"])


def test_asynchronous_kernels_go_on_while_a_frame_runs() -> None:
    """The second kernel stops the run, whose loop would not end."""
    token = ps.CancelToken()

    class Later(NumpyBackend):
        """Neg ends a little later; Abs cancels the run."""

        def kernel(self, node: Any, types: Any) -> Kernel | None:
            begin: dict[str, Callable[..., Any]] = {
                "Neg": lambda done, x: threading.Timer(0.02, done, (-x,)).start(),
                "Abs": lambda done, x: token.cancel(),
            }
            name = node.op.name
            return asynchronous(begin[name]) if name in begin else super().kernel(node, types)

    g = reading_index()
    g.op("Abs", g.op("Neg", "n", name="later"), name="stop")
    session = ps.compile(g.bytes(), executor="frames", backends=[Later()])
    with pytest.raises(ps.Cancelled):
        session.run({"n": 2**31 - 1}, ["while/v/exit"], ["stop"], cancel=token, timeout=60)


@pytest.mark.skipif(core_budget() < 2, reason="one core runs one thing at a time")
def test_slow_kernel_runs_on_another_thread_while_a_frame_goes_on() -> None:
    threads: list[int] = []

    class Slow(NumpyBackend):
        """Neg takes a few milliseconds."""

        name = "slow"

        def kernel(self, node: Any, types: Any) -> Kernel | None:
            def negative(x: Any) -> Any:
                threads.append(threading.get_ident())
                slow(0.002)
                return -x

            return Kernel(negative) if node.op.name == "Neg" else None

    g = reading_index()
    g.op("Neg", "n", name="slow")
    session = ps.compile(g.bytes(), executor="frames", backends=[Slow(), "numpy"], threads=2)
    for _ in range(4):  # the first runs show that it is slow
        outputs = session.run({"n": 100}, ["slow", "while/v/exit"])
        assert [x.tolist() for x in outputs.values()] == [-100, 99]
    assert whole(session) == 1
    assert threads[0] == threading.get_ident() != threads[-1]


def test_runs_with_and_without_observers_share_kernels_beside_a_loop() -> None:
    """
    while i < n: i += 1  beside  count: a kernel with side effects that counts its runs
    """

    class Counting(NumpyBackend):
        def kernel(self, node: Any, types: Any) -> Kernel | None:
            if node.op.name != "ReadVariableOp":
                return super().kernel(node, types)
            numbers = count()
            return Kernel(lambda variable: np.array(next(numbers), np.int32))

    g = inputs(n="int32")
    g.loop("while", g.const(np.int32(0), "zero"), "n")
    variable = {"shared_name": "v", "dtype": Type("int32"), "shape": Shape(())}
    g.node("VarHandleOp", name="v", **variable)
    g.node("ReadVariableOp", "v", name="count", dtype=Type("int32"))
    session = ps.compile(g.bytes(), executor="frames", backends=[Counting()])
    observers = [None, ps.Trace(), None, ps.Trace()]
    runs = [session.run({"n": 3}, ["count", "while/i/exit"], trace=trace) for trace in observers]
    assert [int(outputs["count"]) for outputs in runs] == [0, 1, 2, 3]
