"""Clusters: groups that never wait for each other, large enough for a worker, no larger than that."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterable, Sequence
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.algorithms.clustering import cluster
from penstock.algorithms.dag import Dag
from tests.support.random_dags import random_edges
from tests.support.sweeps import examples, scaled, sweep

# What an example takes says more about the machine than about the code.
many_examples = examples(4)

COSTS = [0.0, 0.01, 0.1, 0.3, 0.5, 0.9, 1.0, 1.1, 5.0]


class Problem:
    """A graph with arguments of ``cluster``; its grain is 1."""

    def __init__(self, dag: Dag, cost: Sequence[float], kinds: Sequence[int] | None) -> None:
        self.dag = dag
        self.cost = cost
        self.kinds = kinds
        self.groups = cluster(dag, cost, 1.0, kinds)
        self.group_of = {i: g for g, group in enumerate(self.groups) for i in group}

    @property
    def over(self) -> Dag:
        """The groups as nodes; raises ``CycleError`` if some wait for each other."""
        edges = [(self.group_of[a], self.group_of[b]) for a, b in self.dag.edges]
        return Dag(len(self.groups), [(a, b) for a, b in edges if a != b])

    def kind(self, i: int) -> int:
        return 0 if self.kinds is None else self.kinds[i]


def ancestors(dag: Dag) -> list[set[int]]:
    """Of each node all that it waits for; nodes stand in an order in which they can run."""
    found: list[set[int]] = []
    for i in range(dag.n):
        found.append({*dag.pred[i], *(a for b in dag.pred[i] for a in found[b])})
    return found


@st.composite
def problems(draw: st.DrawFn) -> Problem:
    n = draw(st.integers(0, 14))
    pairs = [(a, b) for b in range(n) for a in range(b)]
    edges = draw(st.lists(st.sampled_from(pairs), max_size=30)) if pairs else []
    cost = draw(st.lists(st.sampled_from(COSTS), min_size=n, max_size=n))
    kinds = draw(st.none() | st.lists(st.integers(-1, 1), min_size=n, max_size=n))
    return Problem(Dag(n, edges), cost, kinds)


def drawn(seed: int, most: int = 120) -> Problem:
    """Larger graphs, of a shape that depends on the seed: near edges, far ones, few or many."""
    choose = random.Random(seed)
    n = choose.randint(1, most)
    edges = random_edges(choose, n)
    costs = choose.choice([COSTS, [0.1], [0.4, 5.0], [0.9, 0.1], [0.0, 2.0]])
    kinds = choose.choice([None, [choose.choice([0, 0, 0, 1, -2]) for _ in range(n)]])
    return Problem(Dag(n, edges), [choose.choice(costs) for _ in range(n)], kinds)


# What holds for every graph.


def assert_groups(problem: Problem) -> None:
    dag = problem.dag
    # Each node is in one group, where it comes after all that it waits for.
    assert sorted(i for group in problem.groups for i in group) == list(range(dag.n))
    place = {i: k for group in problem.groups for k, i in enumerate(group)}
    group_of = problem.group_of
    assert all(place[a] < place[b] for a, b in dag.edges if group_of[a] == group_of[b])
    assert all(len({problem.kind(i) for i in group}) == 1 for group in problem.groups)
    assert problem.over.n == len(problem.groups)


@many_examples
@given(problem=problems())
def test_groups_of_small_graphs_form_no_cycle(problem):
    assert_groups(problem)


@pytest.mark.parametrize("seed", sweep(range(400), 80))
def test_groups_of_large_graphs_form_no_cycle(seed):
    assert_groups(drawn(seed))


def assert_chains_whole(problem: Problem) -> None:
    dag = problem.dag
    for a in range(dag.n):
        if len(dag.succ[a]) == 1:
            (b,) = dag.succ[a]
            if len(dag.pred[b]) == 1 and problem.kind(a) == problem.kind(b):
                assert problem.group_of[a] == problem.group_of[b]


@many_examples
@given(problem=problems())
def test_chains_of_small_graphs_are_in_one_group(problem):
    assert_chains_whole(problem)


@pytest.mark.parametrize("seed", sweep(range(100), 25))
def test_chains_of_large_graphs_are_in_one_group(seed):
    assert_chains_whole(drawn(seed))


def assert_heavy_nodes_wait_for_their_own(problem: Problem) -> None:
    """No heavy node waits for another because of what stands beside it in a group."""
    before, over = ancestors(problem.dag), problem.over
    heavy = [i for i in range(problem.dag.n) if problem.cost[i] >= 1]
    done: list[set[int]] = [set() for _ in problem.groups]  # heavy nodes that ran with a group
    order = sorted(range(over.n), key=lambda g: min(problem.groups[g]))
    left = [len(p) for p in over.pred]
    ready = [g for g in order if not left[g]]
    for g in ready:
        ran = set().union(*(done[p] for p in over.pred[g]))
        for i in problem.groups[g]:
            if i in heavy:
                assert ran <= before[i], (i, ran - before[i])
                ran = ran | {i}
        done[g] = ran
        for s in over.succ[g]:
            left[s] -= 1
            if not left[s]:
                ready.append(s)


@many_examples
@given(problem=problems())
def test_groups_of_small_graphs_add_no_wait_between_heavy_nodes(problem):
    assert_heavy_nodes_wait_for_their_own(problem)


@pytest.mark.parametrize("seed", sweep(range(200), 40))
def test_groups_of_large_graphs_add_no_wait_between_heavy_nodes(seed):
    assert_heavy_nodes_wait_for_their_own(drawn(seed))


@pytest.mark.parametrize("seed", range(20))
def test_clustering_is_deterministic(seed):
    assert drawn(seed).groups == drawn(seed).groups


@many_examples
@given(problem=problems())
def test_groups_stand_in_the_order_of_their_first_nodes(problem):
    # Nodes stand in an order in which they can run, and keep it.
    firsts = [group[0] for group in problem.groups]
    assert firsts == sorted(firsts)
    assert all(group == sorted(group) for group in problem.groups)


# Hand-drawn.


def groups(n: int, edges: Iterable[tuple[int, int]], cost: Sequence[float], **options):
    return cluster(Dag(n, edges), cost, 1.0, **options)


def test_grouping_of_an_empty_graph_is_empty():
    assert groups(0, [], []) == []


@pytest.mark.parametrize("cost", [0.0, 0.1, 100.0])
def test_a_chain_is_one_group(cost):
    #   0 -> 1 -> ... -> 9
    assert groups(10, pairwise(range(10)), [cost] * 10) == [list(range(10))]


def test_a_chain_is_cut_where_the_kind_changes():
    #   0 -> 1 -> 2 => 3 -> 4 -> 5
    kinds = [0, 0, 0, 1, 1, 1]
    assert groups(6, pairwise(range(6)), [0.1] * 6, kinds=kinds) == [[0, 1, 2], [3, 4, 5]]


def test_kinds_in_turn_share_no_group():
    #   0 => 1 => 2 => 3
    assert groups(4, pairwise(range(4)), [0.1] * 4, kinds=[0, 1, 0, 1]) == [[0], [1], [2], [3]]


def test_a_small_join_keeps_two_heavy_branches_apart():
    #   A (0) --\
    #            +-> Add (2)
    #   B (1) --/
    found = groups(3, [(0, 2), (1, 2)], [5, 5, 0.01])
    assert [0] in found
    assert [1] in found


def test_branches_are_apart_between_a_split_and_a_join():
    #        /-> 1 -> 2 --\
    #     0 +              +-> 5
    #        \-> 3 -> 4 --/
    edges = [(0, 1), (1, 2), (0, 3), (3, 4), (2, 5), (4, 5)]
    found = groups(6, edges, [0.1, 3, 3, 3, 3, 0.1])
    of = {i: g for g, group in enumerate(found) for i in group}
    assert of[1] == of[2] != of[3] == of[4]


def test_small_nodes_join_the_heavy_one_that_alone_reads_them():
    #   0 --\
    #        +-> 2
    #   1 --/
    assert groups(3, [(0, 2), (1, 2)], [0.1, 0.1, 5]) == [[0, 1, 2]]


def test_small_nodes_join_the_heavy_one_that_they_alone_read():
    #        /-> 1
    #     0 +
    #        \-> 2
    assert groups(3, [(0, 1), (0, 2)], [5, 0.1, 0.1]) == [[0, 1, 2]]


def test_small_nodes_without_anything_in_common_make_one():
    assert groups(5, [], [0.1] * 5) == [[0, 1, 2, 3, 4]]


def test_heavy_nodes_stay_alone():
    assert groups(5, [], [1] * 5) == [[i] for i in range(5)]


@pytest.mark.parametrize("cost", [0.02, 0.1, 0.3, 0.6, 0.9])
@pytest.mark.parametrize("ends", [0.0, 0.1, 3.0])
def test_a_wide_graph_of_small_nodes_stays_wide(cost, ends):
    #        /-> 1 --\
    #     0 +-> ... --+-> n + 1
    #        \-> n --/
    n = 500
    edges = [(0, i) for i in range(1, n + 1)] + [(i, n + 1) for i in range(1, n + 1)]
    found = groups(n + 2, edges, [ends, *[cost] * n, ends])
    assert len(found) >= n * cost / 4
    assert len(found) <= 2 * n * cost + 3  # and yet no node is alone if two fit
    middle = [sum(cost for i in group if 0 < i <= n) for group in found]
    assert max(middle) <= 3


@pytest.mark.parametrize("cost", [0.02, 0.3, 0.6, 0.9])
@pytest.mark.parametrize("down", [False, True])
def test_a_tree_of_small_nodes_stays_wide(cost, down):
    #     0 -> 1, 2    1 -> 3, 4    2 -> 5, 6   and so on, or the other way round
    n = 1023
    edges = [((i - 1) // 2, i) for i in range(1, n)]
    found = groups(n, edges if down else [(b, a) for a, b in edges], [cost] * n)
    assert len(found) >= n * cost / 4
    assert max(len(group) for group in found) * cost <= 4


@pytest.mark.parametrize("cost", [0.02, 0.3, 0.9])
def test_independent_small_nodes_stay_wide(cost):
    found = groups(500, [], [cost] * 500)
    assert len(found) >= 500 * cost / 2
    assert max(len(group) for group in found) * cost < 2


def test_a_chain_that_takes_in_small_nodes_takes_in_no_more_than_others():
    #   100   101          199
    #    v     v            v
    #    0 --> 1 -> ... -> 99      without the chain, half of all work is side by side
    n = 100
    edges = [*pairwise(range(n)), *((n + i, i) for i in range(n))]
    found = groups(2 * n, edges, [0.9] * 2 * n)
    (chain,) = [group for group in found if 0 in group]
    assert sum(0.9 for i in chain if i >= n) <= 10


# Sizes.


def limited(n: int) -> None:
    """Fewer frames than nodes: whatever walks a chain by recursion fails."""
    assert sys.getrecursionlimit() < n


@pytest.mark.parametrize("n", scaled(10_000, 100_000))
def test_grouping_of_a_long_chain_takes_seconds(n):
    limited(n)
    assert groups(n, pairwise(range(n)), [0.3] * n) == [list(range(n))]


@pytest.mark.parametrize("n", scaled(10_000, 100_000))
def test_grouping_of_a_chain_of_two_kinds_takes_seconds(n):
    found = groups(n, pairwise(range(n)), [0.3] * n, kinds=[i // 10 % 2 for i in range(n)])
    assert len(found) == n // 10


@pytest.mark.parametrize("n", scaled(4_000, 20_000))
@pytest.mark.parametrize("reach", [30, 20_000])
def test_grouping_of_a_large_random_graph_takes_seconds(reach, n):
    limited(n)
    choose = random.Random(reach)
    edges = [(choose.randrange(max(0, b - reach), b), b) for b in range(1, n) for _ in range(2)]
    problem = Problem(Dag(n, edges), [choose.random() / 4 for _ in range(n)], None)
    assert_groups(problem)
    assert len(problem.groups) < n


@pytest.mark.parametrize("n", scaled(4_000, 20_000))
def test_grouping_of_a_wide_fan_out_takes_seconds(n):
    edges = [(0, i) for i in range(1, n)] + [(i, n) for i in range(1, n)]
    assert len(groups(n + 1, edges, [0.01] * (n + 1))) <= 0.02 * n


# Arguments.


def test_costs_and_kinds_of_other_than_all_nodes_are_refused():
    with pytest.raises(ValueError, match="1 entries for 2 nodes"):
        groups(2, [(0, 1)], [1.0])
    with pytest.raises(ValueError, match="1 entries for 2 nodes"):
        groups(2, [(0, 1)], [1.0, 1.0], kinds=[0])
    with pytest.raises(ValueError, match="1 entries for 0 nodes"):
        groups(0, [], [1.0])
