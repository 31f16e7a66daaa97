"""Compiled normalizations by instance, group and layer against NumPy's."""

from __future__ import annotations

import numpy as np
import pytest

from tests.support.native_kernels import LIBRARIES, check, kernel_of, node_of, pytestmark  # noqa: F401


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
