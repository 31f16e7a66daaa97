"""What is timed: the models, built the same for every engine."""

from __future__ import annotations

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

OPSET = helper.make_opsetid("", 17)
info = helper.make_tensor_value_info


def chain(n: int) -> onnx.ModelProto:
    """``n`` nodes, Mul and Add in turn, each of 16 floats with constants of its own."""
    nodes, constants = [], []
    for i in range(n):
        value = 1.0 + (i % 7) / 64 if i % 2 else 1.0 - (i % 5) / 64
        constants.append(numpy_helper.from_array(np.full(16, value, np.float32), f"c{i}"))
        op = "Add" if i % 2 else "Mul"
        nodes.append(helper.make_node(op, [f"v{i}", f"c{i}"], [f"v{i + 1}"], name=f"node{i}"))
    outputs = [info(f"v{n}", TensorProto.FLOAT, [16])]
    graph = helper.make_graph(
        nodes, "chain", [info("v0", TensorProto.FLOAT, [16])], outputs, constants
    )
    return helper.make_model(graph, opset_imports=[OPSET], ir_version=9)


def loop() -> onnx.ModelProto:
    """A Loop of ``n`` iterations (an input) with a Mul and an Add of 16 floats."""
    carried = [info("x", TensorProto.FLOAT, [16])]
    body = helper.make_graph(
        [
            helper.make_node("Identity", ["go"], ["go_on"]),
            helper.make_node("Mul", ["x", "half"], ["t"]),
            helper.make_node("Add", ["t", "one"], ["y"]),
        ],
        "body",
        [info("i", TensorProto.INT64, []), info("go", TensorProto.BOOL, []), *carried],
        [info("go_on", TensorProto.BOOL, []), info("y", TensorProto.FLOAT, [16])],
    )
    graph = helper.make_graph(
        [helper.make_node("Loop", ["n", "", "x0"], ["out"], body=body)],
        "loop",
        [info("x0", TensorProto.FLOAT, [16]), info("n", TensorProto.INT64, [])],
        [info("out", TensorProto.FLOAT, [16])],
        [
            numpy_helper.from_array(np.full(16, 0.5, np.float32), "half"),
            numpy_helper.from_array(np.ones(16, np.float32), "one"),
        ],
    )
    return helper.make_model(graph, opset_imports=[OPSET], ir_version=9)
