"""Graphs over plain integers: what they hold, and what they refuse."""

from __future__ import annotations

import copy
import dataclasses
import pickle
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.algorithms.dag import CycleError, Dag, strongly_connected_components

# What an example takes says more about the machine than about the code.
#     0
#    / \
#   1   2
#    \ / \
#     3   4
DIAMOND = [(0, 1), (0, 2), (1, 3), (2, 3), (2, 4)]


def assert_is_cycle(cycle: list[int], edges: list[tuple[int, int]]) -> None:
    assert len(set(cycle)) == len(cycle) > 0
    assert set(zip(cycle, [*cycle[1:], cycle[0]], strict=True)) <= set(edges)


def test_dag_has_the_neighbours_of_each_node():
    dag = Dag(5, DIAMOND)
    assert dag.succ == ((1, 2), (3,), (3, 4), (), ())
    assert dag.pred == ((), (0,), (0,), (1, 2), (2,))


def test_dag_has_its_edges_and_number_of_nodes():
    dag = Dag(5, DIAMOND)
    assert (dag.n, dag.edges) == (5, tuple(DIAMOND))


def test_dag_takes_edges_from_an_iterator():
    assert Dag(5, iter(DIAMOND)) == Dag(5, DIAMOND)


def test_dag_without_nodes_is_empty():
    dag = Dag(0, [])
    assert (dag.n, dag.edges, dag.succ, dag.pred) == (0, (), (), ())


def test_dag_edge_given_twice_counts_once():
    dag = Dag(2, [(0, 1), (0, 1)])
    assert (dag.edges, dag.succ, dag.pred) == (((0, 1),), ((1,), ()), ((), (0,)))


def test_neighbours_are_sorted():
    dag = Dag(20, [(0, 8), (0, 17), (0, 1), (8, 1), (17, 1)])
    assert (dag.succ[0], dag.pred[1]) == ((1, 8, 17), (0, 8, 17))


def test_dag_does_not_depend_on_the_order_of_edges():
    shuffled = random.Random(1).sample(DIAMOND, len(DIAMOND))
    assert shuffled != DIAMOND
    assert (Dag(5, shuffled).succ, Dag(5, shuffled).pred) == (
        Dag(5, DIAMOND).succ,
        Dag(5, DIAMOND).pred,
    )


def test_equal_graphs_are_equal_and_hash_alike():
    assert {Dag(5, DIAMOND): 1}[Dag(5, reversed(DIAMOND))] == 1


def test_graphs_with_other_edges_or_more_nodes_differ():
    assert len({Dag(5, DIAMOND), Dag(5, DIAMOND[1:]), Dag(6, DIAMOND)}) == 3


def test_dag_is_immutable():
    with pytest.raises(dataclasses.FrozenInstanceError):
        Dag(2, [(0, 1)]).n = 3  # type: ignore[misc]


@pytest.mark.parametrize(
    "again", [copy.copy, copy.deepcopy, lambda d: pickle.loads(pickle.dumps(d))]
)
def test_dag_copy_has_the_same_neighbours(again):
    dag = again(Dag(5, DIAMOND))
    assert (dag.succ, dag.pred) == (Dag(5, DIAMOND).succ, Dag(5, DIAMOND).pred)


@pytest.mark.parametrize("edge", [(0, 2), (2, 0), (-1, 0), (0, -1)])
def test_dag_refuses_an_edge_out_of_the_graph(edge):
    with pytest.raises(ValueError, match=rf"edge {edge[0]} -> {edge[1]} leaves the graph"):
        Dag(2, [(0, 1), edge])


def test_a_negative_number_of_nodes_is_refused():
    with pytest.raises(ValueError, match="-1 nodes"):
        Dag(-1, [])


def test_cycle_error_names_the_cycle():
    #   0 -> 4 -> 2 -> 1 -> 3
    #        ^---------'
    with pytest.raises(CycleError, match=r"1 -> 4 -> 2 -> 1$") as caught:
        Dag(5, [(0, 4), (4, 2), (2, 1), (1, 4), (1, 3)])
    assert caught.value.cycle == [1, 4, 2]


def test_a_node_after_itself_is_a_cycle():
    with pytest.raises(CycleError, match=r"1 -> 1$") as caught:
        Dag(3, [(0, 1), (1, 1), (1, 2)])
    assert caught.value.cycle == [1]


def test_a_cycle_error_is_a_value_error():
    with pytest.raises(ValueError, match="0 -> 1 -> 0"):
        Dag(2, [(0, 1), (1, 0)])


def test_cycle_error_message_of_a_long_cycle_is_short():
    n = 100_000
    with pytest.raises(CycleError, match=r"0 -> 1 -> .* more nodes .* -> 99999 -> 0") as caught:
        Dag(n, ((i, (i + 1) % n) for i in range(n)))
    assert len(str(caught.value)) < 300
    assert caught.value.cycle == list(range(n))


def test_cycle_error_message_leaves_out_no_single_node():
    for n in range(14, 19):
        with pytest.raises(CycleError) as caught:
            Dag(n, ((i, (i + 1) % n) for i in range(n)))
        hidden = sum(f" {i} " not in f" {caught.value} " for i in range(n))
        assert hidden != 1
        assert f"{hidden} more" in str(caught.value) or hidden == 0


def test_a_cycle_error_survives_pickling():
    error = pickle.loads(pickle.dumps(CycleError([1, 2])))
    assert (error.cycle, str(error)) == ([1, 2], str(CycleError([1, 2])))


def edge_lists() -> st.SearchStrategy[list[tuple[int, int]]]:
    node = st.integers(0, 7)
    return st.lists(st.tuples(node, node), max_size=20)


@given(edge_lists())
def test_a_graph_is_refused_exactly_if_it_has_a_cycle(edges):
    # Reachable by at least one edge, by Warshall's method.
    reach = {*edges}
    for k in range(8):
        reach |= {(a, b) for a in range(8) for b in range(8) if {(a, k), (k, b)} <= reach}
    if any((i, i) in reach for i in range(8)):
        with pytest.raises(CycleError) as caught:
            Dag(8, edges)
        assert_is_cycle(caught.value.cycle, edges)
    else:
        assert set(Dag(8, edges).edges) == set(edges)


@pytest.mark.full
def test_dag_of_100_000_nodes_and_a_million_edges_is_built():
    n = 100_000
    draw = random.Random(0)
    edges = {(draw.randrange(i), i) for i in range(1, n) for _ in range(10)}
    dag = Dag(n, edges)
    assert sum(map(len, dag.succ)) == sum(map(len, dag.pred)) == len(dag.edges) == len(edges)


def test_a_cycle_at_the_end_of_a_long_chain_is_found():
    n = 100_000
    with pytest.raises(CycleError) as caught:
        Dag(n, [*((i, i + 1) for i in range(n - 1)), (n - 1, n - 3)])
    assert caught.value.cycle == [n - 3, n - 2, n - 1]


# Strongly connected components


def test_components_of_a_graph_without_edges_are_single_nodes():
    assert strongly_connected_components([[], [], []]) == [[0], [1], [2]]


def test_components_come_after_those_that_they_reach():
    assert strongly_connected_components([[1], [2], [1, 3], []]) == [[3], [2, 1], [0]]


def test_components_of_a_long_chain_do_not_recurse():
    n = 20_000
    cycle = [[(i + 1) % n] for i in range(n)]
    assert sorted(strongly_connected_components(cycle)[0]) == list(range(n))


@given(st.integers(1, 12), st.data())
def test_components_are_the_classes_of_mutual_reachability(n: int, data: st.DataObject):
    nodes = st.integers(0, n - 1)
    successors = data.draw(st.lists(st.lists(nodes, max_size=3), min_size=n, max_size=n))
    reach = [{i} for i in range(n)]
    for _ in range(n):
        for i in range(n):
            reach[i].update(*(reach[j] for j in successors[i]))
    components = strongly_connected_components(successors)
    position = {i: at for at, component in enumerate(components) for i in component}
    assert sorted(position) == list(range(n))
    for i in range(n):
        for j in range(n):
            assert (position[i] == position[j]) == (j in reach[i] and i in reach[j])
            if j in reach[i]:
                assert position[j] <= position[i]
