"""Offsets of buffers in one arena, such that buffers that are live at once never overlap.

``plan_memory`` takes the steps over which each buffer is live (a static order of steps);
``plan_memory_dag`` takes the pairs of buffers that may be live together (parallel steps)::

    step     0   1   2   3
    a  64    =====                  a at 0, b at 64; c reuses the memory of a:
    b 128        =========          an arena of 192 bytes for 256 bytes of buffers
    c  64            =====

The problem is NP-hard (Garey and Johnson 1979, "dynamic storage allocation"), but on the buffers of
neural networks greedy methods come within a few percent of the lower bound, and a short search
closes most of the rest. Sizes and offsets are in bytes; offsets are multiples of 64.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from heapq import heappop, heappush
from itertools import accumulate, combinations
from math import inf
from operator import attrgetter, mul

from penstock.algorithms.arena import ALIGNMENT, Arena, Buffer, largest_load, lower_bound
from penstock.core.checkpoints import checkpoint, with_checkpoints

# The budget of planners "best" and "quick", counted instead of timed, so that results are the same
# on every machine: pairs of buffers, and visits of the search to buffers and their neighbours, in
# rounds over all of them and in total (about a second).
_PAIRS = 2_000_000
_ROUNDS = 1_000
_QUICK_ROUNDS = 50
_VISITS = 5_000_000
# Places of similar size that planner "reuse" tries for a buffer.
_PLACES = 32


def plan_memory(buffers: Sequence[Buffer], planner: str = "best") -> Arena:
    """Offsets for ``buffers``, such that those live at the same step do not overlap; deterministic.

    The first three planners have the names of onert, the runtime of Samsung's ONE:

        bump       one after the other, no memory is used twice: the largest arena, for debugging
        first_fit  in order of first use, each in the lowest gap between buffers live at that step.
                   Nearly linear time
        wic        by size, the largest first, each in the lowest gap between earlier placed buffers
                   that are live at the same time ("weighted interval colouring"; Pisarchyk and Lee
                   2020, "Efficient memory management for deep neural net inference", take the
                   smallest gap). Time and memory grow with the pairs of buffers that share a step
        best       the smallest arena of these, and of a search (see ``_Search``) of bounded length.
                   With over 2 million pairs of buffers that share a step: the smallest arena of
                   first_fit and its variants (smallest gap, time reversed) instead
        quick      as best with a twentieth of the search; on networks it finds the same arenas

    On the lifetimes of convolutional networks and transformers, measured against ``lower_bound``,
    first_fit needs 1.17 times as much on average, wic 1.01 times and at worst 1.2 times, and best
    reaches the bound. Raises ``ValueError`` for other planners.
    """
    blocks = _Blocks([b.size for b in buffers])
    planners: dict[str, Callable[[], Arena]] = {
        "bump": blocks.bump,
        "first_fit": lambda: _sweep(buffers, blocks),
        "wic": lambda: blocks.place(_by_size(buffers), _overlaps(buffers)),
        "best": lambda: _best(buffers, blocks),
        "quick": lambda: _best(buffers, blocks, _QUICK_ROUNDS),
    }
    return _run(planners, planner)


def plan_memory_dag(
    sizes: Sequence[int], conflicts: Callable[[int, int], bool], planner: str = "best"
) -> Arena:
    """Offsets for buffers whose lifetimes are only partially ordered; deterministic.

    ``conflicts(i, j)`` is whether buffers i and j may be live together, so that they must not
    overlap; it is called once for each pair i < j of buffers that are not empty.

    The planners are those of ``plan_memory``, where first_fit takes buffers in the given order,
    quick equals best, and time grows with the square of the number of buffers; and ``reuse``,
    nearly linear, with a larger arena: a buffer takes the place of a dead one, or a new place. It
    needs buffers in an order in which they can be written, and that for i < j no conflict means
    that i is dead when j is first written; the relation must be transitive. Raises ``ValueError``
    for other planners and negative sizes.
    """
    if min(sizes, default=0) < 0:
        raise ValueError(f"a buffer cannot have {min(sizes)} bytes")
    blocks = _Blocks(sizes)
    by_size = sorted(blocks.filled, key=sizes.__getitem__, reverse=True)

    def neighbours() -> list[list[int]]:
        near: list[list[int]] = [[] for _ in sizes]
        for i, j in with_checkpoints(combinations(by_size, 2)):
            if conflicts(min(i, j), max(i, j)):
                near[i].append(j)
                near[j].append(i)
        return near

    def best() -> Arena:
        near = neighbours()
        arenas = [blocks.bump(), blocks.place(blocks.filled, near), blocks.place(by_size, near)]
        cliques = _cliques(by_size, near)
        bound = max((sum(blocks.sizes[i] for i in clique) for clique in cliques), default=0)
        return _Search(blocks, near).run(_smallest(arenas), bound)

    planners: dict[str, Callable[[], Arena]] = {
        "bump": blocks.bump,
        "first_fit": lambda: blocks.place(blocks.filled, neighbours()),
        "wic": lambda: blocks.place(by_size, neighbours()),
        "best": best,
        "quick": best,
        "reuse": lambda: blocks.reuse(conflicts),
    }
    return _run(planners, planner)


def _run(planners: Mapping[str, Callable[[], Arena]], name: str) -> Arena:
    if name not in planners:
        raise ValueError(f"unknown memory planner {name!r}; there are {', '.join(planners)}")
    return planners[name]()


class _Blocks:
    """Sizes of buffers, rounded up to units of alignment, and simple methods to place them. Empty
    buffers stay at offset 0 and are ignored: ``filled`` are all others."""

    __slots__ = ("filled", "nbytes", "sizes")

    def __init__(self, nbytes: Sequence[int]) -> None:
        self.nbytes = nbytes
        self.sizes = [-(-size // ALIGNMENT) * ALIGNMENT for size in nbytes]
        # Empty buffers conflict with nothing, and would only make pairs to look at.
        self.filled = [i for i, size in enumerate(nbytes) if size]

    def arena(self, offsets: Sequence[int]) -> Arena:
        ends = [offset + size for offset, size in zip(offsets, self.nbytes, strict=True)]
        return Arena(max(ends, default=0), tuple(offsets))

    def bump(self) -> Arena:
        starts = zip(accumulate(self.sizes, initial=0), self.sizes, strict=False)
        return self.arena([start if size else 0 for start, size in starts])

    def place(self, order: Iterable[int], neighbours: Sequence[Sequence[int]]) -> Arena:
        """Place each buffer in turn in the lowest gap between its placed neighbours."""
        offsets = [0] * len(self.sizes)
        ends = [0] * len(self.sizes)  # 0 for buffers not placed yet
        for i in with_checkpoints(order):
            taken = sorted([(offsets[j], ends[j]) for j in neighbours[i] if ends[j]])
            offsets[i] = _lowest_gap(taken, self.sizes[i])
            ends[i] = offsets[i] + self.sizes[i]
        return self.arena(offsets)

    def reuse(self, conflicts: Callable[[int, int], bool]) -> Arena:
        """Place each buffer where a dead one was, best fit first, or behind all others."""
        # Places as (size, number), sorted; and the present buffer of each.
        places: list[tuple[int, int]] = []
        tenant: list[int] = []
        sizes: list[int] = []
        place_of: dict[int, int] = {}
        for i in with_checkpoints(self.filled):
            size = self.sizes[i]
            at = bisect_left(places, (size, -1))
            # Places that are large enough first, then smaller ones, which grow.
            # A limit on both sides keeps the time linear, whatever the sizes.
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


def _lowest_gap(taken: Iterable[tuple[int, int]], size: int) -> int:
    offset = 0
    for start, end in taken:
        if offset + size <= start:
            break
        if end > offset:
            offset = end
    return offset


class _Search:
    """Local search for a smaller arena.

    Buffers are placed below a limit in turn, hard ones first, each in the lowest gap. If there is
    none, the buffers that are in the way are removed again (an ejection chain, Glover 1996), at the
    offset where their resistance is least. The resistance of a buffer is the number of its
    neighbours, and grows each time it ejects others, so that troublesome buffers come to rest first
    (Joslin and Clements 1999, "Squeaky wheel optimization"). Random factors from a fixed seed keep
    the search out of loops. Starting again with the worst buffer first finds arenas as small, but
    each of hundreds of steps pays for all buffers.
    """

    __slots__ = ("_draw", "blocks", "neighbours", "order", "resistance", "visits")

    def __init__(self, blocks: _Blocks, neighbours: Sequence[Sequence[int]]) -> None:
        self.blocks = blocks
        self.neighbours = neighbours
        self.resistance = list(map(len, neighbours))
        # Size times neighbours: roughly the area of a buffer in time and memory.
        area = list(map(mul, blocks.sizes, self.resistance))
        self.order = sorted(blocks.filled, key=area.__getitem__, reverse=True)
        self.visits = 0
        self._draw: Callable[[], float] | None = None

    def run(self, best: Arena, bound: int, rounds: int = _ROUNDS) -> Arena:
        """``best`` or a smaller arena; stops at one of ``bound`` bytes or less."""
        # No arena can be smaller: most networks need no search at all.
        if best.size <= bound:
            return best
        once = len(self.order) + sum(map(len, self.neighbours))
        allowed = min(rounds * once, _VISITS)
        # Usually the bound itself is reached at once.
        self.visits = once + allowed // 10
        smaller = self.fit(None, bound)
        if smaller:
            return smaller
        self.visits = once + allowed
        while best.size > bound and (smaller := self.fit(best, best.size - 1)):
            best = smaller
        return best

    def fit(self, arena: Arena | None, limit: int) -> Arena | None:
        """An arena of at most ``limit`` bytes, based on ``arena``; None if ``visits`` run out."""
        sizes, order = self.blocks.sizes, self.order
        offsets = [0] * len(sizes)
        ends = [0] * len(sizes)  # as in ``_Blocks.place``, 0 for buffers not placed
        if arena:
            offsets = list(arena.offsets)
            ends = [o + s if o + s <= limit else 0 for o, s in zip(offsets, sizes, strict=True)]
        rank = {i: k for k, i in enumerate(order)}
        out = [k for k, i in enumerate(order) if not ends[i]]  # sorted, hence a heap
        self.visits -= len(order)
        while out:
            checkpoint()
            i = order[heappop(out)]
            self.visits -= 1 + len(self.neighbours[i])
            if self.visits < 0:
                return None
            taken = sorted([(offsets[j], ends[j]) for j in self.neighbours[i] if ends[j]])
            offset = _lowest_gap(taken, sizes[i])
            if offset + sizes[i] > limit:
                near = [j for j in self.neighbours[i] if ends[j]]
                offset = self.weakest_spot(i, near, offsets, ends, limit)
                # A block that had to eject others is likely to be in their way again: it settles
                # first.
                self.resistance[i] += len(self.neighbours[i])
                # Each counts as eight visits: the weakest spot takes three sorts, and sums.
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
        """The offset below ``limit`` where the buffers in the way of buffer i resist least."""
        size = self.blocks.sizes[i]
        if self._draw is None:  # numbers from 0 to 1, the same in each search
            import random  # which most searches do without

            self._draw = random.Random(0).random
        # As in ``_lowest_gap``, only the ends of other buffers need to be tried.
        # In the way: buffers that start below the end of the spot, minus those that end before it.
        by_start = sorted(near, key=offsets.__getitem__)
        by_end = sorted(near, key=ends.__getitem__)
        started = [0, *accumulate(map(self.resistance.__getitem__, by_start))]
        ended = [0, *accumulate(map(self.resistance.__getitem__, by_end))]
        starts = list(map(offsets.__getitem__, by_start))
        stops = list(map(ends.__getitem__, by_end))
        least, best = inf, 0
        for spot in sorted({0, *stops}):
            if spot + size > limit:
                break
            weight = started[bisect_left(starts, spot + size)] - ended[bisect_right(stops, spot)]
            # Equal choices in a loop would eject the same buffers for ever.
            resistance = weight * (1 + self._draw())
            if resistance < least:
                least, best = resistance, spot
        return best


def _smallest(arenas: Iterable[Arena]) -> Arena:
    return min(arenas, key=attrgetter("size"))


def _best(buffers: Sequence[Buffer], blocks: _Blocks, rounds: int = _ROUNDS) -> Arena:
    best = _sweep(buffers, blocks)
    if best.size <= lower_bound(buffers):
        return best
    if _pairs(buffers) > _PAIRS:
        variants = ((True, False), (False, True), (True, True))
        return _smallest([best, *(_sweep(buffers, blocks, *v) for v in variants)])
    neighbours = _overlaps(buffers)
    best = _smallest([best, blocks.bump(), blocks.place(_by_size(buffers), neighbours)])
    # With sizes that are aligned, as those of the search are: unaligned ones might never be
    # reached.
    bound = largest_load(zip(buffers, blocks.sizes, strict=True))
    return _Search(blocks, neighbours).run(best, bound, rounds)


def _by_first_use(buffers: Sequence[Buffer]) -> list[int]:
    first = [b.first for b in buffers]
    return sorted([i for i, b in enumerate(buffers) if b.size], key=first.__getitem__)


def _by_size(buffers: Sequence[Buffer]) -> list[int]:
    less = [-b.size for b in buffers]
    return sorted(_by_first_use(buffers), key=less.__getitem__)


def _pairs(buffers: Sequence[Buffer]) -> int:
    """The number of pairs of buffers that share a step."""
    lasts = sorted([b.last for b in buffers if b.size])
    firsts = sorted([b.first for b in buffers if b.size])
    return sum([begun - bisect_left(lasts, first) for begun, first in enumerate(firsts)])


def _overlaps(buffers: Sequence[Buffer]) -> list[list[int]]:
    """For each buffer the other buffers that share a step with it."""
    neighbours: list[list[int]] = [[] for _ in buffers]
    live: list[int] = []
    for i in with_checkpoints(_by_first_use(buffers)):
        first = buffers[i].first
        live = [j for j in live if buffers[j].last >= first]
        neighbours[i] += live
        for j in live:
            neighbours[j].append(i)
        live.append(i)
    return neighbours


def _cliques(order: Sequence[int], neighbours: Sequence[Sequence[int]]) -> Iterator[list[int]]:
    """Cliques of conflicting buffers that cover all buffers, grown greedily in ``order``."""
    near = [set(others) for others in neighbours]
    covered: set[int] = set()
    for seed in with_checkpoints(order):
        if seed not in covered:
            clique: list[int] = []
            candidates = [seed, *(i for i in order if i in near[seed])]
            while candidates:
                checkpoint()
                clique.append(candidates[0])
                candidates = [i for i in candidates if i in near[clique[-1]]]
            covered.update(clique)
            yield clique


def _sweep(
    buffers: Sequence[Buffer], blocks: _Blocks, smallest: bool = False, backward: bool = False
) -> Arena:
    """First fit in order of first use, or with time reversed (``backward``); in the lowest gap, or
    the ``smallest``."""
    sizes, filled = blocks.sizes, blocks.filled
    first = [-b.last if backward else b.first for b in buffers]
    last = [-b.first if backward else b.last for b in buffers]
    by_last = sorted(filled, key=last.__getitem__)
    offsets = [0] * len(buffers)
    # Large enough for all of them beside one another, so that each claim finds a gap.
    gaps = _Gaps(sum(sizes))
    dead = 0
    for i in with_checkpoints(sorted(filled, key=first.__getitem__)):
        while last[by_last[dead]] < first[i]:
            gaps.release(offsets[by_last[dead]], sizes[by_last[dead]])
            dead += 1
        offsets[i] = gaps.claim(sizes[i], smallest)
    return blocks.arena(offsets)


class _Gaps:
    """The free ranges of an arena, ascending and not adjacent."""

    __slots__ = ("ends", "starts")

    def __init__(self, size: int) -> None:
        self.starts = [0]
        self.ends = [size]

    def claim(self, size: int, smallest: bool) -> int:
        """The offset of ``size`` bytes in the lowest or the smallest gap that holds them."""
        starts, ends = self.starts, self.ends
        if smallest:
            lengths = [(end - start, start) for start, end in zip(starts, ends, strict=True)]
            k = starts.index(min([at for at in lengths if at[0] >= size])[1])
        else:
            k = 0
            while ends[k] - starts[k] < size:
                k += 1
        offset = starts[k]
        starts[k] += size
        if starts[k] == ends[k]:
            del starts[k], ends[k]
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
