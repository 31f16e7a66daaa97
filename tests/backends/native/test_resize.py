"""Compiled Resize against NumPy's: copies exactly, sums within the rounding of a few additions."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from tests.support.native_kernels import LIBRARIES, check, expected, kernel_of, node_of, pytestmark  # noqa: F401
from tests.support.sweeps import drawn

COORDINATES = (
    "half_pixel",
    "half_pixel_symmetric",
    "pytorch_half_pixel",
    "align_corners",
    "asymmetric",
)
DIMS = [(2, 3, 5, 7), (1, 5, 9), (1, 2, 3, 4, 5), (2, 70, 6, 5)]
SIZES = [(10, 14, 9), (3, 4, 2), (5, 20, 7), (1, 600, 3), (7, 5, 4)]


def resize(x, sizes, **attrs):
    """A Resize of the axes behind the channels."""
    dims = np.array([*x.shape[:2], *sizes[: x.ndim - 2]])
    inputs = [x, None, None, dims]
    return node_of("Resize", inputs, [3], **attrs), inputs


def image(dims, dtype):
    x = np.random.default_rng(5).normal(size=dims) * 50
    # Processors differ in what negative numbers are as unsigned integers, but not in how these wrap.
    return (x.astype(np.int64) if np.dtype(dtype).kind == "u" else x).astype(dtype)


NEAREST = itertools.product(
    DIMS,
    SIZES,
    COORDINATES,
    ["round_prefer_floor", "ceil"],
    ["float32", "float16", "uint8", "int64"],
)
INTERPOLATED = itertools.product(
    DIMS, SIZES, COORDINATES, ["linear", "cubic"], [0, 1], ["float32", "float64"]
)


@pytest.mark.parametrize(
    ("dims", "sizes", "coordinates", "rounding", "dtype"), drawn(NEAREST, 160), ids=str
)
def test_resize_nearest_equals_numpy(dims, sizes, coordinates, rounding, dtype):
    attrs = {"coordinate_transformation_mode": coordinates, "nearest_mode": rounding}
    check(*resize(image(dims, dtype), sizes, mode="nearest", **attrs))


@pytest.mark.parametrize(
    ("dims", "sizes", "coordinates", "mode", "antialias", "dtype"),
    drawn(INTERPOLATED, 160),
    ids=str,
)
def test_resize_by_interpolation_is_close_to_numpy(
    dims, sizes, coordinates, mode, antialias, dtype
):
    x = image(dims, dtype)
    attrs = {"coordinate_transformation_mode": coordinates, "antialias": antialias}
    tolerance = {"rtol": 0, "atol": 200 * 8 * float(np.finfo(dtype).eps)}
    check(*resize(x, sizes, mode=mode, **attrs), tolerance)


EXACT = {
    "linear": ["uint8", "int8", "uint16", "int16", "int32"],
    "cubic": ["uint8", "int8", "int32"],
}
"""where float32, or float64 for int32, holds all products"""


@pytest.mark.parametrize(
    ("mode", "dtype"), [(mode, dtype) for mode, dtypes in EXACT.items() for dtype in dtypes]
)
@pytest.mark.parametrize("dims", DIMS)
def test_resize_of_integers_rounds_and_saturates_as_numpy_does(dims, mode, dtype):
    ends = np.iinfo(dtype)
    x = np.random.default_rng(5).integers(ends.min, ends.max, dims, dtype, endpoint=True)
    sizes = [2 * size for size in dims[2:]]  # weights are sums of few powers of two
    check(*resize(x, sizes, mode=mode))


def test_resize_of_rows_that_are_far_wider_than_their_results_is_close_to_numpy():
    x = image((1, 2, 3, 20_000), "float32")
    tolerance = {"rtol": 0, "atol": 1e-4}
    check(*resize(x, (2, 50), mode="linear", antialias=1), tolerance)


@pytest.mark.parametrize("axes", [(0,), (1,), (3,), (1, 2), (0, 3)])
@pytest.mark.parametrize("mode", ["nearest", "linear"])
def test_resize_of_any_axes_is_close_to_numpy(mode, axes):
    inputs = [image((3, 4, 5, 6), "float32"), None, np.full(len(axes), 1.5, np.float32)]
    node = node_of("Resize", inputs, [2], mode=mode, axes=axes)
    check(node, inputs, {"rtol": 0, "atol": 1e-4})


@pytest.mark.parametrize("dtype", ["float32", "uint8"])
@pytest.mark.parametrize("mode", ["linear", "cubic"])
@pytest.mark.parametrize("scale", [2, 0.25])
def test_resize_of_elements_of_many_numbers_equals_numpy(scale, mode, dtype):
    inputs = [image((2, 40, 1300), dtype), None, np.array([scale], np.float32)]
    node = node_of("Resize", inputs, [2], mode=mode, axes=(1,), antialias=int(scale < 1))
    check(node, inputs, {"rtol": 0, "atol": 1e-4 if dtype == "float32" else 1})


@pytest.mark.parametrize("size", [1, 7, 16, 33, 70])
@pytest.mark.parametrize("scale", [0.3, 0.5, 0.75, 1.3, 2, 3])
@pytest.mark.parametrize(("mode", "antialias"), [("linear", 0), ("linear", 1), ("cubic", 0)])
def test_resize_of_rows_of_some_vectors_equals_numpy(mode, antialias, scale, size):
    for dims in ((2, size), (2, 3, size), (1, 2, 3, size)):  # of one axis, two or three
        axes = tuple(range(len(dims)))[1:] if len(dims) < 4 else (1, 2, 3)
        inputs = [image(dims, "float32"), None, np.full(len(axes), scale, np.float32)]
        if min(int(dims[axis] * scale) for axis in axes):
            node = node_of("Resize", inputs, [2], mode=mode, axes=axes, antialias=antialias)
            check(node, inputs, {"rtol": 0, "atol": 2e-4})


def test_resize_of_codes_reads_images_backwards():
    x = np.random.default_rng(5).integers(-128, 128, (1, 1, 3, 1)).astype(np.int8)[:, :, ::-1]
    inputs = [x, None, None, np.array([1, 1, 6, 2])]
    attrs = {"mode": "linear", "coordinate_transformation_mode": "asymmetric"}
    node = node_of("IntegerResize", inputs, [3], 1, "tflite", 1, fraction_bits=10, **attrs)
    (wanted,) = expected(node, inputs)
    for library in LIBRARIES:
        y = np.empty_like(wanted)
        function, arguments = kernel_of(node, library).bind(inputs, [y], None)
        assert not arguments
        function()
        np.testing.assert_array_equal(y, wanted)


def test_resize_with_positions_outside_of_the_input_has_no_compiled_kernel():
    roi = np.array([0, 0, -1, 0, 1, 1, 1, 2], np.float32)
    inputs = [image((1, 1, 4, 4), "float32"), roi, None, np.array([1, 1, 5, 5])]
    crop = "tf_crop_and_resize"
    node = node_of("Resize", inputs, [1, 3], mode="linear", coordinate_transformation_mode=crop)
    assert kernel_of(node, LIBRARIES[0]) is None


@pytest.mark.parametrize("dtype", ["float32", "float16", "uint8", "int64"])
@pytest.mark.parametrize("mode", ["edge", "reflect", "wrap"])
@pytest.mark.parametrize("pads", [(0, 0, 2, 3, 0, 0, 1, 2), (1, 0, -1, 0, 0, 2, 2, 0)])
def test_pad_with_copies_equals_numpy(pads, mode, dtype):
    inputs = [image((2, 3, 5, 7), dtype), np.array(pads)]
    check(node_of("Pad", inputs, [1], mode=mode), inputs)
    inputs = [image((4, 3, 40), dtype), np.array([5, 1, 4, 0]), None, np.array([-1, 0])]
    check(node_of("Pad", inputs, [1, 3], mode=mode), inputs)


PADS = [(0, 0, 2, 3, 0, 0, 1, 2), (0, 2, 0, 0, 1, 3, 0, 0), (0, 0, 0, 0, 0, 4, 0, 0)]


@pytest.mark.parametrize("dtype", ["float32", "float16", "uint8", "int64"])
@pytest.mark.parametrize("pads", PADS)
def test_pad_with_a_constant_equals_numpy(pads, dtype):
    inputs = [image((2, 3, 5, 7), dtype), np.array(pads)]
    check(node_of("Pad", inputs, [1]), inputs)
    inputs = [
        image((4, 3, 40), dtype),
        np.array([5, 1, 4, 0]),
        np.array(3, dtype),
        np.array([-1, 0]),
    ]
    check(node_of("Pad", inputs, [1, 2, 3]), inputs)


@pytest.mark.parametrize("pads", PADS)
def test_pad_of_channels_last_images_reads_and_writes_them_where_they_are(pads):
    x = np.moveaxis(image((2, 5, 7, 3), "float32"), 3, 1)
    node = node_of("Pad", [x, np.array(pads)], [1])
    wanted = node.op.compile(node, [x.type for x in node.inputs]).function(x, np.array(pads))
    n, c, h, w = wanted.shape
    y = np.moveaxis(np.empty((n, h, w, c), np.float32), 3, 1)
    function, arguments = kernel_of(node, LIBRARIES[0]).bind([x, node.inputs[1].const], [y], None)
    assert not arguments
    function()
    np.testing.assert_array_equal(y, wanted)


@pytest.mark.parametrize("seed", range(40))
def test_pad_that_cuts_off_equals_numpy(seed):
    rng = np.random.default_rng(seed)
    dims = rng.integers(1, 7, rng.integers(1, 5))
    low = rng.integers(-9, 6, dims.size)
    high = rng.integers(-5, 6, dims.size)
    high += np.maximum(1 - dims - low - high, 0)  # so that some elements are left
    inputs = [image(dims, rng.choice(["float32", "int8", "int64"])), np.array([*low, *high])]
    check(node_of("Pad", inputs, [1]), inputs)


def test_pad_that_only_shifts_equals_numpy():
    for dims, pads in [((1,), (1, -1)), ((4, 1), (0, -1, 0, 1)), ((2, 3), (1, 0, -1, 0))]:
        inputs = [image(dims, "float32"), np.array(pads)]
        check(node_of("Pad", inputs, [1]), inputs)
