"""Keep freed memory in the process, since every run allocates its outputs anew.

With glibc, an array of more than 128 KiB is a mapping of its own at first: the system clears its
pages, and takes them back when the array is freed. For a network of 3 ms with an output of 600 KiB
this takes a sixth of a run. glibc raises the threshold to the size of a mapping when that is freed
(``mallopt``, M_MMAP_THRESHOLD); from then on, freed memory of up to that size is reused.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import numpy as np

# Slightly below the maximum of the threshold.
_LARGEST = (32 << 20) - (1 << 16)


def give_back_memory() -> None:
    """Give free memory back to the system. With glibc; other libraries do so by themselves."""
    trim = _malloc_trim()
    if trim is not None:
        trim(0)


@cache
def _malloc_trim() -> Callable[[int], int] | None:
    import ctypes

    try:
        return ctypes.CDLL(None).malloc_trim
    except (AttributeError, OSError, TypeError):  # TypeError: on Windows
        return None


@cache
def keep_memory() -> None:
    """Reuse freed blocks of up to 32 MiB for later arrays. Touches no memory."""
    np.empty(_LARGEST, np.uint8)
