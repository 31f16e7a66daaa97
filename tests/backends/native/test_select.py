"""Compiled kernels of places against NumPy's, bit by bit."""

from __future__ import annotations

import numpy as np
import pytest

from penstock.core.types import ShapeError
from tests.support.native_kernels import LIBRARIES, check, kernel_of, node_of, pytestmark  # noqa: F401

DTYPES = ["bool", "float16", "float32", "int64", "complex128"]


def numbers(dims: tuple[int, ...], dtype: str) -> np.ndarray:
    return np.random.default_rng(2).integers(0, 5, dims).astype(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("upper", [0, 1])
@pytest.mark.parametrize("k", [None, 0, 2, -3, 2**40, -(2**40)])
@pytest.mark.parametrize("dims", [(4, 7), (2, 5, 3)])
def test_trilu_equals_numpy(dims, k, upper, dtype):
    inputs = [numbers(dims, dtype), *([] if k is None else [np.array(k)])]
    check(node_of("Trilu", inputs, [1] * (k is not None), upper=upper), inputs)


@pytest.mark.parametrize("dtype", DTYPES[:-1])
@pytest.mark.parametrize("k", [0, 3, -2, 99, -99])
def test_eye_like_equals_numpy(k, dtype):
    inputs = [numbers((5, 4), dtype)]
    check(node_of("EyeLike", inputs, k=k), inputs)


@pytest.mark.parametrize("values", ["bool", "float32", "int64"])
@pytest.mark.parametrize("indices", ["int32", "int64"])
@pytest.mark.parametrize("axis", [-1, 0, 1])
@pytest.mark.parametrize("version", [10, 26])
def test_one_hot_equals_numpy(version, axis, indices, values):
    picked = np.random.default_rng(0).integers(-9, 9, (3, 4)).astype(indices)
    inputs = [picked, np.array([6]), np.array([0, 3]).astype(values)]
    check(node_of("OneHot", inputs, [1], axis=axis, version=version), inputs)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("time_axis", [0, 1])
def test_reverse_sequence_equals_numpy(time_axis, dtype):
    x = numbers((5, 6, 3), dtype)
    lengths = np.arange(x.shape[1 - time_axis]) % (x.shape[time_axis] + 1)
    attrs = {"time_axis": time_axis, "batch_axis": 1 - time_axis}
    check(node_of("ReverseSequence", [x, lengths], **attrs), [x, lengths])


@pytest.mark.parametrize("length", [-1, 6])
def test_reverse_sequence_of_a_length_beyond_the_times_raises_as_numpy(length):
    inputs = [numbers((5, 2), "float32"), np.array([3, length])]
    for library in LIBRARIES:
        with pytest.raises(ShapeError, match="sequence_lens must be in"):
            kernel_of(node_of("ReverseSequence", inputs), library).function(*inputs)


def test_unpooled_places_outside_of_the_result_raise_the_error_of_numpy():
    x = np.ones((1, 1, 2), np.float32)
    for wrong in (4, -1, 2**62):
        places = np.array([[[0, wrong]]])
        node = node_of("MaxUnpool", [x, places], kernel_shape=[2], strides=[2])
        for library in LIBRARIES:
            with pytest.raises(ShapeError, match="indices must be in"):
                kernel_of(node, library).function(x, places)


def test_unpooled_with_another_shape_is_left_to_numpy():
    inputs = [np.ones((1, 1, 2), np.float32), np.array([[[0, 3]]]), np.array([1, 1, 6])]
    node = node_of("MaxUnpool", inputs, [2], kernel_shape=[2], strides=[2])
    assert kernel_of(node, LIBRARIES[0]) is None


@pytest.mark.parametrize("mode", ["linear", "circular"])
@pytest.mark.parametrize("axis", [1, 2, -2])
def test_updated_cache_equals_numpys(axis, mode):
    x = np.arange(2 * 5 * 6 * 3, dtype=np.float32).reshape(2, 5, 6, 3)
    update = -x.take(range(2), axis)
    for starts in ([0, 1], [3, 2], None, [4, -9]):
        if mode == "linear" and starts == [4, -9]:
            continue
        inputs = [x, update, None if starts is None else np.array(starts)]
        check(node_of("TensorScatter", inputs, axis=axis, mode=mode), inputs)


@pytest.mark.parametrize("wrong", [-1, 5, 2**62, -(2**63)])
def test_update_beyond_the_cache_raises_the_error_of_numpy(wrong):
    x, update = np.ones((2, 3, 6, 1), np.float32), np.ones((2, 3, 2, 1), np.float32)
    inputs = [x, update, np.array([0, wrong])]
    node = node_of("TensorScatter", inputs)
    for library in LIBRARIES:
        with pytest.raises(ShapeError, match="exceeds the cache"):
            kernel_of(node, library).function(*inputs)
