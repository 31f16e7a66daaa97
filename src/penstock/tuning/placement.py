"""Which backend runs which node: what the user says, what is supported, and what was measured."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from math import inf
from typing import TypeVar

from penstock.algorithms.dag import Dag
from penstock.algorithms.heft import place, place_serial
from penstock.backends.base import Backend
from penstock.backends.kernels import KernelTable
from penstock.errors import InvalidInput, Unsupported, UnsupportedOperation
from penstock.ir.graph import Graph, Node, dependencies
from penstock.ops.internal.fused import is_fused, parts
from penstock.ops.internal.transfer import HOST
from penstock.ops.onnx.control_flow import is_control
from penstock.tuning.measure import CostModel
from penstock.types import TensorType

NODE = "node:"
"""What begins a key of ``place=`` that names one node."""

Seconds = Callable[[Node, Backend], float]
TransferSeconds = Callable[[str, str, int], float]
Candidates = dict[Node, list[Backend]]
T = TypeVar("T")


def check_overrides(
    overrides: Mapping[str, str], graph: Graph, backends: Sequence[Backend]
) -> None:
    """Raise ``InvalidInput`` for a name of ``place=`` that the model or ``backends`` lack."""
    operations: dict[str, None] = {}
    names: dict[str, None] = {}
    for node in graph.walk():
        operations.update({node.op.full_name: None, node.op.name: None})
        names[node.name] = None
    known = [backend.name for backend in backends]
    for key, name in overrides.items():
        if name not in known:
            raise InvalidInput(
                f"place={{{key!r}: {name!r}}}: the session has no such backend, it has "
                f"{', '.join(map(repr, known))}"
            )
        if key.startswith(NODE):
            if key.removeprefix(NODE) not in names:
                raise InvalidInput(f"place= names {key!r}, but the model has no such node")
        elif key not in operations:
            raise InvalidInput(
                f"place= names {key!r}, but the model has no such operation; it has "
                f"{', '.join(sorted(operations))}"
            )


def wanted(node: Node, overrides: Mapping[str, str]) -> list[str]:
    """The backends that the user wants for ``node``, or for the nodes that it is made of."""
    if not overrides:
        return []
    names: dict[str, None] = {}
    for part in parts(node):
        keys = (NODE + part.name, part.op.full_name, part.op.name)
        name = next((overrides[key] for key in keys if key in overrides), None)
        if name is not None:
            names[name] = None
    return list(names)


class Placement:
    """Chooses the backends of nodes by their expected costs, and decides about fused nodes.

    Costs are compared first, and kernels asked for only where a cost speaks for them, so that a
    library builds few primitives that no plan uses. With ``measured_only``, fused nodes without
    measured costs count as faster: all that have kernels are to be measured.
    """

    def __init__(
        self,
        backends: Sequence[Backend],
        overrides: Mapping[str, str],
        kernels: KernelTable,
        costs: CostModel,
        *,
        measured_only: bool = False,
    ) -> None:
        self.backends = list(backends)
        self.overrides = overrides
        self.kernels = kernels
        self.costs = costs
        self.measured_only = measured_only
        self._by_name = {backend.name: backend for backend in backends}
        # Of the nodes of chains, which stand in several proposals.
        self._least: dict[Node, float] = {}
        # Of the parts of fused nodes that were measured to be slower than these apart.
        self._measured_fastest: dict[Node, Backend] = {}

    # Proposals of fused nodes.

    def has_kernel(self, node: Node) -> bool:
        """Whether a backend has a kernel for a fused node, and the user wants no part of the node
        elsewhere."""
        return any(self.kernels.accepts(backend, node) for backend in self._fusing(node))

    def is_faster(self, node: Node) -> bool:
        """Whether a fused node is expected to be at least as fast as its parts, each on the backend
        that is fastest for it; True where the user has chosen the backend."""
        fusing = self._fusing(node)
        if not fusing:
            return False
        if wanted(node, self.overrides):
            return True
        among = [*fusing, *[backend for backend in self.backends if backend not in fusing]]
        measured = self.costs.measured(node, among)
        if measured is not None:
            fastest = min(among, key=lambda backend: measured[backend.name])
            if fastest not in fusing:
                # Its parts were measured there together, and perhaps never one by one.
                self._measured_fastest.update(dict.fromkeys(parts(node), fastest))
            return fastest in fusing
        if self.measured_only:
            return True
        seconds = min(self.costs.expected(node, among, backend) for backend in fusing)
        # The least cost of a part may be that of a backend that has no kernel for it.
        if seconds <= sum(map(self._least_seconds, parts(node))):
            return True
        return seconds <= sum(map(self._seconds, parts(node)))

    def _fusing(self, node: Node) -> list[Backend]:
        """The backends that may have a kernel for a fused node."""
        names = set(wanted(node, self.overrides))
        return [b for b in self.backends if b.fuses and names <= {b.name}]

    def _least_seconds(self, node: Node) -> float:
        least = self._least.get(node)
        if least is None:
            allowed = self._allowed(node)
            least = min(self.costs.expected(node, allowed, backend) for backend in allowed)
            self._least[node] = least
        return least

    def _seconds(self, node: Node) -> float:
        backend = self._fastest(node)
        return inf if backend is None else self.costs.expected(node, self._allowed(node), backend)

    # Placement.

    def candidates(self, graph: Graph) -> Candidates:
        """The backends that have a kernel for each node, nested ones included, those named first to
        be preferred. Raises ``Unsupported`` as ``fastest`` does."""
        return self._each(
            graph,
            lambda node: [b for b in self._allowed(node) if self.kernels.accepts(b, node)],
        )

    def fastest(self, graph: Graph) -> dict[Node, Backend]:
        """The backend of each node, nested ones included, that is expected to be the fastest, for
        backends that share a memory.

        Raises ``Unsupported``, which lists all operations for which none of the backends, or not
        the one that the user wants, has a kernel.
        """
        return self._each(graph, self._fastest)

    def _allowed(self, node: Node) -> list[Backend]:
        names = wanted(node, self.overrides)
        if names:
            return [self._by_name[name] for name in names]
        measured = self._measured_fastest.get(node)
        return self.backends if measured is None else [measured]

    def _fastest(self, node: Node) -> Backend | None:
        allowed = list(self._allowed(node))
        if is_fused(node) and self.has_kernel(node):
            allowed = [b for b in self._fusing(node) if self.kernels.accepts(b, node)]
        while len(allowed) > 1:
            backend = min(allowed, key=partial(self.costs.expected, node, tuple(allowed)))
            if self.kernels.accepts(backend, node):
                return backend
            allowed.remove(backend)
        return allowed[0] if allowed and self.kernels.accepts(allowed[0], node) else None

    def _each(self, graph: Graph, choice: Callable[[Node], T | None]) -> dict[Node, T]:
        chosen: dict[Node, T] = {}
        faults: dict[tuple[str, str], list[str]] = {}
        for node in graph.walk():
            if is_control(node):
                continue
            answer = choice(node)
            if answer:
                chosen[node] = answer
                continue
            names = ", ".join(backend.name for backend in self._allowed(node))
            reason = f"no kernel is available for it on {names}"
            faults.setdefault((node.op.full_name, reason), []).append(node.label)
        if faults:
            raise Unsupported(
                [
                    UnsupportedOperation(operation, reason, tuple(nodes))
                    for (operation, reason), nodes in faults.items()
                ]
            )
        return chosen


def choose(
    graph: Graph,
    allowed: Candidates,
    backends: Sequence[Backend],
    seconds: Seconds,
    transfer: TransferSeconds,
    *,
    parallel: bool,
) -> dict[Node, Backend]:
    """A backend for each node: for steps that run one by one, or as many at once as there are
    workers; nested graphs by themselves, since what enters and leaves them is in the host's memory.
    """
    chosen: dict[Node, Backend] = {}
    inner: dict[Graph, float] = {}
    home = next((i for i, backend in enumerate(backends) if backend.memory == HOST), 0)
    for each, edges in dependencies(graph):  # innermost first
        dag = Dag(len(each.nodes), edges)
        cost: list[list[float | None]] = []
        for node in each.nodes:
            if is_control(node):
                own = sum(inner[g] for _, g in node.graphs)
                cost.append([own if b == home else None for b in range(len(backends))])
            else:
                cost.append([seconds(node, b) if b in allowed[node] else None for b in backends])
        where = _place(each, dag, cost, backends, transfer, parallel)
        total = 0.0
        for node, row, b in zip(each.nodes, cost, where, strict=True):
            total += row[b] or 0.0
            if not is_control(node):
                chosen[node] = backends[b]
        inner[each] = total
    return chosen


def _place(
    graph: Graph,
    dag: Dag,
    cost: Sequence[Sequence[float | None]],
    backends: Sequence[Backend],
    transfer: TransferSeconds,
    parallel: bool,
) -> Sequence[int]:
    sizes = [_bytes(node) for node in graph.nodes]
    host = next((backend.name for backend in backends if backend.memory == HOST), HOST)

    def moved(i: int, a: int, b: int) -> float:
        if backends[a].memory == backends[b].memory:
            return 0.0
        source, target = backends[a].name, backends[b].name
        if HOST in (backends[a].memory, backends[b].memory):
            return transfer(source, target, sizes[i])
        return transfer(source, host, sizes[i]) + transfer(host, target, sizes[i])

    if not parallel:
        return place_serial(dag, cost, moved)
    workers = [backend.workers for backend in backends]
    return place(dag, cost, lambda i, j, a, b: moved(i, a, b), workers).backend


def _bytes(node: Node) -> int:
    """Bytes that a node makes, as far as they are known."""
    kinds = [value.type for value in node.outputs if value is not None]
    return sum(k.nbytes for k in kinds if isinstance(k, TensorType) and k.static)
