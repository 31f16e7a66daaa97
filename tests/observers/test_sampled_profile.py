"""Profiles of some of the runs of a process, as the environment asks for them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import penstock as ps
from penstock.observers import sampled_profile
from penstock.observers.sampled_profile import SHARE, SampledProfile
from penstock.session.environment import TRACE
from tests.support.onnx_text import compile_text

TEXT = "g (float[N] x) => (float[N] y) { a = Sin(x) y = Neg(a) }"
X = {"x": np.ones(2, np.float32)}
INTERVAL = 100


class Clock:
    """A clock that a test turns."""

    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def path(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """The file of the profile; as much time may be spent as there is."""
    monkeypatch.setenv(TRACE, f"{tmp_path}/profile-%p.json@1/{INTERVAL}")
    monkeypatch.setattr(sampled_profile, "SHARE", float("inf"))
    return tmp_path


def written(path: Path) -> Any:
    (file,) = path.iterdir()
    return json.loads(file.read_text())


def ways() -> dict[str, Any]:
    def enough(session: ps.Session, run: Any) -> None:
        for _ in range(2 * INTERVAL):
            run(session)

    def under_control(session: ps.Session) -> None:
        from penstock.executors.control import begin_run, end_run

        control = begin_run(60.0, None)
        session._run_under(control, X)
        end_run(control)

    return {
        "run": lambda session: enough(session, lambda s: s.run(X)),
        "call": lambda session: enough(session, lambda s: s(X["x"])),
        "run with options": lambda session: enough(session, lambda s: s.run(X, timeout=60.0)),
        "submit": lambda session: enough(session, lambda s: s.submit(X).result()),
        "server": lambda session: enough(session, under_control),
    }


@pytest.mark.parametrize("way", ways())
def test_one_run_in_a_hundred_is_observed(path: Path, way: str) -> None:
    with compile_text(TEXT, backends=["numpy"]) as session:
        ways()[way](session)
    profile = written(path)
    assert profile["runs"] == 2
    assert sorted((step["operation"], step["count"]) for step in profile["steps"]) == [
        ("Neg", 2),
        ("Sin", 2),
    ]
    assert sum(step["share"] for step in profile["steps"]) == pytest.approx(1.0)


@pytest.mark.parametrize("executor", ["linear", "dataflow", "parallel", "streams", "frames"])
def test_every_executor_is_sampled(path: Path, executor: str) -> None:
    with compile_text(TEXT, backends=["numpy"], executor=executor) as session:
        for _ in range(INTERVAL):
            session.run(X)
    assert written(path)["runs"] == 1


def test_runs_that_fail_are_left_out(path: Path) -> None:
    token = ps.CancelToken()
    token.cancel()
    with compile_text(TEXT, backends=["numpy"]) as session:
        for _ in range(INTERVAL - 1):
            session.run(X)
        with pytest.raises(ps.Cancelled):
            session.run(X, cancel=token)
        for _ in range(INTERVAL):
            session.run(X)
    assert written(path)["runs"] == 1


def test_profile_is_read_as_others_are(path: Path) -> None:
    """``penstock plan --cost`` and ``SimulatedCluster`` read what ``Profile.save`` writes."""
    with compile_text(TEXT, backends=["numpy"]) as session:
        for _ in range(INTERVAL):
            session.run(X)
        session.profile(X, runs=1).save(path / "profile")
    (other,) = [file for file in path.iterdir() if file.name != "profile"]
    mine, theirs = (json.loads(file.read_text()) for file in (other, path / "profile"))
    assert mine.keys() == theirs.keys()
    assert {*map(frozenset, mine["steps"])} == {*map(frozenset, theirs["steps"])}


def test_runs_are_observed_for_a_hundredth_of_the_time() -> None:
    clock = Clock()
    profile = SampledProfile(INTERVAL, lambda: None, clock)

    def chosen(runs: int) -> int:
        return sum(profile.take() is not None for _ in range(runs))

    assert chosen(INTERVAL) == 1
    run: Any = object()
    profile._running[run] = sampled_profile.Profile(), clock.now
    clock.now += 1.0
    profile.run_end(run, ValueError())
    clock.now += 0.9 / SHARE
    assert chosen(5 * INTERVAL) == 0
    clock.now += 0.1 / SHARE
    assert chosen(INTERVAL) == 1


def test_profile_is_there_from_the_first_observed_run_on(path: Path) -> None:
    session = compile_text(TEXT, backends=["numpy"])
    for _ in range(INTERVAL):
        session.run(X)
    assert written(path)["runs"] == 1
    for _ in range(16 * INTERVAL):
        session.run(X)
    assert written(path)["runs"] == 17


def test_shapes_without_end_are_bounded(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampled_profile, "_MOST_STEPS", 20)
    monkeypatch.setenv(TRACE, f"{path}/profile-%p.json@1/1")
    with compile_text(TEXT, backends=["numpy"]) as session:
        for size in range(1, 30):
            session.run({"x": np.ones(size, np.float32)})
    profile = written(path)
    assert profile["runs"] == 29
    assert len(profile["steps"]) <= 20


def test_folder_that_is_not_there_ends_no_run(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(sampled_profile, "SHARE", float("inf"))
    monkeypatch.setenv(TRACE, str(tmp_path / "none" / "profile.json@1/1"))
    session = compile_text(TEXT, backends=["numpy"])
    with pytest.warns(UserWarning, match=r"PENSTOCK_TRACE: no profile is written: .*none"):
        session.run(X)
    monkeypatch.delenv(TRACE)
    session.close()


def test_session_without_the_variable_observes_nothing() -> None:
    session = compile_text(TEXT, backends=["numpy"])
    assert session._controlled is None
