"""Rules of operations on images: convolution, pooling, resizing: beside LiteRT."""

from __future__ import annotations

import numpy as np
import pytest

import penstock as ps
from tests.support.litert import IMAGE, WINDOW, Op, check_operator, f, i32
from tests.support.tflite_models import model, subgraph

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


SIZES = [[1, 5, 9, 8], [1, 4, 11, 8], [1, 2, 9, 8], [2, 4, 9, 8], [1, 4, 9, 7], [0, 0, 0, 0]]


def transposed(size: list[int] | None) -> bytes:
    """A TRANSPOSE_CONV of an image of 2 by 5, whose output shape is a constant or fed."""
    options = ("TransposeConvOptions", {"padding": 0, "stride_w": 2, "stride_h": 2})
    fed = {"s": ("int32", (4,))} if size is None else {}
    constants = {"w": np.ones((8, 3, 3, 3), np.float32)}
    constants |= {} if size is None else {"s": np.array(size, np.int32)}
    inputs = {**fed, "x": ("float32", (1, 2, 5, 3))}
    return model(
        [subgraph(inputs, [("TRANSPOSE_CONV", ["s", "w", "x"], ["y"], options)], ["y"], constants)]
    )


@pytest.mark.parametrize("size", SIZES, ids=str)
def test_output_shape_that_does_not_fit_is_refused(size: list[int]) -> None:
    with pytest.raises(ps.InvalidModel, match="TRANSPOSE_CONV_0"):
        ps.compile(transposed(size)).run({"x": np.ones((1, 2, 5, 3), np.float32)})
    feeds = {"s": np.array(size, np.int32), "x": np.ones((1, 2, 5, 3), np.float32)}
    with pytest.raises(ps.PenstockError, match="TRANSPOSE_CONV_0"):
        ps.compile(transposed(None)).run(feeds)


@pytest.mark.parametrize("size", [[1, 4, 9, 8], [1, 3, 10, 8]], ids=str)
def test_output_shape_that_is_fed_says_which_of_two_sizes_it_is(size: list[int]) -> None:
    x = np.ones((1, 2, 5, 3), np.float32)
    y = ps.compile(transposed(None)).run({"s": np.array(size, np.int32), "x": x})["y"]
    assert list(y.shape) == size
    np.testing.assert_array_equal(y, ps.compile(transposed(size)).run({"x": x})["y"])
