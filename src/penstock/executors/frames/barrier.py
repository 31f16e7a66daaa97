"""What the parts of one run share: the threads that go on with them, the first error, the end.

A part moves its tokens on one thread at a time, and rests when it has nothing to do. What comes for
it from elsewhere, a value of another part perhaps, wakes it. The thread that brought it does not
enter the part at once, which could go around in circles, but once it is through with its own; or
another does, before this one begins something long. The run ends when all parts rest: nobody is
left who could wake one.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from threading import get_ident
from typing import Any, Protocol

from penstock.errors import Cancelled
from penstock.executors.base import Done, quiet
from penstock.executors.control import Control
from penstock.executors.frames.rendezvous import Rendezvous
from penstock.host.threads import Workers


class Part(Protocol):
    """A part of a run. ``active`` while some thread is at work on it, or about to be; ``resting``
    while it has nothing to do, and no kernel of it runs elsewhere."""

    active: bool
    resting: bool

    def go(self) -> None:
        """Work on it, on the calling thread, as long as there is something to do."""
        ...

    def post(self, *job: Any) -> None:
        """Let its thread call a function, the first of ``job``, with the others."""
        ...

    def check(self) -> None:
        """See whether the run was stopped."""
        ...


class Barrier:
    """Of one run. Its ``lock`` is that of its parts, too. ``on_end`` is called once, by the thread
    that ends the run. Only a run of several parts has a ``rendezvous``."""

    def __init__(self, control: Control, on_end: Callable[[], None]) -> None:
        self.control = control
        self.lock = threading.Lock()
        self.rendezvous: Rendezvous | None = None
        self.parts: Sequence[Part] = ()
        self.error: BaseException | None = None
        self._on_end: Callable[[], None] | None = on_end  # which leads back to us
        self._ready: deque[Part] = deque()
        self._threads: set[int] = set()
        self._busy = 0
        self._over = False
        self._listens = False

    def begin(self, parts: Sequence[Part], *, listens: bool) -> None:
        """Run parts that begin now, as long as there is something to do for the calling thread.
        ``listens``: whether they may all wait for somebody outside, and not see a stop."""
        self.parts = parts
        if len(parts) > 1:
            self.rendezvous = Rendezvous()
        self._busy = len(parts)
        self._ready.extend(parts)
        if listens:
            self._listens = True
            self.control.add_listener(self._stopped)
        self._work()

    def resume(self, part: Part) -> None:
        """Somebody must go on with a part that is active: it has just become so, or leaves its
        thread to another."""
        self._ready.append(part)
        if get_ident() not in self._threads:
            quiet(self._work)

    @property
    def waiting(self) -> bool:
        """Whether some part waits for a thread."""
        return bool(self._ready)

    def help(self, pool: Workers) -> None:
        """This thread begins something long: other threads are to go on with other parts."""
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
                part.go()
        finally:
            self._threads.discard(thread)

    # With the lock held.

    def woke(self, part: Part) -> bool:
        """A part that was resting goes on; False if the run is over."""
        if not self._over:
            self._busy += 1
        return not self._over

    def rested(self) -> bool:
        """A part rests; whether it was the last, so that the run is over."""
        self._busy -= 1
        self._over = not self._busy
        return self._over

    # Ends.

    def fail(self, error: BaseException) -> None:
        """The first error is the one that the run ends with, and ends the other parts."""
        with self.lock:
            if self.error is not None:
                return
            self.error = error
        if self.rendezvous is not None:
            self.rendezvous.abort(error)
        if not self.control.stopped:
            self.control.set(Cancelled("another part of the run has failed"))

    def end(self) -> None:
        """The run is over."""
        if self._listens:
            self.control.remove_listener(self._stopped)
        if self.rendezvous is not None:
            self.rendezvous.close()
        on_end, self._on_end = self._on_end, None
        assert on_end is not None
        on_end()

    def _stopped(self, error: Exception) -> None:
        """Somebody has stopped the run, perhaps while no thread is at work on it."""
        for part in self.parts:
            if not part.resting:
                part.post(part.check)


class MultiPartExecutor:
    """``run`` and ``run_async`` of executors whose runs have parts that meet at a barrier."""

    def run(self, inputs: Sequence[Any], control: Control) -> tuple[Any, ...]:
        control = control.own()
        ended = threading.Lock()
        ended.acquire()
        barrier = Barrier(control, ended.release)
        try:
            quiet(self._begin, barrier, inputs)
            ended.acquire()
        except BaseException:  # an interrupt; the run ends on its own
            control.set(Cancelled("the run was interrupted"))
            raise
        return self._end(barrier)

    def run_async(self, inputs: Sequence[Any], control: Control, done: Done) -> None:
        def end() -> None:
            try:
                outputs = self._end(barrier)
            except BaseException as error:
                done(None, error)
            else:
                done(outputs, None)

        barrier = Barrier(control.own(), end)
        quiet(self._begin, barrier, inputs)

    def _begin(self, barrier: Barrier, inputs: Sequence[Any]) -> None:
        """Make the parts of a run, and run them."""
        raise NotImplementedError

    def _outputs(self, parts: Sequence[Any]) -> tuple[Any, ...]:
        """The outputs of a run, from its parts."""
        raise NotImplementedError

    def _end(self, barrier: Barrier) -> tuple[Any, ...]:
        """What a run that is over gives; raises what it ended with."""
        parts, barrier.parts = barrier.parts, ()  # which lead back to the barrier
        error, barrier.error = barrier.error, None
        if error is not None:
            try:
                raise error
            finally:
                del error, parts  # it holds this frame
        return self._outputs(parts)
