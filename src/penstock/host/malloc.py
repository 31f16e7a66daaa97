"""Keep freed memory in the process, since every run allocates its outputs anew.

With glibc, an array of more than 128 KiB is at first a mapping of its own: the system clears its
pages, and takes them back when the array is freed. For a network of 3 ms with an output of 600 KiB
this takes a sixth of a run. When a mapping is freed, glibc raises the threshold to its size
(``mallopt``, M_MMAP_THRESHOLD), and from then on reuses freed memory of up to that size, at most 32
MiB. ``empty`` reuses the memory of larger arrays.

Threads allocate from up to eight arenas of glibc for each core, and none reuses what is free in
another. Python's lock lets one thread at a time allocate, so that one for each core is enough.
"""

from __future__ import annotations

import math
import mmap
import os
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import cache
from typing import Any, Protocol

import numpy as np

from penstock.host.fork import shared_lock
from penstock.host.native import new_empty
from penstock.host.threads import core_budget

LARGEST = (32 << 20) - (1 << 16)
"""bytes of an array that glibc reuses; its threshold's maximum is slightly larger"""
_M_ARENA_MAX = -8  # of glibc's malloc.h

_ADVISED = 4 << 20

MOST_KEPT = 256 << 20
"""bytes of freed large arrays that are kept"""
# Smaller arrays take memory of up to this many times their size.
_SPARE = 1.5
# Memory of freed large arrays, the most recent at the end. There is no lock, since an array may be
# freed anywhere: each operation on the list is atomic.
_kept: list[mmap.mmap] = []


class Bounded(Protocol):
    """A bound on the memory of a part of the process."""

    @property
    def unused(self) -> int:
        """Return the bytes of the bound that are free for kept memory."""


_bounds: list[weakref.ref[Bounded]] = []

# Bytes of a cache line, of a large page, of a mapping of such pages, of an array of weights that is
# placed in them, of the first weights, which are not, and of all mappings.
_LINE, _PAGE, _SLAB, _SMALL, _FIRST, _MOST = 64, 2 << 20, 16 << 20, 1 << 16, 8 << 20, 128 << 20
_LOCK = shared_lock()
_packed, _room = 0, np.empty(0, np.uint8)
_freed = 0
_slabs: weakref.WeakSet[mmap.mmap] = weakref.WeakSet()


def empty(dims: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """``np.empty``, but a large array takes the memory of a freed one if that fits."""
    nbytes = math.prod(dims) * dtype.itemsize
    # Not for objects, since old references in reused memory would be released again. Windows has
    # no private mappings.
    if nbytes <= LARGEST or dtype.hasobject or not hasattr(mmap, "MAP_PRIVATE"):
        return new_empty()(dims, dtype)
    # Clearing new pages took the system 3.5 of the 5.2 ms of a Resize to 33.5 MB (decision 50).
    block = _take(nbytes)
    if block is None:
        try:
            block = mmap.mmap(-1, nbytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except OSError:
            return np.empty(dims, dtype)  # raises the error for lack of memory
        if hasattr(mmap, "MADV_HUGEPAGE"):
            with suppress(OSError):  # the system may lack it
                block.madvise(mmap.MADV_HUGEPAGE)
    array: np.ndarray = np.ndarray(dims, dtype, block)
    # Views of the array refer to the array, not to the block.
    weakref.finalize(array, _give, block).atexit = False
    return array


def new_bytes(nbytes: int) -> np.ndarray:
    """Return ``nbytes`` of memory for weights, which are written once and kept. From 4 MiB on
    NumPy asks for large pages; if free memory is fragmented, the system first compacts it in the
    middle of a write: loading 500 MB took 0.8 to 2.5 s instead of 0.9 to 1.1, and runs were no
    faster."""
    if nbytes < _ADVISED or not hasattr(mmap, "MAP_PRIVATE"):
        return np.empty(nbytes, np.uint8)
    return np.frombuffer(mmap.mmap(-1, nbytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS), np.uint8)


def weight_bytes(nbytes: int) -> np.ndarray:
    """Return memory for packed weights, aligned to a cache line. After the first 8 MiB of a
    process, up to 128 MiB are in pages of 2 MiB: ResNet-50 takes 6 % longer with pages of 4 KiB,
    and beyond that the system takes longer to create large pages than they save."""
    global _room, _packed
    size = math.ceil(nbytes / _LINE) * _LINE
    mapped = max(size, _SLAB) + _PAGE
    with _LOCK:
        _packed += nbytes
        large = _packed > _FIRST and size >= _SMALL and hasattr(mmap, "MADV_HUGEPAGE")
        if large and size > _room.size and sum(map(len, _slabs)) + mapped <= _MOST:
            block = mmap.mmap(-1, mapped, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            with suppress(OSError):  # the system may lack it
                block.madvise(mmap.MADV_HUGEPAGE)
            _slabs.add(block)
            memory = np.frombuffer(block, np.uint8)
            _room = memory[-memory.ctypes.data % _PAGE :]
        if large and size <= _room.size:
            memory, _room = _room[:nbytes], _room[size:]
            return memory
    return aligned_bytes(nbytes)


def aligned_bytes(nbytes: int) -> np.ndarray:
    """Return uninitialized memory as uint8, aligned to a cache line."""
    memory = np.empty(nbytes + _LINE, np.uint8)
    start: int = memory.__array_interface__["data"][0]  # ``ctypes`` would take calls of Python
    return memory[-start % _LINE :][:nbytes]


def _take(nbytes: int) -> mmap.mmap | None:
    # The smallest that fits, so that large blocks remain for arrays that need them.
    for block in sorted(_kept, key=len):
        if nbytes <= len(block) <= nbytes * _SPARE:
            with suppress(ValueError):  # another thread has taken it
                _kept.remove(block)
                return block
    return None


def bound_kept_memory(bounded: Bounded) -> None:
    """Keep no more freed memory than ``bounded`` leaves unused, as long as it is alive."""
    _bounds[:] = [ref for ref in _bounds if ref() is not None]
    _bounds.append(weakref.ref(bounded))


def _give(block: mmap.mmap) -> None:
    _kept.append(block)
    unused = [bounded.unused for ref in tuple(_bounds) if (bounded := ref()) is not None]
    most = min(MOST_KEPT, *unused) if unused else MOST_KEPT
    while kept_bytes() > most:
        with suppress(IndexError):
            _kept.pop(0)


def kept_bytes() -> int:
    """Return the bytes of freed large arrays that are kept."""
    return sum(map(len, tuple(_kept)))


def note_freed(nbytes: int, most: int = _SLAB) -> None:
    """Record that ``nbytes`` of weights were freed, which later weights do not reuse: beyond
    ``most`` bytes in all, return free memory to the system."""
    global _freed
    _freed += nbytes
    if _freed > most:
        give_back_memory()


def give_back_memory(beyond: int = -1) -> None:
    """Return free memory to the system if it has more than ``beyond`` bytes. With glibc; other
    libraries do so by themselves."""
    global _freed
    if beyond >= kept_bytes() + _free_bytes():
        return
    _freed = 0
    _kept.clear()
    trim = _libc_function("malloc_trim")
    if trim is not None:
        trim(0)


def _free_bytes() -> float:
    """Return the bytes that glibc's malloc could give out without the system; infinity if it does
    not say (before 2.33)."""
    mallinfo = _mallinfo()
    return math.inf if mallinfo is None else mallinfo()[8]  # ``fordblks``


@cache
def _mallinfo() -> Callable[[], Sequence[int]] | None:
    function: Any = _libc_function("mallinfo2")
    if function is None:
        return None
    import ctypes

    class Numbers(ctypes.Structure):
        _fields_ = (("of", ctypes.c_size_t * 10),)

    function.restype = Numbers
    return lambda: function().of


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
    arena for each core unless the environment sets the number. Touches no memory."""
    # Freeing a mapping raises glibc's threshold.
    np.empty(LARGEST, np.uint8)
    mallopt = _libc_function("mallopt")
    chosen = "MALLOC_ARENA_MAX" in os.environ or "arena_max" in os.environ.get("GLIBC_TUNABLES", "")
    if mallopt is not None and not chosen:
        mallopt(_M_ARENA_MAX, core_budget())
