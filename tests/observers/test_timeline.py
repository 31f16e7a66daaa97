"""Lives of values on the time line."""

from __future__ import annotations

import numpy as np

import penstock as ps
from penstock.backends.numpy import NumpyBackend
from penstock.ir.graph import clone
from penstock.observers.trace import Trace
from penstock.plan.builder import compile_plan
from tests.support.onnx_text import model_from_text
from tests.support.traces import NESTED, checked, drive, ns, planned, slices


def lives(events):
    """The begin and the end of each live value, by name and run."""
    begun = {e["id"]: e for e in events if e["ph"] == "b" and e["name"] == "live value"}
    ended = {e["id"]: e for e in events if e["ph"] == "e" and e["name"] == "live value"}
    assert begun.keys() == ended.keys()
    return [(begin["args"], begin["ts"], ended[i]["ts"]) for i, begin in begun.items()]


def test_values_live_from_their_step_to_the_end_of_their_last_reader():
    text = "g (float[8] x) => (float[8] y) { a = Exp(x) b = Neg(a) c = Sin(b) y = Add(c, a) }"
    graph = clone(ps.load(model_from_text(text)).graph)
    trace = Trace()
    drive(compile_plan(graph, [NumpyBackend()]), trace, np.ones(8, np.float32))
    events = checked(trace)
    step = {e["args"]["operation"]: e for e in slices(events, "step")}
    (run,) = slices(events, "run")
    found = {args["value"]: (begin, end) for args, begin, end in lives(events)}
    ends = {name: ns(e["ts"]) + ns(e["dur"]) for name, e in step.items()}
    assert found.keys() == {"a", "b", "c", "y"}
    last = {
        "a": ends["Add"],
        "b": ends["Sin"],
        "c": ends["Add"],
        "y": ns(run["ts"]) + ns(run["dur"]),
    }
    maker = {"a": "Exp", "b": "Neg", "c": "Sin", "y": "Add"}
    for name, (begin, end) in found.items():
        assert (ns(begin), ns(end)) == (ends[maker[name]], last[name])
    assert {args["bytes"] for args, _, _ in lives(events)} == {32}


def test_values_of_loops_live_once_an_iteration():
    trace = Trace()
    drive(planned(NESTED), trace, np.ones(4, np.float32), 3, True)
    values = [args["value"] for args, _, _ in lives(checked(trace))]
    assert values.count("u") == 3
