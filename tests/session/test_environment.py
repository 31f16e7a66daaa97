"""Options by environment variables, and their precedence."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

import penstock as ps
from penstock.cli import main
from penstock.session import environment
from penstock.session.environment import TRACE, VARIABLES
from tests.support.onnx_text import compile_text

TEXT = "g (float[2] x) => (float[2] y) { a = Sin(x) y = Neg(a) }"
X = {"x": np.ones(2, np.float32)}


def backends(session: ps.Session) -> dict[str, str]:
    return {step.node.op.name: step.backend for step in session.inspect.plan.walk()}


def test_environment_gives_options_that_the_caller_does_not(monkeypatch):
    monkeypatch.setenv("PENSTOCK_EXECUTOR", "dataflow")
    monkeypatch.setenv("PENSTOCK_BACKENDS", "numpy")
    monkeypatch.setenv("PENSTOCK_THREADS", "1")
    session = compile_text(TEXT, shapes={})
    assert session.inspect.executor.name == "dataflow"
    assert set(backends(session).values()) == {"numpy"}
    assert session.options.threads == 1
    given = compile_text(TEXT, executor="linear", threads=2, shapes={})
    assert (given.inspect.executor.name, given.options.threads) == ("linear", 2)
    assert compile_text(TEXT, executor="auto", shapes={}).inspect.executor.name == "linear"
    assert compile_text(TEXT, threads=None).options.threads == 1


def test_executor_of_the_environment_is_left_out_where_others_decide(monkeypatch):
    monkeypatch.setenv("PENSTOCK_EXECUTOR", "dataflow")
    cluster = ps.SimulatedCluster(2, bandwidth=1e9, latency=1e-2)
    session = compile_text(TEXT, cluster=cluster)
    assert session.options.executor == "auto"
    assert session.inspect.forecast_on_cluster({"x": (2,)}).used == 1
    assert compile_text(TEXT, devices=2).options.executor == "auto"
    with pytest.raises(ValueError, match="cluster="):
        compile_text(TEXT, cluster=cluster, executor="dataflow")


def test_environment_places_what_models_and_sessions_have(monkeypatch):
    monkeypatch.setenv("PENSTOCK_PLACE", "Sin=numpy; Conv=native; node:none=native")
    session = compile_text(TEXT, backends=["native", "numpy"], shapes={})
    assert backends(session)["Sin"] == "numpy"
    assert session.options.place == {"Sin": "numpy"}


@pytest.mark.parametrize(
    ("name", "text", "says"),
    [
        ("PENSTOCK_EXECUTOR", "fast", "'fast' is not one of auto, linear"),
        ("PENSTOCK_BACKENDS", "numpy,gpu", "'gpu' is not one of native, numpy, torch"),
        ("PENSTOCK_PLACE", "Conv", "the form is OPERATION=BACKEND"),
        ("PENSTOCK_PLACE", "Conv=gpu", "'gpu' is not one of"),
        ("PENSTOCK_THREADS", "0", "a number of threads is needed"),
        ("PENSTOCK_TRACE", "profile.json@1/0", "the form is FILE, or FILE@1/100"),
        ("PENSTOCK_TRACE", "@1/100", "the form is FILE, or FILE@1/100"),
    ],
)
def test_wrong_value_in_the_environment_names_the_variable(monkeypatch, name, text, says):
    monkeypatch.setenv(name, text)
    with pytest.raises(ValueError, match=f"{name}='{text}': {says}"):
        compile_text(TEXT)


def test_environment_traces_all_runs_of_the_process(monkeypatch, tmp_path):
    monkeypatch.setenv(TRACE, str(tmp_path / "run-%p.json"))
    with compile_text(TEXT, backends=["numpy"]) as session:
        session.run(X)
        session.submit(X).result()
    (path,) = tmp_path.iterdir()
    events = json.loads(path.read_text())["traceEvents"]
    assert sum(event["ph"] == "X" and "Sin" in event["name"] for event in events) == 2


def test_trace_of_the_environment_is_bounded_in_a_process_of_many_runs(monkeypatch, tmp_path):
    monkeypatch.setenv(TRACE, str(tmp_path / "run.json"))
    monkeypatch.setattr(environment, "TRACED", 7)
    with compile_text(TEXT, backends=["numpy"]) as session:
        sizes = []
        for _ in range(10):
            session.run(X)
            environment.save_recording()
            sizes.append(len(json.loads((tmp_path / "run.json").read_text())["traceEvents"]))
    assert sizes[4:] == sizes[4:5] * 6


def test_commands_take_the_executor_of_the_environment(monkeypatch, tmp_path):
    from tests.support.onnx_text import model_from_text

    path = tmp_path / "model.onnx"
    path.write_bytes(model_from_text(TEXT).SerializeToString())
    monkeypatch.setenv("PENSTOCK_EXECUTOR", "dataflow")
    result = CliRunner().invoke(main, ["plan", str(path), "--source"], catch_exceptions=False)
    assert "def t0(" in result.output
    arguments = ["plan", str(path), "--source", "--executor", "linear"]
    result = CliRunner().invoke(main, arguments, catch_exceptions=False)
    assert "def run(" in result.output


def test_reference_lists_every_variable():
    page = Path("docs/reference/environment.md").read_text()
    assert all(f"`{name}`" in page for name in (*VARIABLES, TRACE))
