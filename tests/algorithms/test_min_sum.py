"""The least sum over variables of a few states, against all states there are."""

from __future__ import annotations

import math
import random
from itertools import chain, combinations, product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.algorithms.min_sum import OnceCost, Pair, eliminate, minimum_cut

# What an example takes says more about the machine than about the code.
NUMBER = st.one_of(
    st.integers(0, 5),
    st.floats(0, 10, allow_subnormal=False),
    st.floats(0, 1e-6, allow_subnormal=False),
)


def sum_of_tables(tables: list[list[float]], pairs: list[Pair], states: tuple[int, ...]) -> float:
    total = sum(table[s] for table, s in zip(tables, states, strict=True))
    for first, second, table in pairs:
        total += table[states[first] * len(tables[second]) + states[second]]
    return total


@st.composite
def tables(draw: st.DrawFn) -> tuple[list[list[float]], list[Pair]]:
    sizes = draw(st.lists(st.integers(1, 3), max_size=6))
    own = [draw(st.lists(NUMBER, min_size=n, max_size=n)) for n in sizes]
    both = list(combinations(range(len(sizes)), 2))
    pairs = []
    for a, b in draw(st.lists(st.sampled_from(both), unique=True)) if both else []:
        first, second = draw(st.sampled_from([(a, b), (b, a)]))
        entries = sizes[a] * sizes[b]
        pairs.append(
            Pair(first, second, draw(st.lists(NUMBER, min_size=entries, max_size=entries)))
        )
    return own, pairs


@given(tables())
def test_min_sum_elimination_finds_the_minimum(problem):
    own, pairs = problem
    found = eliminate(own, pairs, 10**6)
    assert found is not None
    least = min(sum_of_tables(own, pairs, s) for s in product(*[range(len(t)) for t in own]))
    assert sum_of_tables(own, pairs, tuple(found)) == pytest.approx(least, rel=1e-9, abs=1e-12)


def test_min_sum_of_an_impossible_problem_is_infinite():
    #   0 -- 1 -- 2      neighbours must differ
    differ = [math.inf, 0, 0, math.inf]
    assert eliminate([[0, 1], [0, 5], [2, 0]], [Pair(0, 1, differ), Pair(2, 1, differ)], 8) == [
        1,
        0,
        1,
    ]


def test_min_sum_elimination_gives_up_before_a_table_is_too_large():
    #   a circle of four, each with three states: the first to go is in a table by three variables
    own = [[0.0, 1.0, 2.0]] * 4
    pairs = [Pair(k, (k + 1) % 4, [1.0] * 9) for k in range(4)]
    assert eliminate(own, pairs, 27) == [0] * 4
    assert eliminate(own, pairs, 26) is None


def test_min_sum_tables_leave_out_variables_with_one_state():
    #   all of 1 to 99 are neighbours of 0, and of 100
    own = [[1.0], *[[2.0, 1.0]] * 99, [0.5]]
    pairs = [Pair(end, k, [0.0, 2.0 if k % 2 else 0.0]) for end in (0, 100) for k in range(1, 100)]
    found = eliminate(own, pairs, 2)
    assert found == [0, *[0, 1] * 49, 0, 0]


# Cuts


def sum_of_terms(
    costs: list[tuple[float, float]], terms: list[OnceCost], states: tuple[int, ...]
) -> float:
    total = sum(both[s] for both, s in zip(costs, states, strict=True))
    for maker, readers, state, cost in terms:
        if any(states[r] == state for r in readers) and (maker < 0 or states[maker] != state):
            total += cost
    return total


@st.composite
def terms(draw: st.DrawFn) -> tuple[list[tuple[float, float]], list[OnceCost]]:
    n = draw(st.integers(1, 7))
    scale = draw(st.sampled_from([1.0, 1e-9, 1e9]))
    number = st.integers(0, 3) | st.floats(0, 10, allow_subnormal=False)
    costs = []
    for _ in range(n):
        both = [draw(number) * scale, draw(number) * scale]
        if draw(st.integers(0, 9)) == 0:
            both[draw(st.integers(0, 1))] = math.inf
        costs.append((both[0], both[1]))
    found = []
    for _ in range(draw(st.integers(0, 6))):
        maker = draw(st.integers(-1, n - 1))
        others = [v for v in range(n) if v != maker]
        if others:
            readers = draw(st.lists(st.sampled_from(others), min_size=1, unique=True))
            found.append(OnceCost(maker, readers, draw(st.integers(0, 1)), draw(number) * scale))
    return costs, found


@given(terms())
def test_min_sum_cut_finds_the_minimum(problem):
    costs, found = problem
    sums = {s: sum_of_terms(costs, found, s) for s in product((0, 1), repeat=len(costs))}
    states = minimum_cut(costs, found)
    # What is this much smaller than the largest term counts as rounding (``_ROUNDING``).
    largest = max(x for x in (0.0, *chain(*costs), *(c.cost for c in found)) if x < math.inf)
    wanted = pytest.approx(min(sums.values()), rel=1e-9, abs=1e-12 * largest)
    assert sums[tuple(states)] == wanted


def test_min_sum_cut_prefers_most_zeros_among_equal_cuts():
    assert minimum_cut([(1, 1), (2, 2)], [OnceCost(0, [1], 1, 5.0), OnceCost(0, [1], 0, 5.0)]) == [
        0,
        0,
    ]
    assert minimum_cut([(3, 0), (0, 3)], [OnceCost(0, [1], 0, 3.0)]) == [0, 0]
    assert minimum_cut([], []) == []


def test_min_sum_cut_of_a_long_chain_does_not_recurse():
    draw, n = random.Random(0), 3000
    costs = [(draw.uniform(0, 1), draw.uniform(0, 1)) for _ in range(n)]
    chain = [OnceCost(k, [k + 1], state, 0.7) for k in range(n - 1) for state in (0, 1)]
    best = [0.0, 0.0]
    for both in costs:
        best = [min(best[s], best[1 - s] + 0.7) + both[s] for s in (0, 1)]
    assert sum_of_terms(costs, chain, tuple(minimum_cut(costs, chain))) == pytest.approx(min(best))
