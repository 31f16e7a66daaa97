"""Directed acyclic graphs over numbers, drawn at random."""

from __future__ import annotations

import random

from hypothesis import strategies as st


def random_edges(choose: random.Random, n: int) -> list[tuple[int, int]]:
    """Edges of ``n`` nodes in order of their numbers: near ones or far ones, few or many."""
    reach = choose.choice([2, 4, 10, n])
    many = choose.choice([0.7, 1.2, 2, 4])
    return [
        (choose.randrange(max(0, b - reach), b), b)
        for b in range(1, n)
        for _ in range(int(many + choose.random()))
    ]


def node_times() -> st.SearchStrategy[float]:
    """Times of nodes and transfers: small integers, which are often equal, and any others."""
    return st.one_of(
        st.integers(0, 4),
        st.floats(0, 10, allow_subnormal=False),
        st.floats(0, 1e-6, allow_subnormal=False),
    )
