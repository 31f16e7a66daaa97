"""Placement problems, and what holds for every placement."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

from penstock.algorithms import heft as module
from penstock.algorithms.dag import Dag
from penstock.algorithms.heft import Costs, Transfer, WorkerSchedule
from tests.support.placement_replay import timelines

# What an example takes says more about the machine than about the code.
# Sums in another order differ in the last bits.
ROUNDING = 1 + 1e-9


class Problem(NamedTuple):
    """Arguments of ``place``."""

    dag: Dag
    cost: Costs
    transfer: Transfer | None = None
    workers: Sequence[int] | None = None


def on_one(costs: Sequence[float]) -> list[list[float]]:
    """Costs for a single backend."""
    return [[c] for c in costs]


def times(placement: WorkerSchedule) -> list[tuple[float, float]]:
    return list(zip(placement.start, placement.finish, strict=True))


def flat(time: float) -> Transfer:
    """Every edge between different backends takes as long."""

    def transfer(i: int, j: int, a: int, b: int) -> float:
        assert a != b, "no transfer is asked for within one backend"
        return time

    return transfer


def heft(
    dag: Dag, cost: Costs, transfer: Transfer | None = None, workers: Sequence[int] | None = None
) -> WorkerSchedule:
    """HEFT as published, in one pass over the graph: the schedule that ``place`` begins with."""
    problem = module._problem(dag, cost, transfer, workers)
    return module._insert(problem, problem.by_rank(spread=0.0))


def cheapest(cost: Costs) -> list[float]:
    """The cost of each node on its best backend."""
    return [float(min(c for c in row if c is not None)) for row in cost]


def never(i: int, j: int, a: int, b: int) -> float:
    raise AssertionError(f"asked for the transfer {i} -> {j} from backend {a} to {b}")


def assert_valid(problem: Problem, placement: WorkerSchedule) -> None:
    """Supported backends, existing workers, one node at a time, nothing before its inputs."""
    dag, cost, transfer, workers = problem
    fields = (placement.backend, placement.worker, placement.start, placement.finish)
    for i, (b, w, start, finish) in enumerate(zip(*fields, strict=True)):
        assert cost[i][b] is not None
        assert 0 <= w < (workers[b] if workers else 1)
        assert start >= 0
        assert finish == start + cost[i][b]
    for i, j in dag.edges:
        a, b = placement.backend[i], placement.backend[j]
        delay = transfer(i, j, a, b) if transfer and a != b else 0
        assert placement.start[j] >= placement.finish[i] + delay
    lines = timelines(dag, placement)
    assert sorted(i for line in lines.values() for i in line) == list(range(dag.n))
    for line in lines.values():
        assert all(placement.finish[a] <= placement.start[b] for a, b in pairwise(line))
    assert placement.makespan == max(placement.finish, default=0)
