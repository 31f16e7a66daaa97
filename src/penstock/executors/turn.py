"""The turn of a run in a queue of runs, which a run with work on a device can hand over early.

Runs on a user stream are sequential. Once all remaining work of a run is enqueued on a device, the
next run can enqueue its own work, without waiting until the host sees the end of the first::

    host      enqueue run 1             enqueue run 2 after run 1       copy back 1, 2
    device                   run 1 ................... run 2 ...................
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from penstock.backends.base import Event
from penstock.core.types import RunValue
from penstock.host.threads import Workers

# Runs that may be enqueued on devices at the same time: one that computes, and the next one.
_MOST_AT_ONCE = 2

Function = Callable[[], object]


class Turn:
    """The turn of one run on ``workers``, after the turn ``previous``, if that has not ended."""

    def __init__(self, previous: Turn | None, workers: Workers) -> None:
        self.previous = previous
        self.workers = workers
        self.ended = False
        self._events: Sequence[Event] = ()
        self._handed_over = False
        self._lock = threading.RLock()
        self._next: list[Function] = []
        self._after: list[Function] = []

    # For the run.

    @property
    def behind(self) -> Sequence[Event]:
        """The events that the run must wait for on its devices."""
        previous = self.previous
        return () if previous is None or previous.ended else previous._events

    def hand_over(self, events: Sequence[Event]) -> None:
        """Let the next run begin after ``events``; all other work of this run has ended."""
        turns, turn = 1, self.previous
        while turn is not None and not turn.ended:
            turns, turn = turns + 1, turn.previous
        if turns < _MOST_AT_ONCE or self._after_previous(partial(self.hand_over, events)):
            self._events = events
            self._begin_next()

    def begin_alone(self, begin: Function) -> None:
        """Call ``begin`` when the previous run has ended, now or on a worker."""
        if self._after_previous(partial(self.workers.submit, begin)):
            begin()

    def ending(self, done: Callable[[Any, Any], object], outputs: RunValue, error: Any) -> None:
        """Call ``done(outputs, error)`` to end the run, after the previous run has ended."""
        end = partial(self._end, done, outputs, error)
        if self._after_previous(end):
            end()

    def _after_previous(self, function: Function) -> bool:
        """Whether the previous run has ended. If not, ``function`` is called when it ends."""
        previous = self.previous
        return previous is None or previous.is_over(function)

    def _end(self, done: Callable[[Any, Any], object], outputs: RunValue, error: Any) -> None:
        try:
            done(outputs, error)
        finally:
            del outputs, error
            self.end()

    # For the queue.

    def end(self) -> None:
        """End the turn of a run that has ended or will never begin, after the previous turn."""
        if not self._after_previous(self.end):
            return
        with self._lock:
            self.ended, after = True, self._after[:]
            self._after.clear()
        # Drop the reference: a chain of turns would keep all runs of the queue alive.
        self.previous, self._events = None, ()
        self._begin_next()
        for function in after:
            function()

    def is_over(self, function: Function) -> bool:
        """Whether the run has ended. If not, ``function`` is called when it ends."""
        with self._lock:
            if not self.ended:
                self._after.append(function)
            return self.ended

    def is_handed_over(self, function: Function) -> bool:
        """Whether the next run may begin. If not, ``function`` is called when it may."""
        with self._lock:
            if not self._handed_over:
                self._next.append(function)
            return self._handed_over

    def _begin_next(self) -> None:
        with self._lock:
            self._handed_over, functions = True, self._next[:]
            self._next.clear()
        for function in functions:
            function()
