"""Segments on a device with streams, which run as asynchronous kernels.

A segment has its own executor. A call only enqueues the kernels, and copies of the results to the
host, on a stream of the device. The thread continues with other tokens; the results are delivered
when the event after the copies is set. The stream orders overlapping iterations, which share its
memory.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from penstock.core.types import RunValue, RunValues
from penstock.executors.base import Done, Executor
from penstock.executors.control import Control
from penstock.host.event_watch import EVENTS


class DeviceSegment:
    """Wraps the executor ``inner``, whose outputs are on the device of ``backend``, and copies the
    outputs to the host. All other attributes are those of ``inner``."""

    asynchronous = True

    def __init__(self, inner: Executor, backend: Any) -> None:
        self._inner = inner
        self._stream = backend.device.stream()
        self._leaving = backend.leaving

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def run(self, inputs: RunValues, control: Control) -> tuple[RunValue, ...]:
        outputs, event = self._put(inputs, control)
        event.synchronize()
        return outputs

    def run_async(self, inputs: RunValues, control: Control, done: Done) -> None:
        try:
            outputs, event = self._put(inputs, control)
        except BaseException as error:
            done(None, error)
        else:
            # One thread polls the events of all runs, so no run needs a thread to wait.
            EVENTS.add(event.query, partial(done, outputs, None))

    def _put(self, inputs: RunValues, control: Control) -> tuple[tuple[Any, ...], Any]:
        """Enqueue a run. Return its outputs, and the event after which they are valid."""
        with self._stream.current():
            outputs = self._inner.run(inputs, control)
            return tuple(map(self._leaving, outputs)), self._stream.record()
