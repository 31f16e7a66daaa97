"""Strings: concatenation, splitting, normalizing, matching, counting."""

import time
from typing import Any

import numpy as np
import pytest

from penstock.core.types import BOOL, FLOAT32, INT64, STRING, ShapeError, TensorType
from penstock.ops import find
from penstock.ops.common.regex import Regex, RegexError
from tests.ops.harness import check_node


def text(*values: str, shape: tuple[int, ...] | None = None) -> np.ndarray:
    array = np.empty(len(values), object)
    array[:] = values
    return array.reshape(array.shape if shape is None else shape)


# StringConcat


def test_concat_broadcasts() -> None:
    x, y = text("a", "", "é", shape=(3, 1)), text("1", "zwei")
    (z,) = check_node("StringConcat", [x, y], expected="ort", opset=20)
    assert z[2, 1] == "ézwei"
    check_node("StringConcat", [text("a", shape=()), text("b", shape=())])
    check_node("StringConcat", [text(shape=(0, 2)), text("b")])
    with pytest.raises(ValueError, match="cannot be broadcast"):
        check_node("StringConcat", [text("a", "b"), text("a", "b", "c")], expected=[None])


# StringSplit


@pytest.mark.parametrize("attrs", [{}, {"maxsplit": 1}, {"maxsplit": 0}, {"delimiter": ""}])
def test_string_split_at_whitespace_matches_the_reference(attrs: dict[str, Any]) -> None:
    x = text(" a b  c  ", "", "   ", "x", "d e", "f", shape=(2, 3))
    check_node("StringSplit", [x], attrs, outputs=2, expected="ort", opset=20)


@pytest.mark.parametrize("attrs", [{}, {"maxsplit": 1}, {"maxsplit": 9}])
@pytest.mark.parametrize("delimiter", [",", "--"])
def test_split_at_a_delimiter(attrs: dict[str, Any], delimiter: str) -> None:
    x = text("a,b,,c,", "x--y-- z", ",--", "none")
    attrs = {**attrs, "delimiter": delimiter}
    check_node("StringSplit", [x], attrs, outputs=2, expected="ort", opset=20)
    check_node("StringSplit", [text("", "a" + delimiter)], attrs, outputs=2)


def test_split_of_nothing_matches_the_reference() -> None:
    check_node("StringSplit", [text(shape=(2, 0))], outputs=2)
    want = [text("a", "b"), np.array(2, np.int64)]
    check_node("StringSplit", [text("a b", shape=())], outputs=2, expected=want)


# StringNormalizer


@pytest.mark.parametrize("shape", [(4,), (1, 4)])
@pytest.mark.parametrize("case", ["NONE", "LOWER", "UPPER"])
@pytest.mark.parametrize("sensitive", [0, 1])
def test_normalizer_matches_the_reference(
    shape: tuple[int, ...], case: str, sensitive: int
) -> None:
    x = text("Monday", "TUESDAY", "monday", "été", shape=shape)
    attrs = {"case_change_action": case, "is_case_sensitive": sensitive, "stopwords": ["monday"]}
    change = {"NONE": str, "LOWER": str.lower, "UPPER": str.upper}[case]
    kept = ["Monday", "TUESDAY", "été"] if sensitive else ["TUESDAY", "été"]

    def want(values: list[str]) -> list[np.ndarray]:
        return [text(*map(change, values), shape=(*shape[:-1], len(values)))]

    # The reference drops accents, which the specification knows nothing of.
    check_node("StringNormalizer", [x], attrs, expected=want(kept))
    attrs = {"case_change_action": case}
    check_node("StringNormalizer", [x], attrs, expected=want(x.reshape(-1).tolist()))


def test_normalizer_of_nothing_left_returns_an_empty_string() -> None:
    attrs = {"stopwords": ["a"]}
    pair = text("a", "A", shape=(1, 2))
    check_node("StringNormalizer", [pair], attrs, expected=[text("", shape=(1, 1))])
    check_node("StringNormalizer", [text("a")], attrs, expected=[text("")])
    for shape in ((2, 1), (), (1, 1, 2)):
        with pytest.raises(ShapeError):
            x = text(*("a",) * int(np.prod(shape)), shape=shape)
            check_node("StringNormalizer", [x], attrs, expected=[None])
    with pytest.raises(ShapeError, match="SHOUT"):
        check_node("StringNormalizer", [text("a")], {"case_change_action": "SHOUT"}, expected=[0])


# RegexFullMatch

TEXTS = text(
    *("", "a", "b", "ab", "abab", "aab", "abc", "a\nb", "A", "0", "12", "x1", "a b", "é", "É", "ß"),
    *(
        "-",
        "]",
        "a.b",
        "a\\b",
        "foo@bar.com",
        "a{2}",
        "aa",
        "aaa",
        "\n",
        "a\n",
        "\t",
        "\v",
        "_",
        "٣",
    ),
)
PATTERNS = [
    *("", "a", "a|b", "(ab)*", "a?b", "a+b", ".*", "a.b", "(?s)a.b", "[ab]+", "[^ab]*", "[a-c]*"),
    *(
        r"\d+",
        r"\D*",
        r"\w+",
        r"\W+",
        r"\s",
        r"\S+",
        r"[\d_]",
        r"[^\d]+",
        "(?i)A",
        "(?i)é",
        "[[:alpha:]]",
    ),
    *("[[:^alpha:]]+", r"\pL", r"\p{Lu}", r"\PL+", r"\p{^L}", r"[\pN]+", "a{2}", "a{2,}", "a{1,2}"),
    *(
        "a{,2}",
        "x{2",
        r"\Qa.b\E",
        r"\Qa.",
        "a$",
        "^a",
        r"\Aa\z",
        "(?m)a$\n",
        "(?m)^a$\n?",
        r"\ba\b",
    ),
    *(
        r"a\Bb",
        r"a\b b",
        "(?P<n>a)b",
        "(?<n>a)b",
        "(?:a)b",
        "(?i:A)b",
        "(?i)a(?-i)b",
        "a*?b??",
        "(?U)a*",
    ),
    *(
        "[]]",
        "[^]]",
        "[a-]",
        "[-a]",
        "[a\\]]",
        r"a\.b",
        r"a\\b",
        r"\x61",
        r"\x{e9}",
        r"\141",
        r"\t",
    ),
    *(r"[\w.]+@[a-z]+\.[a-z]{2,3}", "(a|ab)(c|bcd)?", "((a*)*)*", "(|a)b", "()", "a||b", "(?i)ß"),
]
BAD = [
    *(
        "(",
        ")",
        "a)",
        "[",
        "[a",
        "*",
        "a**",
        "a{2}{3}",
        "+a",
        r"\1",
        r"(a)\1",
        "(?=a)",
        "(?!a)",
        "(?<=a)b",
    ),
    *(
        "[b-a]",
        r"\8",
        r"\i",
        r"\pQ",
        "[[:foo:]]",
        "(?P<a",
        "(?P<>a)",
        "a{1001}",
        "a{3,2}",
        "\\",
        r"\x{110000}",
    ),
    *("(?z)a", "(?P=n)", "((a{100}){100}){100}", "(((){1000}){1000}){1000}", "(" * 500 + ")" * 500),
]


@pytest.mark.parametrize("pattern", PATTERNS)
def test_regex_matches_equal_re2(pattern: str) -> None:
    attrs = {"pattern": pattern}
    check_node("RegexFullMatch", [TEXTS], attrs, expected="ort", opset=20)


@pytest.mark.parametrize("pattern", BAD)
def test_regex_patterns_that_re2_lacks_are_refused(pattern: str) -> None:
    with pytest.raises(RegexError):
        Regex(pattern)
    with pytest.raises(ShapeError):
        check_node("RegexFullMatch", [TEXTS], {"pattern": pattern}, expected=[None])


def test_regex_matching_takes_linear_time() -> None:
    start = time.thread_time()
    for pattern in ("(a+)+b", "(a|aa)*b", "(.*)*x(.*)*y", "(a?){100}a{100}b"):
        assert not Regex(pattern).fullmatch("a" * 5000)
    assert time.thread_time() - start < 20  # Python's re would not live to see the end


def test_regex_assertions_look_both_ways() -> None:
    assert Regex(r"\bfoo\b \bbar\b").fullmatch("foo bar")
    assert not Regex(r"fo\bo").fullmatch("foo")
    assert Regex(r"(?m)^a$\n^b$").fullmatch("a\nb")
    assert not Regex(r"a$\nb").fullmatch("a\nb")


# TfIdfVectorizer

TOKENS = ["a", "b", "c", "d"]


@pytest.mark.parametrize("mode", ["TF", "IDF", "TFIDF"])
@pytest.mark.parametrize("skips", [0, 1, 5])
@pytest.mark.parametrize("lengths", [(1, 1), (1, 2), (2, 2), (2, 3), (1, 3)])
@pytest.mark.parametrize("strings", [False, True])
@pytest.mark.parametrize("shape", [(12,), (3, 7), (1, 1)])
def test_tfidf_like_onnx_runtime(
    mode: str, skips: int, lengths: tuple[int, int], strings: bool, shape: tuple[int, ...]
) -> None:
    rng = np.random.default_rng(sum(shape) + skips)
    grams = [[0], [2], [1, 2], [0, 0], [2, 1], [3, 0, 1], [1, 1, 2]]
    flat = [token for gram in grams for token in gram]
    attrs: dict[str, Any] = {
        "mode": mode,
        "max_skip_count": skips,
        "min_gram_length": lengths[0],
        "max_gram_length": lengths[1],
        "ngram_counts": [0, 2, 8],
        "ngram_indexes": [3, 0, 7, 1, 2, 5, 4],
        "weights": [float(i + 2) for i in range(7)],
    }
    x: np.ndarray = rng.integers(0, 5, shape)
    if strings:
        attrs["pool_strings"] = [TOKENS[i] for i in flat]
        x = text(*[[*TOKENS, "?"][i] for i in x.reshape(-1)], shape=shape)
    else:
        attrs["pool_int64s"] = flat
    check_node("TfIdfVectorizer", [x], attrs, expected="ort", opset=9)
    if not strings:
        check_node("TfIdfVectorizer", [x.astype(np.int32)], attrs, expected="ort", opset=9)


def test_tfidf_of_empty_and_wrong_shapes() -> None:
    attrs: dict[str, Any] = {
        "mode": "TF",
        "max_skip_count": 0,
        "min_gram_length": 1,
        "max_gram_length": 2,
        "ngram_counts": [0, 1],
        "ngram_indexes": [0, 2],
        "pool_int64s": [1, 2, 3],
    }
    for shape in ((0,), (2, 0)):
        x = np.zeros(shape, np.int64)
        check_node("TfIdfVectorizer", [x], attrs, expected="ort", opset=9)
    check_node("TfIdfVectorizer", [np.array([2, 3, 1])], attrs, expected="ort", opset=9)
    for bad in (
        {"ngram_counts": [0, 5]},
        {"ngram_indexes": [0]},
        {"ngram_indexes": [0, -1]},
        {"ngram_counts": [0, 2]},
        {"min_gram_length": 3},
        {"mode": "BM25"},
        {"weights": [1.0]},
    ):
        with pytest.raises(ShapeError):
            check_node("TfIdfVectorizer", [np.arange(3)], {**attrs, **bad}, expected=[None])
    with pytest.raises(ShapeError):
        x = np.zeros((1, 2, 3), np.int64)
        check_node("TfIdfVectorizer", [x], attrs, expected=[None])


# Types


def test_text_operations_infer_their_types() -> None:
    x = TensorType(STRING, ("n", 3))
    split, concat = find("StringSplit"), find("StringConcat")
    normalizer, match, tfidf = (
        find(name) for name in ("StringNormalizer", "RegexFullMatch", "TfIdfVectorizer")
    )
    assert split is not None
    assert concat is not None
    assert normalizer is not None
    assert match is not None
    assert tfidf is not None
    assert split.infer([x], {}, []) == (
        TensorType(STRING, ("n", 3, None)),
        TensorType(INT64, ("n", 3)),
    )
    assert concat.infer([x, TensorType(STRING, (1,))], {}, []) == (x,)
    assert match.infer([x], {}, []) == (TensorType(BOOL, ("n", 3)),)
    assert normalizer.infer([x], {}, []) == (TensorType(STRING, (1, None)),)
    assert tfidf.infer([x], {"ngram_indexes": [4, 2]}, []) == (TensorType(FLOAT32, ("n", 5)),)
    with pytest.raises(ShapeError):
        normalizer.infer([TensorType(STRING, (2, 3))], {}, [])
