"""Tensors of ONNX models: constants, initializers, sparse ones, and every element type."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from penstock.analysis.schemas import DTYPE_NAMES
from penstock.core.limits import Limits
from penstock.frontends.onnx.importer import load_onnx
from penstock.frontends.onnx.tensors import dtype_of_code
from tests.support.onnx_models import FLOAT, interpret_model, model_of, node, problems, tensor

X = np.array([-1, 2], np.float32)


@pytest.mark.parametrize(
    ("attrs", "wanted"),
    [
        ({"value": tensor("", np.arange(6).reshape(2, 3))}, np.arange(6).reshape(2, 3)),
        ({"value_float": 1.5}, np.float32(1.5)),
        ({"value_floats": [1.5, 2]}, np.array([1.5, 2], np.float32)),
        ({"value_int": 7}, np.int64(7)),
        ({"value_ints": [7, -1]}, np.array([7, -1])),
        ({"value_string": "a b"}, np.array("a b", object)),
        ({"value_strings": ["a", "ä"]}, np.array(["a", "ä"], object)),
    ],
)
def test_constant_nodes_become_constants(attrs: Any, wanted: Any) -> None:
    model = load_onnx(model_of(node("Constant", "", "y", **attrs)))
    assert not model.graph.nodes
    const = model.graph.outputs[0].const
    assert const is not None
    assert const.dtype == wanted.dtype
    assert const.shape == wanted.shape
    assert np.array_equal(const, wanted)
    assert not const.flags.writeable


def test_constant_nodes_with_faults_are_refused() -> None:
    proto = model_of(
        node("Constant", "", "a", "none"),
        node("Constant", "", "b", "both", value_int=1, value_float=1.0),
        node("Constant", "", "y", "kind", value_int=1.0),
    )
    none, both, kind = problems(proto)
    assert none.startswith("none in the model is a Constant with attributes []")
    assert "['value_float', 'value_int']" in both
    assert kind == "value_int of kind in the model is of kind FLOAT, not INT; write it as that"


def sparse(name: str, values: Any, indices: Any, dims: Sequence[int]) -> onnx.SparseTensorProto:
    return helper.make_sparse_tensor(
        tensor(name, np.asarray(values, np.float32)), tensor("", np.asarray(indices)), dims
    )


@pytest.mark.parametrize("indices", [[1, 5], [[0, 1], [1, 2]]])
def test_sparse_initializers_become_dense(indices: Any) -> None:
    proto = model_of(node("Identity", "w", "y"), inputs=())
    proto.graph.sparse_initializer.append(sparse("w", [3, 4], indices, [2, 3]))
    (y,) = interpret_model(load_onnx(proto))
    assert np.array_equal(y, [[0, 3, 0], [0, 0, 4]])
    constant = model_of(node("Constant", "", "y", sparse_value=sparse("", [3, 4], indices, [2, 3])))
    assert np.array_equal(interpret_model(load_onnx(constant), X)[0], y)


@pytest.mark.parametrize(
    ("values", "indices", "dims", "message"),
    [
        ([1], [6], [2, 3], "indices outside its dims"),
        ([1], [-1], [2, 3], "indices outside its dims"),
        ([1], [[0, 3]], [2, 3], "indices outside its dims"),
        ([1], [[0, 1, 1]], [2, 3], "fit neither"),
        ([1], [0, 1], [2, 3], "fit neither"),
        ([1], [0], [2**20, 2**20], "bytes in dense form"),
        ([1], [0], [2**40, 2**40], "more than memory can hold"),
        ([1], [0], [-2, 3], "negative dim"),
        ([[1]], [0], [2, 3], "values of rank 1"),
    ],
)
def test_sparse_initializers_with_faults_are_refused(
    values: Any, indices: Any, dims: Any, message: str
) -> None:
    proto = model_of(node("Identity", "w", "y"), inputs=())
    proto.graph.sparse_initializer.append(sparse("w", values, indices, dims))
    (problem,) = problems(proto)
    assert problem.startswith("initializer 'w' in the model: ")
    assert message in problem


def stored(dtype: np.dtype, count: int) -> np.ndarray:
    if dtype == np.bool_:
        return np.arange(count) % 2 == 0
    if dtype.kind == "c":
        return (np.arange(count) - 1j * np.arange(count)).astype(dtype)
    values = np.arange(count) % 2 if dtype.name.endswith("2") else np.arange(count) % 4
    if dtype.name == "float8_e8m0fnu":
        values = 2.0**values
    return values.astype(np.float32).astype(dtype)


# Older packages, with which test_versions.py runs this file, lack some.
CODES = {*TensorProto.DataType.values()}
NUMERIC = [c for c, name in DTYPE_NAMES.items() if name != "string" and c in CODES]


@pytest.mark.parametrize("count", [0, 1, 3, 8, 9])
@pytest.mark.parametrize("code", NUMERIC, ids=[TensorProto.DataType.Name(c) for c in NUMERIC])
def test_every_element_type_reads_from_raw_and_typed_data(code: int, count: int) -> None:
    dtype = dtype_of_code(code)
    values = stored(dtype, count)
    raw = numpy_helper.from_array(values, "w")
    assert raw.data_type == code
    typed = helper.make_tensor("w", code, [count], values)
    for proto in (raw, typed):
        model = load_onnx(model_of(inputs=(), outputs=("w",), initializers=[proto]))
        got = model.graph.outputs[0].const
        assert got is not None
        assert got.dtype == dtype
        wide = np.complex128 if dtype.kind == "c" else np.float64
        assert np.array_equal(got.astype(wide), values.astype(wide))


def test_packed_4_bit_integers_are_sign_extended() -> None:
    values = np.array([-8, 7, -1], ml_dtypes.int4)
    proto = model_of(inputs=(), outputs=("w",), initializers=[tensor("w", values)])
    const = load_onnx(proto).graph.outputs[0].const
    assert const is not None
    assert const.astype(int).tolist() == [-8, 7, -1]


def test_strings_that_are_not_utf8_survive() -> None:
    proto = TensorProto(name="w", data_type=TensorProto.STRING, dims=[2])
    proto.string_data.extend([b"abc", b"\xff"])
    const = (
        load_onnx(model_of(inputs=(), outputs=("w",), initializers=[proto])).graph.outputs[0].const
    )
    assert const is not None
    assert const.tolist() == ["abc", "\udcff"]


def test_bools_of_other_bytes_become_true() -> None:
    proto = TensorProto(name="w", data_type=TensorProto.BOOL, dims=[3], raw_data=b"\x00\x02\xff")
    const = (
        load_onnx(model_of(inputs=(), outputs=("w",), initializers=[proto])).graph.outputs[0].const
    )
    assert const is not None
    assert const.view(np.uint8).tolist() == [0, 1, 1]


def weight(**fields: Any) -> TensorProto:
    return TensorProto(**{"name": "w", "data_type": FLOAT, "dims": [2, 3], **fields})


@pytest.mark.parametrize(
    ("proto", "message"),
    [
        (weight(raw_data=bytes(23)), "float32[2, 3] has 23 bytes of data, but takes 24"),
        (weight(raw_data=bytes(25)), "has 25 bytes of data, but takes 24"),
        (weight(), "has 0 entries in float_data, but takes 6"),
        (weight(float_data=[1] * 5), "has 5 entries in float_data, but takes 6"),
        (weight(dims=[-2, 3]), "negative dim in [-2, 3]"),
        (weight(dims=[2**32]), "has 0 entries in float_data, but takes 4294967296"),
        (weight(dims=[2**32, 2**31]), "more than memory can hold"),
        (weight(dims=[0, 2**62, 2**62]), "more than memory can hold"),
        (weight(dims=[1] * 65), "has 65 dims, more than 64"),
        (weight(data_type=0), "element type 0"),
        (weight(data_type=99), "element type 99"),
        (weight(data_type=TensorProto.STRING, dims=[1], raw_data=b"a"), "cannot be raw data"),
        (weight(data_type=TensorProto.STRING, dims=[1]), "has 0 strings for 1 elements"),
        (weight(segment=TensorProto.Segment(begin=0, end=1)), "stored in segments"),
        (weight(data_location=TensorProto.EXTERNAL), "external data"),
    ],
)
def test_initializers_with_faults_are_refused(proto: TensorProto, message: str) -> None:
    begin = time.thread_time()
    (problem,) = problems(model_of(node("Relu", "x", "y"), initializers=[proto]))
    assert time.thread_time() - begin < 1
    assert problem.startswith("initializer 'w' in the model: ")
    assert message in problem


def test_faulty_tensor_attribute_is_named() -> None:
    proto = model_of(node("ConstantOfShape", "s", "y", "fill", value=weight(dims=[1])))
    (problem,) = problems(proto)
    assert problem.startswith("attribute 'value' of fill in the model: float32[1] has 0 entries")


def test_constants_beyond_max_constant_bytes_are_refused() -> None:
    weights = [tensor(f"w{i}", np.zeros(10, np.float32)) for i in range(3)]
    proto = model_of(node("Relu", "x", "y"), initializers=weights)
    load_onnx(proto, Limits(max_constant_bytes=120))
    (problem,) = problems(proto, Limits(max_constant_bytes=119))
    assert problem.startswith("initializer 'w2' in the model: with it, the constants take 120")
