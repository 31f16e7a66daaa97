"""The OpenMP runtime of native libraries: how its idle threads wait."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

# How idle threads of the OpenMP runtime wait: it reads these settings when it is loaded. By default
# they spin for milliseconds, at the cost of all other threads. To wake a thread takes 40 us on a
# virtual machine; kernels come after 1 to 20 us. So threads spin for 3,000 turns, about 50 us,
# before they block. Where there are more of them than cores, as when several threads each run
# kernels, the runtime lets them spin for 100 turns, unless the policy is "active": then for 1,000.
_WAITING = {"GOMP_SPINCOUNT": "3000", "OMP_WAIT_POLICY": "active"}


def is_tuned() -> bool:
    """Whether the user has said how the runtime's threads wait, or on which cores they run."""
    return bool(os.environ.keys() & {*_WAITING, "OMP_PROC_BIND", "OMP_PLACES", "GOMP_CPU_AFFINITY"})


@contextmanager
def openmp_settings() -> Iterator[None]:
    """Load libraries within this block: the runtime that comes with the first of them takes the
    settings above, or those of the user."""
    settings = {} if os.environ.keys() & _WAITING.keys() else _WAITING
    os.environ.update(settings)
    try:
        yield
    finally:
        for name in settings:
            os.environ.pop(name, None)
