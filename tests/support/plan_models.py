"""Small models whose plans differ in kind: what the mutator of plans (``tools/mutate_plans.py``)
changes plans of."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from onnx import numpy_helper

from penstock.core.types import FLOAT32, INT64, TensorType, Type
from penstock.ir.graph import Graph, Model, Node, Value
from penstock.ir.op import Op
from penstock.ops.internal.cells import GRU_CELL, GRU_GATES, GRU_STATE, LSTM_CELL
from penstock.ops.internal.chosen_product import CHOSEN_MATMUL
from penstock.ops.internal.recurrence import RECURRENCE
from penstock.ops.registry import standard
from tests.support import mutants
from tests.support.onnx_cases import node_cases
from tests.support.onnx_text import model_from_text
from tests.support.tflite_cases import FOLDER

_TEXTS: Mapping[str, str] = {
    "convolutions": """g (float[1, 3, 12, 12] x) => (float[1, 5] y) {
        a = Conv<pads=[1, 1, 1, 1]>(x, w_8_3_3_3, b_8) b = Relu(a) c = MaxPool<kernel_shape=[2, 2], strides=[2, 2]>(b)
        d = Conv<group=8, pads=[1, 1, 1, 1]>(c, w_8_1_3_3) e = Clip(d, low, high) f = Conv(e, w_16_8_1_1, b_16)
        p = AveragePool<kernel_shape=[2, 2]>(f) q = GlobalAveragePool(p) r = Flatten(q)
        s = MatMul(r, w_16_5) t = Add(s, b_5) y = Softmax(t) }""",
    "residual": """g (float[2, 8, 6, 6] x) => (float[2, 8, 6, 6] y, float[2, 8, 3, 3] z) {
        a = Conv<pads=[1, 1, 1, 1]>(x, w_8_8_3_3) b = Relu(a) c = Conv<pads=[1, 1, 1, 1]>(b, v_8_8_3_3)
        d = Add(c, x) y = Relu(d) e = ConvTranspose<strides=[2, 2]>(y, u_8_8_2_2)
        z = AveragePool<kernel_shape=[4, 4], strides=[4, 4]>(e) }""",
    "products": """g (float[4, 32] x, float[32, 8] k) => (float[4, 8] y, float[4, 64] z) {
        a = MatMul(x, w_32_64) b = Add(a, b_64) c = Relu(b) z = MatMul(c, w_64_64) d = Gemm<transB=1>(z, w_32_64)
        e = MatMul(d, k) f = MatMul(x, k) y = Sub(e, f) }""",
    "attention": """g (float[2, 6, 16] x) => (float[2, 6, 16] y) {
        n = LayerNormalization(x, b_16, c_16) q = MatMul(n, w_16_16) k = MatMul(n, v_16_16) v = MatMul(n, u_16_16)
        t = Transpose<perm=[0, 2, 1]>(k) s = MatMul(q, t) h = Mul(s, high) p = Softmax<axis=-1>(h)
        o = MatMul(p, v) y = Add(o, x) }""",
    "lstm": """g (float[5, 2, 6] x) => (float[5, 1, 2, 8] y, float[1, 2, 8] h) {
        y, h, c = LSTM<hidden_size=8>(x, w_1_32_6, r_1_32_8, b_1_64) }""",
    "gru": """g (float[5, 2, 6] x) => (float[5, 1, 2, 8] y, float[1, 2, 8] h) {
        y, h = GRU<hidden_size=8, linear_before_reset=1>(x, w_1_24_6, r_1_24_8, b_1_48) }""",
    "elementwise": """g (float[8, 64] x, float[64] k) => (float[8, 64] y, float[8] z, bool[8, 64] p) {
        a = Exp(x) b = Mul(a, k) c = Add(b, x) d = Sqrt(a) e = Div(c, d) f = Tanh(e) p = Greater(f, b_64)
        h = Where(p, f, c) i = Neg(h) j = Max(i, x, b) y = Sigmoid(j) z = ReduceMean<keepdims=0>(y, one) }""",
    "quantized": """g (float[1, 4, 6, 6] x) => (float[1, 8, 6, 6] y, float[4, 8] z)
        <float s = {0.05}, uint8 o = {128}, int8 zero = {0}, float t = {0.02}, int64[2] rows = {4, 36}> {
        q = QuantizeLinear(x, s, o) c = QLinearConv<pads=[1, 1, 1, 1]>(q, s, o, i_8_4_3_3, t, zero, s, o)
        y = DequantizeLinear(c, s, o) f = Reshape(q, rows) m = QLinearMatMul(f, s, o, i_36_8, t, zero, s, o)
        z = DequantizeLinear(m, s, o) }""",
    "integers": """g (float[4, 24] x) => (float[4, 8] y) {
        q, s, o = DynamicQuantizeLinear(x) m = MatMulInteger(q, i_24_8, o) c = Cast<to=1>(m)
        y = Mul(c, s) }""",
    "views": """g (float[6, 8] x, int64[3] i) => (float[3, 8] y, float[8, 4] z)
        <int64[2] from = {1, 2}, int64[2] to = {5, 8}, int64[2] shape = {8, 3}> {
        a = Exp(x) b = Slice(a, from, to) c = Transpose(b) d = Reshape(b, shape) e = Gather(a, i)
        y = Add(e, b_8) f = Transpose(d) h = MatMul(c, b) k = Neg(h) j = Concat<axis=0>(k, k, k)
        l, r = Split<axis=0, num_outputs=2>(j) m = Slice(l, from, to) n = Transpose(c) z = MatMul(r2, n)
        r2 = MatMul(w_8_6, c) }""",
    "branches": """g (float[8] x, bool p) => (float[8] y, float[8] z) {
        a = Exp(x) s = Sin(a) z = If(p)
        <then_branch = th () => (float[8] u) { h = MatMul(w_8_8, s) u = Add(h, a) },
         else_branch = el () => (float[8] v) { k = Cos(a) n = MatMul(w_8_8, k) v = Mul(n, s) }>
        q = MatMul(w_8_8, z) y = Add(q, s) }""",
    "loops": """g (int64 n, bool go, float[8] x) => (float[8] y, float[8] o) {
        a = Exp(x) e = Loop(n, go, a) <body = b (int64 i, bool c, float[8] s) => (bool d, float[8] f) {
            d = Identity(c) m = MatMul(w_8_8, s) t = Tanh(m) f = Loop(two, , t) <body = d
                (int64 j, bool k, float[8] r) => (bool l, float[8] u) {
                    l = Identity(k) v = MatMul(w_8_8, r) h = Add(v, a) u = Tanh(h) }> }>
        two = Constant<value_int=2>() y = Mul(e, a) o = Sin(e) }""",
    "lanes": """g (float[16, 32] x) => (float[16, 32] y) {
        a = MatMul(x, w_32_32) b = MatMul(x, v_32_32) c = Tanh(a) d = Exp(b) e = MatMul(c, v_32_32)
        f = MatMul(d, w_32_32) h = Add(e, f) i = MatMul(a, u_32_32) y = Add(h, i) }""",
}
_FILES = ("mini_resnet_int8", "mini_mobilenet_v2", "mini_lstm_fused", "mini_detector")


def plan_models() -> Iterator[tuple[str, Any]]:
    """Models by name: ONNX models of each kind, TFLite networks, and those that ``mutants`` has."""
    for name, text in _TEXTS.items():
        yield name, _with_weights(text)
    yield "cells", _cells()
    for name in _FILES:
        yield name, FOLDER / "net" / f"{name}.tflite"
    for name in ("if_nested", "while_nested", "while_converted_rnn"):
        yield name, FOLDER / "control" / f"{name}.tflite"
    for name, model in mutants.models().items():
        yield f"small {name}", model


def suite_models() -> Iterator[tuple[str, Any]]:
    """The models of the official ONNX suite, of which there is one or more for each operation."""
    for case in node_cases():
        yield case.name, case.model


def _cells() -> Model:
    """Operations that only passes create, which no schema describes."""
    shapes = {"g": (4, 32), "c": (4, 8), "x": (4, 24), "r": (4, 24), "p": (5, 4, 24), "i": (4, 1)}
    inputs = {name: Value(name, TensorType(FLOAT32, shape)) for name, shape in shapes.items()}
    inputs["i"].type = TensorType(INT64, (4, 1))
    rng = np.random.default_rng(1)
    weights = [rng.standard_normal(s).astype(np.float32) / 4 for s in ((1, 24, 8), (4, 8, 8))]
    w, experts = (Value(f"w{i}", const=array) for i, array in enumerate(weights))
    g, c, x, r, p, i = inputs.values()
    entries: list[tuple[Op, list[Value | None], int, dict[str, Any]]] = [
        (LSTM_CELL, [g, c], 2, {"order": (0, 2, 1, 3), "forget_bias": 1.0}),
        (GRU_CELL, [x, r, c], 1, {"order": (0, 1, 2)}),
        (GRU_GATES, [x, c, r], 2, {"order": (0, 1, 1, 2)}),
        (GRU_STATE, [c, c, c, x], 1, {"order": (2,)}),
        (RECURRENCE, [p, w], 2, {"cell": "GRU", "hidden_size": 8, "places": (0, 1, 2)}),
        (
            CHOSEN_MATMUL,
            [x3 := Value("x3"), experts, i],
            1,
            {"transposed": False, "columns": False},
        ),
        (CHOSEN_MATMUL, [x3, experts, i], 1, {"transposed": True, "columns": False}),
    ]
    nodes = [Node(standard("Unsqueeze"), [c, Value("one", const=np.array([1]))], [x3])]
    for op, operands, count, attributes in entries:
        outputs: list[Value | None] = [Value(f"y{len(nodes)}_{k}") for k in range(count)]
        nodes.append(Node(op, operands, outputs, attributes, name=f"n{len(nodes)}"))
    results = [value for node in nodes[1:] for value in node.outputs if value is not None]
    graph = Graph([*inputs.values()], results, nodes, "cells")
    return Model({"cells": graph}, "cells")


def feeds_of(ports: Any, seed: int = 0) -> dict[str, Any]:
    """A value for each input of a session; counts of iterations are small."""
    rng = np.random.default_rng(seed)
    return {port.name: _feed(port.type, rng) for port in ports}


def _feed(type_: Type, rng: np.random.Generator) -> Any:
    value = mutants.feed(type_, rng)
    if isinstance(value, np.ndarray) and value.dtype == np.bool_:
        return np.ones_like(value)
    return value


def _with_weights(text: str) -> Any:
    """The model of a text, with a constant for each name that ends in dims, as ``w_8_3`` does."""
    model = model_from_text(text, opset=20)
    rng = np.random.default_rng(1)
    graphs, names = [model.graph], {"low": -1.0, "high": 1.0, "one": 1}
    constants: dict[str, np.ndarray] = {}
    while graphs:
        graph = graphs.pop()
        for node in graph.node:
            graphs += [attribute.g for attribute in node.attribute if attribute.HasField("g")]
            for name in node.input:
                prefix, *dims = name.split("_")
                if name in names:
                    dtype = np.int64 if name == "one" else np.float32
                    constants[name] = np.array([1] if name == "one" else names[name], dtype)
                elif dims and all(dim.isdigit() for dim in dims):
                    values = rng.standard_normal([int(dim) for dim in dims]) / 4
                    is_8_bit = prefix == "i"
                    constants[name] = (
                        (values * 100).astype(np.int8) if is_8_bit else values.astype(np.float32)
                    )
    for name, array in constants.items():
        model.graph.initializer.append(numpy_helper.from_array(array, name))
    return model
