"""Tensor arrays and lists whose sizes a model makes up."""

from __future__ import annotations

import numpy as np
import pytest

import penstock as ps
from tests.support.tf_graphs import Builder, Shape, Type

LARGE = 2**31 - 1
LIMITS = ps.Limits(max_bytes=2**24)


def session_of(builder: Builder, executor: str) -> ps.Session:
    return ps.compile(builder.bytes(), executor=executor, limits=LIMITS)


def array_of(size: int, index: int) -> Builder:
    """An array of ``size`` whose element ``index`` is written."""
    g = Builder()
    g.const(np.int32(size), "size")
    g.const(np.int32(index), "index")
    g.const(np.float32([1, 2]), "x")
    dtype, shape = Type("float32"), Shape([2])
    g.node(
        "TensorArrayV3", "size", name="array", dtype=dtype, element_shape=shape, dynamic_size=True
    )
    g.node("TensorArrayWriteV3", "array", "index", "x", "array:1", name="write", T=dtype)
    g.node("TensorArraySizeV3", "array", "write", name="count")
    g.node("TensorArrayReadV3", "array", "index", "write", name="read", dtype=dtype)
    g.node("TensorArrayConcatV3", "array", "write", name="all", dtype=dtype)
    return g


@pytest.mark.parametrize("executor", ["linear", "dataflow", "frames"])
@pytest.mark.parametrize(("size", "index"), [(1, LARGE - 1), (LARGE, 5)])
def test_tensor_array_holds_only_what_was_written(executor, size, index):
    session = session_of(array_of(size, index), executor)
    outputs = session.run({}, ["read", "count"])
    assert outputs["read"].tolist() == [1, 2]
    assert outputs["count"] == LARGE


@pytest.mark.parametrize("executor", ["linear", "dataflow", "frames"])
def test_tensor_array_refuses_to_fill_its_places_beyond_max_bytes(executor):
    with pytest.raises(ps.LimitExceeded, match=r"^TensorArrayConcatV3 \(all"):
        session_of(array_of(LARGE, 5), executor).run({}, ["all"])


@pytest.mark.parametrize("executor", ["linear", "dataflow", "frames"])
def test_list_of_more_places_than_max_bytes_is_refused(executor):
    g = Builder()
    g.const(np.int32(LARGE), "count")
    g.const(np.int32([2]), "shape")
    g.node("TensorListReserve", "shape", "count", name="list", element_dtype=Type("float32"))
    g.node("TensorListLength", "list", name="length")
    with pytest.raises(ps.LimitExceeded, match=r"^TensorListReserve \(list"):
        session_of(g, executor).run({}, ["length"])
