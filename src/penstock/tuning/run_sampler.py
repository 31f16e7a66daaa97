"""Costs from the runs of users: what they speak for is tried in later runs.

A plan of which only estimates say that it runs best in one order learns from its runs::

    run 1 2 3 4   5             10, 15, 20            21 ...     ... 12 runs          from then on
        timed     on one        each step is          as usual   by turns in order    whichever
                  thread, to    measured, on                     and as tasks         was faster
                  warm up       one thread

Runs on one thread may take several times as long as others: so runs as usual lie between them, and
it ends after the tenth run if even the longest chain of dependent steps, or all of them divided
among the workers, took too long. After the last one that is measured a thread of the pool schedules
the plan anew by these costs. The rest follows only if several workers are faster in that schedule,
and none of it for plans that take less than handing work to others. No run is added, and when it is
over, nothing of it is left in a run.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator, Sequence
from functools import partial
from math import inf
from time import perf_counter
from typing import Any, Protocol

from penstock.executors.base import Executor
from penstock.executors.control import Control
from penstock.executors.linear import LinearExecutor
from penstock.host.current_run import working_for
from penstock.host.overheads import OVERHEADS
from penstock.host.threads import Workers, fulfil
from penstock.observers.base import ObservedRun
from penstock.observers.profile import Profile
from penstock.plan.plan import StepTable
from penstock.tuning.measure import CostModel

_TIMED, _MEASURED, _TRIED = 4, 3, 6
_BETWEEN = 4  # runs as usual between those on one thread

Adopt = Callable[[], Callable[[Executor, Executor], None] | None]
"""Gives a function that replaces an executor by another; None if the session is gone."""

Runner = Callable[[LinearExecutor, Sequence[Any], Control], tuple[Any, ...]]
Trial = Generator[Runner, float, Executor | None]


class PlanWithCosts(Protocol):
    """A plan, and the costs of its steps."""

    @property
    def plan(self) -> StepTable: ...

    @property
    def costs(self) -> CostModel: ...


class RunSampler:
    """Chooses how the runs of an executor are run, until it is known which way is fastest.

    ``observed()`` is an executor of the plan with one thread that tells observers of its steps.
    ``may_pay(seconds, profile)`` says whether any schedule of the steps in ``profile`` may take
    less than ``seconds``. ``reschedule(seconds, profile)`` is an executor that should take less
    than ``seconds``, by the costs of ``planned``, which now has those in ``profile``, if there is
    one: it takes the place of the first, by ``adopt``, if it takes at most ``margin`` of its time.
    Of concurrent runs one is sampled.
    """

    def __init__(
        self,
        planned: PlanWithCosts,
        observed: Callable[[], Executor],
        may_pay: Callable[[float, Profile], bool],
        reschedule: Callable[[float, Profile], Executor | None],
        margin: float,
        workers: Workers,
        adopt: Adopt,
    ) -> None:
        self._lock = threading.Lock()
        self._trial = _trial(planned, observed, may_pay, reschedule, margin, workers)
        self._next = next(self._trial)
        self._adopt = adopt

    def run(
        self, executor: LinearExecutor, inputs: Sequence[Any], control: Control
    ) -> tuple[Any, ...]:
        if not self._lock.acquire(blocking=False):
            return _in_order(executor, inputs, control)
        try:
            begin = perf_counter()
            outputs = self._next(executor, inputs, control)
            self._advance(executor, perf_counter() - begin)
            return outputs
        finally:
            self._lock.release()

    def _advance(self, executor: LinearExecutor, seconds: float) -> None:
        """A run took ``seconds``."""
        try:
            self._next = self._trial.send(seconds)
        except StopIteration as end:
            executor.sampler = None
            adopt = self._adopt()
            if end.value is not None and adopt is not None:
                adopt(executor, end.value)


def _trial(
    planned: PlanWithCosts,
    observed: Callable[[], Executor],
    may_pay: Callable[[float, Profile], bool],
    reschedule: Callable[[float, Profile], Executor | None],
    margin: float,
    workers: Workers,
) -> Trial:
    """How each run is run, which is sent the seconds that the run took; returns the executor that
    is faster, if one is."""
    from concurrent.futures import Future

    serial = inf
    for _ in range(_TIMED):
        serial = min(serial, (yield _in_order))
    if serial < OVERHEADS.worth_s:
        return None
    profile, executor = Profile(), observed()
    yield partial(_measured, executor, Profile())  # to warm up
    for _ in range(_MEASURED):
        for _ in range(_BETWEEN):
            yield _in_order
        yield partial(_measured, executor, profile)
        if not may_pay(serial, profile):
            return None

    def decide() -> Executor | None:
        planned.costs.record(profile, True)
        planned.costs.save()
        return reschedule(serial, profile)

    decision: Future[Executor | None] = Future()
    try:
        workers.submit(partial(fulfil, decision, decide))
    except RuntimeError:  # the pool is closed, or the process ends
        return None
    while not decision.done():
        yield _in_order
    candidate = None if decision.exception() else decision.result()
    if candidate is None:
        return None
    best = [inf, inf]
    for _ in range(_TRIED):
        best[0] = min(best[0], (yield _in_order))
        best[1] = min(best[1], (yield partial(_instead, candidate)))
    return candidate if best[1] <= margin * best[0] else None


def _in_order(executor: LinearExecutor, inputs: Sequence[Any], control: Control) -> Any:
    return working_for(control, executor.run, inputs, control)


def _instead(
    candidate: Executor, _: LinearExecutor, inputs: Sequence[Any], control: Control
) -> Any:
    return candidate.run(inputs, control)


def _measured(
    observed: Executor, profile: Profile, _: LinearExecutor, inputs: Sequence[Any], control: Control
) -> Any:
    """Run ``observed`` with ``profile`` as its only observer."""
    outer = control.observer, control.run
    control.observer, control.run = profile, ObservedRun(observed.table, observed.name)
    error: BaseException | None = None
    try:
        profile.run_begin(control.run)
        return observed.run(inputs, control)
    except BaseException as raised:
        error = raised
        raise
    finally:
        profile.run_end(control.run, error)
        control.observer, control.run = outer
        del error  # it holds this frame
