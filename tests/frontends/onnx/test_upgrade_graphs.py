"""Operations with graphs that are written out at import: Scan-8 and FlexAttention."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper
from onnx.reference import ReferenceEvaluator

from penstock.analysis.verify import verify
from penstock.core.errors import InvalidModel
from penstock.frontends.onnx.importer import load_onnx
from tests.support.graphs import interpret

R = np.random.default_rng(7)


def floats(*shape: int) -> np.ndarray:
    return R.normal(size=shape).astype(np.float32)


def scan_model(lengths: bool, directions: Sequence[int]) -> onnx.ModelProto:
    """A Scan-8 with two outputs: the running sum, which is also the state, and doubled elements."""
    nodes = [
        helper.make_node("Add", ["s", "x"], ["s_out"]),
        helper.make_node("Identity", ["s_out"], ["seen"]),
        helper.make_node("Add", ["x", "x"], ["twice"]),
    ]
    info = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [2]) for name in ("s", "x")]
    outs = [
        helper.make_tensor_value_info(name, TensorProto.FLOAT, [2])
        for name in ("s_out", "seen", "twice")
    ]
    body = helper.make_graph(nodes, "body", info, outs)
    names = ["lengths" if lengths else "", "init", "xs"]
    scan = helper.make_node(
        "Scan", names, ["final", "a", "b"], body=body, num_scan_inputs=1, directions=directions
    )
    inputs = [
        helper.make_tensor_value_info("init", TensorProto.FLOAT, [3, 2]),
        helper.make_tensor_value_info("xs", TensorProto.FLOAT, [3, 4, 2]),
    ]
    if lengths:
        inputs.insert(0, helper.make_tensor_value_info("lengths", TensorProto.INT64, [3]))
    outputs = [onnx.ValueInfoProto(name=name) for name in ("final", "a", "b")]
    for output, shape in zip(outputs, ([3, 2], [3, 4, 2], [3, 4, 2]), strict=True):
        output.type.CopyFrom(helper.make_tensor_type_proto(TensorProto.FLOAT, shape))
    graph = helper.make_graph([scan], "g", inputs, outputs)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 8)], ir_version=8)


@pytest.mark.parametrize("backward", [0, 1])
@pytest.mark.parametrize("lengths", [False, True])
def test_scan_8_over_a_batch_matches_the_definition(lengths: bool, backward: int) -> None:
    proto = scan_model(lengths, [backward])
    init, xs = floats(3, 2), floats(3, 4, 2)
    given = np.array([4, 2, 1], np.int64) if lengths else np.array([4, 4, 4], np.int64)
    final, a, b = np.zeros((3, 2), np.float32), np.zeros_like(xs), np.zeros_like(xs)
    for i, n in enumerate(given):
        state = init[i]
        for t, x in enumerate(xs[i, :n][:: -1 if backward else 1]):
            state = state + x
            a[i, t], b[i, t] = state, x + x
        final[i] = state
    model = load_onnx(proto)
    verify(model)
    feeds = [given, init, xs] if lengths else [init, xs]
    for got, want in zip(interpret(model.graph, feeds), (final, a, b), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-5)


def flex(heads: int, modifier_inputs: int = 1, **attrs: Any) -> onnx.ModelProto:
    names = [f"s{i}" for i in range(modifier_inputs)]
    infos = [helper.make_tensor_value_info(n, TensorProto.FLOAT, None) for n in names]
    outs = [helper.make_tensor_value_info("t", TensorProto.FLOAT, None)]
    body = helper.make_graph([helper.make_node("Tanh", ["s0"], ["t"])], "mod", infos, outs)
    node = helper.make_node(
        "FlexAttention", list("qkv"), ["y"], domain="ai.onnx.preview", score_mod=body, **attrs
    )
    shapes = {"q": [2, 4, 3, 8], "k": [2, heads, 5, 8], "v": [2, heads, 5, 6]}
    inputs = [helper.make_tensor_value_info(n, TensorProto.FLOAT, s) for n, s in shapes.items()]
    outputs = [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)]
    graph = helper.make_graph([node], "g", inputs, outputs)
    imports = [helper.make_opsetid("", 26), helper.make_opsetid("ai.onnx.preview", 1)]
    return helper.make_model(graph, opset_imports=imports, ir_version=10)


@pytest.mark.parametrize("heads", [1, 2, 4])
@pytest.mark.parametrize("attrs", [{}, {"scale": 0.25}])
def test_flex_attention_applies_its_graphs(heads: int, attrs: Any) -> None:
    proto = flex(heads, **attrs)
    feeds = [floats(2, 4, 3, 8), floats(2, heads, 5, 8), floats(2, heads, 5, 6)]
    (wanted,) = ReferenceEvaluator(proto).run(None, dict(zip("qkv", feeds, strict=True)))
    for typed in (True, False):
        if not typed:
            proto = flex(heads, softmax_precision=TensorProto.FLOAT, **attrs)
            for info in proto.graph.input:
                info.ClearField("type")
        model = load_onnx(proto)
        verify(model)
        np.testing.assert_allclose(interpret(model.graph, feeds)[0], wanted, rtol=1e-5)


def test_flex_attention_with_faults_is_refused() -> None:
    with pytest.raises(InvalidModel, match=r"score_mod of FlexAttention_0 .* has 2 inputs"):
        load_onnx(flex(4, modifier_inputs=2))
    with pytest.raises(InvalidModel, match="softmax_precision 7"):
        load_onnx(flex(4, softmax_precision=7))
