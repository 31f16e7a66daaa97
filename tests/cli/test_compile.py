"""``penstock compile``."""

from __future__ import annotations

import json

import numpy as np
import pytest
from click.testing import CliRunner

import penstock as ps
from penstock.cli import main
from tests.support.onnx_text import model_from_text


@pytest.fixture
def model(tmp_path):
    path = tmp_path / "model.onnx"
    text = "g (float[N, 3] x, float[M, 3] z) => (float[N, 3] y) { a = Exp(x) y = Add(a, z) }"
    path.write_bytes(model_from_text(text).SerializeToString())
    return path


def invoke(*arguments):
    return CliRunner().invoke(main, ["compile", *map(str, arguments)])


def test_compile_writes_plans_for_all_dims(model, tmp_path):
    out = tmp_path / "out.penstock"
    dims = ["--shape", "x=1x3", "--shape", "x=4x3", "--shape", "z=1x3"]
    done = invoke(model, "-o", out, *dims, "--executor", "linear", "--json")
    result = json.loads(done.output)
    assert result["plans"] == [{"x": [1, 3], "z": [1, 3]}, {"x": [4, 3], "z": [1, 3]}]
    assert result["bytes"] == out.stat().st_size
    opened = ps.open(out)
    assert opened.options.executor == "linear"
    ones = np.ones((1, 3), np.float32)
    np.testing.assert_allclose(opened.run({"x": ones, "z": ones})["y"], np.exp(ones) + 1, rtol=1e-6)


def test_compile_without_shapes_keeps_the_graph(model):
    done = invoke(model)
    assert "model.penstock" in done.output
    assert "nothing yet: name dims with --shape" in done.output
    assert model.with_suffix(".penstock").exists()


def test_compiled_model_is_replaced_only_if_it_is_named_as_output(model):
    invoke(model)
    path = model.with_suffix(".penstock")
    before = path.read_bytes()
    done = invoke(path, "--shape", "x=1x3", "--shape", "z=1x3")
    assert done.exit_code == 2
    assert "name another file with --output" in " ".join(done.stderr.split())
    assert path.read_bytes() == before
    done = invoke(path, "-o", path, "--shape", "x=1x3", "--shape", "z=1x3", "--json")
    assert json.loads(done.output)["plans"] == [{"x": [1, 3], "z": [1, 3]}]


def test_compile_takes_an_open_first_dim_for_1_and_says_so(model):
    done = invoke(model, "--shape", "x=1x3", "--shape", "x=2x3")
    assert "x=1x3 z=1x3" in done.stdout and "x=2x3 z=1x3" in done.stdout
    assert "input z: dim 0 of float32[M, 3] is taken for 1" in done.stdout


def test_compile_takes_sizes_of_dims_by_their_names(model):
    done = invoke(model, "--shape", "N=2", "--shape", "M=1", "--shape", "M=2", "--json")
    assert json.loads(done.output)["plans"] == [
        {"x": [2, 3], "z": [1, 3]},
        {"x": [2, 3], "z": [2, 3]},
    ]


def test_other_commands_take_saved_sessions(model):
    invoke(model)
    path = str(model.with_suffix(".penstock"))
    arguments = ["run", path, "-i", "x=ones:2x3", "-i", "z=zeros:2x3"]
    arguments[3] = "x=zeros:2x3"
    done = CliRunner().invoke(main, [*arguments, "--json"])
    assert json.loads(done.output)["outputs"]["y"]["mean"] == 1.0
