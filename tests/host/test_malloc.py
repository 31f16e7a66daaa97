"""Memory that is freed stays in the process."""

from __future__ import annotations

import gc
import mmap
import os

import numpy as np
import pytest

from penstock.core.types import FLOAT32
from penstock.host import malloc
from penstock.host.malloc import (
    MOST_KEPT,
    empty,
    give_back_memory,
    kept_bytes,
    new_bytes,
    weight_bytes,
)
from tests.support.malloc import needs_glibc
from tests.support.onnx_text import compile_text
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


@pytest.fixture(autouse=True)
def unbounded() -> None:
    """Let go of sessions with ``memory=`` that errors of other tests hold: less is kept for them."""
    gc.collect()


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


LARGE = (33, 1 << 18)
LARGE_BYTES = 33 << 20
"""dims of an array in float32 that malloc does not keep"""

needs_mappings = pytest.mark.skipif(os.name != "posix", reason="mappings are not private")


def place(array: np.ndarray) -> int:
    return array.__array_interface__["data"][0]


@pytest.fixture
def nothing_kept():
    give_back_memory()
    yield
    give_back_memory()


@needs_mappings
@pytest.mark.usefixtures("nothing_kept")
def test_memory_of_a_large_array_is_kept_for_the_next_when_its_last_view_is_freed():
    array = empty(LARGE, FLOAT32)
    part, where = array[3:][:, ::2], place(array)
    del array
    other = empty(LARGE, FLOAT32)
    assert (kept_bytes(), place(other) == where) == (0, False)
    del part
    assert kept_bytes() == other.nbytes
    assert place(empty((32, 1 << 18), FLOAT32)) == where


@needs_mappings
@pytest.mark.usefixtures("nothing_kept")
def test_memory_that_is_kept_is_bounded_and_given_back():
    arrays = [empty(LARGE, FLOAT32) for _ in range(10)]
    nbytes = arrays[0].nbytes
    arrays.clear()
    assert MOST_KEPT - nbytes < kept_bytes() <= MOST_KEPT
    give_back_memory(beyond=1 << 40)
    assert kept_bytes() > 0
    give_back_memory(beyond=nbytes)
    assert kept_bytes() == 0


def test_free_memory_is_counted():
    if malloc._mallinfo() is None:
        pytest.skip("glibc has no mallinfo2")
    blocks = [np.empty(50_000, np.uint8) for _ in range(200)]
    last = np.empty(50_000, np.uint8)  # behind the others, so that malloc keeps them
    before = malloc._free_bytes()
    del blocks
    assert 9e6 < malloc._free_bytes() - before < 11e6
    assert last.size


@needs_mappings
@pytest.mark.usefixtures("nothing_kept")
def test_memory_that_is_far_too_large_is_not_taken():
    array = empty((66, 1 << 18), FLOAT32)
    del array
    assert empty(LARGE, FLOAT32).nbytes < kept_bytes()


@needs_mappings
@pytest.mark.usefixtures("nothing_kept")
def test_forked_child_writes_into_kept_memory_of_its_own():
    array = empty(LARGE, FLOAT32)
    array[0, 0] = 1
    del array
    child = os.fork()
    if not child:
        array = empty(LARGE, FLOAT32)
        array[0, 0] += 1
        os._exit(int(array[0, 0]))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 2
    assert empty(LARGE, FLOAT32)[0, 0] == 1


@needs_mappings
@pytest.mark.usefixtures("nothing_kept")
@pytest.mark.parametrize("operation", ["Exp(x)", "Softmax(x)", "Expand(x, dims)"])
def test_large_result_is_in_memory_of_one_that_the_caller_has_let_go(operation):
    constants = "<int64[2] dims = {33, 262144}>"
    text = f"g (float[33, 262144] x) => (float[33, 262144] y) {constants} {{ y = {operation} }}"
    session = compile_text(text)
    feeds = {"x": np.zeros(LARGE, np.float32)}
    first = session.run(feeds)["y"]
    second = session.run(feeds)["y"]
    places = [place(first), place(second)]
    assert places[0] != places[1]
    del first
    assert place(session.run(feeds)["y"]) == places[0]
    del second
    session.trim()
    assert kept_bytes() == 0


@pytest.mark.parametrize("nbytes", [0, 1, (4 << 20) - 1, 4 << 20, (8 << 20) + 5])
def test_memory_for_weights_is_writable_and_as_large_as_asked_for(nbytes):
    array = new_bytes(nbytes)
    array[:] = 7
    assert (array.dtype, array.shape) == (np.uint8, (nbytes,))
    assert array.flags.c_contiguous
    # Large arrays have a mapping of their own, for which NumPy asks for no large pages.
    assert (array.base is not None) == (nbytes >= 4 << 20)


@pytest.mark.costly
def test_weights_begin_with_a_line_and_do_not_overlap(monkeypatch):
    """Behind the first, those of a size lie in mappings of large pages, up to a limit."""
    monkeypatch.setattr(malloc, "_packed", 0)
    monkeypatch.setattr(malloc, "_room", np.empty(0, np.uint8))
    rng, arrays, mapped = np.random.default_rng(0), [], 0
    for i, size in enumerate(
        [0, 1, 63, 9 << 20, *rng.integers(1, 3 << 20, 150).tolist(), 200 << 20]
    ):
        array = weight_bytes(size)
        assert (array.size, array.dtype, array.flags.writeable) == (size, np.uint8, True)
        assert array.ctypes.data % 64 == 0 or not size
        array[:] = i % 251
        owner = array
        while isinstance(owner, np.ndarray) and owner.base is not None:
            owner = owner.base
        in_pages = not isinstance(owner, np.ndarray)
        mapped += size if in_pages else 0
        if in_pages:
            assert len(arrays) >= 3 and size >= 1 << 16
        arrays.append(array)
    assert 64 << 20 < mapped < 128 << 20 or not hasattr(mmap, "MADV_HUGEPAGE")
    for i, array in enumerate(arrays):
        assert (array == i % 251).all()
    assert sum(map(len, malloc._slabs)) <= 128 << 20
    del arrays, array, owner
    monkeypatch.setattr(malloc, "_room", np.empty(0, np.uint8))
    gc.collect()


@needs_mappings
@pytest.mark.usefixtures("nothing_kept")
def test_memory_that_is_kept_is_no_more_than_a_bound_leaves():
    class Half:
        unused = LARGE_BYTES * 3 // 2

    bound = Half()
    malloc.bound_kept_memory(bound)
    arrays = [empty(LARGE, FLOAT32) for _ in range(3)]
    arrays.clear()
    assert kept_bytes() == LARGE_BYTES
    bound.unused = 0
    array = empty(LARGE, FLOAT32)
    del array
    assert kept_bytes() == 0
    del bound
    array = empty(LARGE, FLOAT32)
    del array
    assert kept_bytes() == LARGE_BYTES
