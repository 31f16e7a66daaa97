"""What a backend offers, and how values get from the memory of one to that of another."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np

from penstock.host.threads import core_budget
from penstock.ir.graph import Node
from penstock.ir.layout import ALIGNMENT, address
from penstock.ir.op import Kernel
from penstock.ops.internal.transfer import HOST
from penstock.ops.work_estimate import seconds
from penstock.types import Type


class Event(Protocol):
    """A point in the work of a device's stream."""

    def query(self) -> bool:
        """Whether the stream has passed it."""
        ...

    def synchronize(self) -> None:
        """Block until it has."""
        ...


class DeviceStream(Protocol):
    """A queue of a device: what is put on it runs in order, while the host goes on."""

    def call(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Call ``function``, so that what it puts on the device is put on this stream. The device
        keeps what it reads until it has, whether or not others hold it."""
        ...

    def record(self) -> Event:
        """The point behind all that is on the stream now."""
        ...

    def wait(self, event: Event) -> None:
        """Let what is put on the stream from now on wait for a point of another."""
        ...


class Device(Protocol):
    """What runs kernels while the host goes on: a call of one only puts it on a stream."""

    def stream(self) -> DeviceStream:
        """A stream of our own."""
        ...


class Backend(Protocol):
    """Where kernels run: offers kernels, allocates and copies.

    ``name`` is what users call it. ``memory`` names the memory and the layout of the values that it
    takes and makes: backends of the same ``memory`` hand values to one another as they are.
    """

    name: str

    @property
    def memory(self) -> str: ...

    @property
    def device(self) -> Device | None:
        """The device that goes on by itself with what is called, None where calls return when all
        is done. What is called outside of any stream of it comes in order all the same; there
        ``to_host`` waits for what it brings over, and ``from_host`` until it is there, since
        constants are then read on any stream."""
        ...

    @property
    def fuses(self) -> bool:
        """Whether it has kernels for fused nodes (``ops/fused.py``)."""
        ...

    def kernel(self, node: Node, types: Sequence[Type | None]) -> Kernel | None:
        """The kernel of a node whose inputs have these types, as far as they are known; None if
        there is none. Raises ``ShapeError`` for types that the operation never takes.

        A compilation asks once for each node and remembers the answer (``KernelTable``); where
        several backends can run a node, it asks them in the order of their ``seconds``."""
        ...

    def seconds(self, node: Node) -> float:
        """Roughly the seconds that a node takes, for where nothing has been measured. Asked before
        ``kernel``, and of any node: what it says of those without a kernel does not matter."""
        ...

    def allocate(self, nbytes: int) -> np.ndarray:
        """``nbytes`` of memory as uint8, aligned to 64 bytes; its contents are arbitrary."""
        ...

    def to_host(self, value: Any) -> Any:
        """A value of this backend's memory as a new NumPy array (or a list of these)."""
        ...

    def from_host(self, value: Any) -> Any:
        """A NumPy array (or a list of these) as a value of this backend's memory."""
        ...

    @property
    def workers(self) -> int:
        """How many steps of one run may go on at once on this backend, at most."""
        ...

    @property
    def threads(self) -> int:
        """How many threads one kernel uses now, at most."""
        ...

    @property
    def threads_of_caller(self) -> bool:
        """Whether the number of threads is a setting of each thread that compiles, binds and runs
        kernels, and not of the whole process."""
        ...

    def set_threads(self, threads: int) -> None:
        """Let kernels use as many threads, at most, from now on."""
        ...


class HostBackend:
    """What backends on the host's memory have in common. They add a name and ``kernel``, and if
    their kernels have threads of their own, ``threads`` and ``set_threads``."""

    memory = HOST
    device = None
    fuses = False

    def seconds(self, node: Node) -> float:
        return seconds(node)

    def allocate(self, nbytes: int) -> np.ndarray:
        memory = np.empty(nbytes + ALIGNMENT, np.uint8)
        start = -address(memory) % ALIGNMENT
        return memory[start : start + nbytes]

    def to_host(self, value: Any) -> Any:
        return value

    def from_host(self, value: Any) -> Any:
        return value

    @property
    def workers(self) -> int:
        return core_budget()

    @property
    def threads(self) -> int:
        return 1

    @property
    def threads_of_caller(self) -> bool:
        return False

    def set_threads(self, threads: int) -> None:
        pass


def transfer_kernel(node: Node, backends: Sequence[Backend]) -> Kernel:
    """The kernel of a transfer to or from the host of two of ``backends``, named in its attributes.

    A name that is none of theirs stands for the host, as does that of a backend there.
    """
    away = {backend.name: backend for backend in backends if backend.memory != HOST}
    source, target = away.get(node.attrs["source"]), away.get(node.attrs["target"])
    if target is None:
        assert source is not None
        return Kernel(source.to_host)
    assert source is None
    return Kernel(target.from_host)


def check_protocol(backend: object) -> None:
    """Raise ``TypeError`` for a backend that lacks ``kernel``, or answers it for another class than
    the one that overrides ``supports`` or ``compile``, which were once asked in its place."""
    for cls in type(backend).__mro__:
        if "kernel" in vars(cls):
            return
        old = [name for name in ("supports", "compile") if name in vars(cls)]
        if old:
            raise TypeError(
                f"backends= has a {type(backend).__name__} with {' and '.join(old)}(): implement "
                "kernel(node, types), which returns a Kernel, or None for nodes that the backend "
                "cannot run; it replaces supports, compile and forget"
            )
    if not callable(getattr(backend, "kernel", None)):
        raise TypeError(
            f"backends= has a {type(backend).__name__}, which is no backend: it takes names of "
            "backends, and objects with the methods of penstock.backends.base.Backend, such as "
            "kernel(node, types)"
        )
