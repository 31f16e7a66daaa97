"""The workers of a cluster as the driver sees them: their actors, links, and whether they live.

Ray starts the actors, where there is room, and says when one has died. One thread of the driver
waits for that; and asks each worker now and then for an answer, since one that hangs does not die.
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
"""stands for the driver where workers have numbers"""

# Calls of a worker that Ray runs at the same time, but for those that wait for no others.
_CALLS = 4
# Workers are asked for an answer this often in the time after which they count as dead.
_PINGS = 4


class _Proxy:
    """An actor beside the driver, which stands for it as the reader of links."""

    def node(self) -> str:
        node: str = ray.get_runtime_context().get_node_id()
        return node


@dataclass(slots=True, eq=False)
class Member:
    """A worker: as a reader of links, its process, both links, and what Ray fulfils when it has
    died; its answer to what it was ``asked`` last, and ``since`` when."""

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
    """The functions for events of workers. ``take``: with each message of a worker; ``lost``: with
    the numbers of those that have died and the reasons, on the thread that watches: it calls
    ``replace``. ``look`` is called now and then there; ``gone``, with a reason, once there are none
    any more."""

    take: Callable[[int, Message], object]
    lost: Callable[[dict[int, str]], object]
    look: Callable[[], object]
    gone: Callable[[str], object]


class Members:
    """All workers."""

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
        # It computes nothing, and must start where all cores are taken.
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
            # Ray would start it anew without its links and parts; `replace` gives it these.
            "max_restarts": 0,
            "concurrency_groups": CALLS_APART,
        }
        actor = ray.remote(**options)(Worker).remote(index, self._threads, self._devices)
        self._actors.append(actor)
        if self._closed.is_set():  # it may not have been there yet when all were ended
            ray.kill(actor)
            raise WorkerLost("the cluster was closed")
        return actor

    def _joined(self, index: int, actor: Any) -> Member:
        """A new worker, with links from the driver and to it."""
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
            # Only now: whatever failed before must not leave a channel open.
            opened.pop_all()
        return Member(reader, process, link, back, actor.stay.remote().future())

    def result(self, ref: Any, timeout: float | None = START_S) -> Any:
        """The result of a call of an actor. Raises ``PenstockError`` if there is no room for the
        actor; ``WorkerLost`` if it has died, or does not reach another one that may have died; what
        the call raises, and what the work of this thread must stop with."""
        # In short waits: between them Python handles signals, and Ray is seen to be shut down.
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
                f"a worker of the cluster did not begin within {START_S:.0f} s: each needs "
                f"{self._threads} CPUs of Ray, which has {ray.available_resources().get('CPU', 0)} "
                "free; ask for fewer workers or threads"
            )
        try:
            return answer.result()
        except ray.exceptions.RayTaskError as error:
            cause = error.cause
            if isinstance(cause, ConnectionError | TimeoutError | RayError):
                raise WorkerLost(
                    f"a worker of the cluster does not reach another: {cause}"
                ) from None
            raise (cause if isinstance(cause, PenstockError) else error) from None
        except RayError as error:
            first = str(error).splitlines()[0]
            raise WorkerLost(f"a worker of the cluster has died: {first}") from error

    def connect(self, pairs: Mapping[tuple[int, int], int]) -> None:
        """Open the links between pairs of workers that are not open yet. ``pairs`` gives
        the bytes of the largest message of each."""
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
        """Start workers in the place of those that have died, with all of their links."""
        for index in lost:
            self._part(index, self.members[index])
        # All are asked for before the first is waited for: Ray starts their processes side by side.
        actors = {index: self._actor(index) for index in lost}
        try:
            for index, actor in actors.items():
                self.members[index] = self._joined(index, actor)
        except BaseException:
            for index, actor in actors.items():
                if self.members[index].actor is not actor:  # it would stay until the end
                    self._kill(actor)
            raise
        with self._lock:
            for (source, target), nbytes in self._pairs.items():
                if source in actors or target in actors:
                    self._connect(source, target, nbytes)
        if self._closed.is_set():
            self.close()

    def _part(self, index: int, old: Member) -> None:
        """Close all links of a worker that has died, so that nothing waits for it."""
        self._kill(old.actor)
        old.link.close()
        old.reader.close()
        # Not waited for any longer than this: a worker that hangs here is found lost in its turn.
        others = [m.actor for m in self.members if m is not old]
        refs = [actor.part_from.remote(index) for actor in others]
        ray.wait(refs, num_returns=len(refs), timeout=self._timeout) if refs else None

    def _kill(self, actor: Any) -> None:
        with suppress(Exception):
            ray.kill(actor)
        with suppress(ValueError):
            self._actors.remove(actor)

    def dead(self, wait: float = 0.0) -> dict[int, str]:
        """The workers that have died, and why, once one has, or after ``wait`` seconds."""
        stays = [member.stays for member in self.members]
        died, _ = wait_for(stays, timeout=wait, return_when=FIRST_COMPLETED)
        return {i: self._reason(self.members[i]) for i, stay in enumerate(stays) if stay in died}

    def _watch(self) -> None:
        """Wait for workers to die. No call of Ray is under way meanwhile: it would end the process
        if another thread shut Ray down."""
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
        """Ask all workers for an answer; those that have given none for too long."""
        silent, now = {}, monotonic()
        for index, member in enumerate(self.members):
            # One question at a time: also a late answer to the last one says that the worker lives.
            if member.asked is None or member.asked.done():
                member.asked, member.since = member.actor.ping.remote().future(), now
            elif now - member.since > self._timeout:
                silent[index] = f"it gave no answer for worker_timeout = {self._timeout} s"
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
            # Processes that end by themselves remove what Ray has in /dev/shm.
            self._call_all([actor.__ray_terminate__ for actor in self._actors])
            for actor in list(self._actors):
                self._kill(actor)
        self._doorbell.close()

    def _call_all(self, methods: RunValues) -> None:
        """Call methods of actors, and wait for them for a while."""
        with suppress(Exception):
            refs = [method.remote() for method in methods]
            ray.wait(refs, num_returns=len(refs), timeout=END_S)


def start_ray(address: str | None, cpus: int) -> None:
    """Attach to the Ray that the process uses, or at an address; or start one on this machine.
    Raises ``PenstockError`` in a process that was forked from one with a Ray."""
    if _HAS_PARENTS_RAY:
        raise PenstockError(
            "this process was forked from one that uses Ray, which does not work in it: start it "
            "anew (multiprocessing's 'spawn')"
        )
    if ray.is_initialized():
        own = ray.get_runtime_context().gcs_address
        if address is not None and _bootstrap(address) not in (own, None):
            raise PenstockError(
                f"this process uses the Ray at {own} already, and cannot use another one, at "
                f"{address!r}: give no address=, or call ray.shutdown() before"
            )
        return
    quiet: dict[str, Any] = {"log_to_driver": False, "configure_logging": False}
    if address is None:
        address = os.environ.get("RAY_ADDRESS") or "local"
    if address == "local":
        cpus = max(cpus, os.cpu_count() or 1)
        ray.init("local", num_cpus=cpus, include_dashboard=False, **quiet)
        return
    advice = "start one ('ray start --head' prints its address), or give no address and unset "
    advice += "RAY_ADDRESS: then one is started on this machine"
    try:
        at = _bootstrap(address)
        if at is not None:  # Ray would try for minutes
            host, _, port = at.rpartition(":")
            socket.create_connection((host.strip("[]"), int(port)), ANSWER_S).close()
        ray.init(address=address, **quiet)
    except (OSError, ValueError, RuntimeError) as error:
        reason = str(error).splitlines()[0]
        raise PenstockError(f"no Ray answers at {address!r} ({reason}); {advice}") from error


def _bootstrap(address: str) -> str | None:
    """The host and port of a Ray, by its address; None for one that Ray has to look for. Raises
    ``PenstockError`` for addresses by which no process can be one of a cluster's."""
    if address in ("auto", "local"):
        return None
    host, _, port = address.rpartition(":")
    if "://" in address or not host or not port.isdigit():
        raise PenstockError(
            f"a cluster needs the address of a Ray as host:port, or 'auto', not {address!r}"
        )
    bootstrap: str | None = canonicalize_bootstrap_address(address)
    return bootstrap


_HAS_PARENTS_RAY: list[bool] = []


@in_child
def _note_fork() -> None:
    if ray.is_initialized():
        _HAS_PARENTS_RAY.append(True)
