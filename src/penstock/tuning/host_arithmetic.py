"""Arithmetic with shapes, which stays on the host beside a backend with a memory of its own.

    x -> Shape -> Gather -> Mul -> Concat -> Reshape(y, .)

The shape of a tensor on a device is known on the host, and what reads a shape reads it there. What
is computed from shapes alone, a few whole numbers each, is computed there, too: on the device it
would take two transfers, and the host would have to wait for the device.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from penstock.backends.base import Backend
from penstock.backends.kernels import KernelTable
from penstock.core.types import TensorType
from penstock.ir.graph import Graph, Node, Value
from penstock.ir.kernel import Kernel
from penstock.ops.internal.transfer import HOST


def host_arithmetic(
    graph: Graph, able: Mapping[Node, Sequence[Backend]], kernels: KernelTable
) -> Iterator[Node]:
    """The nodes of ``graph``, nested ones included, that compute from shapes alone, and that a
    backend of the host is ``able`` to run."""
    on_host: set[Value] = set()
    for inner in graph.graphs():  # a graph before those nested in it
        for node in inner.nodes:
            kernel = _kernel_away(node, able.get(node, ()), kernels)
            if kernel is not None and kernel.device.host_outputs:
                on_host.update(value for value in node.outputs if value is not None)
                continue
            hosted = any(backend.memory == HOST for backend in able.get(node, ()))
            if hosted and _is_arithmetic(node, on_host):
                on_host.update(value for value in node.outputs if value is not None)
                yield node


def _kernel_away(node: Node, among: Sequence[Backend], kernels: KernelTable) -> Kernel | None:
    """The kernel of a node on a backend with a memory of its own, if there is one without error."""
    for backend in among:
        if backend.memory != HOST:
            try:
                return kernels.kernel(backend, node)
            except Exception:  # the plan raises it, unless the node may never run
                return None
    return None


def _is_arithmetic(node: Node, on_host: set[Value]) -> bool:
    """Whether all that a node reads is on the host, and its results are a few whole numbers."""
    read = [value for value in node.inputs if value is not None and not value.is_constant]
    results = [value.type for value in node.outputs if value is not None]
    return (
        bool(read)
        and all(value in on_host for value in read)
        and all(
            isinstance(type_, TensorType)
            and type_.dtype is not None
            and type_.dtype.kind in "biu"
            and type_.rank in (0, 1)
            for type_ in results
        )
    )
