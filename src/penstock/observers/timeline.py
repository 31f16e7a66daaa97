"""From the records of a trace to spans: which step ran when, on which track, and after which.

``trace.py`` records events and writes spans; this module computes the spans in between.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import chain, count
from typing import Any, TypeAlias

from penstock.core.records import dataclass, field
from penstock.core.types import RunValues
from penstock.observers.base import ObservedRun
from penstock.plan.plan import Step, StepTable

RUN_BEGIN, RUN_END, READY, BEGIN, END, TRANSFER, ALLOCATION = range(7)

# Event, time (ns), thread, run, step (None for events of a run), and shapes, bytes or an error.
Record: TypeAlias = tuple[int, int, int, ObservedRun, Any, Any]


@dataclass(eq=False, slots=True)
class Span:
    """A run (``step`` is None), an execution of a step, or its wait from ready to begin. ``first``
    and ``last`` are the indices of the records of its begin and its end."""

    run: RunSpan
    step: Step | None
    thread: int
    begin: int
    first: int
    inputs: RunValues = ()
    outputs: RunValues = ()
    end: int = -1
    last: int = -1
    moved: bool = False
    """whether it ended on another thread"""
    state: str = ""
    """how it ended, if not normally"""
    transferred: int = 0
    lane: int = 0
    """its track among those of its thread"""

    def close(self, end: int, last: int, state: str = "") -> None:
        self.end, self.last, self.state = end, last, state


@dataclass(frozen=True, slots=True)
class Lifetime:
    """A tensor of ``nbytes``, from the end of the step that computes it, to the end of ``last``."""

    name: str
    nbytes: int
    maker: Span
    last: Span


@dataclass(eq=False, slots=True)
class RunSpan:
    """The state of a run while its records are replayed. ``makers`` has the last execution that
    computed the value of each slot, ``live`` is the number of allocated bytes."""

    number: int
    observed: ObservedRun
    lineage: _Lineage
    span: Span = field(init=False)
    error: str | None = None
    waiting: dict[Step, list[Span]] = field(default_factory=dict)
    working: dict[Step, list[Span]] = field(default_factory=dict)
    makers: dict[int, Span] = field(default_factory=dict)
    live: int = 0

    def maker(self, slot: int) -> tuple[Span, int] | None:
        """The execution that computed the present value of a slot, if a step did, and the slot that
        it wrote."""
        latest: tuple[Span, int] | None = None
        seen: set[int] = set()
        stack = [slot]
        while stack:
            slot = stack.pop()
            span = self.makers.get(slot)
            if span is None:
                if slot not in seen:
                    seen.add(slot)
                    stack.extend(self.lineage.sources.get(slot, ()))
            elif latest is None or span.last > latest[0].last:
                # A carried value comes from before the loop or from the previous iteration: from
                # the later of the two, unless the loop passes it on unchanged.
                latest = span, slot
        return latest


class _Lineage:
    """The nesting of the steps and slots of a plan, for arrows and tracks. ``parents``: the step
    whose block contains a step. ``sources``: the slots that the value of a slot comes from if no
    step computes it: the base of a view, the values that enter a loop body."""

    def __init__(self, plan: StepTable) -> None:
        self.parents: dict[Step, Step] = {}
        self.sources: dict[int, list[int]] = {
            i: [slot.base] for i, slot in enumerate(plan.slots) if slot.base >= 0
        }
        for step in plan.walk():
            for block in step.blocks:
                self.parents.update((inner, step) for inner in block.steps)
                if step.node.op.name != "Loop":
                    for outer, inside in zip(step.inputs, block.inputs, strict=False):
                        self.sources[inside] = [outer]
            for carry in step.carries:
                self.sources[carry.inside] = [carry.initial, carry.updated]

    def within(self, step: Step, outer: Step) -> bool:
        """Whether ``step`` is in a block of ``outer``, at any depth."""
        at = self.parents.get(step)
        while at is not None and at is not outer:
            at = self.parents.get(at)
        return at is not None


class Replay:
    """Replays records in the order of time. ``spans`` are in the order in which they began.
    ``arrows`` lead from an execution to one that reads a value it computed, with the name of the
    value. ``reads`` has the last execution that reads a value, by the one that computed it and its
    slot. ``memory`` and ``ready`` are counters: pairs of a time and the value from then on."""

    def __init__(self, records: Sequence[Record]) -> None:
        self.origin = records[0][1] if records else 0
        self.spans: list[Span] = []
        self.waits: list[Span] = []
        self.arrows: list[tuple[Span, Span, str]] = []
        self.reads: dict[tuple[Span, int], Span] = {}
        self.memory: list[tuple[int, int]] = []
        self.ready: list[tuple[int, int]] = []
        self._plans: dict[StepTable, _Lineage] = {}
        self._runs: dict[ObservedRun, RunSpan] = {}
        self._numbers = count(1)
        # In the order of time: each record is taken in the state that the ones before have left.
        for place, record in enumerate(records):
            self._take(place, record)
        for run in self._runs.values():
            self._finish(run, records[-1][1], len(records), "not ended")

    def lifetimes(self) -> Iterator[Lifetime]:
        """The tensors that steps have computed, in that order: each lives until the last step that
        reads it has ended; what leaves the run, until the run has. What no step reads is left
        out."""
        for span in self.spans:
            if span.step is None:
                continue
            table = span.run.observed.table
            for slot, record in zip(span.step.outputs, span.outputs, strict=False):
                last = span.run.span if slot in table.outputs else self.reads.get((span, slot))
                if slot >= 0 and last is not None and isinstance(record, tuple):
                    dtype, dims = record
                    nbytes = getattr(dtype, "itemsize", 0) * math.prod(dims)
                    yield Lifetime(table.slots[slot].name, nbytes, span, last)

    def _take(self, place: int, record: Record) -> None:
        what, now, thread, observed, step, detail = record
        run = self._runs.get(observed)
        if run is None:
            if what in (END, RUN_END):
                return  # it began before the records were cleared
            if observed.table not in self._plans:
                self._plans[observed.table] = _Lineage(observed.table)
            run = RunSpan(next(self._numbers), observed, self._plans[observed.table])
            run.span = Span(run, None, thread, now, place)
            self._runs[observed] = run
            self.spans.append(run.span)
        if what == READY:
            wait = Span(run, step, thread, now, place)
            run.waiting.setdefault(step, []).append(wait)
            self.waits.append(wait)
            _count(self.ready, now, 1)
        elif what == BEGIN:
            self._begin_step(run, Span(run, step, thread, now, place, detail))
        elif what == END:
            if (span := self._working(run, step, thread)) is not None:
                span.close(now, place)
                span.moved, span.outputs = thread != span.thread, detail
                run.working[step].remove(span)
                run.makers.update((slot, span) for slot in step.outputs if slot >= 0)
        elif what == TRANSFER:
            if (span := self._working(run, step, thread)) is not None:
                span.transferred += detail
        elif what == ALLOCATION:
            # Memory allocated before the records were cleared may be freed now.
            change = max(detail, -run.live)
            run.live += change
            _count(self.memory, now, change)
        elif what == RUN_END:
            run.error = detail
            run.span.moved = thread != run.span.thread
            self._finish(run, now, place, "failed" if detail else "")
            del self._runs[observed]

    def _begin_step(self, run: RunSpan, span: Span) -> None:
        step = span.step
        assert step is not None
        if waiting := run.waiting.get(step):
            waiting.pop(0).close(span.begin, span.first)
            _count(self.ready, span.begin, -1)
        self.spans.append(span)
        run.working.setdefault(step, []).append(span)
        makers: dict[Span, int] = {}
        for slot in step.inputs:
            if slot >= 0 and (made := run.maker(slot)) is not None:
                makers.setdefault(made[0], slot)
                self.reads[made] = span
        slots = run.observed.table.slots
        self.arrows += [(maker, span, slots[slot].name) for maker, slot in makers.items()]

    def _working(self, run: RunSpan, step: Step, thread: int) -> Span | None:
        """The execution of a step that an event belongs to: iterations may overlap."""
        spans = run.working.get(step)
        if not spans:
            return None
        # On one thread executions nest: the last to begin is the first to end.
        return next((span for span in reversed(spans) if span.thread == thread), spans[0])

    def _finish(self, run: RunSpan, now: int, place: int, state: str) -> None:
        """End a run, and with it all of its executions and waits in progress."""
        for span in chain(*run.working.values()):
            span.close(now, place, state or "not ended")
        for wait in chain(*run.waiting.values()):
            wait.close(now, place, "never began")
            _count(self.ready, now, -1)
        run.span.close(now, place, state)
        _count(self.memory, now, -run.live)


def _count(counter: list[tuple[int, int]], now: int, change: int) -> None:
    if change:
        counter.append((now, (counter[-1][1] if counter else 0) + change))


def assign_lanes(spans: Sequence[Span]) -> dict[int, int]:
    """Assign spans, in the order of their begins, to tracks; return the tracks of each thread.

    The spans of a track must nest: Perfetto drops those that overlap. A thread whose spans nest as
    steps and runs do has one track; one that takes other work before its own step or run has ended
    needs more.
    """
    threads: dict[int, list[list[Span]]] = {}
    for span in spans:
        lanes = threads.setdefault(span.thread, [[]])
        # The first track is for spans that began and ended on this thread.
        for lane in range(1 if span.moved else 0, len(lanes) + 1):
            if lane == len(lanes):
                lanes.append([])
            stack = lanes[lane]
            while stack and stack[-1].end <= span.begin:
                stack.pop()
            if not stack or _holds(stack[-1], span):
                stack.append(span)
                span.lane = lane
                break
    return {thread: len(lanes) for thread, lanes in threads.items()}


def _holds(outer: Span, span: Span) -> bool:
    """Whether ``span`` is part of ``outer``, which began earlier on the same thread."""
    if outer.moved or outer.end < span.end:
        return False
    if span.step is None:
        return True  # a step or a run that runs a session waits for it
    if outer.run is not span.run:
        return False
    return outer.step is None or span.run.lineage.within(span.step, outer.step)
