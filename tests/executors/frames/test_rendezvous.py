"""The rendezvous: values by key, first in, first out."""

from __future__ import annotations

import threading
from collections import defaultdict

import pytest

from penstock.core.errors import Aborted
from penstock.executors.frames.rendezvous import Rendezvous, edge_key
from tests.support.timing import SOON


class Taken:
    """Records the arguments of its calls."""

    def __init__(self) -> None:
        self.calls: list[tuple[object, bool, object]] = []

    def __call__(self, value, dead, error):
        self.calls.append((value, dead, error))


def test_recv_of_a_sent_value_returns_it():
    rendezvous, taken = Rendezvous(), Taken()
    rendezvous.send("k", 1)
    rendezvous.send("k", None, True)
    assert len(rendezvous) == 2
    assert rendezvous.recv("k", taken) == (1, False)
    assert rendezvous.recv("k", taken) == (None, True)
    assert taken.calls == []
    assert len(rendezvous) == 0


def test_receivers_get_values_in_the_order_of_asking():
    rendezvous, first, second = Rendezvous(), Taken(), Taken()
    assert rendezvous.recv("k", first) is None
    assert rendezvous.recv("k", second) is None
    rendezvous.send("other", 0)
    rendezvous.send("k", 1)
    assert (first.calls, second.calls) == ([(1, False, None)], [])
    rendezvous.send("k", 2, True)
    assert second.calls == [(2, True, None)]
    assert len(rendezvous) == 1


def test_abort_reaches_waiting_and_later_calls():
    rendezvous, waits = Rendezvous(), [Taken(), Taken(), Taken()]
    for key, taken in zip("aab", waits, strict=True):
        rendezvous.recv(key, taken)
    rendezvous.send("c", 1)
    rendezvous.abort(ZeroDivisionError("no"))
    rendezvous.abort(ValueError("too late"))
    for taken in waits:
        ((value, dead, error),) = taken.calls
        assert (value, dead) == (None, False)
        assert isinstance(error, Aborted)
        assert "ZeroDivisionError" in str(error)
    with pytest.raises(Aborted, match="ZeroDivisionError"):
        rendezvous.send("a", 1)
    with pytest.raises(Aborted, match="ZeroDivisionError"):
        rendezvous.recv("c", Taken())
    assert len(rendezvous) == 0


def test_close_drops_values_and_receivers_silently():
    rendezvous, taken = Rendezvous(), Taken()
    rendezvous.recv("a", taken)
    rendezvous.send("b", 1)
    rendezvous.close()
    assert len(rendezvous) == 0
    assert taken.calls == []


def test_receiver_may_send_and_receive_again():
    rendezvous, seen = Rendezvous(), []

    def take(value, dead, error):
        seen.append(value)
        if value < 5:
            rendezvous.recv("k", take)
            rendezvous.send("k", value + 1)

    rendezvous.recv("k", take)
    rendezvous.send("k", 0)
    assert seen == [0, 1, 2, 3, 4, 5]


def test_values_of_many_threads_are_taken_once_in_order():
    #  four threads send to four keys each, four take from them
    rendezvous = Rendezvous()
    taken: dict[tuple[int, int], list[int]] = defaultdict(list)
    lock = threading.Lock()
    n = 300

    def send(sender: int) -> None:
        for i in range(n):
            for taker in range(4):
                rendezvous.send((sender, taker), i)

    def take(taker: int) -> None:
        for sender in range(4):
            for _ in range(n):
                came = threading.Event()

                def keep(value, dead, error, sender=sender, came=came):
                    with lock:
                        taken[sender, taker].append(value)
                    came.set()

                found = rendezvous.recv((sender, taker), keep)
                if found is not None:
                    keep(*found, None)
                assert came.wait(SOON)

    threads = [threading.Thread(target=f, args=(i,)) for f in (send, take) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert taken == {(i, j): list(range(n)) for i in range(4) for j in range(4)}
    assert len(rendezvous) == 0


def test_abort_during_calls_leaves_no_receiver_waiting():
    rendezvous, told = Rendezvous(), []
    begin = threading.Barrier(5)

    def ask(i: int) -> None:
        begin.wait()
        for k in range(200):
            try:
                rendezvous.recv((i, k), lambda value, dead, error: told.append(error))
            except Aborted as error:
                told.append(error)

    threads = [threading.Thread(target=ask, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    begin.wait()
    rendezvous.abort(ValueError())
    for thread in threads:
        thread.join()
    assert len(told) == 800
    assert len(rendezvous) == 0


def test_edge_key_differs_by_both_ends_and_name():
    made = {edge_key(a, b, name) for a in "AB" for b in "AB" for name in ("x:0", "^x")}
    assert len(made) == 8
