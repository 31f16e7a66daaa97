"""Tensors of a GraphDef: shapes, repeated elements, limits."""

from __future__ import annotations

import numpy as np
import pytest

import penstock as ps
from penstock.core.errors import InvalidModel
from tests.frontends.tensorflow.test_importer import refused
from tests.support.tf_graphs import Builder, Type


def test_constant_of_another_dtype_than_declared_is_refused() -> None:
    g = Builder()
    g.node("Const", name="c", dtype=Type("int32"), value=np.float32(1))
    refused(g, "declares int32, but its value is float32")


def test_tensor_that_does_not_fit_its_shape_is_refused() -> None:
    g = Builder()
    g.const(np.zeros(4, np.float32), "c")
    g.proto.node[0].attr["value"].tensor.tensor_shape.dim[0].size = 5
    refused(g, "has 16 bytes, but takes 20")
    g.proto.node[0].attr["value"].tensor.tensor_shape.dim[0].size = 2**62
    refused(g, "c in the model")
    g.proto.node[0].attr["value"].tensor.dtype = 20
    refused(g, "element type 20")


def test_repeated_element_takes_no_memory() -> None:
    g = Builder()
    g.const(np.zeros((), np.float32), "c")
    value = g.proto.node[0].attr["value"].tensor
    value.tensor_content = b""
    value.float_val.append(2.5)
    value.tensor_shape.dim.add(size=2**26)
    g.node(
        "StridedSlice",
        "c",
        *(g.const(np.array([i], np.int32)) for i in (5, 8, 1)),
        name="s",
        T=Type("float32"),
        Index=Type("int32"),
    )
    (out,) = ps.compile(g.bytes(), backends=["numpy"]).run({}, ["s"]).values()
    np.testing.assert_array_equal(out, np.full(3, 2.5, np.float32))


def test_repeated_element_beyond_max_bytes_is_refused() -> None:
    g = Builder()
    g.const(np.zeros((), np.int32), "c")
    value = g.proto.node[0].attr["value"].tensor
    value.tensor_content = b""
    value.tensor_shape.dim.add(size=2**31 - 1)
    with pytest.raises(InvalidModel, match="repeats an element to 8589934588 bytes, more than"):
        ps.load(g.bytes(), limits=ps.Limits(max_bytes=2**26))


def test_constants_beyond_the_limit_are_refused() -> None:
    g = Builder()
    g.const(np.zeros(1000, np.float32), "c")
    ps.load(g.bytes(), limits=ps.Limits(max_constant_bytes=4000))
    with pytest.raises(InvalidModel, match="constants have 4000 bytes"):
        ps.load(g.bytes(), limits=ps.Limits(max_constant_bytes=3999))


def test_string_tensors_pass_through() -> None:
    g = Builder()
    g.const(np.array(["cat", "dog", "mouse"]), "labels")
    g.placeholder("best", "int32", -1)
    zero = g.const(np.int32(0), "axis")
    types = {"Tparams": Type("object"), "Tindices": Type("int32"), "Taxis": Type("int32")}
    g.node("GatherV2", "labels", "best", zero, name="named", **types)
    g.node("Pack", "named", "named", name="twice", N=2, T=Type("object"))
    g.node("Equal", "named", "named", name="same", T=Type("object"))
    for executor in ("linear", "dataflow", "frames"):
        session = ps.compile(g.bytes(), executor=executor)
        out = session.run({"best": [2, 0]}, ["twice", "same"])
        assert out["twice"].tolist() == [["mouse", "cat"]] * 2
        assert out["same"].tolist() == [True, True]
