"""The pool of a plan's arenas: every run has one to itself.

A run that finds no free arena allocates another, so that there are as many as there were runs at
once; or it waits, if ``Limits.max_bytes`` allows no more. Waiting runs are served in order.
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
    """A pool of arenas of ``size`` bytes each, as ``bind(memory)`` returns them, which allocates
    ``remote`` bytes more in each memory of a device, by its name. Raises ``LimitExceeded`` if that
    is more than ``limits.max_bytes`` in one of them."""

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
        """bytes that a run takes of the memory of the session, and whether it is to have all"""
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
        """Take arenas from the memory of a session from now on, before the first run: ``needs``
        bytes with what a run allocates beside its arena, or all of it for one run ``alone``. Raises
        ``LimitExceeded`` if that cannot be."""
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
        if self._memory is not None:  # what others have freed is still the process's
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
        """A free arena, as soon as there is one; raises the error that ``control`` is stopped
        with."""
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
        """Raise ``PenstockError`` if a run further up the stack, which a signal handler or a
        callback of it has interrupted, has an arena: it would never give it back."""
        frame = sys._getframe(2).f_back  # the caller of the run that wants an arena
        while frame is not None:
            # Not of all frames: Python keeps the dict there, and with it a worker's last job.
            names = frame.f_code.co_varnames
            held = frame.f_locals.get("arenas") if "arenas" in names else None
            if isinstance(held, Arenas) and held.waiting is self.waiting:
                raise PenstockError(
                    "the session is called by a signal handler, a finalizer or a callback of a "
                    "run that has the only memory that Limits.max_bytes or memory= allows; raise "
                    "the limit, or call the session when the run has returned"
                )
            frame = frame.f_back

    def ask(self, receive: Callable[[T | None], None]) -> T | None:
        """A free or new arena; None if there can be none now. Then ``receive`` is called when
        another run gives one, on that run's thread, with a value for ``accept``."""
        memory = self._memory
        # A part does not wait for those that wait for the end of its run.
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
        """A free arena, or None in place of one that may be made; nothing if there is neither.
        ``part``: for a part of the run whose results are held. To be called with the lock."""
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
        """Whether what waits is a part of the run whose results are held."""
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
        self.serve()  # one that needs less may have been behind it
        return True

    def give(self, arena: T) -> None:
        """Return an arena: the next run that waits gets it."""
        self.free.append(arena)
        if self.waiting:
            self.serve()

    def serve(self) -> None:
        """Hand arenas to the runs that wait for one, as long as there are any."""
        _serve(self.waiting)

    def drop(self) -> None:
        """Drop an arena instead of returning it: the next run that waits may allocate one."""
        with _LOCK:
            self.count -= 1
        self.serve()

    def forget_free(self) -> None:
        """Drop a free arena, if there is one, for another pool. To be called with the lock."""
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
        """Bytes of all arenas, and of what is allocated beside them."""
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
            # A run that has just begun may have taken it, and will give it.
            found = pool.obtain(pool.is_part(receive))
            if not found:
                return
            waiting.popleft()
        # Without the lock: what receives the arena may ask for another one.
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
    """Hold ``nbytes`` of results in the memory of a session, once they fit beside what runs have.
    Runs that need them wait, in the order in which they came, but for parts of this one."""
    came = threading.Event()
    entry: Waiting | None = None
    results = _Results(memory, nbytes)
    with _LOCK:
        if memory.waiting or not results.obtain(False):
            entry = results, lambda _: came.set()
            memory.waiting.append(entry)
    try:
        if entry is not None:
            _serve(memory.waiting)  # what it waits for may have been given just before
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
            f"allocate({size}) of backend {host.name} gave no {size} bytes of uint8 that can be "
            f"written, in one dim and aligned to {ALIGNMENT}"
        )
    return memory
