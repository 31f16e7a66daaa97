"""Which backend runs which node: what the user says, what is supported, and what was measured."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from penstock.algorithms.dag import Dag
from penstock.algorithms.heft import place, place_serial
from penstock.backends.base import Backend
from penstock.errors import InvalidInput, Unsupported, UnsupportedOperation
from penstock.ir.graph import Graph, Node, dependencies
from penstock.ops.internal.fused import parts
from penstock.ops.internal.transfer import HOST
from penstock.ops.onnx.control_flow import is_control
from penstock.types import TensorType

NODE = "node:"
"""What begins a key of ``place=`` that names one node."""

Seconds = Callable[[Node, Backend], float]
TransferSeconds = Callable[[str, str, int], float]
Candidates = dict[Node, list[Backend]]


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
    found: dict[str, None] = {}
    for part in parts(node):
        keys = (NODE + part.name, part.op.full_name, part.op.name)
        name = next((overrides[key] for key in keys if key in overrides), None)
        if name is not None:
            found[name] = None
    return list(found)


def candidates(
    graph: Graph, backends: Sequence[Backend], overrides: Mapping[str, str]
) -> Candidates:
    """The backends that may run each node, nested ones included, those named first to be preferred.

    Raises ``Unsupported``, which lists all operations that none of them, or not the one that the
    user wants, can run.
    """
    by_name = {backend.name: backend for backend in backends}
    found: Candidates = {}
    faults: dict[tuple[str, str], list[str]] = {}
    for node in graph.walk():
        if is_control(node):
            continue
        types = [None if value is None else value.type for value in node.inputs]
        named = wanted(node, overrides)
        allowed = [by_name[name] for name in named] or list(backends)
        found[node] = [backend for backend in allowed if backend.supports(node, types)]
        if not found[node]:
            names = ", ".join(backend.name for backend in allowed)
            reason = f"no kernel for it on {names}"
            faults.setdefault((node.op.full_name, reason), []).append(node.label)
    if faults:
        raise Unsupported(
            [
                UnsupportedOperation(operation, reason, tuple(nodes))
                for (operation, reason), nodes in faults.items()
            ]
        )
    return found


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
