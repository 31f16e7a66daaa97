"""Operations of ONNX Runtime that are written as those of ONNX."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest

import penstock as ps
from penstock.core.errors import InvalidModel, Unsupported
from penstock.frontends.onnx.importer import load_onnx
from tests.support.contrib import check_contrib, contrib_model
from tests.support.random_arrays import normal, uniform_codes, uniform_scales

rng = np.random.default_rng(0)
draw = partial(normal, rng)
codes = partial(uniform_codes, rng)
scales = partial(uniform_scales, rng)

F32 = np.float32


def whole(dtype: Any, *values: Any) -> np.ndarray:
    return np.array(values, dtype)


CASES: list[tuple[str, Sequence[Any], Mapping[str, Any], Mapping[str, Any]]] = [
    ("Gelu", [draw(3, 17)], {}, {}),
    ("BiasGelu", [draw(3, 17, 8), draw(8)], {}, {"constants": [1]}),
    ("FastGelu", [draw(3, 8)], {}, {}),
    ("FastGelu", [draw(3, 8), draw(8)], {}, {"constants": [1]}),
    ("QuickGelu", [draw(3, 8)], {}, {}),
    ("QuickGelu", [draw(3, 8)], {"alpha": 0.5}, {}),
    ("SampleOp", [draw(3, 8)], {}, {}),
    ("Trilu", [draw(2, 3, 4)], {}, {}),
    ("Trilu", [draw(2, 3, 4), np.array(-1)], {"upper": 0}, {"constants": [1]}),
    ("GatherND", [draw(2, 3, 4), whole(np.int64, [0, 1], [1, 2])], {}, {"constants": [1]}),
    ("GatherND", [draw(2, 3, 4), whole(np.int32, [0], [1])], {}, {}),
    ("ExpandDims", [draw(2, 3), np.array(1, np.int32)], {}, {"constants": [1]}),
    ("ExpandDims", [draw(2, 3), np.array(-1, np.int32)], {}, {}),
    ("Range", [np.array(1), np.array(9), np.array(3)], {}, {"constants": [0, 1, 2]}),
    ("Range", [whole(F32, 1), whole(F32, 4)], {}, {"constants": [0, 1]}),
    ("Range", [whole(np.int32, 5), whole(np.int32, 1), whole(np.int32, -2)], {}, {}),
    ("Unique", [whole(F32, 2, 1, 1, 3, 4, 3)], {}, {"outputs": 3}),
    ("Pad", [draw(2, 3), whole(np.int64, 0, 1, 2, 0), whole(F32, 7)], {}, {"constants": [1, 2]}),
    ("Pad", [draw(2, 3), whole(np.int64, [0, 1, 1, 0])], {"mode": "reflect"}, {}),
    ("MatMulInteger16", [codes(np.int16, 2, 3) // 9, codes(np.int16, 3, 4) // 9], {}, {}),
    ("GridSample", [draw(1, 2, 4, 5), draw(1, 3, 3, 2)], {}, {}),
    ("GridSample", [draw(1, 2, 4, 5), draw(1, 3, 3, 2)], {"mode": "nearest"}, {}),
    (
        "GridSample",
        [draw(1, 2, 4, 5), draw(1, 3, 3, 2)],
        {"mode": "bicubic", "padding_mode": "border", "align_corners": 1},
        {},
    ),
]


@pytest.mark.parametrize(("op", "inputs", "attrs", "more"), CASES)
def test_operation_of_one_onnx_node_matches_onnx_runtime(
    op: str, inputs: Sequence[Any], attrs: Mapping[str, Any], more: Mapping[str, Any]
) -> None:
    check_contrib(op, inputs, attrs, **more)


@pytest.mark.parametrize(
    ("op", "attrs"),
    [
        ("Affine", {"alpha": 0.5, "beta": 2.0}),
        ("Scale", {"scale": 0.3}),
        ("ScaledTanh", {"alpha": 0.5, "beta": 2.0}),
        ("ParametricSoftplus", {"alpha": 0.5, "beta": 2.0}),
        ("ImageScaler", {"scale": 0.5, "bias": [1.0, 2.0, 3.0]}),
        ("Crop", {"border": [1, 2, 1, 0]}),
        ("Crop", {"border": [1, 2, 1, 0], "scale": [2, 3]}),
    ],
)
def test_experiments_of_onnx_match_onnx_runtime(op: str, attrs: Mapping[str, Any]) -> None:
    check_contrib(op, [draw(2, 3, 5, 6)], attrs, domain="", opset=9, untyped="Crop" not in op)


@pytest.mark.parametrize("axes", [[0, 2], None])
def test_dynamic_slice_matches_onnx_runtime(axes: Any) -> None:
    bounds = [np.array([0, 1]), np.array([1, 3]), *([np.array(axes)] if axes else [])]
    check_contrib("DynamicSlice", [draw(2, 3, 4), *bounds], domain="", opset=9)


@pytest.mark.parametrize("alpha", [1.0, 0.25])
@pytest.mark.parametrize("op", ["FusedMatMul", "TransposeMatMul"])
@pytest.mark.parametrize(
    "a, b, attrs",
    [
        ((3, 4), (4, 5), {}),
        ((4, 3), (5, 4), {"transA": 1, "transB": 1}),
        ((2, 4, 3), (2, 4, 5), {"transA": 1}),
        ((2, 3, 4), (2, 5, 4), {"transB": 1}),
        ((2, 3, 4), (5, 4), {"transB": 1}),
        ((3, 2, 6, 4), (2, 6, 4, 5), {"transBatchA": 1}),
        ((4, 2, 6, 3), (2, 6, 4, 5), {"transBatchA": 1, "transA": 1}),
        ((2, 6, 3, 4), (4, 2, 6, 5), {"transBatchB": 1}),
        ((2, 6, 3, 4), (5, 2, 6, 4), {"transBatchB": 1, "transB": 1}),
    ],
)
def test_fused_matmul_matches_onnx_runtime(
    a: Any, b: Any, attrs: Mapping[str, int], op: str, alpha: float
) -> None:
    if op == "FusedMatMul" or not any("Batch" in key for key in attrs):
        check_contrib(op, [draw(*a), draw(*b)], {**attrs, "alpha": alpha}, constants=[1])


@pytest.mark.parametrize(
    "activation, parameters",
    [
        *[(name, {}) for name in ("Relu", "Sigmoid", "Tanh", "Softplus", "Softsign")],
        *[(name, {"alpha": 0.3}) for name in ("LeakyRelu", "Elu", "Celu", "ThresholdedRelu")],
        ("HardSigmoid", {"alpha": 0.3, "beta": 0.4}),
        ("Selu", {"alpha": 1.3, "gamma": 1.4}),
    ],
)
@pytest.mark.parametrize("bias", [(), (4,), (3, 1)])
def test_fused_gemm_matches_onnx_runtime(activation: str, parameters: Any, bias: Any) -> None:
    attrs = {f"activation_{key}": value for key, value in parameters.items()}
    inputs = [draw(5, 3), draw(4, 5), *([draw(*bias)] if bias else [])]
    attrs |= {"transA": 1, "transB": 1, "alpha": 0.5, "beta": 1.5, "activation": activation}
    check_contrib("FusedGemm", inputs, attrs, constants=[1])


@pytest.mark.parametrize(
    "activation, parameters",
    [
        *[("Relu", []), ("Tanh", []), ("Sigmoid", []), ("HardSwish", []), ("LeakyRelu", [0.1])],
        *[("Clip", [-0.5, 0.5]), ("HardSigmoid", [0.3, 0.4])],
    ],
)
@pytest.mark.parametrize("given", ["xw", "xwb", "xwbz", "xw z"])
def test_fused_conv_matches_onnx_runtime(activation: str, parameters: Any, given: str) -> None:
    attrs = {"activation": activation, "pads": [1] * 4}
    if parameters:
        attrs["activation_params"] = parameters
    operands = {"x": draw(1, 3, 5, 5), "w": draw(4, 3, 3, 3), "b": draw(4), "z": draw(1, 4, 5, 5)}
    inputs = [operands.get(key) for key in given]
    check_contrib("FusedConv", inputs, attrs, constants=[1])


@pytest.mark.parametrize("activation", ["Swish", "ScaledTanh"])
def test_unknown_activation_is_refused(activation: str) -> None:
    for op, inputs in (("FusedConv", [draw(1, 3, 5, 5)] * 2), ("FusedGemm", [draw(3, 3)] * 2)):
        with pytest.raises(Unsupported, match=activation):
            ps.load(contrib_model(op, inputs, {"activation": activation}))


@pytest.mark.parametrize("dtype", [np.int8, np.uint8])
@pytest.mark.parametrize("shape", [(1, 6, 3), (2, 6, 7, 3)])
@pytest.mark.parametrize("attrs", [{}, {"strides": 2, "pads": 1}, {"ceil_mode": 1, "strides": 2}])
def test_nhwc_max_pool_matches_onnx_runtime(dtype: Any, shape: Any, attrs: Any) -> None:
    spatial = len(shape) - 2
    lists = {key: [v] * spatial * (1 + (key == "pads")) for key, v in attrs.items()}
    if "ceil_mode" in attrs:
        lists["ceil_mode"] = 1
    check_contrib("NhwcMaxPool", [codes(dtype, *shape)], {"kernel_shape": [3] * spatial, **lists})


@pytest.mark.parametrize("pads", [(0, 0, 0, 0), (1, 0, 0, 2)])
@pytest.mark.parametrize("bias", [False, True])
def test_conv_transpose_with_dynamic_pads_matches_onnx_runtime(pads: Any, bias: bool) -> None:
    inputs = [draw(1, 3, 4, 5), draw(3, 2, 3, 3), np.array(pads), draw(2)][: 3 + bias]
    attrs = {"strides": [2, 1], "output_padding": [1, 0]}
    check_contrib("ConvTransposeWithDynamicPads", inputs, attrs, constants=[2])


@pytest.mark.parametrize(
    "a_dtype, b_dtype", [(np.uint8, np.uint8), (np.uint8, np.int8), (np.int8, np.int8)]
)
@pytest.mark.parametrize("length", [6, 300])
def test_matmul_integer_to_float_matches_onnx_runtime(
    a_dtype: Any, b_dtype: Any, length: int
) -> None:
    a, b = codes(a_dtype, 2, 3, length), codes(b_dtype, length, 4)
    zeros = np.asarray(codes(a_dtype) // 16), codes(b_dtype, 4) // 16
    check_contrib(
        "MatMulIntegerToFloat",
        [a, b, scales(), scales(4), *zeros, draw(4)],
        constants=[1, 3, 5],
        atol=1e-3,
    )
    check_contrib("MatMulIntegerToFloat", [a, b, scales(), scales()], atol=1e-3)
    check_contrib(
        "MatMulIntegerToFloat", [a, b, scales(1), scales(), None, None, draw(4)], atol=1e-3
    )


@pytest.mark.parametrize("b_dtype", [np.uint8, np.int8])
def test_dynamic_quantize_matmul_matches_onnx_runtime(b_dtype: Any) -> None:
    a, b, zero = draw(2, 3, 300), codes(b_dtype, 300, 4), codes(b_dtype, 4) // 16
    check_contrib("DynamicQuantizeMatMul", [a, b, scales()], atol=1e-3)
    inputs = [a, b, scales(4), zero, scales(4)]
    check_contrib("DynamicQuantizeMatMul", inputs, constants=[1, 2, 3, 4], atol=1e-3)
    check_contrib("DynamicQuantizeMatMul", [a * 0, b, scales()])


@pytest.mark.parametrize("kind", [0, 1])
@pytest.mark.parametrize("n, k, block", [(5, 32, 16), (3, 24, 64), (3, 3, 16)])
def test_matmul_bnb4_matches_onnx_runtime(kind: int, n: int, k: int, block: int) -> None:
    count = n * k
    inputs = [draw(2, 4, k), codes(np.uint8, -(-count // 2)), scales(-(-count // block))]
    attrs = {"N": n, "K": k, "block_size": block, "quant_type": kind}
    check_contrib("MatMulBnb4", inputs, attrs, constants=[1, 2])


@pytest.mark.parametrize("kind", [0, 1])
@pytest.mark.parametrize("n, k", [(5, 32), (3, 100)])
def test_matmul_fp_q4_matches_onnx_runtime(kind: int, n: int, k: int) -> None:
    blob = codes(np.uint8, n, -(-k // 32), 20 + kind)
    blob[..., :4] = scales(*blob.shape[:2], 1).view(np.uint8)
    blob[..., 4] &= 15
    inputs = [draw(2, 4, k), blob.reshape(-1), np.array([k, n])]
    try:
        check_contrib("MatMulFpQ4", inputs, {"blk_quant_type": kind}, constants=[1, 2])
    except onnxruntime.capi.onnxruntime_pybind11_state.Fail as error:
        if "not yet supported on this hardware platform" not in str(error):
            raise
        pytest.skip("ONNX Runtime's kernel needs AVX-512")


# Normalization and embedding.


@pytest.mark.parametrize("skip", [(2, 3, 8), (1, 3, 8), (3, 8)])
@pytest.mark.parametrize("beta, bias", [(0, 0), (1, 0), (0, 1), (1, 1)])
@pytest.mark.parametrize("outputs", [[True], [True, False, False, True], [True, True, True]])
def test_skip_layer_normalization_matches_onnx_runtime(
    skip: Any, beta: int, bias: int, outputs: Any
) -> None:
    inputs = [draw(2, 3, 8), draw(*skip), draw(8), draw(8) if beta else None]
    inputs += [draw(8)] if bias else []
    if inputs[-1] is None:
        inputs.pop()
    attrs = {"epsilon": 1e-3}
    check_contrib("SkipLayerNormalization", inputs, attrs, outputs=outputs, constants=[2])


@pytest.mark.parametrize("shape", [(2, 3, 8), (6, 8)])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(
    "outputs", [[True], [True, False, False, True], [True, True, True, True], [True, False, True]]
)
def test_skip_simplified_layer_normalization_matches_onnx_runtime(
    shape: Any, bias: bool, outputs: Any
) -> None:
    inputs = [draw(*shape), draw(*shape), draw(8)] + ([draw(8)] if bias else [])
    attrs = {"epsilon": 1e-3}
    check_contrib("SkipSimplifiedLayerNormalization", inputs, attrs, outputs=outputs)


def test_skip_layer_normalization_of_float16_matches_onnx_runtime() -> None:
    inputs = [
        draw(2, 3, 8, dtype=np.float16),
        draw(2, 3, 8, dtype=np.float16),
        draw(8, dtype=np.float16),
    ]
    check_contrib("SkipLayerNormalization", inputs, {"epsilon": 1e-3}, rtol=5e-3, atol=5e-3)


@pytest.mark.parametrize("segments", [True, False])
@pytest.mark.parametrize("masked", [True, False])
@pytest.mark.parametrize("places", [None, (2, 3), (1, 3)])
def test_embed_layer_normalization_matches_onnx_runtime(
    segments: bool, masked: bool, places: Any
) -> None:
    ids = rng.integers(0, 10, (2, 3)).astype(np.int32)
    inputs = [
        ids,
        rng.integers(0, 2, (2, 3)).astype(np.int32) if segments else None,
        draw(10, 8),
        draw(6, 8),
        draw(2, 8) if segments else None,
        draw(8),
        draw(8),
        np.array([[1, 1, 0], [1, 1, 1]], np.int32) if masked else None,
        rng.integers(0, 6, places).astype(np.int32) if places else None,
    ]
    while inputs[-1] is None:
        inputs.pop()
    for outputs in ([True, masked, True], [True]):
        attrs = {"epsilon": 1e-3, "mask_index_type": int(masked and len(outputs) > 1)}
        check_contrib(
            "EmbedLayerNormalization", inputs, attrs, outputs=outputs, constants=[2, 3, 5, 6]
        )


@pytest.mark.parametrize("dtype", [np.uint8, np.int8])
@pytest.mark.parametrize("segments", [True, False])
@pytest.mark.parametrize("masked", [True, False])
def test_qembed_layer_normalization_matches_onnx_runtime(
    dtype: Any, segments: bool, masked: bool
) -> None:
    ids = rng.integers(0, 6, (2, 3)).astype(np.int32)
    tables = [codes(dtype, *shape) for shape in ((10, 8), (6, 8), (2, 8), (8,), (8,))]
    factors = [scales() for _ in range(5)]
    zeros = [np.asarray(codes(dtype) // 16) for _ in range(5)]
    for group in (tables, factors, zeros):
        group[2] = group[2] if segments else None  # type: ignore[call-overload]
    mask = np.array([[1, 1, 0], [1, 1, 1]], np.int32) if masked else None
    inputs = [ids, ids % 2 if segments else None, *tables, mask, *factors, *zeros]
    check_contrib("QEmbedLayerNormalization", inputs, {"epsilon": 1e-3}, outputs=2, atol=1e-4)


# What cannot be.


def test_rules_leave_no_operation_of_onnx_runtime() -> None:
    for op, inputs, attrs, _ in CASES:
        nodes = load_onnx(contrib_model(op, inputs, attrs)).graph.nodes
        assert nodes
        assert all(node.op.domain == "" for node in nodes)


def test_rule_of_a_node_with_too_many_outputs_or_inputs_left_out_refuses_it() -> None:
    for op, inputs, attrs, _ in CASES:
        with pytest.raises(InvalidModel, match=r"are not those of|outputs"):
            ps.load(contrib_model(op, inputs, attrs, outputs=6))
    a, b = codes(np.int8, 4, 6), codes(np.int8, 6, 24)
    with pytest.raises(InvalidModel, match="lacks input 2, which MatMulIntegerToFloat requires"):
        ps.load(contrib_model("MatMulIntegerToFloat", [a, b, None, scales()]))
    weights = codes(np.uint8, 6, 24)
    with pytest.raises(InvalidModel, match="not those of QAttention"):
        inputs = [codes(np.uint8, 2, 5, 6), weights, draw(24), scales(), None]
        ps.load(contrib_model("QAttention", inputs, {"num_heads": 2}))


@pytest.mark.parametrize(
    "change", [{0: np.array([[10]], np.int32)}, {0: np.zeros((1, 7), np.int32)}]
)
def test_embed_layer_normalization_of_an_index_out_of_range_fails(change: Any) -> None:
    inputs = [np.array([[1]], np.int32), None, draw(10, 8), draw(6, 8), None, draw(8), draw(8)]
    for i, value in change.items():
        inputs[i] = value
    model = contrib_model("EmbedLayerNormalization", inputs)
    feeds = {f"x{i}": x for i, x in enumerate(inputs) if x is not None}
    with pytest.raises(ps.PenstockError, match=r"range|bounds"):
        ps.compile(model).run(feeds)


def test_sparse_to_dense_matmul_of_a_sparse_initializer() -> None:
    dense = np.array([[0, 2, 0], [0, 0, 3]], F32)
    values = onnx.numpy_helper.from_array(np.array([2, 3], F32), "x0")
    places = onnx.numpy_helper.from_array(np.array([1, 5]), "places")
    x = draw(2, 4)
    attrs = {"transA": 1, "alpha": 0.5}
    model = contrib_model("SparseToDenseMatMul", [dense, x], attrs)
    del model.graph.input[0]
    model.graph.sparse_initializer.append(onnx.helper.make_sparse_tensor(values, places, [2, 3]))
    np.testing.assert_allclose(ps.compile(model)(x), dense.T @ x / 2, rtol=1e-6)
