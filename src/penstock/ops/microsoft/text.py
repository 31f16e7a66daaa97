"""com.microsoft's Tokenizer, and MurmurHash3 of strings and numbers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain

import numpy as np

from penstock.core.checkpoints import with_checkpoints
from penstock.core.types import STRING, Shape, ShapeError, TensorType, Type
from penstock.ir.graph import Node
from penstock.ir.kernel import Kernel
from penstock.ir.op import Attrs, Consts, Types
from penstock.ops.common.constant_cache import by_attributes
from penstock.ops.common.dtypes import INT32
from penstock.ops.common.hashes import text_hashes
from penstock.ops.common.regex import Regex, RegexError, simple_pattern
from penstock.ops.common.shape_rules import same_shape, tensor
from penstock.ops.onnx.text import padded_rows
from penstock.ops.registry import MICROSOFT, operator

UINT32 = np.dtype(np.uint32)


def _pieces(least: int, separator: str) -> Callable[[str], Iterable[str]]:
    """Split text by a separator, dropping pieces of fewer than ``least`` characters. An empty match
    also removes the character after it."""
    pattern, simple = Regex(separator), simple_pattern(separator)
    if simple is not None:
        return lambda text: [piece for piece in simple.split(text) if len(piece) >= least]

    def split(text: str) -> Iterator[str]:
        start = 0
        while (match := pattern.search(text, start)) is not None:
            begin, end = match
            if begin - start >= least:
                yield text[start:begin]
            start = end if end > begin else begin + 1
        if len(text) - start >= least:
            yield text[start:]

    return split


def _matches(least: int, token: str) -> Callable[[str], Iterable[str]]:
    """Find the matches of a pattern with at least ``least`` characters, from left to right."""
    pattern, simple = Regex(token), simple_pattern(token)
    if simple is not None:
        return lambda text: [match for match in simple.findall(text) if len(match) >= least]

    def find(text: str) -> Iterator[str]:
        start = 0
        while (match := pattern.search(text, start)) is not None:
            begin, end = match
            # A longer match may begin inside a match that is too short.
            start = begin + 1
            if end - begin >= least:
                yield text[begin:end]
                start = end

    return find


def _check_rank(shape: Shape) -> None:
    if len(shape) not in (1, 2):
        raise ShapeError(f"the input of Tokenizer must have shape [C] or [N, C], not {shape}")


def _infer_tokenizer(types: Types, attrs: Attrs, consts: Consts) -> Sequence[Type]:
    shape = tensor(types, 0).shape
    if shape is None:
        return (TensorType(STRING),)
    _check_rank(shape)
    if 0 in shape:
        return (TensorType(STRING, (*shape[:-1], 0)),)
    # The output of an empty input has another rank.
    known = all(isinstance(dim, int) for dim in shape)
    return (TensorType(STRING, (*shape, None) if known else None),)


def check_tokenizer(attrs: Attrs) -> tuple[int, Sequence[str], str, bool]:
    """Return the minimum number of characters of a token, the separators, the pattern of tokens,
    and whether each character is a token.
    """
    least = attrs["mincharnum"]
    separators, token = attrs.get("separators") or (), attrs.get("tokenexp", "")
    single = token == "." or list(separators) == [""]
    if least < 1 or (single and least > 1) or not (separators or token):
        raise ShapeError(
            f"mincharnum {least} must be positive (1 for single characters), with separators or "
            f"tokenexp, but these are {separators} and {token!r}"
        )
    return least, separators, token, single


@operator("Tokenizer", domain=MICROSOFT, arity=(1, 1), infer=_infer_tokenizer, strings=True)
@by_attributes
def tokenizer(attrs: Attrs) -> Callable[[np.ndarray], np.ndarray]:
    """The tokens of each string, padded at the end: split by all separators in turn, matched by a
    pattern, or single characters."""
    least, separators, token, single = check_tokenizer(attrs)
    try:
        steps = [_pieces(least, pattern) for pattern in separators] or [_matches(least, token)]
    except RegexError as error:
        raise ShapeError(f"separators or tokenexp is not a valid RE2 pattern: {error}") from error

    def tokens(text: str) -> list[str]:
        if single:
            return list(text)
        pieces = [text]
        for step in steps:
            pieces = list(chain.from_iterable(map(step, pieces)))
        return pieces

    def run(x: np.ndarray) -> np.ndarray:
        _check_rank(x.shape)
        if not x.size:
            return np.empty((*x.shape[:-1], 0), STRING)
        rows = [tokens(text) for text in with_checkpoints(x.reshape(-1).tolist())]
        if attrs["mark"] and any(rows):
            rows = [["\x02", *row, "\x03"] for row in rows]
        return padded_rows(rows, attrs["pad_value"], x.shape)

    return run


# MurmurHash3


def _hash_type(attrs: Attrs) -> np.dtype:
    return UINT32 if attrs.get("positive", 1) else INT32


def _rotated(x: np.ndarray, bits: int) -> np.ndarray:
    return (x << np.uint32(bits)) | (x >> np.uint32(32 - bits))


def _hashes(texts: np.ndarray, seed: int) -> np.ndarray:
    """Hash each row of bytes by MurmurHash3_x86_32 (Appleby, 2011)."""
    length = texts.shape[1]
    # Trailing bytes are padded with zeros to a word.
    words = np.pad(texts, ((0, 0), (0, -length % 4))).view("<u4").T
    words = _rotated(words * np.uint32(0xCC9E2D51), 15) * np.uint32(0x1B873593)
    result = np.full(len(texts), seed, UINT32)
    for i, word in enumerate(with_checkpoints(words)):
        result ^= word
        # A padded last word skips the rotation of the state.
        if 4 * i + 4 <= length:
            result = _rotated(result, 13) * np.uint32(5) + np.uint32(0xE6546B64)
    result ^= np.uint32(length)
    # The third step has no multiplication.
    for bits, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35), (16, 1)):
        result ^= result >> np.uint32(bits)
        result *= np.uint32(factor)
    return result


@operator("MurmurHash3", domain=MICROSOFT, arity=(1, 1), infer=same_shape(_hash_type), strings=True)
def murmur_hash3(node: Node, types: Types) -> Kernel:
    seed, dtype = node.attrs.get("seed", 0) % 2**32, _hash_type(node.attrs)

    def run(x: np.ndarray) -> np.ndarray:
        if x.dtype != STRING:
            if x.dtype.kind not in "iuf" or x.itemsize < 4:
                raise ShapeError(
                    f"MurmurHash3 requires strings or numbers of at least 32 bits, not {x.dtype}"
                )
            rows = np.ascontiguousarray(x).reshape(-1, 1).view(np.uint8)
            return _hashes(rows, seed).view(dtype).reshape(x.shape)
        result = text_hashes(x.reshape(-1).tolist(), lambda rows: _hashes(rows, seed))
        return result.view(dtype).reshape(x.shape)

    return Kernel(run)
