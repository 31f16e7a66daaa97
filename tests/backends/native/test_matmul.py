"""Compiled products against NumPy's: of integers exactly, of numbers within rounding errors."""

from __future__ import annotations

import math

import numpy as np
import pytest

from penstock.backends.native import RATES
from penstock.backends.native.matmul import product_workload
from penstock.ops.work_estimate import estimate
from tests.support.native_kernels import (  # noqa: F401
    LIBRARIES,
    check,
    kernel_of,
    node_of,
    pytestmark,
)

DTYPES = ["float32", "float64", "int32", "int64"]
ROUNDING = {"rtol": 1e-5, "atol": 1e-5}
SHAPES = [
    *[
        ((1, 1), (1, 1)),
        ((1, 10), (10, 10)),
        ((5, 3), (3, 1)),
        ((7,), (7, 20)),
        ((9, 33), (33, 70)),
    ],
    *[((3, 4, 5), (5, 6)), ((2, 3, 4, 5), (2, 3, 5, 17)), ((2, 3, 5), (1, 5, 4))],
]


def numbers(dims: tuple[int, ...], dtype: str) -> np.ndarray:
    rng = np.random.default_rng(5)
    if dtype.startswith("int"):  # products wrap
        return rng.integers(-(2**30), 2**30, dims).astype(dtype)
    return rng.normal(size=dims).astype(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("constants", [[], [1]])
@pytest.mark.parametrize("shapes", SHAPES, ids=str)
def test_matmul_is_close_to_numpy(shapes, constants, dtype):
    inputs = [numbers(dims, dtype) for dims in shapes]
    check(node_of("MatMul", inputs, constants), inputs, ROUNDING)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("term", [None, (), (6,), (5, 1), (5, 6), (1, 6)])
@pytest.mark.parametrize("transposed", [(0, 0), (0, 1), (1, 0)])
def test_gemm_is_close_to_numpy(transposed, term, dtype):
    a, b = (4, 5) if transposed[0] else (5, 4), (6, 4) if transposed[1] else (4, 6)
    inputs = [numbers(dims, dtype) for dims in (a, b, *([] if term is None else [term]))]
    attrs = {"transA": transposed[0], "transB": transposed[1]}
    check(node_of("Gemm", inputs, [1], **attrs), inputs, ROUNDING)
    if dtype.startswith("float"):
        node = node_of("Gemm", inputs, [1], alpha=0.5, beta=-2.0, **attrs)
        check(node, inputs, ROUNDING)


@pytest.mark.parametrize(
    ("shapes", "constants", "attrs"),
    [
        (((3,), (3,)), [], {}),
        (((1, 2, 3), (5, 3, 4)), [], {}),
        (((300, 300), (300, 300)), [], {}),
        (((3, 4), (5, 4)), [], {"transB": 1}),
        (((0, 4), (4, 5)), [1], {}),
    ],
    ids=str,
)
def test_other_products_are_left_to_libraries(shapes, constants, attrs):
    inputs = [numbers(dims, "float32") for dims in shapes]
    node = node_of("Gemm" if attrs else "MatMul", inputs, constants, **attrs)
    assert all(kernel_of(node, library) is None for library in LIBRARIES)


def test_products_of_float64_are_compiled_while_the_right_matrix_fits_a_cache():
    for dims, is_native in ((300, True), (400, False)):
        inputs = [numbers((dims, dims), "float64") for _ in range(2)]
        inputs[1] = inputs[1][:, : dims // 16 * 16]
        kernel = kernel_of(node_of("MatMul", inputs, [1]), LIBRARIES[0])
        assert (kernel is not None) is is_native
    inputs = [numbers((24, 50, 60), "float64"), numbers((24, 60, 53), "float64")]
    check(node_of("MatMul", inputs, []), inputs, ROUNDING)


def test_large_matrices_of_integers_are_left_to_numpy_which_splits_them(monkeypatch):
    inputs = [numbers(dims, "int64") for dims in ((4, 30), (30, 20))]
    node = node_of("MatMul", inputs, [])
    assert kernel_of(node, LIBRARIES[0]) is not None
    monkeypatch.setattr("penstock.backends.native.matmul._MOST_ELEMENTS", 599)
    assert kernel_of(node, LIBRARIES[0]) is None


def test_estimate_grows_with_the_product_and_is_infinite_for_unknown_kinds():
    seconds = [
        estimate(
            RATES, product_workload(node_of("MatMul", [numbers(d, "float32") for d in shapes]))
        )
        for shapes in (((1, 4), (4, 4)), ((64, 64), (64, 64)), ((8,), (8,)))
    ]
    assert seconds[0] < seconds[1] < seconds[2] == math.inf
