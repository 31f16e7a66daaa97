"""The table of commands: help without imports, files that are tried, exits."""

from __future__ import annotations

import subprocess
import sys
import warnings

import pytest

from penstock.cli.commands import COMMANDS
from tests.support.command_line import call


def test_warning_is_a_line_on_stderr(model):
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        result = call("info", model, "--plan", "--backends", "numpy", "--precision", "bf16")
    assert result.exit_code == 0
    assert result.stderr.startswith('warning: precision="bf16" computes in float32 here')


@pytest.mark.parametrize("command", ["run", "info", "check", "plan"])
def test_missing_file_exits_with_1(command, tmp_path):
    assert call(command, str(tmp_path / "no.onnx")).exit_code == 1


def test_version_is_printed():
    assert "0.1.0" in call("--version").stdout


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
