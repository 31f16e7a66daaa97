"""Cuts of sequences into stages, beside all that there are."""

from __future__ import annotations

from itertools import combinations, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.algorithms.pipeline_cuts import pipeline_cuts

TIMES = st.integers(0, 20)


def slowest(cost: list[int], crossing: list[int], cuts: list[int]) -> float:
    ends = [0, *cuts, len(cost)]
    edges = [0, *[crossing[i] for i in cuts], 0]
    return max(sum(cost[a:b]) + edges[i] + edges[i + 1] for i, (a, b) in enumerate(pairwise(ends)))


@given(st.lists(st.tuples(TIMES, TIMES), min_size=1, max_size=8), st.integers(1, 4))
def test_pipeline_cuts_are_as_good_as_any(pairs, stages):
    cost, crossing = map(list, zip(*pairs, strict=True))
    cuts = pipeline_cuts(cost, crossing, stages)
    assert cuts == sorted(set(cuts))
    assert len(cuts) < stages
    assert all(0 < cut < len(cost) for cut in cuts)
    every = [c for k in range(stages) for c in combinations(range(1, len(cost)), k)]
    best = min(slowest(cost, crossing, list(c)) for c in every)
    assert slowest(cost, crossing, cuts) == pytest.approx(best)


def test_pipeline_of_nothing_has_no_cuts():
    assert pipeline_cuts([], [], 3) == []
