"""Looking at graphs that only frames can run: explain, forecasts, schedules, profiles, the CLI."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

import penstock as ps
from penstock.cli import main
from penstock.plan.plan import Plan, StepTable
from tests.executors.frames.test_partitioned import Unknown
from tests.support.tf_graphs import Flow

TURNS = 5
COMMANDS = pytest.mark.parametrize("command", ["forecast", "schedule"])


def unraisable() -> bytes:
    """A loop that reads the index output of a Merge, for which Loop has no counterpart."""
    g = Flow()
    g.placeholder("n", "int32")
    zero = g.const(np.int32(0), "zero")
    g.loop("f", zero, "n")
    g.carry("f", "v", zero, lambda v: g.op("AddV2", v, "f/i/merge:1", name="f/late"))
    return g.bytes()


@pytest.fixture
def session() -> ps.Session:
    session = ps.compile(unraisable(), backends=["numpy"])
    assert session.run({"n": np.int32(TURNS)})["f/v/exit:0"] == TURNS - 1
    return session


@pytest.fixture
def model(tmp_path: Path) -> str:
    path = tmp_path / "loop.pb"
    path.write_bytes(unraisable())
    return str(path)


def simulate(session: ps.Session, command: str) -> object:
    return session.inspect.forecast(2) if command == "forecast" else session.inspect.schedule()


def test_explain_of_frames_lists_steps_without_order_or_arena(session):
    text = session.explain()
    assert "no order and no arena planned" in text
    assert "NextIteration(" in text
    assert "f/late" in text


def test_plan_of_frames_is_a_step_table(session):
    assert isinstance(session.inspect.plan, StepTable)
    assert not isinstance(session.inspect.plan, Plan)
    assert "f/late" in {step.node.name for step in session.inspect.plan.walk()}


@COMMANDS
def test_schedule_of_a_loop_in_frames_is_refused_with_the_reason(session, command):
    with pytest.raises(ps.Unsupported, match=r"NextIteration: how often its loop runs .*profile"):
        simulate(session, command)


@COMMANDS
def test_schedule_of_parts_on_several_devices_is_refused_with_the_reason(command):
    g = Flow()
    g.placeholder("x", "float32")
    for i, name in enumerate(("a", "b")):
        g.op("Neg", "x" if not i else "a", name=name, T="float32")
        g.proto.node[-1].device = f"/device:CPU:{i}"
    session = ps.compile(g.bytes(), devices=2, backends=[Unknown()])
    assert session.run({"x": np.float32(3)})["b:0"] == 3
    with pytest.raises(ps.Unsupported, match=r"_Recv: the parts .* wait for one another"):
        simulate(session, command)


@COMMANDS
def test_schedule_of_frames_without_loops_is_simulated(command):
    g = Flow()
    g.placeholder("x", "int32")
    g.op("Neg", "x", name="y")
    session = ps.compile(g.bytes(), executor="frames", backends=["numpy"])
    session.run({"x": np.int32(1)})
    assert simulate(session, command)


def test_profile_of_frames_counts_every_iteration(session):
    profile = session.profile({"n": np.int32(TURNS)}, runs=3)
    counts = {row.name: row.count for row in profile.by_node()}
    (late,) = [name for name in counts if "f/late" in name]
    assert counts[late] == 3 * TURNS
    assert profile.runs == 3
    assert {row.name for row in profile.by_backend()} == {"numpy"}


@pytest.mark.parametrize("arguments", [["plan"], ["plan", "--source"], ["info"]])
def test_command_on_frames_prints_steps(model, arguments):
    result = CliRunner().invoke(main, [*arguments, model], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    assert "NextIteration" in result.output


@pytest.mark.parametrize("option", [["--simulate", "2"], ["--streams"]])
def test_plan_command_on_frames_refuses_schedules(model, option):
    result = CliRunner().invoke(main, ["plan", model, *option], catch_exceptions=False)
    assert result.exit_code == 1
    assert "how often its loop runs is known only during a run" in result.output


@pytest.mark.parametrize("executor", ["auto", "frames"])
def test_profile_command_on_frames_shows_nodes(model, executor):
    arguments = ["profile", model, "-i", f"n:0={TURNS}", "--runs", "2", "--no-trace", "--json"]
    result = CliRunner().invoke(main, [*arguments, "--executor", executor], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout)
    (late,) = [row for row in report["steps"] if "f/late" in row["name"]]
    assert late["count"] == 2 * TURNS
    assert report["effective"]["executor"] == "frames"
