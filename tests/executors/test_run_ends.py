"""How runs of every executor end, and what they leave."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

import numpy as np
import pytest

import penstock as ps
from penstock.backends.numpy import NumpyBackend
from penstock.codegen.steps import ProgramForm
from penstock.codegen.writer import write_program
from penstock.core.limits import DEFAULT_LIMITS, Limits
from penstock.executors.control import Control
from penstock.executors.parallel import ParallelExecutor, TaskWorkers
from penstock.executors.task_loop import Queue
from penstock.host.threads import Workers
from penstock.ir.graph import clone
from penstock.observers.base import ObservedRun, Observer
from penstock.passes.context import PassContext
from penstock.passes.pipeline import optimize
from penstock.plan.arena_layout import plan_arena_for_tasks
from penstock.plan.arrangement import arrange
from penstock.plan.builder import compile_plan
from penstock.plan.plan import Plan, Step
from penstock.plan.tasks import Grouping
from penstock.tuning.measure import CostModel
from tests.executors.test_parallel import OfAllSteps
from tests.support.flows import BrokenError, ended, idle, on
from tests.support.onnx_text import compile_text, graph_from_text
from tests.support.timing import SOON, uncollected, wait_until

#   x -> t -> y (picks one)
#   x -> u -> z
TWO = """g (float[3] x, int64[N] i) => (float[N] y, float[3] z) {
    t = Neg(x) y = Gather(t, i) u = Exp(x) z = Sin(u) }"""


ENDLESS = """g (float[4] x, int64 n) => (float[4] y, float[4] z) {
    y = Loop (n, , x) <body = b (int64 i, bool c, float[4] v) => (bool d, float[4] w)
        { d = Identity(c) a = Neg(v) w = Add(v, a) }>
    z = Exp(x) }"""


EXECUTORS = ["linear", "dataflow", "parallel"]


each_executor = pytest.mark.parametrize("executor", EXECUTORS)


def session(text: str, executor: str, pool: Workers, **options: Any) -> ps.Session:
    """The parallel executor makes each step a task."""
    options |= {"cost_model": CostModel(), "pool": pool}
    if executor == "parallel":
        options["grouping"] = OfAllSteps
    options.setdefault("backends", ["numpy"])
    return compile_text(text, executor=executor, **options)


def feeds(i: int) -> dict[str, np.ndarray]:
    return {"x": np.zeros(3, np.float32), "i": np.array([i])}


@each_executor
def test_failed_run_keeps_no_feed_alive(workers, executor):
    made = session(TWO, executor, workers)
    made.run(feeds(1))
    with uncollected():
        given = feeds(7)
        gone = weakref.ref(given["x"])
        with pytest.raises(ps.RunError):
            made.run(given)
        idle(workers)
        del given
        assert gone() is None


@each_executor
def test_run_keeps_no_feed_alive(workers, executor):
    made = session(TWO, executor, workers)
    made.run(feeds(1))
    with uncollected():
        given = feeds(1)
        gone = [weakref.ref(given["x"])]
        outputs = made.run(given)
        gone.append(weakref.ref(outputs["y"]))
        idle(workers)
        del given, outputs
        assert [each() for each in gone] == [None] * len(gone)


@each_executor
@pytest.mark.parametrize("i", [1, 7])
def test_submitted_run_keeps_no_feed_alive(workers, executor, i):
    made = session(TWO, executor, workers)
    made.run(feeds(1))
    with uncollected():
        given = feeds(i)
        gone = [weakref.ref(given["x"])]
        future = made.submit(given)
        assert (future.exception(SOON) is None) == (i == 1)
        if i == 1:
            gone.append(weakref.ref(future.result(0)["y"]))
        idle(workers)
        del given, future
        assert [each() for each in gone] == [None] * len(gone)


class Live(Observer):
    """Sums what runs allocate, and raises where the test asks for it."""

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
def test_run_frees_its_allocations_except_outputs(workers, executor, way):
    made, live = session(TWO, executor, workers), Live()
    if way == "run":
        outputs = made.run(feeds(1), observers=[live])
    else:
        outputs = made.submit(feeds(1), observers=[live]).result(SOON)
    idle(workers)
    assert live.bytes == sum(each.nbytes for each in outputs.values())


@pytest.mark.parametrize("executor", ["linear", "parallel"])
def test_failed_run_frees_its_allocations(workers, executor):
    made, live = session(TWO, executor, workers), Live()
    with pytest.raises(ps.RunError):
        made.run(feeds(7), observers=[live])
    assert live.bytes <= 0 + sum(each.nbytes for each in feeds(0).values())


def parallel(
    text: str, pool: Workers, limits: Limits = DEFAULT_LIMITS, *, observed: bool = False
) -> ParallelExecutor:
    """Every step is a task, on the caller and a pool."""
    graph = clone(graph_from_text(text))
    optimize(graph, PassContext(limits=limits))
    plan: Plan = compile_plan(graph, [NumpyBackend()])
    queues = [Queue(2, pool)]
    tasks = arrange(plan, Grouping())
    arena_plan = plan_arena_for_tasks(plan, tasks)
    program = write_program(plan, arena_plan, tasks=tasks, form=ProgramForm(observed=observed))
    return ParallelExecutor(program, [NumpyBackend()], limits, TaskWorkers(queues, 0.0))


class Outcome:
    """The future and callback of ``run_async``."""

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
def test_run_gives_its_arena_back(workers, way, n):
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


@pytest.mark.parametrize("fails", ["allocation", "step_ready"])
@pytest.mark.parametrize("way", ["run", "run_async", "later"])
def test_observer_that_fails_at_run_begin_leaks_no_arena(workers, way, fails):
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
            except BrokenError as error:  # equivalent to an error that done receives
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


def test_arena_is_given_back_after_the_last_task_ended(workers, gate):
    """A run that fails while another of its tasks is inside a kernel."""
    executor = parallel(TWO, workers)
    inside, given = threading.Event(), []
    (arena,) = executor._arenas.free
    (bound,) = arena.values()
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
            bound[t] = partial(slow, run=bound[t])
        elif name == "Gather":
            bound[t] = partial(late, run=bound[t])
    control, raised = Control(), []

    def call() -> None:
        try:
            executor.run([np.zeros(3, np.float32), np.array([7])], control)
        except ps.RunError as error:
            raised.append(error)

    caller = on(threading.Thread(target=call))
    wait_until(lambda: control.stopped)
    gate.set()
    ended(caller)
    assert given == [0]
    assert len(raised) == 1
    assert list(executor._arenas.free) == [arena]


def test_interrupted_run_gives_its_arena_up(workers, gate):
    """Other workers may still write to it."""
    executor = parallel(TWO, workers)
    inside = threading.Event()
    (arena,) = executor._arenas.free
    (bound,) = arena.values()
    names = [task.steps[0].node.op.name for task in executor.tasks.tasks]

    def slow(control: Control, V: list[Any]) -> None:
        if threading.current_thread() is threading.main_thread():
            assert inside.wait(SOON)
            raise KeyboardInterrupt
        inside.set()
        assert gate.wait(SOON)

    for t, name in enumerate(names):
        if name in ("Exp", "Neg"):
            bound[t] = slow
    with pytest.raises(KeyboardInterrupt):
        executor.run([np.zeros(3, np.float32), np.array([1])], Control())
    assert not executor._arenas.free
    assert executor.arena_bytes == 0
    y, z = executor.run([np.zeros(3, np.float32), np.array([1])], Control())
    assert (y.tolist(), z[0]) == ([0], np.sin(np.float32(1)))
    gate.set()
    idle(workers)


def test_forked_child_runs_while_a_run_of_its_parent_goes_on(workers):
    from tests.support.processes import in_child

    executor = parallel(ENDLESS, workers)
    executor.run([X, np.array(1)], Control())  # imports the modules of a first run
    control, first = Control(), Outcome()
    workers.submit(partial(executor.run_async, [X, BIG], control, first))
    wait_until(lambda: not executor._arenas.free)

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


def test_forked_child_does_not_wait_for_the_arena_of_its_parents_run(workers):
    from tests.support.processes import in_child

    executor = parallel(ENDLESS, workers, one_arena(ENDLESS))
    executor.run([X, np.array(1)], Control())
    control, first = Control(), Outcome()
    workers.submit(partial(executor.run_async, [X, BIG], control, first))
    wait_until(lambda: not executor._arenas.free)

    def child() -> None:
        late = Control()
        threading.Timer(0.5, late.set, [ps.Cancelled("the arena did not come")]).start()
        executor.run([X, np.array(2)], late)

    try:
        assert in_child(child)
    finally:
        control.set(ps.Cancelled("enough"))
        assert isinstance(first.error, ps.Cancelled)


@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("call", ["step_ready", "step_begin", "step_end", "allocation"])
@pytest.mark.parametrize("executor", ["dataflow", "parallel"])
def test_observer_can_stop_the_run(workers, executor, call, n):
    #   a -> b -> c -> d
    text = "g (float[N] x) => (float[N] d) { a = Exp(x) b = Sin(a) c = Neg(b) d = Cos(c) }"
    made, token = session(text, executor, workers), ps.CancelToken()
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
    ended(thread)
    assert [type(error) for error in raised] == [ps.Cancelled]
