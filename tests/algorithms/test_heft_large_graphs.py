"""Placements of random and large graphs: close to the bound, in little time."""

from __future__ import annotations

import math
import random
import sys
from bisect import insort
from collections.abc import Callable
from itertools import pairwise, product
from statistics import mean
from types import FrameType
from typing import Any

import pytest

from penstock.algorithms import heft as module
from penstock.algorithms.dag import Dag
from penstock.algorithms.heft import bound, list_schedule, place, place_serial
from penstock.algorithms.ordering import ranks, topological_order
from tests.support.placement_problems import (
    ROUNDING,
    Problem,
    assert_valid,
    cheapest,
    flat,
    heft,
    on_one,
)
from tests.support.placement_replay import replay_makespan, serial_time
from tests.support.sweeps import scaled

# Random graphs: close to the bound


def layered(draw: random.Random, n: int) -> Dag:
    """Layers of any width; each node reads one to three of the layer before."""
    width, edges, before, k = draw.randrange(4, 40), [], range(0), 0
    while k < n:
        layer = range(k, min(n, k + draw.randrange(1, 2 * width)))
        for j in layer:
            edges += [(i, j) for i in draw.sample(before, min(len(before), draw.randrange(1, 4)))]
        before, k = layer, layer.stop
    return Dag(n, edges)


def erdos(draw: random.Random, n: int) -> Dag:
    """Any two nodes are as likely joined."""
    p = draw.choice([1, 2, 4, 8, 16]) / n
    return Dag(n, [(a, b) for b in range(n) for a in range(b) if draw.random() < p])


def local(draw: random.Random, n: int) -> Dag:
    """Each node reads one or two that are not far before it."""
    reach = draw.choice([5, 10, 20, 40, 80])
    pairs = [(draw.randrange(max(0, i - reach), i), i) for i in range(1, n) for _ in "12"]
    return Dag(n, [pair for k, pair in enumerate(pairs) if k % 2 or draw.random() < 0.5])


def inception(draw: random.Random, n: int) -> Dag:
    """Blocks of three to eight branches of one to four nodes, joined by one node."""
    edges, last, k = [], 0, 1
    while k < n:
        ends = []
        for _ in range(draw.randrange(3, 9)):
            line = [last, *range(k, k + draw.randrange(1, 5))]
            edges += pairwise(line)
            k = line[-1] + 1
            ends.append(line[-1])
        edges += [(end, k) for end in ends]
        last, k = k, k + 1
    return Dag(k, edges)


def series_parallel(draw: random.Random, n: int) -> Dag:
    """Built by putting an edge's double beside it, or a node into it."""
    edges, nodes = [(0, 1)], 2
    while nodes < n:
        k = draw.randrange(len(edges))
        a, b = edges[k]
        if draw.random() < 0.5:
            edges.append((a, b))
        else:
            edges[k] = (a, nodes)
            edges.append((nodes, b))
            nodes += 1
    return Dag(n, edges)


def in_tree(draw: random.Random, n: int) -> Dag:
    reach = draw.choice([3, 10, 50, n])
    return Dag(n, [(i, draw.randrange(i + 1, min(n, i + 1 + reach))) for i in range(n - 1)])


def out_tree(draw: random.Random, n: int) -> Dag:
    return Dag(n, [(n - 1 - b, n - 1 - a) for a, b in in_tree(draw, n).edges])


def stencil(draw: random.Random, n: int) -> Dag:
    """A grid, each node reads the three above it."""
    w = draw.randrange(6, 30)
    near = ((i, i + w + d) for i in range(n) for d in (-1, 0, 1) if 0 <= i % w + d < w)
    return Dag(n, [(i, j) for i, j in near if j < n])


FAMILIES = [layered, erdos, local, inception, series_parallel, in_tree, out_tree, stencil]
COSTS: list[Callable[[random.Random], float]] = [
    lambda draw: draw.uniform(1, 10),
    lambda draw: draw.expovariate(1),
    lambda draw: draw.lognormvariate(0, 1.5),
]


@pytest.mark.costly
@pytest.mark.parametrize("family", FAMILIES)
def test_placements_are_close_to_the_bound(family):
    draw = random.Random(family.__name__)
    ratios = []
    for cost, n, _ in product(COSTS, (2, 4, 8), range(4)):
        dag = family(draw, draw.randrange(200, 400))
        costs = [cost(draw) for _ in range(dag.n)]
        problem = Problem(dag, on_one(costs), None, [n])
        placement = place(*problem)
        assert_valid(problem, placement)
        ratios.append(placement.makespan / bound(dag, costs, n))
    assert mean(ratios) <= 1.10
    assert max(ratios) <= 1.35


def test_forks_and_joins_are_close_to_what_is_possible():
    #          /-> 1 -\         /-> 6 -\
    #   0 -->  ...      -> 5 --> ...      -> ...      no placement can overlap two of these
    #          \-> 4 -/         \-> 9 -/
    draw = random.Random(0)
    ratios = []
    for cost, n, _ in product(COSTS, (2, 4, 8), range(4)):
        costs, edges, least = [cost(draw)], [], 0.0
        while len(costs) < 300:
            fork, forked = len(costs) - 1, [cost(draw) for _ in range(draw.randrange(2, 40))]
            join = fork + len(forked) + 1
            edges += [(fork, k) for k in range(fork + 1, join)]
            edges += [(k, join) for k in range(fork + 1, join)]
            costs += [*forked, cost(draw)]
            # Two of the n + 1 longest branches must share a worker.
            longest = sorted([*forked, *[0.0] * (n + 1)], reverse=True)
            least += max(longest[0], longest[n - 1] + longest[n], sum(forked) / n) + costs[fork]
        placement = place(Dag(len(costs), edges), on_one(costs), None, [n])
        ratios.append(placement.makespan / (least + costs[-1]))
    assert mean(ratios) <= 1.02
    assert max(ratios) <= 1.10


@pytest.mark.costly
@pytest.mark.parametrize("delay", [0.0, 0.5, 5.0])
def test_placements_on_unequal_backends_are_valid_and_no_worse_than_on_one(delay):
    draw = random.Random(0)
    for family in FAMILIES:
        dag = family(draw, 200)
        cost: list[list[float | None]] = [
            [draw.uniform(1, 10) for _ in "123"] for _ in range(dag.n)
        ]
        for i in range(0, dag.n, 7):
            cost[i][2] = None
        problem = Problem(dag, cost, flat(delay), [2, 1, 3])
        placement = place(*problem)
        assert_valid(problem, placement)
        assert placement.makespan >= bound(dag, cheapest(cost), 6)
        assert placement.makespan <= heft(*problem).makespan
        for b in (0, 1):
            alone = on_one([row[b] or 0 for row in cost])
            assert placement.makespan <= place(dag, alone, None, [(2, 1)[b]]).makespan * ROUNDING
        # One node at a time, and each transfer once for all its readers.
        plan = place_serial(dag, cost, lambda i, a, b: delay)
        one_by_one = serial_time(dag, cost, plan, lambda i, a, b: delay)
        assert placement.makespan <= one_by_one * ROUNDING


# Large graphs


def lines_run(action: Callable[[], Any]) -> int:
    """How many lines of heft.py a call runs: what it takes, on every machine."""
    count = 0

    def line(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal count
        count += event == "line"
        return line

    def call(frame: FrameType, event: str, _: Any) -> Any:
        return line if frame.f_code.co_filename == module.__file__ else None

    before = sys.gettrace()
    sys.settrace(call)
    try:
        action()
    finally:
        sys.settrace(before)
    return count


def gaps_and_loose_nodes(n: int) -> Problem:
    """Rows of four nodes, each after all of the row before; and as many nodes without edges.

    On four workers every row leaves gaps, hardly one of which is long enough for a loose node. The
    last node would fit into any of them, so that none can be forgotten.
    """
    draw = random.Random(0)
    rows = n // 8
    edges = [
        (4 * k + a, 4 * k + 4 + b) for k in range(rows - 1) for a in range(4) for b in range(4)
    ]
    costs = [draw.uniform(1, 10) for _ in range(4 * rows)]
    costs += [draw.uniform(8, 9) for _ in range(n - 4 * rows - 1)]
    return Problem(Dag(n, edges), on_one([*costs, 0.001]), None, [4])


def test_work_grows_hardly_faster_than_the_graph():
    small, large = (lines_run(lambda n=n: heft(*gaps_and_loose_nodes(n))) for n in (2000, 8000))
    assert large <= 6 * small


def test_transfers_are_asked_for_once():
    asked = []

    def transfer(*edge: int) -> float:
        asked.append(edge)
        return 1.0

    dag = local(random.Random(0), 100)
    place(dag, [[1.0, 2.0, None]] * 50 + [[2.0, 1.0, 1.0]] * 50, transfer)
    assert len(asked) == len(set(asked))


def test_a_search_among_many_gaps_finds_the_first():
    problem = gaps_and_loose_nodes(3000)
    dag, cost, *_ = problem
    costs = cheapest(cost)
    rank = [a + b for a, b in zip(costs, ranks(dag, costs), strict=True)]
    busy: list[list[tuple[float, float]]] = [[(0.0, 0.0)] for _ in range(4)]
    start = [0.0] * dag.n
    for j in topological_order(dag, rank):
        ready = max((start[i] + costs[i] for i in dag.pred[j]), default=0.0)
        # Every gap of every worker.
        start[j], _, w = min(
            (max(ready, begin), -begin, w)
            for w, line in enumerate(busy)
            for (_, begin), (end, _) in pairwise([*line, (math.inf, math.inf)])
            if max(ready, begin) + costs[j] <= end
        )
        insort(busy[w], (start[j], start[j] + costs[j]))
    placement = heft(*problem)
    assert_valid(problem, placement)
    assert placement.start == tuple(start)


@pytest.mark.parametrize("n", scaled(5_000, 50_000))
def test_placement_of_a_long_chain_takes_seconds(n):
    dag = Dag(n, [(i + 1, i) for i in range(n - 1)])
    placement = place(dag, on_one([0.5] * n), None, [8])
    assert placement.makespan == n / 2
    assert set(placement.worker) == {0}
    assert replay_makespan(dag, on_one([0.5] * n), placement) == n / 2
    assert list_schedule(dag, [0.5] * n, [8]).makespan == n / 2


@pytest.mark.parametrize("n", scaled(4_000, 20_000))
def test_placement_of_many_nodes_on_two_backends_takes_seconds(n):
    draw = random.Random(0)
    dag = local(draw, n)
    cost = [[draw.uniform(1, 10), draw.uniform(1, 10)] for _ in range(dag.n)]
    problem = Problem(dag, cost, flat(1.0), [4, 4])
    placement = heft(*problem)
    assert_valid(problem, placement)
    assert placement.makespan <= 1.25 * bound(dag, cheapest(cost), 8)
