"""Calls of workers that wait until lost ones are replaced."""

from __future__ import annotations

import threading

import pytest

import penstock as ps
from penstock.cluster.driver_state import MOST_REPLACEMENTS, Wholeness
from tests.support.timing import SOON


def test_call_of_whole_workers_is_made_once() -> None:
    calls: list[int] = []
    assert Wholeness().steady(lambda: calls.append(1) or 7) == 7
    assert calls == [1]


def test_call_waits_for_replacement_and_is_made_again() -> None:
    workers, calls, lost = Wholeness(), [], threading.Event()

    def call() -> int:
        calls.append(workers.replacements)
        if len(calls) == 1:
            workers.is_whole = False
            lost.set()
            raise ps.WorkerLost("it has died")
        return 7

    def replace() -> None:
        assert lost.wait(SOON)
        workers.replaced()

    thread = threading.Thread(target=replace)
    thread.start()
    assert workers.steady(call) == 7
    thread.join()
    assert calls == [0, 1]


def test_call_is_given_up_if_workers_die_again_and_again() -> None:
    workers, calls = Wholeness(), []

    def call() -> None:
        calls.append(1)
        workers.replaced()
        raise ps.WorkerLost("it has died")

    with pytest.raises(ps.WorkerLost):
        workers.steady(call)
    assert len(calls) == MOST_REPLACEMENTS


def test_call_of_a_cluster_that_has_ended_says_why() -> None:
    workers = Wholeness()
    workers.ended = "the cluster is closed"
    with pytest.raises(ps.PenstockError, match="the cluster is closed"):
        workers.steady(lambda: pytest.fail("there is no worker to call"))
