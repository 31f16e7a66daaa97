"""Keep freed memory in the process, since every run allocates its outputs anew.

With glibc, an array of more than 128 KiB is a mapping of its own at first: the system clears its
pages, and takes them back when the array is freed. For a network of 3 ms with an output of 600 KiB
this takes a sixth of a run. glibc raises the threshold to the size of a mapping when that is freed
(``mallopt``, M_MMAP_THRESHOLD); from then on, freed memory of up to that size is reused.

Threads allocate from up to eight arenas of glibc for each core, and none reuses what another has
free. Python's lock lets one thread at a time allocate, so that one for each core is enough.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import cache

import numpy as np

from penstock.host.threads import core_budget

# Slightly below the maximum of the threshold.
_LARGEST = (32 << 20) - (1 << 16)
_M_ARENA_MAX = -8  # of glibc's malloc.h


def give_back_memory() -> None:
    """Give free memory back to the system. With glibc; other libraries do so by themselves."""
    trim = _libc_function("malloc_trim")
    if trim is not None:
        trim(0)


@cache
def _libc_function(name: str) -> Callable[..., int] | None:
    import ctypes

    try:
        function: Callable[..., int] = getattr(ctypes.CDLL(None), name)
    except (AttributeError, OSError, TypeError):  # TypeError: on Windows
        return None
    return function


@cache
def keep_memory() -> None:
    """Reuse freed blocks of up to 32 MiB for later arrays, and share them among threads: use one
    arena for each core unless the environment has a number. Touches no memory."""
    np.empty(_LARGEST, np.uint8)
    mallopt = _libc_function("mallopt")
    chosen = "MALLOC_ARENA_MAX" in os.environ or "arena_max" in os.environ.get("GLIBC_TUNABLES", "")
    if mallopt is not None and not chosen:
        mallopt(_M_ARENA_MAX, core_budget())
