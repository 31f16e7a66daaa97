"""A backend with a memory of its own, for tests of placement.

It computes with NumPy, on values in ``Far`` boxes that NumPy itself refuses, so that a missing
transfer fails.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from penstock.backends.base import Backend
from penstock.backends.numpy import NumpyBackend
from penstock.core.types import TensorType, Type
from penstock.ir.graph import Node
from penstock.ir.kernel import Kernel, array_of
from penstock.tuning.measure import Cost
from tests.support.timing import SOON


@dataclass(frozen=True)
class Far:
    """An array in the memory of a ``FarBackend``."""

    array: np.ndarray
    memory: str

    __array_ufunc__ = None

    @property
    def nbytes(self) -> int:
        return self.array.nbytes

    def __array__(self, *arguments: Any, **options: Any) -> np.ndarray:
        raise TypeError("this value is not in the host's memory")


class FarBackend:
    """Runs ``operations`` (all, if not given) with NumPy, on values of its own memory."""

    threads = 1
    threads_of_caller = False
    device = None
    fuses = False

    def __init__(
        self,
        name: str = "far",
        operations: Collection[str] | None = None,
        memory: str | None = None,
        workers: int = 1,
    ) -> None:
        self.name = name
        self.memory = name if memory is None else memory
        self.workers = workers
        self.operations = operations
        self.near: Collection[str] = ()
        self.ran: Counter[str] = Counter()
        self.moved: Counter[str] = Counter()
        self.on_threads: set[str] = set()
        self._numpy = NumpyBackend()

    def seconds(self, node: Node) -> float:
        return self._numpy.seconds(node)

    def kernel(self, node: Node, types: Sequence[Type | None]) -> Kernel | None:
        all_types = [*types, *(v.type for v in node.outputs if v is not None)]
        if not all(isinstance(type_, TensorType) for type_ in all_types if type_ is not None):
            return None
        if self.operations is not None and node.op.name not in self.operations:
            return None
        kernel = node.op.compile(node, types)

        def run(*inputs: Any) -> Any:
            self.ran[node.op.name] += 1
            self.on_threads.add(threading.current_thread().name)
            result = kernel.function(*map(self._open, inputs))
            if isinstance(result, tuple):
                return tuple(Far(array_of(x), self.memory) for x in result)
            return Far(array_of(result), self.memory)

        return replace(Kernel(run), view=kernel.view)

    def _open(self, value: Any) -> Any:
        if value is None:
            return None
        assert isinstance(value, Far), f"{value!r} is not in the memory of {self.name}"
        assert value.memory == self.memory
        return value.array

    def allocate(self, nbytes: int) -> np.ndarray:
        return self._numpy.allocate(nbytes)

    def to_host(self, value: Far) -> np.ndarray:
        self.moved["to_host"] += 1
        return self._open(value).copy()

    def from_host(self, value: np.ndarray) -> Far:
        self.moved["from_host"] += 1
        assert isinstance(value, np.ndarray)
        return Far(value.copy(), self.memory)

    def stack(self, values: Sequence[Far], axis: int) -> Far:
        self.moved["stacked"] += 1
        return Far(np.stack([self._open(value) for value in values], axis), self.memory)

    def copy_from(self, source: Any) -> Callable[[Far], Far] | None:
        """Straight from those that are near."""
        if source.name not in self.near:
            return None

        def copy(value: Far) -> Far:
            self.moved["direct"] += 1
            assert value.memory == source.memory
            return Far(value.array.copy(), self.memory)

        return copy

    def set_threads(self, threads: int) -> None:
        pass

    def save_memory(self) -> None:
        pass


class MeetingBackend(FarBackend):
    """A far backend whose kernels wait until another one runs, on whichever of these backends."""

    together = threading.Barrier(2, timeout=SOON)

    def kernel(self, node: Node, types: Sequence[Type | None]) -> Kernel | None:
        kernel = super().kernel(node, types)
        if kernel is None:
            return None

        def function(*inputs: Any) -> Any:
            self.together.wait()
            return kernel.function(*inputs)

        return Kernel(function)


class TanhIsFar:
    """Costs by which Tanh belongs on a far backend, where it takes a millisecond."""

    def cost(self, node: Node, backend: Backend, threads: int | None) -> Cost:
        if node.op.name != "Tanh":
            return Cost(1e-5)
        return Cost(1.0 if backend.name == "numpy" else 1e-3)

    def transfer(self, source: str, target: str, nbytes: int) -> float:
        return 1e-6
