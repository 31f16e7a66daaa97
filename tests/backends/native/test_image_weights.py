"""Packed weights of convolutions of images."""

from __future__ import annotations

import numpy as np
import pytest

from penstock.backends.native.image_axes import POINT, spans
from penstock.backends.native.image_strides import AXES
from penstock.backends.native.image_weights import Packing, groups_of_vectors, weights_order
from tests.support.native_kernels import node_of


def packing(filters: int, channels: int, group: int, pairs: str = "", repeats: int = 1) -> Packing:
    x = np.zeros((1, channels, 8, 9), np.float32)
    w = np.zeros((filters, channels // group, 3, 2), np.float32)
    node = node_of("Conv", [x, w], group=group)
    axes = spans(node, [3, 2], [8, 9])
    assert axes is not None
    groups = 0 if repeats > 1 else groups_of_vectors(group, filters // group)
    return weights_order(node, w.shape, [POINT] * (AXES - 2) + axes, groups, pairs, repeats)


@pytest.mark.parametrize(
    "own",
    [
        packing(5, 3, 1),
        packing(40, 6, 1),
        packing(8, 8, 4),
        packing(6, 12, 3),
        packing(4, 6, 1, "in turn"),
        packing(6, 6, 6, repeats=8),
    ],
    ids=str,
)
def test_weights_come_back_from_their_packed_order(own):
    w = np.random.default_rng(0).standard_normal(own.shape).astype(np.float32)
    (packed,) = own.pack(w)
    assert packed.size == sum(own.sizes)
    np.testing.assert_array_equal(own.back(packed), w)


def test_narrow_groups_are_merged_up_to_eight_filters():
    assert [groups_of_vectors(8, filters) for filters in (1, 2, 4, 8)] == [1, 2, 4, 8]
    assert groups_of_vectors(1, 1) == 1
    assert groups_of_vectors(6, 3) == 3  # of two groups each, as 4 would not divide 6
