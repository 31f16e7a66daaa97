"""The options that commands share."""

from __future__ import annotations

import pytest

from tests.support.command_line import as_json


@pytest.mark.parametrize("command", [["profile", "--no-trace"], ["bench", "--seconds", "0"]])
def test_measuring_commands_take_an_alias_of_an_input(graph_def, tmp_path, monkeypatch, command):
    monkeypatch.setenv("PENSTOCK_CACHE", str(tmp_path / "cache"))
    as_json(*command, graph_def, "-i", "n=random:7")


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
