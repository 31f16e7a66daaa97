"""Strings, which are objects: encoders by dict, hashes, tokens, matches, n-grams; rows as dicts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np

from penstock.backends.native import of_any_shape
from penstock.core.checkpoints import checkpoint
from penstock.core.types import FLOAT32, INT64, STRING, RunValue, ShapeError, TensorType, Type
from penstock.host.current_run import reserve
from penstock.host.native import NativeLibrary
from penstock.ir.graph import Node
from penstock.ir.kernel import Kernel
from penstock.ir.op import Attrs
from penstock.ops.common.constant_cache import shared
from penstock.ops.common.regex import Automaton, RegexError, members_of
from penstock.ops.microsoft.text import check_tokenizer
from penstock.ops.onnx.text import NgramPool, check_row, normalization, weighted
from penstock.ops.onnx_ml.features import categories, category_names, encoded_labels, one_of
from penstock.ops.tflite.tables import table_of

Function = Callable[..., RunValue]
Maker = TypeVar("Maker", bound=Callable[[Any, Attrs], Function | None])
_HASHED = tuple(map(np.dtype, ("int32", "uint32", "int64", "uint64", "float32", "float64")))
_MOST_SPAN = 1 << 20  # of integers that a table numbers


def _by_attributes(name: str, *dtypes: np.dtype) -> Callable[[Maker], Maker]:
    """Register kernels of an operation whose input has one of ``dtypes``, from a function that
    depends on attributes only: it returns a function of arrays, or None. Nodes of the same
    attributes share one."""

    def register(make: Maker) -> Maker:
        @of_any_shape(name)
        def choose(
            library: NativeLibrary, node: Node, types: Sequence[Type | None]
        ) -> Kernel | None:
            if not isinstance(types[0], TensorType) or types[0].dtype not in dtypes:
                return None
            key = (make, library.level, *node.attrs)
            attrs = node.attrs
            share = shared(key, lambda: make(library.functions, attrs), *attrs.values())
            function = share.value
            if function is None:
                return None
            return Kernel(lambda *inputs: share and function(*inputs))  # which keeps the share

        return make

    return register


def _encoder(functions: Any, keys: Sequence[Any], values: np.ndarray, default: Any) -> Function:
    """The value beside the key that each string is; of equal keys the last counts."""
    numbers = {key: i for i, key in enumerate(keys)}
    table = np.append(values, np.empty(1, values.dtype))
    table[-1] = default
    places, missing = functions.places, len(keys)
    return lambda x: np.asarray(table.take(places(x, numbers, missing)), table.dtype)


@_by_attributes("ai.onnx.ml.LabelEncoder", STRING)
def _label_encoder(functions: Any, attrs: Attrs) -> Function | None:
    if attrs.get("classes_strings"):  # of version 1
        return _category_mapper(functions, attrs)
    keys, values, default = encoded_labels(attrs)
    return _encoder(functions, keys.tolist(), values, default) if keys.dtype == STRING else None


@_by_attributes("ai.onnx.ml.CategoryMapper", STRING)
def _category_mapper(functions: Any, attrs: Attrs) -> Function:
    names, numbers = category_names(attrs)
    default = attrs.get("default_int64", -1)
    return _encoder(functions, names, np.array(numbers, np.int64), default)


@_by_attributes("ai.onnx.ml.OneHotEncoder", STRING)
def _one_hot(functions: Any, attrs: Attrs) -> Function | None:
    names, dtype = categories(attrs)
    if dtype != STRING or not attrs.get("zeros", 1):
        return None
    numbers, count = {name: i for i, name in enumerate(names)}, len(names)
    rows = np.eye(count + 1, count, dtype=np.float32)  # the last is of zeros
    places = functions.places
    return lambda x: rows.take(places(x, numbers, count), axis=0)


@_by_attributes("com.microsoft.MurmurHash3", STRING, *_HASHED)
def _murmur_hash3(functions: Any, attrs: Attrs) -> Function:
    seed = attrs.get("seed", 0) % 2**32
    dtype = np.dtype(np.uint32 if attrs.get("positive", 1) else np.int32)
    hashes = functions.hashes
    return lambda x: hashes(x, seed, checkpoint).view(dtype)


@_by_attributes("ai.onnx.ml.ZipMap", FLOAT32)
def _zip_map(functions: Any, attrs: Attrs) -> Function:
    labels = tuple(one_of(attrs, "classlabels_strings", "classlabels_int64s")[1])
    zip_map = functions.zip_map

    def run(x: np.ndarray) -> RunValue:
        if x.ndim not in (1, 2) or x.shape[-1] != len(labels):
            raise ShapeError(f"{len(labels)} class labels do not fit an input of shape {x.shape}")
        rows: RunValue = zip_map(x, labels)
        return rows

    return run


@_by_attributes("com.microsoft.Tokenizer", STRING)
def _tokenizer(functions: Any, attrs: Attrs) -> Function | None:
    """None unless tokens are the runs of some class of characters, or single characters."""
    least, separators, token, single = check_tokenizer(attrs)
    classes = [members_of(p, separator=bool(separators)) for p in separators or [token]]
    members, others = np.ones(128, np.bool_), True
    for part in () if single else classes:
        if part is None:
            return None
        members &= part[0]
        others &= part[1]
    marks = ("\x02", "\x03") if attrs["mark"] else ()
    table, pad = members.tobytes(), attrs["pad_value"]
    tokens, padded = functions.tokens, functions.padded

    def run(x: np.ndarray) -> np.ndarray:
        if x.ndim not in (1, 2):
            raise ShapeError(f"Tokenizer takes tensors of shape [C] or [N, C], not {x.shape}")
        if not x.size:
            return np.empty((*x.shape[:-1], 0), STRING)
        texts, counts = tokens(x, table, others, single, least, checkpoint)
        rows: np.ndarray = padded(texts, counts, x, marks if texts else (), pad, reserve)
        return rows

    return run


@_by_attributes("StringSplit", STRING)
def _string_split(functions: Any, attrs: Attrs) -> Function:
    delimiter, limit = attrs.get("delimiter") or None, attrs.get("maxsplit")
    most = -1 if limit is None else limit
    parts, padded = functions.parts, functions.padded

    def run(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        texts, counts = parts(x, delimiter, most, checkpoint)
        return padded(texts, counts, x, (), "", reserve), counts

    return run


@_by_attributes("StringNormalizer", STRING)
def _normalizer(functions: Any, attrs: Attrs) -> Function:
    stop, fold, change = normalization(attrs)
    normalized = functions.normalized

    def run(x: np.ndarray) -> np.ndarray:
        check_row(x.shape)
        texts: np.ndarray = normalized(x, stop or None, fold, change, checkpoint)
        return texts

    return run


@_by_attributes("RegexFullMatch", STRING)
def _full_match(functions: Any, attrs: Attrs) -> Function | None:
    """None for a pattern that is not valid, of which NumPy's kernel says so."""
    try:
        pattern = Automaton(attrs.get("pattern") or "")
    except RegexError:
        return None
    matches = functions.matches

    def run(x: np.ndarray) -> np.ndarray:
        texts, result, at = x.reshape(-1), np.empty(x.shape, np.bool_), 0
        while True:
            at = matches(texts, pattern.columns, pattern.moves, result, at, checkpoint)
            if at == x.size:
                return result
            result.flat[at] = pattern.fullmatch(texts[at])
            at += 1

    return run


@of_any_shape("tflite.SkipGram")
def _skip_gram(library: NativeLibrary, node: Node, types: Sequence[Type | None]) -> Kernel:
    grams, attrs = library.functions.grams, node.attrs
    most, skip = attrs["ngram_size"], attrs["max_skip_size"]
    least = 1 if attrs["include_all_ngrams"] else most
    return Kernel(lambda x: grams(x, most, skip, least, checkpoint))


@of_any_shape("tflite.HashtableFind")
def _find(library: NativeLibrary, node: Node, types: Sequence[Type | None]) -> Kernel | None:
    """HashtableFind of strings in a constant table of int64."""
    keys, values = (None if v is None else v.const for v in node.inputs[:2])
    if keys is None or values is None or keys.dtype != STRING or values.dtype != INT64:
        return None
    places, table = library.functions.places, table_of(keys, values)
    return Kernel(lambda keys, values, query, other: places(query, table, other.item()))


def _numbering(numbers: Mapping[int, int]) -> Function:
    """The number of each integer in arrays, 0 for those that have none: by a table where they are
    close to one another, else by binary search."""
    known = np.array([*sorted(numbers), 0], np.int64)  # the last stands for what is not there
    values = np.array([numbers.get(key, 0) for key in known.tolist()], np.int64)
    low, high = min(numbers, default=0) - 1, max(numbers, default=0) + 1
    if high - low > _MOST_SPAN or not -(2**62) < low < 2**62:

        def search(x: np.ndarray) -> np.ndarray:
            place = np.searchsorted(known[:-1], x)
            return np.where(known[place] == x, values[place], 0)

        return search
    table = np.zeros(high - low + 1, np.int64)
    table[known[:-1] - low] = values[:-1]
    return lambda x: table.take(np.clip(x, low, high) - low)


@_by_attributes("TfIdfVectorizer", STRING, INT64)
def _tfidf(functions: Any, attrs: Attrs) -> Function:
    pool = NgramPool(attrs)
    first = np.full(pool.base, -1, np.int64)
    first[pool.levels[0][0]] = pool.levels[0][1]
    keys, targets = (np.concatenate([level[i] for level in pool.levels]) for i in (0, 1))
    starts = np.cumsum([0, *(len(level[0]) for level in pool.levels)])
    skips = attrs["max_skip_count"]
    weigh = weighted(attrs, pool.width)
    places, ngrams = functions.places, functions.ngrams
    numbered = _numbering({key: n for key, n in pool.numbers.items() if isinstance(key, int)})

    def run(x: np.ndarray) -> np.ndarray:
        if x.ndim not in (1, 2):
            raise ShapeError(f"TfIdfVectorizer takes shapes [C] and [N, C], not {x.shape}")
        rows = x.reshape(1, -1) if x.ndim == 1 else x
        tokens = places(rows, pool.numbers, 0) if x.dtype == STRING else numbered(rows)
        counts = ngrams(
            tokens,
            first,
            keys,
            targets,
            starts,
            pool.columns,
            pool.base,
            pool.shortest,
            skips,
            pool.width,
        )
        return weigh(counts).reshape(*x.shape[:-1], pool.width)

    return run
