r"""Static multi-stream schedules: the stream of each node, and the signals between streams.

A stream is a queue whose nodes run in order. A stream emits a signal when it reaches it, and other
streams can wait for that, as for a CUDA event. ``assign_streams`` puts independent nodes on
different streams, with as few signals as keep every node behind those it depends on::

    0 -> 1 -> 3      stream 0:  0 !a  1  ?b 3
    0 -> 2 -> 3      stream 1:  ?a 2 !b           (!a emits signal a, ?a waits for it)

The method is that of NNC (libnnc), "Static Schedule A Graph". Two things are stricter than there:
streams are never more than the width of the graph, which following the longest chains alone does
not ensure, and a node on several devices that follows one on fewer is behind it on all of them.

A node with several devices has a part on one stream of each. All its parts wait for all signals
that the node waits for; otherwise parts start and end independently. A node whose streams are all
among those of its predecessor follows it there, part by part, and waits for nothing. Otherwise each
of its parts follows all parts of the predecessor.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import chain

from penstock.algorithms.chains import ChainEnds, fewest_chains, implied_edges, transitive_reduction
from penstock.algorithms.dag import Dag
from penstock.algorithms.ordering import ranks, topological_order

_NONE = -1


@dataclass(frozen=True, slots=True)
class StreamSchedule:
    """Which streams each node runs on, and the signals between them.

    ``order`` is a topological order of the nodes. ``streams[i]`` are the streams of node i,
    parallel to its devices, ``waits[i]`` the signals that each of these waits for before the node,
    and ``emits[i]`` the signals emitted after it, each by ``stream_of[signal]``; both ascend. A
    node that is not scheduled is not in ``order``, and has none of these. A stream runs its nodes
    in ``order``, on device ``device_of[stream]``.

    The streams ``begin`` start when stream 0 does: that takes one more signal, which is not
    counted. All others begin with a wait. At the end, stream 0 waits for the signals ``end``; then
    all nodes have ended.
    """

    order: list[int]
    streams: tuple[tuple[int, ...], ...]
    emits: tuple[tuple[int, ...], ...]
    waits: tuple[tuple[int, ...], ...]
    n_streams: int
    n_signals: int
    begin: tuple[int, ...]
    end: tuple[int, ...]
    device_of: tuple[int, ...]
    stream_of: tuple[int, ...]

    @property
    def programs(self) -> list[list[int]]:
        """The nodes of each stream, in their order."""
        programs: list[list[int]] = [[] for _ in self.device_of]
        for i in self.order:
            for s in self.streams[i]:
                programs[s].append(i)
        return programs


def assign_streams(
    dag: Dag,
    *,
    devices: Sequence[tuple[int, ...]] | None = None,
    commands: Sequence[Hashable] | None = None,
    cost: Sequence[float] | None = None,
    sources: Iterable[int] | None = None,
    destinations: Iterable[int] | None = None,
    max_streams: int = 0,
) -> StreamSchedule:
    """Assign the nodes of ``dag`` to streams, and the signals that they need; deterministic.

    ``devices[i]`` are the devices of node i, by default (0,): it runs on one stream of each. A node
    is followed on its stream by the successor with the longest chain of nodes behind it, where
    nodes count ``cost[i]`` (any unit), by default 1; of equal ones, by one whose ``commands[i]``
    the stream has run before. A node that follows none takes over a stream whose last node it
    depends on: one that has run the same command, else the first. (Of very many, only the nearest
    are searched.) None as a command equals no other.

    Only nodes on paths from ``sources`` to ``destinations`` are scheduled, both included; by
    default all nodes are.

    On each device, there are no more streams than nodes that can run at once in any order of the
    graph; nodes of one stream then depend on each other. ``max_streams``, if not 0, bounds the
    streams of all devices together, at least one for each. If it is less, independent nodes share
    streams: they are taken by the length of the chain that they begin, longest first, and one that
    neither follows another nor takes over a stream goes where it could start first.

    Nearly linear in nodes and edges for graphs with mostly local edges, for each device that is
    used; memory is linear.

    Raises:
        ValueError: ``devices``, ``commands`` or ``cost`` does not have one entry per node; a node
            has no device, or one twice; a cost is negative or not a number; ``sources`` or
            ``destinations`` names a node outside of the graph; ``max_streams`` is negative, or
            less than the devices that scheduled nodes use.
    """
    devices = [(0,)] * dag.n if devices is None else devices
    commands = [None] * dag.n if commands is None else commands
    cost = [1.0] * dag.n if cost is None else cost
    _expect(dag, devices=devices, commands=commands, cost=cost)
    _expect_devices(devices)
    _expect_costs(cost)
    nodes = _between(dag, sources, destinations)
    part = _part(dag, nodes)
    work = _Work(
        part,
        transitive_reduction(part),
        [devices[i] for i in nodes],
        [commands[i] for i in nodes],
        [cost[i] for i in nodes],
    )
    order, streams = _assigned(work, max_streams)
    return _scheduled(work, order, streams, nodes, dag.n)


def simulate_streams(
    dag: Dag, schedule: StreamSchedule, cost: Sequence[float], signal: float = 0.0
) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """The start and the end of each node, if node i takes ``cost[i]``.

    ``signal`` is the time of a wait after its signal was emitted, in the unit of ``cost``. A node
    on several streams starts and ends on all of them at once. Time starts when stream 0 begins, and
    the last end is when stream 0 begins to wait for ``schedule.end``. Nodes that are not scheduled
    have 0.0 for both.

    Raises:
        ValueError: ``cost`` does not have one entry per node, the schedule is of another graph, or
            a time is negative or not a number.
    """
    _expect(dag, cost=cost, schedule=schedule.streams)
    _expect_costs(cost)
    if not signal >= 0:
        raise ValueError(f"waiting for a signal cannot take {signal}")
    idle = [0.0] * schedule.n_streams
    for s in schedule.begin:
        idle[s] = float(signal)
    emitted = [0.0] * schedule.n_signals
    start, finish = [0.0] * dag.n, [0.0] * dag.n
    for i in schedule.order:
        waits = schedule.waits[i]
        free = [idle[s] for s in schedule.streams[i]]
        start[i] = max(free + [emitted[k] for k in waits]) + signal * len(waits)
        finish[i] = start[i] + cost[i]
        for s in schedule.streams[i]:
            idle[s] = finish[i]
        for k in schedule.emits[i]:
            emitted[k] = finish[i]
    return tuple(start), tuple(finish)


def _expect(dag: Dag, **arguments: Sequence[object]) -> None:
    for name, entries in arguments.items():
        if len(entries) != dag.n:
            raise ValueError(f"{name} has {len(entries)} entries for {dag.n} nodes")


def _expect_devices(devices: Sequence[tuple[int, ...]]) -> None:
    for i, own in enumerate(devices):
        if not own:
            raise ValueError(f"node {i} has no device")
        if len(own) > 1 and len(set(own)) < len(own):
            raise ValueError(f"node {i} has a device twice: {own}")


def _expect_costs(cost: Sequence[float]) -> None:
    for i, c in enumerate(cost):
        if not c >= 0:
            raise ValueError(f"node {i} cannot cost {c}")


# The part of the graph that is scheduled.


def _between(
    dag: Dag, sources: Iterable[int] | None, destinations: Iterable[int] | None
) -> list[int]:
    """The nodes on paths from ``sources`` to ``destinations``, ascending."""
    after = _reached(dag.succ, sources, "sources")
    before = _reached(dag.pred, destinations, "destinations")
    return [i for i in range(dag.n) if after[i] and before[i]]


def _reached(
    neighbours: Sequence[Sequence[int]], starts: Iterable[int] | None, name: str
) -> Sequence[int]:
    if starts is None:
        return [True] * len(neighbours)
    reached = bytearray(len(neighbours))
    queue = list(starts)
    for i in queue:
        if not 0 <= i < len(neighbours):
            raise ValueError(f"{name} has node {i}, but the graph has {len(neighbours)} nodes")
        reached[i] = True
    for i in queue:
        for j in neighbours[i]:
            if not reached[j]:
                reached[j] = True
                queue.append(j)
    return reached


def _part(dag: Dag, nodes: Sequence[int]) -> Dag:
    """The sub-graph of ``nodes``, numbered from 0 in their order."""
    if len(nodes) == dag.n:
        return dag
    number = {i: k for k, i in enumerate(nodes)}
    edges = ((number[i], number[j]) for i in nodes for j in dag.succ[i] if j in number)
    return Dag(len(nodes), edges)


def _chain_order(dag: Dag) -> list[int]:
    """A topological order in which a node's only successor follows it directly, if ready."""
    waiting = [len(before) for before in dag.pred]
    ready = [i for i, count in enumerate(waiting) if not count]
    order: list[int] = []
    for i in ready:
        order.append(i)
        while True:
            released = []
            for j in dag.succ[i]:
                waiting[j] -= 1
                if not waiting[j]:
                    released.append(j)
            if not released or len(dag.succ[i]) > 1:
                break
            (i,) = released
            order.append(i)
        ready += released
    return order


def _places(order: Sequence[int]) -> list[int]:
    place = [0] * len(order)
    for k, i in enumerate(order):
        place[i] = k
    return place


# Streams.


@dataclass(frozen=True, slots=True)
class _Work:
    """The problem, with the numbers of the scheduled sub-graph."""

    whole: Dag
    dag: Dag  # its transitive reduction
    devices: Sequence[tuple[int, ...]]
    commands: Sequence[Hashable]
    cost: Sequence[float]


def _assigned(work: _Work, max_streams: int) -> tuple[list[int], list[tuple[int, ...]]]:
    """An order of the nodes, and the streams of each node, numbered in the order of their begin."""
    used = list(dict.fromkeys(chain.from_iterable(work.devices)))
    if max_streams < 0 or 0 < max_streams < len(used):
        raise ValueError(f"max_streams is {max_streams}, for nodes on {len(used)} devices")
    order = _chain_order(work.dag)
    greedy = _Assignment(work, order, used)
    greedy.run()
    # A -> C, A -> D, B -> C: with C behind A, B and D would get streams of their own.
    streams = {d: fewest_chains(work.dag, order, device.stream) for d, device in greedy.on.items()}
    width = {d: max(stream, default=_NONE) + 1 for d, stream in streams.items()}
    if 0 < max_streams < sum(width.values()):
        order = topological_order(work.dag, greedy.urgency)
        shared = _SharedAssignment(work, order, used, width, max_streams)
        shared.run()
        streams = {d: device.stream for d, device in shared.on.items()}
    return order, _numbered(work, order, streams)


class _Device:
    """The streams of one device, and the stream of each of its nodes."""

    __slots__ = ("ends", "last", "ran", "stream")

    def __init__(self, n: int) -> None:
        self.stream = [_NONE] * n  # per node, its stream
        self.last: list[int] = []  # per stream, its last node
        self.ran: list[set[Hashable]] = []  # per stream, its commands
        self.ends = ChainEnds(n)

    def open(self) -> int:
        self.last.append(_NONE)
        self.ran.append(set())
        return len(self.last) - 1

    def end(self, s: int, i: int) -> None:
        """Stream s now ends at node i."""
        if self.last[s] != _NONE:
            self.ends.remove(self.last[s])
        self.ends.add(i, s)
        self.last[s] = i


class _Assignment:
    """Greedy assignment of streams, along an order of the nodes."""

    def __init__(self, work: _Work, order: Sequence[int], devices: Iterable[int]) -> None:
        self.work = work
        self.order = order
        self.place = _places(order)
        after = ranks(work.dag, work.cost)
        # The length of the longest chain that begins with each node.
        self.urgency = [a + b for a, b in zip(work.cost, after, strict=True)]
        self.on = {d: _Device(work.dag.n) for d in devices}

    def run(self) -> None:
        pred, devices = self.work.dag.pred, self.work.devices
        for i in self.order:
            for d in devices[i]:
                if self.on[d].stream[i] == _NONE:
                    self.walk(d, i, self.choose(d, i))
            for device in self.on.values():
                device.ends.enter(i, pred[i])
            self.placed(i)

    def choose(self, d: int, i: int) -> int:
        device, command = self.on[d], self.work.commands[i]
        free = device.ends.behind(self.work.dag.pred[i])
        if free:
            return min(free, key=lambda s: (command is None or command not in device.ran[s], s))
        return self.another(d, i)

    def another(self, d: int, i: int) -> int:
        """A stream for node i if it takes over none."""
        return self.on[d].open()

    def placed(self, i: int) -> None:
        """All streams of node i are known."""

    def walk(self, d: int, i: int, s: int) -> None:
        """Put node i on stream s of device d, followed by the longest unassigned path."""
        work, urgency = self.work, self.urgency
        device = self.on[d]
        stream, ran = device.stream, device.ran[s]
        while True:
            stream[i] = s
            if work.commands[i] is not None:
                ran.add(work.commands[i])
            following, best = _NONE, (-1.0, False)
            for j in work.dag.succ[i]:
                if stream[j] == _NONE and d in work.devices[j]:
                    value = (urgency[j], work.commands[j] in ran)
                    if value > best:
                        following, best = j, value
            if following == _NONE:
                break
            i = following
        last = device.last[s]
        if last == _NONE or self.place[i] > self.place[last]:
            device.end(s, i)


class _SharedAssignment(_Assignment):
    """Assignment to a bounded number of streams, which independent nodes share.

    A stream runs its nodes in ``order``. So for any assignment, no two streams can wait for each
    other.
    """

    def __init__(
        self,
        work: _Work,
        order: Sequence[int],
        devices: Iterable[int],
        width: dict[int, int],
        max_streams: int,
    ) -> None:
        super().__init__(work, order, devices)
        self.width = width
        self.left = max_streams - len(self.on)  # beyond one for each device
        self.finish = [0.0] * work.dag.n
        # Per device, the time from which each stream is idle, and a heap of (time, stream).
        self.idle: dict[int, list[float]] = {d: [] for d in self.on}
        self.soonest: dict[int, list[tuple[float, int]]] = {d: [] for d in self.on}
        self.latest: dict[tuple[int, Hashable], int] = {}  # the stream that last ran a command

    def another(self, d: int, i: int) -> int:
        idle, soonest = self.idle[d], self.soonest[d]
        if not idle or (self.left and len(idle) < self.width[d]):
            self.left -= bool(idle)
            idle.append(0.0)
            return self.on[d].open()
        while idle[soonest[0][1]] != soonest[0][0]:
            heappop(soonest)
        when, s = soonest[0]
        alike = self.latest.get((d, self.work.commands[i]))
        if alike is not None and idle[alike] <= max(when, self.ready(i)):
            return alike
        return s

    def ready(self, i: int) -> float:
        return max([self.finish[p] for p in self.work.dag.pred[i]], default=0.0)

    def placed(self, i: int) -> None:
        work = self.work
        own = [(d, self.on[d].stream[i]) for d in work.devices[i]]
        start = max(self.ready(i), *(self.idle[d][s] for d, s in own))
        self.finish[i] = start + work.cost[i]
        for d, s in own:
            self.idle[d][s] = self.finish[i]
            heappush(self.soonest[d], (self.finish[i], s))
            if work.commands[i] is not None:
                self.latest[d, work.commands[i]] = s


def _numbered(
    work: _Work, order: Sequence[int], streams: dict[int, list[int]]
) -> list[tuple[int, ...]]:
    number: dict[tuple[int, int], int] = {}
    numbered: list[tuple[int, ...]] = [()] * work.dag.n
    for i in order:
        own = [(d, streams[d][i]) for d in work.devices[i]]
        numbered[i] = tuple(number.setdefault(stream, len(number)) for stream in own)
    return numbered


# Signals.


class _Parts:
    """The parts of nodes, one for each stream of a node, numbered in the order of their nodes.

    ``pred[a]`` are the parts that part a must follow, including the previous one on its stream.
    """

    def __init__(
        self, work: _Work, order: Sequence[int], streams: Sequence[tuple[int, ...]]
    ) -> None:
        self.of: list[range] = [range(0)] * len(order)  # per node
        self.node: list[int] = []
        self.stream: list[int] = []
        self.pred: list[list[int]] = []
        self.last: dict[int, int] = {}  # per stream
        # If nodes have several streams, a path does not imply as much as an edge: use all edges.
        split = any(len(own) > 1 for own in streams)
        before = work.whole.pred if split else work.dag.pred
        for i in order:
            self.of[i] = range(len(self.node), len(self.node) + len(streams[i]))
            needs = [
                a for p in before[i] if not set(streams[i]) <= set(streams[p]) for a in self.of[p]
            ]
            for s in streams[i]:
                link = [self.last[s]] if s in self.last else []
                self.pred.append(link + [a for a in needs if self.stream[a] != s])
                self.last[s] = len(self.node)
                self.node.append(i)
                self.stream.append(s)

    def waited(self) -> dict[int, list[int]]:
        """For each node, the parts on other streams that it must wait for: those that no other path
        implies.

        Vector clocks would tell as much, but with an entry for each stream they are too large for
        wide graphs.
        """
        without = implied_edges(range(len(self.node)), self.pred)
        waited: dict[int, set[int]] = {}
        for b, pred in enumerate(self.pred):
            for a in pred:
                if self.stream[a] != self.stream[b] and (a, b) not in without:
                    waited.setdefault(self.node[b], set()).add(a)
        return {i: sorted(parts) for i, parts in waited.items()}

    def final(self) -> list[int]:
        """The parts that no other part follows."""
        followed = set(chain.from_iterable(self.pred))
        return [a for a in range(len(self.node)) if a not in followed]


def _scheduled(
    work: _Work,
    order: Sequence[int],
    streams: Sequence[tuple[int, ...]],
    nodes: Sequence[int],
    n: int,
) -> StreamSchedule:
    """The schedule, with the numbers that ``nodes`` have in a graph of n nodes."""
    parts = _Parts(work, order, streams)
    waited = parts.waited()
    end = [a for a in parts.final() if parts.stream[a]]
    signal = {a: k for k, a in enumerate(sorted({*chain(*waited.values()), *end}))}
    device_of = {s: d for i in order for s, d in zip(streams[i], work.devices[i], strict=True)}
    first = {s: i for i in reversed(order) for s in streams[i]}
    per_node: list[list[tuple[int, ...]]] = [[()] * n for _ in range(3)]
    for i, number in enumerate(nodes):
        per_node[0][number] = streams[i]
        per_node[1][number] = tuple(signal[a] for a in parts.of[i] if a in signal)
        per_node[2][number] = tuple(signal[a] for a in waited.get(i, ()))
    return StreamSchedule(
        order=[nodes[i] for i in order],
        streams=tuple(per_node[0]),
        emits=tuple(per_node[1]),
        waits=tuple(per_node[2]),
        n_streams=len(device_of),
        n_signals=len(signal),
        begin=tuple(s for s in range(1, len(device_of)) if first[s] not in waited),
        end=tuple(signal[a] for a in end),
        device_of=tuple(device_of[s] for s in range(len(device_of))),
        stream_of=tuple(parts.stream[a] for a in signal),
    )
