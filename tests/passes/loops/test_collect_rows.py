"""Sequences that Loops append to become rows that they collect, as ONNX Runtime joins them."""

from __future__ import annotations

import numpy as np
import onnxruntime
import pytest
from bench.nets import Net
from onnx import TensorProto, helper

import penstock as ps
from penstock.passes.pipeline import optimize


def appended(axis: int, new_axis: int, *, trips: int = 3, position: bool = False, read=False):
    """A Loop that appends a row [2, 3], which changes, to a sequence that is joined at the end."""
    net, body = Net(2), Net(3, "b")
    x = net.input("x", [2, 3])
    for name, dtype in (("i", TensorProto.INT64), ("go", TensorProto.BOOL)):
        body.input(name, [], dtype)
    body.output("go", "on", [], TensorProto.BOOL)
    body.input("v", [2, 3])
    new = body.Cos(body.Add("v", body.number(0.5)))
    body.output(new, "v_next", [2, 3])
    body.inputs.append(helper.make_tensor_sequence_value_info("s", TensorProto.FLOAT, None))
    where = [body.const(np.array(0))] if position else []
    body.nodes.append(helper.make_node("SequenceInsert", ["s", new, *where], ["s_next"]))
    body.outputs.append(helper.make_tensor_sequence_value_info("s_next", TensorProto.FLOAT, None))
    begin = net.SequenceEmpty(dtype=TensorProto.FLOAT)
    given = net.const(np.array(trips)), net.const(np.array(True)), x, begin
    _, rows = net.Loop(*given, outputs=2, body=body.graph("body"))
    net.output(net.ConcatFromSequence(rows, axis=axis, new_axis=new_axis), "y", None)
    if read:
        net.output(net.SequenceAt(rows, net.const(np.array(1))), "second", [2, 3])
    return net.model()


def operations(model):
    graph = ps.load(model).graph
    optimize(graph)
    return {node.op.name for node in graph.walk()}


def compare(model):
    x = np.arange(6, dtype=np.float32).reshape(2, 3)
    wanted = onnxruntime.InferenceSession(model.SerializeToString()).run(None, {"x": x})
    for y, want in zip(ps.compile(model).run({"x": x}).values(), wanted, strict=True):
        np.testing.assert_allclose(y, want, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("axis", "new_axis"), [(0, 1), (1, 1), (2, 1), (-1, 1), (0, 0), (1, 0), (-1, 0), (-2, 0)]
)
def test_sequence_that_a_loop_appends_to_is_collected_along_any_axis(axis, new_axis):
    model = appended(axis, new_axis)
    assert not {"SequenceEmpty", "SequenceInsert", "ConcatFromSequence"} & operations(model)
    compare(model)


@pytest.mark.parametrize("options", [{"position": True}, {"read": True}])
def test_sequence_that_is_more_than_joined_stays(options):
    model = appended(0, 1, **options)
    assert "SequenceInsert" in operations(model)
    compare(model)


def test_loop_that_never_runs_keeps_its_sequence():
    model = appended(0, 1, trips=0)
    assert "ConcatFromSequence" in operations(model)
