"""Nodes on several devices of a backend: one stream on each, and signals between streams alone.

The devices (``device_backend.py``) are late at random: a stream that does not wait for an input, or
a reader that does not wait for all streams of what it reads, fails.
"""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import penstock as ps
from penstock.build import GraphBuilder
from penstock.plan.tasks import Signals
from tests.support.device_backend import DelayedBackend
from tests.support.expert import with_expert
from tests.support.onnx_text import compile_text

X = np.linspace(-1, 1, 16, dtype=np.float32).reshape(4, 4)
# The devices of operations; the sum is on both, as an all-reduce is.
ON = {"Sin": (0,), "Cos": (1,), "Tanh": (1,), "Exp": (0,), "Sum": (0, 1)}
#   x -+- Sin (0) -+           +- Exp (0)
#      |           +- Sum (0,1)+
#      +- Cos (1) -+           +- Tanh (1)
ALL_REDUCE = """g (float[4, 4] x) => (float[4, 4] y, float[4, 4] z) {
    a = Sin(x) b = Cos(x) s = Sum(a, b) y = Exp(s) z = Tanh(s) }"""


def compiled(source, on=ON, executor="streams", **options) -> ps.Session:
    backend = DelayedBackend(operations=set(on), on=on, most=5e-4)
    options |= {"backends": [backend, "numpy"], "place": options.pop("place", {})}
    if isinstance(source, str):
        options["place"] = {name: "late" for name in on if f"{name}(" in source}
        return compile_text(source, executor=executor, **options)
    return ps.compile(source, executor=executor, **with_expert(options))


def expected(text: str, feeds: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    return compile_text(text, executor="linear", backends=["numpy"]).run(feeds)


def signals_of(session: ps.Session) -> Signals:
    signals = session.inspect.executor.tasks.signals
    for step, behind in signals.behind.items():
        for stream, signal in behind:
            assert stream in signals.on[step]
            assert signals.events[signal] != stream, "a stream waits for a signal of its own"
    return signals


def waits(session: ps.Session) -> dict[str, list[tuple[int, int]]]:
    """By operation on devices: each stream that waits, and the stream for which it waits."""
    signals = signals_of(session)
    return {
        step.node.op.name: [(s, signals.events[k]) for s, k in signals.behind.get(step, ())]
        for step in signals.on
    }


def test_node_on_two_devices_has_a_stream_on_each_and_waits_for_the_other_alone():
    session = compiled(ALL_REDUCE)
    for _ in range(5):
        results = session.run({"x": X})
        for name, wanted in expected(ALL_REDUCE, {"x": X}).items():
            np.testing.assert_allclose(results[name], wanted, rtol=1e-6)
    signals = signals_of(session)
    on = {step.node.op.name: signals.on[step] for step in signals.on}
    (first,), (second,) = on["Sin"], on["Cos"]
    assert {signals.devices[first], signals.devices[second]} == {"late", "late:1"}
    assert (on["Exp"], on["Tanh"]) == ((first,), (second,))
    assert sorted(on["Sum"]) == sorted([first, second])
    waiting = waits(session)
    assert sorted(waiting["Sum"]) == sorted([(first, second), (second, first)])
    # Later nodes wait for the part of the sum on the other device, and for nothing else.
    assert waiting["Exp"] == [(first, second)]
    assert waiting["Tanh"] == [(second, first)]
    # Each kernel is called once, through both streams.
    assert session.source.count(".call, sum_") == 1


def test_schedule_shows_a_node_on_each_of_its_streams():
    session = compiled(ALL_REDUCE)
    session.run({"x": X})
    (chart,) = session.inspect.schedule()
    lanes = [[bar.operation for bar in bars] for bars in chart.streams]
    assert [sum("Sum" in name for name in lane) for lane in lanes].count(1) == 2
    assert sorted(set(chart.devices)) == ["", "late", "late:1"]
    own = [{k for bar in bars for k in bar.emits} for bars in chart.streams]
    waited = [{k for bar in bars for k in bar.waits} for bars in chart.streams]
    assert all(a.isdisjoint(b) for a, b in zip(own, waited, strict=True))


def test_node_on_two_devices_waits_on_both_for_a_node_on_one():
    # Broadcast: the second device has run nothing before.
    text = """g (float[4, 4] x) => (float[4, 4] y) {
        a = Sin(x) s = Sum(a, a) b = Tanh(s) y = Neg(b) }"""
    session = compiled(text)
    for _ in range(5):
        np.testing.assert_allclose(
            session.run({"x": X})["y"], expected(text, {"x": X})["y"], rtol=1e-6
        )
    waiting = waits(session)
    assert len(waiting["Sum"]) == 1  # the stream on the other device waits for that of Sin
    assert len(waiting["Tanh"]) == 1


def test_host_waits_for_all_streams_of_a_node():
    text = "g (float[4, 4] x) => (float[4, 4] y) { s = Sum(x, x) y = Neg(s) }"
    session = compiled(text)
    for _ in range(5):
        np.testing.assert_array_equal(session.run({"x": X})["y"], -2 * X)
    assert session.source.count(".query(): yield S[") == 2


@pytest.mark.parametrize("executor", ["linear", "dataflow", "parallel", "streams", "frames"])
def test_node_on_several_devices_is_computed_by_every_executor(executor):
    session = compiled(ALL_REDUCE, executor=executor)
    results = session.run({"x": X})
    for name, wanted in expected(ALL_REDUCE, {"x": X}).items():
        np.testing.assert_allclose(results[name], wanted, rtol=1e-6)


@pytest.mark.parametrize(
    "body", ["s = Sum(p, q) w = Tanh(s)", "w = Sum(p, q)", "s = Sum(p, q) w = Sum(s, p)"]
)
def test_loop_with_a_node_on_several_devices(body):
    text = f"""g (int64 n, float[4, 4] x) => (float[4, 4] y) {{
        y = Loop <body = b (int64 i, bool c, float[4, 4] v) => (bool c, float[4, 4] w) {{
            p = Sin(v) q = Cos(v) {body} }}> (n, , x) }}"""
    session = compiled(text)
    for n in (0, 1, 2, 5, 9):
        feeds = {"n": np.int64(n), "x": X}
        found, wanted = session.run(feeds), expected(text, feeds)
        np.testing.assert_allclose(found["y"], wanted["y"], rtol=1e-5)
    # Iterations overlap: the sum is passed on with an event that both of its streams have passed.
    assert session.inspect.executor.tasks.signals.overlap.ends


def test_loop_whose_body_is_one_node_on_several_devices():
    text = """g (int64 n, float[4, 4] x) => (float[4, 4] y) {
        y = Loop <body = b (int64 i, bool c, float[4, 4] v) => (bool c, float[4, 4] w) {
            w = Sum(v, v) }> (n, , x) }"""
    session = compiled(text)
    for n in (0, 1, 5):
        found = session.run({"n": np.int64(n), "x": X})
        np.testing.assert_array_equal(found["y"], X * 2**n)


def test_error_of_a_node_on_several_devices_is_the_runs_and_the_next_run_is_sound():
    text = "g (float[4, 4] x, int64[1] i) => (float[1, 4] y) { g = Gather(x, i) y = Neg(g) }"
    session = compiled(text, {"Gather": (0, 1)})
    with pytest.raises(ps.RunError, match="Gather"):
        session.run({"x": X, "i": np.array([9])})
    np.testing.assert_array_equal(session.run({"x": X, "i": np.array([2])})["y"], -X[2:3])


OPERATIONS = {
    "Sin": (0,),
    "Cos": (1,),
    "Tanh": (2,),
    "Add": (0, 1),
    "Mul": (1, 2),
    "Sub": (0, 1, 2),
}


@given(st.data())
def test_random_graphs_on_three_devices_equal_numpy(data):
    b = GraphBuilder()
    values = [b.input("x", np.float32, [4, 4])]
    names, used = [*OPERATIONS, "Neg"], set()
    for _ in range(data.draw(st.integers(1, 12))):
        name = data.draw(st.sampled_from(names))
        count = 2 if name in ("Add", "Mul", "Sub") else 1
        picked = [values[-1 - data.draw(st.integers(0, 3)) % len(values)] for _ in range(count)]
        values.append(b.op(name, *picked))
        used.add(name)
    for i, value in enumerate(values[-2:]):
        b.output(f"y{i}", b.op("Neg", value))
    model = b.model()
    streams = data.draw(st.sampled_from([None, 3, 4, 9]))
    place = dict.fromkeys(used - {"Neg"}, "late")
    session = compiled(model, OPERATIONS, place=place, max_streams=streams)
    wanted = ps.compile(model, executor="linear", backends=["numpy"]).run({"x": X})
    for _ in range(2):
        found = session.run({"x": X})
        for name in wanted:
            np.testing.assert_allclose(found[name], wanted[name], rtol=1e-4, atol=1e-6)
    if session.inspect.executor.tasks is not None:
        signals_of(session)
