"""Traces: what is recorded of runs, on one thread and on several, and what viewers make of it.

Runs are acted out here, call by call, so that tests decide which thread does what, and when.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import penstock as ps
from penstock.backends.numpy import NumpyBackend
from penstock.ir.graph import clone
from penstock.ir.op import array_of
from penstock.observers import trace as trace_module
from penstock.observers.base import ObservedRun, Observer
from penstock.observers.trace import Trace
from penstock.passes.pipeline import optimize
from penstock.plan.builder import compile_plan
from penstock.plan.plan import Plan, SlotKind, Step
from tests.support.onnx_text import OPSET, graph_from_text, model_from_text


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


@pytest.fixture
def clock(monkeypatch):
    return Clock(monkeypatch)


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


@pytest.fixture
def threads():
    made = Threads()
    yield made
    for pool in made.pools.values():
        pool.shutdown()


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


# One thread.


def test_trace_counts_completed_steps():
    plan = planned(NESTED)
    trace = Trace()
    drive(plan, trace, np.ones(4, np.float32), 3, True)
    by_output = {step.node.outputs[0].name: step.node.name for step in plan.walk()}
    counts = {name: trace.counts[label] for name, label in by_output.items()}
    assert counts == {"a": 1, "r": 1, "u": 3, "w": 3, "p": 3, "q": 0, "y": 1}
    assert "q" not in trace.counts
    assert trace.counts["no such node"] == 0
    drive(plan, trace, np.ones(4, np.float32), 2, False)
    assert {name: trace.counts[label] for name, label in by_output.items()} == {
        "a": 2,
        "r": 2,
        "u": 5,
        "w": 5,
        "p": 3,
        "q": 2,
        "y": 2,
    }


def test_trace_counts_nodes_by_name():
    model = model_from_text(
        """g (float[2] x) => (float[2] y) { [first] a = Exp(x) [second] y = Neg(a) }"""
    )
    graph = clone(ps.load(model).graph)
    trace = Trace()
    drive(compile_plan(graph, [NumpyBackend()]), trace, np.ones(2, np.float32))
    assert trace.counts == {"first": 1, "second": 1}
    assert repr(trace) == "Trace(1 runs, 2 steps)"


def test_trace_nests_steps_in_runs_and_control_flow():
    trace = Trace()
    drive(planned(NESTED), trace, np.ones(4, np.float32), 2, True)
    events = checked(trace)
    (run,) = slices(events, "run")
    assert run["name"] == "run g"
    assert run["args"] == {"run": 1, "plan": "g", "executor": "driven"}
    depth = []
    ends: list[int] = []
    for event in slices(events):
        while ends and ends[-1] <= ns(event["ts"]):
            ends.pop()
        depth.append((len(ends), event["args"].get("operation", "run")))
        ends.append(ns(event["ts"]) + ns(event["dur"]))
    assert depth == [
        *[(0, "run"), (1, "Exp"), (1, "Loop")],
        *[(2, "Add"), (2, "If"), (3, "Neg"), (2, "Add"), (2, "If"), (3, "Neg")],
        (1, "Abs"),
    ]
    assert {e["cat"] for e in slices(events) if e["args"].get("operation") in ("If", "Loop")} == {
        "control"
    }
    assert len({e["tid"] for e in slices(events)}) == 1


def test_trace_events_list_inputs_and_outputs():
    trace = Trace()
    drive(planned(CHAIN), trace, np.ones((2, 3), np.float32))
    exp, *_, mul = slices(checked(trace), "step")
    assert exp["args"]["operation"] == "Exp"
    assert "Exp" in exp["args"]["origin"] or "a" in exp["args"]["origin"]
    assert exp["args"]["inputs"] == ["x: float32[2, 3]"]
    assert exp["args"]["outputs"] == ["a: float32[2, 3]"]
    assert mul["args"]["inputs"] == ["b: float32[3, 2]", "t: float32[3, 2]"]


def test_trace_records_shapes_of_call_and_no_tensors():
    plan = planned("g (float[N] x) => (float[M] y) { a = NonZero(x) y = Cast<to = 1>(a) }")
    trace = Trace()
    x = np.array([0, 1, 1], np.float32)
    drive(plan, trace, x)
    events = slices(checked(trace), "step")
    assert events[0]["args"]["outputs"] == ["a: int64[1, 2]"]
    held = [part for record in trace._records for part in record]
    held += [part for detail in held if isinstance(detail, list) for part in detail]
    held += [part for detail in held if isinstance(detail, tuple) for part in detail]
    assert not any(isinstance(part, np.ndarray) for part in held)


def test_trace_describes_values_that_are_not_tensors():
    plan = planned(
        "g (float[2] x) => (int64 n) { s = SequenceConstruct(x, x) n = SequenceLength(s) }"
    )
    trace = Trace()
    drive(plan, trace, np.ones(2, np.float32))
    made = [e["args"]["outputs"] for e in slices(checked(trace), "step")]
    assert made == [["s: 2 elements"], ["n: int64[]"]]


def test_trace_arrows_follow_views():
    #  x -> Exp -> a -> (Transpose: no step) -> Neg -> b -> Mul <- t
    plan = planned(CHAIN)
    assert plan.views == 1
    trace = Trace()
    drive(plan, trace, np.ones((2, 3), np.float32))
    events = checked(trace)
    label = {name: step.node.name for name, step in names(plan).items()}
    assert sorted(arrows(events)) == sorted(
        [(label["a"], label["b"]), (label["b"], label["y"]), (label["a"], label["y"])]
    )
    assert {e["name"] for e in events if e["ph"] == "s"} == {"t", "b"}


def test_trace_arrows_follow_carried_values():
    plan = planned(NESTED)
    trace = Trace()
    drive(plan, trace, np.ones(4, np.float32), 2, True)
    label = {name: step.node.name for name, step in names(plan).items()}
    a, r, u, w, p, y = (label[name] for name in "aruwpy")
    assert sorted(arrows(checked(trace))) == sorted(
        [
            *[(a, r), (a, u), (u, p)],  # the first iteration reads what stood before the loop
            *[(w, u), (u, p)],  # the second what the If of the first has made
            (r, y),
        ]
    )


def test_trace_arrows_of_swapped_values_come_from_before_the_loop():
    #  v, u = u, v: neither is made within, and each comes from the other
    plan = planned(
        """g (float[4] x, int64 n) => (float[4] y, float[4] z, float[M, 4] k) {
            a = Exp(x) b = Sin(x)
            y, z, k = Loop (n, , a, b) <body = b
                (int64 i, bool g, float[4] v, float[4] u) => (bool d, float[4] w, float[4] q, float[4] s)
                { d = Identity(g) w = Identity(u) q = Identity(v) s = Add(u, v) }> }"""
    )
    run = ObservedRun(plan, "driven")
    trace = Trace()
    trace.run_begin(run)
    for step in plan.walk():
        trace.step_begin(run, step, [None] * len(step.inputs))
        if not step.control:
            trace.step_end(run, step, [None] * len(step.outputs))
    trace.run_end(run, None)
    label = {name: step.node.name for name, step in names(plan).items()}
    makers = {start for start, end in arrows(checked(trace)) if end == label["s"]}
    assert makers
    assert makers <= {label["a"], label["b"]}


def test_trace_arrows_follow_scan_inputs_into_body():
    plan = planned(
        """g (float[3, 4] x) => (float[3, 4] y) {
            a = Exp(x)
            y = Scan <num_scan_inputs = 1, body = b (float[4] v) => (float[4] w) { w = Neg(v) }> (a) }"""
    )
    exp, scan = plan.steps
    (neg,) = scan.blocks[0].steps
    run = ObservedRun(plan, "driven")
    trace = Trace()
    trace.run_begin(run)
    trace.step_begin(run, exp, [np.ones((3, 4))])
    trace.step_end(run, exp, [np.ones((3, 4))])
    trace.step_begin(run, scan, [np.ones((3, 4))])
    for _ in range(3):
        trace.step_begin(run, neg, [np.ones(4)])
        trace.step_end(run, neg, [np.ones(4)])
    trace.step_end(run, scan, [np.ones((3, 4))])
    trace.run_end(run, None)
    a, y, w = exp.node.name, scan.node.name, neg.node.name
    assert arrows(checked(trace)) == [(a, y), (a, w), (a, w), (a, w)]


# Time.


def test_trace_times_are_in_microseconds(clock):
    plan = planned("g (float[2] x) => (float[2] y) { y = Neg(x) }")
    (neg,) = plan.steps
    run = ObservedRun(plan, "driven")
    trace = Trace()
    x = np.ones(2, np.float32)
    clock.at(10_000, trace.run_begin, run)
    clock.at(11_500, trace.step_ready, run, neg)
    clock.at(13_001, trace.step_begin, run, neg, [x])
    clock.at(14_000, trace.transfer, run, neg, 300)
    clock.at(14_100, trace.transfer, run, neg, 20)
    clock.at(15_006, trace.step_end, run, neg, [x])
    clock.at(16_000, trace.run_end, run, None)
    events = checked(trace)
    whole, step = slices(events)
    assert (whole["ts"], whole["dur"]) == (0, 6)
    assert (step["ts"], step["dur"]) == (pytest.approx(3.001), pytest.approx(2.005))
    assert (ns(step["ts"]), ns(step["dur"])) == (3001, 2005)
    assert step["args"]["transferred bytes"] == 320
    (begin,) = [e for e in events if e["ph"] == "b"]
    (end,) = [e for e in events if e["ph"] == "e"]
    assert (begin["ts"], end["ts"]) == (1.5, step["ts"])
    assert begin["cat"] == "queue" != step["cat"]
    assert begin["args"] == {"run": 1, "step": neg.node.name}
    ready = [(e["ts"], e["args"]["steps"]) for e in events if e["name"] == "ready steps"]
    assert ready == [(1.5, 1), (step["ts"], 0)]


@given(st.integers(0, 10**15))
def test_trace_times_keep_every_nanosecond(time):
    us = trace_module._microseconds(time)
    assert ns(us) == time
    assert us == pytest.approx(time / 1000, rel=1e-15)


def test_trace_keeps_order_of_steps_without_duration(clock):
    plan = planned(NESTED)
    trace = Trace()
    drive(plan, trace, np.ones(4, np.float32), 2, True)  # the clock stands still
    events = checked(trace)
    assert [e["args"]["operation"] for e in slices(events)[1:]] == [
        *["Exp", "Loop", "Add", "If", "Neg", "Add", "If", "Neg", "Abs"]
    ]


def test_trace_counts_memory_over_all_runs(clock):
    plan = planned("g (float[2] x) => (float[2] y) { y = Neg(x) }")
    trace = Trace()
    first, second = ObservedRun(plan, "a"), ObservedRun(plan, "b")
    clock.at(0, trace.run_begin, first)
    clock.at(1000, trace.allocation, first, 100)
    clock.at(2000, trace.run_begin, second)
    clock.at(3000, trace.allocation, second, 1000)
    clock.at(4000, trace.allocation, first, -40)
    clock.at(5000, trace.run_end, first, None)  # what it has not given back leaves with it
    clock.at(6000, trace.allocation, second, -1000)
    clock.at(7000, trace.run_end, second, None)
    memory = [(e["ts"], e["args"]["bytes"]) for e in checked(trace) if e["name"] == "live memory"]
    assert memory == [(1, 100), (3, 1100), (4, 1060), (5, 1000), (6, 0)]


# Runs that fail, and traces that end early.


def test_trace_marks_steps_in_progress_when_run_fails(clock):
    plan = planned(NESTED)
    a, loop = plan.steps[:2]
    add = loop.blocks[0].steps[0]
    run = ObservedRun(plan, "driven")
    trace = Trace()
    x = np.ones(4, np.float32)
    clock.at(0, trace.run_begin, run)
    clock.at(1001, trace.step_begin, run, a, [x])
    clock.at(2002, trace.step_end, run, a, [x])
    clock.at(3003, trace.step_begin, run, loop, [x, None, x])
    clock.at(3500, trace.step_ready, run, plan.steps[2])
    clock.at(4004, trace.step_begin, run, add, [x, x])
    clock.at(9009, trace.run_end, run, ValueError("no \ud800 luck"))
    events = checked(trace)
    (whole,) = slices(events, "run")
    assert whole["name"] == "run g (failed)"
    assert whole["args"]["error"] == "ValueError: no ? luck"
    states = {e["args"].get("operation"): e["args"].get("state") for e in slices(events)}
    assert states == {None: "failed", "Exp": None, "Loop": "failed", "Add": "failed"}
    assert {ns(e["ts"]) + ns(e["dur"]) for e in slices(events) if "state" in e["args"]} == {9009}
    (wait,) = [e for e in events if e["ph"] == "b"]
    assert wait["args"]["state"] == "never began"
    assert sum(trace.counts.values()) == 1


def test_trace_keeps_text_of_error_only():
    plan = planned("g (float[2] x) => (float[2] y) { y = Neg(x) }")
    trace = Trace()
    drive_failing(plan, trace)
    held = [part for record in trace._records for part in record]
    assert not any(isinstance(part, BaseException) for part in held)
    (run,) = slices(checked(trace), "run")
    assert run["args"]["error"] == "ZeroDivisionError: at 1/0"


def drive_failing(plan: Plan, observer: Observer) -> None:
    run = ObservedRun(plan, "driven")
    observer.run_begin(run)
    observer.step_begin(run, plan.steps[0], [None])
    observer.run_end(run, ZeroDivisionError("at 1/0"))


def test_trace_can_be_read_during_runs():
    plan = planned(CHAIN)
    run = ObservedRun(plan, "driven")
    trace = Trace()
    trace.run_begin(run)
    trace.allocation(run, 10)
    trace.step_begin(run, plan.steps[0], [None])
    (whole, step) = slices(checked(trace))
    assert whole["args"]["state"] == step["args"]["state"] == "not ended"


def test_empty_trace_is_valid():
    assert checked(Trace()) == [
        {
            "ph": "M",
            "name": "process_name",
            "pid": checked(Trace())[0]["pid"],
            "args": {"name": "penstock"},
        }
    ]
    assert Trace().counts == {}


def test_trace_ignores_ends_of_cleared_events():
    plan = planned(CHAIN)
    run = ObservedRun(plan, "driven")
    trace = Trace()
    trace.run_begin(run)
    trace.allocation(run, 100)
    trace.step_begin(run, plan.steps[0], [None])
    trace.clear()
    assert trace.counts == {}
    trace.step_end(run, plan.steps[0], [None])
    trace.allocation(run, -100)
    for step in plan.steps[1:]:
        trace.step_begin(run, step, [None] * len(step.inputs))
        trace.step_end(run, step, [None])
    trace.run_end(run, None)
    events = checked(trace)
    assert len(slices(events, "step")) == len(plan.steps) - 1
    trace.clear()
    trace.run_end(run, None)
    assert slices(checked(trace)) == []


# Several threads.


def test_trace_records_concurrent_runs():
    plan = planned(NESTED)
    trace = Trace()
    start = threading.Barrier(4)

    def work() -> None:
        start.wait()
        for _ in range(5):
            drive(plan, trace, np.ones(4, np.float32), 3, True, ready=True)

    workers = [threading.Thread(target=work, name=f"worker-{i}") for i in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    events = checked(trace)
    assert len(slices(events, "run")) == 20
    assert sorted(e["args"]["run"] for e in slices(events, "run")) == list(range(1, 21))
    assert sum(trace.counts.values()) == 20 * 12
    tracks = [e["args"]["name"] for e in events if e["name"] == "thread_name"]
    assert sorted(tracks) == [f"worker-{i}" for i in range(4)]


TWO = """g (float[4] x) => (float[4] y) { a = Exp(x) b = Sin(x) y = Add(a, b) }"""


def test_trace_puts_steps_on_tracks_of_their_threads(clock, threads):
    plan = planned(TWO)
    exp, sin, add = plan.steps
    x = np.ones(4, np.float32)
    run = ObservedRun(plan, "parallel")
    trace = Trace()
    clock.at(0, trace.run_begin, run)
    for step in (exp, sin):
        clock.at(100, trace.step_ready, run, step)
    for name, step, now in (("one", exp, 1000), ("two", sin, 1500)):
        clock.now = now
        threads.on(name, trace.step_begin, run, step, [x])
    for name, step, now in (("one", exp, 3000), ("two", sin, 4000)):
        clock.now = now
        threads.on(name, trace.step_end, run, step, [x])
    threads.on("two", trace.step_ready, run, add)
    clock.now = 5000
    threads.on("one", trace.step_begin, run, add, [x, x])
    clock.now = 6000
    threads.on("one", trace.step_end, run, add, [x])
    clock.at(7000, trace.run_end, run, None)
    events = checked(trace)
    tracks = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
    of = {e["args"]["operation"]: tracks[e["tid"]] for e in slices(events, "step")}
    assert of == {"Exp": "one", "Sin": "two", "Add": "one"}
    assert sorted(arrows(events)) == sorted((step.node.name, add.node.name) for step in (exp, sin))
    ready = [(e["ts"], e["args"]["steps"]) for e in events if e["name"] == "ready steps"]
    assert ready == [(0.1, 1), (0.1, 2), (1, 1), (1.5, 0), (4, 1), (5, 0)]


def test_trace_puts_loop_that_changes_thread_on_own_track(clock, threads):
    #  one:  Loop begins .. Exp, which is not in it ..
    #  two:                                 .. Add, in the loop .. Loop ends
    plan = planned(NESTED)
    exp, loop, _ = plan.steps
    add = loop.blocks[0].steps[0]
    x = np.ones(4, np.float32)
    run = ObservedRun(plan, "frames")
    trace = Trace()
    calls = [
        ("one", trace.run_begin, run),
        ("one", trace.step_begin, run, loop, [x, None, x]),
        ("one", trace.step_begin, run, exp, [x]),
        ("two", trace.step_begin, run, add, [x, x]),
        ("one", trace.step_end, run, exp, [x]),
        ("two", trace.step_end, run, add, [x]),
        ("two", trace.step_end, run, loop, [x]),
        ("two", trace.run_end, run, None),
    ]
    for now, (name, *call) in enumerate(calls):
        clock.now = 1000 * now
        threads.on(name, *call)
    events = checked(trace)
    tracks = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
    of = {e["args"].get("operation"): tracks[e["tid"]] for e in slices(events)}
    assert of == {None: "one (2)", "Loop": "one (3)", "Exp": "one", "Add": "two"}


def test_trace_keeps_steps_of_other_runs_out_of_a_step(clock):
    plan = planned(NESTED)
    exp, loop, _ = plan.steps
    x = np.ones(4, np.float32)
    first, second = ObservedRun(plan, "frames"), ObservedRun(plan, "frames")
    trace = Trace()
    calls = [
        (trace.run_begin, first),
        (trace.step_begin, first, loop, [x, None, x]),
        (trace.step_begin, second, exp, [x]),
        (trace.step_end, second, exp, [x]),
        (trace.step_end, first, loop, [x]),
        (trace.run_end, first, None),
        (trace.run_end, second, None),
    ]
    for now, call in enumerate(calls):
        clock.at(1000 * now, *call)
    events = checked(trace)
    assert len({e["tid"] for e in slices(events)}) == 2


def test_trace_matches_concurrent_iterations_by_thread(clock, threads):
    plan = planned(NESTED)
    add = plan.steps[1].blocks[0].steps[0]
    x = np.ones(4, np.float32)
    run = ObservedRun(plan, "frames")
    trace = Trace()
    clock.at(0, trace.run_begin, run)
    calls = [
        ("one", trace.step_begin, run, add, [x, x]),
        ("two", trace.step_begin, run, add, [x, x]),
        ("one", trace.step_end, run, add, [x]),
        ("two", trace.step_end, run, add, [x]),
    ]
    for now, (name, *call) in enumerate(calls, 1):
        clock.now = 1000 * now
        threads.on(name, *call)
    clock.at(9000, trace.run_end, run, None)
    assert [(e["ts"], e["dur"]) for e in slices(checked(trace), "step")] == [(1, 2), (2, 2)]


PLAN = planned(NESTED)


@settings(max_examples=200)
@given(data=st.data())
def test_trace_of_any_order_of_events_is_valid(data):
    """Steps of several runs begin and end in any order, on any threads, at any times."""
    trace = Trace()
    steps = list(PLAN.walk())
    fake = {"now": 0, "thread": 1}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trace_module, "perf_counter_ns", lambda: fake["now"])
        patch.setattr(trace_module, "get_ident", lambda: fake["thread"])
        runs = [ObservedRun(PLAN, "any") for _ in range(data.draw(st.integers(1, 3)))]
        working: list[tuple[ObservedRun, Step]] = []
        ended = 0
        for run in runs:
            trace.run_begin(run)
        for _ in range(data.draw(st.integers(0, 30))):
            fake["now"] += data.draw(st.integers(0, 3))
            fake["thread"] = data.draw(st.integers(1, 3))
            run = data.draw(st.sampled_from(runs))
            step = data.draw(st.sampled_from(steps))
            match data.draw(st.integers(0, 4)):
                case 0:
                    trace.step_ready(run, step)
                case 1:
                    trace.step_begin(run, step, [None] * len(step.inputs))
                    working.append((run, step))
                case 2 if working:
                    run, step = working.pop(data.draw(st.integers(0, len(working) - 1)))
                    trace.step_end(run, step, [None] * len(step.outputs))
                    ended += 1
                case 3:
                    trace.allocation(run, data.draw(st.integers(-50, 50)))
                case _:
                    trace.transfer(run, step, 8)
        for run in runs:
            trace.run_end(run, data.draw(st.none() | st.just(OSError("gone"))))
    events = checked(trace)
    assert len(slices(events, "run")) == len(runs)
    assert len(slices(events)) == len(runs) + ended + len(working)
    assert sum(trace.counts.values()) == ended


# Files.


@pytest.mark.parametrize("name", ['say "#"\\', "é\n\t\0", "\ud800", "NaN", "a.b[0]", "{"])
def test_trace_writes_any_name(tmp_path, name):
    plan = planned(CHAIN)
    for step in plan.steps:
        step.node.name = name
        step.node.origin = f"{name} in m.onnx"
    trace = Trace()
    drive(plan, trace, np.ones((2, 3), np.float32))
    path = tmp_path / "run.json"
    trace.save(path)
    text = path.read_bytes()
    assert max(text) < 128
    assert all(byte >= 32 or byte == 10 for byte in text)

    def refuse(constant: str) -> None:
        raise AssertionError(constant)

    document = json.loads(text, parse_constant=refuse)
    assert document == json.loads(json.dumps(trace.to_dict()))
    shown = name.replace("\ud800", "?")
    assert {e["name"] for e in slices(document["traceEvents"], "step")} == {shown}
    assert trace.counts == {name: 3}


def test_recording_a_trace_is_cheap():
    """Counted, not timed: a step is two records of a fixed size, whatever its tensors hold."""
    plan = planned(CHAIN)
    trace = Trace()
    drive(plan, trace, np.ones((2, 3), np.float32))
    assert len(trace._records) == 2 * 3 + 4
