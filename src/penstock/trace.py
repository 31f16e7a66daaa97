"""Traces: what runs did, when and on which thread, for Perfetto and chrome://tracing.

Recording notes times and shapes, nothing else; all that a trace shows is worked out when it is
asked for. The file is in Chrome's Trace Event Format, as JSON objects. What its two readers do with
it, beyond the format's description, is said where it matters below.
"""

from __future__ import annotations

import json
import math
import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from threading import current_thread, get_ident
from time import perf_counter_ns
from typing import Any, TypeAlias

import numpy as np

from penstock.observe import ObservedRun, Observer
from penstock.plan import Plan, Step
from penstock.types import TensorType

_RUN_BEGIN, _RUN_END, _READY, _BEGIN, _END, _TRANSFER, _ALLOCATION = range(7)

# What happened, when (ns), on which thread, in which run, to which step, and what else there is to
# say: shapes, bytes or an error.
_Record: TypeAlias = tuple[int, int, int, ObservedRun, Step | None, Any]


class Trace(Observer):
    """Records runs: ``session.run(feeds, trace=trace)``, any number of them, also at once.

    What is recorded grows by a few hundred bytes with each step that runs, and keeps the plans of
    its runs (and so their constants), until ``clear``. No tensor is kept.
    """

    def __init__(self) -> None:
        # Appending to a list, or setting an item of a dict, is one action to all other threads.
        self._records: list[_Record] = []
        self._threads: dict[int, str] = {}

    @property
    def counts(self) -> Counter[str]:
        """How often each node ran to its end, over all runs, by name; 0 for any other name.

        Nodes of one name count together, and one without a name goes by its label. Nodes that were
        folded away or cost nothing (views of planned memory) do not run.
        """
        ended = (r[4] for r in self._records.copy() if r[0] == _END)
        return Counter(_name(step) for step in ended if step is not None)

    def clear(self) -> None:
        """Forget everything recorded."""
        self._records.clear()

    def to_dict(self) -> dict[str, Any]:
        """The trace as the object that ``save`` writes: ``traceEvents`` in the order of time.

        Times are in microseconds since the first thing recorded. Of each run and each execution of
        a step there is a complete event (``X``), on the track of the thread where it began; one
        that ends on another thread, or in whose course the thread did other things, stands on a
        further track of that thread. Waits from ready to begin are asynchronous events (``b``,
        ``e``) named ``queued``; ``live memory`` and ``ready steps`` are counters; arrows (``s``,
        ``f``) go from the step that made a value to those that read it.
        """
        records = self._records.copy()
        # Threads note the time first and append then. In the order of time, too, whatever led to
        # something else stands before it; records of one time keep their order.
        records.sort(key=lambda record: record[1])
        return {
            "displayTimeUnit": "ns",
            "otherData": {"producer": "penstock", "clock": "time.perf_counter_ns"},
            "traceEvents": _Writer(_Replay(records), self._threads).events,
        }

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the trace to ``path``: open it with https://ui.perfetto.dev or chrome://tracing.

        Raises ``OSError`` where the file cannot be written.
        """
        text = json.dumps(self.to_dict(), allow_nan=False, separators=(",", ":"))
        Path(path).write_text(text + "\n", encoding="ascii")

    def __repr__(self) -> str:
        kinds = Counter([record[0] for record in self._records.copy()])
        return f"Trace({kinds[_RUN_BEGIN]} runs, {kinds[_END]} steps)"

    # What observers are told.

    def run_begin(self, run: ObservedRun) -> None:
        self._record(_RUN_BEGIN, perf_counter_ns(), run, None, None)

    def run_end(self, run: ObservedRun, error: BaseException | None) -> None:
        # The error itself would keep frames, and all values in them, alive.
        text = None if error is None else f"{type(error).__name__}: {error}"
        self._record(_RUN_END, perf_counter_ns(), run, None, text)

    def step_ready(self, run: ObservedRun, step: Step) -> None:
        self._record(_READY, perf_counter_ns(), run, step, None)

    def step_begin(self, run: ObservedRun, step: Step, inputs: Sequence[Any]) -> None:
        shapes = [_shape(value) for value in inputs]
        self._record(_BEGIN, perf_counter_ns(), run, step, shapes)

    def step_end(self, run: ObservedRun, step: Step, outputs: Sequence[Any]) -> None:
        now = perf_counter_ns()
        self._record(_END, now, run, step, [_shape(value) for value in outputs])

    def transfer(self, run: ObservedRun, step: Step, nbytes: int) -> None:
        self._record(_TRANSFER, perf_counter_ns(), run, step, nbytes)

    def allocation(self, run: ObservedRun, nbytes: int) -> None:
        self._record(_ALLOCATION, perf_counter_ns(), run, None, nbytes)

    def _record(
        self, what: int, now: int, run: ObservedRun, step: Step | None, detail: Any
    ) -> None:
        thread = get_ident()
        if thread not in self._threads:
            self._threads[thread] = current_thread().name
        self._records.append((what, now, thread, run, step, detail))


def _shape(value: Any) -> Any:
    """What is noted of a value: dtype and shape, the length of a list, or the name of its type."""
    shape = getattr(value, "shape", None)
    if shape is not None:
        return value.dtype, tuple(shape)
    if isinstance(value, list):
        return len(value)
    return "none" if value is None else type(value).__name__


# From records to spans of time.


@dataclass(eq=False, slots=True)
class _Span:
    """A run (``step`` is None), an execution of a step, or its wait from ready to begin.

    ``first`` and ``last`` are the places of its begin and its end among the records.
    """

    run: _Run
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
class _Run:
    """What is known of a run while its records are gone through.

    ``waiting`` and ``working`` are by step, for which its id stands: two steps may be equal.
    ``makers`` has the last execution that made the value of a slot, ``live`` bytes of memory.
    """

    number: int
    told: ObservedRun
    lineage: _Lineage
    span: _Span = field(init=False)
    error: str | None = None
    waiting: dict[int, list[_Span]] = field(default_factory=dict)
    working: dict[int, list[_Span]] = field(default_factory=dict)
    makers: dict[int, _Span] = field(default_factory=dict)
    live: int = 0

    def maker(self, slot: int) -> _Span | None:
        """The execution that made what a slot holds now, if a step did."""
        found: _Span | None = None
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

    def __init__(self, plan: Plan) -> None:
        self.parents: dict[int, int] = {}
        self.sources: dict[int, list[int]] = {
            i: [slot.base] for i, slot in enumerate(plan.slots) if slot.base >= 0
        }
        for step in plan.walk():
            for block in step.blocks:
                self.parents.update((id(inner), id(step)) for inner in block.steps)
                if step.node.op.name != "Loop":
                    for outer, inside in zip(step.inputs, block.inputs, strict=False):
                        self.sources[inside] = [outer]
            for carry in step.carries:
                self.sources[carry.inside] = [carry.initial, carry.updated]

    def within(self, step: Step, outer: Step) -> bool:
        """Whether ``step`` is in a block of ``outer``, at any depth."""
        at = self.parents.get(id(step))
        while at is not None and at != id(outer):
            at = self.parents.get(at)
        return at is not None


class _Replay:
    """Goes through records in the order of time and tells what they mean.

    ``spans`` in the order in which they began; ``arrows`` from an execution to one that reads what
    it made, by the name of the value read; ``memory`` and ``ready`` are counters: time, and the
    value from then on.
    """

    def __init__(self, records: Sequence[_Record]) -> None:
        self.origin = records[0][1] if records else 0
        self.spans: list[_Span] = []
        self.waits: list[_Span] = []
        self.arrows: list[tuple[_Span, _Span, str]] = []
        self.memory: list[tuple[int, int]] = []
        self.ready: list[tuple[int, int]] = []
        self._plans: dict[int, _Lineage] = {}
        self._runs: dict[ObservedRun, _Run] = {}
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
            if what in (_END, _RUN_END):
                return  # what began before the records were cleared
            run = self._begin(told, now, thread, place)
        if what == _READY:
            wait = _Span(run, step, thread, now, place)
            run.waiting.setdefault(id(step), []).append(wait)
            self.waits.append(wait)
            _count(self.ready, now, 1)
        elif what == _BEGIN:
            self._begin_step(run, _Span(run, step, thread, now, place, detail))
        elif what == _END:
            span = self._working(run, step, thread)
            if span is not None:
                span.close(now, place)
                span.moved, span.outputs = thread != span.thread, detail
                run.working[id(step)].remove(span)
                run.makers.update((slot, span) for slot in step.outputs if slot >= 0)
        elif what == _TRANSFER:
            span = self._working(run, step, thread)
            if span is not None:
                span.transferred += detail
        elif what == _ALLOCATION:
            # What was taken before the records were cleared may be given back now.
            change = max(detail, -run.live)
            run.live += change
            _count(self.memory, now, change)
        elif what == _RUN_END:
            run.error = detail
            run.span.moved = thread != run.span.thread
            self._finish(run, now, place, "failed" if detail else "")
            del self._runs[told]

    def _begin(self, told: ObservedRun, now: int, thread: int, place: int) -> _Run:
        lineage = self._plans.get(id(told.plan))
        if lineage is None:
            lineage = self._plans[id(told.plan)] = _Lineage(told.plan)
        self._begun += 1
        run = self._runs[told] = _Run(self._begun, told, lineage)
        run.span = _Span(run, None, thread, now, place)
        self.spans.append(run.span)
        return run

    def _begin_step(self, run: _Run, span: _Span) -> None:
        step = span.step
        assert step is not None
        waiting = run.waiting.get(id(step))
        if waiting:
            waiting.pop(0).close(span.begin, span.first)
            _count(self.ready, span.begin, -1)
        self.spans.append(span)
        run.working.setdefault(id(step), []).append(span)
        makers: dict[_Span, int] = {}
        for slot in step.inputs:
            maker = run.maker(slot) if slot >= 0 else None
            if maker is not None:
                makers.setdefault(maker, slot)
        slots = run.told.plan.slots
        self.arrows += [(maker, span, slots[slot].name) for maker, slot in makers.items()]

    def _working(self, run: _Run, step: Step, thread: int) -> _Span | None:
        """Which execution of a step something is told of: iterations may go on at once."""
        spans = run.working.get(id(step))
        if not spans:
            return None
        return next((span for span in reversed(spans) if span.thread == thread), spans[0])

    def _finish(self, run: _Run, now: int, place: int, state: str) -> None:
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


def _assign_lanes(spans: Sequence[_Span]) -> dict[int, int]:
    """Give spans, in the order of their begins, to the tracks of their threads; how many each has.

    On a track, spans must nest: Perfetto drops those that overlap. They nest as steps and runs do;
    a thread that takes other work before a step or run of its own has ended needs more tracks.
    """
    threads: dict[int, list[list[_Span]]] = {}
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


def _holds(outer: _Span, span: _Span) -> bool:
    """Whether ``span`` is a part of ``outer``, which began before it on the same thread."""
    if outer.moved or outer.end < span.end:
        return False
    if span.step is None:
        return True  # whoever runs a session within a step or a run waits for it
    if outer.run is not span.run:
        return False
    return outer.step is None or span.run.lineage.within(span.step, outer.step)


# From spans to events.

_Event: TypeAlias = dict[str, Any]


class _Writer:
    """``events``: a replay in the Trace Event Format."""

    def __init__(self, replay: _Replay, threads: Mapping[int, str]) -> None:
        self._origin = replay.origin
        self._pid = os.getpid()
        # Viewers take 32 bits of a thread's number, and Python's identities have more.
        self._tids: dict[tuple[int, int], int] = {}
        tracks = _assign_lanes(replay.spans)
        for thread, lanes in (*tracks.items(), *[(wait.thread, 1) for wait in replay.waits]):
            for lane in range(lanes):
                self._tids.setdefault((thread, lane), len(self._tids) + 1)
        # Each with its place: in the order of time and, of one time, as the records have them.
        made = [((span.begin, span.first, 0), self._complete(span)) for span in replay.spans]
        for number, wait in enumerate(replay.waits, 1):
            begin, end = self._wait(wait, number)
            made += [((wait.begin, wait.first, 0), begin), ((wait.end, wait.last, -1), end)]
        outer = {span for span in replay.spans if span.step is not None and span.step.blocks}
        for number, (maker, reader, name) in enumerate(replay.arrows, 1):
            # Viewers tie an arrow to the innermost span of its time, and Perfetto to the last that
            # began. So it leaves before its maker ends, or as that begins where others are within.
            leaving = (max(maker.begin, maker.end - 1), maker.last, -1)
            if maker in outer:
                leaving = (maker.begin, maker.first, 1)
            arriving = (reader.begin, reader.first, 2)
            start = self._event("s", name, "dataflow", leaving[0], maker, id=number)
            stop = self._event("f", name, "dataflow", arriving[0], reader, id=number, bp="e")
            made += [(leaving, start), (arriving, stop)]
        made.sort(key=lambda event: event[0])
        self.events: list[_Event] = [*self._names(threads), *[event for _, event in made]]
        for name, unit, counter in (
            ("live memory", "bytes", replay.memory),
            ("ready steps", "steps", replay.ready),
        ):
            for now, value in counter:
                self.events.append(self._event("C", name, "counter", now, args={unit: value}))

    def _event(
        self, phase: str, name: str, category: str, time: int, on: _Span | None = None, **more: Any
    ) -> _Event:
        event = {
            "ph": phase,
            "name": _clean(name),
            "cat": category,
            "ts": _microseconds(time - self._origin),
            "pid": self._pid,
        }
        if on is not None:
            event["tid"] = self._tids[on.thread, on.lane]
        return event | more

    def _complete(self, span: _Span) -> _Event:
        run, step, plan = span.run, span.step, span.run.told.plan
        args: dict[str, Any] = {"run": run.number}
        if step is None:
            name, category = f"run {plan.name}", "run"
            args |= {"plan": _clean(plan.name), "executor": _clean(run.told.executor)}
            if run.error is not None:
                name += " (failed)"
                args["error"] = _clean(run.error)
        else:
            name, category = _name(step), "control" if step.control else "step"
            args["operation"] = _clean(step.node.op.full_name)
            args["origin"] = _clean(step.node.origin)
            args["inputs"] = _values(plan, step.inputs, span.inputs)
            args["outputs"] = _values(plan, step.outputs, span.outputs)
            if span.transferred:
                args["transferred bytes"] = span.transferred
        if span.state:
            args["state"] = span.state
        duration = _microseconds(span.end - span.begin)
        return self._event("X", name, category, span.begin, span, dur=duration, args=args)

    def _wait(self, wait: _Span, number: int) -> tuple[_Event, _Event]:
        assert wait.step is not None
        # In Perfetto events of one name share a track, so that the step is said beside it.
        args = {"run": wait.run.number, "step": _clean(_name(wait.step))}
        if wait.state:
            args["state"] = wait.state
        return (
            self._event("b", "queued", "queue", wait.begin, wait, id=number, args=args),
            self._event("e", "queued", "queue", wait.end, wait, id=number),
        )

    def _names(self, threads: Mapping[int, str]) -> Iterator[_Event]:
        """Metadata: what the process and its tracks are called, and in which order they stand."""
        about = {"ph": "M", "pid": self._pid}
        yield {**about, "name": "process_name", "args": {"name": "penstock"}}
        for (thread, lane), tid in self._tids.items():
            name = _clean(threads.get(thread) or f"thread {tid}")
            name = f"{name} ({lane + 1})" if lane else name
            yield {**about, "name": "thread_name", "tid": tid, "args": {"name": name}}
            yield {**about, "name": "thread_sort_index", "tid": tid, "args": {"sort_index": tid}}


def _name(step: Step) -> str:
    return step.node.name or step.node.label


def _values(plan: Plan, slots: Sequence[int], shapes: Sequence[Any]) -> list[str]:
    """Names and shapes as text, of which none may be a key: Perfetto takes keys for paths."""
    texts = []
    for slot, shape in zip(slots, shapes, strict=False):
        if isinstance(shape, tuple):
            dtype, dims = shape
            known = isinstance(dtype, np.dtype)
            text = str(TensorType(dtype, dims)) if known else f"{dtype}{list(dims)}"
        else:
            text = f"{shape} elements" if isinstance(shape, int) else shape
        if slot >= 0:
            texts.append(_clean(f"{plan.slots[slot].name}: {text}"))
    return texts


def _clean(text: str) -> str:
    """``text`` without halves of characters, which JSON lets pass and its readers do not."""
    return text.encode(errors="replace").decode()


def _microseconds(ns: int) -> float:
    """``ns`` in the format's unit, such that a reader finds every nanosecond again.

    Perfetto multiplies by 1000 and drops the fraction: what nests could overlap by one.
    """
    us = ns / 1000
    return us if int(us * 1000.0) == ns else math.nextafter(us, math.inf)
