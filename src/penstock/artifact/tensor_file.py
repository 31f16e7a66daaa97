"""Arrays by name in a file of the safetensors format, which other frameworks read and write too.

::

     0   8 bytes   bytes of the header
     8             the header, as JSON: for each array its dtype, its shape, and where its bytes
                   begin and end, counted from the end of the header; texts as "__metadata__"
                   the bytes of the arrays in C order, without gaps

All numbers are little-endian. Nothing in a file is trusted: what does not fit raises
``InvalidInput``, and no more memory is taken than the file has bytes.
"""

from __future__ import annotations

import json
import os
import stat
import struct
import sys
from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from penstock.core.errors import InvalidInput, shortened
from penstock.core.limits import DEFAULT_LIMITS, Limits
from penstock.core.records import NamedTuple
from penstock.core.types import dtype_name, dtype_named
from penstock.host.replace_file import replacing

_NAMES = {
    "bool": "BOOL",
    **{f"int{bits}": f"I{bits}" for bits in (8, 16, 32, 64)},
    **{f"uint{bits}": f"U{bits}" for bits in (8, 16, 32, 64)},
    **{f"float{bits}": f"F{bits}" for bits in (16, 32, 64)},
    "bfloat16": "BF16",
    "complex64": "C64",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "float8_e8m0fnu": "F8_E8M0",
}
_DTYPES = {name: own for own, name in _NAMES.items()}
_LENGTH = struct.Struct("<Q")
_MOST_HEADER = 100_000_000
"""bytes of a header, as other readers have it"""
_METADATA = "__metadata__"


def save_arrays(path: Path, arrays: Mapping[str, np.ndarray], texts: Mapping[str, str]) -> None:
    """Write arrays and texts by name, in the place of the file that is there. Raises
    ``InvalidInput`` for a dtype that the format has not, ``OSError``."""
    header: dict[str, Any] = {_METADATA: dict(texts)} if texts else {}
    end = 0
    # Aligned, since the larger elements come first.
    in_order = sorted(arrays.items(), key=lambda item: (-item[1].dtype.itemsize, item[0]))
    for name, array in in_order:
        dtype = _NAMES.get(dtype_name(array.dtype))
        if dtype is None:
            raise InvalidInput(
                f"{shortened(name)!r} is of {dtype_name(array.dtype)}, which files of the "
                "safetensors format cannot hold; save it in another way"
            )
        begin, end = end, end + array.nbytes
        header[name] = {"dtype": dtype, "shape": list(array.shape), "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # so that the first array is aligned
    with replacing(path) as file:
        file.write(_LENGTH.pack(len(text)) + text)
        for _, array in in_order:
            file.write(_little_endian(array).tobytes())


class ArrayPlace(NamedTuple):
    """An array of a file: ``nbytes`` bytes from ``begin`` on, counted from the file's beginning."""

    dtype: np.dtype
    shape: tuple[int, ...]
    begin: int
    nbytes: int


def array_places(
    path: Path, file: BinaryIO, size: int
) -> tuple[dict[str, ArrayPlace], dict[str, str]]:
    """The places of the arrays, and the texts, of an open file of ``size`` bytes, of which the
    header alone is read. Raises ``InvalidInput`` for a file that is damaged or of another format.
    """
    head = file.read(_LENGTH.size)
    length = _LENGTH.unpack(head)[0] if len(head) == _LENGTH.size else -1
    start = _LENGTH.size + length
    if not 0 <= length <= _MOST_HEADER or start > size:
        raise _damaged(path, "its header has another length than it says")
    text = file.read(length)
    try:
        header = json.loads(text, object_pairs_hook=_without_repeats)
        texts = header.pop(_METADATA, {})
        if not all(isinstance(text, str) for text in texts.values()):
            raise TypeError("its metadata are no texts")
        places = sorted((*entry["data_offsets"], name) for name, entry in header.items())
        ends = [0, *[end for _, end, _ in places]]  # each array begins where the one before it ends
        # The format has no holes, so that a file cannot be one of another format as well.
        if [begin for begin, _, _ in places] != ends[:-1] or ends[-1] != size - start:
            raise ValueError("its arrays leave gaps, share bytes or end elsewhere than the file")
        return {name: _place(name, entry, start) for name, entry in header.items()}, texts
    except (AttributeError, LookupError, TypeError, ValueError, RecursionError) as error:
        raise _damaged(path, error) from error


def load_arrays(
    path: Path, limits: Limits = DEFAULT_LIMITS
) -> tuple[dict[str, np.ndarray], dict[str, str]]:
    """The arrays and the texts of a file. Raises ``InvalidInput`` for a file that is damaged, is of
    another format, or has more bytes than ``limits`` allow, ``OSError``."""
    with open(path, "rb", opener=_without_waiting) as file:
        status = os.fstat(file.fileno())
        # Of a device or a pipe no size bounds what would be read.
        if not stat.S_ISREG(status.st_mode):
            raise InvalidInput(f"{str(path)!r} is no file")
        if excess := limits.beyond("max_bytes", status.st_size):
            raise InvalidInput(f"{str(path)!r} has more bytes {excess}")
        places, texts = array_places(path, file, status.st_size)
        start = file.tell()
        content = file.read()
    if len(content) != status.st_size - start:
        raise _damaged(path, "it was changed while it was read")
    return {name: _array(place, content, start) for name, place in places.items()}, texts


def _place(name: str, entry: Mapping[str, Any], start: int) -> ArrayPlace:
    shape, (begin, end) = entry["shape"], entry["data_offsets"]
    # True is an int in Python, but no dim; NumPy's arrays have at most 64 dims.
    if not all(type(x) is int and 0 <= x < 2**62 for x in (*shape, begin, end)) or len(shape) > 64:
        raise ValueError(f"{shortened(name)!r} has no shape")
    if entry["dtype"] not in _DTYPES:
        raise ValueError(
            f"{shortened(name)!r} is of {entry['dtype']!r:.40}, which is not supported"
        )
    dtype = dtype_named(_DTYPES[entry["dtype"]])
    if end - begin != prod(shape) * dtype.itemsize:
        raise ValueError(f"{shortened(name)!r} has {end - begin} bytes, which do not fit its shape")
    return ArrayPlace(dtype, tuple(shape), start + begin, end - begin)


def _array(place: ArrayPlace, content: bytes, start: int) -> np.ndarray:
    """An array that may be written to."""
    # A copy: bytes cannot be written to, and a view would keep those of the whole file.
    elements = np.frombuffer(content, np.uint8, place.nbytes, place.begin - start).copy()
    return _little_endian(elements.view(place.dtype).reshape(place.shape))


def _little_endian(array: np.ndarray) -> np.ndarray:
    """The array with the bytes of its elements swapped where the machine's order is the other."""
    return array if sys.byteorder == "little" else array.byteswap()


def _without_repeats(pairs: list[tuple[str, object]]) -> dict[str, object]:
    names = dict(pairs)
    # The format forbids it, since readers differ in which of the two they take.
    if len(names) < len(pairs):
        raise ValueError("two of its entries have one name")
    return names


def _damaged(path: Path, reason: object) -> InvalidInput:
    return InvalidInput(
        f"{str(path)!r} is no file of the safetensors format, or is damaged: {reason}; save it anew"
    )


def _without_waiting(path: str, flags: int) -> int:
    """Open a file; of a pipe, without waiting for one that writes."""
    return os.open(path, flags | getattr(os, "O_NONBLOCK", 0))
