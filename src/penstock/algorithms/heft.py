"""Where and when nodes run: placement on backends that have several workers each, and simulation.

``place`` decides, ``simulate`` tells what a decision takes when the costs turn out otherwise, or
what n workers would take, and ``bound`` what no decision can beat. ``place_serial`` places nodes
that run one at a time, where only the sum of costs and transfers counts.

Times are in seconds, or in any other unit that costs and transfers share. A node runs on one worker
of one backend from start to finish, and a worker runs one node at a time. Workers of one backend
are alike. A transfer delays the node that waits for it, keeps no worker busy, and belongs to one
edge: two consumers on the same backend wait for one each.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from heapq import heapify, heappop, heappush
from itertools import pairwise, product
from math import dist, fsum, inf, sqrt
from operator import attrgetter

from penstock.algorithms.dag import Dag
from penstock.algorithms.min_sum import Series
from penstock.algorithms.ordering import critical_path, ranks, topological_order

# cost[i][b]: what node i takes on backend b; None where b does not support it.
Costs = Sequence[Sequence[float | None]]
# transfer(i, j, b1, b2): what the edge i -> j takes when i is placed on b1 and j on b2.
Transfer = Callable[[int, int, int, int], float]
# transfer(i, b1, b2): what it takes to bring the results of node i from backend b1 to b2, once for
# all that read them there.
Delivery = Callable[[int, int, int], float]

# Rounds of scheduling backward and forward end when one gains less than this part of the bound, or
# the bound is this close, or after so many. Few graphs gain from a second one.
_CLOSE = 1e-3
_ROUNDS = 2

# Rounds over all nodes in search of cheaper backends.
_SWEEPS = 4

# Gaps in a block; one with more than twice as many is split.
_BLOCK = 64


@dataclass(frozen=True, slots=True)
class Placement:
    """Node i runs on ``worker[i]`` of ``backend[i]`` from ``start[i]`` to ``finish[i]``.

    Workers are counted within their backend, from 0, and times from the start of the run.
    """

    backend: tuple[int, ...]
    worker: tuple[int, ...]
    start: tuple[float, ...]
    finish: tuple[float, ...]

    @property
    def makespan(self) -> float:
        """The last finish; 0.0 for an empty graph."""
        return max(self.finish, default=0.0)


def place(
    dag: Dag,
    cost: Costs,
    transfer: Transfer | None = None,
    workers: Sequence[int] | None = None,
) -> Placement:
    """A backend, a worker and times for every node, such that the makespan is low; deterministic.

    ``cost[i][b]`` is what node i takes on backend b, or None if b does not support it and so must
    not get it. ``transfer(i, j, b1, b2)`` is what the edge i -> j takes from backend b1 to another
    backend b2; within a backend, or without ``transfer``, an edge takes nothing. ``workers[b]`` is
    the number of workers of backend b, 1 each if not given.

    The best of what ``heft`` makes on all backends, on each that supports all nodes, on the
    cheapest of each node, and on those with the least sum of costs and transfers that a local
    search finds; so never worse than one node at a time on any of these, or than one backend. Each
    is also tried with nodes whose costs differ much between backends made more urgent (as in onert,
    the runtime of Samsung's ONE) or, on a single backend, with list scheduling; and is scheduled
    backward and forward again (Li and Willis 1992, "An iterative scheduling technique for
    resource-constrained project scheduling"). On random graphs with random costs, one backend and
    2 to 8 workers, the makespan is 1.02 times ``bound`` in the mean; more, as it must be, where all
    branches join again and again. Time is nearly linear in nodes and edges, times workers.

    Raises:
        ValueError: no backend supports a node; ``cost`` does not have a row per node, with an entry
            per backend; a cost or a transfer is negative or not finite; ``workers`` does not have
            an entry per backend, each at least 1.
    """
    best: Placement | None = None
    for variant in _variants(_problem(dag, cost, transfer, workers)):
        best = _improved(variant, best)
    assert best is not None
    return best


def heft(
    dag: Dag,
    cost: Costs,
    transfer: Transfer | None = None,
    workers: Sequence[int] | None = None,
) -> Placement:
    """Heterogeneous Earliest Finish Time as published, in one pass over the graph; deterministic.

    Nodes by descending upward rank: their mean cost, and the largest sum of mean transfer and rank
    of a successor. Each goes to the worker where it finishes first, if possible in an idle time
    between nodes placed before; of equal ones to that which it leaves idle for the shortest time.

    Topcuoglu, Hariri and Wu 2002, "Performance-effective and low-complexity task scheduling for
    heterogeneous computing". Arguments and errors as for ``place``.
    """
    problem = _problem(dag, cost, transfer, workers)
    return _insert(problem, problem.by_rank(spread=0.0))


def simulate(
    dag: Dag, cost: Costs, schedule: Placement | int, transfer: Transfer | None = None
) -> float:
    """The makespan of ``schedule`` with these costs and transfers.

    A placement is replayed: each worker runs its nodes in their order, each as soon as the nodes
    and transfers that it waits for are done. With the costs and transfers that it was made with, a
    result of ``place`` takes its ``makespan``; with none of them higher, never more.

    A number stands for so many workers, all alike, each as good at a node as its best backend. They
    run what is ready, that with the longest chain to follow first (list scheduling, Graham 1966),
    and ``transfer`` is not asked.

    Raises:
        ValueError: as for ``place``; the placement is not one of this graph, puts a node on a
            backend that does not support it, or has starts by which nodes wait for each other.
    """
    if isinstance(schedule, Placement):
        _expect_costs(dag, cost)
        return _replay(dag, cost, schedule, transfer)
    _expect_workers([schedule])
    return _list_schedule(dag, cheapest(dag, cost), schedule, backend=0).makespan


def bound(dag: Dag, cost: Costs, workers: int = 1) -> float:
    """What no placement can beat: the critical path, or all work over all workers if that is more.

    Each node counts with its cost on its best backend, transfers with nothing, and ``workers`` is
    the number of those of all backends. Exact but for rounding. Errors as for ``place``.
    """
    _expect_workers([workers])
    return _bound(dag, cheapest(dag, cost), workers)


def cheapest(dag: Dag, cost: Costs) -> list[float]:
    """What each node costs on its best backend. Errors as for ``place``."""
    _expect_costs(dag, cost)
    return [float(min(c for c in row if c is not None)) for row in cost]


def timelines(dag: Dag, placement: Placement) -> dict[tuple[int, int], list[int]]:
    """What each worker, named as (backend, worker), runs, in the order in which it does.

    Nodes that take no time come before others that start with them, and in topological order.
    Workers that run nothing are left out. Raises ValueError for a placement of another graph.
    """
    if len(placement.backend) != dag.n:
        raise ValueError(f"a placement of {len(placement.backend)} nodes for {dag.n} nodes")
    found: dict[tuple[int, int], list[int]] = {}
    for i in _by_time(topological_order(dag), placement):
        found.setdefault((placement.backend[i], placement.worker[i]), []).append(i)
    return found


def place_serial(dag: Dag, cost: Costs, transfer: Delivery | None = None) -> tuple[int, ...]:
    """A backend for every node, such that running one at a time takes little; deterministic.

    ``cost[i][b]`` is what node i takes on backend b, or None if b does not support it and so must
    not get it. ``transfer(i, b1, b2)`` is what bringing the results of node i from backend b1 to
    another backend b2 takes, and is paid once for each b2 on which a successor runs, however many
    do (see ``serial``); without ``transfer``, nothing.

    Never worse than the best backend that supports all nodes, nor than the cheapest of each node.
    The least there is for chains and, with up to 5 backends, for trees; with two or three, where
    branches part and join again; with two, for all graphs of up to 4096 nodes (``minsum.py``). Else
    the nodes on each two backends are placed anew, as well as can be, until little is gained by it
    (swaps: Boykov, Veksler and Zabih 2001, "Fast approximate energy minimization via graph cuts"),
    in large graphs region by region, so that time is nearly linear in nodes and edges.

    Raises:
        ValueError: as for ``place``.
    """
    _expect_costs(dag, cost)
    options = [{b: float(c) for b, c in enumerate(row) if c is not None} for row in cost]
    costs: list[dict[tuple[int, int], float]] = [{} for _ in options]
    if transfer:
        for i, after in enumerate(dag.succ):
            targets = sorted({b for j in after for b in options[j]})
            pairs = [(a, b) for a in options[i] for b in targets if a != b]
            costs[i] = {(a, b): _delivery(transfer, i, a, b) for a, b in pairs}
    return tuple(Series(dag, options, costs).best())


def serial(
    dag: Dag, cost: Costs, backend: Sequence[int], transfer: Delivery | None = None
) -> float:
    """What running one node at a time takes: the costs of all, and each transfer that is needed.

    One brings the results of a node to another backend, for all its successors there. Raises
    ``ValueError`` where a backend does not support its node.
    """
    times = []
    for i, a in enumerate(backend):
        own = cost[i][a]
        if own is None:
            raise ValueError(f"node {i} is placed on backend {a}, which does not support it")
        times.append(own)
        if transfer:
            others = {b for j in dag.succ[i] if (b := backend[j]) != a}
            times += [transfer(i, a, b) for b in others]
    return fsum(times)


# What an edge takes: table[b1][b2], from backend b1 to backend b2.
_Table = tuple[tuple[float, ...], ...]


@dataclass(frozen=True, slots=True)
class _Problem:
    """The arguments of ``place``, checked."""

    dag: Dag
    order: list[int]  # a topological one
    options: list[dict[int, float]]  # per node, its backends and their costs
    workers: Sequence[int]
    arriving: list[list[_Table]] | None = None  # parallel to dag.pred; None if all is free
    leaving: list[list[_Table]] | None = None  # parallel to dag.succ, and transposed

    def mirrored(self) -> _Problem:
        """The same with time running backward."""
        dag, order = Dag(self.dag.n, ((b, a) for a, b in self.dag.edges)), self.order[::-1]
        return replace(self, dag=dag, order=order, arriving=self.leaving, leaving=self.arriving)

    def arrivals(self, j: int) -> Iterable[tuple[int, _Table]]:
        return zip(self.dag.pred[j], self.arriving[j], strict=True) if self.arriving else ()

    def departures(self, i: int) -> Iterable[tuple[int, _Table]]:
        return zip(self.dag.succ[i], self.leaving[i], strict=True) if self.leaving else ()

    def by_rank(self, spread: float) -> list[int]:
        """The nodes by upward rank, with that many standard deviations added to mean costs."""
        rank = [0.0] * self.dag.n
        for i in reversed(self.order):
            costs = [*self.options[i].values()]
            after = max([rank[j] for j in self.dag.succ[i]], default=0.0)
            for j, table in self.departures(i):
                pairs = [table[b][a] for a in self.options[i] for b in self.options[j] if a != b]
                after = max(after, rank[j] + sum(pairs) / max(len(pairs), 1))
            mean = sum(costs) / len(costs)
            deviation = dist(costs, [mean] * len(costs)) / sqrt(len(costs))
            rank[i] = mean + spread * deviation + after
        # Rounding errors must not decide between equal ranks: of these, the lower node is first.
        return topological_order(self.dag, [float(f"{r:.12g}") for r in rank])


def _problem(
    dag: Dag, cost: Costs, transfer: Transfer | None, workers: Sequence[int] | None
) -> _Problem:
    _expect_costs(dag, cost)
    width = len(cost[0]) if dag.n else 0
    workers = [1] * width if workers is None else workers
    if dag.n and len(workers) != width:
        raise ValueError(f"workers has {len(workers)} entries for {width} backends")
    _expect_workers(workers)
    options = [{b: float(c) for b, c in enumerate(row) if c is not None} for row in cost]
    problem = _Problem(dag, topological_order(dag), options, workers)
    if transfer is None or width < 2:
        return problem
    arriving: list[list[_Table]] = [[] for _ in range(dag.n)]
    leaving: list[list[_Table]] = [[] for _ in range(dag.n)]
    for i, j in dag.edges:
        table = [[0.0] * width for _ in range(width)]
        for a, b in product(options[i], options[j]):
            table[a][b] = _delay(transfer, i, j, a, b)
        arriving[j].append(tuple(map(tuple, table)))
        leaving[i].append(tuple(zip(*table, strict=True)))
    return replace(problem, arriving=arriving, leaving=leaving)


def _expect_costs(dag: Dag, cost: Costs) -> None:
    if len(cost) != dag.n:
        raise ValueError(f"cost has {len(cost)} rows for {dag.n} nodes")
    for i, row in enumerate(cost):
        if len(row) != len(cost[0]):
            raise ValueError(f"node {i} has {len(row)} costs, but node 0 has {len(cost[0])}")
        costs = [c for c in row if c is not None]
        if not costs:
            raise ValueError(f"no backend supports node {i}")
        if not all(0 <= c < inf for c in costs):
            raise ValueError(f"node {i} has costs {costs}; they must be finite and not negative")


def _expect_workers(workers: Sequence[int]) -> None:
    if min(workers, default=1) < 1:
        raise ValueError(f"{min(workers)} workers cannot run anything")


def _delay(transfer: Transfer, i: int, j: int, a: int, b: int) -> float:
    time = 0.0 if a == b else transfer(i, j, a, b)
    if not 0 <= time < inf:
        raise ValueError(f"the edge {i} -> {j} cannot take {time} from backend {a} to {b}")
    return time


def _delivery(transfer: Delivery, i: int, a: int, b: int) -> float:
    time = transfer(i, a, b)
    if not 0 <= time < inf:
        raise ValueError(f"what node {i} makes cannot take {time} from backend {a} to {b}")
    return time


def _bound(dag: Dag, least: Sequence[float], workers: int) -> float:
    return max(critical_path(dag, least), fsum(least) / max(workers, 1))


def _variants(problem: _Problem) -> Iterator[_Problem]:
    """``problem``, and with one backend for each node, in ways that could be better."""
    yield problem
    if any(len(costs) > 1 for costs in problem.options):
        common = set(range(len(problem.workers))).intersection(*problem.options)
        plans = [[min(costs, key=costs.__getitem__) for costs in problem.options]]
        plans += [[b] * problem.dag.n for b in sorted(common)]
        plans += [_near(problem, plan) for plan in plans]
        for plan in dict.fromkeys(map(tuple, plans)):
            chosen = zip(problem.options, plan, strict=True)
            yield replace(problem, options=[{b: costs[b]} for costs, b in chosen])


def _near(problem: _Problem, plan: Sequence[int]) -> list[int]:
    """``plan``, changed where nodes are cheaper on another backend with the transfers around them.

    Iterated conditional modes (Besag 1986): the sum of all costs and transfers never grows.
    """
    backend = list(plan)
    for _ in range(_SWEEPS if problem.arriving else 0):
        before = backend[:]
        for j in problem.order:
            around = (*problem.arrivals(j), *problem.departures(j))
            costs = {
                b: c + sum(table[backend[i]][b] for i, table in around)
                for b, c in problem.options[j].items()
            }
            backend[j] = min(costs, key=costs.__getitem__)
        if backend == before:
            break
    return backend


def _improved(problem: _Problem, rival: Placement | None) -> Placement:
    used = {b for costs in problem.options for b in costs}
    least = [min(costs.values()) for costs in problem.options]
    lowest = _bound(problem.dag, least, sum(problem.workers[b] for b in used))
    if rival and rival.makespan <= lowest:
        return rival
    best = _insert(problem, problem.by_rank(spread=0.0))
    if len(used) == 1:
        (b,) = used
        best = _shortest(best, _list_schedule(problem.dag, least, problem.workers[b], b))
    elif any(len(costs) > 1 for costs in problem.options):
        best = _shortest(best, _insert(problem, problem.by_rank(spread=1.0)))
    for _ in range(_ROUNDS):
        before = best.makespan
        if before <= lowest * (1 + _CLOSE):
            break
        mirror = problem.mirrored()
        backward = _insert(mirror, _by_time(problem.order, best)[::-1])
        best = _shortest(best, _insert(problem, _by_time(mirror.order, backward)[::-1]))
        if before - best.makespan < lowest * _CLOSE:
            break
    return _shortest(rival, best)


def _shortest(*placements: Placement | None) -> Placement:
    return min(filter(None, placements), key=attrgetter("makespan"))


def _by_time(order: Sequence[int], placement: Placement) -> list[int]:
    """The nodes by when they finish: a topological order, if ``order`` is one."""
    start, finish = placement.start, placement.finish
    return sorted(order, key=lambda i: (finish[i], start[i]))


class _Idle:
    """When a worker is idle: in gaps between nodes, each (end, begin), and from ``end`` on.

    Blocks of gaps know their last end and the length of their longest gap, so that a search passes
    over many that are too short at once. Gaps too short for anything that can come are not kept.
    """

    __slots__ = ("blocks", "end", "ends", "longest", "shortest")

    def __init__(self, shortest: float) -> None:
        self.shortest, self.end = shortest, 0.0
        self.blocks: list[list[tuple[float, float]]] = [[]]
        self.ends, self.longest = [0.0], [0.0]

    def find(self, ready: float, cost: float) -> tuple[float, float, int, int]:
        """The first start, not before ``ready``; idle since; block and gap, -1 without a gap."""
        need = ready + cost
        if need <= self.ends[-1]:
            for k in range(bisect_left(self.ends, need), len(self.ends)):
                if self.longest[k] >= cost:
                    block = self.blocks[k]
                    for at in range(bisect_left(block, (need,)), len(block)):
                        end, begin = block[at]
                        if max(begin, ready) + cost <= end:
                            return max(begin, ready), begin, k, at
        return max(self.end, ready), self.end, -1, -1

    def take(self, start: float, finish: float, k: int, at: int) -> None:
        """Busy from ``start`` to ``finish``; block and gap as ``find`` said."""
        if k < 0:
            gaps, self.end = [(start, self.end)], finish
            k, at = len(self.blocks) - 1, len(self.blocks[-1])
        else:
            end, begin = self.blocks[k][at]
            gaps = [(start, begin), (end, finish)]
        block = self.blocks[k]
        kept = [gap for gap in gaps if gap[0] - gap[1] >= self.shortest]
        if kept or at < len(block):
            block[at : at + 1] = kept
            parts = [block[:_BLOCK], block[_BLOCK:]] if len(block) > 2 * _BLOCK else [block]
            self.blocks[k : k + 1] = parts
            self.ends[k : k + 1] = [part[-1][0] if part else self.ends[k] for part in parts]
            self.longest[k : k + 1] = [max([e - b for e, b in part], default=0.0) for part in parts]


def _insert(problem: _Problem, order: Iterable[int]) -> Placement:
    """Each node in turn where it finishes first, in a gap if it fits in one."""
    n, width = problem.dag.n, range(len(problem.workers))
    backend, worker, start, finish = [0] * n, [0] * n, [0.0] * n, [0.0] * n
    shortest = [min([of[b] for of in problem.options if b in of], default=0.0) for b in width]
    idle = [[_Idle(shortest[b]) for _ in range(min(n, problem.workers[b]))] for b in width]
    for j in order:
        ready = max([finish[i] for i in problem.dag.pred[j]], default=0.0)
        earliest = (inf, inf)
        for b, cost in problem.options[j].items():
            if problem.arriving:
                arrivals = problem.arrivals(j)
                ready = max([finish[i] + t[backend[i]][b] for i, t in arrivals], default=0.0)
            for w, gaps in enumerate(idle[b]):
                at, since, *gap = gaps.find(ready, cost)
                if (at + cost, -since) < earliest:
                    earliest = (at + cost, -since)
                    backend[j], worker[j], start[j], found = b, w, at, gap
        finish[j] = earliest[0]
        idle[backend[j]][worker[j]].take(start[j], finish[j], *found)
    return Placement(tuple(backend), tuple(worker), tuple(start), tuple(finish))


def _list_schedule(dag: Dag, cost: Sequence[float], workers: int, backend: int) -> Placement:
    """On workers that are all alike, what is ready as soon as one is idle, by rank."""
    rank = [-(a + b) for a, b in zip(cost, ranks(dag, cost), strict=True)]
    waiting = [len(before) for before in dag.pred]
    ready = [(rank[i], i) for i, count in enumerate(waiting) if not count]
    heapify(ready)
    idle = list(range(min(workers, dag.n)))
    busy: list[tuple[float, int]] = []
    worker, start, finish = [0] * dag.n, [0.0] * dag.n, [0.0] * dag.n
    now = 0.0
    while ready or busy:
        while ready and idle:
            i = heappop(ready)[1]
            worker[i], start[i], finish[i] = heappop(idle), now, now + cost[i]
            heappush(busy, (finish[i], i))
        now = busy[0][0]
        while busy and busy[0][0] == now:
            i = heappop(busy)[1]
            heappush(idle, worker[i])
            for j in dag.succ[i]:
                waiting[j] -= 1
                if not waiting[j]:
                    heappush(ready, (rank[j], j))
    return Placement((backend,) * dag.n, tuple(worker), tuple(start), tuple(finish))


def _replay(dag: Dag, cost: Costs, placement: Placement, transfer: Transfer | None) -> float:
    backend, lines = placement.backend, timelines(dag, placement).values()
    after = {i: (j,) for line in lines for i, j in pairwise(line)}
    waiting = [len(before) for before in dag.pred]
    for (j,) in after.values():
        waiting[j] += 1
    ready = [i for i, count in enumerate(waiting) if not count]
    start, makespan = [0.0] * dag.n, 0.0
    for i in ready:
        b = backend[i]
        own = cost[i][b] if 0 <= b < len(cost[i]) else None
        if own is None:
            raise ValueError(f"node {i} is placed on backend {b}, which does not support it")
        finish = start[i] + own
        makespan = max(makespan, finish)
        for j in (*dag.succ[i], *after.get(i, ())):
            delay = _delay(transfer, i, j, b, backend[j]) if transfer else 0.0
            start[j] = max(start[j], finish + delay)
            waiting[j] -= 1
            if not waiting[j]:
                ready.append(j)
    if len(ready) < dag.n:
        Dag(dag.n, (*dag.edges, *((i, j) for i, (j,) in after.items())))  # names the cycle
    return makespan
