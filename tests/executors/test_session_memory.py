"""``memory=``: a session holds no more than its bound, and says before a run what it would need."""

from __future__ import annotations

import threading

import numpy as np
import pytest

import penstock as ps
from penstock.core.errors import OptionError
from penstock.executors.control import Control
from tests.support.bounded import WIDE, held, least, rows, session_of
from tests.support.timing import SOON


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [("512MB", 512 * 10**6), ("2GiB", 2 << 30), ("1.5 kb", 1500), ("64 B", 64), ("7", 7)],
)
def test_sizes_are_texts_or_numbers(text, nbytes):
    assert session_of(WIDE, memory=text).options.memory_bytes == nbytes


@pytest.mark.parametrize("wrong", ["", "MB", "-1GB", "1XB", "1 000MB", "nan", "infGB", 0, -5])
def test_what_is_no_size_is_refused(wrong):
    with pytest.raises(ValueError, match="memory"):
        session_of(WIDE, memory=wrong)


@pytest.mark.parametrize("options", [{"executor": "frames"}, {"executor": "interpret"}])
def test_executors_without_plans_take_no_bound(options):
    with pytest.raises(OptionError, match="memory="):
        session_of(WIDE, memory="1GB", **options)


@pytest.mark.parametrize("executor", ["linear", "parallel", "streams"])
def test_least_memory_that_is_named_does(executor):
    feeds = {"x": rows(1)}
    memory = least(WIDE, feeds, executor=executor)
    expected = session_of(WIDE).run(feeds)["y"]
    session = session_of(WIDE, memory=memory, executor=executor)
    np.testing.assert_allclose(session.run(feeds)["y"], expected, 1e-5)
    with pytest.raises(ps.LimitExceeded, match="memory= allows"):
        session_of(WIDE, memory=memory - 4000, executor=executor).run(feeds)


def test_values_without_an_arena_are_counted_in_the_run():
    feeds, plain = {"x": rows(64)}, session_of(WIDE, executor="dataflow")
    expected = plain.run(feeds)["y"]
    session = session_of(WIDE, executor="dataflow", memory=held(plain) + 1_500_000)
    np.testing.assert_allclose(session.run(feeds)["y"], expected, 1e-5)
    small = session_of(WIDE, executor="dataflow", memory=held(plain) + 100_000)
    with pytest.raises(ps.LimitExceeded, match="memory= less weights and plans"):
        small.run(feeds)


# How many elements are positive is known in the run alone.
POSITIVE = """g (float[N, 1024] x) => (int64[2, M] y) <float zero = {0}> {
    a = Exp(x) b = MatMul(a, x) c = Greater(b, zero) y = NonZero(c) }"""


@pytest.mark.parametrize(("text", "end"), [(WIDE, "a run$"), (POSITIVE, "a run, and more")])
def test_plan_is_refused_when_it_is_compiled(text, end):
    with pytest.raises(ps.LimitExceeded, match=f"for weights and plans, .* for {end}"):
        session_of(text, memory="2kB", shapes={"x": (1, 1024) if text is WIDE else (1024, 1024)})


def test_plans_of_many_shapes_share_the_memory():
    memory = least(WIDE, {"x": rows(9)}) + 1000
    session = session_of(WIDE, memory=memory)
    for count in (9, 1, 5, 9, 3, 8, 2, 9, 7, 4, 6, 9):
        session.run({"x": rows(count)})
        assert held(session) <= memory


@pytest.mark.parametrize("executor", ["linear", "parallel"])
def test_runs_wait_for_memory(executor):
    feeds = [{"x": rows(40, seed)} for seed in range(12)]
    expected = [session_of(WIDE).run(feed)["y"] for feed in feeds]
    memory = least(WIDE, feeds[0], executor=executor) + 500
    session = session_of(WIDE, memory=memory, executor=executor)
    found = [job.result(SOON)["y"] for job in [session.submit(feed) for feed in feeds]]
    for own, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(own, other, 1e-5)
    assert held(session) <= memory


def test_runs_of_different_shapes_wait_for_one_another():
    feeds = [{"x": rows(30 + seed % 5, seed)} for seed in range(30)]
    expected = [session_of(WIDE).run(feed)["y"] for feed in feeds]
    session = session_of(WIDE, memory=least(WIDE, {"x": rows(34)}) + 3000)
    jobs = [session.submit(feed) for feed in feeds]
    for job, other in zip(jobs, expected, strict=True):
        np.testing.assert_allclose(job.result(SOON)["y"], other, 1e-5)


def test_results_whose_size_follows_from_data_are_counted():
    text = """g (float[N] x) => (int64[1, M] y) { y = NonZero(x) }"""
    session, few = session_of(text, memory=200_000), np.eye(1, 50_000, dtype=np.float32)[0]
    assert session.run({"x": few})["y"].shape == (1, 1)
    with pytest.raises(ps.LimitExceeded, match="memory="):
        session.run({"x": np.ones(50_000, np.float32)})
    assert session.run({"x": few})["y"].shape == (1, 1)


def test_waiting_runs_of_many_threads_leave_nothing_behind():
    session = session_of(WIDE, memory=least(WIDE, {"x": rows(34)}) + 3000)
    failures: list[BaseException] = []

    def work(seed: int) -> None:
        try:
            for turn in range(15):
                session.run({"x": rows(20 + (seed + turn) % 15)}, timeout=SOON)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(SOON)
    assert not failures
    memory = session._plans.memory
    assert not memory.waiting and not memory.results


def test_run_of_a_dropped_plan_leaves_less_for_plans():
    """Its arena belongs to the session until the run ends, though its plan is dropped."""
    session = session_of(WIDE, memory=held(session_of(WIDE, shapes={"x": (9, 1024)})) + 400_000)
    session.run({"x": rows(9)})
    (executor,) = session._plans.executors()
    arena = executor._arenas.take(Control())
    subgraph = session._plans.subgraph_of(executor)
    session._plans.forget(subgraph, next(iter(session._plans.of(subgraph))))
    memory = session._plans.memory
    for count in range(1, 30):
        session.run({"x": rows(1 + count % 2)})
        session.run({"x": rows(count % 9)})
        assert memory.held + memory.taken <= memory.limit
    executor._arenas.give(arena)
