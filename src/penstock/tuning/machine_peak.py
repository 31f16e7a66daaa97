"""What this machine can do at most: the two lines of a roofline.

Measured, not looked up: a product of large float32 matrices by NumPy's library, and a copy of
arrays that no cache holds. The roofline is S. Williams, A. Waterman and D. Patterson's (Roofline:
an insightful visual performance model, CACM 2009).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from time import perf_counter

import numpy as np

from penstock.algorithms.records import dataclass
from penstock.backends.numpy import NumpyBackend
from penstock.host.thread_share import ThreadShare

_SIZE = 1024
_COPIED_BYTES = 1 << 26
_RUNS = 5


@dataclass(frozen=True, slots=True)
class MachinePeak:
    """Floating-point operations in float32, a multiplication and an addition counting as two, and
    bytes to and from memory, each per second, with this number of ``threads`` for products; copies
    have one."""

    threads: int
    flops_per_s: float
    bytes_per_s: float


@cache
def machine_peak(threads: int) -> MachinePeak:
    """The peak of this machine with this number of threads, measured once in a process: the fastest
    of a few runs, in about a tenth of a second."""
    a = np.ones((_SIZE, _SIZE), np.float32)
    product = np.empty_like(a)
    source = np.zeros(_COPIED_BYTES, np.uint8)
    target = np.ones_like(source)
    with ThreadShare([NumpyBackend()], 1, threads):
        product_s = _fastest(lambda: np.matmul(a, a, product))
    copy_s = _fastest(lambda: np.copyto(target, source))
    return MachinePeak(threads, 2 * _SIZE**3 / product_s, 2 * _COPIED_BYTES / copy_s)


def _fastest(work: Callable[[], object]) -> float:
    seconds = []
    for _ in range(_RUNS):
        begin = perf_counter()
        work()
        seconds.append(perf_counter() - begin)
    return min(seconds)
