"""Parts of arrays that are replaced, joined or counted: beside LiteRT."""

from __future__ import annotations

import numpy as np
import pytest

from tests.support.litert import Op, check_operator, f, i32, scalar

COMPLEX = (f(3, 4) + 1j * f(3, 4)).astype(np.complex64)

OPS = [
    Op("BUCKETIZE", (f(3, 4),), {"boundaries": [-0.5, 0.0, 1.0]}, outputs=("int32",)),
    Op("BUCKETIZE", (i32(-2, -1, 0, 1, 2),), {"boundaries": [-0.5, 0.25, 1.5]}, outputs=("int32",)),
    Op("DYNAMIC_UPDATE_SLICE", (f(4, 5), f(2, 3), i32(3, 1))),
    Op("SEGMENT_SUM", (f(5, 2), i32(0, 0, 1, 2, 2))),
    Op("SPARSE_TO_DENSE", (i32([0, 1], [2, 0]), i32(3, 2), f(2), f(1).reshape(()))),
    *(
        Op(f"UNSORTED_SEGMENT_{name}", (f(4, 2), i32(2, 0, -1, 2), [scalar(4)]))
        for name in ("MAX", "MIN", "PROD", "SUM")
    ),
    *(
        Op("RFFT2D", (f(2, *dims), i32(*sizes)), outputs=("complex64",))
        for dims, sizes in (
            ((1, 16), (1, 16)),
            ((1, 12), (1, 16)),
            ((4, 8), (4, 8)),
            ((8, 16), (4, 8)),
            ((3, 5), (8, 32)),
            ((3, 5), (1, 2)),
        )
    ),
    Op("MUL", (COMPLEX, COMPLEX), outputs=("complex64",)),
    Op("BITCAST", (f(3, 4),), outputs=("uint8",)),
    Op("BITCAST", (i32([1, 2], [3, 4]).astype(np.int16),), outputs=("int32",)),
]


@pytest.mark.parametrize("op", OPS, ids=str)
def test_operator_gives_what_litert_gives(op: Op) -> None:
    check_operator(op)
