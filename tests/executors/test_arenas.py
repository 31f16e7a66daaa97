"""Arenas: one per run, as many as memory allows, in the order in which runs ask."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from types import SimpleNamespace

import numpy as np
import pytest

import penstock as ps
from penstock.backends.numpy import NumpyBackend
from penstock.core.limits import Limits
from penstock.executors import arenas as module
from penstock.executors.arenas import Arenas
from penstock.executors.control import Control
from tests.support.timing import SOON, switching

SIZE = 1024


class Arena:
    """The object bound to the memory of an arena, for one run at a time."""

    def __init__(self, memory: np.ndarray) -> None:
        self.memory = memory
        self.owner = threading.Lock()


class Host(NumpyBackend):
    """Has memory for a limited number of allocations."""

    def __init__(self, allocations: float = float("inf")) -> None:
        super().__init__()
        self.allocations = allocations

    def allocate(self, nbytes):
        if self.allocations <= 0:
            raise MemoryError
        self.allocations -= 1
        return super().allocate(nbytes)


def arenas(
    most: int | None = None,
    host: Host | None = None,
    size: int = SIZE,
    bind: Callable[[np.ndarray], Arena] = Arena,
) -> Arenas[Arena]:
    """A pool of at most ``most`` arenas."""
    limit = None if most is None else most * size + size // 2
    return Arenas(size, host or Host(), Limits(max_bytes=limit), bind)


def take(of: Arenas[Arena], control: Control | None = None) -> Arena:
    """An arena, taken in the way of runs."""
    try:
        return of.free.pop()
    except IndexError:
        return of.take(control or Control())


class Waiter:
    """A request for an arena, and the arena that it got."""

    def __init__(self, of: Arenas[Arena]) -> None:
        self.got: list[Arena] = []
        self.at_once = of.ask(self.got.append)


def all_end(*threads: threading.Thread) -> None:
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not any(thread.is_alive() for thread in threads)


# The number of arenas.


def test_arenas_of_sequential_runs_are_one():
    found = arenas()
    first = take(found)
    for _ in range(5):
        found.give(first)
        assert take(found) is first
    assert found.nbytes == SIZE


def test_arenas_are_as_many_as_concurrent_runs():
    found = arenas()
    inside = threading.Barrier(5)
    held: list[Arena] = []

    def run() -> None:
        arena = take(found)
        held.append(arena)
        inside.wait(60)
        found.give(arena)

    for _ in range(3):
        held.clear()
        all_end(*(threading.Thread(target=run) for _ in range(5)))
        assert len({id(arena) for arena in held}) == 5
        assert found.nbytes == 5 * SIZE
        assert len(found.free) == 5


def test_arenas_share_no_memory():
    found = arenas()
    first, second = take(found), take(found)
    assert not np.shares_memory(first.memory, second.memory)
    assert first.memory.nbytes == second.memory.nbytes == SIZE


def test_arenas_are_no_more_than_the_limit_of_bytes_allows():
    found = arenas(3)
    held = [take(found) for _ in range(3)]
    waits = Waiter(found)
    assert waits.at_once is None
    assert not waits.got
    assert found.nbytes == 3 * SIZE
    found.give(held[1])
    assert waits.got == [held[1]]
    assert not found.free


def test_arena_larger_than_the_limit_is_refused():
    with pytest.raises(ps.LimitExceeded, match="1024 bytes, above the limit of 1000"):
        Arenas(SIZE, Host(), Limits(max_bytes=1000), Arena)


@pytest.mark.parametrize("limit", [0, 1, None])
def test_arenas_of_no_bytes_are_not_limited(limit):
    found = Arenas(0, Host(), Limits(max_bytes=limit), Arena)
    held = [take(found) for _ in range(10)]
    assert len(set(map(id, held))) == 10
    assert found.nbytes == 0


def test_arena_made_in_advance_is_taken_first():
    found = arenas(1)
    made = found.make()
    found.give(made)
    assert take(found) is made


# Waiting runs.


def test_arenas_serve_waiting_runs_in_order():
    found = arenas(2)
    held = [take(found), take(found)]
    waiting = [Waiter(found) for _ in range(6)]
    for i in range(3):
        for arena in held:
            found.give(arena)
        served = [len(waiter.got) for waiter in waiting]
        assert served == [1] * (2 * i + 2) + [0] * (4 - 2 * i)
    assert not found.free


def test_free_arena_is_taken_at_once():
    found = arenas(1)
    held = take(found)
    found.give(held)
    assert Waiter(found).at_once is held


def test_arena_given_back_goes_to_a_waiting_thread():
    found = arenas(1)
    held = take(found)
    got = []
    waits = threading.Thread(target=lambda: got.append(take(found)))
    waits.start()
    while not found.waiting:
        pass
    found.give(held)
    waits.join(60)
    assert got == [held]


def test_run_that_waits_for_an_arena_can_be_stopped():
    found = arenas(1)
    held = take(found)
    control = Control()
    raised = []

    def wait() -> None:
        try:
            take(found, control)
        except ps.Cancelled as error:
            raised.append(error)

    waits = threading.Thread(target=wait)
    waits.start()
    while not found.waiting:
        pass
    error = ps.Cancelled("enough")
    control.set(error)
    waits.join(60)
    assert raised == [error]
    assert not found.waiting
    # Nothing is lost: the next run gets the arena.
    found.give(held)
    assert take(found) is held


class Hasty(Control):
    """Its run is stopped at the moment when the arena comes."""

    __slots__ = ("late",)

    @property
    def stopped(self):
        return self.late()

    @stopped.setter
    def stopped(self, value):
        pass


def test_arena_given_to_a_stopped_run_goes_to_the_next():
    found = arenas(1)
    held = take(found)

    def late() -> bool:
        found.give(held)
        return True

    control = Hasty()
    control.late = late
    control.error = ps.Cancelled("enough")
    with pytest.raises(ps.Cancelled):
        found.take(control)
    assert list(found.free) == [held]


@pytest.mark.timeout(60)
def test_arena_of_an_interrupted_run_goes_to_the_next(monkeypatch):
    found = arenas(1)
    held = take(found)

    class Interrupted:
        """A lock. The thread that acquires it after a release is interrupted."""

        def __init__(self) -> None:
            self.lock = threading.Lock()
            self.calls = 0

        def acquire(self, timeout: float = 0.5) -> bool:  # not without end, as the test must end
            self.calls += 1
            if self.calls == 2:
                found.give(held)
            taken = self.lock.acquire(timeout=timeout)
            if self.calls == 2:
                raise KeyboardInterrupt
            return taken

        def release(self) -> None:
            self.lock.release()

    monkeypatch.setattr(module, "threading", SimpleNamespace(Lock=Interrupted))
    with pytest.raises(KeyboardInterrupt):
        found.take(Control())
    assert list(found.free) == [held]


# Giving up.


def test_dropped_arena_makes_room_for_another():
    found = arenas(1)
    dropped = take(found)
    found.drop()
    assert found.nbytes == 0
    assert take(found) is not dropped
    assert found.nbytes == SIZE


def test_dropped_arena_lets_a_waiting_run_make_one():
    found = arenas(1)
    dropped = take(found)
    first, second = Waiter(found), Waiter(found)
    found.drop()
    (arena,) = first.got
    assert arena is not dropped
    assert not second.got
    assert found.nbytes == SIZE
    found.give(arena)
    assert second.got == [arena]


def test_trim_frees_arenas_that_no_run_holds():
    found = arenas(3)
    held = [take(found) for _ in range(3)]
    found.give(held[0])
    found.give(held[1])
    found.trim()
    assert found.nbytes == SIZE
    assert not found.free
    found.give(held[2])
    found.trim()
    assert found.nbytes == 0
    assert len([take(found) for _ in range(3)]) == 3
    assert found.nbytes == 3 * SIZE


class Contested(deque):
    """Free arenas. Just after a thread has looked at them or taken one, others are added."""

    def __init__(self, of: Arenas[Arena]) -> None:
        super().__init__(of.free)
        of.free = self
        self.after_look: Callable[[], object] = bool
        self.after_pop: Callable[[], object] = bool

    def __bool__(self) -> bool:
        found = len(self) > 0
        if found:
            hook, self.after_look = self.after_look, bool
            hook()
        return found

    def pop(self):
        arena = super().pop()
        hook, self.after_pop = self.after_pop, bool
        hook()
        return arena


def test_run_that_asks_during_trim_gets_an_arena():
    found = arenas(1)
    found.give(take(found))
    waiting: list[Waiter] = []
    Contested(found).after_pop = lambda: waiting.append(Waiter(found))
    found.trim()
    (waiter,) = waiting
    assert waiter.at_once is not None or waiter.got


def test_run_gets_another_arena_if_one_was_taken_while_it_asked():
    found = arenas(2)
    found.give(take(found))
    stolen: list[Arena] = []
    free = Contested(found)
    free.after_look = lambda: stolen.append(free.popleft())
    asks = Waiter(found)
    assert asks.at_once is not None
    assert asks.at_once not in stolen


def test_run_gets_the_arena_given_just_as_it_begins_to_wait():
    found = arenas(1)
    held = take(found)
    stolen: list[Arena] = []
    free = Contested(found)
    free.after_look = lambda: stolen.append(free.popleft())

    class Queue(deque):
        """A thread that did not see the waiting run returns its arena just as the run waits."""

        def append(self, receive):
            super().append(receive)
            free.append(held)

    found.waiting = Queue()
    asks = Waiter(found)
    for arena in stolen:  # the faster thread returns it at the end
        found.give(arena)
    assert asks.at_once is held or asks.got == [held]


# Failures.


def test_failed_allocation_of_an_arena_frees_its_share_of_the_limit():
    host = Host(1)
    found = arenas(2, host)
    first = take(found)
    for _ in range(5):
        with pytest.raises(ps.RunError, match="cannot allocate an arena of 1024 bytes"):
            take(found)
        assert found.nbytes == SIZE
    host.allocations = 1
    second = take(found)
    assert second is not first
    assert Waiter(found).at_once is None


@pytest.mark.parametrize("error", [ps.RunError("no"), KeyboardInterrupt()])
def test_failed_binding_of_an_arena_frees_its_share_of_the_limit(error):
    fails = [True]

    def bind(memory: np.ndarray) -> Arena:
        if fails:
            raise error
        return Arena(memory)

    found = arenas(1, bind=bind)
    with pytest.raises(type(error)):
        take(found)
    with pytest.raises(type(error)):
        found.make()
    assert found.nbytes == 0
    fails.clear()
    take(found)
    assert found.nbytes == SIZE


class Outcome(threading.Thread):
    """Takes an arena on a thread of its own; ``got`` is the arena, or the error."""

    def __init__(self, of: Arenas[Arena], control: Control) -> None:
        super().__init__(daemon=True)
        self.of = of
        self.control = control
        self.got: list[object] = []
        self.start()
        while not of.waiting:
            pass

    def run(self) -> None:
        try:
            self.got.append(take(self.of, self.control))
        except ps.PenstockError as error:
            self.got.append(error)


def test_dropped_arena_leaves_errors_of_the_next_one_to_the_waiting_run():
    found = arenas(1, Host(1))
    take(found)
    waiter = Waiter(found)
    found.drop()
    # It gets the right to allocate an arena, and the error is its own.
    assert waiter.got == [None]
    with pytest.raises(ps.RunError, match="cannot allocate"):
        found.accept(None)


@pytest.mark.parametrize("stopped", [False, True])
def test_run_that_waits_for_an_arena_that_cannot_be_made_fails(stopped):
    found = arenas(2, Host(2))
    kept = take(found)
    take(found)
    control = Control()
    waits = Outcome(found, control)
    with suppress(ps.RunError):
        found.drop()
    if stopped:
        control.set(ps.Cancelled("enough"))
    else:
        found.give(kept)
    waits.join(SOON)
    assert waits.got


# Many threads.


@pytest.mark.parametrize("most", [1, 2, 3, None])
def test_concurrent_blocking_requests_each_get_an_arena_of_their_own(most):
    found = arenas(most)
    found.give(found.make())
    begin = threading.Barrier(8)

    def run() -> None:
        begin.wait(60)
        for _ in range(400):
            arena = found.take(Control())  # asks under the lock, while others return without it
            assert arena.owner.acquire(blocking=False)
            arena.owner.release()
            found.give(arena)

    with switching():
        all_end(*(threading.Thread(target=run) for _ in range(8)))
    assert found.nbytes <= (8 if most is None else most) * SIZE
    assert len(found.free) == found.nbytes // SIZE
    assert not found.waiting


def test_concurrent_asynchronous_requests_each_get_an_arena_of_their_own():
    found = arenas(2)
    found.give(found.make())
    done = threading.Semaphore(0)
    begin = threading.Barrier(6)

    def use(arena: Arena) -> None:
        assert arena.owner.acquire(blocking=False)
        arena.owner.release()
        done.release()
        given.append(arena)

    given: deque[Arena] = deque()

    def run() -> None:
        begin.wait(60)
        for _ in range(300):
            arena = found.ask(use)
            if arena is not None:
                use(arena)
            while True:  # one of the threads returns the arena that was received
                try:
                    found.give(given.popleft())
                except IndexError:
                    break

    with switching():
        all_end(*(threading.Thread(target=run) for _ in range(6)))
    while given:
        found.give(given.popleft())
    for _ in range(6 * 300):
        assert done.acquire(timeout=SOON)
    assert len(found.free) == found.nbytes // SIZE


def test_concurrent_requests_survive_stops_and_drops_of_others():
    found = arenas(2)
    begin = threading.Barrier(6)
    failed: list[BaseException] = []

    def run(number: int) -> None:
        begin.wait(60)
        try:
            for i in range(60):
                control = Control()
                if (i + number) % 3 == 0:
                    control.set(ps.Cancelled("enough"))
                try:
                    arena = found.take(control)
                except ps.Cancelled:
                    continue
                assert arena.owner.acquire(blocking=False)
                arena.owner.release()
                if (i + number) % 7 == 0:
                    found.drop()
                else:
                    found.give(arena)
        except BaseException as error:
            failed.append(error)

    with switching():
        all_end(*(threading.Thread(target=run, args=(number,)) for number in range(6)))
    assert not failed
    assert len(found.free) == found.nbytes // SIZE <= 2
    assert not found.waiting
