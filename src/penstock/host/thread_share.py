"""The threads of kernels, divided among all runs of the process that compute at the same time."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Protocol

from penstock.core.records import dataclass, field
from penstock.host.fork import in_child, shared_lock
from penstock.host.threads import core_budget

if TYPE_CHECKING:
    from penstock.host.thread_tuner import ThreadTuner


class Threaded(Protocol):
    """A library with threads for its kernels, as backends are (``backends/base.py``)."""

    name: str

    @property
    def threads(self) -> int: ...

    @property
    def threads_of_caller(self) -> bool: ...

    def set_threads(self, threads: int) -> None: ...


class ThreadShare:
    """The share that one run has of the threads of the kernels of ``libraries``.

    ``enter`` returns the number of threads that each kernel of the run may use: ``most`` (by
    default the core budget) divided by the ``streams`` of all running runs. A sequential run is one
    stream, a run on n workers is n streams. A run whose kernels are too small for several threads
    has 0 streams and gets one thread. Numbers are halved until they fit, so that only a few
    occur, since kernels are compiled for each number.

    The setting of a library with one number of threads for the whole process changes when a run
    enters or leaves, and is restored when the last one has left. Beside a library whose threads
    belong to the caller it gets one thread, since two sets of spinning threads would compete for
    the cores. A run that is alone has one thread if that proves faster and the share is ``tuned``.
    """

    def __init__(
        self,
        libraries: Sequence[Threaded],
        streams: int = 1,
        most: int | None = None,
        tuned: bool = True,
    ) -> None:
        self._streams = (None,) * streams
        self._most = most or core_budget()
        self._limit = most
        self._own = [library for library in libraries if library.threads_of_caller]
        self._shared = [library for library in libraries if not library.threads_of_caller]
        self.setters = tuple([b.set_threads for b in self._own])
        """functions that set the number of threads of the calling thread, one for each library"""
        self.single = not libraries or (not streams and not self._shared)
        """True if runs use one thread, so that ``enter`` would only call ``adopt(1)``"""
        self.idle = not libraries
        """True if there is nothing to share, so that ``enter`` may be left out"""
        # A stream that is alone may be faster with fewer threads.
        self.tuner: ThreadTuner | None = None
        if tuned and self._own and streams == 1 and self._most > 1:
            from penstock.host.thread_tuner import ThreadTuner

            self.tuner = ThreadTuner(self._most)
        self.tries = True
        """whether runs may be trials of the ``tuner``"""
        for library in self._shared:
            library.threads  # noqa: B018 - loads what it needs now, and not during a run

    @property
    def threads(self) -> int:
        """The most threads of a kernel: those of a run that is alone, on one stream."""
        if self.single:
            return 1
        return max(1, self._most // max(len(self._streams), 1)) if self._own else self._most

    def follow(self, other: ThreadShare) -> None:
        """Use as many threads as most runs of another share, on which the same kernels run."""
        self.tuner, self.tries = other.tuner, False

    def enter(self) -> int:
        """Begin to compute. Return the number of threads that each kernel may use, which is also
        set for the calling thread."""
        running, threads = _process.running, self._most if self._streams else 1
        try:
            running.extend(self._streams)
            if threads > 1:
                if self.tuner is not None and len(running) == 1:
                    threads = self.tuner.threads() if self.tries else self.tuner.chosen
                while threads > 1 and threads * len(running) > self._most:
                    threads //= 2
            if self._shared:
                self._divide()
            self.adopt(threads)
        except BaseException:  # KeyboardInterrupt, for example
            self.leave()
            raise
        return threads

    def enter_again(self, threads: int) -> None:
        """Continue with as many threads as before, after a pause."""
        _process.running.extend(self._streams)
        if self._streams and self._shared:
            self._divide()
        self.adopt(threads)

    @contextmanager
    def waiting(self, threads: int) -> Iterator[None]:
        """Release the threads to other runs in the block, while a run that has ``threads`` waits
        for an action of the program."""
        self.leave()
        try:
            yield
        finally:
            self.enter_again(threads)

    def adopt(self, threads: int) -> None:
        """Let the kernels that the calling thread runs use this number of threads."""
        for set_threads in self.setters:
            set_threads(threads)

    def leave(self) -> None:
        """End what began with ``enter``."""
        if self._streams:
            _process.end(self._streams)
            if self._shared:
                self._divide()

    def _divide(self) -> None:
        """Set the threads of the libraries with one setting for the whole process: all of them,
        even if one raises."""
        failed: BaseException | None = None
        with _process.lock:
            for library in self._shared:
                try:
                    setting = _process.settings.get(library.name)
                    if setting is None:
                        setting = _process.settings[library.name] = _ThreadSetting(library)
                    setting.divide(len(_process.running), 1 if self._own else self._limit)
                except BaseException as error:
                    failed = failed or error
        if failed is not None:
            raise failed

    __enter__ = enter

    def __exit__(self, *exception: object) -> None:
        self.leave()


def announce(streams: int) -> None:
    """Count ``streams`` that are about to begin as if they were running, so that the first of them
    takes only its share. Each is announced as -1 when it begins, before it enters."""
    _process.running.extend((None,) * streams)
    _process.end((None,) * -streams)


@dataclass(slots=True)
class _ThreadSetting:
    """The process-wide number of threads of one library: ``idle`` while no run computes, ``now``
    for each kernel at present."""

    library: Threaded
    busy: bool = False
    idle: int = 1
    now: int = 1

    def divide(self, streams: int, most: int | None) -> None:
        """Divide the threads by ``streams``; 0 restores the number from before the first run."""
        if streams and not self.busy:
            self.idle = self.now = self.library.threads
        self.busy = streams > 0
        share = max(1, min(self.idle, most or self.idle) // streams) if streams else self.idle
        if share != self.now:
            self.library.set_threads(share)
            self.now = share


@dataclass(slots=True)
class _Process:
    """The state that all shares of the process have in common.

    ``running`` has an entry for each stream. Its methods are atomic, so that runs take no lock.
    """

    lock: threading.RLock = field(default_factory=shared_lock)
    settings: dict[str, _ThreadSetting] = field(default_factory=dict)
    running: deque[None] = field(default_factory=deque)

    def end(self, streams: Sequence[None]) -> None:
        try:
            for _ in streams:
                self.running.pop()
        except IndexError:
            return  # no run is active in a forked child, not even the one that has forked it


_process = _Process()


@in_child
def _forget_parent() -> None:
    """A forked child inherits none of its parent's runs."""
    _process.running.clear()
    for setting in _process.settings.values():
        setting.divide(0, None)
