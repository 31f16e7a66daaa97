"""The state that the parts of one run share: their threads, the first error, and the end.

A part moves its tokens on one thread at a time, and rests when it has no work. A job from another
thread, such as a value of another part, wakes it. The thread that brings the job works on the woken
part after its own, since an immediate call could recurse without bound; if it begins a long kernel,
another thread takes the part. The run ends when all parts rest, since none can wake another.
If a run has parts in other processes, a part that waits for a value from these does not rest, and
``dispatch`` chooses the thread on which it continues when the value arrives.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from threading import get_ident
from typing import Protocol

from penstock.core.errors import Cancelled
from penstock.core.types import RunValues
from penstock.executors.base import quiet
from penstock.executors.control import Control
from penstock.executors.frames.rendezvous import Rendezvous
from penstock.host.current_run import working_for
from penstock.host.threads import Workers

Dispatch = Callable[[Callable[[], object]], object]
"""Calls a function, now or later, perhaps on another thread."""


class PartRun(Protocol):
    """A part of a run. It is ``resting`` while it has no work and no kernels on other threads."""

    resting: bool

    @property
    def waits(self) -> bool:
        """Whether the part is idle, without kernels on other threads of the process."""

    def go(self) -> None:
        """Work on this part on the calling thread until no work is left."""

    def post(self, *job: object) -> None:
        """Queue a call for the part's thread. ``job``: the function and its arguments."""

    def outputs(self) -> RunValues:
        """The outputs of a part that has ended. Raises ``DeadTensor`` if one has no value."""

    def release(self) -> None:
        """Release the values of a run that has failed."""


# A thread that wakes another part queues it instead of calling it at once: otherwise, a loop
# between two parts would add a nested call for every value that they exchange. The loop stays on
# one thread, without a hand-over for each value (decision 30).
#
# ``_busy`` counts the parts that do not rest. Only a working part can wake another one, so the run
# is over when the last part rests. The lock guards the count, since parts rest on different
# threads.


class Barrier:
    """The shared state and ``lock`` of the parts of one run.

    ``on_end`` is called once, by the thread that ends the run. ``rendezvous``: the one shared with
    parts in other processes (``is_remote``); by default, a run has one if it has several parts.
    ``dispatch`` calls a function when a part is woken; by default, it is called at once.
    """

    def __init__(
        self,
        control: Control,
        on_end: Callable[[], None],
        rendezvous: Rendezvous | None = None,
        dispatch: Dispatch | None = None,
    ) -> None:
        self.control = control
        self.lock = threading.RLock()
        self.rendezvous = rendezvous
        self.is_remote = rendezvous is not None
        self._dispatch = dispatch
        self.parts: Sequence[PartRun] = ()
        self.error: BaseException | None = None
        self._on_end: Callable[[], None] | None = on_end  # a cycle, which ``end`` breaks
        self._ready: deque[PartRun] = deque()
        self._threads: set[int] = set()
        self._busy = 0
        self._over = False
        self._listens = False

    def begin(self, parts: Sequence[PartRun], *, listens: bool) -> None:
        """Run new parts on the calling thread until it has no more work.

        ``listens``: whether all parts may wait for external events at the same time, so that none
        would notice a stop.
        """
        self.parts = parts
        if len(parts) > 1 and self.rendezvous is None:
            self.rendezvous = Rendezvous()
        self._busy = len(parts)
        self._ready.extend(parts)
        if listens:
            self._listens = True
            self.control.add_listener(self._stopped)
        self._work()

    def resume(self, part: PartRun) -> None:
        """Queue a part that was woken, or that yields its thread to another part."""
        self._ready.append(part)
        # A thread of this run checks the queue again when its part has no more work.
        if get_ident() in self._threads:
            return
        if self._dispatch is None:
            quiet(self._work)
        else:
            self._dispatch(partial(quiet, self._work))

    @property
    def waiting(self) -> bool:
        """Whether a part waits for a thread."""
        return bool(self._ready)

    def help(self, pool: Workers) -> None:
        """Offer waiting parts to another thread, before this one begins a long kernel."""
        # Offered, not submitted: without a free thread, this one takes the parts after its kernel.
        if self._ready:
            pool.offer(partial(quiet, self._work))

    def _work(self) -> None:
        thread = get_ident()
        self._threads.add(thread)
        try:
            while self._ready:
                try:
                    part = self._ready.popleft()
                except IndexError:  # another thread was faster
                    break
                working_for(self.control, part.go)
        finally:
            self._threads.discard(thread)

    # The caller of the following methods must hold the lock.

    def woke(self, part: PartRun) -> bool:
        """Count a resting part as busy again. Return False if the run is over."""
        if not self._over:
            self._busy += 1
        return not self._over

    def rested(self) -> bool:
        """Count a part as resting. Return whether it was the last, so that the run is over."""
        self._busy -= 1
        self._over = not self._busy
        return self._over

    @property
    def idle(self) -> bool:
        """Whether only values from other processes can continue the run."""
        return all(part.waits for part in self.parts)

    # The end of the run.

    def fail(self, error: BaseException) -> None:
        """Let the run end with ``error`` if that is its first error, and stop the other parts."""
        with self.lock:
            if self.error is not None:
                return
            self.error = error
        # Without the lock: both calls reach receivers and listeners, which post to other parts.
        if self.rendezvous is not None:
            self.rendezvous.abort(error)
        if not self.control.stopped:
            self.control.set(Cancelled("another part of the run has failed"))

    def end(self) -> None:
        """End the run, whose parts all rest."""
        if self._listens:
            self.control.remove_listener(self._stopped)
        if self.rendezvous is not None:
            self.rendezvous.close()
        on_end, self._on_end = self._on_end, None
        assert on_end is not None
        working_for(None, on_end)  # user code, which is no longer part of this run

    def _stopped(self, error: Exception) -> None:
        """Wake the parts after a stop, which may occur while no thread works on the run."""
        for part in self.parts:
            if not part.resting:
                part.post(lambda: None)  # so that its thread checks the control
