"""Control over a run from outside: cancellation, deadlines and observers.

Every run has one ``Control``. A ``CancelToken`` or the watchdog sets it from any thread, and the
run looks at ``control.stopped`` as it goes::

    caller             run                              another thread
    begin_run(1.0) --> while not control.stopped: ...
                                                        token.cancel() -> control.set(Cancelled())
                       control.stop() raises it
    end_run(...)
"""

from __future__ import annotations

import heapq
import math
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from itertools import count
from typing import TYPE_CHECKING, Any

from penstock.core.checkpoints import THREAD
from penstock.core.errors import Cancelled, wrong_type
from penstock.core.types import RunValue
from penstock.host.fork import in_child
from penstock.host.stop_condition import Cancellation, StopCondition
from penstock.host.threads import report_thread_exception
from penstock.observers.base import ObservedRun, Observer

if TYPE_CHECKING:
    from penstock.executors.turn import Turn
from penstock.plan.plan import StepTable

StopListener = Callable[[Exception], None]
_Entry = list[Any]

_NO_OBSERVER = Observer()
_NO_RUN = ObservedRun(StepTable("", (), (), (), ()), "")


class Control(StopCondition):
    """The stop flag of one run, which any thread may set.

    Generated code reads ``stopped`` at every loop back edge and every few milliseconds of estimated
    work, and calls ``stop`` if it is set. Observed executors report events of ``run`` to
    ``observer``. ``turn`` is the run's place on a user stream, ``priority`` its rank in queues. If
    ``pause`` is set, ``stop`` calls it and returns. ``sink`` receives the values that the run emits
    before it ends, by name (``ops.internal.emit``). While ``sink`` waits, the run's share of the
    kernel threads is released by the context manager that ``outside`` returns.
    """

    __slots__ = (
        *("error", "listeners", "observer", "outside", "pause", "priority", "run", "sink"),
        *("stopped", "turn"),
    )

    def __init__(self, timeout: float | None = None, cancel: Cancellation | None = None) -> None:
        super().__init__(timeout, cancel)
        # A plain attribute: generated code reads it in every iteration of every loop.
        self.stopped = False
        self.error: Exception | None = None
        self.listeners: set[StopListener] = set()
        self.observer: Observer = _NO_OBSERVER
        self.run = _NO_RUN
        self.turn: Turn | None = None
        self.priority = 0
        self.pause: Callable[[], None] | None = None
        self.sink: Callable[[str, RunValue], None] | None = None
        self.outside: Callable[[], AbstractContextManager[None]] = nullcontext

    def set(self, error: Exception) -> None:
        """Ask the run to stop with ``error``. Only the first call has an effect."""
        if self.error is None:
            # The error before the flag: a run that sees the flag raises this error.
            self.error = error
            self.stopped = True
            with ExitStack() as stack:  # every listener is called, even if one of them raises
                # A copy: listeners remove themselves, and other threads add theirs.
                for listener in list(self.listeners):
                    stack.callback(listener, error)

    def add_listener(self, listener: StopListener) -> None:
        """Let ``set`` call ``listener`` with the error, and call it now if the run is already
        stopped. A stop at the same time may cause both calls."""
        # In this order: after a check that came first, a stop before ``add`` would be missed.
        self.listeners.add(listener)
        if self.stopped and self.error is not None:
            listener(self.error)

    def remove_listener(self, listener: StopListener) -> None:
        """Undo ``add_listener``, if it was called. A call of the listener may still be active."""
        self.listeners.discard(listener)

    def ask_to_pause(self, pause: Callable[[], None]) -> None:
        """Let the run call ``pause`` on its thread when it next reads ``stopped``."""
        self.pause = pause
        self.stopped = True

    def stop(self) -> None:
        """Raise the error that the run was stopped with, or call ``pause`` and return."""
        pause, self.pause = self.pause, None
        if pause is not None:
            self.stopped = False
            if self.error is None:
                pause()
            # The run may have been stopped before the pause, or during it.
            if self.error is None:
                return
            self.stopped = True
        raise self.error or Cancelled("the run has ended")

    def check(self) -> None:
        if self.stopped:
            self.stop()
        super().check()

    def late(self) -> Exception | None:
        """Return the error with which a run that ends now must end, or None: it was stopped, or its
        deadline has passed, whether or not the watchdog has noticed."""
        if self.error is None and time.monotonic() > self.deadline:
            self.set(self.timed_out())
        return self.error

    def own(self) -> Control:
        """Return this control, or a new one instead of the shared ``NEVER``."""
        return Control() if self is NEVER else self


NEVER = Control()
"""The control of every run that has neither a deadline, a token nor an observer."""


class CancelToken:
    """Cancels the runs that hold it, from any thread: ``session.run(feeds, cancel=token)``.

    Args:
        parent: A token whose cancellation also cancels this token. Cancelling this token does not
            cancel its parent.
    """

    def __init__(self, parent: CancelToken | None = None) -> None:
        if parent is not None and not isinstance(parent, CancelToken):
            raise wrong_type("parent", parent, "a penstock.CancelToken")
        self._parent = parent
        # Re-entrant: a signal handler may call ``cancel`` while its own thread attaches a run.
        self._lock = threading.RLock()
        self._controls: set[Control] = set()
        self._cancelled = False

    @property
    def cancelled(self) -> bool:
        """Whether ``cancel`` was called on this token or its parent."""
        return self._cancelled or (self._parent is not None and self._parent.cancelled)

    def cancel(self) -> None:
        """Stop every present and future run that holds this token, with ``Cancelled``."""
        with self._lock:
            self._cancelled = True
            # Runs are stopped without the lock: their listeners may attach or detach runs.
            controls, self._controls = self._controls, set()
        with ExitStack() as stack:  # stops all runs, even if a listener raises
            for control in controls:
                stack.callback(control.set, Cancelled("the run was cancelled by its caller"))

    def attach(self, control: Control) -> None:
        """Let ``cancel`` stop the run of ``control``."""
        if self._parent is not None:
            self._parent.attach(control)
        with self._lock:
            if not self._cancelled:
                self._controls.add(control)
                return
        control.set(Cancelled("the run was cancelled before it began"))

    def detach(self, control: Control) -> None:
        """Forget a run that has ended."""
        if self._parent is not None:
            self._parent.detach(control)
        with self._lock:
            self._controls.discard(control)


class Watchdog:
    """A thread that stops runs at their deadlines, and sleeps while there are none.

    ``queue`` is a heap of entries [deadline, number, control], and ``runs`` maps each run to its
    entry. If a run ends early, its entry loses the control and stays in the queue; once most
    entries are stale, the queue is rebuilt.
    """

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.queue: list[_Entry] = []
        self.runs: dict[Control, _Entry] = {}
        self.numbers = count()
        self.thread: threading.Thread | None = None

    def add(self, control: Control) -> None:
        # The number breaks ties between equal deadlines: controls have no order.
        entry: _Entry = [control.deadline, next(self.numbers), control]
        with self.changed:
            if self.thread is None or not self.thread.is_alive():
                self.thread = threading.Thread(
                    target=self.watch, name="penstock-deadlines", daemon=True
                )
                self.thread.start()
            self.runs[control] = entry
            heapq.heappush(self.queue, entry)
            # The thread must wake earlier only if this deadline is the earliest.
            if self.queue[0] is entry:
                self.changed.notify()

    def remove(self, control: Control) -> None:
        with self.changed:
            if (entry := self.runs.pop(control, None)) is not None:
                entry[2] = None
            # A heap cannot find an entry. Rebuilt rarely, so that a removal takes constant time.
            if len(self.queue) > 2 * len(self.runs) + _STALE_ENTRIES:
                self.queue = list(self.runs.values())
                heapq.heapify(self.queue)

    def watch(self) -> None:
        while True:
            with self.changed:
                while not self.queue:
                    self.changed.wait()
                deadline, _, control = self.queue[0]
                seconds_left = deadline - time.monotonic()
                if seconds_left > 0:
                    # ``wait`` raises OverflowError for longer times.
                    self.changed.wait(min(seconds_left, threading.TIMEOUT_MAX))
                    continue
                heapq.heappop(self.queue)
                if control is not None:
                    del self.runs[control]
            if control is not None:
                try:
                    control.set(control.timed_out())
                except BaseException:  # raised by a listener
                    report_thread_exception()


# Stale entries that the watchdog's queue may hold beyond one for each run.
_STALE_ENTRIES = 64
WATCHDOG = Watchdog()
"""The watchdog of all runs of the process."""


@in_child
def _forget_runs() -> None:
    """A forked child inherits none of its parent's runs."""
    # Reset in place, since functions of other modules have it as a default argument.
    WATCHDOG.__init__()  # type: ignore[misc]


def begin_run(
    timeout: float | None, cancel: Cancellation | None, watchdog: Watchdog = WATCHDOG
) -> Control:
    """Return the control of a run that stops after ``timeout`` seconds or by ``cancel``."""
    control = Control(timeout, cancel)
    if timeout is not None:
        # Written so that NaN counts as a deadline that has passed.
        if not timeout > 0:
            control.set(control.timed_out())
        elif timeout < math.inf:
            watchdog.add(control)
    if isinstance(cancel, CancelToken):
        cancel.attach(control)
    return control


@contextmanager
def compile_run(timeout: float | None = None) -> Iterator[Control]:
    """Yield the control of a run during compilation. The compilation's deadline and cancellation
    stop the run, and so does ``timeout`` (seconds), if given."""
    stop = THREAD.run if isinstance(THREAD.run, StopCondition) else StopCondition()
    bounds = [bound for bound in (stop.seconds_left, timeout) if bound is not None]
    control = begin_run(min(bounds, default=None), stop.cancel)
    try:
        yield control
    finally:
        end_run(control)


def end_run(control: Control, watchdog: Watchdog = WATCHDOG) -> None:
    """Undo ``begin_run``; drop the listeners, and the error, whose traceback holds the control."""
    control.error = None
    control.listeners.clear()
    if isinstance(control.cancel, CancelToken):
        control.cancel.detach(control)
    if control.timeout is not None:
        watchdog.remove(control)
