"""Locks that runs share, and calls of sessions from what interrupts a thread that holds one."""

from __future__ import annotations

import os
import threading
import weakref
from contextlib import contextmanager

import numpy as np
import pytest

import penstock as ps
from penstock.compiler import subgraphs
from penstock.executors import arenas
from penstock.host import fork, gc_pause, threads
from penstock.ops.common import constant_cache
from penstock.session import plan_cache
from tests.support.onnx_text import model_from_text
from tests.support.timing import SOON

MODEL = "g (float[2] x) => (float[2] y) { y = Neg(x) }"
X = np.ones(2, np.float32)
LOCKS = {
    "subgraphs": subgraphs._LOCK,
    "arenas": arenas._LOCK,
    "collector": gc_pause._LOCK,
    "pools": threads._LOCK,
    "constants": constant_cache._LOCK,
    "plans": plan_cache._LOCK,
}


@pytest.mark.parametrize("name", LOCKS)
def test_submit_is_refused_while_its_thread_holds_a_lock_that_workers_need(name):
    """As in a signal handler that interrupts the thread there: the worker could wait for it."""
    session = ps.compile(model_from_text(MODEL))
    session.run({"x": X})
    with LOCKS[name]:
        with pytest.raises(ps.PenstockError, match="while this thread hands work or memory"):
            session.submit({"x": X})
        np.testing.assert_array_equal(session.run({"x": X})["y"], -X)  # which needs no worker
    np.testing.assert_array_equal(session.submit({"x": X}).result(timeout=SOON)["y"], -X)


def test_locks_of_pools_are_shared():
    pool = threads.Workers("locks", 1)
    with pool._lock, pytest.raises(ps.PenstockError):
        fork.refuse_reentry()
    fork.refuse_reentry()


@contextmanager
def held_by_another_thread(lock):
    held, end = threading.Event(), threading.Event()

    def hold():
        with lock:
            held.set()
            end.wait(SOON)

    thread = threading.Thread(target=hold)
    thread.start()
    assert held.wait(SOON)
    yield
    end.set()
    thread.join(SOON)


def test_lock_of_another_thread_refuses_nothing():
    with held_by_another_thread(fork.shared_lock()):
        fork.refuse_reentry()


def test_locks_are_forgotten_with_what_has_them():
    lock = fork.shared_lock()
    gone, known = weakref.ref(lock), len(fork._LOCKS)
    del lock
    assert gone() is None
    assert len(fork._LOCKS) == known - 1


def test_no_lock_is_lost_that_threads_make_at_a_time():
    made: list[list[object]] = [[] for _ in range(4)]

    def make(own):
        for i in range(300):
            own.append(fork.shared_lock())
            if i % 3 == 0:
                own.pop(0)

    threads = [threading.Thread(target=make, args=(own,)) for own in made]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(SOON)
    known = {id(each()) for each in fork._LOCKS}
    assert all(id(lock) in known for own in made for lock in own)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
def test_forked_child_has_locks_of_other_threads_free_and_its_own_held():
    others, own = fork.shared_lock(), fork.shared_lock()
    with held_by_another_thread(others), own:
        child = os.fork()
        if child == 0:
            free = others.acquire(blocking=False)
            os._exit(0 if free and own._is_owned() else 1)
        _, status = os.waitpid(child, 0)
    assert status == 0
