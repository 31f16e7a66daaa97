"""Inputs that TensorFlow refuses on its CPU are refused here too, by a message that names the node."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import penstock as ps
from tests.support.tf_graphs import Builder, Shape, Type

F = np.float32
X = np.arange(8, dtype=F).reshape(4, 2)
NONE = np.empty(0, F)


def whole(*values: Any) -> np.ndarray:
    return np.array(values, np.int32)


def real(*values: Any) -> np.ndarray:
    return np.array(values, F)


def longs(*values: Any) -> np.ndarray:
    return np.array(values, np.int64)


def words(*texts: str) -> np.ndarray:
    return np.array(texts, object)


def types(**names: str) -> dict[str, Type]:
    return {key: Type(name) for key, name in names.items()}


SEGMENTS = types(T="float32", Tindices="int32")
NUMBERED = SEGMENTS | types(Tnumsegments="int32")
CHOSEN = types(T="float32", Tidx="int32", Tsegmentids="int32")
COUNTED = CHOSEN | types(Tnumsegments="int32")
ROLL = types(T="float32", Tshift="int32", Taxis="int32")
UNIQUE = types(T="float32", Taxis="int64", out_idx="int32")
BOUND = types(T="float32", out_type="int32")
BINS = types(Tidx="int32", T="float32")
DENSE = types(T="float32", Tindices="int32")
MATRIX = types(T="float32")
RGB = types(T="float32")
INT32 = types(T="int32")
LONG = types(T="int64")
PLACES = np.array([[0, 1], [1, 2]], np.int64)
NGRAMS = types(Tsplits="int64") | {
    **dict.fromkeys(("separator", "left_pad", "right_pad"), ""),
    "pad_width": 0,
    "preserve_short_sequences": False,
}
UTF8 = types(Tsplits="int64") | {"output_encoding": "UTF-8"}
RAGGED = types(T="float32", Tindex="int64", Tshape="int64")
CROSS = types(out_type="int64", internal_type="object") | {
    "N": 0,
    "hashed_output": True,
    "num_buckets": 9,
    "hash_key": 1,
    "sparse_types": [],
}
PARTS = types(T="float32") | {"num_partitions": 2}
STITCH = types(T="float32") | {"N": 2}
REAL = types(T="float32")
GATES = [np.zeros((4, 8), F), *np.zeros((3, 2), F), np.zeros(8, F)]
SEEDED = types(dtype="float32", T="int32", Tseed="int32")
ROWS = types(Tvalues="float32", Tindices="int64", Tsplits="int64") | {
    "PARAMS_RAGGED_RANK": 1,
    "OUTPUT_RAGGED_RANK": 1,
}
NESTED = types(T="float32", Tsplits="int64") | {"RAGGED_RANK": 1}
TRANSCODED = {"input_encoding": "UTF-8", "output_encoding": "UTF-8", "errors": "strict"}
SCALED = types(T="float32") | {"kernel_type": "lanczos3"}
IMAGE = X.reshape(1, 4, 2, 1)
DECODED = types(T="float32") | {"merge_repeated": True}
CODES = types(T="float32") | {"axis": 2}
CHOICES = types(T="float32")
PARTS_OF = [PLACES, real(1, 2), longs(2, 3)]
SUM = types(T="float32", Treal="float32")
LONGS = types(T="float32", Tindices="int64")
IDS = ["FIRST_DIM_SIZE", "VALUE_ROWIDS"]
ONES = [1, 1, 1, 1]
PATCHES = RGB | {"padding": "SAME", "ksizes": ONES, "strides": ONES, "rates": ONES}

CASES: list[tuple[str, list[np.ndarray], dict[str, Any], str]] = [
    (
        "EnsureShape",
        [X],
        {"T": Type("float32"), "shape": Shape((3, -1))},
        r"\(4, 2\) where \(3, None\)",
    ),
    ("Roll", [X, whole(1), whole(0, 1)], ROLL, "must be equal scalars or vectors"),
    ("Roll", [X, np.array(1, np.int32), whole(0)], ROLL, "must be equal scalars or vectors"),
    ("Roll", [X, whole([1]), whole([0])], ROLL, "must be equal scalars or vectors"),
    ("Roll", [X, whole(1), whole(2)], ROLL, "axis 2 is out of range"),
    ("Roll", [X[0, 0], whole(1), whole(0)], ROLL, "the input of Roll must have"),
    ("Bitcast", [whole(1, 2, 3)], types(T="int32", type="int64"), "elements of 8 bytes"),
    ("UniqueV2", [X, np.empty(0, np.int64)], UNIQUE, "the input must have rank"),
    ("UniqueV2", [X, np.array([0, 1])], UNIQUE, "axis must be a vector of"),
    ("UniqueV2", [X, np.array([2])], UNIQUE, "axis 2 is out of range"),
    ("LowerBound", [X, X[:2]], BOUND, "must be matrices with equal numbers"),
    ("UpperBound", [X[0], X[0]], BOUND, "must be matrices with equal numbers"),
    (
        "Bincount",
        [whole(1, -1), np.int32(3), NONE],
        types(T="float32"),
        "values must not be negative",
    ),
    ("Bincount", [whole(1), np.int32(-3), NONE], types(T="float32"), "a scalar of at least 0"),
    ("Bincount", [whole(1), whole(3), NONE], types(T="float32"), "a scalar of at least 0"),
    ("Bincount", [whole(1, 1), np.int32(3), real(1, 2, 3)], types(T="float32"), "weights of shape"),
    ("DenseBincount", [whole([[1]]), np.int32(3), NONE], BINS, "rank 1 or 2"),
    ("DenseBincount", [whole([1, -1]), np.int32(3), NONE], BINS, "values must not be negative"),
    ("DenseBincount", [whole([1, 1]), np.int32(3), real(1, 1)], BINS, "weights of shape"),
    *[
        ("RaggedBincount", [np.array(splits), whole(1, 1, 5), np.int32(3), NONE], BINS, "splits")
        for splits in ([0, 2, 4], [1, 2, 3], [0, 2])
    ],
    (
        "RaggedBincount",
        [np.array([0, 1]), whole(-1), np.int32(3), NONE],
        BINS,
        "values must not be negative",
    ),
    ("InTopKV2", [X, whole(1, 1), np.int32(1)], types(T="int32"), "and predictions"),
    ("InTopKV2", [X[0], whole(1), np.int32(1)], types(T="int32"), "and predictions"),
    *[
        (f"Segment{name}", [X, ids], SEGMENTS, match)
        for name in ("Sum", "Mean", "Max", "Min", "Prod")
        for ids, match in (
            (whole(0, 1, 0, 4), "segment_ids must not decrease"),
            (whole(-1, 0, 0, 4), "segment_ids must not be negative"),
            (whole(0, 0, 4), "must have one entry per row"),
            (X.astype(np.int32), "must have one entry per row"),
        )
    ],
    *[
        (f"UnsortedSegment{name}", [X, ids, np.int32(count)], NUMBERED, match)
        for name in ("Sum", "Max", "Min", "Prod")
        for ids, count, match in (
            (whole(3, 0, -1, 0), 3, "segments up to 3 are not below 3"),
            (whole(3, 0, -1), 4, "segments of"),
            (whole(0, 0, 0, 0), -1, "must not be negative"),
        )
    ],
    *[
        (f"SparseSegment{name}", [X, places, ids], CHOSEN, match)
        for name in ("Sum", "Mean", "SqrtN")
        for places, ids, match in (
            (whole(0, 1, 4), whole(0, 0, 2), r"must be in \[0, 4\)"),
            (whole(0, 1, -1), whole(0, 0, 2), r"must be in \[0, 4\)"),
            (whole(0, 1, 3), whole(1, 0, 2), "segment_ids must not decrease"),
            (whole(0, 1), whole(0, 0, 2), "must have one entry per row"),
        )
    ],
    (
        "SparseSegmentSumWithNumSegments",
        [X, whole(0, 1), whole(0, 2), np.int32(2)],
        COUNTED,
        "must be less than num_segments",
    ),
    *[
        ("SparseToDense", [places, dims, values, np.zeros(default, F)], DENSE, match)
        for places, dims, values, default, match in (
            (whole(2, 0), whole(4), real(1, 2), (), r"place \[0\] at 1 is out of order"),
            (whole(2, 2), whole(4), real(1, 2), (), r"place \[2\] at 1 is repeated"),
            (whole(2, 5), whole(4), real(1, 2), (), "out of bounds"),
            (whole(-1, 2), whole(4), real(1, 2), (), "out of bounds"),
            (whole(0, 2), whole(4), real(1), (), "values of shape"),
            (whole(0, 2), whole(4), real(1, 2), (2,), "the default must be a scalar"),
            (whole(0, 2), whole(2, 2), real(1, 2), (), "indices of shape"),
            (whole(0, 2), whole(-4), real(1, 2), (), "negative"),
        )
    ],
    *[
        (f"TensorScatter{name}", [X, places, updates], DENSE, match)
        for name in ("Sub", "Max", "Min")
        for places, updates, match in (
            (whole([1], [4]), X[:2], "out of bounds"),
            (whole([1], [-1]), X[:2], "out of bounds"),
            (whole([1], [1]), X[:3], "updates must have shape"),
            (whole([1, 1, 1]), real(1), "indices of shape"),
        )
    ],
    *[
        (
            op,
            [X, whole([1], [at]), *updates],
            attrs,
            "negative" if at < 0 else "out of|does not fit",
        )
        for op, updates, attrs in (
            ("GatherNd", [], types(Tparams="float32", Tindices="int32")),
            ("TensorScatterAdd", [X[:2]], DENSE),
            ("TensorScatterUpdate", [X[:2]], DENSE),
        )
        for at in (-1, 4)
    ],
    *[
        ("SparseCross", features, CROSS | {"dense_types": [Type(kind) for kind in kinds]}, match)
        for features, kinds, match in (
            ([words("a"), words("b")], ["object"] * 2, "dense features must have rank"),
            (
                [words("a")[:, None], words("b", "c")[:, None]],
                ["object"] * 2,
                "the columns must have the same",
            ),
        )
    ],
    ("Betainc", [X[:1], X, X], types(T="float32"), "parameters that are not scalars must"),
    ("Cross", [X, X], types(T="float32"), "the inputs of Cross must have"),
    (
        "Cross",
        [np.ones((2, 3), F), np.ones(3, F)],
        types(T="float32"),
        "the inputs of Cross must have",
    ),
    ("MatrixSetDiag", [X, real(1, 2, 3)], MATRIX, "diagonal"),
    ("MatrixDiagPart", [X[0]], MATRIX, "the input must have rank"),
    ("RGBToHSV", [X], RGB, "the last dim of an image"),
    ("HSVToRGB", [X[0, 0]], RGB, "the last dim of an image"),
    ("AdjustHue", [np.ones((1, 3), F), F(0.1)], RGB, "the input must have rank"),
    ("AdjustSaturation", [np.ones((2, 2, 4), F), F(0.1)], RGB, "the last dim of an image"),
    ("AdjustContrastv2", [np.ones((2, 2, 3), F), real(1, 2)], RGB, "hape"),
    *[
        (op, [image, size], types(T="float32"), match)
        for op in ("ResizeBicubic", "ResizeArea")
        for image, size, match in (
            (np.ones((1, 2, 2, 1), F), whole(0, 2), "sizes must be positive"),
            (np.ones((1, 0, 2, 1), F), whole(1, 2), "sizes must be positive"),
            (np.ones((2, 2, 1), F), whole(1, 2), "images must have shape"),
        )
    ],
    (
        "ResizeBicubic",
        [np.ones((1, 2, 2, 1), F), whole(1, 2)],
        RGB | {"align_corners": True, "half_pixel_centers": True},
        "align_corners and half_pixel_centers must not both",
    ),
    ("ExtractImagePatches", [X], PATCHES, "images must have shape"),
    *[
        ("AsString", [x], types(T=name) | attrs, match)
        for x, name, attrs, match in (
            (X, "float32", {"fill": "ab"}, "must be empty"),
            (X, "float32", {"fill": "x"}, "must be empty"),
            (
                X,
                "float32",
                {"scientific": True, "shortest": True},
                "scientific and shortest must not both",
            ),
            (whole(1), "int32", {"precision": 2}, "scientific and shortest are only valid"),
            (whole(1), "int32", {"shortest": True}, "scientific and shortest are only valid"),
        )
    ],
    *[
        ("StringToNumber", [words(text)], types(out_type=name), "is not a number in the")
        for text, names in (
            ("-5", ("uint32",)),
            ("1e3", ("int32", "int64")),
            ("1_000", ("float32", "int64")),
            ("", ("float32", "int32")),
            ("3f", ("float32",)),
            ("1 2", ("float32", "int32")),
            ("99999999999", ("int32",)),
            ("\u0661", ("float32", "int32")),
            ("--1", ("float32", "int32")),
            ("9" * 9999, ("int64",)),
        )
        for name in names
    ],
    ("StringJoin", [words("a", "b"), words("x")], {"N": 2}, "shape"),
    ("StringLower", [words("a")], {"encoding": "latin"}, "encoding .latin. must be"),
    ("StringUpper", [words("a")], {"encoding": "latin"}, "encoding .latin. must be"),
    ("StringSplitV2", [words("a").reshape(1, 1), words("")[0]], {}, "the input must have rank"),
    ("StringSplitV2", [words("a"), words("a", "b")], {}, "the input must have rank"),
    ("StringSplit", [words("a").reshape(1, 1), words("")[0]], {}, "the input must have rank"),
    ("ReduceJoin", [words("a", "b"), whole(1)], {}, "axis"),
    ("DecodeRaw", [words("ab", "abc")], {"out_type": Type("uint8")}, "same number of elements"),
    ("DecodeRaw", [words("abc")], {"out_type": Type("int16")}, "same number of elements"),
    *[("DecodeBase64", [words(text)], {}, "no base64") for text in ("a", "a+bc", "YQ===", "YWI==")],
    ("RaggedRange", [whole(0, 1), whole(2, 3), whole(1, 0)], INT32, "the step of a range is 0"),
    ("RaggedRange", [whole(0, 1), whole(2, 3, 4), whole(1, 1)], INT32, "vectors of one length"),
    ("SparseReshape", [PLACES, longs(2, 3), longs(5)], {}, "cannot be reshaped"),
    ("SparseReshape", [PLACES, longs(2, 2), longs(4)], {}, "index .* is outside"),
    ("SparseReshape", [PLACES, longs(2, 3), longs(-1, -1)], {}, "at most one -1"),
    ("SparseReshape", [PLACES[:0], longs(0, 3), longs(0, -1)], {}, "can be anything"),
    ("SparseReshape", [PLACES, longs(2**40, 2**40), longs(4)], {}, "too large"),
    ("SparseFillEmptyRows", [PLACES, longs(1), longs(2, 3), np.int64(0)], LONG, "as many values"),
    ("SparseFillEmptyRows", [PLACES, longs(1, 2), longs(2, 3), longs(0)], LONG, "a scalar"),
    ("SparseReorder", [PLACES - 1, longs(1, 2), longs(2, 3)], LONG, "index .* is outside"),
    (
        "SparseConcat",
        [PLACES, PLACES, longs(1, 2), longs(1, 2), longs(2, 3), longs(3, 3)],
        {**LONG, "N": 2, "concat_dim": 1},
        "differ in other dims",
    ),
    (
        "SparseSlice",
        [PLACES, longs(1, 2), longs(2, 3), longs(-1, 0), longs(1, 1)],
        LONG,
        "none of them negative",
    ),
    (
        "SparseTensorDenseMatMul",
        [PLACES, longs(1, 2), longs(2, 3), longs(1, 2).reshape(1, 2)],
        {**LONG, **types(Tindices="int64"), "adjoint_a": False, "adjoint_b": False},
        "cannot be multiplied",
    ),
    *[
        ("Substr", [words("ab\xe4d"), np.int32(at), np.int32(1)], {**INT32, "unit": unit}, match)
        for at, unit, match in (
            (6, "BYTE", "position 6 is out of range"),
            (-6, "BYTE", "position -6 is out of range"),
            (5, "UTF8_CHAR", "position 5 is out of range"),
        )
    ],
    ("Substr", [words("ab"), whole(1, 2), whole(3)], INT32, "lengths"),
    ("StaticRegexReplace", [words("a")], {"pattern": "(", "rewrite": ""}, "RE2"),
    (
        "StaticRegexReplace",
        [words("a")],
        {"pattern": "a", "rewrite": "\\x"},
        "has a backslash without a digit",
    ),
    ("RegexReplace", [words("a"), words("a"), words("")[0]], {}, "must be scalars"),
    ("StaticRegexFullMatch", [words("a")], {"pattern": "("}, "RE2|missing"),
    ("StringToHashBucketFast", [words("a")], {"num_buckets": 0}, "and key None must have two"),
    (
        "StringToHashBucketStrong",
        [words("a")],
        {"num_buckets": 9, "key": [1]},
        "must have two elements",
    ),
    (
        "StringFormat",
        [X],
        {"T": [Type("float32")], "template": "%s %s"},
        "has 2 placeholders, but the node has 1",
    ),
    *[
        ("StringNGrams", [words(*"abcd"), np.array(splits)], {**NGRAMS, "ngram_widths": w}, match)
        for splits, w, match in (
            ([0, 3], [2], "must start at"),
            ([1, 4], [2], "must start at"),
            ([0, 3, 2, 4], [2], "must not decrease"),
            ([0, 4], [0], "must be positive"),
        )
    ],
    (
        "UnicodeDecode",
        [words("a\udcff")],
        {"input_encoding": "UTF-8", "errors": "strict"},
        "is not valid UTF-8",
    ),
    ("UnicodeDecode", [words("a")], {"input_encoding": "foo"}, "'foo' is not one of UTF-8"),
    *[
        ("UnicodeEncode", [whole(*points), np.array(splits)], {**UTF8, "errors": "strict"}, match)
        for points, splits, match in (
            ((97, 0x110000), [0, 2], "is not a Unicode scalar value"),
            ((97, 0xD800), [0, 2], "is not a Unicode scalar value"),
            ((97, 228), [0, 3], "must start at"),
            ((97, 228), [1, 2], "must start at"),
            ((97, 228), [0, 2, 1, 2], "must not decrease"),
        )
    ],
    *[
        (
            "RaggedTensorToTensor",
            [np.array(shape), real(1, 2, 3), np.array(default, F), *map(np.array, rows)],
            {**RAGGED, "num_row_partition_tensors": len(rows), "row_partition_types": kinds},
            match,
        )
        for shape, default, rows, kinds, match in (
            ([-1, -1], 0, [[0, 2, 1, 3]], ["ROW_SPLITS"], "ascending offsets from"),
            ([-1, -1], 0, [[1, 2, 3]], ["ROW_SPLITS"], "ascending offsets from"),
            ([-1, -1], 0, [2, [0, 0, 2]], IDS, "must be ascending and in"),
            ([-1, -1], 0, [4, [0, 2, 0]], IDS, "must be ascending and in"),
            ([-1, -1], [0, 1], [[0, 2, 2, 3]], ["ROW_SPLITS"], "a default value of shape"),
            ([-1], 0, [[0, 2, 2, 3]], ["ROW_SPLITS"], "the shape of a value"),
            ([-1, -1], 0, [[3]], ["ROW_LENGTHS"], "do not describe a ragged tensor"),
        )
    ],
    ("Empty", [whole(-1)], {"dtype": Type("float32")}, "a vector of nonnegative dims"),
    ("DynamicPartition", [X, whole(0, 1, 2, 0)], PARTS, "row 2 goes to part 2 of 2"),
    ("DynamicPartition", [X, whole(0, -1, 1, 0)], PARTS, "row 1 goes to part -1 of 2"),
    ("DynamicPartition", [X, whole(0, 1)], PARTS, "do not begin the shape of the data"),
    ("DynamicStitch", [whole(0, 1), whole(2), X[:2], X[:1, :1]], STITCH, "rows of several shapes"),
    ("DynamicStitch", [whole(0, -1), whole(2), X[:2], X[:1]], STITCH, "must not be negative"),
    ("DynamicStitch", [whole(0), whole(2), X[:2], X[:1]], STITCH, "do not begin the shape"),
    ("Cholesky", [X], REAL, "matrices, square ones, are needed, not"),
    ("Cholesky", [-np.eye(2, dtype=F)], REAL, "no result for the matrices: Matrix is not positive"),
    ("MatrixInverse", [np.zeros((2, 2), F)], REAL, "no result for the matrices: Singular matrix"),
    ("MatrixSolve", [X[:2], X[:3]], REAL, r"right-hand sides \(3, 2\) do not fit"),
    ("Qr", [X[0]], REAL, "matrices are needed, not"),
    ("RFFT2D", [X, whole(2)], types(Treal="float32", Tcomplex="complex64"), "positive lengths"),
    ("FFT3D", [X.astype(np.complex64)], types(Tcomplex="complex64"), "along 3 axes of"),
    ("GRUBlockCell", [X, X, X, X, X[0], X[0]], REAL, "weights .* do not fit inputs"),
    ("BlockLSTM", [np.int64(3), X[:2, None], X[:1], X[:1], *GATES], REAL, "3 time steps of"),
    ("LSTMBlockCell", [X, X, X[:1], *GATES], REAL, "weights .* do not fit inputs"),
    ("LSTMBlockCell", [X, X, X[:, :1], *GATES], REAL, "weights .* do not fit inputs"),
    ("StatelessRandomUniform", [whole(-1), whole(1, 2)], SEEDED, "a shape is a vector of dims"),
    ("StatelessRandomUniform", [whole(2), whole(1)], SEEDED, "a seed is two integers"),
    (
        "StatelessRandomUniformInt",
        [whole(2), whole(1, 2), np.int32(3), np.int32(3)],
        SEEDED | types(dtype="int32"),
        "must be a number below maxval",
    ),
    (
        "StatelessRandomUniformV2",
        [whole(2), np.zeros(1, np.uint64), np.zeros(2, np.uint64), np.int32(2)],
        types(dtype="float32", Tshape="int32"),
        "algorithm 2 is none of 1 and 3",
    ),
    ("RaggedGather", [longs(0, 1), X[:1], longs(1)], ROWS, "must be a tensor of rows of 1"),
    ("RaggedGather", [longs(0, 2), X[:1], longs(0)], ROWS, "must start at 0 and end at 1"),
    ("RaggedGather", [longs(0, 1), X[:1], np.int64(0)], ROWS, "do not give a ragged rank of 1"),
    ("LSTMBlockCell", [X, X[:1], X, *GATES], REAL, "cs_prev .* and h_prev .* differ"),
    ("RaggedTensorToSparse", [longs(0, 2), X[:1]], NESTED, "must start at 0 and end at 1"),
    ("UnicodeTranscode", ["a\udcff"], TRANSCODED, "is not valid UTF-8"),
    (
        "ScaleAndTranslate",
        [X, whole(1, 1), real(1, 1), real(0, 0)],
        SCALED,
        "images must have shape",
    ),
    ("ScaleAndTranslate", [IMAGE, whole(1, 1), real(0, 1), real(0, 0)], SCALED, "positive scales"),
    ("ScaleAndTranslate", [IMAGE, whole(1, 1), real(1, np.nan), real(0, 0)], SCALED, "positive"),
    ("ScaleAndTranslate", [IMAGE, whole(0, 1), real(1, 1), real(0, 0)], SCALED, "must be positive"),
    (
        "ScaleAndTranslate",
        [IMAGE, whole(1, 1), real(1, 1), real(0, 0)],
        SCALED | {"kernel_type": "cubic"},
        "is none of lanczos1, lanczos3",
    ),
    ("CTCGreedyDecoder", [X[:, None], whole(5)], DECODED, r"lengths \[5\] or blank -1"),
    ("CTCGreedyDecoder", [X[:, None], whole(4)], DECODED | {"blank_index": 2}, "or blank 2"),
    ("CTCGreedyDecoder", [X[:, None], whole(4, 4)], DECODED, "need lengths"),
    ("QuantizeAndDequantizeV3", [X, real(-1), real(1), np.int32(64)], REAL, "num_bits 64 is out"),
    ("QuantizeAndDequantizeV3", [X, real(1), real(-1), np.int32(8)], REAL, "does not fit"),
    ("QuantizeAndDequantizeV3", [X, *2 * [real(1)], np.int32(8)], CODES, "axis 2 is out of range"),
    ("ListDiff", [X, X[0]], types(T="float32"), "two vectors are needed"),
    ("Multinomial", [X[0], np.int32(1)], CHOICES, "logits must be"),
    ("Multinomial", [X, np.int32(-1)], CHOICES, "num_samples must be a scalar"),
    ("SparseAdd", [*PARTS_OF[:3], *PARTS_OF[:2], longs(3, 3), real(0)], SUM, "cannot be added"),
    ("SparseTensorDenseAdd", [*PARTS_OF[:3], X[:3]], LONGS, r"and \(3, 2\) cannot be added"),
    ("SparseDenseCwiseMul", [*PARTS_OF[:3], X[:3]], REAL, "does not broadcast to"),
    ("SparseReduceSum", [*PARTS_OF[:3], whole(2)], REAL, "axis 2 is out of range"),
    ("SparseReduceSum", [*PARTS_OF[:2], longs(9, 2), whole(0)], REAL, "is outside of the dense"),
    ("SparseSoftmax", [PARTS_OF[0][:, :1], real(1, 2), longs(3)], REAL, "needs two dims or more"),
]


def graph(op: str, inputs: list[np.ndarray], attrs: dict[str, Any]) -> Builder:
    """A node "y" of the operation, fed by placeholders of unknown shapes."""
    g = Builder()
    names = []
    for i, x in enumerate(inputs):
        x = np.asarray(x, object if isinstance(x, str) else None)
        dtype = Type("object" if x.dtype == object else x.dtype.name)
        names.append(g.node("Placeholder", name=f"x{i}", dtype=dtype))
    g.node(op, *names, name="y", **attrs)
    return g


@pytest.mark.parametrize(("op", "inputs", "attrs", "match"), CASES)
def test_input_that_tensorflow_refuses_is_refused(
    op: str, inputs: list[np.ndarray], attrs: dict[str, Any], match: str
) -> None:
    session = ps.compile(graph(op, inputs, attrs).bytes())
    feeds = {
        f"x{i}": np.array(x, object) if isinstance(x, str) else x for i, x in enumerate(inputs)
    }
    with pytest.raises((ps.RunError, ps.InvalidInput), match=match) as error:
        session.run(feeds)
    assert "y in the model" in str(error.value)


@pytest.mark.parametrize(("op", "inputs", "attrs", "match"), CASES)
def test_constant_that_tensorflow_refuses_is_refused(
    op: str, inputs: list[np.ndarray], attrs: dict[str, Any], match: str
) -> None:
    g = Builder()
    g.node(op, *[g.const(x) for x in inputs], name="y", **attrs)
    with pytest.raises(ps.PenstockError, match="y in the model"):
        ps.compile(g.bytes()).run({})


def test_bucketize_with_boundaries_that_fall_is_refused() -> None:
    g = graph("Bucketize", [X], {"T": Type("float32"), "boundaries": [1.0, 0.5]})
    with pytest.raises(ps.InvalidModel, match=r"y in the model .* are not sorted; sort them"):
        ps.compile(g.bytes())


@pytest.mark.parametrize("policy", ["", "DEFAULT", "ERROR", "IGNORE"])
@pytest.mark.parametrize(
    ("op", "inputs", "attrs"),
    [
        ("GatherNd", [X, whole([1])], types(Tparams="float32", Tindices="int32")),
        ("ScatterNd", [whole([1]), X[:1], whole(4, 2)], DENSE),
        *[
            (f"TensorScatter{name}", [X, whole([1]), X[:1]], DENSE)
            for name in ("Update", "Add", "Sub", "Max", "Min")
        ],
    ],
)
def test_bad_indices_are_errors_and_are_not_to_be_ignored(op, inputs, attrs, policy) -> None:
    content = graph(op, inputs, attrs | {"bad_indices_policy": policy}).bytes()
    if policy == "IGNORE":
        with pytest.raises(ps.PenstockError, match=r"y in the model.*bad_indices_policy 'IGNORE'"):
            ps.compile(content)
    else:
        assert ps.compile(content).run({f"x{i}": x for i, x in enumerate(inputs)})
