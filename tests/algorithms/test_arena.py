"""Checks of arenas: what is sound, and how small an arena can be."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.algorithms.arena import Buffer, arena_size, largest_load, lower_bound


def test_buffer_of_negative_size_or_lifetime_is_refused():
    with pytest.raises(ValueError, match="-1 bytes"):
        Buffer(-1, 0, 0)
    with pytest.raises(ValueError, match="from step 2 to step 1"):
        Buffer(8, 2, 1)


def test_arena_size_is_none_for_what_is_not_sound():
    early, late, both = Buffer(64, 0, 0), Buffer(64, 1, 1), Buffer(64, 0, 1)
    assert arena_size([early, late], [0, 0]) == 64  # never live at once
    assert arena_size([early, both], [0, 0]) is None
    assert arena_size([early, both], [0, 64]) == 128
    assert arena_size([early], [32]) is None  # not aligned
    assert arena_size([early], [-64]) is None
    assert arena_size([early], [64]) is None  # larger than all buffers beside one another


def test_buffer_without_bytes_takes_no_room():
    assert arena_size([Buffer(0, 0, 1), Buffer(64, 0, 1)], [0, 0]) == 64
    assert arena_size([], []) == 0


@given(st.lists(st.tuples(st.integers(0, 99), st.integers(0, 9), st.integers(0, 9)), max_size=8))
def test_lower_bound_is_the_largest_sum_over_steps(drawn):
    buffers = [Buffer(size, first, first + steps) for size, first, steps in drawn]
    loads = [sum(b.size for b in buffers if b.first <= s <= b.last) for s in range(20)]
    assert lower_bound(buffers) == largest_load([(b, b.size) for b in buffers]) == max(loads)
