"""Arenas: buffers that are live at once never overlap, and the arena is as small as can be."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Sequence
from itertools import combinations, permutations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.algorithms import arena_planner
from penstock.algorithms.arena import Arena, Buffer, lower_bound
from penstock.algorithms.arena_planner import plan_memory, plan_memory_dag
from tests.support.arenas import assert_sound, mean, ratio
from tests.support.sweeps import scaled

PLANNERS = ["bump", "first_fit", "wic", "best"]


def kib(*lives: tuple[int, int, int]) -> list[Buffer]:
    """Buffers from (size in KiB, first, last)."""
    return [Buffer(size << 10, first, last) for size, first, last in lives]


buffer_lists = st.lists(
    st.builds(
        lambda size, first, steps: Buffer(size, first, first + steps),
        st.one_of(st.integers(0, 300), st.integers(0, 8).map(lambda k: k * 64)),
        st.integers(-5, 12),
        st.one_of(st.integers(0, 3), st.integers(0, 20)),
    ),
    max_size=14,
)


# Buffer


def test_a_buffer_cannot_be_changed():
    with pytest.raises(dataclasses.FrozenInstanceError):
        Buffer(1, 0, 0).size = 2  # type: ignore[misc]


def test_buffer_of_negative_size_is_refused():
    with pytest.raises(ValueError, match="-1 bytes"):
        Buffer(-1, 0, 0)


def test_a_life_that_ends_before_it_begins_is_refused():
    with pytest.raises(ValueError, match="from step 3 to step 2"):
        Buffer(1, 3, 2)


# lower_bound


def test_the_lower_bound_is_the_largest_sum_over_steps():
    #   step     0  1  2  3
    #   10       ====
    #   20          =======
    #   5           =
    #   8              ====
    assert lower_bound(kib((10, 0, 1), (20, 1, 3), (5, 1, 1), (8, 2, 3))) == 35 << 10


def test_buffers_that_share_only_their_last_and_first_step_add_up():
    assert lower_bound([Buffer(3, 0, 1), Buffer(4, 1, 2)]) == 7


def test_buffers_in_adjacent_steps_do_not_add_up():
    assert lower_bound([Buffer(3, 0, 1), Buffer(4, 2, 3)]) == 4


def test_the_lower_bound_leaves_alignment_out():
    assert lower_bound([Buffer(3, 0, 0), Buffer(4, 0, 0)]) == 7


def test_the_lower_bound_without_buffers_is_zero():
    assert lower_bound([]) == 0


def test_the_lower_bound_does_not_count_steps():
    assert lower_bound([Buffer(3, 0, 10**30), Buffer(4, 10**29, 10**31)]) == 7


def test_the_lower_bound_takes_an_iterator():
    assert lower_bound(iter([Buffer(3, 0, 0)])) == 3


@given(buffer_lists)
def test_the_lower_bound_is_that_of_every_single_step(buffers):
    steps = range(-5, 40)
    sums = (sum(b.size for b in buffers if b.first <= step <= b.last) for step in steps)
    assert lower_bound(buffers) == max(sums)


# What holds for every planner


@pytest.mark.parametrize("planner", PLANNERS)
@given(buffers=buffer_lists)
def test_buffers_live_at_once_never_overlap(planner, buffers):
    assert_sound(buffers, plan_memory(buffers, planner))


@pytest.mark.parametrize("planner", PLANNERS)
@given(buffers=buffer_lists)
def test_planner_best_is_never_larger_than_the_others(planner, buffers):
    assert plan_memory(buffers).size <= plan_memory(buffers, planner).size


@given(buffers=buffer_lists)
def test_plans_do_not_depend_on_what_was_planned_before(buffers):
    assert plan_memory(buffers) == plan_memory(buffers)


@pytest.mark.parametrize("planner", PLANNERS)
def test_no_buffers_take_no_room(planner):
    assert plan_memory([], planner) == Arena(0, ())


@pytest.mark.parametrize("planner", PLANNERS)
def test_empty_buffers_take_no_room_and_have_an_offset(planner):
    buffers = [Buffer(0, 0, 5), Buffer(64, 0, 5), Buffer(0, 2, 2), Buffer(64, 0, 5)]
    arena = plan_memory(buffers, planner)
    assert arena.size == 128
    assert_sound(buffers, arena)


@pytest.mark.parametrize("planner", PLANNERS)
def test_the_last_buffer_is_not_padded(planner):
    assert plan_memory([Buffer(1, 0, 0), Buffer(1, 0, 0)], planner) == Arena(65, (0, 64))


@pytest.mark.parametrize("planner", PLANNERS)
def test_sizes_and_steps_may_exceed_64_bits(planner):
    buffers = [Buffer(1 << 70, 0, 1 << 80), Buffer(1 << 69, 1 << 79, 1 << 81)]
    assert plan_memory(buffers, planner).size == (1 << 70) + (1 << 69)


@pytest.mark.parametrize(
    "plan", [lambda p: plan_memory([], p), lambda p: plan_memory_dag([], max, planner=p)]
)
def test_an_unknown_planner_is_refused_with_a_list_of_planners(plan):
    with pytest.raises(ValueError, match="'worst'; there are bump, first_fit, wic, best"):
        plan("worst")


# What distinguishes the planners


def test_bump_uses_no_memory_twice():
    assert plan_memory(kib((1, 0, 0), (2, 1, 1), (3, 2, 2)), "bump").offsets == (0, 1024, 3072)


def test_first_fit_takes_the_lowest_gap():
    #   step    0  1  2
    #   1       =                        1 leaves the lowest gap
    #   1       =======
    #   1       =  .
    #   1       =======
    #   1          ====                  and is followed there
    arena = plan_memory(kib((1, 0, 0), (1, 0, 2), (1, 0, 0), (1, 0, 2), (1, 1, 2)), "first_fit")
    assert arena.offsets[4] == arena.offsets[0] == 0


def test_first_fit_joins_gaps():
    #   step    0  1  2
    #   1       =
    #   1       ====
    #   1       =
    #   1       =======
    #   3             =                  fits where the three were
    lives = (1, 0, 0), (1, 0, 1), (1, 0, 0), (1, 0, 2), (3, 2, 2)
    assert plan_memory(kib(*lives), "first_fit").offsets[4] == 0


def test_first_fit_goes_by_first_use():
    assert plan_memory(kib((4, 1, 2), (1, 0, 1)), "first_fit").offsets == (1024, 0)


def test_wic_places_the_largest_first():
    assert plan_memory(kib((1, 0, 1), (4, 1, 2)), "wic").offsets == (4096, 0)


def test_wic_breaks_ties_by_first_use():
    assert plan_memory(kib((1, 3, 3), (1, 2, 3), (1, 1, 3)), "wic").offsets == (2048, 1024, 0)


def test_a_small_buffer_can_stand_in_the_way_of_first_fit_but_not_of_wic():
    #   step    0  1  2
    #   1       =  .  .
    #   2       ====  .          placed above 1, it keeps 4 from the memory of 1
    #   4          ====
    buffers = kib((1, 0, 0), (2, 0, 1), (4, 1, 2))
    sizes = {planner: plan_memory(buffers, planner).size >> 10 for planner in PLANNERS}
    assert sizes == {"bump": 7, "first_fit": 7, "wic": 6, "best": 6}


# Which planner leaves the last buffer's padding out is a matter of luck, so best compares all.


def test_planner_best_takes_the_plan_of_bump_if_smallest():
    buffers = [Buffer(64, 2, 3), Buffer(70, 1, 3), Buffer(100, 0, 3)]
    sizes = {planner: plan_memory(buffers, planner).size for planner in PLANNERS}
    assert sizes == {"bump": 292, "first_fit": 320, "wic": 320, "best": 292}


def test_planner_best_takes_wic_even_if_smaller_by_less_than_a_unit():
    buffers = [Buffer(65, 0, 2), Buffer(128, 1, 2)]
    sizes = {planner: plan_memory(buffers, planner).size for planner in PLANNERS}
    assert sizes == {"bump": 256, "first_fit": 256, "wic": 193, "best": 193}


def test_planner_best_takes_bump_for_conflicts_if_smallest():
    sizes = [64, 70, 100]
    arenas = {p: plan_memory_dag(sizes, lambda i, j: True, planner=p).size for p in PLANNERS}
    assert arenas == {"bump": 292, "first_fit": 292, "wic": 320, "best": 292}


def test_planner_best_takes_first_fit_for_conflicts_if_smallest():
    sizes = [64, 70, 100, 1]  # the last conflicts with nothing
    arenas = {p: plan_memory_dag(sizes, lambda i, j: j < 3, planner=p).size for p in PLANNERS}
    assert arenas == {"bump": 321, "first_fit": 292, "wic": 320, "best": 292}


def best_of_all_orders(buffers: Sequence[Buffer]) -> int:
    """The least arena: that of some order in which each buffer drops as low as it can."""
    least = sum(b.size for b in buffers)
    for order in permutations(buffers):
        placed: list[tuple[Buffer, int]] = []
        for b in order:
            near = [
                (at, at + o.size) for o, at in placed if o.first <= b.last and b.first <= o.last
            ]
            spots = [0, *(end for _, end in near)]
            at = min(s for s in spots if all(s + b.size <= lo or s >= hi for lo, hi in near))
            placed.append((b, at))
        least = min(least, max((at + b.size for b, at in placed), default=0))
    return least


@given(
    st.lists(
        st.builds(
            lambda size, first, steps: Buffer(64 * size, first, first + steps),
            st.integers(1, 9),
            st.integers(0, 4),
            st.integers(0, 3),
        ),
        max_size=5,
    )
)
def test_planner_best_of_few_buffers_is_the_best_of_all_orders(buffers):
    assert plan_memory(buffers).size == best_of_all_orders(buffers)


def rectangle(draw: random.Random, n: int, steps: int) -> list[Buffer]:
    """A rectangle of 1 MiB by ``steps`` steps, cut at random into n buffers, in any order."""
    parts = [(1 << 20, 0, steps - 1)]

    def worth_cutting(k: int) -> float:
        size, first, last = parts[k]
        return size * (last - first + 1) * draw.random()

    while len(parts) < n:
        size, first, last = parts.pop(max(range(len(parts)), key=worth_cutting))
        if draw.random() < 0.5 and last > first:
            middle = draw.randrange(first, last)
            parts += [(size, first, middle), (size, middle + 1, last)]
        elif size >= 128:
            part = 64 * draw.randrange(1, size // 64)
            parts += [(part, first, last), (size - part, first, last)]
        else:
            parts.append((size, first, last))
    draw.shuffle(parts)
    return [Buffer(*part) for part in parts]


def test_planner_solves_small_packing_puzzles():
    draw = random.Random(0)
    puzzles = [rectangle(draw, n, n // 2) for n in (10, 20, 30, 40) for _ in range(4)]
    sizes = {p: [plan_memory(puzzle, p).size for puzzle in puzzles] for p in ("wic", "best")}
    assert set(sizes["best"]) == {1 << 20}
    assert max(sizes["wic"]) > 1.5 * (1 << 20)


@pytest.mark.parametrize("n", scaled(50, 80))
def test_planner_is_near_the_optimum_of_large_packing_puzzles(n):
    draw = random.Random(0)
    puzzles = [rectangle(draw, n, n // 2) for _ in range(4)]
    sizes = {p: [plan_memory(puzzle, p).size for puzzle in puzzles] for p in ("wic", "best")}
    assert mean([size / (1 << 20) for size in sizes["best"]]) < 1.1
    assert mean([size / (1 << 20) for size in sizes["wic"]]) > 1.2


# plan_memory_dag


def overlap(buffers: Sequence[Buffer]) -> Callable[[int, int], bool]:
    def conflicts(i: int, j: int) -> bool:
        return buffers[i].first <= buffers[j].last and buffers[j].first <= buffers[i].last

    return conflicts


@pytest.mark.parametrize("planner", PLANNERS)
@given(buffers=buffer_lists)
def test_plan_for_the_conflicts_of_lifetimes_is_sound(planner, buffers):
    arena = plan_memory_dag([b.size for b in buffers], overlap(buffers), planner=planner)
    assert_sound(buffers, arena)


@given(buffers=buffer_lists)
def test_planning_by_lifetimes_and_by_conflicts_agree(buffers):
    buffers = sorted(buffers, key=lambda b: b.first)  # in which order ties are broken
    arena = plan_memory_dag([b.size for b in buffers], overlap(buffers), planner="wic")
    assert arena == plan_memory(buffers, "wic")


conflict_graphs = st.integers(0, 9).flatmap(
    lambda n: st.tuples(
        st.lists(st.integers(0, 300), min_size=n, max_size=n),
        st.sets(st.sampled_from([*combinations(range(n), 2)])) if n > 1 else st.just(set()),
    )
)


@pytest.mark.parametrize("planner", PLANNERS)
@given(drawn=conflict_graphs)
def test_buffers_that_conflict_never_overlap(planner, drawn):
    sizes, pairs = drawn
    arena = plan_memory_dag(sizes, lambda i, j: (i, j) in pairs, planner=planner)
    ends = [offset + size for offset, size in zip(arena.offsets, sizes, strict=True)]
    assert arena.size == max(ends, default=0)
    assert all(offset % 64 == 0 for offset in arena.offsets)
    for i, j in pairs:
        if sizes[i] and sizes[j]:
            assert arena.offsets[i] >= ends[j] or arena.offsets[j] >= ends[i]


@pytest.mark.parametrize("planner", PLANNERS)
@given(drawn=conflict_graphs)
def test_planner_best_for_conflicts_is_never_larger_than_the_others(planner, drawn):
    sizes, pairs = drawn

    def size(planner: str) -> int:
        return plan_memory_dag(sizes, lambda i, j: (i, j) in pairs, planner=planner).size

    assert size("best") <= size(planner)


def test_branches_that_run_in_parallel_share_no_memory():
    #      0
    #     / \
    #    1   2       1 and 3 may run at the same time as 2; 4 runs after all, reading 2 and 3
    #    |   |
    #    3   |
    #     \ /
    #      4
    conflicts = {(0, 1), (0, 2), (0, 3), (1, 2), (1, 3), (2, 3), (2, 4), (3, 4)}
    arena = plan_memory_dag([64] * 5, lambda i, j: (i, j) in conflicts)
    assert arena.size == 4 * 64
    assert arena.offsets[1] != arena.offsets[2] != arena.offsets[3]


def test_buffers_without_conflicts_share_all_memory():
    assert plan_memory_dag([64, 128, 1], lambda i, j: False) == Arena(128, (0, 0, 0))


def test_each_pair_of_filled_buffers_is_asked_about_once():
    asked: list[tuple[int, int]] = []

    def conflicts(i: int, j: int) -> bool:
        asked.append((i, j))
        return True

    plan_memory_dag([8, 0, 9, 7], conflicts)
    assert sorted(asked) == [(0, 2), (0, 3), (2, 3)]


def test_for_conflicts_first_fit_places_in_the_order_given():
    arena = plan_memory_dag([64, 128], lambda i, j: True, planner="first_fit")
    assert arena.offsets == (0, 64)


def test_conflicts_that_no_lifetimes_have_are_planned():
    #   0 - 1 - 2 - 3 - 4 - 0     a ring of five, of which no three conflict: greedy takes three
    #                             layers for sizes of one; two layers are impossible
    ring = {(0, 1), (1, 2), (2, 3), (3, 4), (0, 4)}
    assert plan_memory_dag([64] * 5, lambda i, j: (i, j) in ring).size == 3 * 64


def test_planner_refuses_a_negative_size_for_conflicts():
    with pytest.raises(ValueError, match="-1 bytes"):
        plan_memory_dag([1, -1], lambda i, j: True)


# Many buffers


MANY = 100_000


@pytest.mark.costly
@pytest.mark.parametrize("planner", ["first_fit", "wic", "best"])
def test_a_long_chain_of_equal_buffers_takes_two_of_them(planner):
    buffers = [Buffer(4096, i, i + 1) for i in range(MANY)]
    assert plan_memory(buffers, planner).size == 8192


@pytest.mark.full
def test_a_long_chain_of_unequal_buffers_takes_the_lower_bound():
    draw = random.Random(0)
    buffers = [Buffer(64 * draw.randrange(1, 1 << 14), i, i + 1) for i in range(MANY)]
    assert ratio(buffers) == 1


@pytest.mark.costly
def test_long_lived_buffers_beside_a_long_chain_take_little_more():
    draw = random.Random(0)
    buffers = [Buffer(64 * draw.randrange(1, 1 << 14), i, i + 1) for i in range(MANY // 4)]
    buffers += [Buffer(64_000, k, len(buffers) - k) for k in range(10)]
    assert ratio(buffers) <= 1.001


def test_first_fit_looks_at_no_gap_that_is_too_small_for_all(monkeypatch):
    # Were the rests of units gaps, there would be one for each buffer that is live.
    most = 0

    class Counted(arena_planner._Gaps):
        def claim(self, *arguments: int) -> int:
            nonlocal most
            most = max(most, len(self.starts))
            return super().claim(*arguments)

    monkeypatch.setattr(arena_planner, "_Gaps", Counted)
    draw = random.Random(0)
    buffers = [Buffer(draw.randrange(1, 5000), i, 2 * MANY - i) for i in range(MANY)]
    arena = plan_memory(buffers, "first_fit")
    assert arena.size < sum(b.size + 63 for b in buffers)
    assert most == 1


def test_where_too_many_buffers_are_live_at_once_pairs_are_not_listed(monkeypatch):
    monkeypatch.setattr(arena_planner, "_overlaps", None)
    draw = random.Random(0)
    buffers = [Buffer(draw.randrange(1, 5000), i, i + 5000) for i in range(MANY // 10)]
    arena = plan_memory(buffers)
    assert arena.size < plan_memory(buffers, "first_fit").size


def test_where_pairs_are_not_listed_the_smallest_gap_is_tried(monkeypatch):
    #   step    0  1  2  3  4  5
    #   2       =                   leaves a gap of two
    #   1       =======
    #   1       =                   leaves a gap of one
    #   1       =======
    #   1          ====             fits both
    #   2             =             fits the first only
    #   and the same with time reversed
    half = [(2, 0, 0), (1, 0, 2), (1, 0, 0), (1, 0, 2), (1, 1, 2), (2, 2, 2)]
    buffers = kib(*half, *((size, 5 - last, 5 - first) for size, first, last in half))
    monkeypatch.setattr(arena_planner, "_PAIRS", 0)
    assert plan_memory(buffers, "first_fit").size == 7 << 10
    assert plan_memory(buffers).size == 5 << 10


def test_planner_search_ends_at_its_bound(monkeypatch):
    # Six buffers for each corner of a ring of five; those of one corner and of the next conflict.
    # No more than twelve all conflict, but no arena holds them in twelve layers.
    def conflicts(i: int, j: int) -> bool:
        return (j // 6 - i // 6) % 5 in (0, 1, 4)

    looks = 0

    class Counted(arena_planner._Search):
        def weakest_spot(self, i: int, near: list[int], *others) -> int:
            nonlocal looks
            looks += 8 * len(near)
            return super().weakest_spot(i, near, *others)

    def lowest_gap(taken: list[tuple[int, int]], size: int) -> int:
        nonlocal looks
        looks += len(taken)
        return plain(taken, size)

    plain = arena_planner._lowest_gap
    monkeypatch.setattr(arena_planner, "_Search", Counted)
    monkeypatch.setattr(arena_planner, "_lowest_gap", lowest_gap)
    assert plan_memory_dag([64] * 30, conflicts).size == 15 * 64
    once = 30 + 30 * 17
    assert 0.5 * arena_planner._ROUNDS * once < looks < 1.11 * arena_planner._ROUNDS * once


def test_best_stops_at_once_where_first_fit_reaches_the_lower_bound(monkeypatch):
    monkeypatch.setattr(arena_planner, "_overlaps", None)
    monkeypatch.setattr(arena_planner, "_Search", None)
    assert plan_memory([Buffer(64, i, i + 1) for i in range(10)]).size == 128


def test_best_does_not_search_for_less_than_a_unit(monkeypatch):
    monkeypatch.setattr(arena_planner._Search, "fit", None)
    assert plan_memory([Buffer(size, 0, 0) for size in (3, 4, 5)]).size == 64 + 64 + 3


def test_best_does_not_search_where_a_set_that_all_conflicts_fills_the_arena(monkeypatch):
    monkeypatch.setattr(arena_planner._Search, "fit", None)
    assert plan_memory_dag([64, 1, 128, 65], lambda i, j: i > 0).size == 128 + 128 + 1
