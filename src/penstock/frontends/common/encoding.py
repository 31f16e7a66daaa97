"""Encodings that several formats share: varints, text, and arrays of numbers."""

from __future__ import annotations

import sys
from collections.abc import Sequence

import numpy as np


def read_varint(data: bytes, position: int) -> tuple[int, int]:
    """Read a number of up to 64 bits in groups of 7, lowest first (LEB128, as in protobuf). Return
    the number and the position after it. Raises ``ValueError`` if it does not end."""
    value = shift = 0
    for byte in data[position : position + 10]:
        value |= (byte & 0x7F) << shift
        position += 1
        if byte < 0x80:
            return value, position
        shift += 7
    raise ValueError("a number has no end")


def decode_text(data: bytes | str) -> str:
    """Decode UTF-8. Invalid bytes become lone surrogates, which encode to the same bytes again."""
    return data if isinstance(data, str) else data.decode("utf-8", "surrogateescape")


def array_from_bytes(data: bytes | np.ndarray, dtype: np.dtype) -> np.ndarray:
    """Read little-endian elements as a vector of ``dtype``: a view if the data are aligned.
    ``data`` has a whole number of elements. Any byte other than 0 is ``True``."""
    raw = np.frombuffer(data, np.uint8)
    if dtype == np.bool_:
        return raw != 0 if np.any(raw > 1) else raw.view(np.bool_)
    if not raw.size:
        return np.empty(0, dtype)
    array = raw.view(dtype)
    if not array.flags.aligned:
        array = array.copy()
    return array.byteswap() if sys.byteorder == "big" else array


def vector_of(elements: Sequence[object], dtype: np.dtype) -> np.ndarray:
    """Return a vector filled element by element, since NumPy would convert texts to its strings."""
    array = np.empty(len(elements), dtype)
    array[:] = elements
    return array
