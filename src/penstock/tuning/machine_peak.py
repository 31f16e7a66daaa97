"""Peak rates of this machine: the two lines of a roofline.

Measured, not looked up: products of float32 matrices by NumPy's library that fit into a core's
cache, and a copy of arrays that no cache holds. Many short trials, of which the fastest counts:
other processes disturb most of a long one, and a product on several threads waits for the slowest.
The roofline is S. Williams, A. Waterman and D. Patterson's (Roofline: an insightful visual
performance model, CACM 2009).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cache
from time import perf_counter

import numpy as np

from penstock.backends.numpy import NumpyBackend
from penstock.core.records import dataclass, replace
from penstock.host.thread_share import ThreadShare
from penstock.observers.profile import StepRow

_PRECISION = "float32"
_SIZE = 256
_PRODUCTS = 60
_COPIED_BYTES = 1 << 26
_COPIES = 5


@dataclass(frozen=True, slots=True)
class MachinePeak:
    """Floating-point operations in float32, a multiplication and an addition counting as two, and
    bytes to and from memory, each per second. The operations are those of one core times this
    number of ``threads``, which need not reach that together; copies have one thread."""

    threads: int
    flops_per_s: float
    bytes_per_s: float

    def with_steps(self, steps: Iterable[StepRow]) -> MachinePeak:
        """The peak, raised to what the fastest of ``steps`` reached: other libraries may surpass
        NumPy's, and no step its own peak."""
        reached = [row.flops_per_s for row in steps if row.facts.precision == _PRECISION]
        return replace(self, flops_per_s=max([self.flops_per_s, *reached]))

    def share(self, row: StepRow) -> float | None:
        """The share of the peak that a step reaches; None if it does not compute in float32: other
        types have peaks of their own."""
        return row.flops_per_s / self.flops_per_s if row.facts.precision == _PRECISION else None


@cache
def machine_peak(threads: int) -> MachinePeak:
    """The peak of this machine with this number of threads, measured once in a process, in about a
    tenth of a second."""
    # Written, since all pages that never were are one page, which stays in the cache.
    source, target = np.ones((2, _COPIED_BYTES), np.uint8)
    copy_s = _fastest(lambda: np.copyto(target, source), _COPIES)
    # A copy reads each byte and writes it.
    return MachinePeak(threads, threads * _flops_of_core(), 2 * _COPIED_BYTES / copy_s)


@cache
def _flops_of_core() -> float:
    """Operations of one core in a second."""
    a = np.ones((_SIZE, _SIZE), np.float32)
    product = np.empty_like(a)
    with ThreadShare([NumpyBackend()], 1, 1):
        return 2 * _SIZE**3 / _fastest(lambda: np.matmul(a, a, product), _PRODUCTS)


def _fastest(work: Callable[[], object], trials: int) -> float:
    seconds = []
    for _ in range(trials):
        begin = perf_counter()
        work()
        seconds.append(perf_counter() - begin)
    return min(seconds)
