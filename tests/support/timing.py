"""Helpers for tests of threads, time and lifetimes.

Tests do not sleep: they wait for events, barriers and conditions, with a limit that only a failing
test comes to. The functions here are the only ones that let time pass.
"""

from __future__ import annotations

import asyncio
import gc
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager

# Seconds after which a wait is given up: only a failing test comes to that.
SOON = 120


def wait_until(condition: Callable[[], object]) -> None:
    """Return as soon as ``condition`` holds, asked again and again; fail after ``SOON`` seconds.

    For what has no event to wait for, such as a thread of a pool that becomes idle.
    """
    end = time.monotonic() + SOON
    while not condition():
        assert time.monotonic() < end, f"waited {SOON} s in vain"
        time.sleep(0.0005)  # not 0, which would take turns with what is waited for


async def turns_until(condition: Callable[[], Awaitable[object]]) -> None:
    """Let an event loop go on until what ``condition`` gives to await is true."""
    while not await condition():
        await asyncio.sleep(0.005)


def slow(seconds: float) -> None:
    """Take that long, as a slow kernel or device does; other threads run meanwhile.

    Only for doubles whose duration is what the code under test measures or copes with, and to
    measure what idle threads do meanwhile. To wait for another thread, use an event.
    """
    time.sleep(seconds)


@contextmanager
def switching() -> Iterator[None]:
    """Switch threads as often as possible."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        yield
    finally:
        sys.setswitchinterval(before)


@contextmanager
def uncollected() -> Iterator[None]:
    """Keep the garbage collector off: only objects without references are freed."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
