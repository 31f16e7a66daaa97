"""A device that does nothing but take its time, for runs that wait for it."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from penstock.backends.numpy import NumpyBackend
from penstock.core.types import Type
from penstock.ir.graph import Node
from penstock.ir.kernel import Kernel

CALL_S = 0.025


class Moment:
    """An event that comes at a time."""

    def __init__(self, when: float) -> None:
        self.when = when

    def query(self) -> bool:
        return time.perf_counter() >= self.when


class WaitingStream:
    """A stream that is busy for ``CALL_S`` with each kernel and each copy from the host."""

    def __init__(self) -> None:
        self.busy_until = 0.0

    def call(self, function: Callable[..., Any], *arguments: Any) -> Any:
        self.busy_until = max(time.perf_counter(), self.busy_until) + CALL_S
        return function(*arguments)

    def record(self) -> Moment:
        return Moment(self.busy_until)

    def wait(self, event: Moment) -> None:
        self.busy_until = max(self.busy_until, event.when)


class WaitingBackend(NumpyBackend):
    """Runs Neg on the device, as far as the clock is concerned; its values are there at once."""

    name = memory = "waiting"
    fuses = False

    @property
    def device(self) -> type[WaitingBackend]:
        return type(self)

    @staticmethod
    def stream() -> WaitingStream:
        return WaitingStream()

    def kernel(self, node: Node, types: Sequence[Type | None]) -> Kernel | None:
        return Kernel(np.negative) if node.op.name == "Neg" else None

    def to_host(self, value: np.ndarray) -> np.ndarray:
        return value.copy()

    def from_host(self, value: np.ndarray) -> np.ndarray:
        return value.copy()
