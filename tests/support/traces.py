"""Runs acted out for observers, and what every trace must be."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from penstock.backends.numpy import NumpyBackend
from penstock.ir.graph import clone
from penstock.ir.kernel import array_of
from penstock.observers import trace as trace_module
from penstock.observers.base import ObservedRun, Observer
from penstock.observers.trace import Trace
from penstock.passes.pipeline import optimize
from penstock.plan.builder import compile_plan
from penstock.plan.plan import Plan, SlotKind, Step
from tests.support.onnx_text import OPSET, graph_from_text

ROOTS = "g (float[2, 3] x) => (float[2, 3] y) { a = Abs(x) b = Sqrt(a) y = Neg(b) }"
SQUARES = np.array([[0, 1, 4], [9, 16, 25]], np.float32)


def planned(text: str, opset: int = OPSET) -> Plan:
    graph = clone(graph_from_text(text, opset=opset))
    optimize(graph)
    return compile_plan(graph, [NumpyBackend()])


def drive(plan: Plan, observer: Observer, *feeds: Any, ready: bool = False) -> list[Any]:
    """Run ``plan`` on this thread, telling ``observer`` as an executor does."""
    run = ObservedRun(plan, "driven")
    values: dict[int, Any] = dict(zip(plan.inputs, map(np.asarray, feeds), strict=True))

    def read(slot: int) -> Any:
        if slot < 0:
            return None
        known = plan.slots[slot]
        if known.kind is SlotKind.CONSTANT:
            return known.const
        if known.kind is SlotKind.ALIAS:
            kind = known.type
            return np.ndarray(
                kind.dims, kind.dtype, values[known.base], known.offset, known.strides
            )
        return values[slot]

    def step_outputs(step: Step, inputs: list[Any]) -> Sequence[Any]:
        if step.node.op.name == "If":
            block = step.blocks[not inputs[0]]
            perform(block.steps)
            return [read(slot) for slot in block.outputs]
        if step.node.op.name == "Loop":
            (block,) = step.blocks
            carried = inputs[2:]
            for i in range(int(inputs[0])):
                entering = (np.array(i), np.array(True), *carried)
                values.update(zip(block.inputs, entering, strict=True))
                perform(block.steps)
                carried = [read(slot) for slot in block.outputs[1 : 1 + len(carried)]]
            return carried
        with np.errstate(all="ignore"):
            result = step.kernel(*inputs)
        return [array_of(result)] if len(step.outputs) == 1 else result

    def perform(steps: Sequence[Step]) -> None:
        for step in steps:
            if ready:
                observer.step_ready(run, step)
            inputs = [read(slot) for slot in step.inputs]
            observer.step_begin(run, step, inputs)
            outputs = step_outputs(step, inputs)
            observer.step_end(run, step, outputs)
            values.update(zip(step.outputs, outputs, strict=True))

    observer.run_begin(run)
    try:
        observer.allocation(run, 256)
        perform(plan.steps)
        observer.allocation(run, -256)
    except BaseException as error:
        observer.run_end(run, error)
        raise
    observer.run_end(run, None)
    return [read(slot) for slot in plan.outputs]


CHAIN = """g (float[2, 3] x) => (float[3, 2] y) {
    a = Exp(x) t = Transpose(a) b = Neg(t) y = Mul(b, t) }"""

NESTED = """g (float[4] x, int64 n, bool c) => (float[4] y) {
    a = Exp(x)
    r = Loop (n, , a) <body = b (int64 i, bool g, float[4] v) => (bool d, float[4] w) {
        d = Identity(g)
        u = Add(v, x)
        w = If (c) <then_branch = t () => (float[4] p) { p = Neg(u) },
                    else_branch = e () => (float[4] q) { q = Sin(u) }> }>
    y = Abs(r) }"""


def names(plan: Plan) -> dict[str, Step]:
    return {step.node.outputs[0].name: step for step in plan.walk()}


class Clock:
    """The time, in nanoseconds, as tests have it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0
        monkeypatch.setattr(trace_module, "perf_counter_ns", lambda: self.now)

    def at(self, now: int, call: Callable[..., None], *arguments: Any) -> None:
        self.now = now
        call(*arguments)


class Threads:
    """Threads that do one thing at a time, when they are told."""

    def __init__(self) -> None:
        self.pools: dict[str, ThreadPoolExecutor] = {}

    def on(self, name: str, call: Callable[..., Any], *arguments: Any) -> Any:
        pool = self.pools.get(name)
        if pool is None:
            pool = self.pools[name] = ThreadPoolExecutor(1)

            def rename() -> None:
                threading.current_thread().name = name

            pool.submit(rename).result()
        return pool.submit(call, *arguments).result()


# What every trace must be.


def ns(microseconds: float) -> int:
    """A time as Perfetto reads it."""
    return int(microseconds * 1000.0)


def checked(trace: Trace) -> list[dict[str, Any]]:
    """The events of a trace, which is what its readers need it to be."""
    document = json.loads(json.dumps(trace.to_dict(), allow_nan=False))
    assert document["displayTimeUnit"] == "ns"
    events = document["traceEvents"]
    for event in events:
        assert {"ph", "name", "pid"} <= event.keys()
        assert isinstance(event["name"], str)
        assert event["ph"] == "M" or event["ts"] >= 0
        assert 0 < event.get("tid", 1) < 2**31
    named = {e["tid"] for e in events if e["name"] == "thread_name"}
    assert {e["tid"] for e in events if "tid" in e} == named
    timed = [e["ts"] for e in events if e["ph"] not in "MC"]
    assert timed == sorted(timed)
    check_nesting(events)
    check_waits(events)
    check_arrows(events)
    check_counters(events)
    return events


def check_nesting(events: Sequence[dict[str, Any]]) -> None:
    """On one track, events nest or stand apart, and hold only what is their own."""
    stacks: dict[int, list[dict[str, Any]]] = {}
    for event in events:
        if event["ph"] != "X":
            continue
        begin, end = ns(event["ts"]), ns(event["ts"]) + ns(event["dur"])
        assert begin <= end
        stack = stacks.setdefault(event["tid"], [])
        while stack and stack[-1]["end"] <= begin:
            stack.pop()
        if stack:
            assert end <= stack[-1]["end"], "events on a track overlap"
            assert event["cat"] == "run" or event["args"]["run"] == stack[-1]["run"]
            assert stack[-1]["cat"] != "step" or event["cat"] == "run"
        stack.append({"end": end, "run": event["args"]["run"], "cat": event["cat"]})


def check_waits(events: Sequence[dict[str, Any]]) -> None:
    begun: dict[int, dict[str, Any]] = {}
    for event in events:
        if event["ph"] == "b":
            assert event["id"] not in begun
            begun[event["id"]] = event
        elif event["ph"] == "e":
            begin = begun[event["id"]]
            assert begin.pop("open", True)
            begin["open"] = False
            assert (event["name"], event["cat"]) == (begin["name"], begin["cat"])
            assert begin["ts"] <= event["ts"]
    assert all("open" in event for event in begun.values())


def check_arrows(events: Sequence[dict[str, Any]]) -> None:
    starts: dict[int, dict[str, Any]] = {}
    ends: dict[int, dict[str, Any]] = {}
    for event in events:
        if event["ph"] in "sf":
            kind = starts if event["ph"] == "s" else ends
            assert event["id"] not in kind
            kind[event["id"]] = event
    assert starts.keys() == ends.keys()
    for number, start in starts.items():
        end = ends[number]
        assert end["bp"] == "e"
        assert (start["name"], start["cat"]) == (end["name"], end["cat"])
        assert start["ts"] <= end["ts"]


def check_counters(events: Sequence[dict[str, Any]]) -> None:
    last: dict[str, tuple[float, int]] = {}
    for event in events:
        if event["ph"] == "C":
            ((unit, value),) = event["args"].items()
            assert value >= 0
            assert last.get(unit, (0, 0))[0] <= event["ts"]
            last[unit] = (event["ts"], value)
    assert all(value == 0 for _, value in last.values())


def slices(events: Sequence[dict[str, Any]], category: str = "") -> list[dict[str, Any]]:
    return [e for e in events if e["ph"] == "X" and (not category or e["cat"] == category)]


def arrows(events: Sequence[dict[str, Any]]) -> list[tuple[str, str]]:
    """Which slices the arrows join in Perfetto, which ties them to the last to begin on a track."""
    top: dict[int, list[tuple[int, str]]] = {}
    tied: dict[int, list[str]] = {}
    for event in events:
        stack = top.setdefault(event.get("tid", 0), [])
        if event["ph"] == "X":
            while stack and stack[-1][0] <= ns(event["ts"]):
                stack.pop()
            stack.append((ns(event["ts"]) + ns(event["dur"]), event["name"]))
        elif event["ph"] in "sf":
            tied.setdefault(event["id"], []).append(stack[-1][1])
    return [(start, end) for start, end in tied.values()]


def observe(observer: Observer, *outputs: object) -> int:
    """Let ``observer`` see ``outputs`` as values of y, one run after the other. Returns the number
    of steps that it let pass."""
    plan = planned("g (float[2] x) => (float[2] y) { y = Neg(x) }")
    (step,) = plan.steps
    for output in outputs:
        run = ObservedRun(plan, "driven")
        observer.run_begin(run)
        observer.step_begin(run, step, [np.zeros(1, np.float32)])
        observer.step_end(run, step, [output])
        observer.run_end(run, None)
    return len(outputs)
