"""Streams and signals of random graphs, replayed with any timing by ``stream_replay``."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.algorithms import stream_assignment
from penstock.algorithms.dag import Dag
from penstock.algorithms.stream_assignment import StreamSchedule, assign_streams, simulate_streams
from tests.support.random_dags import random_edges
from tests.support.stream_replay import END, Replay, certain, with_less
from tests.support.sweeps import examples, sweep

# What an example takes says more about the machine than about the code.
many_examples = examples(4)


@dataclass
class Problem:
    dag: Dag
    arguments: dict[str, Any] = field(default_factory=dict)

    def device(self, i: int) -> int:
        return (self.arguments.get("devices") or [0] * self.dag.n)[i]

    def solved(self, **more: Any) -> StreamSchedule:
        return assign_streams(self.dag, **(self.arguments | more))


def reached(dag: Dag) -> list[set[int]]:
    """Of each node all that it depends on."""
    above: list[set[int]] = [set() for _ in range(dag.n)]
    for _ in range(dag.n):
        for a, b in dag.edges:
            above[b] |= {a} | above[a]
    return above


def width(above: Sequence[set[int]], nodes: Sequence[int]) -> int:
    """The most of ``nodes`` none of which depends on another.

    As many as are left when as many as possible are matched with one that depends on them.
    """
    follower: dict[int, int] = {}

    def matched(i: int, tried: set[int]) -> bool:
        for j in nodes:
            if i in above[j] and j not in tried:
                tried.add(j)
                if j not in follower or matched(follower[j], tried):
                    follower[j] = i
                    return True
        return False

    return len(nodes) - sum(matched(i, set()) for i in nodes)


@st.composite
def problems(draw: st.DrawFn) -> Problem:
    n = draw(st.integers(0, 9))
    number = draw(st.permutations(range(n)))
    pairs = [(a, b) for b in range(n) for a in range(b)]
    edges = draw(st.lists(st.sampled_from(pairs), max_size=20)) if pairs else []
    arguments: dict[str, Any] = {}

    def each(of: st.SearchStrategy) -> st.SearchStrategy:
        return st.lists(of, min_size=n, max_size=n)

    several = draw(st.sampled_from([1, 1, 2, 3]))
    arguments["devices"] = draw(each(st.integers(0, several - 1)))
    arguments["commands"] = draw(st.none() | each(st.sampled_from([None, "x", "y"])))
    arguments["cost"] = draw(st.none() | each(st.sampled_from([0, 1, 2.5, float("inf")])))
    if draw(st.booleans()):
        least = len(set(arguments["devices"]))
        arguments["max_streams"] = draw(st.integers(max(1, least), least + 4))
    elif draw(st.booleans()):
        arguments["max_streams"] = draw(st.dictionaries(st.integers(0, 2), st.integers(1, 3)))
    return Problem(Dag(n, [(number[a], number[b]) for a, b in edges]), arguments)


def drawn(seed: int, most: int = 60) -> Problem:
    """Larger graphs, of a shape that depends on the seed: near edges, far ones, few or many."""
    choose = random.Random(seed)
    n = choose.randint(1, most)
    edges = random_edges(choose, n)
    several = choose.choice([1, 1, 2, 3])
    arguments: dict[str, Any] = {
        "devices": [choose.randrange(several) for _ in range(n)],
        "max_streams": choose.choice([0, 0, 3, 5, {0: 1}, {0: 2, 1: 1}]),
    }
    return Problem(Dag(n, edges), arguments)


# What is written down.


def assert_consistent(problem: Problem, schedule: StreamSchedule) -> None:
    """Every entry is of the form, and in the place, that ``StreamSchedule`` says."""
    order = schedule.order
    place = {i: k for k, i in enumerate(order)}
    assert len(place) == len(order) == problem.dag.n
    assert all(place[a] < place[b] for a, b in problem.dag.edges)
    begun: list[int] = []
    for i in range(problem.dag.n):
        assert schedule.device_of[schedule.stream[i]] == problem.device(i)
        assert list(schedule.waits[i]) == sorted(set(schedule.waits[i]))
    for i in order:
        begun += [schedule.stream[i]] if schedule.stream[i] not in begun else []
    assert begun == list(range(schedule.n_streams)) == list(range(len(schedule.device_of)))
    emitted = [k for i in order for k in schedule.emits[i]]
    assert emitted == list(range(schedule.n_signals))
    waited = {k for own in schedule.waits for k in own}
    assert waited | set(schedule.end) == set(emitted)


@many_examples
@given(problem=problems())
def test_stream_schedule_is_well_formed(problem):
    assert_consistent(problem, problem.solved())


# What runs when.


def assert_ordered(problem: Problem, schedule: StreamSchedule) -> None:
    pairs = certain(schedule)
    for i in range(problem.dag.n):
        assert {("begin", i), (i, END)} <= pairs
    for a, b in problem.dag.edges:
        assert (a, b) in pairs, f"{b} can start before {a} has ended"


def assert_least(schedule: StreamSchedule) -> None:
    pairs = certain(schedule)
    for less in with_less(schedule):
        assert certain(less) < pairs


@many_examples
@given(problem=problems())
def test_stream_assignment_orders_every_dependency(problem):
    assert_ordered(problem, problem.solved())


@many_examples
@given(problem=problems(), choose=st.randoms(use_true_random=False))
def test_stream_assignment_holds_under_any_timing_without_deadlock(problem, choose):
    Replay(problem.dag, problem.solved(), choose.randrange).run()


@many_examples
@given(problem=problems(), hurried=st.integers(0, 8))
def test_dependencies_hold_if_one_stream_is_always_ahead(problem, hurried):
    Replay(problem.dag, problem.solved(), lambda n: hurried % n).run()
    Replay(problem.dag, problem.solved(), lambda n: n - 1 - hurried % n).run()


@many_examples
@given(problem=problems())
def test_stream_assignment_has_no_redundant_wait(problem):
    assert_least(problem.solved())


@pytest.mark.parametrize("seed", sweep(range(150), 30))
def test_stream_schedules_of_larger_graphs_are_sound(seed, monkeypatch):
    if seed % 2:
        monkeypatch.setattr(
            stream_assignment, "_BATCH", 3
        )  # so that graphs of this size have several
    problem = drawn(seed)
    schedule = problem.solved()
    assert_consistent(problem, schedule)
    assert_ordered(problem, schedule)
    assert_narrow(problem, schedule)
    Replay(problem.dag, schedule, random.Random(seed).randrange).run()
    if problem.dag.n < 30:
        assert_least(schedule)


# How many streams.


def assert_narrow(problem: Problem, schedule: StreamSchedule) -> None:
    above = reached(problem.dag)
    for d in set(schedule.device_of):
        nodes = [i for i in schedule.order if d == problem.device(i)]
        assert schedule.device_of.count(d) <= width(above, nodes)
    most = problem.arguments.get("max_streams", 0)
    if isinstance(most, int):
        assert not most or schedule.n_streams <= most
    else:
        assert all(schedule.device_of.count(d) <= count for d, count in most.items())


@many_examples
@given(problem=problems())
def test_streams_are_never_more_than_the_graph_is_wide(problem):
    assert_narrow(problem, problem.solved())


@many_examples
@given(problem=problems())
def test_nodes_of_a_stream_depend_on_each_other_if_their_number_is_not_bounded(problem):
    above = reached(problem.dag)
    for program in problem.solved(max_streams=0).programs:
        for k, i in enumerate(program):
            assert set(program[:k]) <= above[i]


@many_examples
@given(problem=problems())
def test_a_bound_that_is_not_reached_changes_nothing(problem):
    free = problem.solved(max_streams=0)
    assert problem.solved(max_streams=max(free.n_streams, 1)) == free


@many_examples
@given(problem=problems())
def test_stream_assignment_is_deterministic(problem):
    again = Dag(problem.dag.n, reversed(problem.dag.edges))
    assert Problem(again, problem.arguments).solved() == problem.solved()


@many_examples
@given(problem=problems())
def test_a_single_stream_has_no_signals(problem):
    schedule = problem.solved(devices=None, max_streams=1)
    assert schedule.n_streams == min(problem.dag.n, 1)
    assert schedule.n_signals == 0
    assert schedule.begin == schedule.end == ()


# What it takes.


@many_examples
@given(problem=problems(), signal=st.sampled_from([0.0, 0.5]))
def test_stream_timeline_respects_dependencies(problem, signal):
    schedule = problem.solved()
    cost = [1.0 + i % 3 for i in range(problem.dag.n)]
    start, finish = simulate_streams(problem.dag, schedule, cost, signal)
    assert all(finish[a] <= start[b] for a, b in problem.dag.edges)
    for program in schedule.programs:
        ends = [0.0, *(finish[i] for i in program)]
        assert all(end <= start[i] for end, i in zip(ends, program, strict=False))
    for i in range(problem.dag.n):
        assert finish[i] - start[i] == cost[i]


@many_examples
@given(problem=problems())
def test_without_a_bound_streams_delay_nothing(problem):
    """On one device each, and with signals that take nothing, nodes start when they can."""
    schedule = problem.solved(devices=None, max_streams=0)
    cost = [1.0 + i % 3 for i in range(problem.dag.n)]
    start, finish = simulate_streams(problem.dag, schedule, cost)
    for i in schedule.order:
        assert start[i] == max([finish[p] for p in problem.dag.pred[i]], default=0.0)
