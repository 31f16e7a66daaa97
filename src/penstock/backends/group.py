"""Several backends as one, for operations whose values are on all of them (``ops/penstock``).

``place={"AllReduce": ["torch", "torch:1"]}`` makes a group of these two. Input and output i of its
nodes are in the memory of member i (``Kernel.members``), so that values enter and leave without the
host::

    member 0    x0 ----+------> reduce(x0, x1) -> y0
                       | copies
    member 1    x1 ----+------> reduce(x0, x1) -> y1

Each member gets a copy of each value that it lacks, and computes with its own kernel, in one order
of operands: all outputs of an AllReduce are equal to the last bit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from penstock.backends.base import Backend, HostBackend, Where, copier, group_name
from penstock.core.errors import InvalidInput
from penstock.core.types import RunValue, Type
from penstock.ir.graph import Node
from penstock.ir.kernel import DeviceWork, Kernel
from penstock.ops.internal.transfer import HOST
from penstock.ops.penstock.collective import reduction_node

_COLLECTIVE = ("penstock.AllReduce", "penstock.Broadcast")


def groups_of(places: Iterable[Where], backends: Sequence[Backend]) -> list[Group]:
    """The groups that ``place=`` names, of members out of ``backends``. Raises ``InvalidInput`` for
    members that there are not, or that cannot work together."""
    by_name = {backend.name: backend for backend in backends}
    groups: dict[str, Group] = {}
    for where in places:
        if isinstance(where, str) or group_name(where) in groups:
            continue
        if unknown := [name for name in where if name not in by_name]:
            raise InvalidInput(
                f"place= names {[*where]!r}: the session has no backend {unknown[0]!r}, it has "
                f"{', '.join(map(repr, by_name))}"
            )
        groups[group_name(where)] = Group([by_name[name] for name in where])
    return [*groups.values()]


class Group(HostBackend):
    """Runs AllReduce and Broadcast on ``members``, of which each has a memory of its own. Either
    all have streams, and copy from one another directly, or none has. Raises ``InvalidInput`` for
    others."""

    def __init__(self, members: Sequence[Backend]) -> None:
        self.members = tuple(members)
        self.name = group_name([member.name for member in members])
        self.memory = " + ".join([member.memory for member in members])
        self._devices = tuple([m.device for m in members if m.device is not None])
        if fault := self._fault():
            raise InvalidInput(f"place= names {[m.name for m in members]!r}: {fault}")

    def _fault(self) -> str:
        """Why the members cannot be a group; empty if they can."""
        members = self.members
        if len({member.memory for member in members}) < max(2, len(members)):
            return "several backends are needed, each with a memory of its own"
        if not self._devices:
            return ""
        if len(self._devices) < len(members):
            return "some of them have streams, and others have none"
        lacking = [(a, b) for a in members for b in members if copier(a, b) is None]
        texts = [f"nothing copies from {a.name} to {b.name}" for a, b in lacking]
        return texts[0] if texts else ""

    def kernel(self, node: Node, types: Sequence[Type | None]) -> Kernel | None:
        if node.op.full_name not in _COLLECTIVE:
            return None
        node.op.compile(node, types)  # raises what is wrong with the node
        if len(node.outputs) != len(self.members):
            return None
        if node.op.name == "Broadcast":
            return self._kernel(self._broadcast())
        return self._all_reduce(node, types)

    def _kernel(self, function: Callable[..., RunValue]) -> Kernel:
        return Kernel(function, device=DeviceWork(self._devices, self.members))

    def _broadcast(self) -> Callable[..., RunValue]:
        copies = [_copy(self.members[0], member) for member in self.members]
        return lambda x: tuple([copy(x) for copy in copies])

    def _all_reduce(self, node: Node, types: Sequence[Type | None]) -> Kernel | None:
        members, reduction = self.members, reduction_node(node)
        kernels = [member.kernel(reduction, types) for member in members]
        if None in kernels:
            return None
        copies = [[_copy(source, target) for source in members] for target in members]
        functions = [kernel.function for kernel in kernels if kernel is not None]

        def function(*inputs: RunValue) -> RunValue:
            outputs = []
            for i, (combine, copy) in enumerate(zip(functions, copies, strict=True)):
                operands = [x if k == i else copy[k](x) for k, x in enumerate(inputs)]
                outputs.append(combine(*operands))
            return tuple(outputs)

        return self._kernel(function)

    @property
    def workers(self) -> int:
        return 1


def _copy(source: Backend, target: Backend) -> Callable[[Any], Any]:
    """Return a function that copies a value from the memory of ``source`` into a new one in that of
    ``target``: directly, or through the host."""
    direct = copier(source, target)
    if direct is not None:
        return direct
    if HOST not in (source.memory, target.memory):
        return lambda value: target.from_host(source.to_host(value))
    if source.memory != HOST:
        return source.to_host
    return target.from_host if target.memory != HOST else lambda value: value.copy()
