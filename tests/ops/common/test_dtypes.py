"""Properties of element types."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from penstock.ops.common.dtypes import FLOAT8, POWERS, SUB_BYTE, is_float, is_half, is_small, wide


@pytest.mark.parametrize("name", FLOAT8)
def test_largest_values_of_8_bit_floats_are_those_of_ml_dtypes(name):
    assert float(ml_dtypes.finfo(name).max) == FLOAT8[name]


@pytest.mark.parametrize("name", SUB_BYTE)
def test_types_of_less_than_a_byte_have_their_bits(name):
    dtype = np.dtype(getattr(ml_dtypes, name))
    info = ml_dtypes.finfo(dtype) if is_float(dtype) else ml_dtypes.iinfo(dtype)
    assert (dtype.itemsize, info.bits) == (1, SUB_BYTE[name])
    assert is_float(dtype) == name.startswith("float")


def test_powers_of_two_have_no_zero():
    assert float(np.array(0.0, getattr(ml_dtypes, POWERS))) != 0


@pytest.mark.parametrize(
    ("name", "small", "half", "computed"),
    [
        ("float16", True, True, "float32"),
        (ml_dtypes.bfloat16, True, True, "float32"),
        (ml_dtypes.float8_e5m2, True, False, "float32"),
        ("float32", False, False, "float32"),
        ("float64", False, False, "float64"),
        ("int16", False, False, "float64"),
        (ml_dtypes.int4, False, False, "float64"),
    ],
)
def test_small_floats_are_computed_in_float32(name, small, half, computed):
    dtype = np.dtype(name)
    assert (is_small(dtype), is_half(dtype), wide(dtype)) == (small, half, computed)


def test_no_type_is_no_half():
    assert not is_half(None)
