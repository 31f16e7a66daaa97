"""``penstock compare``, and ``penstock run --fetch all``."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import onnx
import pytest
from click.testing import CliRunner, Result

import penstock as ps
from penstock.cli.commands import main
from penstock.extend import HostBackend, Kernel
from tests.support.onnx_text import model_from_text

TEXT = "g (float[3] x) => (float[3] y) { a = Exp(x) b = Sin(a) y = Exp(b) }"


class Wrong(HostBackend):
    """NumPy's kernels, but a Sin that is off by one part in ten."""

    name = "wrong"

    def kernel(self, node, types):
        if node.op.name == "Sin":
            return Kernel(lambda x: np.float32(1.1) * np.sin(x))
        return node.op.compile(node, types)


@pytest.fixture
def model(tmp_path: Path) -> str:
    onnx.save(model_from_text(TEXT), tmp_path / "model.onnx")
    return str(tmp_path / "model.onnx")


@pytest.fixture
def wrong(monkeypatch) -> None:
    """The backend can be named as those of installed packages can."""
    from penstock.backends import registry

    backend_of = registry.backend_of
    monkeypatch.setattr(
        registry,
        "backend_of",
        lambda b, *a, **o: Wrong() if b == "wrong" else backend_of(b, *a, **o),
    )


def call(*arguments: str) -> Result:
    return CliRunner().invoke(main, list(arguments), catch_exceptions=False)


def test_compare_shows_the_farthest_value_first(model, wrong):
    result = call("compare", model, "--backends", "numpy", "--against", "backends=wrong", "--json")
    assert result.exit_code == 0, result.output
    values = json.loads(result.stdout)["values"]
    assert {row["name"] for row in values[:2]} == {"b", "y"}
    assert next(row for row in values if row["name"] == "b")["relative"] == pytest.approx(0.1)
    assert values[-1]["name"] == "a" and values[-1]["relative"] == 0
    text = call("compare", model, "--backends", "numpy", "--against", "backends=wrong").stdout
    assert "numpy, wrong" in text


@pytest.mark.parametrize(("tolerance", "code"), [("0.2", 0), ("0.05", 1)])
def test_compare_fails_beyond_the_tolerance(model, wrong, tolerance, code):
    against = ["--against", "backends=wrong", "--tolerance", tolerance]
    result = call("compare", model, "--backends", "numpy", *against)
    assert result.exit_code == code
    assert ("differ by more than 0.05" in result.stderr) == bool(code)


def test_compare_without_another_option_is_a_usage_error(model):
    assert call("compare", model).exit_code == 2


def test_fetch_all_gives_the_values_of_all_nodes(model):
    result = call("run", model, "-i", "x=zeros", "--fetch", "all", "--json")
    assert list(json.loads(result.stdout)["outputs"]) == ["a", "b", "y"]
    named = call("run", model, "-i", "x=zeros", "-f", "x", "-f", "all", "--json")
    assert list(json.loads(named.stdout)["outputs"]) == ["x", "a", "b", "y"]


def test_fetch_all_is_the_value_of_that_name_if_there_is_one(tmp_path):
    onnx.save(
        model_from_text("g (float[3] x) => (float[3] y) { all = Exp(x) y = Neg(all) }"),
        tmp_path / "model.onnx",
    )
    result = call("run", str(tmp_path / "model.onnx"), "-i", "x=zeros", "--fetch", "all", "--json")
    assert list(json.loads(result.stdout)["outputs"]) == ["all"]


def test_fetch_all_leaves_out_what_loops_of_frames_compute():
    path = str(Path(__file__).parents[1] / "models" / "tf" / "loop_gcd.pb")
    result = call("run", path, "-i", "a=12", "-i", "b=18", "--fetch", "all", "--json")
    assert result.exit_code == 0, result.output
    fetched = json.loads(result.stdout)["outputs"]
    outputs = {port.name for port in ps.compile(path).outputs}
    assert outputs <= fetched.keys()
    assert not any("while/Merge" in name for name in fetched)


# Outputs of two models, and of two runtimes.

SHIFTED = "g (float[3] x) => (float[3] z) <float[1] c = {0.1}> { a = Exp(x) b = Sin(a) d = Exp(b) z = Mul(d, c) }"


def test_compare_of_two_models_shows_their_outputs(model, tmp_path):
    other = str(tmp_path / "other.onnx")
    onnx.save(model_from_text(SHIFTED), other)
    (row,) = json.loads(call("compare", model, other, "--json").stdout)["outputs"]
    assert (row["name"], row["other_name"], row["same_shape"]) == ("y", "z", True)
    assert row["relative"] == pytest.approx(0.9)
    result = call("compare", model, other, "--tolerance", "0.8")
    assert result.exit_code == 1
    assert "y and z: 0.9 of the largest element" in result.stdout
    assert "outputs differ by more than 0.8" in result.stderr
    assert call("compare", model, other, "--tolerance", "0.95").exit_code == 0


def test_compare_of_two_models_compiles_the_second_with_other_options(model):
    result = call(
        "compare", model, model, "--backends", "native", "--against", "executor=interpret", "--json"
    )
    found = json.loads(result.stdout)
    assert "linear" in found["first"] and "interpret" in found["second"]


def test_compare_with_another_runtime_shows_outputs(model):
    pytest.importorskip("onnxruntime")
    result = call("compare", model, "--against", "onnxruntime", "--tolerance", "1e-5", "--json")
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert "onnxruntime 1." in found["second"]
    assert found["outputs"][0]["relative"] < 1e-5


def test_compare_takes_one_runtime_alone(model):
    result = call("compare", model, "--against", "onnxruntime", "--against", "threads=1")
    assert result.exit_code == 2
    assert "a runtime is named alone" in " ".join(result.stderr.split())
