"""Products of computed matrices of codes, and what becomes of sums, against NumPy bit by bit."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from penstock.backends.native.code_products import merged_groups
from penstock.core.types import TensorType
from penstock.ir.graph import Node, Value
from penstock.ops.internal.fused import fused
from penstock.ops.registry import find
from tests.support.native_kernels import (  # noqa: F401
    LIBRARIES,
    check,
    kernel_of,
    node_of,
    pytestmark,
    threads_of,
)

RNG = np.random.default_rng(7)
DTYPES = ["uint8", "int8"]


def _codes(dtype: str, *dims: int) -> np.ndarray:
    ends = np.iinfo(dtype)
    return RNG.integers(ends.min, ends.max, dims, dtype, endpoint=True)


MATRICES = {
    "one": ((5, 7), (7, 4)),
    "many rows": ((130, 40), (40, 70)),
    "a batch": ((2, 3, 9, 33), (2, 3, 33, 40)),
    "rows of a batch": ((2, 3, 9, 33), (33, 40)),
    "broadcast": ((2, 1, 6, 20), (3, 20, 36)),
    "broadcast rows": ((6, 20), (3, 2, 20, 150)),
    "a row": ((1, 257), (257, 129)),
    "deep": ((3, 4100), (4100, 5)),
}


@pytest.mark.parametrize("w_dtype", DTYPES)
@pytest.mark.parametrize("x_dtype", DTYPES)
@pytest.mark.parametrize("name", MATRICES)
def test_product_of_computed_matrices_equals_numpy(name, x_dtype, w_dtype):
    x_dims, w_dims = MATRICES[name]
    inputs = [_codes(x_dtype, *x_dims), _codes(w_dtype, *w_dims), _codes(x_dtype), _codes(w_dtype)]
    for constants in ((), (2, 3), (2,)):
        check(node_of("MatMulInteger", inputs, constants), inputs)
    check(node_of("MatMulInteger", inputs[:2]), inputs[:2])


@pytest.mark.parametrize("w_dtype", DTYPES)
@pytest.mark.parametrize("extreme", ["min", "max"])
def test_product_of_computed_extreme_codes_does_not_saturate(extreme, w_dtype):
    end = getattr(np.iinfo(w_dtype), extreme)
    x, w = np.full((3, 600), 255, np.uint8), np.full((600, 40), end, w_dtype)
    inputs = [x, w, np.uint8(0).reshape(()), np.array(1, w_dtype)]
    check(node_of("MatMulInteger", inputs), inputs)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["a batch", "rows of a batch"])
def test_scaled_product_of_computed_matrices_equals_numpy(name, dtype):
    x_dims, w_dims = MATRICES[name]
    scales = [np.float32(0.02), np.float32(0.003), np.float32(0.08)]
    inputs: list[Any] = []
    for scale, codes in zip(
        scales, (_codes(dtype, *x_dims), _codes("int8", *w_dims)), strict=False
    ):
        inputs += [codes, scale.reshape(()), _codes(str(codes.dtype))]
    inputs += [scales[2].reshape(()), _codes(dtype)]
    check(node_of("QLinearMatMul", inputs, [1, 2, 4, 5, 6, 7]), inputs)


@pytest.mark.skipif(not hasattr(LIBRARIES[0].functions, "team_counts"), reason="there is no team")
def test_threads_share_a_product_of_computed_matrices():
    inputs = [_codes("uint8", 12, 128, 64), _codes("int8", 12, 64, 512)]
    node = node_of("MatMulInteger", inputs)
    kernel = kernel_of(node, LIBRARIES[0])
    before = sum(LIBRARIES[0].functions.team_counts()[:2])
    with threads_of(LIBRARIES[0], 2):
        result = kernel.function(*inputs)
    assert sum(LIBRARIES[0].functions.team_counts()[:2]) > before
    np.testing.assert_array_equal(result, inputs[0].astype(np.int32) @ inputs[1].astype(np.int32))


def _scaled(
    name: str,
    inputs: Sequence[Any],
    constants: Sequence[int],
    behind: Sequence[tuple],
    **attrs: Any,
) -> tuple[Node, list[np.ndarray]]:
    """A product and ``behind`` it a Cast and operations with these arrays, constants or not."""
    nodes, arrays = [node_of(name, inputs, constants, **attrs)], list(inputs)
    for op, array, is_constant in [("Cast", None, False), *behind]:
        (value,) = nodes[-1].outputs
        type_ = TensorType(np.dtype("float32"), value.type.dims)
        others = []
        if array is not None:
            const = array if is_constant else None
            others = [Value("other", TensorType(array.dtype, array.shape), const=const)]
            arrays.append(array)
        given = {"to": 1} if op == "Cast" else {}
        nodes.append(Node(find(op, "", 20), [value, *others], [Value("y", type_)], given))
    return fused(nodes), arrays


def _numbers(*dims: int) -> np.ndarray:
    return RNG.uniform(-0.02, 0.02, dims).astype(np.float32)


BEHIND = {
    "nothing": lambda n: [],
    "a factor": lambda n: [("Mul", _numbers(), False)],
    "factors": lambda n: [("Mul", _numbers(n), False), ("Add", _numbers(n), True)],
    "constant factors": lambda n: [("Mul", _numbers(n), True), ("Add", _numbers(n), False)],
    "a constant factor": lambda n: [("Mul", _numbers(1), True), ("Relu", None, False)],
    "a term": lambda n: [("Add", _numbers(1), True), ("Relu", None, False)],
}


@pytest.mark.parametrize("behind", BEHIND)
@pytest.mark.parametrize("constants", [(), (1,), (1, 2, 3)])
@pytest.mark.parametrize(("rows", "k", "n"), [(1, 40, 17), (7, 33, 150), (60, 64, 64)])
def test_scaled_product_of_integers_equals_numpy(rows, k, n, constants, behind):
    inputs = [_codes("uint8", 2, rows, k), _codes("int8", k, n), _codes("uint8"), _codes("int8")]
    if constants == (1,):
        inputs = inputs[:3]
    check(*_scaled("MatMulInteger", inputs, constants, BEHIND[behind](n)))


@pytest.mark.parametrize("behind", BEHIND)
@pytest.mark.parametrize("group", [1, 2])
def test_scaled_convolution_of_integers_equals_numpy(group, behind):
    x, w = _codes("uint8", 2, 8, 6, 7), _codes("uint8", 10, 8 // group, 3, 3)
    inputs = [x, w, _codes("uint8"), _codes("uint8", 10)]
    after = [
        (op, None if array is None else array.reshape(-1, 1, 1) if array.size > 1 else array, known)
        for op, array, known in BEHIND[behind](10)
    ]
    node, arrays = _scaled("ConvInteger", inputs, [1, 3], after, group=group, pads=[1, 1, 1, 1])
    check(node, arrays)


def test_scaled_product_with_factors_of_rows_has_no_kernel():
    inputs = [_codes("uint8", 6, 8), _codes("int8", 8, 6)]
    for factors in (_numbers(6, 1), _numbers(6, 6), _numbers(1, 1, 6)):
        node, _ = _scaled("MatMulInteger", inputs, [1], [("Mul", factors, False)])
        assert kernel_of(node, LIBRARIES[0]) is None


@pytest.mark.parametrize(
    ("groups", "filters", "channels", "count"),
    [(32, 4, 4, 8), (32, 16, 16, 2), (32, 32, 32, 1), (33, 2, 2, 11), (7, 1, 1, 7), (8, 1, 60, 1)],
)
def test_groups_are_merged_while_they_fill_no_more_than_a_panel(groups, filters, channels, count):
    assert merged_groups(groups, filters, channels) == count
