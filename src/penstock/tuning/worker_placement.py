"""Placement of the nodes of a graph on workers that have no memory in common.

Two placements are tried, and the better one is taken: that of HEFT, where each worker is a backend
of its own (``algorithms.heft``), and a pipeline of consecutive nodes
(``algorithms.pipeline_cuts``). Which is better is decided by a simulation (``simulated``)::

    load of a worker      its nodes, and the time to send and receive values
    throughput            runs per second of many in flight: 1 / the largest load
    latency               the makespan of one run, from the feeds to the outputs

A value goes once to each worker that reads it, as ``partition`` has it. Feeds come from the driver,
and outputs go there.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from heapq import heappop, heappush
from itertools import count
from typing import TYPE_CHECKING, Any, Protocol

from penstock.algorithms.dag import Dag
from penstock.algorithms.heft import place
from penstock.algorithms.ordering import critical_path
from penstock.algorithms.pipeline_cuts import pipeline_cuts
from penstock.core.limits import Limits
from penstock.core.records import dataclass
from penstock.core.types import TensorType
from penstock.executors.base import Executor
from penstock.ir.graph import Graph, GraphPart, Model, Node, Value, all_reads, dependencies

if TYPE_CHECKING:
    from penstock.tuning.profile_costs import ProfileCosts

OBJECTIVES = ("throughput", "latency")

# A placement on more workers must be better by this fraction.
_GAIN = 0.02
# HEFT is given this many times the workers that could be busy all the time.
_SPARE = 2

DRIVER = -1
"""stands for the process that feeds runs, where workers have numbers"""


@dataclass(frozen=True, slots=True)
class LinkCost:
    """Cost of a message between workers: ``latency`` seconds, plus its bytes over ``bandwidth`` in
    bytes per second."""

    bandwidth: float
    latency: float

    def seconds(self, nbytes: int) -> float:
        return self.latency + nbytes / self.bandwidth


class WorkerPool(Protocol):
    """Interface of a cluster (``penstock.Cluster``) to the compiler. ``costs``: measured costs of
    nodes by name, before those of the table of costs. ``cores``: the number that all workers and
    the driver share; None if each has its own."""

    workers: int
    objective: str
    devices: tuple[str, ...]
    costs: ProfileCosts | None
    cores: int | None

    @property
    def link_cost(self) -> LinkCost:
        """The cost of messages between workers."""

    def executor(self, parts: Sequence[GraphPart], graph: Graph, context: Any) -> Executor:
        """Register the parts of a graph with the workers that they name."""

    def variables(self, model: Model, own: dict[Any, Any], limits: Limits) -> Any:
        """The variables of a session, whose stores are its ``own``, by those of the model."""


@dataclass(frozen=True, slots=True)
class ClusterForecast:
    """A run of a graph on workers, simulated. ``makespan``: seconds of one run; ``loads``: the
    seconds that each worker is busy with one run, the largest of which bounds the throughput;
    ``computing``: those of them that its nodes take; ``nodes``: their number; ``traffic``: the
    bytes between each two workers, of which ``DRIVER`` is the process that feeds the run;
    ``driving``: the seconds that this is busy with messages; ``cores``: those that all workers and
    the driver share, or None."""

    makespan: float
    loads: tuple[float, ...]
    computing: tuple[float, ...]
    nodes: tuple[int, ...]
    traffic: Mapping[tuple[int, int], int]
    driving: float = 0.0
    cores: int | None = None

    @property
    def bottleneck(self) -> int:
        """The worker with the largest load."""
        return max(range(len(self.loads)), key=self.loads.__getitem__)

    @property
    def interval(self) -> float:
        """Seconds between the ends of two runs, if many are in flight."""
        return max(self.shared, max(self.loads, default=0.0))

    @property
    def shared(self) -> float:
        """Seconds that a run takes of each of the cores that workers share."""
        return (sum(self.loads) + self.driving) / self.cores if self.cores else 0.0

    @property
    def used(self) -> int:
        """The number of workers that have something to do."""
        return sum(load > 0 for load in self.loads)

    @property
    def utilization(self) -> float:
        """The part of their time that the workers which are used are busy, if many runs are in
        flight."""
        return sum(self.loads) / (self.used * self.interval) if self.used else 0.0


class WorkerPlacement:
    """Places the nodes of a sorted ``graph`` without frames on as many ``workers``; ``seconds`` is
    the cost of a node, ``link`` that of a message, ``pins`` has the workers that are given; all
    workers share ``cores``, or each has its own."""

    def __init__(
        self,
        graph: Graph,
        workers: int,
        seconds: Callable[[Node], float],
        link: LinkCost,
        pins: Mapping[Node, int],
        cores: int | None = None,
    ) -> None:
        self.graph = graph
        self.workers = workers
        self.cores = cores
        self.link = link
        self._pins = pins
        self.cost = [seconds(node) for node in graph.nodes]
        *_, (_, edges) = dependencies(graph)
        self.dag = Dag(len(graph.nodes), edges)
        index = {node: i for i, node in enumerate(graph.nodes)}
        # The values that a node reads of another one, by their producers; the feeds that it reads.
        self.reads: list[dict[int, list[Value]]] = [{} for _ in graph.nodes]
        self.feeds: list[list[Value]] = [[] for _ in graph.nodes]
        inputs = {*graph.inputs}
        for j, node in enumerate(graph.nodes):
            for value in dict.fromkeys(all_reads(node)):
                if value.producer in index:
                    self.reads[j].setdefault(index[value.producer], []).append(value)
                elif value in inputs:
                    self.feeds[j].append(value)
        self.outputs: dict[int, list[Value]] = {}
        for value in dict.fromkeys(graph.outputs):
            if value.producer in index:
                self.outputs.setdefault(index[value.producer], []).append(value)

    def best(self, objective: str) -> list[int]:
        """The worker of each node, for the least ``"latency"`` or the highest ``"throughput"``."""
        chosen: list[int] | None = None
        least: Any = None
        for workers in self._candidates():
            simulated = self.simulated(workers)
            score = simulated.makespan if objective == "latency" else simulated.interval
            if least is None or score < least * (1 - _GAIN):
                chosen, least = workers, score
        assert chosen is not None
        return chosen

    def _candidates(self) -> list[list[int]]:
        """Placements: all on one worker, a pipeline, that of HEFT."""
        nodes = self.graph.nodes
        pinned = {self._pins[node] for node in nodes if node in self._pins}
        workers = self._useful_workers(pinned)
        candidates = []
        if len(pinned) <= 1:
            candidates.append([next(iter(pinned), 0)] * len(nodes))
        if not pinned:
            candidates.append(self._pipeline())
        rows: list[list[float | None]] = []
        for node, cost in zip(nodes, self.cost, strict=True):
            pin = self._pins.get(node)
            rows.append([cost if pin in (None, w) else None for w in range(workers)])
        candidates.append(list(place(self.dag, rows, self._transfer).backend) if nodes else [])
        return candidates

    def _useful_workers(self, pinned: Collection[int]) -> int:
        """Return how many workers HEFT can use: any more would always be idle, or wait for a core
        that another one has."""
        if not self.graph.nodes:
            return 1
        longest = critical_path(self.dag, self.cost)
        busy = math.ceil(_SPARE * math.fsum(self.cost) / longest) if longest else 1
        return min(self.workers, max([min(busy, self._most), *[w + 1 for w in pinned]]))

    @property
    def _most(self) -> int:
        """The workers that can compute at once."""
        return min(self.workers, self.cores or self.workers)

    def _transfer(self, i: int, j: int, source: int, target: int) -> float:
        return self.link.seconds(sum(map(_nbytes, self.reads[j].get(i, ()))))

    def _pipeline(self) -> list[int]:
        """Consecutive nodes on each worker."""
        n = len(self.graph.nodes)
        last = list(range(n))  # the last reader of each node's values
        for i, after in enumerate(self.dag.succ):
            last[i] = max((i, *after))
        crossing = [0.0] * (n + 2)
        read = {value for reads in self.reads for values in reads.values() for value in values}
        for i, node in enumerate(self.graph.nodes):
            values = [v for v in node.outputs if v is not None and v in read]
            seconds = self.link.seconds(sum(map(_nbytes, values))) if values else 0.0
            if last[i] > i:
                crossing[i + 1] += seconds
                crossing[last[i] + 1] -= seconds
        for i in range(1, n):
            crossing[i] += crossing[i - 1]
        cuts = pipeline_cuts(self.cost, crossing[:n], self._most)
        return _stages(cuts, n)

    def simulated(self, workers: Sequence[int]) -> ClusterForecast:
        """One run with each node on the worker that is given: a worker that is idle runs the first
        node, in the order of the graph, whose values have come. All feeds of a worker come at once,
        and what a node gives leaves when it has ended; a link has room for all that it is given."""
        return _Simulation(self, workers).run()


class _Simulation:
    """A run of a graph, from event to event: nodes get values, or a node ends. ``ready``: the nodes
    of each worker whose values have come; ``waiting``: the workers that wait for a core."""

    def __init__(self, placement: WorkerPlacement, workers: Sequence[int]) -> None:
        self.of = placement
        self.workers = workers
        self.loads = [0.0] * placement.workers
        self.computing = [0.0] * placement.workers
        self.traffic: dict[tuple[int, int], int] = {}
        self.readers: list[dict[int, list[int]]] = [{} for _ in workers]  # by worker
        self.missing = [0] * len(workers)
        self.ready: list[list[int]] = [[] for _ in self.loads]
        self.idle = [True] * placement.workers
        self.free = placement.cores or placement.workers  # cores
        self.waiting: set[int] = set()
        self.events: list[tuple[float, int, Sequence[int], int | None]] = []
        self.number = count()
        self.makespan = self.driving = 0.0

    def run(self) -> ClusterForecast:
        self.begin()
        while self.events:
            now = self.events[0][0]
            touched: set[int] = set() if now else {*self.workers}
            while self.events and self.events[0][0] == now:
                _, _, given, ended = heappop(self.events)
                if ended is not None:
                    touched |= {self.workers[ended], *self.waiting}
                    self.waiting.clear()
                    given = self.end(ended, now)
                touched |= self.give(given)
            # They take cores in this order: equal placements are to have equal forecasts.
            for worker in sorted(touched):
                self.start(worker, now)
        nodes = Counter(self.workers)
        return ClusterForecast(
            self.makespan,
            tuple(self.loads),
            tuple(self.computing),
            tuple([nodes[worker] for worker in range(len(self.loads))]),
            self.traffic,
            self.driving,
            self.of.cores,
        )

    def begin(self) -> None:
        """Send the feeds, and find the nodes that wait for nothing."""
        fed: dict[int, list[int]] = {}
        for j, worker in enumerate(self.workers):
            before, feeds = self.of.dag.pred[j], self.of.feeds[j]
            self.missing[j] = len(before) + bool(feeds)
            if feeds:
                fed.setdefault(worker, []).append(j)
            elif not before:
                heappush(self.ready[worker], j)
            for i in before:
                self.readers[i].setdefault(worker, []).append(j)
        for worker, nodes in fed.items():
            values = dict.fromkeys(value for j in nodes for value in self.of.feeds[j])
            self.later(self.sent(DRIVER, worker, values), nodes)
        self.later(0.0, [])

    def later(self, when: float, nodes: Sequence[int], ended: int | None = None) -> None:
        """Nodes get one of the values that they wait for; or a node ends."""
        # The number keeps events of one moment in the order in which they were made.
        heappush(self.events, (when, next(self.number), nodes, ended))

    def sent(self, source: int, target: int, values: Collection[Value]) -> float:
        """The seconds that values take from one worker to another, which both are busy for."""
        nbytes = sum(map(_nbytes, values))
        seconds = self.of.link.seconds(nbytes)
        for worker in (source, target):
            if worker == DRIVER:
                self.driving += seconds
            else:
                self.loads[worker] += seconds
        self.traffic[source, target] = self.traffic.get((source, target), 0) + nbytes
        return seconds

    def start(self, worker: int, now: float) -> None:
        """Let a worker run its next node, if it is idle and there is one, as soon as a core is."""
        if self.idle[worker] and self.ready[worker]:
            if not self.free:
                self.waiting.add(worker)
                return
            self.free -= 1
            j = heappop(self.ready[worker])
            seconds = self.of.cost[j]
            self.idle[worker] = False
            self.loads[worker] += seconds
            self.computing[worker] += seconds
            self.later(now + seconds, [], j)

    def end(self, node: int, now: float) -> Sequence[int]:
        """Send what a node has given; returns its readers on the same worker."""
        own = self.workers[node]
        self.idle[own] = True
        self.free += 1
        for target, readers in self.readers[node].items():
            if target != own:
                reads = [v for j in readers for v in self.of.reads[j].get(node, ())]
                self.later(now + self.sent(own, target, dict.fromkeys(reads)), readers)
        outputs = self.of.outputs.get(node)
        seconds = self.sent(own, DRIVER, outputs) if outputs else 0.0
        self.makespan = max(self.makespan, now + seconds)
        return self.readers[node].get(own, ())

    def give(self, nodes: Sequence[int]) -> set[int]:
        """Give nodes a value that they wait for; returns the workers of those that are ready."""
        for j in nodes:
            self.missing[j] -= 1
        whole = [j for j in nodes if not self.missing[j]]
        for j in whole:
            heappush(self.ready[self.workers[j]], j)
        return {self.workers[j] for j in whole}


def _stages(cuts: Sequence[int], n: int) -> list[int]:
    """The stage of each of n nodes."""
    stages, stage = [], 0
    for i in range(n):
        if stage < len(cuts) and cuts[stage] == i:
            stage += 1
        stages.append(stage)
    return stages


def _nbytes(value: Value) -> int:
    """The bytes of a value, as far as they are known."""
    type_ = value.type
    return type_.nbytes if isinstance(type_, TensorType) and type_.static else 0
