"""Kernels captured into a graph of a device, which one launch replays."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch

from penstock.backends.torch.device import TorchDevice
from penstock.core.types import RunValue, RunValues
from penstock.host.log import WARNING, log

WARM_UPS = 2
"""calls before the capture, in which libraries choose their kernels and allocate what they keep"""


class CaptureReport(Protocol):
    """An observer of a capture."""

    def captured(self) -> None: ...

    def failed(self, reason: str) -> None: ...


class CapturedCalls:
    """``body``, a function of tensors of fixed shapes that returns a tuple of new ones, as a graph.

    The first calls run it; then it is captured, with inputs and outputs in memory of the graph. A
    call copies its inputs there, launches the graph, and returns its outputs: those that are
    ``fresh`` as copies, the others until the next call. If the capture fails, ``report`` is told
    why, and calls run the function, as they do where another call is under way.
    """

    def __init__(
        self,
        body: Callable[..., tuple[Any, ...]],
        fresh: Sequence[bool],
        report: CaptureReport,
        device: TorchDevice,
    ) -> None:
        self._body = body
        self._fresh = tuple(fresh)
        self._device = device
        self._report = report
        self._warm_ups = WARM_UPS
        self._graph: Any = None
        self._inputs: list[torch.Tensor] = []
        self._outputs: tuple[RunValue, ...] = ()
        self._lock = threading.Lock()

    def __call__(self, *inputs: RunValue) -> tuple[RunValue, ...]:
        # There is one set of memory: a second thread does not wait for it.
        if self._warm_ups < 0 or not self._lock.acquire(blocking=False):
            return self._body(*inputs)
        try:
            if self._warm_ups:
                self._warm_ups -= 1
                return self._body(*inputs)
            if self._graph is None and not self._capture(inputs):
                return self._body(*inputs)
            for own, given in zip(self._inputs, inputs, strict=True):
                # A graph reads and writes the addresses that it was captured with.
                own.copy_(given, non_blocking=True)
            self._graph.replay()
            pairs = zip(self._outputs, self._fresh, strict=True)
            # The next launch overwrites what this one has computed.
            return tuple([value.clone() if fresh else value for value, fresh in pairs])
        finally:
            self._lock.release()

    def _capture(self, inputs: RunValues) -> bool:
        """Capture the function; whether that succeeds."""
        runtime = self._device.runtime
        try:
            own = [torch.empty_like(x) for x in inputs]
            graph = runtime.graph()
            with runtime.capture(graph):
                outputs = self._body(*own)
        except Exception as error:
            self._warm_ups = -1
            reason = f"{type(error).__name__}: {error}"
            self._report.failed(reason)
            log(WARNING, "kernels on %s are not captured: %s", self._device.torch_device, reason)
            return False
        self._graph, self._inputs, self._outputs = graph, own, outputs
        self._report.captured()
        return True
