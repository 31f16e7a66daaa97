"""Sequences that Loops append to become rows that they collect, as ONNX Runtime joins them."""

from __future__ import annotations

import numpy as np
import onnxruntime
import pytest
from ai_edge_litert.interpreter import Interpreter
from bench.nets import Net
from onnx import TensorProto, helper

import penstock as ps
from penstock.passes.pipeline import optimize
from tests.support.tflite_models import model as tflite_model
from tests.support.tflite_models import subgraph


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


_ADD = ("AddOptions", {})
_INT = {"type": 2}
_JOIN = ("ConcatenationOptions", {"axis": 0})


def written(rows: int = 4, *, trips: int = 4, backward: bool = False, read: bool = False) -> bytes:
    """A TFLite model whose loop of x -> tanh(x + 0.5) sets a row of a list in each iteration, as
    the converter writes TensorListSetItem. ``read``: what is added to x comes from the list."""
    state = {
        "i": ("int32", []),
        "k": ("int32", []),
        "list": ("float32", [rows, 1, 3]),
        "x": ("float32", [1, 3]),
    }
    less = [("LESS", ["i", "limit"], ["more"], None)]
    bound = {"limit": np.array(trips, np.int32)}
    constants = {
        "one": np.array(1, np.int32),
        "step": np.array(-1 if backward else 1, np.int32),
        "half": np.float32(0.5),
        "vector": np.array([1], np.int32),
        "all": np.full(2, -1, np.int32),
        "begin": np.zeros(3, np.int32),
        "zeros": np.zeros(2, np.int32),
        "rest": np.full(3, -1, np.int32),
        "row": np.array([1, 1, 3], np.int32),
    }
    past = [("GATHER", ["list", "k"], ["past"], None), ("ADD", ["past", "half"], ["by"], _ADD)]
    body = [
        ("ADD", ["i", "one"], ["next"], _ADD),
        ("ADD", ["k", "step"], ["other"], _ADD),
        ("ADD", ["k", "one"], ["behind"], _ADD),
        *(past if read else []),
        ("ADD", ["x", "by" if read else "half"], ["sum"], _ADD),
        ("TANH", ["sum"], ["y"], None),
        ("RESHAPE", ["k", "vector"], ["place"], None),
        ("CONCATENATION", ["place", "all"], ["size"], _JOIN),
        ("SLICE", ["list", "begin", "size"], ["head"], None),
        ("RESHAPE", ["behind", "vector"], ["after"], None),
        ("CONCATENATION", ["after", "zeros"], ["start"], _JOIN),
        ("SLICE", ["list", "start", "rest"], ["tail"], None),
        ("RESHAPE", ["y", "row"], ["item"], None),
        ("CONCATENATION", ["head", "item", "tail"], ["set"], _JOIN),
    ]
    whole = dict.fromkeys(("next", "other", "behind", "place", "size", "after", "start"), _INT)
    loop = ("WhileOptions", {"cond_subgraph_index": 1, "body_subgraph_index": 2})
    given = {"zero": np.array(0, np.int32), "first": np.array((rows - 1) * backward, np.int32)}
    run = [("WHILE", ["zero", "first", "old", "x"], ["n", "m", "all", "last"], loop)]
    return tflite_model(
        [
            subgraph(
                {"old": state["list"], "x": state["x"]}, run, ["all", "last"], given, n=_INT, m=_INT
            ),
            subgraph(state, less, ["more"], bound, more={"type": 6}),
            subgraph(state, body, ["next", "other", "set", "y"], constants, **whole),
        ]
    )


def litert_answers(file: bytes, feeds: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    runner = Interpreter(model_content=file)
    runner.allocate_tensors()
    for place in runner.get_input_details():
        runner.set_tensor(place["index"], feeds[place["name"]])
    runner.invoke()
    return {p["name"]: runner.get_tensor(p["index"]) for p in runner.get_output_details()}


@pytest.mark.parametrize(
    ("options", "collected"),
    [
        ({}, True),
        ({"rows": 1, "trips": 1}, True),
        ({"backward": True}, True),
        ({"read": True}, False),
        ({"trips": 3}, False),
        ({"trips": 3, "backward": True}, False),
    ],
)
def test_rows_that_a_loop_writes_are_collected_where_it_writes_all(options, collected):
    file, rng = written(**options), np.random.default_rng(1)
    feeds = {"old": rng.normal(size=(options.get("rows", 4), 1, 3)), "x": rng.normal(size=(1, 3))}
    feeds = {name: array.astype(np.float32) for name, array in feeds.items()}
    session = ps.compile(file)
    out = session.run(feeds)
    assert ("SLICE_" in session.source) is not collected
    for name, want in litert_answers(file, feeds).items():
        np.testing.assert_allclose(out[name], want, rtol=1e-5, atol=1e-6)
