"""CRC-32C (Castagnoli), the checksum of TensorFlow's checkpoints and of saved sessions.

Specified in RFC 3720, 12.1. Remainders are polynomials whose highest power is in the lowest bit.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import TypeAlias

import numpy as np

from penstock.host.native import library

Bytes: TypeAlias = bytes | memoryview | np.ndarray
_POLYNOMIAL = 0x82F63B78


def crc32c(data: Bytes, checksum: int = 0) -> int:
    """Return the checksum of ``data``, an object with contiguous bytes. With ``checksum``, continue
    the checksum of preceding bytes."""
    return _function()(data, checksum)


@cache
def _function() -> Callable[[Bytes, int], int]:
    """Return the compiled function if there is one, else the one in Python."""
    loaded = library()
    return plain_crc32c if loaded is None else loaded.functions.crc32c


def plain_crc32c(data: Bytes, checksum: int) -> int:
    """``crc32c`` in Python, byte by byte: 0.1 s for a megabyte."""
    rest, table = checksum ^ 0xFFFFFFFF, _table()
    for byte in np.frombuffer(data, np.uint8).data:
        rest = table[(rest ^ byte) & 0xFF] ^ rest >> 8
    return rest ^ 0xFFFFFFFF


@cache
def _table() -> list[int]:
    """Return the remainders of single bytes."""
    rests = list(range(256))
    for _ in range(8):
        rests = [rest >> 1 ^ (_POLYNOMIAL if rest & 1 else 0) for rest in rests]
    return rests
