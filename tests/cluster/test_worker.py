"""Workers: what they keep and forget, and errors of their kernels."""

from __future__ import annotations

import gc
import threading
from collections import Counter

import numpy as np
import pytest
import ray

import penstock as ps
from penstock.cluster.worker import _MOST_OVER, Worker
from tests.cluster.test_cluster import answer, convnet, halves, images
from tests.support.tf_graphs import Flow, Type
from tests.support.timing import SOON, wait_until


@pytest.fixture(scope="module")
def session(cluster):
    source = convnet()
    return ps.compile(source, cluster=cluster, place=halves(source))


def messages(cluster: ps.Cluster, monkeypatch) -> Counter:
    """Counts the kinds of messages that workers send to the driver, the bytes of arrays, too."""
    counts: Counter = Counter()
    take = cluster._runs.take

    def counting(worker, message):
        counts[message[0]] += 1
        if message[0] == "done":
            counts["bytes"] += sum(output.nbytes for output in message[2] or ())
        take(worker, message)

    monkeypatch.setattr(cluster._runs, "take", counting)
    return counts


def test_graph_is_sent_once(cluster, session):
    x = images(1)
    answer(session, x)
    before = cluster.sent_graph_bytes
    for _ in range(30):
        answer(session, x)
    assert cluster.sent_graph_bytes == before > 0


def test_values_between_parts_do_not_pass_the_driver(cluster, session, monkeypatch):
    x = images(4)
    y = answer(session, x)
    counts = messages(cluster, monkeypatch)
    for _ in range(10):
        answer(session, x)
    assert counts["done"] == 10
    assert counts["bytes"] == 10 * y.nbytes


def test_worker_forgets_the_parts_of_a_session_that_is_gone(cluster):
    source = convnet(2)
    session = ps.compile(source, cluster=cluster, place=halves(source))
    answer(session, images())
    handle = session.inspect.executor._handle
    actor = cluster._members.members[1].actor

    def known() -> bool:
        return ray.get(actor.__ray_call__.remote(lambda worker, h: h in worker._parts, handle))

    assert known()
    session.close()
    del session
    gc.collect()
    wait_until(lambda: not known())


def test_error_of_a_kernel_names_the_node(cluster):
    g = Flow()
    a, b = g.placeholder("a", "int32"), g.placeholder("b", "int32")
    g.node("FloorDiv", a, b, name="quotient", T=Type("int32"))
    for node in g.proto.node:
        node.device = f"/job:worker/task:{int(node.op == 'FloorDiv')}"
    session = ps.compile(g.bytes(), cluster=cluster)
    feeds = {"a": np.int32(7), "b": np.int32(0)}
    for _ in range(3):
        with pytest.raises(ps.RunError, match="quotient"):
            session.run(feeds, ["quotient:0"], timeout=SOON)
    assert session.run({**feeds, "b": np.int32(2)}, ["quotient:0"])["quotient:0"] == 3


def test_steps_that_have_ended_are_gone_through_seldom_while_an_old_one_goes_on():
    """10,000 steps are remembered; all of them, and later ones, while one of before goes on."""
    looks = 0

    class Counting(set):
        def __iter__(self):
            nonlocal looks
            looks += 1
            return super().__iter__()

    worker = Worker.__new__(Worker)
    worker._lock = threading.Lock()
    worker._steps, worker._parts, worker._oldest = {}, {}, 0
    worker._over, worker._most_over = Counting(), _MOST_OVER
    worker._step = lambda number: None  # all that matters is what is remembered
    for number in range(4 * _MOST_OVER):
        worker._over.add(number)
        worker._run(1, number, 0, (), None)
        if not isinstance(worker._over, Counting):
            assert worker._over == {*range(number + 1)}
            worker._over = Counting(worker._over)
    assert looks <= 3
    before = len(worker._over)
    for later in range(number + 1, number + 2 + before):
        worker._over.add(later)
        worker._run(1, later, later, (), None)
    assert len(worker._over) < before  # since the old one has ended
