"""State of a cluster's driver: lost workers, the workers of variables, and the costs of links."""

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
"""The maximum number of consecutive replacements during which further workers die."""


class Wholeness:
    """Whether no worker of a cluster is lost. Calls of workers wait while lost ones are replaced.
    ``ended``: the reason why the cluster has ended, or None."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.is_whole = True
        self.replacements = 0
        self.ended: str | None = None

    def replaced(self) -> None:
        """Let waiting calls continue: lost workers have been replaced, or cannot be."""
        with self.changed:
            self.is_whole = True
            self.replacements += 1
            self.changed.notify_all()

    def steady(self, call: Callable[[], T]) -> T:
        """Return the result of ``call``, a call of workers, which is repeated if a worker dies
        meanwhile and is replaced. Raises ``WorkerLost``."""
        # Only for idempotent calls: to register, connect, read or set. Runs are repeated by
        # ``retries``.
        attempts = MOST_REPLACEMENTS
        while True:
            with self.changed:
                if not self._await_change(self._is_steady):
                    raise WorkerLost("a worker of the cluster is lost, and not replaced yet")
                before = self.replacements
            if self.ended is not None:
                raise PenstockError(self.ended)
            # Without the lock, which the watching thread needs to replace a worker meanwhile.
            try:
                return call()
            except WorkerLost:
                attempts -= 1
                # The error may be raised long before Ray notifies the watching thread.
                with self.changed:
                    is_replaced = self._await_change(partial(self._is_newer, before))
                if not attempts or not is_replaced:
                    raise

    def _await_change(self, condition: Callable[[], bool]) -> bool:
        """Wait up to ``START_S`` for a condition; return whether it holds. The caller must hold
        ``changed``. Raises the error that this thread's work was stopped with, if any."""
        # In short waits, between which Python handles signals, and compilation its deadline.
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
    """The worker of each variable, by the number of its store and its name. ``losses``: losses of
    stores that no run has raised yet. Callers must hold the cluster's lock."""

    def __init__(self) -> None:
        # Weak, so that variables are dropped with their session, here and then on the workers.
        self._numbers: weakref.WeakKeyDictionary[Store, int] = weakref.WeakKeyDictionary()
        self._next = count()
        self.homes: dict[tuple[int, str], int] = {}
        self.losses: dict[int, WorkerLost] = {}
        # Finalizers append to it, on any thread and under any lock: ``append`` needs no lock.
        self.forgotten: deque[int] = deque()

    def number(self, store: Store) -> int:
        """Return the number of a session's store, which no other store has ever had."""
        # A counter, since ``id`` may be that of a deleted store, whose values workers may still
        # have.
        number = self._numbers.get(store)
        if number is None:
            number = self._numbers[store] = next(self._next)
            weakref.finalize(store, self.forgotten.append, number)
        return number

    def settle(self, variable: tuple[int, str], worker: int, devices: Sequence[str]) -> bool:
        """Record the worker of a variable. Return whether it had none before. Raises
        ``InvalidModel`` if another worker has it."""
        # Workers share no memory, and keeping two copies equal would take a message for each
        # assignment.
        is_new = variable not in self.homes
        home = self.homes.setdefault(variable, worker)
        if home != worker:
            raise InvalidModel(
                f"variable {variable[1]!r} is used on {devices[home]} and on {devices[worker]}, "
                "which share no memory; assign all nodes that name it to one device"
            )
        return is_new

    def unsettle(self, fresh: Sequence[tuple[Store, str]]) -> None:
        """Forget the workers of variables, whose graph was not registered."""
        for store, name in fresh:
            self.homes.pop((self._numbers[store], name), None)

    def forget(self, stores: Collection[int]) -> None:
        """Forget the variables of the stores with these numbers."""
        for variable in [v for v in self.homes if v[0] in stores]:
            del self.homes[variable]
        for number in stores:
            self.losses.pop(number, None)

    def find(self, store: Store, name: str) -> tuple[int, int] | None:
        """Return the worker that has a variable, and the number of its store; None if none has."""
        number = self._numbers.get(store)
        worker = None if number is None else self.homes.get((number, name))
        return None if number is None or worker is None else (worker, number)


# The latency and the bandwidth of links, measured by messages to a worker and back.


# Bytes of the two messages, and how often each is sent: the time of the small one is the latency,
# to which the large one adds the time that depends on the bandwidth.
_PROBES = (8, 1 << 20)
_PROBE_ROUNDS = 8


class LinkTimer:
    """The cost of links, as given or as measured."""

    def __init__(self, bandwidth: float | None, latency: float | None) -> None:
        self._given = bandwidth, latency
        self._cost: LinkCost | None = None
        self._echo: dict[int, threading.Event] = {}

    def take_echo(self, number: int) -> None:
        """Record that a message has come back."""
        self._echo[number].set()

    def cost(self, link: Callable[[], Link], timeout: float) -> LinkCost:
        """Return the cost, as given or as measured on the first call, over the link that ``link``
        returns. Raises ``PenstockError`` if a message takes more than ``timeout`` seconds."""
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
        """Measure messages to a worker and back, over two links."""
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
                    raise PenstockError(
                        f"the cluster's links cannot be measured: a worker has not answered within "
                        f"{timeout} s; give bandwidth= and latency=, or a longer worker_timeout="
                    )
                times.append((monotonic() - start) / 2)
            # The minimum, since other load of the machine only adds to the time.
            seconds.append(min(times))
        small, large = seconds
        # The time of the small message is the latency, which is a part of the large one's time.
        per_byte = max(large - small, 1e-9) / (_PROBES[1] - _PROBES[0])
        return LinkCost(1 / per_byte, small)
