"""Compiled poolings against NumPy's: maxima bit by bit, sums to the rounding of their dtype."""

from __future__ import annotations

import numpy as np
import pytest

from tests.support.native_kernels import (  # noqa: F401
    LIBRARIES,
    check,
    check_threads,
    check_within,
    expected,
    kernel_of,
    node_of,
    pytestmark,
)

CASES = [
    ((7,), (3,), {"pads": [2, 1], "strides": [2]}),
    ((1100,), (4,), {"strides": [2], "pads": [1, 2]}),
    ((6, 9), (2, 3), {}),
    ((6, 9), (3, 2), {"pads": [1, 0, 2, 1], "dilations": [2, 3]}),
    ((5, 8), (3, 3), {"pads": [1, 1, 1, 1], "strides": [2, 3]}),
    ((9, 20), (5, 5), {"auto_pad": "SAME_UPPER", "strides": [1, 2]}),
    ((3, 4, 5), (2, 2, 3), {"strides": [1, 2, 1]}),
]
TOLERANCE = {"float32": {"rtol": 2e-6, "atol": 1e-6}, "float64": {"rtol": 1e-13, "atol": 1e-13}}


def draw(dims, dtype):
    return np.round(np.random.default_rng(4).normal(size=dims), 1).astype(dtype)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("ceil", [0, 1])
@pytest.mark.parametrize(("sizes", "kernel", "attrs"), CASES)
@pytest.mark.parametrize("order", [None, 0, 1])
def test_max_pool_equals_numpy(order, sizes, kernel, attrs, ceil, dtype):
    x = draw((2, 3, *sizes), dtype)
    x.flat[5], x.flat[20:30] = np.nan, -np.inf
    more = {"kernel_shape": list(kernel), "ceil_mode": ceil, "storage_order": order or 0}
    check(node_of("MaxPool", [x], outputs=1 if order is None else 2, **attrs, **more), [x])


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("ceil", [0, 1])
@pytest.mark.parametrize("padding", [0, 1])
@pytest.mark.parametrize(("sizes", "kernel", "attrs"), CASES)
def test_average_pool_equals_numpy(sizes, kernel, attrs, padding, ceil, dtype):
    x = draw((2, 3, *sizes), dtype)
    more = {"kernel_shape": list(kernel), "ceil_mode": ceil, "count_include_pad": padding}
    check(node_of("AveragePool", [x], **attrs, **more), [x], TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("p", [1, 2])
@pytest.mark.parametrize(("sizes", "kernel", "attrs"), CASES)
def test_lp_pool_equals_numpy(sizes, kernel, attrs, p, dtype):
    x = draw((2, 3, *sizes), dtype)
    node = node_of("LpPool", [x], kernel_shape=list(kernel), p=p, **attrs)
    check(node, [x], TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("name", ["GlobalAveragePool", "GlobalLpPool", "GlobalMaxPool"])
@pytest.mark.parametrize("dims", [(2, 5, 7), (1, 3, 40, 30), (2, 2, 3, 4, 5)])
def test_global_pool_equals_numpy(dims, name, dtype):
    x = draw(dims, dtype)
    check(node_of(name, [x]), [x], TOLERANCE[dtype])


@pytest.mark.parametrize("name", ["AveragePool", "MaxPool"])
@pytest.mark.parametrize("height, strides", [(9, (3200, 4, 800, 160)), (2, (800, 4, 4, 160))])
def test_pool_of_channels_last_images_reads_and_writes_them_where_they_are(height, strides, name):
    """Strides along a dim of 1 mean nothing."""
    x = np.moveaxis(draw((2, height, 11, 40), np.float32), 3, 1)
    node = node_of(name, [x], kernel_shape=[3, 3], strides=[2, 2], pads=[1, 1, 0, 0])
    rows = height // 2
    memory = np.empty(2 * rows * 5 * 40, np.float32)
    y = np.lib.stride_tricks.as_strided(memory, (2, 40, rows, 5), strides)
    kernel = kernel_of(node, LIBRARIES[0])
    function, arguments = kernel.bind([x], [y], None)
    assert not arguments
    function()
    wanted = node.op.compile(node, [node.inputs[0].type]).function(x)
    np.testing.assert_allclose(y, wanted, rtol=2e-6, atol=1e-6)


@pytest.mark.parametrize("name", ["AveragePool", "LpPool", "MaxPool"])
def test_pool_with_one_window_of_all_elements_equals_numpy_and_is_a_reduction(name):
    x = draw((2, 3, 9, 11), np.float32)
    node = node_of(name, [x], kernel_shape=[9, 11])
    check(node, [x], TOLERANCE["float32"])
    kernel = kernel_of(node, LIBRARIES[0])
    assert "pool" not in kernel.binder.implementation


def test_pool_of_another_power_has_no_compiled_kernel():
    x = draw((1, 1, 10, 10, 10), np.float32)
    node = node_of("LpPool", [x], kernel_shape=[2, 2, 2], p=3)
    assert kernel_of(node, LIBRARIES[0]) is None


@pytest.mark.parametrize("attrs", [{"strides": [2**63 - 1]}, {"dilations": [2**62]}])
def test_pooling_beyond_32_bits_has_no_kernel(attrs):
    x = draw((2, 3, 7), "float64")
    pads = [2**62, 2**62] if "dilations" in attrs else [2, 1]
    node = node_of("MaxPool", [x], outputs=2, kernel_shape=[3], pads=pads, **attrs)
    assert all(kernel_of(node, library) is None for library in LIBRARIES)
    assert expected(node, [x])[0].shape == node.outputs[0].type.dims


@pytest.mark.parametrize("dtype", ["int8", "uint8"])
@pytest.mark.parametrize("outputs", [1, 2])
@pytest.mark.parametrize(("sizes", "kernel", "attrs"), CASES)
def test_max_pool_of_bytes_equals_numpy(sizes, kernel, attrs, outputs, dtype):
    bounds = np.iinfo(dtype)
    x = np.random.default_rng(4).integers(
        bounds.min, bounds.max, (2, 70, *sizes), dtype, endpoint=True
    )
    check(node_of("MaxPool", [x], outputs=outputs, kernel_shape=list(kernel), **attrs), [x])


# Planes that items bring side by side, in parts of rows or columns; rows with their phases apart; and
# images whose rows of columns do not fit into a buffer.
LARGE = [
    ((1, 37, 14, 14), [3, 3], {"pads": [1, 1, 1, 1]}),
    ((1, 20, 55, 61), [3, 3], {"strides": [2, 2]}),
    ((1, 150, 9, 11), [3, 3], {"pads": [1, 1, 1, 1]}),
    ((1, 139, 10, 12), [3, 3], {"strides": [2, 2], "pads": [1, 1, 0, 0]}),
    ((1, 80, 4, 6, 7), [1, 3, 3], {"strides": [2, 1, 1], "pads": [0, 0, 1, 0, 1, 1]}),
    ((1, 9, 2, 70), [1, 5], {"strides": [1, 3], "dilations": [1, 2], "pads": [0, 4, 0, 4]}),
    ((1, 2, 40, 90), [4, 2], {"strides": [2, 2], "pads": [1, 0, 2, 1]}),
    ((1, 3, 5, 200), [2, 3], {"strides": [3, 2], "dilations": [2, 3], "pads": [0, 3, 1, 3]}),
    ((1, 2, 700), [129], {"strides": [7]}),
    ((1, 2, 3, 150), [2, 3], {"strides": [1, 2], "dilations": [4, 1], "pads": [1, 1, 1, 1]}),
    ((1, 32, 64, 64), [3, 3], {"strides": [2, 2], "pads": [1, 1, 1, 1]}),
    ((1, 16, 6, 20, 24), [3, 2, 2], {"strides": [2, 1, 2], "pads": [1, 0, 1, 1, 1, 0]}),
    ((1, 900, 6, 9), [2, 3], {"strides": [1, 2]}),
    ((1, 10, 60, 63), [25, 31], {"pads": [12, 15, 12, 15]}),
    ((1, 1, 3, 6200), [3, 300], {"strides": [1, 250]}),
]


@pytest.mark.parametrize(("dims", "kernel", "attrs"), LARGE)
def test_pool_of_any_part_of_an_image_equals_numpy(dims, kernel, attrs):
    x = draw(dims, np.float32)
    x.flat[7] = np.nan
    check(node_of("MaxPool", [x], kernel_shape=kernel, **attrs), [x])


def exact_average(x, kernel, attrs):
    """The mean and the mean of sizes, of windows without their padding, in float64."""
    wide = x.astype(np.float64)
    means = []
    for each in (wide, np.abs(wide)):
        node = node_of("AveragePool", [each], kernel_shape=kernel, **attrs)
        means.append(expected(node, [each])[0])
    return means


@pytest.mark.parametrize("padding", [0, 1])
@pytest.mark.parametrize(("dims", "kernel", "attrs"), LARGE)
def test_average_pool_is_within_the_bound_of_the_exact_mean(dims, kernel, attrs, padding):
    x = np.random.default_rng(3).normal(size=dims).astype(np.float32)
    attrs = {**attrs, "count_include_pad": padding}
    exact, size = exact_average(x, kernel, attrs)
    # A sum of n terms has n - 1 roundings of at most half an epsilon of the sum of sizes, and the
    # quotient one more; the float64 reference has as many of its own.
    bound = np.prod(kernel) * np.finfo(np.float32).eps / 2 * size + 1e-12
    check_within(node_of("AveragePool", [x], kernel_shape=kernel, **attrs), [x], exact, bound)


@pytest.mark.parametrize("name", ["AveragePool", "MaxPool"])
@pytest.mark.parametrize(("dims", "kernel", "attrs"), LARGE[:4])
def test_pool_by_several_threads_is_the_same(dims, kernel, attrs, name):
    x = draw((4, *dims[1:]), np.float32)
    check_threads(node_of(name, [x], kernel_shape=kernel, **attrs), [x])
