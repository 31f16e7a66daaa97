"""The workers of a cluster as the driver sees them: their actors, their links, and their health.

Ray starts the actors where CPUs are free, and reports when one has died. One thread of the driver
waits for these reports, and also pings each worker regularly, to detect workers that hang.
"""

from __future__ import annotations

import math
import os
import socket
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future
from concurrent.futures import wait as wait_for
from contextlib import ExitStack, suppress
from functools import partial
from itertools import count
from time import monotonic
from typing import Any

import ray
from ray._private.services import canonicalize_bootstrap_address
from ray.exceptions import RayError

from penstock.cluster.doorbell import Doorbell
from penstock.cluster.links import (
    Link,
    LinkReader,
    Message,
    Reader,
    has_ray,
    open_link,
    ray_identity,
)
from penstock.cluster.waits import ANSWER_S, END_S, PING_S, START_S
from penstock.cluster.worker import CALLS_APART, Worker
from penstock.core.checkpoints import WAKE_S, checkpoint
from penstock.core.errors import PenstockError, WorkerLost
from penstock.core.records import NamedTuple, dataclass
from penstock.core.types import RunValues
from penstock.host.fork import in_child
from penstock.host.threads import report_thread_exception

DRIVER = -1
"""the number of the driver, where workers have numbers"""

# Concurrent calls of a worker, not counting those of ``CALLS_APART``.
_CALLS = 4
# Pings per worker during the timeout after which it counts as dead.
_PINGS = 4


class _Proxy:
    """An actor that represents the driver as a reader of links, which must be an actor."""

    def node(self) -> str:
        node: str = ray.get_runtime_context().get_node_id()
        return node


@dataclass(slots=True, eq=False)
class Member:
    """A worker as a reader of links, its process id, the ``link`` to it and the ``reader`` of the
    link from it. ``stays``: done when the worker has died. ``asked``: the last ping, sent at the
    time ``since``."""

    as_reader: Reader
    process: int
    link: Link
    reader: LinkReader
    stays: Future[None]
    asked: Future[None] | None = None
    since: float = 0.0

    @property
    def actor(self) -> Any:
        return self.as_reader.actor


class MemberEvents(NamedTuple):
    """The callbacks for events of workers. ``take``: called with each message of a worker.
    ``lost``: called on the watching thread with the numbers of dead workers and the reasons; it
    calls ``replace``. ``look``: called on that thread regularly. ``gone``: called with the reason
    when all workers are gone."""

    take: Callable[[int, Message], object]
    lost: Callable[[dict[int, str]], object]
    look: Callable[[], object]
    gone: Callable[[str], object]


class Members:
    """All workers of a cluster, with ``threads`` each. A worker that does not answer for
    ``timeout`` seconds counts as dead. Raises ``PenstockError`` if Ray cannot start them."""

    def __init__(
        self, devices: Sequence[str], threads: int, timeout: float, events: MemberEvents
    ) -> None:
        self._devices = list(devices)
        self._threads = threads
        self._timeout = timeout
        self._events = events
        self._ray = ray_identity()
        self._closed = threading.Event()
        self._pairs: dict[tuple[int, int], int] = {}
        self._links = count()
        self._lock = threading.RLock()
        self.members: list[Member] = []
        self._doorbell = Doorbell(ray.util.get_node_ip_address())
        # The proxy computes nothing, and must start even if no CPU is free.
        proxy = ray.remote(num_cpus=0)(_Proxy).remote()
        self._actors = [proxy]
        try:
            self._own = Reader(proxy, self.result(proxy.node.remote()), self._doorbell.address)
            actors = [self._actor(i) for i in range(len(devices))]
            for i, actor in enumerate(actors):
                self.members.append(self._joined(i, actor))
        except BaseException:
            self.close()
            raise
        threading.Thread(target=self._watch, name="penstock-cluster", daemon=True).start()

    def _actor(self, index: int) -> Any:
        options: dict[str, Any] = {
            "num_cpus": self._threads,
            "max_concurrency": _CALLS,
            # A restart by Ray would have no links and parts, which ``replace`` restores.
            "max_restarts": 0,
            "concurrency_groups": CALLS_APART,
        }
        actor = ray.remote(**options)(Worker).remote(index, self._threads, self._devices)
        self._actors.append(actor)
        if self._closed.is_set():  # ``close`` may not have seen the new actor
            ray.kill(actor)
            raise WorkerLost("the cluster was closed")
        return actor

    def _joined(self, index: int, actor: Any) -> Member:
        """Return a new worker, with links from and to the driver."""
        node, process, bell = self.result(actor.identity.remote())
        reader = Reader(actor, node, bell)
        with ExitStack() as opened:
            there, here = next(self._links), next(self._links)
            link = open_link(there, reader, 0)
            opened.callback(link.close)
            self.result(actor.read.remote(there, DRIVER, link.channel))
            channel = self.result(actor.open.remote(here, DRIVER, self._own, 0))
            take = partial(self._events.take, index)
            back = LinkReader(channel, take, str(index), self._doorbell.accept(here))
            # At the end, so that a failure before leaves no channel open.
            opened.pop_all()
        return Member(reader, process, link, back, actor.stay.remote().future())

    def result(self, ref: Any, timeout: float | None = START_S) -> Any:
        """Return the result of a call of an actor. Raises ``PenstockError`` if Ray has too few CPUs
        to start the actor; ``WorkerLost`` if the actor has died, or cannot reach another one; the
        error of the call; and the error that this thread's work was stopped with."""
        # In short waits, between which Python handles signals, and a shutdown of Ray is noticed.
        answer: Future[Any] = ref.future()
        until = math.inf if timeout is None else monotonic() + timeout
        left = WAKE_S
        while left > 0 and not wait_for([answer], left).done:
            checkpoint()
            if not ray.is_initialized():
                raise WorkerLost("Ray was shut down, and all workers with it")
            left = min(WAKE_S, until - monotonic())
        if not answer.done():
            raise PenstockError(
                f"a worker of the cluster did not start within {START_S:.0f} s: each needs "
                f"{self._threads} CPUs of Ray, which has {ray.available_resources().get('CPU', 0)} "
                "free; reduce workers= or threads="
            )
        try:
            return answer.result()
        except ray.exceptions.RayTaskError as error:
            cause = error.cause
            if isinstance(cause, ConnectionError | TimeoutError | RayError):
                raise WorkerLost(f"a worker of the cluster cannot reach another: {cause}") from None
            raise (cause if isinstance(cause, PenstockError) else error) from None
        except RayError as error:
            first = str(error).splitlines()[0]
            raise WorkerLost(f"a worker of the cluster has died: {first}") from error

    def connect(self, pairs: Mapping[tuple[int, int], int]) -> None:
        """Open missing links. ``pairs``: the largest message, in bytes, of each pair of workers."""
        with self._lock:
            for (source, target), nbytes in pairs.items():
                if (source, target) not in self._pairs:
                    self._connect(source, target, nbytes)
                    self._pairs[source, target] = nbytes

    def _connect(self, source: int, target: int, nbytes: int) -> None:
        one, other = self.members[source], self.members[target]
        number = next(self._links)
        opened = one.actor.open.remote(number, target, other.as_reader, nbytes)
        self.result(other.actor.read.remote(number, source, self.result(opened)))

    def replace(self, lost: Collection[int]) -> None:
        """Replace dead workers by new ones with the same links. Raises ``PenstockError``."""
        for index in lost:
            self._disconnect(index, self.members[index])
        # All actors are requested before the first is awaited, so that Ray starts them in parallel.
        actors = {index: self._actor(index) for index in lost}
        try:
            for index, actor in actors.items():
                self.members[index] = self._joined(index, actor)
        except BaseException:
            for index, actor in actors.items():
                if self.members[index].actor is not actor:  # otherwise it would run until the end
                    self._kill(actor)
            raise
        with self._lock:
            for (source, target), nbytes in self._pairs.items():
                if source in actors or target in actors:
                    self._connect(source, target, nbytes)
        if self._closed.is_set():
            self.close()

    def _disconnect(self, index: int, old: Member) -> None:
        """Close all links of a dead worker, so that nothing waits for it."""
        self._kill(old.actor)
        old.link.close()
        old.reader.close()
        # Awaited for a limited time: another worker that hangs is detected separately.
        others = [m.actor for m in self.members if m is not old]
        refs = [actor.part_from.remote(index) for actor in others]
        ray.wait(refs, num_returns=len(refs), timeout=self._timeout) if refs else None

    def _kill(self, actor: Any) -> None:
        with suppress(Exception):
            ray.kill(actor)
        with suppress(ValueError):
            self._actors.remove(actor)

    def dead(self, wait: float = 0.0) -> dict[int, str]:
        """Wait up to ``wait`` seconds for a worker to die. Return the dead ones, with reasons."""
        stays = [member.stays for member in self.members]
        died, _ = wait_for(stays, timeout=wait, return_when=FIRST_COMPLETED)
        return {i: self._reason(self.members[i]) for i, stay in enumerate(stays) if stay in died}

    def _watch(self) -> None:
        """Wait for workers to die, without a pending call of Ray: this would end the process if
        another thread shut Ray down."""
        wait = min(self._timeout / _PINGS, PING_S)
        while not self._closed.is_set():
            try:
                lost = self.dead(wait)
                if has_ray(self._ray):
                    lost.update(self._silent())
                    if lost and not self._closed.is_set():
                        self._events.lost(lost)
                self._events.look()
            except BaseException:
                if has_ray(self._ray) and not self._closed.is_set():
                    report_thread_exception()
                    self._closed.wait(wait)
            if not has_ray(self._ray):
                self._events.gone("Ray was shut down, and all workers with it")
                return

    def _reason(self, member: Member) -> str:
        error = member.stays.exception()
        if error is None:
            return f"process {member.process} has ended"
        return f"process {member.process} has died: {str(error).splitlines()[0].rstrip('.')}"

    def _silent(self) -> dict[int, str]:
        """Ping all workers. Return those that have not answered for too long, with the reasons."""
        silent, now = {}, monotonic()
        for index, member in enumerate(self.members):
            # One ping at a time: a late answer to the last one also proves that the worker lives.
            if member.asked is None or member.asked.done():
                member.asked, member.since = member.actor.ping.remote().future(), now
            elif now - member.since > self._timeout:
                silent[index] = f"it has not answered for worker_timeout = {self._timeout} s"
        return silent

    def close(self) -> None:
        """End all workers."""
        self._closed.set()
        if has_ray(self._ray):
            self._call_all([member.actor.close for member in self.members])
        for member in self.members:
            member.link.close()
            member.reader.close()
        if has_ray(self._ray):
            # Processes that exit normally remove Ray's files in /dev/shm.
            self._call_all([actor.__ray_terminate__ for actor in self._actors])
            for actor in list(self._actors):
                self._kill(actor)
        self._doorbell.close()

    def _call_all(self, methods: RunValues) -> None:
        """Call methods of actors, and wait for these up to ``END_S``."""
        with suppress(Exception):
            refs = [method.remote() for method in methods]
            ray.wait(refs, num_returns=len(refs), timeout=END_S)


def start_ray(address: str | None, cpus: int) -> None:
    """Attach to the Ray cluster that the process uses, or to that at an address; or start one on
    this machine. Raises ``PenstockError`` if none answers, if the process uses another one, or if
    it was forked from a process that uses one."""
    if _HAS_PARENTS_RAY:
        raise PenstockError(
            "this process was forked from one that uses Ray, which does not work in a forked "
            "process: start a new process instead (multiprocessing's 'spawn')"
        )
    if ray.is_initialized():
        own = ray.get_runtime_context().gcs_address
        if address is not None and _bootstrap(address) not in (own, None):
            raise PenstockError(
                f"this process already uses the Ray cluster at {own}, and cannot use another one, "
                f"at {address!r}: omit address=, or call ray.shutdown() before"
            )
        return
    quiet: dict[str, Any] = {"log_to_driver": False, "configure_logging": False}
    if address is None:
        address = os.environ.get("RAY_ADDRESS") or "local"
    if address == "local":
        cpus = max(cpus, os.cpu_count() or 1)
        ray.init("local", num_cpus=cpus, include_dashboard=False, **quiet)
        return
    advice = "start one ('ray start --head' prints its address), or omit address= and unset "
    advice += "RAY_ADDRESS to start one on this machine"
    try:
        at = _bootstrap(address)
        if at is not None:  # checked first, since Ray would retry for minutes
            host, _, port = at.rpartition(":")
            socket.create_connection((host.strip("[]"), int(port)), ANSWER_S).close()
        ray.init(address=address, **quiet)
    except (OSError, ValueError, RuntimeError) as error:
        reason = str(error).splitlines()[0]
        raise PenstockError(
            f"no Ray cluster answers at {address!r} ({reason}); {advice}"
        ) from error


def _bootstrap(address: str) -> str | None:
    """Return the host and port of a Ray cluster, given its address; None if Ray has to find it.
    Raises ``PenstockError`` for other addresses, such as of Ray's client protocol."""
    if address in ("auto", "local"):
        return None
    host, _, port = address.rpartition(":")
    if "://" in address or not host or not port.isdigit():
        raise PenstockError(
            f"a cluster needs the address of a Ray cluster as host:port, or 'auto', not {address!r}"
        )
    bootstrap: str | None = canonicalize_bootstrap_address(address)
    return bootstrap


_HAS_PARENTS_RAY: list[bool] = []


@in_child
def _note_fork() -> None:
    if ray.is_initialized():
        _HAS_PARENTS_RAY.append(True)
