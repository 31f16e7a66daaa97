"""The state that the parts of one run share: their threads, the first error, and the end.

A part moves its tokens on one thread at a time, and rests when it has nothing to do. A job from
elsewhere, such as a value of another part, wakes it. The thread that brought the job does not enter
the part at once, which could recurse without end, but after its own part; or another thread does,
if this one begins something long. The run ends when all parts rest, since none can wake another.
Where a run goes on in other processes, too, a part that waits for a value of theirs does not rest,
and ``dispatch`` says on which thread it goes on when the value comes.
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
"""Calls a function, now or soon, perhaps on another thread."""


class PartRun(Protocol):
    """A part of a run. It is ``resting`` while it has no work and none of its kernels runs on
    another thread."""

    resting: bool

    @property
    def waits(self) -> bool:
        """Whether it is idle, with no work in progress elsewhere in the process."""

    def go(self) -> None:
        """Work on this part on the calling thread until no work is left."""

    def post(self, *job: object) -> None:
        """Queue a call for the part's thread: the first element of ``job`` is the function, the
        others are its arguments."""

    def outputs(self) -> RunValues:
        """The outputs of a part that has ended; raises ``DeadTensor``."""

    def release(self) -> None:
        """Give up the values of a run that has failed."""


# A thread that wakes another part queues it, instead of entering it at once: otherwise, a loop
# between two parts would add a nested call for every value that they exchange. So the loop stays on
# one thread, without a hand-over for each value (decision 30).
#
# ``_busy`` counts the parts that are not at rest. Only a working part can wake another one, so the
# run is over when the last part rests. It is guarded by the lock, since parts rest on different
# threads.


class Barrier:
    """The shared state and ``lock`` of the parts of one run.

    ``on_end`` is called once, by the thread that ends the run. A run has a ``rendezvous`` only if
    it has several parts, or if it is given one because other parts are in other processes
    (``is_remote``). ``dispatch`` calls a function; by default, it is called at once.
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
        self._on_end: Callable[[], None] | None = on_end  # refers to this barrier: see ``end``
        self._ready: deque[PartRun] = deque()
        self._threads: set[int] = set()
        self._busy = 0
        self._over = False
        self._listens = False

    def begin(self, parts: Sequence[PartRun], *, listens: bool) -> None:
        """Run new parts on the calling thread until it has no more work.

        ``listens``: whether all parts may wait for something outside the run at once, so that none
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
        """Queue a part that has become active, or that leaves its thread to another part."""
        self._ready.append(part)
        # A thread of this run looks at the queue again when its own part has nothing to do.
        if get_ident() in self._threads:
            return
        if self._dispatch is None:
            quiet(self._work)
        else:
            self._dispatch(partial(quiet, self._work))

    @property
    def waiting(self) -> bool:
        """Whether some part waits for a thread."""
        return bool(self._ready)

    def help(self, pool: Workers) -> None:
        """Offer waiting parts to another thread, before this one begins a long kernel."""
        # Not submitted: without a free thread, this thread takes the parts after its kernel.
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

    # With the lock held.

    def woke(self, part: PartRun) -> bool:
        """A part that was resting goes on; False if the run is over."""
        if not self._over:
            self._busy += 1
        return not self._over

    def rested(self) -> bool:
        """A part rests; whether it was the last, so that the run is over."""
        self._busy -= 1
        self._over = not self._busy
        return self._over

    @property
    def idle(self) -> bool:
        """Whether nothing but values of other processes can let the run go on."""
        return all(part.waits for part in self.parts)

    # Ends.

    def fail(self, error: BaseException) -> None:
        """Let the run end with ``error`` if it is the first, and stop the other parts."""
        with self.lock:
            if self.error is not None:
                return
            self.error = error
        # Outside of the lock: both call receivers and listeners, which post to other parts.
        if self.rendezvous is not None:
            self.rendezvous.abort(error)
        if not self.control.stopped:
            self.control.set(Cancelled("another part of the run has failed"))

    def end(self) -> None:
        """End the run: all parts rest."""
        if self._listens:
            self.control.remove_listener(self._stopped)
        if self.rendezvous is not None:
            self.rendezvous.close()
        on_end, self._on_end = self._on_end, None
        assert on_end is not None
        working_for(None, on_end)  # the thread may be about to do something else

    def _stopped(self, error: Exception) -> None:
        """Wake the parts after a stop, which may come while no thread works on the run."""
        for part in self.parts:
            if not part.resting:
                part.post(lambda: None)  # its thread sees the stop
