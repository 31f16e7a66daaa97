"""Asynchronous kernels, on every executor."""

from __future__ import annotations

import gc
import queue
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import penstock as ps
from penstock.backends.numpy import NumpyBackend
from penstock.host.threads import Workers
from penstock.ir.kernel import Kernel, Outcome, asynchronous
from penstock.ops import operator
from penstock.ops.common.shape_rules import same_type
from tests.support.onnx_text import model_from_text
from tests.support.tf_graphs import Builder
from tests.support.tf_loops import counting
from tests.support.timing import SOON, wait_until

EXECUTORS = ["linear", "dataflow", "parallel", "streams", "frames"]


class Asked:
    """A call of the kernel of Ask, which the test answers."""

    def __init__(self, done: Callable[..., None], x: np.ndarray) -> None:
        self.done = done
        self.x = x
        self.cancelled = threading.Event()


ASKED: queue.Queue[Asked] = queue.Queue()


@operator("Ask", domain="com.example", infer=same_type, pure=False, traits={"any order"})
def ask(node, types) -> Kernel:
    def begin(done, x):
        asked = Asked(done, x)
        ASKED.put(asked)
        return asked.cancelled.set

    return asynchronous(begin)


@operator("Echo", domain="com.example", infer=same_type, pure=False)
def echo(node, types) -> Kernel:
    """Calls done before it returns, and twice."""

    def begin(done, x):
        done(2 * x)
        done(3 * x)

    return asynchronous(begin)


@operator("Refuse", domain="com.example", infer=same_type, pure=False)
def refuse(node, types) -> Kernel:
    def begin(done, x):
        raise ZeroDivisionError("no")

    return asynchronous(begin)


@pytest.fixture(autouse=True)
def nothing_asked():
    while not ASKED.empty():
        ASKED.get()


def compile(text: str, executor: str) -> ps.Session:
    proto = model_from_text(text, domains={"com.example": 1})
    return ps.compile(proto, executor=executor, backends=["numpy"])


def abandoned(session: ps.Session) -> Asked:
    """The call of a kernel whose run was cancelled."""
    token = ps.CancelToken()
    future = session.submit({"x": X}, cancel=token)
    asked = ASKED.get(timeout=SOON)
    token.cancel()
    with pytest.raises(ps.Cancelled):
        future.result(SOON)
    return asked


def asked_until_deadline(session: ps.Session, feeds: dict[str, np.ndarray]) -> Asked:
    """The call of a kernel during which the deadline of its run passed. On a busy machine, a short
    deadline passes before the call."""
    for timeout in (0.05, 0.5, 5):
        with pytest.raises(ps.DeadlineExceeded):
            session.submit(feeds, timeout=timeout).result(SOON)
        if not ASKED.empty():
            return ASKED.get()
    pytest.fail("no run has come to the kernel")


ONE = "g (float[2] x) => (float[2] y) { a = Exp(x) [asks] b = com.example.Ask(a) y = Neg(b) }"
X = np.array([0, 1], np.float32)


@pytest.mark.parametrize("executor", EXECUTORS)
def test_asynchronous_kernel_may_answer_from_any_thread(executor):
    session = compile(ONE, executor)
    future = session.submit({"x": X})
    asked = ASKED.get(timeout=SOON)
    np.testing.assert_array_equal(asked.x, np.exp(X))
    threading.Thread(target=asked.done, args=(10 * asked.x,)).start()
    np.testing.assert_array_equal(future.result(SOON)["y"], -10 * np.exp(X))
    assert not asked.cancelled.is_set()


@pytest.mark.parametrize("executor", EXECUTORS)
def test_asynchronous_kernel_first_answer_counts_even_at_once(executor):
    session = compile("g (float[2] x) => (float[2] y) { y = com.example.Echo(x) }", executor)
    assert session(X).tolist() == [0, 2]
    trace = ps.Trace()
    session.run({"x": X}, trace=trace)
    assert list(trace.counts.values()) == [1]


@pytest.mark.parametrize("executor", EXECUTORS)
def test_error_of_an_asynchronous_kernel_names_the_node(executor):
    session = compile(ONE, executor)
    for error, says in ((ValueError("line is busy"), "line is busy"), (KeyboardInterrupt(), "")):
        future = session.submit({"x": X})
        asked = ASKED.get(timeout=SOON)
        asked.done(error=error)
        if executor != "frames" and not isinstance(error, Exception):
            with pytest.raises(KeyboardInterrupt):
                future.result(SOON)
            continue
        with pytest.raises(ps.RunError, match=f"asks.*{says}") as caught:
            future.result(SOON)
        assert caught.value.__cause__ is error
    session = compile("g (float[2] x) => (float[2] y) { [no] y = com.example.Refuse(x) }", executor)
    with pytest.raises(ps.RunError, match=r"no.*ZeroDivisionError"):
        session(X)


@pytest.mark.parametrize("way", ["deadline", "token"])
@pytest.mark.parametrize("executor", EXECUTORS)
def test_stopped_run_does_not_wait_for_an_asynchronous_kernel(executor, way):
    session = compile(ONE, executor)
    asked = abandoned(session) if way == "token" else asked_until_deadline(session, {"x": X})
    assert asked.cancelled.wait(SOON)
    asked.done(X)  # too late, and ignored
    future = session.submit({"x": X})
    ASKED.get(timeout=SOON).done(X)
    np.testing.assert_array_equal(future.result(SOON)["y"], -X)


@pytest.mark.parametrize("executor", EXECUTORS)
def test_asynchronous_kernels_run_in_loops_and_branches(executor):
    session = compile(
        """g (float[2] x, int64 n) => (float[2] y) {
            y = Loop (n, , x) <body = b (int64 i, bool c, float[2] v) => (bool d, float[2] w)
                { d = Identity(c) w = com.example.Ask(v) }>
        }""",
        executor,
    )
    future = session.submit({"x": X, "n": np.array(3)})
    for _ in range(3):
        asked = ASKED.get(timeout=SOON)
        asked.done(asked.x + 1)
    assert future.result(SOON)["y"].tolist() == [3, 4]
    asked = asked_until_deadline(session, {"x": X, "n": np.array(3)})
    assert asked.cancelled.wait(SOON)


@pytest.mark.parametrize("executor", EXECUTORS)
def test_thread_that_answers_waits_for_no_kernel_of_a_loop_behind(executor):
    """It is the only thread that answers: a run that waited on it would never end."""
    session = compile(
        """g (float[2] x, int64 n) => (float[2] y) {
            a = com.example.Ask(x)
            y = Loop (n, , a) <body = b (int64 i, bool c, float[2] v) => (bool d, float[2] w)
                { d = Identity(c) w = com.example.Ask(v) }>
        }""",
        executor,
    )
    for observers in ([], [ps.Profile()]):
        feeds = {"x": X, "n": np.array(3)}
        future = session.submit(feeds, timeout=SOON, observers=observers)
        for _ in range(4):
            asked = ASKED.get(timeout=SOON)
            asked.done(asked.x + 1)
        assert future.result(SOON)["y"].tolist() == [4, 5]


@pytest.mark.parametrize("executor", EXECUTORS)
def test_runs_at_once_carry_values_of_their_own_while_kernels_wait(executor):
    session = compile(
        """g (float[2] x, int64 n) => (float[2] y, float[2] z) {
            y, z = Loop (n, , x, x) <body = b (int64 i, bool c, float[2] v, float[2] u)
                => (bool d, float[2] w, float[2] s)
                { d = Identity(c) w = com.example.Ask(v) s = Identity(v) }>
        }""",
        executor,
    )
    starts, runs, asked = (X, X + 10), [], []
    for start in starts:
        runs.append(session.submit({"x": start, "n": np.array(2)}))
        asked.append(ASKED.get(timeout=SOON))
    again = []
    for ask in asked:
        ask.done(ask.x + 1)
        again.append(ASKED.get(timeout=SOON))
    for ask, start, future in zip(again, starts, runs, strict=True):
        ask.done(ask.x + 1)
        outputs = future.result(SOON)
        assert outputs["y"].tolist() == (start + 2).tolist()
        assert outputs["z"].tolist() == (start + 1).tolist()


@pytest.mark.parametrize("executor", [*EXECUTORS, "auto"])
def test_executor_runs_other_nodes_while_kernels_wait(executor):
    session = compile(
        """g (float[2] x) => (float[2] y) {
            a = com.example.Ask(x) b = com.example.Ask(x) c = Neg(x) y = Sum(a, b, c)
        }""",
        executor,
    )
    seen: list[str] = []

    class Ends(ps.Observer):
        def step_end(self, run, step, outputs):
            seen.append(step.node.op.name)

    future = session.submit({"x": X}, observers=[Ends()])
    first, second = ASKED.get(timeout=SOON), ASKED.get(timeout=SOON)
    wait_until(lambda: "Neg" in seen)
    second.done(5 * X)
    first.done(3 * X)
    np.testing.assert_array_equal(future.result(SOON)["y"], 7 * X)
    assert seen == ["Neg", "Ask", "Ask", "Sum"]


@pytest.mark.parametrize("executor", [*EXECUTORS, "auto"])
def test_caller_of_a_run_waits_for_all_asynchronous_kernels_at_once(executor):
    session = compile(
        """g (float[2] x, bool p) => (float[2] y) {
            a = com.example.Ask(x) b = Exp(x) c = com.example.Ask(b)
            d = If (p) <then_branch = t () => (float[2] u) { u = com.example.Ask(b) },
                        else_branch = e () => (float[2] v) { v = Neg(x) }>
            y = Sum(a, c, d)
        }""",
        executor,
    )

    def answer() -> None:
        for asked in [ASKED.get(timeout=SOON) for _ in range(3)]:  # only when all wait
            asked.done(asked.x)

    thread = threading.Thread(target=answer)
    thread.start()
    outputs = session.run({"x": X, "p": np.array(True)})
    thread.join(SOON)
    np.testing.assert_array_equal(outputs["y"], X + np.exp(X) + np.exp(X))


@pytest.mark.parametrize("executor", [*EXECUTORS, "auto"])
def test_waiting_runs_hold_no_thread_of_the_pool(executor):
    pool = Workers("one", 1)
    proto = model_from_text(ONE, domains={"com.example": 1})
    with ps.compile(
        proto, executor=executor, backends=["numpy"], expert=ps.ExpertOptions(pool=pool)
    ) as session:
        futures = [session.submit({"x": X + i}) for i in range(4)]
        for asked in [ASKED.get(timeout=SOON) for _ in futures]:
            asked.done(asked.x)
        for i, future in enumerate(futures):
            np.testing.assert_array_equal(future.result(SOON)["y"], -np.exp(X + i))
    pool.close()


def test_stopped_run_leaves_its_asynchronous_kernel_a_copy_of_its_inputs():
    session = compile(ONE, "linear")
    asked = abandoned(session)
    future = session.submit({"x": X + 1})
    ASKED.get(timeout=SOON).done(X)
    future.result(SOON)
    np.testing.assert_array_equal(asked.x, np.exp(X))


@pytest.mark.parametrize("executor", EXECUTORS)
def test_error_cancels_pending_asynchronous_kernels(executor):
    session = compile(
        """g (float[2] x, int64[1] i) => (float[2] y) {
            a = com.example.Ask(x) b = com.example.Ask(x) [bad] c = Gather(a, i) y = Add(b, c)
        }""",
        executor,
    )
    future = session.submit({"x": X, "i": np.array([9])})
    first, second = ASKED.get(timeout=SOON), ASKED.get(timeout=SOON)
    first.done(X)
    with pytest.raises(ps.RunError, match="bad"):
        future.result(SOON)
    assert second.cancelled.is_set()
    assert not first.cancelled.is_set()


def living_runs() -> list[object]:
    gc.collect()
    return [x for x in gc.get_objects() if type(x).__name__ in ("FramesRun", "TaskRun")]


@pytest.mark.parametrize("executor", EXECUTORS)
def test_unanswered_asynchronous_kernel_keeps_no_run_alive(executor):
    session = compile(ONE, executor)
    kept = []
    for way in ("late", "never"):
        asked = abandoned(session)
        if way == "late":
            asked.done(X)
        kept.append(asked)
    assert len(kept) == 2
    wait_until(lambda: not living_runs())  # a worker's thread may just be leaving its run


def test_asynchronous_kernel_refuses_strings():
    with pytest.raises(ps.PenstockError, match="takes no strings"):
        session = compile("g (string[2] x) => (string[2] y) { y = com.example.Ask(x) }", "frames")
        session.run({"x": np.array(["a", "b"], object)}, timeout=1)


def test_cancel_hook_that_raises_does_not_change_the_ending(monkeypatch):
    monkeypatch.setattr(threading, "excepthook", lambda arguments: None)

    @operator("Stubborn", domain="com.example", infer=same_type, pure=False)
    def stubborn(node, types) -> Kernel:
        def refuse() -> Any:
            raise ZeroDivisionError

        return asynchronous(lambda done, x: refuse)

    text = "g (float[2] x) => (float[2] y) { y = com.example.Stubborn(x) }"
    for executor in ("frames", "linear"):
        with pytest.raises(ps.DeadlineExceeded):
            compile(text, executor).run({"x": X}, timeout=0.02)


@pytest.mark.parametrize("executor", ["frames", "auto"])
@pytest.mark.parametrize("parallel", [1, 4, 16])
def test_iterations_of_a_frame_wait_at_once_up_to_parallel_iterations(parallel, executor):
    """The body of the loop only waits, so as many iterations wait as the frame allows."""
    asked_count = answered = most = 0

    def begin(done, x):
        nonlocal asked_count, most
        asked_count += 1
        most = max(most, asked_count - answered)
        asked = Asked(done, x)
        ASKED.put(asked)
        return asked.cancelled.set

    class Asking(NumpyBackend):
        def kernel(self, node, types):
            return asynchronous(begin) if node.op.name == "Neg" else super().kernel(node, types)

    b = Builder()
    total = counting(b, b.placeholder("n", "int32"), parallel)
    session = ps.compile(b.bytes(), executor=executor, backends=[Asking()])
    future = session.submit({"n": np.int32(20)}, [total])
    while answered < 20:
        for asked in [ASKED.get(timeout=SOON) for _ in range(min(parallel, 20 - answered))]:
            answered += 1
            asked.done(-asked.x)
    assert future.result(SOON)[total] == sum(range(20))
    assert most == parallel
    (used,) = session._plans.executors()
    assert used.name == ("frames" if executor == "frames" or parallel > 1 else "linear")


class LongNeg(NumpyBackend):
    """Claims that its Neg takes long."""

    name = "long"

    def seconds(self, node):
        return 1e-3 if node.op.name == "Neg" else super().seconds(node)


@pytest.mark.parametrize("backend", [LongNeg, NumpyBackend])
@pytest.mark.parametrize("parallel", [1, 4])
def test_auto_keeps_frames_whose_iterations_overlap_in_long_kernels(parallel, backend):
    b = Builder()
    total = counting(b, b.placeholder("n", "int32"), parallel)
    session = ps.compile(
        b.bytes(), backends=[backend()], threads=2, expert=ps.ExpertOptions(pool=Workers("two", 2))
    )
    assert session.run({"n": np.int32(5)}, [total])[total] == 10
    kept = backend is LongNeg and parallel > 1
    (executor,) = session._plans.executors()
    assert executor.name == ("frames" if kept else "linear")


def test_interrupt_while_waiting_for_an_outcome_cancels_the_kernel():
    ended = threading.Event()

    def begin(done):
        return ended.set

    outcome = Outcome(begin, ())
    outcome._future.exception = lambda timeout: (_ for _ in ()).throw(KeyboardInterrupt)  # type: ignore[assignment]
    with pytest.raises(KeyboardInterrupt):
        outcome.wait()
    assert ended.is_set()
