"""Rules of operations on images: convolution, pooling, resizing: beside LiteRT."""

from __future__ import annotations

import pytest

from tests.support.litert import IMAGE, WINDOW, Op, check_operator, f, i32

OPS = [
    Op("AVERAGE_POOL_2D", (IMAGE,), WINDOW, kind="Pool2DOptions"),
    Op(
        "CONV_3D",
        (f(1, 4, 5, 5, 2), [f(2, 3, 3, 2, 3)], [f(3)]),
        {"padding": 1, "stride_d": 1, "stride_w": 2, "stride_h": 1},
        kind="Conv3DOptions",
    ),
    Op(
        "CONV_3D_TRANSPOSE",
        ([i32(1, 6, 7, 7, 3)], [f(3, 3, 3, 3, 2)], f(1, 3, 4, 4, 2)),
        {"padding": 0, "stride_d": 2, "stride_w": 2, "stride_h": 2},
        kind="Conv3DOptions",
    ),
    Op("L2_POOL_2D", (IMAGE,), WINDOW, kind="Pool2DOptions"),
    Op(
        "LOCAL_RESPONSE_NORMALIZATION",
        (IMAGE,),
        {"radius": 2, "bias": 1.0, "alpha": 0.5, "beta": 0.75},
    ),
    Op("MAX_POOL_2D", (IMAGE,), {**WINDOW, "fused_activation_function": 1}, kind="Pool2DOptions"),
    Op("RESIZE_BILINEAR", (IMAGE, [i32(5, 9)]), {"half_pixel_centers": True}),
    Op("RESIZE_NEAREST_NEIGHBOR", (IMAGE, [i32(5, 9)]), {"align_corners": True}),
    Op(
        "TRANSPOSE_CONV",
        (i32(1, 8, 7, 3), [f(3, 3, 2, 4)], f(1, 4, 4, 4), [f(3)]),
        {"padding": 0, "stride_w": 2, "stride_h": 2, "fused_activation_function": 1},
        version=4,
    ),
]


@pytest.mark.parametrize("op", OPS, ids=str)
def test_operator_gives_what_litert_gives(op: Op) -> None:
    check_operator(op)
