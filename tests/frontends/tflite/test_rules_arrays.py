"""Rules of reductions, and of operations on shapes and places of elements: beside LiteRT."""

from __future__ import annotations

import numpy as np
import pytest

import penstock as ps
from tests.support.litert import Op, check_operator, f, i32, scalar

OPS = [
    Op("EMBEDDING_LOOKUP", (i32(2, 0, 1), [f(3, 4)])),
    Op("GATHER", (f(2, 3, 4), i32(2, 0)), {"axis": -2}),
    Op("GATHER", (f(2, 3, 4), i32([1, 0], [2, 2])), {"axis": 2, "batch_dims": 1}, version=5),
    Op("MATRIX_SET_DIAG", (f(2, 3, 4), f(2, 3))),
    Op("MIRROR_PAD", (f(4, 5), [i32([1, 2], [0, 3])]), {"mode": 0}),
    Op("MIRROR_PAD", (f(4, 5), [i32([1, 2], [0, 3])]), {"mode": 1}),
    Op(
        "NON_MAX_SUPPRESSION_V4",
        (
            np.abs(f(9, 4)),
            np.abs(f(9)),
            [scalar(4)],
            [scalar(0.3, np.float32)],
            [scalar(0.1, np.float32)],
        ),
        outputs=("int32", "int32"),
    ),
    Op(
        "NON_MAX_SUPPRESSION_V5",
        (
            np.abs(f(9, 4)),
            np.abs(f(9)),
            [scalar(4)],
            [scalar(0.3, np.float32)],
            [scalar(0.1, np.float32)],
            [scalar(0.5, np.float32)],
        ),
        outputs=("int32", "float32", "int32"),
    ),
    *[  # a share of just the threshold
        Op(
            "NON_MAX_SUPPRESSION_V4",
            (
                np.array([[0, 0, 2, 2], [0, 1, 2, 2], [1, 3, 0, 0]], np.float32),
                np.array([0.9, 0.8, 0.7], np.float32),
                [scalar(4)],
                [scalar(threshold, np.float32)],
                [scalar(0.1, np.float32)],
            ),
            outputs=("int32", "int32"),
        )
        for threshold in (0.5, 0.500001)
    ],
    Op(
        "ONE_HOT",
        (i32([0, 2], [3, -1]), [scalar(3)], [scalar(2, np.float32)], [scalar(-1, np.float32)]),
        {"axis": 1},
    ),
    Op(
        "REDUCE_ALL",
        (f(3, 4) > -1, [i32(1)]),
        {"keep_dims": True},
        ("bool",),
        kind="ReducerOptions",
    ),
    Op("REVERSE_SEQUENCE", (f(3, 4, 2), i32(2, 4, 1)), {"seq_dim": 1, "batch_dim": 0}),
    Op("REVERSE_SEQUENCE", (f(3, 4, 2), i32(2, 1, 3, 0)), {"seq_dim": 0, "batch_dim": 1}),
    Op("SPLIT_V", (f(2, 7), [i32(2, -1, 3)], [scalar(1)]), {"num_splits": 3}, ("float32",) * 3),
    Op("STRIDED_SLICE", (f(5, 6), [i32(4, 0)], [i32(0, 5)], [i32(-2, 2)]), {"begin_mask": 2}),
    # Ends that count from the first element taken.
    *(
        Op("STRIDED_SLICE", (f(5, 6), begin, [i32(2, 4)], [i32(1, 2)]), {"offset": True, **mask})
        for begin in ([i32(-4, -6)], i32(-2, 1), [i32(1, 2)], [i32(-9, 0)])
        for mask in ({}, {"begin_mask": 1})
    ),
    Op("UNIQUE", (f(4)[[0, 1, 0, 3, 1]],), {"idx_out_type": 2}, ("float32", "int32")),
    Op("GATHER", (f(3, 4), np.array([1, 0, 2], np.int16)), {"axis": 1}),
    Op("REDUCE_MAX", (f(3, 4).astype(np.int8), [i32(1)]), {}, ("int8",), kind="ReducerOptions"),
    Op("REDUCE_MIN", (f(3, 4).astype(np.int16), [i32(1)]), {}, ("int16",), kind="ReducerOptions"),
]


@pytest.mark.parametrize("op", OPS, ids=str)
def test_operator_gives_what_litert_gives(op: Op) -> None:
    check_operator(op)


@pytest.mark.parametrize(
    ("begins", "options"),
    [
        ([scalar(0)], {"sizes": [i32(2, -1, 1)]}),
        ([i32(-2, 0)], {"offset": True}),
        (i32(-2, 0), {"offset": True}),
    ],
    ids=["SPLIT_V", "constant begin", "fed begin"],
)
def test_parts_from_the_end_are_those_of_the_shape_that_is_fed(begins, options) -> None:
    """Of a longer array than the file declares."""

    def op(rows: int) -> Op:
        x = np.arange(6 * rows, dtype=np.float32).reshape(rows, 6)
        if "sizes" in options:
            sizes = options["sizes"]
            return Op("SPLIT_V", (x, sizes, begins), {"num_splits": 3}, ("float32",) * 3)
        return Op("STRIDED_SLICE", (x, begins, [i32(2, 3)], [i32(1, 1)]), options)

    got = ps.compile(op(4).file).run(op(9).feeds)
    want = ps.compile(op(9).file).run(op(9).feeds)
    for a, b in zip(got.values(), want.values(), strict=True):
        assert a.size
        np.testing.assert_array_equal(a, b)
