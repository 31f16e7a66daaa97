"""MaxPool, AveragePool, LpPool, the global ones, and MaxUnpool."""

import ml_dtypes
import numpy as np
import pytest

from penstock.analysis.interpreter import evaluate
from penstock.core.types import FLOAT32, INT64, ShapeError, TensorType
from penstock.frontends.onnx.importer import load_onnx
from penstock.ops import find
from penstock.ops.onnx import pooling as family
from tests.ops.harness import check_node, node_model

rng = np.random.default_rng(0)
NARROW = [np.float16, ml_dtypes.bfloat16]


def draw(*shape, dtype=np.float32):
    if np.dtype(dtype).kind in "iu":
        info = np.iinfo(dtype)
        return rng.integers(info.min, info.max, shape).astype(dtype)
    return rng.standard_normal(shape).astype(dtype)


GEOMETRY = [
    {},
    {"strides": [2, 3]},
    {"pads": [1, 1, 1, 1]},
    {"pads": [2, 0, 1, 1], "strides": [2, 2]},
    {"dilations": [2, 3]},
    {"dilations": [1, 2], "strides": [2, 1], "pads": [1, 1, 2, 0]},
    {"strides": [2, 2], "ceil_mode": 1},
    {"strides": [3, 2], "ceil_mode": 1, "pads": [1, 1, 1, 1]},
    {"strides": [3, 3], "ceil_mode": 1, "dilations": [2, 2], "pads": [1, 0, 1, 1]},
    {"auto_pad": "SAME_UPPER", "strides": [2, 2]},
    {"auto_pad": "SAME_LOWER", "strides": [2, 3]},
    {"auto_pad": "VALID", "strides": [2, 2]},
]


@pytest.mark.parametrize("attrs", GEOMETRY)
@pytest.mark.parametrize("kernel", [[3, 3], [2, 3], [3, 1], [1, 1]])
@pytest.mark.parametrize("outputs", [1, 2])
def test_max_pool_matches_the_reference(attrs, kernel, outputs):
    if any(p >= k for p, k in zip(attrs.get("pads", [0] * 4), kernel * 2, strict=True)):
        attrs = {k: v for k, v in attrs.items() if k != "pads"}
    if attrs.get("auto_pad") == "SAME_UPPER" and 1 in kernel:
        pytest.skip("ONNX Runtime refuses SAME with strides beyond the kernel")
    check_node("MaxPool", [draw(2, 3, 9, 10)], {"kernel_shape": kernel, **attrs},
               expected="ort", opset=21, outputs=outputs)  # fmt: skip


@pytest.mark.parametrize("storage_order", [0, 1])
@pytest.mark.parametrize("shape", [(2, 3, 9), (2, 3, 7, 8), (2, 2, 4, 5, 6)])
def test_max_pool_indices_matches_the_reference(shape, storage_order):
    rank = len(shape) - 2
    attrs = {"kernel_shape": [2] * rank, "storage_order": storage_order, "pads": [1] * 2 * rank}
    check_node("MaxPool", [draw(*shape)], attrs, expected="ort", opset=21, outputs=2)


def test_max_pool_takes_the_first_of_equal_ones():
    x = rng.integers(0, 3, (1, 2, 8, 8)).astype(np.float32)
    attrs = {"kernel_shape": [3, 3], "pads": [1] * 4, "strides": [2, 2]}
    check_node("MaxPool", [x], attrs, expected="ort", opset=21, outputs=2)


def test_max_pool_keeps_nans():
    x = draw(1, 1, 4, 4)
    x[0, 0, 1, 1] = np.nan
    x[0, 0, 3, :] = -np.inf
    want = np.array([[[[np.nan, np.nan], [np.nan, np.nan]]]], np.float32)
    attrs = {"kernel_shape": [3, 3]}
    where = np.full((1, 1, 2, 2), 5)
    check_node("MaxPool", [x], attrs, expected=[want])
    check_node("MaxPool", [x], attrs, expected=[want, where], outputs=2)
    low = np.full((1, 1, 2, 2), -np.inf, np.float32)
    y = check_node("MaxPool", [low], {"kernel_shape": [2, 2]}, expected=[low[..., :1, :1],
                   np.zeros((1, 1, 1, 1), np.int64)], outputs=2)  # fmt: skip
    assert y[1].item() == 0


@pytest.mark.parametrize("dtype", [np.float64, np.int8, np.uint8])
@pytest.mark.parametrize("outputs", [1, 2])
def test_max_pool_of_every_dtype_matches_the_definition(dtype, outputs):
    attrs = {"kernel_shape": [3, 2], "pads": [1, 1, 1, 0], "strides": [2, 1]}
    check_node("MaxPool", [draw(2, 3, 6, 7, dtype=dtype)], attrs, expected="ort", opset=21,
               outputs=outputs)  # fmt: skip


@pytest.mark.parametrize("dtype", NARROW)
def test_max_pool_narrow_matches_the_reference(dtype):
    x = draw(2, 3, 6, 7, dtype=dtype)
    attrs = {"kernel_shape": [2, 2], "strides": [2, 2]}
    cut = x[..., :6].astype(np.float32).reshape(2, 3, 3, 2, 3, 2)
    check_node("MaxPool", [x], attrs, expected=[cut.max((3, 5)).astype(dtype)])
    whole = x.astype(np.float32).max((2, 3), keepdims=True).astype(dtype)
    check_node("GlobalMaxPool", [x], expected=[whole])


@pytest.mark.parametrize("include", [0, 1])
@pytest.mark.parametrize("attrs", GEOMETRY)
@pytest.mark.parametrize("kernel", [[3, 3], [2, 4], [3, 1]])
def test_average_pool_matches_the_reference(attrs, kernel, include):
    if any(p >= k for p, k in zip(attrs.get("pads", [0] * 4), kernel * 2, strict=True)):
        attrs = {k: v for k, v in attrs.items() if k != "pads"}
    attrs = {"kernel_shape": kernel, "count_include_pad": include, **attrs}
    check_node("AveragePool", [draw(2, 3, 9, 11)], attrs, expected="ort", opset=21)


@pytest.mark.parametrize("op", ["AveragePool", "MaxPool", "LpPool"])
@pytest.mark.parametrize("shape", [(2, 3, 9), (2, 2, 4, 5, 6), (0, 2, 4, 4), (2, 0, 4, 4)])
def test_pool_ranks_matches_the_reference(op, shape):
    rank = len(shape) - 2
    attrs = {"kernel_shape": [2] * rank, "strides": [2] * rank}
    if 0 in shape:
        want = np.zeros((*shape[:2], *(s // 2 for s in shape[2:])), np.float32)
        check_node(op, [draw(*shape)], attrs, expected=[want])
    else:
        check_node(op, [draw(*shape)], {**attrs, "pads": [1] * 2 * rank}, expected="ort", opset=21)


@pytest.mark.parametrize("block", [1, 100, 300])
@pytest.mark.parametrize("shape", [(2, 3, 9, 10), (4, 3, 4, 4), (1, 2, 4, 5, 6)])
def test_pool_in_blocks_matches_the_reference(monkeypatch, shape, block):
    monkeypatch.setattr(family, "BLOCK", block)
    rank = len(shape) - 2
    attrs = {"kernel_shape": [3] * rank, "strides": [2] * rank, "pads": [1] * 2 * rank}
    check_node("MaxPool", [draw(*shape)], attrs, expected="ort", opset=21)
    check_node("AveragePool", [draw(*shape)], attrs, expected="ort", opset=21)


@pytest.mark.parametrize("number", range(40))
def test_pool_rows_with_padding_equal_positions(monkeypatch, number):
    """Both ways to take windows along the last axis, one of which takes them one by one."""
    rank = int(rng.integers(1, 4))
    kernel = rng.integers(1, 5, rank).tolist()
    dilations = rng.integers(1, 3, rank).tolist()
    pads = [int(rng.integers(0, k)) for k in kernel * 2]
    attrs = {"kernel_shape": kernel, "dilations": dilations, "pads": pads}
    x = draw(2, 3, *rng.integers(8, 12, rank))
    for op in ("MaxPool", "AveragePool"):
        check_node(op, [x], attrs, expected="ort", opset=21, rtol=1e-4, atol=1e-5)
    x.reshape(-1)[:: int(rng.integers(5, 40))] = rng.choice([np.nan, np.inf, -np.inf])
    for op in ("MaxPool", "AveragePool"):
        (node,) = load_onnx(node_model(op, [x], attrs)).graph.nodes
        with monkeypatch.context() as patch:
            patch.setattr(family, "_rows", lambda *_: None)
            want = evaluate(node, [x])
        check_node(op, [x], attrs, expected=want, rtol=1e-4, atol=1e-5)


def test_pool_of_empty_batch_of_large_images_is_empty():
    x = np.empty((0, 9, 200, 200), np.float32)
    attrs = {"kernel_shape": [3, 3], "strides": [2, 2]}
    check_node("MaxPool", [x], attrs, expected=[np.empty((0, 9, 99, 99), np.float32)])
    check_node("AveragePool", [x], attrs, expected=[np.empty((0, 9, 99, 99), np.float32)])


@pytest.mark.parametrize("p", [1, 2, 3])
@pytest.mark.parametrize("attrs", [g for g in GEOMETRY if "ceil_mode" not in g])
def test_lp_pool_matches_the_reference(attrs, p):
    attrs = {"kernel_shape": [3, 3], "p": p, **attrs}
    check_node("LpPool", [draw(2, 3, 9, 11)], attrs, expected="ort", opset=21, rtol=1e-4)


def test_lp_pool_ceil_matches_the_reference():
    x = draw(1, 1, 4, 4)
    squares = np.pad(x.astype(float) ** 2, ((0, 0), (0, 0), (0, 1), (0, 1)))
    want = np.sqrt(
        [[[[squares[0, 0, i : i + 3, j : j + 3].sum() for j in (0, 2)] for i in (0, 2)]]]
    )
    attrs = {"kernel_shape": [3, 3], "strides": [2, 2], "ceil_mode": 1}
    check_node("LpPool", [x], attrs, expected=[want.astype(np.float32)])


@pytest.mark.parametrize("dtype", NARROW)
def test_average_pool_narrow_matches_the_reference(dtype):
    x = draw(2, 3, 6, 7, dtype=dtype)
    wide = x.astype(float)
    cut = wide[..., :6].reshape(2, 3, 3, 2, 3, 2)
    attrs = {"kernel_shape": [2, 2], "strides": [2, 2]}
    check_node("AveragePool", [x], attrs, expected=[cut.mean((3, 5)).astype(dtype)],
               rtol=1e-2, atol=1e-3)  # fmt: skip
    check_node("LpPool", [x], attrs, expected=[np.sqrt((cut**2).sum((3, 5))).astype(dtype)],
               rtol=1e-2)  # fmt: skip
    check_node("GlobalAveragePool", [x], expected=[wide.mean((2, 3), keepdims=True).astype(dtype)],
               rtol=1e-2, atol=1e-3)  # fmt: skip


@pytest.mark.parametrize("op", ["GlobalAveragePool", "GlobalMaxPool", "GlobalLpPool"])
@pytest.mark.parametrize("shape", [(2, 3, 5), (2, 3, 5, 6), (2, 3, 2, 3, 4), (0, 3, 4, 4)])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_global_pools_match_the_reference(op, shape, dtype):
    x = draw(*shape, dtype=dtype)
    axes = tuple(range(2, x.ndim))
    want = {
        "GlobalAveragePool": lambda: x.mean(axes, keepdims=True),
        "GlobalMaxPool": lambda: x.max(axes, keepdims=True),
        "GlobalLpPool": lambda: np.sqrt((x * x).sum(axes, keepdims=True)),
    }[op]()
    check_node(op, [x], expected=[want], rtol=1e-4)
    if op == "GlobalLpPool":
        cubes = np.cbrt((np.abs(x) ** 3).sum(axes, keepdims=True))
        check_node(op, [x], {"p": 3}, expected=[cubes], rtol=1e-4)


@pytest.mark.parametrize("op", ["GlobalAveragePool", "GlobalMaxPool", "GlobalLpPool"])
@pytest.mark.parametrize("shape", [(2, 3), (2, 3, 0), (2, 3, 4, 0)])
def test_global_pool_of_empty_images_is_refused(op, shape):
    with pytest.raises(ShapeError):
        check_node(op, [draw(*shape)], expected=[])


@pytest.mark.parametrize(
    "shape, attrs",
    [
        ((2, 3), {"kernel_shape": [1]}),
        ((2, 3, 4, 4), {"kernel_shape": [2]}),
        ((2, 3, 4, 4), {"kernel_shape": [2, 0]}),
        ((2, 3, 4, 4), {"kernel_shape": [2, 5]}),
        ((2, 3, 4, 4), {"kernel_shape": [2, 2], "strides": [1]}),
        ((2, 3, 4, 4), {"kernel_shape": [2, 2], "pads": [0, 0]}),
        ((2, 3, 4, 4), {"kernel_shape": [2, 2], "auto_pad": "same"}),
        ((2, 3, 0, 4), {"kernel_shape": [2, 2]}),
    ],
)
@pytest.mark.parametrize("op", ["MaxPool", "AveragePool", "LpPool"])
def test_pool_with_bad_inputs_is_refused(op, shape, attrs):
    with pytest.raises(ShapeError):
        check_node(op, [draw(*shape)], attrs, expected=[])


def test_infer_pool_keeps_known_dims():
    infer = find("MaxPool").infer
    x = TensorType(FLOAT32, ("n", 8, "h", 7))
    attrs = {"kernel_shape": [3, 3], "pads": [1] * 4}
    assert infer([x], attrs, [None]) == (
        TensorType(FLOAT32, ("n", 8, "h", 7)),
        TensorType(INT64, ("n", 8, "h", 7)),
    )
    attrs["strides"] = [2, 2]
    assert infer([x], attrs, [None])[0].shape == ("n", 8, None, 4)
    assert infer([TensorType()], attrs, [None])[0].shape == (None,) * 4
    assert find("GlobalMaxPool").infer([x], {}, [None])[0].shape == ("n", 8, 1, 1)


def test_max_unpool_undoes_max_pool():
    x = draw(2, 3, 6, 8)
    attrs = {"kernel_shape": [2, 2], "strides": [2, 2]}
    y, where = check_node("MaxPool", [x], attrs, expected="ort", opset=21, outputs=2)
    want = np.zeros_like(x)
    want.reshape(-1)[where.reshape(-1)] = y.reshape(-1)
    check_node("MaxUnpool", [y, where], attrs, expected=[want])
    check_node("MaxUnpool", [y, where, np.array(x.shape)], attrs, expected=[want], constants=[2])
    wider = np.zeros((2, 3, 7, 8), np.float32)
    wider[:, :, :6] = want
    check_node("MaxUnpool", [y, where, np.array(wider.shape)], attrs, expected=[wider])


@pytest.mark.parametrize("dtype", NARROW)
def test_max_unpool_narrow_matches_the_reference(dtype):
    x = np.array([[[1, 2]]], dtype)
    want = np.array([[[0, 1, 2, 0]]], dtype)
    attrs = {"kernel_shape": [2], "strides": [2]}
    check_node("MaxUnpool", [x, np.array([[[1, 2]]])], attrs, expected=[want])


@pytest.mark.parametrize(
    "where, shape",
    [
        ([[[0, 4]]], None),
        ([[[-1, 1]]], None),
        ([[[0]]], None),
        ([[[0, 1]]], [1, 1]),
        ([[[0, 1]]], [1, 2, 4]),
        ([[[0, 1]]], [1, 1, -4]),
    ],
)
def test_max_unpool_with_bad_inputs_is_refused(where, shape):
    inputs = [np.ones((1, 1, 2), np.float32), np.array(where)]
    if shape is not None:
        inputs.append(np.array(shape))
    with pytest.raises(ShapeError):
        check_node("MaxUnpool", inputs, {"kernel_shape": [2], "strides": [2]}, expected=[])


@pytest.mark.parametrize("op", ["LpPool", "GlobalLpPool"])
def test_lp_pool_of_negative_power_is_refused(op):
    attrs = {"kernel_shape": [2]} if op == "LpPool" else {}
    with pytest.raises(ShapeError, match="positive"):
        check_node(op, [draw(1, 1, 4)], {"p": 0, **attrs}, expected=[])


def test_pool_window_of_mostly_padding_skips_padding():
    huge = 10**9
    attrs = {"kernel_shape": [huge], "pads": [huge - 1, 0]}
    x = np.array([[[1, 5, 2]]], np.float32)
    check_node("MaxPool", [x], attrs, expected=[np.array([[[1, 5, 5]]], np.float32)])
    check_node("AveragePool", [x], attrs, expected=[np.array([[[1, 3, 8 / 3]]], np.float32)])
    attrs["count_include_pad"] = 1
    want = np.array([[[1, 6, 8]]]) / huge
    check_node("AveragePool", [x], attrs, expected=[want.astype(np.float32)])


def test_pool_with_several_windows_of_many_elements_is_refused():
    attrs = {"kernel_shape": [20_000]}
    with pytest.raises(ShapeError, match="several windows of 20000 elements"):
        check_node("MaxPool", [np.zeros((1, 1, 30_000), np.float32)], attrs, expected=[])


@pytest.mark.parametrize("pads", [[0, 0], [3, 5]])
def test_pool_with_one_window_of_many_elements_matches_the_reference(pads):
    x = draw(1, 2, 100_000)
    attrs = {"kernel_shape": [100_000 + sum(pads)], "pads": pads}
    largest, mean = x.max(-1, keepdims=True), x.mean(-1, keepdims=True, dtype=np.float64)
    check_node("MaxPool", [x], attrs, expected=[largest])
    check_node("AveragePool", [x], attrs, expected=[mean.astype(np.float32)])
