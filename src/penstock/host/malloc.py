"""Keep freed memory in the process, since every run allocates its outputs anew.

With glibc, an array of more than 128 KiB is a mapping of its own at first: the system clears its
pages, and takes them back when the array is freed. For a network of 3 ms with an output of 600 KiB
this takes a sixth of a run. glibc raises the threshold to the size of a mapping when that is freed
(``mallopt``, M_MMAP_THRESHOLD); from then on, freed memory of up to that size is reused.
"""

from __future__ import annotations

from functools import cache

import numpy as np

# Slightly below the maximum of the threshold.
_LARGEST = (32 << 20) - (1 << 16)


@cache
def keep_memory() -> None:
    """Reuse freed blocks of up to 32 MiB for later arrays. Touches no memory."""
    np.empty(_LARGEST, np.uint8)
