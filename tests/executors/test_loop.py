"""The loop over tasks: what runs at the same time, how it ends, and that it always does.

Most tests draw tasks by hand, which are plain functions here. Tasks meet at barriers and wait for
events, with a timeout that only a failing test ever comes to.
"""

from __future__ import annotations

import gc
import random
import sys
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
from onnx import parser

import penstock as ps
from penstock import compiling
from penstock.backends.numpy import NumpyBackend
from penstock.dag import Dag
from penstock.executors.base import Control
from penstock.executors.loop import Flow, FlowRun, Queue
from penstock.executors.parallel import ParallelExecutor
from penstock.grouping import OneByOne
from penstock.ir import Node, clone
from penstock.limits import DEFAULT_LIMITS, Limits
from penstock.observe import ObservedRun, Observer
from penstock.ops import find
from penstock.passes.pipeline import optimize
from penstock.plan import Plan, Step, compile_plan
from penstock.tasks import Task, Tasks, arrange
from penstock.threads import Workers
from tests.executors.test_parallel import OfAllSteps, Unmeasured

# What only a failing test comes to.
SOON = 30


@pytest.fixture
def workers() -> Iterator[Workers]:
    made = Workers("test", 2)
    yield made
    made.close()


@pytest.fixture
def other() -> Iterator[Workers]:
    made = Workers("other", 1)
    yield made
    made.close()


@pytest.fixture
def gate() -> Iterator[threading.Event]:
    """An event, set at the end in any case, so that a failed test ends too."""
    made = threading.Event()
    yield made
    made.set()


# Tasks by hand.


def drawn(
    n: int,
    edges: Iterable[tuple[int, int]] = (),
    *,
    blocks: Mapping[int, Sequence[Sequence[int]]] | None = None,
    queues: Mapping[int, int] | None = None,
    reads: Mapping[int, Sequence[int]] | None = None,
) -> Tasks:
    """Tasks 0 to n - 1, with ``edges`` between those of one block.

    ``blocks[t]`` are the tasks of each block of the expanded task t, ``queues[t]`` is the queue of
    task t, if not 0, and ``reads[slot]`` are the tasks that read a slot.
    """
    parent, members, of = [-1], [list(range(n))], [0] * n
    owned: dict[int, tuple[int, ...]] = {}
    for t, inner in (blocks or {}).items():
        owned[t] = tuple(range(len(parent), len(parent) + len(inner)))
        for each in inner:
            for i in each:
                members[of[i]].remove(i)
                of[i] = len(parent)
            parent.append(t)
            members.append(list(each))
    dag = Dag(n, edges)
    counted: list[list[int]] = [[] for _ in range(n)]
    for slot, readers in (reads or {}).items():
        for t in readers:
            counted[t].append(slot)
    steps = [Step(Node(find("Neg"), [], [], name=f"n{t}"), None, (), ()) for t in range(n)]
    return Tasks(
        tuple(
            Task((steps[t],), of[t], owned.get(t, ()), (queues or {}).get(t, 0), 1.0)
            for t in range(n)
        ),
        tuple(len(before) for before in dag.pred),
        dag.succ,
        tuple(map(tuple, members)),
        tuple(parent),
        frozenset(reads or ()),
        ((),) * n,
        tuple(map(tuple, counted)),
        {slot: len(readers) for slot, readers in (reads or {}).items()},
    )


def begin(
    tasks: Tasks,
    functions: Mapping[int, Callable[..., Any]],
    queues: Sequence[Queue] = (Queue(1, None),),
    *,
    worthwhile: Iterable[int] | None = None,
    control: Control | None = None,
    values: list[Any] | None = None,
    **options: Any,
) -> FlowRun:
    """A run of ``tasks``; those without a function do nothing, all not named are worth a worker."""
    n = len(tasks.tasks)
    worth = range(n) if worthwhile is None else set(worthwhile)
    values = [None] * 8 if values is None else values
    flow = Flow(tasks, queues, [t in worth for t in range(n)], len(values))
    given = [functions.get(t, lambda control, V: None) for t in range(n)]
    return FlowRun(flow, given, values, control or Control(), **options)


def on(thread: threading.Thread) -> threading.Thread:
    thread.start()
    return thread


def ended(*threads: threading.Thread) -> None:
    for thread in threads:
        thread.join(SOON)
    assert not any(thread.is_alive() for thread in threads)


def idle(*pools: Workers) -> None:
    """Return when all jobs are done and all threads idle."""
    end = time.monotonic() + SOON
    while any(pool._free != pool.threads for pool in pools):
        assert time.monotonic() < end
        time.sleep(0)


class Log:
    """The order in which tasks ran."""

    def __init__(self) -> None:
        self.order: list[int] = []

    def of(self, *tasks: int) -> dict[int, Callable[..., None]]:
        """Functions for tasks that are noted."""
        return {t: partial(self.note, t) for t in tasks}

    def note(self, t: int, control: Control, V: list[Any]) -> None:
        self.order.append(t)


class Meeting:
    """Where so many tasks must be inside at once; which they are on, by name."""

    def __init__(self, parties: int) -> None:
        self.barrier = threading.Barrier(parties)
        self.threads: set[str] = set()

    def __call__(self, control: Control, V: list[Any]) -> None:
        self.threads.add(threading.current_thread().name)
        self.barrier.wait(SOON)


# At the same time.


def test_two_tasks_that_do_not_wait_for_each_other_overlap(workers):
    #   0
    #   1
    meet = Meeting(2)
    begin(drawn(2), {0: meet, 1: meet}, [Queue(2, workers)]).run()
    assert len(meet.threads) == 2
    assert threading.current_thread().name in meet.threads


def test_the_branches_of_a_diamond_overlap_and_its_ends_do_not(workers):
    #        /-> 1 --\
    #     0 +         +-> 3
    #        \-> 2 --/
    meet, tasks = Meeting(2), drawn(4, [(0, 1), (0, 2), (1, 3), (2, 3)])
    for _ in range(50):
        log = Log()
        begin(tasks, {**log.of(0, 3), 1: meet, 2: meet}, [Queue(2, workers)]).run()
        assert log.order == [0, 3]


@pytest.mark.parametrize("limit", [1, 2, 3, 5])
def test_there_are_never_more_at_once_than_the_queue_allows(limit):
    workers = Workers("test", 8)
    inside, most, lock = 0, 0, threading.Lock()

    def work(control: Control, V: list[Any]) -> None:
        nonlocal inside, most
        with lock:
            inside += 1
            most = max(most, inside)
        for _ in range(50):
            time.sleep(0)
        with lock:
            inside -= 1

    begin(drawn(60), dict.fromkeys(range(60), work), [Queue(limit, workers)]).run()
    assert 1 <= most <= limit
    workers.close()


def test_as_many_as_the_queue_allows_are_inside():
    workers = Workers("test", 8)
    meet = Meeting(4)
    begin(drawn(12), dict.fromkeys(range(12), meet), [Queue(4, workers)]).run()
    assert len(meet.threads) == 4
    workers.close()


@pytest.mark.parametrize("pool", [True, False])
def test_one_thread_is_enough_for_everything(pool):
    workers = Workers("test", 1) if pool else None
    log = Log()

    def inner(t: int, *blocks: int) -> Callable[..., Any]:
        def generate(control: Control, V: list[Any]) -> Iterator[int]:
            yield from blocks
            log.order.append(t)

        return generate

    tasks = drawn(8, [(0, 1), (1, 2), (0, 3), (4, 5)], blocks={2: [(4, 5)], 3: [(6,), ()]})
    functions = {**log.of(*range(8)), 2: inner(2, 1, 1), 3: inner(3, 2, 3, 2)}
    begin(tasks, functions, [Queue(2, workers)]).run()
    assert Counter(log.order) == {0: 1, 1: 1, 2: 1, 3: 1, 4: 2, 5: 2, 6: 2, 7: 1}
    if workers is not None:
        workers.close()


def test_the_most_urgent_of_the_ready_tasks_runs_first():
    #   0 -> 3      and 1, 2, 4 wait for nothing
    log = Log()
    begin(drawn(5, [(0, 3)]), log.of(*range(5))).run()
    assert log.order == [0, 1, 2, 3, 4]


def test_tasks_that_are_not_worth_it_wake_nobody(workers):
    names = set()
    functions = dict.fromkeys(
        range(50), lambda control, V: names.add(threading.current_thread().name)
    )
    begin(drawn(50), functions, [Queue(2, workers)], worthwhile=()).run()
    assert names == {threading.current_thread().name}
    assert workers.threads == 0


def briefly(event: threading.Event, seen: list[bool]) -> Callable[..., None]:
    return lambda control, V: seen.append(event.wait(SOON))


def test_a_small_task_hides_no_large_one(workers, gate):
    #   0 (large)   1 (small)   2 (large), all ready: 0 ends when 2 has begun
    seen: list[bool] = []
    functions = {0: briefly(gate, seen), 2: lambda control, V: gate.set()}
    begin(drawn(3), functions, [Queue(2, workers)], worthwhile=(0, 2)).run()
    assert seen == [True]


# Several queues.


def test_tasks_of_two_queues_overlap_each_on_its_own_threads(workers, other):
    #   0, 2 on the host     1, 3 elsewhere
    meet, there = Meeting(2), set()

    def far(control: Control, V: list[Any]) -> None:
        there.add(threading.current_thread().name)
        meet.barrier.wait(SOON)

    tasks = drawn(4, queues={1: 1, 3: 1})
    queues = [Queue(1, workers), Queue(1, other)]
    begin(tasks, {0: meet, 2: meet, 1: far, 3: far}, queues).run()
    assert meet.threads == {threading.current_thread().name}
    assert there == {"penstock-other-0"}


@pytest.mark.parametrize("worthwhile", [True, False])
def test_a_chain_through_two_queues_goes_to_and_fro(workers, other, worthwhile):
    #   0 => 1 => 2 => ... => 199
    n, order = 200, []

    def note(t: int) -> Callable[..., None]:
        return lambda control, V: order.append((t, threading.current_thread().name))

    tasks = drawn(n, [(t, t + 1) for t in range(n - 1)], queues=dict.fromkeys(range(1, n, 2), 1))
    run = begin(
        tasks,
        {t: note(t) for t in range(n)},
        [Queue(2, workers), Queue(1, other)],
        worthwhile=range(n) if worthwhile else (),
    )
    run.run()
    assert [t for t, _ in order] == list(range(n))
    assert {name for t, name in order if t % 2} == {"penstock-other-0"}
    assert "penstock-other-0" not in {name for t, name in order if not t % 2}


def test_a_caller_with_nothing_to_do_takes_no_processor_time(workers, other, gate):
    #   0 => 1    the caller waits for 1, first for its begin and then for its end
    began = threading.Event()

    def far(control: Control, V: list[Any]) -> None:
        began.set()
        assert gate.wait(SOON)

    used = []

    def call() -> None:
        run = begin(drawn(2, [(0, 1)], queues={1: 1}), {1: far}, [Queue(1, None), Queue(1, other)])
        before = time.thread_time()
        run.run()
        used.append(time.thread_time() - before)

    caller = on(threading.Thread(target=call))
    assert began.wait(SOON)
    threading.Event().wait(0.2)
    gate.set()
    ended(caller)
    assert used[0] < 0.05


def test_a_caller_that_waits_is_woken_for_a_task(other):
    #   0 (elsewhere) -> 1 (the host, which has no pool)
    names = []
    tasks = drawn(2, [(0, 1)], queues={0: 1})
    run = begin(
        tasks,
        {1: lambda control, V: names.append(threading.current_thread().name)},
        [Queue(1, None), Queue(1, other)],
    )
    run.run()
    assert names == [threading.current_thread().name]


def test_a_run_without_a_caller_comes_back_to_its_pool(workers, other):
    #   0 (elsewhere) -> 1 (the host): who has started the run has left by then
    done, names = threading.Event(), []
    tasks = drawn(2, [(0, 1)], queues={0: 1})
    run = begin(
        tasks,
        {1: lambda control, V: names.append(threading.current_thread().name)},
        [Queue(1, workers), Queue(1, other)],
        on_end=done.set,
    )
    workers.submit(run.start)
    assert done.wait(SOON)
    assert run.error is None
    assert names[0].startswith("penstock-test")


# Expanded tasks.


def turning(times: int, block: int = 1) -> Callable[..., Iterator[int]]:
    def generate(control: Control, V: list[Any]) -> Iterator[int]:
        for _ in range(times):
            if control.stopped:
                control.stop()
            yield block

    return generate


@pytest.mark.parametrize("times", [0, 1, 10_000])
@pytest.mark.parametrize("body", [(), (1,), (1, 2)])
def test_a_body_runs_as_often_as_its_loop_turns(times, body):
    #   0 { body }     and no deeper the more often
    ran: Counter[int] = Counter()
    depth = set()

    def work(t: int) -> Callable[..., None]:
        def run(control: Control, V: list[Any]) -> None:
            ran[t] += 1
            frame, frames = sys._getframe(), 0
            while frame is not None:
                frame, frames = frame.f_back, frames + 1
            depth.add(frames)

        return run

    tasks = drawn(1 + len(body), blocks={0: [body]})
    begin(tasks, {0: turning(times), 1: work(1), 2: work(2)}).run()
    assert ran == (dict.fromkeys(body, times) if times else {})
    assert len(depth) <= 1


def test_tasks_of_a_body_overlap_and_iterations_do_not(workers):
    #   0 { 1, 2 }
    meet, inside, wrong = Meeting(2), [0, 0], []

    def work(t: int) -> Callable[..., None]:
        def run(control: Control, V: list[Any]) -> None:
            inside[t] += 1
            meet.barrier.wait(SOON)
            if inside[0] != inside[1]:
                wrong.append(list(inside))
            meet.barrier.wait(SOON)

        return run

    tasks = drawn(3, blocks={0: [(1, 2)]})
    begin(tasks, {0: turning(100), 1: work(0), 2: work(1)}, [Queue(2, workers)]).run()
    assert inside == [100, 100]
    assert not wrong


def test_blocks_nest(workers):
    #   0 { 1 { 2, 3 | } -> 4 } -> 5
    log = Log()

    def choosing(control: Control, V: list[Any]) -> Iterator[int]:
        V[0] += 1
        yield 2 if V[0] % 2 else 3

    tasks = drawn(6, [(1, 4), (0, 5)], blocks={0: [(1, 2, 3, 4)], 1: [(2, 3), ()]})
    functions = {0: turning(4), 1: choosing, **log.of(2, 3, 4, 5)}
    begin(tasks, functions, [Queue(2, workers)], values=[0] * 8).run()
    assert Counter(log.order) == {2: 2, 3: 2, 4: 4, 5: 1}
    assert log.order[-1] == 5
    assert sorted(log.order[:3]) == [2, 3, 4]
    assert log.order[2:4] == [4, 4]


def test_a_body_may_be_on_another_queue(other):
    #   0 { 1 => 2 }
    names: list[str] = []
    tasks = drawn(3, [(1, 2)], blocks={0: [(1, 2)]}, queues={1: 1})
    functions = {
        0: turning(50),
        1: lambda control, V: names.append(threading.current_thread().name),
    }
    begin(tasks, functions, [Queue(1, None), Queue(1, other)]).run()
    assert names == ["penstock-other-0"] * 50


def test_two_loops_turn_at_the_same_time(workers):
    #   0 { 1 }     2 { 3 }: each body meets the other's
    meet = Meeting(2)
    tasks = drawn(4, blocks={0: [(1,)], 2: [(3,)]})
    functions = {0: turning(50), 2: turning(50, 2), 1: meet, 3: meet}
    begin(tasks, functions, [Queue(2, workers)]).run()
    assert len(meet.threads) == 2


def test_what_follows_a_loop_waits_for_its_last_iteration(workers):
    #   0 { 1 } -> 2
    ran = []
    tasks = drawn(3, [(0, 2)], blocks={0: [(1,)]})
    functions = {
        0: turning(10),
        1: lambda control, V: ran.append(1),
        2: lambda control, V: ran.append(2),
    }
    begin(tasks, functions, [Queue(2, workers)]).run()
    assert ran == [1] * 10 + [2]


# Values.


def test_a_value_goes_with_the_last_of_its_readers(workers):
    #        /-> 1 --\
    #     0 +-> 2 ----+-> 4      V[0] is made by 0, and read by 1, 2 and 3
    #        \-> 3 --/
    class Value:
        pass

    gone: list[weakref.ref] = []

    def make(control: Control, V: list[Any]) -> None:
        V[0] = Value()
        gone.append(weakref.ref(V[0]))

    def read(control: Control, V: list[Any]) -> None:
        assert isinstance(V[0], Value)

    def last(control: Control, V: list[Any]) -> None:
        assert V[0] is None
        assert gone[-1]() is None

    edges = [(0, 1), (0, 2), (0, 3), (1, 4), (2, 4), (3, 4)]
    tasks = drawn(5, edges, reads={0: (1, 2, 3)})
    for _ in range(50):
        begin(tasks, {0: make, 1: read, 2: read, 3: read, 4: last}, [Queue(3, workers)]).run()


def test_and_so_it_does_in_each_iteration():
    #   0 { 1 -> 2, 3 }    V[0] is made by 1, and read by 2 and 3
    held = []

    def make(control: Control, V: list[Any]) -> None:
        held.append(V[0])
        V[0] = 1

    def read(control: Control, V: list[Any]) -> None:
        assert V[0] == 1

    tasks = drawn(4, [(1, 2), (1, 3)], blocks={0: [(1, 2, 3)]}, reads={0: (2, 3)})
    begin(tasks, {0: turning(5), 1: make, 2: read, 3: read}).run()
    assert held == [None] * 5


# Failures.


class BrokenError(Exception):
    """What goes wrong in a task."""


def failing(error: BaseException, after: threading.Event | None = None) -> Callable[..., None]:
    def fail(control: Control, V: list[Any]) -> None:
        assert after is None or after.wait(SOON)
        raise error

    return fail


def test_a_failing_task_lets_what_runs_end_and_nothing_else_begin(workers, gate):
    #   0 fails while 1 is inside; 2 is ready, 3 waits for 1
    inside, ran = threading.Event(), []

    def slow(control: Control, V: list[Any]) -> None:
        inside.set()
        assert gate.wait(SOON)
        ran.append(1)

    def note(t: int) -> Callable[..., None]:
        return lambda control, V: ran.append(t)

    control, error = Control(), BrokenError()
    run = begin(
        drawn(4, [(1, 3)]),
        {0: failing(error, inside), 1: slow, 2: note(2), 3: note(3)},
        [Queue(2, workers)],
        control=control,
    )
    raised: list[BaseException] = []

    def call() -> None:
        try:
            run.run()
        except BrokenError as failure:
            raised.append(failure)
            assert ran == [1]

    caller = on(threading.Thread(target=call))
    assert inside.wait(SOON)
    while not control.stopped:  # which tells loops that are inside
        time.sleep(0)
    assert caller.is_alive()
    gate.set()
    ended(caller)
    assert raised == [error]
    assert ran == [1]


def test_the_first_to_fail_wins(workers):
    #   0 and 1 are inside; 1 fails when 0 has failed
    meet, errors = threading.Barrier(2), [BrokenError("first"), BrokenError("second")]
    control = Control()

    def first(control: Control, V: list[Any]) -> None:
        meet.wait(SOON)
        raise errors[0]

    def second(control: Control, V: list[Any]) -> None:
        meet.wait(SOON)
        end = time.monotonic() + SOON
        while not control.stopped and time.monotonic() < end:
            time.sleep(0)
        raise errors[1]

    for _ in range(20):
        control = Control()
        run = begin(drawn(2), {0: first, 1: second}, [Queue(2, workers)], control=control)
        with pytest.raises(BrokenError, match="first"):
            run.run()
        for error in errors:
            error.__traceback__ = None


def test_an_error_in_a_body_ends_what_is_around_it():
    #   0 { 1 { 2 } } -> 3
    ran = []
    tasks = drawn(4, [(0, 3)], blocks={0: [(1, 2)], 1: [(2,)]})
    functions = {
        0: turning(3),
        1: turning(3, 2),
        2: failing(BrokenError()),
        3: lambda control, V: ran.append(3),
    }
    with pytest.raises(BrokenError):
        begin(tasks, functions).run()
    assert not ran


def test_a_task_that_stands_in_its_own_way_is_our_bug():
    #   0 <-> 1
    tasks = replace(drawn(2, [(0, 1)]), waits=(1, 1))
    with pytest.raises(ps.InternalError, match="wait for each other"):
        begin(tasks, {}).run()


def test_a_pool_that_takes_no_jobs_ends_the_run(other):
    #   0 -> 1 (elsewhere, where the pool is closed)
    other.close()
    tasks = drawn(2, [(0, 1)], queues={1: 1})
    with pytest.raises(RuntimeError, match="closed"):
        begin(tasks, {}, [Queue(1, None), Queue(1, other)]).run()


def test_no_tasks_at_all():
    ends = []
    begin(drawn(0), {}).run()
    begin(drawn(0), {}, on_end=lambda: ends.append(1)).start()
    assert ends == [1]


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit])
def test_an_interrupt_raises_at_once_and_leaves_nobody_behind(workers, gate, error):
    #   0 is interrupted while 1 is inside; 2 is ready, 3 waits for 1
    inside, control, ran = threading.Event(), Control(), []

    def slow(control: Control, V: list[Any]) -> None:
        inside.set()
        assert gate.wait(SOON)
        ran.append(1)

    def interrupted(control: Control, V: list[Any]) -> None:
        assert threading.current_thread() is threading.main_thread()
        assert inside.wait(SOON)
        raise error

    run = begin(
        drawn(4, [(1, 3)]),
        {0: interrupted, 1: slow, 2: failing(BrokenError()), 3: failing(BrokenError())},
        [Queue(2, workers)],
        control=control,
    )
    with pytest.raises(error):
        run.run()
    assert not ran  # raised while 1 was inside
    assert control.stopped  # which loops that are inside look at
    gate.set()
    idle(workers)
    assert ran == [1]
    # The pool serves others.
    meet = Meeting(3)
    begin(drawn(3), dict.fromkeys(range(3), meet), [Queue(3, workers)]).run()


def test_an_interrupt_of_a_caller_that_waits(workers, other, gate, monkeypatch):
    #   0 => 1   the caller is interrupted while it waits for 1
    inside = threading.Event()

    def slow(control: Control, V: list[Any]) -> None:
        inside.set()
        assert gate.wait(SOON)

    run = begin(drawn(2, [(0, 1)], queues={1: 1}), {1: slow}, [Queue(1, None), Queue(1, other)])

    class Interrupted:
        def acquire(self) -> None:
            assert inside.wait(SOON)
            raise KeyboardInterrupt

        def release(self) -> None:
            pass

    run.signal = Interrupted()
    with pytest.raises(KeyboardInterrupt):
        run.run()
    gate.set()
    idle(other)
    assert run.ended


# From outside.


def test_a_run_stops_between_two_tasks(workers, gate):
    #   0 -> 1
    inside, control, ran = threading.Event(), Control(), []

    def slow(control: Control, V: list[Any]) -> None:
        inside.set()
        assert gate.wait(SOON)
        ran.append(0)

    run = begin(
        drawn(2, [(0, 1)]),
        {0: slow, 1: lambda control, V: ran.append(1)},
        [Queue(2, workers)],
        control=control,
    )
    raised: list[BaseException] = []

    def call() -> None:
        try:
            run.run()
        except ps.Cancelled as error:
            raised.append(error)

    caller = on(threading.Thread(target=call))
    assert inside.wait(SOON)
    error = ps.Cancelled("enough")
    control.set(error)
    gate.set()
    ended(caller)
    assert raised == [error]
    assert ran == [0]
    assert error.__notes__ == ["The run had come to Neg (n1)."]


def test_a_run_that_was_stopped_says_in_which_loops_it_was():
    #   0 { 1 { 2 } }
    control = Control()
    tasks = drawn(3, blocks={0: [(1, 2)], 1: [(2,)]})

    def generate(control: Control, V: list[Any]) -> Iterator[int]:
        control.set(ps.Cancelled("enough"))
        yield 2

    with pytest.raises(ps.Cancelled) as caught:
        begin(tasks, {0: turning(1), 1: generate}, control=control).run()
    assert caught.value.__notes__ == ["The run had come to Neg (n2), in Neg (n1), in Neg (n0)."]


def test_a_loop_that_turns_for_ever_can_be_stopped(workers):
    #   0 { 1, 2 }
    control, turns = Control(), threading.Semaphore(0)
    tasks = drawn(3, blocks={0: [(1, 2)]})
    run = begin(
        tasks,
        {0: turning(2**62), 1: lambda control, V: turns.release()},
        [Queue(2, workers)],
        control=control,
    )
    raised = []

    def call() -> None:
        try:
            run.run()
        except ps.Cancelled as error:
            raised.append(error)

    caller = on(threading.Thread(target=call))
    for _ in range(10):
        assert turns.acquire(timeout=SOON)
    control.set(ps.Cancelled("enough"))
    ended(caller)
    assert raised == [control.error]


@pytest.mark.parametrize("way", ["run", "start"])
def test_a_run_that_waits_for_a_busy_pool_can_be_stopped(other, workers, gate, way):
    #   0 => 1, while others keep the pool of 1 busy
    busy = threading.Event()
    other.submit(lambda: (busy.set(), gate.wait(SOON)))
    assert busy.wait(SOON)
    control, over = Control(), threading.Event()
    run = begin(
        drawn(2, [(0, 1)], queues={1: 1}),
        {},
        [Queue(1, workers), Queue(1, other)],
        control=control,
        on_end=over.set if way == "start" else None,
    )

    def call() -> None:
        if way == "start":
            run.start()
            return
        try:
            run.run()
        except ps.Cancelled:
            over.set()

    caller = on(threading.Thread(target=call))
    while not run.workers[1] or run.running:
        time.sleep(0)
    control.set(ps.Cancelled("enough"))
    try:
        assert over.wait(SOON)
    finally:
        gate.set()
        ended(caller)


@pytest.mark.parametrize("way", ["run", "start"])
def test_nor_does_it_wait_if_it_is_stopped_a_moment_before(other, workers, gate, way):
    #   0 => 1, while others keep the pool of 1 busy; it is stopped while 0 is inside
    busy = threading.Event()
    other.submit(lambda: (busy.set(), gate.wait(SOON)))
    assert busy.wait(SOON)
    over = threading.Event()
    run = begin(
        drawn(2, [(0, 1)], queues={1: 1}),
        {0: lambda control, V: control.set(ps.Cancelled("enough"))},
        [Queue(1, workers), Queue(1, other)],
        on_end=over.set if way == "start" else None,
    )

    def call() -> None:
        with suppress(ps.Cancelled):
            getattr(run, way)()
        if way == "run":
            over.set()

    caller = on(threading.Thread(target=call))
    try:
        assert over.wait(SOON)
    finally:
        gate.set()
        ended(caller)


def test_a_signal_may_stop_the_run_at_any_moment():
    #   0 -> 1, 2      the handler of a signal runs between any two lines of the main thread
    control, over = Control(), threading.Event()

    class Interrupted(list):
        def __setitem__(self, slot, value):
            super().__setitem__(slot, value)
            control.set(ps.Cancelled("enough"))

    tasks = drawn(4, [(0, 1), (0, 2), (1, 3), (2, 3)], reads={0: (1, 2)})
    run = begin(tasks, {}, control=control, values=Interrupted([None] * 4))

    def call() -> None:
        with suppress(ps.Cancelled):
            run.run()
        over.set()

    on(threading.Thread(target=call, daemon=True))
    assert over.wait(1)


@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("call", ["step_ready", "step_begin", "step_end", "allocation"])
@pytest.mark.parametrize("executor", ["dataflow", "parallel"])
def test_an_observer_may_stop_the_run(every_step_a_task, executor, call, n):
    #   a -> b -> c -> d
    text = "g (float[N] x) => (float[N] d) { a = Exp(x) b = Sin(a) c = Neg(b) d = Cos(c) }"
    made, token = session(text, executor), ps.CancelToken()
    raised: list[BaseException] = []
    calls: list[object] = []

    def count(*arguments: object) -> None:
        calls.append(arguments)
        if len(calls) == n:
            token.cancel()

    observer = Observer()
    setattr(observer, call, count)

    def run() -> None:
        try:
            made.run({"x": np.ones(4, np.float32)}, cancel=token, observers=[observer])
        except ps.PenstockError as error:
            raised.append(error)

    thread = on(threading.Thread(target=run, daemon=True))
    thread.join(1)
    assert [type(error) for error in raised] == [ps.Cancelled]


# The end.


class Promises:
    """A pool that takes jobs and runs them when it is told to."""

    size = 8

    def __init__(self, *, refuses: bool = False) -> None:
        self.jobs: list[Callable[[], object]] = []
        self.refuses = refuses

    def submit(self, job: Callable[[], object]) -> None:
        self.jobs.append(job)

    def offer(self, job: Callable[[], object]) -> bool:
        if not self.refuses:
            self.jobs.append(job)
        return not self.refuses


def test_helpers_that_come_too_late_do_nothing():
    for fails in (False, True):
        pool, log = Promises(), Log()
        ends: list[int] = []
        functions = log.of(*range(10))
        if fails:
            functions[9] = failing(BrokenError())
        run = begin(drawn(10), functions, [Queue(4, pool)], on_end=partial(ends.append, 1))
        run.start()
        assert ends == [1]
        assert len(pool.jobs) == 3
        for job in pool.jobs:
            job()
        assert ends == [1]
        assert log.order == list(range(9 if fails else 10))
        assert run.workers == [0]
        assert run.running == 0
        assert isinstance(run.error, BrokenError) == fails


def test_nobody_is_asked_twice_for_the_same_place():
    pool = Promises()
    begin(drawn(100), {}, [Queue(4, pool)]).run()
    assert len(pool.jobs) == 3


def test_who_finds_nobody_does_all_alone():
    pool, ran = Promises(refuses=True), []
    functions = {t: lambda control, V: ran.append(threading.get_ident()) for t in range(20)}
    begin(drawn(20), functions, [Queue(4, pool)]).run()
    assert ran == [threading.get_ident()] * 20


def test_a_run_waits_for_a_helper_that_has_promised_to_come():
    #   0 => 1, whose worker comes when all others have left
    pool, ends = Promises(), []
    tasks = drawn(2, [(0, 1)], queues={1: 1})
    run = begin(tasks, {}, [Queue(1, pool), Queue(1, pool)], on_end=lambda: ends.append(1))
    run.start()
    assert not ends
    assert not run.ended
    (job,) = pool.jobs
    job()
    assert ends == [1]
    assert run.error is None


@pytest.mark.parametrize("error", [SystemExit, KeyboardInterrupt])
def test_the_end_is_told_whatever_a_task_raises(error):
    ends = []
    run = begin(drawn(1), {0: failing(error())}, on_end=lambda: ends.append(1))
    with suppress(error):
        run.start()
    assert isinstance(run.error, error)
    assert ends == [1]


class Refuses(Observer):
    """Raises the n-th time that a step is ready."""

    def __init__(self, n: int) -> None:
        self.n = n

    def step_ready(self, run: ObservedRun, step: Step) -> None:
        self.n -= 1
        if not self.n:
            raise BrokenError


@pytest.mark.parametrize("n", [1, 2, 3])
def test_the_end_is_told_whatever_an_observer_raises(n):
    #   0 { 1 } -> 2
    ends, control = [], Control()
    control.observer = Refuses(n)
    tasks = drawn(3, [(0, 2)], blocks={0: [(1,)]})
    run = begin(
        tasks, {0: turning(1)}, control=control, observe=True, on_end=lambda: ends.append(1)
    )
    run.start()
    assert isinstance(run.error, BrokenError)
    assert ends == [1]


def test_observers_are_told_of_each_task_that_is_ready_once():
    #   0 { 1 } -> 2
    class Ready(Observer):
        def __init__(self) -> None:
            self.names: list[str] = []

        def step_ready(self, run: ObservedRun, step: Step) -> None:
            self.names.append(step.node.name)

    control = Control()
    control.observer = seen = Ready()
    tasks = drawn(3, [(0, 2)], blocks={0: [(1,)]})
    begin(tasks, {0: turning(3)}, control=control, observe=True).run()
    assert seen.names == ["n0", "n1", "n1", "n1", "n2"]


# Stress.


class Checked:
    """Random tasks that check that all they wait for has ended, and some of which fail."""

    def __init__(self, seed: int, queues: int) -> None:
        choose = random.Random(seed)
        self.n = n = choose.randint(1, 25)
        reach = choose.choice([2, 5, n])
        self.edges = [
            (choose.randrange(max(0, b - reach), b), b)
            for b in range(1, n)
            for _ in range(choose.randint(0, 2))
        ]
        self.blocks: dict[int, list[list[int]]] = {}
        total = n
        for t in choose.sample(range(n), choose.randint(0, min(n, 4))):
            inner = [list(range(total, total + choose.randint(0, 3)))]
            total += len(inner[0])
            self.blocks[t] = inner
        self.total = total
        self.times = {t: choose.randint(0, 4) for t in self.blocks}
        self.queues = {t: choose.randrange(queues) for t in range(total) if t not in self.blocks}
        self.fails = choose.randrange(total) if choose.random() < 0.4 else -1
        self.outside = choose.random() < 0.1
        self.worthwhile = [t for t in range(total) if choose.random() < 0.8]
        self.tasks = drawn(total, self.edges, blocks=self.blocks, queues=self.queues)
        self.before = Dag(total, self.edges).pred
        self.lock = threading.Lock()
        self.begun: Counter[int] = Counter()
        self.done: Counter[int] = Counter()
        self.inside: set[int] = set()

    def functions(self) -> dict[int, Callable[..., Any]]:
        return {
            t: self.generator(t) if t in self.blocks else self.plain(t) for t in range(self.total)
        }

    def enter(self, t: int) -> None:
        with self.lock:
            self.begun[t] += 1
            assert all(self.done[b] for b in self.before[t])

    def leave(self, t: int) -> None:
        if t == self.fails:
            raise BrokenError
        with self.lock:
            self.done[t] += 1

    def plain(self, t: int) -> Callable[..., None]:
        def run(control: Control, V: list[Any]) -> None:
            self.inside.add(threading.get_ident())
            self.enter(t)
            if self.outside and t == self.total // 2:
                control.set(ps.Cancelled("enough"))
            self.inside.discard(threading.get_ident())
            self.leave(t)

        return run

    def generator(self, t: int) -> Callable[..., Iterator[int]]:
        (block,) = self.tasks.tasks[t].blocks
        (inner,) = self.blocks[t]

        def generate(control: Control, V: list[Any]) -> Iterator[int]:
            self.enter(t)
            for turn in range(self.times[t]):
                assert all(self.done[i] == turn for i in inner)
                yield block
            assert all(self.done[i] == self.times[t] for i in inner)
            self.leave(t)

        return generate

    def assert_over(self, error: BaseException | None) -> None:
        assert not self.inside
        if error is None:
            wanted = dict.fromkeys(range(self.n), 1)
            for t, (inner,) in self.blocks.items():
                wanted |= dict.fromkeys(inner, self.times[t])
            assert +self.begun == +self.done == +Counter(wanted)
        else:
            assert isinstance(error, BrokenError | ps.Cancelled)


@contextmanager
def switching() -> Iterator[None]:
    """Threads take turns as often as they can."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        yield
    finally:
        sys.setswitchinterval(before)


@pytest.mark.parametrize("queues", [1, 2])
def test_hundreds_of_runs_end_once_each(queues):
    host, far = Workers("test", 3), Workers("far", 2)
    made = [Queue(3, host), Queue(2, far)][:queues]
    with switching():
        for seed in range(300):
            checked = Checked(seed, queues)
            run = begin(checked.tasks, checked.functions(), made, worthwhile=checked.worthwhile)
            error: BaseException | None = None
            try:
                run.run()
            except (BrokenError, ps.Cancelled) as raised:
                error = raised
            assert run.ended
            checked.assert_over(error)
    host.close()
    far.close()


@pytest.mark.parametrize("queues", [1, 2])
def test_hundreds_of_runs_at_once_end_once_each(queues):
    host, far = Workers("test", 3), Workers("far", 2)
    made = [Queue(3, host), Queue(2, far)][:queues]
    ends: Counter[int] = Counter()
    all_of: list[tuple[Checked, FlowRun, threading.Event]] = []

    def end(seed: int, event: threading.Event) -> None:
        ends[seed] += 1
        event.set()

    with switching():
        for seed in range(300):
            checked, event = Checked(seed, queues), threading.Event()
            run = begin(
                checked.tasks,
                checked.functions(),
                made,
                worthwhile=checked.worthwhile,
                on_end=partial(end, seed, event),
            )
            all_of.append((checked, run, event))
            host.submit(run.start)
        for checked, run, event in all_of:
            assert event.wait(SOON)
            checked.assert_over(run.error)
    host.close()
    far.close()
    assert set(ends.values()) == {1}
    assert len(ends) == 300
    assert all(run.workers == [0] * queues and not run.running for _, run, _ in all_of)


# What is left of a run.


@contextmanager
def uncollected() -> Iterator[None]:
    """Nothing goes but what nobody refers to."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


class Value:
    """Something that a task makes."""


@pytest.mark.parametrize("way", ["run", "start"])
def test_a_run_that_is_over_holds_nothing(way):
    with uncollected():
        values = [Value(), None]
        gone = weakref.ref(values[0])

        def work(control: Control, V: list[Any]) -> None:
            V[1] = Value()

        run = begin(drawn(1), {0: work}, values=values)
        getattr(run, way)()
        del run, values, work
        assert gone() is None


def test_nor_does_one_that_fails():
    with uncollected():
        values = [Value(), None]
        gone = weakref.ref(values[0])

        def work(control: Control, V: list[Any]) -> None:
            raise BrokenError

        run = begin(drawn(1), {0: work}, values=values)
        with pytest.raises(BrokenError):
            run.run()
        del run, values, work
        assert gone() is None


# Through executors.


HEADER = '<ir_version: 9, opset_import: ["" : 20]>\n'

#   x -> t -> y (picks one)
#   x -> u -> z
TWO = """g (float[3] x, int64[N] i) => (float[N] y, float[3] z) {
    t = Neg(x) y = Gather(t, i) u = Exp(x) z = Sin(u) }"""

ENDLESS = """g (float[4] x, int64 n) => (float[4] y, float[4] z) {
    y = Loop (n, , x) <body = b (int64 i, bool c, float[4] v) => (bool d, float[4] w)
        { d = Identity(c) a = Neg(v) w = Add(v, a) }>
    z = Exp(x) }"""


@pytest.fixture
def every_step_a_task(monkeypatch, workers) -> Workers:
    """The parallel executor takes each step for a task, and has a pool of two threads."""
    monkeypatch.setattr(compiling, "Clustered", OfAllSteps)
    monkeypatch.setattr(compiling, "Costs", Unmeasured)
    monkeypatch.setattr(compiling, "HAND_OVER_S", 0.0)
    monkeypatch.setattr(compiling, "pool", lambda *arguments: workers)
    return workers


EXECUTORS = ["linear", "dataflow", "parallel"]
each_executor = pytest.mark.parametrize("executor", EXECUTORS)


def session(text: str, executor: str, **options: Any) -> ps.Session:
    return ps.compile(parser.parse_model(HEADER + text), executor=executor, **options)


def feeds(i: int) -> dict[str, np.ndarray]:
    return {"x": np.zeros(3, np.float32), "i": np.array([i])}


@each_executor
def test_a_failed_run_holds_nothing_of_what_was_fed(every_step_a_task, executor):
    made = session(TWO, executor)
    made.run(feeds(1))
    with uncollected():
        given = feeds(7)
        gone = weakref.ref(given["x"])
        with pytest.raises(ps.RunError):
            made.run(given)
        idle(every_step_a_task)
        del given
        assert gone() is None


@each_executor
def test_a_run_holds_nothing_of_what_was_fed(every_step_a_task, executor):
    made = session(TWO, executor)
    made.run(feeds(1))
    with uncollected():
        given = feeds(1)
        gone = [weakref.ref(given["x"])]
        outputs = made.run(given)
        gone.append(weakref.ref(outputs["y"]))
        idle(every_step_a_task)
        del given, outputs
        assert [each() for each in gone] == [None] * len(gone)


@each_executor
@pytest.mark.parametrize("i", [1, 7])
def test_a_submitted_run_holds_nothing_when_it_is_over(every_step_a_task, executor, monkeypatch, i):
    from penstock import session as module

    monkeypatch.setattr(module, "pool", lambda: every_step_a_task)
    made = session(TWO, executor)
    made.run(feeds(1))
    with uncollected():
        given = feeds(i)
        gone = [weakref.ref(given["x"])]
        future = made.submit(given)
        assert (future.exception(SOON) is None) == (i == 1)
        if i == 1:
            gone.append(weakref.ref(future.result(0)["y"]))
        idle(every_step_a_task)
        del given, future
        assert [each() for each in gone] == [None] * len(gone)


@each_executor
def test_a_failed_run_says_what_it_failed_with(every_step_a_task, executor):
    with pytest.raises(ps.RunError, match="Gather") as caught:
        session(TWO, executor).run(feeds(7))
    assert caught.value.__cause__ is not None


class Live(Observer):
    """Adds up what runs allocate, and raises where it shall."""

    def __init__(self, fails: str = "") -> None:
        self.lock = threading.Lock()
        self.bytes = 0
        self.fails = fails

    def allocation(self, run: ObservedRun, nbytes: int) -> None:
        with self.lock:
            self.bytes += nbytes
        if self.fails == "allocation":
            raise BrokenError

    def step_ready(self, run: ObservedRun, step: Step) -> None:
        if self.fails == "step_ready":
            raise BrokenError


@each_executor
@pytest.mark.parametrize("way", ["run", "submit"])
def test_what_a_run_allocates_is_given_back_but_for_its_outputs(every_step_a_task, executor, way):
    made, live = session(TWO, executor), Live()
    if way == "run":
        outputs = made.run(feeds(1), observers=[live])
    else:
        outputs = made.submit(feeds(1), observers=[live]).result(SOON)
    idle(every_step_a_task)
    assert live.bytes == sum(each.nbytes for each in outputs.values())


@pytest.mark.parametrize("executor", ["linear", "parallel"])
def test_and_where_it_fails_its_arena_is(every_step_a_task, executor):
    made, live = session(TWO, executor), Live()
    with pytest.raises(ps.RunError):
        made.run(feeds(7), observers=[live])
    assert live.bytes <= 0 + sum(each.nbytes for each in feeds(0).values())


def parallel(
    text: str, pool: Workers, limits: Limits = DEFAULT_LIMITS, *, observed: bool = False
) -> ParallelExecutor:
    """Every step a task, on the caller and a pool."""
    graph = clone(ps.load(parser.parse_model(HEADER + text)).graph)
    optimize(graph, limits)
    plan: Plan = compile_plan(graph, [NumpyBackend()])
    queues = [Queue(2, pool)]
    tasks = arrange(plan, OneByOne())
    return ParallelExecutor(plan, tasks, [NumpyBackend()], limits, queues, 0.0, observed=observed)


class Outcome:
    """What ``run_async`` hands out."""

    def __init__(self) -> None:
        self.event = threading.Event()
        self.calls: list[tuple[Any, BaseException | None]] = []

    def __call__(self, outputs: tuple[Any, ...] | None, error: BaseException | None) -> None:
        self.calls.append((outputs, error))
        self.event.set()

    @property
    def error(self) -> BaseException | None:
        assert self.event.wait(SOON)
        ((_, error),) = self.calls
        return error


def one_arena(text: str) -> Limits:
    """Limits that allow a plan of ``text`` one arena."""
    pool = Workers("test", 1)
    size = parallel(text, pool).arena_bytes
    assert size > 0
    return Limits(max_bytes=size + size // 2)


BIG = np.array(2**62)
X = np.ones(4, np.float32)


@pytest.mark.parametrize("n", [1, 7])
@pytest.mark.parametrize("way", ["run", "run_async"])
def test_a_run_gives_its_arena_back(workers, way, n):
    executor = parallel(TWO, workers)
    held = executor.arena_bytes
    given = [np.zeros(3, np.float32), np.array([n])]
    for _ in range(3):
        done = Outcome()
        if way == "run_async":
            executor.run_async(given, Control(), done)
            assert (done.error is None) == (n == 1)
        else:
            with suppress(ps.RunError):
                executor.run(given, Control())
        idle(workers)
        assert len(executor._arenas.free) == 1
    assert executor.arena_bytes == held


def test_runs_that_wait_for_the_one_arena_follow_each_other(workers):
    executor = parallel(ENDLESS, workers, one_arena(ENDLESS))
    control, first = Control(), Outcome()
    workers.submit(partial(executor.run_async, [X, BIG], control, first))
    while executor._arenas.free:
        time.sleep(0)
    others = [Outcome() for _ in range(10)]
    for each in others:
        executor.run_async([X, np.array(1)], Control(), each)
    assert not any(each.calls for each in others)
    control.set(ps.Cancelled("enough"))
    assert isinstance(first.error, ps.Cancelled)
    assert [each.error for each in others] == [None] * 10
    idle(workers)
    assert len(executor._arenas.free) == 1


def test_one_that_waits_for_an_arena_can_be_stopped(workers):
    executor = parallel(ENDLESS, workers, one_arena(ENDLESS))
    control, first = Control(), Outcome()
    workers.submit(partial(executor.run_async, [X, BIG], control, first))
    while executor._arenas.free:
        time.sleep(0)
    waits, second = Control(), Outcome()
    executor.run_async([X, np.array(1)], waits, second)
    waits.set(ps.DeadlineExceeded("late"))
    try:
        assert second.event.wait(SOON)
    finally:
        control.set(ps.Cancelled("enough"))
        assert isinstance(first.error, ps.Cancelled)
        idle(workers)


def test_one_that_gets_an_arena_at_once_is_stopped_by_nobody_else(workers):
    executor = parallel(ENDLESS, workers, one_arena(ENDLESS))
    held = executor._arenas.free.pop()
    ask, control, done = executor._arenas.ask, Control(), Outcome()

    def slowly(receive: Callable[[Any], None]) -> Any:
        asked = ask(receive)
        executor._arenas.give(held)
        assert done.error is None
        return asked

    executor._arenas.ask = slowly  # type: ignore[method-assign]
    executor.run_async([X, np.array(1)], control, done)
    idle(workers)
    assert control.on_stop is None


@pytest.mark.parametrize("fails", ["allocation", "step_ready"])
@pytest.mark.parametrize("way", ["run", "run_async", "later"])
def test_an_observer_that_fails_as_a_run_begins_loses_no_arena(workers, way, fails):
    executor = parallel(ENDLESS, workers, one_arena(ENDLESS), observed=True)
    control, done = Control(), Outcome()
    control.observer = Live(fails)
    hook, threading.excepthook = threading.excepthook, lambda args: None
    try:
        if way == "run":
            with pytest.raises((BrokenError, ps.PenstockError)):
                executor.run([X, np.array(1)], control)
        elif way == "run_async":
            try:
                executor.run_async([X, np.array(1)], control, done)
            except BrokenError as error:  # as good as an error that done is told
                done(None, error)
        else:
            (held,) = [executor._arenas.free.pop()]
            executor.run_async([X, np.array(1)], control, done)
            executor._arenas.give(held)
            idle(workers)
            assert done.event.wait(SOON)
        idle(workers)
        assert len(executor._arenas.free) == 1
    finally:
        threading.excepthook = hook


def test_an_arena_is_given_back_when_nobody_writes_to_it_any_more(workers, gate):
    """A run that fails while another of its tasks is inside a kernel."""
    executor = parallel(TWO, workers)
    inside, given = threading.Event(), []
    (bound,) = executor._arenas.free
    names = [task.steps[0].node.op.name for task in executor.tasks.tasks]

    def slow(control: Control, V: list[Any], run: Callable[..., Any]) -> None:
        inside.set()
        assert gate.wait(SOON)
        given.append(len(executor._arenas.free))
        run(control, V)

    def late(control: Control, V: list[Any], run: Callable[..., Any]) -> None:
        assert inside.wait(SOON)
        run(control, V)

    for t, name in enumerate(names):
        if name == "Exp":
            bound.functions[t] = partial(slow, run=bound.functions[t])
        elif name == "Gather":
            bound.functions[t] = partial(late, run=bound.functions[t])
    control, raised = Control(), []

    def call() -> None:
        try:
            executor.run([np.zeros(3, np.float32), np.array([7])], control)
        except ps.RunError as error:
            raised.append(error)

    caller = on(threading.Thread(target=call))
    while not control.stopped:
        time.sleep(0)
    gate.set()
    ended(caller)
    assert given == [0]
    assert len(raised) == 1
    assert list(executor._arenas.free) == [bound]


def test_an_interrupted_run_gives_its_arena_up(workers, gate):
    """Other workers may still write to it."""
    executor = parallel(TWO, workers)
    inside = threading.Event()
    (bound,) = executor._arenas.free
    names = [task.steps[0].node.op.name for task in executor.tasks.tasks]

    def slow(control: Control, V: list[Any]) -> None:
        if threading.current_thread() is threading.main_thread():
            assert inside.wait(SOON)
            raise KeyboardInterrupt
        inside.set()
        assert gate.wait(SOON)

    for t, name in enumerate(names):
        if name in ("Exp", "Neg"):
            bound.functions[t] = slow
    with pytest.raises(KeyboardInterrupt):
        executor.run([np.zeros(3, np.float32), np.array([1])], Control())
    assert not executor._arenas.free
    assert executor.arena_bytes == 0
    y, z = executor.run([np.zeros(3, np.float32), np.array([1])], Control())
    assert (y.tolist(), z[0]) == ([0], np.sin(np.float32(1)))
    gate.set()
    idle(workers)


def test_a_child_forked_while_a_run_goes_on_runs_by_itself(workers):
    from tests.test_threads import in_child

    executor = parallel(ENDLESS, workers)
    executor.run([X, np.array(1)], Control())  # what is imported by the first run
    control, first = Control(), Outcome()
    workers.submit(partial(executor.run_async, [X, BIG], control, first))
    while executor._arenas.free:
        time.sleep(0)

    def child() -> None:
        done = Outcome()
        executor.run_async([X, np.array(1)], Control(), done)
        assert done.error is None
        assert executor.run([X, np.array(2)], Control())[0].tolist() == [0] * 4

    try:
        assert in_child(child)
    finally:
        control.set(ps.Cancelled("enough"))
        assert isinstance(first.error, ps.Cancelled)


def test_nor_does_it_wait_for_the_arena_of_that_run(workers):
    from tests.test_threads import in_child

    executor = parallel(ENDLESS, workers, one_arena(ENDLESS))
    executor.run([X, np.array(1)], Control())
    control, first = Control(), Outcome()
    workers.submit(partial(executor.run_async, [X, BIG], control, first))
    while executor._arenas.free:
        time.sleep(0)

    def child() -> None:
        late = Control()
        threading.Timer(0.5, late.set, [ps.Cancelled("the arena did not come")]).start()
        executor.run([X, np.array(2)], late)

    try:
        assert in_child(child)
    finally:
        control.set(ps.Cancelled("enough"))
        assert isinstance(first.error, ps.Cancelled)
