"""Calls on event loops by the thread that runs steps."""

from __future__ import annotations

import asyncio
import threading

import pytest

from penstock.stepping.loop_calls import LoopCalls
from tests.support.timing import SOON


def on_thread(job):
    thread = threading.Thread(target=job)
    thread.start()
    thread.join(SOON)
    assert not thread.is_alive()


def counted_wakes(loop, monkeypatch):
    """A list that has an item for each time that another thread has woken ``loop``."""
    wakes, wake = [], loop.call_soon_threadsafe

    def counted(*arguments):
        wakes.append(threading.get_ident())
        return wake(*arguments)

    monkeypatch.setattr(loop, "call_soon_threadsafe", counted)
    return wakes


def test_loop_is_woken_once_for_all_calls_of_a_step(monkeypatch):
    calls, called = LoopCalls(), []

    async def main():
        loop, ended = asyncio.get_running_loop(), asyncio.Event()
        here = threading.get_ident()
        wakes = counted_wakes(loop, monkeypatch)

        def step():
            with calls.together():
                for i in range(8):
                    calls.soon(loop, lambda i=i: called.append((i, threading.get_ident())))
                calls.soon(loop, ended.set)
                assert not wakes

        on_thread(step)
        await asyncio.wait_for(ended.wait(), SOON)
        assert called == [(i, here) for i in range(8)]
        assert len(wakes) == 1

    asyncio.run(main())


def test_call_of_another_thread_does_not_wait_for_a_step():
    calls = LoopCalls()

    async def main():
        loop, ended = asyncio.get_running_loop(), asyncio.Event()
        with calls.together():
            on_thread(lambda: calls.soon(loop, ended.set))
            await asyncio.wait_for(ended.wait(), SOON)

    asyncio.run(main())


def test_closed_loop_keeps_no_other_from_its_calls():
    calls, closed = LoopCalls(), asyncio.new_event_loop()
    closed.close()

    async def main():
        loop, ended = asyncio.get_running_loop(), asyncio.Event()

        def step():
            with calls.together():
                calls.soon(closed, ended.clear)
                calls.soon(loop, ended.set)

        on_thread(step)
        await asyncio.wait_for(ended.wait(), SOON)

    asyncio.run(main())


def test_calls_that_can_wait_are_left_to_the_next_wake(monkeypatch):
    calls, called = LoopCalls(), []
    monkeypatch.setattr("penstock.stepping.loop_calls.PATIENCE", SOON)

    async def main():
        loop, ended = asyncio.get_running_loop(), asyncio.Event()
        wakes = counted_wakes(loop, monkeypatch)

        def steps():
            for i in range(3):
                with calls.together(patient=True):
                    calls.soon(loop, lambda i=i: called.append(i), can_wait=True)
            calls.soon(loop, ended.set, can_wait=True)  # outside of a block

        on_thread(steps)
        await asyncio.wait_for(ended.wait(), SOON)
        assert called == [0, 1, 2]
        assert len(wakes) == 1

    asyncio.run(main())


def test_call_that_cannot_wait_takes_the_others_along(monkeypatch):
    calls, called = LoopCalls(), []
    monkeypatch.setattr("penstock.stepping.loop_calls.PATIENCE", SOON)

    async def main():
        loop, ended = asyncio.get_running_loop(), asyncio.Event()

        def steps():
            with calls.together(patient=True):
                calls.soon(loop, lambda: called.append(0), can_wait=True)
                calls.soon(loop, ended.set)

        on_thread(steps)
        await asyncio.wait_for(ended.wait(), SOON)
        assert called == [0]

    asyncio.run(main())


@pytest.mark.parametrize("patience, patient", [(0.0, True), (SOON, False)])
def test_calls_wait_no_longer_than_said(monkeypatch, patience, patient):
    calls = LoopCalls()
    monkeypatch.setattr("penstock.stepping.loop_calls.PATIENCE", patience)

    async def main():
        loop, ended = asyncio.get_running_loop(), asyncio.Event()

        def step():
            with calls.together(patient=patient):
                calls.soon(loop, ended.set, can_wait=True)

        on_thread(step)
        await asyncio.wait_for(ended.wait(), SOON)

    asyncio.run(main())
