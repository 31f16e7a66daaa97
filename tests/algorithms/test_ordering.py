"""Orders in which a graph can run: which comes first, and what they cost."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from itertools import accumulate, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.algorithms import ordering as order_module
from penstock.algorithms.dag import Dag
from penstock.algorithms.ordering import (
    Output,
    critical_path,
    memory_order,
    ranks,
    topological_order,
)
from tests.support.sweeps import scaled


# What an example takes says more about the machine than about the code.
def assert_can_run(dag: Dag, order: Sequence[int]) -> None:
    place = {i: k for k, i in enumerate(order)}
    assert len(order) == dag.n == len(place)
    assert all(place[a] < place[b] for a, b in dag.edges)


@st.composite
def dags(draw: st.DrawFn, largest: int = 8) -> Dag:
    n = draw(st.integers(0, largest))
    number = draw(st.permutations(range(n)))
    pairs = [(a, b) for b in range(n) for a in range(b)]
    edges = draw(st.lists(st.sampled_from(pairs), max_size=16)) if pairs else []
    return Dag(n, [(number[a], number[b]) for a, b in edges])


# topological_order


def test_nodes_in_order_stay_in_order():
    #   0 -> 2 -> 4
    #   1 -> 3 ---^
    assert topological_order(Dag(5, [(0, 2), (1, 3), (2, 4), (3, 4)])) == [0, 1, 2, 3, 4]


def test_topological_order_takes_the_lowest_ready_node_first():
    #   4 -> 0 -> 2
    #   3 -> 1
    assert topological_order(Dag(5, [(4, 0), (0, 2), (3, 1)])) == [3, 1, 4, 0, 2]


def test_topological_order_takes_the_highest_priority_first():
    #       /-> 1
    #     0 --> 2
    #       \-> 3
    dag = Dag(4, [(0, 1), (0, 2), (0, 3)])
    assert topological_order(dag, priority=[0, 1.5, -2, 7]) == [0, 3, 1, 2]


def test_equal_priorities_leave_the_lowest_first():
    assert topological_order(Dag(4, []), priority=[1, 2, 1, 2]) == [1, 3, 0, 2]


def test_priority_cannot_overtake_a_dependency():
    #   0 -> 1    2
    assert topological_order(Dag(3, [(0, 1)]), priority=[0, 9, 1]) == [2, 0, 1]


def test_priority_for_other_than_all_nodes_is_refused():
    with pytest.raises(ValueError, match="priority has 1 entries for 2 nodes"):
        topological_order(Dag(2, []), priority=[1])


@given(dags(), st.lists(st.floats(allow_nan=False), min_size=8, max_size=8))
def test_a_topological_order_can_run(dag, priority):
    assert_can_run(dag, topological_order(dag))
    assert_can_run(dag, topological_order(dag, priority[: dag.n]))


@given(dags())
def test_without_priority_the_order_is_the_smallest_of_all(dag):
    def smallest(done: tuple[int, ...]) -> tuple[int, ...]:
        ready = (i for i in range(dag.n) if i not in done and set(dag.pred[i]) <= set(done))
        first = min(ready, default=None)
        return done if first is None else smallest((*done, first))

    assert tuple(topological_order(dag)) == smallest(())


# ranks and critical_path


def test_ranks_count_the_nodes_of_the_longest_chain_that_follows():
    #   0 -> 1 -> 3 -> 4
    #    '-> 2 -------^
    assert ranks(Dag(5, [(0, 1), (0, 2), (1, 3), (3, 4), (2, 4)])) == [3, 2, 1, 1, 0]


def test_ranks_add_up_costs_without_the_nodes_own():
    #   0 -> 1 -> 3      costs 1, 2, 5, 4
    #    '-> 2 --^
    dag = Dag(4, [(0, 1), (0, 2), (1, 3), (2, 3)])
    assert ranks(dag, [1, 2, 5, 4]) == [9, 4, 4, 0]


def test_critical_path_has_both_ends():
    #   0 -> 1 -> 3      costs 1, 2, 5, 4
    #    '-> 2 --^
    assert critical_path(Dag(4, [(0, 1), (0, 2), (1, 3), (2, 3)]), [1, 2, 5, 4]) == 10


def test_a_single_node_can_be_the_critical_path():
    #   0 -> 1    2
    assert critical_path(Dag(3, [(0, 1)]), [1, 1, 3]) == 3


def test_critical_path_of_an_empty_graph_is_zero():
    path = critical_path(Dag(0, []), [])
    assert (path, type(path)) == (0.0, float)


def test_a_negative_cost_is_refused():
    with pytest.raises(ValueError, match="negative cost -1"):
        ranks(Dag(2, []), [0, -1])


@pytest.mark.parametrize("measure", [ranks, critical_path])
def test_costs_for_other_than_all_nodes_are_refused(measure):
    with pytest.raises(ValueError, match="cost has 1 entries for 2 nodes"):
        measure(Dag(2, []), [1])


def chains(dag: Dag, i: int) -> list[list[int]]:
    """All chains that follow node i, up to every node of them."""
    return [[], *([j, *rest] for j in dag.succ[i] for rest in chains(dag, j))]


@given(dags(largest=7), st.lists(st.integers(0, 9), min_size=7, max_size=7))
def test_ranks_are_those_of_all_chains(dag, cost):
    cost = cost[: dag.n]
    longest = [max(sum(cost[j] for j in chain) for chain in chains(dag, i)) for i in range(dag.n)]
    assert ranks(dag, cost) == longest
    assert critical_path(dag, cost) == max(
        (a + b for a, b in zip(cost, longest, strict=True)), default=0
    )


# memory_order


def peak_bytes(dag: Dag, outputs: Sequence[Sequence[Output]], order: Sequence[int]) -> int:
    """The most bytes that are live at once when the nodes of ``dag`` run in ``order``."""
    step = {i: k for k, i in enumerate(order)}
    changes = [0] * (dag.n + 1)
    for i, produced in enumerate(outputs):
        for size, consumers in produced:
            last = dag.n - 1 if consumers is None else max(step[j] for j in (i, *consumers))
            changes[step[i]] += size
            changes[last + 1] -= size
    return max(accumulate(changes), default=0)


def one_buffer_each(dag: Dag, sizes: Sequence[int]) -> list[list[Output]]:
    """Each node makes one buffer, for its successors; without any, for good."""
    return [[(size, after or None)] for size, after in zip(sizes, dag.succ, strict=True)]


#   0 --> 1 --> 4       0 makes 1 byte; 1 and 2 make 50, and 3 and 4 shrink them to 5
#    '--> 2 --> 3 --> 5
#         4 ----------^
BRANCHES = Dag(6, [(0, 1), (0, 2), (1, 4), (2, 3), (4, 5), (3, 5)])
BRANCH_BUFFERS = one_buffer_each(BRANCHES, [1, 50, 50, 5, 5, 1])


def test_a_branch_is_finished_before_the_next_begins():
    order = memory_order(BRANCHES, BRANCH_BUFFERS)
    assert abs(order.index(1) - order.index(4)) == abs(order.index(2) - order.index(3)) == 1
    assert peak_bytes(BRANCHES, BRANCH_BUFFERS, order) == 60  # 5 of one branch, 50 + 5 of the other


def test_peak_of_the_given_order_is_its_largest_live_sum():
    assert peak_bytes(BRANCHES, BRANCH_BUFFERS, range(6)) == 105


def test_peak_counts_inputs_and_outputs_of_the_running_node():
    #   0 -> 1
    dag = Dag(2, [(0, 1)])
    assert peak_bytes(dag, [[(10, [1])], [(7, None)]], [0, 1]) == 17


def test_a_buffer_lives_until_its_last_consumer():
    #   0 -> 1 -> 2 -> 3      2 reads what 0 made
    dag = Dag(4, [(0, 1), (1, 2), (0, 2), (2, 3)])
    buffers = [[(100, [1, 2])], [(1, [2])], [(1, [3])], [(20, None)]]
    assert peak_bytes(dag, buffers, range(4)) == 102


def test_a_buffer_without_consumers_lives_for_one_step():
    dag = Dag(2, [(0, 1)])
    assert peak_bytes(dag, [[(100, ())], [(99, ())]], [0, 1]) == 100


def test_a_buffer_that_is_kept_lives_to_the_end():
    dag = Dag(2, [(0, 1)])
    assert peak_bytes(dag, [[(100, None)], [(99, ())]], [0, 1]) == 199


def test_a_consumer_named_twice_counts_once():
    dag = Dag(3, [(0, 1), (1, 2)])
    assert peak_bytes(dag, [[(100, [1, 1])], [(1, [2])], [(50, None)]], range(3)) == 101


def test_peak_counts_each_output_of_a_node_by_its_own_readers():
    #   0 -> 1 -> 2      1 reads the large output of 0, 2 the small one
    dag = Dag(3, [(0, 1), (1, 2), (0, 2)])
    buffers = [[(100, [1]), (10, [2])], [(1, [2])], [(90, None)]]
    assert peak_bytes(dag, buffers, range(3)) == 111


def test_memory_order_takes_the_consumers_of_views_as_given():
    #   0 -> 1 -> 2      1 is a view of what 0 made
    dag = Dag(3, [(0, 1), (1, 2)])
    assert peak_bytes(dag, [[(100, [1, 2])], [], [(7, None)]], range(3)) == 107


def test_outputs_of_the_graph_are_made_late():
    #   0 -> 1 (kept)
    #    '-> 2 -> 3      2 needs a large workspace
    dag = Dag(4, [(0, 1), (0, 2), (2, 3)])
    buffers = [[(1, [1, 2])], [(100, None)], [(1, [3]), (100, ())], [(1, None)]]
    order = memory_order(dag, buffers)
    assert order.index(1) > order.index(2)
    assert peak_bytes(dag, buffers, order) == 102


def test_memory_order_evaluates_the_operand_with_the_larger_peak_first():
    #   0 -> 1 -.
    #            4      1 needs 20 bytes to make 10; 3 makes more, 15, but needs 100
    #   2 -> 3 -'
    dag = Dag(5, [(0, 1), (2, 3), (1, 4), (3, 4)])
    buffers = one_buffer_each(dag, [20, 10, 100, 15, 1])
    order = memory_order(dag, buffers)
    assert order == [2, 3, 0, 1, 4]
    assert peak_bytes(dag, buffers, order) == 115


def test_memory_order_runs_branches_that_need_more_than_they_leave_first():
    #   1 -> 3
    #   0    2         bytes 5, 10, 5, 20; all but those of 1 are kept
    dag = Dag(4, [(1, 3)])
    order = memory_order(dag, one_buffer_each(dag, [5, 10, 5, 20]))
    assert order == [1, 3, 0, 2]


def test_memory_order_runs_nodes_that_free_nothing_last():
    #   4 -> 2 -> 0     3
    #    '-> 1                 bytes 20, 10, 20, 20, 20; those of 0, 1 and 3 are kept
    dag = Dag(5, [(4, 2), (2, 0), (4, 1)])
    buffers = one_buffer_each(dag, [20, 10, 20, 20, 20])
    order = memory_order(dag, buffers)
    assert order == [4, 1, 2, 0, 3]
    assert peak_bytes(dag, buffers, order) == 50  # what is kept, and so the least


def test_outputs_of_the_graph_count_from_the_end_of_the_graph():
    #   0 -> 1 -> 4     2
    #    '-> 3                 bytes 20, 20, 5, 1, 10; those of 2, 3 and 4 are kept
    dag = Dag(5, [(0, 1), (1, 4), (0, 3)])
    buffers = one_buffer_each(dag, [20, 20, 5, 1, 10])
    order = memory_order(dag, buffers)
    assert order == [0, 3, 1, 4, 2]
    assert peak_bytes(dag, buffers, order) == 41


def test_memory_order_runs_the_node_that_grows_least_first():
    #   0 -> 1 -> 2
    #    '-> 3                 bytes 5, 20, 5, 2
    dag = Dag(4, [(0, 1), (1, 2), (0, 3)])
    buffers = one_buffer_each(dag, [5, 20, 5, 2])
    order = memory_order(dag, buffers)
    assert order == [0, 3, 1, 2]
    assert peak_bytes(dag, buffers, order) == 27


def test_memory_order_keeps_an_order_that_cannot_be_improved():
    #   0 -> 2, 1 -> 3
    dag = Dag(4, [(0, 2), (1, 3)])
    assert memory_order(dag, one_buffer_each(dag, [5, 5, 5, 5])) == [0, 1, 2, 3]


def test_memory_order_stops_at_a_plain_order_that_is_optimal(monkeypatch):
    #   0 -> 1 -> 2      the most that one node touches is a peak that no order avoids
    monkeypatch.setattr(order_module, "_greedy", None)
    dag = Dag(3, [(0, 1), (1, 2)])
    assert memory_order(dag, one_buffer_each(dag, [1, 2, 3])) == [0, 1, 2]


def test_memory_order_takes_sizes_beyond_64_bits():
    dag = Dag(2, [(0, 1)])
    assert peak_bytes(dag, [[(1 << 80, [1])], [(1 << 80, None)]], [0, 1]) == 1 << 81


def test_negative_bytes_are_refused():
    with pytest.raises(ValueError, match="node 1 cannot produce -1 bytes"):
        memory_order(Dag(2, []), [[], [(-1, ())]])


@pytest.mark.parametrize("consumer", [-1, 2])
def test_a_consumer_out_of_the_graph_is_refused(consumer):
    with pytest.raises(ValueError, match="node 0 has a consumer outside 0 to 1"):
        memory_order(Dag(2, []), [[(1, [1, consumer])], []])


def test_outputs_for_other_than_all_nodes_are_refused():
    with pytest.raises(ValueError, match="outputs has 1 entries for 2 nodes"):
        memory_order(Dag(2, []), [[]])


@st.composite
def dags_with_buffers(draw: st.DrawFn) -> tuple[Dag, list[list[Output]]]:
    dag = draw(dags())
    size = st.integers(0, 40)
    outputs: list[list[Output]] = []
    for after in dag.succ:
        some = st.lists(st.sampled_from(after), unique=True) if after else st.just(())
        consumers = st.one_of(st.none(), some)
        outputs.append(draw(st.lists(st.tuples(size, consumers), max_size=3)))
    return dag, outputs


@given(dags_with_buffers())
def test_a_memory_order_can_run_and_needs_no_more_than_the_plain_order(drawn):
    dag, outputs = drawn
    order = memory_order(dag, outputs)
    assert_can_run(dag, order)
    plain = peak_bytes(dag, outputs, topological_order(dag))
    assert peak_bytes(dag, outputs, order) <= plain


@given(dags_with_buffers())
def test_consumers_named_twice_change_nothing(drawn):
    dag, outputs = drawn
    twice = [[(size, c and [*c, *c]) for size, c in produced] for produced in outputs]
    assert memory_order(dag, twice) == memory_order(dag, outputs)


@given(dags_with_buffers())
def test_peak_is_the_largest_sum_of_live_bytes(drawn):
    dag, outputs = drawn
    order = topological_order(dag)
    live = [0] * dag.n
    for first, i in enumerate(order):
        for size, consumers in outputs[i]:
            last = dag.n - 1 if consumers is None else max(map(order.index, [i, *consumers]))
            for step in range(first, last + 1):
                live[step] += size
    assert peak_bytes(dag, outputs, order) == max(live, default=0)


def lowest_peak(dag: Dag, outputs: list[list[Output]]) -> int:
    """The least that any order needs, by dynamic programming over sets of nodes that have run."""
    every = frozenset(range(dag.n))

    def during(done: frozenset[int], i: int) -> int:
        total = 0
        for j in {*done, i}:
            for size, consumers in outputs[j]:
                waits = consumers is None or not done.issuperset(consumers)
                total += size if j == i or waits else 0
        return total

    best = {frozenset[int](): 0}
    for _ in every:
        later: dict[frozenset[int], int] = {}
        for done, peak in best.items():
            for i in every - done:
                if done.issuperset(dag.pred[i]):
                    now = max(peak, during(done, i))
                    later[done | {i}] = min(now, later.get(done | {i}, now))
        best = later
    return best[every]


def random_graph(draw: random.Random, kind: str) -> Dag:
    n = draw.randrange(5, 10)
    if kind == "tree":
        edges = [(i, draw.randrange(i + 1, n)) for i in range(n - 1)]
    elif kind == "chains":  # side by side, from node 0 to node n - 1
        cuts = sorted({0, *(draw.randrange(n - 2) for _ in range(2)), n - 2})
        edges = [(i, i + 1) for a, b in pairwise(cuts) for i in range(a + 1, b)]
        edges += [(0, a + 1) for a in cuts[:-1]] + [(b, n - 1) for b in cuts[1:]]
    else:
        edges = [(a, b) for b in range(n) for a in range(b) if draw.random() < 0.3]
    number = draw.sample(range(n), n)
    return Dag(n, [(number[a], number[b]) for a, b in edges])


@pytest.mark.parametrize(("kind", "mean"), [("any", 1.02), ("tree", 1.005), ("chains", 1.02)])
def test_memory_orders_are_close_to_the_best(kind, mean):
    draw = random.Random(0)
    ratios = []
    for _ in range(60):
        dag = random_graph(draw, kind)
        sizes = [2 ** draw.randrange(6) * draw.randrange(1, 4) for _ in range(dag.n)]
        outputs = one_buffer_each(dag, sizes)
        peak = peak_bytes(dag, outputs, memory_order(dag, outputs))
        ratios.append(peak / lowest_peak(dag, outputs))
    assert min(ratios) >= 1
    assert math.prod(ratios) ** (1 / len(ratios)) <= mean
    assert max(ratios) <= 1.3


# Large graphs


def long_graph(n: int) -> Dag:
    """Nodes in shuffled numbers, each reading one or two of the 40 before it."""
    draw = random.Random(0)
    number = draw.sample(range(n), n)
    edges = [
        (number[max(0, i - draw.randrange(1, 40))], number[i])
        for i in range(1, n)
        for _ in range(draw.choice([1, 1, 2]))
    ]
    return Dag(n, edges)


@pytest.mark.parametrize("n", scaled(10_000, 100_000))
def test_memory_order_of_a_long_chain_takes_seconds(n):
    dag = Dag(n, [(i + 1, i) for i in range(n - 1)])
    backward = list(range(n))[::-1]
    assert topological_order(dag) == backward
    assert ranks(dag) == list(range(n))
    assert critical_path(dag, [0.5] * n) == n / 2
    assert memory_order(dag, one_buffer_each(dag, [8] * n)) == backward


@pytest.mark.full
def test_memory_order_of_a_graph_of_100_000_nodes_takes_seconds():
    dag = long_graph(100_000)
    draw = random.Random(0)
    outputs = [[(draw.randrange(1, 10_000), after)] for after in dag.succ]
    order = memory_order(dag, outputs)
    assert_can_run(dag, order)
    plain = peak_bytes(dag, outputs, topological_order(dag))
    assert peak_bytes(dag, outputs, order) < 0.8 * plain
