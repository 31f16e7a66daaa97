"""Compiled losses against NumPy's."""

from __future__ import annotations

import numpy as np
import pytest

from penstock.core.types import ShapeError
from tests.support.native_kernels import LIBRARIES, check, kernel_of, node_of, pytestmark  # noqa: F401

NEAR = {"rtol": 1e-6}


def loss_of(target, weight=None, dims=(4, 5), **attrs):
    x = -np.random.default_rng(1).random(dims).astype(np.float32)
    inputs = [x, np.array(target), weight]
    return node_of("NegativeLogLikelihoodLoss", inputs, **attrs), inputs


@pytest.mark.parametrize("reduction", ["none", "sum", "mean"])
@pytest.mark.parametrize("dtype", ["int32", "int64"])
def test_loss_is_near_numpys(reduction, dtype):
    rng = np.random.default_rng(3)
    for dims in ((4, 5), (1, 1), (7, 3, 2, 5), (3, 6, 4000)):
        target = rng.integers(0, dims[1], (dims[0], *dims[2:])).astype(dtype)
        for weight in (None, rng.random(dims[1]).astype(np.float32)):
            for ignored in ({}, {"ignore_index": 0}, {"ignore_index": -100}):
                node, inputs = loss_of(target, weight, dims, reduction=reduction, **ignored)
                check(node, inputs, NEAR)


def test_ignored_targets_may_be_no_classes_and_infinite():
    for reduction in ("none", "sum", "mean"):
        node, inputs = loss_of([0, 99, 4, 99], reduction=reduction, ignore_index=99)
        inputs[0][1] = -np.inf
        check(node, inputs, NEAR)


def test_mean_of_only_ignored_targets_is_nan():
    node, inputs = loss_of([9, 9, 9, 9], ignore_index=9)
    check(node, inputs)


@pytest.mark.parametrize("wrong", [-1, 5, 2**40, -(2**62)])
@pytest.mark.parametrize("reduction", ["none", "mean"])
def test_target_that_is_no_class_raises_the_error_of_numpy(wrong, reduction):
    node, inputs = loss_of([0, 1, wrong, 2], reduction=reduction, ignore_index=-100)
    for library in LIBRARIES:
        kernel = kernel_of(node, library)
        assert kernel is not None
        with pytest.raises(ShapeError, match="targets range"):
            kernel.function(*inputs)
