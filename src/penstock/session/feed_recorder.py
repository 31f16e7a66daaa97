"""Copies of what some of the runs of a session are fed, for a hundredth of the processor's time.

A run that is recorded leaves the short way through ``Session.run``, and its feeds are copied::

    run      1   2   3   4   5   6   7  ...  runs
             -   -   x   -   -   -   x        x   and on, until there are a few feeds at least
                     |<--- gap ---->|

The gap is random, around one that is long enough for ``SHARE``, by what the copies before have
taken and what the process takes for each run. Of more feeds than are kept each has the same chance.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from itertools import count
from random import Random
from time import process_time, thread_time
from typing import TYPE_CHECKING

import numpy as np

from penstock.compiler.subgraphs import Subgraphs
from penstock.core.errors import PenstockError

if TYPE_CHECKING:
    from penstock.compiler.options import RunOptions
    from penstock.observers.base import Observer
    from penstock.session.run import RunChooser

SHARE = 0.01
"""the part of the processor's time of the process that may go into recording"""
FEWEST = 8
"""feeds that are recorded at least, however many runs that takes"""
MOST_BYTES = 64 << 20
"""of feeds that are kept"""
# Seconds by which a run takes longer that leaves the short way, as far as these are not measured.
_LEAVING = 2e-5

RecordedFeeds = Mapping[str, np.ndarray]


class FeedRecorder:
    """Chooses runs and keeps copies of their feeds, up to ``most`` of them. ``finish`` is called
    once, by the run that is the last one: about the ``runs``-th.

    ``others`` is what chooses runs of the session for another purpose, if anything.
    """

    def __init__(
        self,
        runs: int,
        most: int,
        subgraphs: Subgraphs,
        finish: Callable[[], None],
        others: RunChooser | None = None,
        process_clock: Callable[[], float] = process_time,
        thread_clock: Callable[[], float] = thread_time,
    ) -> None:
        self.feeds: list[RecordedFeeds] = []
        self.nbytes = 0
        self.spent = 0.0
        """seconds of the processor that recording has taken"""
        self._runs, self.most, self._subgraphs, self._finish = runs, most, subgraphs, finish
        self.others = others
        self._process_clock, self._thread_clock = process_clock, thread_clock
        self._began = process_clock()
        self._random = Random(runs)
        self._next = count(1).__next__
        self._interval = max(runs // most, 1)
        self._when = 1 + self._random.randrange(self._interval)
        self._due = 0
        # Feeds that might have been kept, and whether there was no room for one of them.
        self._seen, self._is_full = 0, False
        self._lock = threading.Lock()

    def due(self) -> bool:
        number = self._next()
        if number < self._when:
            return self.others is not None and self.others.due()
        self._due = number
        return True

    def take(self, options: RunOptions) -> Observer | None:
        number, self._due = self._due or self._next(), 0
        # Of runs at once one is recorded.
        if number >= self._when and self._lock.acquire(blocking=False):
            try:
                self._sample(options, number)
            finally:
                self._lock.release()
        return None if self.others is None else self.others.take(options)

    def _sample(self, options: RunOptions, number: int) -> None:
        """Record the run of a number, if there is time for it, and choose the next one."""
        begin, elapsed = self._thread_clock(), self._process_clock() - self._began
        if self.spent <= SHARE * elapsed:
            self._record(options)
        cost = self._thread_clock() - begin + _LEAVING
        self.spent += cost
        gap: float = self._interval
        if elapsed > 0:
            gap = max(gap, cost * number / (SHARE * elapsed))
        following = number + max(round(gap * self._random.uniform(0.5, 1.5)), 1)
        if number < self._runs:
            self._when = min(following, self._runs)
            return
        self._when = following
        if self._is_full or len(self.feeds) >= min(FEWEST, self.most):
            self._finish()

    def _record(self, options: RunOptions) -> None:
        try:
            request, _, values = self._subgraphs.resolve(
                options.feeds, options.fetches, options.targets
            )
        except (PenstockError, LookupError, TypeError, ValueError):  # which the run raises as well
            return
        arrays = [value for value in values if isinstance(value, np.ndarray)]
        names, main = request.subgraph.names, self._subgraphs.main.names
        if len(arrays) < len(values) or {*names} != {*main}:  # a part of the model
            return
        self._seen += 1
        # The number of the one that makes room: that of none yet, while there is room for more.
        place = len(self.feeds)
        if place >= self.most or self._is_full:
            place = self._random.randrange(self._seen)
            if place >= len(self.feeds):
                return
        before = sum(x.nbytes for x in self.feeds[place].values()) if self.feeds[place:] else 0
        nbytes = self.nbytes - before + sum(array.nbytes for array in arrays)
        if nbytes > MOST_BYTES:
            self._is_full = True
            return
        self.nbytes = nbytes
        self.feeds[place : place + 1] = [
            {name: array.copy() for name, array in zip(names, arrays, strict=True)}
        ]

    def forked(self) -> None:
        """Be as free in a child as if no run of the parent was recorded right then."""
        self._lock = threading.Lock()
