"""What operations compute for several samples at once, compared with ONNX Runtime's answer for each."""

from __future__ import annotations

import numpy as np
import onnx
import onnxruntime
import pytest

import penstock as ps
from penstock.core.records import replace
from penstock.passes.structure.add_samples import add_samples
from tests.support.onnx_text import model_from_text

CONSTANTS = """<int64[1] one = {1}, int64[1] first = {0}, int64[2] dims = {0, -1}, int64[1] two = {2},
    int64[3] wide = {2, 1, 1}, int64[3] times = {1, 2, 1}, int64[2] ends = {1, 3}, int64 at = {1},
    int64[2] parts = {1, 3}, int64[6] pads = {0, 1, 0, 0, 0, 2}, float low = {0}, int64[2] picked = {2, 0}>"""
FORMS = {
    "operands of other ranks": "y = Add (x, v)",
    "a vector": "y = MatMul (x, v)",
    "a vector in front": "t = Transpose <perm = [0, 2, 1]> (x) y = MatMul (v, x)",
    "matrices": "t = Transpose <perm = [0, 2, 1]> (x) y = MatMul (x, t)",
    "layers": "m = Squeeze (x, first) y = Gemm <transB = 1, alpha = 0.5> (m, m, v4)",
    "softmax": "y = Softmax <axis = 1> (x)",
    "sums": "a = ReduceSum <keepdims = 0> (x, one) b = ReduceMax (x) y = Add (a, b)",
    "running sums": "y = CumSum (x, at)",
    "moves": "t = Transpose (x) r = Reshape (t, dims) y = Concat <axis = 0> (r, r)",
    "flat": "y = Flatten <axis = 2> (x)",
    "single axes": "u = Unsqueeze (x, two) y = Squeeze (u)",
    "parts": "a, b = Split <axis = 1> (x, parts) c = Slice (x, first, one, two) y = Mul (a, c)",
    "padding": "y = Pad (x, pads)",
    "repetition": "e = Expand (x, wide) y = Tile (e, times)",
    "clipped": "y = Clip (x, low)",
    "picked of all": "y = Gather <axis = 1> (x, picked)",
    "picked by each": "i = ArgMax <axis = 2, keepdims = 0> (x) y = Gather <axis = 2> (table, i)",
    "picked of each by each": "t = Squeeze (x, first) i = ArgMax (t) y = Gather (t, i)",
    "elements": "i = ArgMax <axis = 1> (x) y = GatherElements <axis = 1> (x, i)",
    "shapes": "s = Shape <start = -1> (x) n = Size (x) p = Mul (s, n) f = Cast <to = 1> (p) y = Mul (x, f)",
    "images": "y = Conv <pads = [1, 1]> (x, kernel)",
    "pools": "y = MaxPool <kernel_shape = [2]> (x)",
    "normalized": "y = LayerNormalization <axis = 2> (x, v5)",
    "sequences": "y, h = GRU <hidden_size = 2> (x, gw, gr, , , state)",
    "letters": "y = Einsum <equation = 'bij,j->bi'> (x, v)".replace("'", '"'),
}  # fmt: skip
ARRAYS = {
    "table": (1, 2, 5),
    "kernel": (2, 4, 3),
    "gw": (1, 6, 5),
    "gr": (1, 6, 2),
    "v4": (4,),
    "v5": (5,),
}
INPUTS = {"x": (1, 4, 5), "v": (5,), "state": (1, 4, 2)}


@pytest.mark.parametrize("form", FORMS)
def test_samples_are_computed_at_once_as_each_alone(form: str) -> None:
    rng = np.random.default_rng(0)
    body = FORMS[form].replace("MatMul (v, x)", "MatMul (v, t)")
    used = [name for name in INPUTS if f"{name}," in body or f"{name})" in body]
    inputs = ", ".join(f"float[{', '.join(map(str, INPUTS[name]))}] {name}" for name in used)
    model = model_from_text(f"g ({inputs}) => (float[?] y) {CONSTANTS} {{ {body} }}", opset=18)
    del model.graph.output[0].type.tensor_type.shape.dim[:]
    model.graph.output[0].type.tensor_type.ClearField("shape")
    for name, shape in ARRAYS.items():
        array = rng.standard_normal(shape).astype(np.float32)
        model.graph.initializer.append(onnx.numpy_helper.from_array(array, name))
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    runtime = onnxruntime.InferenceSession(model.SerializeToString(), options)
    samples = [
        {name: rng.standard_normal(INPUTS[name]).astype(np.float32) for name in used}
        for _ in range(3)
    ]
    wanted = np.stack([runtime.run(["y"], sample)[0] for sample in samples])
    loaded = ps.load(model)
    graph = add_samples(loaded.graph)
    assert "Scan" not in [node.op.name for node in graph.nodes]
    session = ps.compile(replace(loaded, graphs={**loaded.graphs, loaded.entry: graph}))
    got = session.run({name: np.stack([s[name] for s in samples]) for name in used})["y"]
    np.testing.assert_allclose(got, wanted, rtol=0, atol=2e-6)
