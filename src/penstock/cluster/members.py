"""The workers of a cluster as the driver sees them: their actors, links, and whether they live.

Ray starts the actors, where there is room, and says when one has died. One thread of the driver
waits for that; and asks each worker now and then for an answer, since one that hangs does not die.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack, suppress
from functools import partial
from time import monotonic
from typing import Any

import ray
from ray.exceptions import RayError

from penstock.algorithms.records import dataclass
from penstock.cluster.doorbell import Doorbell
from penstock.cluster.links import Link, LinkReader, Message, Reader, open_link
from penstock.cluster.worker import Worker
from penstock.errors import PenstockError
from penstock.host.threads import report_thread_exception

DRIVER = -1
"""stands for the driver where workers have numbers"""

# Calls of a worker that Ray runs at the same time: ``stay`` is one of them.
_CALLS = 4
# Workers are asked for an answer this often in the time after which they count as dead.
_PINGS = 4
_LONGEST_WAIT_S = 5.0
_START_S = 60.0


class _Proxy:
    """An actor beside the driver, which stands for it as the reader of links."""

    def node(self) -> str:
        node: str = ray.get_runtime_context().get_node_id()
        return node


@dataclass(slots=True, eq=False)
class Member:
    """A worker: as a reader of links, its process, both links, and what Ray fulfils when it has
    died; what it was ``asked`` last, and ``since`` when."""

    as_reader: Reader
    process: int
    link: Link
    reader: LinkReader
    stays: Any
    asked: Any = None
    since: float = 0.0

    @property
    def actor(self) -> Any:
        return self.as_reader.actor


class Members:
    """All workers. ``take`` is called with each message of a worker, ``lost`` with the numbers of
    those that have died and the reasons, on the thread that watches: it calls ``replace``.
    ``look`` is called now and then there."""

    def __init__(
        self,
        devices: Sequence[str],
        threads: int,
        timeout: float,
        take: Callable[[int, Message], object],
        lost: Callable[[dict[int, str]], object],
        look: Callable[[], object],
    ) -> None:
        self._devices = list(devices)
        self._threads = threads
        self._timeout = timeout
        self._take = take
        self._lost = lost
        self._look = look
        self._closed = threading.Event()
        self._pairs: dict[tuple[int, int], int] = {}
        self._lock = threading.RLock()
        self.members: list[Member] = []
        self._doorbell = Doorbell(ray.util.get_node_ip_address())
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
        options = {"num_cpus": self._threads, "max_concurrency": _CALLS, "max_restarts": 0}
        actor = ray.remote(**options)(Worker).remote(index, self._threads, self._devices)
        self._actors.append(actor)
        return actor

    def _joined(self, index: int, actor: Any) -> Member:
        """A new worker, with links from the driver and to it."""
        node, process, bell = self.result(actor.identity.remote())
        reader = Reader(actor, node, bell)
        with ExitStack() as opened:
            link = open_link(DRIVER, reader, 0)
            opened.callback(link.close)
            self.result(actor.read.remote(DRIVER, link.channel))
            channel = self.result(actor.open.remote(DRIVER, self._own, 0))
            take = partial(self._take, index)
            back = LinkReader(channel, take, str(index), self._doorbell.accept(index))
            opened.pop_all()
        return Member(reader, process, link, back, actor.stay.remote())

    def result(self, ref: Any) -> Any:
        """What a call of an actor returns. Raises ``PenstockError`` if there is no room for the
        actor, or it has died; what the call raises."""
        try:
            return ray.get(ref, timeout=_START_S)
        except ray.exceptions.GetTimeoutError as error:
            raise PenstockError(
                f"a worker of the cluster did not begin within {_START_S:.0f} s: each needs "
                f"{self._threads} CPUs of Ray, which has {ray.available_resources().get('CPU', 0)} "
                "free; ask for fewer workers or threads"
            ) from error
        except ray.exceptions.RayTaskError as error:
            cause = error.cause
            raise (cause if isinstance(cause, PenstockError) else error) from None
        except RayError as error:
            raise PenstockError(f"a worker of the cluster has died: {error}") from error

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
        opened = one.actor.open.remote(target, other.as_reader, nbytes)
        self.result(other.actor.read.remote(source, self.result(opened)))

    def replace(self, lost: Collection[int]) -> None:
        """Start workers in the place of those that have died, with all of their links."""
        for index in lost:
            self._part(index, self.members[index])
        actors = {index: self._actor(index) for index in lost}
        for index, actor in actors.items():
            self.members[index] = self._joined(index, actor)
        with self._lock:
            for (source, target), nbytes in self._pairs.items():
                if source in actors or target in actors:
                    self._connect(source, target, nbytes)

    def _part(self, index: int, old: Member) -> None:
        """Close all links of a worker that has died, so that nothing waits for it."""
        with suppress(Exception):
            ray.kill(old.actor)
        old.link.close()
        old.reader.close()
        others = [m.actor for m in self.members if m is not old]
        refs = [actor.part_from.remote(index) for actor in others]
        ray.wait(refs, num_returns=len(refs), timeout=self._timeout) if refs else None

    def dead(self, wait: float = 0.0) -> dict[int, str]:
        """The workers that have died, and why, once one has, or after ``wait`` seconds."""
        stays = [member.stays for member in self.members]
        died, _ = ray.wait(stays, timeout=wait)
        return {i: self._reason(self.members[i]) for i, ref in enumerate(stays) if ref in died}

    def _watch(self) -> None:
        """Wait for workers to die."""
        wait = min(self._timeout / _PINGS, _LONGEST_WAIT_S)
        while not self._closed.is_set():
            try:
                lost = {**self.dead(wait), **self._silent()}
                if lost and not self._closed.is_set():
                    self._lost(lost)
                self._look()
            except SystemExit:  # Ray is shut down
                return
            except Exception:
                if not self._closed.is_set():
                    report_thread_exception()
                    self._closed.wait(wait)

    def _reason(self, member: Member) -> str:
        try:
            ray.get(member.stays, timeout=0)
        except Exception as error:
            return f"process {member.process} has died: {str(error).splitlines()[0].rstrip('.')}"
        return f"process {member.process} has ended"

    def _silent(self) -> dict[int, str]:
        """Ask all workers for an answer; those that have given none for too long."""
        silent, now = {}, monotonic()
        for index, member in enumerate(self.members):
            if member.asked is not None and ray.wait([member.asked], timeout=0)[0]:
                member.asked = None
            if member.asked is None:
                member.asked, member.since = member.actor.ping.remote(), now
            elif now - member.since > self._timeout:
                silent[index] = f"it gave no answer for worker_timeout = {self._timeout} s"
        return silent

    def close(self) -> None:
        """End all workers."""
        self._closed.set()
        refs = [member.actor.close.remote() for member in self.members]
        with suppress(Exception):
            ray.wait(refs, num_returns=len(refs), timeout=1.0)
        for member in self.members:
            member.link.close()
            member.reader.close()
        for actor in self._actors:
            with suppress(Exception):
                ray.kill(actor)
        self._doorbell.close()


def start_ray(address: str | None, cpus: int) -> None:
    """Attach to the Ray that the process uses, or at an address; or start one on this machine."""
    if ray.is_initialized():
        return
    quiet: dict[str, Any] = {"log_to_driver": False, "configure_logging": False}
    if address is not None:
        ray.init(address=address, **quiet)
        return
    cpus = max(cpus, os.cpu_count() or 1)
    ray.init(num_cpus=cpus, include_dashboard=False, **quiet)
