"""Jobs that run one at a time, on the threads that bring them."""

from __future__ import annotations

import threading

from penstock.cluster.strand import Strand
from tests.support.timing import SOON


def test_strand_runs_jobs_on_the_thread_that_drains_it_in_order():
    strand, ran = Strand("test-order"), []
    strand.drain()
    for i in range(3):
        strand.submit(lambda i=i: ran.append((i, threading.get_ident())))
    assert not ran
    strand.drain()
    assert ran == [(i, threading.get_ident()) for i in range(3)]


def test_strand_runs_a_job_that_a_job_submits_after_it():
    strand, ran = Strand("test-nested"), []

    def outer() -> None:
        strand.submit(lambda: ran.append("inner"))
        ran.append("outer")

    strand.drain()
    strand.submit(outer)
    strand.drain()
    assert ran == ["outer", "inner"]


def test_strand_runs_jobs_of_a_thread_that_never_drains_on_its_own_thread():
    strand, ran = Strand("test-other"), threading.Event()
    threads = []

    def job() -> None:
        threads.append(threading.get_ident())
        ran.set()

    strand.submit(job)
    assert ran.wait(SOON)
    assert threads != [threading.get_ident()]


def test_strand_leaves_jobs_to_the_thread_that_is_busy():
    strand, ran = Strand("test-busy"), []
    began, go_on, noted = threading.Event(), threading.Event(), threading.Event()

    def first() -> None:
        began.set()
        assert go_on.wait(SOON)
        ran.append(threading.current_thread().name)

    def read() -> None:
        strand.drain()
        strand.submit(first)
        strand.drain()

    def read_on() -> None:
        strand.drain()
        strand.submit(lambda: ran.append(threading.current_thread().name))
        strand.drain()  # returns at once, though the first job runs
        noted.set()

    one = threading.Thread(target=read, name="one")
    one.start()
    assert began.wait(SOON)
    other = threading.Thread(target=read_on, name="other")
    other.start()
    assert noted.wait(SOON)
    assert ran == []
    go_on.set()
    for thread in (one, other):
        thread.join(SOON)
    assert ran == ["one", "one"]


def test_strand_reports_a_job_that_raises_and_runs_the_next(monkeypatch):
    reported, ran = [], []
    monkeypatch.setattr(threading, "excepthook", reported.append)
    strand = Strand("test-error")
    strand.drain()
    strand.submit(lambda: 1 // 0)
    strand.submit(lambda: ran.append(1))
    strand.drain()
    assert [hook.exc_type for hook in reported] == [ZeroDivisionError]
    assert ran == [1]
