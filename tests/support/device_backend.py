"""A device that runs asynchronously: NumPy on threads of its own, late at random."""

from __future__ import annotations

import random
import threading
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from queue import SimpleQueue
from typing import Any

import numpy as np

from penstock.ir.kernel import DeviceWork, Kernel
from tests.support.far_backend import Far, FarBackend
from tests.support.timing import SOON, slow

MOST_JOBS = 500


class Later:
    """A value that a stream computes later."""

    def __init__(self) -> None:
        self.value: Any = None
        self.there = False

    def now(self) -> Any:
        assert self.there, "the value was read before it was computed: a wait is missing"
        return self.value


class Moment:
    """An event of a stream."""

    def __init__(self) -> None:
        self.passed = threading.Event()

    def query(self) -> bool:
        return self.passed.is_set()

    def synchronize(self) -> None:
        assert self.passed.wait(SOON)


class Lane:
    """A stream: one thread that runs its jobs in order, each after a delay."""

    def __init__(self, device: DelayedDevice) -> None:
        self.device = device
        self.jobs: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        threading.Thread(target=_work, args=(self.jobs, device.delay), daemon=True).start()
        weakref.finalize(self, self.jobs.put, None)

    def call(self, function: Callable[..., Any], *arguments: Any) -> Any:
        self.device.here.lane = self
        try:
            return function(*arguments)
        finally:
            self.device.here.lane = None

    def record(self) -> Moment:
        moment = Moment()
        self.put(moment.passed.set)
        return moment

    def wait(self, event: Moment) -> None:
        self.put(event.synchronize)

    def allocate(self, nbytes: int) -> np.ndarray:
        """Workspace of the stream."""
        self.device.allocated.append(nbytes)
        return np.zeros(nbytes, np.uint8)

    def put(self, job: Callable[[], None]) -> None:
        """Add a job; not ahead of the stream without end, as on a real device."""
        while self.jobs.qsize() > MOST_JOBS:
            slow(self.device.delay.most)
        self.jobs.put(job)


def _work(jobs: SimpleQueue[Callable[[], None] | None], delay: Callable[[], float]) -> None:
    np.seterr(all="ignore")
    while (job := jobs.get()) is not None:
        slow(delay())
        job()


class Clock:
    """Random delays of up to ``most`` seconds."""

    def __init__(self, most: float) -> None:
        self.most = most
        self.random = random.Random(7)
        self.lock = threading.Lock()

    def __call__(self) -> float:
        with self.lock:
            return self.random.choice([0.0, 0.0, self.random.uniform(0, self.most)])


class DelayedDevice:
    """``most``: the largest delay of a stream before each of its jobs, in seconds."""

    def __init__(self, most: float) -> None:
        self.delay = Clock(most)
        self.here = threading.local()
        self.streams = 0
        self.allocated: list[int] = []
        self.default = Lane(self)

    def stream(self) -> Lane:
        self.streams += 1
        return Lane(self)

    @property
    def lane(self) -> Lane:
        return getattr(self.here, "lane", None) or self.default


@contextmanager
def _marked(memories: Sequence[np.ndarray], nbytes: int) -> Iterator[None]:
    """Fail if others write to the workspace of a kernel while it works."""
    used = memories if nbytes else ()
    for memory in used:
        assert len(memory) >= nbytes
        assert not memory[:nbytes].any(), "two kernels use one workspace at the same time"
        memory[:nbytes] = 1
    slow(0)
    yield
    for memory in used:
        memory[:nbytes] = 0


class DelayedBackend(FarBackend):
    """Kernels return at once with a value that is computed later. Reading it, or copying it to the
    host, before its stream has computed it is an error.

    ``on`` has the numbers of the devices of operations that do not run on the first alone: each
    reads the inputs there, and the outputs are there when all have. ``workspace`` has the bytes
    that operations need, and refuse to share while they work. ``order`` has the operations in the
    order in which their work was done."""

    def __init__(
        self,
        name: str = "late",
        operations: Collection[str] | None = None,
        most: float = 0.002,
        on: Mapping[str, tuple[int, ...]] | None = None,
        workspace: Mapping[str, int] | None = None,
    ) -> None:
        super().__init__(name, operations)
        self.on = on or {}
        self.workspace = workspace or {}
        count = 1 + max([d for devices in self.on.values() for d in devices], default=0)
        self.devices = [DelayedDevice(most) for _ in range(count)]
        self.device = self.devices[0]
        for device in self.devices:
            device.default = self.device.default  # calls outside of any stream run in order
        self.order: list[str] = []

    def kernel(self, node, types) -> Kernel | None:
        kernel = super().kernel(node, types)
        if kernel is None:
            return None
        count = len(node.outputs)
        devices = [self.devices[d] for d in self.on.get(node.op.name, (0,))]

        nbytes = self.workspace.get(node.op.name, 0)

        def run(*inputs: Any, workspace: Any = None) -> Any:
            made = [Later() for _ in range(count)]
            parts = [*devices]
            on_stream = devices[0].lane is not devices[0].default
            assert (workspace is not None) == (on_stream and nbytes > 0)
            memories = workspace if isinstance(workspace, tuple) else (workspace,) * on_stream

            def job() -> None:
                try:
                    arrays = [x if x is None else x.now() for x in inputs]
                    parts.pop()
                    if parts:
                        return
                    self.began(node.op.name)
                    self.order.append(node.op.name)
                    with _marked(memories, nbytes):
                        values = kernel.function(*arrays)
                except BaseException as error:
                    values = [error] * count
                values = values if isinstance(values, tuple | list) else [values]
                for later, value in zip(made, values, strict=True):
                    later.value, later.there = value, True

            for device in devices:
                device.lane.put(job)
            return made[0] if count == 1 else tuple(made)

        named = tuple(devices) if node.op.name in self.on else ()
        return replace(Kernel(run), device=DeviceWork(devices=named), workspace=nbytes)

    def began(self, name: str) -> None:
        """The work of an operation begins."""

    def to_host(self, value: Later) -> np.ndarray:
        lane = self.device.lane
        if lane is self.device.default and not value.there:
            # Outside of any stream, or after a wait that is missing: only the former may wait.
            assert not self.device.streams, "the host read this before it was there"
            moment = lane.record()
            moment.synchronize()
        found = value.now()
        if isinstance(found, BaseException):
            raise found
        return super().to_host(found)

    def stack(self, values: Sequence[Later], axis: int) -> Later:
        stacked, later = super().stack, Later()

        def job() -> None:
            later.value, later.there = stacked([value.now() for value in values], axis), True

        self.device.lane.put(job)
        return later

    def from_host(self, value: np.ndarray) -> Later:
        copy: Far = super().from_host(value)
        later = Later()

        def job() -> None:
            later.value, later.there = copy, True

        lane = self.device.lane
        lane.put(job)
        if lane is self.device.default:
            lane.record().synchronize()
        return later

    def _open(self, value: Any) -> Any:
        if isinstance(value, BaseException):
            raise value
        return super()._open(value)
