"""A device of torch that runs asynchronously: kernels of the CPU device, late at random.

A stream is a thread. What is called on it is put off: the results are there at once, with the
shapes that they will have, and hold what they hold (NaN) until the thread has come so far. So a
wait that is missing gives wrong answers, as on CUDA. Views are views at once; what reads numbers on
the host waits, and cannot be captured.
"""

from __future__ import annotations

import random
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from queue import SimpleQueue
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_flatten, tree_map

from tests.support.timing import SOON, slow

aten = torch.ops.aten
_OF_HOST = {aten._local_scalar_dense.default, aten.equal.default, aten.is_nonzero.default}
_SIZED_BY_DATA = {aten.nonzero.default, aten.masked_select.default, aten.repeat_interleave.Tensor}


class LateEvent:
    """An event: it comes when the thread of the stream that recorded it has come so far."""

    def __init__(self, runtime: LateRuntime) -> None:
        self.runtime = runtime
        self.passed = threading.Event()
        self.passed.set()

    def record(self, stream: LateStream | HostStream) -> None:
        self.runtime.counts["record"] += 1
        self.passed = passed = threading.Event()
        stream.put(passed.set)

    def query(self) -> bool:
        return self.passed.is_set()

    def synchronize(self) -> None:
        assert self.passed.wait(SOON)


class HostStream:
    """The default stream: all is done at once."""

    def __init__(self, runtime: LateRuntime) -> None:
        self.runtime = runtime

    def put(self, job: Callable[[], object]) -> None:
        job()

    def wait_event(self, event: LateEvent) -> None:
        event.synchronize()

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        self.runtime.counts["synchronize"] += 1


class LateStream:
    """A stream with a thread of its own, which does each job after a delay."""

    def __init__(self, runtime: LateRuntime) -> None:
        self.runtime = runtime
        self.jobs: SimpleQueue[Callable[[], object] | None] = SimpleQueue()
        self.errors: list[BaseException] = []
        self.put_there, self.done = 0, [0]
        args = self.jobs, runtime.delay, self.errors, self.done
        threading.Thread(target=_work, args=args, daemon=True).start()
        weakref.finalize(self, self.jobs.put, None)

    def put(self, job: Callable[[], object]) -> None:
        self.put_there += 1
        self.jobs.put(job)

    def wait_event(self, event: LateEvent) -> None:
        self.runtime.counts["wait"] += 1
        passed = event.passed
        self.put(lambda: passed.wait(SOON))

    def query(self) -> bool:
        return self.put_there == self.done[0]

    def synchronize(self) -> None:
        self.runtime.counts["synchronize"] += 1
        passed = threading.Event()
        self.put(passed.set)
        assert passed.wait(SOON)
        if self.errors:
            raise self.errors.pop()


def _work(
    jobs: SimpleQueue[Callable[[], object] | None],
    delay: Callable[[], float],
    errors: list[BaseException],
    done: list[int],
) -> None:
    with torch.inference_mode():
        while (job := jobs.get()) is not None:
            slow(delay())
            try:
                job()
            except BaseException as error:
                errors.append(error)
            del job
            done[0] += 1


class LateGraph:
    """A captured graph: its kernels, which one launch puts on the current stream."""

    def __init__(self, runtime: LateRuntime) -> None:
        self.runtime = runtime
        self.jobs: list[Callable[[], object]] = []

    def replay(self) -> None:
        self.runtime.counts["replay"] += 1
        jobs = self.jobs
        stream = self.runtime.current(None)
        with torch.inference_mode() if isinstance(stream, HostStream) else nullcontext():
            stream.put(lambda: [job() for job in jobs])


class LateRuntime:
    """The streams, events and graphs of such a device; ``most``: the longest delay in seconds.
    ``counts`` has what was called, ``launch`` for each kernel that the host put on a stream."""

    def __init__(self, most: float = 2e-4) -> None:
        self.most = most
        self.random = random.Random(7)
        self.lock = threading.Lock()
        self.here = threading.local()
        self.default = HostStream(self)
        self.streams: weakref.WeakSet[LateStream] = weakref.WeakSet()
        self.counts: dict[str, int] = dict.fromkeys(
            ["stream", "record", "wait", "synchronize", "launch", "replay", "capture", "kept"], 0
        )
        self.refuses: Callable[[Any], bool] = lambda function: False

    def delay(self) -> float:
        with self.lock:
            return self.random.choice([0.0, 0.0, self.random.uniform(0, self.most)])

    def stream(self, device: Any) -> LateStream:
        self.counts["stream"] += 1
        stream = LateStream(self)
        self.streams.add(stream)
        return stream

    def event(self) -> LateEvent:
        return LateEvent(self)

    def current(self, device: Any) -> LateStream | HostStream:
        return getattr(self.here, "stream", None) or self.default

    @contextmanager
    def on(self, stream: LateStream | HostStream) -> Iterator[None]:
        outer = getattr(self.here, "stream", None)
        self.here.stream = stream
        try:
            with _Deferring(self, stream.put) if isinstance(stream, LateStream) else nullcontext():
                yield
        finally:
            self.here.stream = outer

    def keep(self, tensor: torch.Tensor, stream: Any) -> None:
        self.counts["kept"] += 1

    def synchronize(self, device: Any) -> None:
        self.counts["synchronize"] += 1
        for stream in list(self.streams):
            stream.synchronize()

    def graph(self) -> LateGraph:
        return LateGraph(self)

    @contextmanager
    def capture(self, graph: LateGraph) -> Iterator[None]:
        self.counts["capture"] += 1
        outer = getattr(self.here, "stream", None)
        if isinstance(outer, LateStream):
            outer.synchronize()
        with _Deferring(self, graph.jobs.append, capturing=True):
            yield


class _Deferring(TorchDispatchMode):
    """Hands kernels to ``put`` in place of running them."""

    def __init__(
        self, runtime: LateRuntime, put: Callable[[Any], object], capturing: bool = False
    ) -> None:
        super().__init__()
        self.runtime = runtime
        self.put = put
        self.capturing = capturing

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        with _disable_current_modes():  # those of streams around this one, too
            return self._defer(func, args, kwargs or {})

    def _defer(self, func: Any, args: Any, kwargs: Any) -> Any:
        given = [x for x in tree_flatten((args, kwargs))[0] if isinstance(x, torch.Tensor)]
        if self.capturing and self.runtime.refuses(func):
            raise RuntimeError("operation not permitted when stream is capturing")
        if func in _OF_HOST or func in _SIZED_BY_DATA:
            if self.capturing:
                raise RuntimeError("operation not permitted when stream is capturing")
            self.runtime.current(None).synchronize()
            return func(*args, **kwargs)
        schema = func._schema
        written = self._written(schema, args, kwargs)
        if written:
            self._launch(lambda: func(*args, **kwargs))
            return written[0] if len(schema.returns) == 1 else tuple(written)
        if not given:  # new memory; numbers that are written there are as good as the host's
            return func(*args, **kwargs)
        if any(r.alias_info is not None for r in schema.returns) or func.is_view:
            result = func(*args, **kwargs)
            flat = [x for x in tree_flatten(result)[0] if isinstance(x, torch.Tensor)]
            known = {x.untyped_storage().data_ptr() for x in given}
            if all(x.untyped_storage().data_ptr() in known for x in flat):
                return result
        spare = tree_map(_zeros, (args, kwargs))  # to see the shapes of the results
        results = tree_map(_empty, func(*spare[0], **spare[1]))

        def job() -> None:
            values = tree_flatten(func(*args, **kwargs))[0]
            for target, value in zip(tree_flatten(results)[0], values, strict=True):
                target.copy_(value)

        self._launch(job)
        return results

    def _launch(self, job: Callable[[], object]) -> None:
        if not self.capturing:
            self.runtime.counts["launch"] += 1
        self.put(job)

    @staticmethod
    def _written(schema: Any, args: Any, kwargs: Any) -> list[torch.Tensor]:
        """The arguments that a kernel writes."""
        written = []
        for i, argument in enumerate(schema.arguments):
            if argument.alias_info is not None and argument.alias_info.is_write:
                value = args[i] if i < len(args) else kwargs.get(argument.name)
                written += value if isinstance(value, list | tuple) else [value]
        return written


def _zeros(value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype).fill_(0)


def _empty(value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    memory = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype)
    return memory.fill_(float("nan")) if value.is_floating_point() else memory.fill_(1)
