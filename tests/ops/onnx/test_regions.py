"""RoiAlign, MaxRoiPool and DeformConv."""

from functools import partial

import ml_dtypes
import numpy as np
import pytest

from penstock.core.types import FLOAT32, INT64, ShapeError, TensorType
from penstock.ops import find
from penstock.ops.onnx import regions
from tests.ops.harness import check_node, convolve
from tests.support.random_arrays import normal

rng = np.random.default_rng(0)
draw = partial(normal, rng)


def boxes(count, extent=20.0):
    corners = rng.uniform(-3, extent, (count, 4)).astype(np.float32)
    return np.concatenate([np.minimum(corners[:, :2], corners[:, 2:]),
                           np.maximum(corners[:, :2], corners[:, 2:])], axis=1)  # fmt: skip


@pytest.mark.parametrize("mode", ["half_pixel", "output_half_pixel"])
@pytest.mark.parametrize("ratio", [0, 1, 3])
@pytest.mark.parametrize("scale", [1.0, 0.5])
@pytest.mark.parametrize("size", [(1, 1), (3, 2)])
def test_roi_align_matches_the_reference(mode, ratio, scale, size):
    inputs = [draw(2, 3, 9, 12), boxes(7), np.array([0, 1, 1, 0, 0, 1, 0])]
    attrs = {
        "coordinate_transformation_mode": mode,
        "sampling_ratio": ratio,
        "spatial_scale": scale,
        "output_height": size[0],
        "output_width": size[1],
    }
    check_node("RoiAlign", inputs, attrs, expected="ort", opset=21, rtol=1e-4, atol=1e-5)
    check_node("RoiAlign", inputs, {**attrs, "mode": "max"}, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", [np.float64, np.float16, ml_dtypes.bfloat16])
@pytest.mark.parametrize("mode", ["avg", "max"])
def test_roi_align_of_every_dtype_matches_the_definition(dtype, mode):
    x, rois = draw(1, 2, 5, 5, dtype=dtype), np.array([[0, 0, 4, 4], [1, 2, 3, 3]], dtype)
    wide = [x.astype(np.float32), rois.astype(np.float32), np.array([0, 0])]
    attrs = {"mode": mode, "output_height": 2, "output_width": 2, "sampling_ratio": 2}
    (want,) = check_node("RoiAlign", wide, attrs, rtol=1e-4, atol=1e-5)
    check_node("RoiAlign", [x, rois, np.array([0, 0])], attrs, expected=[want.astype(dtype)],
               rtol=1e-2, atol=1e-2)  # fmt: skip


@pytest.mark.parametrize("mode", ["avg", "max"])
def test_roi_align_of_a_region_turned_over_is_zero(mode):
    inputs = [draw(1, 2, 5, 5), np.array([[4, 4, 1, 1]], np.float32), np.array([0])]
    want = np.zeros((1, 2, 2, 2), np.float32)
    check_node("RoiAlign", inputs, {"mode": mode, "output_height": 2, "output_width": 2},
               expected=[want])  # fmt: skip


@pytest.mark.parametrize(
    "x, rois, batch, attrs",
    [
        ((1, 2, 5), [[0, 0, 4, 4]], [0], {}),
        ((1, 2, 5, 5), [0, 0, 4, 4], [0], {}),
        ((1, 2, 5, 5), [[0, 0, 4]], [0], {}),
        ((1, 2, 5, 5), [[0, 0, 4, 4]], [0, 0], {}),
        ((1, 2, 5, 5), [[0, 0, 4, 4]], [[0]], {}),
        ((1, 2, 5, 5), [[0, 0, 4, 4]], [1], {}),
        ((1, 2, 5, 5), [[0, 0, 4, 4]], [-1], {}),
        ((1, 2, 5, 5), [[0, 0, 4, np.nan]], [0], {}),
        ((1, 2, 5, 5), [[0, 0, 4, 1e30]], [0], {}),
        ((1, 2, 0, 5), [[0, 0, 4, 4]], [0], {}),
        ((1, 2, 5, 5), [[0, 0, 4, 4]], [0], {"mode": "sum"}),
        ((1, 2, 5, 5), [[0, 0, 4, 4]], [0], {"output_width": 0}),
    ],
)
def test_roi_align_with_bad_inputs_is_refused(x, rois, batch, attrs):
    with pytest.raises(ShapeError):
        check_node("RoiAlign", [draw(*x), np.array(rois, np.float32), np.array(batch)], attrs,
                   expected=[])  # fmt: skip


def test_infer_regions_keeps_names():
    x = TensorType(FLOAT32, ("n", 8, None, None))
    rois, batch = TensorType(FLOAT32, (None, 4)), TensorType(INT64, ("rois",))
    attrs = {"output_height": 7, "output_width": 5}
    infer = find("RoiAlign").infer
    assert infer([x, rois, batch], attrs, [None] * 3)[0].shape == ("rois", 8, 7, 5)
    infer = find("MaxRoiPool").infer
    rois = TensorType(FLOAT32, ("rois", 5))
    assert infer([x, rois], {"pooled_shape": [2, 3]}, [None] * 2)[0].shape == ("rois", 8, 2, 3)


@pytest.mark.parametrize("scale", [1.0, 0.5])
@pytest.mark.parametrize("size", [[1, 1], [3, 2], [6, 6]])
@pytest.mark.parametrize("dtype", [np.float32])
def test_max_roi_pool_matches_the_reference(scale, size, dtype):
    rois = np.concatenate([np.array([[0], [1], [1], [0], [0]]), boxes(5)], axis=1)
    attrs = {"pooled_shape": size, "spatial_scale": scale}
    check_node("MaxRoiPool", [draw(2, 3, 9, 12), rois.astype(dtype)], attrs, expected="ort",
               opset=21)  # fmt: skip


@pytest.mark.parametrize("dtype", [np.float64, np.float16, ml_dtypes.bfloat16])
def test_max_roi_pool_of_every_dtype_matches_the_definition(dtype):
    x = draw(1, 2, 4, 4, dtype=dtype)
    want = x.astype(np.float32).reshape(1, 2, 2, 2, 2, 2).max((3, 5)).astype(dtype)
    rois = np.array([[0, 0, 0, 3, 3]], dtype)
    check_node("MaxRoiPool", [x, rois], {"pooled_shape": [2, 2]}, expected=[want])


@pytest.mark.parametrize(
    "rois, size",
    [
        ([[0, 0, 0, 3]], [1, 1]),
        ([[1, 0, 0, 3, 3]], [1, 1]),
        ([[0, 0, 0, np.inf, 3]], [1, 1]),
        ([[0, 0, 0, 3, 3]], [1]),
        ([[0, 0, 0, 3, 3]], [0, 1]),
    ],
)
def test_max_roi_pool_with_bad_inputs_is_refused(rois, size):
    with pytest.raises(ShapeError):
        check_node("MaxRoiPool", [draw(1, 2, 4, 4), np.array(rois, np.float32)],
                   {"pooled_shape": size}, expected=[])  # fmt: skip


DEFORM = [
    ({}, (1, 4, 6, 7), (6, 4, 3, 2), 1),
    ({"strides": [2, 1], "pads": [1, 0, 1, 1]}, (2, 4, 6, 7), (6, 4, 3, 2), 1),
    ({"dilations": [2, 2], "pads": [1, 1, 1, 1]}, (1, 4, 7, 7), (6, 4, 3, 2), 2),
    ({"group": 2}, (1, 4, 6, 7), (6, 2, 3, 2), 4),
]


@pytest.mark.parametrize("attrs, x, w, groups", DEFORM)
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("masked", [True, False])
def test_deform_conv_matches_the_reference(monkeypatch, attrs, x, w, groups, bias, masked):
    attrs = {"offset_group": groups, "kernel_shape": list(w[2:]), **attrs}
    plain = {k: v for k, v in attrs.items() if k != "offset_group"}
    counts = convolve(draw(*x), draw(*w), plain).shape[2:]
    taps = groups * w[2] * w[3]
    inputs = [
        draw(*x),
        draw(*w),
        2 * draw(x[0], 2 * taps, *counts),
        draw(w[0]) if bias else None,
        draw(x[0], taps, *counts) if masked else None,
    ]
    while inputs[-1] is None:
        inputs.pop()
    expected = check_node("DeformConv", inputs, attrs, rtol=1e-3, atol=1e-3)
    monkeypatch.setattr(regions, "BLOCK_BYTES", 1)
    monkeypatch.setattr(regions, "MIN_BLOCK", 7)
    check_node("DeformConv", inputs, attrs, expected=expected)


@pytest.mark.parametrize("rank", [1, 3])
@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_deform_conv_without_offsets_is_conv(rank, dtype):
    x, w = draw(2, 4, *(5, 6, 4)[:rank], dtype=dtype), draw(3, 4, *(2, 3, 2)[:rank], dtype=dtype)
    attrs = {"pads": [1] * 2 * rank, "strides": [2] * rank}
    want = convolve(x.astype(np.float64), w.astype(np.float64), attrs)
    taps = int(np.prod(w.shape[2:]))
    offset = np.zeros((2, taps * rank, *want.shape[2:]), dtype)
    check_node("DeformConv", [x, w, offset], attrs, expected=[want.astype(dtype)],
               rtol=1e-2, atol=1e-2)  # fmt: skip


def test_deform_conv_reads_nothing_outside():
    x, w = draw(1, 2, 4, 4), draw(3, 2, 2, 2)
    offset = np.full((1, 8, 3, 3), 1e30, np.float32)
    offset[:, ::3] = -1e30
    want = np.zeros((1, 3, 3, 3), np.float32)
    check_node("DeformConv", [x, w, offset], {}, expected=[want])


@pytest.mark.parametrize(
    "shapes, attrs",
    [
        (((1, 4, 5, 5), (3, 4, 2, 2), (1, 8, 4, 5)), {}),
        (((1, 4, 5, 5), (3, 4, 2, 2), (1, 7, 4, 4)), {}),
        (((1, 4, 5, 5), (3, 4, 2, 2), (1, 24, 4, 4)), {"offset_group": 3}),
        (((1, 4, 5, 5), (3, 4, 2, 2), (1, 8, 4, 4)), {"offset_group": 0}),
        (((1, 4, 5, 5), (3, 3, 2, 2), (1, 8, 4, 4)), {}),
        (((1, 4, 5, 5), (3, 4, 2, 2), (1, 8, 4, 4), (4,)), {}),
        (((1, 4, 5, 5), (3, 4, 2, 2), (1, 8, 4, 4), (3,), (1, 8, 4, 4)), {}),
    ],
)
def test_deform_conv_with_bad_inputs_is_refused(shapes, attrs):
    with pytest.raises(ShapeError):
        check_node("DeformConv", [draw(*s) for s in shapes], attrs, expected=[])


def test_infer_deform_conv_from_offsets_alone():
    offset = TensorType(FLOAT32, ("n", 18, "h", "w"))
    types = [TensorType(), TensorType(FLOAT32), offset]
    assert find("DeformConv").infer(types, {}, [None] * 3)[0].shape == ("n", None, "h", "w")
