"""Lookups by key, sums of embeddings, skip-grams, and bits of random generators."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import repeat
from typing import Any

import numpy as np

from penstock.core.checkpoints import checkpoint
from penstock.core.types import STRING, ShapeError, TensorType, Type, dtype_named
from penstock.ir.graph import Node
from penstock.ir.kernel import Kernel
from penstock.ir.op import Attrs, Consts, Dims, Types
from penstock.ops.common import shape_rules as rules
from penstock.ops.common.dtypes import UINT8
from penstock.ops.registry import TFLITE, array_operator, operator


def _infer_find(types: Types, attrs: Attrs, consts: Consts) -> Sequence[Type]:
    return (TensorType(rules.tensor(types, 1).dtype, rules.tensor(types, 2).shape),)


@operator("HashtableFind", domain=TFLITE, strings=True, infer=_infer_find)
def hashtable_find(node: Node, types: Types) -> Kernel:
    """Inputs: keys, their values, what to look up, and the value of other keys."""
    keys, values = (None if v is None else v.const for v in node.inputs[:2])
    fixed = None if keys is None or values is None else table_of(keys, values)

    def find(
        keys: np.ndarray, values: np.ndarray, query: np.ndarray, other: np.ndarray
    ) -> np.ndarray:
        table = table_of(keys, values) if fixed is None else fixed
        out = np.empty(query.size, values.dtype)
        out[:] = [*map(table.get, query.reshape(-1).tolist(), repeat(other.item()))]
        return out.reshape(query.shape)

    return Kernel(find)


def table_of(keys: np.ndarray, values: np.ndarray) -> dict[Any, Any]:
    """Values by keys, of equal ones the first."""
    if keys.size != values.size:
        raise ShapeError(f"a table of {keys.size} keys and {values.size} values")
    # From behind, since of equal keys a dict keeps the last.
    return dict(
        zip(reversed(keys.reshape(-1).tolist()), reversed(values.reshape(-1).tolist()), strict=True)
    )


def _infer_lookup(types: Types, attrs: Attrs, consts: Consts) -> Sequence[Type]:
    query, _, values = (rules.tensor(types, i) for i in range(3))
    shape = None
    if query.shape is not None and values.shape is not None:
        shape = (*query.shape, *values.shape[1:])
    return TensorType(values.dtype, shape), TensorType(UINT8, query.shape)


def _lookup_work(attrs: Attrs, inputs: Dims, output: tuple[int, ...]) -> int:
    """The elements of the result, as other rows are not read."""
    return math.prod(output)


@array_operator(
    "HashtableLookup", domain=TFLITE, strings=True, infer=_infer_lookup, work=_lookup_work
)
def hashtable_lookup(
    query: np.ndarray, keys: np.ndarray, values: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Rows of values by sorted keys, empty ones of missing keys; and whether there was one."""
    if keys.shape != values.shape[:1] or not keys.size:
        raise ShapeError(f"a table of keys {keys.shape} and values {values.shape}")
    places = keys.searchsorted(query)
    # To clip is also faster than to raise.
    hits = np.asarray(keys.take(places, mode="clip") == query)
    out = np.asarray(values.take(places, 0, mode="clip"), values.dtype)
    if not hits.all():
        out[~hits] = "" if values.dtype == STRING else 0
    return out, hits.view(UINT8)


@array_operator("SkipGram", domain=TFLITE, strings=True)
def skip_gram(
    text: np.ndarray, *, ngram_size: int, max_skip_size: int, include_all_ngrams: bool
) -> np.ndarray:
    """Sequences of ``ngram_size`` words of a text, or of up to as many, between which others may be
    left out."""
    words = str(text.reshape(-1)[0]).split()
    grams: list[str] = []
    if 0 < ngram_size <= len(words):
        grams = _grams(words, ngram_size, max_skip_size, 1 if include_all_ngrams else ngram_size)
    out = np.empty(len(grams), object)
    out[:] = grams
    return out


def _grams(words: Sequence[str], most: int, skip: int, least: int) -> list[str]:
    """Sequences of ``least`` to ``most`` words, each before what it begins with."""
    grams: list[str] = []
    # Of each sequence that is being continued, it and the words that may follow.
    texts, others = [""], [iter(range(len(words)))]
    while others:
        checkpoint()
        text, size = texts[-1], len(others)
        before = f"{text} " if size > 1 else ""
        if size == most:
            grams += [f"{before}{words[i]}" for i in others[-1]]
            place = None
        else:
            place = next(others[-1], None)
        if place is not None:
            texts.append(f"{before}{words[place]}")
            others.append(iter(range(place + 1, min(place + 2 + skip, len(words)))))
            continue
        texts.pop(), others.pop()
        if least < size:
            grams.append(text)
    return grams


# Random bits.

_MASK = np.uint64(0xFFFFFFFF)
_ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))


def _infer_bits(types: Types, attrs: Attrs, consts: Consts) -> Sequence[Type]:
    return rules.tensor(types, 0).without_data(), TensorType(
        dtype_named(attrs["dtype"]), tuple(attrs["shape"])
    )


@array_operator("RngBitGenerator", domain=TFLITE, infer=_infer_bits)
def rng_bit_generator(
    state: np.ndarray, *, algorithm: int, dtype: str, shape: Sequence[int]
) -> tuple[np.ndarray, np.ndarray]:
    """The next state and random bits: Salmon et al., Parallel random numbers: as easy as 1, 2, 3
    (SC 2011). ``algorithm``: 2 for Threefry, of a key and a counter, or else Philox."""
    out_dtype = dtype_named(dtype)
    # In 64 bits, which a product of two words needs; sums are cut to 32.
    words = state.view(np.uint32).astype(np.uint64)
    threefry = algorithm == 2
    if state.dtype != np.uint64 or state.shape not in ((2,), (2 if threefry else 3,)):
        raise ShapeError(f"a state of {state.dtype}{list(state.shape)}")
    count = int(np.prod(shape, dtype=np.int64)) * out_dtype.itemsize // 4
    width = 2 if threefry else 4
    calls = -(-count // width)
    counters = state[1] + np.arange(calls, dtype=np.uint64)
    low, high = counters & _MASK, counters >> np.uint64(32)
    if threefry:
        bits = _threefry(words[0], words[1], low, high)
    else:
        at = 4 if len(state) == 3 else 0
        bits = _philox(words[0], words[1], [low, high, words[at], words[at + 1]])
    out = np.stack(np.broadcast_arrays(*bits), axis=1).astype(np.uint32).reshape(-1)[:count]
    following = state.copy()
    following[1] += np.uint64(calls)
    return following, out.view(out_dtype).reshape(shape)


def _threefry(k0: np.uint64, k1: np.uint64, x0: np.ndarray, x1: np.ndarray) -> list[np.ndarray]:
    # The constant is that of Threefry's key schedule for words of 32 bits.
    keys = (k0, k1, k0 ^ k1 ^ np.uint64(0x1BD11BDA))
    x0, x1 = (x0 + k0) & _MASK, (x1 + k1) & _MASK
    for group in range(5):
        for rotation in _ROTATIONS[group % 2]:
            x0 = (x0 + x1) & _MASK
            turned = (x1 << np.uint64(rotation)) | (x1 >> np.uint64(32 - rotation))
            x1 = (turned & _MASK) ^ x0
        x0 = (x0 + keys[(group + 1) % 3]) & _MASK
        x1 = (x1 + keys[(group + 2) % 3] + np.uint64(group + 1)) & _MASK
    return [x0, x1]


def _philox(k0: np.uint64, k1: np.uint64, counter: list[np.ndarray]) -> list[np.ndarray]:
    for _ in range(10):
        first = np.uint64(0xD2511F53) * counter[0]
        second = np.uint64(0xCD9E8D57) * counter[2]
        counter = [
            (second >> np.uint64(32)) ^ counter[1] ^ k0,
            second & _MASK,
            (first >> np.uint64(32)) ^ counter[3] ^ k1,
            first & _MASK,
        ]
        # Weyl sequences of the golden ratio and of sqrt(3) - 1, as Philox has them.
        k0, k1 = (k0 + np.uint64(0x9E3779B9)) & _MASK, (k1 + np.uint64(0xBB67AE85)) & _MASK
    return counter
