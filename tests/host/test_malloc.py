"""Memory that is freed stays in the process."""

from __future__ import annotations

import pytest

from tests.support.malloc import needs_glibc
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


@needs_glibc
def test_keep_memory_lets_arrays_reuse_freed_pages():
    pages = (1 << 20) // 4096
    assert int(end_of(PROGRAM)) < pages, "20 arrays of 256 pages, each of which was used before"


THREADS = """
import threading
from penstock.host.malloc import keep_memory
from penstock.host.threads import core_budget
from tests.support.malloc import arena_count

keep_memory()
begun, end = threading.Barrier(25), threading.Event()

def client():
    buffer = bytearray(100_000)
    begun.wait()
    end.wait()

threads = [threading.Thread(target=client) for _ in range(24)]
for thread in threads:
    thread.start()
begun.wait()
print(arena_count(), core_budget())
end.set()
"""


@needs_glibc
@pytest.mark.parametrize(
    ("variables", "count"),
    [({}, 0), ({"MALLOC_ARENA_MAX": "5"}, 5), ({"GLIBC_TUNABLES": "glibc.malloc.arena_max=4"}, 4)],
)
def test_threads_share_one_arena_for_each_core_unless_the_user_has_a_number(
    variables, count, monkeypatch
):
    for name in ("MALLOC_ARENA_MAX", "GLIBC_TUNABLES"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    arenas, cores = map(int, end_of(THREADS).split())
    assert arenas == (count or cores)
