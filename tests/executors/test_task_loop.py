"""The loop over tasks: what runs at the same time, how it ends, and that it always does.

Most tests draw tasks by hand, which are plain functions here. Tasks meet at barriers and wait for
events, with a timeout that only a failing test reaches.
"""

from __future__ import annotations

import sys
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from penstock.executors.control import Control
from penstock.executors.task_loop import Queue
from penstock.host.threads import Workers
from tests.support.flows import Log, Meeting, begin, drawn, ended, on, turning
from tests.support.timing import SOON, slow

# Concurrency.


def test_task_loop_runs_independent_tasks_at_once(workers):
    #   0
    #   1
    meet = Meeting(2)
    begin(drawn(2), {0: meet, 1: meet}, [Queue(2, workers)]).run()
    assert len(meet.threads) == 2
    assert threading.current_thread().name in meet.threads


def test_task_diamond_overlaps_its_branches_alone(workers):
    #        /-> 1 --\
    #     0 +         +-> 3
    #        \-> 2 --/
    meet, tasks = Meeting(2), drawn(4, [(0, 1), (0, 2), (1, 3), (2, 3)])
    for _ in range(50):
        log = Log()
        begin(tasks, {**log.of(0, 3), 1: meet, 2: meet}, [Queue(2, workers)]).run()
        assert log.order == [0, 3]


def test_run_right_behind_another_has_the_worker_of_that():
    may_return, answers = threading.Event(), []

    class Returning(Workers):
        """Jobs that take long to return after they have done their work."""

        def offer(self, job):
            def work() -> None:
                job()
                may_return.wait(SOON)

            answers.append(super().offer(work))
            return answers[-1]

    workers, meet = Returning("test", 1), Meeting(2)
    begin(drawn(2), {0: meet, 1: meet}, [Queue(2, workers)]).run()
    assert answers == [True]
    begin(drawn(2), {}, [Queue(2, workers)]).run()
    assert answers == [True, True]
    may_return.set()
    workers.close()


@pytest.mark.parametrize("limit", [1, 2, 3, 5])
def test_concurrent_tasks_are_within_the_limit_of_the_queue(limit):
    workers = Workers("test", 8)
    inside, most, lock = 0, 0, threading.Lock()

    def work(control: Control, V: list[Any]) -> None:
        nonlocal inside, most
        with lock:
            inside += 1
            most = max(most, inside)
        for _ in range(50):
            slow(0)
        with lock:
            inside -= 1

    begin(drawn(60), dict.fromkeys(range(60), work), [Queue(limit, workers)]).run()
    assert 1 <= most <= limit
    workers.close()


def test_concurrent_tasks_reach_the_limit_of_the_queue():
    workers = Workers("test", 8)
    meet = Meeting(4)
    begin(drawn(12), dict.fromkeys(range(12), meet), [Queue(4, workers)]).run()
    assert len(meet.threads) == 4
    workers.close()


@pytest.mark.parametrize("pool", [True, False])
def test_tasks_of_a_run_complete_on_one_thread(pool):
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


def test_most_urgent_ready_task_runs_first():
    #   0 -> 3      and 1, 2, 4 wait for nothing
    log = Log()
    begin(drawn(5, [(0, 3)]), log.of(*range(5))).run()
    assert log.order == [0, 1, 2, 3, 4]


def test_cheap_tasks_wake_no_worker(workers):
    names = set()
    functions = dict.fromkeys(
        range(50), lambda control, V: names.add(threading.current_thread().name)
    )
    begin(drawn(50), functions, [Queue(2, workers)], worthwhile=()).run()
    assert names == {threading.current_thread().name}
    assert workers.threads == 0


def briefly(event: threading.Event, seen: list[bool]) -> Callable[..., None]:
    return lambda control, V: seen.append(event.wait(SOON))


def test_cheap_task_does_not_delay_an_expensive_one(workers, gate):
    #   0 (large)   1 (small)   2 (large), all ready: 0 ends when 2 has begun
    seen: list[bool] = []
    functions = {0: briefly(gate, seen), 2: lambda control, V: gate.set()}
    begin(drawn(3), functions, [Queue(2, workers)], worthwhile=(0, 2)).run()
    assert seen == [True]


# Several queues.


def test_tasks_of_two_queues_overlap_on_threads_of_their_own(workers, other):
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
def test_task_chain_alternates_between_two_queues(workers, other, worthwhile):
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


def test_calling_thread_blocks_while_it_has_no_task(workers, other, gate):
    #   0 => 1    the caller waits for 1, first for its beginning and then for its end
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
    slow(0.2)  # which the caller must spend blocked
    gate.set()
    ended(caller)
    assert used[0] < 0.05


def test_calling_thread_that_waits_is_woken_for_a_task(other):
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


def test_started_run_goes_on_in_the_pool_after_its_starter_left(workers, other):
    #   0 (elsewhere) -> 1 (the host): the thread that started the run has left by then
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


@pytest.mark.parametrize("times", [0, 1, 10_000])
@pytest.mark.parametrize("body", [(), (1,), (1, 2)])
def test_task_block_runs_once_per_iteration(times, body):
    #   0 { body }     and the stack gets no deeper with the number of expansions
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


def test_tasks_of_a_block_overlap_but_iterations_do_not(workers):
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


def test_task_loop_runs_nested_blocks(workers):
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


def test_task_block_may_run_on_another_queue(other):
    #   0 { 1 => 2 }
    names: list[str] = []
    tasks = drawn(3, [(1, 2)], blocks={0: [(1, 2)]}, queues={1: 1})
    functions = {
        0: turning(50),
        1: lambda control, V: names.append(threading.current_thread().name),
    }
    begin(tasks, functions, [Queue(1, None), Queue(1, other)]).run()
    assert names == ["penstock-other-0"] * 50


def test_two_task_loops_iterate_at_the_same_time(workers):
    #   0 { 1 }     2 { 3 }: each body waits for the other
    meet = Meeting(2)
    tasks = drawn(4, blocks={0: [(1,)], 2: [(3,)]})
    functions = {0: turning(50), 2: turning(50, 2), 1: meet, 3: meet}
    begin(tasks, functions, [Queue(2, workers)]).run()
    assert len(meet.threads) == 2


def test_task_after_a_loop_waits_for_its_last_iteration(workers):
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


def test_task_run_frees_a_value_after_its_last_reader(workers):
    #        /-> 1 --\
    #     0 +-> 2 ----+-> 4      V[0] is written by 0, and read by 1, 2 and 3
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


def test_task_run_frees_a_value_of_a_body_in_each_iteration():
    #   0 { 1 -> 2, 3 }    V[0] is written by 1, and read by 2 and 3
    held = []

    def make(control: Control, V: list[Any]) -> None:
        held.append(V[0])
        V[0] = 1

    def read(control: Control, V: list[Any]) -> None:
        assert V[0] == 1

    tasks = drawn(4, [(1, 2), (1, 3)], blocks={0: [(1, 2, 3)]}, reads={0: (2, 3)})
    begin(tasks, {0: turning(5), 1: make, 2: read, 3: read}).run()
    assert held == [None] * 5
