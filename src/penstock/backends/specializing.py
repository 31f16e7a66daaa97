"""Backends whose kernels are made for known shapes.

Of a node with unknown dims the kernel is chosen in each run (``dynamic_shapes``), which is imported
where a plan has such a node.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING

from penstock.backends.base import Backend, HostBackend
from penstock.core.records import cached_property
from penstock.core.types import TensorType, Type, is_static
from penstock.ir.graph import Node
from penstock.ir.kernel import Kernel

if TYPE_CHECKING:
    from penstock.backends.dynamic_shapes import KernelCaches

_MOST_BYTES = 64 << 20


class SpecializingBackend(HostBackend, Backend):
    """A base class of backends whose kernels are made for known shapes (``static_kernel``). Of a
    node with unknown dims the kernel is chosen in each run, among these and NumPy's. To make a
    kernel takes about ``making_s`` seconds, and a call that is not bound to memory ``unbound_s``
    more than one that is, a look at the shapes included. Kernels made in runs take ``most_bytes``
    at most. A ``reproducible`` one leaves nothing to NumPy that it has a kernel for."""

    making_s: float
    unbound_s: float
    most_bytes = _MOST_BYTES
    reproducible = False

    @cached_property
    def caches(self) -> KernelCaches:
        """The kernels made in runs."""
        from penstock.backends.dynamic_shapes import KernelCaches

        return KernelCaches()

    @abstractmethod
    def static_kernel(self, node: Node, types: Sequence[Type | None]) -> Kernel | None:
        """As ``kernel``; None where dims are unknown that the kernel would have to know."""

    def supports(self, node: Node) -> bool:
        """Whether there is a ``static_kernel`` of a node of known shapes, as far as that is known
        without making the kernel."""
        types = [None if value is None else value.type for value in node.inputs]
        return self.static_kernel(node, types) is not None

    def kernel(self, node: Node, types: Sequence[Type | None]) -> Kernel | None:
        for type_ in types:  # a loop: this is asked for each kernel
            if type_ is not None and not (isinstance(type_, TensorType) and type_.static):
                break
        else:
            kernel = self.static_kernel(node, types)
            if kernel is not None or all(v is None or is_static(v.type) for v in node.outputs):
                return kernel
        from penstock.backends.dynamic_shapes import kernel_of_unknown_shapes

        return kernel_of_unknown_shapes(self, node, types)

    def unbound_cost(self, node: Node) -> float:
        return self.unbound_s


def plausible(node: Node) -> Node:
    """The node with plausible dims in place of unknown ones, for estimates; the node itself if all
    are known, or no guess fits the operation."""
    for value in (*node.inputs, *node.outputs):  # a loop: this is asked for each estimate
        type_ = None if value is None else value.type
        if value is not None and not (isinstance(type_, TensorType) and type_.static):
            break
    else:
        return node
    from penstock.backends.dynamic_shapes import guess

    return guess(node)


def estimates(backends: Sequence[Backend], node: Node, guessed: Node | None = None) -> list[float]:
    """The seconds of a node on each backend; ``guessed``: ``plausible(node)``, if it is known."""
    guessed = plausible(node) if guessed is None else guessed
    if guessed is not node:
        from penstock.backends.dynamic_shapes import late_estimate

        return [late_estimate(backend, guessed) for backend in backends]
    seconds = []
    for backend in backends:  # mostly one
        seconds.append(backend.seconds(node))  # noqa: PERF401
    return seconds
