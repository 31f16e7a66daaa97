"""Where WidenHalves computes float16 and bfloat16 in float32, and what remains in 16 bits."""

from __future__ import annotations

from collections import Counter
from typing import Any

import ml_dtypes
import numpy as np
import onnxruntime
import pytest

import penstock as ps
from penstock.ir.graph import Graph, Node
from penstock.passes.context import Numerics, PassContext
from penstock.passes.pipeline import optimize
from tests.support import half_models
from tests.support.onnx_text import graph_from_text, model_from_text

NETWORKS = {
    "mlp": half_models.mlp(3, 32),
    "conv_net": half_models.conv_net(2, 12, 8),
    "transformer": half_models.transformer(2, 12, 32, 4),
    "recurrence": half_models.recurrence(4, 16),
}
HALF = ("float16", "bfloat16")


def widened(text: str, context: PassContext | None = None) -> Graph:
    graph = graph_from_text(text)
    optimize(graph, context)
    return graph


def is_half(value: Any) -> bool:
    return value is not None and value.dtype is not None and value.dtype.name in HALF


def casts(graph: Graph) -> list[tuple[str, str]]:
    """The dtypes of the inputs and outputs of all Casts, in order."""
    nodes = [node for node in graph.walk() if node.op.name == "Cast"]
    return [(node.inputs[0].dtype.name, node.outputs[0].dtype.name) for node in nodes]


def computing(graph: Graph) -> list[Node]:
    """The nodes that compute in 16 bits, but for control flow."""
    nodes = [node for node in graph.walk() if not node.graphs and not node.op.moves]
    return [node for node in nodes if any(map(is_half, (*node.inputs, *node.outputs)))]


def relative(got: np.ndarray, want: np.ndarray) -> float:
    """The largest difference by the largest element."""
    got, want = got.astype(np.float64), want.astype(np.float64)
    return float(np.abs(got - want).max() / np.abs(want).max())


@pytest.mark.parametrize("name", NETWORKS)
def test_widen_halves_networks_agree_with_onnx_runtime_and_strict(name: str) -> None:
    model = NETWORKS[name].model()
    feeds = NETWORKS[name].feeds(model)
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    other = onnxruntime.InferenceSession(model.SerializeToString(), options)
    got = ps.compile(model).run(feeds)
    strict = ps.compile(model, precision="strict").run(feeds)
    for (key, value), want in zip(got.items(), other.run(None, feeds), strict=True):
        assert value.dtype == np.float16
        assert relative(value, want) < 4e-3
        assert relative(value, strict[key]) < 1e-2


@pytest.mark.parametrize("executor", ["linear", "dataflow", "interpret"])
@pytest.mark.parametrize("name", NETWORKS)
def test_widen_halves_bfloat16_agrees_with_float32(name: str, executor: str) -> None:
    model = NETWORKS[name].model("bfloat16")
    feeds = NETWORKS[name].feeds(model)
    wide = NETWORKS[name].model("float")
    halves = {tensor.name: half_models.array_of(tensor) for tensor in model.graph.initializer}
    for tensor in wide.graph.initializer:
        if tensor.name in NETWORKS[name].weights:
            tensor.raw_data = halves[tensor.name].astype(np.float32).tobytes()
    want = ps.compile(wide).run(
        {k: v if v.dtype == np.int64 else v.astype(np.float32) for k, v in feeds.items()}
    )
    for key, value in ps.compile(model, executor=executor).run(feeds).items():
        assert value.dtype == ml_dtypes.bfloat16
        assert relative(value, want[key]) < 0.06


@pytest.mark.parametrize(
    ("name", "want"),
    [
        ("mlp", {("float16", "float32"): 1, ("float32", "float16"): 1}),
        ("conv_net", {("float16", "float32"): 1, ("float32", "float16"): 1}),
        # The embedded tokens, whose table stays as it is, and the mask.
        ("transformer", {("float16", "float32"): 2, ("float32", "float16"): 1}),
        # x, the carried state in the loop and behind it, and two branches. The state is rounded for
        # the next iteration, and the comparison rounds the sum.
        ("recurrence", {("float16", "float32"): 4, ("float32", "float16"): 4}),
    ],
)
def test_widen_halves_leaves_casts_at_the_edges_alone(name, want) -> None:
    graph = ps.load(NETWORKS[name].model()).graph
    optimize(graph)
    assert computing(graph) == []
    assert Counter(casts(graph)) == want
    before = len(graph.nodes)
    assert not optimize(graph)
    assert len(graph.nodes) == before


def test_widen_halves_strict_leaves_the_graph() -> None:
    graph = ps.load(NETWORKS["mlp"].model()).graph
    optimize(graph, PassContext(numerics=Numerics(strict=True)))
    assert casts(graph) == []
    assert len(computing(graph)) == len(graph.nodes)


def test_widen_halves_sum_beyond_float16_is_finite_inside_and_infinite_in_strict() -> None:
    model = model_from_text(
        """g (float16[1] x, float16[1] four) => (float16[1] y, float16[1] z)
        { z = Add(x, x) y = Div(z, four) }"""
    )
    feeds = {"x": np.array([60000], np.float16), "four": np.array([4], np.float16)}
    got = ps.compile(model).run(feeds)
    assert (got["y"], got["z"]) == (30000, np.inf)
    assert ps.compile(model, precision="strict").run(feeds)["y"] == np.inf


def test_widen_halves_results_that_jump_see_rounded_values() -> None:
    """2047 + 0.75 is 2048 in float16, and 2047.75 in float32."""
    text = """g (float16[1] x, float16[1] q) => (float16[1] f, bool[1] e, int32[1] i)
        { d = Add(x, q) f = Floor(d) e = Equal(d, x) i = Cast <to = 6> (d) }"""
    x, q = np.array([2047], np.float16), np.array([0.75], np.float16)
    for precision in ("float32", "strict"):
        session = ps.compile(model_from_text(text), precision=precision)
        got = session.run({"x": x, "q": q})
        assert (got["f"], got["e"], got["i"]) == (2048, False, 2048)


def test_widen_halves_rounding_that_the_model_writes_is_kept() -> None:
    """Two Casts in a row round; one before a node in float16 does not."""
    text = "g (float[2] x) => (float[2] y) { a = Cast <to = 10> (x) y = Cast <to = 1> (a) }"
    assert casts(widened(text)) == [("float32", "float16"), ("float16", "float32")]
    graph = widened(
        """g (float[2] x) => (float[2] y)
        { a = Cast <to = 10> (x) b = Exp(a) c = Neg(b) d = Tanh(c) y = Cast <to = 1> (d) }"""
    )
    assert casts(graph) == []
    assert [node.op.name for node in graph.nodes] == ["Exp", "Neg", "Tanh"]


def test_widen_halves_moves_of_stored_values_stay_in_16_bits() -> None:
    graph = widened(
        """g (float16[N, 4] past, float16[N, 4] x) => (float16[M, 4] present, float16[M, 4] y)
        { k = Tanh(x) present = Concat <axis = 0> (past, k) y = Exp(present) }"""
    )
    (concat,) = [node for node in graph.nodes if node.op.name == "Concat"]
    assert is_half(concat.outputs[0])
    assert Counter(casts(graph)) == {("float16", "float32"): 2, ("float32", "float16"): 2}


def test_widen_halves_shape_of_a_computed_value_needs_no_cast() -> None:
    graph = widened(
        """g (float16[N, M] x) => (float16[K, L] y)
        { a = Exp(x) s = Shape(a) b = Tanh(x) r = Reshape(b, s) y = Add(r, a) }"""
    )
    assert casts(graph) == [("float16", "float32"), ("float32", "float16")]


def test_widen_halves_values_that_branches_capture_are_converted_once_before_them() -> None:
    text = """g (float16[2, 2] x, bool c) => (float16[2, 2] y) { y = If (c)
        <then_branch = t () => (float16[2, 2] u) { u = MatMul(x, x) },
         else_branch = e () => (float16[2, 2] v) { w = Exp(x) v = MatMul(w, x) }> }"""
    graph = widened(text)
    assert [node.op.name for node in graph.nodes] == ["Cast", "If"]
    assert Counter(casts(graph)) == {("float16", "float32"): 1, ("float32", "float16"): 2}
    x = np.array([[0.5, 1], [2, -1]], np.float16)
    for condition in (True, False):
        feeds = {"x": x, "c": np.array(condition)}
        got, strict = (
            ps.compile(model_from_text(text), precision=precision).run(feeds)["y"]
            for precision in ("float32", "strict")
        )
        assert relative(got, strict) < 2e-3


@pytest.mark.parametrize("dtype", HALF)
def test_widen_halves_weights_are_held_once_and_given_back(dtype: str) -> None:
    network = half_models.mlp(2, 64)
    model = ps.load(network.model(dtype))
    weights = {v for node in model.graph.nodes for v in node.inputs if v.const is not None}
    want = {value: value.const for value in weights}
    session = ps.compile(model, backends=["numpy"])
    session.run(network.feeds(network.model(dtype)))
    assert all(value.held is None for value in weights)
    assert session.memory.weights == sum(array.size for array in want.values()) * 4
    for value, array in want.items():
        assert value.const.dtype == array.dtype
        assert value.const.tobytes() == array.tobytes()


def test_widen_halves_other_fetches_share_weights() -> None:
    network = half_models.mlp(2, 64)
    model = network.model()
    session, feeds = ps.compile(model), network.feeds(model)
    want = session.run(feeds)["y"]
    widened = session._compiler.context.weights.widened
    before = dict(widened)
    got = session.run(feeds, ["y", "d"])
    assert widened == before
    assert relative(got["y"], want) < 1e-3
    assert got["d"].dtype == np.float16
