"""The latency and the bandwidth of the links of a cluster, measured by messages to a worker."""

from __future__ import annotations

import threading
from collections.abc import Callable
from time import monotonic
from typing import TYPE_CHECKING

from penstock.core.errors import PenstockError

if TYPE_CHECKING:
    from penstock.cluster.links import Link
    from penstock.tuning.worker_placement import LinkCost

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
