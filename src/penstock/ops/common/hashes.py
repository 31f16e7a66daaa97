"""Hashes of bytes, of many texts of one length at a time: FarmHash's fingerprint, Murmur, Sip."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from penstock.core.checkpoints import checkpoint, with_checkpoints


def text_hashes(texts: Sequence[str], hash_rows: Callable[[np.ndarray], np.ndarray]) -> np.ndarray:
    """The hash of each text: ``hash_rows`` gives those of rows of bytes, all of one length."""
    encoded = [text.encode("utf-8", "surrogateescape") for text in with_checkpoints(texts)]
    lengths = np.array([len(text) for text in encoded], int)
    result = np.empty(len(encoded), hash_rows(np.empty((0, 0), np.uint8)).dtype)
    for length in np.unique(lengths):
        checkpoint()
        chosen = np.flatnonzero(lengths == length)
        joined = b"".join([encoded[i] for i in chosen])
        result[chosen] = hash_rows(np.frombuffer(joined, np.uint8).reshape(len(chosen), length))
    return result


# FarmHash

# Odd numbers of FarmHash, and what it begins long keys with.
_K0, _K1, _K2 = 0xC3A5C85C97CB3127, 0xB492B66FBE98F273, 0x9AE16A3B2F90404F
_SEED = 81
_MURMUR, _MURMUR_SEED = 0xC6A4A7935BD1E995, 0xDECAFCAFFE


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


def murmur_hashes(keys: np.ndarray) -> np.ndarray:
    """MurmurHash64A of each row of bytes, uint64, from the seed that TensorFlow has for texts."""
    length, odd = keys.shape[1], np.uint64(_MURMUR)
    whole = length // 8 * 8
    total = np.full(len(keys), _MURMUR_SEED ^ (length * _MURMUR) % 2**64, np.uint64)
    for at in range(0, whole, 8):
        total = (total ^ _mixed(_word(keys, at) * odd) * odd) * odd
    if whole < length:
        rest = np.zeros((len(keys), 8), np.uint8)
        rest[:, : length - whole] = keys[:, whole:]
        total = (total ^ _word(rest, 0)) * odd
    return _mixed(_mixed(total) * odd)


def _of_up_to_64(keys: np.ndarray, mul: np.ndarray) -> np.ndarray:
    """Hash keys of 17 to 64 bytes: both ends, and from 33 bytes on the part between."""
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
    """Hash keys of more than 64 bytes in blocks of 64, the last of which ends with the key."""
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
    """``a`` and ``b`` mixed with 32 bytes."""
    first, second, third, last = (_word(keys, at + 8 * i) for i in range(4))
    a = a + first
    b = _rotated(b + a + last, 21)
    whole = a + second + third
    return whole + last, b + _rotated(whole, 44) + a


def _word(keys: np.ndarray, at: int, size: int = 8) -> np.ndarray:
    """The little-endian number in some bytes of each key."""
    # A view as other numbers needs the bytes of a key side by side.
    part = np.ascontiguousarray(keys[:, at : at + size])
    return part.view(f"<u{size}")[:, 0].astype(np.uint64)


def _rotated(x: np.ndarray, bits: int) -> np.ndarray:
    return (x >> np.uint64(bits)) | (x << np.uint64(64 - bits))


def _mixed(x: np.ndarray) -> np.ndarray:
    return x ^ (x >> np.uint64(47))


def _joined(x: np.ndarray, y: np.ndarray, mul: np.ndarray) -> np.ndarray:
    return _mixed((y ^ _mixed((x ^ y) * mul)) * mul) * mul


def joined_fingerprints(one: np.ndarray, other: np.ndarray) -> np.ndarray:
    """TensorFlow's fingerprint of two fingerprints, uint64, which broadcast (``FingerprintCat64``,
    a step of MurmurHash64A)."""
    factor = np.uint64(_MURMUR)
    result = (one ^ factor ^ (_mixed(other * factor) * factor)) * factor
    return _mixed(_mixed(result) * factor)


# SipHash

_INITIAL = (0x736F6D6570736575, 0x646F72616E646F6D, 0x6C7967656E657261, 0x7465646279746573)


def sip_hashes(keys: np.ndarray, secret: Sequence[int]) -> np.ndarray:
    """SipHash-2-4 of each row of bytes, uint64, with a secret of two numbers of 64 bits (Aumasson
    and Bernstein, SipHash: a fast short-input PRF, 2012)."""
    count, length = keys.shape
    first, second = (np.full(count, number % 2**64, np.uint64) for number in secret)
    constants = [np.uint64(number) for number in _INITIAL]
    state = [x ^ y for x, y in zip((first, second, first, second), constants, strict=True)]
    padded = np.zeros((count, length // 8 * 8 + 8), np.uint8)
    padded[:, :length] = keys
    padded[:, -1] = length % 256
    for at in range(0, padded.shape[1], 8):
        checkpoint()
        word = _word(padded, at)
        state[3] = state[3] ^ word
        state = _sip_round(_sip_round(state))
        state[0] = state[0] ^ word
    state[2] = state[2] ^ np.uint64(0xFF)
    for _ in range(4):
        state = _sip_round(state)
    return state[0] ^ state[1] ^ state[2] ^ state[3]


def _sip_round(state: Sequence[np.ndarray]) -> list[np.ndarray]:
    a, b, c, d = state
    a = a + b
    b = _turned(b, 13) ^ a
    a = _turned(a, 32)
    c = c + d
    d = _turned(d, 16) ^ c
    a = a + d
    d = _turned(d, 21) ^ a
    c = c + b
    b = _turned(b, 17) ^ c
    return [a, b, _turned(c, 32), d]


def _turned(x: np.ndarray, bits: int) -> np.ndarray:
    """``x`` rotated to the left."""
    return _rotated(x, 64 - bits)
