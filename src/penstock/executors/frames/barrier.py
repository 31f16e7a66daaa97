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
    """A part of a run. ``resting`` while it has nothing to do, and none of its kernels runs
    elsewhere."""

    resting: bool

    @property
    def waits(self) -> bool:
        """Whether it does nothing, and nothing of its own goes on elsewhere in the process."""

    def go(self) -> None:
        """Work on it, on the calling thread, as long as there is something to do."""

    def post(self, *job: object) -> None:
        """Let its thread call a function, the first of ``job``, with the rest of it."""

    def outputs(self) -> RunValues:
        """The outputs of a part that has ended; raises ``DeadTensor``."""

    def release(self) -> None:
        """Give up the values of a run that has failed."""


# A thread that wakes another part queues it, instead of entering it at once: a loop between two
# parts would nest an activation of each for every value that they exchange. So the loop stays on
# one thread, without a hand-over for each value (decision 30).
#
# ``_busy`` counts the parts that are not at rest. Only a part that works can wake another one, so
# that the run is over when the last one rests; under the lock, since a part rests on its own
# thread.


class Barrier:
    """The shared state of the parts of one run, whose ``lock`` they use as well.

    ``on_end`` is called once, by the thread that ends the run. Only a run of several parts has a
    ``rendezvous``, or one that is given it since other parts are in other processes
    (``is_remote``).
    ``dispatch`` calls a function: at once, by default.
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
        """Run new parts, as long as there is something to do for the calling thread.

        ``listens``: whether all of them may wait for something outside the run, so that none would
        notice a stop.
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
        """Ask for another thread for waiting parts: this one begins something long."""
        # Offered, not submitted: without a free thread this one takes the parts after its kernel.
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
