"""Compiled products against NumPy's: of integers exactly, of numbers within rounding errors."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.backends.native import RATES
from penstock.backends.native.matmul import product_workload
from penstock.ir.graph import Node, Value
from penstock.ir.kernel import Kernel
from penstock.ops.internal.fused import fused
from penstock.ops.registry import standard
from penstock.ops.work_estimate import estimate
from tests.support.native_kernels import (  # noqa: F401
    LIBRARIES,
    check,
    kernel_of,
    node_of,
    pytestmark,
    threads_of,
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


def scaled(operation, shapes, dtype, factor, first=False):
    """A product and what multiplies or divides it by a number, as one node, and its inputs."""
    product = node_of("MatMul", [numbers(dims, dtype) for dims in shapes])
    y = product.outputs[0]
    constant = Value("factor", const=np.array(factor, dtype))
    values, result = [y, constant][:: -1 if first else 1], [Value("scaled", y.type)]
    inputs = [numbers(dims, dtype) for dims in shapes]
    return fused([product, Node(standard(operation), values, result)]), [*inputs, constant.const]


@pytest.mark.parametrize("dtype", DTYPES[:2])
@pytest.mark.parametrize("shapes", SHAPES, ids=str)
def test_matmul_with_a_factor_is_close_to_numpy(shapes, dtype):
    for operation, factor in (("Mul", 0.3), ("Div", [-8.0])):
        check(*scaled(operation, shapes, dtype, factor), ROUNDING)


@pytest.mark.parametrize("dtype, operation, factor, first", [
    ("float32", "Div", 8.0, True), ("float32", "Mul", 1e-9, False), ("int32", "Mul", 3, False),
    ("float32", "Add", 2.0, False),
])  # fmt: skip
def test_matmul_with_what_is_no_factor_of_it_has_no_kernel(dtype, operation, factor, first):
    node, _ = scaled(operation, [(3, 4, 5), (5, 6)], dtype, factor, first)
    assert all(kernel_of(node, library) is None for library in LIBRARIES)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("columns", [3, 20, 64])
@pytest.mark.parametrize("rows", [*range(2, 27), 196])
def test_matmul_with_any_tiles_of_rows_is_close_to_numpy(rows, columns, dtype):
    inputs = [numbers(dims, dtype) for dims in [(2, rows, 9), (2, 9, columns)]]
    check(node_of("MatMul", inputs), inputs, ROUNDING)


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
    "shapes", [((0, 4), (4, 5)), ((3, 0), (0, 5)), ((2, 0, 4), (4, 5))], ids=str
)
def test_products_without_multiplications_are_left_to_numpy(shapes):
    node = node_of("MatMul", [numbers(dims, "float32") for dims in shapes])
    assert all(kernel_of(node, library) is None for library in LIBRARIES)


def check_bound(node: Node, inputs: list[np.ndarray]) -> None:
    """Compare products with those of float64. Of n terms, each is rounded once when it is
    multiplied and at most n times when sums are added up: |error| <= n eps (|a| |b|)."""
    a, b = (x.astype(np.float64) for x in inputs)
    want, most = a @ b, abs(a) @ abs(b)
    bound = (a.shape[-1] + 1) * np.finfo(inputs[0].dtype).eps * most
    for library in LIBRARIES:
        kernel = kernel_of(node, library)
        assert kernel is not None
        with threads_of(library, 2):
            for y in (kernel.function(*inputs), bound_result(kernel, inputs, want.shape)):
                assert y.dtype == inputs[0].dtype
                assert np.all(abs(y - want) <= bound), library.level


def bound_result(kernel: Kernel, inputs: list[np.ndarray], dims: tuple[int, ...]) -> np.ndarray:
    """The result in memory where its last dims lie the other way round, if it has two of them."""
    memory = np.full(dims[:-2] + dims[-2:][::-1], np.nan, inputs[0].dtype)
    y = memory.swapaxes(-1, -2) if len(dims) > 1 else memory
    function, arguments = kernel.bind(inputs, [y], None)
    function(*arguments)
    return y


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize(
    "shapes",
    [
        *[((1, 3001), (3001, 1)), ((1, 1), (1, 300)), ((70, 1), (1, 70)), ((257, 513), (513, 1))],
        *[((65, 257), (257, 129)), ((7, 4097), (4097, 3)), ((300, 17), (17, 95))],
        *[((1, 700), (700, 333)), ((2, 16), (16, 16)), ((13, 31, 1, 40), (13, 1, 40, 9))],
        *[((513,), (513,)), ((3, 1, 9, 33), (2, 33, 18)), ((33,), (4, 33, 65))],
    ],
    ids=str,
)
def test_products_are_within_the_bound_of_rounding_errors(shapes, dtype):
    inputs = [numbers(dims, dtype) for dims in shapes]
    check_bound(node_of("MatMul", inputs), inputs)


@st.composite
def matrices(draw: st.DrawFn) -> list[np.ndarray]:
    """Two arrays that have a product, with dims in any order in memory, gaps and negative steps."""
    rows, inner, columns = (draw(st.integers(1, limit)) for limit in (70, 300, 150))
    lead = draw(st.lists(st.integers(1, 3), max_size=3))
    dtype = draw(st.sampled_from(["float32", "float64"]))
    arrays = []
    for dims in ((rows, inner), (inner, columns)):
        own = [draw(st.sampled_from([1, size])) for size in lead]
        shape = (*own[draw(st.integers(0, len(own))) :], *dims)
        order = draw(st.permutations(range(len(shape))))
        memory = numbers(tuple([2 * shape[axis] for axis in order]), dtype)
        step = draw(st.sampled_from([1, 2, -1]))
        parts = [slice(None, None, -1), slice(0, None, 2)]
        for axis in range(memory.ndim):
            size = shape[order[axis]]
            part = slice(0, size) if step == 1 else parts[step > 0]
            memory = np.moveaxis(np.moveaxis(memory, axis, 0)[part][:size], 0, axis)
        arrays.append(memory.transpose(np.argsort(order)))
    return arrays


@pytest.mark.costly
@pytest.mark.hypothesis
@settings(deadline=None, max_examples=100)
@given(matrices())
def test_products_of_any_strides_are_within_the_bound(inputs):
    check_bound(node_of("MatMul", inputs), inputs)


@pytest.mark.parametrize(
    "shapes", [((9, 40), (40, 70)), ((2, 40), (70, 40)), ((80, 300), (300, 9))]
)
def test_nan_and_infinity_reach_what_they_are_multiplied_for_and_nothing_else(shapes):
    a, b = (numbers(dims, "float32") for dims in shapes)
    a[1, 3], a[0, -1], b[-1, 2] = np.nan, np.inf, -np.inf
    b = b.T if shapes[1][1] == shapes[0][1] else b
    with np.errstate(invalid="ignore"):
        want = a.astype(np.float64) @ b.astype(np.float64)
    for library in LIBRARIES:
        kernel = kernel_of(node_of("MatMul", [a, b]), library)
        assert kernel is not None
        y = kernel.function(a, b)
        np.testing.assert_array_equal(np.isnan(y), np.isnan(want))
        np.testing.assert_array_equal(np.isinf(y) * np.sign(y), np.isinf(want) * np.sign(want))


def test_term_with_factor_zero_is_not_read():
    inputs = [numbers((5, 4), "float32"), numbers((4, 6), "float32")]
    third = np.full((5, 6), np.nan, np.float32)
    for library in LIBRARIES:
        kernel = kernel_of(node_of("Gemm", [*inputs, third], beta=0.0), library)
        assert kernel is not None
        y = kernel.function(*inputs, third)
        np.testing.assert_allclose(y, inputs[0] @ inputs[1], **ROUNDING)


@pytest.mark.parametrize("shapes", [((97, 70), (70, 40)), ((3, 50, 20), (3, 20, 33))], ids=str)
def test_results_do_not_depend_on_the_number_of_threads(shapes, monkeypatch):
    inputs = [numbers(dims, "float32") for dims in shapes]
    for library in LIBRARIES:
        results = []
        for cores in (1, 3, 16):
            monkeypatch.setattr("penstock.backends.native.core_budget", lambda n=cores: n)
            kernel = kernel_of(node_of("MatMul", inputs), library)
            assert kernel is not None
            y = np.empty(np.matmul(*inputs).shape, np.float32)
            assert kernel.into is not None
            kernel.into(*inputs, y)
            results.append(y.tobytes())
        assert len(set(results)) == 1


def test_estimate_grows_with_the_product_and_is_infinite_for_none():
    seconds = [
        estimate(
            RATES, product_workload(node_of("MatMul", [numbers(d, "float32") for d in shapes]))
        )
        for shapes in (((1, 4), (4, 4)), ((64, 64), (64, 64)), ((0, 8), (8, 8)))
    ]
    assert seconds[0] < seconds[1] < seconds[2] == math.inf
