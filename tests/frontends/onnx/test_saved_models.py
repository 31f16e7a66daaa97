"""Models that ONNX Runtime saved after its optimizations: what it fused is taken apart again."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest

import penstock as ps
from tests.support.saved_models import Net, saved

HIDDEN, HEADS = 64, 4


def linear(net: Net, x: str, width: int, height: int) -> str:
    weights = net.rng.standard_normal((width, height)).astype(np.float32) / 8
    product = net.add("MatMul", x, net.constant(weights))
    return net.add("Add", net.constant(net.rng.standard_normal(height).astype(np.float32)), product)


def normalized(net: Net, x: str) -> str:
    scale, bias = (net.constant(net.rng.standard_normal(HIDDEN).astype(np.float32)) for _ in "ab")
    return net.add("LayerNormalization", x, scale, bias, axis=-1)


def transformer(net: Net) -> onnx.ModelProto:
    """A layer of BERT as torch exports it, and a pooler."""
    shape = net.constant(np.array([0, 0, HEADS, HIDDEN // HEADS]))
    parts = [net.add("Reshape", linear(net, "x", HIDDEN, HIDDEN), shape) for _ in range(3)]
    orders = ([0, 2, 1, 3], [0, 2, 3, 1], [0, 2, 1, 3])
    q, k, v = (net.add("Transpose", y, perm=p) for y, p in zip(parts, orders, strict=True))
    scores = net.add("Div", net.add("MatMul", q, k), net.constant(np.float32(4)))
    y = net.add("MatMul", net.add("Softmax", scores, axis=-1), v)
    y = net.add("Transpose", y, perm=[0, 2, 1, 3])
    y = net.add("Reshape", y, net.constant(np.array([0, 0, HIDDEN])))
    x = normalized(net, net.add("Add", linear(net, y, HIDDEN, HIDDEN), "x"))
    f = linear(net, x, HIDDEN, 2 * HIDDEN)
    root, one, half = (net.constant(np.float32(c)) for c in (2**0.5, 1, 0.5))
    gate = net.add("Add", net.add("Erf", net.add("Div", f, root)), one)
    y = linear(net, net.add("Mul", net.add("Mul", f, gate), half), 2 * HIDDEN, HIDDEN)
    x = normalized(net, net.add("Add", y, x))
    first = net.add("Gather", x, net.constant(np.array(0)), axis=1)
    weights = net.constant(net.rng.standard_normal((HIDDEN, HIDDEN)).astype(np.float32))
    bias = net.constant(np.zeros(HIDDEN, np.float32))
    pooled = net.add("Tanh", net.add("Gemm", first, weights, bias, transB=1))
    return net.model_of(["batch", "length", HIDDEN], x, pooled)


def convolutions(net: Net) -> onnx.ModelProto:
    x = net.add("Relu", net.conv("x", 3, 20))
    y = net.add("Relu", net.add("Add", net.conv(x, 20, 20), x))
    y = net.add("LeakyRelu", net.conv(y, 20, 20, group=4), alpha=0.2)
    return net.model(3, net.add("HardSigmoid", net.conv(y, 20, 12, bias=False)))


@pytest.mark.parametrize("level", ["ORT_ENABLE_BASIC", "ORT_ENABLE_EXTENDED"])
@pytest.mark.parametrize(
    ("network", "shape"), [(transformer, (2, 24, HIDDEN)), (convolutions, (2, 3, 16, 16))]
)
def test_saved_model_has_the_steps_and_results_of_the_plain_one(
    network: object, shape: tuple[int, ...], level: str, tmp_path: Path
) -> None:
    plain = network(Net())  # type: ignore[operator]
    optimized = saved(plain, tmp_path, level)
    if level == "ORT_ENABLE_EXTENDED":
        assert any(node.domain == "com.microsoft" for node in optimized.graph.node)
    x = np.random.default_rng(1).standard_normal(shape).astype(np.float32)
    sessions = [ps.compile(model, shapes={"x": shape}) for model in (plain, optimized)]
    wanted, got = (session.run({"x": x}) for session in sessions)
    for name, want in wanted.items():
        np.testing.assert_allclose(got[name], want, rtol=1e-4, atol=1e-5)
    steps = [len(session.source.splitlines()) for session in sessions]
    assert steps[1] <= steps[0]
