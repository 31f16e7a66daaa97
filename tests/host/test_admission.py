"""The queue in which long runs wait while others compute on every core."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

import penstock as ps
from penstock.executors.control import NEVER, Control
from penstock.extend import Kernel, operator, same_type
from penstock.host import admission
from penstock.host.admission import AdmissionQueue
from penstock.host.thread_share import ThreadShare
from penstock.ops import registry
from tests.support.onnx_text import compile_text, model_from_text
from tests.support.processes import in_child
from tests.support.timing import SOON, wait_until

LONG = 1e6  # seconds that a run is said to take, so that none goes in out of turn


class Client:
    """A thread with one run, which is inside until ``finish``."""

    def __init__(self, queue: AdmissionQueue, control: Any = NEVER, seconds: float = LONG) -> None:
        self.pauses = 0
        self.entered, self._may_leave = threading.Event(), threading.Event()
        self.error: BaseException | None = None
        self._arguments = seconds, control
        self._queue = queue
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            with self._queue.ticket(*self._arguments):
                self.entered.set()
                self._may_leave.wait(SOON)
        except BaseException as error:
            self.error = error

    def finish(self) -> None:
        self._may_leave.set()
        self._thread.join(SOON)


def queued(queue: AdmissionQueue, count: int, **options: Any) -> list[Client]:
    """Clients that wait, in this order."""
    clients = []
    for i in range(count):
        before = queue.waiting
        clients.append(Client(queue, **options))
        wait_until(lambda before=before: queue.waiting == before + 1)
        assert not clients[i].entered.is_set()
    return clients


def test_line_lets_as_many_in_as_there_are_places_and_then_first_come_first_served():
    queue = AdmissionQueue(2)
    first, second = Client(queue), Client(queue)
    assert first.entered.wait(SOON) and second.entered.wait(SOON)
    third, fourth = queued(queue, 2)
    second.finish()
    assert third.entered.wait(SOON)
    assert (queue.inside, queue.waiting) == (2, 1)
    first.finish()
    assert fourth.entered.wait(SOON)
    third.finish()
    fourth.finish()
    assert (queue.inside, queue.waiting) == (0, 0)


def test_run_that_comes_while_others_wait_does_not_pass_them():
    queue = AdmissionQueue(1)
    first = Client(queue)
    assert first.entered.wait(SOON)
    second, third = queued(queue, 2)
    first.finish()
    assert second.entered.wait(SOON)
    fourth = Client(queue)
    wait_until(lambda: queue.waiting == 2)
    second.finish()
    assert third.entered.wait(SOON)
    assert not fourth.entered.is_set()
    third.finish()
    assert fourth.entered.wait(SOON)
    fourth.finish()


def test_run_waits_no_longer_than_it_would_have_shared_the_cores(monkeypatch):
    monkeypatch.setattr(admission, "_SLACK", 1e-3)
    queue = AdmissionQueue(1)
    long = Client(queue)
    assert long.entered.wait(SOON)
    (waiting,) = queued(queue, 1)
    with queue.ticket(0.1, NEVER):  # goes in beside the other, which never leaves
        assert (queue.inside, queue.waiting) == (2, 1)
    assert (queue.inside, queue.waiting) == (1, 1)  # it took nothing from the next in the queue
    long.finish()
    assert waiting.entered.wait(SOON)
    waiting.finish()


def test_short_run_begins_at_once_and_takes_no_ticket():
    queue = AdmissionQueue(1)
    with queue.ticket(1e-3, NEVER):
        assert queue.inside == 1  # it took the place that was free
        client = Client(queue, seconds=1e-3)
        assert client.entered.wait(SOON)
        assert (queue.inside, queue.waiting) == (1, 0)
        client.finish()
        (long,) = queued(queue, 1)
        client = Client(queue, seconds=1e-3)
        assert client.entered.wait(SOON)
        client.finish()
        assert (queue.inside, queue.waiting) == (1, 1)
    assert long.entered.wait(SOON)
    long.finish()


def test_run_inside_of_a_run_on_its_thread_does_not_wait():
    queue = AdmissionQueue(1)
    with queue.ticket(LONG, NEVER):
        with queue.ticket(LONG, NEVER), queue.ticket(LONG, NEVER):
            assert queue.inside == 1
        assert queue.inside == 1
    assert queue.inside == 0


@pytest.mark.parametrize("error", [ps.Cancelled("no"), ps.DeadlineExceeded("late")])
def test_run_that_is_stopped_while_it_waits_leaves_the_line(error):
    queue, control = AdmissionQueue(1), Control()
    first = Client(queue)
    assert first.entered.wait(SOON)
    (stopped,) = queued(queue, 1, control=control)
    control.set(error)
    stopped.finish()
    assert stopped.error is error
    assert (queue.inside, queue.waiting) == (1, 0)
    assert not control.listeners
    first.finish()
    assert queue.inside == 0


def test_run_stopped_as_it_is_let_in_gives_its_place_to_the_next():
    queue = AdmissionQueue(1)

    class Stopping(Control):
        def remove_listener(self, listener):
            raise KeyboardInterrupt

    first = Client(queue)
    assert first.entered.wait(SOON)
    (interrupted,) = queued(queue, 1, control=Stopping())
    (next_,) = queued(queue, 1)
    first.finish()
    assert next_.entered.wait(SOON)
    interrupted.finish()
    assert isinstance(interrupted.error, KeyboardInterrupt)
    next_.finish()
    assert (queue.inside, queue.waiting) == (0, 0)


def test_many_runs_never_are_more_than_the_places():
    queue, count, most = AdmissionQueue(3), [0], [0]
    lock = threading.Lock()

    def use() -> None:
        for _ in range(200):
            with queue.ticket(LONG, NEVER):
                with lock:
                    count[0] += 1
                    most[0] = max(most[0], count[0])
                with lock:
                    count[0] -= 1

    threads = [threading.Thread(target=use) for _ in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(SOON)
    assert most[0] <= 3
    assert (queue.inside, queue.waiting) == (0, 0)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_forked_child_has_an_empty_queue():
    queue = AdmissionQueue(1)
    other = Client(queue)
    assert other.entered.wait(SOON)

    def job() -> None:
        assert (queue.inside, queue.waiting) == (0, 0)
        with queue.ticket(LONG, NEVER):
            assert queue.inside == 1
        assert queue.inside == 0

    assert in_child(job)
    other.finish()
    with queue.ticket(LONG, NEVER):
        assert in_child(job)


# Cores.


class Cores:
    """Stands for the system: threads, by name, each on a core."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, count: int) -> None:
        self.all = set(range(count))
        self.core: dict[int, int] = {}
        self.allowed: list[tuple[int, set[int]]] = []
        monkeypatch.setattr(admission, "cores_of_thread", lambda: self.all)
        monkeypatch.setattr(admission, "core_of_thread", self.here)
        monkeypatch.setattr(admission, "allow", self.allow)

    def here(self) -> int:
        return self.core.get(threading.get_native_id(), 0)

    def allow(self, thread: int, cores: set[int]) -> None:
        thread = thread or threading.get_native_id()
        self.allowed.append((thread, set(cores)))
        if self.core.get(thread, 0) not in cores:
            self.core[thread] = min(cores)


def test_run_on_the_core_of_another_goes_to_a_free_one(monkeypatch):
    cores = Cores(monkeypatch, 3)
    queue = AdmissionQueue(3)
    # where the first one is, none asks: it is alone
    clients = [Client(queue)]
    for _ in range(2):
        assert clients[-1].entered.wait(SOON)
        clients.append(Client(queue))
    assert clients[-1].entered.wait(SOON)
    assert sorted(p.core for p in queue._inside.values()) == [-1, 0, 1]
    assert [where for _, where in cores.allowed] == [{1, 2}, {0, 1, 2}]
    for client in clients:
        client.finish()


def test_run_that_has_waited_begins_on_the_core_that_was_left(monkeypatch):
    cores = Cores(monkeypatch, 2)
    queue = AdmissionQueue(2)
    first = Client(queue)
    assert first.entered.wait(SOON)
    second = Client(queue)
    assert second.entered.wait(SOON)
    third, fourth = queued(queue, 2)
    first.finish()
    assert third.entered.wait(SOON)
    assert [where for _, where in cores.allowed] == [{1}, {0, 1}]
    cores.allowed.clear()
    second.finish()
    assert fourth.entered.wait(SOON)
    assert [where for _, where in cores.allowed] == [{0}, {0, 1}]
    third.finish()
    fourth.finish()


def test_thread_bound_to_other_cores_than_the_process_does_not_wait(monkeypatch):
    cores = Cores(monkeypatch, 2)
    queue = AdmissionQueue(1)
    with queue.ticket(LONG, NEVER):
        cores.all = {5}
        client = Client(queue)
        assert client.entered.wait(SOON)
        assert queue.inside == 1
        client.finish()
    assert (queue.inside, cores.allowed) == (0, [])


# Sessions.

HEAVY = "g (float[64, 64] x) => (float[64, 64] y) { a = MatMul(x, x) y = Neg(a) }"
DOMAIN = "com.example.line"
EYE = np.eye(64, dtype=np.float32)


@pytest.fixture
def queue(monkeypatch) -> Iterator[AdmissionQueue]:
    """A queue that admits one run, instead of that of the process."""
    queue = AdmissionQueue(1)
    monkeypatch.setattr(admission, "ADMISSIONS", queue)
    yield queue
    assert (queue.inside, queue.waiting) == (0, 0)


def heavy_session(seconds: float = LONG, text: str = HEAVY, **options: Any) -> ps.Session:
    """A session whose runs take ``seconds``, as it says."""
    session = compile_text(text, executor="linear", backends=["numpy"], **options)
    session(EYE)
    session.inspect.executor._core_seconds = seconds
    return session


def beside(queue: AdmissionQueue, run: Callable[[], Any]) -> threading.Thread:
    """The thread of a run that has come to wait."""
    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    wait_until(lambda: queue.waiting == 1)
    return thread


def test_long_run_of_a_session_waits_for_the_run_that_has_the_core(queue):
    session, results = heavy_session(), []
    with queue.ticket(LONG, NEVER):
        thread = beside(queue, lambda: results.append(session(EYE)))
        assert not results
    thread.join(SOON)
    assert np.array_equal(results[0], -EYE)


@pytest.mark.parametrize("way", ["timeout", "cancel"])
def test_run_of_a_session_can_be_stopped_while_it_waits(queue, way):
    session, token, errors = heavy_session(), ps.CancelToken(), []

    def run() -> None:
        try:
            session.run({"x": EYE}, timeout=0.05 if way == "timeout" else None, cancel=token)
        except ps.PenstockError as error:
            errors.append(error)

    with queue.ticket(LONG, NEVER):
        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        if way == "cancel":
            wait_until(lambda: queue.waiting == 1)
            token.cancel()
        thread.join(SOON)
    assert isinstance(errors[0], ps.DeadlineExceeded if way == "timeout" else ps.Cancelled)


def test_clients_of_long_runs_share_as_many_arenas_as_there_are_places(queue):
    session = heavy_session(text=HEAVY.replace("Neg(a)", "MatMul(a, x)"))
    assert session.inspect.executor.run_bytes > 0
    session.inspect.executor._may_wait = False  # runs leave the time that is said as it is
    together = threading.Barrier(8)

    def use() -> None:
        together.wait(SOON)
        for _ in range(20):
            session(EYE)

    threads = [threading.Thread(target=use) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(SOON)
    assert session.inspect.executor.arena_bytes == session.inspect.executor.run_bytes


@pytest.mark.parametrize("options", [{"executor": "dataflow"}, {"observed": True}, {"small": True}])
def test_runs_that_may_wait_for_others_or_are_short_do_not_wait(queue, options):
    text = HEAVY.replace("64, 64", "2, 2") if options.pop("small", False) else HEAVY
    observers = [ps.Profile()] if options.pop("observed", False) else []
    session = compile_text(text, **{"executor": "linear", "backends": ["numpy"], **options})
    x = EYE if text is HEAVY else EYE[:2, :2]
    with queue.ticket(LONG, NEVER):
        for _ in range(3):
            other = threading.Thread(target=lambda: session.run({"x": x}, observers=observers))
            other.start()
            other.join(SOON)
            assert not other.is_alive()
        assert queue.inside == 1


def test_session_with_an_operation_of_a_user_does_not_wait(queue):
    @operator("Scaled", domain=DOMAIN, infer=same_type)
    def scaled(node, types):
        return Kernel(lambda x: x * np.float32(2))

    text = HEAVY.replace("Neg(a)", f"{DOMAIN}.Scaled(a)")
    try:
        session = ps.compile(
            model_from_text(text, domains={DOMAIN: 1}), executor="linear", backends=["numpy"]
        )
        with queue.ticket(LONG, NEVER):
            for _ in range(2):
                thread = threading.Thread(target=session, args=(EYE,), daemon=True)
                thread.start()
                thread.join(SOON)
                assert not thread.is_alive()
                assert session.inspect.executor._core_seconds == 0
    finally:
        registry._REGISTRY.pop((DOMAIN, "Scaled"), None)


def test_runs_about_to_begin_count_when_threads_are_divided():
    queue, share, seen = AdmissionQueue(1), ThreadShare([], 1, 2), []

    class Asking(Control):
        def remove_listener(self, listener):  # woken, and not yet inside of its share
            with share as threads:
                seen.append(threads)

    first = Client(queue)
    assert first.entered.wait(SOON)
    (second,) = queued(queue, 1, control=Asking())
    with share as threads:
        assert threads == 2
    first.finish()
    assert second.entered.wait(SOON)
    assert seen == [1]
    with share as threads:
        assert threads == 2
    second.finish()


# Priorities.


class Worker(Client):
    """A client that looks whether to stop or pause, until it may leave."""

    def __init__(self, queue: AdmissionQueue, priority: int, seconds: float = LONG) -> None:
        self.control = Control()
        self.control.priority = priority
        super().__init__(queue, self.control, seconds)

    def _run(self) -> None:
        try:
            with self._queue.ticket(*self._arguments) as self.ticket:
                self.entered.set()
                while not self._may_leave.wait(1e-3):
                    if self.control.stopped:
                        self.entered.clear()
                        self.control.stop()
                        self.entered.set()
                        self.pauses += 1
        except BaseException as error:
            self.error = error


def test_runs_of_a_lower_priority_pause_for_one_of_a_higher():
    queue = AdmissionQueue(2)
    queue.ranked = True
    low = [Worker(queue, 0), Worker(queue, 0)]
    again = [Worker(AdmissionQueue(1), 0)]
    for client in (*low, *again):
        assert client.entered.wait(SOON)
    high = Worker(queue, 3)
    assert high.entered.wait(SOON)
    wait_until(lambda: not any(client.entered.is_set() for client in low))
    assert (queue.inside, queue.waiting) == (1, 2)
    high.finish()
    assert all(client.entered.wait(SOON) for client in low)
    wait_until(lambda: [client.pauses for client in low] == [1, 1])
    for client in (*low, *again):
        client.finish()
        assert client.error is None
    assert (queue.inside, queue.waiting, again[0].pauses) == (0, 0, 0)


def test_run_of_a_lower_priority_waits_while_one_of_a_higher_computes():
    queue = AdmissionQueue(2)
    high = Worker(queue, 1)
    assert high.entered.wait(SOON)
    low = Worker(queue, 0)
    wait_until(lambda: queue.waiting == 1)
    other = Worker(queue, 1)
    assert other.entered.wait(SOON) and not low.entered.is_set()
    high.finish()
    assert not low.entered.is_set()
    other.finish()
    assert low.entered.wait(SOON)
    low.finish()


def test_run_that_has_waited_for_long_goes_on_and_pauses_no_more(monkeypatch):
    monkeypatch.setattr(admission, "_PATIENCE", 1)
    queue = AdmissionQueue(1)
    queue.ranked = True
    low = Worker(queue, 0, seconds=0.02)
    assert low.entered.wait(SOON)
    high = Worker(queue, 1)
    assert high.entered.wait(SOON)
    wait_until(lambda: low.pauses == 1)  # it has come back beside the other
    assert (queue.inside, queue.waiting) == (2, 0) and not low.ticket.may_pause
    another = Worker(queue, 2)
    wait_until(lambda: another.entered.is_set())
    assert low.entered.is_set()
    for client in (another, low, high):
        client.finish()
        assert client.error is None


def test_run_that_pauses_can_be_stopped():
    queue = AdmissionQueue(1)
    queue.ranked = True
    low = Worker(queue, 0)
    assert low.entered.wait(SOON)
    high = Worker(queue, 1)
    assert high.entered.wait(SOON)
    wait_until(lambda: queue.waiting == 1)
    low.control.set(ps.Cancelled("now"))
    low.finish()
    assert isinstance(low.error, ps.Cancelled) and queue.waiting == 0
    high.finish()


def test_control_that_is_stopped_does_not_pause():
    control, paused = Control(), []
    control.ask_to_pause(lambda: paused.append(1))
    assert control.stopped
    control.stop()
    assert paused == [1] and not control.stopped
    control.ask_to_pause(lambda: paused.append(2))
    control.set(ps.Cancelled("first"))
    with pytest.raises(ps.Cancelled, match="first"):
        control.stop()
    with pytest.raises(ps.Cancelled, match="first"):
        control.stop()
    assert paused == [1]

    def stopped_meanwhile() -> None:
        other.set(ps.Cancelled("meanwhile"))

    other = Control()
    other.ask_to_pause(stopped_meanwhile)
    with pytest.raises(ps.Cancelled, match="meanwhile"):
        other.stop()
    assert other.late() is other.error


@pytest.mark.costly
def test_runs_of_sessions_pause_and_give_the_same_answers(queue, monkeypatch):
    monkeypatch.setattr("penstock.executors.linear.UNSEEN_RUN_S", 0.0)
    monkeypatch.setattr(admission, "SHORT_RUN_S", 0.0)
    wide = " ".join(f"v{i + 1} = MatMul(v{i}, w)" for i in range(30))
    text = f"""g (float[200, 300] v0) => (float[200, 300] y) {{
        w = Constant<value = float[300, 300] {{{", ".join(["0.003"] * 90_000)}}}> ()
        {wide} y = Neg(v30) }}"""
    low = compile_text(text, executor="linear")
    high = compile_text(text, executor="linear", priority=2)
    feeds = [{"v0": np.full((200, 300), i, np.float32)} for i in range(6)]
    expected = [low.run(feed)["y"] for feed in feeds]
    assert high.options.priority == 2
    jobs = [
        (i, session.submit(feeds[i], priority=priority))
        for turn in range(6)
        for i in range(6)
        for session, priority in ((low, None), (high, None), (low, turn % 3 - 1))
    ]
    for i, job in jobs:
        np.testing.assert_allclose(job.result(SOON)["y"], expected[i], 1e-5)
    wait_until(lambda: (queue.inside, queue.waiting) == (0, 0))
