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
and none of it for plans that take less than handing work to others. No run is added. Where both
ways were tried, the slower one is tried again, ever more seldom (``trial.judged_again``); else
nothing is left in a run.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator, Sequence
from functools import partial
from math import inf
from time import perf_counter
from typing import Any, Protocol
from weakref import ref

from penstock.core.records import dataclass
from penstock.executors.base import CompiledExecutor, Executor
from penstock.executors.control import Control
from penstock.host.threads import OVERHEADS, Workers, fulfil
from penstock.observers.base import ObservedRun
from penstock.observers.profile import Profile
from penstock.plan.plan import StepTable
from penstock.tuning.measure import CostModel
from penstock.tuning.trial import PAIRS, Recipe, Runner, Switch, as_usual, converse, in_turns, judged_again

_TIMED, _MEASURED = 4, 3
_BETWEEN = 4  # runs as usual between those on one thread

Adopt = Callable[[], Callable[[Executor, Executor], None] | None]
"""Gives a function that replaces an executor by another; None if the session is gone."""

Trial = Generator[Runner, float, None]
"""How each run is run, which is sent the seconds that the run took."""


class PlanWithCosts(Protocol):
    """A plan, and the costs of its steps."""

    @property
    def plan(self) -> StepTable: ...

    @property
    def costs(self) -> CostModel: ...


class RunSampler:
    """Runs an executor as a trial says, until that ends. Of concurrent runs one is sampled.
    ``adopt``: lets the session use another executor."""

    def __init__(self, adopt: Adopt) -> None:
        self._lock = threading.Lock()
        self._adopt = adopt
        # Weak, as the executor has this sampler: plans are freed by their last reference.
        self._used: ref[Executor] | None = None

    def begin(self, trial: Callable[[Switch], Trial]) -> None:
        """Begin ``trial``, which is given the function that lets another executor be used."""
        own = ref(self)

        def switch(executor: Executor) -> Recipe | None:
            sampler = own()
            return None if sampler is None else sampler.switch(executor)

        self._trial = trial(switch)
        self._next = next(self._trial)

    def run(self, executor: Executor, inputs: Sequence[Any], control: Control) -> tuple[Any, ...]:
        if not self._lock.acquire(blocking=False):
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
        used, adopt = None if self._used is None else self._used(), self._adopt()
        if used is None or adopt is None:
            return None
        adopt(used, executor)
        for each, sampler in ((used, None), (executor, self)):
            if isinstance(each, CompiledExecutor):
                each.sampler = sampler
        return used.recipe() if isinstance(used, CompiledExecutor) else None


@dataclass(frozen=True)
class Choice:
    """What to choose from by costs that runs show.

    ``observed()`` is an executor of the plan with one thread that tells observers of its steps.
    ``may_pay(seconds, profile)`` says whether any schedule of the steps in ``profile`` may take
    less than ``seconds``. ``reschedule(seconds, profile)`` is an executor that should take less
    than ``seconds``, by the costs of ``planned``, which now has those in ``profile``, if there is
    one: it is used if it takes at most ``margin`` of the time of the first.
    """

    planned: PlanWithCosts
    observed: Callable[[], Executor]
    may_pay: Callable[[float, Profile], bool]
    reschedule: Callable[[float, Profile], Executor | None]
    margin: float
    workers: Workers


def sampled(choice: Choice, switch: Switch) -> Trial:
    """Measure steps in runs, and try what their costs speak for; ``switch`` uses it, if it is
    faster."""
    from concurrent.futures import Future

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
        choice.planned.costs.record(profile, True)
        choice.planned.costs.save()
        return choice.reschedule(serial, profile)

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
    of_one_plan = isinstance(candidate, CompiledExecutor)
    recipe, margin = (candidate.recipe() if of_one_plan else None), choice.margin
    if (yield from in_turns(candidate, PAIRS, margin)):
        replaced = switch(candidate)
        if replaced is None:
            return
        recipe, margin = replaced, converse(margin)
    del candidate, decision, executor  # which may be used now, and have the sampler of this trial
    if of_one_plan and recipe is not None:
        yield from judged_again(recipe, margin, switch)


def _measured(
    observed: Executor, profile: Profile, _: Executor, inputs: Sequence[Any], control: Control
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
