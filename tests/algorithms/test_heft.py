"""Placements: valid, close to what no placement can beat, never worse than the obvious ones."""

from __future__ import annotations

import dataclasses
import math
import random
from itertools import permutations, product
from statistics import mean

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.algorithms.dag import Dag
from penstock.algorithms.heft import WorkerSchedule, bound, list_schedule, place
from penstock.algorithms.ordering import critical_path
from tests.support.placement_problems import (
    ROUNDING,
    Problem,
    assert_valid,
    cheapest,
    flat,
    heft,
    never,
    on_one,
    times,
)
from tests.support.placement_replay import replay_makespan, timelines
from tests.support.random_dags import node_times

# heft, by hand


def test_a_chain_stays_on_one_worker():
    #   0 -> 1 -> 2      costs 1, 2, 3
    placement = heft(Dag(3, [(0, 1), (1, 2)]), on_one([1, 2, 3]), workers=[4])
    assert placement == WorkerSchedule((0, 0, 0), (0, 0, 0), (0, 1, 3), (1, 3, 6))
    assert placement.makespan == 6


def test_branches_run_at_the_same_time():
    #     /-> 1 -\           costs 1, 2, 3, 1
    #   0          -> 3
    #     \-> 2 -/
    dag = Dag(4, [(0, 1), (0, 2), (1, 3), (2, 3)])
    placement = heft(dag, on_one([1, 2, 3, 1]), workers=[2])
    assert times(placement) == [(0, 1), (1, 3), (1, 4), (4, 5)]
    assert placement.worker == (0, 1, 0, 0)


def test_the_longer_chain_comes_first():
    #   0 -> 1 -> 2      one worker, all cost 1
    #   3 -> 4
    placement = heft(Dag(5, [(0, 1), (1, 2), (3, 4)]), on_one([1] * 5))
    assert placement.start == (0, 1, 3, 2, 4)


def test_a_node_goes_where_it_finishes_first():
    #   0    1      backend 1 is slower, but 0 is in the way on the other
    assert heft(Dag(2, []), [[4, 6], [3, 5]]) == WorkerSchedule((0, 1), (0, 0), (0, 0), (4, 5))


def test_a_gap_between_nodes_is_used():
    #   0 -> 1 -> 2      costs 3, 3, 3, 2, 2
    #         \-> 3
    #   4                              without gaps, 4 would come last of all:
    #
    #   worker 0  000111222            000111222
    #   worker 1  44    33                   3344
    dag = Dag(5, [(0, 1), (1, 2), (1, 3)])
    placement = heft(dag, on_one([3, 3, 3, 2, 2]), workers=[2])
    assert times(placement) == [(0, 3), (3, 6), (6, 9), (6, 8), (0, 2)]
    assert placement.worker == (0, 0, 0, 1, 1)


def test_the_first_gap_that_is_long_enough_is_used():
    #   0 -> 1 -> 2 -> 3 -> 4      backend 0 runs 0, 2, 4, and 5
    #   5                          backend 1 runs 1, 3
    #
    #   backend 0  00   2     444444
    #   backend 1    111 33333
    dag = Dag(6, [(0, 1), (1, 2), (2, 3), (3, 4)])
    chain = [[2, None], [None, 3], [1, None], [None, 5], [6, None]]
    for length, start in [(3, 2), (4, 6), (5, 6), (5.5, 17)]:
        assert heft(dag, [*chain, [length, None]]).start == (0, 2, 5, 6, 11, start)


def test_a_gap_may_be_used_more_than_once():
    #   0 -> 1 -> 2      backend 0 runs all but 1, which takes 6: 3, 4 and 5 fill the gap
    #   3   4   5
    dag = Dag(6, [(0, 1), (1, 2)])
    placement = heft(dag, [[3, None], [None, 6], [3, None], [2, None], [2, None], [2, None]])
    assert placement.start == (0, 3, 9, 3, 5, 7)


def test_the_worker_that_idles_for_the_shortest_time_is_taken():
    #   0 -> 2      costs 2, 3, 2, 1; when 2 is done, 3 could run on both workers
    #   1 -> 3
    #   2 -> 3
    dag = Dag(4, [(0, 2), (1, 3), (2, 3)])
    placement = heft(dag, on_one([2, 3, 2, 1]), workers=[2])
    assert times(placement) == [(0, 2), (0, 3), (2, 4), (4, 5)]
    assert placement.worker[3] == placement.worker[2]


def test_of_equal_nodes_the_lowest_comes_first():
    #   0 -> 1      costs whose sums differ in the last bit: 0.1 + 0.2 > 0.3
    #   2
    placement = heft(Dag(3, [(1, 2)]), on_one([0.3, 0.1, 0.2]))
    assert placement.start[0] == 0


def test_nodes_that_take_no_time_come_after_their_inputs():
    #   3 -> 2 -> 1 -> 0      nothing takes any time
    dag = Dag(4, [(3, 2), (2, 1), (1, 0)])
    placement = heft(dag, on_one([0] * 4), workers=[2])
    assert placement == WorkerSchedule((0,) * 4, (0,) * 4, (0.0,) * 4, (0.0,) * 4)
    assert timelines(dag, placement) == {(0, 0): [3, 2, 1, 0]}


def test_nodes_that_take_no_time_find_room_between_others():
    #   0 -> 1      costs 3, 0; the worker is busy from 0 to 9
    #   2           costs 6
    placement = heft(Dag(3, [(0, 1)]), on_one([3, 0, 6]))
    assert times(placement) == [(6, 9), (9, 9), (0, 6)]
    placement = heft(Dag(3, [(0, 1)]), on_one([7, 0, 6]))
    assert times(placement) == [(0, 7), (7, 7), (7, 13)]


# The example of Topcuoglu, Hariri and Wu 2002, figures 2 to 4: three processors, times of the
# tasks 1 to 10 on each, and of transfers between any two.
PAPER_COST = (
    (14, 16, 9),
    (13, 19, 18),
    (11, 13, 19),
    (13, 8, 17),
    (12, 13, 10),
    (13, 16, 9),
    (7, 15, 11),
    (5, 11, 14),
    (18, 12, 20),
    (21, 7, 16),
)
PAPER_TRANSFER = {
    (1, 2): 18,
    (1, 3): 12,
    (1, 4): 9,
    (1, 5): 11,
    (1, 6): 14,
    (2, 8): 19,
    (2, 9): 16,
    (3, 7): 23,
    (4, 8): 27,
    (4, 9): 23,
    (5, 9): 13,
    (6, 8): 15,
    (7, 10): 17,
    (8, 10): 11,
    (9, 10): 13,
}
PAPER = Problem(
    Dag(10, [(i - 1, j - 1) for i, j in PAPER_TRANSFER]),
    PAPER_COST,
    lambda i, j, a, b: PAPER_TRANSFER[i + 1, j + 1],
)


def test_heft_gives_the_schedule_of_the_paper():
    placement = heft(*PAPER)
    assert [b + 1 for b in placement.backend] == [3, 1, 3, 2, 3, 2, 3, 1, 2, 2]
    assert placement.start == (0, 27, 9, 18, 28, 26, 38, 57, 56, 73)
    assert placement.makespan == 80


def test_place_beats_the_schedule_of_the_paper():
    placement = place(*PAPER)
    assert_valid(PAPER, placement)
    assert placement.makespan <= 76


# place, by hand


def test_a_node_stays_where_the_transfer_takes_longer_than_it_gains():
    #   0 -> 1      1 takes 4 or 2
    dag = Dag(2, [(0, 1)])
    cost = [[1, None], [4, 2]]
    assert place(dag, cost).backend == (0, 1)
    assert place(dag, cost, flat(1)).backend == (0, 1)
    assert place(dag, cost, flat(1)).start == (0, 2)
    assert place(dag, cost, flat(3)).backend == (0, 0)


def test_transfers_may_depend_on_all_that_they_are_between():
    #   0 -> 2      0 runs on backend 0, 1 on backend 1; 2 runs where the other's transfer is short
    #   1 -> 2
    dag = Dag(3, [(0, 2), (1, 2)])
    cost = [[1, None], [None, 1], [1, 1]]
    for b in (0, 1):
        delay = {(1, 2, 1, 0): 4 + b, (0, 2, 0, 1): 5 - b}
        placement = place(dag, cost, lambda *edge, delay=delay: delay[edge])
        assert placement.backend == (0, 1, b)
        assert placement.start == (0, 0, 5)


def test_two_transfers_do_not_wait_for_each_other():
    #   0 -> 2      transfers of 5
    #   1 -> 2
    placement = place(Dag(3, [(0, 2), (1, 2)]), [[1, None], [2, None], [None, 1]], flat(5))
    assert placement.start == (2, 0, 8)


def test_the_fastest_start_is_not_always_taken():
    #   0 -> 1      0 takes 1 or 2, 1 takes 5 or 1; transfers of 3. heft puts 0 where it finishes
    #               first, and pays for it: 1 + 3 + 1
    problem = Problem(Dag(2, [(0, 1)]), [[1, 2], [5, 1]], flat(3))
    assert heft(*problem).makespan == 5
    assert place(*problem) == WorkerSchedule((1, 1), (0, 0), (0, 2), (2, 3))


def test_a_node_that_loses_much_on_the_wrong_backend_comes_first():
    #   0   1      0 takes 3 on both, 1 takes 1 or 5: the means are equal, the spreads are not
    problem = Problem(Dag(2, []), [[3, 3], [1, 5]])
    assert heft(*problem).makespan == 4
    assert place(*problem) == WorkerSchedule((1, 0), (0, 0), (0, 0), (3, 1))


def test_one_backend_may_beat_two():
    #   1 -> 2      0 takes 2 or 3, 1 takes 2 or 1, 2 takes 2 or 4; transfers of 3, two workers on
    #   0           backend 0. heft puts 1 where it finishes first, and 2 behind it
    problem = Problem(Dag(3, [(1, 2)]), [[2, 3], [2, 1], [2, 4]], flat(3), [2, 1])
    assert heft(*problem).makespan == 5
    placement = place(*problem)
    assert placement.backend == (0, 0, 0)
    assert placement.makespan == 4


def test_nodes_stay_together_where_transfers_are_long():
    #   0 -> 2      0 takes 1 or 2, 1 takes 3, 2 takes 5 or 2; transfers of 3. Neither the fastest
    #   1           start of 0, nor the cheapest backend of each, nor a single backend is best
    problem = Problem(Dag(3, [(0, 2)]), [[1, 2], [3, 3], [5, 2]], flat(3))
    assert heft(*problem).makespan == 6
    placement = place(*problem)
    assert placement.backend == (1, 0, 1)
    assert placement.makespan == 4


def test_workers_that_are_idle_take_what_is_ready():
    #        /-> 2      costs 1, 2, 4, 3. By rank 0, 2, 3, 1: without a gap left to it, 1 ends at 6
    #   0 --<
    #        \-> 3      worker 0  02222
    #   1               worker 1  11333
    problem = Problem(Dag(4, [(0, 2), (0, 3)]), on_one([1, 2, 4, 3]), None, [2])
    assert heft(*problem).makespan == 6
    assert place(*problem).makespan == 5


def test_a_backend_never_gets_what_it_does_not_support():
    #   0 -> 1 -> 2      backend 1 is faster, but does not support 1; transfers cost too much
    dag = Dag(3, [(0, 1), (1, 2)])
    assert place(dag, [[2, 1], [2, None], [2, 1]]).backend == (1, 0, 1)
    assert place(dag, [[2, 1], [2, None], [2, 1]], flat(5)).backend == (0, 0, 0)


def test_all_workers_of_a_backend_are_used():
    #   0   1   2   3      backend 0 takes 2, backend 1 takes 3
    cost = [[2, 3]] * 4
    for workers, makespan in [([1, 1], 6), ([2, 1], 4), ([2, 2], 3), ([4, 1], 2)]:
        assert place(Dag(4, []), cost, None, workers).makespan == makespan
    placement = place(Dag(4, []), cost, None, [2, 2])
    assert sorted(timelines(Dag(4, []), placement)) == [(0, 0), (0, 1), (1, 0), (1, 1)]


def test_placement_of_an_empty_graph_is_empty():
    for workers in (None, [], [2, 3]):
        assert place(Dag(0, []), [], None, workers) == WorkerSchedule((), (), (), ())
    assert place(Dag(0, []), []).makespan == 0.0
    assert list_schedule(Dag(0, []), [], [3]).makespan == bound(Dag(0, []), [], 3) == 0.0


def test_times_are_floats_whatever_costs_are():
    placement = place(Dag(2, [(0, 1)]), [[1], [2]])
    assert {type(t) for t in (*placement.start, *placement.finish)} == {float}


def test_a_placement_cannot_be_changed():
    with pytest.raises(dataclasses.FrozenInstanceError):
        place(Dag(0, []), []).start = (1.0,)  # type: ignore[misc]


def test_more_workers_than_nodes_take_no_room():
    assert place(Dag(3, []), on_one([1, 2, 3]), workers=[10**12]).makespan == 3
    assert list_schedule(Dag(3, []), [1, 2, 3], [10**12]).makespan == 3


def test_place_asks_for_no_transfers_within_one_backend():
    dag = Dag(2, [(0, 1)])
    placement = place(dag, on_one([1, 2]), never)
    assert replay_makespan(dag, on_one([1, 2]), placement, never) == 3
    assert place(dag, [[1, None], [2, None]], never).backend == (0, 0)


# What is refused


ONE_EDGE = Dag(2, [(0, 1)])
WRONG = [
    (Problem(ONE_EDGE, [[1, 2], [None, None]]), "no backend supports node 1"),
    (Problem(ONE_EDGE, [[], []]), "no backend supports node 0"),
    (Problem(ONE_EDGE, [[1]]), "cost has 1 rows for 2 nodes"),
    (Problem(ONE_EDGE, [[1, 2], [1]]), "node 1 has 1 costs, but node 0 has 2"),
    (Problem(ONE_EDGE, [[1], [-1]]), "node 1 has costs .-1.; they must be finite"),
    (Problem(ONE_EDGE, [[math.nan], [1]]), "node 0 has costs .nan.; they must be finite"),
    (Problem(ONE_EDGE, [[1], [math.inf]]), "node 1 has costs .inf.; they must be finite"),
    (Problem(ONE_EDGE, [[1], [1]], None, [0]), "0 workers"),
    (Problem(ONE_EDGE, [[1], [1]], None, [1, 1]), "workers has 2 entries for 1 backends"),
    (Problem(ONE_EDGE, [[1], [1]], None, []), "workers has 0 entries for 1 backends"),
    (
        Problem(ONE_EDGE, [[1, 1], [1, 1]], lambda *_: -1.0),
        "the edge 0 -> 1 cannot take -1.0 from backend 0 to 1",
    ),
    (
        Problem(ONE_EDGE, [[1, 1], [1, 1]], lambda *_: math.nan),
        "the edge 0 -> 1 cannot take nan from backend 0 to 1",
    ),
]


@pytest.mark.parametrize("method", [place, heft])
@pytest.mark.parametrize(("problem", "message"), WRONG)
def test_placement_with_wrong_arguments_is_refused(method, problem, message):
    with pytest.raises(ValueError, match=message):
        method(*problem)


@pytest.mark.parametrize(("measure", "workers"), [(bound, 1), (list_schedule, [1])])
def test_wrong_costs_are_refused(measure, workers):
    with pytest.raises(ValueError, match="cost has 1 entries for 2 nodes"):
        measure(Dag(2, []), [1.0], workers)
    with pytest.raises(ValueError, match="negative cost -1"):
        measure(Dag(2, []), [1.0, -1.0], workers)


# list_schedule


def test_workers_take_the_longest_chain_that_is_ready():
    #   0 -> 1 -> 2      costs 2, 2, 2, and 3 each for 3 and 4
    #   3   4
    #
    #   worker 0  001122      of rank 6, 4, 2, 3, 3
    #   worker 1  333444
    dag = Dag(5, [(0, 1), (1, 2)])
    cost = [2, 2, 2, 3, 3]
    assert [list_schedule(dag, cost, [n]).makespan for n in (1, 2, 3, 4)] == [12, 6, 6, 6]


def test_workers_take_the_longest_of_single_nodes():
    assert list_schedule(Dag(3, []), [1, 1, 2], [2]).makespan == 2


# bound


def test_the_bound_is_the_critical_path_or_the_share_of_the_work():
    #   0 -> 1      costs 2, 3, 4, 5
    #   2   3
    dag = Dag(4, [(0, 1)])
    cost = [2, 3, 4, 5]
    assert [bound(dag, cost, n) for n in (1, 2, 3)] == [14, 7, 5]
    assert bound(dag, cost) == 14


# What holds for every problem


@st.composite
def problems(draw: st.DrawFn) -> Problem:
    n = draw(st.integers(0, 9))
    number = draw(st.permutations(range(n)))
    pairs = [(a, b) for b in range(n) for a in range(b)]
    edges = draw(st.lists(st.sampled_from(pairs), max_size=16)) if pairs else []
    dag = Dag(n, [(number[a], number[b]) for a, b in edges])
    width = draw(st.integers(1, 3))
    time = node_times()
    row = st.lists(st.one_of(time, time, st.none()), min_size=width, max_size=width)
    cost = [draw(row.filter(lambda r: r != [None] * width)) for _ in range(n)]
    workers = draw(st.lists(st.integers(1, 3), min_size=width, max_size=width))
    if draw(st.booleans()):
        return Problem(dag, cost, None, workers)
    table = draw(st.lists(time, min_size=7, max_size=7))

    def transfer(i: int, j: int, a: int, b: int) -> float:
        assert (i, j) in dag.edges
        assert a != b
        assert None not in (cost[i][a], cost[j][b])
        return table[(31 * i + 7 * j + 3 * a + b) % 7]

    return Problem(dag, cost, transfer, workers)


@given(problems())
def test_placements_can_run(problem):
    assert_valid(problem, heft(*problem))
    assert_valid(problem, place(*problem))


@given(problems())
def test_a_placement_beats_all_obvious_ones_but_not_the_bound(problem):
    dag, cost, transfer, workers = problem
    makespan = place(*problem).makespan
    assert makespan * ROUNDING >= bound(dag, cheapest(cost), sum(workers))
    assert makespan <= heft(*problem).makespan
    for b, count in enumerate(workers):
        if all(row[b] is not None for row in cost):
            alone = on_one([row[b] for row in cost])
            assert makespan <= place(dag, alone, None, [count]).makespan * ROUNDING
            assert makespan <= sum(c for (c,) in alone) * ROUNDING
    # One node at a time, each on its cheapest backend, and one transfer at a time.
    best = [min((c, b) for b, c in enumerate(row) if c is not None)[1] for row in cost]
    edges = [(i, j, best[i], best[j]) for i, j in dag.edges if best[i] != best[j]]
    serial = sum(cheapest(cost)) + sum(transfer(*edge) for edge in edges if transfer)
    assert makespan <= serial * ROUNDING


@given(problems())
def test_a_replay_with_the_same_costs_takes_the_makespan(problem):
    dag, cost, transfer, _ = problem
    for placement in (heft(*problem), place(*problem)):
        assert replay_makespan(dag, cost, placement, transfer) == placement.makespan


@given(problems(), st.lists(st.floats(1, 5), min_size=9, max_size=9))
def test_a_replay_with_higher_costs_takes_no_less(problem, factors):
    dag, cost, transfer, _ = problem
    slower = [[c and c * f for c in row] for row, f in zip(cost, factors, strict=False)]
    placement = place(*problem)
    assert replay_makespan(dag, slower, placement, transfer) >= placement.makespan
    assert replay_makespan(dag, cost, placement, flat(10)) >= placement.makespan


@given(problems())
def test_the_same_problem_has_the_same_placement(problem):
    dag, *rest = problem
    assert place(*problem) == place(Dag(dag.n, reversed(dag.edges)), *rest)


@given(problems(), st.integers(1, 4))
def test_n_workers_take_no_longer_than_list_scheduling_can(problem, n):
    """Graham 1966: at most 2 - 1 / n times as long as need be."""
    dag, cost = problem.dag, cheapest(problem.cost)
    makespan = list_schedule(dag, cost, [n]).makespan
    share, longest = sum(cost) / n, critical_path(dag, cost)
    assert max(share, longest) == pytest.approx(bound(dag, cost, n))
    assert bound(dag, cost, n) <= makespan * ROUNDING
    assert makespan <= (share + longest * (1 - 1 / n)) * ROUNDING


def shortest(problem: Problem) -> float:
    """The least makespan, by trying all backends in all orders; one worker each."""
    dag, cost, transfer, _ = problem
    assert transfer
    place_in = ({i: k for k, i in enumerate(order)} for order in permutations(range(dag.n)))
    orders = [list(k) for k in place_in if all(k[a] < k[b] for a, b in dag.edges)]
    best = math.inf
    for backend in product(*([b for b, c in enumerate(row) if c is not None] for row in cost)):
        for order in orders:
            free, finish = [0.0] * len(cost[0]), [0.0] * dag.n
            for j in order:
                b = backend[j]
                start = free[b]
                for i in dag.pred[j]:
                    delay = transfer(i, j, backend[i], b) if backend[i] != b else 0
                    start = max(start, finish[i] + delay)
                free[b] = finish[j] = start + cost[j][b]
            best = min(best, max(finish))
    return best


def test_placements_on_two_backends_are_close_to_the_best():
    draw = random.Random(0)
    ratios = []
    for _ in range(60):
        dag = Dag(5, [(a, b) for b in range(5) for a in range(b) if draw.random() < 0.4])
        cost = [[draw.randrange(1, 10), draw.choice([None, *range(1, 10)])] for _ in range(5)]
        problem = Problem(dag, cost, flat(draw.randrange(4)))
        ratios.append(place(*problem).makespan / shortest(problem))
    assert min(ratios) >= 1
    assert mean(ratios) <= 1.03
    assert max(ratios) <= 1.4
