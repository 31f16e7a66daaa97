"""One thread of the process that polls events of devices.

A run whose next step needs a device registers an event and leaves its thread: however many runs and
streams wait, only this thread does (as NNC's scheduler thread). Events can only be polled, and a
thread that blocked for one of them would miss the others. So they are polled in turn, at growing
intervals while none has completed; without events the thread blocks.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress

from penstock.core.checkpoints import EVENT_S
from penstock.host.fork import renewed
from penstock.host.threads import report_thread_exception

Watched = tuple[Callable[[], bool], Callable[[], object]]


class EventWatch:
    """Calls functions when events have completed, on a thread that is started when it is first
    needed. ``thread`` is None before."""

    def __init__(self) -> None:
        self.forked()
        renewed(self)

    def forked(self) -> None:
        """Watch nothing in a forked child, since its parent watches the events."""
        self.thread: threading.Thread | None = None
        self._lock = threading.RLock()
        self._new: deque[Watched] = deque()
        # Released when there is a new event. These operations are atomic: a signal handler may
        # interrupt them and add an event, too. SimpleQueue.get with such a short timeout may wait
        # for ever (seen with Python 3.11) if the timeout ends before the wait has begun.
        self._arrived = threading.Lock()

    def add(self, query: Callable[[], bool], function: Callable[[], object]) -> None:
        """Call ``function`` once ``query()`` is true or raises, which later steps then report."""
        self._new.append((query, function))
        with suppress(RuntimeError):  # the lock is already released
            self._arrived.release()
        if self.thread is None:
            with self._lock:
                if self.thread is None:
                    # Python would join a non-daemon thread before it calls atexit handlers.
                    self.thread = threading.Thread(
                        target=self._watch,
                        args=(self._new, self._arrived),
                        name="penstock-events",
                        daemon=True,
                    )
                    self.thread.start()

    def _watch(self, new: deque[Watched], arrived: threading.Lock) -> None:
        watched: list[Watched] = []
        shortest, longest = EVENT_S
        pause = shortest
        while True:
            if arrived.acquire(timeout=pause if watched else -1):
                pause = shortest
            else:
                pause = min(2 * pause, longest)
            while new:
                watched.append(new.popleft())
            left = _look(watched)
            # If one event has completed, others are likely to complete soon.
            pause = shortest if len(left) < len(watched) else pause
            watched = left


def _look(watched: list[Watched]) -> list[Watched]:
    """Call the functions of completed events and return the others. A separate function, so that
    the thread does not refer to a run while it waits."""
    left = []
    for query, function in watched:
        if not _come(query):
            left.append((query, function))
            continue
        try:
            function()
        except BaseException:
            report_thread_exception()
    return left


def _come(query: Callable[[], bool]) -> bool:
    try:
        return query()
    except Exception:
        return True


EVENTS = EventWatch()
