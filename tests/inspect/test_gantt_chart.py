"""Charts of schedules as text."""

from __future__ import annotations

import pytest

from penstock.inspect.gantt import format_charts
from penstock.tuning import cost_table
from penstock.tuning.cost_table import CostTable
from tests.inspect.test_gantt import DIAMOND, LOOP, compiled
from tests.support.device_backend import DelayedBackend


@pytest.fixture(autouse=True)
def nothing_measured(monkeypatch, tmp_path):
    empty = CostTable(tmp_path / "none.sqlite", "machine")
    monkeypatch.setattr(cost_table, "cost_table", lambda: empty)


def test_chart_text_lists_steps_under_their_stream():
    text = format_charts(compiled(DIAMOND).inspect.schedule(2))
    lines = text.splitlines()
    assert lines[0].startswith("plan 'g', run by executor linear now: 2 streams, 2 signals, ")
    words = [line.split("rank")[1].split("#")[0].split()[1:] for line in lines if "rank" in line]
    assert words == [["Exp", "!0"], ["Sin"], ["Neg"], ["Add", "?1"], ["Cos", "?0", "!1"]]
    assert [line.strip() for line in lines if "stream" in line][1:] == ["stream 0", "stream 1"]


def test_chart_has_one_stream_when_streams_do_not_pay():
    (chart,) = compiled(DIAMOND).inspect.schedule()
    assert len(chart.streams) == 1 and not chart.signals
    assert chart.makespan == pytest.approx(chart.serial)


def test_chart_ranks_are_times_of_following_chains():
    (chart,) = compiled(DIAMOND).inspect.schedule(2)
    rank = {bar.operation: bar.rank for stream in chart.streams for bar in stream}
    length = {b.operation: b.finish - b.start for stream in chart.streams for b in stream}
    assert rank["Add"] == 0
    assert rank["Neg"] == pytest.approx(length["Add"])
    assert rank["Exp"] == pytest.approx(length["Sin"] + length["Neg"] + length["Add"])


def test_blocks_with_streams_have_charts():
    outer, body = compiled(LOOP).inspect.schedule(2)
    assert outer.name == "plan 'g'" and len(outer.streams) == 1
    assert body.name.startswith("body of Loop_0") and len(body.streams) == 2
    assert body.end == () or body.signals >= 1


def test_chart_names_device_of_stream():
    backend = DelayedBackend(operations={"Sin"})
    session = compiled(DIAMOND, backends=[backend, "numpy"], place={"Sin": "late"})
    (chart,) = session.inspect.schedule(4)
    assert sorted(set(chart.devices)) == ["", "late"]
    assert "on late" in format_charts([chart])
