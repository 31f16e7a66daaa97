"""Hashes of locality-sensitive hashing: the signs of projections of fingerprints."""

from __future__ import annotations

import numpy as np

from penstock.algorithms.checkpoints import checkpoint
from penstock.ir.op import Attrs, Consts, Types
from penstock.ops.common import shape_rules as rules
from penstock.ops.common.dtypes import INT32
from penstock.ops.registry import TFLITE, array_operator
from penstock.types import FLOAT32, ShapeError, TensorType, Type, dtype_name

_MOST_BITS = 32
# Odd numbers of FarmHash, and what it begins long keys with.
_K0, _K1, _K2 = 0xC3A5C85C97CB3127, 0xB492B66FBE98F273, 0x9AE16A3B2F90404F
_SEED = 81


def fingerprints(keys: np.ndarray) -> np.ndarray:
    """FarmHash's ``Fingerprint64`` of each row of bytes, uint64 (https://github.com/google/farmhash,
    which guarantees that it never changes)."""
    length = keys.shape[1]
    mul = np.full(len(keys), (_K2 + 2 * length) % 2**64, np.uint64)
    if length > 64:
        return _of_many(keys)
    if length > 16:
        return _of_up_to_64(keys, mul)
    if length >= 8:
        a, b = _word(keys, 0) + np.uint64(_K2), _word(keys, length - 8)
        return _joined(_rotated(b, 37) * mul + a, (_rotated(a, 25) + b) * mul, mul)
    if length >= 4:
        first, last = (_word(keys, at, 4) for at in (0, length - 4))
        return _joined((first << np.uint64(3)) + np.uint64(length), last, mul)
    if not length:
        return np.full(len(keys), _K2, np.uint64)
    a, b, c = (keys[:, i].astype(np.uint64) for i in (0, length >> 1, length - 1))
    y = (a + (b << np.uint64(8))) * np.uint64(_K2)
    z = ((c << np.uint64(2)) + np.uint64(length)) * np.uint64(_K0)
    return _mixed(y ^ z) * np.uint64(_K2)


def _of_up_to_64(keys: np.ndarray, mul: np.ndarray) -> np.ndarray:
    """Of more than 16 bytes: both ends, and what is between them if they are more than 32."""
    length, k2 = keys.shape[1], np.uint64(_K2)
    a = _word(keys, 0) * np.uint64(_K2 if length > 32 else _K1)
    b, c = _word(keys, 8), _word(keys, length - 8) * mul
    y = _rotated(a + b, 43) + _rotated(c, 30) + _word(keys, length - 16) * k2
    z = _joined(y, a + _rotated(b + k2, 18) + c, mul)
    if length <= 32:
        return z
    e, f = _word(keys, 16) * mul, _word(keys, 24)
    g, h = (y + _word(keys, length - 32)) * mul, (z + _word(keys, length - 24)) * mul
    return _joined(_rotated(e + f, 43) + _rotated(g, 30) + h, e + _rotated(f + a, 18) + g, mul)


def _of_many(keys: np.ndarray) -> np.ndarray:
    """Of more than 64 bytes: block by block of 64, the last of which ends with the key."""
    count, length = keys.shape
    zero, k1, k2 = (np.full(count, k, np.uint64) for k in (0, _K1, _K2))
    y = np.uint64(_SEED) * k1 + np.uint64(113)
    x, z = np.uint64(_SEED) * k2 + _word(keys, 0), _mixed(y * k2 + np.uint64(113)) * k2
    state = (x, y, z, (zero, zero), (zero, zero))
    for at in range(0, (length - 1) // 64 * 64, 64):
        state = _block(keys, at, state, k1, 1)
    x, y, z, v, w = state
    mul = k1 + ((z & np.uint64(0xFF)) << np.uint64(1))
    w0 = w[0] + np.uint64((length - 1) % 64)
    v = v[0] + w0, v[1]
    state = _block(keys, length - 64, (x, y, z, v, (w0 + v[0], w[1])), mul, 9)
    x, y, z, v, w = state
    one = _joined(v[0], w[0], mul) + _mixed(y) * np.uint64(_K0) + z
    return _joined(one, _joined(v[1], w[1], mul) + x, mul)


_Pair = tuple[np.ndarray, np.ndarray]
_State = tuple[np.ndarray, np.ndarray, np.ndarray, _Pair, _Pair]


def _block(keys: np.ndarray, at: int, state: _State, mul: np.ndarray, times: int) -> _State:
    """The state after the 64 bytes from ``at`` on."""
    x, y, z, v, w = state
    x = _rotated(x + y + v[0] + _word(keys, at + 8), 37) * mul
    y = _rotated(y + v[1] + _word(keys, at + 48), 42) * mul
    x = x ^ (w[1] * np.uint64(times))
    y = y + v[0] * np.uint64(times) + _word(keys, at + 40)
    z = _rotated(z + w[0], 33) * mul
    v = _halves(keys, at, v[1] * mul, x + w[0])
    w = _halves(keys, at + 32, z + w[1], y + _word(keys, at + 16))
    return z, y, x, v, w


def _halves(keys: np.ndarray, at: int, a: np.ndarray, b: np.ndarray) -> _Pair:
    """What becomes of ``a`` and ``b`` by 32 bytes."""
    first, second, third, last = (_word(keys, at + 8 * i) for i in range(4))
    a = a + first
    b = _rotated(b + a + last, 21)
    whole = a + second + third
    return whole + last, b + _rotated(whole, 44) + a


def _word(keys: np.ndarray, at: int, size: int = 8) -> np.ndarray:
    """The little-endian number in some bytes of each key."""
    part = np.ascontiguousarray(keys[:, at : at + size])
    return part.view(f"<u{size}")[:, 0].astype(np.uint64)


def _rotated(x: np.ndarray, bits: int) -> np.ndarray:
    return (x >> np.uint64(bits)) | (x << np.uint64(64 - bits))


def _mixed(x: np.ndarray) -> np.ndarray:
    return x ^ (x >> np.uint64(47))


def _joined(x: np.ndarray, y: np.ndarray, mul: np.ndarray) -> np.ndarray:
    return _mixed((y ^ _mixed((x ^ y) * mul)) * mul) * mul


def _infer(types: Types, attrs: Attrs, consts: Consts) -> tuple[Type]:
    shape = rules.tensor(types, 0).shape
    if shape is None or len(shape) != 2:
        return (TensorType(INT32),)
    rows, bits = shape
    if not attrs.get("dense"):
        return (TensorType(INT32, (rows,)),)
    elements = rows * bits if isinstance(rows, int) and isinstance(bits, int) else None
    return (TensorType(INT32, (elements,)),)


@array_operator("LshProjection", domain=TFLITE, infer=_infer)
def lsh_projection(
    hashes: np.ndarray, x: np.ndarray, weights: np.ndarray | None = None, *, dense: bool = False
) -> np.ndarray:
    """For each of ``hashes`` [rows, bits] (float32) whether the weighted sum of fingerprints of the
    items of ``x`` is positive, 0 or 1 (int32); unless ``dense``, the bits of each row as a number,
    with a range of its own."""
    if hashes.ndim != 2 or hashes.shape[1] > _MOST_BITS or not x.ndim or not len(x):
        raise ShapeError(f"hashes of shape {hashes.shape} for items of shape {x.shape}")
    if hashes.dtype != FLOAT32:
        raise ShapeError(f"hashes of {dtype_name(hashes.dtype)} instead of float32")
    if weights is not None and weights.shape != x.shape[:1]:
        raise ShapeError(f"weights of shape {weights.shape} for {len(x)} items")
    items = np.ascontiguousarray(x).reshape(len(x), x.size // len(x)).view(np.uint8)
    keys = np.empty((len(x), 4 + items.shape[1]), np.uint8)
    keys[:, 4:] = items
    bits = np.empty(hashes.shape, np.int32)
    for place, seed in np.ndenumerate(hashes):
        checkpoint()
        keys[:, :4] = np.frombuffer(seed.tobytes(), np.uint8)
        scores = fingerprints(keys).view(np.int64).astype(np.float64)
        # In order, as LiteRT adds them: the last bits may decide.
        bits[place] = np.cumsum(scores if weights is None else weights * scores)[-1] > 0
    if dense:
        return bits.ravel()
    rows, count = hashes.shape
    numbers = bits @ (1 << np.arange(count, dtype=np.int64)[::-1])
    return (numbers + np.arange(rows) * (1 << count)).astype(np.int32)
