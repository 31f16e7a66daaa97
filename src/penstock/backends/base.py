"""What a backend offers, and how values get from the memory of one to that of another."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any, Protocol

import numpy as np

from penstock.host.fork import in_child
from penstock.host.thread_tuner import ThreadTuner
from penstock.host.threads import core_budget
from penstock.ir.graph import Node
from penstock.ir.op import Kernel
from penstock.ops.internal.transfer import HOST
from penstock.ops.work_estimate import seconds
from penstock.types import Type

ALIGNMENT = 64  # bytes: a cache line, and the widest vector register


class Event(Protocol):
    """A point in the work of a device's stream."""

    def query(self) -> bool:
        """Whether the stream has passed it."""
        ...

    def synchronize(self) -> None:
        """Block until it has."""
        ...


class DeviceStream(Protocol):
    """A queue of a device: what is put on it runs in order, while the host goes on."""

    def call(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Call ``function``, so that what it puts on the device is put on this stream. The device
        keeps what it reads until it has, whether or not others hold it."""
        ...

    def record(self) -> Event:
        """The point behind all that is on the stream now."""
        ...

    def wait(self, event: Event) -> None:
        """Let what is put on the stream from now on wait for a point of another."""
        ...


class Device(Protocol):
    """What runs kernels while the host goes on: a call of one only puts it on a stream."""

    def stream(self) -> DeviceStream:
        """A stream of our own."""
        ...


class Backend(Protocol):
    """Where kernels run: says what it supports, compiles it, allocates and copies.

    ``name`` is what users call it. ``memory`` names the memory and the layout of the values that it
    takes and makes: backends of the same ``memory`` hand values to one another as they are.
    """

    name: str

    @property
    def memory(self) -> str: ...

    @property
    def device(self) -> Device | None:
        """The device that goes on by itself with what is called, None where calls return when all
        is done. What is called outside of any stream of it comes in order all the same; there
        ``to_host`` waits for what it brings over, and ``from_host`` until it is there, since
        constants are then read on any stream."""
        ...

    @property
    def fuses(self) -> bool:
        """Whether it has kernels for fused nodes (``ops/fused.py``)."""
        ...

    def supports(self, node: Node, types: Sequence[Type | None]) -> bool:
        """Whether ``compile`` would succeed for this node and these input types."""
        ...

    def compile(self, node: Node, types: Sequence[Type | None]) -> Kernel:
        """The kernel of a node; raises ``ShapeError`` for types the operation never takes."""
        ...

    def forget(self) -> None:
        """A graph is compiled: what has been kept of its nodes from ``supports`` to ``compile`` is
        of no more use."""
        ...

    def seconds(self, node: Node) -> float:
        """Roughly what a node that it supports takes, for where nothing has been measured."""
        ...

    def allocate(self, nbytes: int) -> np.ndarray:
        """``nbytes`` of memory as uint8, aligned to 64 bytes; its contents are arbitrary."""
        ...

    def to_host(self, value: Any) -> Any:
        """A value of this backend's memory as a new NumPy array (or a list of these)."""
        ...

    def from_host(self, value: Any) -> Any:
        """A NumPy array (or a list of these) as a value of this backend's memory."""
        ...

    @property
    def workers(self) -> int:
        """How many steps of one run may go on at once on this backend, at most."""
        ...

    @property
    def threads(self) -> int:
        """How many threads one kernel uses now, at most."""
        ...

    @property
    def threads_of_caller(self) -> bool:
        """Whether the number of threads is a setting of each thread that compiles, binds and runs
        kernels, and not of the whole process."""
        ...

    def set_threads(self, threads: int) -> None:
        """Let kernels use as many threads, at most, from now on."""
        ...


class HostBackend:
    """What backends on the host's memory have in common; they add a name, ``supports`` and
    ``compile``, and if their kernels have threads of their own, ``threads`` and ``set_threads``."""

    memory = HOST
    device = None
    fuses = False

    def forget(self) -> None:
        pass

    def seconds(self, node: Node) -> float:
        return seconds(node)

    def allocate(self, nbytes: int) -> np.ndarray:
        memory = np.empty(nbytes + ALIGNMENT, np.uint8)
        start = -memory.ctypes.data % ALIGNMENT
        return memory[start : start + nbytes]

    def to_host(self, value: Any) -> Any:
        return value

    def from_host(self, value: Any) -> Any:
        return value

    @property
    def workers(self) -> int:
        return core_budget()

    @property
    def threads(self) -> int:
        return 1

    @property
    def threads_of_caller(self) -> bool:
        return False

    def set_threads(self, threads: int) -> None:
        pass


def transfer_kernel(node: Node, backends: Sequence[Backend]) -> Kernel:
    """The kernel of a transfer to or from the host of two of ``backends``, named in its attributes.

    A name that is none of theirs stands for the host, as does that of a backend there.
    """
    away = {backend.name: backend for backend in backends if backend.memory != HOST}
    source, target = away.get(node.attrs["source"]), away.get(node.attrs["target"])
    if target is None:
        assert source is not None
        return Kernel(source.to_host)
    assert source is None
    return Kernel(target.from_host)


class ThreadShare:
    """The threads of kernels, divided among all that compute at the same time.

    Who enters is told how many threads each kernel may use: ``most`` (the core budget, unless said
    otherwise) divided by the ``streams`` of all who are within. A run that does one thing after the
    other is one stream, one on n workers n of them; one whose kernels are not worth several threads
    is none, and gets one. Numbers are halved, so that there are few of them: kernels are compiled
    for each.

    Of a library whose threads are a setting of the whole process, that changes when somebody enters
    or leaves, and is what it was when the last has left. Beside one whose threads are the caller's
    it gets one: of two sets of threads each would wait, spinning, on the cores of the other.
    """

    def __init__(
        self, backends: Sequence[Backend], streams: int = 1, most: int | None = None
    ) -> None:
        self._streams = streams
        self._most = most or core_budget()
        self._limit = most
        self._own = [backend for backend in backends if backend.threads_of_caller]
        self._shared = [backend for backend in backends if not backend.threads_of_caller]
        self.idle = not backends
        """whether there is nothing to share, and no need to enter"""
        # How a stream that is alone fares with fewer threads.
        paced = self._own and streams == 1 and self._most > 1
        self.pace = ThreadTuner(self._most) if paced else None
        for backend in self._shared:
            backend.threads  # noqa: B018 - what it must load to say so, it loads now and in no run

    def enter(self) -> int:
        """How many threads each kernel may use from now on; those that this thread runs, do."""
        global _STREAMS
        entered = False
        try:
            if self._streams:
                with _LOCK:
                    _STREAMS += self._streams
                    entered = True
            threads = self._most if self._streams and not (self._own and _ORPHANED) else 1
            if threads > 1 and self.pace is not None and _STREAMS == 1:
                threads = self.pace.threads()
            while threads > 1 and threads * _STREAMS > self._most:
                threads //= 2
            if self._shared:
                self._divide()
            self.adopt(threads)
        except BaseException:  # an interrupt, perhaps
            if entered:
                self.leave()
            raise
        return threads

    def adopt(self, threads: int) -> None:
        """Let kernels that the calling thread runs use so many threads."""
        global _STARTED
        for backend in self._own:
            backend.set_threads(threads)
            _STARTED |= threads > 1

    def leave(self) -> None:
        """The end of what began with ``enter``."""
        global _STREAMS
        if self._streams:
            with _LOCK:
                # In a forked child nobody is within, not even the run that has forked it.
                _STREAMS = max(0, _STREAMS - self._streams)
            if self._shared:
                self._divide()

    def _divide(self) -> None:
        """Set the threads of libraries that all threads share."""
        with _LOCK, ExitStack() as stack:  # all are set, whatever one of them raises
            for backend in self._shared:
                state = _SHARES.get(backend.name)
                if state is None:
                    state = _SHARES[backend.name] = _State(backend)
                stack.callback(state.divide, _STREAMS, 1 if self._own else self._limit)

    def __enter__(self) -> int:
        return self.enter()

    def __exit__(self, *exception: object) -> None:
        self.leave()


class _State:
    """Of one backend: its threads in all while nobody is within, and for each kernel now."""

    __slots__ = ("all", "backend", "busy", "now")

    def __init__(self, backend: Backend) -> None:
        self.backend = backend
        self.busy = False
        self.all = self.now = 1

    def divide(self, streams: int, most: int | None) -> None:
        if streams and not self.busy:
            self.all = self.now = self.backend.threads
        self.busy = streams > 0
        each = max(1, min(self.all, most or self.all) // streams) if streams else self.all
        if each != self.now:
            self.backend.set_threads(each)
            self.now = each


_LOCK = threading.Lock()
_SHARES: dict[str, _State] = {}
_STREAMS = 0
# Whether kernels have started threads of the caller's, and whether that was in a parent process.
_STARTED = _ORPHANED = False


@in_child
def _forget() -> None:
    """A forked child has none of its parent's runs, and no thread that a library has started: one
    that waits for those waits forever."""
    global _LOCK, _ORPHANED, _STREAMS
    _ORPHANED = _STARTED
    _LOCK = threading.Lock()
    _STREAMS = 0
    for state in _SHARES.values():
        state.divide(0, None)
