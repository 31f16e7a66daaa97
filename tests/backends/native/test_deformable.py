"""Compiled DeformConv against NumPy's."""

from __future__ import annotations

import numpy as np
import pytest

from penstock.ops.onnx.convolution import conv_shape
from tests.support.native_kernels import LIBRARIES, check, kernel_of, node_of, pytestmark  # noqa: F401

RANDOM = np.random.default_rng(8)


def inputs_of(x, w, groups, bias, masked, attrs, dtype=np.float32):
    """Inputs of these shapes, with offsets that lead beyond the borders too."""
    shape = conv_shape(x, w, attrs)
    taps = groups * w[2] * w[3]
    inputs = [
        RANDOM.normal(size=x),
        RANDOM.normal(size=w),
        RANDOM.normal(0, 2, (x[0], 2 * taps, *shape[2:])),
        RANDOM.normal(size=w[0]) if bias else None,
        RANDOM.normal(size=(x[0], taps, *shape[2:])) if masked else None,
    ]
    while inputs[-1] is None:
        inputs.pop()
    return [None if value is None else value.astype(dtype) for value in inputs]


@pytest.mark.parametrize(("dtype", "tolerance"), [(np.float32, 1e-4), (np.float64, 1e-12)])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize(
    ("x", "w", "groups", "attrs"),
    [
        ((2, 4, 9, 11), (5, 4, 3, 3), 1, {"pads": [1, 1, 1, 1]}),
        ((1, 6, 8, 9), (4, 3, 3, 2), 3, {"group": 2, "strides": [2, 1]}),
        ((1, 6, 8, 9), (6, 2, 2, 3), 2, {"group": 3, "dilations": [2, 3], "pads": [0, 2, 3, 1]}),
        ((1, 50, 6, 7), (9, 50, 3, 3), 2, {}),
        ((1, 2, 5, 6), (300, 2, 1, 1), 1, {}),
    ],
)
def test_deform_conv_is_close_to_numpy(x, w, groups, attrs, masked, bias, dtype, tolerance):
    inputs = inputs_of(x, w, groups, bias, masked, attrs, dtype)
    node = node_of("DeformConv", inputs, offset_group=groups, **attrs)
    check(node, inputs, {"rtol": tolerance, "atol": tolerance})


def test_deform_conv_of_positions_far_away_or_not_numbers_equals_numpy():
    inputs = inputs_of((1, 2, 5, 5), (3, 2, 3, 3), 1, False, True, {})
    inputs[2][0, :6, 0] = [[np.inf], [-np.inf], [1e30], [-1e30], [np.nan], [4e9]]
    with np.errstate(invalid="ignore"):
        check(node_of("DeformConv", inputs), inputs, {"rtol": 1e-4, "atol": 1e-4})


def test_deform_conv_of_large_kernels_is_left_to_numpy():
    inputs = inputs_of((1, 2, 20, 20), (1, 2, 14, 14), 1, False, False, {})
    assert kernel_of(node_of("DeformConv", inputs), LIBRARIES[0]) is None
