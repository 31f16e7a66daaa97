"""What NumPy computes to the same bits on all processors."""

from __future__ import annotations

import numpy as np
import pytest

from penstock.build import GraphBuilder
from penstock.ops.exactness import is_exact

ATTRS = {
    "Cast": {"to": 11},
    "Transpose": {"perm": [1, 0]},
    "HannWindow": {},
    "MelWeightMatrix": {},
    "ArgMax": {},
}


def exact(name: str, *dtypes: str, dims: tuple[int, ...] = (2, 3)) -> bool:
    b = GraphBuilder()
    inputs = [b.input(f"x{i}", dtype, dims) for i, dtype in enumerate(dtypes)]
    node = b.op(name, *inputs, **ATTRS.get(name, {})).value.producer
    assert node is not None
    return is_exact(node, [None if v is None else v.type for v in node.outputs])


@pytest.mark.parametrize(
    ("name", "dtypes"),
    [
        ("Add", ("float32", "float32")),
        ("Sqrt", ("float64",)),
        ("Cast", ("float32",)),
        ("Transpose", ("float32",)),
        ("ArgMax", ("float32",)),
        ("Less", ("float32", "float32")),
        ("Where", ("bool", "float32", "float32")),
        ("Mod", ("int64", "int64")),
    ],
)
def test_operations_that_are_rounded_in_one_way_are_exact(name, dtypes):
    assert exact(name, *dtypes)


@pytest.mark.parametrize("name", ["Exp", "Sin", "Asinh", "ReduceSum", "Softmax"])
def test_functions_and_sums_are_not(name):
    assert not exact(name, "float32")
    assert not exact(name, "float64")


def test_products_of_floats_are_not():
    assert not exact("MatMul", "float32", "float32", dims=(3, 3))
    assert exact("MatMul", "int32", "int32", dims=(3, 3))


@pytest.mark.parametrize(
    ("name", "dims"), [("Exp", (0, 3)), ("Softmax", (3, 0)), ("ReduceSum", (0, 3))]
)
def test_operations_without_elements_are_exact(name, dims):
    assert exact(name, "float32", dims=dims)


def test_products_over_no_elements_are_exact():
    b = GraphBuilder()
    product = b.op("MatMul", b.input("x", "float32", (3, 0)), b.input("z", "float32", (0, 2)))
    assert is_exact(product.value.producer, [product.value.type])


def test_running_sums_are_exact():
    b = GraphBuilder()
    sums = b.op("CumSum", b.input("x", "float32", (2, 3)), b.input("axis", "int64", ()))
    assert is_exact(sums.value.producer, [sums.value.type])


@pytest.mark.parametrize(
    ("reduction", "updates", "wanted"),
    [("none", 4, True), ("add", 4, True), ("max", 4, False), ("max", 0, True), ("min", 4, False)],
)
def test_scatters_are_exact_but_for_extremes(reduction, updates, wanted):
    b = GraphBuilder()
    x, indices = b.input("x", "float32", (9,)), b.input("i", "int64", (updates,))
    given = b.input("u", "float32", (updates,))
    result = b.op("ScatterElements", x, indices, given, reduction=reduction)
    assert is_exact(result.value.producer, [result.value.type]) is wanted


def test_windows_and_filters_of_signals_are_exact():
    assert exact("HannWindow", "int64", dims=())
    assert exact("MelWeightMatrix", *["int64"] * 3, *["float32"] * 2, dims=())


def test_what_is_made_of_sizes_is_exact():
    b = GraphBuilder()
    value = b.op("ConstantOfShape", b.input("n", "int64", (2,)), value=np.ones(1, np.float32))
    assert is_exact(value.value.producer, [value.value.type])
