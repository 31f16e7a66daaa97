"""Reductions: oneDNN against the NumPy backend."""

from __future__ import annotations

import numpy as np
import pytest

from penstock.backends.onednn.library import library
from tests.backends.onednn.forced import check, one_node, refused

pytestmark = pytest.mark.skipif(library() is None, reason="needs libdnnl.so.3")

rng = np.random.default_rng(0)


def draw(*shape: int) -> np.ndarray:
    return rng.standard_normal(shape).astype(np.float32)


def reduction(op, feeds, axes, **attrs):
    return one_node(op, feeds, {"axes": np.array(axes, np.int64)}, **attrs)


PERMS = [(), (0, 2, 3, 1), (0, 2, 1, 3), (3, 2, 1, 0)]
AXES = [[0], [1], [2], [3], [-1], [2, 3], [1, 2], [0, 1], [3, 1, 2], [0, 1, 2, 3]]


@pytest.mark.parametrize("perm", PERMS)
@pytest.mark.parametrize("keepdims", [0, 1])
@pytest.mark.parametrize("axes", AXES)
def test_reduce_mean_equals_numpy(axes, keepdims, perm):
    feeds = {"x": draw(2, 3, 4, 5)}
    model = reduction("ReduceMean", feeds, axes, keepdims=keepdims, perm=perm)
    check(model, feeds, "ReduceMean")


@pytest.mark.parametrize("perm", PERMS)
@pytest.mark.parametrize("keepdims", [0, 1])
@pytest.mark.parametrize("axes", [[3], [2, 3], [1, 2, 3], [0, 1, 2, 3]])
@pytest.mark.parametrize("op", ["ReduceSum", "ReduceProd"])
def test_reductions_of_the_last_axes_equal_numpy(op, axes, keepdims, perm):
    feeds = {"x": draw(2, 3, 4, 5)}
    check(reduction(op, feeds, axes, keepdims=keepdims, perm=perm), feeds, op)


@pytest.mark.parametrize("op", ["ReduceMean", "ReduceSum", "ReduceProd"])
@pytest.mark.parametrize(
    ("shape", "axes"),
    [((7,), [0]), ((1000,), [0]), ((3, 1, 5), [1, 2]), ((2, 1, 5), [2]), ((2, 3, 5, 1), [2, 3])],
)
def test_reductions_of_other_shapes(op, shape, axes):
    feeds = {"x": draw(*shape)}
    check(reduction(op, feeds, axes), feeds, op)


@pytest.mark.parametrize("op", ["ReduceMean", "ReduceSum"])
def test_reductions_of_all_axes(op):
    feeds = {"x": draw(3, 4, 5)}
    for keepdims in (0, 1):
        check(one_node(op, feeds, keepdims=keepdims), feeds, op)
        check(reduction(op, feeds, [], keepdims=keepdims), feeds, op)


def test_sums_of_integers_are_exact():
    feeds = {"x": -rng.integers(0, 2, (7, 1001)).astype(np.float32)}
    check(reduction("ReduceSum", feeds, [1]), feeds, "ReduceSum", rtol=0, atol=0)


@pytest.mark.parametrize("shape", [(1, 64, 7, 7), (2, 5, 33, 17), (1, 197, 6, 3)])
def test_reduce_mean_of_images(shape):
    feeds = {"x": draw(*shape)}
    for axes in ([2, 3], [1]):
        check(reduction("ReduceMean", feeds, axes), feeds, "ReduceMean")


@pytest.mark.parametrize(
    ("op", "shape", "axes"),
    [
        ("ReduceSum", (2, 3, 4), [1]),
        ("ReduceMin", (2, 3, 4), [2]),
        ("ReduceMax", (2, 3, 4, 5), [3]),
        ("ReduceL2", (2, 3, 4), [2]),
    ],
)
def test_reductions_that_onednn_lacks_run_on_numpy(op, shape, axes):
    feeds = {"x": draw(*shape)}
    refused(reduction(op, feeds, axes), feeds, op)


@pytest.mark.parametrize("op", ["ReduceMax", "ReduceMin"])
def test_reduce_max_of_infinities_is_infinite(op):
    feeds = {"x": np.full((2, 64), np.inf if op == "ReduceMin" else -np.inf, np.float32)}
    refused(reduction(op, feeds, [1]), feeds, op, rtol=0, atol=0)


def test_reductions_of_empty_tensors_run_on_numpy():
    feeds = {"x": draw(2, 0, 4)}
    refused(reduction("ReduceSum", feeds, [1]), feeds, "ReduceSum")
