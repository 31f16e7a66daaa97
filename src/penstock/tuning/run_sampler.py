"""Costs from the runs of users, by which later runs try other schedules.

A plan that runs in one order by estimates alone learns from its runs::

    run 1 2 3 4   5             10, 15, 20            21 ...     ... 12 runs          from then on
        timed     on one        each step is          as usual   by turns in order    whichever
                  thread, to    measured, on                     and as tasks         was faster
                  warm up       one thread

Runs on one thread may take several times as long as others: so runs as usual lie between them, and
it ends after the tenth run if even the longest chain of dependent steps, or all of them divided
among the workers, took too long. After the last one that is measured a thread of the pool schedules
the plan anew by these costs. The rest follows only if several workers are faster in that schedule,
and none of it for plans that take less than handing work to others. No run is added. Where both
ways were tried, the slower one is tried again, ever more seldom (``trial.judged_again``); else
nothing is left in a run.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator
from functools import partial
from math import inf
from time import perf_counter
from typing import Any, Protocol
from weakref import ref

from penstock.core.records import dataclass
from penstock.core.types import RunValue, RunValues
from penstock.executors.base import CompiledExecutor, Executor
from penstock.executors.control import Control
from penstock.host.threads import OVERHEADS, Workers, fulfil
from penstock.observers.base import ObservedRun
from penstock.observers.profile import Profile
from penstock.plan.plan import Plan
from penstock.tuning.measure import CostModel
from penstock.tuning.trial import (
    PAIRS,
    Recipe,
    Runner,
    Switch,
    as_usual,
    converse,
    in_turns,
    judged_again,
)

_TIMED, _MEASURED = 4, 3
_BETWEEN = 4  # runs as usual between those on one thread

Trial = Generator[Runner, float, None]
"""Generator that yields how to run each run, and is sent the seconds that the run took."""


@dataclass(frozen=True)
class MeasuredRuns:
    """Measurements from runs of a ``plan``: the ``seconds`` of a run in one order, and the
    ``profile`` of its steps, which is part of ``costs`` as well."""

    plan: Plan
    costs: CostModel
    seconds: float
    profile: Profile


class PlanOwner(Protocol):
    """The owner of executors: a session."""

    def replace(self, old: Executor, new: Executor) -> None:
        """Use another executor of the same plan from now on."""

    def reschedule(self, executor: Executor, measured: MeasuredRuns) -> Executor | None:
        """The executor of the same plan that should be faster by what runs of ``executor`` have
        shown, if there is one."""


Reschedule = Callable[[MeasuredRuns], Executor | None]


def _nobody() -> None:
    """The owner of an executor that belongs to no session, or to one that is gone."""


class RunSampler:
    """Runs an executor as a trial says, until that ends. Of concurrent runs one is sampled.

    Measurements go to the ``owner`` of the executor, which recompiles the plan and uses the result:
    nothing is compiled here.
    """

    def __init__(self) -> None:
        self.owner: Callable[[], PlanOwner | None] = _nobody
        self._lock = threading.Lock()
        # Weak, as the executor has this sampler: plans are freed by their last reference.
        self._used: ref[Executor] | None = None

    def begin(self, trial: Callable[[Switch, Reschedule], Trial]) -> None:
        """Begin ``trial``, which is given what lets another executor be used, and what compiles the
        plan anew."""
        # The trial belongs to this sampler, and would keep it alive.
        own = ref(self)

        def reschedule(measured: MeasuredRuns) -> Executor | None:
            sampler = own()
            return None if sampler is None else sampler.reschedule(measured)

        def switch(executor: Executor) -> Recipe | None:
            sampler = own()
            return None if sampler is None else sampler.switch(executor)

        self._trial = trial(switch, reschedule)
        self._next = next(self._trial)

    def run(self, executor: Executor, inputs: RunValues, control: Control) -> tuple[RunValue, ...]:
        if not self._lock.acquire(blocking=False):
            # Nor would its time say much, beside the run that is sampled.
            return as_usual(executor, inputs, control)
        try:
            self._used = ref(executor)
            begin = perf_counter()
            outputs = self._next(executor, inputs, control)
            self._advance(perf_counter() - begin)
            return outputs
        finally:
            self._lock.release()

    def _advance(self, seconds: float) -> None:
        """A run took ``seconds``."""
        try:
            self._next = self._trial.send(seconds)
        except StopIteration:
            used = None if self._used is None else self._used()
            if isinstance(used, CompiledExecutor):
                used.sampler = None

    def switch(self, executor: Executor) -> Recipe | None:
        """Let ``executor`` take the place of the one used, whose recipe is returned; None if the
        session is gone."""
        used, owner = None if self._used is None else self._used(), self.owner()
        if used is None or owner is None:
            return None
        owner.replace(used, executor)
        for each, sampler in ((used, None), (executor, self)):
            if isinstance(each, CompiledExecutor):
                each.sampler = sampler
        return used.recipe() if isinstance(used, CompiledExecutor) else None

    def reschedule(self, measured: MeasuredRuns) -> Executor | None:
        """The callback of the owner for measurements; None if the session is gone."""
        used, owner = None if self._used is None else self._used(), self.owner()
        return None if used is None or owner is None else owner.reschedule(used, measured)


@dataclass(frozen=True)
class Choice:
    """A choice between schedules by costs that runs measure.

    ``observed()`` is an executor of the plan with one thread that tells observers of its steps.
    ``may_pay(seconds, profile)`` says whether any schedule of the steps in ``profile`` may take
    less than ``seconds``. The plan rescheduled by ``costs``, which include measurements of runs, is
    used if it takes at most ``margin`` of the time of the first.
    """

    plan: Plan
    costs: CostModel
    observed: Callable[[], Executor]
    may_pay: Callable[[float, Profile], bool]
    margin: float
    workers: Workers


def sampled(choice: Choice, switch: Switch, reschedule: Reschedule) -> Trial:
    """Measure steps in runs, and try what their costs speak for (``reschedule``); ``switch`` uses
    it, if it is faster."""
    serial = inf
    for _ in range(_TIMED):
        serial = min(serial, (yield as_usual))
    if serial < OVERHEADS.worth_s:
        return
    profile, executor = Profile(), choice.observed()
    yield partial(_measured, executor, Profile())  # to warm up
    for _ in range(_MEASURED):
        for _ in range(_BETWEEN):
            yield as_usual
        yield partial(_measured, executor, profile)
        if not choice.may_pay(serial, profile):
            return

    def decide() -> Executor | None:
        choice.costs.record(profile, True)
        choice.costs.save()
        return reschedule(MeasuredRuns(choice.plan, choice.costs, serial, profile))

    from concurrent.futures import Future  # with logging, which a first run does without

    decision: Future[Executor | None] = Future()
    try:
        choice.workers.submit(partial(fulfil, decision, decide))
    except RuntimeError:  # the pool is closed, or the process ends
        return
    while not decision.done():
        yield as_usual
    candidate = None if decision.exception() else decision.result()
    if candidate is None:
        return
    # Another kind of executor has another plan, and is not tried again.
    recipe = candidate.recipe() if isinstance(candidate, CompiledExecutor) else None
    margin = choice.margin
    if (yield from in_turns(candidate, PAIRS, margin)):
        replaced = switch(candidate)
        if replaced is None:
            return
        recipe, margin = recipe and replaced, converse(margin)
    del candidate, decision, executor  # which may be used now, and have the sampler of this trial
    if recipe is not None:
        yield from judged_again(recipe, margin, switch)


def _measured(
    observed: Executor, profile: Profile, _: Executor, inputs: RunValues, control: Control
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
