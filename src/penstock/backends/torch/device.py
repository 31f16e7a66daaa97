"""A device of torch as executors see it: streams, events and graphs.

What the backend asks of a device is in ``Runtime``: few functions, those of CUDA. Tests give
another object with these methods, whose streams are threads and whose events come late.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Protocol, TypeAlias

import torch

from penstock.core.errors import PenstockError, wrong_type
from penstock.core.types import RunValue, RunValues
from penstock.host.log import WARNING, log

TorchHandle: TypeAlias = Any
"""a stream, event or graph of the runtime: an object of torch, which has no types of its own"""


class Runtime:
    """The functions of a device, those of ``torch.cuda``. Streams and events have the methods of
    ``torch.cuda.Stream`` and ``torch.cuda.Event``; graphs have ``replay()``."""

    def stream(self, device: torch.device) -> TorchHandle:
        """A new stream."""
        return torch.cuda.Stream(device)

    def event(self) -> TorchHandle:
        """A new event, without times."""
        # Nobody reads times, and recording them would take longer.
        return torch.cuda.Event(enable_timing=False)

    def current(self, device: torch.device) -> TorchHandle:
        """The stream on which the calling thread puts its work."""
        return torch.cuda.current_stream(device)

    def on(self, stream: TorchHandle) -> AbstractContextManager[object]:
        """The calling thread puts its work on ``stream``."""
        return torch.cuda.stream(stream)

    def keep(self, tensor: torch.Tensor, stream: TorchHandle) -> None:
        """Do not give the memory of ``tensor`` to others before what is on ``stream`` has ended."""
        tensor.record_stream(stream)

    def synchronize(self, device: torch.device) -> None:
        """Wait for all work on the device."""
        torch.cuda.synchronize(device)

    def graph(self) -> TorchHandle:
        """A new graph, which captures nothing yet."""
        return torch.cuda.CUDAGraph()

    def capture(self, graph: TorchHandle) -> AbstractContextManager[object]:
        """Work that the calling thread puts on the device goes into ``graph``, and is not run."""
        # Other threads may allocate meanwhile, which other modes would take for a fault.
        return torch.cuda.graph(graph, capture_error_mode="thread_local")


class TorchDevice:
    """A device whose kernels are asynchronous, with the streams of ``runtime``."""

    def __init__(self, device: torch.device, runtime: Runtime) -> None:
        self.torch_device = device
        self.runtime = runtime
        self._here = threading.local()

    @property
    def in_call(self) -> bool:
        """Whether the calling thread is in a call of a stream."""
        return getattr(self._here, "in_call", False)

    @contextmanager
    def on(self, stream: TorchHandle) -> Iterator[None]:
        """The calling thread puts its work on ``stream``, one of torch's."""
        # Calls may nest: the inner one must not end the outer one.
        here, outer = self._here, self.in_call
        here.in_call = True
        try:
            with self.runtime.on(stream):
                yield
        finally:
            here.in_call = outer

    def stream(self, stream: TorchHandle = None) -> TorchStream:
        """A new stream; given one of torch's, that."""
        return TorchStream(
            self, self.runtime.stream(self.torch_device) if stream is None else stream
        )

    def current(self) -> TorchStream:
        """The stream on which the calling thread puts its work."""
        return TorchStream(self, self.runtime.current(self.torch_device))

    def keep_for_copy(self, tensor: torch.Tensor) -> None:
        """Keep the memory of a tensor until a copy to another device has read it, which torch puts
        on the current stream of this one."""
        self.runtime.keep(tensor, self.runtime.current(self.torch_device))

    def settle(self) -> None:
        """Wait for what the calling thread's stream has been given."""
        self.runtime.current(self.torch_device).synchronize()

    def settle_all(self) -> None:
        """Wait for all work on the device."""
        self.runtime.synchronize(self.torch_device)


class TorchStream:
    """A stream of torch; ``torch`` is the stream itself, for work of the user's own."""

    def __init__(self, device: TorchDevice, stream: TorchHandle) -> None:
        self.device = device
        self.torch = stream
        self._keep = device.runtime.keep

    def call(self, function: Callable[..., RunValue], *arguments: object) -> Any:
        """Call ``function``, whose kernels go to this stream. Memory that torch's allocator lent to
        another stream is kept from being lent again until this one has read it."""
        stream, keep, here = self.torch, self._keep, self.device.torch_device
        for argument in arguments:
            if isinstance(argument, torch.Tensor):
                if argument.device == here:
                    keep(argument, stream)
            elif isinstance(argument, list):
                for tensor in argument:
                    if isinstance(tensor, torch.Tensor):
                        keep(tensor, stream)
        with self.device.on(stream):
            return function(*arguments)

    def current(self) -> AbstractContextManager[object]:
        """The calling thread puts its work on this stream."""
        return self.device.on(self.torch)

    def record(self) -> TorchHandle:
        event = self.device.runtime.event()
        event.record(self.torch)
        return event

    def wait(self, event: TorchHandle) -> None:
        self.torch.wait_event(event)

    def query(self) -> bool:
        """Whether all that was put on the stream has ended."""
        return bool(self.torch.query())

    def allocate(self, nbytes: int) -> torch.Tensor:
        """Workspace of the stream, from torch's caching allocator."""
        with self.current():
            return torch.empty(nbytes, dtype=torch.uint8, device=self.device.torch_device)


def stream_on(device: Any) -> TorchStream:
    """The stream that a user names: one of ``TorchDevice.stream``, one of torch's on a CUDA device,
    or such a device or its name, which gets a new one. Raises ``PenstockError`` for a device that
    there is not, or that has no streams, ``TypeError`` for anything else."""
    if isinstance(device, TorchStream):
        return device
    if not isinstance(device, str | torch.device | torch.Stream):
        raise wrong_type(
            "device",
            device,
            'a stream of torch, a torch.device, or a name such as "cuda:0", or nothing for runs on '
            "the host",
        )
    stream = device if isinstance(device, torch.Stream) else None
    chosen = device_of(device if stream is None else stream.device)
    if chosen.type == "cpu":
        raise PenstockError(
            f"Stream(device={device!r}): torch's CPU device has no streams; Stream() is a queue of "
            "runs on the host"
        )
    return TorchDevice(chosen, Runtime()).stream(stream)


def device_of(device: str | torch.device | None) -> torch.device:
    """The device of that name. Raises ``PenstockError`` if there is none."""
    cuda = torch.cuda.is_available()
    try:
        chosen = torch.device(("cuda" if cuda else "cpu") if device is None else device)
    except RuntimeError as error:
        raise PenstockError(f"device={device!r} is no device of torch: {error}") from error
    if chosen.type == "cpu":
        # Without its number: torch takes "cpu" and "cpu:0" for two devices.
        return torch.device("cpu")
    if chosen.type != "cuda":
        raise PenstockError(f"device={device!r}: the torch backend runs on cpu and cuda devices")
    count = torch.cuda.device_count() if cuda else 0
    index = chosen.index
    if index is None and cuda:
        index = torch.cuda.current_device()
    if index is None or index >= count:
        raise PenstockError(f"device={device!r}: torch finds {count} CUDA devices here")
    # With its number, as tensors there have it: torch takes "cuda" and "cuda:0" for two.
    return torch.device("cuda", index)


# Kernels captured into a graph of a device, which one launch replays.


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
    ``fresh`` as copies, the others until the next call. If the capture fails, ``report`` gets
    the reason, and calls run the function, as they do where another call is under way.
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
