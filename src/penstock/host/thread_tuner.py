"""The number of threads for the kernels of a plan, chosen by the times of its runs.

More threads are not always faster: short kernels do not pay for them, and while other processes use
the machine, several threads may get less of it than one.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection
from math import inf

from penstock.core.checkpoints import UNSEEN_RUN_S

# Runs whose median time decides whether runs have become slow.
_JUDGED = 5
# Runs with the other thread count in a trial. Each is compared with the next one, which has the
# usual count, since other processes take a core for some milliseconds at a time: runs that begin a
# trial because they are slow are often followed by faster ones, whatever the thread count.
_TRIED = 3
# A trial is judged by mean times, in which no time counts for more than this multiple of the least:
# a run that is often late is worth avoiding, one that was delayed once for long is not.
_MOST_LATE = 4
# Runs between two trials: the minimum after a change, doubled up to the maximum without changes. A
# trial ends with the first run that takes longer than usual by this factor, so few runs are trials
# and the 99th percentile is not affected. If one thread has never been as fast as several are now,
# trials become rarer still, and slow runs trigger none. The reverse does not hold: runs with one
# thread do not show that a core has become free, so the first trial after a change to one thread
# comes sooner, since the other core was usually taken only for moments.
_FEWEST, _MOST, _RAREST = 32, 512, 4096
_FEWEST_ALONE = 4
_LONGER = 1.15
# A trial begins when the median run is slower than usual by this factor, but not during the first
# _PATIENCE runs after the last trial.
_SLOW = 1.3
_PATIENCE = 4
# One thread is chosen only if faster by this factor, since several have more cache together.
_MARGIN = 0.97
# Seconds of runs that are short beside the time to wake a thread (c/waiting.h). Their threads go on
# from one run to the next, unless a run with one thread is between: the run after it is repeated.
_SHORT = UNSEEN_RUN_S / 5


class ThreadTuner:
    """Chooses between one thread and ``most``: uses the faster, and tries the other at intervals.
    Concurrent runs may share a tuner without a lock: a lost update only delays a decision.

    After a change of the machine, three runs show that runs have become slower, and six more,
    alternately with the other count, measure it: a wrong choice lasts for less than ten runs.
    """

    def __init__(self, most: int) -> None:
        self.most = most
        self._now = most
        self._times = {n: deque[float](maxlen=_JUDGED) for n in (1, most)}
        self._least_alone = inf  # the shortest time with one thread
        self._last = most  # the thread count of the last run
        self._usual = 0.0
        self._has_judged = False
        self._left = _TRIED + 1  # runs until the next trial begins, or the present one ends
        self._trying = self._beside = False
        self._interval = _FEWEST

    def threads(self) -> int:
        """The thread count for the next run."""
        return self._other if self._trying and not self._beside else self._now

    @property
    def chosen(self) -> int:
        """The thread count of runs that are not trials."""
        return self._now

    @property
    def undecided(self) -> bool:
        """Whether the next run has the other thread count, or the first trial has not ended."""
        return self.threads() != self._now or not self._has_judged

    @property
    def _other(self) -> int:
        return 1 if self._now != 1 else self.most

    def took(self, threads: int, seconds: float) -> None:
        """Record that a run with ``threads`` threads has taken ``seconds``."""
        times = self._times.get(threads)
        if times is None:
            return
        woke = self._last == 1 != threads and self._least_alone < _SHORT
        self._last = threads
        if woke and self._trying:
            return
        times.append(seconds)
        if threads == 1:
            self._least_alone = min(self._least_alone, seconds)
        if self._trying:
            self._compare(threads, seconds)
            return
        self._left -= 1
        if self._left <= 0 or self._slow(seconds, times):
            self._usual = median(times.copy())  # the copy is atomic; other threads append
            for past in self._times.values():
                past.clear()
            self._trying, self._beside, self._left = True, False, _TRIED

    def _compare(self, threads: int, seconds: float) -> None:
        """Add a run to the current trial, and end the trial if it is complete."""
        if threads != self._now:
            self._left -= 1
        self._beside = threads != self._now
        late = self._beside and seconds > _LONGER * self._usual
        if late or (self._left <= 0 and not self._beside):
            self._judge()

    def _slow(self, seconds: float, times: deque[float]) -> bool:
        """Whether runs have become slower since the last trial."""
        bound = _SLOW * self._usual
        if not bound or seconds <= bound or self._left >= self._interval - _PATIENCE:
            return False
        # A trial without a change makes these times the usual ones, so that it is not repeated.
        middle = median(times.copy())
        return len(times) == _JUDGED and middle > bound and not self._is_best(middle)

    def _is_best(self, seconds: float) -> bool:
        """Whether several threads are used, and no run with one thread has ever been as fast."""
        return self._now != 1 and seconds < _MARGIN * self._least_alone < inf

    def _judge(self) -> None:
        """End a trial, and use the faster thread count from now on."""
        one, several = (_mean(self._times[n].copy()) for n in (1, self.most))
        better = self._now
        if one and several:  # otherwise a concurrent run has begun a trial of its own
            better = 1 if one < _MARGIN * several else self.most
        changed, self._has_judged = better != self._now, True
        if changed:
            self._usual = one if better == 1 else several
        self._now = better
        most = _RAREST if self._is_best(self._usual) else _MOST
        fewest = _FEWEST_ALONE if better == 1 else _FEWEST
        self._interval = fewest if changed else min(2 * self._interval, most)
        self._trying, self._left = False, self._interval


def median(times: Collection[float]) -> float:
    """Return the upper median, or 0 of no times. (``statistics`` would import ten modules.)"""
    in_order = sorted(times)
    return in_order[len(in_order) // 2] if in_order else 0.0


def _mean(times: Collection[float]) -> float:
    """Return the mean, with times bounded by ``_MOST_LATE`` times the least; 0 of no times."""
    in_order = sorted(times)
    if not in_order:
        return 0.0
    longest = _MOST_LATE * in_order[0]
    return sum(min(seconds, longest) for seconds in in_order) / len(in_order)
