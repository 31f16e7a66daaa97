"""The admission queue: long runs wait in it while others compute on every core of the process.

If more runs compute at the same time than there are cores, the system's scheduler makes them take
turns anyway, but they evict each other's weights and results from the caches, and hold an arena
each. The queue admits as many runs as there are cores at a time; the others wait in the order of
arrival::

    2 cores    client 1   run ........ (3) run ....
               client 2   run .......... (4) run ..
               client 3   wait         run ........
               client 4   wait           run ......

No run waits for much longer than it would have shared the cores with all others: longer runs do not
delay a shorter one, and runs that wait for one another, on whatever threads, proceed. Short runs
begin at once: the queue only ensures that two of them do not share a core while one is idle.

A run of a higher priority does not wait for those of a lower one. These pause when they next check
for a stop, a few milliseconds later, and wait again, ahead of others of their priority::

    client 1   run .... pause        .....
    client 2, of a higher priority   wait run ......

A run that has waited for long continues beside the others, and pauses no more.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Set
from contextlib import suppress
from functools import cache
from time import monotonic
from typing import Protocol

from penstock.core.checkpoints import LOOK_S, SHORT_RUN_S, WAKE_S
from penstock.host.fork import renewed, shared_lock
from penstock.host.thread_share import ThreadShare, announce
from penstock.host.threads import Line, cores_of_thread, usable_cores

# A run waits for at most this multiple of the time that it would take if all runs shared the cores:
# times vary.
_SLACK = 2
# The longest wait of a run for those of a higher priority, as a multiple of its own time.
_PATIENCE = 8


class Stoppable(Protocol):
    """A run that may be stopped while it waits."""

    stopped: bool
    priority: int

    def own(self) -> Stoppable:
        """Return a control that no other run uses."""
        ...

    def ask_to_pause(self, pause: Callable[[], None]) -> None: ...

    def stop(self) -> None: ...

    def add_listener(self, listener: Callable[[Exception], None]) -> None: ...

    def remove_listener(self, listener: Callable[[Exception], None]) -> None: ...


class Ticket:
    """The ticket of one run in the queue, on the calling thread, used as a context manager.

    ``core`` is the thread's core when the run was admitted, or -1 if that is not known.
    """

    __slots__ = (
        *("_queue", "_seconds", "_woken", "admitted", "adopted", "announced", "core"),
        *("may_pause", "native", "paused", "priority", "run", "share", "thread"),
    )

    def __init__(self, queue: AdmissionQueue, seconds: float, run: Stoppable) -> None:
        self._queue = queue
        self._seconds = seconds
        self.run = run
        self.priority = run.priority
        self.may_pause = False
        """whether the run checks a control of its own, and has not waited for long"""
        self.share: ThreadShare | None = None
        """the run's share of the threads of kernels, of which it has ``adopted`` some"""
        self.adopted = 1
        self.paused = 0.0
        """seconds for which it has paused"""
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
        except BaseException:  # the run was stopped, for example, or KeyboardInterrupt
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

    def pause(self) -> None:
        """Wait again, on the run's thread, while runs of a higher priority compute."""
        patience = self._queue.rejoin(self, self._seconds)
        if patience <= 0:
            return
        begin = monotonic()
        if self.share is not None:
            self.share.leave()
        try:
            self._wait(begin + patience)
        finally:
            if self.share is not None:
                self.share.enter_again(self.adopted)
            self.paused += monotonic() - begin

    def _wait(self, end: float) -> None:
        run, woken = self.run, self._woken
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
        """End the wait: the run is admitted, or was stopped with ``error``."""
        if self._woken is not None:
            with suppress(RuntimeError):  # the lock is already released
                self._woken.release()


class AdmissionQueue:
    """Lets ``count`` runs compute at a time, each on a core of its own as far as the queue knows.

    A thread that the program has bound to cores outside the process's initial set does not wait:
    the queue does not know what else runs on these.
    """

    def __init__(self, count: int) -> None:
        self.count = count
        self.ranked = False
        """whether there have been runs of different priorities"""
        self.cores = cores_of_thread()
        self._lock = shared_lock()
        self.forked()
        renewed(self)

    def forked(self) -> None:
        """Reset a forked child, in which no run is admitted, not even the one that forked it."""
        self._inside: dict[int, Ticket] = {}  # by thread
        self._waiting: Line[Ticket] = Line()

    @property
    def inside(self) -> int:
        """The number of runs that have been admitted and have not left."""
        return len(self._inside)

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    def ticket(self, seconds: float, run: Stoppable) -> Ticket:
        """Return the ticket of a run that takes about ``seconds`` on a core of its own."""
        if run.priority:
            self.ranked = True
        ticket = Ticket(self, seconds, run.own() if self.ranked else run)
        ticket.may_pause = self.ranked
        return ticket

    def ask(self, ticket: Ticket, seconds: float) -> float:
        """Admit a run if there is room, or append it to the queue. Return the seconds that it must
        wait. On a thread with an admitted run, further runs count as parts of that run."""
        inside = self._inside
        with self._lock:
            if ticket.thread in inside:
                return 0.0
            # Most often no other run is under way, which needs no system call.
            if not inside:
                inside[ticket.thread] = ticket
                return 0.0
            if cores_of_thread() != self.cores:
                return 0.0
            if self.ranked:
                patience = self._ask_others(ticket, seconds)
                if patience or ticket.thread in inside:
                    return patience
            waits = bool(self._waiting) and self._waiting.first.priority >= ticket.priority
            if not waits and self._has_room(ticket.priority):
                self._move(ticket)
                inside[ticket.thread] = ticket
                return 0.0
            # The run would have ended by the time that it is woken.
            # Where runs of 3 ms waited, four clients made 0.88 to 0.94 of the runs (decision 64).
            if seconds < SHORT_RUN_S:
                return 0.0
            return self._queue(ticket, _SLACK * seconds)

    def _queue(self, ticket: Ticket, seconds: float, *, front: bool = False) -> float:
        """Queue a run. Return its longest wait, given its ``seconds`` alone on the cores."""
        ticket.prepare()
        self._waiting.append(ticket, ticket.priority, front=front)
        return seconds * (len(self._inside) + len(self._waiting)) / self.count

    def _ask_others(self, ticket: Ticket, seconds: float) -> float:
        """Ask runs of a lower priority to pause, or wait for one of a higher priority. Return how
        long to wait, 0 if there is neither."""
        lower = [other for other in self._inside.values() if _pauses_for(other, ticket.priority)]
        for other in lower:
            other.run.ask_to_pause(other.pause)
        if lower and seconds < SHORT_RUN_S:
            self._inside[ticket.thread] = ticket  # it will almost have ended when the others pause
        elif lower:
            self._queue(ticket, seconds)
            # Kernels of the others may be in the middle of a product.
            return max(LOOK_S, seconds / 2)
        elif seconds >= SHORT_RUN_S and self._is_higher_inside(ticket.priority):
            return self._queue(ticket, _PATIENCE * seconds)
        return 0.0

    def _has_room(self, priority: int) -> bool:
        """Whether a run fits beside those that are admitted, or replaces one of lower priority."""
        if len(self._inside) < self.count:
            return True
        if not self.ranked:
            return False
        return len([1 for own in self._inside.values() if own.priority >= priority]) < self.count

    def _is_higher_inside(self, priority: int) -> bool:
        return any(other.priority > priority for other in self._inside.values())

    def rejoin(self, ticket: Ticket, seconds: float) -> float:
        """Let an admitted run wait ahead of others of its priority. Return how long."""
        with self._lock:
            if self._inside.get(ticket.thread) is not ticket:
                return 0.0  # it has left since it was asked to pause
            del self._inside[ticket.thread]
            ticket.admitted = False
            patience = self._queue(ticket, _PATIENCE * seconds, front=True)
            self._admit_next()
            return patience

    def _admit_next(self) -> None:
        """Admit waiting runs while there is room and none of a higher priority is admitted."""
        while self._waiting:
            first = self._waiting.first.priority
            if not self._has_room(first):
                return
            # Wait until all runs of a lower priority pause, which would share the cores.
            if self._is_higher_inside(first):
                return
            if any(_pauses_for(other, first) for other in self._inside.values()):
                return
            self._admit(self._waiting.popleft())

    def admit(self, ticket: Ticket) -> None:
        """Admit a run that has waited for its longest time, beside those already admitted."""
        with self._lock, suppress(ValueError):  # it has just been admitted
            self._waiting.remove(ticket)
            ticket.may_pause = False
            self._admit(ticket)

    def leave(self, ticket: Ticket) -> None:
        """Give up a ticket, admitted or waiting, and admit the next run in the queue."""
        with self._lock:
            self.started(ticket)
            if self._inside.get(ticket.thread) is ticket:
                del self._inside[ticket.thread]
                self._admit_next()
            elif not ticket.admitted:
                with suppress(ValueError):  # the run has not asked
                    self._waiting.remove(ticket)

    def started(self, ticket: Ticket) -> None:
        """Note that the calling thread, whose run was admitted, is awake."""
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
        announce(1)  # runs that begin before the thread is awake share the cores with it
        ticket.wake()

    def _move(self, ticket: Ticket) -> None:
        """Move the calling thread away from a core on which another run is."""
        taken, ticket.core = self._taken(), core_of_thread()
        free = self.cores - taken
        if ticket.core in taken and free:
            # Forbidden and allowed again: the system moves a thread at once only if it must.
            allow(0, free)
            allow(0, self.cores)
            ticket.core = core_of_thread()

    def _taken(self) -> set[int]:
        """The cores of the admitted runs."""
        return {ticket.core for ticket in self._inside.values()}


def _pauses_for(ticket: Ticket, priority: int) -> bool:
    """Whether an admitted run pauses for one of a given priority."""
    return ticket.may_pause and ticket.priority < priority


# Not OMP_NUM_THREADS: programs that set it to 1 and start a thread for each core use all of them.
ADMISSIONS = AdmissionQueue(usable_cores())
"""the queue of all runs of the process"""


def ticket_for(seconds: float, run: Stoppable) -> Ticket:
    """Return the ticket in ``ADMISSIONS`` of a run that takes about ``seconds`` on its own core."""
    return ADMISSIONS.ticket(seconds, run)


# The cores on which threads run.
#
# Linux may leave two threads on one core for seconds while another is idle, and may wake a thread
# on the core of one that computes. Threads are not bound here: a thread is sent to other cores, and
# then allowed on all of them again.


def core_of_thread() -> int:
    """Return the core on which the calling thread runs, or -1 if the system does not tell."""
    return _current()()


def allow(thread: int, cores: Set[int]) -> None:
    """Restrict a thread to ``cores``; it moves there at once. ``thread`` is its system thread ID,
    or 0 for the calling thread. If the system cannot do that, nothing changes."""
    with suppress(AttributeError, OSError):
        os.sched_setaffinity(thread, cores)


@cache
def _current() -> Callable[[], int]:
    import ctypes

    try:
        # The interpreter's lock is held during the call, which takes 50 ns.
        function: Callable[[], int] = ctypes.PyDLL(None).sched_getcpu
    except (AttributeError, OSError, TypeError):
        return lambda: -1
    return function
