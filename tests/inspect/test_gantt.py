"""Static schedules as text and as drawings."""

from __future__ import annotations

import numpy as np
import pytest

import penstock as ps
from penstock.inspect.gantt import format_charts
from penstock.tuning import cost_table
from penstock.tuning.cost_table import CostTable
from tests.support.onnx_text import compile_text

#      +- Sin -- Neg -+
#  Exp-+              +- Add -- y
#      +- Cos --------+
DIAMOND = """g (float[8] x) => (float[8] y) {
    e = Exp(x) s = Sin(e) n = Neg(s) c = Cos(e) y = Add(n, c) }"""


LOOP = """g (int64 n, float[8] x) => (float[8] y) {
    y = Loop <body = b (int64 i, bool c, float[8] v) => (bool d, float[8] w) {
        d = Identity(c) p = Sin(v) q = Cos(v) w = Mul(p, q) }> (n, , x) }"""


@pytest.fixture(autouse=True)
def nothing_measured(monkeypatch, tmp_path):
    empty = CostTable(tmp_path / "none.sqlite", "machine")
    monkeypatch.setattr(cost_table, "cost_table", lambda: empty)


def compiled(text: str, **options) -> ps.Session:
    return compile_text(text, **{"backends": ["numpy"], **options})


def test_fused_operations_are_listed_in_chart():
    text = compiled(DIAMOND, executor="streams", max_streams=2).explain()
    assert "waits for signal 0" in text and "emits signal 1" in text
    session = compiled(LOOP, executor="streams", max_streams=2)
    assert "body:" in session.explain()
    x = np.linspace(-1, 1, 8, dtype=np.float32)
    assert session.run({"n": np.int64(0), "x": x})["y"].tolist() == x.tolist()


def test_schedule_is_a_page_a_drawing_in_notebooks_and_text_in_terminals():
    schedule = compiled(DIAMOND).inspect.schedule(2)
    assert schedule.to_html().startswith("<!DOCTYPE html>")
    assert schedule.to_svg() in schedule.to_html()
    assert schedule.to_svg() in schedule._repr_html_()
    assert str(schedule) == format_charts(schedule).rstrip("\n")
