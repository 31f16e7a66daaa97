"""What executors share: the protocol, and the control over a run from outside."""

from __future__ import annotations

import heapq
import threading
import time
from collections.abc import Sequence
from itertools import count
from typing import Any, Protocol

from penstock.errors import Cancelled, DeadlineExceeded


class Control:
    """The one thing a run looks at to learn that it must stop; set from any thread.

    Generated code reads ``stopped`` at every loop back-edge and every few milliseconds of estimated
    work, and calls ``stop`` when it is set.
    """

    __slots__ = ("error", "stopped")

    def __init__(self) -> None:
        self.stopped = False
        self.error: Exception | None = None

    def set(self, error: Exception) -> None:
        """Ask the run to stop with ``error``; the first to ask wins."""
        if not self.stopped:
            self.error = error
            self.stopped = True

    def stop(self) -> None:
        """Raise what the run was stopped with."""
        assert self.error is not None
        raise self.error


NEVER = Control()
"""For runs that nobody can stop."""


class CancelToken:
    """Cancels the runs it was given to, from any thread: ``session.run(feeds, cancel=token)``."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._controls: list[Control] = []
        self._cancelled = False

    @property
    def cancelled(self) -> bool:
        """Whether ``cancel`` was called."""
        return self._cancelled

    def cancel(self) -> None:
        """Stop every run that holds this token, now and later, with ``Cancelled``."""
        with self._lock:
            self._cancelled = True
            controls, self._controls = self._controls, []
        for control in controls:
            control.set(Cancelled("the run was cancelled by its caller"))

    def attach(self, control: Control) -> None:
        """Let ``cancel`` stop a run."""
        with self._lock:
            if not self._cancelled:
                self._controls.append(control)
                return
        control.set(Cancelled("the run was cancelled before it began"))

    def detach(self, control: Control) -> None:
        """Forget a run that has ended."""
        with self._lock:
            if control in self._controls:
                self._controls.remove(control)


class _Watchdog:
    """One thread that stops runs at their deadlines; it sleeps while there are none."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.queue: list[tuple[float, int, Control, float]] = []
        self.numbers = count()
        self.thread: threading.Thread | None = None

    def add(self, control: Control, timeout: float) -> None:
        with self.changed:
            # A fork leaves the thread behind in the parent.
            if self.thread is None or not self.thread.is_alive():
                self.thread = threading.Thread(
                    target=self.watch, name="penstock-deadlines", daemon=True
                )
                self.thread.start()
            when = time.monotonic() + timeout
            heapq.heappush(self.queue, (when, next(self.numbers), control, timeout))
            self.changed.notify()

    def watch(self) -> None:
        while True:
            with self.changed:
                while not self.queue:
                    self.changed.wait()
                wait = self.queue[0][0] - time.monotonic()
                if wait > 0:
                    self.changed.wait(wait)
                    continue
                _, _, control, timeout = heapq.heappop(self.queue)
            control.set(DeadlineExceeded(f"the run did not end within its timeout of {timeout} s"))

    def remove(self, control: Control) -> None:
        with self.changed:
            self.queue = [entry for entry in self.queue if entry[2] is not control]
            heapq.heapify(self.queue)


_WATCHDOG = _Watchdog()


def begin(timeout: float | None, cancel: CancelToken | None) -> Control:
    """The control of a new run that may take ``timeout`` seconds and be cancelled."""
    control = Control()
    if cancel is not None:
        cancel.attach(control)
    if timeout is not None:
        if timeout <= 0:
            control.set(DeadlineExceeded(f"the run has a timeout of {timeout} s"))
        else:
            _WATCHDOG.add(control, timeout)
    return control


def end(control: Control, timeout: float | None, cancel: CancelToken | None) -> None:
    """Release what ``begin`` set up."""
    if cancel is not None:
        cancel.detach(control)
    if timeout is not None and timeout > 0:
        _WATCHDOG.remove(control)


class Executor(Protocol):
    """How a plan is run: built from a plan once, it serves any number of runs at once."""

    def run(self, inputs: Sequence[Any], control: Control) -> tuple[Any, ...]:
        """The outputs of one run, in memory of the caller's own."""
        ...

    @property
    def nbytes(self) -> int:
        """Bytes of memory held between runs, constants left out."""
        ...
