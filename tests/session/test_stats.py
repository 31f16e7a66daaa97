"""Counters of a session, and its lines in the log."""

from __future__ import annotations

import asyncio
import logging
import threading

import numpy as np
import pytest

import penstock as ps
from tests.support.logs import logged
from tests.support.onnx_text import compile_text
from tests.support.timing import SOON

TEXT = "g (float[N] x) => (float[N] y) { a = Exp(x) y = Neg(a) }"


def x(n: int) -> dict[str, np.ndarray]:
    return {"x": np.ones(n, np.float32)}


def test_stats_count_plans_that_are_made_found_and_kept():
    session = compile_text(TEXT, backends=["numpy"])
    assert session.stats == ps.Stats(0, 0, 0, 0, 0, 0, 0)
    for n in (1, 2, 1, 1, 2):
        session.run(x(n))
    stats = session.stats
    assert (stats.plans_made, stats.plans_kept, stats.plans_dropped) == (2, 2, 0)
    assert stats.plans_found == 3


def test_stats_count_each_run_that_finds_a_plan_once():
    session = compile_text(TEXT, backends=["numpy"], shapes=[{"x": [1]}, {"x": [1]}])
    assert session.stats.plans_found == 0  # compiled ahead: no run has looked for it
    session.run(x(1))
    session.run(x(1), timeout=60)
    session.run(x(1), observers=[ps.Profile()])
    session.run(x(1), out={"y": np.empty(1, np.float32)})
    session.submit(x(1)).result(SOON)
    session.run(x(1), ["y"])
    assert session.stats.plans_found == 6
    session.profile(x(1), runs=2)  # has runs of its own, and plans are compiled again
    session.run(x(2))
    for _ in range(2):
        with pytest.raises(ps.InvalidInput):
            session.run({"nothing": 1})
    assert (session.stats.plans_found, session.stats.runs) == (6, 9)


def test_stats_tell_plans_that_were_saved_from_those_that_are_made(tmp_path):
    session = compile_text(TEXT, backends=["numpy"])
    session.run(x(1))
    session.save(tmp_path / "saved.penstock")
    opened = ps.open(tmp_path / "saved.penstock")
    opened.run(x(1))
    assert (opened.stats.plans_opened, opened.stats.plans_made) == (1, 0)
    opened.run(x(2))
    assert (opened.stats.plans_opened, opened.stats.plans_made) == (1, 1)


def test_stats_count_runs_of_all_kinds():
    session = compile_text(TEXT, backends=["numpy"])
    session.run(x(1))
    session(np.ones(1, np.float32))
    session.run(x(1), ["a"])
    session.run(x(1), timeout=60)
    session.submit(x(1)).result(SOON)
    asyncio.run(session.arun(x(1)))
    ps.Stream().run(session, x(1)).result(SOON)
    with pytest.raises(ps.InvalidInput):
        session.run({"nothing": 1})
    assert session.stats.runs == 8
    session.profile(x(1), runs=3)  # has runs of its own
    assert session.stats.runs == 8


def test_plan_of_other_values_is_told_of_if_no_run_had_the_outputs():
    session = compile_text(TEXT, backends=["numpy"])
    session.run(x(3), ["a"])
    assert "Neg" not in session.explain()
    assert "exp" in session.source
    assert session.effective.backends == ("numpy",)
    session.run(x(3))
    assert "Neg" in session.explain()


def test_stats_count_plans_that_are_dropped():
    session = compile_text(TEXT, backends=["numpy"], limits=ps.Limits(max_plans_bytes=1))
    with logged("penstock", logging.INFO) as records:
        for n in (1, 2, 3):
            session.run(x(n))
    assert session.stats.plans_dropped == 2
    assert session.stats.plans_kept == 1
    assert sum("dropped a plan of" in record.getMessage() for record in records) == 2


def test_stats_count_submitted_runs_that_have_not_ended():
    class Waiting(ps.Observer):
        def run_begin(self, run):
            began.set()
            assert go_on.wait(SOON)

    began, go_on = threading.Event(), threading.Event()
    session = compile_text(TEXT, backends=["numpy"], max_pending=4)
    future = session.submit(x(1), observers=[Waiting()])
    assert began.wait(SOON)
    assert session.stats.pending == 1
    go_on.set()
    future.result(SOON)
    session.submit(x(1)).result(SOON)
    assert session.stats.pending == 0
