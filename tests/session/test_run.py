"""One run: ends once, informs its observers once, and leaves nothing when it is over."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError, Future
from contextlib import suppress
from typing import Any

import pytest

import penstock as ps
from penstock.compiler.options import RunOptions
from penstock.compiler.subgraph import Subgraph
from penstock.compiler.subgraphs import Request
from penstock.executors.base import Done
from penstock.executors.control import WATCHDOG, CancelToken, Control
from penstock.ir.graph import Graph
from penstock.observers.base import ObservedRun, Observer
from penstock.plan.plan import StepTable
from penstock.session.run import Job, PreparedRun, Run
from tests.support.processes import end_of
from tests.support.timing import SOON, uncollected

PLAN = StepTable("g", (), (), (), ())


class Fake:
    """An executor whose runs do what the test asks for."""

    name = "fake"
    threads = 1
    table = PLAN

    def __init__(self, outcome: Callable[[Control], Any] = lambda control: (1,)) -> None:
        self.outcome = outcome
        self.controls: list[Control] = []

    def run(self, inputs: Sequence[Any], control: Control) -> tuple[Any, ...]:
        self.controls.append(control)
        return self.outcome(control)

    def run_async(self, inputs: Sequence[Any], control: Control, done: Done) -> None:
        try:
            try:
                outputs = self.run(inputs, control)
            except BaseException as error:
                done(None, error)
            else:
                done(outputs, None)
        finally:
            del done  # an error holds this frame


class Seen(Observer):
    """Records what it observes, and raises where the test asks for it."""

    def __init__(self, *, begin: BaseException | None = None, end: BaseException | None = None):
        self.told: list[Any] = []
        self.begin = begin
        self.end = end

    def run_begin(self, run: ObservedRun) -> None:
        assert (run.table, run.executor) == (PLAN, "fake")
        self.told.append("begin")
        if self.begin is not None:
            raise self.begin

    def run_end(self, run: ObservedRun, error: BaseException | None) -> None:
        self.told.append(error)
        if self.end is not None:
            raise self.end


def raising(error: BaseException) -> Callable[[Control], Any]:
    def outcome(control: Control) -> Any:
        raise error

    return outcome


class Task(Job):
    """A job and its future."""

    def __init__(self, run: Run, prepare: Callable[[bool], PreparedRun]) -> None:
        self.future = Counted()
        super().__init__(run, prepare, self.future)


def job(
    executor: Fake | Exception,
    timeout: float | None = None,
    cancel: CancelToken | None = None,
    observers: Sequence[Observer] = (),
) -> Task:
    def prepare(observed: bool) -> PreparedRun:
        assert observed == bool(observers)
        if isinstance(executor, Exception):
            raise executor
        return executor, [], Request(Subgraph(Graph([], [], []), ["y"]), ("y",))

    return Task(run_of(timeout, cancel, observers), prepare)


def run_of(
    timeout: float | None = None,
    cancel: CancelToken | None = None,
    observers: Sequence[Observer] = (),
) -> Run:
    return Run(RunOptions(timeout=timeout, cancel=cancel, observers=observers))


class Counted(Future):
    """A future that counts how often it ends."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def set_result(self, result):
        self.count += 1
        super().set_result(result)

    def set_exception(self, exception):
        self.count += 1
        super().set_exception(exception)


# On the calling thread.


def test_run_returns_outputs_and_calls_observers():
    seen = Seen()
    assert run_of(None, None, [seen]).run_inline(Fake(), []) == (1,)
    assert seen.told == ["begin", None]


@pytest.mark.parametrize("error", [ps.RunError("no"), ZeroDivisionError(), KeyboardInterrupt()])
def test_error_of_a_run_is_raised_and_reported_to_observers(error):
    seen = [Seen(), Seen()]
    with pytest.raises(type(error)):
        run_of(None, None, seen).run_inline(Fake(raising(error)), [])
    assert [each.told for each in seen] == [["begin", error]] * 2


def test_run_with_a_cancelled_token_never_begins():
    token, seen, executor = CancelToken(), Seen(), Fake()
    token.cancel()
    with pytest.raises(ps.Cancelled):
        run_of(None, token, [seen]).run_inline(executor, [])
    assert seen.told == []
    assert not executor.controls


def test_run_that_ends_after_its_deadline_fails():
    token, seen = CancelToken(), Seen()
    with pytest.raises(ps.Cancelled) as caught:
        run_of(None, token, [seen]).run_inline(Fake(lambda control: token.cancel()), [])
    assert seen.told == ["begin", caught.value]


def test_ended_run_cannot_be_stopped():
    token, executor = CancelToken(), Fake()
    run_of(60, token, []).run_inline(executor, [])
    token.cancel()
    assert not executor.controls[0].stopped


def test_two_runs_with_one_token_are_stopped_together_but_fail_apart():
    token, first, second = CancelToken(), Fake(), Fake(raising(ps.RunError("no")))
    one, other = run_of(None, token, []), run_of(None, token, [])
    assert one.control is not other.control
    with pytest.raises(ps.RunError):
        other.run_inline(second, [])
    assert one.run_inline(first, []) == (1,)
    third, fourth = run_of(None, token, []), run_of(None, token, [])
    token.cancel()
    assert third.control.stopped
    assert fourth.control.stopped
    assert third.control.error is not fourth.control.error  # tracebacks and notes change them


# Stopping runs.


def test_control_listener_removed_while_control_is_set_does_not_disturb_others():
    control, called = Control(), []

    def first(error: Exception) -> None:
        control.remove_listener(first)
        control.remove_listener(second)
        called.append("first")

    def second(error: Exception) -> None:
        control.remove_listener(first)
        control.remove_listener(second)
        called.append("second")

    control.add_listener(first)
    control.add_listener(second)
    control.set(ps.Cancelled("enough"))
    assert control.stopped and sorted(called) == ["first", "second"]
    assert not control.listeners


def refusing(error: Exception) -> None:
    raise ZeroDivisionError


def test_a_token_stops_all_runs_whatever_one_of_them_raises():
    token = CancelToken()
    runs = [run_of(None, token, []) for _ in range(5)]
    for run in runs:
        run.control.add_listener(refusing)
    with suppress(ZeroDivisionError):
        token.cancel()
    assert all(run.control.stopped for run in runs)


def test_deadlines_stop_all_runs_whatever_one_of_them_raises(monkeypatch):
    monkeypatch.setattr(threading, "excepthook", lambda arguments: None)
    stopped = threading.Event()
    with WATCHDOG.changed:  # no run is stopped before both have their listeners
        first, second = run_of(0.01, None, []), run_of(0.05, None, [])
        first.control.add_listener(refusing)
        second.control.add_listener(lambda error: stopped.set())
    assert stopped.wait(SOON)


@pytest.mark.parametrize("call", ["add", "discard"])
def test_a_signal_may_cancel_a_run_at_any_moment(call):
    token = CancelToken()

    class Interrupted(set):
        """The handler of a signal runs between any two lines of the main thread."""

    setattr(Interrupted, call, lambda self, control: token.cancel())
    token._controls = Interrupted()
    done = threading.Event()

    def run() -> None:
        with suppress(ps.Cancelled):
            run_of(None, token, []).run_inline(Fake(), [])
        done.set()

    threading.Thread(target=run, daemon=True).start()
    assert done.wait(SOON)


# Observers that raise.


def test_observer_that_refuses_a_run_ends_it():
    refuses, executor = Seen(begin=ps.RunError("no")), Fake()
    with pytest.raises(ps.RunError, match="no"):
        run_of(None, None, [refuses]).run_inline(executor, [])
    assert not executor.controls


def test_observer_told_of_the_begin_is_told_of_the_end_if_another_refuses():
    first, refuses = Seen(), Seen(begin=ps.RunError("no"))
    with pytest.raises(ps.RunError):
        run_of(None, None, [first, refuses]).run_inline(Fake(), [])
    assert first.told == ["begin", refuses.begin]


each_way = pytest.mark.parametrize("way", ["here", "job"])


def ends_with(way: str, executor: Fake, observers: Sequence[Observer]) -> BaseException | None:
    """Return what a run of ``executor`` ends with."""
    if way == "here":
        try:
            run_of(None, None, observers).run_inline(executor, [])
        except Exception as error:
            return error
        return None
    task = job(executor, observers=observers)
    task()
    return task.future.exception(0)


@each_way
def test_observer_that_fails_at_the_end_fails_the_run(way):
    fails = Seen(end=ps.RunError("no"))
    assert ends_with(way, Fake(), [fails]) is fails.end
    assert fails.told == ["begin", None]


@each_way
def test_each_observer_is_told_of_the_end_if_another_fails(way):
    observers = [Seen(), Seen(end=ps.RunError("no")), Seen()]
    error = ps.RunError("the run's own")
    ends_with(way, Fake(raising(error)), observers)
    assert [each.told for each in observers] == [["begin", error]] * 3


def test_a_run_is_done_whatever_an_observer_raises_at_its_end():
    fails = Seen(end=SystemExit("no"))
    task = job(Fake(), observers=[fails])
    with suppress(SystemExit):
        task()
    assert fails.told == ["begin", None]
    assert task.future.done()


# On a pool.


def test_a_job_has_its_outputs_by_name():
    seen = Seen()
    task = job(Fake(), observers=[seen])
    assert not task.future.done()
    task()
    assert task.future.result(0) == {"y": 1}
    assert seen.told == ["begin", None]


@pytest.mark.parametrize("error", [ps.RunError("no"), ZeroDivisionError(), KeyboardInterrupt()])
def test_error_of_a_job_is_raised_by_its_future(error):
    seen = Seen()
    task = job(Fake(raising(error)), observers=[seen])
    task()
    assert task.future.exception(0) is error
    assert seen.told == ["begin", error]


def test_error_before_a_job_begins_is_raised_by_its_future():
    seen, error = Seen(), ps.InvalidInput("no")
    task = job(error, observers=[seen])
    task()
    assert task.future.exception(0) is error
    assert seen.told == []


def test_a_job_runs_once_however_often_it_is_called():
    executor = Fake()
    task = job(executor)
    for _ in range(3):
        task()
    assert len(executor.controls) == 1


def test_a_job_that_was_stopped_before_it_was_made_is_over_at_once():
    token, seen = CancelToken(), Seen()
    token.cancel()
    for task in (job(Fake(), cancel=token, observers=[seen]), job(Fake(), timeout=0)):
        assert task.future.done()
        task()
        assert isinstance(task.future.exception(0), ps.RunError)
    assert seen.told == []


@pytest.mark.parametrize("how", ["token", "deadline"])
def test_a_job_that_is_stopped_in_the_queue_ends_at_once_and_does_nothing_later(how):
    token, seen, executor = CancelToken(), Seen(), Fake()
    task = job(executor, 0.01 if how == "deadline" else 60, token, [seen])
    if how == "token":
        token.cancel()
    with pytest.raises(ps.Cancelled if how == "token" else ps.DeadlineExceeded):
        task.future.result(SOON)
    task()
    assert not executor.controls
    assert seen.told == []


def test_a_job_whose_future_is_cancelled_does_nothing_later():
    token, seen, executor = CancelToken(), Seen(), Fake()
    task = job(executor, 60, token, [seen])
    assert task.future.cancel()
    task()
    token.cancel()
    task()
    with pytest.raises(CancelledError):
        task.future.result(0)
    assert not executor.controls
    assert seen.told == []
    assert not token._controls


def test_a_token_may_come_after_the_future_was_cancelled():
    token = CancelToken()
    task = job(Fake(), 60, token)
    assert task.future.cancel()
    token.cancel()
    task()
    assert task.future.cancelled()


def test_a_job_that_runs_cannot_be_cancelled_but_stopped():
    token = CancelToken()
    task = job(
        Fake(lambda control: (task.future.cancel(), token.cancel(), control.stopped)), 60, token
    )
    task()
    with pytest.raises(ps.Cancelled):
        task.future.result(0)


def test_a_job_is_over_when_the_executor_says_so_on_any_thread():
    later: list[Done] = []

    class Late(Fake):
        def run_async(self, inputs, control, done):
            later.append(done)

    seen = Seen()
    task = job(Late(), observers=[seen])
    task()
    assert not task.future.done()
    assert seen.told == ["begin"]
    (done,) = later
    thread = threading.Thread(target=done, args=((7,), None))
    thread.start()
    assert task.future.result(SOON) == {"y": 7}
    thread.join()
    assert seen.told == ["begin", None]


@pytest.mark.parametrize("seed", range(8))
def test_job_is_ended_once_by_the_first_of_several_threads(seed):
    # the token, the caller that gives up, the pool and its second try, all at once
    for round in range(20):
        token, seen, executor = CancelToken(), Seen(), Fake()
        task = job(executor, cancel=token, observers=[seen])
        begin = threading.Barrier(4)

        def at_once(act: Callable[[], object], begin: threading.Barrier = begin) -> None:
            begin.wait(SOON)
            act()

        acts = [token.cancel, task.future.cancel, task, task]
        order = [acts[(i + seed + round) % 4] for i in range(4)]
        threads = [threading.Thread(target=at_once, args=(act,)) for act in order]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(SOON)
        assert task.future.done()
        assert task.future.count == (0 if task.future.cancelled() else 1)
        assert len(executor.controls) <= 1
        assert len(seen.told) == 2 * len(executor.controls)
        assert not token._controls


# What remains of a run.


class Output:
    """An object that a run creates."""


def fails(control: Control) -> Any:
    """Return an outcome with an error to which nothing else refers."""
    raise ps.RunError("no")


def test_ended_job_keeps_nothing_alive():
    with uncollected():
        output = Output()
        gone = weakref.ref(output)
        task = job(Fake(lambda control, output=output: (output,)))
        task()
        assert task.future.result(0) == {"y": output}
        future = weakref.ref(task.future)
        del task, output
        assert future() is None
        assert gone() is None


def test_failed_job_keeps_nothing_alive():
    with uncollected():
        task = job(Fake(fails))
        task()
        future = weakref.ref(task.future)
        assert isinstance(task.future.exception(0), ps.RunError)
        del task
        assert future() is None


def test_job_that_cannot_begin_keeps_nothing_alive():
    def resolve(watched: bool) -> Any:
        raise ps.InvalidInput("no")

    with uncollected():
        task = Task(run_of(None, None, []), resolve)
        task()
        future = weakref.ref(task.future)
        assert isinstance(task.future.exception(0), ps.InvalidInput)
        del task
        assert future() is None


def test_job_stopped_in_the_queue_keeps_nothing_alive():
    with uncollected():
        token = CancelToken()
        executor = Fake()
        task = job(executor, 60, token)
        token.cancel()
        gone = [weakref.ref(task.future), weakref.ref(executor)]
        del task.future, executor
        assert [reference() for reference in gone] == [None, None]
        task()  # from the queue, which still has it


def test_run_on_the_calling_thread_keeps_nothing_alive():
    with uncollected():
        output = Output()
        gone = weakref.ref(output)
        run = run_of(60, CancelToken(), [Seen()])
        assert run.run_inline(Fake(lambda control, output=output: (output,)), []) == (output,)
        del run, output
        assert gone() is None


def test_failed_run_on_the_calling_thread_keeps_nothing_alive():
    with uncollected():
        executor = Fake(fails)
        gone = weakref.ref(executor)
        with pytest.raises(ps.RunError):
            run_of(60, CancelToken(), [Observer()]).run_inline(executor, [])
        del executor
        assert gone() is None


def test_run_imports_no_module():
    program = """
import sys
import numpy as np
import penstock as ps
from onnx import parser
text = '<ir_version: 9, opset_import: ["" : 20]> g (float[64, 64] x) => (float[64, 64] y) { y = MatMul(x, x) }'
session = ps.compile(parser.parse_model(text), executor="linear", shapes={})
before = set(sys.modules)
session.run({"x": np.eye(64, dtype=np.float32)})
print(*(set(sys.modules) - before))
"""
    assert end_of(program).split() == []
