"""Loops and branches on streams: what overlaps them, what waits for them, how they end."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np
import pytest

import penstock as ps
from penstock.backends.numpy import NumpyBackend
from penstock.host.threads import Workers
from penstock.ir.kernel import Kernel
from tests.support.onnx_text import compile_text

PATIENCE = 30

WHILE = """Loop <body = {name} (int64 i{name}, bool c{name}, float[4] v{name}) =>
    (bool d{name}, float[4] w{name}) {{ d{name} = Identity(c{name}) {body} }}>"""


def loop(name: str, body: str) -> str:
    """A Loop that carries v<name>, and returns w<name>."""
    return WHILE.format(name=name, body=body)


class Hooked(NumpyBackend):
    """Calls a function of the test before each call of an operation's kernel."""

    def __init__(self, hooks: Mapping[str, Callable[[], None]] | None = None) -> None:
        super().__init__()
        self.hooks = dict(hooks or {})
        self.calls: Counter[str] = Counter()

    def kernel(self, node, types: Sequence) -> Kernel:
        kernel = super().kernel(node, types)
        name = node.op.name

        def function(*inputs):
            self.calls[name] += 1
            hook = self.hooks.get(name)
            if hook is not None:
                hook()
            return kernel.function(*inputs)

        return Kernel(function)


class Pool:
    """Four threads for each test, however many cores there are: an idle pool refuses no help."""

    workers: Workers


@pytest.fixture(autouse=True)
def workers() -> Iterator[Workers]:
    Pool.workers = Workers("test", 4)
    yield Pool.workers
    Pool.workers.close()


def compiled(text: str, backend: NumpyBackend | None = None, streams: int = 4) -> ps.Session:
    return compile_text(
        text,
        executor="streams",
        max_streams=streams,
        backends=[backend or NumpyBackend()],
        pool=Pool.workers,
    )


def linear(text: str) -> ps.Session:
    return compile_text(text, executor="linear", backends=["numpy"])


def same(
    text: str, feeds: dict[str, np.ndarray], backend: NumpyBackend | None = None
) -> ps.Session:
    """A session whose outputs, twice, equal those of the linear executor to the bit."""
    session = compiled(text, backend)
    expected = linear(text).run(feeds)
    for _ in range(2):
        for name, found in session.run(feeds).items():
            np.testing.assert_array_equal(found, expected[name])
    return session


def streams_of(session: ps.Session) -> int:
    """Return the number of streams of the outermost block."""
    tasks = session.inspect.executor.tasks
    return 1 if tasks is None else len(tasks.blocks[0])


X = np.linspace(-1, 1, 4, dtype=np.float32)


# Two loops.

LOOPS = (
    "a = " + loop("p", "wp = Sin(vp)") + " (n, , x) b = " + loop("q", "wq = Cos(vq)") + " (m, , x)"
)


@pytest.mark.parametrize(("first", "last"), [("Sin", "Cos"), ("Cos", "Sin")])
def test_streams_join_two_loops_that_end_in_either_order(first, last):
    #  x -+- while Sin -+- y        one waits in its first iteration until the other has ended
    #     +- while Cos -+
    text = f"g (int64 n, int64 m, float[4] x) => (float[4] y) {{ {LOOPS} y = Add(a, b) }}"
    backend, ended = Hooked(), threading.Event()

    def count() -> None:
        if backend.calls[first] % 5 == 0:
            ended.set()

    backend.hooks[first] = count
    backend.hooks[last] = lambda: assert_set(ended)
    feeds = {"n": np.int64(5), "m": np.int64(5), "x": X}
    session = same(text, feeds, backend)
    assert streams_of(session) == 2


def assert_set(event: threading.Event) -> None:
    assert event.wait(PATIENCE)


def test_streams_run_two_loops_that_are_both_outputs():
    #  x -+- while Sin -- a
    #     +- while Cos -- b
    text = f"g (int64 n, int64 m, float[4] x) => (float[4] a, float[4] b) {{ {LOOPS} }}"
    for n, m in ((3, 7), (7, 3), (0, 2)):
        session = same(text, {"n": np.int64(n), "m": np.int64(m), "x": X})
        assert streams_of(session) == 2


def test_streams_loop_as_last_step_has_streams_in_its_body():
    text = "g (int64 n, float[4] x) => (float[4] a) { y = Exp(x) z = Neg(x) s = Add(y, z) a = " + (
        loop("p", "tp = Sin(vp) up = Cos(vp) wp = Mul(tp, up)") + " (n, , s) }"
    )
    session = same(text, {"n": np.int64(3), "x": X})
    assert len(session.inspect.executor.tasks.blocks) == 2  # the body has streams of its own
    assert [len(block) for block in session.inspect.executor.tasks.blocks] == [2, 2]


# Nested blocks.


def test_streams_loop_body_takes_another_branch_in_its_second_iteration():
    #  while i < n: i even -> sin v * cos v, odd -> -v + |v|
    text = (
        "g (int64 n, float[4] x) => (float[4] a) <int64 two = {2}, int64 zero = {0}> { a = "
        + loop(
            "p",
            """r = Mod(ip, two) even = Equal(r, zero)
            wp = If (even) <
                then_branch = e () => (float[4] te) { e1 = Sin(vp) e2 = Cos(vp) te = Mul(e1, e2) },
                else_branch = o () => (float[4] to) { o1 = Neg(vp) o2 = Abs(vp) to = Add(o1, o2) }>""",
        )
        + " (n, , x) }"
    )
    for n in range(5):
        same(text, {"n": np.int64(n), "x": X})


def test_streams_run_loops_in_branches_in_loops():
    text = (
        "g (int64 n, float[4] x) => (float[4] a) <int64 two = {2}, int64 zero = {0}> { a = "
        + loop(
            "p",
            """r = Mod(ip, two) even = Equal(r, zero) f = Floor(vp)
            s = If (even) <
                then_branch = e () => (float[4] te) { te = """
            + loop("q", "sq = Sin(vq) kq = Cos(vq) wq = Mul(sq, kq)")
            + """ (two, , vp) },
                else_branch = o () => (float[4] to) { to = Neg(vp) }>
            wp = Add(s, f)""",
        )
        + " (n, , x) }"
    )
    for n in range(4):
        same(text, {"n": np.int64(n), "x": X})


# Nodes before a loop on another stream, and readers on another stream.


def test_streams_loop_waits_for_other_streams_and_they_for_it():
    #  x -+- Exp ---------------- while -+- Neg -- y
    #     +- Sin -- (read inside) --^    +- Abs -- z
    text = (
        "g (int64 n, float[4] x) => (float[4] y, float[4] z) { e = Exp(x) s = Sin(x) a = "
        + loop("p", "wp = Add(vp, s)")
        + " (n, , e) y = Neg(a) z = Abs(a) }"
    )
    session = same(text, {"n": np.int64(3), "x": X})
    signals = session.inspect.executor.tasks.signals
    (while_,) = [step for step in session.inspect.plan.steps if step.control]
    assert len(signals.waits[while_]) == 1
    assert len(signals.emits[while_]) == 1
    assert streams_of(session) == 2


def test_streams_overlap_independent_work_with_a_loop():
    #  x -+- while Sin -+- y        the loop cannot end before its neighbours
    #     +- Exp -- Neg -+
    text = (
        "g (int64 n, float[4] x) => (float[4] y) { a = "
        + loop("p", "wp = Sin(vp)")
        + " (n, , x) e = Exp(x) f = Neg(e) y = Add(a, f) }"
    )
    backend, beside = Hooked(), threading.Event()
    backend.hooks["Neg"] = beside.set
    backend.hooks["Sin"] = lambda: assert_set(beside)
    session = compiled(text, backend)
    found = session.run({"n": np.int64(3), "x": X})["y"]
    np.testing.assert_array_equal(found, linear(text).run({"n": np.int64(3), "x": X})["y"])


def test_streams_that_wait_in_a_loop_hold_no_thread(workers):
    #  eight branches wait for one node: they run on the available threads
    names = ["Sin", "Cos", "Exp", "Neg", "Abs", "Tanh", "Floor", "Ceil"]
    branches = " ".join(f"b{i} = {name}(s)" for i, name in enumerate(names))
    sums = " ".join(f"c{i} = Add({'b0' if i == 1 else f'c{i - 1}'}, b{i})" for i in range(1, 8))
    text = f"g (float[4] x) => (float[4] c7) {{ s = Sqrt(x) {branches} {sums} }}"
    backend, threads = Hooked(), set()
    backend.hooks = dict.fromkeys(names, lambda: threads.add(threading.current_thread().name))
    before = threading.active_count()
    session = compiled(text, backend, streams=8)
    for _ in range(20):
        session.run({"x": np.abs(X)})
    assert streams_of(session) == 8
    assert threading.active_count() <= before + workers.size
    assert len(threads) <= 1 + workers.size


# Iterations.


def test_streams_loop_without_iterations_returns_its_inputs():
    text = (
        "g (int64 n, bool c, float[4] x) => (float[4] a) { y = Exp(x) z = Neg(x) s = Add(y, z) a = "
        + loop("p", "tp = Sin(vp) up = Cos(vp) wp = Mul(tp, up)")
        + " (n, c, s) }"
    )
    expected = np.exp(X) + -X
    session = compiled(text)
    for n, c in ((0, True), (5, False), (0, False)):
        found = session.run({"n": np.int64(n), "c": np.bool_(c), "x": X})["a"]
        np.testing.assert_array_equal(found, expected)


def test_streams_loop_condition_runs_once_more_than_the_body():
    #  while v[0] < 5: the test for the first iteration precedes the loop
    text = """g (float[4] x) => (float[4] a) <float five = {5}> {
        m = ReduceMin<keepdims = 0>(x) c = Less(m, five)
        a = Loop <body = b (int64 i, bool c1, float[4] v) => (bool d, float[4] w) {
            s = Exp(v) t = Abs(v) w = Add(s, t) k = ReduceMin<keepdims = 0>(w) d = Less(k, five) }>
            ( , c, x) }"""
    backend = Hooked()
    same(text, {"x": X}, backend)
    assert backend.calls["Less"] == backend.calls["Exp"] + 2  # of two runs


@pytest.mark.parametrize("turns", [1, 2, 3, 4])
def test_streams_value_read_by_a_loop_survives_all_iterations(turns):
    #  two carried values swap places in every iteration, beside one that is only read
    text = """g (int64 n, float[4] x) => (float[4] a, float[4] b, float[4] e) {
        e = Exp(x) y = Neg(x)
        a, b = Loop <body = l (int64 i, bool c, float[4] v, float[4] u) =>
            (bool d, float[4] v1, float[4] u1) {
                d = Identity(c) v1 = Add(u, e) u1 = Mul(v, e) }> (n, , x, y) }"""
    session = same(text, {"n": np.int64(turns), "x": X})
    v, u, e = X, -X, np.exp(X)
    for _ in range(turns):
        v, u = u + e, v * e
    found = session.run({"n": np.int64(turns), "x": X})
    np.testing.assert_array_equal(found["a"], v)
    np.testing.assert_array_equal(found["b"], u)
    np.testing.assert_array_equal(found["e"], e)


# How runs end.

TWO = (
    "g (int64 n, float[4] x) => (float[4] y) { a = "
    + loop("p", "sp = Sin(vp) kp = Cos(vp) wp = Mul(sp, kp)")
    + " (n, , x) e = Exp(x) f = Neg(e) y = Add(a, f) }"
)


def test_streams_run_cancelled_in_a_loop_leaks_nothing():
    backend, token = Hooked(), ps.CancelToken()

    def third() -> None:
        if backend.calls["Sin"] == 3:
            token.cancel()

    backend.hooks["Sin"] = third
    session = compiled(TWO, backend)
    with pytest.raises(ps.Cancelled):
        session.run({"n": np.int64(10**6), "x": X}, cancel=token)
    assert backend.calls["Sin"] < 100
    for n in (0, 3):
        feeds = {"n": np.int64(n), "x": X}
        np.testing.assert_array_equal(session.run(feeds)["y"], linear(TWO).run(feeds)["y"])


@pytest.mark.parametrize("at", ["Sin", "Cos", "Neg", "Exp", "Add"])
def test_streams_stop_after_an_error_on_one_of_them(at):
    backend = Hooked()

    def fail() -> None:
        raise ValueError("it broke")

    backend.hooks[at] = fail
    session = compiled(TWO, backend)
    for _ in range(3):
        with pytest.raises(ps.RunError, match=f"{at}.*it broke"):
            session.run({"n": np.int64(3), "x": X}, timeout=PATIENCE)
    del backend.hooks[at]
    feeds = {"n": np.int64(3), "x": X}
    np.testing.assert_array_equal(session.run(feeds)["y"], linear(TWO).run(feeds)["y"])


def test_streams_that_wait_for_a_failing_one_do_not_hang():
    #  x -- Sin -- fails      steps that wait for it end, too
    text = """g (float[4] x) => (float[4] y) { a = Sin(x) b = Exp(a) c = Neg(a) d = Abs(a)
        s = Add(b, c) y = Add(s, d) }"""
    backend = Hooked({"Sin": lambda: 1 // 0})
    session = compiled(text, backend)
    with pytest.raises(ps.RunError, match="Sin"):
        session.run({"x": X}, timeout=PATIENCE)
    assert not backend.calls["Exp"] + backend.calls["Neg"] + backend.calls["Abs"]


def test_streams_run_loops_asynchronously():
    session = compiled(TWO)
    expected = {n: linear(TWO).run({"n": np.int64(n), "x": X})["y"] for n in range(6)}
    futures = [(n, session.submit({"n": np.int64(n), "x": X})) for n in range(6) for _ in range(5)]
    for n, future in futures:
        np.testing.assert_array_equal(future.result(PATIENCE)["y"], expected[n])


# Counts.


def test_streams_loop_body_of_one_stream_stays_on_the_stream_of_the_loop():
    text = (
        "g (int64 n, float[4] x) => (float[4] a) { a = " + loop("p", "wp = Sin(vp)") + " (n, , x) }"
    )
    session = compiled(text)
    assert session.inspect.executor.tasks is None
    assert session.source == linear(text).source


def test_streams_are_no_more_than_the_width_of_the_graph():
    text = "g (float[4] x) => (float[4] y) { a = Sin(x) b = Cos(x) y = Add(a, b) }"
    assert streams_of(compiled(text, streams=100)) == 2
    assert streams_of(compiled(text, streams=1)) == 1
