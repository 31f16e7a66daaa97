"""Compiled normalizations by instance, group and layer against NumPy's."""

from __future__ import annotations

import numpy as np
import pytest

from penstock.core.types import TensorType
from penstock.ir.graph import Node, Value
from penstock.ops.internal.fused import fused
from penstock.ops.registry import standard
from tests.support.native_kernels import (  # noqa: F401
    LIBRARIES,
    check,
    check_threads,
    check_within,
    kernel_of,
    node_of,
    pytestmark,
)


def arguments(dims, dtype="float32"):
    rng = np.random.default_rng(4)
    x = rng.normal(3, 2, dims)
    return [x.astype(dtype), *rng.normal(size=(2, dims[1])).astype(dtype)]


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize(
    "dims", [(2, 3, 5, 7), (1, 5, 9), (3, 4, 1, 1), (1, 150, 13), (2, 8, 3, 4, 6), (2, 4, 70, 70)]
)
def test_instance_normalization_is_close_to_numpy(dims, dtype):
    inputs = arguments(dims, dtype)
    tolerance = {"rtol": 0, "atol": 40 * float(np.finfo(dtype).eps)}
    check(node_of("InstanceNormalization", inputs), inputs, tolerance)


@pytest.mark.parametrize("groups", [1, 2, 8])
@pytest.mark.parametrize("dims", [(2, 8, 5, 7), (1, 16, 9), (2, 8), (1, 400, 3, 3)])
def test_group_normalization_is_close_to_numpy(dims, groups):
    inputs = arguments(dims)
    node = node_of("GroupNormalization", inputs, num_groups=groups, epsilon=1e-3)
    check(node, inputs, {"rtol": 0, "atol": 1e-5})


def test_instance_normalization_far_from_zero_is_close_to_the_exact_result():
    rng = np.random.default_rng(2)
    x = (rng.normal(size=(1, 2, 100, 100)) + 3000).astype(np.float32)
    inputs = [x, np.ones(2, np.float32), np.zeros(2, np.float32)]
    node = node_of("InstanceNormalization", inputs)
    wide = x.astype(np.float64)
    exact = (wide - wide.mean((2, 3), keepdims=True)) / np.sqrt(
        wide.var((2, 3), keepdims=True) + 1e-5
    )
    for library in LIBRARIES:
        kernel = kernel_of(node, library)
        assert kernel is not None
        assert np.abs(kernel(*inputs) - exact).max() < 3e-4


ROWS = [((2, 3, 48), -1), ((5, 7), 1), ((2, 3, 4, 5), 2), ((3, 2, 1), 0), ((1, 3000), -1)]


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize(("dims", "axis"), ROWS)
@pytest.mark.parametrize(
    ("name", "bias"),
    [
        ("LayerNormalization", True),
        ("LayerNormalization", False),
        ("RMSNormalization", False),
        ("SimplifiedLayerNormalization", False),
    ],
)
def test_layer_normalization_is_close_to_numpy(name, bias, dims, axis, dtype):
    rng = np.random.default_rng(4)
    tail = dims[axis:]
    inputs = [rng.normal(3, 2, dims), rng.normal(size=tail), *([rng.normal(size=tail)] * bias)]
    inputs = [x.astype(dtype) for x in inputs]
    tolerance = {"rtol": 0, "atol": 100 * float(np.finfo(dtype).eps)}
    check(node_of(name, inputs, axis=axis, epsilon=1e-3), inputs, tolerance)


@pytest.mark.parametrize("outputs", [2, 3])
def test_layer_normalization_saves_means_and_inverse_deviations(outputs):
    inputs = [arguments((4, 9))[0], *np.random.default_rng(1).normal(size=(2, 9))]
    inputs = [x.astype(np.float32) for x in inputs]
    node = node_of("LayerNormalization", inputs, outputs=outputs)
    check(node, inputs, {"rtol": 0, "atol": 1e-5})


def test_layer_normalization_of_constants_that_are_broadcast_is_close_to_numpy():
    inputs = [arguments((2, 3, 4, 5))[0], np.float32([[2.0]]), np.ones((4, 1), np.float32)]
    node = node_of("LayerNormalization", inputs, [1, 2], axis=2)
    check(node, inputs, {"rtol": 0, "atol": 1e-5})


IMAGES = [(2, 3, 5, 7), (1, 16, 9), (3, 33), (1, 5, 1, 1), (2, 8, 3, 4, 6), (1, 1100, 2, 3)]


def batch(dims, dtype):
    """Inputs of a BatchNormalization."""
    rng, channels = np.random.default_rng(6), dims[1]
    scale, bias, mean = rng.normal(size=(3, channels))
    x = rng.normal(2, 3, dims)
    return [a.astype(dtype) for a in (x, scale, bias, mean, rng.uniform(0.1, 4, channels))]


def exact_batch(inputs, epsilon):
    """The result in float64, and the sizes of its two terms, of which an error is a part: each is
    rounded once when it is computed for a channel, and once more as a product or sum, as is the
    result: three halves of the dtype's epsilon in all."""
    x, *rest = (a.astype(np.float64) for a in inputs)
    scale, bias, mean, variance = (a.reshape(-1, *[1] * (x.ndim - 2)) for a in rest)
    factor = scale / np.sqrt(variance + epsilon)
    term = bias - mean * factor
    return x * factor + term, np.abs(x * factor) + np.abs(term)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("dims", IMAGES)
@pytest.mark.parametrize("constants", [(), (1, 2, 3, 4), (1, 3)])
def test_batch_normalization_is_within_the_bound_of_the_exact_result(constants, dims, dtype):
    inputs = batch(dims, dtype)
    exact, size = exact_batch(inputs, 1e-3)
    # Of float64 the reference itself has such an error.
    bound = (1.5 if dtype == "float32" else 4) * np.finfo(dtype).eps * size
    check_within(
        node_of("BatchNormalization", inputs, constants, epsilon=1e-3), inputs, exact, bound
    )


def test_batch_normalization_of_nan_and_infinities_has_these():
    inputs = batch((1, 4, 3, 5), "float32")
    inputs[0].flat[:3] = np.nan, np.inf, -np.inf
    exact, size = exact_batch(inputs, 1e-5)
    bound = 1.5 * np.finfo(np.float32).eps * np.nan_to_num(size, posinf=0)
    check_within(node_of("BatchNormalization", inputs), inputs, exact, bound)


@pytest.mark.parametrize("constants", [(), (1, 2, 3, 4)])
def test_batch_normalization_with_relu_behind_it_is_one_kernel(constants):
    inputs = batch((2, 18, 5, 7), "float32")
    inputs[0].flat[0] = np.nan
    node = node_of("BatchNormalization", inputs, constants)
    type_ = TensorType(inputs[0].dtype, inputs[0].shape)
    relu = Node(standard("Relu"), [node.outputs[0]], [Value("y", type_)], {})
    exact, size = exact_batch(inputs, 1e-5)
    bound = 1.5 * np.finfo(np.float32).eps * np.nan_to_num(size)
    check_within(fused([node, relu]), inputs, np.maximum(exact, 0), bound)


def test_batch_normalization_by_parameters_with_gaps_reads_these():
    """Images without gaps, whose parameters are not where the code for dense ones would read."""
    inputs = batch((2, 6, 3), "float32")
    exact, size = exact_batch(inputs, 1e-5)
    gaps = [inputs[0], *[np.repeat(x, 2)[::2] for x in inputs[1:4]], inputs[4][::-1].copy()[::-1]]
    for library in LIBRARIES:
        kernel = kernel_of(node_of("BatchNormalization", inputs), library)
        y = np.empty(exact.shape, np.float32)
        function, arguments = kernel.bind(gaps, [y], None)
        function(*arguments)
        assert (np.abs(y - exact) <= 1.5 * np.finfo(np.float32).eps * size).all(), library.level


def test_batch_normalization_in_training_or_with_unusual_dtypes_has_no_compiled_kernel():
    inputs = batch((2, 3, 4), "float32")
    wide = [*inputs[:3], *[a.astype(np.float64) for a in inputs[3:]]]
    assert kernel_of(node_of("BatchNormalization", wide), LIBRARIES[0]) is None
    training = node_of("BatchNormalization", inputs, outputs=3, training_mode=1)
    assert kernel_of(training, LIBRARIES[0]) is None


def exact_lrn(x, size, alpha, beta, bias):
    """The result in float64, and the sums that it was divided by a power of."""
    squares = np.square(x.astype(np.float64))
    before, after = (size - 1) // 2, size // 2
    padded = np.pad(squares, [(0, 0), (before, after), *[(0, 0)] * (x.ndim - 2)])
    total = sum(padded[:, k : k + x.shape[1]] for k in range(size))
    sums = bias + alpha / size * total
    return x / sums**beta, sums


@pytest.mark.parametrize("dims", [*IMAGES, (1, 20, 30, 3), (1, 64, 7, 7)])
@pytest.mark.parametrize(
    ("size", "beta", "bias"), [(5, 0.75, 1), (3, 0.75, 2), (4, 0.5, 1), (1, 1.3, 1e4)]
)
def test_lrn_is_within_the_bound_of_the_exact_result(size, beta, bias, dims):
    x = np.random.default_rng(5).normal(0, 3, dims).astype(np.float32)
    node = node_of("LRN", [x], size=size, alpha=0.2, beta=beta, bias=float(bias))
    exact, sums = exact_lrn(x, size, np.float32(0.2), beta, bias)
    # Halves of an epsilon: each of size + 3 roundings of a sum of positive terms counts beta times.
    # Two roots, a product and a quotient are 4; a logarithm of 2 units in the last place (4 halves),
    # its product with beta, exp of 2 units and the quotient are 4 + 1 of the exponent, and 5.
    exponent = np.abs(beta * np.log(sums))
    halves = beta * (size + 3) + (4 if beta == 0.75 else 5 + 5 * exponent + 4 * beta)
    check_within(node, [x], exact, halves * np.finfo(np.float32).eps / 2 * np.abs(exact))


def test_lrn_of_sums_that_are_not_finite_or_positive_equals_numpy():
    x = np.random.default_rng(5).normal(0, 3, (1, 9, 4, 5)).astype(np.float32)
    x.flat[:4], x[0, 5, 2] = (np.nan, np.inf, 1e25, -np.inf), 0
    check(node_of("LRN", [x], size=3, alpha=1.0, bias=0.0), [x], {"rtol": 1e-5, "atol": 0})
    check(node_of("LRN", [x], size=3, alpha=1.0, bias=-4.0), [x], {"rtol": 1e-4, "atol": 0})


@pytest.mark.parametrize("size", [3, 5])
def test_lrn_of_channels_of_which_a_few_sums_are_not_ordinary_equals_numpy(size):
    x = np.random.default_rng(5).normal(0, 3, (1, 150, 4, 5)).astype(np.float32)
    x[0, 30, 0, 1:5], x[0, 70:75, 2], x[0, 141:, 3, 1] = (np.nan, np.inf, 1e25, 1e-21), 0, 1e-20
    check(node_of("LRN", [x], size=size, alpha=1.0, bias=0.0), [x], {"rtol": 1e-5, "atol": 0})


def test_lrn_of_many_channels_around_or_of_float64_has_no_compiled_kernel():
    x = np.ones((1, 200, 2, 2), np.float32)
    assert kernel_of(node_of("LRN", [x], size=150), LIBRARIES[0]) is None
    assert kernel_of(node_of("LRN", [x.astype(np.float64)], size=3), LIBRARIES[0]) is None


@pytest.mark.parametrize("name", ["BatchNormalization", "LRN"])
def test_normalization_by_several_threads_is_the_same(name):
    inputs = batch((2, 48, 40, 40), "float32")
    attrs = {} if name == "BatchNormalization" else {"size": 5}
    inputs = inputs if name == "BatchNormalization" else inputs[:1]
    check_threads(node_of(name, inputs, **attrs), inputs)
