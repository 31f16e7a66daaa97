"""Threads are sent to cores."""

from __future__ import annotations

import os
import threading

import pytest

from penstock.host.admission import allow, core_of_thread

needs_affinity = pytest.mark.skipif(
    not hasattr(os, "sched_setaffinity"), reason="the system has no affinity of threads"
)


@needs_affinity
def test_thread_is_on_the_only_core_that_it_is_allowed_on():
    cores = []

    def job() -> None:
        everywhere = os.sched_getaffinity(0)
        for core in everywhere:
            allow(0, {core})
            cores.append((core, os.sched_getaffinity(0), core_of_thread()))

    thread = threading.Thread(target=job)
    thread.start()
    thread.join()
    assert cores
    assert all(allowed == {core} and at in (core, -1) for core, allowed, at in cores)


@needs_affinity
def test_core_that_is_not_there_changes_nothing():
    before = os.sched_getaffinity(0)
    allow(0, {4095})
    assert os.sched_getaffinity(0) == before
