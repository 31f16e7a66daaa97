"""A worker of a cluster: a process, as a Ray actor, that runs parts of graphs.

Messages arrive by links: from the driver, the feeds of runs, with the handle of a part, and orders
to stop a run; from other workers, the values that their parts send. The parts of all runs are jobs
of one strand, in the order in which they become ready: one thread at a time computes, which has
read a message, while others read. The worker sends the driver the outputs of each part, or the
error that it ended with.

A run of all parts of a graph is a *step*, whose number is in each message. Values of a step may
arrive before its feeds; values of a step that has ended are dropped. The driver sends no message to
begin a *passive* part, which waits for values of other parts: the values include its handle. The
driver does not wait for the end of a *silent* part, which is reported later.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Hashable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import ray

from penstock.cluster.doorbell import BellAddress, Doorbell
from penstock.cluster.links import Link, LinkClosed, LinkReader, Message, Reader, open_link
from penstock.cluster.parts import PartOptions, RemotePart, compile_part
from penstock.cluster.strand import Strand
from penstock.cluster.waits import IDLE_S
from penstock.core.errors import Aborted, PenstockError, RunError
from penstock.core.types import RunValue, RunValues, TensorType
from penstock.executors.control import Control, begin_run, end_run
from penstock.executors.frames.barrier import Barrier
from penstock.executors.frames.executor import FramesExecutor
from penstock.executors.frames.rendezvous import Rendezvous
from penstock.host.threads import report_thread_exception
from penstock.observers.base import ObservedRun
from penstock.observers.profile import Profile, StepRow

# Ended steps up to which all are remembered, since values may still arrive for steps that were
# stopped.
_MOST_OVER = 10_000
# Maximum number of ends of silent parts that are kept until they are reported.
_MOST_ENDED = 100_000
_APART = "apart"
_apart: Any = ray.method(concurrency_group=_APART)
CALLS_APART = {_APART: 2}
"""calls that must not wait for other calls, which may take long: ``stay``, and ``ping``"""


class FarRendezvous(Rendezvous):
    """The rendezvous of a part with the parts of other workers, in one step. Sent values go to
    other workers by links, and links bring values of other workers (``arrive``)."""

    def __init__(self, worker: Worker, step: int) -> None:
        super().__init__()
        self._worker = worker
        self._step = step
        self.handle = -1
        self.sent: dict[int, int] = {}
        self.received: dict[int, int] = {}

    def is_remote(self, key: Hashable) -> bool:
        assert isinstance(key, tuple)
        return self._worker.leaves(key[0])

    def send(self, key: Hashable, value: RunValue, dead: bool = False) -> None:
        assert isinstance(key, tuple)
        if not self._worker.leaves(key[0]):  # to another device of this worker
            super().send(key, value, dead)
            return
        target = self._worker.target(key[0])
        self.sent[target] = self.sent.get(target, 0) + 1
        try:
            self._worker.links[target].send((self._step, self.handle, key, value, dead))
        except (LinkClosed, KeyError) as error:
            raise Aborted(f"cannot send {key[0]!r}: worker {target} is gone") from error

    def arrive(self, source: int, key: Hashable, value: RunValue, dead: bool) -> None:
        with suppress(Aborted):  # the step has failed
            super().send(key, value, dead)
        # Counted after the delivery, so that a part does not seem to wait for a value counted here.
        self.received[source] = self.received.get(source, 0) + 1


class RemoteStep:
    """A run of a part. ``control`` and ``barrier`` are None until its feeds have arrived.
    ``observed``: the run in events for observers, if its steps are measured."""

    def __init__(self, worker: Worker, number: int) -> None:
        self.rendezvous = FarRendezvous(worker, number)
        self.control: Control | None = None
        self.barrier: Barrier | None = None
        self.observed: ObservedRun | None = None
        self.reported: tuple[dict[int, int], dict[int, int]] | None = None

    def counts(self) -> tuple[dict[int, int], dict[int, int]]:
        """Return the numbers of values sent to and received from each worker."""
        return dict(self.rendezvous.sent), dict(self.rendezvous.received)


class Worker:
    """The actor. ``devices``: the full device names of all workers, in the order of workers."""

    def __init__(self, index: int, threads: int, devices: Sequence[str]) -> None:
        os.environ["OMP_NUM_THREADS"] = str(threads)
        self.index = index
        self.threads = threads
        self.links: dict[int, Link] = {}
        self._doorbell = Doorbell(ray.util.get_node_ip_address())
        self._tasks = {device: i for i, device in enumerate(devices)}
        self._readers: dict[int, LinkReader] = {}
        self._parts: dict[int, FramesExecutor] = {}
        # Observed executors of parts, and the profiles of those that are currently observed.
        self._observed: dict[int, tuple[FramesExecutor, Profile | None]] = {}
        self._stores: dict[int, Any] = {}
        self._passive: set[int] = set()
        self._silent: set[int] = set()
        self._steps: dict[int, RemoteStep] = {}
        self._ended: deque[Message] = deque(maxlen=_MOST_ENDED)
        self._oldest = 0
        self._over: set[int] = set()
        self._most_over = _MOST_OVER
        self._lock = threading.Lock()
        self._strand = Strand(f"cluster-{index}")
        self._closed = threading.Event()

    # Called by the driver, through Ray.

    def identity(self) -> tuple[str, int, BellAddress]:
        """Return the Ray node of the worker, its process id, and the address of its doorbell."""
        node: str = ray.get_runtime_context().get_node_id()
        return node, os.getpid(), self._doorbell.address

    def open(self, number: int, peer: int, reader: Reader, nbytes: int) -> Any:
        """Open a link to another worker, or to the driver (-1), and return its channel."""
        old = self.links.get(peer)
        if old is not None:
            old.close()
        # An old link to this peer leads to a worker that was replaced.
        link = self.links[peer] = open_link(number, reader, nbytes)
        return link.channel

    def read(self, number: int, peer: int, channel: Any) -> None:
        """Read messages from the channel of a link from another worker, or from the driver."""
        old = self._readers.pop(peer, None)
        if old is not None:
            old.close()
        take = self._take_order if peer < 0 else partial(self._take_value, peer)
        bell = self._doorbell.accept(number)
        self._readers[peer] = LinkReader(channel, take, str(peer), bell, self._strand.drain)

    def part_from(self, peer: int) -> None:
        """Close the links to and from a worker that is lost."""
        ends: list[Any] = [self.links.pop(peer, None), self._readers.pop(peer, None)]
        for end in ends:
            if end is not None:
                end.close()

    def register(
        self, handle: int, part: RemotePart, content: Any, options: bytes, stores: list[int]
    ) -> list[str]:
        """Compile a part, and return the names of the backends of its steps."""
        chosen = PartOptions.decode(options)
        compiled = compile_part(memoryview(content), chosen, self.threads, stores, self._stores)
        self._parts[handle] = compiled
        if part.passive:
            self._passive.add(handle)
        if part.silent:
            self._silent.add(handle)
        return [step.backend for step in compiled.table.walk() if step.backend]

    def observe(self, handle: int) -> None:
        """Measure the steps of a part in later runs, until ``observed`` is called."""
        part, _ = self._observed.get(handle, (None, None))
        self._observed[handle] = part or self._parts[handle].observed(), Profile()

    def observed(self, handle: int) -> list[StepRow]:
        """Return the steps of a part measured since ``observe``; none on a replacement."""
        part, profile = self._observed.get(handle, (None, None))
        if part is None or profile is None:
            return []
        self._observed[handle] = part, None
        return profile.steps()

    def forget(self, handles: Sequence[int], stores: Sequence[int]) -> None:
        """Drop the parts with these handles, and the stores with these numbers."""
        for handle in handles:
            self._parts.pop(handle, None)
            self._observed.pop(handle, None)
            self._passive.discard(handle)
            self._silent.discard(handle)
        for number in stores:
            self._stores.pop(number, None)

    def variable(self, store: int, name: str) -> RunValue:
        """Return the value of a variable in the store of this number; None if it has none."""
        return self._stores[store].variable(name, TensorType()).value

    def set_variable(self, store: int, name: str, value: RunValue) -> None:
        """Set the value of a variable; None for no value."""
        variable = self._stores[store].variable(name, TensorType())
        if value is None:
            variable.value = None
        else:
            variable.assign(value)

    @_apart  # type: ignore[untyped-decorator]
    def ping(self) -> int:
        """Return the number of running steps."""
        return len(self._steps)

    @_apart  # type: ignore[untyped-decorator]
    def stay(self) -> None:
        """Report ended silent parts and waiting steps, until the worker is closed."""
        while not self._closed.wait(IDLE_S):
            if self._ended:
                ended = [self._ended.popleft() for _ in range(len(self._ended))]
                self._answer(("ended", ended))
            for number, step in list(self._steps.items()):
                self._report(number, step)

    def close(self) -> None:
        """Close the links, which ends their threads."""
        self._closed.set()
        ends: list[Any] = [*self.links.values(), *self._readers.values()]
        for end in ends:
            end.close()
        self._doorbell.close()

    # Messages.

    def _take_order(self, message: Message) -> None:
        """Process a message of the driver: run a part, stop or end a step, or answer."""
        kind, *rest = message
        if kind == "run":
            self._strand.submit(partial(self._run, *rest))
        elif kind == "stop":
            self._stop(*rest)
        elif kind == "end":
            self._strand.submit(partial(self._end, *rest))
        elif kind == "echo":
            self._answer(message)

    def _take_value(self, source: int, message: Message) -> None:
        """Process a value of another worker."""
        number, handle, key, value, dead = message
        step = self._step(number)
        if step is None:
            return
        if handle in self._passive and step.rendezvous.handle < 0:
            step.rendezvous.handle = handle
            self._strand.submit(partial(self._run, handle, number, 0, (), None))
        step.rendezvous.arrive(source, key, value, dead)

    def _stop(self, number: int, error: Exception) -> None:
        """Stop a step. If it has not begun, it never will, even if its feeds arrive later."""
        # Not a job of the strand, which would wait for the jobs of this step and of other steps.
        with self._lock:
            step = self._steps.get(number)
            control = None if step is None else step.control
            if control is None:
                self._steps.pop(number, None)
                self._over.add(number)
        if control is not None:
            control.set(error)

    def _answer(self, message: Message) -> None:
        with suppress(LinkClosed, KeyError):  # the driver has ended
            self.links[-1].send(message)

    def _step(self, number: int) -> RemoteStep | None:
        """Return a step, which is created if it is new; None if it has ended."""
        with self._lock:
            step = self._steps.get(number)
            if step is None and number >= self._oldest and number not in self._over:
                step = self._steps[number] = RemoteStep(self, number)
            return step

    # Steps, as jobs of the strand.

    def _run(
        self, handle: int, number: int, oldest: int, feeds: RunValues, timeout: float | None
    ) -> None:
        """Begin a step, and forget steps before the ``oldest``, which have ended on all workers."""
        with self._lock:
            self._oldest = max(oldest, self._oldest)
            # Steps created by values, whose feeds the driver never sent, since their runs ended.
            stale = [n for n, s in self._steps.items() if n < oldest and s.control is None]
            for each in stale:
                del self._steps[each]
            if len(self._over) > self._most_over:
                self._over = {n for n in self._over if n >= self._oldest}
                # An old step that still runs keeps all later ones.
                self._most_over = max(_MOST_OVER, 2 * len(self._over))
        step, part = self._step(number), self._parts.get(handle)
        if step is None:
            return
        step.rendezvous.handle = handle
        step.control = begin_run(timeout, None)
        with self._lock:
            is_over = number in self._over
        if is_over:  # stopped meanwhile
            end_run(step.control)
            return
        watched, profile = self._observed.get(handle, (None, None))
        if watched is not None and profile is not None:
            part = watched
            step.control.observer = profile
            step.observed = step.control.run = ObservedRun(part.table, part.name, part.threads)
            profile.run_begin(step.observed)
        done = partial(self._done, handle, number)
        if part is None:
            done(None, PenstockError(f"worker {self.index} has no part with handle {handle}"))
            return
        try:
            barrier = part.begin(feeds, step.control, done, step.rendezvous, self._strand.submit)
        except BaseException as error:
            report_thread_exception()
            done(None, error)
        else:
            step.barrier = barrier

    def _end(self, number: int, handle: int) -> None:
        """Let a step end that waits for values which no worker will send."""
        if number not in self._steps and handle in self._passive:
            self._run(handle, number, 0, (), None)
        step = self._steps.get(number)
        if step is not None:
            step.rendezvous.end()

    def _done(
        self,
        handle: int,
        number: int,
        outputs: tuple[RunValue, ...] | None,
        error: BaseException | None,
    ) -> None:
        with self._lock:
            step = self._steps.pop(number, None)
            self._over.add(number)
        counts: tuple[dict[int, int], dict[int, int]] = ({}, {})
        if step is not None:
            counts = step.counts()
            if step.control is not None:
                if step.observed is not None:
                    step.control.observer.run_end(step.observed, error)
                end_run(step.control)
        if error is None and handle in self._silent:
            self._ended.append((number, *counts))
            return
        try:
            self._answer(("done", number, outputs, _sendable(error), *counts))
        except Exception as problem:  # an output cannot be pickled
            reason = f"an output cannot be sent to the caller of the run: {problem!r}"
            self._answer(("done", number, None, RunError(reason), *counts))

    def _report(self, number: int, step: RemoteStep) -> None:
        """Report a step to the driver that has only waited since the previous call."""
        barrier = step.barrier
        if barrier is None or not barrier.idle:
            return
        counts = step.counts()
        if not barrier.idle:  # the counts may be inconsistent
            step.reported = None
        elif counts != step.reported:
            step.reported = counts
        else:
            self._answer(("waits", number, *counts))

    def leaves(self, edge: str) -> bool:
        """Whether the values of an edge go to another worker, not to another device of this one."""
        # Edges between workers have the workers' device names, of which each worker has one.
        source, target, _ = edge.split(";", 2)
        return source in self._tasks and target in self._tasks

    def target(self, edge: str) -> int:
        """Return the worker to which the values of an edge go (``rendezvous.edge_key``)."""
        return self._tasks[edge.split(";")[1]]


def _sendable(error: BaseException | None) -> BaseException | None:
    """Return an error that can be sent to another process, without its traceback and cause."""
    if error is None:
        return None
    if isinstance(error, PenstockError):
        error.__traceback__ = error.__cause__ = error.__context__ = None
        return error
    return RunError(f"a worker failed: {error!r}")
