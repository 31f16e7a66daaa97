"""Where and when nodes run: placement on backends that have several workers each, and simulation.

``place`` decides, ``simulate`` tells what a decision takes when the costs turn out otherwise, or
what n workers would take, and ``bound`` what no decision can beat.

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
from itertools import chain, pairwise
from math import fsum, inf, sqrt

from penstock.dag import Dag
from penstock.order import critical_path, ranks, topological_order

# cost[i][b]: what node i takes on backend b; None where b does not support it.
Costs = Sequence[Sequence[float | None]]
# transfer(i, j, b1, b2): what the edge i -> j takes when i is placed on b1 and j on b2.
Transfer = Callable[[int, int, int, int], float]

# ``place`` schedules backward and forward again until a round gains less than this, the makespan is
# this close to the bound, or for so many rounds. Few graphs gain from a second one.
_CLOSE = 1e-3
_ROUNDS = 4

# Rounds over all nodes in which ``place_serial`` looks for better backends.
_SWEEPS = 16

# Idle times of a worker in one block; see _Idle.
_BLOCK = 64


@dataclass(frozen=True, slots=True)
class Placement:
    """Node i runs on ``worker[i]`` of ``backend[i]`` from ``start[i]`` to ``finish[i]``.

    Workers are counted within their backend, from 0. Times count from the start of the run, and
    ``makespan`` is the last finish, 0.0 for an empty graph.
    """

    backend: tuple[int, ...]
    worker: tuple[int, ...]
    start: tuple[float, ...]
    finish: tuple[float, ...]
    makespan: float


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

    The best of what ``heft`` makes on all backends, on each one that supports all nodes, with the
    cheapest one for each node, and with those of ``place_serial``; so never worse than all nodes on
    one backend, or than one node at a time. Each is also tried with nodes whose costs differ much
    between backends made more urgent (as in onert, the runtime of Samsung's ONE) or, on a single
    backend, with list scheduling, and then scheduled backward and forward again (Li and Willis
    1992, "An iterative scheduling technique for resource-constrained project scheduling").

    The problem is NP-hard. Nearly linear in nodes and edges, times the number of workers.

    Raises:
        ValueError: no backend supports a node; ``cost`` does not have one row per node, with one
            entry per backend; a cost or a transfer is negative or not finite; ``workers`` does not
            have one entry per backend, or a backend has less than one worker.
    """
    best: Placement | None = None
    for variant in _variants(_problem(dag, cost, transfer, workers)):
        used = {b for costs in variant.options for b in costs}
        least = [min(costs.values()) for costs in variant.options]
        lowest = _bound(dag, least, sum(variant.workers[b] for b in used))
        if best is None or lowest < best.makespan:
            found = _settled(dag, cost, _improved(variant, used, lowest), transfer)
            best = found if best is None else min(best, found, key=_makespan)
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
    of a successor. Each goes to the backend and worker where it finishes first, if possible in an
    idle time between nodes placed before; where it finishes at the same time, to that which would
    be idle for the shortest time, of these to the first.

    Topcuoglu, Hariri and Wu 2002, "Performance-effective and low-complexity task scheduling for
    heterogeneous computing". Arguments and errors as for ``place``.
    """
    problem = _problem(dag, cost, transfer, workers)
    return _settled(dag, cost, _insert(problem, problem.by_rank(spread=0.0)), transfer)


def place_serial(dag: Dag, cost: Costs, transfer: Transfer | None = None) -> Placement:
    """A backend for every node where only one thing happens at a time; deterministic.

    The makespan is the sum of all costs and transfers: before a node starts, all that it waits for
    is transferred, one after the other. Each backend has one worker.

    The problem is a minimum multiway cut, NP-hard from three backends on. Nodes change to a backend
    that is cheaper with the transfers around it until none gains (iterated conditional modes, Besag
    1986), from the cheapest one for each node and from each one that supports all nodes; the best
    of these is taken. Arguments and errors as for ``place``.
    """
    problem = _problem(dag, cost, transfer, None)
    backend = _serial_backends(problem)
    start, finish = [0.0] * dag.n, [0.0] * dag.n
    now = 0.0
    for j in problem.order:
        start[j] = now + sum(table[backend[i]][backend[j]] for i, table in problem.arrivals(j))
        now = finish[j] = start[j] + problem.options[j][backend[j]]
    return _placement(backend, [0] * dag.n, start, finish)


def simulate(
    dag: Dag, cost: Costs, schedule: Placement | int, transfer: Transfer | None = None
) -> float:
    """The makespan of ``schedule`` with these costs and transfers.

    A placement is replayed: each worker runs its nodes in the order of their starts, each as soon
    as the nodes and transfers that it waits for are done. With the costs and transfers that it was
    made with, a result of ``place`` takes its ``makespan``; with none of them higher, never more.

    A number stands for so many workers, all alike, and each as good at a node as its best backend.
    They run the nodes that are ready, that with the longest chain to follow first (list scheduling,
    Graham 1966), and ``transfer`` is not asked.

    Raises:
        ValueError: as for ``place``; the placement is not one of this graph, puts a node on a
            backend that does not support it, or has starts by which nodes wait for each other; the
            number of workers is less than one.
    """
    if isinstance(schedule, int):
        (n,) = _expect_workers([schedule])
        return _list_schedule(dag, cheapest(dag, cost), n, backend=0).makespan
    _expect_costs(dag, cost)
    return _replay(dag, cost, schedule, transfer).makespan


def bound(dag: Dag, cost: Costs, workers: int | Sequence[int] = 1) -> float:
    """What no placement can beat: the critical path, or all work over all workers if that is more.

    Each node counts with the cost on its best backend, transfers with nothing; ``workers`` is their
    number, or that of each backend. Exact but for rounding. Errors as for ``place``.
    """
    counts = _expect_workers([workers] if isinstance(workers, int) else workers)
    return _bound(dag, cheapest(dag, cost), sum(counts))


def cheapest(dag: Dag, cost: Costs) -> list[float]:
    """What each node costs on its best backend. Errors as for ``place``."""
    _expect_costs(dag, cost)
    return [float(min(c for c in row if c is not None)) for row in cost]


def timelines(dag: Dag, placement: Placement) -> dict[tuple[int, int], list[int]]:
    """What each worker, named as (backend, worker), runs, in the order in which it does.

    Of nodes that start at the same time, those that take no time come first, in topological order.
    Workers that run nothing are left out.

    Raises:
        ValueError: the placement is not one of this graph.
    """
    if len(placement.backend) != dag.n:
        raise ValueError(f"a placement of {len(placement.backend)} nodes for {dag.n} nodes")
    found: dict[tuple[int, int], list[int]] = {}
    for i in _by_time(topological_order(dag), placement):
        found.setdefault((placement.backend[i], placement.worker[i]), []).append(i)
    return found


# What is to be placed


# What an edge takes: table[b1][b2], from backend b1 to backend b2.
_Table = list[list[float]]


@dataclass(frozen=True, slots=True)
class _Problem:
    """The arguments of ``place``, checked."""

    dag: Dag
    order: list[int]  # a topological one
    options: list[dict[int, float]]  # per node, its backends and their costs
    workers: Sequence[int]
    arriving: list[list[_Table]] | None  # parallel to dag.pred; None if nothing takes time
    leaving: list[list[_Table]] | None  # parallel to dag.succ, and transposed

    def mirrored(self) -> _Problem:
        """The same with time running backward."""
        dag = Dag(self.dag.n, ((b, a) for a, b in self.dag.edges))
        options, workers = self.options, self.workers
        return _Problem(dag, self.order[::-1], options, workers, self.leaving, self.arriving)

    def on(self, backend: Sequence[int]) -> _Problem:
        """The same with a single backend for each node."""
        chosen = zip(self.options, backend, strict=True)
        return replace(self, options=[{b: costs[b]} for costs, b in chosen])

    def arrivals(self, j: int) -> Iterable[tuple[int, _Table]]:
        return zip(self.dag.pred[j], self.arriving[j], strict=True) if self.arriving else ()

    def departures(self, i: int) -> Iterable[tuple[int, _Table]]:
        return zip(self.dag.succ[i], self.leaving[i], strict=True) if self.leaving else ()

    def by_rank(self, spread: float) -> list[int]:
        """The nodes by upward rank, with that many standard deviations added to mean costs."""
        rank = [0.0] * self.dag.n
        for i in reversed(self.order):
            costs = self.options[i].values()
            mean = sum(costs) / len(costs)
            deviation = sqrt(sum((c - mean) ** 2 for c in costs) / len(costs))
            after = max((rank[j] for j in self.dag.succ[i]), default=0.0)
            for j, table in self.departures(i):
                pairs = [table[b][a] for a in self.options[i] for b in self.options[j] if a != b]
                after = max(after, rank[j] + sum(pairs) / max(len(pairs), 1))
            rank[i] = mean + spread * deviation + after
        return topological_order(self.dag, rank)


def _problem(
    dag: Dag, cost: Costs, transfer: Transfer | None, workers: Sequence[int] | None
) -> _Problem:
    _expect_costs(dag, cost)
    width = len(cost[0]) if dag.n else len(workers or ())
    workers = _expect_workers([1] * width if workers is None else workers)
    if len(workers) != width:
        raise ValueError(f"workers has {len(workers)} entries for {width} backends")
    options = [{b: float(c) for b, c in enumerate(row) if c is not None} for row in cost]
    arriving = leaving = None
    if transfer is not None and width > 1:
        arriving, leaving = [[] for _ in range(dag.n)], [[] for _ in range(dag.n)]
        for i, j in dag.edges:
            table = [[0.0] * width for _ in range(width)]
            for a in options[i]:
                for b in options[j]:
                    table[a][b] = _delay(transfer, i, j, a, b)
            arriving[j].append(table)
            leaving[i].append([list(column) for column in zip(*table, strict=True)])
    return _Problem(dag, topological_order(dag), options, workers, arriving, leaving)


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


def _expect_workers(workers: Sequence[int]) -> Sequence[int]:
    if min(workers, default=1) < 1:
        raise ValueError(f"a backend cannot have {min(workers)} workers")
    return workers


def _delay(transfer: Transfer | None, i: int, j: int, a: int, b: int) -> float:
    time = 0.0 if transfer is None or a == b else transfer(i, j, a, b)
    if not 0 <= time < inf:
        raise ValueError(f"the edge {i} -> {j} cannot take {time} from backend {a} to {b}")
    return time


def _bound(dag: Dag, least: Sequence[float], workers: int) -> float:
    return max(critical_path(dag, least), fsum(least) / max(workers, 1))


# Candidates


def _variants(problem: _Problem) -> Iterator[_Problem]:
    yield problem
    if any(len(costs) > 1 for costs in problem.options):
        plans = (*_plain_backends(problem), _serial_backends(problem))
        for backend in dict.fromkeys(map(tuple, plans)):
            yield problem.on(backend)


def _plain_backends(problem: _Problem) -> list[list[int]]:
    """For each node its cheapest backend; for all nodes each one that supports them."""
    common = set(range(len(problem.workers))).intersection(*problem.options)
    least = [min(costs, key=costs.__getitem__) for costs in problem.options]
    return [least, *([b] * problem.dag.n for b in sorted(common))]


def _serial_backends(problem: _Problem) -> list[int]:
    def total(backend: list[int]) -> float:
        costs = (problem.options[j][b] for j, b in enumerate(backend))
        edges = ((i, j, table) for j in problem.order for i, table in problem.arrivals(j))
        return fsum(chain(costs, (table[backend[i]][backend[j]] for i, j, table in edges)))

    def gains(backend: list[int], j: int) -> bool:
        """Whether node j had a better backend, which it now has."""
        near = (*problem.arrivals(j), *problem.departures(j))
        costs = {
            b: c + sum(table[backend[i]][b] for i, table in near)
            for b, c in problem.options[j].items()
        }
        before, best = backend[j], min(costs, key=costs.__getitem__)
        if costs[best] < costs[before]:
            backend[j] = best
        return backend[j] != before

    starts = _plain_backends(problem)
    for backend in starts:
        for _ in range(_SWEEPS):
            if not sum(gains(backend, j) for j in problem.order):
                break
    return min(starts, key=total)


def _improved(problem: _Problem, used: set[int], lowest: float) -> Placement:
    best = _insert(problem, problem.by_rank(spread=0.0))
    if len(used) == 1:
        (b,) = used
        costs = [of[b] for of in problem.options]
        other = _list_schedule(problem.dag, costs, problem.workers[b], b)
    else:
        other = _insert(problem, problem.by_rank(spread=1.0))
    best = min(best, other, key=_makespan)
    if best.makespan <= lowest * (1 + _CLOSE):
        return best
    mirror = problem.mirrored()
    for _ in range(_ROUNDS):
        backward = _insert(mirror, _by_time(problem.order, best, from_end=True))
        again = _insert(problem, _by_time(mirror.order, backward, from_end=True))
        gain = best.makespan - again.makespan
        best = min(best, again, key=_makespan)
        if gain < lowest * _CLOSE:
            break
    return best


def _makespan(placement: Placement) -> float:
    return placement.makespan


def _by_time(order: Sequence[int], placement: Placement, from_end: bool = False) -> list[int]:
    """The nodes by when they start, or from the end by when they finish.

    If ``order`` is a topological order then so is the result, from the end of the mirrored graph.
    """
    keys = list(zip(placement.start, placement.finish, strict=True))
    if from_end:
        return sorted(reversed(order), key=lambda i: (-keys[i][1], -keys[i][0]))
    return sorted(order, key=keys.__getitem__)


# Scheduling


class _Idle:
    """When a worker is idle: in gaps between nodes, and from ``end`` on.

    Gaps are (end, begin), sorted, in blocks that know their last end and the length of their
    longest gap, so that a search passes by many gaps that are too short at once. Those shorter
    than anything that can come are not kept.
    """

    __slots__ = ("blocks", "end", "ends", "longest", "shortest")

    def __init__(self, shortest: float) -> None:
        self.shortest = shortest
        self.end = 0.0
        self.blocks: list[list[tuple[float, float]]] = []
        self.ends: list[float] = []
        self.longest: list[float] = []

    def find(self, ready: float, cost: float) -> tuple[float, float, int, int]:
        """The first start, not before ``ready``; idle since; block and gap, or -1 for no gap."""
        need = ready + cost
        if self.ends and need <= self.ends[-1]:
            for k in range(bisect_left(self.ends, need), len(self.blocks)):
                if self.longest[k] >= cost:
                    block = self.blocks[k]
                    for at in range(bisect_left(block, (need,)), len(block)):
                        end, begin = block[at]
                        if max(begin, ready) + cost <= end:
                            return max(begin, ready), begin, k, at
        return max(self.end, ready), self.end, -1, -1

    def take(self, start: float, finish: float, k: int, at: int) -> None:
        """The time from ``start`` to ``finish``, in the gap that ``find`` found."""
        if k < 0:
            gaps = [(start, self.end)]
            self.end = finish
            if not self.blocks:
                self.blocks, self.ends, self.longest = [[]], [0.0], [0.0]
            k, at = len(self.blocks) - 1, len(self.blocks[-1])
        else:
            end, begin = self.blocks[k][at]
            gaps = [(start, begin), (end, finish)]
        kept = [(end, begin) for end, begin in gaps if end - begin >= self.shortest]
        block = self.blocks[k]
        if not kept and at == len(block):
            return
        block[at : at + 1] = kept
        size = len(block) if len(block) <= 2 * _BLOCK else _BLOCK
        parts = [block[m : m + size] for m in range(0, len(block), max(size, 1))]
        self.blocks[k : k + 1] = parts
        self.ends[k : k + 1] = [part[-1][0] for part in parts]
        self.longest[k : k + 1] = [max([end - begin for end, begin in part]) for part in parts]


def _insert(problem: _Problem, order: Iterable[int]) -> Placement:
    """Each node in turn where it finishes first, in a gap if it fits in one."""
    n, width = problem.dag.n, range(len(problem.workers))
    backend, worker, start, finish = [0] * n, [0] * n, [0.0] * n, [0.0] * n
    shortest = [min((of[b] for of in problem.options if b in of), default=0.0) for b in width]
    idle = [[_Idle(shortest[b]) for _ in range(problem.workers[b])] for b in width]
    for j in order:
        ready = max([finish[i] for i in problem.dag.pred[j]], default=0.0)
        earliest = (inf, 0.0)
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
    return _placement(backend, worker, start, finish)


def _list_schedule(dag: Dag, cost: Sequence[float], workers: int, backend: int) -> Placement:
    """On workers that are all alike, whatever is ready as soon as one is idle, by rank."""
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
    return _placement([backend] * dag.n, worker, start, finish)


def _placement(
    backend: Sequence[int], worker: Sequence[int], start: Sequence[float], finish: Sequence[float]
) -> Placement:
    makespan = max(finish, default=0.0)
    return Placement(tuple(backend), tuple(worker), tuple(start), tuple(finish), makespan)


def _replay(dag: Dag, cost: Costs, placement: Placement, transfer: Transfer | None) -> Placement:
    """``placement`` with each node as early as can be in the order in which its worker has it."""
    backend = placement.backend
    following = [*pairwise(())]
    for line in timelines(dag, placement).values():
        following += pairwise(line)
    after = dict(following)
    waiting = [len(before) for before in dag.pred]
    for j in after.values():
        waiting[j] += 1
    start, finish = [0.0] * dag.n, [0.0] * dag.n
    ready = [i for i, count in enumerate(waiting) if not count]
    for i in ready:
        b = backend[i]
        own = cost[i][b] if 0 <= b < len(cost[i]) else None
        if own is None:
            raise ValueError(f"node {i} is placed on backend {b}, which does not support it")
        finish[i] = start[i] + own
        ...
    return _placement(backend, placement.worker, start, finish)
