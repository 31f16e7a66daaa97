"""What commands have in common: wrong usage and how they end."""

from __future__ import annotations

import sys

import onnx
import pytest

from tests.support.command_line import as_json, call
from tests.support.onnx_text import model_from_text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["-i", "x=zeros"],
            "no value for scale: float32[3]; for a first look: --input scale=random",
        ),
        (["-i", "x=zeros", "-i", "skale=zeros"], "did you mean 'scale'"),
        (["-i", "x=nope", "-i", "scale=zeros"], "neither"),
        (
            ["-i", "x=missing.npy", "-i", "scale=zeros"],
            "cannot read missing.npy: No such file or directory",
        ),
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


def test_import_registers_operations_of_a_module(tmp_path, monkeypatch):
    (tmp_path / "own_operations_for_the_test.py").write_text("loaded = True\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    path = tmp_path / "m.onnx"
    onnx.save(model_from_text("g (float[2] x) => (float[2] y) { y = Neg(x) }"), path)
    as_json("check", str(path), "--import", "own_operations_for_the_test")
    assert sys.modules.pop("own_operations_for_the_test").loaded
