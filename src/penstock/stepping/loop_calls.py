"""Calls on event loops by the thread that runs steps: each loop is woken once per step."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from asyncio import AbstractEventLoop


class LoopCalls:
    """Calls functions on the threads of event loops. Waking a loop takes a system call, which
    releases the interpreter lock: another thread takes it, and the step has to wait."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._calls: dict[AbstractEventLoop, list[Callable[[], object]]] = {}
        self._holder: int | None = None

    def soon(self, loop: AbstractEventLoop, call: Callable[[], object]) -> None:
        """Let ``loop`` call a function; within ``together``, at the end of the block."""
        with self._lock:
            self._calls.setdefault(loop, []).append(call)
        if self._holder != threading.get_ident():
            self._wake()

    @contextmanager
    def together(self) -> Iterator[None]:
        """Wake each loop once for all calls of this thread in the block. One thread at a time."""
        self._holder = threading.get_ident()
        try:
            yield
        finally:
            self._holder = None
            self._wake()

    def _wake(self) -> None:
        with self._lock:
            calls, self._calls = self._calls, {}
        for loop, functions in calls.items():
            with suppress(RuntimeError):  # the loop was closed meanwhile
                loop.call_soon_threadsafe(_call_all, functions)


def _call_all(calls: list[Callable[[], object]]) -> None:
    for call in calls:
        call()
