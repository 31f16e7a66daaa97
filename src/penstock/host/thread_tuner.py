"""How many threads the kernels of a plan had best use: as many as its runs have shown.

More are not always faster: where kernels are short, they cost more than they bring, and where other
processes use the machine, a kernel waits for the thread that comes last, however many there are.
"""

from __future__ import annotations

from collections import deque

# Runs that one number of threads is judged by; the fastest counts, as others disturb the rest.
_JUDGED = 5
_TRIED = 3
# Runs between two trials: fewer after a change, more while all stays as it is.
_FEWEST, _MOST = 64, 4096
# A run that takes so many times as long as usual asks for another trial, but not at once.
_SLOW = 1.4
_PATIENCE = 16
# One thread must be so much faster than several, of which each has what it needs in its own cache.
_MARGIN = 0.97


class ThreadTuner:
    """One thread or ``most``, of which the faster is used and the other tried now and then.

    Any number of runs may use it at once; that one of them may miss what another has just found
    does no harm.
    """

    def __init__(self, most: int) -> None:
        self.most = most
        self._now = most
        self._times: dict[int, deque[float]] = {
            1: deque(maxlen=_JUDGED),
            most: deque(maxlen=_JUDGED),
        }
        self._usual = 0.0
        self._left = _TRIED + 1  # runs until the next trial, or of a trial
        self._trying = False
        self._interval = _FEWEST

    def threads(self) -> int:
        """How many threads the next run gets."""
        return self._other if self._trying else self._now

    @property
    def _other(self) -> int:
        return 1 if self._now != 1 else self.most

    def took(self, threads: int, seconds: float) -> None:
        """A run with so many threads has taken so long."""
        times = self._times.get(threads)
        if times is None:
            return
        times.append(seconds)
        self._left -= 1
        if self._trying:
            if self._left <= 0:
                self._judge()
        elif self._left <= 0 or self._slow(times):
            self._begin()

    def _slow(self, times: deque[float]) -> bool:
        """Whether runs take longer than they did, some time after the last trial."""
        late = self._left < self._interval - _PATIENCE and len(times) == _JUDGED
        return late and 0 < _SLOW * self._usual < min(times)

    def _begin(self) -> None:
        self._times[self._other].clear()
        self._trying, self._left = True, _TRIED

    def _judge(self) -> None:
        """The end of a trial: the faster one is used from now on."""
        one, several = (min(self._times[n], default=0.0) for n in (1, self.most))
        better = 1 if one < _MARGIN * several else self.most
        self._interval = min(2 * self._interval, _MOST) if better == self._now else _FEWEST
        self._now = better
        self._usual = one if better == 1 else several
        self._trying, self._left = False, self._interval
