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


@pytest.mark.parametrize(
    "executor", ["linear", "dataflow", "parallel", "streams", "frames", "interpret"]
)
@pytest.mark.parametrize(("size", "index"), [(1, LARGE - 1), (LARGE, 5)])
def test_tensor_array_holds_only_what_was_written(executor, size, index):
    session = session_of(array_of(size, index), executor)
    outputs = session.run({}, ["read", "count"])
    assert outputs["read"].tolist() == [1, 2]
    assert outputs["count"] == LARGE


@pytest.mark.parametrize(
    "executor", ["linear", "dataflow", "parallel", "streams", "frames", "interpret"]
)
def test_tensor_array_refuses_to_fill_its_places_beyond_max_bytes(executor):
    with pytest.raises(ps.LimitExceeded, match=r"^TensorArrayConcatV3 \(all"):
        session_of(array_of(LARGE, 5), executor).run({}, ["all"])


@pytest.mark.parametrize(
    "executor", ["linear", "dataflow", "parallel", "streams", "frames", "interpret"]
)
def test_list_of_more_places_than_max_bytes_is_refused(executor):
    g = Builder()
    g.const(np.int32(LARGE), "count")
    g.const(np.int32([2]), "shape")
    types = {"element_dtype": Type("float32"), "shape_type": Type("int32")}
    g.node("TensorListReserve", "shape", "count", name="list", **types)
    g.node("TensorListLength", "list", name="length")
    with pytest.raises(ps.LimitExceeded, match=r"^TensorListReserve \(list"):
        session_of(g, executor).run({}, ["length"])


@pytest.mark.parametrize(
    "executor", ["linear", "dataflow", "parallel", "streams", "frames", "interpret"]
)
@pytest.mark.parametrize("op", ["TensorArrayReadV3", "TensorArrayGatherV3", "TensorArrayConcatV3"])
def test_tensor_array_read_as_another_dtype_is_refused(executor, op):
    g = array_of(2, 1)
    more = {"TensorArrayReadV3": ["index"], "TensorArrayGatherV3": ["indices"]}.get(op, [])
    g.const(np.int32([1]), "indices")
    g.node(op, "array", *more, "write", name="wrong", dtype=Type("int32"))
    with pytest.raises(ps.RunError, match="the elements of the tensor array must"):
        session_of(g, executor).run({}, ["wrong:0"])


@pytest.mark.parametrize(
    "executor", ["linear", "dataflow", "parallel", "streams", "frames", "interpret"]
)
def test_list_read_as_another_dtype_is_refused(executor):
    g = Builder()
    g.const(np.float32([[1, 2]]), "rows")
    g.const(np.int32([2]), "shape")
    types = {"element_dtype": Type("float32"), "shape_type": Type("int32")}
    g.node("TensorListFromTensor", "rows", "shape", name="list", **types)
    g.node("TensorListStack", "list", "shape", name="all", element_dtype=Type("int64"))
    with pytest.raises(ps.RunError, match="the elements of the list of tensors"):
        session_of(g, executor).run({}, ["all"])


def stack_of(pushed: str, popped: str) -> Builder:
    """A stack of float32 onto which a value is pushed and from which one is popped."""
    g = Builder()
    g.const(np.int32(-1), "limit")
    g.const(np.ones(2, pushed), "x")
    g.node("StackV2", "limit", name="stack", elem_type=Type("float32"))
    g.node("StackPushV2", "stack", "x", name="push", T=Type(pushed))
    g.node("StackPopV2", "stack", "^push", name="pop", elem_type=Type(popped))
    return g


@pytest.mark.parametrize(
    "executor", ["linear", "dataflow", "parallel", "streams", "frames", "interpret"]
)
@pytest.mark.parametrize(
    ("pushed", "popped", "fault"),
    [
        ("float32", "int32", "the elements of the stack must"),
        ("int32", "float32", "the stack has elements of type"),
    ],
)
def test_stack_of_another_dtype_is_refused(executor, pushed, popped, fault):
    with pytest.raises(ps.RunError, match=fault):
        session_of(stack_of(pushed, popped), executor).run({}, ["pop"])
    g = stack_of("float32", "float32")
    assert session_of(g, executor).run({}, ["pop"])["pop"].tolist() == [1, 1]
