"""The places in files from which arrays were read, so that saved sessions can refer to weights."""

from __future__ import annotations

from weakref import ref

import numpy as np

from penstock.core.records import NamedTuple

LEAST_BYTES = 1 << 16
"""bytes of an array from which on its origin is recorded"""


class Origin(NamedTuple):
    """The offset of an array's bytes in a file with an absolute path."""

    path: str
    offset: int


_ORIGINS: dict[int, tuple[ref[np.ndarray], Origin | None]] = {}


def note_origin(data: np.ndarray, origin: Origin | None) -> None:
    """Record where bytes were read from, as long as the array or a view of it lives. None: from no
    file, whatever is known of an array that this one is a view of."""
    if data.nbytes >= LEAST_BYTES:
        key = id(data)  # a later array may have the same id
        _ORIGINS[key] = ref(data, lambda _: _ORIGINS.pop(key, None)), origin


def origin_of(array: np.ndarray) -> Origin | None:
    """Return where a file has the elements of an array as they are in memory, or None."""
    owner: object = array
    while isinstance(owner, np.ndarray):
        known = _ORIGINS.get(id(owner))
        if known is not None and known[0]() is owner:
            if known[1] is None:
                return None
            begin = array.ctypes.data - owner.ctypes.data
            dense = array.flags.c_contiguous and array.nbytes >= LEAST_BYTES
            return known[1]._replace(offset=known[1].offset + begin) if dense else None
        owner = owner.base
    return None
