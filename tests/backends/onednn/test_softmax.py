"""Softmax and LogSoftmax with oneDNN equal those of NumPy."""

from __future__ import annotations

import numpy as np
import pytest

from penstock.backends.onednn.library import library
from tests.backends.onednn.forced import check, one_node, refused
from tests.backends.onednn.test_normalization import draw

pytestmark = pytest.mark.skipif(library() is None, reason="needs libdnnl.so.3")


SOFTMAXES = [
    ((7,), 0),
    ((1, 1000), 1),
    ((33, 17), -1),
    ((2, 3, 9), 2),
    ((2, 3, 4, 5), -1),
    ((2, 21, 6, 7), 1),
    ((1, 5, 3, 4, 2), 1),
    ((3, 10, 1, 1), 1),
    ((4, 5, 1), 1),
]


@pytest.mark.parametrize("op", ["Softmax", "LogSoftmax"])
@pytest.mark.parametrize(("shape", "axis"), SOFTMAXES)
def test_softmax_equals_numpy(op, shape, axis):
    feeds = {"x": 5 * draw(*shape)}
    check(one_node(op, feeds, axis=axis), feeds, op)


@pytest.mark.parametrize("perm", [(0, 2, 3, 1), (0, 3, 1, 2), (0, 2, 1, 3), (3, 2, 1, 0)])
@pytest.mark.parametrize("axis", [1, 3])
def test_softmax_of_a_view(perm, axis):
    feeds = {"x": draw(2, 3, 4, 5)}
    check(one_node("Softmax", feeds, perm=perm, axis=axis), feeds, "Softmax")


@pytest.mark.parametrize("axis", [-1, 0, 1, 2, 3])
def test_softmax_over_all_axes_from_one_on(axis):
    feeds = {"x": draw(2, 3, 4, 5)}
    check(one_node("Softmax", feeds, opset=11, axis=axis), feeds, "Softmax")


@pytest.mark.parametrize(("shape", "axis"), [((8, 9), 0), ((2, 3, 4), 1), ((2, 3, 4, 5), 2)])
def test_softmax_along_other_axes_runs_on_numpy(shape, axis):
    feeds = {"x": draw(*shape)}
    refused(one_node("Softmax", feeds, axis=axis), feeds, "Softmax")


def test_softmax_of_large_differences_does_not_overflow():
    x = np.array([[1000, 1001, -1000], [-np.inf, 0, 1], [3e38, -3e38, 0]], np.float32)
    check(one_node("Softmax", {"x": -x}, axis=-1), {"x": -x}, "Softmax")
