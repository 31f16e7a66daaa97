"""The pool of a plan's arenas: every run has one to itself.

A run that finds no free arena allocates another, so the pool grows to the largest number of
concurrent runs. If ``Limits.max_bytes`` allows no more, the run waits, first come, first served.
"""

from __future__ import annotations

import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Generic, TypeVar

import numpy as np

from penstock.backends.base import Backend
from penstock.core.checkpoints import LOOK_S
from penstock.core.errors import ExtensionError, LimitExceeded, PenstockError, RunError
from penstock.core.limits import Limits
from penstock.executors.control import Control
from penstock.host.fork import renewed, shared_lock
from penstock.host.malloc import give_back_memory
from penstock.ir.layout import ALIGNMENT, address
from penstock.ops.internal.transfer import HOST

if TYPE_CHECKING:
    from penstock.executors.session_memory import SessionMemory, Waiting

T = TypeVar("T")

_LOCK = shared_lock()  # of all pools: few runs need it


class Arenas(Generic[T]):
    """A pool of arenas of ``size`` bytes each, which ``bind(memory)`` creates. ``bind`` allocates
    ``remote`` further bytes for each arena, by the name of the device memory. Raises
    ``LimitExceeded`` if an arena exceeds ``limits.max_bytes`` in one memory."""

    def __init__(
        self,
        size: int,
        host: Backend,
        limits: Limits,
        bind: Callable[[np.ndarray], T],
        remote: Mapping[str, int] | None = None,
    ) -> None:
        self.size = size
        memories = {HOST: size, **(remote or {})}
        self.each = sum(memories.values())
        self._host = host
        self._bind = bind
        self.waiting: deque[Waiting] = deque()
        self.needs, self.alone = self.each, False
        """bytes of the session's memory that a run reserves, and whether it must reserve all of
        it
        """
        self._memory: SessionMemory | None = None
        most = limits.max_bytes
        largest = max(memories, key=memories.__getitem__)
        if most is not None and memories[largest] > most:
            where = "" if largest == HOST else f" on {largest}, workspaces included"
            raise LimitExceeded(
                f"the plan needs an arena of {memories[largest]} bytes{where}, above the limit of "
                f"{most} (Limits.max_bytes)"
            )
        # By the memory that is full first: each run takes as much of every one.
        self._most = most // memories[largest] if most is not None and self.each else None
        self.free: deque[T] = deque()
        """arenas that no run holds; ``pop`` is the fast path of ``take``, and ``append``, with
        ``serve`` if there are ``waiting`` runs, is ``give``"""
        self.count = 0
        """arenas, free and held by runs"""
        renewed(self)

    def share(self, memory: SessionMemory, needs: int, alone: bool) -> None:
        """Take arenas from the memory of a session from now on; call this before the first run.
        ``needs``: the bytes of an arena and of the other allocations of a run. ``alone``: a run
        takes all of the memory. Raises ``LimitExceeded`` if a run could never begin."""
        memory.check(needs)
        self._memory, self.needs, self.alone = memory, needs, alone
        self.waiting = memory.waiting
        with _LOCK:
            count, self.count = self.count, 0
            fits = memory.makes_room(self)
            self.count = count
            if not fits:
                self.forget_free()

    def make(self) -> T:
        """A new arena, to be returned by ``give``."""
        with _LOCK:
            self.count += 1
        return self._new()

    def _new(self) -> T:
        if self._memory is not None:  # the process still holds what others have freed
            give_back_memory()
        try:
            return self._bind(_checked(self._host, self._host.allocate(self.size), self.size))
        except BaseException as error:
            self.drop()
            if isinstance(error, MemoryError):
                message = f"out of memory: cannot allocate an arena of {self.size} bytes"
                raise RunError(message) from error
            raise

    def take(self, control: Control) -> T:
        """Wait for a free arena and return it. Raises the error of ``control`` if it is stopped."""
        received = threading.Lock()
        received.acquire()
        box: list[T | None] = []

        def receive(arena: T | None) -> None:
            box.append(arena)
            received.release()

        arena = self.ask(receive)
        if arena is not None:
            return arena
        try:
            self._refuse_reentry()
            # The control has no way to wake a thread that waits for a lock.
            while not received.acquire(timeout=LOOK_S):
                if control.stopped:
                    control.stop()
        except BaseException:
            if not self.forget(receive):
                # Another run has handed us an arena, or is about to.
                while not box:
                    received.acquire(timeout=LOOK_S)
                if box[0] is None:
                    self.drop()
                else:
                    self.give(box[0])
            raise
        return self.accept(box[0])

    def _refuse_reentry(self) -> None:
        """Raise ``PenstockError`` if a run further up the stack holds an arena. A signal handler
        or a callback has interrupted that run, so it would never release the arena."""
        frame = sys._getframe(2).f_back  # the caller of the run that wants an arena
        while frame is not None:
            # Not of all frames: Python keeps the dict there, and with it a worker's last job.
            names = frame.f_code.co_varnames
            held = frame.f_locals.get("arenas") if "arenas" in names else None
            if isinstance(held, Arenas) and held.waiting is self.waiting:
                raise PenstockError(
                    "the session is called from a signal handler, a finalizer or a callback of a "
                    "run that holds all the memory that Limits.max_bytes or memory= allows; "
                    "raise the limit, or call the session after the run has returned"
                )
            frame = frame.f_back

    def ask(self, receive: Callable[[T | None], None]) -> T | None:
        """A free or new arena; None if there can be none now. Then ``receive`` is called when
        another run gives one, on that run's thread, with a value for ``accept``."""
        memory = self._memory
        # A part does not wait behind runs that wait for the end of its own run.
        part = memory is not None and memory.in_parts
        with _LOCK:
            found = () if self.waiting and not self.free and not part else self.obtain(part)
            if not found:
                if part and memory is not None:
                    memory.next_part = receive
                    self.waiting.appendleft((self, receive))
                else:
                    self.waiting.append((self, receive))
                # A run may have given one meanwhile without seeing that we wait.
                found = self.obtain(part) if part or len(self.waiting) == 1 else ()
                if not found:
                    return None
                self.waiting.popleft()
        return self.accept(found[0])

    def obtain(self, part: bool) -> tuple[T | None, ...]:
        """Return a free arena, (None,) if the caller may allocate one, or () if it must wait.
        ``part``: for a part of the run that holds results. The caller must hold the lock."""
        with suppress(IndexError):
            return (self.free.pop(),)
        if not self._may_make(part):
            return ()
        self.count += 1
        return (None,)

    def _may_make(self, part: bool) -> bool:
        """Whether there may be one more arena."""
        if self._most is not None and self.count >= self._most:
            return False
        return self._memory is None or self._memory.makes_room(self, part)

    def is_part(self, receive: Callable[..., object]) -> bool:
        """Whether the waiting callback belongs to a part of the run that holds results."""
        return self._memory is not None and self._memory.next_part is receive

    def accept(self, received: T | None) -> T:
        """The arena that ``receive`` was called with, or a new one in place of one that was
        dropped."""
        return self._new() if received is None else received

    def forget(self, receive: Callable[[T | None], None]) -> bool:
        """Stop waiting for an arena; False if ``receive`` has been called, or is about to be."""
        with _LOCK:
            if (self, receive) not in self.waiting:
                return False
            self.waiting.remove((self, receive))
        self.serve()  # the next run in line may need less
        return True

    def give(self, arena: T) -> None:
        """Return an arena: the next run that waits gets it."""
        self.free.append(arena)
        if self.waiting:
            self.serve()

    def serve(self) -> None:
        """Hand free arenas to waiting runs."""
        _serve(self.waiting)

    def drop(self) -> None:
        """Drop an arena instead of returning it: the next run that waits may allocate one."""
        with _LOCK:
            self.count -= 1
        self.serve()

    def forget_free(self) -> None:
        """Drop a free arena, if any, for another pool. The caller must hold the lock."""
        with suppress(IndexError):
            self.free.pop()
            self.count -= 1

    def trim(self) -> None:
        """Drop the arenas that no run holds."""
        while True:
            try:
                self.free.pop()
            except IndexError:
                return
            self.drop()

    @property
    def nbytes(self) -> int:
        """Bytes of all arenas, device memory included."""
        return self.count * self.each

    def forked(self) -> None:
        """In a forked child: arenas that runs of the parent's threads hold never come back."""
        self.waiting.clear()
        self.count = len(self.free)


def _serve(waiting: deque[Waiting]) -> None:
    while waiting:
        with _LOCK:
            if not waiting:
                return
            pool, receive = waiting[0]
            # A run that has just begun may have taken it, and will return it.
            found = pool.obtain(pool.is_part(receive))
            if not found:
                return
            waiting.popleft()
        # Without the lock: the callback may ask for another arena.
        receive(found[0])


class _Results:
    """Waits, among runs that wait for arenas, for the memory of results."""

    def __init__(self, memory: SessionMemory, nbytes: int) -> None:
        self._memory, self._nbytes = memory, nbytes

    def obtain(self, part: bool) -> tuple[None, ...]:
        return (None,) if self._memory.holds_results(self._nbytes) else ()

    def is_part(self, receive: Callable[..., object]) -> bool:
        return False


@contextmanager
def holding_results(memory: SessionMemory, nbytes: int, control: Control) -> Iterator[None]:
    """Wait until ``nbytes`` of results fit into the memory of a session, and hold them. Other runs
    that need the memory wait, first come, first served; parts of this run do not."""
    came = threading.Event()
    entry: Waiting | None = None
    results = _Results(memory, nbytes)
    with _LOCK:
        if memory.waiting or not results.obtain(False):
            entry = results, lambda _: came.set()
            memory.waiting.append(entry)
    try:
        if entry is not None:
            _serve(memory.waiting)  # the memory may have been released just before
            while not came.wait(LOOK_S):
                if control.stopped:
                    control.stop()
        yield
    finally:
        with _LOCK, suppress(ValueError):
            if entry is not None:
                memory.waiting.remove(entry)
        memory.results = 0
        _serve(memory.waiting)


def _checked(host: Backend, memory: np.ndarray, size: int) -> np.ndarray:
    """The memory that a backend has allocated; raises ``ExtensionError`` if no plan can use it."""
    sound = isinstance(memory, np.ndarray) and memory.dtype == np.uint8 and memory.shape == (size,)
    aligned = not size or (sound and address(memory) % ALIGNMENT == 0)
    if not sound or not aligned or not memory.flags.writeable:
        raise ExtensionError(
            f"allocate({size}) of backend {host.name} must return a writable one-dimensional "
            f"uint8 array of {size} bytes, aligned to {ALIGNMENT}"
        )
    return memory
