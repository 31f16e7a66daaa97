"""Python operators on values mean what they do in NumPy."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import penstock as ps
from penstock.build import GraphBuilder, SymbolicValue
from penstock.core.types import SequenceType, TensorType
from tests.build.test_graph_builder import run

A = np.array([[7, -7, 3], [2, 5, -4]])


B = np.array([3, -2, 2])


ARITHMETIC = "add sub mul floordiv mod lt le gt ge eq ne".split()  # noqa: SIM905 - a list of words


BITWISE = ["and_", "or_", "xor"]


@pytest.mark.parametrize("dtype", [np.int64, np.float32])
@pytest.mark.parametrize("name", ARITHMETIC)
def test_operator_means_what_it_does_in_numpy(name: str, dtype: Any) -> None:
    f, x, y = getattr(operator, name), A.astype(dtype), B.astype(dtype)
    b = GraphBuilder()
    value = b.input("x", dtype, ["n", 3])
    for i, result in enumerate([f(value, y), f(y, value), f(value, 2), f(2, value)]):
        b.output(f"y{i}", result)
    for got, want in zip(run(b, x), [f(x, y), f(y, x), f(x, 2), f(2, x)], strict=True):
        assert got.dtype == want.dtype
        np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("name", BITWISE)
@pytest.mark.parametrize("dtype", [np.int32, np.bool_])
def test_bitwise_operator_of_truth_values_is_logical(name: str, dtype: Any) -> None:
    f, x, y = getattr(operator, name), (A > 2).astype(dtype), (B > 0).astype(dtype)
    b = GraphBuilder()
    value = b.input("x", dtype, [2, 3])
    b.output("y", f(value, y))
    b.output("z", ~value)
    got, inverse = run(b, x)
    np.testing.assert_array_equal(got, f(x, y))
    np.testing.assert_array_equal(inverse, ~x)


def test_power_quotient_product_and_sign_mean_what_they_do_in_numpy() -> None:
    x = np.array([[0.5, 2, 3], [4, 5, 6]], np.float32)
    b = GraphBuilder()
    value = b.input("x", np.float32, x.shape)
    results = [value**2, 2**value, value / 4, 4 / value, value @ x.T, x.T @ value, -value]
    for i, result in enumerate([*results, abs(-value)]):
        b.output(f"y{i}", result)
    wants = [x**2, 2**x, x / 4, 4 / x, x @ x.T, x.T @ x, -x, x]
    for got, want in zip(run(b, x), wants, strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-6)


KEYS = [
    np.s_[1],
    np.s_[-1, 2:],
    np.s_[::-1, :, 1:4:2],
    np.s_[:, None, 0],
    np.s_[..., -2],
    np.s_[None, ..., None],
    np.s_[1:, ..., ::-2],
    np.s_[:, [0, 2, 1]],
    np.s_[-1:0:-1],
]


@pytest.mark.parametrize("key", KEYS, ids=str)
def test_index_means_what_it_does_in_numpy(key: Any) -> None:
    x = np.arange(60, dtype=np.float32).reshape(3, 4, 5)
    b = GraphBuilder()
    value = b.input("x", np.float32, [3, "m", 5])
    b.output("y", value[key])
    np.testing.assert_array_equal(run(b, x), x[key])


def test_index_by_a_value_takes_rows_of_an_axis() -> None:
    x, rows = np.arange(12.0).reshape(4, 3), np.array([[3, 0], [1, 1]])
    b = GraphBuilder()
    value, index = b.input("x", np.float64, [4, 3]), b.input("rows", np.int64, [2, 2])
    b.output("y", value[index, 1:])
    np.testing.assert_array_equal(run(b, x, rows), x[rows, 1:])


def test_reshape_transpose_and_astype() -> None:
    x = np.arange(6, dtype=np.int32).reshape(2, 3)
    b = GraphBuilder()
    value = b.input("x", np.int32, [2, 3])
    b.output("y", value.transpose().reshape(-1).astype(np.float32) / 2)
    np.testing.assert_array_equal(run(b, x), x.T.reshape(-1) / np.float32(2))


def test_number_takes_the_dtype_of_a_value_that_is_known_in_a_run() -> None:
    b = GraphBuilder()
    values = b.input("s", SequenceType(TensorType()))
    b.output("y", b.op("SequenceAt", values, 0) + 1)
    (got,) = [run(b, [np.array([1, 2], np.int16)])]
    np.testing.assert_array_equal(got, np.array([2, 3], np.int16))
    assert got.dtype == np.int16


def test_value_is_neither_true_nor_false_nor_iterable() -> None:
    x = GraphBuilder().input("x", np.float32, [2])
    with pytest.raises(TypeError, match=r"GraphBuilder\.cond"):
        bool(x > 0)
    with pytest.raises(TypeError, match="not iterable"):
        list(x)  # type: ignore[call-overload]


@pytest.mark.parametrize(
    ("use", "error", "reason"),
    [
        (lambda x: x / 2, TypeError, "use //"),
        (lambda x: x + 0.5, TypeError, "use astype first"),
        (lambda x: x[1, 2, 3], IndexError, "has 2 axes, but 3 are indexed"),
        (lambda x: x[0.5], TypeError, "must be of integers"),
        (lambda x: x[::0], ps.InvalidModel, "steps must not contain 0"),
    ],
)
def test_operator_that_cannot_be_meant_is_refused(
    use: Callable[[SymbolicValue], Any], error: type[Exception], reason: str
) -> None:
    with pytest.raises(error, match=reason):
        use(GraphBuilder().input("x", np.int64, [2, 3]))
