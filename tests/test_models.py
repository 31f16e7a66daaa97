"""Third-party models: they run, agree with ONNX Runtime, and need little more than must be."""

from __future__ import annotations

import math

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import helper, numpy_helper

import penstock as ps
from penstock.ir.describe import format_bytes
from tests.models.fetch import RealModel, fetch, real_models

pytestmark = pytest.mark.models

RECURRENT = {"LSTM", "GRU", "RNN"}


def onnxruntime_session(path: str | bytes) -> onnxruntime.InferenceSession:
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    return onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])


def assert_agree(got: np.ndarray, want: np.ndarray, tolerance: float) -> None:
    """Equal where results are exact; else to ``tolerance``, relative.

    Results near zero are held to a part of it of the largest: they come of cancellation (or, as
    ONNX Runtime's sigmoid of large negative numbers, of an approximation whose error is absolute).
    """
    assert got.dtype == want.dtype
    assert got.shape == want.shape
    if want.dtype.kind != "f":
        np.testing.assert_array_equal(got, want)
        return
    scale = max(float(np.abs(want).max(initial=0)), 0.1)
    np.testing.assert_allclose(got, want, rtol=tolerance, atol=tolerance * scale * 0.1)


@pytest.mark.parametrize("model", real_models(), ids=lambda model: model.name)
def test_real_models_agree_with_onnx_runtime(model: RealModel):
    path = fetch(model)
    feeds = model.feeds()
    wanted = onnxruntime_session(str(path)).run(None, feeds)
    session = ps.compile(path)
    recurrent = any(node.op.name in RECURRENT for node in session.model.graph.walk())
    for _ in range(2):
        outputs = session.run(feeds)
        for got, want in zip(outputs.values(), wanted, strict=True):
            assert_agree(got, want, 1e-3 if recurrent else 1e-4)
    session = ps.compile(path, executor="linear")
    session.run(feeds)
    arena_plan = session.inspect.executor.arena_plan
    print(
        f"{model.name}: arena {format_bytes(arena_plan.size)} of {format_bytes(arena_plan.lower_bound)}"
    )
    assert arena_plan.size <= 1.05 * arena_plan.lower_bound


@pytest.mark.costly
def test_arenas_are_within_one_percent_of_their_lower_bounds():
    ratios = []
    for model in real_models():
        session = ps.compile(fetch(model), executor="linear")
        session.run(model.feeds())
        arena_plan = session.inspect.executor.arena_plan
        if arena_plan.lower_bound:
            ratios.append(arena_plan.size / arena_plan.lower_bound)
    assert len(ratios) >= 15
    assert math.exp(sum(map(math.log, ratios)) / len(ratios)) <= 1.01


def resnet50(seed: int = 0) -> onnx.ModelProto:
    """ResNet-50 with random weights, batch normalization folded in as exporters do."""
    rng = np.random.default_rng(seed)
    nodes: list[onnx.NodeProto] = []
    weights: list[onnx.TensorProto] = []

    def tensor(name: str, shape: tuple[int, ...]) -> str:
        scale = math.sqrt(2 / max(1, math.prod(shape[1:])))
        values = (rng.standard_normal(shape) * scale).astype(np.float32)
        weights.append(numpy_helper.from_array(values, name))
        return name

    def add(op: str, inputs: list[str], **attrs) -> str:
        name = f"{op}_{len(nodes)}"
        nodes.append(helper.make_node(op, inputs, [name], **attrs))
        return name

    def conv(x: str, c: int, o: int, k: int, stride: int = 1, relu: bool = True) -> str:
        n = len(nodes)
        inputs = [x, tensor(f"w{n}", (o, c, k, k)), tensor(f"b{n}", (o,))]
        y = add("Conv", inputs, kernel_shape=[k, k], strides=[stride] * 2, pads=[k // 2] * 4)
        return add("Relu", [y]) if relu else y

    def bottleneck(x: str, c: int, o: int, stride: int) -> str:
        y = conv(x, c, o // 4, 1)
        y = conv(y, o // 4, o // 4, 3, stride)
        y = conv(y, o // 4, o, 1, relu=False)
        shortcut = x if c == o else conv(x, c, o, 1, stride, relu=False)
        return add("Relu", [add("Add", [y, shortcut])])

    x = conv("x", 3, 64, 7, 2)
    x = add("MaxPool", [x], kernel_shape=[3, 3], strides=[2, 2], pads=[1] * 4)
    channels = 64
    for stage, (blocks, out) in enumerate(zip((3, 4, 6, 3), (256, 512, 1024, 2048), strict=True)):
        for block in range(blocks):
            x = bottleneck(x, channels, out, 2 if block == 0 and stage else 1)
            channels = out
    x = add("Flatten", [add("GlobalAveragePool", [x])])
    logits = add("Gemm", [x, tensor("fc", (1000, 2048)), tensor("bias", (1000,))], transB=1)
    info = helper.make_tensor_value_info
    graph = helper.make_graph(
        nodes, "resnet50", [info("x", 1, [1, 3, 224, 224])], [info(logits, 1, [1, 1000])], weights
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)


@pytest.mark.costly
def test_resnet50_agrees_with_onnx_runtime_and_fits_its_arena():
    proto = resnet50()
    x = np.random.default_rng(1).standard_normal((1, 3, 224, 224)).astype(np.float32)
    (want,) = onnxruntime_session(proto.SerializeToString()).run(None, {"x": x})
    for executor in ("parallel", "linear"):
        session = ps.compile(proto, executor=executor)
        got = session(x)
        assert np.abs(got - want).max() <= 1e-4 * np.abs(want).max()
    arena_plan = session.inspect.executor.arena_plan
    assert arena_plan.size <= 1.01 * arena_plan.lower_bound
    # Without fusion, the last convolution of the first block, its shortcut and its input are alive
    # at once: 256 x 56 x 56 twice and 64 x 56 x 56 floats.
    assert arena_plan.lower_bound <= (2 * 256 + 64) * 56 * 56 * 4
