"""Drawings of schedules: bars, arrows, rows, axes."""

from __future__ import annotations

from xml.etree import ElementTree

import pytest

import penstock as ps
from penstock.inspect.gantt import format_charts
from penstock.inspect.gantt_svg import draw_charts
from penstock.tuning import cost_table
from penstock.tuning.cost_table import CostTable
from tests.inspect.test_gantt import DIAMOND, compiled
from tests.support.onnx_text import model_from_text

SVG = "{http://www.w3.org/2000/svg}"


@pytest.fixture(autouse=True)
def nothing_measured(monkeypatch, tmp_path):
    empty = CostTable(tmp_path / "none.sqlite", "machine")
    monkeypatch.setattr(cost_table, "cost_table", lambda: empty)


def shapes(svg: str, kind: str) -> list[ElementTree.Element]:
    return list(ElementTree.fromstring(svg).iter(SVG + kind))


def bars(svg: str) -> list[ElementTree.Element]:
    return [each for each in shapes(svg, "rect") if each.find(SVG + "title") is not None]


def arrows(svg: str) -> list[ElementTree.Element]:
    return [each for each in shapes(svg, "path") if each.get("marker-end")]


def test_svg_has_bar_per_step_and_arrow_per_wait():
    charts = compiled(DIAMOND).inspect.schedule(2)
    svg = draw_charts(charts)
    assert len(bars(svg)) == 5
    assert len(arrows(svg)) == 2
    root = ElementTree.fromstring(svg)
    width, height = (float(root.get(name)) for name in ("width", "height"))
    for bar in bars(svg):
        x, y, wide, tall = (float(bar.get(name)) for name in ("x", "y", "width", "height"))
        assert x >= 0 and x + wide <= width and y >= 0 and y + tall <= height
    lanes = {bar.get("y") for bar in bars(svg)}
    assert len(lanes) == 2


def test_svg_arrow_leads_from_emit_to_wait():
    charts = compiled(DIAMOND).inspect.schedule(2)
    svg = draw_charts(charts)
    by_name = {bar.find(SVG + "title").text.split()[1].rstrip(","): bar for bar in bars(svg)}
    first = (
        arrows(svg)[0] if "signal 0" in arrows(svg)[0].find(SVG + "title").text else arrows(svg)[1]
    )
    numbers = first.get("d").replace("M", " ").replace("C", " ").split()
    start, end = (float(numbers[0]), float(numbers[1])), (float(numbers[-2]), float(numbers[-1]))
    emits, waits = by_name["Exp"], by_name["Cos"]
    assert start[0] == pytest.approx(float(emits.get("x")) + float(emits.get("width")), abs=0.2)
    assert end[0] == pytest.approx(float(waits.get("x")), abs=0.2)
    assert start[1] < end[1]


def test_svg_escapes_names():
    model = model_from_text("g (float[2] x) => (float[2] y) { y = Exp(x) }")
    model.graph.node[0].name = '<script>&"'
    model.graph.name = "</svg><b>"
    svg = draw_charts(ps.compile(model, backends=["numpy"]).inspect.schedule())
    assert "<script>" not in svg and len(bars(svg)) == 1


def test_svg_has_room_for_200_steps():
    #  ten branches of twenty steps: most labels are there, and no bar is thinner than a pixel
    names = ["Sin", "Cos", "Exp", "Neg", "Abs"]
    body, ends = [], []
    for b in range(10):
        last = "x"
        for k in range(20):
            body.append(f"v{b}_{k} = {names[(k * (1 + b // 5) + b) % 5]}({last})")
            last = f"v{b}_{k}"
        ends.append(last)
    text = f"g (float[64] x) => (float[64] y) {{ {' '.join(body)} y = Sum({', '.join(ends)}) }}"
    session = compiled(text)
    svg = draw_charts(session.inspect.schedule(10))
    assert len(bars(svg)) == len(session.inspect.plan.steps) > 190  # some begin alike
    labels = [each.text for each in shapes(svg, "text") if each.get("fill") == "white"]
    assert len(labels) > 170
    assert all(float(bar.get("width")) >= 1 for bar in bars(svg))


def test_svg_of_empty_plan():
    charts = compiled("g (float[2] x) => (float[2] x) { }").inspect.schedule(2)
    assert not bars(draw_charts(charts))
    assert format_charts(charts).count("\n") == 1


def chain(n: int) -> ps.Session:
    """A session of ``n`` pairs of steps that can run at once, pair after pair."""
    lines, last = [], "x"
    for i in range(n):
        lines.append(f"s{i} = Sin({last}) c{i} = Cos({last}) a{i} = Add(s{i}, c{i})")
        last = f"a{i}"
    text = " ".join(lines)
    return compiled(f"g (float[4096] x) => (float[4096] y) {{ {text} y = Exp({last}) }}")


def test_svg_has_an_axis_of_time_and_a_legend():
    schedule = chain(3).inspect.schedule(2)
    root = ElementTree.fromstring(schedule.to_svg(wrap=None))
    texts = list(root.iter(SVG + "text"))
    ticks = [each for each in texts if each.get("text-anchor") == "middle"]
    times = [float(each.text.removesuffix(" us")) for each in ticks]
    places = [float(each.get("x")) for each in ticks]
    assert len(times) >= 4 and times[0] == 0
    scale = (places[-1] - places[0]) / (times[-1] - times[0])
    assert all(
        x == pytest.approx(places[0] + t * scale, abs=0.2)
        for x, t in zip(places, times, strict=True)
    )
    exp = next(
        bar for bar in bars(schedule.to_svg(None)) if " Exp," in bar.find(SVG + "title").text
    )
    start = schedule[0].makespan - float(exp.get("width")) / scale * 1e-6
    assert float(exp.get("x")) == pytest.approx(places[0] + start * 1e6 * scale, abs=1)
    legend = {each.text for each in texts if each.get("class") == "legend"}
    assert legend == {"Sin", "Cos", "Add", "Exp"}


def test_wide_svg_wraps_into_rows():
    schedule = chain(60).inspect.schedule(2)
    root = ElementTree.fromstring(schedule.to_svg(wrap=1000))
    assert float(root.get("width")) <= 1000
    wide = ElementTree.fromstring(schedule.to_svg(wrap=None))
    assert float(wide.get("width")) > 2000
    titles = [each.find(SVG + "title").text for each in bars(schedule.to_svg(wrap=1000))]
    assert len(set(titles)) == 181  # every step is there, some in two rows
    in_rows = sum(float(bar.get("width")) for bar in bars(schedule.to_svg(wrap=1000)))
    assert in_rows == pytest.approx(
        sum(float(b.get("width")) for b in bars(schedule.to_svg(None))), rel=0.02
    )
    for bar in bars(schedule.to_svg(wrap=1000)):
        assert 110 <= float(bar.get("x")) <= float(bar.get("x")) + float(bar.get("width")) <= 981


def test_waits_across_rows_are_labelled_at_both_ends():
    svg = chain(60).inspect.schedule(2).to_svg(wrap=1000)
    marks = [each for each in shapes(svg, "text") if each.get("class") == "signal"]
    arrows_and_marks = len(arrows(svg)) + len(marks) / 2
    assert arrows_and_marks == len(arrows(chain(60).inspect.schedule(2).to_svg(wrap=None)))
