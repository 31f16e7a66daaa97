"""The command run: values and files in, values and files out."""

from __future__ import annotations

import json

import numpy as np

from tests.support.command_line import as_json, call


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


def test_run_takes_an_alias_of_an_input(graph_def, tmp_path):
    np.savez(tmp_path / "n.npz", n=np.ones(2, np.float32))
    for argument in ("n=[1, 1]", "n:0=[1, 1]", f"{tmp_path}/n.npz"):
        result = as_json("run", graph_def, "-i", argument)
        assert result["outputs"]["y:0"]["first"] == [-1, -1]
    result = as_json("run", graph_def, "-i", "n=random:7")
    assert result["outputs"]["y:0"]["shape"] == [7]


def test_run_writes_a_trace(model, tmp_path):
    trace = tmp_path / "run.json"
    arguments = ["-i", "x=[[1, 2, 3]]", "-i", "scale=[1, 1, 2]", "--executor", "dataflow"]
    as_json("run", model, *arguments, "--trace", str(trace))
    events = json.loads(trace.read_text())["traceEvents"]
    names = {event["name"] for event in events if event["ph"] == "X"}
    assert any("Mul_0" in name for name in names)
