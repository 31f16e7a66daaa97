"""State of a cluster's driver: which workers are alive, which of them holds which variable, and the
costs of links."""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Callable, Collection, Sequence
from functools import partial
from itertools import count
from time import monotonic
from typing import TYPE_CHECKING, TypeVar

from penstock.cluster.waits import START_S
from penstock.core.checkpoints import WAKE_S, checkpoint
from penstock.core.errors import InvalidModel, PenstockError, WorkerLost

if TYPE_CHECKING:
    from penstock.cluster.links import Link
    from penstock.ops.tensorflow.state import Store
    from penstock.tuning.worker_placement import LinkCost

T = TypeVar("T")

MOST_REPLACEMENTS = 5
"""Times that workers are replaced in a row while others die."""


class Wholeness:
    """Whether all workers of a cluster are there: lost ones are being replaced otherwise, which
    calls of workers wait for. ``ended`` says why there are none any more."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.is_whole = True
        self.replacements = 0
        self.ended: str | None = None

    def replaced(self) -> None:
        """Lost workers have been replaced, or cannot be."""
        with self.changed:
            self.is_whole = True
            self.replacements += 1
            self.changed.notify_all()

    def steady(self, call: Callable[[], T]) -> T:
        """The result of a call of workers, which is repeated if one dies meanwhile and is replaced.
        Raises ``WorkerLost``."""
        # Only for calls that may be made twice: to register, connect, read or set. Runs have
        # ``retries`` of their own.
        attempts = MOST_REPLACEMENTS
        while True:
            with self.changed:
                if not self._await_change(self._is_steady):
                    raise WorkerLost("a worker of the cluster is lost, and not replaced yet")
                before = self.replacements
            if self.ended is not None:
                raise PenstockError(self.ended)
            # Without the lock: the thread that watches needs it to replace a worker meanwhile.
            try:
                return call()
            except WorkerLost:
                attempts -= 1
                # The error may come long before Ray tells the thread that watches.
                with self.changed:
                    is_replaced = self._await_change(partial(self._is_newer, before))
                if not attempts or not is_replaced:
                    raise

    def _await_change(self, condition: Callable[[], bool]) -> bool:
        """Whether a condition holds after a while, ``changed`` being held meanwhile. Raises what
        the work of this thread must stop with."""
        # In short waits: Python handles signals, and compiling its deadline, between them.
        until = monotonic() + START_S
        while not self.changed.wait_for(condition, WAKE_S):
            checkpoint()
            if monotonic() > until:
                return False
        return True

    def _is_newer(self, replacements: int) -> bool:
        return self.replacements != replacements or self.ended is not None

    def _is_steady(self) -> bool:
        return self.is_whole or self.ended is not None


# The worker of each variable.


class VariableHomes:
    """The workers of variables, by the numbers of their stores and their names, and the ``losses``
    of stores that no run has been told of. All methods are called under the cluster's lock."""

    def __init__(self) -> None:
        # Weak, so that variables go with their session, here and then on the workers.
        self._numbers: weakref.WeakKeyDictionary[Store, int] = weakref.WeakKeyDictionary()
        self._next = count()
        self.homes: dict[tuple[int, str], int] = {}
        self.losses: dict[int, WorkerLost] = {}
        # Finalizers add to it, on any thread and under any lock: appending takes none.
        self.forgotten: deque[int] = deque()

    def number(self, store: Store) -> int:
        """The number of a session's store, which no other store has had."""
        # Counted, since ``id`` may be that of a store that is gone, whose values workers still
        # have.
        number = self._numbers.get(store)
        if number is None:
            number = self._numbers[store] = next(self._next)
            weakref.finalize(store, self.forgotten.append, number)
        return number

    def settle(self, variable: tuple[int, str], worker: int, devices: Sequence[str]) -> bool:
        """Note the worker that has a variable; whether none had it before."""
        # Workers have no memory in common, and to keep two copies equal would take a message for
        # each assignment.
        is_new = variable not in self.homes
        home = self.homes.setdefault(variable, worker)
        if home != worker:
            raise InvalidModel(
                f"variable {variable[1]!r} is used on {devices[home]} and on {devices[worker]}, "
                "which have no memory in common; give all nodes that name it one device"
            )
        return is_new

    def unsettle(self, fresh: Sequence[tuple[Store, str]]) -> None:
        """Forget the workers of the variables of a graph that none has."""
        for store, name in fresh:
            self.homes.pop((self._numbers[store], name), None)

    def forget(self, stores: Collection[int]) -> None:
        """Forget the variables of stores, by their numbers."""
        for variable in [v for v in self.homes if v[0] in stores]:
            del self.homes[variable]
        for number in stores:
            self.losses.pop(number, None)

    def find(self, store: Store, name: str) -> tuple[int, int] | None:
        """The worker that has a variable, and the number of its store there; None if none has."""
        number = self._numbers.get(store)
        worker = None if number is None else self.homes.get((number, name))
        return None if number is None or worker is None else (worker, number)


# The latency and the bandwidth of the links of a cluster, measured by messages to a worker.


# Bytes of the messages, one that takes the latency alone and one that takes the bandwidth, and how
# often each is sent.
_PROBES = (8, 1 << 20)
_PROBE_ROUNDS = 8


class LinkTimer:
    """The cost of links, as given or as measured by messages to a worker and back."""

    def __init__(self, bandwidth: float | None, latency: float | None) -> None:
        self._given = bandwidth, latency
        self._cost: LinkCost | None = None
        self._echo: dict[int, threading.Event] = {}

    def take_echo(self, number: int) -> None:
        """A message has come back."""
        self._echo[number].set()

    def cost(self, link: Callable[[], Link], timeout: float) -> LinkCost:
        """The cost, which is measured over a ``link`` unless it is known."""
        from penstock.tuning.worker_placement import LinkCost

        if self._cost is None:
            bandwidth, latency = self._given
            if bandwidth is None or latency is None:
                measured = self._measure(link(), timeout)
                bandwidth = measured.bandwidth if bandwidth is None else bandwidth
                latency = measured.latency if latency is None else latency
            self._cost = LinkCost(bandwidth, latency)
        return self._cost

    def _measure(self, link: Link, timeout: float) -> LinkCost:
        """Time messages to a worker and back, which are two links."""
        import numpy as np

        from penstock.tuning.worker_placement import LinkCost

        seconds = []
        for nbytes in _PROBES:
            times = []
            payload = np.zeros(nbytes, np.uint8)
            for i in range(_PROBE_ROUNDS):
                event = self._echo[i] = threading.Event()
                start = monotonic()
                link.send(("echo", i, payload))
                if not event.wait(timeout):
                    raise PenstockError("a worker gives no answer")
                times.append((monotonic() - start) / 2)
            # The least: other work on the machine only adds to the time.
            seconds.append(min(times))
        small, large = seconds
        # The small message takes the latency alone, which is a part of the large one's time.
        per_byte = max(large - small, 1e-9) / (_PROBES[1] - _PROBES[0])
        return LinkCost(1 / per_byte, small)
