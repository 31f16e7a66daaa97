"""Profiles: counts and seconds by step, over runs of all kinds."""

from __future__ import annotations

import numpy as np
import pytest

import penstock as ps
from penstock.observers.base import ObservedRun, Observer
from penstock.observers.profile import Profile
from tests.support.onnx_text import compile_text

X = np.array([1, 2, 3], np.float32)

#   x -- Exp -- a -+- Neg -- b -+- Add -- y
#                  +- Sin -- c -+
DIAMOND = "g (float[N] x) => (float[N] y) { a = Exp(x) b = Neg(a) c = Sin(a) y = Add(b, c) }"
LOOP = """g (float[3] x, int64 n) => (float[3] y) {
    y = Loop (n, , x) <body = b (int64 i, bool c, float[3] v) => (bool d, float[3] w)
        { d = Identity(c) e = Neg(v) w = Exp(e) }> }"""


@pytest.fixture(autouse=True)
def empty_cache(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("PENSTOCK_CACHE", str(tmp_path / "cache"))


def compiled(text: str = DIAMOND, **options) -> ps.Session:
    return compile_text(text, **{"backends": ["numpy"], **options})


@pytest.mark.parametrize("executor", ["linear", "dataflow", "parallel"])
def test_profile_adds_up_runs(executor):
    session = compiled(executor=executor)
    profile = Profile()
    for _ in range(5):
        session.run({"x": X}, observers=[profile])
    assert profile.runs == 5
    assert {row.name: row.count for row in profile.by_operation()} == dict.fromkeys(
        ["Exp", "Neg", "Sin", "Add"], 5
    )
    seconds = [row.seconds for row in profile.by_node()]
    assert seconds == sorted(seconds, reverse=True)
    assert all(0 < entry.best <= entry.mean for entry in profile)
    assert profile.inside <= profile.wall
    assert profile.outside == pytest.approx(profile.wall - profile.inside)
    assert sum(seconds) == pytest.approx(profile.inside)


def test_profile_counts_steps_of_loop_per_iteration():
    profile = Profile()
    compiled(LOOP).run({"x": X, "n": np.array(7)}, observers=[profile])
    assert {row.name: row.count for row in profile.by_operation()} == {"Neg": 7, "Exp": 7}


def test_profile_of_failed_run_keeps_no_open_steps():
    session = compiled("g (float[3] x, int64[1] i) => (float[1] y) { a = Neg(x) y = Gather(a, i) }")
    profile = Profile()
    with pytest.raises(ps.RunError):
        session.run({"x": X, "i": np.array([5])}, observers=[profile])
    assert profile.runs == 0
    session.run({"x": X, "i": np.array([1])}, observers=[profile])
    counts = {row.name: row.count for row in profile.by_operation()}
    assert counts["Gather"] == 1


def test_profile_observes_concurrent_runs():
    profile = Profile()
    session = compiled(shapes={"x": [3]})
    runs = [ObservedRun(session.inspect.plan, "linear") for _ in range(2)]
    step = session.inspect.plan.steps[0]
    for run in runs:
        profile.run_begin(run)
        profile.step_begin(run, step, (X,))
    for run in runs:
        profile.step_end(run, step, (X,))
        profile.run_end(run, None)
    assert profile.runs == 2
    assert profile.entries[step.node, step.backend].count == 2


def test_profile_counts_overlapping_executions_of_a_step():
    session = compiled(shapes={"x": [3]})
    run, profile = ObservedRun(session.inspect.plan, "frames"), Profile()
    step = session.inspect.plan.steps[0]
    profile.run_begin(run)
    for call in (profile.step_begin, profile.step_begin, profile.step_end, profile.step_end):
        call(run, step, ())
    profile.run_end(run, None)
    (entry,) = profile
    assert entry.count == 2


def settled(
    totals: list[float], counts: list[int], alone: list[float], observed: float = 100.0
) -> list[float]:
    """The seconds of steps with these before, once they are settled."""
    session = compiled()
    profile = Profile()
    session.run({"x": X}, observers=[profile])
    entries = list(profile)[: len(totals)]
    for entry, total, count in zip(entries, totals, counts, strict=True):
        entry.total, entry.count, entry.best = total, count, total / count
    profile.entries = {(entry.step.node, entry.step.backend): entry for entry in entries}
    profile.observed, profile.alone = observed, alone
    profile.settle()
    assert all(entry.best == entry.mean for entry in profile)
    return [entry.total for entry in profile]


def test_observing_is_taken_from_each_execution_alike():
    assert settled([6, 4, 9], [2, 2, 3], [6.0, 6.0]) == pytest.approx([4, 2, 6])


def test_runs_that_were_slower_while_observed_leave_every_step_its_share():
    # Of the 18 seconds beyond the runs alone, observing took 3 at most: as much as between steps.
    assert settled([10, 2, 12], [1, 1, 1], [6.0], observed=27) == pytest.approx(
        [9 * 6 / 21, 1 * 6 / 21, 11 * 6 / 21]
    )


def test_steps_that_take_less_than_observing_have_no_time_left():
    assert settled([10, 0.5, 8], [1, 1, 1], [4.0]) == pytest.approx([3, 0, 1])
    assert settled([10, 1], [1, 1], [0.0]) == [0, 0]


@pytest.mark.parametrize("alone", [[], [11.0]])
def test_steps_that_take_less_than_the_runs_stay_as_they_are(alone):
    assert settled([6, 4], [1, 2], alone) == [6, 4]


def test_steps_that_overlap_stay_as_they_are():
    assert settled([60, 50], [1, 1], [90.0]) == [60, 50]


@pytest.mark.parametrize("executor", ["linear", "dataflow", "frames"])
def test_session_profile_adds_up_to_runs_that_nothing_observes(executor):
    """Exactly: many small steps, of which each takes less than observing it."""
    text = "".join(f"a{i + 1} = Sin(a{i}) " for i in range(50))
    session = compiled(
        f"g (float[3] a0) => (float[3] y) {{ {text} y = Neg(a50) }}", executor=executor
    )
    profile = session.profile({"a0": X}, runs=4)
    assert profile.runs == len(profile.alone) == 4
    assert {row.count for row in profile.steps()} == {4}
    total = sum(row.seconds for row in profile.steps()) + profile.outside
    assert total == pytest.approx(sum(profile.alone))
    assert profile.observed > 0


def test_completion_shows_what_users_call():
    shown = {name for name in dir(Profile()) if not name.startswith("_")}
    assert {"steps", "by_operation", "by_backend", "save", "wall", "runs"} <= shown
    assert shown.isdisjoint({*vars(Observer), "settle", "alone"})
    assert shown <= {*object.__dir__(Profile())}
