"""Compiled Col2Im against NumPy's, bit by bit."""

from __future__ import annotations

import math

import numpy as np
import pytest

from penstock.ops.common.windows import windows
from tests.support.native_kernels import check, node_of, pytestmark  # noqa: F401

CASES = [
    ((7,), (3,), {"pads": [2, 1], "strides": [2]}),
    ((6, 9), (2, 3), {}),
    ((6, 9), (3, 2), {"pads": [1, 0, 2, 1], "dilations": [2, 3]}),
    ((5, 8), (3, 3), {"pads": [1, 1, 1, 1], "strides": [2, 3]}),
    ((3, 4, 5), (2, 2, 3), {"strides": [1, 2, 1]}),
]


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize(("sizes", "kernel", "attrs"), CASES)
def test_col2im_equals_numpy(sizes, kernel, attrs, dtype):
    count = math.prod(axis.count for axis in windows(attrs, kernel, sizes))
    x = np.random.default_rng(3).normal(size=(2, 3 * math.prod(kernel), count)).astype(dtype)
    inputs = [x, np.array(sizes), np.array(kernel)]
    check(node_of("Col2Im", inputs, [1, 2], **attrs), inputs)
