"""Recording of the feeds of sampled runs, within a hundredth of the processor's time.

A recorded run leaves the fast path through ``Session.run``, and its feeds are copied::

    run      1   2   3   4   5   6   7  ...  runs
             -   -   x   -   -   -   x        x   and on, until there is a minimum of feeds
                     |<--- gap ---->|

The gap is random. It is chosen to stay within ``SHARE``, given the time of earlier copies and the
process time per run. If there are more feeds than are kept, each has the same chance to be kept.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from itertools import chain, repeat
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
"""the part of the process's CPU time that recording may take"""
FEWEST = 8
"""the least number of recorded feeds, however many runs that takes"""
MOST_BYTES = 64 << 20
"""bytes of feeds that are kept"""
# Estimated times in seconds: of a run that leaves the fast path, and of one call of ``due``.
_LEAVING, _ASKING = 2e-5, 5e-8

RecordedFeeds = Mapping[str, np.ndarray]


class KeptFeeds:
    """Copies of at most ``most`` feeds and ``MOST_BYTES``. If more are added, each has the same
    chance to be kept."""

    def __init__(self, most: int) -> None:
        self.feeds: list[RecordedFeeds] = []
        self.nbytes = 0
        self.is_full = False
        """whether some feeds were dropped for lack of room"""
        self._most, self._seen, self._random = most, 0, Random(most)

    @property
    def is_enough(self) -> bool:
        """Whether the minimum number of feeds is recorded."""
        return len(self.feeds) >= min(FEWEST, self._most)

    def add(self, arrays: RecordedFeeds) -> None:
        """Keep a copy of ``arrays``, or skip it at random."""
        self._seen += 1
        place = len(self.feeds)
        if place >= self._most or self.is_full:
            place = self._random.randrange(self._seen)
            if place >= len(self.feeds):
                return
        # The number of the feeds to be replaced, if any.
        before = sum(_nbytes(feeds) for feeds in self.feeds[place : place + 1])
        nbytes = self.nbytes - before + _nbytes(arrays)
        if nbytes > MOST_BYTES:
            self.is_full = True
            return
        self.nbytes = nbytes
        copies = {name: array.copy() for name, array in arrays.items()}
        self.feeds[place : place + 1] = [copies]


def _nbytes(arrays: RecordedFeeds) -> int:
    return sum(array.nbytes for array in arrays.values())


class FeedRecorder:
    """Chooses runs and keeps up to ``most`` of their feeds. ``finish`` is called by the last
    recorded run: about the ``runs``-th.

    ``due`` is a method of an iterator, which takes a third of the time of a Python function, so
    each gap has a new one, of which ``installed`` informs the session. ``others`` is another
    chooser of the session's runs, if any.
    """

    def __init__(
        self,
        runs: int,
        most: int,
        subgraphs: Subgraphs,
        finish: Callable[[], None],
        process_clock: Callable[[], float] = process_time,
        thread_clock: Callable[[], float] = thread_time,
    ) -> None:
        self.kept = KeptFeeds(most)
        self.spent = 0.0
        """CPU seconds that recorded runs have taken beyond other runs, for copies and for the
        slower path"""
        self._cost = 0.0  # of the last copy
        self.others: RunChooser | None = None
        self.installed: Callable[[], None] = _nobody
        self._runs, self._subgraphs, self._finish = runs, subgraphs, finish
        self._process_clock, self._thread_clock = process_clock, thread_clock
        self._began = process_clock()
        self._random = Random(runs)
        self._interval = max(runs // most, 1)
        self._number = 0  # of runs that were counted
        self._is_over = False
        self._lock = threading.Lock()
        self._wait(1 + self._random.randrange(self._interval))

    @property
    def due(self) -> Callable[[], bool]:
        """A function that counts a run and returns whether the run must call ``take``."""
        return self._due if self.others is None else self._due_or_others

    def _due_or_others(self) -> bool:
        return self._due() or (self.others is not None and self.others.due())

    def _wait(self, gap: int) -> None:
        """Let ``gap`` - 1 runs pass; then each run is due until one of them is recorded."""
        self._gap = gap
        self._due = chain(repeat(False, gap - 1), repeat(True)).__next__

    def take(self, options: RunOptions) -> Observer | None:
        """Record a run if it is its turn, and return the observer that ``others`` choose for it."""
        # A run stays due: runs that did not ask are counted here. Of several concurrent ones, one
        # is recorded.
        if self._due() and self._lock.acquire(blocking=False):
            try:
                self._sample(options)
            finally:
                self._lock.release()
        return None if self.others is None else self.others.take(options)

    def _sample(self, options: RunOptions) -> None:
        """Record a run if time allows, and choose the next one."""
        if self._is_over:  # recording ended while this run came here
            return
        begin, elapsed = self._thread_clock(), self._process_clock() - self._began
        self._number += self._gap
        # For short runs, the check alone takes most of the share.
        allowed = max(SHARE * elapsed - _ASKING * self._number, SHARE * elapsed / 2)
        if self.spent + self._cost <= allowed or not self.kept.feeds:
            self._record(options)
            self._cost = self._thread_clock() - begin + _LEAVING
        self.spent += self._thread_clock() - begin + _LEAVING
        wanted = self._interval * self._random.uniform(0.5, 1.5)
        if allowed > 0:
            # The number of runs until recording is allowed. Checking too early takes time as well.
            enough = (self.spent + self._cost) * self._number / allowed
            wanted = max(wanted, (enough - self._number) * self._random.uniform(1.0, 1.5))
        gap = max(round(wanted), 1)
        left = self._runs - self._number
        if left <= 0 and (self.kept.is_full or self.kept.is_enough):
            self._is_over = True
            self._finish()
            return
        self._wait(min(gap, left) if left > 0 else gap)
        self.installed()

    def _record(self, options: RunOptions) -> None:
        # The run itself raises errors of its feeds, so these need no copy.
        with suppress(PenstockError, LookupError, TypeError, ValueError, MemoryError):
            request, _, values = self._subgraphs.resolve(
                options.feeds, options.fetches, options.targets
            )
            feeds = dict(zip(request.subgraph.names, values, strict=True))
            whole = feeds.keys() == {*self._subgraphs.main.names}
            if whole and all(isinstance(value, np.ndarray) for value in values):
                self.kept.add(feeds)

    def forked(self) -> None:
        """Release the lock in a forked child, as if no run of the parent was being recorded."""
        self._lock = threading.Lock()


def _nobody() -> None:
    """The default of ``installed`` while no session uses the recorder."""
