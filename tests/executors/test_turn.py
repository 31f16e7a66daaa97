"""Runs that take turns at the only arena."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

import penstock as ps
from penstock.executors.control import Control
from tests.executors.test_run_ends import BIG, ENDLESS, Outcome, X, one_arena, parallel
from tests.support.flows import idle
from tests.support.timing import SOON, wait_until


def test_runs_that_wait_for_the_only_arena_run_in_turn(workers):
    executor = parallel(ENDLESS, workers, one_arena(ENDLESS))
    control, first = Control(), Outcome()
    workers.submit(partial(executor.run_async, [X, BIG], control, first))
    wait_until(lambda: not executor._arenas.free)
    others = [Outcome() for _ in range(10)]
    for each in others:
        executor.run_async([X, np.array(1)], Control(), each)
    assert not any(each.calls for each in others)
    control.set(ps.Cancelled("enough"))
    assert isinstance(first.error, ps.Cancelled)
    assert [each.error for each in others] == [None] * 10
    idle(workers)
    assert len(executor._arenas.free) == 1


def test_run_that_waits_for_the_only_arena_can_be_stopped(workers):
    executor = parallel(ENDLESS, workers, one_arena(ENDLESS))
    control, first = Control(), Outcome()
    workers.submit(partial(executor.run_async, [X, BIG], control, first))
    wait_until(lambda: not executor._arenas.free)
    waits, second = Control(), Outcome()
    executor.run_async([X, np.array(1)], waits, second)
    waits.set(ps.DeadlineExceeded("late"))
    try:
        assert second.event.wait(SOON)
    finally:
        control.set(ps.Cancelled("enough"))
        assert isinstance(first.error, ps.Cancelled)
        idle(workers)


def test_run_given_its_arena_while_it_asks_leaves_no_stop_listener(workers):
    executor = parallel(ENDLESS, workers, one_arena(ENDLESS))
    held = executor._arenas.free.pop()
    ask, control, done = executor._arenas.ask, Control(), Outcome()

    def slowly(receive: Callable[[Any], None]) -> Any:
        asked = ask(receive)
        executor._arenas.give(held)
        assert done.error is None
        return asked

    executor._arenas.ask = slowly  # type: ignore[method-assign]
    executor.run_async([X, np.array(1)], control, done)
    idle(workers)
    assert not control.listeners
