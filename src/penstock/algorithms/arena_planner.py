"""Offsets for buffers in one arena, so that buffers that are live at once never overlap.

``plan_memory`` takes the steps over which each buffer lives (a static order of steps);
``plan_memory_dag`` takes which buffers may be live together (steps that run in parallel).

The problem is NP-hard (Garey and Johnson 1979, "dynamic storage allocation"), but on the buffers of
neural networks greedy placing comes within some percent of the lower bound, and a short search
closes most of the rest. Sizes, offsets and alignments are in bytes.
"""

from __future__ import annotations

import random
from bisect import bisect_left, bisect_right, insort
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import accumulate, combinations

MEMORY_PLANNERS = ("quick", "best", "wic", "first_fit", "bump")
"""The planners of ``plan_memory``, those of the smallest arenas first."""

# What planner "best" may spend, counted and not timed, so that its result is the same on every
# machine: pairs of buffers that it lists, and visits of its search to buffers and their neighbours:
# so many rounds past all of them, but no more visits than take about a second.
_PAIRS = 2_000_000
_ROUNDS = 1_000
_QUICK_ROUNDS = 50
_VISITS = 5_000_000
# Places of about its size that planner "reuse" looks at for a buffer.
_PLACES = 32


@dataclass(frozen=True, slots=True)
class Buffer:
    """``size`` bytes, live over steps ``first`` to ``last``, at a multiple of ``align``.

    Both steps are included: a buffer that a step reads last and one that it writes do not share
    memory. A buffer of size 0 takes no room.

    Raises:
        ValueError: ``size`` is negative, ``last`` is before ``first``, or ``align`` is not a
            power of two.
    """

    size: int
    first: int
    last: int
    align: int = 64

    def __post_init__(self) -> None:
        _check(self.size, self.align)
        if self.last < self.first:
            raise ValueError(f"a buffer cannot live from step {self.first} to step {self.last}")


@dataclass(frozen=True, slots=True)
class Arena:
    """Buffer i lies at ``offsets[i]`` in an arena of ``size`` bytes.

    The arena must itself begin at a multiple of the strictest alignment.
    """

    size: int
    offsets: tuple[int, ...]


def lower_bound(buffers: Iterable[Buffer]) -> int:
    """The largest sum of live sizes over steps: no arena can be smaller.

    Alignment is left out. Linear in buffers, but for sorting, however large the step numbers.
    """
    return _largest_load(buffers, unit=1)


def plan_memory(buffers: Sequence[Buffer], planner: str = "best") -> Arena:
    """Offsets for ``buffers``, such that those that share a step do not overlap; deterministic.

    The first three planners have the names that onert, the runtime of Samsung's ONE, gives them:

        bump       one after the other, no memory used twice: the largest arena, for debugging
        first_fit  in order of first use, each in the lowest gap between those live at that step.
                   Nearly linear time
        wic        by size, the largest first, each in the lowest gap between those placed before
                   that live at the same time ("weighted interval colouring"). Greedy by size in
                   Pisarchyk and Lee 2020, "Efficient memory management for deep neural net
                   inference", takes the smallest gap instead. Time and memory grow with the pairs
                   of buffers that share a step
        best       the smallest arena of these, and of a search (see ``_Search``) that ends when no
                   arena can be smaller by a whole unit of alignment, or at a count. Where more
                   than 2 million pairs of buffers share a step, of first_fit and its variants
                   (smallest gap, time reversed) instead
        quick      best with a twentieth of the search, for who waits: on networks it finds the same

    On the lifetimes of convolutional networks and transformers, measured against ``lower_bound``,
    first_fit takes 1.17 times as much in the mean, wic 1.01 times and at worst 1.2 times, and
    best reaches the bound.

    Raises:
        ValueError: there is no planner of that name.
    """
    blocks = _Blocks([b.size for b in buffers], [b.align for b in buffers])
    planners: dict[str, Callable[[], Arena]] = {
        "bump": blocks.bump,
        "first_fit": lambda: _sweep(buffers, blocks.unit),
        "wic": lambda: blocks.place(_by_size(buffers), _overlaps(buffers)),
        "best": lambda: _best(buffers, blocks),
        "quick": lambda: _best(buffers, blocks, _QUICK_ROUNDS),
    }
    return _chosen(planners, planner)()


def plan_memory_dag(
    sizes: Sequence[int],
    conflicts: Callable[[int, int], bool],
    *,
    aligns: Sequence[int] | None = None,
    planner: str = "best",
) -> Arena:
    """Offsets for buffers whose lifetimes are only partly ordered; deterministic.

    ``conflicts(i, j)`` says whether buffers i and j may be live together, so that they must not
    overlap; it is asked once for each pair i < j of buffers that are not empty. ``aligns[i]`` is a
    power of two, 64 each if not given.

    The planners are those of ``plan_memory``, where first_fit places in the order given, and time
    grows with the square of the number of buffers; and ``reuse``, nearly linear, whose arena is
    larger: a buffer takes the place of one that is gone, or one of its own. It needs buffers in an
    order in which they can be written, and that for i < j no conflict means that i is gone for sure
    when j is written first, of which it makes use: then so is what was gone before i.

    Raises:
        ValueError: a size is negative, an alignment is no power of two, ``aligns`` does not have
            one entry per buffer, or there is no planner of that name.
    """
    aligns = [64] * len(sizes) if aligns is None else aligns
    for size, align in zip(sizes, aligns, strict=True):
        _check(size, align)
    blocks = _Blocks(sizes, aligns)
    by_size = sorted(blocks.filled, key=sizes.__getitem__, reverse=True)

    def neighbours() -> list[list[int]]:
        found: list[list[int]] = [[] for _ in sizes]
        for i, j in combinations(by_size, 2):
            if conflicts(min(i, j), max(i, j)):
                found[i].append(j)
                found[j].append(i)
        return found

    def best() -> Arena:
        found = neighbours()
        arenas = (blocks.bump(), blocks.place(blocks.filled, found), blocks.place(by_size, found))
        whole = [_round_up(size, blocks.unit) for size in sizes]
        bound = max((sum(whole[i] for i in c) for c in _cliques(by_size, found)), default=0)
        return _Search(blocks, found).run(min(arenas, key=_size), bound)

    planners: dict[str, Callable[[], Arena]] = {
        "bump": blocks.bump,
        "first_fit": lambda: blocks.place(blocks.filled, neighbours()),
        "wic": lambda: blocks.place(by_size, neighbours()),
        "best": best,
        "quick": best,
        "reuse": lambda: blocks.reuse(conflicts),
    }
    return _chosen(planners, planner)()


def _check(size: int, align: int) -> None:
    if size < 0:
        raise ValueError(f"a buffer cannot have {size} bytes")
    if align < 1 or align & (align - 1):
        raise ValueError(f"alignment {align} is not a power of two")


def _chosen(planners: Mapping[str, Callable[[], Arena]], name: str) -> Callable[[], Arena]:
    if name not in planners:
        raise ValueError(f"unknown memory planner {name!r}; there are {', '.join(planners)}")
    return planners[name]


def _round_up(offset: int, align: int) -> int:
    return -(-offset // align) * align


class _Blocks:
    """Sizes and alignments of buffers, and ways to lay them out."""

    __slots__ = ("aligns", "filled", "sizes", "unit")

    def __init__(self, sizes: Sequence[int], aligns: Sequence[int]) -> None:
        self.sizes = sizes
        self.aligns = aligns
        # Empty buffers stay at offset 0 and take no part in anything.
        self.filled = [i for i, size in enumerate(sizes) if size]
        # What all offsets are multiples of. A sum of sizes in whole units is therefore less than
        # one unit above what the same buffers need side by side.
        self.unit = min((aligns[i] for i in self.filled), default=1)

    def arena(self, offsets: Sequence[int]) -> Arena:
        ends = (offset + size for offset, size in zip(offsets, self.sizes, strict=True))
        return Arena(max(ends, default=0), tuple(offsets))

    def bump(self) -> Arena:
        offsets = [0] * len(self.sizes)
        top = 0
        for i in self.filled:
            offsets[i] = _round_up(top, self.aligns[i])
            top = offsets[i] + self.sizes[i]
        return self.arena(offsets)

    def place(self, order: Iterable[int], neighbours: Sequence[Sequence[int]]) -> Arena:
        """Each buffer in turn in the lowest gap between its neighbours that are placed already."""
        offsets = [0] * len(self.sizes)
        ends = [0] * len(self.sizes)  # 0 for buffers not placed yet
        for i in order:
            taken = sorted([(offsets[j], ends[j]) for j in neighbours[i] if ends[j]])
            offsets[i] = _lowest_gap(taken, self.sizes[i], self.aligns[i])
            ends[i] = offsets[i] + self.sizes[i]
        return self.arena(offsets)

    def reuse(self, conflicts: Callable[[int, int], bool]) -> Arena:
        """Each buffer in the place of one that is gone, the best fit, or behind all others."""
        # Places by size, with the number of each; and what is in each now.
        places: list[tuple[int, int]] = []
        tenant: list[int] = []
        sizes: list[int] = []
        place_of: dict[int, int] = {}
        for i in self.filled:
            size = _round_up(self.sizes[i], self.unit)
            at = bisect_left(places, (size, -1))
            # Those that are large enough first, then smaller ones, which then grow.
            near = (*places[at : at + _PLACES], *reversed(places[max(0, at - _PLACES) : at]))
            for held, place in near:
                if not conflicts(tenant[place], i):
                    places.remove((held, place))
                    break
            else:
                place = len(tenant)
                tenant.append(i)
                sizes.append(0)
            tenant[place] = i
            sizes[place] = max(size, sizes[place])
            insort(places, (sizes[place], place))
            place_of[i] = place
        starts = [0, *accumulate(sizes)]
        offsets = [starts[place_of[i]] if i in place_of else 0 for i in range(len(self.sizes))]
        return self.arena(offsets)


def _lowest_gap(taken: Iterable[tuple[int, int]], size: int, align: int) -> int:
    offset = 0
    for start, end in taken:
        if offset + size <= start:
            break
        if end > offset:
            offset = -(-end // align) * align
    return offset


class _Search:
    """Local search for a smaller arena.

    Buffers are put below a limit in turn, those first that are hard to place, each into the lowest
    gap. For one that finds no gap, the buffers in its way are taken out again (an ejection chain,
    Glover 1996), where these resist least. A buffer resists by the number of its neighbours, and
    the more the more often it had to push others out, so that what causes trouble comes to rest
    first (the idea of Joslin and Clements 1999, "Squeaky wheel optimization"). Chance, from a
    fixed seed, keeps the search out of loops.

    Rejected: placing all buffers anew, with the one that fits worst moved to the front. It finds
    arenas as small, but pays for all buffers with each step, and a graph of 100,000 nodes has
    hundreds of places that need one. Starting from several orders (by size, lifetime, or both)
    found nothing that the same number of steps from one order did not.
    """

    __slots__ = ("blocks", "draw", "neighbours", "order", "resistance", "visits")

    def __init__(self, blocks: _Blocks, neighbours: Sequence[Sequence[int]]) -> None:
        self.blocks = blocks
        self.neighbours = neighbours
        # Size times neighbours: with lifetimes, the area that a buffer covers.
        self.order = sorted(blocks.filled, key=lambda i: -blocks.sizes[i] * len(neighbours[i]))
        self.resistance = list(map(len, neighbours))
        self.visits = 0
        self.draw = random.Random(0)

    def run(self, best: Arena, bound: int, rounds: int = _ROUNDS) -> Arena:
        """``best`` or a smaller arena; stops at one of ``bound`` bytes or less."""
        if best.size <= bound:
            return best
        once = len(self.order) + sum(map(len, self.neighbours))
        allowed = min(rounds * once, _VISITS)
        # Most often the bound is in reach, and at once.
        self.visits = once + allowed // 10
        smaller = self.fit(None, bound)
        if smaller:
            return smaller
        self.visits = once + allowed
        while best.size > bound and (smaller := self.fit(best, best.size - 1)):
            best = smaller
        return best

    def fit(self, arena: Arena | None, limit: int) -> Arena | None:
        """An arena of at most ``limit`` bytes, made from ``arena``; None if ``visits`` run out."""
        sizes, aligns, order = self.blocks.sizes, self.blocks.aligns, self.order
        offsets = [0] * len(sizes)
        ends = [0] * len(sizes)  # as in ``_Blocks.place``, 0 for buffers not placed
        if arena:
            offsets = list(arena.offsets)
            ends = [o + s if o + s <= limit else 0 for o, s in zip(offsets, sizes, strict=True)]
        rank = {i: k for k, i in enumerate(order)}
        out = [k for k, i in enumerate(order) if not ends[i]]  # sorted, so a heap
        self.visits -= len(order)
        while out:
            i = order[heappop(out)]
            self.visits -= 1 + len(self.neighbours[i])
            if self.visits < 0:
                return None
            near = [j for j in self.neighbours[i] if ends[j]]
            taken = sorted([(offsets[j], ends[j]) for j in near])
            offset = _lowest_gap(taken, sizes[i], aligns[i])
            if offset + sizes[i] > limit:
                offset = self.weakest_spot(i, near, offsets, ends, limit)
                self.resistance[i] += len(self.neighbours[i])
                self.visits -= 8 * len(near)
                for j in near:
                    if offsets[j] < offset + sizes[i] and offset < ends[j]:
                        ends[j] = 0
                        heappush(out, rank[j])
            offsets[i] = offset
            ends[i] = offset + sizes[i]
        return self.blocks.arena(offsets)

    def weakest_spot(
        self, i: int, near: list[int], offsets: list[int], ends: list[int], limit: int
    ) -> int:
        """An offset for buffer i, below ``limit``, where the buffers in its way resist least."""
        size, align = self.blocks.sizes[i], self.blocks.aligns[i]
        # As in ``_lowest_gap``, there is nothing to win between the ends of others.
        spots = sorted({0, *(_round_up(ends[j], align) for j in near)})
        # In the way are those that start below the end of the spot, less those that end before it.
        by_start = sorted((offsets[j], self.resistance[j]) for j in near)
        by_end = sorted((ends[j], self.resistance[j]) for j in near)
        started = [0, *accumulate(weight for _, weight in by_start)]
        ended = [0, *accumulate(weight for _, weight in by_end)]
        starts = [start for start, _ in by_start]
        stops = [end for end, _ in by_end]

        def resistance(spot: int) -> float:
            weight = started[bisect_left(starts, spot + size)] - ended[bisect_right(stops, spot)]
            return weight * (1 + self.draw.random())

        return min((spot for spot in spots if spot + size <= limit), key=resistance)


def _size(arena: Arena) -> int:
    return arena.size


def _best(buffers: Sequence[Buffer], blocks: _Blocks, rounds: int = _ROUNDS) -> Arena:
    best = _sweep(buffers, blocks.unit)
    if best.size <= lower_bound(buffers):
        return best
    if _pairs(buffers) > _PAIRS:
        variants = ((True, False), (False, True), (True, True))
        return min((best, *(_sweep(buffers, blocks.unit, *v) for v in variants)), key=_size)
    neighbours = _overlaps(buffers)
    best = min(best, blocks.bump(), blocks.place(_by_size(buffers), neighbours), key=_size)
    bound = _largest_load(buffers, blocks.unit)
    return _Search(blocks, neighbours).run(best, bound, rounds)


def _largest_load(buffers: Iterable[Buffer], unit: int) -> int:
    """The largest sum over steps of live sizes, each rounded up to a multiple of ``unit``."""
    changes: list[tuple[int, int]] = []
    for b in buffers:
        size = _round_up(b.size, unit)
        changes += ((b.first, size), (b.last + 1, -size))
    # Sorted, the sizes that a step frees come before those that it claims.
    changes.sort()
    return max(accumulate(change for _, change in changes), default=0)


def _by_first_use(buffers: Sequence[Buffer]) -> list[int]:
    return sorted((i for i, b in enumerate(buffers) if b.size), key=lambda i: buffers[i].first)


def _by_size(buffers: Sequence[Buffer]) -> list[int]:
    return sorted(_by_first_use(buffers), key=lambda i: -buffers[i].size)


def _pairs(buffers: Sequence[Buffer]) -> int:
    """How many pairs of buffers share a step."""
    lasts = sorted(b.last for b in buffers if b.size)
    firsts = (buffers[i].first for i in _by_first_use(buffers))
    return sum(begun - bisect_left(lasts, first) for begun, first in enumerate(firsts))


def _overlaps(buffers: Sequence[Buffer]) -> list[list[int]]:
    """For each buffer the others that share a step with it."""
    neighbours: list[list[int]] = [[] for _ in buffers]
    live: list[int] = []
    for i in _by_first_use(buffers):
        first = buffers[i].first
        live = [j for j in live if buffers[j].last >= first]
        neighbours[i] += live
        for j in live:
            neighbours[j].append(i)
        live.append(i)
    return neighbours


def _cliques(order: Sequence[int], neighbours: Sequence[Sequence[int]]) -> Iterator[list[int]]:
    """Sets of buffers that all conflict, grown greedily in ``order``; together they hold all."""
    near = [set(others) for others in neighbours]
    covered: set[int] = set()
    for seed in order:
        if seed not in covered:
            clique: list[int] = []
            candidates = [seed, *(i for i in order if i in near[seed])]
            while candidates:
                clique.append(candidates[0])
                candidates = [i for i in candidates if i in near[clique[-1]]]
            covered.update(clique)
            yield clique


def _sweep(
    buffers: Sequence[Buffer], unit: int, smallest: bool = False, backward: bool = False
) -> Arena:
    """First fit in order of first use; ``smallest`` prefers the smallest gap to the lowest.

    ``backward`` reads time from its end: in order of last use, latest first.
    """
    # Whole units, as the rest of a unit would be a gap that is of no use but has to be looked at.
    sizes = [_round_up(b.size, unit) for b in buffers]
    lives = [(-b.last, -b.first) if backward else (b.first, b.last) for b in buffers]
    filled = [i for i, size in enumerate(sizes) if size]
    by_last = sorted(filled, key=lambda i: lives[i][1])
    offsets = [0] * len(buffers)
    gaps = _Gaps(sum(size + b.align for size, b in zip(sizes, buffers, strict=True)))
    dead = top = 0
    for i in sorted(filled, key=lambda i: lives[i][0]):
        while lives[by_last[dead]][1] < lives[i][0]:
            gaps.release(offsets[by_last[dead]], sizes[by_last[dead]])
            dead += 1
        offsets[i] = gaps.claim(sizes[i], buffers[i].align, smallest)
        top = max(top, offsets[i] + buffers[i].size)
    return Arena(top, tuple(offsets))


class _Gaps:
    """The free ranges of an arena, from low to high, none touching the next."""

    __slots__ = ("ends", "starts")

    def __init__(self, size: int) -> None:
        self.starts = [0]
        self.ends = [size]

    def claim(self, size: int, align: int, smallest: bool) -> int:
        """Offset of the lowest or the smallest gap that holds ``size`` bytes; there must be one."""
        chosen, width = -1, 0
        for k, (start, end) in enumerate(zip(self.starts, self.ends, strict=True)):
            fits = _round_up(start, align) + size <= end
            if fits and (chosen < 0 or end - start < width):
                chosen, width = k, end - start
                if not smallest:
                    break
        start, end = self.starts[chosen], self.ends[chosen]
        offset = _round_up(start, align)
        left = [(a, b) for a, b in ((start, offset), (offset + size, end)) if a < b]
        self.starts[chosen : chosen + 1] = [a for a, _ in left]
        self.ends[chosen : chosen + 1] = [b for _, b in left]
        return offset

    def release(self, offset: int, size: int) -> None:
        start, end = offset, offset + size
        low = high = bisect_left(self.starts, start)
        if high < len(self.starts) and self.starts[high] == end:
            end = self.ends[high]
            high += 1
        if low and self.ends[low - 1] == start:
            low -= 1
            start = self.starts[low]
        self.starts[low:high] = [start]
        self.ends[low:high] = [end]
