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
_POLYNOMIAL = np.uint32(0x82F63B78)
_LANES = 4096


def crc32c(data: Bytes, checksum: int = 0) -> int:
    """The checksum of ``data``, an object with contiguous bytes, or of these behind others whose
    checksum is given."""
    return _function()(data, checksum)


@cache
def _function() -> Callable[[Bytes, int], int]:
    """The compiled function, where there is one."""
    loaded = library()
    return plain_crc32c if loaded is None else loaded.functions.crc32c


def plain_crc32c(data: Bytes, checksum: int) -> int:
    """As ``crc32c``, in NumPy: the remainders of many equal parts side by side, then pairs of them
    joined, ``left x^n + right`` for parts of n bits, until one is left."""
    content = np.frombuffer(data, np.uint8)
    table = np.arange(256, dtype=np.uint32)
    for _ in range(8):
        table = _shifted(table)
    rest, length = checksum ^ 0xFFFFFFFF, len(content) // _LANES
    head = len(content) - length * _LANES
    for byte in content[:head].tolist():
        rest = int(table[(rest ^ byte) & 0xFF]) ^ rest >> 8
    if length:
        sums = np.zeros(_LANES, np.uint32)
        sums[0] = rest
        for column in content[head:].reshape(_LANES, length).T:
            sums = table[(sums ^ column) & 0xFF] ^ sums >> 8
        power = np.array([1 << 31], np.uint32)  # one
        for bit in bin(8 * length)[2:]:
            power = _product(power, power)
            power = _shifted(power) if bit == "1" else power
        while len(sums) > 1:
            sums, power = _product(sums[::2], power) ^ sums[1::2], _product(power, power)
        rest = int(sums[0])
    return rest ^ 0xFFFFFFFF


def _shifted(x: np.ndarray) -> np.ndarray:
    """Polynomials times x."""
    return (x >> 1) ^ np.where(x & 1, _POLYNOMIAL, 0)


def _product(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Products of polynomials."""
    result = np.zeros_like(a)
    for bit in range(31, -1, -1):
        result ^= np.where(a >> bit & 1, b, 0)
        b = _shifted(b)
    return result
