"""Placement of nodes on backends and their workers, and bounds on the makespan.

``place`` chooses backends, workers and times, ``list_schedule`` workers and times where all workers
are alike, and ``bound`` is a lower bound on any makespan. ``place_serial`` places nodes that run
one at a time, where only the sum of costs and transfers counts.

Costs and transfers share a unit of time. A node runs on one worker of one backend from start to
finish, and a worker runs one node at a time. Workers of one backend are alike. A transfer delays
the node that waits for it, occupies no worker, and belongs to one edge.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from heapq import heappop, heappush
from math import dist, fsum, inf, sqrt
from operator import attrgetter

from penstock.algorithms.dag import Dag
from penstock.algorithms.min_sum import Series
from penstock.algorithms.ordering import critical_path, ranks, topological_order
from penstock.core.checkpoints import with_checkpoints
from penstock.core.records import dataclass, replace

# cost[i][b]: the time of node i on backend b; None where b does not support it.
Costs = Sequence[Sequence[float | None]]
# transfer(i, j, b1, b2): the time of the edge i -> j when i is placed on b1 and j on b2.
Transfer = Callable[[int, int, int, int], float]
# transfer(i, b1, b2): the time to copy the results of node i from backend b1 to b2, once for all
# readers there.
Delivery = Callable[[int, int, int], float]

# Rounds of scheduling backward and forward end when one gains less than this fraction of the bound,
# when the bound is this close, or after _ROUNDS. Few graphs gain from a second round.
_CLOSE = 1e-3
_ROUNDS = 2

# Rounds over all nodes in search of cheaper backends.
_SWEEPS = 4

# Gaps in a block; a block of more than twice this number is split.
_BLOCK = 64


@dataclass(frozen=True, slots=True)
class WorkerSchedule:
    """Node i runs on ``worker[i]`` of ``backend[i]`` from ``start[i]`` to ``finish[i]``. Workers
    are counted within their backend, from 0, and times from the start of the run."""

    backend: tuple[int, ...]
    worker: tuple[int, ...]
    start: tuple[float, ...]
    finish: tuple[float, ...]

    @property
    def makespan(self) -> float:
        """The last finish; 0.0 for an empty graph."""
        return max(self.finish, default=0.0)


def place(
    dag: Dag, cost: Costs, transfer: Transfer | None = None, workers: Sequence[int] | None = None
) -> WorkerSchedule:
    """A backend, a worker and times for every node, such that the makespan is low; deterministic.

    ``cost[i][b]`` is the time of node i on backend b, or None if b does not support it.
    ``transfer(i, j, b1, b2)`` is the time of the edge i -> j from backend b1 to another backend b2;
    within a backend, or without ``transfer``, an edge takes no time. ``workers[b]`` is the number
    of workers of backend b, by default 1.

    Uses Heterogeneous Earliest Finish Time (Topcuoglu, Hariri and Wu 2002, "Performance-effective
    and low-complexity task scheduling for heterogeneous computing"): nodes by descending upward
    rank (their mean cost, plus the largest sum of mean transfer and rank of a successor), each on
    the worker where it finishes first, in an idle gap if it fits.

    Returns the best of several such schedules: on all backends, on each backend that supports all
    nodes, on the cheapest backend of each node, and on those of least total cost and transfer that
    a local search finds. So it is never worse than one node at a time on any of these. Each is also
    tried with nodes whose costs differ much between backends made more urgent (as in onert) or, on
    one backend, with list scheduling; and it is scheduled backward and forward again (Li and Willis
    1992, "An iterative scheduling technique for resource-constrained project scheduling"). On
    random graphs, one backend and 2 to 8 workers, the makespan is 1.02 times ``bound`` on average.
    Time is nearly linear in nodes and edges, times workers.

    Raises:
        ValueError: no backend supports a node; ``cost`` does not have a row per node, with an entry
            per backend; a cost or a transfer is negative or not finite; ``workers`` does not have
            an entry per backend, each at least 1.
    """
    best: WorkerSchedule | None = None
    for variant in _variants(_problem(dag, cost, transfer, workers)):
        best = _improved(variant, best)
    assert best is not None
    return best


def bound(dag: Dag, cost: Sequence[float], workers: int = 1) -> float:
    """A lower bound on the makespan of nodes that take ``cost[i]`` on any of all ``workers``:
    max(critical path, total cost / workers). Transfers do not count. Errors as for ``ranks``.
    """
    return max(critical_path(dag, cost), fsum(cost) / max(workers, 1))


def list_schedule(
    dag: Dag, cost: Sequence[float], workers: Sequence[int], backend: Sequence[int] | None = None
) -> WorkerSchedule:
    """A schedule of nodes whose backends are known, by default 0: a worker that is idle runs the
    ready node of its backend with the longest chain of nodes behind it (list scheduling, Graham
    1966). ``workers[b]`` is the number of workers of backend b. Errors as for ``ranks``.
    """
    on = [0] * dag.n if backend is None else backend
    rank = [-(a + b) for a, b in zip(cost, ranks(dag, cost), strict=True)]
    waiting = [len(before) for before in dag.pred]
    ready: list[list[tuple[float, int]]] = [[] for _ in workers]
    for i, count in enumerate(waiting):
        if not count:
            heappush(ready[on[i]], (rank[i], i))
    idle = [list(range(min(count, dag.n))) for count in workers]
    busy: list[tuple[float, int]] = []
    worker, start, finish = [0] * dag.n, [0.0] * dag.n, [0.0] * dag.n
    now = 0.0
    free: Iterable[int] = range(len(workers))  # the backends with new nodes or new idle workers
    while True:
        for b in free:
            while ready[b] and idle[b]:
                i = heappop(ready[b])[1]
                worker[i], start[i], finish[i] = heappop(idle[b]), now, now + cost[i]
                heappush(busy, (finish[i], i))
        if not busy:
            break
        now, free = busy[0][0], set()
        while busy and busy[0][0] == now:
            i = heappop(busy)[1]
            heappush(idle[on[i]], worker[i])
            free.add(on[i])
            for j in dag.succ[i]:
                waiting[j] -= 1
                if not waiting[j]:
                    heappush(ready[on[j]], (rank[j], j))
                    free.add(on[j])
    return WorkerSchedule(tuple(on), tuple(worker), tuple(start), tuple(finish))


def place_serial(dag: Dag, cost: Costs, transfer: Delivery | None = None) -> tuple[int, ...]:
    """A backend for every node, such that running one node at a time is fast; deterministic.

    ``transfer(i, b1, b2)`` is the time to copy the results of node i from backend b1 to another
    backend b2, paid once for each b2 on which successors run. ``cost`` and errors as for ``place``.

    Never worse than the best backend that supports all nodes, nor than the cheapest of each node.
    The least there is for chains and, with up to 5 backends, for trees; with two or three, where
    branches part and join again; with two, for all graphs of up to 4096 nodes (``min_sum``). Else
    the nodes on each two backends are placed anew, as well as can be, until little is gained by it
    (swaps: Boykov, Veksler and Zabih 2001, "Fast approximate energy minimization via graph cuts"),
    in large graphs region by region, so that time is nearly linear in nodes and edges.
    """
    options = _options(dag, cost)
    costs: list[dict[tuple[int, int], float]] = [{} for _ in options]
    if transfer:
        for i, after in enumerate(dag.succ):
            targets = sorted({b for j in after for b in options[j]})
            pairs = [(a, b) for a in options[i] for b in targets if a != b]
            costs[i] = {(a, b): transfer(i, a, b) for a, b in pairs}
            _expect_times(costs[i], f"the results of node {i}")
    return tuple(Series(dag, options, costs).best())


# Time of an edge: table[b1][b2], from backend b1 to backend b2.
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
        """The same problem with time reversed."""
        dag, order = Dag(self.dag.n, ((b, a) for a, b in self.dag.edges)), self.order[::-1]
        return replace(self, dag=dag, order=order, arriving=self.leaving, leaving=self.arriving)

    def arrivals(self, j: int) -> Iterable[tuple[int, _Table]]:
        return zip(self.dag.pred[j], self.arriving[j], strict=True) if self.arriving else ()

    def departures(self, i: int) -> Iterable[tuple[int, _Table]]:
        return zip(self.dag.succ[i], self.leaving[i], strict=True) if self.leaving else ()

    def by_rank(self, spread: float) -> list[int]:
        """The nodes by upward rank, with ``spread`` standard deviations added to mean costs."""
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
        # Rounding errors must not decide between equal ranks: the lower node is first.
        return topological_order(self.dag, [float(f"{r:.12g}") for r in rank])


def _problem(
    dag: Dag, cost: Costs, transfer: Transfer | None, workers: Sequence[int] | None
) -> _Problem:
    options = _options(dag, cost)
    width = len(cost[0]) if dag.n else 0
    workers = [1] * width if workers is None else workers
    if dag.n and len(workers) != width:
        raise ValueError(f"workers has {len(workers)} entries for {width} backends")
    if min(workers, default=1) < 1:
        raise ValueError(f"{min(workers)} workers cannot run anything")
    problem = _Problem(dag, topological_order(dag), options, workers)
    if transfer is None or width < 2:
        return problem
    arriving: list[list[_Table]] = [[] for _ in range(dag.n)]
    leaving: list[list[_Table]] = [[] for _ in range(dag.n)]
    for i, j in dag.edges:
        table = [[0.0] * width for _ in range(width)]
        times = {(a, b): transfer(i, j, a, b) for a in options[i] for b in options[j] if a != b}
        _expect_times(times, f"the edge {i} -> {j}")
        for (a, b), time in times.items():
            table[a][b] = time
        arriving[j].append(tuple(map(tuple, table)))
        leaving[i].append(tuple(zip(*table, strict=True)))
    return replace(problem, arriving=arriving, leaving=leaving)


def _options(dag: Dag, cost: Costs) -> list[dict[int, float]]:
    """The backends of each node and their costs, checked."""
    if len(cost) != dag.n:
        raise ValueError(f"cost has {len(cost)} rows for {dag.n} nodes")
    options = []
    for i, row in enumerate(cost):
        if len(row) != len(cost[0]):
            raise ValueError(f"node {i} has {len(row)} costs, but node 0 has {len(cost[0])}")
        costs = {b: float(c) for b, c in enumerate(row) if c is not None}
        if not costs:
            raise ValueError(f"no backend supports node {i}")
        if not all(0 <= c < inf for c in costs.values()):
            own = [c for c in row if c is not None]
            raise ValueError(f"node {i} has costs {own}; they must be finite and not negative")
        options.append(costs)
    return options


def _expect_times(times: Mapping[tuple[int, int], float], moved: str) -> None:
    for (a, b), time in times.items():
        if not 0 <= time < inf:
            raise ValueError(f"{moved} cannot take {time} from backend {a} to {b}")


def _variants(problem: _Problem) -> Iterator[_Problem]:
    """``problem``, and promising variants of it with one backend for each node."""
    yield problem
    if any(len(costs) > 1 for costs in problem.options):
        common = set(range(len(problem.workers))).intersection(*problem.options)
        plans = [[min(costs, key=costs.__getitem__) for costs in problem.options]]
        plans += [[b] * problem.dag.n for b in sorted(common)]
        plans += [_near(problem, plan) for plan in plans]
        # Plans are often equal, and each takes a schedule of all nodes.
        for plan in dict.fromkeys(map(tuple, plans)):
            chosen = zip(problem.options, plan, strict=True)
            yield replace(problem, options=[{b: costs[b]} for costs, b in chosen])


def _near(problem: _Problem, plan: Sequence[int]) -> list[int]:
    """``plan`` after moving nodes to backends where cost and adjacent transfers are less. Iterated
    conditional modes (Besag 1986): the sum of all costs and transfers never grows."""
    backend = list(plan)
    for _ in range(_SWEEPS if problem.arriving else 0):
        before = backend[:]
        for j in with_checkpoints(problem.order):
            around = (*problem.arrivals(j), *problem.departures(j))
            costs = {
                b: c + sum(table[backend[i]][b] for i, table in around)
                for b, c in problem.options[j].items()
            }
            backend[j] = min(costs, key=costs.__getitem__)
        if backend == before:
            break
    return backend


def _improved(problem: _Problem, rival: WorkerSchedule | None) -> WorkerSchedule:
    used = {b for costs in problem.options for b in costs}
    least = [min(costs.values()) for costs in problem.options]
    lowest = bound(problem.dag, least, sum(problem.workers[b] for b in used))
    if rival and rival.makespan <= lowest:
        return rival
    best = _insert(problem, problem.by_rank(spread=0.0))
    if len(used) == 1:
        (b,) = used
        best = _shortest(best, list_schedule(problem.dag, least, problem.workers, [b] * len(least)))
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


def _shortest(*placements: WorkerSchedule | None) -> WorkerSchedule:
    return min(filter(None, placements), key=attrgetter("makespan"))


def _by_time(order: Sequence[int], placement: WorkerSchedule) -> list[int]:
    """The nodes by finish time: a topological order, if ``order`` is one."""
    start, finish = placement.start, placement.finish
    return sorted(order, key=lambda i: (finish[i], start[i]))


class _Idle:
    """The idle time of a worker: gaps between nodes, each (end, begin), and all from ``end`` on.
    Each block of gaps stores its last end and its longest gap, so that a search skips blocks of
    gaps that are too short. Gaps shorter than every possible node are dropped."""

    __slots__ = ("blocks", "end", "ends", "longest", "shortest")

    def __init__(self, shortest: float) -> None:
        self.shortest, self.end = shortest, 0.0
        self.blocks: list[list[tuple[float, float]]] = [[]]
        self.ends, self.longest = [0.0], [0.0]

    def find(self, ready: float, cost: float) -> tuple[float, float, int, int]:
        """The earliest start from ``ready`` on; idle since; block and gap, -1 if after all gaps."""
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
        """Occupy the worker from ``start`` to ``finish``; block and gap are those of ``find``."""
        if k < 0:
            gaps, self.end = [(start, self.end)], finish
            k, at = len(self.blocks) - 1, len(self.blocks[-1])
        else:
            end, begin = self.blocks[k][at]
            gaps = [(start, begin), (end, finish)]
        block = self.blocks[k]
        # No node fits into the others: searches would only pass them.
        kept = [gap for gap in gaps if gap[0] - gap[1] >= self.shortest]
        if kept or at < len(block):
            block[at : at + 1] = kept
            parts = [block[:_BLOCK], block[_BLOCK:]] if len(block) > 2 * _BLOCK else [block]
            self.blocks[k : k + 1] = parts
            self.ends[k : k + 1] = [part[-1][0] if part else self.ends[k] for part in parts]
            self.longest[k : k + 1] = [max([e - b for e, b in part], default=0.0) for part in parts]


def _insert(problem: _Problem, order: Iterable[int]) -> WorkerSchedule:
    """Place each node in turn where it finishes first, in a gap if it fits in one."""
    n, width = problem.dag.n, range(len(problem.workers))
    backend, worker, start, finish = [0] * n, [0] * n, [0.0] * n, [0.0] * n
    shortest = [min([of[b] for of in problem.options if b in of], default=0.0) for b in width]
    idle = [[_Idle(shortest[b]) for _ in range(min(n, problem.workers[b]))] for b in width]
    for j in with_checkpoints(order):
        ready = max([finish[i] for i in problem.dag.pred[j]], default=0.0)
        best_slot: list[int] = []
        earliest = (inf, inf)
        for b, cost in problem.options[j].items():
            if problem.arriving:
                arrivals = problem.arrivals(j)
                ready = max([finish[i] + t[backend[i]][b] for i, t in arrivals], default=0.0)
            for w, gaps in enumerate(idle[b]):
                at, since, *gap = gaps.find(ready, cost)
                # Of equal finishes, that with the least idle time before it: longer gaps stay for
                # longer nodes.
                if (at + cost, -since) < earliest:
                    earliest = (at + cost, -since)
                    backend[j], worker[j], start[j], best_slot = b, w, at, gap
        finish[j] = earliest[0]
        idle[backend[j]][worker[j]].take(start[j], finish[j], *best_slot)
    return WorkerSchedule(tuple(backend), tuple(worker), tuple(start), tuple(finish))
