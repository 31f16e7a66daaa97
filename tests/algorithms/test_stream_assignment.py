"""Streams: which nodes share one, and which signals there are between them.

What holds for every graph is in ``test_stream_assignment_properties.py``.
"""

from __future__ import annotations

import math
import random
import sys
from collections.abc import Iterable
from itertools import pairwise
from typing import Any

import pytest

from penstock.algorithms.dag import Dag
from penstock.algorithms.stream_assignment import StreamSchedule, assign_streams, simulate_streams
from tests.support.sweeps import scaled


class Named:
    """A graph whose nodes have names, and its schedule.

    As text, nodes in the order of their names: ``name:stream``, ``?k`` for each signal that the
    node waits for, ``!k`` for each that is emitted after it.
    """

    def __init__(self, names: str, edges: str, **arguments: Any) -> None:
        self.names = names.split()
        pairs = (edge.split(">") for edge in edges.split())
        number = {name: i for i, name in enumerate(self.names)}
        self.dag = Dag(len(number), [(number[a], number[b]) for a, b in pairs])
        self.schedule = assign_streams(self.dag, **arguments)

    def __str__(self) -> str:
        nodes = []
        for i, name in enumerate(self.names):
            waits = "".join(f"?{k}" for k in self.schedule.waits[i])
            emits = "".join(f"!{k}" for k in self.schedule.emits[i])
            nodes.append(f"{name}:{self.schedule.stream[i]}{waits}{emits}")
        return " ".join(nodes)

    @property
    def order(self) -> list[str]:
        return [self.names[i] for i in self.schedule.order]


def count(schedule: StreamSchedule) -> tuple[int, int]:
    return schedule.n_streams, schedule.n_signals


# The assignments that the method is known by.


def test_streams_of_a_diamond_are_two():
    #   N1 -> N2 -> N4
    #    '--> N3 ---^
    it = Named("N1 N2 N3 N4", "N1>N2 N1>N3 N2>N4 N3>N4")
    assert str(it) == "N1:0!0 N2:0 N3:1?0!1 N4:0?1"
    assert count(it.schedule) == (2, 2)
    assert it.schedule.begin == it.schedule.end == ()
    assert it.schedule.programs == [[0, 1, 3], [2]]


def test_two_diamonds_in_series_share_the_second_stream():
    #   A -> B -> D -> E -> G
    #    '-> C ---^'-> F ---^
    it = Named("A B C D E F G", "A>B A>C B>D C>D D>E D>F E>G F>G")
    assert str(it) == "A:0!0 B:0 C:1?0!1 D:0?1!2 E:0 F:1?2!3 G:0?3"
    assert count(it.schedule) == (2, 4)


def test_streams_of_two_sources_are_joined():
    #   mul -> div -> log -> sum1
    #   sum ---^'---> exp ---^
    it = Named("mul sum div log exp sum1", "mul>div sum>div div>log div>exp log>sum1 exp>sum1")
    assert str(it) == "mul:0 sum:1!0 div:0?0!1 log:0 exp:1?1!2 sum1:0?2"
    assert count(it.schedule) == (2, 3)
    assert it.schedule.begin == (1,)
    assert it.schedule.end == ()


def test_stream_assignment_emits_no_signal_for_an_implied_edge():
    #   A -> B -> C
    #    '--------^
    it = Named("A B C", "A>B B>C A>C")
    assert str(it) == "A:0 B:0 C:0"
    assert count(it.schedule) == (1, 0)


def test_longest_chain_stays_on_its_stream():
    #   A -> B ------------> F
    #    '-> C -> D -> E ----^
    it = Named("A B C D E F", "A>B A>C C>D D>E E>F B>F")
    assert str(it) == "A:0!0 B:1?0!1 C:0 D:0 E:0 F:0?1"
    assert it.schedule.n_streams == 2


# What naive versions get wrong.


def test_signals_are_left_out_on_the_same_stream():
    #   A -> B -> C -> D      all on one stream
    #    '--------^
    #         '--------^
    it = Named("A B C D", "A>B B>C C>D A>C B>D")
    assert count(it.schedule) == (1, 0)


def test_signals_are_left_out_that_an_edge_implies():
    #   A -> B -> D -> E
    #    '-> C ---^    ^
    #        '---------'      E follows C, but so does D
    it = Named("A B C D E", "A>B A>C B>D C>D D>E C>E")
    assert str(it) == "A:0!0 B:0 C:1?0!1 D:0?1 E:0"


def test_signals_are_left_out_that_another_signal_implies():
    #   A (0) -> B (1) -> C (2)      C waits for B, which has waited for A
    #     '----------------^
    it = Named("A B C", "A>B B>C A>C", devices=[0, 1, 2])
    assert str(it) == "A:0!0 B:1?0!1 C:2?1!2"
    #   A (0) -> B (0) -> D (1) -> E (1)      D has waited for B on E's stream, and so for A
    #     '--------------------------^
    it = Named("A B D E", "A>B B>D D>E A>E", devices=[0, 0, 1, 1])
    assert str(it) == "A:0 B:0!0 D:1?0 E:1!1"


def test_signals_are_left_out_that_a_shared_stream_implies():
    #   A (0) -> C (1)      A comes before B, though no edge says so, since they share a stream
    #   B (0) ---^
    it = Named("A B C", "A>C B>C", devices=[0, 0, 1], max_streams=2)
    assert str(it) == "A:0 B:0!0 C:1?0!1"
    assert it.schedule.end == (1,)


def test_one_signal_serves_all_who_wait_for_it():
    #   A -> B
    #    |-> C
    #    '-> D
    it = Named("A B C D", "A>B A>C A>D")
    assert str(it) == "A:0!0 B:0 C:1?0!1 D:2?0!2"
    assert it.schedule.end == (1, 2)


def test_stream_destination_on_another_stream_is_waited_for():
    #   A -> B -> D
    #    '-> C          C is an end, and the run is not over before
    it = Named("A B C D", "A>B A>C B>D")
    assert str(it) == "A:0!0 B:0 C:1?0!1 D:0"
    assert it.schedule.end == (1,)


# Which streams are taken.


def test_costs_say_which_chain_is_the_longest():
    #   A -> B -> E -> D      F takes longer than E
    #    '-> C -> F ---^
    graph = ("A B C D E F", "A>B A>C B>E C>F E>D F>D")
    it = Named(*graph, cost=[1, 1, 1, 1, 2, 5])
    assert str(it) == "A:0!0 B:1?0 C:0 D:0?1 E:1!1 F:0"
    it = Named(*graph, cost=[0] * 6)
    assert str(it) == "A:0!0 B:0 C:1?0 D:0?1 E:0 F:1!1"


def test_own_cost_of_a_node_is_not_behind_it():
    #   A -> B -> D      as much comes after B as after C, which takes longer: the first edge decides
    #    '-> C ---^
    it = Named("A B C D", "A>B A>C B>D C>D", cost=[1, 2, 5, 1])
    assert str(it) == "A:0!0 B:0 C:1?0!1 D:0?1"


def test_command_goes_where_it_has_run_before_if_chains_are_equal():
    #   A(x) -> B(y) -> D
    #    '----> C(x) ---^
    graph, commands = ("A B C D", "A>B A>C B>D C>D"), ["x", "y", "x", "z"]
    for cost in (None, [3, 2, 5, 1], [3, 5, 2, 1]):
        it = Named(*graph, commands=commands, cost=cost)
        assert str(it) == "A:0!0 B:1?0!1 C:0 D:0?1"


def test_longer_chain_goes_before_the_same_command():
    #   A(x) -> B(y) -> E -> D
    #    '----> C(x) --------^
    it = Named("A B C D E", "A>B A>C B>E C>D E>D", commands=["x", "y", "x", "z", "w"])
    assert str(it) == "A:0!0 B:0 C:1?0!1 D:0?1 E:0"


def test_stream_that_ran_the_command_is_taken_over_first():
    #   A -> B(x) -> E -> F
    #    |-> C(y) ---^'-> G(z)      G takes over the stream of C or of D
    #    '-> D(z) ---^
    graph = ("A B C D E F G", "A>B A>C A>D B>E C>E D>E E>F E>G")
    for commands in (["a", "x", "y", "z", "e", "f", "z"], ["a", "x", "z", "y", "e", "f", "z"]):
        stream = Named(*graph, commands=commands).schedule.stream
        assert stream[6] == stream[commands.index("z")] != stream[0]


def test_shared_stream_is_one_that_ran_the_command_if_it_is_free_as_soon():
    #   A(x)   B(y)   C(y)   D(x)
    it = Named("A B C D", "", commands=["x", "y", "y", "x"], max_streams=2)
    assert it.schedule.programs == [[0, 3], [1, 2]]


def test_a_stream_is_not_taken_over_while_its_last_node_may_run():
    #   A -> B -> D -> E
    #    '-> C    '--> F      C has not certainly ended when F starts
    it = Named("A B C D E F", "A>B A>C B>D D>E D>F")
    assert it.schedule.stream[5] == 2


def test_streams_are_no_more_than_can_be_used_at_once():
    #   A -> C      following A with C, the first successor, would leave B and D without each other
    #    '-> D
    #   B -> C
    it = Named("A B C D", "A>C A>D B>C")
    assert it.schedule.n_streams == 2
    assert str(it) == "A:0!0 B:1 C:1?0!1 D:0"


def test_stream_assignment_keeps_chains_together():
    #   A -> B -> C -> F
    #    '-> D -> E ---^
    it = Named("A B D C E F", "A>B B>C C>F A>D D>E E>F")
    assert it.order == ["A", "B", "C", "D", "E", "F"]
    #   A -> B -> C      X
    #    '--------^
    assert Named("A X B C", "A>B B>C A>C").order == ["A", "B", "C", "X"]


def test_each_device_has_streams_of_its_own():
    #   A (0) -> B (1) -> C (0)
    it = Named("A B C", "A>B B>C", devices=[0, 1, 0])
    assert str(it) == "A:0!0 B:1?0!1 C:0?1"
    assert it.schedule.device_of == (0, 1)


# A bounded number.


def test_streams_are_shared_if_there_are_not_enough():
    #   A -> B1 -> C      C is on the first stream; what is put there as well must come before it
    #    |-> B2 ---^
    #    |-> B3 ---^
    #    '-> B4 ---^
    it = Named("A B1 B2 B3 B4 C", "A>B1 A>B2 A>B3 A>B4 B1>C B2>C B3>C B4>C", max_streams=2)
    assert sorted(map(len, it.schedule.programs)) == [2, 4]
    assert it.schedule.n_signals == 2
    start, finish = simulate_streams(it.dag, it.schedule, [1.0] * 6)
    assert max(finish) == 4
    assert start[5] == 3


def test_a_shared_stream_is_the_one_that_is_free_first():
    #   A   B   C   D   E
    it = Named("A B C D E", "", cost=[4, 1, 1, 1, 1], max_streams=2)
    assert it.schedule.programs == [[0], [1, 2, 3, 4]]


def test_shared_stream_is_free_by_time_where_costs_are_rounded():
    #   A   B   C      by its cost A would end after B
    it = Named("A B C", "", cost=[3, 2, 1], time=[1, 3, 1], max_streams=2)
    assert it.schedule.programs == [[0, 2], [1]]


def test_shared_stream_that_ran_the_command_may_be_free_a_little_later():
    #   A(x)   B(y)   C(x)
    for time, programs in (([1.05, 1, 1], [[0, 2], [1]]), ([1.2, 1, 1], [[0], [1, 2]])):
        it = Named("A B C", "", commands=["x", "y", "x"], time=time, max_streams=2)
        assert it.schedule.programs == programs


def test_shared_stream_does_not_delay_urgent_nodes():
    #   A -> C1 -> C2 -> C3 -> D      B1 and B2 are numbered before the chain, and go elsewhere
    #    |-> B1 ---------------^
    #    '-> B2 ---------------^
    edges = "A>B1 A>B2 A>C1 C1>C2 C2>C3 C3>D B1>D B2>D"
    it = Named("A B1 B2 C1 C2 C3 D", edges, max_streams=2)
    assert it.schedule.programs == [[0, 3, 4, 5, 6], [1, 2]]


def test_bounded_streams_leave_one_for_every_device():
    #   A (0)   B (0)   C (0)   D (1)
    it = Named("A B C D", "", devices=[0, 0, 0, 1], max_streams=3)
    assert [it.schedule.device_of[s] for s in it.schedule.stream] == [0, 0, 0, 1]
    assert sorted(it.schedule.device_of) == [0, 0, 1]


def test_bounded_streams_of_a_device_are_no_more_than_its_width():
    #   A -> C      on device 0; following A with C would make it three streams
    #    '-> D
    #   B -> C
    #   E    F    G    H      on device 1
    devices = [0] * 4 + [1] * 4
    it = Named("A B C D E F G H", "A>C A>D B>C", devices=devices, max_streams=5)
    assert sorted(it.schedule.device_of) == [0, 0, 1, 1, 1]


# What is not there.


def test_stream_assignment_of_an_empty_graph_is_empty():
    schedule = assign_streams(Dag(0, []))
    assert schedule == StreamSchedule([], (), (), (), 0, (), (), ())
    assert schedule.programs == []
    assert simulate_streams(Dag(0, []), schedule, []) == ((), ())


# The time line.


def test_stream_timeline_of_a_diamond():
    #   A -> B -> D      A takes 1, B 2, C 5, D 1
    #    '-> C ---^
    it = Named("A B C D", "A>B A>C B>D C>D")
    start, finish = simulate_streams(it.dag, it.schedule, [1, 2, 5, 1])
    assert start == (0, 1, 1, 6)
    assert finish == (1, 3, 6, 7)


def test_stream_timeline_counts_each_awaited_signal():
    #   A -> B -> D
    #    '-> C ---^
    it = Named("A B C D", "A>B A>C B>D C>D")
    start, _ = simulate_streams(it.dag, it.schedule, [1, 2, 5, 1], signal=0.25)
    assert start == (0, 1, 1.25, 6.5)


def test_stream_timeline_counts_the_signal_that_begins_the_run():
    #   A    B
    it = Named("A B", "")
    assert simulate_streams(it.dag, it.schedule, [1, 1], signal=0.25)[0] == (0, 0.25)


# Arguments.


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"devices": [0]}, "devices has 1 entries for 2 nodes"),
        ({"commands": "xyz"}, "commands has 3 entries for 2 nodes"),
        ({"cost": []}, "cost has 0 entries for 2 nodes"),
        ({"cost": [1, -1]}, "node 1 cannot cost -1"),
        ({"time": [1, -2]}, "node 1 cannot cost -2"),
        ({"cost": [math.nan, 1]}, "node 0 cannot cost nan"),
        ({"max_streams": -1}, "max_streams is -1"),
        ({"devices": [0, 1], "max_streams": 1}, "max_streams is 1, for nodes on 2 devices"),
    ],
)
def test_stream_assignment_refuses_wrong_arguments(arguments, message):
    with pytest.raises(ValueError, match=message):
        assign_streams(Dag(2, [(0, 1)]), **arguments)


def test_stream_assignment_takes_infinite_costs():
    #   A -> B -> D
    #    '-> C ---^
    it = Named("A B C D", "A>B A>C B>D C>D", cost=[0, 1, math.inf, 1], max_streams=1)
    assert it.schedule.programs == [[0, 2, 1, 3]]


def test_stream_assignment_refuses_wrong_times():
    dag = Dag(2, [(0, 1)])
    schedule = assign_streams(dag)
    with pytest.raises(ValueError, match="cost has 1 entries for 2 nodes"):
        simulate_streams(dag, schedule, [1])
    with pytest.raises(ValueError, match="schedule has 2 entries for 3 nodes"):
        simulate_streams(Dag(3, []), schedule, [1, 1, 1])
    with pytest.raises(ValueError, match="node 0 cannot cost -2"):
        simulate_streams(dag, schedule, [-2, 1])
    with pytest.raises(ValueError, match="cannot take nan"):
        simulate_streams(dag, schedule, [1, 1], signal=math.nan)


# Sizes.


def large(n: int, edges: Iterable[tuple[int, int]], **arguments: Any) -> StreamSchedule:
    """Fewer frames than nodes: whatever walks a chain by recursion fails."""
    assert sys.getrecursionlimit() < n
    return assign_streams(Dag(n, edges), **arguments)


@pytest.mark.parametrize("n", scaled(10_000, 100_000))
def test_streams_of_a_long_chain_take_seconds(n):
    schedule = large(n, pairwise(range(n)))
    assert count(schedule) == (1, 0)
    assert schedule.order == list(range(n))


@pytest.mark.full
def test_streams_of_a_chain_read_by_its_last_node_take_seconds():
    n = 100_000
    schedule = large(n, [*pairwise(range(n)), *((i, n - 1) for i in range(n - 2))])
    assert count(schedule) == (1, 0)


@pytest.mark.parametrize("wide", scaled(10_000, 50_000))
@pytest.mark.parametrize("max_streams", [0, 7])
def test_streams_of_two_forks_of_many_branches_take_seconds(max_streams, wide):
    edges = []
    for first in (0, wide + 1):
        last = first + wide + 1
        edges += [(first, i) for i in range(first + 1, last)]
        edges += [(i, last) for i in range(first + 1, last)]
    schedule = large(2 * wide + 3, edges, max_streams=max_streams)
    used = max_streams or wide
    # In both, one signal to all streams but the first, and one back from each of these.
    assert count(schedule) == (used, 2 * used)
    assert sum(map(len, schedule.waits)) == 2 * 2 * (used - 1)
    assert schedule.begin == schedule.end == ()


@pytest.mark.parametrize("n", scaled(10_000, 100_000))
def test_streams_of_many_diamonds_take_seconds(n):
    edges = [
        edge
        for a in range(0, n - 1, 3)
        for edge in ((a, a + 1), (a, a + 2), (a + 1, a + 3), (a + 2, a + 3))
    ]
    schedule = large(n, edges)
    assert count(schedule) == (2, 2 * (n // 3))


@pytest.mark.parametrize("wide", scaled(3_000, 30_000))
def test_streams_that_end_far_above_are_taken_over_below(wide):
    #   wide nodes -> J -> a chain of wide / 3 diamonds -> wide nodes
    n = 3 * wide + 1
    edges = [(i, wide) for i in range(wide)]
    for a in range(wide, 2 * wide, 3):
        edges += [(a, a + 1), (a, a + 2), (a + 1, a + 3), (a + 2, a + 3)]
    edges += [(2 * wide, i) for i in range(2 * wide + 1, n)]
    assert large(n, edges).n_streams == wide


@pytest.mark.parametrize("n", scaled(9_999, 99_999))
def test_streams_of_a_tree_to_many_leaves_take_seconds(n):
    schedule = large(n, [((i - 1) // 2, i) for i in range(1, n)])
    # All nodes that are no leaves emit one signal, and all leaves but one say that they are done.
    assert count(schedule) == (n // 2 + 1, n - 1)
    assert len(schedule.end) == n // 2


@pytest.mark.parametrize("n", scaled(9_999, 99_999))
def test_streams_of_a_tree_from_many_leaves_take_seconds(n):
    schedule = large(n, [(i, n - 1 - (n - 2 - i) // 2) for i in range(n - 1)])
    assert count(schedule) == (n // 2 + 1, n // 2)
    assert len(schedule.begin) == n // 2


@pytest.mark.parametrize("n", scaled(10_000, 100_000))
@pytest.mark.parametrize("max_streams", [0, 10])
def test_streams_of_many_nodes_in_layers_are_few(max_streams, n):
    wide = 300
    choose = random.Random(0)
    edges = [
        (choose.randrange((i // wide - 1) * wide, i // wide * wide), i)
        for i in range(wide, n)
        for _ in range(3)
    ]
    schedule = large(n, edges, max_streams=max_streams)
    leaves = n - len({a for a, _ in edges})
    if max_streams:
        assert schedule.n_streams == max_streams
    else:
        # Leaves end streams, and little more is needed than they are.
        assert leaves <= schedule.n_streams <= 1.05 * leaves + wide
    assert sum(map(len, schedule.waits)) <= len(set(edges))


@pytest.mark.parametrize("n", scaled(10_000, 100_000))
def test_streams_of_many_nodes_with_long_edges_are_few(n):
    choose = random.Random(0)
    edges = [(choose.randrange(i), i) for i in range(1, n) for _ in range(2)]
    schedule = large(n, edges)
    assert n - len({a for a, _ in edges}) <= schedule.n_streams <= 0.4 * n
    assert schedule.n_signals <= n


def test_device_has_no_more_streams_than_it_is_given():
    #   0 -> 1, 2, 3, on device 1; 1, 2 and 3 at once take three streams
    dag = Dag(4, [(0, 1), (0, 2), (0, 3)])
    devices = [0, 1, 1, 1]
    assert assign_streams(dag, devices=devices).device_of == (0, 1, 1, 1)
    assert assign_streams(dag, devices=devices, max_streams={1: 2}).device_of == (0, 1, 1)
    assert assign_streams(dag, devices=devices, max_streams={1: 9}).device_of == (0, 1, 1, 1)
    with pytest.raises(ValueError, match="max_streams is"):
        assign_streams(dag, devices=devices, max_streams={1: 0})
