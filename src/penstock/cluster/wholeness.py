"""Whether all workers of a cluster are there, and calls of workers that wait until they are."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from time import monotonic
from typing import TypeVar

from penstock.cluster.waits import START_S
from penstock.core.checkpoints import WAKE_S, checkpoint
from penstock.core.errors import PenstockError, WorkerLost

T = TypeVar("T")

MOST_REPLACEMENTS = 5
"""Times that workers are replaced in a row while others die."""


class Wholeness:
    """Whether all workers of a cluster are there: lost ones are being replaced otherwise, which
    calls of workers wait for. ``ended`` says why there are none any more."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.is_whole = True
        self.replacements = 0
        self.ended: str | None = None

    def replaced(self) -> None:
        """Lost workers have been replaced, or cannot be."""
        with self.changed:
            self.is_whole = True
            self.replacements += 1
            self.changed.notify_all()

    def steady(self, call: Callable[[], T]) -> T:
        """The result of a call of workers, which is repeated if one dies meanwhile and is replaced.
        Raises ``WorkerLost``."""
        # Only for calls that may be made twice: to register, connect, read or set. Runs have
        # ``retries`` of their own.
        attempts = MOST_REPLACEMENTS
        while True:
            with self.changed:
                if not self._await_change(self._is_steady):
                    raise WorkerLost("a worker of the cluster is lost, and not replaced yet")
                before = self.replacements
            if self.ended is not None:
                raise PenstockError(self.ended)
            # Without the lock: the thread that watches needs it to replace a worker meanwhile.
            try:
                return call()
            except WorkerLost:
                attempts -= 1
                # The error may come long before Ray tells the thread that watches.
                with self.changed:
                    is_replaced = self._await_change(partial(self._is_newer, before))
                if not attempts or not is_replaced:
                    raise

    def _await_change(self, condition: Callable[[], bool]) -> bool:
        """Whether a condition holds after a while, ``changed`` being held meanwhile. Raises what
        the work of this thread must stop with."""
        # In short waits: Python handles signals, and compiling its deadline, between them.
        until = monotonic() + START_S
        while not self.changed.wait_for(condition, WAKE_S):
            checkpoint()
            if monotonic() > until:
                return False
        return True

    def _is_newer(self, replacements: int) -> bool:
        return self.replacements != replacements or self.ended is not None

    def _is_steady(self) -> bool:
        return self.is_whole or self.ended is not None
