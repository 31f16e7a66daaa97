"""A profile of some of the runs of a process, which takes at most a hundredth of their time.

Observed runs take longer than others: each of their steps is a call of its own, between two looks
at a clock. So few runs are observed, and none while those before have taken more than their share.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from itertools import count
from pathlib import Path
from time import perf_counter

from penstock.core.types import RunValues
from penstock.host.replace_file import replacing
from penstock.observers.base import ObservedRun, Observer
from penstock.observers.profile import Profile, StepRow, steps_document
from penstock.plan.plan import Step
from penstock.plan.step_facts import StepFacts

SHARE = 0.01
"""The part of the time since the process began that observed runs may take."""
# Observed runs after which the profile is written again.
_WRITTEN = 16
# The most steps with an entry of their own; those of little time are dropped, since a process may
# meet any number of shapes.
_MOST_STEPS = 10_000


class SampledProfile(Observer):
    """Chooses runs to observe (``due``, ``take``), one in ``interval`` at most, and adds up the
    seconds of their steps. ``write`` is called at the end of some of them."""

    def __init__(
        self, interval: int, write: Callable[[], None], clock: Callable[[], float] = perf_counter
    ) -> None:
        self._interval, self._write, self._clock = interval, write, clock
        self._next = count(1).__next__
        self._due = False
        self._began = clock()
        self._lock = threading.Lock()
        self._running: dict[ObservedRun, tuple[Profile, float]] = {}
        # Plain records, without the plans, which may be dropped.
        self._rows: dict[StepFacts, StepRow] = {}
        self._runs, self._seconds, self._spent = 0, 0.0, 0.0

    def due(self) -> bool:
        """Count a run, and say whether to observe it: the next one that asks ``take``."""
        if self._next() % self._interval or self._spent > SHARE * (self._clock() - self._began):
            return False
        self._due = True
        return True

    def take(self, options: object = None) -> SampledProfile | None:
        """Count a run, unless ``due`` has, and return what observes it, if anything; whatever its
        ``options`` are."""
        chosen = self._due or self.due()
        self._due = False
        return self if chosen else None

    def run_begin(self, run: ObservedRun) -> None:
        profile = Profile()
        self._running[run] = profile, self._clock()
        profile.run_begin(run)

    def step_begin(self, run: ObservedRun, step: Step, inputs: RunValues) -> None:
        self._running[run][0].step_begin(run, step, inputs)

    def step_end(self, run: ObservedRun, step: Step, outputs: RunValues) -> None:
        self._running[run][0].step_end(run, step, outputs)

    def run_end(self, run: ObservedRun, error: BaseException | None) -> None:
        profile, began = self._running.pop(run)
        profile.run_end(run, error)
        if error is None:
            with self._lock:
                self._add(profile)
            if self._runs % _WRITTEN == 1:
                self._write()
        with self._lock:
            self._spent += self._clock() - began

    def _add(self, profile: Profile) -> None:
        self._runs += 1
        self._seconds += profile.wall
        for row in profile.steps():
            before = self._rows.get(row.facts)
            if before is not None:
                seconds, best = before.seconds + row.seconds, min(before.best, row.best)
                times = before.count + row.count
                row = StepRow(row.facts, row.threads, times, seconds, best, 0.0)
            self._rows[row.facts] = row
        if len(self._rows) > _MOST_STEPS:
            longest = sorted(self._rows.values(), key=lambda row: -row.seconds)
            self._rows = {row.facts: row for row in longest[: _MOST_STEPS // 2]}

    def save(self, path: Path) -> None:
        """Write what was observed as ``Profile.save`` does. Raises ``OSError``.

        Args:
            path: The file, which is replaced atomically.
        """
        with self._lock:
            rows, runs, seconds = list(self._rows.values()), self._runs, self._seconds
        with replacing(path) as file:
            file.write(steps_document(runs, seconds, rows).encode())
