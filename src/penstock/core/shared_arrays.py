"""Hold large arrays with the same contents once per process.

Two sessions of one model have the same weights, and their kernels pack these in the same forms.
Contents are compared, not file times: arrays that differ in one bit, or that lie elsewhere in a
file, are never shared.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable
from weakref import WeakValueDictionary

import numpy as np

from penstock.core.origins import note_origin, origin_of

LEAST_BYTES = 1 << 18
"""bytes of an array from which on it is shared"""
_SAMPLES, _PIECE = 64, 1 << 20

_KNOWN: WeakValueDictionary[tuple[object, ...], np.ndarray] = WeakValueDictionary()


def held_once(
    array: np.ndarray, keep: Callable[[np.ndarray], np.ndarray] | None = None
) -> np.ndarray:
    """Return a live array with the same contents that was passed here before, or a view of it if it
    was read elsewhere, or else ``keep(array)``, by default ``array`` itself. None of these may be
    written any more. Memory mapped from a file is not shared, since its contents change with the
    file."""
    large = array.nbytes >= LEAST_BYTES and array.flags.c_contiguous and not array.dtype.hasobject
    if not large or mapping_of(array) is not None:
        return array if keep is None else keep(array)
    flat = array.reshape(-1)
    sample = flat[:: max(1, flat.size // _SAMPLES)].tobytes()
    # A saved session refers to the place of an array in a file, so that equal arrays from elsewhere
    # are views with origins of their own.
    origin = origin_of(array)
    any_origin, key = ((array.dtype, array.shape, sample, x) for x in (None, origin))
    # Each call is atomic; if two threads add equal arrays at once, both keep their own.
    known = _KNOWN.get(key)
    shared = _KNOWN.get(any_origin) if known is None else known
    if shared is not None and shared is not array and _equal(shared, array):
        if origin_of(shared) == origin:
            return shared
        kept = shared.view()
        note_origin(kept, origin)
    else:
        kept = array if keep is None else keep(array)
        _KNOWN.setdefault(any_origin, kept)
    _KNOWN[key] = kept
    return kept


def let_pages_go(array: np.ndarray) -> None:
    """Tell the system that an array in a mapped file is not needed for a while, which frees its
    memory. The next access reads the file again."""
    mapping = mapping_of(array)
    if mapping is None or not array.flags.c_contiguous or not hasattr(mmap, "MADV_DONTNEED"):
        return
    arrays = array, np.frombuffer(mapping, np.uint8)
    address, start = [x.__array_interface__["data"][0] for x in arrays]
    begin = address - start
    # Only whole pages: the others contain parts of other arrays.
    first = -(-begin // mmap.PAGESIZE) * mmap.PAGESIZE
    end = (begin + array.nbytes) // mmap.PAGESIZE * mmap.PAGESIZE
    if first < end:
        mapping.madvise(mmap.MADV_DONTNEED, first, end - first)


def mapping_of(array: np.ndarray) -> mmap.mmap | None:
    """Return the mapping of a file that contains an array, or None for other memory."""
    owner: object = array
    while isinstance(owner, np.ndarray | memoryview):
        owner = owner.base if isinstance(owner, np.ndarray) else owner.obj
    # Anonymous memory may be written.
    return owner if isinstance(owner, mmap.mmap) and memoryview(owner).readonly else None


def _equal(known: np.ndarray, array: np.ndarray) -> bool:
    """Whether two arrays of one type have the same bytes, compared in blocks. NumPy's comparison of
    whole arrays allocates a third one, and treats NaN as unequal."""
    a, b = known.reshape(-1).view(np.uint8), array.reshape(-1).view(np.uint8)
    return all(
        a[at : at + _PIECE].tobytes() == b[at : at + _PIECE].tobytes()
        for at in range(0, a.size, _PIECE)
    )
