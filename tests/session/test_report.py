"""Reports of sessions: their data, for every executor, and comparisons."""

from __future__ import annotations

import numpy as np
import pytest

import penstock as ps
from tests.support.onnx_text import compile_text

#      +- Sin -- Neg -+
#  Exp-+              +- Add -- y
#      +- Cos --------+
DIAMOND = """g (float[1024] x) => (float[1024] y) {
    e = Exp(x) s = Sin(e) n = Neg(s) c = Cos(e) y = Add(n, c) }"""


FEEDS = {"x": np.linspace(0, 1, 1024, dtype=np.float32)}


def compiled(text: str = DIAMOND, **options) -> ps.Session:
    return compile_text(text, **{"backends": ["numpy"], **options})


def test_report_keeps_no_costs_and_profile_does(tmp_path, monkeypatch):
    monkeypatch.setenv("PENSTOCK_CACHE", str(tmp_path))
    session = compiled()
    session.inspect.report(FEEDS, runs=1)
    assert not [*tmp_path.iterdir()]
    session.profile(FEEDS, runs=1)
    assert [path.name for path in tmp_path.glob("*.sqlite")] == ["costs.sqlite"]


def test_report_compares_values_with_another_session():
    model = """g (float[4,4] x) => (float[4,4] y) {
        a = Exp(x) b = MatMul(a, a) y = Sin(b) }"""
    feeds = {"x": np.full((4, 4), 0.5, np.float32)}
    other = compiled(
        model.replace("Exp(x)", "Exp(x)").replace("y = Sin(b)", "h = Identity(b) y = Cos(h)")
    )
    comparison = compiled(model).inspect.report(feeds, runs=1, against=other).document["comparison"]
    rows = {row["name"]: row for row in comparison["values"]}
    assert rows["a"]["largest"] == rows["b"]["largest"] == 0
    b = np.exp(feeds["x"]) @ np.exp(feeds["x"])
    difference = np.abs(np.sin(b) - np.cos(b))
    assert rows["y"]["largest"] == pytest.approx(difference.max(), rel=1e-5)
    assert rows["y"]["one"] == pytest.approx(np.sin(b[0, 0]), rel=1e-5)
    assert (rows["y"]["operation"], rows["y"]["other_operation"]) == ("Sin", "Cos")
    assert comparison["values"][0]["name"] == "y"  # the largest first


def test_report_of_sessions_without_a_common_value_is_refused():
    other = compiled("g (float[1024] x) => (float[1024] z) { z = Neg(x) }")
    with pytest.raises(ps.InvalidInput, match="compare sessions of one model"):
        compiled().inspect.report(FEEDS, against=other)


def test_report_refuses_wrong_arguments():
    with pytest.raises(ValueError, match="runs"):
        compiled().inspect.report(FEEDS, runs=0)
    with pytest.raises(TypeError, match="against"):
        compiled().inspect.report(FEEDS, against="numpy")
    with pytest.raises(ps.InvalidInput):
        compiled().inspect.report({})


def test_report_of_closed_session_is_refused():
    session = compiled()
    session.close()
    with pytest.raises(ps.PenstockError, match="closed"):
        session.inspect.report(FEEDS)


def test_report_is_saved_as_a_page_and_shown_in_notebooks(tmp_path):
    report = compiled().inspect.report(FEEDS, runs=1)
    path = tmp_path / "r.html"
    report.save(path)
    assert path.read_text(encoding="utf-8") == report.html
    assert report._repr_html_().startswith("<iframe ")
    assert repr(report) == "Report('g', 5 steps, 1 runs)"


def test_results_after_a_report_are_those_before():
    session = compiled()
    before = session.run(FEEDS)["y"]
    session.inspect.report(FEEDS, runs=1)
    np.testing.assert_array_equal(session.run(FEEDS)["y"], before)
