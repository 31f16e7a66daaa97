"""Reports of sessions: measure, in separate runs, what a report's page shows."""

from __future__ import annotations

from dataclasses import asdict
from heapq import nlargest
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from penstock.compiler.options import CompileOptions
from penstock.core import VERSION
from penstock.core.errors import InvalidInput
from penstock.core.types import Feeds, RunValues, type_of
from penstock.executors.base import Executor
from penstock.executors.control import compile_run
from penstock.inspect.report_document import Observation, comparison_document, report_document
from penstock.inspect.report_page import Report
from penstock.ir.graph import Model
from penstock.observers.base import ObservedRun, Observer, Observers
from penstock.observers.trace import Trace
from penstock.observers.values import ValueComparison, ValueKeeper
from penstock.plan.tasks import NO_SIGNALS
from penstock.session.facts import EffectiveOptions
from penstock.tuning.machine_peak import machine_peak
from penstock.tuning.trial import profile_in_turn

if TYPE_CHECKING:
    from penstock.tuning.reasons import Reasons


class ReportedSession(Protocol):
    """The members of a session that a report reads."""

    @property
    def model(self) -> Model: ...

    @property
    def options(self) -> CompileOptions: ...

    def watched(self, feeds: Feeds | None) -> tuple[Executor, Executor, RunValues]:
        """Return the executor for these feeds, an executor of the same plan with observers, and
        the values that both take."""

    @property
    def effective(self) -> EffectiveOptions: ...

    @property
    def reasons(self) -> Reasons: ...


# The number of the longest steps whose backend is explained. Each backend must be asked for its
# kernel again, which takes about a millisecond.
_MOST_REASONS = 300


class _Watched:
    """A session with the executors of its plan for some feeds, and its results for them."""

    def __init__(self, session: ReportedSession, feeds: Feeds | None) -> None:
        self.session = session
        self.executor, self.observed, self.values = session.watched(feeds)

    def watch(self, *observers: Observer) -> None:
        """Run once more, observed."""
        run(self.observed, self.values, *observers)

    def observation(self, runs: int) -> Observation:
        """Measure ``runs`` runs of the plan; then trace one."""
        profile = profile_in_turn(self.observed, self.executor, self.values, runs)
        # Measured before the traced run, which takes longer than others.
        profile.settle()
        self.watch(trace := Trace())
        reason = self.session.reasons
        longest = nlargest(_MOST_REASONS, profile, key=lambda entry: entry.total)
        reasons = {entry.step: str(reason.of(entry.step)) for entry in longest}
        table, arena_plan = self.observed.table, self.observed.arena_plan
        tasks, scopes = self.observed.tasks, self.session.model.scopes
        signals = NO_SIGNALS if tasks is None else tasks.signals
        return Observation(table, arena_plan, profile, trace, reasons, scopes, signals)


def run(observed: Executor, values: Any, *observers: Observer) -> None:
    """Run once on an executor that reports steps to observers."""
    with compile_run() as control:
        control.run = ObservedRun(observed.table, observed.name, observed.threads)
        control.observer = Observers(observers)
        error: BaseException | None = None
        control.observer.run_begin(control.run)
        try:
            observed.run(values, control)
        except BaseException as raised:
            error = raised
            raise
        finally:
            control.observer.run_end(control.run, error)
            del error


def make_report(
    session: ReportedSession, feeds: Feeds | None, runs: int, against: ReportedSession | None
) -> Report:
    """Return the report of ``session`` for ``feeds``, compared with the session ``against``."""
    watched = _Watched(session, feeds)
    other = None if against is None else _Watched(against, feeds)
    if other is not None:
        # Before all other runs, while the variables of both still have the same values.
        kept = ValueKeeper()
        watched.watch(kept)
        compared = ValueComparison(kept)
        other.watch(compared)
        if not compared.steps:
            raise InvalidInput(
                "the sessions compute no value of the same name: compare sessions of one model"
            )
    seen, effective = watched.observation(runs), session.effective
    peak = machine_peak(effective.threads).with_steps(seen.profile.steps())
    path, table = session.model.path, watched.executor.table
    names = [table.slots[slot].name for slot in table.inputs]
    fed = zip(names, watched.values, strict=True)
    about: dict[str, Any] = {
        "format": 1,
        "version": VERSION,
        "title": Path(path).name if path else session.model.entry,
        "about": effective.line(session.options),
        "effective": asdict(effective),
        "feeds": {name: str(type_of(value)) for name, value in fed},
        "peak": asdict(peak),
    }
    document = report_document(about, seen)
    if other is not None and against is not None:
        labels = effective.line(session.options), against.effective.line(against.options)
        measured = other.observation(runs)
        document["comparison"] = comparison_document(labels, seen, measured, kept, compared)
    return Report(document)
