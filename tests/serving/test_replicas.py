"""Replicas: what a queue, batches, deadlines and errors do to requests."""

from __future__ import annotations

import asyncio
import gc
import threading
import weakref
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

import penstock as ps
from penstock.backends.numpy import NumpyBackend
from penstock.host.threads import core_budget, pool
from penstock.ir.kernel import Kernel
from tests.support.onnx_text import compile_text, model_from_text
from tests.support.tf_graphs import Builder, Shape, Type
from tests.support.timing import SOON, wait_until

ROWS = "g (float[N, 3] x) => (float[N, 3] y) { y = Sin(x) }"
TWO = """g (float[N, 3] x, int64[N] i) => (float[N, 3] y, int64[N] j) {
    y = Sin(x) j = Add(i, i) }"""


class Held(NumpyBackend):
    """Sin waits until ``opened``; ``shapes`` has those that it was called with. A NaN fails."""

    name = "held"

    def __init__(self) -> None:
        self.opened = threading.Event()
        self.shapes: list[tuple[int, ...]] = []

    def kernel(self, node: Any, types: Any) -> Kernel | None:
        return Kernel(self.sine) if node.op.name == "Sin" else super().kernel(node, types)

    def sine(self, x: np.ndarray) -> np.ndarray:
        self.shapes.append(x.shape)
        assert self.opened.wait(SOON)
        if np.isnan(x).any():
            raise ValueError("not a number")
        return np.sin(x)


def held(text: str = ROWS, n: int = 1, **options: Any) -> tuple[ps.Replicas, Held]:
    """Replicas whose kernels wait."""
    backend = Held()
    backend.opened.set()  # for the batches that are tried out
    replicas = ps.Replicas(model_from_text(text), n, backends=[backend], **options)
    backend.opened.clear()
    backend.shapes.clear()
    return replicas, backend


class Told:
    """Calls ``late``, and keeps what it is told of times."""

    def __init__(self, late: Any) -> None:
        self.late = late
        self.times: list[tuple[float, float]] = []

    def timed(self, queue: float, run: float) -> None:
        self.times.append((queue, run))


def row(k: int, rows: int = 1) -> dict[str, np.ndarray]:
    return {"x": np.full((rows, 3), k, np.float32)}


def check(future: Future[Any], k: int, rows: int = 1) -> None:
    y = future.result(SOON)["y"]
    np.testing.assert_allclose(y, np.sin(row(k, rows)["x"]), rtol=1e-6)
    assert y.base is None


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("max_batch", [1, 4])
def test_replicas_answer_many_threads_as_a_session_does(n, max_batch):
    with ps.Replicas(model_from_text(TWO), n, max_batch=max_batch, max_delay=0.001) as replicas:

        def ask(k: int) -> None:
            rows = 1 + k % 3
            feeds = {**row(k, rows), "i": np.arange(rows) + k}
            outputs = replicas.run(feeds)
            np.testing.assert_allclose(outputs["y"], np.sin(feeds["x"]), rtol=1e-6)
            np.testing.assert_array_equal(outputs["j"], 2 * feeds["i"])

        with ThreadPoolExecutor(8) as pool:
            list(pool.map(ask, range(200)))
        wait_until(lambda: not replicas.counts.running)
        counts = replicas.counts
        assert (counts.succeeded, counts.failed, counts.refused, counts.queued) == (200, 0, 0, 0)
        assert counts.rows == (200 if max_batch == 1 else sum(1 + k % 3 for k in range(200)))
        assert counts.batches <= 200


def test_full_queue_refuses_a_request_and_runs_the_others():
    replicas, backend = held(n=2, queue=3)
    futures = [replicas.submit(row(k)) for k in range(5)]
    wait_until(lambda: len(backend.shapes) == 2)
    with pytest.raises(ps.QueueFull, match="3 requests wait, and queue=3 is the limit"):
        replicas.submit(row(5))
    assert (replicas.counts.queued, replicas.counts.running, replicas.counts.refused) == (3, 2, 1)
    backend.opened.set()
    for k, future in enumerate(futures):
        check(future, k)
    check(replicas.submit(row(6)), 6)
    replicas.close()


def test_requests_of_a_higher_priority_come_first_and_tell_their_times():
    replicas, backend = held(queue=9, priority=1)
    order: list[int] = []
    times: dict[int, tuple[float, float]] = {}

    def ask(k: int, **options: Any) -> Future[Any]:
        future = replicas.submit(row(k), timed=lambda *own: times.update({k: own}), **options)
        future.add_done_callback(lambda _: order.append(k))
        return future

    futures = [ask(0)]
    wait_until(lambda: len(backend.shapes) == 1)
    futures += [ask(k, priority=p) for k, p in ((1, -1), (2, None), (3, 5), (4, 1), (5, 5))]
    with ThreadPoolExecutor(1) as threads:
        told = Told(lambda error: None)
        last = threads.submit(replicas.run_here, row(6), priority=9, told=told)
        wait_until(lambda: replicas.counts.queued == 6)
        backend.opened.set()
        np.testing.assert_allclose(last.result(SOON)["y"], np.sin(row(6)["x"]), rtol=1e-6)
    for k, future in enumerate(futures):
        check(future, k)
    assert order == [0, 3, 5, 2, 4, 1]
    assert all(queue >= 0 and run > 0 for queue, run in times.values()) and len(times) == 6
    assert times[1][0] >= times[3][0] and len(told.times) == 1
    replicas.close()


def test_more_replicas_than_cores_run_as_many_requests_at_once():
    size, count = pool().size, core_budget() + 2
    replicas, backend = held(n=count)
    futures = [replicas.submit(row(k)) for k in range(count + 1)]
    wait_until(lambda: len(backend.shapes) == count)
    assert (replicas.counts.running, replicas.counts.queued) == (count, 1)
    backend.opened.set()
    for k, future in enumerate(futures):
        check(future, k)
    replicas.close()
    assert pool().size == size  # that of other sessions


def test_request_run_here_runs_on_the_calling_thread_in_its_turn():
    replicas, backend = held(n=1, queue=2)
    first = replicas.submit(row(1))
    wait_until(lambda: len(backend.shapes) == 1)
    with ThreadPoolExecutor(1) as threads:
        second = threads.submit(replicas.run_here, row(2))
        wait_until(lambda: replicas.counts.queued == 1)
        told: list[Exception] = []
        with pytest.raises(ps.DeadlineExceeded):
            replicas.run_here(row(3), timeout=0.3, told=Told(told.append))
        wait_until(lambda: told)  # by the thread of deadlines, which may have ended the wait first
        assert [type(error) for error in told] == [ps.DeadlineExceeded]
        third = replicas.submit(row(4))
        with pytest.raises(ps.QueueFull):
            replicas.run_here(row(5))
        assert replicas.counts.queued == 2
        backend.opened.set()
        np.testing.assert_allclose(second.result(SOON)["y"], np.sin(row(2)["x"]), rtol=1e-6)
    check(first, 1)
    check(third, 4)
    wait_until(lambda: not replicas.counts.running)
    assert (replicas.counts.succeeded, replicas.counts.failed, len(backend.shapes)) == (3, 1, 3)
    assert replicas.counts.batches == 3
    replicas.close()


def test_request_run_here_by_many_threads_is_answered_as_by_a_session():
    with ps.Replicas(model_from_text(ROWS), 2) as replicas:

        def ask(k: int) -> None:
            outputs = replicas.run_here(row(k), timeout=SOON)
            np.testing.assert_allclose(outputs["y"], np.sin(row(k)["x"]), rtol=1e-6)

        with ThreadPoolExecutor(8) as pool:
            list(pool.map(ask, range(200)))
        assert replicas.counts.succeeded == 200
        assert replicas._workers is not None
        assert replicas._workers.threads == 0


def test_request_run_here_that_fails_or_is_late_gives_its_replica_back():
    replicas, backend = held(n=1)
    backend.opened.set()
    for feeds in ({"x": np.full((1, 3), np.nan, np.float32)}, {"z": 1}):
        with pytest.raises(ps.PenstockError):
            replicas.run_here(feeds)
    backend.opened.clear()
    told: list[Exception] = []

    def late(error: Exception) -> None:
        told.append(error)
        backend.opened.set()  # of a kernel that nothing stops

    with pytest.raises(ps.DeadlineExceeded):
        replicas.run_here(row(1), timeout=0.02, told=Told(late))
    assert len(told) == 1
    check(replicas.submit(row(2)), 2)
    assert (replicas.counts.succeeded, replicas.counts.failed) == (1, 3)
    replicas.close()


def test_thread_whose_request_waits_is_told_when_replicas_are_closed():
    replicas, backend = held(n=1)
    first = replicas.submit(row(1))
    wait_until(lambda: len(backend.shapes) == 1)
    with ThreadPoolExecutor(2) as threads:
        second = threads.submit(replicas.run_here, row(2))
        wait_until(lambda: replicas.counts.queued == 1)
        closing = threads.submit(replicas.close, wait=False)
        with pytest.raises(ps.Cancelled, match="closed"):
            second.result(SOON)
        backend.opened.set()
        closing.result(SOON)
    check(first, 1)
    with pytest.raises(ps.PenstockError, match="closed"):
        replicas.run_here(row(3))


def test_observers_are_told_of_requests_run_here(tmp_path, monkeypatch):
    monkeypatch.setenv("PENSTOCK_TRACE", str(tmp_path / "trace.json"))
    with ps.Replicas(model_from_text(ROWS)) as replicas:
        replicas.run_here(row(1))
    assert "Sin" in (tmp_path / "trace.json").read_text()


def test_replica_that_calls_its_own_replicas_is_refused():
    errors: list[BaseException] = []

    class Calling(NumpyBackend):
        name = "calling"

        def kernel(self, node: Any, types: Any) -> Kernel | None:
            return Kernel(self.sine) if node.op.name == "Sin" else super().kernel(node, types)

        def sine(self, x: np.ndarray) -> np.ndarray:
            try:
                replicas.run_here(row(1))
            except ps.PenstockError as error:
                errors.append(error)
            return np.sin(x)

    replicas = ps.Replicas(model_from_text(ROWS), backends=[Calling()])
    np.testing.assert_allclose(replicas.run_here(row(2))["y"], np.sin(row(2)["x"]), rtol=1e-6)
    assert "must not call its replicas" in str(errors[0])
    replicas.close()


def test_threads_of_replicas_end_with_them():
    def threads() -> set[threading.Thread]:
        return {t for t in threading.enumerate() if t.name.startswith("penstock-replicas")}

    for closed in (True, False):
        before = threads()  # those of earlier tests may end meanwhile
        replicas, backend = held(n=2)
        backend.opened.set()
        check(replicas.submit(row(1)), 1)
        own = threads() - before
        assert own
        if closed:
            replicas.close()
        del replicas
        gc.collect()
        wait_until(lambda own=own: own.isdisjoint(threads()))


def test_requests_that_wait_run_as_one_batch():
    replicas, backend = held(max_batch=8)
    first = replicas.submit(row(0))
    wait_until(lambda: backend.shapes == [(1, 3)])
    sizes = (1, 3, 2, 4, 1)
    futures = [replicas.submit(row(k, rows)) for k, rows in enumerate(sizes)]
    backend.opened.set()
    check(first, 0)
    for k, (future, rows) in enumerate(zip(futures, sizes, strict=True)):
        check(future, k, rows)
    replicas.close()
    # 4 rows do not fit behind 1 + 3 + 2, the last one does.
    assert backend.shapes == [(1, 3), (7, 3), (4, 3)]


def test_requests_of_other_shapes_dtypes_and_fetches_run_apart():
    text = "g (float[N, M] x) => (float[N, M] y, float[N, M] z) { y = Sin(x) z = Neg(x) }"
    sample = {"x": np.ones((1, 3), np.float32)}
    replicas, backend = held(text, max_batch=8, sample=sample)
    blocker = replicas.submit(row(0))
    wait_until(lambda: len(backend.shapes) == 1)
    wide = {"x": np.ones((1, 5), np.float32)}
    futures = [replicas.submit(feeds) for feeds in (row(1), wide, row(2), wide)]
    negated = [replicas.submit(row(k), ["z"]) for k in (1, 2)]
    backend.opened.set()
    blocker.result(SOON)
    check(futures[0], 1)
    check(futures[2], 2)
    assert [futures[k].result(SOON)["y"].shape for k in (1, 3)] == [(1, 5), (1, 5)]
    assert [f.result(SOON)["z"][0, 0] for f in negated] == [-1, -2]
    replicas.close()
    assert backend.shapes == [(1, 3), (2, 3), (2, 5)]
    assert replicas.counts.batches == 4


def test_batch_waits_for_others_until_its_delay_or_until_it_is_full():
    replicas, backend = held(max_batch=2, max_delay=SOON)
    backend.opened.set()
    first = replicas.submit(row(1))
    assert replicas.counts.queued == 1
    check(replicas.submit(row(2)), 2)
    check(first, 1)
    assert backend.shapes == [(2, 3)]
    late, _ = held(max_batch=2, max_delay=0.01)
    late.session.options.backends[0].opened.set()
    check(late.submit(row(3)), 3)
    last = replicas.submit(row(4))
    replicas.close()  # waits for no others
    check(last, 4)
    late.close()


def test_error_of_one_request_is_not_that_of_the_others_in_its_batch():
    replicas, backend = held(max_batch=8)
    blocker = replicas.submit(row(0))
    wait_until(lambda: len(backend.shapes) == 1)
    futures = [replicas.submit(row(k)) for k in (1, np.nan, 3)]
    backend.opened.set()
    check(blocker, 0)
    check(futures[0], 1)
    check(futures[2], 3)
    with pytest.raises(ps.RunError, match="not a number"):
        futures[1].result(SOON)
    replicas.close()
    counts = replicas.counts
    assert (counts.succeeded, counts.failed, counts.running) == (3, 1, 0)


@pytest.mark.parametrize("max_batch", [1, 8])
def test_request_ends_at_its_deadline_or_when_it_is_cancelled_wherever_it_is(max_batch):
    replicas, backend = held(max_batch=max_batch)
    running = replicas.submit(row(0), timeout=0.05)
    wait_until(lambda: len(backend.shapes) == 1)
    token = ps.CancelToken()
    late = replicas.submit(row(1), timeout=0.05)
    cancelled, dropped = replicas.submit(row(2), cancel=token), replicas.submit(row(3))
    others = [replicas.submit(row(k)) for k in (4, 5)]
    token.cancel()
    assert dropped.cancel()
    for future, error in ((running, ps.DeadlineExceeded), (late, ps.DeadlineExceeded)):
        with pytest.raises(error):
            future.result(SOON)
    with pytest.raises(ps.Cancelled):
        cancelled.result(SOON)
    assert replicas.counts.queued == 2
    backend.opened.set()
    for k, future in zip((4, 5), others, strict=True):
        check(future, k)
    replicas.close()
    assert sum(shape[0] for shape in backend.shapes) == 3
    assert replicas.counts.failed == 4


def test_request_in_a_batch_ends_at_its_deadline_and_the_others_go_on():
    replicas, backend = held(max_batch=2, max_delay=SOON)
    late, other = replicas.submit(row(1), timeout=0.2), replicas.submit(row(2))
    wait_until(lambda: backend.shapes == [(2, 3)])
    with pytest.raises(ps.DeadlineExceeded):
        late.result(SOON)
    backend.opened.set()
    check(other, 2)
    replicas.close()


def test_close_without_waiting_cancels_what_has_not_begun():
    replicas, backend = held()
    running, queued = replicas.submit(row(0)), replicas.submit(row(1))
    wait_until(lambda: len(backend.shapes) == 1)
    closer = threading.Thread(target=replicas.close, kwargs={"wait": False})
    closer.start()
    with pytest.raises(ps.Cancelled, match="closed"):
        queued.result(SOON)
    backend.opened.set()
    check(running, 0)
    closer.join(SOON)
    with pytest.raises(ps.PenstockError, match="closed"):
        replicas.submit(row(2))
    with pytest.raises(ps.PenstockError, match="closed"):
        replicas.session.run(row(2))


def test_arun_is_cancelled_with_its_task():
    replicas, backend = held()

    async def main() -> None:
        task = asyncio.ensure_future(replicas.arun(row(1)))
        await asyncio.to_thread(wait_until, lambda: bool(backend.shapes))
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        backend.opened.set()
        outputs = await replicas.arun(row(2))
        np.testing.assert_allclose(outputs["y"], np.sin(row(2)["x"]), rtol=1e-6)

    asyncio.run(main())
    replicas.close()


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (
            "(float[N, 3] x) => (float[N, 3] y) { y = Softmax<axis = 0>(x) }",
            "depends on other rows",
        ),
        ("(float[N, 3] x) => (float[3, N] y) { y = Transpose(x) }", "depends on other rows"),
        (
            "(float[N, 3] x) => (float y) { y = ReduceSum<keepdims = 0>(x) }",
            "depends on other rows",
        ),
        (
            "(float[2, 3] x) => (float[2, 3] y) { y = Sin(x) }",
            "first dim of input .* must be dynamic",
        ),
        ("(float x) => (float y) { y = Sin(x) }", "first dim of input .* must be dynamic"),
        ("(float[N, M] x) => (float[N, M] y) { y = Sin(x) }", "give an example request as sample="),
        (
            "(float[N, 3] x) => (float[2, 3] y) { y = Reshape(x, s) }",
            "give an example request as sample=",
        ),
    ],
)
def test_model_whose_rows_cannot_be_joined_has_no_batches(body, reason):
    body = body.replace("{ y = Reshape", "<int64[2] s = {2, 3}> { y = Reshape")
    with pytest.raises(ValueError, match=reason):
        ps.Replicas(model_from_text(f"g {body}"), max_batch=4)
    ps.Replicas(model_from_text(f"g {body}")).close()


def test_model_with_variables_has_no_replicas():
    b = Builder()
    handle = b.node("VarHandleOp", name="v", dtype=Type("float32"), shape=Shape([]))
    b.node("AssignVariableOp", handle, b.placeholder("x", "float32"), dtype=Type("float32"))
    with pytest.raises(ValueError, match="variables"):
        ps.Replicas(b.bytes())


def test_wrong_options_of_replicas_are_refused():
    model = model_from_text(ROWS)
    for error, options in (
        (ValueError, {"n": 0}),
        (ValueError, {"queue": 0}),
        (TypeError, {"max_batch": 1.5}),
    ):
        with pytest.raises(error, match="a whole number"):
            ps.Replicas(model, **options)
    with pytest.raises(TypeError, match="max_delay=-1"):
        ps.Replicas(model, max_delay=-1)
    with pytest.raises(TypeError, match="a session is already compiled"):
        ps.Replicas(compile_text(ROWS), threads=1)
    replicas = ps.Replicas(model, max_batch=2)
    two = {"x": np.ones((2, 3), np.float32), "i": np.arange(3)}
    with pytest.raises(ps.InvalidInput, match="same number of rows"):
        ps.Replicas(model_from_text(TWO), max_batch=4).submit(two)
    with pytest.raises(ps.InvalidInput, match="no such value"):
        replicas.run({"z": two["x"]})


def test_dropped_replicas_and_requests_leave_nothing_behind():
    gc.disable()
    try:
        replicas = ps.Replicas(model_from_text(ROWS), max_batch=2)
        future = replicas.submit(row(1), timeout=SOON, cancel=ps.CancelToken())
        future.result(SOON)
        failed = replicas.submit({"x": np.ones((1, 4), np.float32)})
        with pytest.raises(ps.PenstockError):
            failed.result(SOON)
        references = [weakref.ref(each) for each in (replicas, replicas.session, future)]
        replicas.close()
        del replicas, future, failed
        wait_until(lambda: not any(reference() for reference in references))
    finally:
        gc.enable()


def test_representation_has_model_and_load():
    with ps.Replicas(model_from_text(ROWS)) as served:
        assert (
            repr(served) == "Replicas('g', 1, max_batch=1: 0 requests run, 0 of at most 128 wait)"
        )


@pytest.mark.parametrize("max_batch", [1, 8])
@pytest.mark.parametrize("here", [False, True])
def test_histograms_split_waiting_from_computing(monkeypatch, max_batch, here):
    clock = [100.0]
    for module in ("replicas", "replica_queue", "request_records"):
        monkeypatch.setattr(f"penstock.serving.{module}.monotonic", lambda: clock[0])
    replicas, backend = held(max_batch=max_batch)
    run = replicas.run_here if here else replicas.run
    with ThreadPoolExecutor(3) as threads:
        threads.submit(run, row(0))
        wait_until(lambda: len(backend.shapes) == 1)
        second = threads.submit(run, row(1, rows=2))
        wait_until(lambda: replicas.counts.queued == 1)
        third = threads.submit(run, row(2))
        wait_until(lambda: replicas.counts.queued == 2)
        clock[0] += 4.0
        assert replicas.histograms.queue_seconds.count == 1
        backend.opened.set()
        for future in (second, third):
            future.result(SOON)
    replicas.close()
    histograms = replicas.histograms
    assert (histograms.queue_seconds.count, histograms.queue_seconds.total) == (3, 8.0)
    assert (histograms.compute_seconds.count, histograms.compute_seconds.total) == (3, 4.0)
    # Of 1 and of 2 + 1 rows; without batches a request counts as one row.
    assert histograms.batch_rows.cumulative()[:3] == ([3, 3, 3] if max_batch == 1 else [1, 1, 2])
