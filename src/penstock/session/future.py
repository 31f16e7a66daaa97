"""The future of a run."""

from __future__ import annotations

import threading
from concurrent.futures import Future
from typing import TypeVar

T = TypeVar("T")


class RunFuture(Future[T]):
    """A future whose waiting thread may be interrupted by a signal handler or finalizer that waits
    for futures itself. A thread that waits for a ``Future`` holds its lock before and after, which
    the worker that ends it needs; the interrupting call may wait for that worker."""

    def __init__(self) -> None:
        super().__init__()
        self._ended = False
        self._wake = threading.Lock()  # held until it has ended
        self._wake.acquire()
        self.add_done_callback(RunFuture._end)  # type: ignore[arg-type]

    def _end(self) -> None:
        self._ended = True
        self._wake.release()

    def _wait(self, timeout: float | None) -> None:
        most = -1 if timeout is None else max(timeout, 0)
        if not self._ended and self._wake.acquire(timeout=most):
            self._wake.release()  # wake the next waiting thread, too

    def result(self, timeout: float | None = None) -> T:
        self._wait(timeout)
        try:
            return super().result(0)
        finally:
            del self  # an error holds this frame

    def exception(self, timeout: float | None = None) -> BaseException | None:
        self._wait(timeout)
        return super().exception(0)
