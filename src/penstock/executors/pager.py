"""Paging of weights in a mapped file, of which only some are in memory during runs.

A model larger than the memory of its session (``memory=``) is read from its file in each run: the
system reads pages when kernels access them, and a thread releases all when there are too many::

    pages in memory     /|  /|  /|  /|      each peak is what the session may hold
                       / | / | / | / |
                      /  |/  |/  |/  |

The order in which steps use weights need not be known. Pages that were released too early are read
again, mostly from the system's page cache, which the system shrinks as needed.
"""

from __future__ import annotations

import mmap
import threading
import weakref
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from penstock.core.checkpoints import EVENT_S
from penstock.core.types import RunValue, RunValues
from penstock.host.current_run import working_for
from penstock.host.fork import renewed

if TYPE_CHECKING:
    from penstock.executors.base import Executor
    from penstock.executors.control import Control


class Pager:
    """A sampler of executors that watches their runs, and releases the pages of ``mapping`` when
    these take more than ``most()`` bytes, the memory left to them, plus the ``window``."""

    def __init__(self, mapping: mmap.mmap, most: Callable[[], int]) -> None:
        start = np.frombuffer(mapping, np.uint8).ctypes.data
        self.active = False
        """whether the weights exceed the available memory"""
        self.window = 0
        """bytes of weights that a step and its successor read"""
        self.owner: Callable[[], Any] = lambda: None
        self._mapping, self._most = mapping, most
        self._addresses = range(start, start + len(mapping))
        self._before = 0
        self.forked()
        renewed(self)

    def forked(self) -> None:
        """Reset the thread and the count of runs in a forked child."""
        self._runs = 0
        self._lock = threading.Lock()
        self._wakes = threading.Event()
        self._thread: threading.Thread | None = None
        # The thread must wake to see that the pager was deleted, or it would wait forever.
        weakref.finalize(self, self._wakes.set).atexit = False

    def bytes_of(self, constants: Mapping[int, int]) -> int:
        """Return the total bytes of those ``constants``, sizes by address, that are in the file."""
        return sum([nbytes for at, nbytes in constants.items() if at in self._addresses])

    def begin(self) -> None:
        """Release pages during runs from now on."""
        if not self.active:
            self.active = True
            self._mapping.madvise(mmap.MADV_DONTNEED)
            self._before = resident_bytes()

    def run(self, executor: Executor, inputs: RunValues, control: Control) -> tuple[RunValue, ...]:
        """Return the outputs of one run of ``executor``, during which pages are released."""
        with self._lock:
            self._runs += 1
            if self._thread is None or not self._thread.is_alive():
                watch, name = partial(_watch, weakref.ref(self), self._wakes), "penstock-pager"
                self._thread = threading.Thread(target=watch, name=name, daemon=True)
                self._thread.start()
        self._wakes.set()
        try:
            return working_for(control, executor.run, inputs, control)
        finally:
            with self._lock:
                self._runs -= 1
                if not self._runs:
                    self._wakes.clear()

    def look(self) -> None:
        """Release all pages if there are too many."""
        most = self.window + self._most()
        # An eighth is a reserve for pages that are read between two checks.
        if resident_bytes() - self._before > most - most // 8:
            self._mapping.madvise(mmap.MADV_DONTNEED)


def _watch(own: weakref.ref[Pager], wakes: threading.Event) -> None:
    """Check the pages during runs, until the pager is deleted."""
    pause = threading.Event()
    while True:
        wakes.wait()
        pager = own()
        if pager is None:
            return
        with suppress(OSError):  # /proc cannot be read, as when no file descriptor is left
            pager.look()
        del pager
        pause.wait(EVENT_S[1])


def resident_bytes() -> int:
    """Return the resident bytes of mapped files. Raises ``OSError`` if the system has no report."""
    with open("/proc/self/statm", "rb") as file:
        return int(file.read().split()[2]) * mmap.PAGESIZE


def can_page() -> bool:
    """Whether the system reports resident pages and can release them."""
    try:
        return resident_bytes() > 0 and hasattr(mmap, "MADV_DONTNEED")
    except (OSError, ValueError, IndexError):
        return False
