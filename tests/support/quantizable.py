"""Small networks to quantize, and samples for them."""

from __future__ import annotations

from functools import cache

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from tests.support.onnx_text import model_from_text

FLOAT = TensorProto.FLOAT


def _model(nodes: list, weights: dict[str, np.ndarray], x: list, y: list) -> onnx.ModelProto:
    graph = helper.make_graph(
        nodes,
        "net",
        [helper.make_tensor_value_info("x", FLOAT, x)],
        [helper.make_tensor_value_info("y", FLOAT, y)],
        [numpy_helper.from_array(array, name) for name, array in weights.items()],
    )
    opsets = [helper.make_opsetid("", 19)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=9)


def images(count: int = 8, seed: int = 0) -> np.ndarray:
    """[count, 1, 3, 24, 24], smooth."""
    noise = np.random.default_rng(seed).standard_normal((count, 1, 3, 24, 24))
    for axis in (3, 4):
        noise = noise + np.roll(noise, 1, axis) + np.roll(noise, 2, axis)
    return (noise / 3).astype(np.float32)


@cache
def convolutional() -> onnx.ModelProto:
    """Convolutions with Relu, a depthwise one, a sum of two branches, pooling, and a Gemm."""
    rng = np.random.default_rng(1)

    def normal(*shape: int) -> np.ndarray:
        return (rng.standard_normal(shape) / np.prod(shape[1:]) ** 0.5).astype(np.float32)

    weights = {
        "w0": normal(16, 3, 3, 3),
        "b0": normal(16),
        "w1": normal(16, 1, 3, 3),
        "b1": normal(16),
        "w2": normal(16, 16, 1, 1),
        "w3": normal(32, 16, 3, 3),
        "b3": normal(32),
        "w4": normal(10, 32),
        "b4": normal(10),
    }
    make = helper.make_node
    pads = {"pads": [1, 1, 1, 1]}
    nodes = [
        make("Conv", ["x", "w0", "b0"], ["c0"], name="first", **pads),
        make("Relu", ["c0"], ["r0"]),
        make("Conv", ["r0", "w1", "b1"], ["c1"], name="depthwise", group=16, **pads),
        make("Relu", ["c1"], ["r1"]),
        make("Conv", ["r1", "w2"], ["c2"], name="point"),
        make("Add", ["c2", "r0"], ["a"]),
        make("MaxPool", ["a"], ["m"], kernel_shape=[2, 2], strides=[2, 2]),
        make("Conv", ["m", "w3", "b3"], ["c3"], name="last", **pads),
        make("Relu", ["c3"], ["r3"]),
        make("GlobalAveragePool", ["r3"], ["g"]),
        make("Flatten", ["g"], ["f"]),
        make("Gemm", ["f", "w4", "b4"], ["y"], name="dense", transB=1),
    ]
    return _model(nodes, weights, ["N", 3, 24, 24], ["N", 10])


def rows(count: int = 8, seed: int = 0) -> np.ndarray:
    """[count, 4, 64]."""
    return np.random.default_rng(seed).standard_normal((count, 4, 64)).astype(np.float32)


@cache
def feed_forward() -> onnx.ModelProto:
    """Two products with biases and a GELU between them, added to their input."""
    rng = np.random.default_rng(2)
    weights = {
        "w0": (rng.standard_normal((64, 128)) / 8).astype(np.float32),
        "b0": rng.standard_normal(128).astype(np.float32),
        "w1": (rng.standard_normal((128, 64)) / 11).astype(np.float32),
    }
    nodes = [
        helper.make_node("MatMul", ["x", "w0"], ["p0"], name="up"),
        helper.make_node("Add", ["p0", "b0"], ["s0"]),
        helper.make_node("Relu", ["s0"], ["g"]),
        helper.make_node("MatMul", ["g", "w1"], ["p1"], name="down"),
        helper.make_node("Add", ["p1", "x"], ["y"]),
    ]
    return _model(nodes, weights, ["N", 64], ["N", 64])


def with_weights(text: str, **weights: np.ndarray) -> onnx.ModelProto:
    """The model of a text, some of whose inputs are these constants."""
    proto = model_from_text(text)
    kept = [value for value in proto.graph.input if value.name not in weights]
    del proto.graph.input[:]
    proto.graph.input.extend(kept)
    proto.graph.initializer.extend(numpy_helper.from_array(w, n) for n, w in weights.items())
    return proto
