"""Static schedules as text and as drawings."""

from __future__ import annotations

from xml.etree import ElementTree

import numpy as np
import pytest

import penstock as ps
from penstock.inspect.gantt import format_charts
from penstock.inspect.gantt_svg import draw_charts
from penstock.tuning import cost_table
from penstock.tuning.cost_table import CostTable
from tests.support.device_backend import DelayedBackend
from tests.support.onnx_text import compile_text, model_from_text

SVG = "{http://www.w3.org/2000/svg}"

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


def shapes(svg: str, kind: str) -> list[ElementTree.Element]:
    return list(ElementTree.fromstring(svg).iter(SVG + kind))


def bars(svg: str) -> list[ElementTree.Element]:
    return [each for each in shapes(svg, "rect") if each.find(SVG + "title") is not None]


def arrows(svg: str) -> list[ElementTree.Element]:
    return [each for each in shapes(svg, "path") if each.get("marker-end")]


def test_chart_text_lists_steps_under_their_stream():
    text = format_charts(compiled(DIAMOND).inspect.schedule(2))
    lines = text.splitlines()
    assert lines[0].startswith("plan 'g': 2 streams, 2 signals, ")
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


def test_fused_operations_are_listed_in_chart():
    text = compiled(DIAMOND, executor="streams", max_streams=2).explain()
    assert "waits for signal 0" in text and "emits signal 1" in text
    session = compiled(LOOP, executor="streams", max_streams=2)
    assert "body:" in session.explain()
    x = np.linspace(-1, 1, 8, dtype=np.float32)
    assert session.run({"n": np.int64(0), "x": x})["y"].tolist() == x.tolist()


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


def test_schedule_is_a_page_a_drawing_in_notebooks_and_text_in_terminals():
    schedule = compiled(DIAMOND).inspect.schedule(2)
    assert schedule.to_html().startswith("<!DOCTYPE html>")
    assert schedule.to_svg() in schedule.to_html()
    assert schedule.to_svg() in schedule._repr_html_()
    assert str(schedule) == format_charts(schedule).rstrip("\n")
