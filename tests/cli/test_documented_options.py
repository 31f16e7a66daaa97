"""Options of the command line: those that documents name are there, and each one is used."""

from __future__ import annotations

import ast
import inspect
import json
import re
import sys
from pathlib import Path
from textwrap import dedent

import click
import onnx
import pytest
from click.testing import CliRunner

import penstock as ps
import penstock.cli.bench as bench
import penstock.cli.inspect as inspect_command
import penstock.cli.quantize as quantize_command
import penstock.cli.run as run
import penstock.cli.serve as serve
from penstock.cli import main
from penstock.cli.bench_text import TextTrial
from penstock.cli.commands import COMMANDS
from penstock.cli.generators import GeneratorOptions
from penstock.cli.options import compile_options
from penstock.core.records import fields
from penstock.session.session import Session
from tests.support.onnx_text import model_from_text

README = Path(__file__).parent.parent.parent / "README.md"
OWN = {  # options that a command has in another form, or that would do nothing there
    "bench": {"--executor", "--threads"},  # which may be repeated
    "plan": {"--max-streams"},  # also of the schedule that --streams draws
    "run": {"--timeout"},  # of the run
    "serve": {"--timeout"},  # of requests
    "profile": {"--autotune"},  # which is what it does
}
COMPILING = [name for name in COMMANDS if name not in ("cache", "chat", "quantize")]
"""but for "chat", which compiles decoders alone: tests/cli/test_chat.py, and for "quantize", which
compiles candidates to measure them: tests/cli/test_quantize.py"""
VALUES = {
    "executor": ("dataflow", "dataflow"),
    "memory_planner": ("bump", "bump"),
    "threads": ("1", 1),
    "backends": ("numpy", ["numpy"]),
    "precision": ("strict", "strict"),
    "dead_rows": ("any", "any"),
    "memory": ("1GB", "1GB"),
    "reproducible": (None, True),
    "place": ("Neg=numpy", {"Neg": "numpy"}),
    "limits": ("max_depth=7", ps.Limits(max_depth=7)),
    "devices": ("2", 2),
    "max_streams": ("2", 2),
    "autotune": (None, True),
    "timeout": ("60", 60.0),
}
"""of each option that commands share: what the command line says, and what the session gets"""


def command_of(name: str) -> click.Command:
    command = main.get_command(click.Context(main), name)
    assert command is not None
    return command


def flags_of(command: click.Command) -> set[str]:
    return {flag for parameter in command.params for flag in parameter.opts}


@click.command
@compile_options()
def all_options() -> None:
    """Has the options of compiling alone."""


def shared_flags() -> set[str]:
    return flags_of(all_options) - {"--import"}


def test_help_of_options_does_not_speak_of_python() -> None:
    texts = {p.name: p.help for p in all_options.params if isinstance(p, click.Option)}
    spoken = re.compile(r"\b\w+=(?![\w/])|\bobjects?\b|\bmapping\b|\barrays?\b")
    assert {name for name, text in texts.items() if text and spoken.search(text)} == set()


@pytest.fixture
def path(tmp_path: Path, monkeypatch) -> str:
    monkeypatch.chdir(tmp_path)
    onnx.save(model_from_text("g (float[2] x) => (float[2] y) { z = Neg(x) y = Sin(z) }"), "m.onnx")
    return "m.onnx"


def call(command: str, path: str, *options: str) -> tuple[int, str]:
    """The exit code of a command that compiles a model, and its answer in JSON."""
    needed = {"info": ["--plan"], "compare": ["--against", "backends=native"], "run": ["-i"]}
    rest = [*needed.get(command, []), *(["x=zeros"] if command == "run" else [])]
    arguments = [command, path, *rest, *options, "--json"]
    result = CliRunner().invoke(main, arguments, catch_exceptions=False)
    return result.exit_code, result.stdout


def test_readme_lists_the_options_of_commands_that_compile():
    (text,) = re.findall(r"take the options of `compile` \((.*?)\)", README.read_text(), re.DOTALL)
    assert set(re.findall(r"`(--[\w-]+)`", text)) == shared_flags()
    assert len(shared_flags()) == len(VALUES)


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_takes_json_and_those_that_compile_the_shared_options(name):
    flags = flags_of(command_of(name))
    assert "--json" in flags
    if name in COMPILING:
        assert shared_flags() - OWN.get(name, set()) <= flags
        assert name == "serve" or "--signature" in flags


@pytest.mark.parametrize("name", COMMANDS)
def test_every_parameter_of_a_command_is_read_by_it(name):
    callback = command_of(name).callback
    assert callback is not None
    function = ast.parse(dedent(inspect.getsource(inspect.unwrap(callback)))).body[0]
    assert isinstance(function, ast.FunctionDef)
    parameters = {a.arg for a in (*function.args.args, *function.args.kwonlyargs)}
    read = {node.id for node in ast.walk(function) if isinstance(node, ast.Name)}
    assert parameters and parameters <= read


@pytest.mark.parametrize(
    "record",
    [
        *(bench._Trials, inspect_command._Question, run.ModelInputs, run._Wanted),
        *(serve._HttpOptions, serve._ReplicaOptions, serve._StepOptions, TextTrial),
        *(GeneratorOptions, quantize_command._Options),
    ],
)
def test_every_field_of_gathered_options_is_read(record):
    tree = ast.parse(inspect.getsource(sys.modules[record.__module__]))
    read = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    assert {field.name for field in fields(record)} <= read


def test_help_has_the_options_for_experts_apart():
    for name in COMPILING:
        head, _, expert = (
            CliRunner().invoke(main, [name, "--help"]).output.partition("Expert options:")
        )
        assert "--planner" in expert and "--planner" not in head
        assert "--executor" in head and "--executor" not in expert.replace("--executor streams", "")


def flag_of(option: str) -> str:
    return "--planner" if option == "memory_planner" else "--" + option.replace("_", "-")


def pairs() -> list[tuple[str, str]]:
    """Commands with the options that they hand on as they are."""
    return [(n, o) for n in COMPILING for o in VALUES if flag_of(o) not in OWN.get(n, ())]


@pytest.mark.parametrize(("name", "option"), pairs())
def test_option_of_compiling_reaches_the_session(name, option, path, monkeypatch):
    if name == "serve":
        pytest.importorskip("uvicorn")
    met = []

    def init(self, model, options) -> None:
        met.append(options)
        raise ps.PenstockError("met")

    monkeypatch.setattr(Session, "__init__", init)
    text, value = VALUES[option]
    call(name, path, flag_of(option), *([] if text is None else [text]))
    got = met[-1].get(option)
    assert got == value or (option == "timeout" and 0 < got <= value)


BOUNDS = [("max_nodes=1", "max_nodes"), ("max_constant_bytes=1", "max_constant_bytes")]


@pytest.mark.parametrize(("limit", "message"), BOUNDS)
@pytest.mark.parametrize("name", COMPILING)
def test_limits_hold_while_a_command_reads_the_model(name, limit, message, path):
    if name == "serve":
        pytest.importorskip("uvicorn")
    text = "g (float[2] x) => (float[2] y) <float[2] w = {1, 2}> { z = Add(x, w) y = Sin(z) }"
    onnx.save(model_from_text(text), path)
    code, answer = call(name, path, "--limits", limit)
    assert code == 1
    assert f"Limits.{message} = 1" in answer


def test_limits_hold_where_a_command_only_reads_the_model(path):
    arguments = ["info", path, "--limits", "max_nodes=1", "--json"]
    result = CliRunner().invoke(main, arguments)
    assert result.exit_code == 1
    assert "Limits.max_nodes = 1" in result.stdout


@pytest.mark.parametrize("name", [n for n in COMPILING if n not in ("run", "serve")])
def test_timeout_holds_for_a_command_from_reading_on(name, path):
    code, answer = call(name, path, "--timeout", "0")
    assert code == 1
    assert json.loads(answer)["error"]["type"] == "DeadlineExceeded"


def test_timeout_of_a_command_counts_reading_and_compiling_together(path, monkeypatch):
    from penstock.cli import base

    times = iter([100.0, 107.0])
    monkeypatch.setattr(base.time, "monotonic", lambda: next(times))
    monkeypatch.setattr(base, "load", lambda *arguments, **options: options["timeout"])
    read, options = base.read_model(path, None, {"timeout": 10.0, "threads": 1})
    assert (read, options) == (10.0, {"timeout": 3.0, "threads": 1})


ASSUMING = [["info"], ["plan"], ["plan", "--source"], ["plan", "--after", "fold_constants"]]
ASSUMING += [["plan", "--planner", "all"], ["plan", "--simulate", "2"], ["plan", "--streams"]]
ASSUMING += [
    ["report"],
    ["profile", "--no-trace"],
    ["compare"],
    ["run"],
    ["bench", "--seconds", "0"],
]


@pytest.mark.parametrize("arguments", ASSUMING, ids=" ".join)
def test_open_first_dim_counts_as_1_and_the_output_says_so(arguments, path):
    onnx.save(model_from_text("g (float[N, 2] x) => (float[N, 2] y) { y = Neg(x) }"), path)
    name, *rest = arguments
    code, answer = call(name, path, *rest)
    assert code == 0
    result = json.loads(answer)
    assumed = result["plan"]["assumed"] if name == "info" else result["assumed"]
    assert assumed == {"x": "dim 0 of float32[N, 2] is taken for 1"}
    needed = {"info": ["--plan"], "compare": ["--against", "backends=native"]}.get(name, [])
    feed = ["--input", "x=zeros"] if name == "run" else []
    text = CliRunner().invoke(main, [name, path, *rest, *needed, *feed]).output
    assert "dim 0 of float32[N, 2] is taken for 1; --shape names others" in text


@pytest.mark.parametrize("name", [n for n in COMPILING if n not in ("check", "compile", "serve")])
def test_other_open_dims_are_asked_for(name, path):
    onnx.save(model_from_text("g (float[2, N] x) => (float[2, N] y) { y = Neg(x) }"), path)
    code, answer = call(name, path)
    why = answer if name == "info" else json.loads(answer)["error"]["message"]
    assert code == (0 if name == "info" else 1)  # which has the rest to tell
    assert "--shape x=2x64" in why


DEFAULTS = {"compile": "m.penstock", "report": "m.report.html", "profile": "m.trace.json"}


@pytest.mark.parametrize("name", DEFAULTS)
def test_default_file_that_cannot_be_written_is_refused_before_the_model_is_read(name, path):
    Path(DEFAULTS[name]).mkdir()
    Path(path).unlink()
    code, answer = call(name, path)
    assert code == 2
    assert f"cannot write {DEFAULTS[name]}" in answer


def test_signature_beside_a_text_is_refused(tmp_path):
    (tmp_path / "graph.txt").write_text("")
    arguments = ["plan", "--from", str(tmp_path / "graph.txt"), "--signature", "a"]
    result = CliRunner().invoke(main, arguments)
    assert result.exit_code == 2
    assert "--signature is for a MODEL" in result.output
