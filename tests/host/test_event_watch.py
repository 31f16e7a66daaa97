"""The thread that watches events."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable
from functools import partial

from penstock.host.event_watch import EventWatch
from tests.support.timing import SOON, wait_until


class Event:
    """An event that comes when ``come`` is called; ``asked`` on which threads."""

    def __init__(self, watch: EventWatch, function: Callable[[], object]) -> None:
        self.here = False
        self.asked: list[threading.Thread] = []
        watch.add(self.query, function)

    def query(self) -> bool:
        self.asked.append(threading.current_thread())
        return self.here


def test_functions_are_called_in_the_order_in_which_events_come() -> None:
    watch, called, done = EventWatch(), [], threading.Semaphore(0)

    def note(i: int) -> None:
        called.append(i)
        done.release()

    events = [Event(watch, partial(note, i)) for i in range(5)]
    for i in (3, 0, 4, 1, 2):
        events[i].here = True
        assert done.acquire(timeout=SOON)
    assert called == [3, 0, 4, 1, 2]
    assert {thread for event in events for thread in event.asked} == {watch.thread}


def test_event_that_has_failed_has_come() -> None:
    watch, called = EventWatch(), threading.Event()

    def query() -> bool:
        raise RuntimeError("the device is lost")

    watch.add(query, called.set)
    assert called.wait(SOON)


def test_function_that_raises_is_reported_and_others_go_on(monkeypatch) -> None:
    watch, called, reported = EventWatch(), threading.Event(), []
    monkeypatch.setattr(threading, "excepthook", lambda args: reported.append(args.exc_type))
    watch.add(lambda: True, lambda: 1 / 0)
    watch.add(lambda: bool(reported), called.set)
    assert called.wait(SOON)
    assert reported == [ZeroDivisionError]


def test_thread_is_started_for_the_first_event_and_forgets_those_that_came() -> None:
    watch, called = EventWatch(), threading.Event()
    assert watch.thread is None
    first = Event(watch, called.set)
    first.here = True
    assert called.wait(SOON)
    asked = len(first.asked)
    again = threading.Event()
    second = Event(watch, again.set)
    wait_until(lambda: len(second.asked) > 3)
    second.here = True
    assert again.wait(SOON)
    assert len(first.asked) == asked


def test_thread_keeps_nothing_alive_that_it_has_called() -> None:
    watch, called = EventWatch(), threading.Event()

    class Run:
        def resume(self) -> None:
            called.set()

    run = Run()
    watch.add(lambda: True, run.resume)
    assert called.wait(SOON)
    kept = weakref.ref(run)
    del run
    wait_until(lambda: gc.collect() >= 0 and kept() is None)
