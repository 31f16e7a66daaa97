"""The command profile: measured steps, and traces of them."""

from __future__ import annotations

import json

import pytest

from penstock.backends import registry
from penstock.host.native import library
from tests.support.command_line import as_json, call
from tests.support.costs import measured_variants


@pytest.mark.parametrize("backends", [["numpy"], ["native", "numpy"]])
def test_profile_measures_shows_and_traces(model, tmp_path, monkeypatch, backends):
    if "native" in backends and library() is None:
        pytest.skip("there are no compiled kernels")
    monkeypatch.setattr(registry, "available", lambda: tuple(backends))
    monkeypatch.setenv("PENSTOCK_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    result = as_json("profile", model, "-i", "x=random:7x3", "--runs", "3")
    fused = "native" in backends
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
