"""Segments on a device of streams: their kernels are put there, and an event ends them.

A segment is run by an executor of its own, whose calls only put kernels on a stream of the device
and begin to bring the results back. The thread goes on with other tokens; the event behind the
results delivers them. Iterations that overlap follow one another on the stream, whose memory they
share.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from penstock.core.types import RunValue, RunValues
from penstock.executors.base import Done, Executor
from penstock.executors.control import Control
from penstock.host.event_watch import EVENTS


class DeviceSegment:
    """``inner``, which leaves its outputs on the device of ``backend``, as an executor that brings
    them to the host. All else is that of ``inner``."""

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
            # One thread looks at the events of all runs: none has to wait for its own.
            EVENTS.add(event.query, partial(done, outputs, None))

    def _put(self, inputs: RunValues, control: Control) -> tuple[tuple[Any, ...], Any]:
        """The outputs of a run, as arrays that are there when the event has come."""
        with self._stream.current():
            outputs = self._inner.run(inputs, control)
            return tuple(map(self._leaving, outputs)), self._stream.record()
