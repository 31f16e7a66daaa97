"""The protocols of backends and devices, and transfers between their memories."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np

from penstock.backends.costs import host_seconds
from penstock.core.types import Type
from penstock.host.threads import core_budget
from penstock.ir.graph import Node
from penstock.ir.layout import ALIGNMENT, address
from penstock.ir.op import Kernel
from penstock.ops.internal.transfer import HOST
from penstock.ops.onnx.control_flow import row_type, stack


class Event(Protocol):
    """A point in a stream of a device."""

    def query(self) -> bool:
        """Whether the stream has passed the point; called on one thread for all runs."""
        ...


class DeviceStream(Protocol):
    """An in-order queue of a device, which runs while the host continues."""

    def call(self, function: Callable[..., Any], *arguments: Any) -> Any:
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
        Kernels that put work on other devices of the backend name these (``Kernel.devices``).

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

    def to_host(self, value: Any) -> Any:
        """A value of this backend's memory as a new NumPy array (or a list of these).

        Args:
            value: A value of this memory, or a list of these.
        """
        ...

    def from_host(self, value: Any) -> Any:
        """A NumPy array (or a list of these) as a value of this backend's memory.

        Args:
            value: A NumPy array, or a list of these.
        """
        ...

    # A backend that copies constants into orders of its own may have ``copies_of(constant)``, which
    # returns these copies as arrays of bytes, by name; and ``saved_copies(constant, copies)``: as
    # long as what it returns lives, new kernels use such copies instead of making their own.

    # A backend may also have ``copy_from(source: Backend)``: a function that copies a value of that
    # backend's memory into a new one of its own, directly, or None if there is no such way.
    # ``stack(values: Sequence, axis: int)`` is a new value with at least one other along a new
    # axis, as of ``np.stack``; with it, rows that loops collect stay in this memory. And
    # ``openmp``, the address of ``omp_set_num_threads`` of the runtime that has its threads: of
    # backends with one address, one sets the threads of all.

    # A backend with a memory of its own whose kernels have ``into`` has ``arena(nbytes)``, memory
    # there, and ``view(arena, start, offset, type, strides)``, a value in it: ``start`` is where a
    # value begins of which this is perhaps a part, ``offset`` where in that it begins, ``strides``
    # (None: C order) and offsets are in bytes of NumPy's elements. Its views have the elements of
    # NumPy's. ``captured(body, fresh, report)``, if it is not None, is ``body`` as a graph of the
    # device that one launch replays (``codegen/captures.py``). ``in_runs(function)`` is
    # ``function`` as a run calls it, in a setting of the library; ``bounded(threads, function)`` as
    # a run calls it that may use this number of threads, if that is a setting of the process.

    # A backend with a memory of its own may take and give values of callers: ``adopt(value)`` is
    # a value of any library as one of its own, without a copy where that is possible, and its
    # ``TensorType``; None for one that it does not take. ``give(value)`` is a result as callers get
    # it, of its own memory or the host's, in the form that ``gives`` names (``returns=``).

    # A backend with a memory of its own may name one of the host in ``beside``. A session without
    # any gets that one: it ``stands_in``, for nodes that no other backend has a kernel for.

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
        kernels, as with OpenMP, and not of the whole process."""
        ...

    def set_threads(self, threads: int) -> None:
        """Bound the threads of kernels from now on.

        Args:
            threads: The most threads for a kernel.
        """
        ...

    def save_memory(self) -> None:
        """Give back memory that no kernel needs, and from now on prefer kernels that are freed as a
        whole over ones that leave something behind. Called by ``Session.trim`` and ``close``, and
        for sessions that meet many input shapes."""
        ...


class HostBackend:
    """A base class of backends in the host's memory. They add a name and ``kernel``, and if their
    kernels have threads of their own, ``threads`` and ``set_threads``."""

    memory = HOST
    device: Device | None = None
    fuses = False
    threads_of_caller = False
    name: str

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.name!r})"

    def save_memory(self) -> None:
        """Nothing is kept."""

    def seconds(self, node: Node) -> float:
        """An estimate from the work of the node, as ``Backend.seconds``.

        Args:
            node: The node.
        """
        return host_seconds(node)

    def allocate(self, nbytes: int) -> np.ndarray:
        """Uninitialized memory as uint8, aligned to 64 bytes.

        Args:
            nbytes: Bytes of memory.
        """
        memory = np.empty(nbytes + ALIGNMENT, np.uint8)
        start = -address(memory) % ALIGNMENT
        return memory[start : start + nbytes]

    def to_host(self, value: Any) -> Any:
        """The value itself: it is in the host's memory.

        Args:
            value: A value.
        """
        return value

    def from_host(self, value: Any) -> Any:
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
    """What copies a value from the memory of one backend straight to that of another; None if that
    takes a copy in the host's memory between."""
    copy_from = getattr(target, "copy_from", None)
    copy: Callable[[Any], Any] | None = None if copy_from is None else copy_from(source)
    return copy


def stacks(backend: Backend) -> bool:
    """Whether rows that loops collect stay in the memory of a backend."""
    return backend.memory != HOST and getattr(backend, "stack", None) is not None


def has_arenas(backend: Backend) -> bool:
    """Whether values of a memory other than the host's are planned into arenas there."""
    return backend.memory != HOST and getattr(backend, "arena", None) is not None


def stands_in(backend: Backend) -> bool:
    """Whether a backend runs only what no other one has a kernel for."""
    return bool(getattr(backend, "stands_in", False))


def stack_kernel(node: Node, backend: Backend) -> Kernel:
    """The kernel that joins the rows that a loop has collected in the memory of ``backend``."""
    join: Callable[..., Any] = backend.stack  # type: ignore[attr-defined]
    axis, backward = node.attrs["axis"], node.attrs["backward"]
    (rows,) = node.inputs
    assert rows is not None
    type_ = row_type(rows.type, axis)

    def function(rows: Sequence[Any]) -> Any:
        if not rows:
            return backend.from_host(stack((), axis, backward, type_))
        return join(rows[::-1] if backward else rows, axis)

    return Kernel(function)


def transfer_kernel(node: Node, backends: Sequence[Backend]) -> Kernel:
    """The kernel of a transfer between two of ``backends``, named in its attributes. Names of other
    backends, and of those in the host's memory, stand for the host."""
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
