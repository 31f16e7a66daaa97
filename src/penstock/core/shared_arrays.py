"""Large arrays with the same contents are held once in a process.

Two sessions of one model have the same weights, and kernels have packed them in the same forms.
Contents are compared, not times of files: what differs in one bit, or lies elsewhere in a file, is
never shared.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable
from weakref import WeakValueDictionary

import numpy as np

from penstock.core.origins import origin_of

LEAST_BYTES = 1 << 18
"""bytes of an array from which on it is looked for"""
_SAMPLES, _PIECE = 64, 1 << 20

_KNOWN: WeakValueDictionary[tuple[object, ...], np.ndarray] = WeakValueDictionary()


def held_once(
    array: np.ndarray, keep: Callable[[np.ndarray], np.ndarray] | None = None
) -> np.ndarray:
    """An array with the same contents that was kept here before and lives, or what ``keep`` makes
    of ``array``, by default itself. Neither may be written any more. Memory that a file is mapped
    to is left alone: its contents change with the file."""
    large = array.nbytes >= LEAST_BYTES and array.flags.c_contiguous and not array.dtype.hasobject
    if not large or mapping_of(array) is not None:
        return array if keep is None else keep(array)
    flat = array.reshape(-1)
    sample = flat[:: max(1, flat.size // _SAMPLES)].tobytes()
    # A saved session refers to a file where an array lies: equal ones elsewhere are others.
    key = array.dtype, array.shape, origin_of(array), sample
    # Each call is atomic; of two threads that add the same at once, both keep their own.
    known = _KNOWN.get(key)
    if known is not None and known is not array and _equal(known, array):
        return known
    kept = _KNOWN[key] = array if keep is None else keep(array)
    return kept


def let_pages_go(array: np.ndarray) -> None:
    """Tell the system that an array in a mapped file is not read for a while: its memory is free.
    When it is read again, so is the file."""
    mapping = mapping_of(array)
    if mapping is None or not array.flags.c_contiguous or not hasattr(mmap, "MADV_DONTNEED"):
        return
    begin = _address(array) - _address(np.frombuffer(mapping, np.uint8))
    # Whole pages alone: the others have parts of other arrays.
    first = -(-begin // mmap.PAGESIZE) * mmap.PAGESIZE
    end = (begin + array.nbytes) // mmap.PAGESIZE * mmap.PAGESIZE
    if first < end:
        mapping.madvise(mmap.MADV_DONTNEED, first, end - first)


def mapping_of(array: np.ndarray) -> mmap.mmap | None:
    """The mapping of a file that an array is in; None for an array in other memory."""
    owner: object = array
    while isinstance(owner, np.ndarray | memoryview):
        owner = owner.base if isinstance(owner, np.ndarray) else owner.obj
    # Anonymous memory may be written.
    return owner if isinstance(owner, mmap.mmap) and memoryview(owner).readonly else None


def _address(array: np.ndarray) -> int:
    start = array.__array_interface__["data"][0]
    assert isinstance(start, int)
    return start


def _equal(known: np.ndarray, array: np.ndarray) -> bool:
    """Whether two arrays of one type have the same bytes, some at a time: a comparison of whole
    arrays by NumPy makes a third, and takes NaN for unequal."""
    a, b = known.reshape(-1).view(np.uint8), array.reshape(-1).view(np.uint8)
    return all(
        a[at : at + _PIECE].tobytes() == b[at : at + _PIECE].tobytes()
        for at in range(0, a.size, _PIECE)
    )
