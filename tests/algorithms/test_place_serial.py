"""Placements for one node at a time: the least there is or close to it, no obvious loss."""

from __future__ import annotations

import math
import random
from collections import Counter, deque
from collections.abc import Callable
from itertools import pairwise, product
from statistics import mean
from typing import NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.algorithms import min_sum
from penstock.algorithms.dag import Dag
from penstock.algorithms.heft import Costs, Delivery, place_serial
from tests.algorithms.test_heft_large_graphs import (
    FAMILIES,
    erdos,
    layered,
    local,
    series_parallel,
    stencil,
)
from tests.support.placement_problems import on_one
from tests.support.placement_replay import serial_time
from tests.support.random_dags import node_times
from tests.support.sweeps import scaled

# What an example takes says more about the machine than about the code.
# Sums in another order differ in the last bits.
ROUNDING = 1 + 1e-9


class Problem(NamedTuple):
    """Arguments of ``place_serial``."""

    dag: Dag
    cost: Costs
    transfer: Delivery | None = None


def flat(time: float) -> Delivery:
    """Every transfer takes as long."""

    def transfer(i: int, a: int, b: int) -> float:
        assert a != b, "no transfer is asked for within one backend"
        return time

    return transfer


def time_of(problem: Problem, plan: tuple[int, ...] | None = None) -> float:
    dag, cost, transfer = problem
    return serial_time(dag, cost, place_serial(*problem) if plan is None else plan, transfer)


# By hand


def test_without_transfers_each_node_has_its_cheapest_backend():
    #   0 -> 1 -> 2
    dag = Dag(3, [(0, 1), (1, 2)])
    cost = [[2, 1], [1, 2], [3, None]]
    assert place_serial(dag, cost) == (1, 0, 0)
    assert place_serial(dag, cost, flat(0)) == (1, 0, 0)
    assert place_serial(Dag(0, []), [], flat(1)) == ()
    assert place_serial(Dag(2, []), on_one([1, 2]), flat(1)) == (0, 0)


def test_a_node_stays_where_the_transfer_takes_longer_than_it_gains():
    #   0 -> 1      1 takes 4 or 2
    dag, cost = Dag(2, [(0, 1)]), [[1, None], [4, 2]]
    assert place_serial(dag, cost, flat(1)) == (0, 1)
    assert place_serial(dag, cost, flat(3)) == (0, 0)
    assert serial_time(dag, cost, (0, 1), flat(1)) == 4
    assert serial_time(dag, cost, (0, 0), flat(1)) == 5


def test_result_is_transferred_once_to_each_backend():
    #        /-> 1      1 and 2 take 4 or 2 each: alone neither gains what a transfer of 3 takes,
    #   0 --<            but together they do
    #        \-> 2
    dag, cost = Dag(3, [(0, 1), (0, 2)]), [[1, None], [4, 2], [4, 2]]
    assert serial_time(dag, cost, (0, 1, 1), flat(3)) == 8
    assert place_serial(dag, cost, flat(3)) == (0, 1, 1)
    assert place_serial(dag, cost, flat(5)) == (0, 0, 0)


def test_result_is_transferred_to_every_backend_that_reads_it():
    #   0 -> 1, 2, 3      each runs on a backend of its own
    dag = Dag(4, [(0, 1), (0, 2), (0, 3)])
    cost = [[1, 9, 9], [1, None, None], [None, 1, None], [None, None, 1]]
    assert place_serial(dag, cost, flat(2)) == (0, 0, 1, 2)
    assert serial_time(dag, cost, (0, 0, 1, 2), flat(2)) == 8
    assert serial_time(dag, cost, (1, 0, 1, 2), flat(2)) == 16


def test_a_region_moves_though_none_of_its_nodes_would_alone():
    #   0 -> 1 -> 2 -> 3      1 and 2 take 3 or 1; the transfers there and back take 3 in all
    dag = Dag(4, [(0, 1), (1, 2), (2, 3)])
    cost = [[1, None], [3, 1], [3, 1], [1, None]]
    assert place_serial(dag, cost, flat(1.5)) == (0, 1, 1, 0)
    assert place_serial(dag, cost, flat(2.5)) == (0, 0, 0, 0)


def test_transfers_may_depend_on_direction_and_node():
    #   0 -> 1 -> 2      to backend 1 and back
    dag = Dag(3, [(0, 1), (1, 2)])
    cost = [[1, None], [9, 1], [1, None]]
    for times, plan in [({(0, 0, 1): 7, (1, 1, 0): 0.5}, 1), ({(0, 0, 1): 7, (1, 1, 0): 2}, 0)]:
        assert place_serial(dag, cost, lambda *key, times=times: times[key]) == (0, plan, 0)


def test_a_backend_never_gets_what_it_does_not_support():
    #   0 -> 1 -> 2
    dag = Dag(3, [(0, 1), (1, 2)])
    assert place_serial(dag, [[9, 1], [2, None], [9, 1]], flat(3)) == (1, 0, 1)
    assert place_serial(dag, [[9, 1], [2, None], [9, 1]], flat(50)) == (0, 0, 0)
    assert place_serial(dag, [[None, 1], [2, None], [None, 1]], flat(50)) == (1, 0, 1)


def test_place_serial_breaks_ties_by_the_first_backends():
    dag = Dag(3, [(0, 1), (1, 2)])
    assert place_serial(dag, [[1, 1, 1]] * 3, flat(1)) == (0, 0, 0)


def test_each_transfer_is_asked_for_once_and_only_where_it_can_be():
    #   0 -> 1, 0 -> 2      backend 2 runs 2 only
    asked: list[tuple[int, int, int]] = []

    def transfer(*key: int) -> float:
        asked.append(key)  # type: ignore[arg-type]
        return 1.0

    place_serial(Dag(3, [(0, 1), (0, 2)]), [[1, 2, None], [2, 1, None], [None, 1, 1]], transfer)
    assert Counter(asked) == Counter([(0, 0, 1), (0, 0, 2), (0, 1, 0), (0, 1, 2)])


@pytest.mark.parametrize("time", [-1, math.inf, math.nan])
def test_place_serial_refuses_wrong_transfers(time):
    with pytest.raises(ValueError, match="the results of node 0 cannot take"):
        place_serial(Dag(2, [(0, 1)]), [[1, 2], [2, 1]], flat(time))


def test_place_serial_refuses_wrong_costs():
    with pytest.raises(ValueError, match="no backend supports node 1"):
        place_serial(Dag(2, []), [[1, 2], [None, None]])
    with pytest.raises(ValueError, match="cost has 1 rows for 2 nodes"):
        place_serial(Dag(2, []), [[1, 2]])
    with pytest.raises(ValueError, match="must be finite and not negative"):
        place_serial(Dag(1, []), [[1, -2]])


# What holds for every problem


@st.composite
def problems(draw: st.DrawFn) -> Problem:
    n = draw(st.integers(0, 7))
    pairs = [(a, b) for b in range(n) for a in range(b)]
    edges = draw(st.lists(st.sampled_from(pairs), max_size=14)) if pairs else []
    number = draw(st.permutations(range(n)))
    dag = Dag(n, [(number[a], number[b]) for a, b in edges])
    width = draw(st.integers(1, 7))
    time = node_times()
    row = st.lists(st.one_of(time, time, st.none()), min_size=width, max_size=width)
    cost = [draw(row.filter(lambda r: r != [None] * width)) for _ in range(n)]
    table = draw(st.lists(time, min_size=7, max_size=7))

    def transfer(i: int, a: int, b: int) -> float:
        assert a != b
        assert cost[i][a] is not None
        return table[(31 * i + 3 * a + b) % 7]

    return Problem(dag, cost, transfer)


@given(problems())
def test_place_serial_is_no_worse_than_one_backend_alone(problem):
    dag, cost, transfer = problem
    plan = place_serial(*problem)
    assert len(plan) == dag.n
    time = serial_time(dag, cost, plan, transfer)  # raises for what is not supported
    assert time * ROUNDING >= sum(min(c for c in row if c is not None) for row in cost)
    cheapest = [min((c, b) for b, c in enumerate(row) if c is not None)[1] for row in cost]
    assert time <= serial_time(dag, cost, cheapest, transfer) * ROUNDING
    for b in range(len(cost[0]) if dag.n else 0):
        if all(row[b] is not None for row in cost):
            assert time <= serial_time(dag, cost, [b] * dag.n, transfer) * ROUNDING


@given(problems())
def test_place_serial_is_deterministic(problem):
    dag, *rest = problem
    assert place_serial(*problem) == place_serial(Dag(dag.n, reversed(dag.edges)), *rest)


# The least there is


def least(problem: Problem) -> float:
    """By trying all plans."""
    dag, cost, transfer = problem
    options = [[b for b, c in enumerate(row) if c is not None] for row in cost]
    return min(serial_time(dag, cost, plan, transfer) for plan in product(*options))


def drawn(draw: random.Random, dag: Dag, width: int) -> Problem:
    """Random costs, some of them missing, and transfers, some of them free."""
    cost = [
        [draw.uniform(1, 10) if draw.random() < 0.9 else None for _ in range(width)]
        for _ in range(dag.n)
    ]
    for row in cost:
        if row == [None] * width:
            row[draw.randrange(width)] = 1.0
    scale = draw.choice([1, 3, 10, 30])
    times = [
        [draw.choice([0.0, *[draw.uniform(0, scale) for _ in "1234"]]) for _ in range(width**2)]
        for _ in range(dag.n)
    ]
    return Problem(dag, cost, lambda i, a, b: times[i][a * width + b])


def test_place_serial_of_small_graphs_is_near_the_optimum():
    draw = random.Random(0)
    ratios = []
    for _ in range(400):
        n, width, p = draw.randrange(1, 8), draw.randrange(1, 4), draw.random()
        dag = Dag(n, [(a, b) for b in range(n) for a in range(b) if draw.random() < p])
        problem = drawn(draw, dag, width)
        ratios.append(time_of(problem) / least(problem))
    assert min(ratios) >= 1 / ROUNDING
    assert mean(ratios) <= 1.001
    assert max(ratios) <= 1.1


def shape(name: str, draw: random.Random) -> Dag:
    n = draw.randrange(2, 8)
    if name == "chain":
        return Dag(n, pairwise(range(n)))
    if name == "tree":  # edges in both directions
        edges = [(draw.randrange(i), i) for i in range(1, n)]
        number = draw.sample(range(n), n)
        return Dag(
            n, [(min(a, b), max(a, b)) for a, b in ((number[a], number[b]) for a, b in edges)]
        )
    return series_parallel(draw, n)


@pytest.mark.parametrize(
    ("name", "width"),
    [*product(["chain", "tree"], [1, 2, 3, 4, 5]), *product(["series_parallel"], [1, 2, 3])],
)
def test_place_serial_of_chains_trees_and_branches_is_optimal(name, width):
    draw = random.Random(f"{name} {width}")
    for _ in range(20):
        dag = shape(name, draw)
        while width**dag.n > 5000:
            dag = shape(name, draw)
        problem = drawn(draw, dag, width)
        assert time_of(problem) == pytest.approx(least(problem), rel=1e-9)


def least_on_two(problem: Problem) -> float:
    """By a minimum cut: on the side of the source is what runs on backend 0 (Stone 1977).

    A helper stands for what node i makes, on the other backend: to cut it off from i takes the
    transfer, and it cannot be cut off from its readers there. Maximum flow by Dinic 1970, without
    any of what makes that of ``minsum.py`` fast.
    """
    dag, cost, transfer = problem
    assert transfer
    source, sink = dag.n, dag.n + 1
    arcs: list[list[int]] = [[], []]
    arcs += [[] for _ in range(dag.n)]
    ends: list[int] = []
    room: list[float] = []

    def arc(a: int, b: int, most: float | None) -> None:
        for start, end, value in ((a, b, math.inf if most is None else most), (b, a, 0.0)):
            arcs[start].append(len(ends))
            ends.append(end)
            room.append(value)

    for i, (on_0, on_1) in enumerate(cost):
        arc(source, i, on_1)
        arc(i, sink, on_0)
        if dag.succ[i]:
            for here in (0, 1):
                if cost[i][here] is None:
                    continue
                helper = len(arcs)
                arcs.append([])
                ways = [(i, helper, transfer(i, here, 1 - here))]
                ways += [(helper, j, math.inf) for j in dag.succ[i]]
                for a, b, most in ways:
                    arc(*((a, b) if here == 0 else (b, a)), most)
    flow = 0.0
    while True:
        level = {source: 0}
        queue = deque([source])
        while queue:
            a = queue.popleft()
            for k in arcs[a]:
                if room[k] > 1e-12 and ends[k] not in level:
                    level[ends[k]] = level[a] + 1
                    queue.append(ends[k])
        if sink not in level:
            return flow
        tried = [0] * len(arcs)
        path: list[int] = []
        a = source
        while True:
            if a == sink:
                most = min(room[k] for k in path)
                for k in path:
                    room[k] -= most
                    room[k ^ 1] += most
                flow += most
                path, a = [], source
            elif tried[a] < len(arcs[a]):
                k = arcs[a][tried[a]]
                if room[k] > 1e-12 and level.get(ends[k]) == level[a] + 1:
                    path.append(k)
                    a = ends[k]
                else:
                    tried[a] += 1
            elif path:
                a = ends[path.pop() ^ 1]
                tried[a] += 1
            else:
                break


def test_place_serial_on_two_backends_is_a_minimum_cut():
    draw = random.Random(0)
    for _ in range(50):
        n, p = draw.randrange(1, 7), draw.random()
        dag = Dag(n, [(a, b) for b in range(n) for a in range(b) if draw.random() < p])
        problem = drawn(draw, dag, 2)
        assert least_on_two(problem) == pytest.approx(least(problem))


@pytest.mark.parametrize("family", FAMILIES)
def test_place_serial_on_two_backends_is_optimal(family):
    draw = random.Random(family.__name__)
    ratios = []
    for _ in range(6):
        problem = drawn(draw, family(draw, 150), 2)
        ratios.append(time_of(problem) / least_on_two(problem))
    assert min(ratios) >= 1 / ROUNDING
    assert max(ratios) <= ROUNDING


@pytest.mark.costly
@pytest.mark.parametrize("family", FAMILIES)
def test_place_serial_by_regions_is_near_the_optimum(family, monkeypatch):
    monkeypatch.setattr(min_sum, "_REGION", 40)
    monkeypatch.setattr(min_sum, "_ENTRIES_FOR_TWO", 8)  # but for these there are no tables
    draw = random.Random(family.__name__)
    ratios = []
    for _ in range(6):
        problem = drawn(draw, family(draw, 200), 2)
        ratios.append(time_of(problem) / least_on_two(problem))
    assert min(ratios) >= 1 / ROUNDING
    assert mean(ratios) <= 1.05
    assert max(ratios) <= 1.15


@pytest.mark.parametrize("family", [layered, erdos, local, stencil])
def test_place_serial_on_three_backends_gains_by_search(family):
    draw = random.Random(family.__name__)
    problem = drawn(draw, family(draw, 150), 3)
    dag, cost, transfer = problem
    for a, b in ((0, 1), (0, 2), (1, 2)):
        pair = [[row[a], row[b]] for row in cost]
        if not all(any(c is not None for c in row) for row in pair):
            continue
        two = Problem(dag, pair, lambda i, s, t, a=a, b=b: transfer(i, (a, b)[s], (a, b)[t]))
        assert time_of(problem) <= least_on_two(two)


# Large graphs


@pytest.mark.parametrize("n", scaled(10_000, 100_000))
def test_place_serial_of_a_long_chain_is_optimal(n):
    draw = random.Random(0)
    cost = [[draw.uniform(1, 10) for _ in "123"] for _ in range(n)]
    problem = Problem(Dag(n, pairwise(range(n))), cost, flat(2.0))
    # Node by node (Viterbi 1967): of all plans so far that end on a backend, the best.
    best = [0.0] * 3
    for row in cost:
        best = [min(best[b], min(best) + 2.0) + row[b] for b in range(3)]
    assert time_of(problem) == pytest.approx(min(best), rel=1e-9)


def hub(n: int) -> Dag:
    """One node that all others read, which are a chain."""
    return Dag(n, [(0, i) for i in range(1, n)] + [(i, i + 1) for i in range(1, n - 1)])


@pytest.mark.parametrize("n", scaled(2_000, 20_000))
@pytest.mark.parametrize(
    "graph", [hub, lambda n: layered(random.Random(0), n)], ids=["hub", "layered"]
)
def test_place_serial_of_large_graphs_takes_near_linear_work(graph: Callable[[int], Dag], n: int):
    draw, dag = random.Random(0), graph(n)
    cost = [[draw.uniform(1, 10) for _ in "12"] for _ in range(dag.n)]
    problem = Problem(dag, cost, flat(1.0))
    cheapest = tuple([row.index(min(row)) for row in cost])
    assert time_of(problem) < time_of(problem, cheapest)
