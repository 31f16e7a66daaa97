"""One thread of the process that looks whether events of devices have come.

A run whose next step needs a device hands its event over and leaves its thread: however many runs
and streams wait, this one thread does (NNC's scheduler thread). Events can only be asked, and a
thread that blocked for one of them would not see the others come, so that they are asked in turn,
again and again, at growing intervals while none comes; without any the thread blocks.
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
    """Calls functions when events have come, on a thread that is started when it is first needed.
    ``thread`` is None before."""

    def __init__(self) -> None:
        self.forked()
        renewed(self)

    def forked(self) -> None:
        """Watch nothing, as in a forked child: its parent watches the events."""
        self.thread: threading.Thread | None = None
        self._lock = threading.RLock()
        self._new: deque[Watched] = deque()
        # Released when there is something new. These operations are atomic: a signal handler may
        # interrupt them and add an event, too. SimpleQueue.get with a timeout as short as these
        # may wait without end (seen with Python 3.11), if its time is over before it has begun.
        self._arrived = threading.Lock()

    def add(self, query: Callable[[], bool], function: Callable[[], object]) -> None:
        """Call ``function`` once ``query()`` is true, or raises: what comes next finds out why."""
        self._new.append((query, function))
        with suppress(RuntimeError):  # it is released
            self._arrived.release()
        if self.thread is None:
            with self._lock:
                if self.thread is None:
                    # Python would wait for a thread that is no daemon before it calls atexit.
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
            # Where one has come, others are likely to be near.
            pause = shortest if len(left) < len(watched) else pause
            watched = left


def _look(watched: list[Watched]) -> list[Watched]:
    """Call the functions of events that have come; the others. A function of its own, so that the
    thread does not refer to a run while it waits."""
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
