"""The cache of plans: one compilation for each plan, and a bound on the bytes held."""

from __future__ import annotations

import threading
from dataclasses import dataclass

import pytest

from penstock.compiler.subgraph import NO_PLAN, Subgraph
from penstock.session.plan_cache import PlanCache
from tests.support.onnx_text import graph_from_text
from tests.support.timing import SOON, wait_until


@dataclass(eq=False)
class FakeExecutor:
    arena_bytes: int = 60
    plan_bytes: int = 40
    run_bytes: int = 60

    def trim(self) -> None:
        self.arena_bytes = 0

    def run(self) -> None:
        self.arena_bytes = 60


@pytest.fixture
def subgraph() -> Subgraph:
    return Subgraph(graph_from_text("g (float[N] x) => (float[N] y) { y = Neg(x) }"), ["y"])


def fill(cache: PlanCache, subgraph: Subgraph, *keys: int) -> list[FakeExecutor]:
    return [cache.get(subgraph, key, False, FakeExecutor) for key in keys]


def test_plan_cache_get_again_returns_the_same_executor(subgraph):
    cache = PlanCache(1000)
    one, two = fill(cache, subgraph, 1, 2)
    assert fill(cache, subgraph, 1, 2) == [one, two]
    assert (subgraph.last.key, subgraph.last.executor) == (2, two)


def test_plan_cache_keeps_observed_plans_apart(subgraph):
    cache = PlanCache(1000)
    (plain,) = fill(cache, subgraph, 1)
    observed = cache.get(subgraph, 1, True, FakeExecutor)
    assert observed is not plain
    assert (subgraph.last.key, subgraph.last.executor) == (
        1,
        plain,
    )  # runs without observers take it from here
    assert cache.get(subgraph, 1, True, FakeExecutor) is observed


def test_plan_cache_over_its_limit_gives_up_arenas_first(subgraph):
    cache = PlanCache(300)
    one, two, three = fill(cache, subgraph, 1, 2, 3)
    assert fill(cache, subgraph, 1) == [one]
    (four,) = fill(cache, subgraph, 4)
    assert cache.executors() == [two, three, one, four]
    assert [x.arena_bytes for x in (one, two, three, four)] == [60, 0, 0, 60]


def test_plan_cache_over_its_limit_drops_the_least_recently_used(subgraph):
    cache = PlanCache(150)
    _, two, _ = fill(cache, subgraph, 1, 2, 3)
    assert fill(cache, subgraph, 2) == [two]
    two.run()
    (four,) = fill(cache, subgraph, 4)
    assert cache.executors() == [two, four]
    assert (two.arena_bytes, four.arena_bytes) == (0, 60)


def test_plan_that_lost_its_arena_takes_the_room_of_others(subgraph):
    cache = PlanCache(200)
    one, two, three = fill(cache, subgraph, 1, 2, 3)
    assert [x.arena_bytes for x in (one, two, three)] == [0, 0, 60]
    assert fill(cache, subgraph, 1) == [one]
    one.run()
    assert [x.arena_bytes for x in (one, two, three)] == [60, 0, 0]


def test_plan_cache_keeps_the_last_plan_whatever_it_holds(subgraph):
    cache = PlanCache(1)
    one, two = fill(cache, subgraph, 1, 2)
    assert cache.executors() == [two]
    assert one is not two


def test_plan_cache_that_drops_the_last_used_plan_of_a_subgraph_forgets_it_there(subgraph):
    other = Subgraph(subgraph.graph, ["y"])
    cache = PlanCache(100)
    fill(cache, subgraph, 1)
    fill(cache, other, 1)
    assert subgraph.last is NO_PLAN
    assert other.last[0] == 1


def test_plan_cache_drop_forgets_the_plans_of_one_subgraph(subgraph):
    other = Subgraph(subgraph.graph, ["y"])
    cache = PlanCache(1000)
    fill(cache, subgraph, 1, 2)
    kept = fill(cache, other, 1)
    cache.drop(subgraph)
    assert cache.executors() == kept
    assert subgraph.last is NO_PLAN


def test_plan_cache_closed_keeps_nothing(subgraph):
    cache = PlanCache(1000)
    fill(cache, subgraph, 1)
    cache.close()
    assert cache.executors() == []
    assert subgraph.last is NO_PLAN
    fill(cache, subgraph, 2)  # for a run that was submitted before
    assert cache.executors() == []
    assert subgraph.last is NO_PLAN


def test_plan_cache_concurrent_get_of_one_plan_compiles_once(subgraph):
    cache, compiled, executors = PlanCache(1000), [], []
    entered, threads = [], []

    def compile() -> FakeExecutor:
        compiled.append(1)
        wait_until(lambda: len(entered) == 4)
        return FakeExecutor()

    def job() -> None:
        entered.append(1)
        executors.append(cache.get(subgraph, 1, False, compile))

    for _ in range(4):
        threads.append(threading.Thread(target=job))
        threads[-1].start()
    for thread in threads:
        thread.join(SOON)
    assert len(compiled) == 1
    assert len(set(map(id, executors))) == 1


def test_plan_cache_failed_compilation_is_tried_again(subgraph):
    cache = PlanCache(1000)

    def fail() -> FakeExecutor:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        cache.get(subgraph, 1, False, fail)
    (executor,) = fill(cache, subgraph, 1)
    assert cache.executors() == [executor]
