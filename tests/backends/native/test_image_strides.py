"""Strides of images for compiled code."""

from __future__ import annotations

import numpy as np
import pytest

from penstock.backends.native.image_strides import steps_of


@pytest.mark.parametrize("dims", [(2, 3, 5), (2, 3, 4, 5), (2, 3, 4, 5, 6)])
@pytest.mark.parametrize("last", [False, True])
def test_steps_are_those_of_the_array(dims, last):
    x = np.empty(dims, np.float32)
    if last:
        x = np.moveaxis(np.empty((dims[0], *dims[2:], dims[1]), np.float32), -1, 1)
    strides = tuple([step // x.itemsize for step in x.strides])
    image, channel, rows, columns, *_ = steps_of(dims, strides, turned=False)
    assert (image, channel, columns) == (strides[0], strides[1], strides[-1])
    assert len(dims) == 3 or rows == strides[-2]
    turned = steps_of(dims, strides, turned=True)
    assert turned[2:4] == (columns, rows)


def test_strides_along_dims_of_one_element_are_those_of_channels_last():
    assert steps_of((1, 3, 1, 4), (99, 1, 77, 3), turned=False)[:4] == (12, 1, 12, 3)
    assert steps_of((2, 1, 4, 5), (20, 55, 5, 1), turned=False)[:4] == (20, 1, 5, 1)
