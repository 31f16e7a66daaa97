"""Strings: arrays of dtype object with ``str`` elements.

No kernel writes into given memory, since arenas cannot hold string objects.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TypeAlias

import numpy as np

from penstock.core.checkpoints import checkpoint, with_checkpoints
from penstock.core.types import BOOL, FLOAT32, INT64, STRING, Shape, ShapeError, TensorType, Type
from penstock.host.current_run import reserve
from penstock.ir.graph import Node
from penstock.ir.kernel import Kernel
from penstock.ir.op import Attrs, Consts, Types
from penstock.ops.common.constant_cache import by_attributes
from penstock.ops.common.regex import Regex, RegexError
from penstock.ops.common.shape_rules import broadcast_to, choice, same_shape, tensor
from penstock.ops.registry import ArrayFunction, array_operator, operator


def strings(values: Sequence[str], shape: tuple[int, ...]) -> np.ndarray:
    """A string tensor of dtype object; NumPy would convert a list to a fixed-width dtype."""
    array = np.empty(len(values), STRING)
    array[:] = values
    return array.reshape(shape)


@array_operator("StringConcat", since=20, infer=broadcast_to(STRING), strings=True)
def string_concat(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    # Without broadcasting, the result is no larger than both operands together.
    if x.shape != y.shape:
        _reserve_joined(x, y)
    joined = np.add(x, y)
    # For operands of rank 0, NumPy returns a string rather than an array.
    return joined if isinstance(joined, np.ndarray) else strings([joined], ())


def _reserve_joined(x: np.ndarray, y: np.ndarray) -> None:
    """Reserve the memory of a concatenation that repeats strings by broadcasting."""
    count = math.prod(np.broadcast_shapes(x.shape, y.shape))
    chars = [sum(map(len, part.reshape(-1).tolist())) / (part.size or 1) for part in (x, y)]
    reserve(int(count * sum(chars)))


def padded_rows(rows: Sequence[list[str]], pad: str, shape: tuple[int, ...]) -> np.ndarray:
    """Pad rows of strings, one per element of ``shape``, to the length of the longest."""
    width = max(map(len, rows), default=0)
    reserve(len(rows) * width * STRING.itemsize)
    parts = np.empty((len(rows), width), STRING)
    for place, row in zip(parts, rows, strict=True):
        checkpoint()
        place[: len(row)] = row
        place[len(row) :] = pad
    return parts.reshape(*shape, width)


def _infer_split(types: Types, attrs: Attrs, consts: Consts) -> Sequence[Type]:
    shape = tensor(types, 0).shape
    longer: Shape | None = None if shape is None else (*shape, None)
    return TensorType(STRING, longer), TensorType(INT64, shape)


@operator("StringSplit", since=20, infer=_infer_split, strings=True)
def string_split(node: Node, types: Types) -> Kernel:
    # In ONNX, an empty delimiter also means any whitespace.
    delimiter, limit = node.attrs.get("delimiter") or None, node.attrs.get("maxsplit")
    limit = -1 if limit is None else limit

    def split(text: str) -> list[str]:
        parts = text.split(delimiter, limit)
        if delimiter is None and parts:
            # Trailing whitespace is stripped, even where maxsplit leaves some.
            parts[-1] = parts[-1].rstrip()
        return parts

    def run(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        rows = [split(text) for text in with_checkpoints(x.reshape(-1).tolist())]
        counts = np.array([len(row) for row in rows], np.int64)
        return padded_rows(rows, "", x.shape), counts.reshape(x.shape)

    return Kernel(run)


_Change: TypeAlias = "Callable[[str], str] | None"
_CASES: dict[str, _Change] = {"LOWER": str.lower, "UPPER": str.upper, "NONE": None}


def normalization(attrs: Attrs) -> tuple[set[str], _Change, _Change]:
    """Return the stop words of a StringNormalizer, what a text goes through before it is looked up
    among them, and what it goes through otherwise; None where it stays as it is."""
    change = _CASES[choice(attrs, "case_change_action", "NONE", _CASES)]
    fold = None if attrs.get("is_case_sensitive", 0) else str.lower
    stop = attrs.get("stopwords") or ()
    return {fold(word) for word in stop} if fold else {*stop}, fold, change


def check_row(shape: Shape) -> None:
    one_row = len(shape) == 2 and (shape[0] == 1 or not isinstance(shape[0], int))
    if len(shape) != 1 and not one_row:
        raise ShapeError(f"StringNormalizer needs an input of shape [C] or [1, C], not {shape}")


def _infer_normalizer(types: Types, attrs: Attrs, consts: Consts) -> Sequence[Type]:
    shape = tensor(types, 0).shape
    if shape is None:
        return (TensorType(STRING),)
    check_row(shape)
    return (TensorType(STRING, (*(1,) * (len(shape) - 1), None)),)


@operator("StringNormalizer", since=10, infer=_infer_normalizer, strings=True)
def string_normalizer(node: Node, types: Types) -> Kernel:
    """Case conversion follows Unicode, independent of the locale."""
    stop, fold, change = normalization(node.attrs)

    def run(x: np.ndarray) -> np.ndarray:
        check_row(x.shape)
        texts = x.reshape(-1).tolist()
        if stop:
            texts = [text for text in texts if (fold(text) if fold else text) not in stop]
        # If all words are stop words, the output is one empty string.
        kept = [*map(change, texts)] if change else texts
        kept = kept or [""]
        return strings(kept, (*(1,) * (x.ndim - 1), len(kept)))

    return Kernel(run)


@operator("RegexFullMatch", since=20, infer=same_shape(BOOL), strings=True)
@by_attributes
def regex_full_match(attrs: Attrs) -> ArrayFunction:
    try:
        match = Regex(attrs.get("pattern") or "").fullmatch
    except RegexError as error:
        raise ShapeError(f"attribute pattern is not a valid RE2 pattern: {error}") from error

    def run(x: np.ndarray) -> np.ndarray:
        texts = with_checkpoints(x.reshape(-1).tolist())
        matches = np.array([match(text) for text in texts], np.bool_)
        return matches.reshape(x.shape)

    return run


class NgramPool:
    """The n-grams to count, as a trie that is traversed for whole arrays by binary search. A node
    is the number of a prefix; ``step`` extends prefixes by one token."""

    def __init__(self, attrs: Attrs) -> None:
        pool = attrs.get("pool_strings") or attrs.get("pool_int64s") or []
        counts, indexes = attrs["ngram_counts"], attrs["ngram_indexes"]
        self.shortest, self.longest = attrs["min_gram_length"], attrs["max_gram_length"]
        if not 1 <= self.shortest <= self.longest:
            raise ShapeError(
                f"min_gram_length={self.shortest} must be at least 1 and at most "
                f"max_gram_length={self.longest}"
            )
        self.longest = min(self.longest, len(counts))
        self.numbers = {token: i for i, token in enumerate(dict.fromkeys(pool), 1)}
        self.base = len(self.numbers) + 1
        self.width = max(indexes, default=-1) + 1
        if min(indexes, default=0) < 0:
            raise ShapeError("ngram_indexes must not be negative")
        columns = [-1]  # the output column of each node; -1 for a prefix that is not an n-gram
        edges: list[dict[int, int]] = [{} for _ in range(self.longest)]
        at = 0  # index of the n-gram in the pool
        for length, start in enumerate(counts, 1):
            stop = counts[length] if length < len(counts) else len(pool)
            if not 0 <= start <= stop <= len(pool) or (stop - start) % length:
                raise ShapeError(
                    f"ngram_counts {list(counts)} must be ascending offsets of whole n-grams in "
                    f"a pool of {len(pool)}"
                )
            for first in range(start, stop, length):
                if at >= len(indexes):
                    raise ShapeError(
                        f"ngram_indexes has {len(indexes)} entries, fewer than the pool has n-grams"
                    )
                if self.shortest <= length <= self.longest:
                    node = 0
                    for depth, token in enumerate(pool[first : first + length]):
                        # Token numbers are below the base, so that (node, token) pairs have unique
                        # keys.
                        key = node * self.base + self.numbers[token]
                        node = edges[depth].setdefault(key, len(columns))
                        if node == len(columns):
                            columns.append(-1)
                    columns[node] = indexes[at]
                at += 1
        self.columns = np.array(columns, np.int64)
        self.levels = []
        for edge in edges:
            keys = np.array(sorted(edge), np.int64)
            self.levels.append((keys, np.array([edge[k] for k in keys.tolist()], np.int64)))

    def tokens(self, x: np.ndarray) -> np.ndarray:
        """The number of each token, from 1; 0 for tokens that are not in the pool."""
        get = self.numbers.get
        flat = [get(token, 0) for token in with_checkpoints(x.reshape(-1).tolist())]
        return np.array(flat, np.int64).reshape(x.shape)

    def step(self, depth: int, nodes: np.ndarray, tokens: np.ndarray) -> np.ndarray:
        """The nodes of prefixes extended by a token; -1 where none exists."""
        keys, targets = self.levels[depth]
        if not len(keys):
            return np.full(nodes.shape, -1)
        wanted = nodes * self.base + tokens
        place = np.minimum(np.searchsorted(keys, wanted), len(keys) - 1)
        return np.where((keys[place] == wanted) & (nodes >= 0), targets[place], -1)


def _infer_tfidf(types: Types, attrs: Attrs, consts: Consts) -> Sequence[Type]:
    shape = tensor(types, 0).shape
    if shape is None:
        return (TensorType(FLOAT32),)
    if len(shape) not in (1, 2):
        raise ShapeError(f"the input of TfIdfVectorizer must have shape [C] or [N, C], not {shape}")
    return (TensorType(FLOAT32, (*shape[:-1], max(attrs["ngram_indexes"], default=-1) + 1)),)


_MOST_TOKENS = 2**18  # tokens of the rows that are counted together


@operator("TfIdfVectorizer", since=9, infer=_infer_tfidf, strings=True)
@by_attributes
def tfidf_vectorizer(attrs: Attrs) -> ArrayFunction:
    skips = attrs["max_skip_count"]
    pool = NgramPool(attrs)
    weigh = weighted(attrs, pool.width)

    def counted(tokens: np.ndarray) -> np.ndarray:
        """The number of occurrences of each n-gram in each row."""
        rows, length = tokens.shape
        cells = []
        first_cell = np.arange(rows)[:, None] * pool.width
        # Skipping s tokens means a distance of s + 1.
        for distance in range(1, min(skips + 1, max(length, 1)) + 1):
            nodes = np.zeros((rows, length), np.int64)
            for depth in range(pool.longest):
                if depth * distance >= length:
                    break
                checkpoint()
                following = tokens[:, depth * distance :]
                nodes = pool.step(depth, nodes[:, : following.shape[1]], following)
                # Unigrams have no skips: count them once.
                if depth + 1 >= pool.shortest and (depth or distance == 1):
                    columns = np.where(nodes >= 0, pool.columns[nodes], -1)
                    cells.append((columns + first_cell)[columns >= 0])
        flat = np.concatenate(cells) if cells else np.empty(0, np.int64)
        return np.bincount(flat, minlength=rows * pool.width).reshape(rows, pool.width)

    def run(x: np.ndarray) -> np.ndarray:
        if x.ndim not in (1, 2):
            raise ShapeError(
                f"the input of TfIdfVectorizer must have shape [C] or [N, C], not {x.shape}"
            )
        rows = x.reshape(1, -1) if x.ndim == 1 else x
        tokens, counts = pool.tokens(rows), np.empty((len(rows), pool.width), np.float32)
        step = 1 + _MOST_TOKENS // max(rows.shape[1], 1)
        for begin in range(0, len(rows), step):
            counts[begin : begin + step] = counted(tokens[begin : begin + step])
        return weigh(counts).reshape(*x.shape[:-1], pool.width)

    return run


def weighted(attrs: Attrs, width: int) -> Callable[[np.ndarray], np.ndarray]:
    """A function that weights n-gram counts by output column; the attribute ``weights`` is in the
    order of the pool."""
    mode = choice(attrs, "mode", "", ("TF", "IDF", "TFIDF"))
    weights, indexes = attrs.get("weights"), attrs["ngram_indexes"]
    columns = np.ones(width, np.float32)
    if weights and len(weights) != len(indexes):
        raise ShapeError(f"weights has {len(weights)} entries; ngram_indexes has {len(indexes)}")
    columns[indexes if weights else []] = weights or []

    def weigh(counts: np.ndarray) -> np.ndarray:
        # IDF counts an n-gram at most once, and TF has no weights.
        if mode == "IDF":
            counts = np.minimum(counts, 1)
        return counts * columns if weights and mode != "TF" else counts

    return weigh
