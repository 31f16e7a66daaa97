"""Orders of dims in memory."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from penstock.core.types import ANY, FLOAT32, STRING, TensorType
from penstock.ir.layout import RuntimeArray, address, channels_last, is_plannable, packed_strides


@pytest.mark.parametrize("order", list(itertools.permutations(range(4))))
def test_packed_strides_are_those_of_a_transposed_array(order):
    dims = (2, 3, 5, 7)
    packed = np.empty([dims[axis] for axis in order], np.float32)
    assert packed_strides(dims, 4, order) == packed.transpose(np.argsort(order)).strides
    assert RuntimeArray(packed_strides(dims, 4, order)).order == order


def test_packed_strides_by_default_are_those_of_c():
    assert packed_strides((2, 3, 5), 8) == np.empty((2, 3, 5)).strides
    assert packed_strides((), 8) == ()
    assert RuntimeArray().order is None


def test_channels_last_has_axis_1_innermost():
    assert channels_last(4) == (0, 2, 3, 1)
    assert [channels_last(rank) for rank in (0, 1, 2, 3)] == [(), (), (), (0, 2, 1)]


def test_address_is_that_of_the_first_element():
    x = np.arange(6, dtype=np.float32)
    assert address(x[2:]) - address(x) == 8
    assert address(x[::-1]) - address(x) == 20


def test_only_tensors_of_known_size_that_hold_numbers_are_plannable():
    assert is_plannable(TensorType(FLOAT32, (2, 3)))
    others = [TensorType(FLOAT32, (2, None)), TensorType(STRING, (2,)), TensorType(FLOAT32), ANY]
    assert not any(map(is_plannable, others))
