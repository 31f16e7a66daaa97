r"""Static multi-stream schedules: the stream of each node, and the signals between streams.

A stream is a queue whose nodes run in order. A stream emits a signal when it reaches it, and other
streams can wait for that, as for a CUDA event. ``assign_streams`` puts independent nodes on
different streams, with as few signals as keep every node behind those it depends on::

    0 -> 1 -> 3      stream 0:  0 !a  1  ?b 3
    0 -> 2 -> 3      stream 1:  ?a 2 !b           (!a emits signal a, ?a waits for it)

The method is that of NNC (libnnc), "Static Schedule A Graph", with streams never more than the
width of the graph, which following the longest chains alone does not ensure.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import chain
from typing import NamedTuple

from penstock.algorithms.chains import ChainEnds, fewest_chains, implied_edges, transitive_reduction
from penstock.algorithms.checkpoints import paced
from penstock.algorithms.dag import Dag, expect_one_per_node
from penstock.algorithms.ordering import ranks, topological_order

_NONE = -1


@dataclass(frozen=True, slots=True)
class StreamSchedule:
    """The stream of each node, and the signals between streams.

    ``order`` is a topological order of the nodes. Node i runs on ``stream[i]``, after the signals
    ``waits[i]``, and emits those of ``emits[i]``, at most one; both ascend. A stream runs its nodes
    in ``order``, on device ``device_of[stream]``.

    The streams ``begin`` start when stream 0 does: that takes one more signal, which is not
    counted. All others begin with a wait. At the end, stream 0 waits for the signals ``end``; then
    all nodes have ended.
    """

    order: list[int]
    stream: tuple[int, ...]
    emits: tuple[tuple[int, ...], ...]
    waits: tuple[tuple[int, ...], ...]
    n_signals: int
    begin: tuple[int, ...]
    end: tuple[int, ...]
    device_of: tuple[int, ...]

    @property
    def n_streams(self) -> int:
        """The number of streams, on all devices."""
        return len(self.device_of)

    @property
    def programs(self) -> list[list[int]]:
        """The nodes of each stream, in their order."""
        programs: list[list[int]] = [[] for _ in self.device_of]
        for i in paced(self.order):
            programs[self.stream[i]].append(i)
        return programs


def assign_streams(
    dag: Dag,
    *,
    devices: Sequence[int] | None = None,
    commands: Sequence[Hashable] | None = None,
    cost: Sequence[float] | None = None,
    max_streams: int = 0,
) -> StreamSchedule:
    """Assign the nodes of ``dag`` to streams, and the signals that they need; deterministic.

    Node i runs on a stream of device ``devices[i]``, by default 0. A node is followed on its stream
    by the successor with the longest chain of nodes behind it, where nodes count ``cost[i]`` (any
    unit), by default 1; of equal ones, by one whose ``commands[i]`` the stream has run before. A
    node that follows none takes over a stream whose last node it depends on: one that has run the
    same command, else the first. (Of very many, only the nearest are searched.) None as a command
    equals no other.

    On each device, there are no more streams than nodes that can run at once in any order of the
    graph; nodes of one stream then depend on each other. ``max_streams``, if not 0, bounds the
    streams of all devices together, at least one for each. If it is less, independent nodes share
    streams: they are taken by the length of the chain that they begin, longest first, and one that
    neither follows another nor takes over a stream goes where it could start first.

    Time is nearly linear in nodes and mostly local edges, times devices; memory is linear.

    Raises:
        ValueError: ``devices``, ``commands`` or ``cost`` does not have one entry per node; a cost
            is negative or not a number; ``max_streams`` is negative, or less than the devices used.
    """
    devices = [0] * dag.n if devices is None else devices
    commands = [None] * dag.n if commands is None else commands
    cost = [1.0] * dag.n if cost is None else cost
    expect_one_per_node(dag, devices=devices, commands=commands, cost=cost)
    _expect_costs(cost)
    used = list(dict.fromkeys(devices))
    if max_streams < 0 or 0 < max_streams < len(used):
        raise ValueError(f"max_streams is {max_streams}, for nodes on {len(used)} devices")
    dag = transitive_reduction(dag)
    work = _Work(dag, devices, commands, cost)
    order = _chain_order(dag)
    greedy = _Assignment(work, order)
    greedy.run()
    # A -> C, A -> D, B -> C: with C behind A, B and D would get streams of their own.
    width: dict[int, int] = {}
    stream = greedy.stream
    for d in used:
        own = [s if on == d else _NONE for s, on in zip(stream, devices, strict=True)]
        chains = fewest_chains(dag, order, own)
        width[d] = max(chains) + 1
        stream = [s if c == _NONE else c for s, c in zip(stream, chains, strict=True)]
    if 0 < max_streams < sum(width.values()):
        order = topological_order(dag, greedy.urgency)
        shared = _SharedAssignment(work, order, width, max_streams)
        shared.run()
        stream = shared.stream
    return _schedule(dag, order, stream, devices)


def simulate_streams(
    dag: Dag, schedule: StreamSchedule, cost: Sequence[float], signal: float = 0.0
) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """The start and the end of each node, if node i takes ``cost[i]``.

    ``signal`` is the time of a wait after its signal was emitted, in the unit of ``cost``. Time
    starts when stream 0 begins, and ends when stream 0 begins to wait for ``schedule.end``. Raises
    ``ValueError`` for another number of nodes, and for times that are negative or not numbers.
    """
    expect_one_per_node(dag, cost=cost, schedule=schedule.stream)
    _expect_costs(cost)
    if not signal >= 0:
        raise ValueError(f"waiting for a signal cannot take {signal}")
    idle = [0.0] * schedule.n_streams
    for s in schedule.begin:
        idle[s] = float(signal)
    emitted = [0.0] * schedule.n_signals
    start, finish = [0.0] * dag.n, [0.0] * dag.n
    for i in paced(schedule.order):
        s, waits = schedule.stream[i], schedule.waits[i]
        start[i] = max([idle[s], *[emitted[k] for k in waits]]) + signal * len(waits)
        idle[s] = finish[i] = start[i] + cost[i]
        for k in schedule.emits[i]:
            emitted[k] = finish[i]
    return tuple(start), tuple(finish)


def _expect_costs(cost: Sequence[float]) -> None:
    for i, c in enumerate(cost):
        if not c >= 0:
            raise ValueError(f"node {i} cannot cost {c}")


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


# Streams.


class _Device:
    """The streams of one device, and which of them a node can take over."""

    __slots__ = ("ends", "last", "ran")

    def __init__(self, n: int) -> None:
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


class _Work(NamedTuple):
    """The arguments of ``assign_streams``, without edges that others imply."""

    dag: Dag
    devices: Sequence[int]
    commands: Sequence[Hashable]
    cost: Sequence[float]


class _Assignment:
    """Greedy assignment of streams, numbered within their devices, along an order of the nodes."""

    def __init__(self, work: _Work, order: Sequence[int]) -> None:
        self.dag, self.devices, self.commands, self.cost = work
        self.order = order
        self.place = {i: k for k, i in enumerate(order)}
        # The length of the longest chain that begins with each node.
        self.urgency = [a + b for a, b in zip(work.cost, ranks(work.dag, work.cost), strict=True)]
        self.stream = [_NONE] * work.dag.n
        self.on = {d: _Device(work.dag.n) for d in dict.fromkeys(work.devices)}

    def run(self) -> None:
        for i in paced(self.order):
            if self.stream[i] == _NONE:
                self.walk(i, self.choose(i))
            for device in self.on.values():
                device.ends.enter(i, self.dag.pred[i])
            self.placed(i)

    def choose(self, i: int) -> int:
        device, command = self.on[self.devices[i]], self.commands[i]
        free = device.ends.behind(self.dag.pred[i])
        if free:
            return min(free, key=lambda s: (command is None or command not in device.ran[s], s))
        return self.another(i)

    def another(self, i: int) -> int:
        """A stream for node i if it takes over none."""
        return self.on[self.devices[i]].open()

    def placed(self, i: int) -> None:
        """The stream of node i is final."""

    def walk(self, i: int, s: int) -> None:
        """Put node i on stream s of its device, followed by the longest unassigned path."""
        stream, commands, d = self.stream, self.commands, self.devices[i]
        device = self.on[d]
        ran = device.ran[s]
        while True:
            stream[i] = s
            if commands[i] is not None:
                ran.add(commands[i])
            following, best = _NONE, (-1.0, False)
            for j in self.dag.succ[i]:
                if stream[j] == _NONE and self.devices[j] == d:
                    value = (self.urgency[j], commands[j] in ran)
                    if value > best:
                        following, best = j, value
            if following == _NONE:
                break
            i = following
        last = device.last[s]
        if last == _NONE or self.place[i] > self.place[last]:
            device.end(s, i)


class _SharedAssignment(_Assignment):
    """Assignment to a bounded number of streams, which independent nodes share. A stream runs its
    nodes in ``order``, so that no two streams can wait for each other."""

    def __init__(
        self, work: _Work, order: Sequence[int], width: dict[int, int], max_streams: int
    ) -> None:
        super().__init__(work, order)
        self.width = width
        self.left = max_streams - len(self.on)  # beyond one for each device
        self.finish = [0.0] * self.dag.n
        # Per device, the time from which each stream is idle, and a heap of (time, stream).
        self.idle: dict[int, list[float]] = {d: [] for d in self.on}
        self.soonest: dict[int, list[tuple[float, int]]] = {d: [] for d in self.on}
        self.latest: dict[tuple[int, Hashable], int] = {}  # the stream that last ran a command

    def another(self, i: int) -> int:
        d = self.devices[i]
        idle, soonest = self.idle[d], self.soonest[d]
        if not idle or (self.left and len(idle) < self.width[d]):
            self.left -= bool(idle)
            idle.append(0.0)
            return self.on[d].open()
        while idle[soonest[0][1]] != soonest[0][0]:
            heappop(soonest)
        when, s = soonest[0]
        alike = self.latest.get((d, self.commands[i]))
        if alike is not None and idle[alike] <= max(when, self.ready(i)):
            return alike
        return s

    def ready(self, i: int) -> float:
        return max([self.finish[p] for p in self.dag.pred[i]], default=0.0)

    def placed(self, i: int) -> None:
        d, s, command = self.devices[i], self.stream[i], self.commands[i]
        self.finish[i] = max(self.ready(i), self.idle[d][s]) + self.cost[i]
        self.idle[d][s] = self.finish[i]
        heappush(self.soonest[d], (self.finish[i], s))
        if command is not None:
            self.latest[d, command] = s


# Signals.


def _schedule(
    dag: Dag, order: list[int], own: Sequence[int], devices: Sequence[int]
) -> StreamSchedule:
    """The schedule of nodes on streams that ``own`` numbers within their devices. Vector clocks
    would find the waits that others imply, but with an entry for each stream they are too large for
    wide graphs."""
    number: dict[tuple[int, int], int] = {}
    stream = [0] * dag.n
    last: dict[int, int] = {}
    before: list[list[int]] = [[] for _ in order]
    begin = []
    for i in paced(order):
        s = stream[i] = number.setdefault((devices[i], own[i]), len(number))
        before[i] = [p for p in dag.pred[i] if stream[p] != s]
        if s in last:
            before[i].append(last[s])
        elif s and not before[i]:
            begin.append(s)
        last[s] = i
    implied = implied_edges(order, before)
    waited = [
        [p for p in needed if stream[p] != stream[i] and (p, i) not in implied]
        for i, needed in enumerate(before)
    ]
    followed = set(chain(*before))
    end = [i for i in order if stream[i] and i not in followed]
    emitting = {*chain(*waited), *end}
    signal = {i: k for k, i in enumerate([i for i in order if i in emitting])}
    emits = tuple([(signal[i],) if i in signal else () for i in range(dag.n)])
    waits = tuple([tuple(sorted([signal[p] for p in needed])) for needed in waited])
    ends = tuple(begin), tuple([signal[i] for i in end])
    device_of = tuple([d for d, _ in number])
    return StreamSchedule(order, tuple(stream), emits, waits, len(signal), *ends, device_of)
