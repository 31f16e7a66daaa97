"""Placement where backends have memories of their own, so that values must be transferred.

The graphs of loops and branches are placed innermost first, once for each memory that their carried
values may be in: in a loop that carries values on a device, an iteration transfers only values that
it reads or computes elsewhere, and the loop itself is then a node on that device with the time of
all its iterations. Whether that pays off is decided with the nodes around it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import fsum

from penstock.algorithms.dag import Dag
from penstock.algorithms.heft import place, place_serial
from penstock.backends.base import Backend, copier, stacks
from penstock.core.records import NamedTuple
from penstock.ir.graph import Graph, Node, Value, captures, dependencies
from penstock.ops.internal.transfer import HOST, Ports
from penstock.ops.onnx.control_flow import is_control, loop_carried
from penstock.plan.grouping import DEFAULT_TRIP_COUNT
from penstock.tuning.node_signature import tensor_bytes

Seconds = Callable[[Node, Backend], float]
TransferSeconds = Callable[[str, str, int], float]

# Limits of loops that end by their condition are often the largest integer.
_MOST_TRIPS = 10_000


class _Placed(NamedTuple):
    """The seconds of a graph, and the index of a backend for each of its nodes."""

    seconds: float
    where: Sequence[int]


class TransferPlacement:
    """Chooses backends by costs, for steps that run one by one, or as many at once as there are
    workers. ``ports``: where inputs and outputs of the graph are, if not all on the host.

    ``home`` is the index of a backend in the host's memory, if there is one, ``remote`` are those
    elsewhere, and ``memories`` have one for each memory. ``fed`` has the backends of inputs by
    number, if not ``home``; with ``stay`` outputs are wanted away from it. ``placed[graph, b]``:
    the best that was found for a graph whose carried values, or outputs of a branch, are in the
    memory of b.
    """

    def __init__(
        self,
        allowed: Mapping[Node, Sequence[Backend]],
        backends: Sequence[Backend],
        seconds: Seconds,
        transfer: TransferSeconds,
        parallel: bool,
        ports: Ports | None = None,
    ) -> None:
        self.allowed = allowed
        self.backends = backends
        self.seconds = seconds
        self.transfer = transfer
        self.parallel = parallel
        # From behind, so that of each memory the backend that was named first stays.
        memories = {backend.memory: b for b, backend in reversed(list(enumerate(backends)))}
        self.memories = sorted(memories.values())
        self.home = memories.get(HOST, 0)
        self.remote = [b for b, backend in enumerate(backends) if backend.memory != HOST]
        named = {backend.name: b for b, backend in enumerate(backends)}
        fed = {} if ports is None else ports.fed
        self.fed = {i: named[place.backend] for i, place in fed.items()}
        self.stay = ports is not None and ports.stay
        self.placed: dict[tuple[Graph, int], _Placed] = {}

    def choose(self, graph: Graph) -> dict[Node, Backend]:
        """A backend for each node."""
        owners = {g: node for node in graph.walk() if is_control(node) for _, g in node.graphs}
        for block, edges in dependencies(graph):  # innermost first
            owner = owners.get(block)
            stays = owner is not None and owner.op.name != "SequenceMap"
            for b in self.memories if stays else [self.home]:
                self.placed[block, b] = self.place(block, edges, owner, b)
        chosen: dict[Node, Backend] = {}
        stack = [(graph, self.home)]
        while stack:
            block, b = stack.pop()
            # Behind the nodes are the ports, whose places were given.
            for node, at in zip(block.nodes, self.placed[block, b].where, strict=False):
                if is_control(node):
                    stack += [(inner, at) for _, inner in node.graphs]
                else:
                    chosen[node] = self.backends[at]
        return chosen

    def place(
        self, block: Graph, edges: Sequence[tuple[int, int]], owner: Node | None, b: int
    ) -> _Placed:
        """Place the nodes of a graph. Its inputs and outputs are nodes beside them, whose places
        are given: b for those that are carried, else the host."""
        pairs, ports = self._ports(block, edges, owner, b)
        every = range(len(self.backends))
        cost = [self._row(node) for node in block.nodes]
        cost += [[0.0 if at in port else None for at in every] for port in ports]
        dag = Dag(len(cost), pairs)
        sizes = [sum(tensor_bytes(v) or 0 for v in node.outputs) for node in block.nodes]
        sizes += [tensor_bytes(value) or 0 for value in block.inputs]

        def moved(i: int, source: int, target: int) -> float:
            return self._moved(sizes[i], source, target) if i < len(sizes) else 0.0

        if self.parallel:
            workers = [backend.workers for backend in self.backends]
            schedule = place(dag, cost, lambda i, j, x, y: moved(i, x, y), workers)
            return _Placed(schedule.makespan, schedule.backend)
        where = place_serial(dag, cost, moved)
        # A value goes to a backend once, however many of its readers are there.
        copies = {(i, where[j]) for i, j in dag.edges if where[i] != where[j]}
        times = [row[at] or 0.0 for row, at in zip(cost, where, strict=True)]
        return _Placed(fsum([*times, *[moved(i, where[i], at) for i, at in copies]]), where)

    def _ports(
        self, block: Graph, edges: Sequence[tuple[int, int]], owner: Node | None, b: int
    ) -> tuple[list[tuple[int, int]], list[Sequence[int]]]:
        """Return the edges of ``block`` between indices, and the possible places of its ports.
        Nodes have the first indices; its inputs, what Ifs and loops read on the host, and its
        outputs follow, each with the places of which any will do."""
        n = len(block.nodes)
        entering, leaving = _carried(block, owner, self.backends[b])
        whole, home = owner is None, [self.home]
        fed = self.fed if whole else dict.fromkeys(entering, b)
        ports: list[Sequence[int]] = [[fed.get(i, self.home)] for i in range(len(block.inputs))]
        index = {value: n + i for i, value in enumerate(block.inputs)}
        index.update((v, k) for k, node in enumerate(block.nodes) for v in node.outputs if v)
        pairs = [(a, k) for a, k in edges if not is_control(block.nodes[k])]
        for k, node in enumerate(block.nodes):
            there, on_host = _reads(node)
            pairs += [(index[v], k) for v in there if v in index]
            for v in filter(index.__contains__, on_host):
                pairs += [(index[v], n + len(ports)), (n + len(ports), k)]
                ports.append(home)
        for i, v in enumerate(block.outputs):
            if v in index:
                pairs.append((index[v], n + len(ports)))
                if whole and self.stay:
                    ports.append(self.remote)
                else:
                    ports.append([b] if i in leaving else home)
        return pairs, ports

    def _row(self, node: Node) -> list[float | None]:
        """The seconds of a node on each backend: of an If or a loop, with what it carries there."""
        if not is_control(node):
            allowed = self.allowed[node]
            return [self.seconds(node, b) if b in allowed else None for b in self.backends]
        row: list[float | None] = [None] * len(self.backends)
        for b in self.memories:
            graphs = [self.placed.get((graph, b)) for _, graph in node.graphs]
            times = [graph.seconds for graph in graphs if graph is not None]
            if times:
                # Of an If the branch that takes longer: only a run knows which one it takes.
                row[b] = max(times) * _trips(node)
        return row

    def _moved(self, nbytes: int, source: int, target: int) -> float:
        a, b = self.backends[source], self.backends[target]
        if a.memory == b.memory:
            return 0.0
        if HOST in (a.memory, b.memory) or copier(a, b) is not None:
            return self.transfer(a.name, b.name, nbytes)
        host = next((backend.name for backend in self.backends if backend.memory == HOST), HOST)
        return self.transfer(a.name, host, nbytes) + self.transfer(host, b.name, nbytes)


def _carried(block: Graph, owner: Node | None, backend: Backend) -> tuple[range, range]:
    """The positions of the inputs and of the outputs of a graph that stay where they are used: what
    loops carry, what branches compute, and the rows that loops collect if ``backend`` joins them.
    """
    if owner is None:
        return range(0), range(0)
    if owner.op.name == "If":
        return range(0), range(len(block.outputs))
    entering, leaving = loop_carried(owner)
    stop = len(block.outputs) if stacks(backend) else leaving.stop
    return range(entering.start, entering.stop), range(leaving.start, stop)


def _reads(node: Node) -> tuple[list[Value], list[Value]]:
    """The values that a node reads where it is, and those that it reads on the host: conditions,
    limits and rows of loops."""
    inputs = [value for value in node.inputs if value is not None]
    if not is_control(node):
        return inputs, []
    entering = loop_carried(node)[0]
    carried = [v for v in node.inputs[entering] if v is not None]
    captured = [v for _, graph in node.graphs for v in captures(graph)]
    there = list(dict.fromkeys([*carried, *captured]))
    return there, [v for v in inputs if v not in there]


def _trips(node: Node) -> int:
    """About how often the graph of a loop runs; 1 for an If."""
    if node.op.name == "If":
        return 1
    limit = node.inputs[0] if node.op.name == "Loop" else None
    if limit is None or limit.const is None or limit.const.size != 1:
        return DEFAULT_TRIP_COUNT
    return min(max(0, int(limit.const.reshape(-1)[0])), _MOST_TRIPS)
