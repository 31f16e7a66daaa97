"""The number of threads for the kernels of a plan, chosen by the times of its runs.

More threads are not always faster: short kernels do not pay for them, and while other processes use
the machine, several threads may have less of it than one.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection
from math import inf

# Runs by which a thread count is judged, by their median: what is slow now and then counts, too.
_JUDGED = 5
_TRIED = 3
# Runs between two trials: the minimum after a change, doubled up to the maximum while none. A trial
# that is not due to slow runs ends with the first run that takes longer than usual by this factor:
# so few runs are trials that they do not show in the 99th percentile. Where one thread has never
# been as fast as several are now, trials become rarer still, and slow runs trigger none; but not
# the other way round: that a core has become free does not show in runs with one thread.
_FEWEST, _MOST, _RAREST = 32, 512, 4096
_LONGER = 1.15
# A trial begins when the median run is slower than usual by this factor, but not during the first
# _PATIENCE runs after the last trial.
_SLOW = 1.3
_PATIENCE = 4
# One thread is chosen only if faster by this factor: several have more cache between them.
_MARGIN = 0.97


class ThreadTuner:
    """Chooses between one thread and ``most``: uses the faster, tries the other now and then.
    Concurrent runs may share a tuner without a lock: a lost update only delays a decision.

    After a change of the machine, three runs show that they have become slower, and three more what
    the other number takes: a choice that has become wrong lasts for less than ten runs.
    """

    def __init__(self, most: int) -> None:
        self.most = most
        self._now = most
        self._times = {n: deque[float](maxlen=_JUDGED) for n in (1, most)}
        self._least_alone = inf  # with one thread
        self._usual = 0.0
        self._left = _TRIED + 1  # runs until the next trial begins, or the present one ends
        self._trying = self._brief = False
        self._interval = _FEWEST

    def threads(self) -> int:
        """The thread count for the next run."""
        return self._other if self._trying else self._now

    @property
    def _other(self) -> int:
        return 1 if self._now != 1 else self.most

    def took(self, threads: int, seconds: float) -> None:
        """Note that a run with ``threads`` threads has taken ``seconds``."""
        times = self._times.get(threads)
        if times is None:
            return
        times.append(seconds)
        if threads == 1:
            self._least_alone = min(self._least_alone, seconds)
        self._left -= 1
        if self._trying:
            if self._left <= 0 or (self._brief and seconds > _LONGER * self._usual):
                self._judge()
        elif self._left <= 0 or self._slow(seconds, times):
            self._times[self._other].clear()
            self._usual = median(self._times[self._now])
            self._trying, self._brief, self._left = True, self._left <= 0, _TRIED

    def _slow(self, seconds: float, times: deque[float]) -> bool:
        """Whether runs have become slower since the last trial."""
        bound = _SLOW * self._usual
        if not bound or seconds <= bound or self._left >= self._interval - _PATIENCE:
            return False
        # A trial that changes nothing takes these times for usual, so that it is not repeated.
        middle = median(times)
        return len(times) == _JUDGED and middle > bound and not self._is_best(middle)

    def _is_best(self, seconds: float) -> bool:
        """Whether several threads are used, and no run with one has ever been as fast."""
        return self._now != 1 and seconds < _MARGIN * self._least_alone < inf

    def _judge(self) -> None:
        """End a trial: use the faster thread count from now on."""
        one, several = (median(self._times[n]) for n in (1, self.most))
        better = self._now
        if one and several:  # else a run at the same time has begun a trial of its own
            better = 1 if one < _MARGIN * several else self.most
        changed = better != self._now
        self._now = better
        self._usual = one if better == 1 else several
        most = _RAREST if self._is_best(self._usual) else _MOST
        self._interval = _FEWEST if changed else min(2 * self._interval, most)
        self._trying, self._left = False, self._interval


def median(times: Collection[float]) -> float:
    """The middle one; the later of two; 0 of none. (``statistics`` imports ten modules more.)"""
    in_order = sorted(times)  # first, as another thread may clear them
    return in_order[len(in_order) // 2] if in_order else 0.0
