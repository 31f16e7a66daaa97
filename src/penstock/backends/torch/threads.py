"""The number of torch's threads: a setting of the process, held down while sessions run that may
use fewer, and put back when the last of them leaves."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch

from penstock.core.types import RunValue


class ThreadBound:
    """Bounds torch's threads for calls. Of calls that overlap, the lowest bound holds for all:
    torch has one number for the process."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._bounds: Counter[int] = Counter()
        self._before = 0

    def bounded(self, threads: int, function: Callable[..., RunValue]) -> Callable[..., RunValue]:
        """``function`` with at most this number of torch's threads."""

        def call(*arguments: object) -> Any:
            self._enter(threads)
            try:
                return function(*arguments)
            finally:
                self._leave(threads)

        return call

    def _enter(self, threads: int) -> None:
        with self._lock:
            # Read again once no run uses it: the process may have set another number since.
            if not self._bounds:
                self._before = torch.get_num_threads()
            self._bounds[threads] += 1
            self._set()

    def _leave(self, threads: int) -> None:
        with self._lock:
            self._bounds[threads] -= 1
            if not self._bounds[threads]:
                del self._bounds[threads]
            self._set()

    def _set(self) -> None:
        wanted = min([self._before, *self._bounds])
        if torch.get_num_threads() != wanted:
            torch.set_num_threads(wanted)


BOUND = ThreadBound()
