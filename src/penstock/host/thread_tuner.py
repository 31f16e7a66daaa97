"""The number of threads for the kernels of a plan, chosen by the times of its runs.

More threads are not always faster: short kernels do not pay for them, and while other processes use
the machine, a kernel waits for the slowest of its threads.
"""

from __future__ import annotations

from collections import deque

# Runs by which a thread count is judged; the fastest counts, as other processes disturb the rest.
_JUDGED = 5
_TRIED = 3
# Runs between two trials: the minimum after a change, doubled up to the maximum while none.
_FEWEST, _MOST = 64, 4096
# A run this many times slower than usual triggers a trial, but not within _PATIENCE runs.
_SLOW = 1.4
_PATIENCE = 16
# One thread is chosen only if faster by this factor: several have more cache between them.
_MARGIN = 0.97


class ThreadTuner:
    """Chooses between one thread and ``most``: uses the faster, tries the other now and then.
    Concurrent runs may share a tuner without a lock: a lost update only delays a decision."""

    def __init__(self, most: int) -> None:
        self.most = most
        self._now = most
        self._times = {n: deque[float](maxlen=_JUDGED) for n in (1, most)}
        self._usual = 0.0
        self._left = _TRIED + 1  # runs until the next trial begins, or the present one ends
        self._trying = False
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
        self._left -= 1
        if self._trying:
            if self._left <= 0:
                self._judge()
        elif self._left <= 0 or self._slow(times):
            self._times[self._other].clear()
            self._trying, self._left = True, _TRIED

    def _slow(self, times: deque[float]) -> bool:
        """Whether runs have become slower since the last trial."""
        late = self._left < self._interval - _PATIENCE and len(times) == _JUDGED
        return late and 0 < _SLOW * self._usual < min(times)

    def _judge(self) -> None:
        """End a trial: use the faster thread count from now on."""
        one, several = (min(self._times[n], default=0.0) for n in (1, self.most))
        better = 1 if one < _MARGIN * several else self.most
        self._interval = min(2 * self._interval, _MOST) if better == self._now else _FEWEST
        self._now = better
        self._usual = one if better == 1 else several
        self._trying, self._left = False, self._interval
