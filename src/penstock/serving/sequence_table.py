"""The open sequences of a model with state, by id.

::

    start 7   ──> open, busy ──> release ──> open ──> resume ──> busy ──> ...
                      │                       └── no request for a while: it ends
    start 7 again ────┘ the other one ends

A sequence has one request at a time: requests arrive by several connections, so the order of two
requests would be undefined.
"""

from __future__ import annotations

import threading
from time import perf_counter
from typing import TypeAlias

from penstock.core.errors import InvalidInput, PenstockError, check_count, wrong_type
from penstock.core.records import dataclass
from penstock.executors.control import Control, begin_run, end_run
from penstock.serving.request_records import ReplicasClosed
from penstock.stepping.stepper import StepSequence

Key: TypeAlias = "int | str"
"""a sequence id; 7 and "7" differ"""

MOST, IDLE = 1024, 60.0


class UnknownSequence(InvalidInput):
    """A request names a sequence that is not open, and does not start one."""


class SequenceConflict(PenstockError):  # noqa: N818
    """A request arrived while another request of the same sequence was running."""


class TooManySequences(PenstockError):  # noqa: N818
    """A request would start a sequence beyond the maximum number."""


@dataclass(eq=False, slots=True)
class OpenSequence:
    """An open sequence. ``used``: the end of its last request; ``busy``: whether one is running."""

    sequence: StepSequence
    used: float
    busy: bool = True


@dataclass(slots=True)
class SequenceCounts:
    """Counts of a model's sequences: ``open`` now; ``begun`` so far, of which ``idle`` have ended
    for lack of requests; ``refused``, because the maximum number were open."""

    open: int = 0
    begun: int = 0
    idle: int = 0
    refused: int = 0


class SequenceTable:
    """The open sequences of a model, for use by any thread.

    Args:
        most: The maximum number of open sequences; a further one raises ``TooManySequences``.
        idle: Seconds without a request after which a sequence ends.
    """

    def __init__(self, most: int = MOST, idle: float = IDLE) -> None:
        check_count("most", most)
        if not isinstance(idle, int | float) or not idle > 0:
            raise wrong_type("idle", idle, "a number of seconds above 0")
        self.most, self.idle = most, idle
        # The least recently used first, except for busy ones.
        self._open: dict[Key, OpenSequence] = {}
        self._busy = self._begun = self._ended_idle = self._refused = 0
        # Never held while a sequence is closed: that takes the lock of the stepper, and ends a
        # request, which calls ``release``.
        self._lock = threading.RLock()
        self._released = threading.Condition(self._lock)
        self._timer: Control | None = None
        self._closed = False

    @property
    def counts(self) -> SequenceCounts:
        """Return the counts of sequences so far."""
        with self._lock:
            return SequenceCounts(len(self._open), self._begun, self._ended_idle, self._refused)

    def check_open(self) -> None:
        """Raise ``ReplicasClosed`` if no request is accepted."""
        if self._closed:
            raise ReplicasClosed("the sequences are closed")

    def start(self, key: Key, sequence: StepSequence) -> OpenSequence:
        """Open a sequence, replacing one with the same id. Raises ``TooManySequences``."""
        own = OpenSequence(sequence, perf_counter())
        with self._lock:
            self.check_open()
            before = self._open.pop(key, None)
            if before is None and len(self._open) >= self.most:
                self._refused += 1
                raise TooManySequences(
                    f"{self.most} sequences are open, which is the limit: end some, or try again "
                    "later"
                )
            self._open[key] = own
            self._busy += 1
            self._begun += 1
        if before is not None:
            before.sequence.close()
        self._set_timer()
        return own

    def resume(self, key: Key) -> OpenSequence:
        """Return the sequence of a request that does not start one. Raises ``UnknownSequence``, and
        ``SequenceConflict`` if another request of the sequence is running."""
        with self._lock:
            self.check_open()
            own = self._open.get(key)
            if own is None:
                raise UnknownSequence(
                    f"sequence {key!r} does not exist: its first request must have the parameter "
                    f'"sequence_start": true, and it ends after {self.idle:g} s without a request, '
                    "or if a client disconnects before the response"
                )
            if own.busy:
                raise SequenceConflict(
                    f"another request of sequence {key!r} is running: wait for its response, or "
                    "send several frames in one request"
                )
            own.busy = True
            self._busy += 1
        return own

    def release(self, key: Key, own: OpenSequence, *, ends: bool) -> bool:
        """Let a sequence wait, or end. Return False if it was ended or restarted meanwhile."""
        with self._lock:
            is_open = self._open.get(key) is own
            if is_open:
                # At the end, as the most recently used sequence.
                del self._open[key]
                if not ends:
                    self._open[key] = own
            own.busy, own.used = False, perf_counter()
            self._busy -= 1
            self._released.notify_all()
        if ends:
            own.sequence.close()
        return is_open

    def end(self, key: Key, own: OpenSequence) -> None:
        """End a sequence, and its running request if any."""
        with self._lock:
            if self._open.get(key) is own:
                del self._open[key]
        own.sequence.close()

    def close(self) -> None:
        """Refuse further requests, wait for running ones, and drop all sequences."""
        with self._released:
            self._closed = True
            self._released.wait_for(lambda: not self._busy)
            timer, self._timer = self._timer, None
            self._open.clear()
        if timer is not None:
            end_run(timer)

    def _set_timer(self) -> None:
        """Schedule ``_expire`` for the end of the idle time of the least recently used sequence."""
        with self._lock:
            if self._timer is not None or not self._open or self._closed:
                return
            now = perf_counter()
            used = next((own.used for own in self._open.values() if not own.busy), now)
            # The watchdog of runs is the timer: a run that is never stopped but by its time.
            timer = self._timer = begin_run(used + self.idle - now, None)
        # Without the lock, since the listener is called at once if the time has passed.
        timer.add_listener(self._expire)

    def _expire(self, error: Exception) -> None:
        """End the sequences without a request for ``idle`` seconds."""
        now, late = perf_counter(), []
        with self._lock:
            self._timer = None
            for key, own in [*self._open.items()]:
                if not own.busy and own.used + self.idle > now:
                    break
                if not own.busy:
                    late.append(self._open.pop(key))
            self._ended_idle += len(late)
        for own in late:
            own.sequence.close()
        self._set_timer()
