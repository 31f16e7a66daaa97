"""``session.inspect``: inspection of plans, and hints for its former places."""

from __future__ import annotations

import numpy as np
import pytest

import penstock as ps
from penstock.backends.numpy import NumpyBackend
from penstock.build import GraphBuilder
from penstock.plan.plan import Plan
from penstock.session.inspection import Inspection
from penstock.session.session import Session
from tests.support.onnx_text import compile_text, model_from_text

TEXT = "g (float[2] x) => (float[2] y) { y = Neg (x) }"
X = np.ones(2, np.float32)


def test_inspect_looks_at_the_plan_that_was_used_last() -> None:
    session = compile_text(TEXT, backends=["numpy"], executor="linear")
    inspection = session.inspect
    assert isinstance(inspection.plan, Plan)
    assert inspection.plan is inspection.executor.table
    assert [step.backend for step in inspection.plan.steps] == ["numpy"]
    assert [backend.name for backend in inspection.backends] == ["numpy"]
    assert inspection.describe()["asked"]["executor"] == "linear"
    assert inspection.stale == ()
    session.run({"x": X})
    assert inspection.stats.runs == 1, "it looks at the session as it is now"
    assert repr(inspection) == "<inspection of 'g'>"


@pytest.mark.parametrize("name", ["source", "memory", "effective", "stats"])
def test_short_cut_of_a_session_equals_its_inspection(name: str) -> None:
    session = compile_text(TEXT)
    session.run({"x": X})
    assert getattr(session, name) == getattr(session.inspect, name)
    assert session.explain(reasons=True) == session.inspect.explain(reasons=True)


@pytest.mark.parametrize(
    ("name", "place"),
    [
        *[(name, name) for name in ("backends", "describe", "forecast", "forecast_on_cluster")],
        *[(name, name) for name in ("plan", "reasons", "report", "schedule", "stale")],
        ("latest", "executor"),
    ],
)
def test_member_that_moved_raises_attribute_error_with_its_place(name: str, place: str) -> None:
    session = compile_text(TEXT)
    with pytest.raises(AttributeError, match=rf"'{name}'; it is session\.inspect\.{place}$"):
        getattr(session, name)
    assert hasattr(Inspection, place)


def test_report_against_what_is_no_session_raises_type_error() -> None:
    with pytest.raises(TypeError, match=r"^against="):
        compile_text(TEXT).inspect.report({"x": X}, against=3)  # type: ignore[arg-type]


def test_report_of_a_closed_session_is_refused() -> None:
    session = compile_text(TEXT)
    session.close()
    with pytest.raises(ps.PenstockError, match="closed"):
        session.inspect.report({"x": X})


def test_inspection_is_not_in_the_way_of_release() -> None:
    """An inspection holds the parts of a session, not the session."""
    session = compile_text(TEXT)
    inspection = session.inspect
    assert not any(isinstance(part, Session) for part in inspection._parts)


BRANCHES = "g (float[2] x) => (float[2] y) { a = Exp(x) b = Neg(x) y = Add(a, b) }"


@pytest.mark.parametrize("streams", [None, 2])
def test_effective_executor_of_a_plan_in_one_order_is_linear(streams: int | None) -> None:
    expert = ps.ExpertOptions(max_streams=streams)
    session = compile_text(BRANCHES, executor="streams", backends=["numpy"], expert=expert)
    session.run({"x": np.ones(2, np.float32)})
    ran = "streams" if streams else "linear"
    assert session.inspect.effective.executor == session.inspect.executor.name == ran
    told = session.inspect.effective.line(session.options)
    assert ("(asked for: streams)" in told) == (streams is None)


def test_title_of_a_schedule_says_which_executor_runs_the_plan() -> None:
    def title(**expert: int) -> str:
        options = ps.ExpertOptions(**expert)
        session = compile_text(BRANCHES, executor="streams", backends=["numpy"], expert=options)
        return session.inspect.schedule(max_streams=2)[0].title

    assert title().startswith("plan 'g', run by executor linear now: 2 streams")
    assert title(max_streams=2).startswith("plan 'g': 2 streams")


class Own(NumpyBackend):
    name = "own"


def test_effective_backends_are_also_those_of_devices() -> None:
    model = ps.load(model_from_text("g (float[2] x) => (float[2] y) { a = Exp(x) y = Neg(a) }"))
    for i, node in enumerate(model.graph.nodes):
        node.device = f"/cpu:{i}"
    session = ps.compile(model, devices={"cpu:0": "numpy", "cpu:1": Own()}, backends=["numpy"])
    session.run({"x": np.ones(2, np.float32)})
    assert session.inspect.effective.backends == ("numpy", "own")


def test_schedule_on_frames_counts_segments_by_their_steps() -> None:
    text = "g (float[N] x) => (float[] y) { a = Relu(x) b = NonZero(a) c = Cast<to = 1>(b) "
    text += "y = ReduceSum<keepdims = 0>(c) }"
    session = compile_text(text, executor="frames", backends=["numpy"])
    session.run({"x": np.ones(2, np.float32)})
    steps = [step for step in session.inspect.plan.walk() if not step.blocks]
    seconds = session._compiler.context.seconds(session._compiler.context.costs, 1)
    serial = sum(map(seconds, steps))
    assert session.inspect.schedule()[0].serial == pytest.approx(serial)
    assert session.inspect.forecast(2).serial == pytest.approx(serial)


def test_schedule_of_a_graph_that_calls_another_is_refused() -> None:
    builder = GraphBuilder()
    call = builder.function("twice", lambda value: value + value, (np.float32, [2]))
    builder.output("y", call(builder.input("given", np.float32, [2])))
    session = ps.compile(builder.model(), executor="frames", backends=["numpy"])
    session.run({"given": np.ones(2, np.float32)})
    for simulate in (session.inspect.schedule, lambda: session.inspect.forecast(2)):
        with pytest.raises(ps.Unsupported, match="how long the graph takes that it calls"):
            simulate()
