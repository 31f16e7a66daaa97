"""``Session.stream``: values of a run, also inside loops, while the run continues."""

from __future__ import annotations

import asyncio
import gc
import threading

import numpy as np
import pytest
from examples import tf_loop

import penstock as ps
from penstock.core.errors import InvalidInput
from penstock.host.thread_share import _process
from penstock.host.threads import pool
from tests.support.onnx_text import compile_text
from tests.support.timing import SOON, wait_until

LOOP = """g (int64 n, float[3] x) => (float[3] y, float[K, 3] rows) {
    t = Constant<value = bool {1}> () one = Constant<value = float {1}> ()
    y, rows = Loop (n, t, x) <body = b (int64 i, bool c, float[3] s) => (bool c2, float[3] s2, float[3] r) {
        c2 = Identity(c) s2 = Add(s, one) r = Mul(s2, s2) }> z = Neg(y) }"""
EXECUTORS = ["linear", "dataflow", "parallel", "streams", "frames", "interpret"]
FEW = {"n": np.int64(5), "x": np.zeros(3, np.float32)}
MANY = {**FEW, "n": np.int64(10**9)}


def pairs(values: object) -> list[tuple[str, object]]:
    return [(name, np.asarray(value).tolist()) for name, value in values]


@pytest.mark.parametrize("executor", EXECUTORS)
def test_values_of_the_body_of_a_loop_come_in_each_iteration(executor):
    session = compile_text(LOOP, executor=executor)
    with session.stream(FEW, ["i", "s2"]) as values:
        found = pairs(values)
        outputs = values.result(SOON)
    assert [value for name, value in found if name == "i"] == [0, 1, 2, 3, 4]
    assert [value for name, value in found if name == "s2"] == [[k] * 3 for k in range(1, 6)]
    assert outputs["y"].tolist() == [5, 5, 5]
    np.testing.assert_array_equal(outputs["rows"][:, 0], [1, 4, 9, 16, 25])
    assert session.run(FEW)["y"].tolist() == [5, 5, 5]


def test_values_stay_as_they_were_though_the_run_goes_on():
    session = compile_text(LOOP)
    values = [value for _, value in session.stream(FEW, ["s2"], ahead=1)]
    assert [value.tolist() for value in values] == [[k] * 3 for k in range(1, 6)]
    assert len({id(value) for value in values}) == 5


@pytest.mark.parametrize("executor", ["auto", "frames"])
def test_values_of_tensorflow_s_loops_come_in_each_iteration(executor, tmp_path):
    path = tmp_path / "collatz.pbtxt"
    path.write_text(tf_loop.collatz())
    session = ps.compile(path, executor=executor, cache=False)
    values = session.stream({"n": np.int32(6)}, ["either"])
    assert [int(value) for _, value in values] == [3, 10, 5, 16, 8, 4, 2, 1]
    assert int(values.result(SOON)["steps:0"]) == 8


def test_values_of_branches_scans_and_nested_loops_come_as_often_as_they_are_computed():
    text = """g (float[4, 2] x, int64 n) => (float[2] y, float[4, 2] rows) {
        t = Constant<value = bool {1}> () zero = Constant<value = float {0}> ()
        first = Constant<value = float[2] {0, 0}> ()
        y, rows = Scan(first, x) <num_scan_inputs = 1, body = b (float[2] s, float[2] e) =>
            (float[2] s2, float[2] r) { s2 = Add(s, e)
                m = ReduceSum<keepdims = 0>(e) more = Greater(m, zero)
                r = If(more) <then_branch = p () => (float[2] u) { u = Neg(s2) },
                              else_branch = q () => (float[2] w) {
                    w = Loop(n, t, s2) <body = l (int64 i, bool c, float[2] a) => (bool c2, float[2] a2) {
                        c2 = Identity(c) a2 = Add(a, a) }> }> }> }"""
    x = np.float32([[1, 1], [-1, -2], [3, 3], [-4, 0]])
    session = compile_text(text)
    values = session.stream({"x": x, "n": np.int64(2)}, ["u", "a2", "y"])
    names = [name for name, _ in values]
    assert names == ["u", "a2", "a2", "u", "a2", "a2", "y"]


def test_run_waits_until_values_are_read():
    session = compile_text(LOOP)
    values = session.stream(MANY, ["i"], ahead=3)
    channel = values._channel
    wait_until(channel.queue.full)
    assert [int(next(values)[1]) for _ in range(10)] == list(range(10))
    values.close()
    with pytest.raises(ps.Cancelled):
        values.result(SOON)
    assert list(values) == []


@pytest.mark.parametrize("executor", EXECUTORS)
def test_streams_that_nobody_reads_leave_workers_and_threads_to_others(executor):
    session, workers = compile_text(LOOP, executor=executor), pool()
    streams = [session.stream(MANY, ["i"], ahead=1) for _ in range(2 * workers.size + 1)]
    for values in streams:
        wait_until(values._channel.queue.full)
    assert session.submit(FEW).result(SOON)["y"].tolist() == [5, 5, 5]
    assert asyncio.run(session.arun(FEW))["y"].tolist() == [5, 5, 5]
    wait_until(lambda: not _process.running)
    for values in streams:
        values.close()
        with pytest.raises(ps.Cancelled):
            values.result(SOON)
    most = workers._most
    wait_until(lambda: workers.threads <= most and workers._outside == 0)


def test_streams_of_one_event_loop_wait_on_no_thread():
    session = compile_text(LOOP)

    async def read() -> int:
        # More streams than asyncio has threads, and none of them ever has a value.
        streams = [session.stream(MANY, ["y"]) for _ in range(40)]
        tasks = [asyncio.create_task(anext(values)) for values in streams]
        await asyncio.to_thread(int)  # meanwhile the others begin to wait
        found = await asyncio.to_thread(lambda: 1)
        for values in streams:
            values.close()
        await asyncio.gather(*tasks, return_exceptions=True)
        return found

    assert asyncio.run(asyncio.wait_for(read(), SOON)) == 1


@pytest.mark.parametrize("way", ["submit", "arun", "stream", "run", "run_async"])
def test_run_without_any_time_ends_with_deadline_exceeded(way):
    session, ended = compile_text(LOOP), threading.Event()
    told: list[BaseException | None] = []
    with pytest.raises(ps.DeadlineExceeded):
        if way == "arun":
            asyncio.run(session.arun(FEW, timeout=0))
        elif way == "stream":
            list(session.stream(FEW, ["i"], timeout=0))
        elif way == "submit":
            session.submit(FEW, timeout=0).result(SOON)
        elif way == "run":
            session.run(FEW, timeout=0)
        else:
            session.run_async(lambda _, error: (told.append(error), ended.set()), FEW, timeout=0)
            assert ended.wait(SOON)
            raise told[0]


def test_run_ends_when_nobody_can_read_its_values():
    session = compile_text(LOOP)
    values = session.stream(MANY, ["i"], ahead=2)
    future = values._future
    next(values)
    del values
    gc.collect()
    with pytest.raises(ps.Cancelled):
        future.result(SOON)


@pytest.mark.parametrize("way", ["token", "timeout", "with"])
def test_run_can_be_ended(way):
    session, token = compile_text(LOOP), ps.CancelToken()
    timeout = 0.05 if way == "timeout" else SOON
    values = session.stream(MANY, ["i"], cancel=token, timeout=timeout)
    if way == "with":
        with values:
            next(values)
        with pytest.raises(ps.Cancelled):
            values.result(SOON)
        return
    if way == "token":
        token.cancel()
    with pytest.raises(ps.Cancelled if way == "token" else ps.DeadlineExceeded):
        for _ in values:
            pass


def test_outputs_may_be_asked_for_without_reading_values():
    session = compile_text(LOOP)
    values = session.stream({**FEW, "n": np.int64(500)}, ["i"], ahead=1)
    assert values.result(SOON)["y"].tolist() == [500, 500, 500]
    assert list(values) == []


def test_error_of_the_run_comes_behind_its_values():
    text = """g (int64[K] k, float[4] x) => (float y) { t = Constant<value = bool {1}> ()
        n = Size(k) zero = Constant<value = float {0}> ()
        y = Loop(n, t, zero) <body = b (int64 i, bool c, float s) => (bool c2, float s2) {
            c2 = Identity(c) j = Gather(k, i) e = Gather(x, j) s2 = Add(s, e) }> }"""
    session = compile_text(text)
    feeds = {"k": np.array([1, 2, 9]), "x": np.ones(4, np.float32)}
    values, found = session.stream(feeds, ["s2"]), []
    with pytest.raises(ps.RunError, match="Gather"):
        for _, value in values:
            found.append(float(value))
    assert found == [1, 2]


def test_stream_is_an_asynchronous_iterator():
    session = compile_text(LOOP)

    async def read() -> list[int]:
        found = [int(i) async for _, i in session.stream(FEW, ["i"])]
        endless = session.stream(MANY, ["rows"])
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(anext(endless), 0.02)
        with pytest.raises(ps.Cancelled):
            endless.result(SOON)
        return found

    assert asyncio.run(read()) == [0, 1, 2, 3, 4]


def test_streams_at_the_same_time_do_not_mix():
    session, found = compile_text(LOOP), {}

    def read(k: int) -> None:
        feeds = {"n": np.int64(50), "x": np.full(3, 100 * k, np.float32)}
        found[k] = [value[0] for _, value in session.stream(feeds, ["s2"], ahead=2)]

    threads = [threading.Thread(target=read, args=(k,)) for k in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(SOON)
    assert found == {k: [100 * k + i for i in range(1, 51)] for k in range(6)}


def test_wrong_feeds_and_closed_sessions_are_refused_at_once():
    session = compile_text(LOOP)
    with pytest.raises(InvalidInput):
        session.stream({"n": np.int64(2)}, ["s2"])
    with pytest.raises(InvalidInput):
        session.stream({**FEW, "x": np.zeros(4, np.float32)}, ["s2"]).result(SOON)
    with pytest.raises(ValueError, match="ahead"):
        session.stream(FEW, ["s2"], ahead=0)
    session.close()
    with pytest.raises(ps.PenstockError, match="closed"):
        session.stream(FEW, ["s2"])
