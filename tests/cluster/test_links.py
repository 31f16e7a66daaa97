"""Links: messages are written at once where the reader has taken those before, and stay in order."""

from __future__ import annotations

import socket
import sys
import threading
from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import penstock as ps
from penstock.build import GraphBuilder
from penstock.cluster import links
from penstock.cluster.doorbell import BellAddress
from penstock.cluster.links import Link, LinkReader, Reader
from penstock.executors.control import begin_run
from penstock.executors.frames.rendezvous import Rendezvous
from tests.support.timing import SOON, wait_until

# Those of doorbells on one machine, where it is Linux; and a stream, as between two machines.
KINDS = [*([socket.SOCK_SEQPACKET] if sys.platform == "linux" else []), socket.SOCK_STREAM]


class Held:
    """A channel that holds what is written."""

    def __init__(self) -> None:
        self.messages: list[Any] = []

    def write(self, packed: Any) -> None:
        self.messages.append(packed.message)

    def close(self) -> None:
        """Nothing waits here."""


@pytest.fixture(params=KINDS)
def link(request, monkeypatch):
    """A link to a channel that holds messages, and the end of its bell that the reader has."""
    here, there = socket.socketpair(socket.AF_UNIX, request.param)

    class HeldLink(Link):
        def _channel(self, nbytes: int) -> Held:
            self._room = nbytes
            return Held()

    # The cluster that tests share goes on meanwhile: its links have messages of several items, and the
    # thread that watches it ends it where this process has another identity.
    packed, identity, own = links._packed, links.ray_identity, threading.get_ident()
    monkeypatch.setattr(
        links, "ray_identity", lambda: ("", "") if threading.get_ident() == own else identity()
    )
    monkeypatch.setattr(
        links, "_packed", lambda message: Packed(message) if len(message) == 1 else packed(message)
    )
    made = HeldLink(Reader(None, "", BellAddress("", 0, b"", b"")), 1 << 20, here)
    yield made, there
    made.close()
    there.close()


class Packed:
    total_bytes = 1

    def __init__(self, message: Any) -> None:
        self.message = message


class Jobs:
    """In the place of the thread of a link: jobs wait until they are run."""

    def __init__(self) -> None:
        self.jobs: list[Callable[[], object]] = []

    def submit(self, job: Callable[[], object]) -> None:
        self.jobs.append(job)

    def close(self, wait: bool) -> None:
        """There is no thread."""


def test_message_whose_predecessors_were_taken_is_written_by_its_sender(link):
    made, reader = link
    for i in range(5):
        made.post((i,))
        assert made.channel.messages[-1] == (i,)
        assert reader.recv(1) == b"!"
        reader.sendall(b"!")
    assert made._poster is None


def test_message_is_not_waited_for_by_its_sender_and_none_overtakes_it(link):
    made, reader = link
    made._poster = waiting = Jobs()
    made.post((0,))
    made.post((1,))  # the first one has not been read
    assert made.channel.messages == [(0,)]
    reader.sendall(b"!")
    made.post((2,))
    assert made.channel.messages == [(0,)], "the third overtook the second"
    for job in waiting.jobs:
        job()
    assert made.channel.messages == [(0,), (1,), (2,)]
    reader.sendall(b"!")
    made.post((3,))
    assert len(waiting.jobs) == 3
    waiting.jobs[-1]()
    reader.sendall(b"!")
    reader.sendall(b"!")
    made.post((4,))
    assert made.channel.messages == [(i,) for i in range(5)]
    assert len(waiting.jobs) == 3


def test_answers_do_not_fill_the_memory_of_the_bell(link):
    made, reader = link
    for i in range(5000):
        made.send((i,))
        reader.recv(1)
        reader.send(b"!", socket.MSG_DONTWAIT)
    assert made._taken >= 4999


def test_reader_that_is_gone_lets_nobody_wait(link):
    made, reader = link
    made._poster = waiting = Jobs()
    made.send((0,))
    reader.close()
    made.post((1,))
    waiting.jobs.pop()()  # drops it
    with pytest.raises(links.LinkClosed):
        made.send((2,))


@pytest.mark.parametrize("kind", KINDS)
def test_messages_are_taken_in_order_while_one_thread_computes(kind, monkeypatch):
    writer, bell = socket.socketpair(socket.AF_UNIX, kind)
    sent: deque[int] = deque()
    taken: list[int] = []
    drains = threading.local()
    computes, goes_on = threading.Event(), threading.Event()

    class Registered:
        def ensure_registered_as_reader(self) -> None:
            """It is no channel of Ray."""

        def close(self) -> None:
            """Nothing waits here."""

    def then() -> None:
        if not hasattr(drains, "here"):  # before all messages
            drains.here = True
        elif taken and not computes.is_set():
            computes.set()
            assert goes_on.wait(SOON)

    class Reader(LinkReader):
        def _next(self) -> tuple[int]:
            return (sent.popleft(),)

    # The links of the cluster that tests share go on meanwhile, and must take their own messages.
    unpacked = links._unpacked
    monkeypatch.setattr(
        links, "_unpacked", lambda packed: packed if isinstance(packed, tuple) else unpacked(packed)
    )
    reader = Reader(Registered(), lambda message: taken.append(*message), "test", bell, then)
    answers = 0
    for i in range(500):
        sent.append(i)
        writer.sendall(b"!")
        if not i:
            assert computes.wait(SOON)
        if i % 4 == 3:  # some messages wait for others
            while answers <= i:
                answers += len(writer.recv(64))
    wait_until(lambda: len(taken) == 500)
    goes_on.set()
    assert taken == [*range(500)]
    assert answers == 500
    reader.close()
    named = "penstock-link-test-"
    wait_until(lambda: not any(t.name.startswith(named) for t in threading.enumerate()))
    writer.close()


def test_client_that_waits_for_each_run_sends_by_its_own_thread(ray_started):
    """The part on the first worker has no outputs, so that the driver is not told of its end."""
    b = GraphBuilder()
    h = b.input("x", np.float32, [1000])
    for i in range(2):
        with b.device(f"/job:worker/task:{i}"):
            h = b.op("Neg", h)
    b.output("y", h)
    x = np.arange(1000, dtype=np.float32)
    with ps.Cluster(2) as cluster:
        session = ps.compile(b.model(), cluster=cluster)
        for _ in range(20):
            np.testing.assert_array_equal(session.run({"x": x})["y"], x)
        assert [member.link._poster for member in cluster._members.members] == [None, None]


def test_outputs_of_a_part_are_not_copied_before_they_are_sent():
    b = GraphBuilder()
    b.output("y", b.op("Identity", b.input("x", np.float32, [4])))
    session = ps.compile(b.model(), executor="frames")
    x = np.ones(4, np.float32)
    assert not np.shares_memory(session.run({"x": x})["y"], x)
    ended: list[Any] = []
    control = begin_run(None, None)
    session.inspect.executor.begin([x], control, lambda *result: ended.append(result), Rendezvous())
    ((outputs, error),) = ended
    assert error is None
    assert np.shares_memory(outputs[0], x)
