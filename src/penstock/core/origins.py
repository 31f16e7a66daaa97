"""Where in files arrays were read from: what is kept of a session refers to weights there."""

from __future__ import annotations

from weakref import ref

import numpy as np

from penstock.core.records import NamedTuple

LEAST_BYTES = 1 << 16
"""bytes of an array from which on it matters"""


class Origin(NamedTuple):
    """The offset of an array's bytes in a file, whose path is absolute."""

    path: str
    offset: int


_ORIGINS: dict[int, tuple[ref[np.ndarray], Origin]] = {}


def note_origin(data: np.ndarray, path: str, offset: int) -> None:
    """Remember where bytes were read from, as long as an array or a view of them lives."""
    if data.nbytes >= LEAST_BYTES:
        key = id(data)  # which another array may get later on
        _ORIGINS[key] = ref(data, lambda _: _ORIGINS.pop(key, None)), Origin(path, offset)


def origin_of(array: np.ndarray) -> Origin | None:
    """Where the elements of an array lie as they do in memory, if that is known."""
    owner: object = array
    while isinstance(owner, np.ndarray):
        known = _ORIGINS.get(id(owner))
        if known is not None and known[0]() is owner:
            begin = array.ctypes.data - owner.ctypes.data
            dense = array.flags.c_contiguous and array.nbytes >= LEAST_BYTES
            return known[1]._replace(offset=known[1].offset + begin) if dense else None
        owner = owner.base
    return None
