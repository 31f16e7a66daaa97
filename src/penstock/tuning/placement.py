"""Choice of a backend for each node: by ``place=``, by support, and by measured costs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import inf
from typing import TypeVar

from penstock.algorithms.dag import Dag
from penstock.backends.base import Backend, Outruns, Where, group_name, is_fallback
from penstock.backends.kernels import NO_KERNEL, KernelTable
from penstock.backends.specializing import estimates, plausible
from penstock.core import capability
from penstock.core.errors import InvalidInput, Unsupported
from penstock.core.records import cached_property, dataclass, field
from penstock.ir.graph import Graph, Node, dependencies
from penstock.ops.internal.fused import FUSED, parts
from penstock.ops.internal.transfer import HOST
from penstock.ops.onnx.control_flow import is_control
from penstock.tuning.measure import CostModel, CostSource, CustomCosts, compared, measured_seconds

NODE = "node:"
"""Prefix of a key of ``place=`` that names one node."""

Candidates = dict[Node, list[Backend]]
T = TypeVar("T")

# Branches should take at most this part of the time of all nodes one by one.
_WORTH = 0.9


def check_overrides(
    overrides: Mapping[str, Where], graph: Graph, backends: Sequence[Backend]
) -> None:
    """Raise ``InvalidInput`` for a name of ``place=`` that the model or ``backends`` lack."""
    available = [backend.name for backend in backends]
    for key, name in overrides.items():
        if group_name(name) not in available:
            raise InvalidInput(
                f"place={{{key!r}: {name!r}}}: the session has no such backend, it has "
                f"{', '.join(map(repr, available))}"
            )
    check_keys(overrides, graph)


def check_keys(overrides: Mapping[str, Where], graph: Graph) -> None:
    """Raise ``InvalidInput`` for a key of ``place=`` that the model lacks."""
    operations: dict[str, None] = {}
    names: dict[str, None] = {}
    for node in graph.walk():
        operations.update({node.op.full_name: None, node.op.name: None})
        names[node.name] = None
    for key in overrides:
        if key.startswith(NODE):
            if key.removeprefix(NODE) not in names:
                raise InvalidInput(f"place= names {key!r}, but the model has no such node")
        elif key not in operations:
            alike = [name for name in operations if name.casefold() == key.casefold()]
            hint = f"it has {', '.join(sorted(operations))}"
            if key in names:
                hint = f"it has a node of this name: write {NODE + key!r}"
            elif alike:
                hint = f"did you mean {alike[0]!r}?"
            raise InvalidInput(f"place= names {key!r}, but the model has no such operation; {hint}")


def wanted(node: Node, overrides: Mapping[str, Where]) -> list[str]:
    """The backends, or groups of these, that the user wants for ``node``, or for the nodes that it
    is made of."""
    if not overrides:
        return []
    keys = [(NODE + part.name, part.op.full_name, part.op.name) for part in parts(node)]
    places = [next((overrides[k] for k in part if k in overrides), None) for part in keys]
    return [*dict.fromkeys([group_name(where) for where in places if where is not None])]


@dataclass
class Placement:
    """Chooses the backends of nodes by their expected costs, and decides about fused nodes.

    Costs are compared first, and kernels asked for only where a cost speaks for them, so that a
    library builds few primitives that no plan uses. With ``measured_only``, fused nodes without
    measured costs count as faster: all that have kernels are to be measured.
    """

    backends: Sequence[Backend]
    overrides: Mapping[str, Where]
    kernels: KernelTable
    costs: CostModel
    measured_only: bool = False
    # Of the parts of fused nodes that were measured to be slower than these apart.
    _measured_fastest: dict[Node, Backend] = field(default_factory=dict)

    def has_kernel(self, node: Node) -> bool:
        """Whether a backend has a kernel for a fused node, and the user wants no part of the node
        elsewhere."""
        return self._cheapest(node, self._fusing(node)) is not None

    def is_faster(self, node: Node, pieces: Sequence[Node] | None = None) -> bool:
        """Whether a fused node is expected to be at least as fast as its parts, or as the
        ``pieces`` in whose place it comes, each on the backend that is fastest for it; True where
        the user has chosen the backend of its parts. Pieces that the user has placed stay."""
        fusing, overrides = self._fusing(node), self.overrides
        if not fusing or (overrides and any(wanted(piece, overrides) for piece in pieces or ())):
            return False
        if overrides and wanted(node, overrides):
            return True
        pieces = parts(node) if pieces is None else pieces
        # A backend with a measurement may be faster than those that fuse.
        among = [*fusing, *[b for b in self.backends if b not in fusing]]
        known = measured_seconds(self.costs, node, among)
        if known is not None:
            fastest = among[known.index(min(known))]
            if fastest not in fusing and not isinstance(self.costs, CustomCosts):
                # Its parts were measured there together, and perhaps never one by one.
                self._measured_fastest.update(dict.fromkeys(pieces, fastest))
            return fastest in fusing
        if self.measured_only:
            return True
        seconds = min(estimates(fusing, node))
        if seconds == inf:  # there is no kernel, which those of the parts need not be made to show
            return False
        for cost in (self._least, self._seconds):
            total = 0.0
            for part in pieces:
                total += cost(part)
                if total >= seconds:
                    return True
        return False

    def _least(self, node: Node) -> float:
        """The least expected cost, perhaps that of a backend that has no kernel for a node."""
        allowed = self._allowed(node)
        known = measured_seconds(self.costs, node, allowed)
        if known is not None:
            return min(known)
        guessed = plausible(node)
        leading, behind = self._leading(node, guessed, allowed)
        least = min(estimates(leading, node, guessed))
        return least if least < inf else min(estimates(behind, node), default=inf)

    def _fusing(self, node: Node) -> Sequence[Backend]:
        """The backends that may have a kernel for a fused node."""
        if not self.overrides:
            return self._fusers
        names = {*wanted(node, self.overrides)}
        return [backend for backend in self._fusers if names <= {backend.name}]

    @cached_property
    def _fusers(self) -> Sequence[Backend]:
        return [backend for backend in self.backends if backend.fuses]

    def _seconds(self, node: Node) -> float:
        backend, allowed = self._fastest(node), self._allowed(node)
        seconds, _ = compared(self.costs, node, allowed)
        return inf if backend is None else seconds[list(allowed).index(backend)]

    def candidates(self, graph: Graph) -> Candidates:
        """The backends that have a kernel for each node, nested ones included, those named first to
        be preferred; one that stands in for others only where these have none, and where all that
        a node computes is shapes on the host. Raises ``Unsupported`` as ``fastest`` does."""
        able = self._chosen(graph, self._able)
        if any(map(is_fallback, self.backends)):
            from penstock.tuning.host_arithmetic import host_arithmetic

            for node in host_arithmetic(graph, able, self.kernels):
                able[node] = [b for b in able[node] if b.memory == HOST]
        # Prefer backends that are no fallback for another.
        return {n: [b for b in among if not is_fallback(b)] or among for n, among in able.items()}

    def _able(self, node: Node) -> list[Backend]:
        accepts = self.kernels.accepts
        return [b for b in self._allowed(node) if accepts(b, node)]

    def fastest(self, graph: Graph) -> dict[Node, Backend]:
        """The backend of each node, nested ones included, that is expected to be the fastest, for
        backends that share a memory. Raises ``Unsupported``, which lists all operations for which
        none of the backends, or not the one that the user wants, has a kernel."""
        return self._chosen(graph, self._fastest)

    def for_workers(self, graph: Graph, workers: int) -> dict[Node, Backend]:
        """As ``fastest``; but where branches on ``workers``, each node on one thread, should be
        faster than all nodes one by one on all threads, nodes that were measured so are where that
        is fastest. With a common pool and no transfers this is the result of HEFT."""
        placed = self.fastest(graph)
        if workers == 1:
            return placed
        *_, (_, edges) = dependencies(graph)
        dag = Dag(len(graph.nodes), edges)
        starts = [before for before in dag.pred if not before]
        if len(starts) <= 1 and max(map(len, dag.succ), default=0) <= 1:  # a chain
            return placed
        alone = {node: self._fastest_alone(node) or backend for node, backend in placed.items()}
        if alone == placed:
            return placed
        from penstock.algorithms.heft import bound

        costs = self.costs.cost
        nodes = [node for node in graph.nodes if node in placed]
        serial = sum(costs(node, placed[node]).seconds for node in nodes)
        cost = [
            costs(node, alone[node], 1).seconds if node in alone else 0.0 for node in graph.nodes
        ]
        return alone if bound(dag, cost, workers) < _WORTH * serial else placed

    def _fastest_alone(self, node: Node) -> Backend | None:
        """The backend that is the fastest with one thread; None unless all were measured."""
        allowed = self._allowed(node)
        if len(allowed) == 1 or measured_seconds(self.costs, node, allowed) is None:
            return None
        able = [backend for backend in allowed if backend.seconds(node) < inf]
        costs = [self.costs.cost(node, backend, 1) for backend in able]
        known = [(c.seconds, i) for i, c in enumerate(costs) if c.source is CostSource.MEASURED]
        backend = able[min(known)[1]] if len(known) == len(able) > 0 else None
        return backend if backend is not None and self.kernels.accepts(backend, node) else None

    def _allowed(self, node: Node) -> Sequence[Backend]:
        if self.overrides and (names := wanted(node, self.overrides)):
            by_name = {backend.name: backend for backend in self.backends}
            return [by_name[name] for name in names]
        measured = self._measured_fastest.get(node)
        return self.backends if measured is None else [measured]

    def _fastest(self, node: Node) -> Backend | None:
        fused = self._cheapest(node, self._fusing(node)) if node.op is FUSED else None
        return fused or self._cheapest(node, self._allowed(node))

    def _cheapest(self, node: Node, among: Sequence[Backend]) -> Backend | None:
        """Return the backend with a kernel for a node that is expected to be fastest, or None;
        slower ones are not asked."""
        for backend in among if len(among) == 1 else self._by_cost(node, among):
            if self.kernels.answer(backend, node) is not NO_KERNEL:
                return backend
        return None

    def _by_cost(self, node: Node, among: Sequence[Backend]) -> Sequence[Backend]:
        """Backends in the order of their expected costs."""
        seconds = measured_seconds(self.costs, node, among)
        if seconds is None:
            guessed = plausible(node)
            leading, behind = self._leading(node, guessed, among)
            if len(leading) == 1:
                return [*leading, *behind]
            among = [*leading, *behind]
            seconds = [*estimates(leading, node, guessed), *[inf] * len(behind)]
        order = sorted(range(len(among)), key=seconds.__getitem__)
        return [among[i] for i in order]

    def _leading(
        self, node: Node, guessed: Node, among: Sequence[Backend]
    ) -> tuple[Sequence[Backend], Sequence[Backend]]:
        """Backends whose estimates are compared, and those that come behind one of these anyway.
        ``guessed``: ``plausible(node)``."""
        names = []
        for backend, own in self._outrunning:
            if backend in among and (name := own.outruns(node)):
                names.append(name)
        if not names or guessed is not node:
            return among, ()
        leading: list[Backend] = []
        behind: list[Backend] = []
        for backend in among:
            (behind if backend.name in names else leading).append(backend)
        return leading, behind

    @cached_property
    def _outrunning(self) -> list[tuple[Backend, Outruns]]:
        able = [(backend, capability(backend, Outruns)) for backend in self.backends]
        return [(backend, own) for backend, own in able if own is not None]

    def _chosen(self, graph: Graph, choice: Callable[[Node], T | None]) -> dict[Node, T]:
        chosen: dict[Node, T] = {}
        faults = []
        for node in graph.walk():
            if node.nests and is_control(node):
                continue
            if backend := choice(node):
                chosen[node] = backend
                continue
            names = ", ".join(backend.name for backend in self._allowed(node))
            reason = f"no kernel is available for it on {names}"
            faults.append((node.op.full_name, reason, node.label))
        if faults:
            raise Unsupported.of(faults)
        return chosen
