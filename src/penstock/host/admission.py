"""The admission queue, in which long runs wait while others compute on every core of the process.

Runs that compute at the same time on fewer cores than there are runs take turns on them anyway, by
the scheduler of the system, but push each other's weights and results out of the caches, and hold
an arena each. The queue admits as many runs as there are cores at a time; the others wait, first
come, first served::

    2 cores    client 1   run ........ (3) run ....
               client 2   run .......... (4) run ..
               client 3   wait         run ........
               client 4   wait           run ......

No run waits for much longer than it would have shared the cores with all others: a run is not kept
waiting by longer ones, and runs that wait for one another, on whatever threads, go on. Short runs
begin at once: the queue only ensures that two of them do not share a core while one is idle.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable, Set
from contextlib import suppress
from functools import cache
from time import monotonic
from typing import Protocol

from penstock.core.checkpoints import SHORT_RUN_S, WAKE_S
from penstock.host.fork import renewed, shared_lock
from penstock.host.thread_share import announce
from penstock.host.threads import cores_of_thread, usable_cores

# A run waits for at most this many times the time that it would take if all runs shared the cores:
# times vary.
_SLACK = 2


class Stoppable(Protocol):
    """A run that may be stopped while it waits."""

    stopped: bool

    def stop(self) -> None: ...

    def add_listener(self, listener: Callable[[Exception], None]) -> None: ...

    def remove_listener(self, listener: Callable[[Exception], None]) -> None: ...


class Ticket:
    """The ticket of one run in the queue, on the calling thread; a context manager.

    ``core`` is where the thread was when the run was let in, -1 if that is not known.
    """

    __slots__ = (
        *("_queue", "_run", "_seconds", "_woken"),
        *("admitted", "announced", "core", "native", "thread"),
    )

    def __init__(self, queue: AdmissionQueue, seconds: float, run: Stoppable) -> None:
        self._queue = queue
        self._seconds = seconds
        self._run = run
        self.thread = threading.get_ident()
        self.native = 0
        self.core = -1
        self.admitted = self.announced = False
        self._woken: threading.Lock | None = None

    def __enter__(self) -> Ticket:
        try:
            patience = self._queue.ask(self, self._seconds)
            if patience > 0:
                self._wait(monotonic() + patience)
        except BaseException:  # the run was stopped, or KeyboardInterrupt, for example
            self._queue.leave(self)
            raise
        return self

    def __exit__(self, *exception: object) -> None:
        self._queue.leave(self)

    def prepare(self) -> None:
        """Prepare to wait."""
        self.native = threading.get_native_id()
        self._woken = threading.Lock()
        self._woken.acquire()

    def _wait(self, end: float) -> None:
        run, woken = self._run, self._woken
        assert woken is not None
        run.add_listener(self.wake)
        try:
            while not self.admitted:
                if run.stopped:
                    run.stop()
                rest = end - monotonic()
                if rest <= 0:
                    self._queue.admit(self)
                else:
                    woken.acquire(timeout=min(rest, WAKE_S))
        finally:
            run.remove_listener(self.wake)
            if self.admitted:
                self._queue.started(self)
                self.core = core_of_thread()

    def wake(self, error: Exception | None = None) -> None:
        """End the wait: the run is inside, or was stopped."""
        if self._woken is not None:
            with suppress(RuntimeError):  # it has been woken
                self._woken.release()


class AdmissionQueue:
    """Lets ``count`` runs compute at a time, each on a core of its own, as far as it can tell.

    A thread that the program has bound to cores other than the process had at first does not wait:
    the queue knows nothing of what else is on these.
    """

    def __init__(self, count: int) -> None:
        self.count = count
        self.cores = cores_of_thread()
        self._lock = shared_lock()
        self.forked()
        renewed(self)

    def forked(self) -> None:
        """In a forked child no run is inside, not even the one that has forked it."""
        self._inside: dict[int, Ticket] = {}  # by thread
        self._waiting: deque[Ticket] = deque()

    @property
    def inside(self) -> int:
        """The number of runs that have been let in and have not left."""
        return len(self._inside)

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    def ticket(self, seconds: float, run: Stoppable) -> Ticket:
        """The ticket of a run that takes about ``seconds`` on a core of its own."""
        return Ticket(self, seconds, run)

    def ask(self, ticket: Ticket, seconds: float) -> float:
        """Admit a run if there is room, or append it to the queue; returns how long it is to wait,
        in seconds. On a thread that is inside, runs belong to the one that was let in."""
        inside = self._inside
        with self._lock:
            if ticket.thread in inside:
                return 0.0
            # Most often no other run is under way: that needs no system call.
            if not inside:
                inside[ticket.thread] = ticket
                return 0.0
            if cores_of_thread() != self.cores:
                return 0.0
            if len(inside) < self.count and not self._waiting:
                self._move(ticket)
                inside[ticket.thread] = ticket
                return 0.0
            # It would have ended by the time that it is woken.
            # Where runs of 3 ms waited, four clients made 0.88 to 0.94 of the runs (decision 64).
            if seconds < SHORT_RUN_S:
                return 0.0
            ticket.prepare()
            self._waiting.append(ticket)
            return _SLACK * seconds * (len(inside) + len(self._waiting)) / self.count

    def admit(self, ticket: Ticket) -> None:
        """Let a run in that has waited for long enough, beside those that are inside."""
        with self._lock, suppress(ValueError):  # it has just been let in
            self._waiting.remove(ticket)
            self._admit(ticket)

    def leave(self, ticket: Ticket) -> None:
        """Give up a ticket, admitted or waiting; the next in the queue is admitted."""
        with self._lock:
            self.started(ticket)
            if self._inside.get(ticket.thread) is ticket:
                del self._inside[ticket.thread]
                while self._waiting and len(self._inside) < self.count:
                    self._admit(self._waiting.popleft())
            elif not ticket.admitted:
                with suppress(ValueError):  # it has not asked
                    self._waiting.remove(ticket)

    def started(self, ticket: Ticket) -> None:
        """The calling thread, which has been let in, is awake."""
        with self._lock:
            if ticket.announced:
                ticket.announced = False
                announce(-1)
                allow(0, self.cores)

    def _admit(self, ticket: Ticket) -> None:
        free = self.cores - self._taken()
        if free and len(free) < len(self.cores):
            allow(ticket.native, free)
        self._inside[ticket.thread] = ticket
        ticket.admitted = ticket.announced = True
        announce(1)  # others that begin before the thread is awake share the cores with it
        ticket.wake()

    def _move(self, ticket: Ticket) -> None:
        """Let the calling thread leave a core on which another run is."""
        taken, ticket.core = self._taken(), core_of_thread()
        free = self.cores - taken
        if ticket.core in taken and free:
            # Sent away and allowed back: the system moves a thread at once only if it may not stay.
            allow(0, free)
            allow(0, self.cores)
            ticket.core = core_of_thread()

    def _taken(self) -> set[int]:
        """The cores of those that are inside."""
        return {ticket.core for ticket in self._inside.values()}


# Not OMP_NUM_THREADS: who sets that to 1 and starts a thread for each core means all cores.
ADMISSIONS = AdmissionQueue(usable_cores())
"""the queue of all runs of the process"""


def ticket_for(seconds: float, run: Stoppable) -> Ticket:
    """The ticket in ``ADMISSIONS`` of a run that takes about ``seconds`` on a core of its own."""
    return ADMISSIONS.ticket(seconds, run)


# The cores on which threads run.
#
# Linux may leave two threads on one core for seconds while another is idle, and may wake a thread
# on the core of one that computes. Nothing here stays bound: a thread is sent to other cores, and
# then allowed on all of them again.


def core_of_thread() -> int:
    """The core on which the calling thread runs, -1 if the system does not tell."""
    return _current()()


def allow(thread: int, cores: Set[int]) -> None:
    """Let a thread run on ``cores`` only; it goes there at once. ``thread`` is the number that the
    system has given it, 0 the calling one. Where that is not possible, nothing changes."""
    with suppress(AttributeError, OSError):
        os.sched_setaffinity(thread, cores)


@cache
def _current() -> Callable[[], int]:
    import ctypes

    try:
        # With the interpreter's lock held: the call takes 50 ns.
        function: Callable[[], int] = ctypes.PyDLL(None).sched_getcpu
    except (AttributeError, OSError, TypeError):
        return lambda: -1
    return function
