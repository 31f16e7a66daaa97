"""Compiled kernels of indices against NumPy's: gathering, scattering and TopK."""

from __future__ import annotations

import numpy as np
import pytest

from penstock.backends.native import index
from penstock.core.errors import PenstockError
from tests.support.native_kernels import LIBRARIES, check, kernel_of, node_of, pytestmark  # noqa: F401

DTYPES = ["bool", "uint8", "float16", "float32", "int32", "float64", "int64"]
CASES = [((5,), (7,), 0), ((4, 6), (9, 6), 0), ((4, 6), (3, 5), 1), ((2, 3, 4), (2, 5, 3), -2)]


def draw(dims, dtype):
    return np.random.default_rng(4).integers(-9, 9, dims).astype(dtype)


def places(dims, size, dtype=np.int64):
    return np.random.default_rng(5).integers(-size, size, dims).astype(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("wide", [np.int32, np.int64])
@pytest.mark.parametrize(("dims", "shape", "axis"), CASES)
def test_gather_and_scatter_elements_kernels_equal_numpy(dims, shape, axis, wide, dtype):
    x, indices = draw(dims, dtype), places(shape, dims[axis], wide)
    check(node_of("GatherElements", [x, indices], axis=axis), [x, indices])
    inputs = [x, indices, draw(shape, dtype)]
    check(node_of("ScatterElements", inputs, axis=axis), inputs)


@pytest.mark.parametrize("dtype", [*DTYPES, "complex64", "complex128"])
@pytest.mark.parametrize("wide", [np.int32, np.int64])
@pytest.mark.parametrize("axis", [0, 1, -1])
@pytest.mark.parametrize("shape", [(), (1,), (2, 3)])
def test_gather_kernel_equals_numpy(shape, axis, wide, dtype):
    x, indices = draw((4, 3, 5), dtype), np.asarray(places(shape, 3, wide))
    check(node_of("Gather", [x, indices], axis=axis), [x, indices])


@pytest.mark.parametrize("dtype", ["float32", "float64", "int32", "int64"])
@pytest.mark.parametrize("reduction", ["add", "mul", "max", "min"])
@pytest.mark.parametrize(("dims", "shape", "axis"), CASES)
def test_scatter_kernels_reduce_as_numpy(dims, shape, axis, reduction, dtype):
    inputs = [draw(dims, dtype), places(shape, dims[axis]), draw(shape, dtype)]
    check(node_of("ScatterElements", inputs, axis=axis, reduction=reduction), inputs)
    tuples = places((8, 1), dims[0])
    inputs = [draw(dims, dtype), tuples, draw((8, *dims[1:]), dtype)]
    check(node_of("ScatterND", inputs, reduction=reduction), inputs)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("depth", "batch"), [(1, 0), (2, 0), (3, 0), (1, 1), (2, 1), (1, 2)])
def test_gather_and_scatter_nd_kernels_equal_numpy(depth, batch, dtype):
    x = draw((2, 3, 4), dtype)
    tuples = places((*x.shape[:batch], 5, depth), 2)
    check(node_of("GatherND", [x, tuples], batch_dims=batch), [x, tuples])
    if not batch:
        inputs = [x, tuples, draw((5, *x.shape[depth:]), dtype)]
        check(node_of("ScatterND", inputs), inputs)


@pytest.mark.parametrize("index", [4, -5, 2**62, -(2**63)])
@pytest.mark.parametrize(
    "name", ["Gather", "GatherElements", "ScatterElements", "GatherND", "ScatterND"]
)
def test_index_kernels_refuse_indices_out_of_range(name, index):
    x, indices = draw((4, 3), np.float32), np.zeros((5, 3 if "Elements" in name else 1), np.int64)
    indices[3, 0] = index
    updates = [] if name[0] == "G" else [np.zeros((5, 3), np.float32)]
    node = node_of(name, [x, indices, *updates])
    for library in LIBRARIES:
        with pytest.raises((PenstockError, IndexError)):
            kernel_of(node, library).function(x, indices, *updates)


@pytest.mark.parametrize("dtype", ["float32", "float64", "int8", "uint8", "int32", "int64"])
@pytest.mark.parametrize("largest", [0, 1])
@pytest.mark.parametrize("sort", [0, 1])
@pytest.mark.parametrize(
    ("dims", "axis", "k"),
    [
        *[((7,), 0, 3), ((5, 300), -1, 10), ((3, 70, 4), 1, 5), ((9, 20), 1, 20), ((2, 200), 1, 1)],
        *[((3, 300), 1, 300), ((2, 400, 3), 1, 150), ((2, 90, 37), 1, 6), ((2000,), 0, 120)],
        *[((5000,), 0, 100), ((2, 700, 3), 1, 5), ((300, 2), 0, 1), ((200, 16), 0, 20)],
        *[((900, 5), 0, 70), ((100, 33), 0, 3), ((100, 32), 0, 99), ((260, 17), 0, 32)],
    ],
)
def test_top_k_kernel_equals_numpy(dims, axis, k, sort, largest, dtype):
    inputs = [draw(dims, np.int8).astype(dtype), np.array([k])]
    check(node_of("TopK", inputs, [1], outputs=2, axis=axis, largest=largest, sorted=sort), inputs)


@pytest.mark.parametrize(
    ("dims", "k", "compiled"),
    [
        *[((50_257,), 50, True), ((64, 1000), 10, True), ((9000,), 9000, True)],
        *[((10_000,), 1000, False), ((64, 1000), 64, False)],
    ],
)
def test_top_k_of_some_floats_is_left_to_numpy_where_a_heap_costs_more(
    dims, k, compiled, monkeypatch
):
    monkeypatch.setattr(index, "core_budget", lambda: 1)
    node = node_of("TopK", [np.zeros(dims, np.float32), np.array([k])], [1], outputs=2)
    assert (kernel_of(node, LIBRARIES[0]) is not None) == compiled


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("largest", [0, 1])
def test_top_k_kernel_orders_nan_infinity_and_zeros_as_numpy(largest, dtype):
    special = [np.nan, np.inf, -np.inf, -0.0, 0.0, -np.nan, 1e-45, 3, 0.0, -0.0, np.nan, np.inf]
    for repeats, k in ((9, 50), (20, 240)):
        inputs = [np.array(special * repeats, dtype), np.array([k])]
        check(node_of("TopK", inputs, [1], outputs=2, largest=largest), inputs)
    for columns, k in ((1, 3), (2, 9), (3, 70), (20, 5)):
        inputs = [np.array(special * 50 * columns, dtype).reshape(-1, columns), np.array([k])]
        check(node_of("TopK", inputs, [1], outputs=2, largest=largest, axis=0), inputs)


@pytest.mark.parametrize("order", ["random", "few", "ascending", "descending", "special"])
@pytest.mark.parametrize("largest", [0, 1])
@pytest.mark.parametrize(
    ("length", "k"), [(6000, 65), (9000, 100), (1100, 129), (67, 66), (60_000, 1024)]
)
def test_top_k_of_many_elements_in_any_order_equals_numpy(length, k, largest, order):
    x = np.random.default_rng(length + k).normal(size=(2, length)).astype(np.float32)
    if order == "few":
        x = np.round(x)
    elif order == "special":
        x[x > 1], x[x < -1] = np.nan, np.inf
    elif order != "random":
        x.sort()
        x = x if order == "ascending" else -x
    inputs = [x, np.array([k])]
    node = node_of("TopK", inputs, [1], outputs=2, largest=largest)
    if kernel_of(node, LIBRARIES[0]) is not None:  # else NumPy's is faster
        check(node, inputs)


@pytest.mark.parametrize("dtype", ["int8", "float64", "int32", "int64"])
@pytest.mark.parametrize("largest", [0, 1])
def test_sort_of_many_elements_equals_numpy(largest, dtype):
    rng = np.random.default_rng(4)
    wide = rng.integers(-(2**62), 2**62, 9000).astype(dtype)
    for x in (wide, wide // 2 ** (8 * wide.itemsize - 7), np.full(9000, wide[0])):
        inputs = [x, np.array([len(x)])]
        check(node_of("TopK", inputs, [1], outputs=2, largest=largest), inputs)
