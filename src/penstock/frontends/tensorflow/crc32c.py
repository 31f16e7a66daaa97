"""CRC-32C (Castagnoli), the checksum of TensorFlow's checkpoints (RFC 3720, appendix B.4).

Large data is cut into lanes of equal length whose sums are taken side by side, byte by byte, in
NumPy. A sum is linear in what it is of, so that the sum of two pieces is that of the first, moved
along as if as many zeros followed as the second has bytes, plus that of the second.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import numpy as np

_POLYNOMIAL = 0x82F63B78
_LANES = 8192  # a power of two: sums are joined in pairs
_MASK_DELTA = 0xA282EAD8


def crc32c(data: bytes | np.ndarray) -> int:
    """The checksum of bytes."""
    array = np.frombuffer(data, np.uint8) if isinstance(data, bytes) else data
    state = 0xFFFFFFFF
    length = array.size // _LANES
    if length > 8:
        state = _in_lanes(array[: length * _LANES], length)
        array = array[length * _LANES :]
    table = _table().tolist()
    for byte in array.tolist():
        state = table[(state ^ byte) & 0xFF] ^ (state >> 8)
    return state ^ 0xFFFFFFFF


def unmasked(value: int) -> int:
    """A checksum as files store it, turned and shifted, so that sums of sums are not odd ones."""
    turned = (value - _MASK_DELTA) & 0xFFFFFFFF
    return ((turned >> 17) | (turned << 15)) & 0xFFFFFFFF


@cache
def _table() -> np.ndarray:
    """What a byte adds to the state."""
    state = np.arange(256, dtype=np.uint32)
    for _ in range(8):
        state = np.where(state & 1, (state >> 1) ^ np.uint32(_POLYNOMIAL), state >> 1)
    return state.astype(np.uint32)


def _in_lanes(array: np.ndarray, length: int) -> int:
    """The state behind ``array``, of as many lanes of ``length`` bytes."""
    table = _table()
    rows = array.reshape(_LANES, length)
    states = np.zeros(_LANES, np.uint32)
    states[0] = 0xFFFFFFFF
    step = 512  # columns that are made contiguous at a time
    for first in range(0, length, step):
        for column in np.ascontiguousarray(rows[:, first : first + step].T):
            states = table[(states ^ column) & 0xFF] ^ (states >> 8)
    moved = _moved(length)
    while states.size > 1:
        states = _applied(moved, states[0::2]) ^ states[1::2]
        moved = _applied(moved, moved)
    return int(states[0])


def _applied(matrix: np.ndarray, vectors: np.ndarray) -> np.ndarray:
    """A matrix of bits, a column for each bit, times vectors of 32 bits."""
    out = np.zeros_like(vectors)
    for i, column in enumerate(matrix):
        out ^= np.where((vectors >> np.uint32(i)) & 1, column, np.uint32(0))
    return out


def _moved(count: int) -> np.ndarray:
    """What ``count`` zero bytes make of a state, as a matrix."""
    bits: Sequence[int] = [1 << i for i in range(32)]
    found = np.array(bits, np.uint32)  # nothing changes
    table = _table()
    power = table[found & 0xFF] ^ (found >> 8)
    while count:
        if count & 1:
            found = _applied(power, found)
        power = _applied(power, power)
        count >>= 1
    return found.astype(np.uint32)
