"""The kernels of one compilation: each backend is asked once for each node."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from penstock.backends.base import Backend, stack_kernel
from penstock.core.checkpoints import checkpoint
from penstock.core.records import dataclass
from penstock.core.types import Type
from penstock.ir.contract import checked_kernel
from penstock.ir.graph import Node, Value
from penstock.ir.kernel import Kernel
from penstock.ir.op import Attrs
from penstock.ops.internal.transfer import (
    HOST,
    NO_OTHER_PLACES,
    REORDER,
    STACK,
    OtherPlaces,
    Place,
    is_transfer,
)


@dataclass(frozen=True, slots=True, eq=False)
class _Answer:
    """The kernel of a node with these attributes, whose inputs and outputs have these types and
    constants; None if the backend has none, and ``error`` if it raised."""

    attrs: Attrs
    types: list[Type | None]
    constants: list[Value | None]
    kernel: Kernel | None
    error: Exception | None


class KernelTable:
    """The answers to ``Backend.kernel`` during one compilation, by backend and node.

    Fusion, placement and the plan ask for the kernels of the same nodes. The table passes each
    question on once, and again only if the types or constants of the node have changed since. It
    lives as long as the compilation: kernels that are not chosen go with it.
    """

    __slots__ = ("_answers",)

    def __init__(self) -> None:
        self._answers: dict[tuple[str, Node], _Answer] = {}

    def kernel(self, backend: Backend, node: Node) -> Kernel | None:
        """The kernel of ``node`` on ``backend``; None if it has none. Raises what the backend
        raises, such as ``ShapeError`` for types that the operation never takes."""
        answer = self._answer(backend, node)
        if answer.error is not None:
            raise answer.error
        return answer.kernel

    def accepts(self, backend: Backend, node: Node) -> bool:
        """Whether ``backend`` has a kernel for ``node``, or an error that says why no run of the
        node can succeed. Never raises."""
        answer = self._answer(backend, node)
        return answer.kernel is not None or answer.error is not None

    def without_state(self) -> KernelTable:
        """A copy without the kernels of impure operations, which may keep state from call to call
        (a generator of random numbers): for runs that must leave no trace, such as measurements."""
        copy = KernelTable()
        copy._answers = {key: answer for key, answer in self._answers.items() if key[1].op.pure}
        return copy

    def _answer(self, backend: Backend, node: Node) -> _Answer:
        key = (backend.name, node)
        answer = self._answers.get(key)
        attrs, inputs = node.attrs, node.inputs
        types = [None if v is None else v.type for v in (*inputs, *node.outputs)]
        constants = [v if v is not None and v.is_constant else None for v in inputs]
        # Values are compared by identity.
        same = answer and types == answer.types and constants == answer.constants
        if answer is None or not same or attrs is not answer.attrs:
            checkpoint()  # a library may take milliseconds to choose a kernel
            kernel, error = None, None
            try:
                if node.op is STACK:
                    kernel = stack_kernel(node, backend)
                else:
                    kernel = backend.kernel(node, types[: len(inputs)])
                kernel = checked_kernel(node, kernel, backend)
            except Exception as raised:
                error = raised.with_traceback(None)  # that would hold this table
            answer = self._answers[key] = _Answer(attrs, types, constants, kernel, error)
        return answer


def other_places(
    table: KernelTable, backends: Sequence[Backend], placement: Mapping[Node, Place]
) -> Callable[[Node], OtherPlaces]:
    """A function from a node to the places of its values, for ``PassContext.other_places``, by
    ``DeviceWork`` of its kernel."""
    remote = {backend.name: backend for backend in backends if backend.memory != HOST}
    home = next((Place(b.name, HOST) for b in backends if b.memory == HOST), Place(HOST, HOST))

    def places(node: Node) -> OtherPlaces:
        place = placement.get(node)
        backend = None if place is None else remote.get(place.backend)
        if backend is None or is_transfer(node):
            return NO_OTHER_PLACES
        try:
            kernel = table.kernel(backend, node)
        except Exception:  # the plan raises it, unless the node may never run
            return NO_OTHER_PLACES
        if kernel is None:
            return NO_OTHER_PLACES
        if kernel.device.backends_of_values:
            of_members = [
                Place(member.name, member.memory) for member in kernel.device.backends_of_values
            ]
            inputs = dict(enumerate(of_members[: len(node.inputs)]))
            return OtherPlaces(inputs, dict(enumerate(of_members)))
        results = range(len(node.outputs) if kernel.device.host_outputs else 0)
        on_host = dict.fromkeys(kernel.device.host_inputs, home)
        return OtherPlaces(on_host, dict.fromkeys(results, home))

    return places


def placed_kernels(
    table: KernelTable, backends: Sequence[Backend], placement: Mapping[Node, Place]
) -> Callable[[Node], tuple[Place, Kernel] | None]:
    """A function from a node to its place and kernel, for ``PassContext.compiled``: on the backend
    where it is placed, else on the first of ``backends`` that has a kernel; for a copy between
    layouts, on that of the host's memory that should be the fastest."""

    by_name = {backend.name: backend for backend in backends}

    def compiled(node: Node) -> tuple[Place, Kernel] | None:
        place = placement.get(node)
        if is_transfer(node):
            return None
        among = backends
        if place is not None:
            among = [by_name[place.backend]] if place.backend in by_name else []
        elif node.op is REORDER:
            hosts = [backend for backend in backends if backend.memory == HOST]
            among = sorted(hosts, key=lambda backend: backend.seconds(node))
        for backend in among:
            try:
                kernel = table.kernel(backend, node)
            except Exception:  # the plan raises it, unless the node may never run
                return None
            if kernel is not None:
                return place or Place(backend.name, backend.memory), kernel
        return None

    return compiled
