"""Compiled reductions against NumPy's: sums to the rounding of their dtype."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest

import penstock as ps
from tests.support.native_kernels import (  # noqa: F401
    LIBRARIES,
    check,
    check_within,
    expected,
    kernel_of,
    node_of,
    pytestmark,
)
from tests.support.onnx_text import compile_text

FLOATS = ["L1", "L2", "LogSum", "LogSumExp", "Max", "Mean", "Min", "Prod", "Sum", "SumSquare"]
TOLERANCE = {"float32": {"rtol": 2e-6, "atol": 1e-6}, "float64": {"rtol": 1e-13, "atol": 1e-13}}
SHAPES = [((3, 5), [1]), ((7,), [-1]), ((2, 3, 4), [1, 2]), ((4, 6, 1), [1]), ((200, 1), [1])]
WIDE = [
    ((3, 1100), [1]),
    *[((9, length), [1]) for length in (16, 17, 27, 31, 32, 63, 530)],
    ((2, 70, 9), [1]),
    ((5, 300), [0]),
    ((2, 3, 5, 4), [1, 2]),
    ((90, 17), [1]),
    *[((70, length), [1]) for length in (2, 3, 4, 7)],
    *[((300, columns), [0]) for columns in (2, 3, 100, 200)],
    *[((5, length, 3), [1]) for length in (3, 4, 100, 161)],
    ((1025, 2), [0]),
    ((2, 700, 3), [1]),
]


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("name", FLOATS)
@pytest.mark.parametrize(("dims", "axes"), SHAPES)
@pytest.mark.parametrize("keepdims", [0, 1])
def test_reduction_of_floats_equals_numpy(keepdims, dims, axes, name, dtype):
    x = np.random.default_rng(3).uniform(0.1, 2, dims).astype(dtype)
    inputs = [x, np.array(axes)]
    check(node_of(f"Reduce{name}", inputs, [1], keepdims=keepdims), inputs, TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("name", FLOATS)
@pytest.mark.parametrize(("dims", "axes"), WIDE)
def test_reduction_of_long_axes_equals_numpy(dims, axes, name, dtype):
    x = np.random.default_rng(3).uniform(0.9, 1.1, dims).astype(dtype)
    inputs = [x, np.array(axes)]
    tolerance = {"rtol": 2e-5} if name == "Prod" and dtype == "float32" else TOLERANCE[dtype]
    check(node_of(f"Reduce{name}", inputs, [1], keepdims=0), inputs, tolerance)


@pytest.mark.parametrize("dtype", ["int32", "int64"])
@pytest.mark.parametrize("name", ["Max", "Mean", "Min", "Prod", "Sum"])
@pytest.mark.parametrize(("dims", "axes"), [((5, 9), [1]), *WIDE])
def test_reduction_of_integers_equals_numpy(dims, axes, name, dtype):
    x = np.random.default_rng(4).integers(-(2**30), 2**30, dims).astype(dtype)
    x.flat[0] = np.iinfo(dtype).min
    check(node_of(f"Reduce{name}", [x, np.array(axes)], [1]), [x, np.array(axes)])


@pytest.mark.parametrize("name", ["Max", "Min", "LogSumExp"])
def test_reduction_of_values_that_are_not_finite_equals_numpy(name):
    x = np.array([[1, np.nan], [np.nan, 1], [np.inf, -np.inf], [-np.inf, -np.inf]], np.float32)
    for wide in (x, np.repeat(x, 20, axis=1)):
        inputs = [wide, np.array([1])]
        with np.errstate(all="ignore"):
            check(node_of(f"Reduce{name}", inputs, [1]), inputs, {"rtol": 1e-6})


def test_sum_of_many_float32_elements_is_accurate():
    x = np.full((300_000, 1), 0.1, np.float32)
    for inputs in ([x.reshape(1, -1), np.array([1])], [x.reshape(-1, 3), np.array([0])]):
        wanted = np.sum(inputs[0], axis=int(inputs[1][0]), dtype=np.float64, keepdims=True)
        for library in LIBRARIES:
            kernel = kernel_of(node_of("ReduceSum", inputs, [1]), library)
            np.testing.assert_allclose(kernel.function(*inputs), wanted, rtol=2e-6)


@pytest.mark.parametrize("columns", [1, 2, 3, 5, 17, 64, 65, 128, 129])
@pytest.mark.parametrize("length", [1, 3, 4, 9, 100, 161, 515])
def test_sums_and_logarithms_of_columns_are_within_the_bound_of_their_roundings(length, columns):
    """Of float32, parts of at most 64 elements are summed in float32, and these in float64."""
    x = np.random.default_rng(length).normal(0, 9, (2, length, columns)).astype(np.float32)
    inputs, real, unit = [x, np.array([1])], x.astype(np.float64), 2.0**-24
    parts = min(length, 64)
    for name, terms in (("Sum", real), ("SumSquare", real * real)):
        exact = terms.sum(1)
        bound = unit * (parts * np.abs(terms).sum(1) + np.abs(exact))
        check_within(node_of(f"Reduce{name}", inputs, [1], keepdims=0), inputs, exact, bound * 1.01)
    top = real.max(1, keepdims=True)
    exact = np.log(np.exp(real - top).sum(1)) + top[:, 0]
    # Differences are rounded, as far as they reach, and powers to 2 units of 2 each.
    bound = unit * ((top - real).max(1) + 4 + parts + np.abs(exact)) * 1.01
    check_within(node_of("ReduceLogSumExp", inputs, [1], keepdims=0), inputs, exact, bound)
    wide = [real, inputs[1]]
    exact = np.log(np.exp((real - top).astype(np.longdouble)).sum(1)) + top[:, 0]
    bound *= 2.0**-28  # float64 has 29 digits more, of which one is for the result that is wanted
    check_within(node_of("ReduceLogSumExp", wide, [1], keepdims=0), wide, exact, bound)


@pytest.mark.parametrize("dtype", ["int8", "uint8", "int16"])
@pytest.mark.parametrize("name", ["Max", "Min"])
@pytest.mark.parametrize("length", [1, 15, 16, 31, 100, 600])
def test_extremes_of_codes_equal_numpy(length, name, dtype):
    info = np.iinfo(dtype)
    x = np.random.default_rng(4).integers(info.min, info.max, (9, length), dtype, endpoint=True)
    for axis in (0, 1):
        check(node_of(f"Reduce{name}", [x, np.array([axis])], [1]), [x, np.array([axis])])


@pytest.mark.parametrize(
    "dtype", ["float32", "float64", "int32", "int64", "int8", "uint8", "int16"]
)
@pytest.mark.parametrize("name", ["ArgMax", "ArgMin"])
@pytest.mark.parametrize("last", [0, 1])
def test_place_of_an_extreme_equals_numpy(last, name, dtype):
    x = np.random.default_rng(5).integers(-2, 3, (40, 600)).astype(np.int8).astype(dtype)
    if dtype[0] == "f":
        x[3, 2:4] = x[4, 5] = x[5, 0] = x[6, 400] = np.nan
        x[7] = np.inf if name == "ArgMin" else -np.inf
    for keepdims in (0, 1):
        few = [(0, x.T[:, :4]), (0, x.T[:, 3:8]), (0, x.T[:171, 3:5]), (0, x.T[:5, 5:8])]
        wide = x.reshape(2, 20, 30, 20)
        for axis, part in [(-1, x), (-1, x[:, :6]), (0, x.T), (1, wide), *few]:
            inputs = [np.ascontiguousarray(part)]
            attrs = {"axis": axis, "keepdims": keepdims, "select_last_index": last}
            check(node_of(name, inputs, **attrs), inputs)


@pytest.mark.parametrize("last", [0, 1])
@pytest.mark.parametrize("name", ["ArgMax", "ArgMin"])
def test_place_of_an_extreme_that_is_the_least_number_equals_numpy(name, last):
    """Of columns that are folded, equal elements and NaNs lie in several parts."""
    least, most = np.iinfo(np.int32).min, np.iinfo(np.int32).max
    special = {np.float32: [np.nan, -np.inf, np.inf, -0.0], np.int32: [least, most]}
    special |= {np.uint8: [0, 255], np.int8: [-128, 127]}
    for length, columns in product((1, 7, 65, 300), (1, 2, 3, 17)):
        for dtype, number in [(key, value) for key in special for value in special[key]]:
            x = np.random.default_rng(length).integers(0, 2, (length, columns)).astype(dtype)
            x[length // 3 :, 0] = x[:, -1] = number
            x[::2, columns // 2] = number
            attrs = {"axis": 0, "keepdims": 0, "select_last_index": last}
            check(node_of(name, [x], **attrs), [x])
            check(node_of(name, [x], domain="tflite", version=1, **attrs), [x])


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("name", ["ArgMax", "ArgMin"])
@pytest.mark.parametrize("last", [0, 1])
def test_place_of_an_extreme_skips_nan_if_asked_to(last, name, dtype):
    rng, info = np.random.default_rng(8), np.finfo(dtype)
    x = rng.integers(-20, 20, (40, 600)).astype(dtype)
    x[rng.random(x.shape) < 0.2] = np.nan
    x[3] = np.nan
    x[4, 1:] = x[5:7] = -np.inf if name == "ArgMax" else np.inf
    x[6, 9] = x[7, ::3] = info.min if name == "ArgMax" else info.max
    x[8] = rng.integers(0, 9, 600)
    few = [(0, x.T[:, :4]), (0, x.T[:, 3:8]), (0, x.T[:171, 3:5]), (0, x.T[:5, 5:8])]
    for axis, part in [(-1, x), (-1, x[:, :6]), (0, x.T), (1, x.reshape(2, 20, 30, 20)), *few]:
        inputs = [np.ascontiguousarray(part)]
        attrs = {"axis": axis, "keepdims": 0, "select_last_index": last, "skip_nan": 1}
        check(node_of(name, inputs, **attrs), inputs)


@pytest.mark.parametrize(
    ("name", "dims", "axes"), [("Sum", (3, 5, 2), [0, 2]), ("Sum", (3, 0), [1])]
)
def test_reduction_of_axes_apart_or_without_elements_has_no_compiled_kernel(name, dims, axes):
    inputs = [np.zeros(dims, np.float32), np.array(axes)]
    assert kernel_of(node_of(f"Reduce{name}", inputs, [1]), LIBRARIES[0]) is None


@pytest.mark.parametrize("name", ["L1", "L2", "LogSum", "LogSumExp", "SumSquare"])
def test_rare_reduction_of_integers_has_no_compiled_kernel(name):
    inputs = [np.ones((3, 5), np.int64), np.array([1])]
    assert kernel_of(node_of(f"Reduce{name}", inputs, [1]), LIBRARIES[0]) is None


def test_mean_of_channels_last_images_reads_them_where_they_are():
    x = np.random.default_rng(6).uniform(size=(2, 5, 7, 40)).astype(np.float32)
    inputs = [np.moveaxis(x, 3, 1), np.array([2, 3])]
    kernel = kernel_of(node_of("ReduceMean", inputs, [1], keepdims=0), LIBRARIES[0])
    y = np.empty((2, 40), np.float32)
    function, arguments = kernel.bind(inputs, [y], None)
    assert not arguments
    function()
    np.testing.assert_allclose(y, x.mean((1, 2)), rtol=2e-6)


def test_reduction_of_short_rows_is_placed_on_compiled_kernels():
    session = compile_text(
        "g (float[200, 5] x) => (float[200, 1] y) <int64[1] axes = {1}> { y = ReduceSum(x, axes) }",
        executor="linear",
    )
    profile = ps.Profile()
    y = session.run({"x": np.ones((200, 5), np.float32)}, observers=[profile])["y"]
    assert y.tolist() == [[5.0]] * 200
    assert [backend for _, backend in profile.entries] == ["native"]


@pytest.mark.costly
@pytest.mark.parametrize("axes", [[0], [1], [1, 2], [0, 1, 2]])
@pytest.mark.parametrize("dtype", ["int8", "int16"])
def test_product_of_codes_equals_numpy(dtype, axes):
    ends = np.iinfo(dtype)
    for dims in ((2, 9, 5), (70, 3, 300), (1, 40, 33)):
        x = np.random.default_rng(0).integers(ends.min, ends.max + 1, dims).astype(dtype)
        zeros = [-5, 3] if dtype == "int8" else [0, 0]
        for scales in ([0.02, 0.03], [0.9, 0.01], [1.0, 1e-6]):
            attrs = {"axes": axes, "keepdims": 0, "scales": scales, "zero_points": zeros}
            node = node_of("IntegerProduct", [x], domain="tflite", version=1, **attrs)
            check(node, [x])


@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("length", [1, 15, 127, 128, 129, 1000])
@pytest.mark.parametrize(("dtype", "code"), [("uint8", 255), ("int8", -128), ("int8", 127)])
def test_means_of_codes_at_the_ends_do_not_overflow(dtype, code, length, axis):
    x = np.full((length, 40) if axis == 0 else (40, length), code, dtype)
    attrs = {"axes": [axis], "keepdims": 0, "scales": [1.0, 1.0], "form": "fixed point"}
    node = node_of("IntegerMean", [x], domain="tflite", version=1, zero_points=[0, 0], **attrs)
    check(node, [x])
    assert (expected(node, [x])[0] == code).all()
