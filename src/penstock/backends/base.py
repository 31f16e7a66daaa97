"""What a backend offers, and how values get from the memory of one to that of another."""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

from penstock.errors import InternalError
from penstock.ir import Node
from penstock.ops.base import Kernel, Op, Types
from penstock.ops.infer import same_type
from penstock.types import Type

HOST = "host"
"""The memory that NumPy arrays are in. What enters and leaves a graph is there."""


class Backend(Protocol):
    """Where kernels run: says what it supports, compiles it, allocates and copies.

    ``name`` is what users call it. ``memory`` names the memory and the layout of the values that it
    takes and makes: backends of the same ``memory`` hand values to one another as they are.
    """

    name: str
    memory: str

    def supports(self, node: Node, types: Sequence[Type | None]) -> bool:
        """Whether ``compile`` would succeed for this node and these input types."""
        ...

    def compile(self, node: Node, types: Sequence[Type | None]) -> Kernel:
        """The kernel of a node; raises ``ShapeError`` for types the operation never takes."""
        ...

    def allocate(self, nbytes: int) -> np.ndarray:
        """``nbytes`` of memory as uint8, aligned to 64 bytes; its contents are arbitrary."""
        ...

    def to_host(self, value: Any) -> Any:
        """A value of this backend's memory as a NumPy array (or a list of these)."""
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

    def set_threads(self, threads: int) -> None:
        """Let kernels use as many threads, at most, from now on; for the whole process."""
        ...


def _made_of_two(node: Node, types: Types) -> Kernel:
    raise InternalError("the kernel of a transfer is made of two backends")


TRANSFER = Op("Transfer", "penstock", 1, 1, same_type, _made_of_two)
"""A value brought from the memory of one backend to that of another, the attributes ``source`` and
``target``. It is not in the table of operations: no file can ask for it."""


def is_transfer(node: Node) -> bool:
    """Whether ``node`` brings a value from one backend's memory to another's."""
    return node.op is TRANSFER


def transfer_kernel(node: Node, backends: Sequence[Backend]) -> Kernel:
    """The kernel of a transfer between two of ``backends``, named in its attributes."""
    by_name = {backend.name: backend for backend in backends}
    source, target = by_name[node.attrs["source"]], by_name[node.attrs["target"]]
    if source.memory == HOST:
        return Kernel(target.from_host)
    if target.memory == HOST:
        return Kernel(source.to_host)
    return Kernel(lambda value: target.from_host(source.to_host(value)))


class SingleThreaded:
    """While anybody is within one of these, each kernel of ``backends`` uses one thread.

    How many threads a library uses is a setting of the whole process: it changes when the first run
    enters, and back when the last one leaves.
    """

    def __init__(self, backends: Sequence[Backend]) -> None:
        self._backends = backends

    def enter(self) -> None:
        with _LOCK:
            for backend in self._backends:
                users, before = _SINGLE.get(backend.name, (0, 1))
                if not users:
                    before = backend.threads
                    if before > 1:
                        backend.set_threads(1)
                _SINGLE[backend.name] = users + 1, before

    def leave(self) -> None:
        with _LOCK:
            for backend in self._backends:
                users, before = _SINGLE.get(backend.name, (0, 1))
                if users == 1 and before > 1:
                    backend.set_threads(before)
                _SINGLE[backend.name] = max(users - 1, 0), before

    def __enter__(self) -> None:
        self.enter()

    def __exit__(self, *exception: object) -> None:
        self.leave()


_LOCK = threading.Lock()
# By name of the backend, how many runs want one thread, and how many threads there were before.
_SINGLE: dict[str, tuple[int, int]] = {}


def _forget() -> None:
    """A forked child has none of its parent's runs."""
    global _LOCK
    _LOCK = threading.Lock()
    _SINGLE.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)
