"""Parts of a run on several devices end together."""

from __future__ import annotations

import gc
import queue
import threading

import numpy as np
import pytest

import penstock as ps
from penstock.backends.numpy import NumpyBackend
from penstock.executors.frames.barrier import Barrier
from penstock.executors.frames.rendezvous import Rendezvous
from penstock.executors.frames.run import FramesRun
from penstock.ir.kernel import asynchronous
from tests.executors.conformance import Recorder
from tests.executors.frames.test_partitioned import Unknown, endless, parted
from tests.support.tf_cases import cases, feeds
from tests.support.tf_graphs import Builder
from tests.support.tf_loops import INT, Names, add, const, counting, enter, while_loop
from tests.support.timing import SOON, wait_until


@pytest.mark.parametrize("way", ["deadline", "token"])
def test_endless_loop_across_devices_can_be_stopped(way):
    source, total = endless()
    session = ps.compile(source, "frames", [Unknown()], devices=2)
    assert session.run({"n": np.int32(4)}, [total], timeout=SOON)[total] == 6  # compiled now
    assert parted(session)
    token = ps.CancelToken()
    timer = threading.Timer(0.05, token.cancel)
    if way == "token":
        timer.start()
    timeout = 0.05 if way == "deadline" else None
    with pytest.raises(ps.DeadlineExceeded if way == "deadline" else ps.Cancelled, match="run"):
        session.run({"n": np.int32(2**31 - 1)}, [total], timeout=timeout, cancel=token)
    assert session.run({"n": np.int32(4)}, [total], timeout=SOON)[total] == 6


def test_first_error_of_a_part_ends_all_and_is_raised():
    (case,) = [case for case in cases() if case.name == "dev_while_error"]
    session = ps.compile(case.path, "frames", [Unknown()], devices=2)
    run = next(run for run in case.runs if "error" in run["expect"])
    for _ in range(20):
        with pytest.raises(ps.RunError, match="floordiv") as caught:
            session.run(feeds(run), run["fetches"], run["targets"], timeout=SOON)
        assert not isinstance(caught.value, ps.Cancelled)


def test_error_in_another_part_ends_an_independent_loop():
    """The other device has an endless loop of its own."""
    b = Builder()
    n = b.placeholder("n", "int32")
    total = counting(b, n)
    for node in b.proto.node:
        node.device = "/cpu:1"
    bad = add(b, n, b.const(np.int32(0)), op="FloorDiv")
    session = ps.compile(b.bytes(), "frames", [Unknown()], devices=2)
    with pytest.raises(ps.RunError, match=bad):
        session.run({"n": np.int32(2**31 - 1)}, [total, bad], timeout=SOON)


def test_run_ends_after_its_last_part():
    """The run still waits although all fetched values were computed before."""
    asked: queue.Queue = queue.Queue()

    class Asking(NumpyBackend):
        def kernel(self, node, types):
            if node.op.name != "Neg":
                return super().kernel(node, types)
            return asynchronous(lambda done, x: asked.put((done, x)))

    b = Builder()
    x = b.placeholder("x", "int32")
    y = add(b, x, x)
    slow = b.node("Neg", x, T=INT)
    b.proto.node[-1].device = "/cpu:1"
    session = ps.compile(b.bytes(), "frames", [Asking()], devices=2)
    seen = Recorder()
    future = session.submit({"x": np.int32(3)}, [y], [slow], observers=[seen])
    done, value = asked.get(timeout=SOON)
    wait_until(lambda: y in seen.ended)
    assert not future.done()
    done(-value)
    assert future.result(SOON)[y] == 6
    assert seen.ended[slow] == 1
    # A part that is stopped meanwhile does not wait.
    with pytest.raises(ps.DeadlineExceeded):
        session.run({"x": np.int32(3)}, [y], [slow], timeout=0.02)


def test_value_that_is_never_sent_does_not_block_the_run():
    """A value that exists only in the first iteration, on a device other than its reader's."""
    b = Builder()
    n = b.placeholder("n", "int32")
    once = enter(b, "loop", n, 10)
    limit = enter(b, "loop", n, 10, True)

    def body(values: Names) -> Names:
        add(b, add(b, once, once), values[0])
        return [add(b, values[0], const(b, 1, values[0]))]

    (ended,) = while_loop(
        b, "loop", [b.const(np.int32(0))], lambda v: b.node("Less", v[0], limit, T=INT), body
    )
    reader = b.proto.node[[node.name for node in b.proto.node].index("loop/next0") - 3]
    reader.device = "/cpu:1"
    session = ps.compile(b.bytes(), "frames", [Unknown()], devices=2)
    assert session.run({"n": np.int32(4)}, [ended], [reader.name], timeout=SOON)[ended] == 4
    assert parted(session)


def test_concurrent_runs_have_a_rendezvous_each():
    source, total = endless()
    session = ps.compile(source, "frames", [Unknown()], devices=2)
    futures = [(n, session.submit({"n": np.int32(n)}, [total])) for n in range(40)]
    for n, future in futures:
        assert future.result(SOON)[total] == n * (n - 1) // 2


def test_ended_run_leaves_no_objects_behind():
    source, total = endless()
    session = ps.compile(source, "frames", [Unknown()], devices=2)
    session.run({"n": np.int32(3)}, [total])
    gc.collect()
    gc.disable()
    try:
        for _ in range(3):
            session.run({"n": np.int32(5)}, [total])
            session.submit({"n": np.int32(5)}, [total]).result(SOON)
        kinds = FramesRun | Barrier | Rendezvous
        wait_until(lambda: not any(issubclass(type(x), kinds) for x in gc.get_objects()))
    finally:
        gc.enable()
