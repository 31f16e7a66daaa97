"""Compiled kernels of strings against NumPy's."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from penstock.core.errors import Cancelled
from penstock.core.types import STRING
from penstock.host.current_run import working_for
from tests.support.counting_run import CountingRun
from tests.support.native_kernels import LIBRARIES, check, expected, kernel_of, node_of, pytestmark  # noqa: F401

NAMES = ["ant", "bee", "", "Ünï", "bee2"]
TEXTS = ["The quick, brown_fox 7", "", "  ", "né à Paris\n", "日本 a-b", "x", "tab\there  x,y;z"]


def strings(*texts: str) -> np.ndarray:
    return np.array(texts, STRING)


def ml(name: str, x: np.ndarray, version: int = 3, **attrs: Any) -> Any:
    return node_of(name, [x], domain="ai.onnx.ml", version=version, **attrs)


def some(names: list[str], dims: tuple[int, ...]) -> np.ndarray:
    places = np.random.default_rng(1).integers(0, len(names), dims)
    return np.asarray(np.array(names, STRING)[places], STRING)


@pytest.mark.parametrize("dims", [(), (7,), (3, 4), (0, 2)])
@pytest.mark.parametrize(
    "attrs",
    [
        {"values_int64s": [5, 6, 7, 8], "default_int64": -3},
        {"values_floats": [0.5, 1.5, 2.5, 3.5]},
        {"values_strings": ["a", "b", "c", "d"], "default_string": "none"},
    ],
)
def test_label_encoder_of_strings_equals_numpy(attrs, dims):
    keys = ["ant", "bee", "", "bee"]  # of equal keys the last counts
    x = some(NAMES, dims)
    check(ml("LabelEncoder", x, keys_strings=keys, **attrs), [x])


def test_category_mapper_and_first_label_encoder_equal_numpy():
    x = some(NAMES, (4, 3))
    attrs = {"cats_strings": NAMES[:3], "cats_int64s": [4, 5, 6], "default_int64": 9}
    check(ml("CategoryMapper", x, 1, **attrs), [x])
    check(ml("LabelEncoder", x, 1, classes_strings=NAMES[:3]), [x])


@pytest.mark.parametrize("attrs", [{}, {"positive": 0, "seed": 7}])
@pytest.mark.parametrize("dtype", ["str", "int32", "uint32", "int64", "float32", "float64"])
def test_hashes_equal_numpy(dtype, attrs):
    x = some(TEXTS, (5, 41)) if dtype == "str" else np.arange(-99, 106).reshape(5, 41).astype(dtype)
    check(node_of("MurmurHash3", [x], domain="com.microsoft", version=1, **attrs), [x])


@pytest.mark.parametrize("dims", [(1,), (5, 2), (0,)])
def test_one_hot_encoder_of_strings_equals_numpy(dims):
    x = some(NAMES, dims)
    check(ml("OneHotEncoder", x, cats_strings=NAMES[:4], zeros=1), [x])


@pytest.mark.parametrize(
    "attrs", [{"classlabels_int64s": [3, 1, 2]}, {"classlabels_strings": ["a", "b", "a"]}]
)
@pytest.mark.parametrize("dims", [(3,), (1, 3), (50, 3), (0, 3)])
def test_zip_map_equals_numpy(dims, attrs):
    x = np.random.default_rng(0).normal(size=dims).astype(np.float32)
    node = ml("ZipMap", x, 1, **attrs)
    for library in LIBRARIES:
        rows = kernel_of(node, library).function(x)
        assert rows == node.op.compile(node, [node.inputs[0].type]).function(x)
        assert all(type(value) is float for row in rows for value in row.values())


@pytest.mark.parametrize(
    "attrs",
    [
        {"tokenexp": "[a-zA-Z0-9_]+"},
        {"tokenexp": r"\w+", "mincharnum": 2},
        {"tokenexp": r"[^ ,]+"},
        {"tokenexp": "."},
        {"separators": [""]},
        {"separators": [" "]},
        {"separators": [",", r"[ \-;]"], "mincharnum": 2},
        {"separators": [r"[^a-z]+"]},
    ],
    ids=str,
)
@pytest.mark.parametrize("mark", [0, 1])
@pytest.mark.parametrize("dims", [(7,), (7, 1), (1, 7), (0, 2)])
def test_tokenizer_equals_numpy(dims, mark, attrs):
    x = strings(*TEXTS).reshape(dims) if 0 not in dims else np.empty(dims, STRING)
    attrs = {"mark": mark, "pad_value": "#", "mincharnum": 1, **attrs}
    check(node_of("Tokenizer", [x], domain="com.microsoft", version=1, **attrs), [x])


def test_tokenizer_of_another_pattern_is_left_to_numpy():
    x = strings(*TEXTS)
    for pattern in ("[a-z]+[0-9]", "ab|c", r"[a-zé]+"):
        attrs = {"mark": 0, "pad_value": "#", "mincharnum": 1, "tokenexp": pattern}
        node = node_of("Tokenizer", [x], domain="com.microsoft", version=1, **attrs)
        assert all(kernel_of(node, library) is None for library in LIBRARIES)


@pytest.mark.parametrize("mode", ["TF", "IDF", "TFIDF"])
@pytest.mark.parametrize(("shortest", "longest", "skips"), [(1, 1, 0), (1, 3, 0), (2, 3, 2)])
@pytest.mark.parametrize("dims", [(12,), (5, 12), (3, 1), (0, 4)])
def test_tfidf_equals_numpy(dims, shortest, longest, skips, mode):
    x = some(NAMES, dims)
    pool = ["ant", "bee", "Ünï", *["ant", "bee"], *["bee", "bee"], *["bee", "ant", "Ünï"]]
    attrs = {
        "mode": mode,
        "min_gram_length": shortest,
        "max_gram_length": longest,
        "max_skip_count": skips,
        "ngram_counts": [0, 3, 7],
        "pool_strings": pool,
        "ngram_indexes": [4, 0, 1, 2, 3, 6],
        "weights": [0.5, 2.0, 3.0, 1.0, 4.0, 0.25],
    }
    check(node_of("TfIdfVectorizer", [x], **attrs), [x])
    names = attrs.pop("pool_strings")
    for step in (7, 2**50):  # a table of all integers between, and none
        numbers = {name: step * i - 9 for i, name in enumerate(NAMES)}
        ints = [numbers[name] for name in names]
        x = np.random.default_rng(2).choice([*numbers.values(), 0, 2**40, -(2**63)], dims)
        check(node_of("TfIdfVectorizer", [x], pool_int64s=ints, **attrs), [x])


def test_element_that_is_no_string_is_told():
    for library in LIBRARIES:
        assert library.functions.are_strings(strings("a", "é"))
        assert not library.functions.are_strings(np.array(["a", b"b"], object))
        assert not library.functions.are_strings(np.array(["a", None], object))


@pytest.mark.parametrize("dims", [(), (300,), (20, 30), (0, 2)])
@pytest.mark.parametrize(
    "attrs",
    [
        {},
        {"delimiter": ","},
        {"delimiter": "à "},
        {"maxsplit": 1},
        {"delimiter": " ", "maxsplit": 2},
    ],
)
def test_string_split_equals_numpy(dims, attrs):
    x = some([*TEXTS, " two  words  ", "a,,b, c"], dims)
    check(node_of("StringSplit", [x], outputs=2, **attrs), [x])


def matched(pattern: str, x: np.ndarray) -> None:
    check(node_of("RegexFullMatch", [x], pattern=pattern), [x])


@pytest.mark.parametrize("dims", [(), (300,), (20, 30), (0, 2)])
@pytest.mark.parametrize(
    "pattern",
    [
        r"\w*",
        r".*\bis?\b.*",
        r"[^\d,]+",
        r"(?i)the .*|\s*",
        r"né à \p{L}+\n",
        r"日本.*",
        r"^x$",
        "",
    ],
)
def test_regex_full_match_equals_numpy(dims, pattern):
    matched(pattern, some([*TEXTS, "\U0001f600 is", "\ud800", "日" * 9, "It is."], dims))


@pytest.mark.full
def test_regex_of_more_states_or_characters_than_tables_hold_equals_numpy():
    letters = np.random.default_rng(2).choice(list("ab"), (400, 15))
    matched("(a|b)*a(a|b){9}", np.array(["".join(row) for row in letters], STRING))
    code_points = [chr(code) for code in range(40, 3000)]
    matched("|".join(code_points[100:900]), np.array(code_points, STRING))


def test_regex_that_is_not_valid_is_refused_by_numpy():
    x = strings("a")
    for library in LIBRARIES:
        assert kernel_of(node_of("RegexFullMatch", [x], pattern="a**"), library) is None


WORDS = "The\u2003quick\t brown   fox Ünï \U0001f600 日本\n over \ud800 a lazy dog"


def grams(text: str, size: int, skip: int, every: bool) -> Any:
    attrs = {"ngram_size": size, "max_skip_size": skip, "include_all_ngrams": every}
    return node_of("SkipGram", [strings(text)], domain="tflite", version=1, **attrs)


@pytest.mark.parametrize("every", [False, True])
@pytest.mark.parametrize("size", [-1, 0, 1, 2, 3, 12, 13])
@pytest.mark.parametrize("text", [WORDS, "", " \n", "one", "a b"])
def test_skip_grams_equal_numpys(text, size, every):
    for skip in (-1, 0, 1, 3):
        check(grams(text, size, skip, every), [strings(text)])


def test_skip_grams_end_in_the_middle_when_their_run_is_stopped():
    text = strings(" ".join("abcdefghijklmnopqrstuvwxyz"))
    for library in LIBRARIES:
        kernel = kernel_of(grams(text[0], 13, 99, False), library)
        with pytest.raises(Cancelled):
            working_for(CountingRun(last=2), kernel.function, text)


def test_skip_grams_of_no_text_raise_as_numpys():
    node = grams("a", 1, 0, False)
    for function in (
        node.op.compile(node, [node.inputs[0].type]).function,
        *[kernel_of(node, library).function for library in LIBRARIES],
    ):
        with pytest.raises(IndexError):
            function(strings())


@pytest.mark.parametrize("dims", [(), (30,), (4, 3), (0, 2)])
def test_numbers_of_texts_in_a_table_equal_numpys(dims):
    keys, values = strings("bee", "Ünï", "bee", ""), np.array([7, 2**62, 9, -1])
    inputs = [keys, values, some(NAMES, dims), np.array([5])]
    check(node_of("HashtableFind", inputs, [0, 1], domain="tflite", version=1), inputs)


def test_texts_of_numbers_in_a_table_are_left_to_numpy():
    inputs = [np.array([1, 2]), strings("a", "b"), np.array([2]), strings("?")]
    node = node_of("HashtableFind", inputs, [0, 1], domain="tflite", version=1)
    assert all(kernel_of(node, library) is None for library in LIBRARIES)
