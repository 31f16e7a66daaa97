"""Trials: measurements that find the fastest of several ways to run a plan.

Ahead of the first answer, runs are added, and they are bounded: ``BUDGET`` times a run in all,
unless ``autotune=True`` asks for more. Later, runs of users are timed, and none is added::

    run   1 ... 32     33 ... 38         39 ... 102    103 ... 108       ...
          as usual     both, by turns    as usual      both, by turns

A choice is never final: measurements in one process, beside others, may be wrong. So the
slower executor is tried again, at growing intervals, as ``ThreadTuner`` does for threads.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from functools import partial
from math import inf
from time import perf_counter
from typing import TYPE_CHECKING, Any

import numpy as np

from penstock.core.checkpoints import report_progress
from penstock.core.errors import PenstockError
from penstock.core.types import RunValues
from penstock.executors.base import Executor
from penstock.executors.control import Control, compile_run
from penstock.executors.linear import LinearExecutor
from penstock.host.current_run import working_for
from penstock.observers.base import ObservedRun

if TYPE_CHECKING:
    from penstock.observers.profile import Profile

Inputs = RunValues
Outputs = tuple[Any, ...]

BUDGET = 3
"""times a run with all threads: what measuring takes ahead of the first answer"""
_LEAST_SECONDS = 0.01  # that it may take in any case
# Runs to measure a graph by: one, and up to this number while they take less than MOST_SECONDS.
MOST_RUNS = 5
MOST_SECONDS = 0.2
# Turns of observed and unobserved runs: few, since each begins with its memory cold.
_TURNS = 3
_DISTURBED = 3
# Runs between two trials: the fewest after a change, doubled up to the most.
# With six pairs a trial these are less than 1 % of all runs in the end. Without further trials one
# process of ten kept the slower executor, which took 1.3 to 1.6 times as long (decision 74).
FEWEST, RAREST = 32, 4096
PAIRS = 6
"""of runs, in a trial"""


def profile_runs(
    executor: Executor, values: Inputs, runs: int, most_seconds: float = inf
) -> Profile:
    """A profile of ``runs`` runs of an observed executor, after one to warm up; of fewer once they
    have taken ``most_seconds``. Nothing is kept in the table of costs."""
    from penstock.observers.profile import Profile

    profile = Profile()
    begin = perf_counter()
    for i in range(1 + runs):
        observed_run(executor, values, profile if i else None)
        if i and perf_counter() - begin > most_seconds:
            break
    return profile


def profile_in_turn(observed: Executor, executor: Executor, values: Inputs, runs: int) -> Profile:
    """A profile of ``runs`` runs of ``observed``, and in turn with them of as many of ``executor``,
    the same without observers, so that other load on the machine slows down both, except for single
    runs and steps that were interrupted (``undisturbed``). It includes the overhead of observing
    until it is settled (``Profile.settle``)."""
    from penstock.observers.profile import Profile

    watched: list[Profile] = []
    alone: list[float] = []
    turns = min(_TURNS, runs // 3) or 1
    for turn in range(turns):
        report_progress("measure the plan", turn, turns)
        count = (runs + turn) // turns
        # Each turn after one run to warm up: the other executor has an arena of its own.
        alone += run_seconds(executor, values, 1 + count, runs)[1:]
        for i in range(1 + count):
            profile = Profile()
            observed_run(observed, values, profile if i else None)
            watched += [profile] if i else []
    report_progress("measured the plan", turns, turns)
    whole = _without_disturbances(watched)
    whole.alone = undisturbed(alone)
    return whole


def run_seconds(executor: Executor, values: Inputs, runs: int, trials: int = 0) -> list[float]:
    """The seconds of each of ``runs`` runs, without up to ``trials`` others by which the executor
    chooses the number of its threads."""
    taken: list[float] = []
    while len(taken) < runs:
        trial = trials > 0 and isinstance(executor, LinearExecutor) and executor.undecided
        with compile_run() as control:
            begin = perf_counter()
            executor.run(values, control)
            seconds = perf_counter() - begin
        trials -= trial
        taken += [] if trial else [seconds]
    return taken


def _without_disturbances(profiles: Sequence[Profile]) -> Profile:
    """The profile of all runs of which each has one of ``profiles``. What other processes do to a
    run, they do to few of its steps: the seconds of each step are those of ``undisturbed`` runs,
    and the runs are as much shorter."""
    from penstock.observers.profile import Profile

    whole = Profile()
    for profile in profiles:
        whole.add(profile)
    for key, entry in whole.entries.items():
        own = [p.entries[key].total for p in profiles if key in p.entries]
        seconds = sum(undisturbed(own))
        whole.observed -= entry.total - seconds
        entry.total = seconds
    return whole


def undisturbed(seconds: Sequence[float]) -> list[float]:
    """The times of runs that do the same; one of more than ``_DISTURBED`` times the median, which
    other processes must have interrupted, counts as the median.

    >>> undisturbed([1.0, 1.5, 80.0, 1.0])
    [1.0, 1.5, 1.25, 1.0]
    """
    middle = float(np.median(seconds))
    return [x if x <= _DISTURBED * middle else middle for x in seconds]


def observed_run(
    executor: Executor, values: Inputs, profile: Profile | None, timeout: float | None = None
) -> float:
    """One run of an observed executor; the seconds that it took."""
    with compile_run(timeout) as control:
        control.run = ObservedRun(executor.table, executor.name, executor.threads)
        if profile is not None:
            control.observer = profile
        control.observer.run_begin(control.run)
        begin = perf_counter()
        executor.run(values, control)
        seconds = perf_counter() - begin
        control.observer.run_end(control.run, None)
        return seconds


def profile_briefly(
    executor: Executor, values: Inputs, runs: int, left: float | None = None
) -> tuple[Profile, float]:
    """A profile of up to ``runs`` runs of an observed executor within ``left`` seconds, and those
    that are left then. If nothing has run before, one more run warms up, and all together may take
    ``BUDGET`` times as long as that; one of ``MOST_SECONDS`` tells enough by itself. Raises
    ``DeadlineExceeded`` if the first run takes longer than is left.
    """
    from penstock.observers.profile import Profile

    profile, last = Profile(), 0.0
    if left is None:
        first = observed_run(executor, values, profile)
        left = left_after(first)
        # Beside kernels that take so long, what a first run does once is little.
        if first >= MOST_SECONDS:
            return profile, left
        profile = Profile()
    for _ in range(runs):
        if left < 2 * last:  # one that is stopped would take what the others have shown with it
            break
        last = observed_run(executor, values, profile, left)
        left = max(left - last, 0.0)
    return profile, left


def left_after(serial: float) -> float:
    """The seconds that runs may take after a first one, of ``serial`` seconds: all together at most
    ``BUDGET`` times as long."""
    return max((BUDGET - 1) * serial, _LEAST_SECONDS)


def without_broadcasts(values: Inputs) -> list[Any]:
    """Copies of values that stand for a shape: reading strides of zero would be too fast."""
    return [np.ascontiguousarray(x) if isinstance(x, np.ndarray) and x.ndim else x for x in values]


def faster(
    one: Executor, other: Executor, values: Inputs, margin: float
) -> tuple[Executor, Executor]:
    """``one`` before ``other`` if it takes at most ``margin`` of its time, else behind it. Both are
    run: a simulation knows neither shared memory bandwidth nor Python's lock."""
    fed = without_broadcasts(values)
    best = [inf, inf]
    try:
        # Twice: threads that one executor left spinning slow down the first run of the other.
        for _ in range(2):
            for i, executor in enumerate((one, other)):
                begin = perf_counter()
                for _ in range(MOST_RUNS):
                    start = perf_counter()
                    with compile_run() as control:
                        executor.run(fed, control)
                    best[i] = min(best[i], perf_counter() - start)
                    if perf_counter() - begin > MOST_SECONDS / 2:
                        break
    except PenstockError:
        return other, one
    return (one, other) if best[0] <= margin * best[1] else (other, one)


# Comparing executors by the runs of users.

Runner = Callable[[Executor, Inputs, Control], Outputs]
"""Runs an executor, or another one in its place"""
Turns = Generator[Runner, float, bool]
Recipe = Callable[[], Executor]
"""Makes an executor, which holds memory, for as long as it is needed"""
Switch = Callable[[Executor], Recipe | None]
"""Lets an executor take the place of the one used, whose recipe it returns; None without a session.
"""


def as_usual(executor: Executor, inputs: Inputs, control: Control) -> Outputs:
    return working_for(control, executor.run, inputs, control)


def _instead(other: Executor, _: Executor, inputs: Inputs, control: Control) -> Outputs:
    return working_for(control, other.run, inputs, control)


def in_turns(other: Executor, pairs: int, margin: float) -> Turns:
    """Yield how to run each of ``pairs`` pairs of runs: as usual, then with ``other``; is sent the
    seconds of each run. Returns whether ``other`` takes at most ``margin`` of the usual time."""
    usual = best = inf
    for _ in range(pairs):
        usual = min(usual, (yield as_usual))
        best = min(best, (yield partial(_instead, other)))
    return best <= margin * usual


def converse(margin: float) -> float:
    """The margin of an executor, by that of the other one."""
    return 1 / margin if margin else inf


def judged_again(
    recipe: Recipe, margin: float, switch: Switch, first: int = FEWEST
) -> Generator[Runner, float, None]:
    """Yield how to run each run of a plan, and switch between two executors: runs are as usual, but
    after ``first`` runs, and then at intervals that grow as long as nothing changes, in turns with
    the one of ``recipe``. It is used from then on if it takes at most ``margin`` of the usual time.
    The loser is released: its arena may be as large as that of the one in use."""
    interval = first
    while True:
        for _ in range(interval):
            yield as_usual
        interval = min(max(2 * interval, FEWEST), RAREST)
        try:
            other = recipe()
        except (PenstockError, MemoryError):  # there may be no room for two arenas
            continue
        if (yield from in_turns(other, PAIRS, margin)):
            replaced = switch(other)
            if replaced is None:
                return
            recipe, margin, interval = replaced, converse(margin), FEWEST
        del other
