"""Min-sum problems: minimize a sum over variables that have a few states each.

The time of nodes that run one at a time is such a sum; a node's backend is the state of a variable.

``eliminate``: a sum of tables by one and by two variables. The tables of one variable after the
other are replaced by their minimum over its states (nonserial dynamic programming, Bertelè and
Brioschi 1972). Fast if variables have few neighbours when they are eliminated: in chains, in trees,
and where branches part and join.

``minimum_cut``: two states, and costs that are paid once for any number of variables. Variables on
the source's side of a minimum cut are in state 0 (Stone 1977, "Multiprocessor scheduling with the
aid of network flow algorithms"). Fast on all but very long graphs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import lru_cache
from heapq import heapify, heappop, heappush
from itertools import combinations
from math import fsum, inf, isfinite, prod
from operator import add

from penstock.algorithms.dag import Dag
from penstock.algorithms.ordering import topological_order
from penstock.core.checkpoints import checkpoint
from penstock.core.records import NamedTuple, dataclass

# Number of backends of which all sets are enumerated, as places that a result is copied to.
_ALL_SETS = 4

# Nodes that are placed by one cut; rounds over all nodes, if there are more than that or more than
# two backends; rounds end when one gains less than the fraction _GAIN.
_REGION = 4096
_TURNS = 4
_GAIN = 1e-3

# Entries of the largest table (less for two backends, where the cut is the alternative), and of all
# tables together: a constant, plus a number for each variable.
_ENTRIES = 2**16
_ENTRIES_FOR_TWO = 2**9
_ENTRIES_OF_ALL = 500_000
_ENTRIES_OF_EACH = 1000

# Residual capacity, relative to the widest arc, that counts as a rounding error.
_ROUNDING = 1e-13


@dataclass(frozen=True, slots=True)
class Series:
    """Nodes that run one at a time. ``options[i][b]`` is the time of node i on backend b,
    ``costs[i][a, b]`` the time to copy its results from backend a to b, for all readers there; 0 if
    not given."""

    dag: Dag
    options: Sequence[dict[int, float]]
    costs: Sequence[dict[tuple[int, int], float]]

    def best(self) -> list[int]:
        """A backend for every node, such that the total time is low."""
        cheapest = [min(own, key=own.__getitem__) for own in self.options]
        backends = sorted(set().union(*self.options))
        if len(backends) < 2 or not any(self.costs):
            return cheapest
        exact = self.eliminated(_ENTRIES if len(backends) > 2 else _ENTRIES_FOR_TWO)
        if exact is not None:
            return exact
        # All nodes on one backend, where it supports them: no start is best for every graph.
        plans = [
            [b if b in o else c for o, c in zip(self.options, cheapest, strict=True)]
            for b in backends
        ]
        plans = sorted([cheapest, *plans], key=self.time)
        small = self.dag.n <= _REGION
        order = topological_order(self.dag)
        # A cut between two backends is the optimum wherever it begins, and in large graphs each
        # start takes long.
        starts = plans if small and len(backends) > 2 else plans[:1]
        turns = 1 if small and len(backends) == 2 else _TURNS
        plans += [self.swapped(plan, order, backends, turns) for plan in starts]
        return min(plans, key=self.time)

    def time(self, plan: Sequence[int]) -> float:
        """The time of all nodes and of the transfers between them."""
        times = [own[a] for own, a in zip(self.options, plan, strict=True)]
        for i, after in enumerate(self.dag.succ):
            a, costs = plan[i], self.costs[i]
            times += [costs.get((a, b), 0.0) for b in {plan[j] for j in after}]
        return fsum(times)

    def eliminated(self, entries: int) -> list[int] | None:
        """The optimal plan; None if the graph is too wide for tables of ``entries`` entries."""
        states = [self.states(i) for i in range(self.dag.n)]
        if not all(states):
            return None
        tables = [
            [own[a] + sum([costs.get((a, b), 0.0) for b in there]) for a, there in of]
            for own, costs, of in zip(self.options, self.costs, states, strict=True)
        ]

        def pairs() -> Iterator[Pair]:
            for i, j in self.dag.edges:
                costs, to = self.costs[i], [b for b, _ in states[j]]
                if len(self.dag.succ[i]) == 1:
                    table = [costs.get((a, b), 0.0) for a, _ in states[i] for b in to]
                else:
                    table = [0.0 if b in there else inf for _, there in states[i] for b in to]
                yield Pair(i, j, table)

        chosen = eliminate(tables, pairs(), entries)
        return None if chosen is None else [states[i][k][0] for i, k in enumerate(chosen)]

    def states(self, i: int) -> list[tuple[int, frozenset[int]]]:
        """All states of node i: its backend, and the set of backends that have its results; none if
        there were too many. With a single successor the edge implies the set, which is left out."""
        after = [self.options[j] for j in self.dag.succ[i]]
        targets = sorted(set().union(*after)) if len(after) > 1 else []
        forced = {b for options in after for b in options if len(options) == 1}
        states = []
        for a in self.options[i]:
            # Backends that need the results in any case, or get them for free.
            certain = {a, *[b for b in targets if b in forced or not self.costs[i].get((a, b))]}
            sets = [frozenset(certain)]
            rest = [b for b in targets if b not in certain]
            if len(rest) > _ALL_SETS:
                return []
            for b in rest:
                sets += [members | {b} for members in sets]
            states += [(a, members) for members in sets]
        return states

    def swapped(
        self, plan: Sequence[int], order: Sequence[int], backends: Sequence[int], turns: int
    ) -> list[int]:
        """A plan that no swap improves much; in large graphs, no swap within a region."""
        least, best = self.time(plan), list(plan)
        for turn in range(turns):
            plan = best[:]
            # Every other turn is shifted by half a region, so that borders do not stay where they
            # are.
            for start in range(-(_REGION // 2) * (turn % 2), self.dag.n, _REGION):
                region = order[max(start, 0) : start + _REGION]
                for pair in combinations(backends, 2):
                    checkpoint()
                    self.swap(plan, region, pair)
            before, now = least, self.time(plan)
            if now < least:
                best, least = plan, now
            if before - now <= before * _GAIN:
                break
        return best

    def swap(self, plan: list[int], region: Iterable[int], pair: tuple[int, int]) -> None:
        """Place those nodes of ``region`` that are on one of two backends optimally on these two,
        while all others stay where they are."""
        inside = {i: k for k, i in enumerate([i for i in region if plan[i] in pair])}
        own: list[tuple[float, float]] = []
        terms: list[OnceCost] = []
        for p in dict.fromkeys((*inside, *[p for i in inside for p in self.dag.pred[i]])):
            costs, options = self.costs[p], self.options[p]
            there = {plan[j] for j in self.dag.succ[p] if j not in inside}
            readers = [inside[j] for j in self.dag.succ[p] if j in inside]
            sources = [plan[p]] * 2
            if p in inside:
                sources = [*pair[::-1]]
                in_0, in_1 = [
                    options.get(x, inf) + sum([costs.get((x, b), 0.0) for b in there]) for x in pair
                ]
                own.append((in_0, in_1))
            for state, target in enumerate(pair):
                time = costs.get((sources[state], target))
                if readers and time and target not in there:
                    terms.append(OnceCost(inside.get(p, -1), readers, state, time))
        for i, state in zip(inside, minimum_cut(own, terms), strict=True):
            plan[i] = pair[state]


class Pair(NamedTuple):
    """The cost of two variables in states s and t: ``table[s * states of second + t]``."""

    first: int
    second: int
    table: Sequence[float]


# In a table by several variables, entries of the last one are adjacent.
_Scope = tuple[int, ...]
_Factor = tuple[_Scope, Sequence[float]]


def eliminate(
    tables: Sequence[Sequence[float]], pairs: Iterable[Pair], entries: int
) -> list[int] | None:
    """The states of least sum; None if that takes too many tables, or one of over ``entries``.
    ``tables[v][s]`` is the cost of variable v in state s; no two of ``pairs`` have the same two
    variables. Deterministic, and linear in variables and pairs times ``entries``."""
    return _Elimination(tables, pairs, entries).run()


class _Elimination:
    def __init__(
        self, tables: Sequence[Sequence[float]], pairs: Iterable[Pair], entries: int
    ) -> None:
        self.entries = entries
        self.own = [list(table) for table in tables]
        self.sizes = [len(table) for table in tables]
        self.factors: list[_Factor] = []
        # Dicts as ordered sets: the order of all work must be deterministic.
        self.factors_of: list[dict[int, None]] = [{} for _ in tables]
        self.near: list[dict[int, None]] = [{} for _ in tables]
        self.done: list[tuple[int, list[float], list[_Factor]]] = []
        self.left = _ENTRIES_OF_ALL + _ENTRIES_OF_EACH * len(tables)
        # Most tables have one of few sizes. A cache for the process would take much memory.
        self.places: Callable[[_Scope, _Scope], list[int]] = lru_cache(1 << 8)(_places)
        for first, second, table in pairs:
            self.add((first, second), table)
            self.near[first][second] = self.near[second][first] = None

    def run(self) -> list[int] | None:
        gone = [size == 1 for size in self.sizes]
        for v, only in enumerate(gone):
            if only:
                self.fix(v)
        fewest = [(len(self.near[v]), v) for v, out in enumerate(gone) if not out]
        heapify(fewest)
        while fewest:
            checkpoint()
            count, v = heappop(fewest)
            if gone[v] or count != len(self.near[v]):
                continue  # there is a newer entry
            around = list(self.near[v])
            if not self.eliminate(v):
                return None
            gone[v] = True
            for u in around:
                heappush(fewest, (len(self.near[u]), u))
        states = [0] * len(gone)
        # The last one first: it depends on no other variable.
        for v, own, factors in reversed(self.done):
            total = own
            for scope, table in factors:
                strides = self.strides(scope)
                step = strides.pop(v)
                start = sum([stride * states[u] for u, stride in strides.items()])
                total = [x + table[start + step * s] for s, x in enumerate(total)]
            states[v] = total.index(min(total))
        return states

    def eliminate(self, v: int) -> bool:
        """Eliminate ``v``, unless the table by it and its neighbours is too large; whether done."""
        entries = size = self.sizes[v]
        for u in self.near[v]:
            entries *= self.sizes[u]
            if entries > self.entries:
                return False
        self.left -= entries
        if self.left < 0:
            return False
        scope = tuple(sorted(self.near[v]))
        factors = self.take(v)
        self.done.append((v, self.own[v], factors))
        if not scope:
            return True
        sizes = (*[self.sizes[u] for u in scope], size)
        total = self.own[v] * prod(sizes[:-1])
        for within, table in factors:
            strides = self.strides(within)
            steps = tuple([strides.get(u, 0) for u in (*scope, v)])
            total = [x + table[k] for x, k in zip(total, self.places(sizes, steps), strict=True)]
        self.add(scope, [min(total[k : k + size]) for k in range(0, len(total), size)])
        for u in scope:
            self.near[u].update(dict.fromkeys(scope))
            del self.near[u][u]
        return True

    def fix(self, v: int) -> None:
        """Eliminate ``v``, which has one state, without a table by all of its neighbours."""
        for scope, table in self.take(v):
            self.add(tuple([u for u in scope if u != v]), table)

    def add(self, scope: _Scope, table: Sequence[float]) -> None:
        if len(scope) == 1:
            self.own[scope[0]] = list(map(add, self.own[scope[0]], table))
            return
        for v in scope:
            self.factors_of[v][len(self.factors)] = None
        self.factors.append((scope, table))

    def take(self, v: int) -> list[_Factor]:
        """Remove and return the tables that ``v`` is in."""
        taken = [self.factors[k] for k in self.factors_of[v]]
        for k in self.factors_of[v]:
            for u in self.factors[k][0]:
                if u != v:
                    del self.factors_of[u][k]
        for u in self.near[v]:
            del self.near[u][v]
        return taken

    def strides(self, scope: _Scope) -> dict[int, int]:
        strides: dict[int, int] = {}
        stride = 1
        for v in reversed(scope):
            strides[v] = stride
            stride *= self.sizes[v]
        return strides


def _places(sizes: _Scope, strides: _Scope) -> list[int]:
    """For each entry of a table of ``sizes``, its index in a table of ``strides``."""
    places = [0]
    for size, stride in zip(sizes, strides, strict=True):
        places = [k + s * stride for k in places for s in range(size)]
    return places


class OnceCost(NamedTuple):
    """A cost that is paid once if any of ``readers`` is in ``state`` and ``maker`` is not; if
    ``maker`` is -1, one reader in ``state`` suffices."""

    maker: int
    readers: Sequence[int]
    state: int
    cost: float


def minimum_cut(costs: Sequence[tuple[float, float]], terms: Iterable[OnceCost]) -> list[int]:
    """The states, 0 or 1, of least sum, with the most zeros; ``costs[v]`` has the cost of variable
    v in either state, of which one may be infinite."""
    n = len(costs)
    network = _Network(n, n + 1, n + 2)
    for v, (in_0, in_1) in enumerate(costs):
        # State 0 is the source's side: it cuts the arc to the sink.
        # What both states cost anyway needs no arc; and one of the two costs may be infinite.
        both = min(in_0, in_1)
        network.arc(n, v, in_1 - both)
        network.arc(v, n + 1, in_0 - both)
    for maker, readers, state, cost in terms:
        # The helper is on the side of any reader in ``state``, and pays the cost to be on another
        # side than the maker.
        helper = network.node()
        if state:
            network.arc(n if maker < 0 else maker, helper, cost)
        else:
            network.arc(helper, n + 1 if maker < 0 else maker, cost)
        for reader in readers:
            network.arc(*((helper, reader) if state else (reader, helper)), inf)
    return [int(reaches) for reaches in network.cut()[:n]]


class _Network:
    """Maximum flow (Dinic 1970). Arc k ^ 1 is the reverse of arc k."""

    def __init__(self, source: int, sink: int, nodes: int) -> None:
        self.source = source
        self.sink = sink
        self.arcs: list[list[int]] = [[] for _ in range(nodes)]
        self.ends: list[int] = []
        self.room: list[float] = []
        self.least = 0.0

    def node(self) -> int:
        self.arcs.append([])
        return len(self.arcs) - 1

    def arc(self, a: int, b: int, room: float) -> None:
        if room:
            self.arcs[a].append(len(self.ends))
            self.arcs[b].append(len(self.ends) + 1)
            self.ends += (b, a)
            self.room += (room, 0.0)

    def cut(self) -> list[bool]:
        """For each node, whether it reaches the sink in the residual network of a maximum flow."""
        # Without a threshold, rounding errors would be augmented round by round.
        self.least = _ROUNDING * max(filter(isfinite, self.room), default=0.0)
        while True:
            checkpoint()
            level = self.levels()
            if level[self.source] < 0:
                return [distance >= 0 for distance in level]
            self.fill(level)

    def levels(self) -> list[int]:
        """The distance of each node to the sink, in arcs with capacity left; -1 if unreachable."""
        arcs, ends, room, least = self.arcs, self.ends, self.room, self.least
        level = [-1] * len(arcs)
        level[self.sink] = 0
        queue = [self.sink]
        for b in queue:
            for k in arcs[b]:
                a = ends[k]
                if level[a] < 0 and room[k ^ 1] > least:
                    level[a] = level[b] + 1
                    queue.append(a)
        return level

    def fill(self, level: list[int]) -> None:
        """Augment along shortest paths until none is left (a blocking flow)."""
        arcs, ends, room, least = self.arcs, self.ends, self.room, self.least
        untried = [list(outgoing) for outgoing in arcs]
        path: list[int] = []
        a = self.source
        while True:
            if a == self.sink:
                most = min([room[k] for k in path])
                full = -1
                for at, k in enumerate(path):
                    room[k] -= most
                    room[k ^ 1] += most
                    if full < 0 and room[k] <= least:
                        full = at
                # Only from the first arc that is full on is the path of no use any more.
                a = ends[path[full] ^ 1]
                del path[full:]
            elif untried[a]:
                k = untried[a][-1]
                b = ends[k]
                if room[k] > least and level[b] == level[a] - 1:
                    path.append(k)
                    a = b
                else:
                    untried[a].pop()
            elif path:
                a = ends[path.pop() ^ 1]
                untried[a].pop()
            else:
                return
