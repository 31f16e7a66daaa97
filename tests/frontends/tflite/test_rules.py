"""Rules of arithmetic, element by element and of matrices, and of element types: beside LiteRT."""

from __future__ import annotations

import numpy as np
import pytest

from tests.support.litert import Op, check_operator, f, i32

COMPLEX = (f(3, 4) + 1j * f(3, 4)).astype(np.complex64)

OPS = [
    *(Op("ADD", (f(2, 3), f(3)), {"fused_activation_function": n}) for n in range(5) if n != 4),
    Op("ATAN2", (f(5), f(5))),
    Op("BITWISE_XOR", (i32(1, 2, 7), i32(3, 3, 3)), outputs=("int32",)),
    Op("BROADCAST_ARGS", (i32(2, 1), i32(3, 1, 4)), outputs=("int32",)),
    Op("FLOOR_DIV", (i32(7, -7, 7), i32(2, 2, -2)), outputs=("int32",)),
    Op("FLOOR_MOD", (i32(7, -7, 7), i32(2, 2, -2)), outputs=("int32",)),
    Op("FULLY_CONNECTED", (f(2, 3, 4), [f(5, 4)], None), {"keep_num_dims": True}, version=5),
    Op("FULLY_CONNECTED", (f(2, 3, 4), [f(5, 4)], [f(5)]), {"fused_activation_function": 3}),
    Op("FULLY_CONNECTED", (f(2, 6), [f(5, 4)], [f(5)])),
    Op("MATRIX_DIAG", (f(2, 3),)),
    Op("RELU_0_TO_1", (f(9),)),
    Op("RIGHT_SHIFT", (i32(16, -16), i32(2, 2)), outputs=("int32",)),
    Op("SIGN", (f(5),)),
    *(Op("CAST", (300 * f(3, 4),), outputs=(t,)) for t in ("uint8", "int8", "uint16", "complex64")),
    *(Op("CAST", (COMPLEX,), outputs=(t,)) for t in ("float32", "int32", "complex64")),
    Op("BITCAST", (f(3, 4),), outputs=("int32",)),
]


@pytest.mark.parametrize("op", OPS, ids=str)
def test_operator_gives_what_litert_gives(op: Op) -> None:
    check_operator(op)
