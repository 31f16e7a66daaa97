"""Memory that runs ask for again and again, kept in the process.

The outputs of a run are new arrays. With glibc, each of more than 128 KiB is a mapping of its own
at first: the system clears its pages, and takes them back when the caller lets go of it. For a
network of 3 ms whose result has 600 KiB this is a sixth of a run. The bound rises when a mapping is
given back, to its size (``mallopt``, M_MMAP_THRESHOLD), and what was given back then serves again.
"""

from __future__ import annotations

from functools import cache

import numpy as np

# A little less than where the bound ends to rise.
_LARGEST = (32 << 20) - (1 << 16)


@cache
def keep_memory() -> None:
    """Let what is freed, up to 32 MiB at once, serve later arrays. Touches no memory."""
    np.empty(_LARGEST, np.uint8)
