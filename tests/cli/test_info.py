"""The commands info and check: what a file holds, and what an installation runs on."""

from __future__ import annotations

import re
import subprocess
import sys

import numpy as np
import onnx
import pytest

from penstock.backends.registry import BACKENDS
from penstock.host.native import library as native_library
from tests.support.command_line import MODEL, as_json, call
from tests.support.onnx_text import model_from_text


def test_info_takes_the_shape_of_an_alias(graph_def):
    assert as_json("info", graph_def, "--shape", "n=7")["plan"]["inputs"] == {"n:0": "float32[7]"}


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


def test_info_says_what_the_backends_run_on():
    found = as_json("info")["backends"]
    assert found["numpy"] == f"NumPy {np.__version__}"
    assert found.keys() == BACKENDS.keys()
    assert (" kernels for " in found["native"]) == (native_library() is not None)
    assert found["native"].startswith("not available: ") == (native_library() is None)
    shown = " ".join(call("info").output.split())
    assert all(" ".join(what.split()) in shown for what in found.values())


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
    onnx.helper.set_model_props(proto, {"classes": "3", "tokens": "a" * 9000})
    path = tmp_path / "made.onnx"
    onnx.save(proto, path)
    found = as_json("info", str(path))
    assert found["outputs"] == {"y": "float32[N, 3]"}
    assert found["about"]["producer"] == "maker"
    assert found["about"]["opset"] == "ai.onnx 20"
    assert found["metadata"] == {"classes": "3", "tokens": "a" * 9000}
    shown = call("info", str(path)).output
    assert "tokens: a" in shown and "[8000 characters]" in shown
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


def test_info_of_the_installation_imports_no_torch(tmp_path):
    """That takes seconds, and its version is in its metadata."""
    program = "import sys\nfrom penstock.cli import main\nmain(['info'], standalone_mode=False)\n"
    program += "assert 'torch' not in sys.modules\n"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert re.search(r"^torch +(PyTorch \d|not available)", done.stdout, re.MULTILINE)
