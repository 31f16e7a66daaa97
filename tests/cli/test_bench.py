"""``penstock bench``."""

from __future__ import annotations

import json

import onnx
import pytest
from click.testing import CliRunner

from penstock.cli import main
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
        assert 0 < row["min_ms"] <= row["median_ms"] <= row["max_ms"]
        assert row["min_ms"] <= row["geomean_ms"] * 1.0001 <= row["mean_ms"] * 1.0002
        assert row["first_ms"] > 0 and row["prepare_ms"] > 0
        assert row["runs_per_s"] > 0


def test_bench_prints_a_table(dense):
    done = invoke(dense, "--seconds", "0", "--input", "x=random:4x3")
    assert done.exit_code == 0, done.output
    assert "input x: float32[4, 3]" in done.output
    assert "geomean" in done.output and "clients" not in done.output and "runs/s" in done.output
    assert "auto" in done.output


def test_bench_reports_errors_of_clients(dense):
    done = invoke(dense, "--seconds", "0", "--input", "x=[[1, 2]]")
    assert done.exit_code == 1
    assert "InvalidInput" in done.output


def test_bench_refuses_zero_threads(dense):
    assert invoke(dense, "--threads", "0").exit_code == 2
