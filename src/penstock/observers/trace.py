"""Traces: the steps of runs with times and threads, for Perfetto and chrome://tracing.

Recording notes times and shapes only; spans and arrows are computed when the trace is saved. The
file is in Chrome's Trace Event Format, in JSON. Comments below say where its two viewers do more
than the description of the format demands.
"""

from __future__ import annotations

import json
import math
import os
from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from threading import current_thread, get_ident
from time import perf_counter_ns
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from penstock.core.errors import check_count
from penstock.core.types import JsonObject, RunValue, RunValues, TensorType
from penstock.host.on_demand import imported
from penstock.observers.base import ObservedRun, Observer
from penstock.observers.timeline import (
    ALLOCATION,
    BEGIN,
    END,
    READY,
    RUN_BEGIN,
    RUN_END,
    TRANSFER,
    Lifetime,
    Record,
    Replay,
    Span,
    assign_lanes,
)
from penstock.ops.internal.fused import operation_name
from penstock.plan.plan import Step, StepTable

if TYPE_CHECKING:
    from penstock.ir.tables import DisplayTable


class Trace(Observer):
    """Records runs: ``session.run(feeds, trace=trace)``, any number of them, also concurrent ones.
    Each execution of a step takes a few hundred bytes. Until ``clear``, the trace keeps the plans
    of its runs, and so their constants, but no tensors.

    Args:
        max_events: Events that are kept, the newest: begins, ends and waits of steps and runs,
            transfers and allocations. By default all.
    """

    def __init__(self, max_events: int | None = None) -> None:
        if max_events not in (None, 0):
            check_count("max_events", max_events, 2**62)
        # Appending to a deque and setting an item of a dict are atomic, and so is a copy.
        self._records: deque[Record] = deque(maxlen=max_events)
        self._threads: dict[int, str] = {}

    @property
    def counts(self) -> Counter[str]:
        """The number of completed executions of each node over all runs, by name. Nodes of the same
        name count together; one without a name counts under its label. Nodes that were folded and
        views of planned memory do not run."""
        ended = (r[4] for r in self._records.copy() if r[0] == END)
        return Counter(_name(step) for step in ended if step is not None)

    def clear(self) -> None:
        """Forget everything recorded."""
        self._records.clear()

    def to_dict(self) -> JsonObject:
        """The trace as the object that ``save`` writes: ``traceEvents`` in the order of time.

        Times are in microseconds since the first record. Each run and each execution of a step is a
        complete event (``X``) on the track of the thread where it began; if it ended on another
        thread, or the thread did other work meanwhile, on a further track of that thread. Waits
        from ready to begin are asynchronous events (``b``, ``e``) named ``queued``, and so are the
        lives of tensors, each with its bytes, named ``live value``; ``live memory``
        and ``ready steps`` are counters; arrows (``s``, ``f``) lead from the step that computed a
        value to those that read it.
        """
        return {
            "displayTimeUnit": "ns",
            "otherData": {"producer": "penstock", "clock": "time.perf_counter_ns"},
            "traceEvents": _Writer(self.replay(), self._threads).events,
        }

    def replay(self) -> Replay:
        """The spans of everything recorded: executions of steps and runs, with their tracks."""
        # Threads read the clock before they append. Sorting by time keeps causes before effects;
        # the sort is stable for records of the same time.
        return Replay(sorted(self._records.copy(), key=lambda record: record[1]))

    def thread_name(self, thread: int) -> str:
        """The name that a thread of the trace had, "" if it had none."""
        return self._threads.get(thread, "")

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the trace to a file: open it with https://ui.perfetto.dev or chrome://tracing.
        Raises ``OSError`` where the file cannot be written.

        Args:
            path: The file, of JSON.
        """
        text = json.dumps(self.to_dict(), allow_nan=False, separators=(",", ":"))
        Path(path).write_text(text + "\n", encoding="ascii")

    _repr_html_ = imported("penstock.ir.tables.show_html")
    _repr_pretty_ = imported("penstock.ir.tables.show_text")

    def _as_table(self) -> DisplayTable:
        from penstock.ir.tables import DisplayTable

        total: Counter[tuple[str, str, str]] = Counter()
        count: Counter[tuple[str, str, str]] = Counter()
        for span in self.replay().spans:
            if span.step is not None:
                key = _name(span.step), operation_name(span.step.node), span.step.backend
                count[key] += 1
                total[key] += span.end - span.begin
        rows = [(*key, count[key], f"{ns * 1e-6:.3f}") for key, ns in total.most_common()]
        return DisplayTable(repr(self), ("step", "operation", "backend", "times", "ms"), rows)

    def __repr__(self) -> str:
        events = [record[0] for record in self._records.copy()]
        return f"Trace({events.count(RUN_BEGIN)} runs, {events.count(END)} steps)"

    def run_begin(self, run: ObservedRun) -> None:
        self._record(RUN_BEGIN, perf_counter_ns(), run)

    def run_end(self, run: ObservedRun, error: BaseException | None) -> None:
        # The error itself would keep its frames, and all values in them, alive.
        text = None if error is None else f"{type(error).__name__}: {error}"
        self._record(RUN_END, perf_counter_ns(), run, None, text)

    def step_ready(self, run: ObservedRun, step: Step) -> None:
        self._record(READY, perf_counter_ns(), run, step)

    def step_begin(self, run: ObservedRun, step: Step, inputs: RunValues) -> None:
        shapes = [_shape(value) for value in inputs]
        self._record(BEGIN, perf_counter_ns(), run, step, shapes)

    def step_end(self, run: ObservedRun, step: Step, outputs: RunValues) -> None:
        now = perf_counter_ns()
        self._record(END, now, run, step, [_shape(value) for value in outputs])

    def transfer(self, run: ObservedRun, step: Step, nbytes: int) -> None:
        self._record(TRANSFER, perf_counter_ns(), run, step, nbytes)

    def allocation(self, run: ObservedRun, nbytes: int) -> None:
        self._record(ALLOCATION, perf_counter_ns(), run, None, nbytes)

    def _record(
        self, what: int, now: int, run: ObservedRun, step: Step | None = None, detail: Any = None
    ) -> None:
        thread = get_ident()
        if thread not in self._threads:
            self._threads[thread] = current_thread().name
        self._records.append((what, now, thread, run, step, detail))


def _shape(value: RunValue) -> Any:
    """The record of a value: dtype and shape, the length of a list, or the name of its type."""
    shape = getattr(value, "shape", None)
    if shape is not None:
        return value.dtype, tuple(shape)
    if isinstance(value, list):
        return len(value)
    return "none" if value is None else type(value).__name__


_Event: TypeAlias = dict[str, Any]


class _Writer:
    """``events``: a replay in the Trace Event Format."""

    def __init__(self, replay: Replay, threads: Mapping[int, str]) -> None:
        self._origin = replay.origin
        self._pid = os.getpid()
        # Viewers read 32 bits of a thread id; Python's have more.
        self._tids: dict[tuple[int, int], int] = {}
        tracks = assign_lanes(replay.spans)
        for thread, lanes in (*tracks.items(), *[(wait.thread, 1) for wait in replay.waits]):
            for lane in range(lanes):
                self._tids.setdefault((thread, lane), len(self._tids) + 1)
        # Events with their sort keys: by time, then in the order of the records.
        keyed = [((span.begin, span.first, 0), self._complete(span)) for span in replay.spans]
        for number, wait in enumerate(replay.waits, 1):
            begin, end = self._wait(wait, number)
            keyed += [((wait.begin, wait.first, 0), begin), ((wait.end, wait.last, -1), end)]
        for number, life in enumerate(replay.lifetimes(), len(replay.waits) + 1):
            begin, end = self._life(life, number)
            keyed.append(((life.maker.end, life.maker.last, 1), begin))
            keyed.append(((life.last.end, life.last.last, 1), end))
        outer = {span for span in replay.spans if span.step is not None and span.step.blocks}
        for number, (maker, reader, name) in enumerate(replay.arrows, 1):
            # Viewers attach an arrow to the innermost span at its time, Perfetto to the last that
            # began. So it leaves just before its maker ends, or, if that contains other steps, as
            # it begins.
            leaving = (max(maker.begin, maker.end - 1), maker.last, -1)
            if maker in outer:
                leaving = (maker.begin, maker.first, 1)
            arriving = (reader.begin, reader.first, 2)
            start = self._event("s", name, "dataflow", leaving[0], maker, id=number)
            stop = self._event("f", name, "dataflow", arriving[0], reader, id=number, bp="e")
            keyed += [(leaving, start), (arriving, stop)]
        keyed.sort(key=lambda event: event[0])
        self.events: list[_Event] = [*self._names(threads), *[event for _, event in keyed]]
        counters = (("live memory", "bytes", replay.memory), ("ready steps", "steps", replay.ready))
        for name, unit, points in counters:
            for now, value in points:
                self.events.append(self._event("C", name, "counter", now, args={unit: value}))

    def _event(
        self, phase: str, name: str, category: str, time: int, on: Span | None = None, **more: Any
    ) -> _Event:
        event = {"ph": phase, "name": _clean(name), "cat": category, "pid": self._pid, **more}
        event["ts"] = _microseconds(time - self._origin)
        if on is not None:
            event["tid"] = self._tids[on.thread, on.lane]
        return event

    def _complete(self, span: Span) -> _Event:
        run, step, plan = span.run, span.step, span.run.observed.table
        args: dict[str, Any] = {"run": run.number}
        if step is None:
            name, category = f"run {plan.name}", "run"
            args |= {"plan": _clean(plan.name), "executor": _clean(run.observed.executor)}
            if run.error is not None:
                name += " (failed)"
                args["error"] = _clean(run.error)
        else:
            name, category = _name(step), "control" if step.control else "step"
            args["operation"] = _clean(operation_name(step.node))
            if step.backend:
                args["backend"] = step.backend
            args["origin"] = _clean(step.node.origin)
            if step.node.device:
                args["device"] = _clean(step.node.device)
            args["inputs"] = _values(plan, step.inputs, span.inputs)
            args["outputs"] = _values(plan, step.outputs, span.outputs)
            if span.transferred:
                args["transferred bytes"] = span.transferred
        if span.state:
            args["state"] = span.state
        duration = _microseconds(span.end - span.begin)
        return self._event("X", name, category, span.begin, span, dur=duration, args=args)

    def _wait(self, wait: Span, number: int) -> tuple[_Event, _Event]:
        assert wait.step is not None
        # Perfetto puts events of one name on one track: the step is an argument.
        args = {"run": wait.run.number, "step": _clean(_name(wait.step))}
        if wait.state:
            args["state"] = wait.state
        return (
            self._event("b", "queued", "queue", wait.begin, wait, id=number, args=args),
            self._event("e", "queued", "queue", wait.end, wait, id=number),
        )

    def _life(self, life: Lifetime, number: int) -> tuple[_Event, _Event]:
        assert life.maker.step is not None
        args = {"run": life.maker.run.number, "value": _clean(life.name), "bytes": life.nbytes}
        args["step"] = _clean(_name(life.maker.step))
        name, category = "live value", "memory"  # one name for one track, as of waits
        return (
            self._event("b", name, category, life.maker.end, life.maker, id=number, args=args),
            self._event("e", name, category, life.last.end, life.maker, id=number),
        )

    def _names(self, threads: Mapping[int, str]) -> Iterator[_Event]:
        """Metadata: the names of the process and its tracks, and their order."""
        about = {"ph": "M", "pid": self._pid}
        yield {**about, "name": "process_name", "args": {"name": "penstock"}}
        for (thread, lane), tid in self._tids.items():
            name = _clean(threads.get(thread) or f"thread {tid}")
            name = f"{name} ({lane + 1})" if lane else name
            yield {**about, "name": "thread_name", "tid": tid, "args": {"name": name}}
            yield {**about, "name": "thread_sort_index", "tid": tid, "args": {"sort_index": tid}}


def _name(step: Step) -> str:
    return step.node.name or step.node.label


def _values(plan: StepTable, slots: Sequence[int], shapes: Sequence[Any]) -> list[str]:
    """Names and shapes as text; not as keys, which Perfetto reads as paths."""
    texts = []
    for slot, shape in zip(slots, shapes, strict=False):
        if isinstance(shape, tuple):
            dtype, dims = shape
            is_numpy = isinstance(dtype, np.dtype)
            text = str(TensorType(dtype, dims)) if is_numpy else f"{dtype}{list(dims)}"
        else:
            text = f"{shape} elements" if isinstance(shape, int) else shape
        if slot >= 0:
            texts.append(_clean(f"{plan.slots[slot].name}: {text}"))
    return texts


def _clean(text: str) -> str:
    """``text`` without surrogates, which JSON allows and its readers refuse."""
    return text.encode(errors="replace").decode()


def _microseconds(ns: int) -> float:
    """``ns`` in the unit of the format, rounded so that a reader recovers every nanosecond.
    Perfetto multiplies by 1000 and truncates: nested spans could overlap by one nanosecond."""
    us = ns / 1000
    return us if int(us * 1000.0) == ns else math.nextafter(us, math.inf)
