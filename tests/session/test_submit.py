"""Submitted runs: a bounded queue, whose runs overlap."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import penstock as ps
from penstock.host.threads import Places, Workers
from penstock.ops.registry import TFLITE, operator
from tests.frontends.nnpackage.test_refusals import files, folder
from tests.support.tflite_models import model, subgraph

WAIT_S = 60
X = {"x": ("float32", [1])}
FOREVER = {"block": True, "timeout": None}
STAGES: dict[str, Callable[[int], object]] = {}
"""What the stages of the package do with a request, by name."""


def _stage(name: str) -> None:
    @operator(name, domain=TFLITE, pure=False)
    def compile_stage(node: Any, types: Any) -> ps.ops.Kernel:
        def run(x: np.ndarray) -> np.ndarray:
            STAGES[name](int(x[0]))
            return x + np.float32(100)

        return ps.ops.Kernel(run)


for _name in ("TestFirstStage", "TestSecondStage"):
    _stage(_name)


def stage_model(name: str) -> bytes:
    return model([subgraph(X, [(f"CUSTOM:{name}", ["x"], ["y"], b"")], ["y"])])


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """Two models, of which the second takes the outputs of the first."""
    models = stage_model("TestFirstStage"), stage_model("TestSecondStage")
    edge = {"from": "0:0:0", "to": ["1:0:0"]}
    return folder(tmp_path, files(*models, **{"model-connect": [edge]}))


@pytest.fixture
def workers() -> Iterator[Callable[[int], Workers]]:
    pools: list[Workers] = []

    def make(size: int) -> Workers:
        pools.append(Workers("submit", size))
        return pools[-1]

    yield make
    for pool in pools:
        pool.close()


def feeds(number: int) -> dict[str, np.ndarray]:
    return {"x": np.array([number], np.float32)}


def test_stages_of_successive_requests_overlap(package: Path, workers: Any, monkeypatch) -> None:
    """The second stage of request 1 ends only once the first stage of request 2 has begun."""
    begun = threading.Event()

    def first(number: int) -> None:
        if number == 2:
            begun.set()

    def second(number: int) -> None:
        if number == 101:
            assert begun.wait(WAIT_S)

    monkeypatch.setitem(STAGES, "TestFirstStage", first)
    monkeypatch.setitem(STAGES, "TestSecondStage", second)
    session = ps.compile(package, expert=ps.ExpertOptions(pool=workers(2)))
    futures = [session.submit(feeds(number)) for number in (1, 2, 3)]
    results = [next(iter(future.result(WAIT_S).values())).item() for future in futures]
    assert results == [201, 202, 203]


class Blocked:
    """A session on one worker, whose runs wait in their first stage until ``go`` is set."""

    def __init__(self, package: Path, pool: Workers, monkeypatch: Any, most: int) -> None:
        self.go, self.entered = threading.Event(), threading.Event()

        def first(number: int) -> None:
            self.entered.set()
            assert self.go.wait(WAIT_S)

        monkeypatch.setitem(STAGES, "TestFirstStage", first)
        monkeypatch.setitem(STAGES, "TestSecondStage", lambda number: None)
        self.session = ps.compile(package, expert=ps.ExpertOptions(pool=pool), max_pending=most)


def test_submit_takes_no_more_runs_than_max_pending(package, workers, monkeypatch) -> None:
    blocked = Blocked(package, workers(1), monkeypatch, 2)
    pending = [blocked.session.submit(feeds(number)) for number in (1, 2)]
    refused = blocked.session.submit(feeds(3), timeout=0.01)
    with pytest.raises(ps.DeadlineExceeded):
        refused.result(WAIT_S)
    waiting: list[Any] = []
    thread = threading.Thread(target=lambda: waiting.append(blocked.session.submit(feeds(4))))
    thread.start()
    blocked.go.set()
    thread.join(WAIT_S)
    for future in [*pending, *waiting]:
        future.result(WAIT_S)
    assert len(waiting) == 1


def test_runs_that_are_not_submitted_are_not_bounded_by_max_pending(
    package, workers, monkeypatch
) -> None:
    blocked = Blocked(package, workers(1), monkeypatch, 1)
    submitted = blocked.session.submit(feeds(1))
    assert blocked.entered.wait(WAIT_S)
    ended: list[Any] = []
    done = threading.Semaphore(0)

    def tell(outputs: Any, error: Any) -> None:
        ended.append(error)
        done.release()

    stream = ps.Stream()
    for number in (2, 3):
        blocked.session.run_async(tell, feeds(number))
    streamed = [stream.run(blocked.session, feeds(number)) for number in (4, 5)]
    assert blocked.session.stats.pending == 1
    assert not submitted.done() and not ended
    blocked.go.set()
    assert len(blocked.session.run(feeds(6))) == 1
    assert [done.acquire(timeout=WAIT_S) for _ in range(2)] == [True, True]
    assert ended == [None, None]
    for future in [submitted, *streamed]:
        future.result(WAIT_S)


def test_place_is_waited_for_no_longer_than_its_timeout_when_woken_in_vain(monkeypatch) -> None:
    """Each wait ends at once, as if another thread then takes the free place first."""
    places, waits = Places(1), []
    assert places.take(block=True, timeout=None)

    class Woken:
        def acquire(self, timeout: float) -> bool:
            waits.append(timeout)
            return True

    places._was_given = Woken()  # type: ignore[assignment]
    clock = count()
    monkeypatch.setattr("penstock.host.threads.monotonic", lambda: next(clock) / 4)
    assert not places.take(block=True, timeout=1.0)
    assert waits == [0.5, 0.5, 0.25]


def test_places_given_together_wake_a_thread_each(monkeypatch) -> None:
    monkeypatch.setattr("penstock.host.threads.WAKE_S", WAIT_S)
    places = Places(4)
    waiting = [threading.Thread(target=places.take, kwargs=FOREVER) for _ in range(8)]
    for thread in waiting:
        thread.start()
    for _ in range(4):
        places.give()
    for thread in waiting:
        thread.join(WAIT_S / 4)
    assert not any(thread.is_alive() for thread in waiting)
    assert places.all_taken


def test_place_in_the_queue_is_free_after_an_error_and_a_cancelled_run(
    package, workers, monkeypatch
) -> None:
    blocked = Blocked(package, workers(1), monkeypatch, 2)
    blocked.go.set()
    for _ in range(5):
        with pytest.raises(ps.InvalidInput):
            blocked.session.submit({"wrong": 1}).result(WAIT_S)
    blocked.go.clear()
    blocked.entered.clear()
    running = blocked.session.submit(feeds(1))
    assert blocked.entered.wait(WAIT_S)
    for _ in range(5):
        assert blocked.session.submit(feeds(2)).cancel()
    blocked.go.set()
    running.result(WAIT_S)


def test_submit_on_a_worker_does_not_wait_for_workers(package, workers, monkeypatch) -> None:
    blocked = Blocked(package, workers(1), monkeypatch, 1)
    inner: list[Any] = []
    monkeypatch.setitem(
        STAGES,
        "TestSecondStage",
        lambda number: (
            inner.append(blocked.session.submit(feeds(number))) if number < 200 else None
        ),
    )
    blocked.go.set()
    blocked.session.submit(feeds(1)).result(WAIT_S)
    with pytest.raises(ps.DeadlineExceeded, match="max_pending=1"):
        inner[0].result(WAIT_S)


def test_callback_of_a_run_may_submit_the_next(package, workers, monkeypatch) -> None:
    blocked = Blocked(package, workers(1), monkeypatch, 1)
    blocked.go.set()
    ended = threading.Event()
    results: list[float] = []

    def next_run(future: Any) -> None:
        results.append(next(iter(future.result().values())).item())
        if len(results) < 5:
            blocked.session.submit(feeds(len(results))).add_done_callback(next_run)
        else:
            ended.set()

    blocked.session.submit(feeds(0)).add_done_callback(next_run)
    assert ended.wait(WAIT_S)
    assert results == [200, 201, 202, 203, 204]


def test_arun_waits_for_a_place_while_the_event_loop_goes_on(package, workers, monkeypatch) -> None:
    blocked = Blocked(package, workers(1), monkeypatch, 1)

    async def main() -> list[Any]:
        tasks = [asyncio.create_task(blocked.session.arun(feeds(number))) for number in (1, 2, 3)]
        assert await asyncio.to_thread(blocked.entered.wait, WAIT_S)
        blocked.go.set()  # only reached if the loop is free
        return await asyncio.gather(*tasks)

    results = asyncio.run(main())
    assert [next(iter(outputs.values())).item() for outputs in results] == [201, 202, 203]


@pytest.mark.parametrize("most", [0, -1, 10**7])
def test_max_pending_must_be_a_number_of_runs(package, most: int) -> None:
    with pytest.raises(ValueError, match="max_pending"):
        ps.compile(package, max_pending=most)
