"""Programs bound to arenas, and arenas of one plan: every run has one to itself.

A run that finds none free makes another, so that there are as many as there were runs at once; or
waits, where ``Limits.max_bytes`` allows no more. Who waits is served in the order of asking.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Generic, Protocol, TypeVar

import numpy as np

from penstock.backends.base import Backend
from penstock.errors import LimitExceeded, RunError
from penstock.host.fork import renewed
from penstock.limits import Limits

T = TypeVar("T")

# How often a run that waits for an arena looks at its control.
_PATIENCE_S = 0.02


class Stoppable(Protocol):
    """What a run that waits for an arena looks at."""

    @property
    def stopped(self) -> bool: ...

    def stop(self) -> None: ...


class Arenas(Generic[T]):
    """What ``bind`` makes of arenas of ``size`` bytes each, for one run at a time."""

    def __init__(
        self, size: int, host: Backend, limits: Limits, bind: Callable[[np.ndarray], T]
    ) -> None:
        self.size = size
        self._host = host
        self._bind = bind
        self._reset()
        most = limits.max_bytes
        if most is not None and size > most:
            raise LimitExceeded(
                f"the plan needs an arena of {size} bytes, above the limit of {most} "
                "(Limits.max_bytes)"
            )
        self._most = most // size if most is not None and size else None
        self.free: deque[T] = deque()
        """arenas that no run holds; to ``pop`` is the fast way to take one"""
        self._count = 0
        renewed(self)

    def _reset(self) -> None:
        self._lock = threading.Lock()
        self._waiting: deque[Callable[[T | None], None]] = deque()

    def make(self) -> T:
        """Another arena, to be given when it is no longer used."""
        with self._lock:
            self._count += 1
        return self._made()

    def _made(self) -> T:
        try:
            return self._bind(self._host.allocate(self.size))
        except BaseException as error:
            self.drop()
            if isinstance(error, MemoryError):
                message = f"there is no memory for an arena of {self.size} bytes"
                raise RunError(message) from error
            raise

    def take(self, control: Stoppable) -> T:
        """A free arena, as soon as there is one; raises what ``control`` is stopped with."""
        got = threading.Lock()
        got.acquire()
        box: list[T | None] = []

        def receive(arena: T | None) -> None:
            box.append(arena)
            got.release()

        arena = self.ask(receive)
        if arena is not None:
            return arena
        try:
            while not got.acquire(timeout=_PATIENCE_S):
                if control.stopped:
                    control.stop()
        except BaseException:
            if not self.forget(receive):
                # It is on its way to us, or here.
                while not box:
                    got.acquire(timeout=_PATIENCE_S)
                if box[0] is None:
                    self.drop()
                else:
                    self.give(box[0])
            raise
        return self.accept(box[0])

    def ask(self, receive: Callable[[T | None], None]) -> T | None:
        """An arena if there is one; else ``receive`` is called when another run gives one, with
        what ``accept`` makes an arena of, on that run's thread."""
        with self._lock:
            with suppress(IndexError):
                return self.free.pop()
            if self._most is not None and self._count >= self._most:
                self._waiting.append(receive)
                # Perhaps one was given meanwhile, by somebody who did not see that we wait.
                with suppress(IndexError):
                    arena = self.free.pop()
                    self._waiting.pop()
                    return arena
                return None
            self._count += 1
        return self._made()

    def accept(self, received: T | None) -> T:
        """The arena that somebody was given who waited: it, or another in the place of one that is
        gone."""
        return self._made() if received is None else received

    def forget(self, receive: Callable[[T | None], None]) -> bool:
        """No longer wait for an arena; False if ``receive`` has been called, or is about to be."""
        with self._lock:
            if receive not in self._waiting:
                return False
            self._waiting.remove(receive)
            return True

    def give(self, arena: T) -> None:
        """End the use of an arena: the next who waits for one gets it."""
        self.free.append(arena)
        if not self._waiting:
            return
        with self._lock:
            if not self._waiting:
                return
            try:
                arena = self.free.pop()
            except IndexError:
                return  # a run that has just begun has it, and will give it
            receive = self._waiting.popleft()
        receive(arena)

    def drop(self) -> None:
        """Forget an arena that was taken, instead of giving it: the next who waits may make one."""
        with self._lock:
            if not self._waiting:
                self._count -= 1
                return
            receive = self._waiting.popleft()
        receive(None)

    def trim(self) -> None:
        """Give up the arenas that no run holds."""
        while True:
            try:
                self.free.pop()
            except IndexError:
                return
            self.drop()

    @property
    def nbytes(self) -> int:
        """Bytes of all arenas."""
        return self._count * self.size

    def forked(self) -> None:
        """In a forked child: the runs of its parent's other threads will give nothing back."""
        self._reset()
        self._count = len(self.free)
