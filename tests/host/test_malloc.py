"""Memory that is freed stays in the process."""

from __future__ import annotations

import platform

import pytest

from tests.support.processes import end_of

PROGRAM = """
import resource
import numpy as np
from penstock.host.malloc import keep_memory

def faults():
    begin = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(20):
        np.empty(1 << 20, np.uint8).fill(1)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - begin

keep_memory()
np.empty(1 << 20, np.uint8).fill(1)
print(faults())
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="a property of glibc's malloc")
def test_keep_memory_lets_arrays_reuse_freed_pages():
    pages = (1 << 20) // 4096
    assert int(end_of(PROGRAM)) < pages, "20 arrays of 256 pages, each of which was used before"
