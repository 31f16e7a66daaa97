"""The command line."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import warnings
from pathlib import Path

import numpy as np
import onnx
import pytest
from click.testing import CliRunner, Result

from penstock.backends import registry
from penstock.backends.onednn.library import library
from penstock.backends.registry import BACKENDS
from penstock.cli import main
from penstock.cli.commands import COMMANDS
from penstock.host.native import library as native_library
from penstock.passes.pipeline import DEVICES, LOWER, OPTIMIZE, PASSES, SPLIT, STRUCTURE
from tests.support.costs import measured_variants
from tests.support.onnx_text import model_from_text
from tests.support.tf_graphs import Builder, Type

MODEL = """affine (float[N, 3] x, float[3] scale) => (float[N, 3] y) <float[3] b = {1, 2, 3}> {
    product = Mul(x, scale)
    y = Add(product, b)
}"""


@pytest.fixture
def numpy_alone(monkeypatch) -> None:
    """Commands compile for NumPy, which fuses nothing and is there on every machine."""
    monkeypatch.setattr(registry, "available", lambda: ("numpy",))


@pytest.fixture
def model(tmp_path: Path) -> str:
    path = tmp_path / "affine.onnx"
    onnx.save(model_from_text(MODEL), path)
    return str(path)


def call(*arguments: str) -> Result:
    return CliRunner().invoke(main, list(arguments), catch_exceptions=False)


def as_json(*arguments: str, code: int = 0) -> dict:
    result = call(*arguments, "--json")
    assert result.exit_code == code, result.output
    return json.loads(result.stdout)


def test_run_takes_values_in_json(model):
    result = as_json("run", model, "-i", "x=[[1, 2, 3]]", "-i", "scale=[1, 1, 2]")
    y = result["outputs"]["y"]
    assert y["dtype"] == "float32"
    assert y["shape"] == [1, 3]
    assert y["first"] == [2, 4, 9]


def test_run_takes_files_and_saves_outputs(model, tmp_path):
    x = np.arange(6, dtype=np.float32).reshape(2, 3)
    np.save(tmp_path / "x.npy", x)
    np.savez(tmp_path / "rest.npz", scale=np.ones(3, np.float32))
    out = tmp_path / "out"
    arguments = ["-i", f"x={tmp_path}/x.npy", "-i", f"{tmp_path}/rest.npz", "-o", str(out)]
    result = as_json("run", model, *arguments, "-f", "y", "-f", "product")
    np.testing.assert_array_equal(np.load(result["outputs"]["y"]["file"]), x + np.array([1, 2, 3]))
    np.testing.assert_array_equal(np.load(out / "product.npy"), x)


def test_run_takes_random_values_and_zeros(model):
    result = as_json("run", model, "-i", "x=random:4x3", "-i", "scale=zeros")
    assert result["outputs"]["y"]["shape"] == [4, 3]
    assert result["outputs"]["y"]["first"][:3] == [1, 2, 3]


def test_run_prints_a_table(model):
    result = call("run", model, "-i", "x=random", "-i", "scale=zeros")
    assert result.exit_code == 0
    assert "float32[1, 3]" in result.stdout
    assert "ran in" in result.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["-i", "x=zeros"],
            "no value for scale: float32[3]; for a first look: --input scale=random",
        ),
        (["-i", "x=zeros", "-i", "skale=zeros"], "did you mean 'scale'"),
        (["-i", "x=nope", "-i", "scale=zeros"], "neither"),
        (["-i", "x=missing.npy", "-i", "scale=zeros"], "cannot read missing.npy"),
        (["-i", "x=[[1, 2]]", "-i", "scale=zeros"], "must have 3 at axis 1"),
        (["-i", "x=zeros", "-i", "scale=zeros", "-f", "produkt"], "did you mean 'product'"),
    ],
)
def test_invalid_input_exits_with_1_and_an_explanation(model, arguments, message):
    result = call("run", model, *arguments)
    assert result.exit_code == 1
    assert message in result.stderr
    error = as_json("run", model, *arguments, code=1)["error"]
    assert error["type"] == "InvalidInput"
    assert message in error["message"]


@pytest.fixture
def graph_def(tmp_path: Path) -> str:
    """A GraphDef, whose input ``n:0`` has the alias ``n``."""
    b = Builder()
    b.node("Neg", b.placeholder("n", "float32", -1), name="y", T=Type("float32"))
    path = tmp_path / "neg.pb"
    path.write_bytes(b.bytes())
    return str(path)


def test_run_takes_an_alias_of_an_input(graph_def, tmp_path):
    np.savez(tmp_path / "n.npz", n=np.ones(2, np.float32))
    for argument in ("n=[1, 1]", "n:0=[1, 1]", f"{tmp_path}/n.npz"):
        result = as_json("run", graph_def, "-i", argument)
        assert result["outputs"]["y:0"]["first"] == [-1, -1]
    result = as_json("run", graph_def, "-i", "n=random:7")
    assert result["outputs"]["y:0"]["shape"] == [7]


@pytest.mark.parametrize("command", [["profile", "--no-trace"], ["bench", "--seconds", "0"]])
def test_measuring_commands_take_an_alias_of_an_input(graph_def, tmp_path, monkeypatch, command):
    monkeypatch.setenv("PENSTOCK_CACHE", str(tmp_path / "cache"))
    as_json(*command, graph_def, "-i", "n=random:7")


def test_info_takes_the_shape_of_an_alias(graph_def):
    assert as_json("info", graph_def, "--shape", "n=7")["plan"]["inputs"] == {"n:0": "float32[7]"}


@pytest.mark.parametrize(
    "arguments",
    [
        ["run"],
        ["jog"],
        ["run", "MODEL", "--input", "x"],
        ["run", "MODEL", "--input", "x=zeros:-1"],
        ["info", "MODEL", "--shape", "x=axb"],
        ["info", "MODEL", "--shape", "x=-1x3"],
        ["bench", "MODEL", "--backends", "nimpy"],
        ["run", "MODEL", "--executor", "linear", "--devices", "2"],
        ["run", "MODEL", "--devices", "x"],
        ["run", "MODEL", "--max-streams", "2"],
    ],
)
def test_wrong_usage_exits_with_2(model, arguments):
    result = call(*[model if a == "MODEL" else a for a in arguments])
    assert result.exit_code == 2


def test_wrong_value_of_the_environment_exits_with_2(model, monkeypatch):
    monkeypatch.setenv("PENSTOCK_EXECUTOR", "fast")
    result = call("info", model, "--plan")
    assert result.exit_code == 2
    assert "PENSTOCK_EXECUTOR='fast'" in result.stderr


def test_warning_is_a_line_on_stderr(model):
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        result = call("info", model, "--plan", "--backends", "numpy", "--precision", "bf16")
    assert result.exit_code == 0
    assert result.stderr.startswith('warning: precision="bf16" computes in float32 here')


@pytest.mark.parametrize("command", ["run", "info", "check", "plan"])
def test_missing_file_exits_with_1(command, tmp_path):
    assert call(command, str(tmp_path / "no.onnx")).exit_code == 1


def test_info_lists_inputs_outputs_and_operations(model, numpy_alone):
    result = as_json("info", model, "--shape", "x=5x3")
    assert result["inputs"] == {"x": "float32[N, 3]", "scale": "float32[3]"}
    assert result["operations"] == {"Mul": 1, "Add": 1}
    assert result["parameters"] == 3
    assert result["plan"]["outputs"] == {"y": "float32[5, 3]"}
    assert result["plan"]["flops"] == 30
    assert result["plan"]["arena_bytes"] == 60
    text = call("info", model, "--plan").stdout
    assert "lower bound" in text
    assert "Mul" in text


def test_info_compiles_only_for_a_plan(model, monkeypatch):
    def refuse(*arguments: object, **options: object) -> None:
        raise AssertionError("info compiles")

    monkeypatch.setattr("penstock.session.session.compile", refuse)
    assert "plan" not in as_json("info", model)
    assert "lower bound" not in call("info", model).stdout
    with pytest.raises(AssertionError, match="info compiles"):
        as_json("info", model, "--plan")


def test_check_reports_everything(model, tmp_path):
    assert as_json("check", model) == {"ok": True, "problems": [], "unsupported": []}
    bad = model_from_text(
        "g (float[2] x) => (float[2] y) { a = my.domain.Foo(x) b = my.domain.Bar(a) y = Add(a, b) }",
        domains={"my.domain": 1},
    )
    path = tmp_path / "bad.onnx"
    onnx.save(bad, path)
    result = as_json("check", str(path), code=1)
    assert not result["ok"]
    assert len(result["unsupported"]) == 2
    assert "my.domain.Foo" in call("check", str(path)).stdout


def test_check_of_a_file_that_is_no_model_exits_with_1(tmp_path):
    path = tmp_path / "garbage.onnx"
    path.write_bytes(b"\xff\x00garbage" * 10)
    result = as_json("check", str(path), code=1)
    assert "garbage.onnx" in result["problems"][0]


def test_plan_prints_steps_and_source(model, numpy_alone):
    text = call("plan", model, "--shape", "x=2x3").stdout
    assert "arena 24 B" in text
    assert "Mul(" in text
    source = call("plan", model, "--source").stdout
    assert source.startswith("def run(control")


def test_version_is_printed():
    assert "0.1.0" in call("--version").stdout


def test_run_writes_a_trace(model, tmp_path):
    trace = tmp_path / "run.json"
    arguments = ["-i", "x=[[1, 2, 3]]", "-i", "scale=[1, 1, 2]", "--executor", "dataflow"]
    as_json("run", model, *arguments, "--trace", str(trace))
    events = json.loads(trace.read_text())["traceEvents"]
    names = {event["name"] for event in events if event["ph"] == "X"}
    assert any("Mul_0" in name for name in names)


def test_info_says_what_the_backends_run_on():
    found = as_json("info")["backends"]
    assert found["numpy"] == f"NumPy {np.__version__}"
    assert found.keys() == BACKENDS.keys()
    assert (" kernels for " in found["native"]) == (native_library() is not None)
    assert found["native"].startswith("not available: ") == (native_library() is None)
    if library() is not None:
        assert found["onednn"].startswith("oneDNN 3.")
        assert "libdnnl" in found["onednn"]
    shown = " ".join(call("info").output.split())
    assert all(" ".join(what.split()) in shown for what in found.values())


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


@pytest.mark.parametrize("backends", [["numpy"], ["onednn", "numpy"]])
def test_profile_measures_shows_and_traces(model, tmp_path, monkeypatch, backends):
    if "onednn" in backends and library() is None:
        pytest.skip("needs libdnnl.so.3")
    monkeypatch.setattr(registry, "available", lambda: tuple(backends))
    monkeypatch.setenv("PENSTOCK_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    result = as_json("profile", model, "-i", "x=random:7x3", "--runs", "3")
    fused = "onednn" in backends
    assert {row["name"] for row in result["operations"]} <= {"Mul", "Add", "Mul+Add"}
    assert {row["count"] for row in result["steps"]} == {3}
    assert {row["backend"] for row in result["steps"]} <= set(backends)
    assert sum(row["share"] for row in result["steps"]) == pytest.approx(1)
    assert result["runs"] == 3
    assert 0 <= result["outside_ms"] <= result["ms"]
    times = sum(row["ms"] for row in result["steps"]) + result["outside_ms"]
    assert times == pytest.approx(result["ms"], rel=0.05)
    assert {row["flops"] for row in result["steps"]} <= {21, 42}
    assert result["peak"]["gflops_per_s"] > 0 and result["inputs"]["x"] == "float32[7, 3]"
    assert result["effective"]["executor"] in result["effective_line"]
    assert "traceEvents" in json.loads((tmp_path / "affine.trace.json").read_text())
    machine = measured_variants(tmp_path / "cache" / "costs.sqlite")
    # Where chains are fused, they are measured, too.
    chains = ["penstock.Fused"] if fused else []
    assert {name: costs.keys() for name, costs in machine.items()} == {
        name: {"Mul", "Add", *chains} for name in backends
    }
    shown = call("profile", model, "--no-trace").output
    assert "outside" in shown
    assert "Mul_0 in affine.onnx" in shown


def test_profile_names_what_cannot_run(model):
    result = as_json("profile", model, "-i", "x=random:7x4", "--no-trace", code=1)
    assert "must have 3 at axis 1" in result["error"]["message"]


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


# Passes and the text form.

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


@pytest.mark.skipif(library() is None, reason="no oneDNN")
def test_plan_after_fuse_shows_the_nodes_of_a_fused_node(foldable):
    # So large that oneDNN takes less time for it than the compiled kernels.
    text = call("plan", foldable, "--shape", "x=100000x4", "--after", "fuse").stdout
    assert 'penstock.Fused-1{ops="MatMul Mul"}' in text
    assert "region: graph(" in text


@pytest.mark.skipif(library() is None, reason="no oneDNN")
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


def test_help_lists_every_command_without_importing_any():
    program = (
        "import sys; from penstock.cli import main; main(['--help'], standalone_mode=False);"
        "print(*[m for m in ('numpy', 'rich', 'penstock.cli.base') if m in sys.modules])"
    )
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    lines = done.stdout.splitlines()
    assert [line.split()[0] for line in lines[-len(COMMANDS) - 1 : -1]] == sorted(COMMANDS)
    assert lines[-1] == ""


def test_info_without_a_model_tells_of_the_installation(tmp_path, monkeypatch):
    monkeypatch.setenv("PENSTOCK_CACHE", str(tmp_path / "cache"))
    found = as_json("info")
    assert found["backends"].keys() == BACKENDS.keys()
    assert found["packages"]["numpy"] == np.__version__
    assert found["folders"]["costs"].startswith(str(tmp_path))
    assert found["environment"]["PENSTOCK_CACHE"] == str(tmp_path / "cache")
    assert f"threads         {found['threads']}" in call("info").output
    assert call("info", "--plan").exit_code == 2


def test_info_shows_declared_outputs_producer_and_opset(tmp_path):
    proto = model_from_text(MODEL)
    proto.producer_name, proto.doc_string = "maker", "what it is for"
    onnx.helper.set_model_props(proto, {"classes": "3"})
    path = tmp_path / "made.onnx"
    onnx.save(proto, path)
    found = as_json("info", str(path))
    assert found["outputs"] == {"y": "float32[N, 3]"}
    assert found["about"]["producer"] == "maker"
    assert found["about"]["opset"] == "ai.onnx 20"
    assert found["metadata"] == {"classes": "3"}
    shown = call("info", str(path)).output
    assert "y: float32[N, 3]" in shown and "what it is for" in shown and "classes: 3" in shown


@pytest.mark.parametrize(
    "command", [["bench", "--seconds", "0"], ["profile", "--no-trace"], ["run"]]
)
def test_first_unknown_dims_are_named_and_others_asked_for(tmp_path, monkeypatch, command):
    monkeypatch.setenv("PENSTOCK_CACHE", str(tmp_path / "cache"))
    path = str(tmp_path / "m.onnx")
    onnx.save(model_from_text("g (float[N, C] x) => (float[N, C] y) { y = Neg(x) }"), path)
    feed = ["-i", "x=random"]
    assert "--shape x=1x64" in as_json(*command, path, *feed, code=1)["error"]["message"]
    found = as_json(*command, path, *feed, "--shape", "x=5x4")
    assert found["inputs"] == {"x": "float32[5, 4]"} and not found["assumed"]
    onnx.save(model_from_text("g (float[N, 3] x) => (float[N, 3] y) { y = Neg(x) }"), path)
    found = as_json(*command, path, *feed)
    assert found["assumed"] == {"x": "dim 0 of float32[N, 3] is taken for 1"}
    assert "dim 0 of float32[N, 3] is taken for 1" in call(*command, path, *feed).output


@pytest.mark.parametrize(
    "arguments",
    [
        ["run", "MODEL", "--trace", "NO/t.json"],
        ["run", "MODEL", "--dump", "NO/t.npz"],
        ["run", "MODEL", "-o", "FILE/out"],
        ["plan", "MODEL", "--svg", "NO/x.svg"],
        ["profile", "MODEL", "--trace", "NO/t.json"],
        ["compile", "MODEL", "-o", "NO/x.penstock"],
    ],
)
def test_files_that_cannot_be_written_are_refused_before_the_model_is_read(tmp_path, arguments):
    (tmp_path / "file").write_text("")
    places = {"NO": str(tmp_path / "no"), "FILE": str(tmp_path / "file")}
    for name, place in places.items():
        arguments = [a.replace(name + "/", place + "/") for a in arguments]
    missing = str(tmp_path / "missing.onnx")
    result = call(*[missing if a == "MODEL" else a for a in arguments])
    assert result.exit_code == 2
    assert "cannot " in result.output and "missing.onnx" not in result.output


def test_files_that_are_tried_are_not_left_behind(tmp_path):
    call("run", str(tmp_path / "missing.onnx"), "--trace", str(tmp_path / "t.json"))
    assert not (tmp_path / "t.json").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["plan", "MODEL", "--source", "--streams"], "name one"),
        (["plan", "MODEL", "--source", "--simulate", "2"], "name one"),
        (["plan", "MODEL", "--max-streams", "2"], "--max-streams is for"),
        (["plan", "MODEL", "--max-elements", "2"], "--max-elements is for --after"),
        (["info", "MODEL", "--threads", "1"], "are for --plan"),
        (["profile", "MODEL", "--no-trace", "--trace", "t.json"], "--no-trace"),
        (["run", "MODEL", "--limits", "max_dogs=1"], "there is no limit"),
        (["run", "MODEL", "--timeout", "-1"], "--timeout"),
        (["run", "MODEL", "--import", "no_such_module"], "cannot import"),
    ],
)
def test_options_that_do_nothing_are_usage_errors_in_json_too(
    model, tmp_path, monkeypatch, arguments, message
):
    monkeypatch.chdir(tmp_path)
    arguments = [model if a == "MODEL" else a for a in arguments]
    found = as_json(*arguments, code=2)
    assert message in found["error"]["message"]
    assert found["error"]["type"] == "UsageError"


def test_every_command_that_compiles_takes_the_options_of_compiling(model, tmp_path):
    options = ["--backends", "numpy", "--precision", "strict", "--threads", "1"]
    options += ["--limits", "max_iterations=10", "--place", "Mul=numpy", "--executor", "dataflow"]
    shape = ["--shape", "x=2x3"]
    plan = as_json("plan", model, *shape, *options)["plan"]
    assert plan["effective"] == {
        "executor": "dataflow",
        "precision": "strict",
        "devices": [],
        "threads": 1,
        "backends": ["numpy"],
    }
    assert "dataflow" in as_json("info", model, *shape, *options)["plan"]["effective"]
    feeds = ["-i", "x=random:2x3", "-i", "scale=random"]
    assert as_json("run", model, *feeds, *options)["outputs"]["y"]["shape"] == [2, 3]
    output = ["-o", str(tmp_path / "m.penstock")]
    assert as_json("compile", model, *shape, *options, *output)["plans"]


def test_import_registers_operations_of_a_module(tmp_path, monkeypatch):
    (tmp_path / "own_operations_for_the_test.py").write_text("loaded = True\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    path = tmp_path / "m.onnx"
    onnx.save(model_from_text("g (float[2] x) => (float[2] y) { y = Neg(x) }"), path)
    as_json("check", str(path), "--import", "own_operations_for_the_test")
    assert sys.modules.pop("own_operations_for_the_test").loaded


def test_plan_with_reasons_says_why_each_step_is_where_it_is(model, numpy_alone):
    text = call("plan", model, "--reasons").stdout
    assert text.count("# the only backend with a kernel for it") == 2


def test_report_writes_a_page_and_says_what_differs(model, tmp_path):
    path = tmp_path / "r.html"
    result = call(
        "report",
        model,
        "-o",
        str(path),
        "--shape",
        "x=2x3",
        "--runs",
        "1",
        "--against",
        "backends=numpy",
    )
    assert result.exit_code == 0, result.output
    assert path.read_text(encoding="utf-8").startswith("<!DOCTYPE html>")
    assert "largest relative difference" in result.output


@pytest.mark.parametrize("against", ["backends", "colour=red", "executor=slow", "threads=0"])
def test_report_refuses_what_it_cannot_compare_with(model, tmp_path, against):
    result = call("report", model, "-o", str(tmp_path / "r.html"), "--against", against)
    assert result.exit_code == 2
    assert not (tmp_path / "r.html").exists()


def test_info_of_the_installation_imports_no_torch(tmp_path):
    """That takes seconds, and its version is in its metadata."""
    program = "import sys\nfrom penstock.cli import main\nmain(['info'], standalone_mode=False)\n"
    program += "assert 'torch' not in sys.modules\n"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert re.search(r"^torch +(PyTorch \d|not available)", done.stdout, re.MULTILINE)
