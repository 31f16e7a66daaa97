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


def steps(n: int) -> onnx.ModelProto:
    """``n`` steps in a chain, of 16 floats each, none of which can be folded away."""
    ops = ("Sin", "Neg", "Exp", "Abs")
    nodes = [helper.make_node(ops[i % 4], [f"v{i}"], [f"v{i + 1}"]) for i in range(n)]
    ports = [info("v0", TensorProto.FLOAT, [16])], [info(f"v{n}", TensorProto.FLOAT, [16])]
    graph = helper.make_graph(nodes, "steps", *ports)
    return helper.make_model(graph, opset_imports=[OPSET], ir_version=9)


def branches(count: int = 6, depth: int = 4, size: int = 384) -> onnx.ModelProto:
    """Independent chains of matrix products, all of one input, joined at the end."""
    rng = np.random.default_rng(0)
    nodes, constants, ends = [], [], []
    for b in range(count):
        value = "x"
        for i in range(depth):
            weights = (rng.standard_normal((size, size)) / size**0.5).astype(np.float32)
            constants.append(numpy_helper.from_array(weights, f"w{b}_{i}"))
            nodes.append(helper.make_node("MatMul", [value, f"w{b}_{i}"], [f"m{b}_{i}"]))
            value = f"m{b}_{i}"
        ends.append(value)
    nodes.append(helper.make_node("Concat", ends, ["y"], axis=1))
    ports = (
        [info("x", TensorProto.FLOAT, [size, size])],
        [info("y", TensorProto.FLOAT, [size, count * size])],
    )
    graph = helper.make_graph(nodes, "branches", *ports, constants)
    return helper.make_model(graph, opset_imports=[OPSET], ir_version=9)


def plug_in(count: int) -> onnx.ModelProto:
    """``count`` independent Negs of 16 floats, each of a sum of its own, and their sum."""
    constants = [numpy_helper.from_array(np.full(16, i, np.float32), f"c{i}") for i in range(count)]
    nodes = [helper.make_node("Add", ["x", f"c{i}"], [f"a{i}"]) for i in range(count)]
    nodes += [helper.make_node("Neg", [f"a{i}"], [f"n{i}"]) for i in range(count)]
    nodes.append(helper.make_node("Sum", [f"n{i}" for i in range(count)], ["y"]))
    ports = [info("x", TensorProto.FLOAT, [16])], [info("y", TensorProto.FLOAT, [16])]
    graph = helper.make_graph(nodes, "plug_in", *ports, constants)
    return helper.make_model(graph, opset_imports=[OPSET], ir_version=9)


def inception(modules: int = 4, channels: int = 192, size: int = 28) -> onnx.ModelProto:
    """Modules of four branches of convolutions, as in GoogLeNet (Szegedy et al. 2015)."""
    rng = np.random.default_rng(0)
    nodes, constants = [], []

    def convolution(value: str, inputs: int, outputs: int, kernel: int) -> str:
        name = f"c{len(nodes)}"
        scale = (2 / (inputs * kernel * kernel)) ** 0.5
        weights = (rng.standard_normal((outputs, inputs, kernel, kernel)) * scale).astype("f4")
        constants.append(numpy_helper.from_array(weights, f"{name}_w"))
        constants.append(numpy_helper.from_array(np.zeros(outputs, np.float32), f"{name}_b"))
        nodes.append(
            helper.make_node(
                "Conv", [value, f"{name}_w", f"{name}_b"], [name], pads=[kernel // 2] * 4
            )
        )
        nodes.append(helper.make_node("Relu", [name], [f"{name}_r"]))
        return f"{name}_r"

    value = "x"
    for _ in range(modules):
        pooled = f"p{len(nodes)}"
        pool = {"kernel_shape": [3, 3], "pads": [1] * 4}
        nodes.append(helper.make_node("MaxPool", [value], [pooled], **pool))
        parts = [
            convolution(value, channels, 48, 1),
            convolution(convolution(value, channels, 64, 1), 64, 80, 3),
            convolution(convolution(value, channels, 24, 1), 24, 32, 5),
            convolution(pooled, channels, 32, 1),
        ]
        value = f"m{len(nodes)}"
        nodes.append(helper.make_node("Concat", parts, [value], axis=1))
    shape = [1, channels, size, size]
    ports = [info("x", TensorProto.FLOAT, shape)], [info(value, TensorProto.FLOAT, shape)]
    graph = helper.make_graph(nodes, "inception", *ports, constants)
    return helper.make_model(graph, opset_imports=[OPSET], ir_version=9)
