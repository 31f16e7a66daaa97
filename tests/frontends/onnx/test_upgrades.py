"""Rules for older operator versions compute what those versions define.

Each case is imported with typed and with untyped inputs, because rules emit different nodes for
these. Expected results come from ONNX Runtime, which runs opsets from 7 on, or from NumPy.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import helper

import penstock as ps
from penstock.core.errors import InvalidModel, Unsupported
from penstock.frontends.onnx.importer import load_onnx
from penstock.frontends.onnx.upgrades import UNCHANGED, UPGRADES, meaning
from penstock.ir.graph import Model
from penstock.ops import find
from tests.ops.harness import run_ort, value_info
from tests.support.onnx_models import interpret_model
from tests.support.onnx_text import model_from_text

R = np.random.default_rng(7)


def floats(*shape: int) -> np.ndarray:
    return R.normal(size=shape).astype(np.float32)


def build(
    op: str,
    opset: int,
    inputs: Sequence[Any],
    attrs: Mapping[str, Any],
    outputs: int | Sequence[bool] = 1,
    *,
    domain: str = "",
    typed: bool = True,
    constants: Sequence[int] = (),
) -> onnx.ModelProto:
    flags = [True] * outputs if isinstance(outputs, int) else outputs
    names = ["" if x is None else f"x{i}" for i, x in enumerate(inputs)]
    results = [f"y{i}" if flag else "" for i, flag in enumerate(flags)]
    node = helper.make_node(op, names, results, name="node", domain=domain)
    for key, value in attrs.items():
        attr_type = onnx.AttributeProto.INTS if value == [] else None
        node.attribute.append(helper.make_attribute(key, value, attr_type=attr_type))
    infos = [
        value_info(name, x) if typed else onnx.ValueInfoProto(name=name)
        for i, (name, x) in enumerate(zip(names, inputs, strict=True))
        if x is not None and i not in constants
    ]
    initializers = [onnx.numpy_helper.from_array(inputs[i], f"x{i}") for i in constants]
    outs = [onnx.ValueInfoProto(name=name) for name in results if name]
    graph = helper.make_graph([node], "g", infos, outs, initializers)
    imports = [helper.make_opsetid("", 17 if domain else opset)]
    if domain:
        imports.append(helper.make_opsetid(domain, opset))
    return helper.make_model(graph, opset_imports=imports, ir_version=8)


def run(model: Model, inputs: Sequence[Any]) -> list[Any]:
    """The outputs for inputs named ``x0``, ``x1``, ...; constants among them are left out."""
    by_name = {f"x{i}": x for i, x in enumerate(inputs)}
    return interpret_model(model, *[by_name[v.name] for v in model.graph.inputs])


Expected = str | Callable[..., Any]


def check(
    op: str,
    opset: int,
    inputs: Sequence[Any],
    attrs: Mapping[str, Any],
    expected: Expected,
    outputs: int | Sequence[bool] = 1,
    *,
    domain: str = "",
    constants: Sequence[int] = (),
    rtol: float = 1e-5,
    atol: float = 1e-6,
) -> None:
    if expected == "ort":
        proto = build(op, opset, inputs, attrs, outputs, domain=domain)
        wanted = run_ort(proto, inputs)
    else:
        assert not isinstance(expected, str)
        with np.errstate(all="ignore"):
            result = expected(*inputs)
        wanted = list(result) if isinstance(result, tuple) else [result]
    for typed, consts in ((True, ()), (False, ()), (True, constants)):
        proto = build(
            op, opset, inputs, attrs, outputs, domain=domain, typed=typed, constants=consts
        )
        model = load_onnx(proto)
        for got, want in zip(run(model, inputs), wanted, strict=True):
            assert got.dtype == want.dtype or want.dtype.kind in "UO"
            assert got.shape == want.shape
            if want.dtype.kind in "fc":
                np.testing.assert_allclose(got, want, rtol=rtol, atol=atol)
            else:
                np.testing.assert_array_equal(got, want)


A = floats(2, 3, 4, 5)
AXES = [
    ((3, 4), {"broadcast": 1, "axis": 1}, lambda b: b[None, :, :, None]),
    ((2,), {"broadcast": 1, "axis": 0}, lambda b: b[:, None, None, None]),
    ((3, 4), {"broadcast": 1, "axis": -3}, lambda b: b[None, :, :, None]),
    ((4, 5), {"broadcast": 1, "axis": 2}, lambda b: b),
    ((4, 5), {"broadcast": 1}, lambda b: b),
    ((1, 1), {"broadcast": 1, "axis": 0}, lambda b: b),
    ((), {"broadcast": 1}, lambda b: b),
    ((2, 3, 4, 5), {}, lambda b: b),
]


@pytest.mark.parametrize("opset", [1, 6])
@pytest.mark.parametrize(("shape", "attrs", "place"), AXES)
def test_legacy_broadcasting_matches_numpy(shape: Any, attrs: Any, place: Any, opset: int) -> None:
    b = floats(*shape)
    check("Add", opset, [A, b], attrs, lambda a, b: a + place(b), constants=[1])


BINARY: dict[str, Callable[[Any, Any], Any]] = {
    "Sub": np.subtract,
    "Mul": np.multiply,
    "Div": np.divide,
    "Pow": lambda a, b: np.power(a, b),
    "Less": np.less,
    "Greater": np.greater,
    "Equal": np.equal,
    "And": np.logical_and,
    "Or": np.logical_or,
    "Xor": np.logical_xor,
}


@pytest.mark.parametrize("op", BINARY)
def test_legacy_broadcasting_works_for_all_binary_operations(op: str) -> None:
    a, b = floats(2, 3, 4), floats(3)
    if op in ("And", "Or", "Xor"):
        a, b = a > 0, b > 0
    if op == "Equal":
        a, b = (3 * a).astype(np.int64), (3 * b).astype(np.int64)
    if op == "Pow":
        a = np.abs(a)
    attrs = {"broadcast": 1, "axis": 1}
    check(op, 1, [a, b], attrs, lambda a, b: BINARY[op](a, b[:, None]))


def normalized(x: Any, scale: Any, bias: Any, mean: Any, var: Any, epsilon: float) -> Any:
    shape = (-1,) + (1,) * (x.ndim - 2)
    mean, var, scale, bias = (v.reshape(shape) for v in (mean, var, scale, bias))
    return ((x - mean) / np.sqrt(var + epsilon) * scale + bias).astype(x.dtype)


X = floats(2, 3, 4, 5)
STATISTICS = [floats(3), floats(3), floats(3), np.abs(floats(3))]


@pytest.mark.parametrize(
    ("opset", "attrs"),
    [
        (1, {"is_test": 1, "consumed_inputs": [0, 0, 0, 1, 1]}),
        (6, {"is_test": 1}),
        (7, {}),
        (8, {}),
        (9, {}),
        (13, {}),
    ],
)
def test_batch_normalization_in_old_versions_matches_the_definition(opset: int, attrs: Any) -> None:
    check(
        "BatchNormalization",
        opset,
        [X, *STATISTICS],
        {"epsilon": 0.01, **attrs},
        lambda *inputs: normalized(*inputs, 0.01),
        rtol=1e-4,
    )


@pytest.mark.parametrize(("opset", "attrs"), [(6, {"is_test": 1}), (8, {})])
def test_batch_normalization_with_spatial_0_is_per_element(opset: int, attrs: Any) -> None:
    statistics = [floats(3, 4, 5), floats(3, 4, 5), floats(3, 4, 5), np.abs(floats(3, 4, 5))]
    check(
        "BatchNormalization",
        opset,
        [X, *statistics],
        {"epsilon": 0.01, "spatial": 0, **attrs},
        lambda x, s, b, m, v: (x - m) / np.sqrt(v + np.float32(0.01)) * s + b,
        rtol=1e-4,
    )


@pytest.mark.parametrize("opset", [6, 9])
def test_batch_normalization_in_training_gives_statistics(opset: int) -> None:
    def expected(x: Any, scale: Any, bias: Any, mean: Any, var: Any) -> Any:
        now, spread = x.mean(axis=(0, 2, 3)), x.var(axis=(0, 2, 3))
        y = normalized(x, scale, bias, now, spread, 1e-5)
        return y, mean * np.float32(0.9) + now * 0.1, var * np.float32(0.9) + spread * 0.1

    check("BatchNormalization", opset, [X, *STATISTICS], {}, expected, 3, rtol=1e-4)


def test_batch_normalization_saved_outputs_are_refused() -> None:
    with pytest.raises(Unsupported, match="saved_mean"):
        load_onnx(build("BatchNormalization", 9, [X, *STATISTICS], {}, 5))


@pytest.mark.parametrize("opset", [1, 5])
def test_cast_to_a_type_name_becomes_its_code(opset: int) -> None:
    check("Cast", opset, [A], {"to": "INT32"}, lambda a: a.astype(np.int32))
    check("Cast", opset, [A], {"to": "float16"}, lambda a: a.astype(np.float16))
    with pytest.raises(InvalidModel, match="node in the model casts to 'REAL'"):
        load_onnx(build("Cast", opset, [A], {"to": "REAL"}))


@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.float16])
@pytest.mark.parametrize("attrs", [{"min": -0.5, "max": 0.75}, {"min": 0.0}, {"max": 0.25}, {}])
def test_clip_with_attributes_as_bounds_clips(dtype: Any, attrs: Any) -> None:
    a = A.astype(dtype)
    low, high = attrs.get("min", -np.inf), attrs.get("max", np.inf)
    for opset in (1, 6, 10):
        check("Clip", opset, [a], attrs, lambda a: np.clip(a, dtype(low), dtype(high)))


def test_clip_without_bounds_keeps_infinity_except_in_version_6() -> None:
    a = np.array([np.inf, -np.inf], np.float32)
    largest = np.finfo(np.float32).max
    check("Clip", 6, [a], {}, lambda a: np.array([largest, -largest], np.float32))
    check("Clip", 1, [a], {}, lambda a: a)


def test_concat_1_has_axis_1_by_default() -> None:
    check("Concat", 1, [A, A], {}, lambda a, b: np.concatenate([a, b], 1))
    check("Concat", 3, [A, A], {"axis": 2}, lambda a, b: np.concatenate([a, b], 2))


@pytest.mark.parametrize("attrs", [{}, {"axis": 2}, {"inverse": 1}, {"onesided": 1}])
def test_dft_with_axis_as_attribute_matches_onnx_runtime(attrs: Any) -> None:
    x = floats(2, 8, 6, 2 if "inverse" in attrs else 1)
    check("DFT", 17, [x], attrs, "ort", rtol=1e-3, atol=1e-5)
    check("DFT", 17, [x, np.array(4, np.int64)], attrs, "ort", rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize(
    ("opset", "attrs"), [(1, {"is_test": 1}), (6, {"is_test": 1, "ratio": 0.9}), (7, {}), (10, {})]
)
def test_dropout_in_inference_is_identity(opset: int, attrs: Any) -> None:
    check("Dropout", opset, [A], attrs, lambda a: a)
    mask_type = bool if opset == 10 else np.float32
    check("Dropout", opset, [A], attrs, lambda a: (a, np.ones_like(a, mask_type)), 2)


def test_dropout_in_training_drops() -> None:
    x = np.ones(10_000, np.float32)
    model = load_onnx(build("Dropout", 6, [x], {"ratio": 0.25}))
    (y,) = run(model, [x])
    assert set(np.unique(y)) == {np.float32(0), np.float32(1 / 0.75)}
    assert 0.2 < np.mean(y == 0) < 0.3


@pytest.mark.parametrize("opset", [1, 6])
def test_gemm_in_old_versions_broadcasts_c(opset: int) -> None:
    a, b, c = floats(2, 3), floats(4, 3), floats(4)
    check(
        "Gemm",
        opset,
        [a, b, c],
        {"transB": 1, "alpha": 0.5, "broadcast": 1},
        lambda a, b, c: 0.5 * (a @ b.T) + c,
        rtol=1e-4,
    )


def test_lp_pool_with_a_float_p_needs_a_whole_number() -> None:
    attrs = {"kernel_shape": [2, 2], "p": 2.0}
    blocks = X[:, :, :4, :4].reshape(2, 3, 2, 2, 2, 2)
    wanted = np.sqrt((blocks**2).sum(axis=(3, 5)))
    check("LpPool", 1, [X[:, :, :4, :4]], {**attrs, "strides": [2, 2]}, lambda x: wanted)
    wanted_global = np.abs(X).sum(axis=(2, 3), keepdims=True)
    check("GlobalLpPool", 1, [X], {"p": 1.0}, lambda x: wanted_global)
    with pytest.raises(Unsupported, match=r"p = 2.5 is not a whole number"):
        load_onnx(build("GlobalLpPool", 1, [X], {"p": 2.5}))
    with pytest.raises(InvalidModel, match="kernel_shape"):
        load_onnx(build("LpPool", 1, [X], {}))


@pytest.mark.parametrize("mode", ["bilinear", "nearest", "bicubic"])
def test_grid_sample_16_modes_become_the_current_ones(mode: str) -> None:
    grid = np.clip(floats(2, 6, 7, 2), -1, 1)
    check("GridSample", 16, [X, grid], {"mode": mode}, "ort", rtol=1e-3)


def test_group_normalization_18_scales_per_group() -> None:
    x, scale, bias = floats(2, 6, 4, 5), floats(3), floats(3)

    def expected(x: Any, scale: Any, bias: Any) -> Any:
        groups = x.reshape(2, 3, -1)
        mean, var = groups.mean(-1, keepdims=True), groups.var(-1, keepdims=True)
        y = (groups - mean) / np.sqrt(var + 1e-3) * scale[None, :, None] + bias[None, :, None]
        return y.reshape(x.shape).astype(x.dtype)

    attrs = {"num_groups": 3, "epsilon": 1e-3}
    check("GroupNormalization", 18, [x, scale, bias], attrs, expected, rtol=1e-4)


@pytest.mark.parametrize("op", ["RNN", "GRU", "LSTM"])
@pytest.mark.parametrize("direction", ["forward", "reverse", "bidirectional"])
def test_recurrent_operations_in_old_versions_match_onnx_runtime(op: str, direction: str) -> None:
    gates = {"RNN": 1, "GRU": 3, "LSTM": 4}[op]
    n = 2 if direction == "bidirectional" else 1
    x, w, r = floats(5, 2, 3), floats(n, gates * 4, 3), floats(n, gates * 4, 4)
    attrs = {"hidden_size": 4, "direction": direction}
    wanted = run_ort(build(op, 14, [x, w, r], attrs, 2), [x, w, r])
    for opset in (1, 6):
        more = {**attrs, "output_sequence": 1} if opset < 7 else attrs
        check(op, opset, [x, w, r], more, lambda *_: tuple(wanted), 2, rtol=1e-4)


def test_gru_1_misspelt_default_direction_is_forward() -> None:
    x, w, r = floats(5, 2, 3), floats(1, 12, 3), floats(1, 12, 4)
    wanted = run_ort(build("GRU", 14, [x, w, r], {"hidden_size": 4}, 2), [x, w, r])
    check("GRU", 1, [x, w, r], {"hidden_size": 4}, lambda *_: tuple(wanted), 2, rtol=1e-4)


@pytest.mark.parametrize("op", ["Softmax", "LogSoftmax", "Hardmax"])
@pytest.mark.parametrize("shape", [(2, 3, 4), (2, 3), (2, 3, 1, 1)])
def test_softmax_before_13_flattens_from_the_axis(op: str, shape: Any) -> None:
    x = floats(*shape)
    check(op, 7, [x], {}, "ort")
    for axis in range(len(shape)):
        check(op, 11, [x], {"axis": axis - len(shape)}, "ort")
        check(op, 9, [x], {"axis": axis}, "ort")


def test_softmax_over_the_last_axis_is_one_node() -> None:
    for shape, axis in (((2, 3), 1), ((2, 3, 1, 1), 1), ((2, 3, 4), -1)):
        model = load_onnx(build("Softmax", 11, [floats(*shape)], {"axis": axis}))
        assert [node.op.name for node in model.graph.nodes] == ["Softmax"]


@pytest.mark.parametrize("opset", [9, 10])
@pytest.mark.parametrize("dtype", [np.int64, np.int32, np.float32])
def test_one_hot_9_of_negative_indices_matches_the_definition(opset: int, dtype: Any) -> None:
    indices = np.array([[0, 2, -1], [3, -3, 1]], dtype)
    depth, values = np.array([3], np.int64), np.array([2, 5], np.float32)
    table = (indices[..., None] == np.arange(3)).astype(np.float32) * 3 + 2
    check("OneHot", opset, [indices, depth, values], {}, lambda *_: table)
    scalar = np.array(-1, dtype)
    check("OneHot", opset, [scalar, depth, values], {}, lambda *_: np.full(3, 2, np.float32))


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize(
    "attrs",
    [
        {"pads": [0, 1, 2, 0, 2, 1], "value": 1.5},
        {"pads": [0, 1, 2, 0, 2, 1]},
        {"pads": [0, -1, 2, 0, 0, -1], "value": 0.5},
        {"pads": [0, 1, 2, 0, 1, 1], "mode": "reflect"},
        {"pads": [0, 1, 2, 0, 2, 1], "mode": "edge"},
    ],
)
def test_pad_with_attributes_pads(attrs: Any, dtype: Any) -> None:
    x = floats(2, 3, 4).astype(dtype)
    check("Pad", 10, [x], attrs, "ort")
    wanted = run_ort(build("Pad", 10, [x], attrs), [x])[0]
    first = {k.replace("pads", "paddings"): v for k, v in attrs.items()}
    check("Pad", 1, [x], first, lambda x: wanted)


@pytest.mark.parametrize("opset", [1, 6])
def test_prelu_with_a_slope_per_channel_broadcasts(opset: int) -> None:
    x = floats(2, 3, 4, 5)

    def expected(x: Any, slope: Any) -> Any:
        return np.where(x < 0, x * slope.reshape(-1, 1, 1), x)

    check("PRelu", opset, [x, floats(3)], {}, expected, constants=[1])
    check("PRelu", opset, [x, floats(1)], {}, expected, constants=[1])
    check("PRelu", opset, [floats(4, 3), floats(3)], {}, lambda x, s: np.where(x < 0, x * s, x))


REDUCE: dict[str, Callable[..., Any]] = {
    "ReduceSum": np.sum,
    "ReduceMean": np.mean,
    "ReduceMax": np.max,
    "ReduceMin": np.min,
    "ReduceProd": np.prod,
    "ReduceL1": lambda x, **k: np.abs(x).sum(**k),
    "ReduceL2": lambda x, **k: np.sqrt((x**2).sum(**k)),
    "ReduceSumSquare": lambda x, **k: (x**2).sum(**k),
    "ReduceLogSum": lambda x, **k: np.log(x.sum(**k)),
    "ReduceLogSumExp": lambda x, **k: np.log(np.exp(x).sum(**k)),
}


@pytest.mark.parametrize("op", REDUCE)
def test_reductions_with_axes_as_attribute_match_numpy(op: str) -> None:
    x = np.abs(floats(2, 3, 4)) + 0.1
    for opset in (1, 11, 12 if op == "ReduceSum" else 17):
        for axes in ([1], [0, 2], None, []):
            for keepdims in (0, 1):
                attrs = {"keepdims": keepdims} | ({} if axes is None else {"axes": axes})
                where = tuple(axes) if axes else None
                check(
                    op,
                    opset,
                    [x],
                    attrs,
                    lambda x, w=where, k=keepdims: np.asarray(REDUCE[op](x, axis=w, keepdims=k)),
                    rtol=1e-4,
                )


def test_reshape_1_reshapes_to_its_attribute() -> None:
    attrs = {"shape": [0, -1, 5]}
    check("Reshape", 1, [A], attrs, lambda a: a.reshape(2, 12, 5))
    check("Reshape", 4, [A[:1, :1, :1, :1]], {"shape": []}, lambda a: a.reshape(()))
    with pytest.raises(InvalidModel, match="shape"):
        load_onnx(build("Reshape", 1, [A], {}))


IMAGE = floats(1, 2, 5, 6)


@pytest.mark.parametrize("mode", ["nearest", "linear"])
@pytest.mark.parametrize("scales", [(2, 3), (0.6, 0.6), (1.5, 0.7), (1.3, 2.7), (0.4, 0.9), (1, 1)])
def test_resize_10_matches_onnx_runtime(mode: str, scales: Any) -> None:
    factors = np.array([1, 1, *scales], np.float32)
    check("Resize", 10, [IMAGE, factors], {"mode": mode}, "ort", constants=[1], rtol=1e-4)


@pytest.mark.parametrize("mode", ["nearest", "linear"])
@pytest.mark.parametrize("scales", [(2.0, 3.0), (1.3, 2.7), (1.0, 2.0)])
def test_upsample_matches_onnx_runtime(mode: str, scales: Any) -> None:
    factors = np.array([1, 1, *scales], np.float32)
    check("Upsample", 9, [IMAGE, factors], {"mode": mode}, "ort", constants=[1], rtol=1e-4)
    attrs = {"mode": mode, "scales": factors.tolist()}
    check("Upsample", 7, [IMAGE], attrs, "ort", rtol=1e-4)
    wanted = run_ort(build("Upsample", 7, [IMAGE], attrs), [IMAGE])[0]
    first = {
        "mode": "nearest" if mode == "nearest" else "bilinear",
        "height_scale": scales[0],
        "width_scale": scales[1],
    }
    check("Upsample", 1, [IMAGE], first, lambda x: wanted, rtol=1e-4)


@pytest.mark.parametrize("rounding", ["floor", "round_prefer_floor"])
@pytest.mark.parametrize("scales", [(2.0, 3.0), (0.6, 0.5), (1.3, 0.7)])
def test_resize_11_tf_half_pixel_matches_onnx_runtime(rounding: str, scales: Any) -> None:
    empty = np.empty(0, np.float32)
    factors = np.array([1, 1, *scales], np.float32)
    attrs = {
        "mode": "nearest",
        "nearest_mode": rounding,
        "coordinate_transformation_mode": "tf_half_pixel_for_nn",
    }
    check("Resize", 11, [IMAGE, empty, factors], attrs, "ort", constants=[1, 2])


@pytest.mark.parametrize("attrs", [{}, {"mode": "linear"}, {"mode": "cubic"}])
def test_resize_11_accepts_empty_tensors_for_missing_inputs(attrs: Any) -> None:
    empty = np.empty(0, np.float32)
    sizes = np.array([1, 2, 7, 4], np.int64)
    inputs = [IMAGE, empty, empty, sizes]
    check("Resize", 11, inputs, attrs, "ort", constants=[1, 2, 3], rtol=1e-3)


def test_resize_11_unsupported_modes_are_refused() -> None:
    empty, factors = np.empty(0, np.float32), np.array([1, 1, 2, 2], np.float32)
    attrs = {"mode": "linear", "coordinate_transformation_mode": "tf_half_pixel_for_nn"}
    with pytest.raises(Unsupported, match="tf_half_pixel_for_nn"):
        load_onnx(build("Resize", 11, [IMAGE, empty, factors], attrs))


def test_roi_align_10_has_no_half_pixel_offset() -> None:
    rois = np.array([[0, 0, 4, 3], [1, 1, 3.5, 4]], np.float32)
    attrs = {"output_height": 2, "output_width": 2, "sampling_ratio": 2}
    inputs = [IMAGE, rois, np.zeros(2, np.int64)]
    check("RoiAlign", 10, inputs, attrs, "ort", rtol=1e-4)


@pytest.mark.parametrize("opset", [9, 11])
def test_scatter_becomes_scatter_elements(opset: int) -> None:
    data, updates = floats(3, 4), floats(2, 4)
    indices = np.array([[0, 1, 2, 0], [1, 2, 0, 1]], np.int64)
    inputs = [data, indices, updates]
    wanted = run_ort(build("Scatter", 9, inputs, {}), inputs)[0]
    check("Scatter", opset, inputs, {}, lambda *_: wanted)


@pytest.mark.parametrize("opset", [1, 9])
@pytest.mark.parametrize(
    ("attrs", "where"),
    [
        ({"starts": [1, 0], "ends": [3, 2], "axes": [2, 0]}, np.s_[0:2, :, 1:3]),
        ({"starts": [0, 1], "ends": [1, -1]}, np.s_[0:1, 1:-1]),
        ({"starts": [-2], "ends": [1000], "axes": [-1]}, np.s_[..., -2:]),
    ],
)
def test_slice_with_attributes_slices(attrs: Any, where: Any, opset: int) -> None:
    check("Slice", opset, [A], attrs, lambda a: a[where])


@pytest.mark.parametrize("opset", [1, 2, 11, 13, 17])
def test_split_in_old_versions_splits(opset: int) -> None:
    x = floats(6, 4)
    check("Split", opset, [x], {"axis": 0}, lambda x: tuple(np.split(x, 3)), 3)
    check("Split", opset, [x], {}, lambda x: tuple(np.split(x, 2)), 2)
    lengths = np.array([1, 3], np.int64)
    parts = [x[:, :1], x[:, 1:4]]
    if opset < 13:
        attrs = {"axis": 1, "split": lengths.tolist()}
        check("Split", opset, [x[:, :4]], attrs, lambda _: tuple(parts), 2)
    if opset == 1:
        lengths = lengths.astype(np.float32)
    if opset not in (2, 11):
        check("Split", opset, [x, lengths], {"axis": 1}, lambda *_: tuple(parts), 2)


@pytest.mark.parametrize("opset", [1, 11, 12])
def test_squeeze_and_unsqueeze_with_axes_as_attribute_work(opset: int) -> None:
    x = floats(1, 3, 1, 4)
    check("Squeeze", opset, [x], {"axes": [0]}, lambda x: x[0])
    check("Squeeze", opset, [x], {}, lambda x: x[0, :, 0])
    check("Unsqueeze", opset, [x], {"axes": [0, 5]}, lambda x: x[None, ..., None])


def test_tile_1_repeats_one_axis() -> None:
    two, axis = np.array([2], np.float32), np.array([1], np.float32)
    check("Tile", 1, [A, two, axis], {}, lambda a, *_: np.tile(a, (1, 2, 1, 1)))


def test_top_k_with_k_as_attribute_sorts() -> None:
    x = floats(3, 6)
    order = np.argsort(-x, axis=1)[:, :2]
    wanted = (np.take_along_axis(x, order, 1), order)
    check("TopK", 1, [x], {"k": 2, "axis": 1}, lambda x: wanted, 2)
    check("TopK", 9, [x], {"k": 2}, lambda x: wanted, 2)


def test_label_encoder_1_looks_up_by_position() -> None:
    words = np.array(["b", "c", "?"], object)
    numbers = np.array([1, 0, 7], np.int64)
    attrs = {"classes_strings": ["a", "b", "c"]}
    to_number = {**attrs, "default_int64": -5}
    to_word = {**attrs, "default_string": "none"}
    ml = "ai.onnx.ml"
    check("LabelEncoder", 1, [words], to_number, lambda _: np.array([1, 2, -5]), domain=ml)
    check(
        "LabelEncoder",
        1,
        [numbers],
        to_word,
        lambda _: np.array(["b", "a", "none"], object),
        domain=ml,
    )


def versions() -> dict[tuple[str, str], list[int]]:
    """The versions of each operation of ONNX, by domain and name."""
    versions: dict[tuple[str, str], list[int]] = {}
    for schema in onnx.defs.get_all_schemas_with_history():
        versions.setdefault((schema.domain, schema.name), []).append(schema.since_version)
    return {key: sorted(numbers) for key, numbers in versions.items()}


def test_upgrade_tables_cover_every_operation_with_several_versions() -> None:
    for (domain, name), numbers in versions().items():
        listed = (domain, name) in UPGRADES or name in UNCHANGED
        old = find(name, domain, numbers[0])  # registered as an old version
        registered = old is not None and old.version < numbers[-1]
        assert listed or registered or len(numbers) == 1, name
        if (domain, name) in UPGRADES:
            assert name not in UNCHANGED
            last = [version for version, _ in UPGRADES[domain, name]]
            assert numbers[0] <= last[0] and last == sorted(last)
    names = {name for _, name in versions()}
    assert set(UNCHANGED) <= names
    assert {name for _, name in UPGRADES} <= names


# Operations without a kernel in any version.
MISSING = {"Gradient"}


def test_every_version_of_every_operation_has_a_meaning() -> None:
    missing = {
        f"{name}-{version}"
        for (domain, name), numbers in versions().items()
        for version in numbers
        if name not in MISSING and not (domain == "" and name == "Constant")
        if meaning(name, domain, version).rule is None
        if meaning(name, domain, version).op is None
    }
    assert not missing


@pytest.mark.parametrize("opset", [1, 9, 16])
def test_layer_normalization_before_its_first_version_is_that_of_17(opset: int) -> None:
    """ONNX Runtime writes it into models of any opset."""
    text = "g (float[2, 3] x) => (float[2, 3] y) <float[3] s = {{1, 2, 3}}> {{ y = {} }}"
    model = model_from_text(text.format("LayerNormalization(x, s)"), opset=opset)
    x = np.arange(6, dtype=np.float32).reshape(2, 3)
    newer = model_from_text(text.format("LayerNormalization(x, s)"), opset=17)
    np.testing.assert_array_equal(ps.compile(model)(x), ps.compile(newer)(x))
    for wrong in ("LayerNormalization(x)", "LayerNormalization<stash = 1>(x, s)"):
        with pytest.raises(ps.InvalidModel, match="LayerNormalization-17"):
            ps.compile(model_from_text(text.format(wrong), opset=opset))
