"""The pool of a plan's arenas. Each run has exclusive use of one arena.

A run that finds no free arena allocates another, so the pool grows to the largest number of
concurrent runs. If ``Limits.max_bytes`` allows no more, runs wait in the order of arrival.
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

_LOCK = shared_lock()  # one lock for all pools, since few runs take it


class Arenas(Generic[T]):
    """A pool of arenas. ``bind(memory)`` creates an arena in a uint8 array of ``size`` bytes, and
    allocates ``remote`` further bytes for it, by the name of the device memory. Raises
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
        self.bytes_each = sum(memories.values())
        self._host = host
        self._bind = bind
        self.waiting: deque[Waiting] = deque()
        self.needs, self.alone = self.bytes_each, False
        """bytes of the session's memory that a run reserves, and whether a run must reserve all of
        the memory
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
        # The memory with the largest share is full first, since an arena takes a part of each.
        self._most = most // memories[largest] if most is not None and self.bytes_each else None
        self.free: deque[T] = deque()
        """arenas that no run holds. ``pop`` is the fast path of ``take``; ``append``, followed by
        ``serve`` if there are ``waiting`` runs, is equivalent to ``give``"""
        self.count = 0
        """the number of arenas, whether free or held by runs"""
        renewed(self)

    def share(self, memory: SessionMemory, needs: int, alone: bool) -> None:
        """Count arenas against the memory of a session from now on; call this before the first
        run. ``needs``: the bytes of an arena and of a run's other allocations. ``alone``: a run
        takes all of the memory, as it may allocate more. Raises ``LimitExceeded`` if a run could
        never begin."""
        memory.check(needs, alone)
        self._memory, self.needs, self.alone = memory, needs, alone
        self.waiting = memory.waiting
        with _LOCK:
            count, self.count = self.count, 0
            fits = memory.makes_room(self)
            self.count = count
            if not fits:
                self.forget_free()

    def make(self) -> T:
        """Return a new arena, which the caller must return by ``give``."""
        with _LOCK:
            self.count += 1
        return self._new()

    def _new(self) -> T:
        if self._memory is not None:  # malloc may still hold the memory of dropped arenas
            give_back_memory(self._memory.unused)
        try:
            return self._bind(_checked(self._host, self._host.allocate(self.size), self.size))
        except BaseException as error:
            self.drop()
            if isinstance(error, MemoryError):
                message = f"out of memory: cannot allocate an arena of {self.size} bytes"
                raise RunError(message) from error
            raise

    def take(self, control: Control) -> T:
        """Wait for an arena and return it. Raises the error of ``control`` if it is stopped."""
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
            # ``f_locals`` creates a dict that the frame keeps, and with it a worker's last job.
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
        """Return a free or new arena, or None if the caller must wait. In this case ``receive`` is
        called with a value for ``accept``, on the thread of the run that returns an arena."""
        memory = self._memory
        # Runs in the queue may wait for the end of this part's run, so the part goes first.
        part = memory is not None and memory.in_parts
        with _LOCK:
            offer = () if self.waiting and not self.free and not part else self.obtain(part)
            if not offer:
                if part and memory is not None:
                    memory.next_part = receive
                    self.waiting.appendleft((self, receive))
                else:
                    self.waiting.append((self, receive))
                # A run may have returned one meanwhile without seeing that this run waits.
                offer = self.obtain(part) if part or len(self.waiting) == 1 else ()
                if not offer:
                    return None
                self.waiting.popleft()
        return self.accept(offer[0])

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
        """Whether the limit and the session's memory allow one more arena."""
        if self._most is not None and self.count >= self._most:
            return False
        return self._memory is None or self._memory.makes_room(self, part)

    def is_part(self, receive: Callable[..., object]) -> bool:
        """Whether the waiting callback belongs to a part of the run that holds results."""
        return self._memory is not None and self._memory.next_part is receive

    def accept(self, received: T | None) -> T:
        """Return the arena that ``receive`` was called with, or a new arena for None."""
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
        """Return an arena to the pool, which hands it to the next waiting run."""
        self.free.append(arena)
        if self.waiting:
            self.serve()

    def serve(self) -> None:
        """Hand free arenas to waiting runs."""
        _serve(self.waiting)

    def drop(self) -> None:
        """Drop an arena instead of returning it, so that the next waiting run may allocate one."""
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
        return self.count * self.bytes_each

    def forked(self) -> None:
        """Forget, in a forked child, the arenas that runs of the parent's other threads hold."""
        self.waiting.clear()
        self.count = len(self.free)


def _serve(waiting: deque[Waiting]) -> None:
    while waiting:
        with _LOCK:
            if not waiting:
                return
            pool, receive = waiting[0]
            # A run that has just begun may have taken the arena; it calls ``serve`` at its end.
            offer = pool.obtain(pool.is_part(receive))
            if not offer:
                return
            waiting.popleft()
        # Called without the lock, since the callback may ask for another arena.
        receive(offer[0])


class _Results:
    """An entry of the queue of waiting runs that waits for the memory of results, not an arena."""

    def __init__(self, memory: SessionMemory, nbytes: int) -> None:
        self._memory, self._nbytes = memory, nbytes

    def obtain(self, part: bool) -> tuple[None, ...]:
        return (None,) if self._memory.holds_results(self._nbytes) else ()

    def is_part(self, receive: Callable[..., object]) -> bool:
        return False


@contextmanager
def holding_results(memory: SessionMemory, nbytes: int, control: Control) -> Iterator[None]:
    """Wait until ``nbytes`` of results fit into the memory of a session, and reserve them. Other
    runs that need the memory wait in the order of arrival; parts of this run do not."""
    reserved = threading.Event()
    entry: Waiting | None = None
    results = _Results(memory, nbytes)
    with _LOCK:
        if memory.waiting or not results.obtain(False):
            entry = results, lambda _: reserved.set()
            memory.waiting.append(entry)
    try:
        if entry is not None:
            _serve(memory.waiting)  # the memory may have been released just before
            while not reserved.wait(LOOK_S):
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
    """Return ``memory``, which a backend has allocated. Raises ``ExtensionError`` unless it is
    writable, aligned, and a uint8 array of ``size`` bytes."""
    sound = isinstance(memory, np.ndarray) and memory.dtype == np.uint8 and memory.shape == (size,)
    aligned = not size or (sound and address(memory) % ALIGNMENT == 0)
    if not sound or not aligned or not memory.flags.writeable:
        raise ExtensionError(
            f"allocate({size}) of backend {host.name} must return a writable one-dimensional "
            f"uint8 array of {size} bytes, aligned to {ALIGNMENT}"
        )
    return memory
