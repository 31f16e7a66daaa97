"""What a trace recorded, as spans of time: which step ran when, on which track, and after which.

``trace.py`` records and writes; this is what lies between.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from penstock.observers.base import ObservedRun
from penstock.plan.plan import Step, StepTable

RUN_BEGIN, RUN_END, READY, BEGIN, END, TRANSFER, ALLOCATION = range(7)

# What happened, when (ns), on which thread, in which run, to which step, and what else there is to
# say: shapes, bytes or an error.
Record: TypeAlias = tuple[int, int, int, ObservedRun, Step | None, Any]


@dataclass(eq=False, slots=True)
class Span:
    """A run (``step`` is None), an execution of a step, or its wait from ready to begin.

    ``first`` and ``last`` are the places of its begin and its end among the records.
    """

    run: RunSpan
    step: Step | None
    thread: int
    begin: int
    first: int
    inputs: Sequence[Any] = ()
    outputs: Sequence[Any] = ()
    end: int = -1
    last: int = -1
    moved: bool = False
    """whether it ended on another thread"""
    state: str = ""
    """what is to be said of its end, if anything"""
    transferred: int = 0
    lane: int = 0
    """which of the tracks of its thread it is on"""

    def close(self, end: int, last: int, state: str = "") -> None:
        self.end, self.last, self.state = end, last, state


@dataclass(eq=False, slots=True)
class RunSpan:
    """What is known of a run while its records are gone through.

    ``waiting`` and ``working`` are by step, for which its id stands: two steps may be equal.
    ``makers`` has the last execution that made the value of a slot, ``live`` bytes of memory.
    """

    number: int
    told: ObservedRun
    lineage: _Lineage
    span: Span = field(init=False)
    error: str | None = None
    waiting: dict[Step, list[Span]] = field(default_factory=dict)
    working: dict[Step, list[Span]] = field(default_factory=dict)
    makers: dict[int, Span] = field(default_factory=dict)
    live: int = 0

    def maker(self, slot: int) -> Span | None:
        """The execution that made what a slot holds now, if a step did."""
        found: Span | None = None
        seen: set[int] = set()
        stack = [slot]
        while stack:
            slot = stack.pop()
            span = self.makers.get(slot)
            if span is None:
                if slot not in seen:
                    seen.add(slot)
                    stack.extend(self.lineage.sources.get(slot, ()))
            elif found is None or span.last > found.last:
                # A loop's value comes from before it, or from the iteration before: the later of
                # these it is, but for values that are only passed around.
                found = span
        return found


class _Lineage:
    """What arrows and tracks must know of a plan.

    ``parents``: the step in whose block a step is. ``sources``: where the value of a slot that is
    no step's output comes from: what a view is of, what enters a loop's body.
    """

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
    """Goes through records in the order of time and tells what they mean.

    ``spans`` in the order in which they began; ``arrows`` from an execution to one that reads what
    it made, by the name of the value read; ``memory`` and ``ready`` are counters: time, and the
    value from then on.
    """

    def __init__(self, records: Sequence[Record]) -> None:
        self.origin = records[0][1] if records else 0
        self.spans: list[Span] = []
        self.waits: list[Span] = []
        self.arrows: list[tuple[Span, Span, str]] = []
        self.memory: list[tuple[int, int]] = []
        self.ready: list[tuple[int, int]] = []
        self._plans: dict[StepTable, _Lineage] = {}
        self._runs: dict[ObservedRun, RunSpan] = {}
        self._begun = 0
        for place, record in enumerate(records):
            self._take(place, *record)
        for run in self._runs.values():
            self._finish(run, records[-1][1], len(records), "not ended")

    def _take(
        self,
        place: int,
        what: int,
        now: int,
        thread: int,
        told: ObservedRun,
        step: Any,
        detail: Any,
    ) -> None:
        run = self._runs.get(told)
        if run is None:
            if what in (END, RUN_END):
                return  # what began before the records were cleared
            run = self._begin(told, now, thread, place)
        if what == READY:
            wait = Span(run, step, thread, now, place)
            run.waiting.setdefault(step, []).append(wait)
            self.waits.append(wait)
            _count(self.ready, now, 1)
        elif what == BEGIN:
            self._begin_step(run, Span(run, step, thread, now, place, detail))
        elif what == END:
            span = self._working(run, step, thread)
            if span is not None:
                span.close(now, place)
                span.moved, span.outputs = thread != span.thread, detail
                run.working[step].remove(span)
                run.makers.update((slot, span) for slot in step.outputs if slot >= 0)
        elif what == TRANSFER:
            span = self._working(run, step, thread)
            if span is not None:
                span.transferred += detail
        elif what == ALLOCATION:
            # What was taken before the records were cleared may be given back now.
            change = max(detail, -run.live)
            run.live += change
            _count(self.memory, now, change)
        elif what == RUN_END:
            run.error = detail
            run.span.moved = thread != run.span.thread
            self._finish(run, now, place, "failed" if detail else "")
            del self._runs[told]

    def _begin(self, told: ObservedRun, now: int, thread: int, place: int) -> RunSpan:
        lineage = self._plans.get(told.table)
        if lineage is None:
            lineage = self._plans[told.table] = _Lineage(told.table)
        self._begun += 1
        run = self._runs[told] = RunSpan(self._begun, told, lineage)
        run.span = Span(run, None, thread, now, place)
        self.spans.append(run.span)
        return run

    def _begin_step(self, run: RunSpan, span: Span) -> None:
        step = span.step
        assert step is not None
        waiting = run.waiting.get(step)
        if waiting:
            waiting.pop(0).close(span.begin, span.first)
            _count(self.ready, span.begin, -1)
        self.spans.append(span)
        run.working.setdefault(step, []).append(span)
        makers: dict[Span, int] = {}
        for slot in step.inputs:
            maker = run.maker(slot) if slot >= 0 else None
            if maker is not None:
                makers.setdefault(maker, slot)
        slots = run.told.table.slots
        self.arrows += [(maker, span, slots[slot].name) for maker, slot in makers.items()]

    def _working(self, run: RunSpan, step: Step, thread: int) -> Span | None:
        """Which execution of a step something is told of: iterations may go on at once."""
        spans = run.working.get(step)
        if not spans:
            return None
        return next((span for span in reversed(spans) if span.thread == thread), spans[0])

    def _finish(self, run: RunSpan, now: int, place: int, state: str) -> None:
        """End a run, and with it whatever of it is under way or waiting."""
        for spans in run.working.values():
            for span in spans:
                span.close(now, place, state or "not ended")
        for waits in run.waiting.values():
            for wait in waits:
                wait.close(now, place, "never began")
                _count(self.ready, now, -1)
        run.span.close(now, place, state)
        _count(self.memory, now, -run.live)


def _count(counter: list[tuple[int, int]], now: int, change: int) -> None:
    if change:
        counter.append((now, (counter[-1][1] if counter else 0) + change))


def assign_lanes(spans: Sequence[Span]) -> dict[int, int]:
    """Give spans, in the order of their begins, to the tracks of their threads; how many each has.

    On a track, spans must nest: Perfetto drops those that overlap. They nest as steps and runs do;
    a thread that takes other work before a step or run of its own has ended needs more tracks.
    """
    threads: dict[int, list[list[Span]]] = {}
    for span in spans:
        lanes = threads.setdefault(span.thread, [[]])
        # The first is for what the thread did from begin to end.
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
    """Whether ``span`` is a part of ``outer``, which began before it on the same thread."""
    if outer.moved or outer.end < span.end:
        return False
    if span.step is None:
        return True  # whoever runs a session within a step or a run waits for it
    if outer.run is not span.run:
        return False
    return outer.step is None or span.run.lineage.within(span.step, outer.step)
