from __future__ import annotations

import numpy as np

import penstock as ps
from penstock.core.limits import Limits
from penstock.core.types import FLOAT32, INT64
from penstock.frontends.common.weight_file import ConstantBudget, WeightFile
from penstock.frontends.weights.tensors import StoredTensor, TensorStore
from penstock.frontends.weights.writer import ModelWriter


def writer(**arrays: np.ndarray) -> ModelWriter:
    tensors = {}
    for name, array in arrays.items():
        name = name.replace("_", ".")
        source = WeightFile(array.tobytes())
        tensors[name] = StoredTensor(name, array.shape, "F32", "m", source, 0, array.nbytes)
    return ModelWriter(TensorStore("m", tensors, ConstantBudget(Limits())))


MATRIX = np.arange(6, dtype=np.float32).reshape(2, 3)


def test_product_has_the_matrix_as_it_is_stored_and_the_bias() -> None:
    b = writer(a_weight=MATRIX, a_bias=np.array([1, 2], np.float32))
    x = b.input("x", FLOAT32, ("n", 3))
    b.output("y", b.linear(x, "a", 3, 2), ("n", 2))
    (y,) = ps.compile(b.model(None, {})).run({"x": np.eye(3, dtype=np.float32)}).values()
    np.testing.assert_array_equal(y, np.add(MATRIX.T, [1, 2]))


def test_matrices_are_views_of_what_is_stored() -> None:
    b = writer(a_weight=MATRIX)
    ids = b.input("ids", INT64, ("n",))
    x = b.embedding(ids, "a", 3)
    b.output("y", b.linear(x, "a", 3, 2), ("n", 2))
    gather, product = b.model(None, {}).graph.nodes
    table, matrix = gather.const(0), product.const(1)
    assert table is not None
    assert matrix is not None
    assert np.shares_memory(table, matrix)
    assert (table.shape, matrix.shape) == ((2, 3), (3, 2))


def test_offset_is_added_to_the_weights_of_a_norm() -> None:
    b = writer(a_weight=np.zeros(3, np.float32))
    x = b.input("x", FLOAT32, ("n", 3))
    b.output("y", b.norm(x, "a", 3, 0.0, 1.0), ("n", 3))
    (y,) = ps.compile(b.model(None, {})).run({"x": np.ones((1, 3), np.float32)}).values()
    np.testing.assert_allclose(y, [[1, 1, 1]])


def test_split_divides_the_last_axis() -> None:
    b = writer()
    x = b.input("x", FLOAT32, ("n", 3))
    for i, part in enumerate(b.split(x, [1, 2])):
        b.output(f"y{i}", part, ("n", i + 1))
    parts = ps.compile(b.model(None, {"a": "b"})).run({"x": MATRIX})
    assert [y.tolist() for y in parts.values()] == [[[0], [3]], [[1, 2], [4, 5]]]


def test_names_of_values_are_unique_and_tell_their_section() -> None:
    b = writer(a_weight=MATRIX)
    b.section("head")
    x = b.input("x", FLOAT32, ("n", 3))
    names = [b.op("Relu", x).name for _ in range(2)]
    assert names == ["head/relu", "head/relu_1"]
