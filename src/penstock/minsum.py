"""The least sum of tables over variables that have a few states each.

What a placement takes is such a sum, the backend of each node being its state: a table by one
variable for what a node takes, one by two for what an edge takes. Variables are eliminated one
after another: of all tables that a variable is in, one is made that has the least over its states
(nonserial dynamic programming, Bertelè and Brioschi 1972). Which is exact, and fast where variables
have few neighbours when their turn comes: in chains and trees, and wherever branches part and join
again. Elsewhere some are held in the state that they have, and others the next time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from heapq import heapify, heappop, heappush
from math import prod
from operator import add
from typing import NamedTuple

# Entries of the largest table that is made: larger ones cost more than they gain, but where there
# are few variables. A pair's table may be larger than either.
_ENTRIES = 512
_ENTRIES_OF_FEW = 4096
_ENTRIES_OF_ALL = 400_000


class Pair(NamedTuple):
    """What two variables add: ``table[s * states of second + t]`` in the states s and t.

    With the first held in the state that it has, the second adds ``instead[t]`` in its state t, if
    given: never less than the row of the table that it stands for, and the same where the second
    has the state that it has. So a row that would tie the second to the first can be loosened.
    """

    first: int
    second: int
    table: Sequence[float]
    instead: Sequence[float] | None = None


# Tables that a variable is in are known by the variables and entries, the last changing fastest.
_Scope = tuple[int, ...]
_Factor = tuple[_Scope, Sequence[float], Sequence[float] | None]


def improve(
    tables: Sequence[Sequence[float]],
    pairs: Iterable[Pair],
    states: Sequence[int],
    held: list[int],
) -> tuple[list[int], bool]:
    """States of all variables with no greater sum than in ``states``, and whether it is the least.

    ``tables[v][s]`` is what variable v adds in state s. ``held[v]`` says how often v has been held
    so far, which this adds to: of variables with many neighbours, those held least often are next.
    Nearly linear in variables and pairs; deterministic.
    """
    search = _Search(tables, pairs, states)
    exact = search.run(held)
    return search.states, exact


class _Search:
    def __init__(
        self, tables: Sequence[Sequence[float]], pairs: Iterable[Pair], states: Sequence[int]
    ) -> None:
        self.own = [list(table) for table in tables]
        self.states = list(states)
        self.sizes = [len(table) for table in tables]
        self.factors: list[_Factor] = []
        self.factors_of: list[dict[int, None]] = [{} for _ in tables]  # in order, as all sets here
        self.near: list[dict[int, None]] = [{} for _ in tables]
        few = min(_ENTRIES_OF_FEW, _ENTRIES_OF_ALL // max(len(tables), 1))
        self.entries = max(_ENTRIES, few)
        self.done: list[tuple[int, list[float], list[_Factor]]] = []
        # Most tables are alike in size. Not kept for the process: this is much memory for little.
        self.places: Callable[[_Scope, _Scope], list[int]] = lru_cache(1 << 8)(_places)
        for first, second, table, instead in pairs:
            self.add((first, second), table, instead)
            self.near[first][second] = self.near[second][first] = None
            self.entries = max(self.entries, len(table))

    def run(self, held: list[int]) -> bool:
        exact = True
        gone = [size == 1 for size in self.sizes]
        for v, only in enumerate(gone):
            if only:
                self.hold(v)
        fewest = [(len(self.near[v]), v) for v, out in enumerate(gone) if not out]
        heapify(fewest)
        # By what has been held and has most neighbours; made when it is needed first.
        most: list[tuple[int, int, int]] = []
        while fewest:
            count, v = heappop(fewest)
            if gone[v] or count != len(self.near[v]):
                continue  # there is a newer entry
            around = list(self.near[v])
            if self.small(v):
                self.eliminate(v)
            else:
                heappush(fewest, (count, v))
                if not most:
                    most = [
                        (held[u], -len(self.near[u]), u) for u, out in enumerate(gone) if not out
                    ]
                    heapify(most)
                while True:
                    _, count, v = heappop(most)
                    if not gone[v] and -count == len(self.near[v]):
                        break
                around = list(self.near[v])
                self.hold(v)
                held[v] += 1
                exact = False
            gone[v] = True
            for u in around:
                heappush(fewest, (len(self.near[u]), u))
                if most:
                    heappush(most, (held[u], -len(self.near[u]), u))
        self.settle()
        return exact

    def small(self, v: int) -> bool:
        """Whether the table by ``v`` and all its neighbours is not too large."""
        size = self.sizes[v]
        for u in self.near[v]:
            size *= self.sizes[u]
            if size > self.entries:
                return False
        return True

    def eliminate(self, v: int) -> None:
        scope = tuple(sorted(self.near[v]))
        factors = self.take(v)
        self.done.append((v, self.own[v], factors))
        if not scope:
            return
        size = self.sizes[v]
        sizes = (*[self.sizes[u] for u in scope], size)
        total = self.own[v] * prod(sizes[:-1])
        for within, table, _ in factors:
            strides = self.strides(within)
            steps = tuple([strides.get(u, 0) for u in (*scope, v)])
            total = [x + table[k] for x, k in zip(total, self.places(sizes, steps), strict=True)]
        self.add(scope, [min(total[k : k + size]) for k in range(0, len(total), size)])
        for u in scope:
            self.near[u].update(dict.fromkeys(scope))
            del self.near[u][u]

    def hold(self, v: int) -> None:
        """Let ``v`` have the state that it has."""
        for scope, table, instead in self.take(v):
            if instead is not None and scope[0] == v:
                self.add(scope[1:], instead)
                continue
            rest = tuple([u for u in scope if u != v])
            strides = self.strides(scope)
            start = self.states[v] * strides[v]
            sizes = tuple([self.sizes[u] for u in rest])
            places = self.places(sizes, tuple([strides[u] for u in rest]))
            self.add(rest, [table[start + k] for k in places])

    def settle(self) -> None:
        """The states of those that were eliminated, the last first: it depends on no other."""
        for v, own, factors in reversed(self.done):
            total = own
            for scope, table, _ in factors:
                strides = self.strides(scope)
                step = strides.pop(v)
                start = sum([stride * self.states[u] for u, stride in strides.items()])
                total = [x + table[start + step * s] for s, x in enumerate(total)]
            self.states[v] = total.index(min(total))

    def add(
        self, scope: _Scope, table: Sequence[float], instead: Sequence[float] | None = None
    ) -> None:
        if len(scope) == 1:
            self.own[scope[0]] = list(map(add, self.own[scope[0]], table))
            return
        for v in scope:
            self.factors_of[v][len(self.factors)] = None
        self.factors.append((scope, table, instead))

    def take(self, v: int) -> list[_Factor]:
        """The tables that ``v`` is in, which no other variable has any more."""
        taken = [self.factors[k] for k in self.factors_of[v]]
        for k in self.factors_of[v]:
            for u in self.factors[k][0]:
                if u != v:
                    del self.factors_of[u][k]
        for u in self.near[v]:
            del self.near[u][v]
        return taken

    def strides(self, scope: _Scope) -> dict[int, int]:
        found: dict[int, int] = {}
        stride = 1
        for v in reversed(scope):
            found[v] = stride
            stride *= self.sizes[v]
        return found


def _places(sizes: _Scope, strides: _Scope) -> list[int]:
    """Where in a table with these ``strides`` the entries of one with these ``sizes`` are."""
    places = [0]
    for size, stride in zip(sizes, strides, strict=True):
        places = [k + s * stride for k in places for s in range(size)]
    return places
