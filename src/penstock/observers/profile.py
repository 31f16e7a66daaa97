"""An observer that adds up the seconds of each step."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from time import perf_counter_ns
from typing import TYPE_CHECKING

from penstock.core.records import dataclass, replace
from penstock.core.types import JsonObject, RunValues
from penstock.host.on_demand import imported
from penstock.ir.graph import Node
from penstock.observers.base import ObservedRun, Observer
from penstock.plan.plan import Step
from penstock.plan.step_facts import StepFacts, step_facts

if TYPE_CHECKING:
    from pathlib import Path

    from penstock.ir.tables import DisplayTable


@dataclass(slots=True)
class Entry:
    """The executions of one step: their number, total seconds, and those of the fastest."""

    step: Step
    count: int = 0
    total: float = 0.0
    best: float = float("inf")

    @property
    def mean(self) -> float:
        """Mean seconds of an execution."""
        return self.total / self.count if self.count else 0.0


@dataclass(frozen=True, slots=True)
class Row:
    """A line of a table: a name, the number of executions, and their seconds in total."""

    name: str
    count: int
    seconds: float


@dataclass(frozen=True, slots=True)
class StepRow:
    """A step in a table: what it is, the most ``threads`` of its kernel, the number of executions
    in all runs, their ``seconds`` in total, those of the fastest one, and its ``share`` of the
    seconds of all steps; of a cluster, the ``worker`` that ran it. ``flops_per_s`` and
    ``bytes_per_s`` are those of the mean execution."""

    facts: StepFacts
    threads: int
    count: int
    seconds: float
    best: float
    share: float
    worker: str = ""

    def describe(self, runs: int) -> JsonObject:
        """The step as JSON has it: its facts, and milliseconds a run."""
        from dataclasses import asdict  # which no run needs

        return {
            **asdict(self.facts),
            **({"worker": self.worker} if self.worker else {}),
            "threads": self.threads,
            "count": self.count,
            "ms": self.seconds / runs * 1e3,
            "best_ms": self.best * 1e3,
            "share": self.share,
        }

    @property
    def flops_per_s(self) -> float:
        return self.facts.flops * self.count / self.seconds if self.seconds else 0.0

    @property
    def bytes_per_s(self) -> float:
        return self.facts.bytes * self.count / self.seconds if self.seconds else 0.0


class Profile(Observer):
    """Adds up seconds by step over any number of runs, also concurrent ones. An If or a loop has no
    time of its own: the steps of its graphs have, and the rest of it counts as time ``outside`` of
    kernels, as does that of the executor."""

    def __init__(self) -> None:
        self.entries: dict[tuple[Node, str], Entry] = {}
        """the steps that have a kernel, by node and backend"""
        self.runs = 0
        self.observed = 0.0
        """seconds from begin to end of all runs that succeeded, while they were observed"""
        self.executors: dict[str, int] = {}
        """the executors of the runs, by name, with the most threads of a kernel on each"""
        self.alone: list[float] = []
        """seconds of as many runs of the same plan that nothing observed, if ``Session.profile``
        made it; the seconds of steps are then those of such runs"""
        self._lock = threading.RLock()
        self._runs: dict[ObservedRun, int] = {}
        # Several executions of a step may overlap: in iterations of a frame that run in parallel.
        self._begun: dict[tuple[ObservedRun, Step], list[int]] = {}

    def run_begin(self, run: ObservedRun) -> None:
        self.executors[run.executor] = run.threads
        self._runs[run] = perf_counter_ns()

    def run_end(self, run: ObservedRun, error: BaseException | None) -> None:
        now = perf_counter_ns()
        with self._lock:
            began = self._runs.pop(run, now)
            if error is None:
                self.runs += 1
                self.observed += (now - began) * 1e-9
                return
            # Steps of a run that failed may have begun and never end.
            for key in [key for key in self._begun if key[0] is run]:
                del self._begun[key]

    def step_begin(self, run: ObservedRun, step: Step, inputs: RunValues) -> None:
        if step.kernel is not None:
            with self._lock:
                self._begun.setdefault((run, step), []).append(perf_counter_ns())

    def step_end(self, run: ObservedRun, step: Step, outputs: RunValues) -> None:
        now = perf_counter_ns()
        if step.kernel is None:
            return
        with self._lock:
            # Which of the executions that overlap ends does not matter to their sum.
            began = self._begun[run, step]
            seconds = (now - began.pop(0)) * 1e-9
            if not began:
                del self._begun[run, step]
            self._count(step, 1, seconds, seconds)

    def add(self, other: Profile) -> None:
        """Add the counts and seconds of another profile.

        Args:
            other: That profile.
        """
        with self._lock:
            self.runs += other.runs
            self.observed += other.observed
            self.alone += other.alone
            self.executors |= other.executors
            for entry in other:
                self._count(entry.step, entry.count, entry.total, entry.best)

    def _count(self, step: Step, count: int, total: float, best: float) -> None:
        entry = self.entries.setdefault((step.node, step.backend), Entry(step))
        entry.count += count
        entry.total += total
        entry.best = min(entry.best, best)

    def settle(self) -> None:
        """Scale the seconds of steps to those of the runs ``alone``, which were not observed.

        Observed steps are called one by one, with two reads of the clock; unobserved ones are
        called many at a time. The overhead is about the same for each execution, and no larger
        within steps than between them. So the same time is subtracted from each execution, until
        the steps take no longer than the runs. If steps are still too slow, the machine was slower
        while they were observed, and all are scaled by one factor. Steps that overlap, and so add
        up to more than a run, are left alone.
        """
        alone = sum(self.alone)
        excess = min(self.inside - alone, self.observed - self.inside)
        if not self.alone or excess <= 0:
            return
        self._take_from_each(excess)
        slower = self.inside / alone if alone else 1.0
        if slower > 1:
            for entry in self:
                entry.total /= slower
                entry.best /= slower

    def _take_from_each(self, excess: float) -> None:
        """Take as much from each execution as adds up to ``excess`` seconds, where it has that."""
        # The shortest first: what these do not have is taken from all others alike.
        entries = sorted(self, key=lambda entry: entry.mean)
        count = sum(entry.count for entry in entries)
        for entry in entries:
            if entry.mean > excess / count:
                break
            excess -= entry.total
            count -= entry.count
        each = excess / count if count else float("inf")
        for entry in entries:
            entry.total = max(0.0, entry.total - entry.count * each)
            entry.best = max(0.0, entry.best - each)

    # Tables with a row for each node (with its origin), operation or backend, the longest first.

    @property
    def wall(self) -> float:
        """Seconds of all runs: of those ``alone`` if there are any, else of the observed ones."""
        return sum(self.alone) if self.alone else self.observed

    @property
    def inside(self) -> float:
        """Seconds in kernels."""
        return sum(entry.total for entry in self)

    @property
    def outside(self) -> float:
        """Seconds of runs outside of kernels, spent by the executor and in control flow. Not
        meaningful for parallel runs: 0 if kernels took longer than the runs."""
        return max(0.0, self.wall - self.inside)

    def steps(self) -> list[StepRow]:
        """A row for each step, the longest first."""
        inside, threads = self.inside or 1.0, max(self.executors.values(), default=1)
        rows = [
            StepRow(step_facts(e.step), threads, e.count, e.total, e.best, e.total / inside)
            for e in self
        ]
        return sorted(rows, key=lambda row: -row.seconds)

    def save(self, path: str | Path) -> None:
        """Write the steps as JSON, which ``penstock plan --cost`` and ``SimulatedCluster`` read.

        Args:
            path: The file, which is replaced if it exists.
        """
        from pathlib import Path

        document = steps_document(self.runs, self.wall, self.steps())
        Path(path).write_text(document, encoding="utf-8")

    def by_node(self) -> list[Row]:
        return self._rows(lambda step: f"{step.facts.operation} ({step.facts.origin})")

    def by_operation(self) -> list[Row]:
        return self._rows(lambda step: step.facts.operation)

    def by_backend(self) -> list[Row]:
        return self._rows(lambda step: step.facts.backend)

    def _rows(self, name: Callable[[StepRow], str]) -> list[Row]:
        totals: dict[str, tuple[int, float]] = {}
        for step in self.steps():
            key = name(step)
            count, seconds = totals.get(key, (0, 0.0))
            totals[key] = count + step.count, seconds + step.seconds
        rows = [Row(key, *total) for key, total in totals.items()]
        return sorted(rows, key=lambda row: -row.seconds)

    def __dir__(self) -> list[str]:
        # Without what runs and ``Session.profile`` call: completion shows what users do.
        called = {*vars(Observer), "alone", "entries", "executors", "observed", "settle"}
        return [name for name in object.__dir__(self) if name[0] == "_" or name not in called]

    def __iter__(self) -> Iterator[Entry]:
        # A copy: other threads may run meanwhile.
        return iter(list(self.entries.values()))

    _repr_html_ = imported("penstock.ir.tables.show_html")
    _repr_pretty_ = imported("penstock.ir.tables.show_text")

    def _as_table(self) -> DisplayTable:
        from penstock.ir.tables import DisplayTable

        count, steps = self.runs or 1, self.steps()
        where = ("worker",) if any(row.worker for row in steps) else ()
        rows: list[tuple[str | int, ...]] = [
            (
                row.facts.operation,
                row.facts.origin,
                *[row.worker for _ in where],
                row.facts.backend,
                row.count,
                f"{row.seconds / count * 1e3:.3f}",
                f"{row.share:.1%}",
            )
            for row in steps
        ]
        titles = ("operation", "step", *where, "backend", "times", "ms a run", "share")
        return DisplayTable(
            f"{self.runs} runs, {self.wall / count * 1e3:.3f} ms each", titles, rows
        )

    def __repr__(self) -> str:
        return f"Profile({self.runs} runs, {len(self.steps())} steps, {self.wall:.6f} s)"


def steps_document(runs: int, seconds: float, rows: Iterable[StepRow]) -> str:
    """The steps of ``runs`` runs, which took ``seconds`` in all, as JSON, the longest first."""
    import json

    ordered = sorted(rows, key=lambda row: -row.seconds)
    inside, count = sum([row.seconds for row in ordered]) or 1.0, runs or 1
    steps = [replace(row, share=row.seconds / inside).describe(count) for row in ordered]
    document = {"runs": runs, "ms": seconds / count * 1e3, "steps": steps}
    return json.dumps(document, indent=2)
