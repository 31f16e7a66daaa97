"""The command plan: steps, schedules, arenas, and graphs after passes."""

from __future__ import annotations

from pathlib import Path

import onnx
import pytest

from penstock.backends import registry
from penstock.host.native import library
from penstock.passes.pipeline import DEVICES, LOWER, OPTIMIZE, PASSES, SPLIT, STRUCTURE
from tests.support.command_line import as_json, call
from tests.support.onnx_text import model_from_text


def test_plan_prints_steps_and_source(model, numpy_alone):
    text = call("plan", model, "--shape", "x=2x3").stdout
    assert "arena 24 B" in text
    assert "Mul(" in text
    source = call("plan", model, "--source").stdout
    assert source.startswith("def run(control")


def test_plan_of_the_parallel_executor_prints_tasks(model, monkeypatch):
    monkeypatch.setattr(registry, "available", lambda: ("numpy",))
    text = as_json("plan", model, "--executor", "dataflow")["text"]
    assert "task t0 (about" in text
    assert "task t1 after t0 (about" in text
    assert text.index("product") < text.index("task t1")


@pytest.mark.parametrize("executor", ["linear", "parallel"])
def test_plan_with_planner_all_compares_arenas(model, executor):
    result = as_json("plan", model, "--planner", "all", "--executor", executor)
    sizes, bounds = result["arena_bytes"], result["arena_lower_bound"]
    assert list(sizes) == ["quick", "best", "wic", "first_fit", "bump"]
    assert all(bounds[name] <= sizes[name] <= sizes["bump"] for name in sizes)
    shown = call("plan", model, "--planner", "all", "--executor", executor).output
    assert all(name in shown for name in sizes)


def test_plan_names_its_planner(model):
    assert "planner wic, lower bound" in as_json("plan", model, "--planner", "wic")["text"]
    assert call("plan", model, "--planner", "none").exit_code == 2
    run = ("run", model, "-i", "x=zeros:1x3", "-i", "scale=zeros", "--planner", "bump")
    assert call(*run).exit_code == 0


def test_plan_prints_a_simulated_schedule(model):
    one, many = (as_json("plan", model, "--simulate", n) for n in ("1", "8"))
    assert one["makespan"] == pytest.approx(one["serial"])
    assert many["workers"] == 8
    assert many["bound"] <= many["makespan"] <= many["serial"]
    assert many["critical_path"] == pytest.approx(many["serial"])  # it is a chain
    shown = call("plan", model, "--simulate", "8").output
    assert "8 workers" in shown
    assert "costs: 0 of 1 measured on this machine, the others estimated" in shown
    assert call("plan", model, "--simulate", "0").exit_code == 2


def test_simulated_schedule_tells_which_costs_were_measured(model, tmp_path):
    trace = str(tmp_path / "trace.json")
    call("profile", model, "-i", "x=random", "--runs", "2", "--trace", trace)
    shown = call("plan", model, "--simulate", "2", "--backends", "numpy").output
    assert "costs: 2 of 2 measured on this machine" in shown


def test_plan_on_streams_prints_and_draws_the_schedule(tmp_path, monkeypatch):
    monkeypatch.setattr(registry, "available", lambda: ("numpy",))
    path, svg = tmp_path / "two.onnx", tmp_path / "two.svg"
    text = "g (float[4] x) => (float[4] y) { a = Sin(x) b = Cos(x) y = Add(a, b) }"
    onnx.save(model_from_text(text), path)
    result = as_json("plan", str(path), "--streams", "--max-streams", "2", "--svg", str(svg))
    (block,) = result["blocks"]
    assert [[bar["operation"] for bar in stream] for stream in block["streams"]] == [
        ["Sin", "Add"],
        ["Cos"],
    ]
    assert block["signals"] == 1
    assert svg.read_text().startswith("<svg")
    text = call("plan", str(path), "--streams", "--max-streams", "2").output
    assert "stream 1, begins with stream 0" in text
    assert (
        "def t1("
        in call("plan", str(path), "--executor", "streams", "--max-streams", "2", "--source").output
    )


FOLDABLE = """g (float[N, 4] x) => (float[N, 4] y) <float[4, 4] w = {1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13,
14, 15, 16}, float[1] two = {2}, float[1] three = {3}> {
    scale = Mul(two, three)
    h = MatMul(x, w)
    y = Mul(h, scale)
}"""


@pytest.fixture
def foldable(tmp_path: Path) -> str:
    path = tmp_path / "foldable.onnx"
    onnx.save(model_from_text(FOLDABLE), path)
    return str(path)


def test_plan_after_pass_prints_the_graph_for_the_given_shapes(foldable):
    before = call("plan", foldable, "--shape", "x=2x4", "--after", "raise_control_flow").stdout
    assert "Mul(two, three)" in before
    after = as_json("plan", foldable, "--shape", "x=2x4", "--after", "fold_constants")
    assert after["pass"] == "fold_constants"
    assert "h: float32[2, 4] = MatMul(x, w)" in after["text"]
    assert "Mul(two, three)" not in after["text"]


def test_plan_after_pass_with_max_elements_cuts_constants_short(foldable):
    text = call("plan", foldable, "--after", "simplify", "--max-elements", "2").stdout
    assert "const [1.0, 2.0, ...]" in text


# Two kernels that take long enough for devices to have parts of their own.
ON_TWO_DEVICES = """graph g(x: float32[1000, 1000]) -> (y) {
  a = MatMul(x, x) on "/device:CPU:0"
  y = MatMul(a, a) on "/device:CPU:1"
}
"""
OF_BLOCKS = [step.name for step in (*STRUCTURE, *OPTIMIZE, *LOWER)]
OF_FRAMES = [step.name for step in (*DEVICES, *SPLIT)]


@pytest.mark.parametrize("name", OF_BLOCKS)
def test_plan_after_every_pass_prints_a_graph(foldable, name):
    assert call("plan", foldable, "--after", name).stdout.startswith("graph g(x: float32[")


@pytest.mark.parametrize("name", OF_FRAMES)
def test_plan_after_every_pass_for_frames_prints_a_graph(foldable, name):
    options = ["--executor", "frames", "--devices", "2"]
    text = call("plan", foldable, *options, "--after", name).stdout
    # What runs in segments, too, is shown as it leaves the last of them.
    assert text.startswith("graph " if name in OF_BLOCKS else "graph g(x: float32[")


@pytest.mark.parametrize("name", sorted({*OF_FRAMES} - {*OF_BLOCKS}))
def test_plan_after_pass_for_frames_without_them_names_the_executor(foldable, name):
    result = call("plan", foldable, "--after", name)
    assert result.exit_code == 1
    assert f"pass {name} did not run: it is for graphs with frames" in result.output


@pytest.mark.parametrize("name", ["partition", "group_segments"])
def test_plan_after_partition_prints_each_part(tmp_path, name):
    path = tmp_path / "two.txt"
    path.write_text(ON_TWO_DEVICES, encoding="utf-8")
    text = call("plan", "--from", str(path), "--devices", "2", "--after", name).stdout
    sending, receiving = text.strip().split("\n\n")
    assert "_Send" in sending
    assert "_Recv" not in sending
    assert "_Recv" in receiving


@pytest.mark.skipif(library() is None, reason="there are no compiled kernels")
def test_plan_after_fuse_shows_the_nodes_of_a_fused_node(foldable):
    text = call("plan", foldable, "--shape", "x=100000x4", "--after", "fuse").stdout
    assert 'penstock.Fused-1{ops="MatMul Mul"}' in text
    assert "region: graph(" in text


@pytest.mark.skipif(library() is None, reason="there are no compiled kernels")
def test_plan_from_text_after_fuse_equals_the_plan_of_the_model(foldable, tmp_path):
    path = tmp_path / "graph.txt"
    path.write_text(call("plan", foldable, "--after", "fuse").stdout, encoding="utf-8")
    assert call("plan", "--from", str(path)).stdout == call("plan", foldable).stdout


def test_plan_after_unknown_pass_is_a_usage_error_that_lists_the_names(foldable):
    result = call("plan", foldable, "--after", "nothing")
    assert result.exit_code == 2
    assert all(repr(name) in result.output for name in PASSES)


def test_plan_after_pass_of_the_interpreter_says_that_no_pass_ran(foldable):
    result = call("plan", foldable, "--executor", "interpret", "--after", "simplify")
    assert result.exit_code == 1
    assert "pass simplify did not run" in result.output


@pytest.mark.parametrize("name", ["dead_code", "common_subexpressions", "hoist_scales"])
def test_plan_from_text_equals_the_plan_of_the_model(foldable, tmp_path, name):
    path = tmp_path / "graph.txt"
    path.write_text(call("plan", foldable, "--after", name).stdout, encoding="utf-8")
    assert call("plan", "--from", str(path)).stdout == call("plan", foldable).stdout


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("graph g(", "line 1, column 9"),
        ("graph g(x: float32[2]) -> (y) {\n  y = Nix(x)\n}", "line 2, column 7"),
        ("graph g(x: float32[2]) -> (y) {\n  y = Add(x, x)\n  z = Add(x, z)\n}", "'z'"),
        ("\0", "line 1, column 1"),
    ],
)
def test_plan_from_invalid_text_ends_with_1_and_the_place(tmp_path, text, message):
    path = tmp_path / "graph.txt"
    path.write_text(text, encoding="utf-8")
    result = call("plan", "--from", str(path))
    assert result.exit_code == 1
    assert message in result.output


def test_plan_from_bytes_that_are_no_text_is_an_invalid_model(tmp_path):
    path = tmp_path / "graph.txt"
    path.write_bytes(b"\xff\xfe")
    result = call("plan", "--from", str(path))
    assert result.exit_code == 1
    assert "is not a text file" in result.output


def test_plan_needs_either_a_model_or_a_text(foldable, tmp_path):
    path = tmp_path / "graph.txt"
    path.write_text("graph g() -> () {\n}")
    assert call("plan").exit_code == 2
    assert call("plan", foldable, "--from", str(path)).exit_code == 2


def test_plan_with_reasons_says_why_each_step_is_where_it_is(model, numpy_alone):
    text = call("plan", model, "--reasons").stdout
    assert text.count("# the only backend with a kernel for it") == 2
