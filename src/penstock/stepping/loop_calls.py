"""Calls on event loops by the thread that runs steps: each loop is woken once per step, or once for
several short steps."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from time import perf_counter
from typing import TYPE_CHECKING

from penstock.core.checkpoints import UNSEEN_RUN_S

if TYPE_CHECKING:
    from asyncio import AbstractEventLoop

PATIENCE = 2 * UNSEEN_RUN_S
"""how many seconds calls that can wait do so; no reader of a text sees it"""


class LoopCalls:
    """Calls functions on the threads of event loops. Waking a loop takes a system call, which
    releases the interpreter lock: another thread takes it, and the step has to wait."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._calls: dict[AbstractEventLoop, list[Callable[[], object]]] = {}
        self._holder: int | None = None
        self._since = 0.0  # when the first of the calls came
        self._can_wait = True

    def soon(
        self, loop: AbstractEventLoop, call: Callable[[], object], *, can_wait: bool = False
    ) -> None:
        """Let ``loop`` call a function; within ``together``, at the end of the block, or of a later
        one if it ``can_wait``."""
        with self._lock:
            if not self._calls:
                self._since = perf_counter()
            self._can_wait &= can_wait
            self._calls.setdefault(loop, []).append(call)
        if self._holder != threading.get_ident():
            self.wake()

    @contextmanager
    def together(self, *, patient: bool = False) -> Iterator[None]:
        """Wake each loop once for all calls of this thread in the block. One thread at a time.
        ``patient``: another block or ``wake`` follows soon, to which calls that can wait are left
        for up to ``PATIENCE``."""
        self._holder = threading.get_ident()
        try:
            yield
        finally:
            self._holder = None
            waits = patient and self._can_wait and perf_counter() - self._since < PATIENCE
            if not waits:
                self.wake()

    def wake(self) -> None:
        """Make the calls that wait."""
        if not self._calls:
            return
        with self._lock:
            calls, self._calls, self._can_wait = self._calls, {}, True
        for loop, functions in calls.items():
            with suppress(RuntimeError):  # the loop was closed meanwhile
                loop.call_soon_threadsafe(_call_all, functions)


def _call_all(calls: list[Callable[[], object]]) -> None:
    for call in calls:
        call()
