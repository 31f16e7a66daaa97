"""Types of nodes: what ONNX's schemas allow is loaded, all else is refused, by every executor."""

from __future__ import annotations

import numpy as np
import onnx
import pytest

import penstock as ps
from penstock.core.errors import InvalidInput, InvalidModel
from tests.support.onnx_text import compile_text, model_from_text

EXECUTORS = ["linear", "dataflow", "parallel", "streams", "frames", "interpret"]

REFUSED = {
    "Sigmoid": "g (int64[2] x) => (int64[2] y) { y = Sigmoid(x) }",
    "Softmax": "g (int64[2] x) => (int64[2] y) { y = Softmax(x) }",
    "Erf": "g (string[2] x) => (string[2] y) { y = Erf(x) }",
    "Tanh": "g (bool[2] x) => (bool[2] y) { y = Tanh(x) }",
    "Xor": "g (float[2] x) => (bool[2] y) { y = Xor(x, x) }",
    "And": "g (float[2] x, bool[2] z) => (bool[2] y) { y = And(z, x) }",
    "Add": "g (bool[2] x) => (bool[2] y) { y = Add(x, x) }",
    "Where": "g (float[2] x) => (float[2] y) { y = Where(x, x, x) }",
    "BitwiseAnd": "g (float[2] x) => (float[2] y) { y = BitwiseAnd(x, x) }",
    "Gather": "g (float[2] x) => (float[2] y) { y = Gather(x, x) }",
    "Neg": "g (uint8[2] x) => (uint8[2] y) { y = Neg(x) }",
    "Conv": "g (int32[1, 1, 4, 4] x) => (int32[A, B, C, D] y) { y = Conv(x, x) }",
    "RandomNormalLike": "g (float[2] x) => (int32[2] y) { y = RandomNormalLike<dtype = 6>(x) }",
    "If": """g (int64 c) => (float y) { y = If (c) <
        then_branch = a () => (float p) { p = Constant<value_float = 1.0>() },
        else_branch = b () => (float q) { q = Constant<value_float = 2.0>() }> }""",
}


@pytest.mark.parametrize("op", REFUSED)
@pytest.mark.parametrize("executor", EXECUTORS)
def test_type_that_no_version_allows_is_refused_by_every_executor(op, executor):
    with pytest.raises(
        InvalidModel, match=rf"{op} \(.*\) (reads|gives) tensor\(.*-\d+ (takes|giv)"
    ):
        compile_text(REFUSED[op], executor=executor)


def test_type_refusal_names_every_node_at_fault():
    with pytest.raises(InvalidModel) as caught:
        compile_text("g (int64[2] x) => (int64[2] y) { h = Sin(x) i = Cast<to = 7>(h) y = Cos(i) }")
    assert [p.split()[0] for p in caught.value.problems] == ["Sin", "Cos"]


def test_inputs_that_must_be_of_one_type_are_refused_with_both_types():
    text = "g (float[2] x, int64[2] z) => (float[2] y) { y = Add(x, z) }"
    message = r"reads tensor\(float\) as A and tensor\(int64\) as input 1 \(B\)"
    with pytest.raises(InvalidModel, match=message):
        compile_text(text)


@pytest.mark.parametrize(
    ("text", "opset", "feeds", "y"),
    [
        # Allowed by later versions only.
        ("g (int8[2] x) => (int8[2] y) { y = Relu(x) }", 13, {"x": [-1, 2]}, [0, 2]),
        ("g (uint8[2] x) => (uint8[2] y) { y = Add(x, x) }", 7, {"x": [1, 2]}, [2, 4]),
        # Allowed by former versions only: T of DequantizeLinear's scale.
        (
            "g (int32[2] x, float s) => (float[2] y) { y = DequantizeLinear(x, s) }",
            10,
            {"x": [1, 2], "s": 0.5},
            [0.5, 1],
        ),
        (
            "g (float[2] x, int32[2] z) => (float[2] y) { y = Pow(x, z) }",
            15,
            {"x": [2, 3], "z": [3, 2]},
            [8, 9],
        ),
        (
            "g (float[1] x) => (int64[1] y) { h = Shape(x) i = Sub(h, h) y = Gather(h, i) }",
            20,
            {"x": [7]},
            [1],
        ),
    ],
)
def test_type_that_some_version_allows_is_run(text, opset, feeds, y):
    session = ps.compile(model_from_text(text, opset=opset))
    assert session.run(feeds)["y"].tolist() == y


def test_types_are_followed_through_nested_graphs_and_functions():
    body = "b (int64 i, bool c, int64[2] v) => (bool d, int64[2] w) { d = Identity(c) w = %s }"
    loop = "g (int64[2] x, int64 n) => (int64[2] y) { y = Loop (n, , x) <body = %s> }"
    compile_text(loop % (body % "Neg(v)"))
    with pytest.raises(InvalidModel, match=r"Sqrt \(.*reads tensor\(int64\) as input 0"):
        compile_text(loop % (body % "Sqrt(v)"))
    with pytest.raises(
        InvalidModel, match=r"'w' is tensor\(bool\), but tensor\(int64\) as the iter"
    ):
        compile_text(loop % (body % "Not(c)"))
    function = """<ir_version: 9, opset_import: ["" : 20, "own" : 1]>
        g (int64[2] x) => (int64[2] y) { y = own.root(x) }
        <opset_import: ["" : 20], domain: "own"> root (a) => (b) { b = Sqrt(a) }"""
    with pytest.raises(InvalidModel, match=r"Sqrt \(.*reads tensor\(int64\) as input 0"):
        ps.compile(onnx.parser.parse_model(function))


def test_types_of_nodes_in_any_order_are_checked():
    model = model_from_text("g (int64[2] x) => (int64[2] y) { h = Neg(x) y = Sin(h) }")
    nodes = list(model.graph.node)[::-1]
    del model.graph.node[:]
    model.graph.node.extend(nodes)
    with pytest.raises(InvalidModel, match=r"Sin \(.*reads tensor\(int64\)"):
        ps.load(model)


@pytest.mark.parametrize("executor", EXECUTORS)
def test_types_of_inputs_left_open_are_checked_when_they_are_fed(executor):
    model = model_from_text("g (float[2] x) => (float[2] y) { h = Neg(x) y = Sin(h) }")
    model.graph.input[0].type.tensor_type.elem_type = 0
    session = ps.compile(model, executor=executor)
    assert session.run({"x": np.zeros(2)})["y"].dtype == np.float64
    with pytest.raises(
        InvalidInput, match=r"takes no feeds of these dtypes: Sin .*tensor\(int64\)"
    ):
        session.run({"x": np.zeros(2, np.int64)})
    assert session.run({"x": np.zeros(2, np.float32)})["y"].dtype == np.float32


@pytest.mark.parametrize("op", ["BiasGelu", "FastGelu", "Gelu", "QuickGelu"])
def test_integers_for_operations_of_onnx_runtime_on_floats_are_refused(op):
    inputs = "x, z" if op == "BiasGelu" else "x"
    text = f"g (int64[2] x, int64[2] z) => (int64[2] y) {{ y = com.microsoft.{op}({inputs}) }}"
    model = model_from_text(text, domains={"com.microsoft": 1})
    with pytest.raises(InvalidModel, match=r"reads tensor\(int64\) as input 0"):
        ps.load(model)
