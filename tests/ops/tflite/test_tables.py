"""Tables, random bits and skip-grams, beside LiteRT."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import penstock as ps
from tests.frontends.tflite.test_rules_stablehlo import ONCE, RESOURCE, i64
from tests.support.litert import by_litert
from tests.support.tflite_models import TYPES, model, subgraph


@pytest.mark.parametrize("dtype", ["int32", "uint64"])
@pytest.mark.parametrize(("algorithm", "words"), [(1, 2), (1, 3), (2, 2)])
def test_random_bits_are_those_of_litert(algorithm: int, words: int, dtype: str) -> None:
    state = np.array([2**40 + 7, 2**64 - 2, 99][:words], np.uint64)
    options = ("StablehloRngBitGeneratorOptions", {"algorithm": algorithm})
    graph = subgraph(
        {"s": ("uint64", [words])},
        [("STABLEHLO_RNG_BIT_GENERATOR", ["s"], ["n", "y"], options)],
        ["n", "y"],
        n={"type": TYPES.index("uint64"), "shape": [words]},
        y={"type": TYPES.index(dtype), "shape": [3, 5]},
    )
    file = model([graph])
    wanted = by_litert(file, {"s": state})
    for got, want in zip(ps.compile(file).run({"s": state}).values(), wanted, strict=True):
        assert got.dtype == want.dtype
        np.testing.assert_array_equal(got, want)


def table(query: np.ndarray, keys: np.ndarray, values: np.ndarray, default: Any) -> bytes:
    """y = what a table, which CALL_ONCE fills, has for the queries; n = its size."""
    names = {np.dtype(object): 4, np.dtype(np.int64): 5}
    kinds = {"key_dtype": names[keys.dtype], "value_dtype": names[values.dtype]}
    kinds = {key: TYPES.index({4: "object", 5: "int64"}[n]) for key, n in kinds.items()}
    made = ("HASHTABLE", [], ["t"], ("HashtableOptions", {"table_id": 3, **kinds}))
    main = [
        ONCE,
        made,
        ("HASHTABLE_FIND", ["t", "x", "d"], ["y"], ("HashtableFindOptions", {})),
        ("HASHTABLE_SIZE", ["t"], ["n"], ("HashtableSizeOptions", {})),
    ]
    fill = ("HASHTABLE_IMPORT", ["t", "k", "v"], [], ("HashtableImportOptions", {}))
    ports = {"x": (query.dtype.name, query.shape)}
    types = {"y": {"type": TYPES.index(values.dtype.name)}, "n": {"type": TYPES.index("int64")}}
    other = np.array(default, values.dtype).reshape(())
    resource = {"t": {**RESOURCE, "shape": [1]}}
    return model(
        [
            subgraph(ports, main, ["y", "n"], {"d": other}, **types, **resource),
            subgraph({}, [made, fill], [], {"k": keys, "v": values}, **resource),
        ]
    )


def test_tables_of_words_and_numbers_are_looked_up() -> None:
    words, numbers = np.array(["one", "two", "twö", "one"], object), i64(1, 2, 3, 9)
    query = np.array([["two", "none"], ["one", "twö"]], object)
    file = table(query, words, numbers, -1)
    y, n = ps.compile(file).run({"x": query}).values()
    assert (y.dtype, y.tolist(), n.tolist()) == (np.int64, [[2, -1], [1, 3]], [3])
    wanted = by_litert(file, {"x": query})
    np.testing.assert_array_equal(y, wanted[0])
    np.testing.assert_array_equal(n, wanted[1])
    back = ps.compile(table(i64(3, 4), numbers, words, "?")).run({"x": i64(3, 4)})
    assert back["y"].tolist() == ["twö", "?"]


@pytest.mark.parametrize("every", [False, True])
@pytest.mark.parametrize(("size", "skip"), [(1, 0), (2, 0), (2, 1), (3, 2), (7, 1)])
def test_skip_grams_are_those_of_litert(size: int, skip: int, every: bool) -> None:
    options = {"ngram_size": size, "max_skip_size": skip, "include_all_ngrams": every}
    graph = subgraph(
        {"x": ("object", [1])},
        [("SKIP_GRAM", ["x"], ["y"], ("SkipGramOptions", options))],
        ["y"],
        y={"type": TYPES.index("object")},
    )
    x = np.array(["The quick\t brown fox jumps!"], object)
    (want,) = by_litert(model([graph]), {"x": x})
    got = ps.compile(model([graph])).run({"x": x})["y"]
    assert got.tolist() == [text.decode() for text in want.tolist()]
