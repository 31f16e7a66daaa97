"""Traces: what is recorded of runs, and what viewers make of it.

Runs are acted out here, call by call, so that tests decide what happens when.
"""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import penstock as ps
from penstock.backends.numpy import NumpyBackend
from penstock.ir.graph import clone
from penstock.observers import trace as trace_module
from penstock.observers.base import ObservedRun, Observer
from penstock.observers.trace import Trace
from penstock.plan.builder import compile_plan
from penstock.plan.plan import Plan
from tests.support.onnx_text import model_from_text
from tests.support.traces import CHAIN, NESTED, arrows, checked, drive, names, ns, planned, slices


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
    created = [e["args"]["outputs"] for e in slices(checked(trace), "step")]
    assert created == [["s: 2 elements"], ["n: int64[]"]]


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
        """g (float[3, 4] x) => (float[3, 4] y, float[4] end)
        <float[4] s = {0, 0, 0, 0}> {
            a = Exp(x)
            end, y = Scan <num_scan_inputs = 1, body = b (float[4] before, float[4] v)
                => (float[4] w, float[4] row) { w = Mul(before, v) row = Identity(w) }> (s, a) }"""
    )
    exp, scan = plan.steps
    (product,) = scan.blocks[0].steps
    run = ObservedRun(plan, "driven")
    trace = Trace()
    trace.run_begin(run)
    trace.step_begin(run, exp, [np.ones((3, 4))])
    trace.step_end(run, exp, [np.ones((3, 4))])
    trace.step_begin(run, scan, [np.ones((3, 4))])
    for _ in range(3):
        trace.step_begin(run, product, [np.ones(4), np.ones(4)])
        trace.step_end(run, product, [np.ones(4)])
    trace.step_end(run, scan, [np.ones(4), np.ones((3, 4))])
    trace.run_end(run, None)
    a, y, w = exp.node.name, scan.node.name, product.node.name
    drawn = [arrow for arrow in arrows(checked(trace)) if arrow != (w, w)]  # from step to step
    assert drawn == [(a, y), (a, w), (a, w), (a, w)]


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
    (begin,) = [e for e in events if e["ph"] == "b" and e["cat"] == "queue"]
    (end,) = [e for e in events if e["ph"] == "e" and e["cat"] == "queue"]
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
    (wait,) = [e for e in events if e["ph"] == "b" and e["cat"] == "queue"]
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


@pytest.mark.parametrize("most", range(20))
def test_trace_keeps_the_last_events(most):
    session = ps.compile(model_from_text(CHAIN), backends=["numpy"], executor="linear")
    last, whole = Trace(most), Trace()
    for trace in (*[last] * 20, whole):
        session.run({"x": np.zeros((2, 3), np.float32)}, trace=trace)
    assert last.counts.total() <= (most + 1) // 2
    spans, wanted = slices(checked(last), "step"), slices(checked(whole), "step")
    names = [span["name"] for span in wanted]
    assert len(spans) <= most // 2
    assert not spans or spans[-1]["name"] == names[-1]


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
