"""Compiled Fourier transforms against NumPy's."""

from __future__ import annotations

import numpy as np
import pytest

from tests.support.native_kernels import (
    LIBRARIES,
    check,
    check_threads,
    kernel_of,
    node_of,
    pytestmark,  # noqa: F401
)

NEAR = {"rtol": 1e-4, "atol": 2e-4}


def node_and_inputs(dims, length, axis, dtype="float32", **attrs):
    x = np.random.default_rng(7).normal(size=dims).astype(dtype)
    inputs = [x, np.array(length), np.array(axis)]
    return node_of("DFT", inputs, [1, 2], **attrs), inputs


@pytest.mark.parametrize(
    "length", [1, 2, 3, 4, 6, 8, 9, 12, 25, 31, 49, 60, 62, 64, 121, 400, 2048]
)
@pytest.mark.parametrize("parts", [1, 2])
@pytest.mark.parametrize("inverse", [0, 1])
@pytest.mark.parametrize("onesided", [0, 1])
def test_transform_of_any_length_is_near_numpys(length, parts, inverse, onesided):
    attrs = {"inverse": inverse, "onesided": onesided}
    read = length // 2 + 1 if inverse and onesided else length
    for dims in (
        (1, read, parts),
        (19, read, parts),
        (2, 3, read + 4, parts),
        (2, max(read - 3, 1), parts),
    ):
        node, inputs = node_and_inputs(dims, length, len(dims) - 2, **attrs)
        check(node, inputs, NEAR)


@pytest.mark.parametrize("axis", [0, 1, -2])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_transform_along_any_axis_is_near_numpys(axis, dtype):
    for attrs in ({}, {"onesided": 1}, {"inverse": 1}, {"inverse": 1, "onesided": 1}):
        for parts in (1, 2):
            node, inputs = node_and_inputs((12, 20, 18, parts), 20, axis, dtype, **attrs)
            check(node, inputs, NEAR if dtype == "float32" else {"rtol": 1e-12, "atol": 1e-12})


def test_inverse_restores_the_signal():
    for length in (30, 45, 1024):
        node, inputs = node_and_inputs((3, length, 1), length, 1, onesided=1)
        for library in LIBRARIES:
            kernel = kernel_of(node, library)
            assert kernel is not None
            spectrum = kernel.function(*inputs)
            back = [spectrum, *inputs[1:]]
            kernel = kernel_of(node_of("DFT", back, [1, 2], inverse=1, onesided=1), library)
            assert kernel is not None
            np.testing.assert_allclose(kernel.function(*back), inputs[0], atol=2e-6)


@pytest.mark.parametrize("length", [37, 2 * 41, 4099, 8192])
def test_lengths_of_large_factors_and_long_ones_are_left_to_numpy(length):
    node, _ = node_and_inputs((1, length, 1), length, 1)
    assert all(kernel_of(node, library) is None for library in LIBRARIES)


@pytest.mark.parametrize("parts", [1, 2])
@pytest.mark.parametrize("onesided", [0, 1])
@pytest.mark.parametrize("windowed", [False, True])
def test_windowed_frames_are_near_numpys(parts, onesided, windowed):
    rng = np.random.default_rng(5)
    for size, length, step in ((100, 16, 7), (33, 33, 1), (64, 15, 3), (5, 1, 2)):
        x = rng.normal(size=(3, size, parts)).astype(np.float32)
        window = rng.random(length).astype(np.float32) if windowed else None
        inputs = [x, np.array(step), window, np.array(length)]
        check(node_of("STFT", inputs, [1, 3], onesided=onesided), inputs, NEAR)


def test_transform_does_not_depend_on_threads():
    node, inputs = node_and_inputs((200, 60, 2), 60, 1)
    check_threads(node, inputs)
