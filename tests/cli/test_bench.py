"""``penstock bench``."""

from __future__ import annotations

import json

import onnx
import pytest
from click.testing import CliRunner

from penstock.cli import main
from tests.support import tflite_models
from tests.support.onnx_text import model_from_text


@pytest.fixture
def dense(tmp_path):
    model = model_from_text("""dense (float[N, 3] x) => (float[N, 2] y) <float[3, 2] w = {1, 0, 0, 1, 1, 1}>
        { y = MatMul(x, w) }""")
    path = tmp_path / "dense.onnx"
    onnx.save(model, path)
    return str(path)


def invoke(*arguments: str):
    return CliRunner().invoke(main, ["bench", *arguments])


def test_bench_has_a_row_for_each_combination(dense):
    done = invoke(
        dense,
        *("--threads", "1", "--clients", "1", "--clients", "2", "--seconds", "0", "--json"),
        *("--executor", "linear", "--executor", "dataflow"),
    )
    assert done.exit_code == 0, done.output
    rows = json.loads(done.stdout)["rows"]
    assert [(r["executor"], r["threads"], r["clients"]) for r in rows] == [
        ("linear", 1, 1),
        ("linear", 1, 2),
        ("dataflow", 1, 1),
        ("dataflow", 1, 2),
    ]
    assert [r["runs"] for r in rows] == [5, 10, 5, 10]
    for row in rows:
        assert 0 < row["min_ms"] <= row["median_ms"] <= row["p95_ms"] <= row["p99_ms"]
        assert row["p99_ms"] <= row["max_ms"]
        assert row["min_ms"] <= row["geomean_ms"] * 1.0001 <= row["mean_ms"] * 1.0002
        assert row["first_ms"] > 0 and row["prepare_ms"] > 0
        assert row["runs_per_s"] > 0


def test_bench_prints_a_table(dense):
    done = invoke(dense, "--seconds", "0", "--input", "x=random:4x3")
    assert done.exit_code == 0, done.output
    assert "input x: float32[4, 3]" in done.output
    titles = done.output.splitlines()[2].split()
    assert titles[-7:] == ["mean", "median", "p95", "p99", "min", "max", "runs/s"]
    assert "clients" not in titles and "ratio" not in titles
    assert "auto" in done.output


def test_bench_reports_errors_of_clients(dense):
    done = invoke(dense, "--seconds", "0", "--input", "x=[[1, 2]]")
    assert done.exit_code == 1
    assert "InvalidInput" in done.output


def test_bench_refuses_zero_threads(dense):
    assert invoke(dense, "--threads", "0").exit_code == 2


# Against other runtimes.


def test_bench_against_a_runtime_has_a_row_for_it_with_a_ratio(dense):
    pytest.importorskip("onnxruntime")
    arguments = [dense, "--threads", "1", "--seconds", "0", "--shape", "N=4"]
    done = invoke(
        *arguments, "--against", "onnxruntime", "--turns", "3", "--json", "--clients", "2"
    )
    assert done.exit_code == 0, done.output
    result = json.loads(done.stdout)
    own, peer = result["rows"]
    assert result["turns"] == 3
    assert (own["engine"], own["executor"], own["effective"]) == ("penstock", "auto", "linear")
    assert (peer["engine"], peer["executor"]) == ("onnxruntime", None)
    assert peer["version"].startswith("1.")
    assert own["runs"] == peer["runs"] == 3 * 2 * 5  # turns, clients, least runs
    assert peer["ratio"] > 0 and "ratio" not in own
    assert peer["relative"] < 1e-6
    assert peer["threads"] == 1 and peer["p95_ms"] > 0


def test_bench_against_a_runtime_prints_ratios(dense):
    pytest.importorskip("onnxruntime")
    done = invoke(dense, "--threads", "1", "--seconds", "0", "--against", "onnxruntime")
    assert done.output.splitlines()[2].split()[0] == "runtime"
    assert "the median of 5 turns: below 1 Penstock is faster" in done.output


def test_bench_against_a_runtime_has_options_of_penstock(dense, tmp_path, monkeypatch):
    pytest.importorskip("onnxruntime")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "leaves_a_mark.py").write_text("with open('mark', 'a') as f: f.write('x')\n")
    arguments = [dense, "--threads", "1", "--seconds", "0", "--against", "onnxruntime", "--json"]
    options = ["--executor", "dataflow", "--backends", "numpy", "--import", "leaves_a_mark"]
    rows = json.loads(invoke(*arguments, *options).stdout)["rows"]
    assert [row["effective"] for row in rows] == ["dataflow", None]
    assert (tmp_path / "mark").read_text() == "xx"  # here and in Penstock's process


def test_bench_against_a_runtime_that_cannot_read_the_model_says_so(tmp_path):
    pytest.importorskip("onnxruntime")
    path = tmp_path / "m.tflite"
    x = {"x": ("float32", [2])}
    path.write_bytes(
        tflite_models.model([tflite_models.subgraph(x, [("NEG", ["x"], ["y"], None)], ["y"])])
    )
    done = invoke(str(path), "--seconds", "0", "--against", "onnxruntime")
    assert done.exit_code == 1
    assert "PenstockError: onnxruntime: " in done.stderr


def test_bench_refuses_turns_alone(dense):
    done = invoke(dense, "--turns", "3")
    assert done.exit_code == 2
    assert "--turns is for --against" in done.stderr
