"""The protocols of backends and devices, and transfers between their memories."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from penstock.core import capability
from penstock.core.types import RunValue, RunValues, TensorType, Type
from penstock.host.malloc import aligned_bytes
from penstock.host.threads import core_budget
from penstock.ir.graph import Node, Value
from penstock.ir.kernel import Kernel
from penstock.ops.internal.transfer import HOST
from penstock.ops.onnx.control_flow import row_type, stack
from penstock.ops.work_estimate import HOST_RATES, RateTable, Workload, estimate, host_workload


class Event(Protocol):
    """A point in a stream of a device."""

    def query(self) -> bool:
        """Whether the stream has passed the point; called on one thread for all runs."""
        ...


class DeviceStream(Protocol):
    """An in-order queue of a device, which runs while the host continues."""

    def call(self, function: Callable[..., RunValue], *arguments: RunValue) -> RunValue:
        """Call ``function``; the work that it submits to the device goes to this stream. The device
        keeps the memory that the work reads alive until it is done.

        Args:
            function: What submits work to the device.
            arguments: Its arguments.
        """
        ...

    def record(self) -> Event:
        """The event that follows all work on the stream now."""
        ...

    def wait(self, event: Event) -> None:
        """Let work that is submitted from now on wait for an event.

        Args:
            event: An event of another stream.
        """
        ...

    # For kernels that need workspace, a stream also has ``allocate(nbytes: int)``: uninitialized
    # memory of its device, which all kernels on the stream share (``Kernel.workspace``).


class Device(Protocol):
    """An accelerator that runs kernels asynchronously: a call only submits a kernel to a stream."""

    def stream(self) -> DeviceStream:
        """A new stream."""
        ...


class Backend(Protocol):
    """Where kernels run: offers kernels, allocates and copies. ``name`` is the name that users
    give. ``memory`` names the memory, layout included, of the values that its kernels read and
    write: backends of one ``memory`` share values without copies."""

    name: str

    @property
    def memory(self) -> str: ...

    @property
    def device(self) -> Device | None:
        """The device if kernels are asynchronous; None if calls return when the work is done.
        Kernels that put work on other devices of the backend name these (``DeviceWork.devices``).

        Calls outside of any stream run in order. There ``to_host`` waits for the value, and
        ``from_host`` until the copy is complete, since any stream may then read it."""
        ...

    @property
    def fuses(self) -> bool:
        """Whether it has kernels for fused nodes (``ops/internal/fused.py``)."""
        ...

    def kernel(self, node: Node, types: Sequence[Type | None]) -> Kernel | None:
        """The kernel of a node, None if the backend has none. Raises ``ShapeError`` for types that
        the operation does not accept.

        Called once for each node of a compilation (``KernelTable``); of several backends, that with
        the fewest ``seconds`` is asked first.

        Args:
            node: The node.
            types: The types of its inputs, None where unknown.
        """
        ...

    def seconds(self, node: Node) -> float:
        """A rough estimate of the time of a node that has not been measured; ``math.inf`` if there
        is no kernel for nodes of its kind. Called before ``kernel``; any other estimate of a node
        without a kernel is ignored.

        Args:
            node: The node, with the types that are known of its values.
        """
        ...

    def allocate(self, nbytes: int) -> np.ndarray:
        """Uninitialized memory as uint8, aligned to 64 bytes.

        Args:
            nbytes: Bytes of memory.
        """
        ...

    def to_host(self, value: RunValue) -> RunValue:
        """A value of this backend's memory as a new NumPy array (or a list of these).

        Args:
            value: A value of this memory, or a list of these.
        """
        ...

    def from_host(self, value: RunValue) -> RunValue:
        """A NumPy array (or a list of these) as a value of this backend's memory.

        Args:
            value: A NumPy array, or a list of these.
        """
        ...

    @property
    def workers(self) -> int:
        """The most steps of one run that may run at once on this backend."""
        ...

    @property
    def threads(self) -> int:
        """The most threads that one kernel uses now."""
        ...

    @property
    def threads_of_caller(self) -> bool:
        """Whether the number of threads is a setting of each thread that compiles, binds and runs
        kernels, and not of the whole process."""
        ...

    def set_threads(self, threads: int) -> None:
        """Bound the threads of kernels from now on.

        Args:
            threads: The most threads for a kernel.
        """
        ...

    def save_memory(self) -> None:
        """Give back memory that no kernel needs. Called by ``Session.trim`` and ``close``."""
        ...


# Capabilities: what a backend may have besides, each a protocol that ``capability`` asks for.

BackendValue = Any
"""a value in the memory of a backend, or this memory"""


class HasArena(Protocol):
    """Plans values of kernels with ``into`` into memory of its own."""

    def arena(self, nbytes: int) -> BackendValue:
        """Uninitialized memory there."""

    def view(
        self,
        arena: BackendValue,
        start: int,
        offset: int,
        type_: TensorType,
        strides: Sequence[int] | None,
    ) -> BackendValue:
        """A value of a type in an arena, with the elements of NumPy's.

        Args:
            arena: The memory.
            start: Where a value begins of which this is perhaps a part.
            offset: Where this begins in that, in bytes of NumPy's elements.
            type_: The type.
            strides: In bytes of NumPy's elements; None for C order.
        """


class CapturesGraphs(Protocol):
    """Makes graphs of the device, each of which one launch replays (``codegen/captures.py``)."""

    @property
    def captured(self) -> Callable[..., RunValue]:
        """``captured(body, fresh, report)`` is ``body`` as such a graph."""


class EntersRuns(Protocol):
    """Runs in a setting of a library."""

    def in_runs(self, function: Callable[..., RunValue]) -> Callable[..., RunValue]:
        """``function`` as a run calls it."""


class BoundsThreads(Protocol):
    """Has a number of threads that is a setting of the process."""

    @property
    def bounded(self) -> Callable[[int, Callable[..., RunValue]], Callable[..., RunValue]]:
        """``bounded(threads, function)`` is ``function`` as a run calls it that may use these."""


class TakesTensors(Protocol):
    """Takes and gives values of callers, in a memory of its own."""

    @property
    def gives(self) -> str:
        """The name of the form of results (``returns=``)."""

    def adopt(self, value: BackendValue) -> tuple[BackendValue, TensorType] | None:
        """A value of any library as one of its own, without a copy where that is possible, and its
        type; None for one that it does not take."""

    def give(self, value: BackendValue) -> BackendValue:
        """A result as callers get it, of its own memory or the host's."""

    def leaving(self, value: BackendValue) -> BackendValue:
        """A result as arrays that are there when the current stream has come so far."""


class CopiesPeer(Protocol):
    """Copies values from memories of other backends directly."""

    def copy_from(self, source: RunValue) -> Callable[[BackendValue], BackendValue] | None:
        """Return a function that copies from the backend ``source``, or None."""


class StacksRows(Protocol):
    """Keeps rows that loops collect in its memory."""

    def stack(self, values: Sequence[BackendValue], axis: int) -> BackendValue:
        """A new value with the ``values``, at least one, along a new axis, as of ``np.stack``."""


class PacksConstants(Protocol):
    """Copies constants into orders of its own, which a saved session then holds."""

    def copies_of(self, constants: Sequence[Value]) -> Sequence[Mapping[str, np.ndarray]]:
        """The copies of each constant, by name."""

    def saved_copies(self, constant: np.ndarray, copies: Mapping[str, np.ndarray]) -> object:
        """As long as what it returns lives, new kernels use such copies instead of their own."""


class RoundsOperands(Protocol):
    """May round the operands of products to bfloat16."""

    @property
    def narrow(self) -> bool:
        """Whether it does (``precision="bf16"``)."""


class HasHostBackend(Protocol):
    """Needs a backend of the host for what it has no kernel for."""

    @property
    def host_backend(self) -> str:
        """The name of the one that a session gets which has none, as a fallback only."""


class FallbackOnly(Protocol):
    """May run only the nodes that no other backend has a kernel for."""

    @property
    def fallback_only(self) -> bool:
        """Whether it does."""


class Outruns(Protocol):
    """Is taken to be faster than another for some nodes, whatever estimates say."""

    def outruns(self, node: Node) -> str:
        """The name of the other; empty for nodes whose estimates are compared.

        Args:
            node: The node.
        """


class HostBackend:
    """A base class of backends in the host's memory. They add a name and ``kernel``, and if their
    kernels have threads of their own, ``threads`` and ``set_threads``."""

    memory = HOST
    device: Device | None = None
    fuses = False
    threads_of_caller = False
    fallback_only = False
    name: str
    rates: RateTable = HOST_RATES

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.name!r})"

    def save_memory(self) -> None:
        """Nothing is kept."""

    def seconds(self, node: Node) -> float:
        """As ``Backend.seconds``: by ``rates`` and the work of the node.

        Args:
            node: The node.
        """
        return estimate(self.rates, self.work(node))

    def work(self, node: Node) -> Workload | None:
        """The work of a node in the units of ``rates``; None if there is no kernel of its kind.

        Args:
            node: The node.
        """
        return host_workload(node)

    def unbound_cost(self, node: Node) -> float:
        """The seconds that a call of a node takes more if shapes are known only during the run.

        Args:
            node: The node.
        """
        return 0.0

    def allocate(self, nbytes: int) -> np.ndarray:
        """Uninitialized memory as uint8, aligned to 64 bytes.

        Args:
            nbytes: Bytes of memory.
        """
        return aligned_bytes(nbytes)

    def to_host(self, value: RunValue) -> RunValue:
        """The value itself: it is in the host's memory.

        Args:
            value: A value.
        """
        return value

    def from_host(self, value: RunValue) -> RunValue:
        """The value itself: it is in the host's memory.

        Args:
            value: A value.
        """
        return value

    @property
    def workers(self) -> int:
        return core_budget()

    @property
    def threads(self) -> int:
        return 1

    def set_threads(self, threads: int) -> None:
        """Nothing by default: kernels have one thread.

        Args:
            threads: The most threads for a kernel.
        """


Where = str | Sequence[str]
"""what ``place=`` says of a node: the name of a backend, or those of the members of a group"""


def group_name(where: Where) -> str:
    """The name of a backend, or of the group of several."""
    return where if isinstance(where, str) else "+".join(where)


def copier(source: Backend, target: Backend) -> Callable[[Any], Any] | None:
    """Return a function that copies values from the memory of ``source`` directly to that of
    ``target``; None if a copy must go through the host's memory."""
    peer = capability(target, CopiesPeer)
    return None if peer is None else peer.copy_from(source)


def stacks(backend: Backend) -> bool:
    """Whether rows that loops collect stay in the memory of a backend."""
    return backend.memory != HOST and capability(backend, StacksRows) is not None


def has_arenas(backend: Backend) -> bool:
    """Whether values of a memory other than the host's are planned into arenas there."""
    return backend.memory != HOST and capability(backend, HasArena) is not None


def is_fallback(backend: Backend) -> bool:
    """Whether a backend runs only what no other one has a kernel for."""
    fallback = capability(backend, FallbackOnly)
    return fallback is not None and fallback.fallback_only


def stack_kernel(node: Node, backend: Backend) -> Kernel:
    """The kernel that joins the rows that a loop has collected in the memory of ``backend``."""
    rows_of = capability(backend, StacksRows)
    assert rows_of is not None
    join = rows_of.stack
    axis, backward = node.attrs["axis"], node.attrs["backward"]
    (rows,) = node.inputs
    assert rows is not None
    type_ = row_type(rows.type, axis)

    def function(rows: RunValues) -> Any:
        # Libraries cannot tell the type and the shape of rows that there are none of.
        if not rows:
            return backend.from_host(stack((), axis, backward, type_))
        return join(rows[::-1] if backward else rows, axis)

    return Kernel(function)


def transfer_kernel(node: Node, backends: Sequence[Backend]) -> Kernel:
    """The kernel of a transfer between two of ``backends``, named in its attributes. Names of other
    backends, and of those in the host's memory, mean the host."""
    remote = {backend.name: backend for backend in backends if backend.memory != HOST}
    source, target = remote.get(node.attrs["source"]), remote.get(node.attrs["target"])
    if target is None:
        assert source is not None
        return Kernel(source.to_host)
    if source is None:
        return Kernel(target.from_host)
    copy = copier(source, target)
    assert copy is not None
    return Kernel(copy)
