"""Compiled RoiAlign, CropAndResize and NonMaxSuppression against NumPy's."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest

from penstock.core.types import ShapeError, TensorType
from penstock.ir.graph import Node, Value
from penstock.ops.registry import find
from tests.support.native_kernels import LIBRARIES, check, kernel_of, node_of, pytestmark  # noqa: F401
from tests.support.sweeps import sweep


def regions(count):
    rng = np.random.default_rng(6)
    corners = rng.uniform(-3, 12, (count, 2))
    return np.concatenate([corners, corners + rng.uniform(-1, 9, (count, 2))], 1, dtype=np.float32)


@pytest.mark.parametrize("coordinates", ["half_pixel", "output_half_pixel"])
@pytest.mark.parametrize("ratio", [0, 2, 50])
@pytest.mark.parametrize("mode", ["avg", "max"])
@pytest.mark.parametrize(("dtype", "tolerance"), [(np.float32, 1e-5), (np.float64, 1e-12)])
def test_roi_align_is_close_to_numpy(dtype, tolerance, mode, ratio, coordinates):
    x = np.random.default_rng(7).normal(size=(2, 3, 9, 12)).astype(dtype)
    inputs = [x, regions(11).astype(dtype), np.arange(11) % 2]
    attrs = {
        "mode": mode,
        "sampling_ratio": ratio,
        "coordinate_transformation_mode": coordinates,
        "output_height": 3,
        "output_width": 5,
        "spatial_scale": 0.9,
    }
    check(node_of("RoiAlign", inputs, **attrs), inputs, {"rtol": tolerance, "atol": tolerance})


@pytest.mark.parametrize("mode", ["avg", "max"])
@pytest.mark.parametrize("columns", [1, 3, 150])
def test_roi_align_of_samples_far_apart_is_close_to_numpy(columns, mode):
    x = np.random.default_rng(7).normal(size=(1, 2, 60, 2500)).astype(np.float32)
    rois = np.array([[1, 2, 2400, 50], [2400, 50, 1, 2]], np.float32)
    attrs = {"sampling_ratio": 2, "output_height": 1, "output_width": columns, "mode": mode}
    inputs = [x, rois, np.zeros(2, np.int64)]
    check(node_of("RoiAlign", inputs, **attrs), inputs, {"rtol": 1e-4, "atol": 1e-4})


@pytest.mark.parametrize("shape", [[3, 5], [1, 1], [14, 20]])
def test_max_roi_pool_equals_numpy(shape):
    x = np.random.default_rng(7).normal(size=(2, 3, 9, 12)).astype(np.float32)
    x[1, 2, 3, 4], x[0, 0, 0, 0], x[0, 1, 5, 5] = np.nan, np.inf, -np.inf
    corners = np.concatenate([regions(40), [[-1e9, -5, 1e9, 3], [5, 5, 5, 5], [9, 9, 2, 1]]])
    rois = np.concatenate([np.arange(len(corners))[:, None] % 2, corners], 1, dtype=np.float32)
    attrs = {"pooled_shape": shape, "spatial_scale": 0.9}
    check(node_of("MaxRoiPool", [x, rois], **attrs), [x, rois])


@pytest.mark.parametrize(
    "region", [[2, 0, 0, 1, 1], [-1, 0, 0, 1, 1], [np.nan, 0, 0, 1, 1], [0, 0, np.inf, 1, 1]]
)
def test_max_roi_pool_refuses_regions_that_numpy_refuses(region):
    inputs = [np.ones((2, 1, 4, 4), np.float32), np.array([region], np.float32)]
    node = node_of("MaxRoiPool", inputs, pooled_shape=[2, 2])
    for library in LIBRARIES:
        with pytest.raises(ShapeError):
            kernel_of(node, library).function(*inputs)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_roi_align_of_numbers_that_are_not_finite_equals_numpy(value):
    x = np.ones((1, 2, 9, 12), np.float32)
    x[0, 1, 4, 4] = value
    inputs = [x, np.array([[0, 0, 9, 9]], np.float32), np.array([0])]
    attrs = {"output_height": 3, "output_width": 3, "sampling_ratio": 2, "mode": "max"}
    check(node_of("RoiAlign", inputs, **attrs), inputs, {"rtol": 1e-6})


@pytest.mark.costly
@pytest.mark.parametrize("case", sweep(product(["avg", "max"], [0, 3]), 1))
def test_roi_align_of_regions_far_beyond_the_image_is_close_to_numpy(case):
    mode, ratio = case
    x = np.random.default_rng(7).normal(size=(1, 3, 9, 12)).astype(np.float32)
    ends = [(-500, 3, 700, 4), (2, -9e4, 5, 9e4), (30, 0, 99, 9), (-40, -40, -3, 7), (9, 8, 1, 2)]
    inputs = [x, np.array(ends, np.float32), np.zeros(len(ends), np.int64)]
    attrs = {"mode": mode, "sampling_ratio": ratio, "output_height": 2, "output_width": 3}
    check(node_of("RoiAlign", inputs, **attrs), inputs, {"rtol": 1e-4, "atol": 1e-4})


@pytest.mark.parametrize("mode", ["avg", "max"])
@pytest.mark.parametrize("end", [12.4, 19.9, 60.0])
def test_roi_align_reads_the_last_sample_of_bins_that_are_many_pixels_long(end, mode):
    """Of one sample for a bin, the distance to the next is that of the bins."""
    x = np.random.default_rng(7).normal(size=(1, 2, 13, 14)).astype(np.float32)
    inputs = [x, np.array([[1, 5, 13, end], [3, 2, end, 12]], np.float32), np.array([0, 0])]
    for bins in (1, 3):
        attrs = {"sampling_ratio": 1, "output_height": bins, "output_width": bins, "mode": mode}
        check(node_of("RoiAlign", inputs, **attrs), inputs, {"rtol": 1e-4, "atol": 1e-5})


@pytest.mark.parametrize(("domain", "mode"), [("com.microsoft", "mode"), ("tensorflow", "method")])
@pytest.mark.parametrize("way", ["bilinear", "nearest"])
@pytest.mark.parametrize("size", [[1, 1], [3, 5], [1, 4]])
def test_crop_and_resize_equals_numpy(size, way, domain, mode):
    """Also of boxes that are flipped, empty, partly or wholly outside, and not a number."""
    x = np.random.default_rng(7).normal(size=(2, 5, 9, 12)).astype(np.float32)
    x[0, 0, 3, 4], x[1, 4, 8, 11] = np.nan, np.inf
    ends = [(0, 0, 1, 1), (1, 1, 0, 0), (0.5, 0.5, 0.5, 0.5), (-0.2, 0.3, 1.2, 0.6), (2, 2, 3, 3)]
    boxes = np.array([*ends, (np.nan, 0, 1, 1), (0, 0, np.inf, 1)], np.float32)
    inputs = [x, boxes, np.arange(len(boxes), dtype=np.int32) % 2, np.array(size, np.int32)]
    attrs = {mode: way, "extrapolation_value": -2.5}
    check(node_of("CropAndResize", inputs, [3], domain=domain, version=1, **attrs), inputs)


@pytest.mark.parametrize("image", [-1, 2])
def test_crop_and_resize_refuses_images_that_numpy_refuses(image):
    inputs = [np.ones((2, 1, 4, 4), np.float32), np.zeros((1, 4), np.float32)]
    inputs += [np.array([image], np.int32), np.array([2, 2], np.int32)]
    node = node_of("CropAndResize", inputs, [3], domain="com.microsoft", version=1)
    for library in LIBRARIES:
        with pytest.raises(ShapeError):
            kernel_of(node, library).function(*inputs)


def test_items_that_would_take_seconds_are_left_to_numpy():
    image, boxes = np.zeros((1, 256, 64, 64), np.float32), np.zeros((1, 100_000, 4), np.float32)
    inputs = [image, np.zeros((1, 4), np.float32), np.zeros(1, np.int64)]
    for ratio, is_native in ((4, True), (1024, False)):
        node = node_of("RoiAlign", inputs, sampling_ratio=ratio)
        assert (kernel_of(node, LIBRARIES[0]) is not None) is is_native
    for most, is_native in ((100, True), (100_000, False)):
        scores = np.zeros((1, 1, 100_000), np.float32)
        node = node_of("NonMaxSuppression", [boxes, scores, np.array([most])], [2])
        assert (kernel_of(node, LIBRARIES[0]) is not None) is is_native


@pytest.mark.parametrize(("region", "image"), [((0, 0, 1, 1), 2), ((0, 0, np.nan, 1), 0)])
def test_roi_align_refuses_regions_that_numpy_refuses(region, image):
    x = np.zeros((2, 1, 4, 4), np.float32)
    inputs = [x, np.array([region], np.float32), np.array([image])]
    node = node_of("RoiAlign", inputs)
    for library in LIBRARIES:
        kernel = kernel_of(node, library)
        assert kernel is not None
        with pytest.raises(ShapeError):
            kernel(*inputs)


@pytest.mark.parametrize("centred", [0, 1])
@pytest.mark.parametrize("threshold", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("least", [None, 0.2])
@pytest.mark.parametrize("most", [0, 3, 1000])
@pytest.mark.parametrize("count", [1, 300])
def test_suppression_equals_numpy(count, most, least, threshold, centred):
    rng = np.random.default_rng(9)
    boxes = rng.uniform(0, 3, (2, count, 4)).astype(np.float32)
    scores = np.round(rng.normal(size=(2, 3, count)), 1).astype(np.float32)
    scores.flat[0] = np.nan
    limit = None if least is None else np.array([least], np.float32)
    inputs = [boxes, scores, np.array([most]), np.array([threshold], np.float32), limit]
    node = node_of("NonMaxSuppression", inputs, center_point_box=centred)
    check(node, inputs)


def tensorflow_node(inputs, outputs, **attrs):
    op = find("NonMaxSuppression", "tensorflow", 1)
    attrs = {"outputs": outputs, **attrs}
    values = [
        Value(f"x{i}", TensorType(x.dtype, x.shape), const=x if i == 2 else None)
        for i, x in enumerate(inputs)
    ]
    types, consts = [v.type for v in values], [v.const for v in values]
    results = [Value(f"y{i}", type_) for i, type_ in enumerate(op.infer(types, attrs, consts))]
    return Node(op, values, results, attrs)


@pytest.mark.parametrize("inclusive", [False, True])
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize(("outputs", "sigma"), [(1, []), (2, []), (3, [0.0]), (3, [0.4])])
@pytest.mark.parametrize("threshold", [0.0, 1 / 3, 0.5, 1.0])
@pytest.mark.parametrize("most", [3, 80])
@pytest.mark.parametrize("count", [1, 60])
def test_suppression_of_tensorflow_equals_numpy(
    count, most, threshold, outputs, sigma, padded, inclusive
):
    """Boxes of whole coordinates, so that many share just the threshold, in any order of corners."""
    rng = np.random.default_rng(9)
    boxes = rng.integers(0, 5, (count, 4)).astype(np.float32)
    scores = rng.permutation(count).astype(np.float32) / count - 0.1
    scores[0] = np.nan if count > 1 else 1
    limits = [np.array(x, np.float32) for x in (threshold, 0.05, *sigma)]
    inputs = [boxes, scores, np.array(most, np.int32), *limits]
    attrs = {"pad_to_max_output_size": padded, "inclusive": inclusive}
    check(tensorflow_node(inputs, outputs, **attrs), inputs, {"rtol": 1e-5})


def test_suppression_of_tensorflow_prefers_the_first_of_equal_scores():
    boxes = np.array([[0, 0, 1, 1], [0, 2, 1, 3], [0, 4, 1, 5], [0, 2, 1, 3]], np.float32)
    limits = [np.array(x, np.float32) for x in (0.5, -np.inf)]
    inputs = [boxes, np.array([0, 2, -0.0, 2], np.float32), np.array(4, np.int32), *limits]
    node = tensorflow_node(inputs, 2)
    check(node, inputs)
    for library in LIBRARIES:
        assert kernel_of(node, library).function(*inputs)[0].tolist() == [1, 0, 2]


def test_suppression_refuses_a_threshold_that_numpy_refuses():
    inputs = [np.zeros((2, 4), np.float32), np.zeros(2, np.float32), np.array(1)]
    limits = [np.array(1.5, np.float32), np.array(0, np.float32)]
    one = [*inputs[:2], inputs[2].astype(np.int32), *limits]
    batch = [inputs[0][None], inputs[1][None, None], inputs[2], limits[0]]
    for node, x in ((tensorflow_node(one, 1), one), (node_of("NonMaxSuppression", batch), batch)):
        for library in LIBRARIES:
            with pytest.raises(ShapeError):
                kernel_of(node, library).function(*x)


@pytest.mark.parametrize("shapes", [((2, 4), (5,)), ((5, 3), (5,)), ((5, 4), (1, 5))])
def test_suppression_of_tensorflow_leaves_boxes_that_do_not_fit_to_numpy(shapes):
    boxes, scores = (np.zeros(dims, np.float32) for dims in shapes)
    limits = [np.array(x, np.float32) for x in (0.5, 0)]
    node = tensorflow_node([boxes, scores, np.array(3, np.int32), *limits], 1)
    assert all(kernel_of(node, library) is None for library in LIBRARIES)
