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

from collections.abc import Hashable, Mapping, Sequence
from heapq import heappop, heappush
from itertools import chain, count

from penstock.algorithms.dag import Dag, expect_one_per_node
from penstock.algorithms.ordering import ranks, topological_order
from penstock.core.checkpoints import with_checkpoints
from penstock.core.records import NamedTuple, dataclass, field

_NONE = -1
_NEAREST = 16  # paths that are searched for a command
_SLACK = 0.1  # of its time a node may begin later where its command has run


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
        for i in with_checkpoints(self.order):
            programs[self.stream[i]].append(i)
        return programs


def assign_streams(
    dag: Dag,
    *,
    devices: Sequence[int] | None = None,
    commands: Sequence[Hashable] | None = None,
    cost: Sequence[float] | None = None,
    time: Sequence[float] | None = None,
    max_streams: int | Mapping[int, int] = 0,
) -> StreamSchedule:
    """Assign the nodes of ``dag`` to streams, and the signals that they need; deterministic.

    Node i runs on a stream of device ``devices[i]``, by default 0. A node is followed on its stream
    by the successor with the longest chain of nodes behind it, where nodes count ``cost[i]`` (any
    unit), by default 1; of equal ones, by one whose ``commands[i]`` the path has run before, as
    streams keep what commands need; else by the one whose edge comes first. None as a command
    equals no other. These paths are then joined where a node depends on the last one of a path,
    preferably one that has run the same command.

    On each device, there are no more streams than nodes that can run at once in any order of the
    graph; nodes of one stream then depend on each other. ``max_streams``, if not 0, bounds the
    streams of all devices together, at least one for each; or those of each device in it. If that
    is less, independent paths share streams: they are taken by the length of the chain that they
    begin, longest first, and one that does not follow another goes where it could start first, if
    node i takes ``time[i]``, by default ``cost[i]``; or where its command ran last, if that is
    later by at most a tenth of its time.

    Time is nearly linear in nodes and mostly local edges, times devices; memory is linear.

    Raises:
        ValueError: ``devices``, ``commands``, ``cost`` or ``time`` does not have one entry per
            node; a cost or a time is negative or not a number; ``max_streams`` is negative, or less
            than the devices used, or less than one for a device.
    """
    devices = [0] * dag.n if devices is None else devices
    commands = [None] * dag.n if commands is None else commands
    cost = [1.0] * dag.n if cost is None else cost
    time = cost if time is None else time
    expect_one_per_node(dag, devices=devices, commands=commands, cost=cost, time=time)
    _expect_costs(cost)
    _expect_costs(time)
    used = list(dict.fromkeys(devices))
    total, of_device = (max_streams, {}) if isinstance(max_streams, int) else (0, max_streams)
    if total < 0 or 0 < total < len(used) or min(of_device.values(), default=1) < 1:
        raise ValueError(f"max_streams is {max_streams}, for nodes on {len(used)} devices")
    dag = transitive_reduction(dag)
    behind = ranks(dag, cost)
    order = _chain_order(dag)
    # A -> C, A -> D, B -> C: with C behind A, B and D would get streams of their own.
    stream = [_NONE] * dag.n
    width: dict[int, int] = {}
    for d in used:
        paths = _paths(dag, order, [on == d for on in devices], behind, commands)
        chains = fewest_chains(dag, order, paths)
        width[d] = max(chains) + 1
        stream = [s if c == _NONE else c for s, c in zip(stream, chains, strict=True)]
    fewer = {d: min(n, of_device.get(d, n)) for d, n in width.items()}
    allowed = min(total or dag.n, sum(fewer.values()))
    if allowed < sum(width.values()):
        # The length of the longest chain that begins with each node.
        order = topological_order(dag, [a + b for a, b in zip(cost, behind, strict=True)])
        stream = _share(dag, order, _Work(devices, commands, time), stream, fewer, allowed)
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
    for i in with_checkpoints(schedule.order):
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


def _paths(
    dag: Dag,
    order: Sequence[int],
    own: Sequence[bool],
    behind: Sequence[float],
    commands: Sequence[Hashable],
) -> list[int]:
    """The path of each node that is ``own``, by number; -1 for others.

    Along ``order``, each node that is on no path takes over one that has ended above it, or begins
    one, and is followed by the successor on none that has the longest chain ``behind`` it. The
    paths that have ended above a node are known to its successors, and after the last of these to
    that one's successors, so that not every node below an end finds it.
    """
    path = [_NONE if o else dag.n for o in own]
    ended: list[list[int]] = [[] for _ in order]
    last: dict[int, int] = {}  # the last node of each path
    ran: list[set[Hashable]] = []  # the commands of each path
    readers = [len(after) for after in dag.succ]
    for first in with_checkpoints(order):
        i, before = first, dag.pred[first]
        if path[i] == _NONE:
            number = _taken_over([ended[p] for p in before if ended[p]], ran, commands[i])
            if number == _NONE:
                number = len(ran)
                ran.append(set())
            while i != _NONE:
                path[i] = number
                last[number] = i
                if commands[i] is not None:
                    ran[number].add(commands[i])
                free = [j for j in dag.succ[i] if path[j] == _NONE]
                values = [(behind[j], commands[j] in ran[number]) for j in free]
                i = free[values.index(max(values))] if free else _NONE
        known = [[path[first]]] if last.get(path[first]) == first else [[]]
        for p in before:
            readers[p] -= 1
            if not readers[p]:
                known.append(ended[p])
        known.sort(key=len)
        for fewer in known[:-1]:
            known[-1] += fewer
        ended[first] = known[-1]
    return [_NONE if p == dag.n else p for p in path]


def _taken_over(ended: Sequence[list[int]], ran: Sequence[set[Hashable]], command: Hashable) -> int:
    """Take one of the paths that have ended: of the nearest one that has run ``command``, else the
    nearest; -1 if there is none."""
    for paths in ended:
        for k in range(len(paths) - 1, max(len(paths) - 1 - _NEAREST, -1), -1):
            if command in ran[paths[k]]:
                return paths.pop(k)
    return ended[0].pop() if ended else _NONE


@dataclass(slots=True)
class _SharedStreams:
    """The streams of one device, at most ``most``: by stream the last path on it, and when that is
    idle. ``soonest`` is a heap of (time, stream), with entries that are out of date."""

    most: int
    paths: list[int] = field(default_factory=list)
    idle: list[float] = field(default_factory=list)
    soonest: list[tuple[float, int]] = field(default_factory=list)

    def next(self) -> int:
        """The stream that is idle first."""
        while self.idle[self.soonest[0][1]] != self.soonest[0][0]:
            heappop(self.soonest)
        return self.soonest[0][1]


class _Work(NamedTuple):
    """The work of each node: its device, its command, and the time that it takes."""

    devices: Sequence[int]
    commands: Sequence[Hashable]
    time: Sequence[float]


def _share(
    dag: Dag,
    order: Sequence[int],
    work: _Work,
    chain: Sequence[int],
    width: dict[int, int],
    max_streams: int,
) -> list[int]:
    """The stream of each node, numbered within its device, where independent nodes share streams.
    Nodes of a path share one. A stream runs its nodes in ``order``, so that no two streams can wait
    for each other."""
    devices, commands, time = work
    left = max_streams - len(width)  # beyond one for each device
    on = {d: _SharedStreams(most) for d, most in width.items()}
    # Nodes of a chain that follow one another directly, as the first of them.
    path = list(range(dag.n))
    previous: dict[tuple[int, int], int] = {}
    for i in order:
        p = previous.get((devices[i], chain[i]), _NONE)
        if p in dag.pred[i]:
            path[i] = path[p]
        previous[devices[i], chain[i]] = i
    end = {path[i]: i for i in order}
    stream, finish = [_NONE] * dag.n, [0.0] * dag.n
    of_path: dict[int, int] = {}
    latest: dict[tuple[int, Hashable], int] = {}  # the stream that has run a command last
    for i in with_checkpoints(order):
        device = on[devices[i]]
        alike = latest.get((devices[i], commands[i]), _NONE)
        ready = max([finish[p] for p in dag.pred[i]], default=0.0)
        s = of_path.get(path[i], _NONE)
        if s == _NONE:
            # One that a node before has just left, a new one, or the one that is idle first.
            before = [p for p in dag.pred[i] if devices[p] == devices[i] and end[path[p]] == p]
            free = [stream[p] for p in before if device.paths[stream[p]] == path[p]]
            if free:
                s = alike if alike in free else min(free)
            elif device.idle and (not left or len(device.idle) >= device.most):
                s = device.next()
                slack = _SLACK * time[i]
                if alike != _NONE and device.idle[alike] <= max(device.idle[s], ready) + slack:
                    s = alike
            else:
                left -= bool(device.idle)
                s = len(device.idle)
                device.idle.append(0.0)
                device.paths.append(_NONE)
            of_path[path[i]], device.paths[s] = s, path[i]
        stream[i] = s
        if commands[i] is not None:
            latest[devices[i], commands[i]] = s
        finish[i] = device.idle[s] = max(ready, device.idle[s]) + time[i]
        heappush(device.soonest, (finish[i], s))
    return stream


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
    for i in with_checkpoints(order):
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
    return StreamSchedule(
        order,
        tuple(stream),
        emits,
        waits,
        n_signals=len(signal),
        begin=tuple(begin),
        end=tuple([signal[i] for i in end]),
        device_of=tuple([d for d, _ in number]),
    )


# Chains of dependent nodes, without a table of which node reaches which.
#
# ``transitive_reduction`` drops the edges that other paths imply, and ``implied_edges`` lists them.
# ``fewest_chains`` covers all nodes with the least number of chains, the width of the graph.


# Nodes whose descendants are computed at once, as the bits of one integer for each node.
_BATCH = 4096


def transitive_reduction(dag: Dag) -> Dag:
    """``dag`` without the edges that other paths imply: its transitive reduction (Aho, Garey and
    Ullman 1972, "The transitive reduction of a directed graph"). Costs as of ``implied_edges``."""
    without = implied_edges(topological_order(dag), dag.pred)
    return Dag(dag.n, (edge for edge in dag.edges if edge not in without)) if without else dag


def implied_edges(order: Sequence[int], pred: Sequence[Sequence[int]]) -> set[tuple[int, int]]:
    """The edges (p, i), p in ``pred[i]``, for which another path leads from p to i.

    ``order`` has all nodes, each after those of its ``pred``. Descendants are computed for some
    thousand nodes at a time, as the bits of one integer for each node of the stretch of ``order``
    in which their edges end. Memory is linear, and so is time for edges that are short in
    ``order``; for long ones it is quadratic with a very small factor: 100,000 nodes with 300,000
    random edges take seconds.
    """
    place = [0] * len(order)
    until: dict[int, int] = {}
    for k, i in enumerate(with_checkpoints(order)):
        place[i] = k
        # The only edge into a node is implied by no other path.
        if len(pred[i]) > 1:
            until.update(dict.fromkeys(pred[i], k))
    sources = sorted(until, key=place.__getitem__)
    edges: set[tuple[int, int]] = set()
    for begin in range(0, len(sources), _BATCH):
        batch = sources[begin : begin + _BATCH]
        stretch = order[place[batch[0]] + 1 : max(until[p] for p in batch) + 1]
        edges |= _implied_by(stretch, pred, batch)
    return edges


def _implied_by(
    stretch: Sequence[int], pred: Sequence[Sequence[int]], batch: Sequence[int]
) -> set[tuple[int, int]]:
    # Integers of any length: one operation joins the descendants of thousands of nodes.
    bit = {p: 1 << b for b, p in enumerate(batch)}
    reached_by: dict[int, int] = {}
    edges: set[tuple[int, int]] = set()
    for i in with_checkpoints(stretch):
        direct = further = 0
        for p in pred[i]:
            if p in bit:
                direct |= bit[p]
            if p in reached_by:
                further |= reached_by[p]
        if direct & further:
            edges.update((p, i) for p in pred[i] if p in bit and bit[p] & further)
        if direct or further:
            reached_by[i] = direct | further
    return edges


def fewest_chains(dag: Dag, order: Sequence[int], chain: Sequence[int]) -> list[int]:
    """The chain of each node, with the least number of chains; deterministic.

    ``chain`` is the assignment to begin with, of which as much as possible is kept; nodes with -1
    are on no chain and stay so. Nodes of one chain depend on each other. Chains are numbered from 0
    in the order of their first nodes in ``order``, a topological one.

    The least number of chains is the largest number of nodes none of which depends on another
    (Dilworth 1950). It corresponds to a maximum bipartite matching between nodes and descendants
    (Fulkerson 1956), computed by rounds of alternating paths from the last nodes of all chains at
    once. Each round is linear, and few suffice in practice.
    """
    before, after = _links(order, chain)
    while _join(dag, order, chain, before, after):
        pass
    numbered = [_NONE] * dag.n
    numbers = count()
    for i in with_checkpoints(order):
        if chain[i] != _NONE:
            numbered[i] = next(numbers) if before[i] == _NONE else numbered[before[i]]
    return numbered


def _links(order: Sequence[int], chain: Sequence[int]) -> tuple[list[int], list[int]]:
    """For each node its predecessor and its successor on its chain."""
    before, after = [_NONE] * len(order), [_NONE] * len(order)
    last: dict[int, int] = {}
    for i in order:
        if chain[i] in last:
            before[i] = last[chain[i]]
            after[before[i]] = i
        if chain[i] != _NONE:
            last[chain[i]] = i
    return before, after


def _join(
    dag: Dag, order: Sequence[int], chain: Sequence[int], before: list[int], after: list[int]
) -> bool:
    """One round of joining chains; whether any were joined.

    Each search starts from the last node of a chain and spreads over its descendants. Node j is
    reached from ``above[j]``, which it could follow; the node that j follows so far could then be
    followed by another one, and the search continues from there. No two searches visit the same
    node, so that all successful ones can be applied.
    """
    above = [_NONE] * dag.n
    start = [_NONE] * dag.n
    open_ended = [i for i in order if chain[i] != _NONE and after[i] == _NONE]
    for i in open_ended:
        start[i] = i
    succeeded: set[int] = set()
    for i in open_ended:
        walk = [i]
        while walk and start[i] not in succeeded:
            for j in dag.succ[walk.pop()]:
                if above[j] != _NONE:
                    continue
                above[j] = i
                walk.append(j)
                if chain[j] == _NONE:
                    continue
                if before[j] == _NONE:
                    succeeded.add(start[i])
                    _relink(j, above, before, after)
                    break
                start[before[j]] = start[i]
                open_ended.append(before[j])
    return bool(succeeded)


def _relink(j: int, above: Sequence[int], before: list[int], after: list[int]) -> None:
    """Let node j follow ``above[j]``, the former successor of that another node, and so on."""
    while j != _NONE:
        i = above[j]
        before[j] = i
        after[i], j = j, after[i]
