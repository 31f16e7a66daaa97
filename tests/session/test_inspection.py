"""``session.inspect``: what looks at plans, and where it was before."""

from __future__ import annotations

import numpy as np
import pytest

import penstock as ps
from penstock.plan.plan import Plan
from penstock.session.inspection import Inspection
from penstock.session.session import Session
from tests.support.onnx_text import compile_text

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
