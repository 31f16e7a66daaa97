"""Compiled GridSample and AffineGrid against NumPy's."""

from __future__ import annotations

import numpy as np
import pytest

from tests.support.native_kernels import check, node_of, pytestmark  # noqa: F401

DIMS = [
    ((2, 3, 5, 7), (9, 11)),
    ((1, 4, 6), (130,)),
    ((2, 2, 3, 4, 5), (3, 4, 6)),
    ((1, 1, 1, 1), (3, 3)),
]


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("corners", [0, 1])
@pytest.mark.parametrize("padding", ["zeros", "border", "reflection"])
@pytest.mark.parametrize("mode", ["nearest", "linear", "cubic"])
@pytest.mark.parametrize(("dims", "target"), DIMS)
def test_grid_sample_is_close_to_numpy(dims, target, mode, padding, corners, dtype):
    rng = np.random.default_rng(8)
    x = rng.normal(size=dims).astype(dtype)
    grid = rng.normal(0, 0.8, (dims[0], *target, len(target))).astype(dtype)
    grid.flat[:3] = np.nan, 1e30, -np.inf
    inputs = [x, grid]
    attrs = {"mode": mode, "padding_mode": padding, "align_corners": corners}
    tolerance = {"rtol": 0, "atol": 0 if mode == "nearest" else 40 * float(np.finfo(dtype).eps)}
    check(node_of("GridSample", inputs, **attrs), inputs, tolerance)


def test_grid_sample_does_not_multiply_what_lies_outside():
    x = np.full((1, 1, 2, 2), np.inf, np.float32)
    grid = np.array([[[[-3, 0], [0.9, 0.9]]]], np.float32)
    check(node_of("GridSample", [x, grid]), [x, grid])


@pytest.mark.parametrize("corners", [0, 1])
@pytest.mark.parametrize("size", [(2, 3, 5, 7), (1, 1, 1, 1), (2, 1, 3, 4, 5)])
def test_affine_grid_is_close_to_numpy(size, corners):
    rank = len(size) - 2
    theta = np.random.default_rng(1).normal(size=(size[0], rank, rank + 1)).astype(np.float32)
    inputs = [theta, np.array(size)]
    node = node_of("AffineGrid", inputs, [1], align_corners=corners)
    check(node, inputs, {"rtol": 0, "atol": 2e-6})
