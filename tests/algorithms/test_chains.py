"""Chains: edges that paths imply, and as few chains as there can be."""

from __future__ import annotations

from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.algorithms import stream_assignment
from penstock.algorithms.dag import Dag
from penstock.algorithms.ordering import topological_order
from penstock.algorithms.stream_assignment import fewest_chains, implied_edges, transitive_reduction
from tests.support.sweeps import examples

# What an example takes says more about the machine than about the code.
many_examples = examples(4)


@st.composite
def dags(draw: st.DrawFn) -> Dag:
    n = draw(st.integers(0, 9))
    number = draw(st.permutations(range(n)))
    pairs = [(a, b) for b in range(n) for a in range(b)]
    edges = draw(st.lists(st.sampled_from(pairs), max_size=20)) if pairs else []
    return Dag(n, [(number[a], number[b]) for a, b in edges])


def ancestors(dag: Dag) -> list[set[int]]:
    above: list[set[int]] = [set() for _ in range(dag.n)]
    for i in topological_order(dag):
        above[i] = {*dag.pred[i], *(a for p in dag.pred[i] for a in above[p])}
    return above


# Edges.


def test_implied_edges_beside_a_path_are_found():
    #   0 -> 1 -> 2 -> 3
    #    '-------------^
    dag = Dag(4, [(0, 1), (1, 2), (2, 3), (0, 3)])
    assert implied_edges(range(4), dag.pred) == {(0, 3)}
    assert transitive_reduction(dag) == Dag(4, [(0, 1), (1, 2), (2, 3)])


def test_reduction_of_a_graph_without_implied_edges_is_the_graph():
    #   0 -> 1 -> 3
    #    '-> 2 ---^
    dag = Dag(4, [(0, 1), (0, 2), (1, 3), (2, 3)])
    assert transitive_reduction(dag) is dag


@pytest.mark.costly
@pytest.mark.parametrize("batch", [1, 2, 4096])
def test_edges_are_implied_if_they_start_before_another_one_that_ends_there(batch, monkeypatch):
    monkeypatch.setattr(stream_assignment, "_BATCH", batch)

    @many_examples
    @given(dag=dags())
    def check(dag: Dag) -> None:
        above = ancestors(dag)
        found = {(a, b) for a, b in dag.edges if any(a in above[p] for p in dag.pred[b])}
        assert implied_edges(topological_order(dag), dag.pred) == found
        assert ancestors(transitive_reduction(dag)) == above

    check()


# Chains.


def test_chains_are_joined_by_letting_others_follow():
    #   0 -> 2      0, 2 as a chain leave 1 and 3 without each other
    #    '-> 3
    #   1 -> 2
    dag = Dag(4, [(0, 2), (0, 3), (1, 2)])
    assert fewest_chains(dag, range(4), [0, 1, 0, 2]) == [0, 1, 1, 0]


def test_chains_that_are_few_enough_are_kept():
    #   0 -> 1 -> 3
    #    '-> 2 ---^
    dag = Dag(4, [(0, 1), (0, 2), (1, 3), (2, 3)])
    assert fewest_chains(dag, range(4), [7, 5, 7, 7]) == [0, 1, 0, 0]


def test_nodes_of_no_chain_can_stand_between_nodes_of_one():
    #   0 -> 1 -> 2
    assert fewest_chains(Dag(3, [(0, 1), (1, 2)]), range(3), [0, -1, 1]) == [0, -1, 0]


def wide(above: list[set[int]], nodes: list[int]) -> int:
    """The most of ``nodes`` of which none depends on another."""

    def free(some: tuple[int, ...]) -> bool:
        return not any(a in above[b] or b in above[a] for a, b in combinations(some, 2))

    return max(k for k in range(len(nodes) + 1) if any(map(free, combinations(nodes, k))))


@many_examples
@given(dag=dags(), data=st.data())
def test_chains_are_as_few_as_the_graph_is_wide(dag, data):
    order, above = topological_order(dag), ancestors(dag)
    chain, last = [-1] * dag.n, {}
    for i in order:
        behind = [c for c, end in last.items() if end in above[i]]
        chain[i] = data.draw(st.sampled_from([*behind, len(last), -1]))
        if chain[i] >= 0:
            last[chain[i]] = i
    found = fewest_chains(dag, order, chain)
    nodes = [i for i in order if chain[i] >= 0]
    assert [c >= 0 for c in found] == [c >= 0 for c in chain]
    assert len({*found} - {-1}) == wide(above, nodes)
    members: dict[int, list[int]] = {}
    for i in nodes:
        assert set(members.setdefault(found[i], [])) <= above[i]
        members[found[i]].append(i)
    assert list(members) == list(range(len(members)))
    if len(last) == len(members):
        assert all((found[i] == found[j]) == (chain[i] == chain[j]) for i in nodes for j in nodes)
