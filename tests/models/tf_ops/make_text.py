"""Makes ``text.npz.xz``, as ``make.py`` does ``cases.npz.xz``: operations on text, ragged tensors and
tables."""

from __future__ import annotations

from typing import Any

import numpy as np
import tensorflow as tf
from make import F, case, real, save, several


def words(*texts: str | bytes) -> np.ndarray:
    array = np.empty(len(texts), object)
    array[:] = texts
    return array


def numbers() -> None:
    reals = [1.5, -0.1, 1e20, np.inf, -np.inf, np.nan, 1e-7, 3, 1 / 3]
    for name, given in (
        ("plain", {}),
        ("precision", {"precision": 2}),
        ("scientific", {"scientific": True}),
        ("shortest", {"shortest": True, "precision": 3}),
        ("width", {"width": 12}),
        ("zeros", {"width": 8, "fill": "0"}),
        ("left", {"width": 8, "fill": "-"}),
        ("space", {"width": 8, "fill": " "}),
        ("sign", {"width": 8, "fill": "+"}),
    ):
        for dtype in (np.float32, np.float64, np.float16):
            x = np.array(reals if dtype != np.float16 else reals[:2], dtype)
            case(f"AsString_{name}_{np.dtype(dtype).name}", "AsString", {"input": x}, **given)
        z = np.array([[1 + 2j, -0.5j]], np.complex64)
        case(f"AsString_{name}_complex", "AsString", {"input": z}, **given)
        if name in ("plain", "width", "zeros", "left", "space", "sign"):
            for whole in (np.array([-5, 0, 7], np.int64), np.array([200, 3], np.uint8)):
                label = f"AsString_{name}_{whole.dtype.name}"
                case(label, "AsString", {"input": whole}, **given)
            case(f"AsString_{name}_bool", "AsString", {"input": np.array([True, False])}, **given)
            case(f"AsString_{name}_words", "AsString", {"input": words("a", "bcd")}, **given)
    texts = words("1", "-5", " 7\t", "+3", "00012")
    for dtype in (tf.float32, tf.float64, tf.int32, tf.int64):
        case(
            f"StringToNumber_{dtype.name}",
            "StringToNumber",
            {"string_tensor": texts},
            out_type=dtype,
        )
    large = words("18446744073709551615", "0")
    case("StringToNumber_uint64", "StringToNumber", {"string_tensor": large}, out_type=tf.uint64)
    odd = words(
        "1e3", "0x10", "inf", "-INF", "NaN", "infinity", "1.", ".5", "1e400", "1e-400", "-0"
    )
    for dtype in (tf.float32, tf.float64):
        case(
            f"StringToNumber_odd_{dtype.name}",
            "StringToNumber",
            {"string_tensor": odd},
            out_type=dtype,
        )


def parts() -> None:
    one, other = words("a", "ä", ""), words("b", "", "€")
    case("StringJoin", "StringJoin", {"inputs": [one, other, one]}, separator="-")
    scalar = np.array("x", object)
    case("StringJoin_scalar", "StringJoin", {"inputs": [one.reshape(3, 1), scalar]})
    case("StringJoin_one_dynamic", "StringJoin", {"inputs": [one]}, separator="-")
    halves = [words(b"\xc3"), words(b"\xa4")]
    case("StringJoin_halves", "StringJoin", {"inputs": halves})
    mixed = words("AbÄÖẞİΣΑΣ", "ΑΣ Σ", "abäößŉΐ ﬁ", "I i")
    for op in ("StringLower", "StringUpper"):
        case(op, op, {"input": mixed})
        case(f"{op}_whole", op, {"input": mixed.reshape(2, 2)}, encoding="utf-8")
    case("StringStrip", "StringStrip", {"input": words(" \t a b\x0b\x0c\r\n", "\xa0x\x1c", "")})
    lines = words(
        "", "a", " a  b ", "a,,b", ",a,", "a, b,c", "aXXbXXXc", "  ", "a\x1cb\x85c\x0bd e"
    )
    for name, separator in (("space", ""), ("comma", ","), ("two", "XX")):
        for most in (-1, 0, 1, 2):
            label = f"StringSplitV2_{name}_{most}"
            case(label, "StringSplitV2", {"input": lines}, sep=separator, maxsplit=most)
    case("StringSplitV2_none", "StringSplitV2", {"input": words()}, sep="")
    dynamic = {"input": lines, "sep": np.array(",", object)}
    case("StringSplitV2_dynamic", "StringSplitV2", dynamic)
    odd = words("aä€😀", "", b"\xff\x80a", b"\x80")
    case("StringLength", "StringLength", {"input": odd})
    case("StringLength_whole", "StringLength", {"input": odd}, unit="UTF8_CHAR")
    content = words("abäd", "wörld")
    for position, length in ((1, 2), (-2, 2), (0, 0), (3, 9), (4, 1), (-4, 1), (1, -1), (0, -1)):
        for unit in ("BYTE", "UTF8_CHAR"):
            label = f"Substr_{position}_{length}_{unit}"
            case(label, "Substr", {"input": content}, pos=position, len=length, unit=unit)
    table = np.array([["hello", "world"], ["abc", "def"]], object)
    some = {"pos": np.array([1, 2], np.int32), "len": np.array([1, 3], np.int32)}
    case("Substr_rows_dynamic", "Substr", {"input": table, **some})
    case("Substr_many", "Substr", {"input": np.array("hello", object), **some})
    columns = {key: value[:, None].astype(np.int64) for key, value in some.items()}
    case("Substr_columns", "Substr", {"input": words("hello", "world"), **columns})


def patterns() -> None:
    text = words(
        "caaandaab", "abxd", "abaa", "abab", "foo foobar foo", "xaBy\n", "aä", "", "äab<br />"
    )
    for i, (pattern, rewrite) in enumerate(
        (
            ("a+", "<\\0>"),
            ("x*", "-"),
            ("(a)(b)?", "[\\1\\2]"),
            ("a|ab", "X"),
            ("(a*)(a|ab)(b*)", "\\3\\2\\1"),
            ("a*?", "X"),
            ("(?U)a+(b)", "\\1"),
            ("^a", "X"),
            ("", "-"),
            ("[aä]", "X"),
            ("a", "\\1"),
            ("\\bfoo\\b", "X"),
            ("(?i)A(b)", "\\1\\\\"),
            (".", "x"),
            ("(?:o(b)?)+", "<\\1>"),
            ("<br />|b$", " "),
            ("[!\"#$%&()\\*\\+,-\\./:;<=>?@\\[\\\\\\]^_`{|}~\\']", ""),
            ("(a{1,2}?)(a|b)", "\\2\\1"),
        )
    ):
        for everywhere in (True, False):
            given = {"pattern": pattern, "rewrite": rewrite, "replace_global": everywhere}
            case(
                f"StaticRegexReplace_{i}_{everywhere}",
                "StaticRegexReplace",
                {"input": text},
                **given,
            )
    case("RegexReplace", "RegexReplace", {"input": text}, pattern="a(.)", rewrite="\\1\\1")
    dynamic = {
        key: np.array(value, object) for key, value in (("pattern", "a|b"), ("rewrite", "."))
    }
    case("RegexReplace_dynamic", "RegexReplace", {"input": text, **dynamic})
    case("StaticRegexFullMatch", "StaticRegexFullMatch", {"input": text}, pattern="a.*[bd]")
    case("RegexFullMatch", "RegexFullMatch", {"input": text}, pattern="(ab)+")


def hashes() -> None:
    letters = "the quick brown fox jumps over the lazy dog äöü€😀 " * 8
    texts = words(*(letters[i % 7 : i % 7 + i] for i in range(140)), letters, "", b"\xff\xfe")
    for buckets in (10, 2**62):
        case(
            f"StringToHashBucketFast_{buckets}",
            "StringToHashBucketFast",
            {"input": texts},
            num_buckets=buckets,
        )
        for key in ([133, 137], [-1, 2**62]):
            given = {"num_buckets": buckets, "key": key}
            label = f"StringToHashBucketStrong_{buckets}_{key[0]}"
            case(label, "StringToHashBucketStrong", {"input": texts}, **given)


def formats() -> None:
    raw = tf.raw_ops
    values = [
        np.arange(10, dtype=np.int32),
        np.array([[1.5, 2], [3, 4]], F),
        words("a", "ä b"),
        np.array(True),
        np.zeros((2, 2, 3), np.int32),
        np.array([1e-10, 1e10, np.nan, np.inf, 1 / 3, 1e5, 1e6, 123456789], F),
        np.array([1 / 3, 1e22]),
        np.array(2**63, np.uint64),
        np.array([], F),
        np.arange(20).reshape(10, 2),
    ]
    for shown in (-1, 2, 3):

        def build(shown: int = shown, **holders: Any) -> list[tf.Tensor]:
            inputs = [holders[key] for key in sorted(holders)]
            template = "|".join(["{}"] * len(inputs))
            return [
                raw.StringFormat(
                    inputs=inputs, template=template, placeholder="{}", summarize=shown
                )
            ]

        fed = {f"x{i}": value for i, value in enumerate(values)}
        several(f"StringFormat_{shown}", build, fed)


def ragged() -> None:
    letters, splits = words(*"abcdef"), np.array([0, 3, 3, 4, 6], np.int64)
    pads = {"left_pad": "L", "right_pad": "R"}
    for i, given in enumerate(
        (
            {"ngram_widths": [2], "pad_width": 0},
            {"ngram_widths": [1, 3], "pad_width": 0, "left_pad": "", "right_pad": ""},
            {"ngram_widths": [3], "pad_width": 1},
            {"ngram_widths": [3, 2], "pad_width": -1},
            {"ngram_widths": [3], "pad_width": 0, "preserve_short_sequences": True},
            {"ngram_widths": [5], "pad_width": 1, "preserve_short_sequences": True},
            {"ngram_widths": [], "pad_width": 0},
        )
    ):
        more = {"separator": "_", "preserve_short_sequences": False, **pads, **given}
        case(f"StringNGrams_{i}", "StringNGrams", {"data": letters, "data_splits": splits}, **more)
    odd = words(
        b"a\xc3\xa4\x01b\x7f\xc2\x85",
        b"\xff\xe2\x82x",
        b"",
        b"\xe2\x82",
        b"\xf0\x9f\x98",
        b"\xed\xa0\x80",
    )
    for errors in ("replace", "ignore"):
        for controls in (False, True):
            given = {
                "input_encoding": "UTF-8",
                "errors": errors,
                "replace_control_characters": controls,
            }
            label = f"UnicodeDecode_{errors}_{controls}"
            case(label, "UnicodeDecode", {"input": odd}, replacement_char=63, **given)
    wide = words("a€".encode("utf-16-be"))
    case(
        "UnicodeDecode_wide",
        "UnicodeDecode",
        {"input": wide},
        input_encoding="UTF-16-BE",
        Tsplits=tf.int32,
    )
    table = words("ab", "c", "", "d").reshape(2, 2)
    case("UnicodeDecode_table_dynamic", "UnicodeDecode", {"input": table}, input_encoding="UTF-8")
    points = np.array([97, 228, 0x20AC, 0x1F600, 0x110000, -1, 0xD800], np.int32)
    rows = {"input_values": points, "input_splits": np.array([0, 2, 2, 4, 7], np.int64)}
    for errors in ("replace", "ignore"):
        case(
            f"UnicodeEncode_{errors}", "UnicodeEncode", rows, output_encoding="UTF-8", errors=errors
        )
    valid = {"input_values": points[:2], "input_splits": np.array([0, 2], np.int32)}
    case("UnicodeEncode_wide", "UnicodeEncode", valid, output_encoding="UTF-16-BE")

    def dense(name: str, fed: dict[str, Any], kinds: list[str], default: Any, shape: Any) -> None:
        shape = np.array(shape, np.int64)
        given = {"shape": shape, "default_value": default, "row_partition_types": kinds}
        case(f"RaggedTensorToTensor_{name}", "RaggedTensorToTensor", fed, **given)

    values = np.arange(1, 7, dtype=np.int32)
    one = {"values": values, "row_partition_tensors": [np.array([0, 2, 2, 5, 6], np.int64)]}
    dense("open", one, ["ROW_SPLITS"], 0, [-1, -1])
    dense("scalar", one, ["ROW_SPLITS"], 0, -1)
    dense("cut", one, ["ROW_SPLITS"], 9, [3, 2])
    dense("more_dynamic", one, ["ROW_SPLITS"], 9, [6, 4])
    ids = {"values": values, "row_partition_tensors": [np.array(5), np.array([0, 0, 2, 2, 2, 3])]}
    dense("ids", ids, ["FIRST_DIM_SIZE", "VALUE_ROWIDS"], -1, [-1, -1])
    deep = {
        "values": values,
        "row_partition_tensors": [np.array([0, 2, 3]), np.array([0, 1, 4, 6])],
    }
    dense("deep", deep, ["ROW_SPLITS"] * 2, 0, [-1, -1, -1])
    dense("deep_cut", deep, ["ROW_SPLITS"] * 2, 0, [-1, 1, 2])
    vectors = {"values": real(6, 2), "row_partition_tensors": one["row_partition_tensors"]}
    dense("vectors", vectors, ["ROW_SPLITS"], real(2), [-1, -1, 2])
    texts = {"values": words(*"abcdef"), "row_partition_tensors": one["row_partition_tensors"]}
    dense("words", texts, ["ROW_SPLITS"], "-", [-1, 4])


def crosses() -> None:
    columns = [words("a", "c", "b", "ä").reshape(2, 2), words("x", "y", "z", "").reshape(2, 2)]
    rows = {
        "indices": [np.array([[0, 0], [2, 0], [2, 1]], np.int64)],
        "values": [words("a", "b", "c")],
        "shapes": [np.array([3, 2], np.int64)],
    }
    none: dict[str, Any] = {"indices": [], "values": [], "shapes": []}
    numbers = [np.array([[1, -2], [3, 2**40]], np.int64), np.array([[5], [6]], np.int64)]
    for name, fed, kind, buckets in (
        ("dense", {"dense_inputs": columns}, tf.string, 1000),
        ("large", {"dense_inputs": columns}, tf.string, 0),
        ("numbers", {"dense_inputs": numbers}, tf.int64, 10**12),
        ("sparse", {**rows, "dense_inputs": [words("x", "y", "z").reshape(3, 1)]}, tf.string, 1000),
    ):
        given = {key: value for key, value in none.items() if key not in fed}
        more = {"num_buckets": buckets, "hash_key": 956888297470, "internal_type": kind, **given}
        case(
            f"SparseCross_{name}", "SparseCross", fed, hashed_output=True, out_type=tf.int64, **more
        )
    more = {
        "num_buckets": 0,
        "hash_key": 1,
        "internal_type": tf.string,
        "out_type": tf.string,
        **none,
    }
    case("SparseCross_text", "SparseCross", {"dense_inputs": columns}, hashed_output=False, **more)


def tables() -> None:
    """Tables that the graph itself fills; the run waits for that."""
    raw = tf.raw_ops

    def table(keys: Any, values: Any, fill: Any, query: tf.Tensor, default: Any) -> list[tf.Tensor]:
        keys, values = tf.constant(keys), tf.constant(values)
        handle = raw.HashTableV2(key_dtype=keys.dtype, value_dtype=values.dtype, shared_name="t")
        with tf.control_dependencies([fill(table_handle=handle, keys=keys, values=values)]):
            found = raw.LookupTableFindV2(table_handle=handle, keys=query, default_value=default)
            return [found, raw.LookupTableSizeV2(table_handle=handle)]

    names = np.array([["a", "ä"], ["", "z"]], object)
    fills = (("import", raw.LookupTableImportV2), ("initialize", raw.InitializeTableV2))
    for name, fill in fills:

        def numbered(keys: tf.Tensor, fill: Any = fill) -> list[tf.Tensor]:
            return table(["a", "ä", "b", "a"], np.array([1, 2, 3, 1]), fill, keys, np.int64(-1))

        several(f"LookupTable_{name}", numbered, {"keys": names})

        def named(keys: tf.Tensor, fill: Any = fill) -> list[tf.Tensor]:
            return table(np.array([5, -7]), ["x", "y"], fill, keys, "[UNK]")

        several(f"LookupTable_{name}_names_dynamic", named, {"keys": np.array([-7, 0, 5])})


if __name__ == "__main__":
    for part in (numbers, parts, patterns, hashes, formats, ragged, crosses, tables):
        part()
    save("text")
