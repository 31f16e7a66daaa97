"""Traces of runs on several threads: tracks, arrows and waits.

Runs are acted out here, call by call, so that tests decide which thread does what, and when.
"""

from __future__ import annotations

import threading

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.observers import trace as trace_module
from penstock.observers.base import ObservedRun
from penstock.observers.trace import Trace
from penstock.plan.plan import Step
from tests.support.sweeps import examples
from tests.support.traces import NESTED, arrows, checked, drive, planned, slices


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


@examples(3)
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
