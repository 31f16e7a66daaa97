"""The loop over tasks: how runs end, by failures, from outside and under stress, and what is left."""

from __future__ import annotations

import random
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

import pytest

import penstock as ps
from penstock.algorithms.dag import Dag
from penstock.executors.control import Control
from penstock.executors.task_loop import Queue, TaskRun
from penstock.host.threads import Workers
from penstock.observers.base import ObservedRun, Observer
from penstock.plan.plan import Step
from tests.support.flows import (
    BrokenError,
    Log,
    Meeting,
    begin,
    drawn,
    ended,
    failing,
    idle,
    on,
    turning,
)
from tests.support.timing import SOON, switching, uncollected, wait_until

# Failures.


def test_failing_task_lets_running_tasks_end_and_no_other_begin(workers, gate):
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
    wait_until(lambda: control.stopped)  # running loops see it
    assert caller.is_alive()
    gate.set()
    ended(caller)
    assert raised == [error]
    assert ran == [1]


def test_task_run_raises_the_first_of_two_errors(workers):
    #   0 and 1 are inside; 1 fails when 0 has failed
    meet, errors = threading.Barrier(2), [BrokenError("first"), BrokenError("second")]
    control = Control()

    def first(control: Control, V: list[Any]) -> None:
        meet.wait(SOON)
        raise errors[0]

    def second(control: Control, V: list[Any]) -> None:
        meet.wait(SOON)
        wait_until(lambda: control.stopped)
        raise errors[1]

    for _ in range(20):
        control = Control()
        run = begin(drawn(2), {0: first, 1: second}, [Queue(2, workers)], control=control)
        with pytest.raises(BrokenError, match="first"):
            run.run()
        for error in errors:
            error.__traceback__ = None


def test_error_in_a_nested_block_ends_the_tasks_around_it():
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


def test_tasks_that_never_become_ready_raise_internal_error():
    #   0 <-> 1
    tasks = replace(drawn(2, [(0, 1)]), waits=(1, 1))
    with pytest.raises(ps.InternalError, match="wait for each other"):
        begin(tasks, {}).run()


def test_task_run_ends_if_the_pool_takes_no_jobs(other):
    #   0 -> 1 (elsewhere, where the pool is closed)
    other.close()
    tasks = drawn(2, [(0, 1)], queues={1: 1})
    with pytest.raises(RuntimeError, match="closed"):
        begin(tasks, {}, [Queue(1, None), Queue(1, other)]).run()


def test_task_run_without_tasks_ends_at_once():
    ends = []
    begin(drawn(0), {}).run()
    begin(drawn(0), {}, on_end=lambda: ends.append(1)).start()
    assert ends == [1]


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit])
def test_interrupt_ends_the_task_run_and_its_workers(workers, gate, error):
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
    assert control.stopped  # running loops check it
    gate.set()
    idle(workers)
    assert ran == [1]
    # The pool still serves other runs.
    meet = Meeting(3)
    begin(drawn(3), dict.fromkeys(range(3), meet), [Queue(3, workers)]).run()


def test_interrupt_of_a_waiting_caller_ends_the_task_run(workers, other, gate, monkeypatch):
    #   0 => 1   the caller is interrupted while it waits for 1
    inside = threading.Event()

    def slow(control: Control, V: list[Any]) -> None:
        inside.set()
        assert gate.wait(SOON)

    run = begin(drawn(2, [(0, 1)], queues={1: 1}), {1: slow}, [Queue(1, None), Queue(1, other)])

    class Interrupted:
        def acquire(self, timeout: float) -> None:
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


def test_stopped_task_run_ends_between_two_tasks(workers, gate):
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
    assert error.__notes__ == ["The run had reached Neg (n1)."]


def test_stopped_task_run_names_the_loops_it_was_in():
    #   0 { 1 { 2 } }
    control = Control()
    tasks = drawn(3, blocks={0: [(1, 2)], 1: [(2,)]})

    def generate(control: Control, V: list[Any]) -> Iterator[int]:
        control.set(ps.Cancelled("enough"))
        yield 2

    with pytest.raises(ps.Cancelled) as caught:
        begin(tasks, {0: turning(1), 1: generate}, control=control).run()
    assert caught.value.__notes__ == ["The run had reached Neg (n2), in Neg (n1), in Neg (n0)."]


def test_endless_task_loop_can_be_stopped(workers):
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
def test_task_run_that_waits_for_a_busy_pool_can_be_stopped(other, workers, gate, way):
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
    wait_until(lambda: run.queues[1].workers and not run.running)
    control.set(ps.Cancelled("enough"))
    try:
        assert over.wait(SOON)
    finally:
        gate.set()
        ended(caller)


@pytest.mark.parametrize("way", ["run", "start"])
def test_task_run_stopped_just_before_does_not_wait_for_a_busy_pool(other, workers, gate, way):
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


def test_task_run_can_be_stopped_by_a_signal_handler_at_any_moment():
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
    assert over.wait(SOON)


# The end.


class Promises:
    """A pool that takes jobs and runs them on request."""

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


def test_workers_that_come_after_the_end_do_nothing():
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
        assert [queue.workers for queue in run.queues] == [0]
        assert run.running == 0
        assert isinstance(run.error, BrokenError) == fails


def test_worker_is_asked_once_for_each_place():
    pool = Promises()
    begin(drawn(100), {}, [Queue(4, pool)]).run()
    assert len(pool.jobs) == 3


def test_calling_thread_runs_all_tasks_if_no_worker_is_free():
    pool, ran = Promises(refuses=True), []
    functions = {t: lambda control, V: ran.append(threading.get_ident()) for t in range(20)}
    begin(drawn(20), functions, [Queue(4, pool)]).run()
    assert ran == [threading.get_ident()] * 20


def test_task_run_waits_for_a_worker_that_has_accepted():
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
def test_end_of_a_task_run_is_reported_whatever_a_task_raises(error):
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
def test_end_of_a_task_run_is_reported_whatever_an_observer_raises(n):
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


def test_observers_see_each_ready_task_once():
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
    """Random tasks that check that their predecessors have ended; some of them fail."""

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


@pytest.mark.parametrize("queues", [1, 2])
def test_hundreds_of_task_runs_in_turn_each_end_once(queues):
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
def test_hundreds_of_concurrent_task_runs_each_end_once(queues):
    host, far = Workers("test", 3), Workers("far", 2)
    made = [Queue(3, host), Queue(2, far)][:queues]
    ends: Counter[int] = Counter()
    all_of: list[tuple[Checked, TaskRun, threading.Event]] = []

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
    for _, run, _ in all_of:
        assert [queue.workers for queue in run.queues] == [0] * queues and not run.running


# What remains of a run.


class Value:
    """An object that a task creates."""


@pytest.mark.parametrize("way", ["run", "start"])
def test_ended_task_run_keeps_nothing_alive(way):
    with uncollected():
        values = [Value(), None]
        gone = weakref.ref(values[0])

        def work(control: Control, V: list[Any]) -> None:
            V[1] = Value()

        run = begin(drawn(1), {0: work}, values=values)
        getattr(run, way)()
        del run, values, work
        assert gone() is None


def test_failed_task_run_keeps_nothing_alive():
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
