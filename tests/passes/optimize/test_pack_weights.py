"""Which weights behind a DequantizeLinear PackWeights multiplies by as they are stored."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper
from onnxruntime import GraphOptimizationLevel, InferenceSession, SessionOptions

import penstock as ps
from penstock.passes.pipeline import optimize
from tests.support.passes import count_operations

K, N = 48, 24
RANGES = {"INT2": (-2, 2), "UINT2": (0, 4), "INT4": (-8, 8), "UINT4": (0, 16)}
RANGES |= {"INT8": (-128, 128), "UINT8": (0, 256)}


def product(
    dtype: str,
    *,
    op: str = "MatMul",
    turned: bool = False,
    block: int = 16,
    zeros: bool = True,
    scale_dims: tuple[int, ...] | None = None,
    quantized: bool = False,
    opset: int = 21,
) -> onnx.ModelProto:
    """The product of x, which is ``quantized`` or not, and of weights [K, N] or, ``turned``,
    [N, K], in blocks along K or, with a block of 0, with ``scale_dims``."""
    rng, kind = np.random.default_rng(7), getattr(TensorProto, dtype)
    blocks = (-(-K // block), N) if block else ()
    dims = (blocks[::-1] if turned else blocks) if scale_dims is None else scale_dims
    shape = (N, K) if turned else (K, N)

    def codes(name: str, dims: tuple[int, ...]) -> onnx.TensorProto:
        return helper.make_tensor(name, kind, dims, rng.integers(*RANGES[dtype], dims).ravel())

    scales = rng.random(dims, np.float32) + 0.5
    weights = [codes("w", shape), numpy_helper.from_array(np.asarray(scales, np.float32), "s")]
    weights += [codes("z", dims)] if zeros else []
    along = int(turned) if block else int(not turned)
    attrs = {"axis": along, **({"block_size": block} if block else {})}
    names = [each.name for each in weights]
    nodes = [helper.make_node("DequantizeLinear", names, ["d"], **attrs)]
    if turned and op == "MatMul":
        nodes.append(helper.make_node("Transpose", ["d"], ["t"]))
    x = "x"
    if quantized:
        weights.append(numpy_helper.from_array(np.float32(0.1), "xs"))
        weights.append(numpy_helper.from_array(np.uint8(128), "xz"))
        nodes.append(helper.make_node("QuantizeLinear", ["x", "xs", "xz"], ["q"]))
        nodes.append(helper.make_node("DequantizeLinear", ["q", "xs", "xz"], ["y0"]))
        x = "y0"
    if op == "Gemm":
        weights.append(numpy_helper.from_array(rng.random(N, np.float32), "b"))
        nodes.append(helper.make_node(op, [x, "d", "b"], ["y"], transB=int(turned)))
    else:
        nodes.append(helper.make_node(op, [x, nodes[-1].output[0] if x == "x" else "d"], ["y"]))
    info = [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["rows", K])]
    result = [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)]
    graph = helper.make_graph(nodes, "product", info, result, weights)
    opsets = [helper.make_opsetid("", opset)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=10 if opset < 25 else 13)


def operations(model: onnx.ModelProto) -> dict[str, int]:
    graph = ps.load(model).graph
    optimize(graph)
    return dict(count_operations(graph))


def check_answer(model: onnx.ModelProto) -> None:
    """Compare with ONNX Runtime, which runs the nodes as they are."""
    session = ps.compile(model)
    for rows in (1, 5):
        x = np.random.default_rng(8).standard_normal((rows, K)).astype(np.float32)
        options = SessionOptions()
        options.graph_optimization_level = GraphOptimizationLevel.ORT_DISABLE_ALL
        peer = InferenceSession(model.SerializeToString(), options)
        np.testing.assert_allclose(session(x), peer.run(None, {"x": x})[0], rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("zeros", [False, True])
@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("op", ["MatMul", "Gemm"])
@pytest.mark.parametrize("dtype", ["INT4", "UINT4", "INT8", "UINT8"])
def test_weights_in_blocks_are_multiplied_as_they_are_stored(dtype, op, turned, zeros):
    model = product(dtype, op=op, turned=turned, zeros=zeros)
    assert operations(model) == {"MatMulNBits": 1}
    check_answer(model)


@pytest.mark.parametrize("dtype", ["INT4", "UINT4"])
def test_weights_whose_last_block_is_shorter_are_padded(dtype):
    model = product(dtype, block=32)
    assert operations(model) == {"MatMulNBits": 1}
    check_answer(model)


@pytest.mark.parametrize("dtype", ["INT2", "UINT2"])
def test_weights_of_two_bits_are_multiplied_as_they_are_stored(dtype):
    model = product(dtype, opset=25)
    assert operations(model) == {"MatMulNBits": 1}
    check_answer(model)


@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("scale_dims", [(), (N,)])
def test_weights_of_four_bits_with_a_scale_of_each_column_are_one_block(scale_dims, turned):
    model = product("INT4", block=0, scale_dims=scale_dims, turned=turned)
    assert operations(model) == {"MatMulNBits": 1}
    check_answer(model)


def test_weights_of_eight_bits_without_blocks_are_expanded():
    assert operations(product("INT8", block=0, scale_dims=(N,))) == {"MatMul": 1}


def test_weights_of_quantized_activations_are_left_to_quantize():
    counts = operations(product("INT4", quantized=True))
    assert "MatMulNBits" not in counts


def test_weights_of_scales_along_k_are_expanded():
    """A scale of each element of K is no block that a MatMulNBits has."""
    model = product("INT4", block=0, scale_dims=(K,))
    model.graph.node[0].attribute[0].i = 0
    assert operations(model) == {"MatMul": 1}
    check_answer(model)


def test_weights_dequantized_to_another_type_are_expanded():
    """The type of the product is that of its inputs, not that of the scales."""
    model = product("INT4", opset=23)
    model.graph.node[0].attribute.append(helper.make_attribute("output_dtype", TensorProto.FLOAT16))
    model.graph.input[0].type.tensor_type.elem_type = TensorProto.FLOAT16
    assert "MatMulNBits" not in operations(model)


def test_weights_with_zero_points_of_other_dims_are_refused_as_before():
    model = product("INT4", scale_dims=(3, N))
    zeros = next(each for each in model.graph.initializer if each.name == "z")
    zeros.CopyFrom(helper.make_tensor("z", TensorProto.INT4, (1, N), np.zeros(N, np.int8)))
    with pytest.raises(ps.PenstockError, match="block_size 16 requires"):
        operations(model)
