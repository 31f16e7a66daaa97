"""Blocks of quantized weights, as GGUF files store them.

A block of ``size`` weights of a row has codes and parameters that convert them to numbers. All
formats are converted to one, which MatMulNBits takes::

    weight = (code - zero) * scale      for each group of 16 or 32 weights of a row

    Q4_0   32 weights:  scale, 16 bytes of two codes each, those of both halves of the block
    Q5_0   32 weights:  scale, the highest bits of 32 codes, the others as of Q4_0
    Q8_0   32 weights:  scale, 32 codes
    Q4_K  256 weights:  scales of scales and of minima, 8 of each in 6 bits, 128 bytes of codes
    Q5_K  256 weights:  as Q4_K, with 32 bytes of highest bits
    Q6_K  256 weights:  128 bytes of low and 64 of high bits, 16 scales, scale of scales

Q4_1 and Q5_1 also have a minimum. The layouts are those of https://github.com/ggml-org/ggml,
``ggml-common.h`` and ``ggml-quants.c``.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from penstock.core.checkpoints import checkpoint
from penstock.core.records import NamedTuple
from penstock.core.types import FLOAT32
from penstock.host.native import in_c_order

_TOGETHER = 1 << 18
"""weights that are decoded at a time: intermediate results take several times their memory, and
should fit into a cache"""
_NIBBLES = np.uint64(0x0F0F0F0F0F0F0F0F)


class BlockCodes(NamedTuple):
    """A matrix of ``codes`` of ``bits`` bits, uint8 [rows, columns * bits / 8], packed as in
    MatMulNBits: the first code of a byte is in the low bits. ``scales`` and ``zeros``
    [rows, columns / group] are float32. Without ``zeros``, the zero is the middle of the range of
    codes."""

    codes: np.ndarray
    scales: np.ndarray
    zeros: np.ndarray | None
    bits: int

    @property
    def rows(self) -> int:
        return int(self.codes.shape[0])

    @property
    def columns(self) -> int:
        return int(self.codes.shape[1]) * 8 // self.bits

    @property
    def group(self) -> int:
        """The number of weights that share a scale."""
        return self.columns // int(self.scales.shape[1])

    def dequantized(self) -> np.ndarray:
        """Return the weights, float32 [rows, columns]."""
        codes = self.codes
        if self.bits == 4:
            codes = np.stack((codes & 15, codes >> 4), -1)
        weights = codes.reshape(self.rows, -1, self.group).astype(FLOAT32)
        middle = np.float32(1 << (self.bits - 1))
        weights -= middle if self.zeros is None else self.zeros[..., None]
        weights *= self.scales[..., None]
        return weights.reshape(self.rows, self.columns)

    def of_group(self, group: int) -> BlockCodes:
        """Return the same weights with groups of ``group``, a divisor of the current size."""
        times = self.group // group
        zeros = None if self.zeros is None else np.repeat(self.zeros, times, 1)
        return BlockCodes(self.codes, np.repeat(self.scales, times, 1), zeros, self.bits)


class _Format(NamedTuple):
    """A block has ``size`` weights, and ``block`` is the dtype of its bytes; ``decode`` returns for
    some blocks packed codes, scales, and zeros or None."""

    size: int
    block: np.dtype
    bits: int
    decode: Callable[[np.ndarray], _Parts]


_Parts = tuple[np.ndarray, np.ndarray, np.ndarray | None]


def _real(blocks: np.ndarray, name: str) -> np.ndarray:
    return blocks[name].astype(FLOAT32)


def _halves(nibbles: np.ndarray) -> np.ndarray:
    """Return the low four bits of all bytes of the last axis, then the high ones."""
    return np.concatenate((nibbles & 15, nibbles >> 4), -1)


def _paired(nibbles: np.ndarray) -> np.ndarray:
    """``_halves``, but with two adjacent codes in a byte."""
    # Sixteen bytes give eight pairs of low bits and eight of high ones. Words of eight bytes are
    # computed at once, since NumPy is slow for short rows.
    words = in_c_order()(nibbles).reshape(-1).view("<u8")
    pairs = np.empty((nibbles.size // nibbles.shape[-1], 2, nibbles.shape[-1] // 16), "<u8")
    for i, low in enumerate((words & _NIBBLES, words >> np.uint64(4) & _NIBBLES)):
        low |= low >> np.uint64(4)
        together = low.view("<u2").astype(np.uint8)  # the first byte of two
        pairs[:, i] = together.view("<u8").reshape(len(pairs), -1)
    return pairs.view(np.uint8).reshape(nibbles.shape)


def _zeros(codes: np.ndarray, scales: np.ndarray, offsets: np.ndarray) -> _Parts:
    """Return the parts of weights ``code * scale - offset``; ``codes`` [..., groups, bytes]."""
    # If all codes represent one number, it is one step below a zero of 1.
    flat = scales == 0
    codes[flat] = 0
    scales = np.where(flat, offsets, scales)
    zeros = np.divide(offsets, scales, out=np.zeros_like(scales), where=scales != 0)
    return codes, scales, zeros


def _q4_0(blocks: np.ndarray) -> _Parts:
    return _paired(blocks["codes"]), _real(blocks, "scale"), None


def _q4_1(blocks: np.ndarray) -> _Parts:
    return _zeros(_paired(blocks["codes"]), _real(blocks, "scale"), -_real(blocks, "least"))


def _fifth_bits(blocks: np.ndarray) -> np.ndarray:
    """Return codes of five bits, whose highest bits are those of a 32-bit number."""
    high = np.unpackbits(blocks["high"], axis=-1, bitorder="little")
    return _halves(blocks["codes"]) | high << 4


def _q5_0(blocks: np.ndarray) -> _Parts:
    return _fifth_bits(blocks) + np.uint8(112), _real(blocks, "scale"), None  # 16 is the middle


def _q5_1(blocks: np.ndarray) -> _Parts:
    return _zeros(_fifth_bits(blocks), _real(blocks, "scale"), -_real(blocks, "least"))


def _q8_0(blocks: np.ndarray) -> _Parts:
    return blocks["codes"] ^ 128, _real(blocks, "scale"), None  # of two's complement, plus 128


def _six_bits(packed: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return eight scales and eight minima of 6 bits, from 12 bytes."""
    low, middle, high = packed[..., :4], packed[..., 4:8], packed[..., 8:]
    scales = np.concatenate((low & 63, high & 15 | low >> 6 << 4), -1)
    minima = np.concatenate((middle & 63, high >> 4 | middle >> 6 << 4), -1)
    return scales, minima


def _of_groups(blocks: np.ndarray, codes: np.ndarray) -> _Parts:
    """Return the parts of eight groups, whose scales and minima have scales themselves."""
    factors, minima = _six_bits(blocks["scales"])
    scales = (_real(blocks, "scale")[..., None] * factors).astype(FLOAT32)
    offsets = (_real(blocks, "least")[..., None] * minima).astype(FLOAT32)
    return _zeros(codes.reshape(*blocks.shape, 8, -1), scales, offsets)


def _q4_k(blocks: np.ndarray) -> _Parts:
    return _of_groups(blocks, _paired(blocks["codes"].reshape(*blocks.shape, 4, 32)))


def _q5_k(blocks: np.ndarray) -> _Parts:
    shifts = np.arange(8, dtype=np.uint8)[:, None]
    high = blocks["high"][..., None, :] >> shifts & 1
    low = _halves(blocks["codes"].reshape(*blocks.shape, 4, 32)).reshape(high.shape)
    return _of_groups(blocks, low | high << 4)


def _q6_k(blocks: np.ndarray) -> _Parts:
    low = blocks["low"].reshape(*blocks.shape, 2, 2, 32)
    high = blocks["high"].reshape(*blocks.shape, 2, 1, 32)
    shifts = np.array([0, 2, 4, 6], np.uint8)[:, None]
    nibbles = np.concatenate((low & 15, low >> 4), -2)
    codes = (nibbles | (high >> shifts & 3) << 4) + np.uint8(96)  # of 8 bits: 32 is the middle
    scales = _real(blocks, "scale")[..., None] * blocks["scales"].astype(FLOAT32)
    return codes, scales, None


def _block(*fields: tuple[str, str, int]) -> np.dtype:
    return np.dtype([(name, kind, (n,)) if n > 1 else (name, kind) for name, kind, n in fields])


_SCALE, _LEAST = ("scale", "<f2", 1), ("least", "<f2", 1)
FORMATS = {
    "Q4_0": _Format(32, _block(_SCALE, ("codes", "u1", 16)), 4, _q4_0),
    "Q4_1": _Format(32, _block(_SCALE, _LEAST, ("codes", "u1", 16)), 4, _q4_1),
    "Q5_0": _Format(32, _block(_SCALE, ("high", "u1", 4), ("codes", "u1", 16)), 8, _q5_0),
    "Q5_1": _Format(32, _block(_SCALE, _LEAST, ("high", "u1", 4), ("codes", "u1", 16)), 8, _q5_1),
    "Q8_0": _Format(32, _block(_SCALE, ("codes", "u1", 32)), 8, _q8_0),
    "Q4_K": _Format(
        256, _block(_SCALE, _LEAST, ("scales", "u1", 12), ("codes", "u1", 128)), 4, _q4_k
    ),
    "Q5_K": _Format(
        256,
        _block(_SCALE, _LEAST, ("scales", "u1", 12), ("high", "u1", 32), ("codes", "u1", 128)),
        8,
        _q5_k,
    ),
    "Q6_K": _Format(
        256, _block(("low", "u1", 128), ("high", "u1", 64), ("scales", "i1", 16), _SCALE), 8, _q6_k
    ),
}
"""formats by name"""


def decode(format_name: str, data: np.ndarray, columns: int) -> BlockCodes:
    """Return the blocks of a matrix with rows of ``columns`` weights, from its bytes."""
    form = FORMATS[format_name]
    blocks = data.view(form.block).reshape(-1, columns // form.size)
    step, whole = max(_TOGETHER // columns, 1), list[np.ndarray]()
    for at in range(0, len(blocks), step):
        checkpoint()
        some = blocks[at : at + step]
        parts = [x.reshape(len(some), -1) for x in form.decode(some) if x is not None]
        if len(some) == len(blocks):
            whole = parts
            break
        whole = whole or [np.empty((len(blocks), x.shape[1]), x.dtype) for x in parts]
        for x, part in zip(whole, parts, strict=True):
            x[at : at + step] = part
    codes, scales, *zeros = whole
    return BlockCodes(codes, scales, zeros[0] if zeros else None, form.bits)
