"""Pages of reports in a headless browser: opened, and clicked through."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from onnx import TensorProto, helper

import penstock as ps
from penstock.inspect.report_page import Report
from tests.support.browser import Page, headless_browser
from tests.support.onnx_text import compile_text

# A loop and a branch, in which a value outlives others.
NESTED = """g (int64 n, float[64] x, bool q) => (float[64] y) {
    a = Exp(x)
    v = Loop <body = b (int64 i, bool c, float[64] s) => (bool d, float[64] w) {
        d = Identity(c) p = Sin(s) r = Cos(s) w = Mul(p, r) }> (n, , x)
    z = Add(v, a)
    y = If (q) <then_branch = t () => (float[64] u) { m = Neg(z) u = Sin(m) },
                else_branch = e () => (float[64] u2) { u2 = Cos(z) }> }"""
FEEDS = {"n": np.array(5), "x": np.ones(64, np.float32), "q": np.array(True)}


def chain(n: int) -> Report:
    """The report of ``n`` steps, one after the other."""
    names = ["x", *[f"v{i}" for i in range(n - 1)], "y"]
    nodes = " ".join(
        f"{b} = {'Sin' if i % 2 else 'Cos'}({a})" for i, (a, b) in enumerate(pairwise(names))
    )
    session = compile_text(
        f"g (float[8] x) => (float[8] y) {{ {nodes} }}", backends=["numpy"], executor="linear"
    )
    return session.inspect.report({"x": np.ones(8, np.float32)}, runs=1)


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with headless_browser() as browser:
        yield browser


@pytest.fixture(scope="module")
def nested(tmp_path_factory: Any) -> tuple[Report, str]:
    sessions = [compile_text(NESTED, backends=[name]) for name in ("numpy", "numpy")]
    report = sessions[0].inspect.report(FEEDS, runs=2, against=sessions[1])
    path = tmp_path_factory.mktemp("report") / "nested.html"
    report.save(path)
    return report, path.as_uri()


@pytest.fixture
def page(browser: Any, nested: tuple[Report, str]) -> Iterator[Page]:
    opened = Page(browser, nested[1])
    yield opened
    assert opened.problems == []
    assert opened.requests == [nested[1]]  # nothing but the file itself
    opened.close()


def number_of(report: Report, operation: str) -> int:
    return int(report.document["steps"]["operation"].index(operation))


def test_report_opens_with_all_views(page: Page) -> None:
    views = page.ask("[...document.querySelectorAll('nav button')].map(tab => tab.textContent)")
    assert views == ["Graph", "Timeline", "Memory", "Steps", "Roofline", "Compare"]
    for view in views:
        page.show(view.lower())
        assert page.ask("document.querySelector('#stage').children.length") > 0


def test_click_on_step_of_graph_shows_its_details(page: Page, nested: tuple[Report, str]) -> None:
    step = number_of(nested[0], "Loop")
    page.click_at(f"report.graph.pointOf({step})")
    assert page.details == f"{step + 1} Loop"


def test_double_click_opens_and_closes_subgraph(page: Page, nested: tuple[Report, str]) -> None:
    step = number_of(nested[0], "Loop")
    boxes = "report.graph.boxes.length"
    closed = page.ask(boxes)
    page.click_at(f"report.graph.pointOf({step})", double=True)
    assert page.ask(boxes) == closed + nested[0].document["steps"]["parent"].count(step)
    page.click_at(f"report.graph.pointOf({step})", double=True)
    assert page.ask(boxes) == closed


def test_graph_is_panned_and_zoomed(page: Page) -> None:
    page.page.mouse.move(300, 400)
    before = page.ask("[report.graph.transform.x, report.graph.transform.k]")
    page.page.mouse.wheel(0, -300)
    page.page.mouse.down()
    page.page.mouse.move(400, 450)
    page.page.mouse.up()
    after = page.ask("[report.graph.transform.x, report.graph.transform.k]")
    assert after[1] > before[1]
    assert after[0] != before[0]


@pytest.mark.parametrize("colour", ["time", "memory", "backend"])
def test_graph_is_coloured_by(page: Page, colour: str) -> None:
    page.page.click(f"#bar button[data-choice={colour}]")
    assert page.ask("report.state.colour") == colour
    assert page.page.get_attribute(f"#bar button[data-choice={colour}]", "aria-pressed") == "true"


def test_step_is_selected_in_all_views_at_once(page: Page, nested: tuple[Report, str]) -> None:
    step = number_of(nested[0], "Add")
    page.show("timeline")
    page.click_at(f"report.timeline.pointOf({step})")
    assert page.details == f"{step + 1} Add"
    page.show("steps")
    assert page.page.get_attribute(".row.on", "data-step") == str(step)
    page.show("graph")
    assert page.ask("report.state.step") == step
    assert page.ask("location.hash") == f"#graph/{step + 1}"


def test_click_in_roofline_selects_step(page: Page) -> None:
    page.show("roofline")
    step = page.ask("report.roofline.points[0].step")
    page.click_at(f"report.roofline.pointOf({step})")
    assert page.ask("report.state.step") >= 0


def test_click_on_buffer_of_peak_selects_its_step(page: Page, nested: tuple[Report, str]) -> None:
    page.show("memory")
    arena = nested[0].document["arena"]
    listed = page.page.locator("#peak li")
    assert listed.count() == len(arena["peak"]["buffers"])
    page.click_at(f"report.memory.pointOf({arena['peak']['buffers'][0]})")
    members = arena["buffers"][arena["peak"]["buffers"][0]][5]
    step = page.ask("report.state.step")
    assert set(members) & set(nested[0].document["steps"]["outputs"][step])


def test_table_is_sorted_by_every_column(page: Page) -> None:
    page.show("steps")
    for column in page.ask("report.stepTable.columns.map(column => column.key)"):
        title = f".head button[data-column={column}]"
        page.page.click(title)
        if page.page.get_attribute(title, "aria-sort") == "descending":
            page.page.click(title)
        assert page.page.get_attribute(title, "aria-sort") == "ascending"
        values = page.ask(
            f"(c => report.stepTable.rows.map(c.value))(report.stepTable.columns.find(c => c.key === '{column}'))"
        )
        if all(isinstance(value, int | float | None) for value in values):
            assert values == sorted(values, key=lambda value: (value is not None, value or 0))
        page.page.click(title)
        assert page.page.get_attribute(title, "aria-sort") == "descending"


def test_search_finds_steps_by_operation(page: Page, nested: tuple[Report, str]) -> None:
    page.page.fill("#search", "loop")
    operations = nested[0].document["steps"]["operation"]
    found = page.ask(
        "[...document.querySelectorAll('#found li[data-step]')].map(item => +item.dataset.step)"
    )
    assert operations.index("Loop") in found
    page.page.press("#search", "Enter")
    assert page.ask("report.state.step") == found[0]
    page.page.fill("#search", "no such step")
    assert page.page.inner_text("#found") == "no step has this"


def test_comparison_selects_the_step_of_a_value(page: Page, nested: tuple[Report, str]) -> None:
    page.show("compare")
    rows = page.page.locator(".row")
    assert rows.count() == len(nested[0].document["comparison"]["values"])
    rows.first.click()
    assert page.ask("report.state.step") == int(rows.first.get_attribute("data-step") or -1)


def test_reveal_of_step_in_block_opens_its_subgraph(page: Page, nested: tuple[Report, str]) -> None:
    step = number_of(nested[0], "Mul")
    page.ask(f"report.select({step})")
    assert page.ask(f"report.graph.boxes.some(box => box.step === {step})")


@pytest.fixture(scope="module")
def scoped(tmp_path_factory: Any) -> str:
    """A page of 30 layers of two parts each, with an edge past one of them."""
    nodes, last = [], "x"
    operations = ("Sin", "Cos", "Tanh", "Exp", "Add")
    for layer in range(30):
        parts = ("attention", "attention", "mlp", "mlp")
        inputs = [last]
        for operation, part in zip(operations, (*parts, ""), strict=True):
            name = "/".join(filter(None, ("/net", f"layer.{layer}", part, operation)))
            out = f"v{len(nodes)}"
            given = [*inputs, last] if operation == "Add" else inputs
            nodes.append(helper.make_node(operation, given, [out], name=name))
            inputs = [out]
        last = inputs[0]
    ends = [helper.make_tensor_value_info(v, TensorProto.FLOAT, [4]) for v in ("x", last)]
    graph = helper.make_graph(nodes, "g", ends[:1], ends[1:])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10)
    session = ps.compile(model, backends=["numpy"], executor="linear")
    path = tmp_path_factory.mktemp("scoped") / "scoped.html"
    session.inspect.report({"x": np.zeros(4, np.float32)}, runs=1).save(path)
    return str(path.as_uri())


@pytest.fixture
def layers(browser: Any, scoped: str) -> Iterator[Page]:
    opened = Page(browser, scoped)
    yield opened
    assert opened.problems == []
    opened.close()


LAYER = "report.graph.groupNamed('net/layer.0')"
SHOWN = "report.graph.boxes.length"


def test_steps_of_a_scope_are_one_box_until_it_is_opened(layers: Page) -> None:
    assert layers.ask("report.graph.groups.length") == 90  # layers, each of two parts
    layers.page.click("#bar button:has-text('close all')")
    assert layers.ask(SHOWN) == 30
    assert layers.ask("report.graph.curves.length") == 29
    layers.click_at(f"report.graph.pointOf({LAYER})", double=True)
    assert layers.ask(SHOWN) == 30 + 3  # two parts and the sum
    # into the layer to its first part and past both; between; into the sum; out of it
    assert layers.ask("report.graph.curves.length") == 28 + 1 + 2
    layers.page.click("#bar button:has-text('open all')")
    assert layers.ask(SHOWN) == 90 + 150
    layers.click_at(f"report.graph.pointOf({LAYER})", double=True)
    assert layers.ask(SHOWN) == 90 + 150 - 2 - 5


def test_graph_of_many_scopes_begins_with_as_many_boxes_as_can_be_read(layers: Page) -> None:
    assert 30 <= layers.ask(SHOWN) <= 120


def test_click_on_scope_shows_what_it_takes(layers: Page) -> None:
    layers.page.click("#bar button:has-text('close all')")
    layers.click_at(f"report.graph.pointOf({LAYER})")
    assert layers.details == "net/layer.0"
    assert "steps\n5\n" in layers.page.inner_text("#details dl")
    layers.page.click("#details li a")
    assert layers.ask("report.state.step") >= 0


def test_step_in_closed_scopes_is_revealed(layers: Page) -> None:
    layers.page.click("#bar button:has-text('close all')")
    layers.ask("report.select(100)")
    assert layers.ask("report.graph.boxes.some(box => box.step === 100)")
    assert layers.ask(SHOWN) > 30


def test_scopes_can_be_left_out_of_the_graph(layers: Page) -> None:
    layers.page.click("#bar button:has-text('scopes')")
    assert layers.ask(SHOWN) == 150
    assert layers.ask("report.graph.boxes.every(box => box.step >= 0)")
    layers.page.click("#bar button:has-text('scopes')")
    assert layers.ask("report.graph.boxes.some(box => box.step < 0)")


def test_scope_is_faded_unless_a_step_in_it_is_found(layers: Page) -> None:
    layers.page.click("#bar button:has-text('close all')")
    layers.page.fill("#search", "layer.7/mlp")
    names = "report.graph.boxes.filter(box => report.graph.matches(box.id)).map(box => box.id)"
    assert layers.ask(names) == [layers.ask("report.graph.groupNamed('net/layer.7')")]


def test_graph_of_many_steps_draws_only_what_is_seen(browser: Any, tmp_path: Any) -> None:
    path = tmp_path / "chain.html"
    chain(1500).save(path)
    opened = Page(browser, path.as_uri())
    assert opened.ask("report.graph.boxes.length") == 1500
    assert 0 < opened.ask("report.graph.drawn") < 60
    opened.ask("report.select(1200)")
    opened.page.wait_for_function("report.graph.drawn > 0")
    opened.show("steps")
    assert opened.page.locator(".row").count() < 60
    assert opened.problems == []


def test_page_of_frames_with_circles_opens(browser: Any, tmp_path: Any) -> None:
    session = compile_text(NESTED, backends=["numpy"])
    report = session.inspect.report(FEEDS, runs=1)
    report.document["edges"].append(
        [report.document["edges"][-1][1], report.document["edges"][0][0]]
    )
    path = tmp_path / "circle.html"
    path.write_text(report.html, encoding="utf-8")
    opened = Page(browser, path.as_uri())
    assert opened.ask("report.graph.boxes.length") > 1
    assert opened.problems == []
