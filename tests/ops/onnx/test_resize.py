"""Resize against onnx.reference, whose arithmetic is float64, and against ONNX Runtime."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import onnxruntime
import pytest

import penstock as ps
from penstock.core.errors import InvalidModel
from penstock.core.types import ShapeError, TensorType, constant_type
from penstock.ops import find
from tests.ops.harness import check_node
from tests.support.onnx_text import model_from_text

rng = np.random.default_rng(3)


def image(*shape: int, dtype: Any = np.float32) -> np.ndarray:
    if np.dtype(dtype).kind in "iu":
        return rng.integers(0, 100, shape).astype(dtype)
    return rng.normal(size=shape).astype(dtype)


def scales(*values: float) -> np.ndarray:
    return np.array(values, np.float32)


def sizes(*values: int) -> np.ndarray:
    return np.array(values, np.int64)


def check(inputs: list[Any], attrs: dict[str, Any], **more: Any) -> None:
    """With shapes known only during the run, and with constant sizes."""
    constants = [i for i, x in enumerate(inputs) if i and x is not None and x.size]
    more.setdefault("atol", 1e-5)
    (y,) = check_node("Resize", inputs, attrs, **more)
    more["expected"] = [y]
    check_node("Resize", inputs, attrs, constants=constants, **more)


COORDINATES = ["half_pixel", "half_pixel_symmetric", "align_corners", "asymmetric"]
TARGETS = [(5, 7), (10, 14), (15, 21), (3, 3), (9, 20), (5, 13), (1, 1), (20, 4)]


@pytest.mark.parametrize("coordinates", [*COORDINATES, "pytorch_half_pixel"])
@pytest.mark.parametrize("rounding", ["round_prefer_floor", "round_prefer_ceil", "floor", "ceil"])
@pytest.mark.parametrize("target", TARGETS)
def test_resize_nearest_matches_the_reference(
    coordinates: str, rounding: str, target: tuple[int, int]
) -> None:
    attrs = {"coordinate_transformation_mode": coordinates, "nearest_mode": rounding}
    check([image(2, 3, 5, 7), None, None, sizes(2, 3, *target)], attrs)


@pytest.mark.parametrize("mode", ["linear", "cubic"])
@pytest.mark.parametrize("coordinates", COORDINATES)
@pytest.mark.parametrize("outside", [0, 1])
@pytest.mark.parametrize("target", TARGETS)
def test_resize_by_interpolation_matches_the_reference(
    mode: str, coordinates: str, outside: int, target: tuple[int, int]
) -> None:
    attrs = {
        "mode": mode,
        "coordinate_transformation_mode": coordinates,
        "exclude_outside": outside,
        "cubic_coeff_a": -0.5,
    }
    check([image(2, 3, 5, 7), None, None, sizes(2, 3, *target)], attrs)


@pytest.mark.parametrize("mode", ["linear", "cubic"])
@pytest.mark.parametrize("outside", [0, 1])
@pytest.mark.parametrize("target", TARGETS)
def test_resize_with_antialias_matches_the_reference(
    mode: str, outside: int, target: tuple[int, int]
) -> None:
    attrs = {"mode": mode, "antialias": 1, "exclude_outside": outside}
    check([image(2, 3, 5, 7), None, None, sizes(2, 3, *target)], attrs)


@pytest.mark.parametrize("mode", ["nearest", "linear", "cubic"])
@pytest.mark.parametrize("coordinates", [*COORDINATES, "pytorch_half_pixel"])
@pytest.mark.parametrize("factors", [(2, 2), (0.6, 0.6), (1, 3), (3, 1), (0.5, 2.5), (1, 1)])
def test_resize_by_scales_matches_the_reference(
    mode: str, coordinates: str, factors: tuple[float, float]
) -> None:
    attrs = {"mode": mode, "coordinate_transformation_mode": coordinates}
    check([image(2, 3, 5, 7), None, scales(1, 1, *factors)], attrs)


@pytest.mark.parametrize("mode", ["nearest", "linear", "cubic"])
@pytest.mark.parametrize(
    "coordinates", ["half_pixel", "align_corners", "asymmetric", "pytorch_half_pixel"]
)
@pytest.mark.parametrize("target", TARGETS)
def test_resize_equals_onnx_runtime(mode: str, coordinates: str, target: tuple[int, int]) -> None:
    attrs = {
        "mode": mode,
        "coordinate_transformation_mode": coordinates,
        "nearest_mode": "floor" if coordinates == "asymmetric" else "round_prefer_floor",
    }
    inputs = [image(2, 3, 5, 7), None, None, sizes(2, 3, *target)]
    check(inputs, attrs, expected="ort", opset=19, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("producer", ["pytorch", "onnx.quantize"])
@pytest.mark.parametrize("mode", ["linear", "cubic"])
def test_resize_of_torch_aligns_corners_of_whole_pixels_as_onnx_runtime(
    mode: str, producer: str
) -> None:
    """As torch does; ONNX's reference aligns those of 13.5 pixels, and so do models of others."""
    text = f"""g (float[1, 2, h, w] x) => (float[1, 2, a, b] y) <float[4] s = {{1, 1, 1.5, 1.5}}>
        {{ y = Resize <mode = "{mode}", coordinate_transformation_mode = "align_corners"> (x, , s) }}"""
    model = model_from_text(text)
    model.producer_name = producer
    x = image(1, 2, 7, 9)
    want = onnxruntime.InferenceSession(model.SerializeToString()).run(None, {"x": x})[0]
    np.testing.assert_allclose(ps.compile(model)(x), want, rtol=1e-4, atol=1e-4)


def test_resize_half_pixel_for_nearest_equals_onnx_runtime() -> None:
    """A mode that versions 11 to 12 had."""
    attrs = {"coordinate_transformation_mode": "tf_half_pixel_for_nn", "nearest_mode": "floor"}
    inputs = [image(2, 3, 5, 7), np.zeros(0, np.float32), scales(1, 1, 2, 0.6)]
    check(inputs, attrs, expected="ort", opset=12)
    inputs[2:] = [np.zeros(0, np.float32), sizes(2, 3, 11, 3)]
    check(inputs, attrs, expected="ort", opset=12)


def test_resize_by_rounded_quotient_scale() -> None:
    """0.7 as float32 is less than 0.7; ten pixels are still seven, and at every position."""
    x = np.arange(10, dtype=np.float32)
    attrs = {"coordinate_transformation_mode": "asymmetric", "nearest_mode": "floor"}
    want = x[[0, 1, 2, 4, 5, 7, 8]]
    check_node("Resize", [x, None, scales(0.7)], attrs, expected=[want])
    x = np.arange(5, dtype=np.float32)
    want = x[[0, 1, 3]]
    check_node("Resize", [x, None, scales(0.6)], attrs, expected=[want])


@pytest.mark.parametrize("size", [9, 23])
@pytest.mark.parametrize("scale", [0.6, 0.3, 1.7, 2.3])
@pytest.mark.parametrize("coordinates", ["asymmetric", "half_pixel"])
def test_resize_to_nearest_rounds_positions_of_scales_as_onnx_runtime(
    size: int, scale: float, coordinates: str
) -> None:
    """In float32, 3 / 0.6 is 5; by the next larger number than 0.6, it is less in float64."""
    attrs = {"coordinate_transformation_mode": coordinates, "nearest_mode": "floor"}
    check([image(1, 2, size), None, scales(1, 1, scale)], attrs, expected="ort", opset=19)


@pytest.mark.parametrize("mode", ["nearest", "linear", "cubic"])
@pytest.mark.parametrize(
    "roi", [(0, 0.5, 0.75, 1), (0.25, 0.25, 0.75, 0.75), (-0.25, 0.5, 1.5, 1), (1, 0, 0.25, 1)]
)
@pytest.mark.parametrize("target", [(5, 7), (10, 3), (1, 1)])
@pytest.mark.parametrize("kind", [np.float32, np.float16])
def test_resize_of_a_crop_matches_the_reference(
    mode: str, roi: tuple[float, ...], target: tuple[int, int], kind: Any
) -> None:
    attrs = {
        "mode": mode,
        "coordinate_transformation_mode": "tf_crop_and_resize",
        "extrapolation_value": 7.5,
    }
    a, b, c, d = roi
    full = np.array([0, 0, a, b, 1, 1, c, d], kind)
    check([image(2, 3, 5, 7), full, None, sizes(2, 3, *target)], attrs)


@pytest.mark.parametrize("mode", ["nearest", "linear", "cubic"])
@pytest.mark.parametrize("axes", [[2, 3], [3, 2], [3], [1], [0, 2]])
@pytest.mark.parametrize("by", ["scales", "sizes"])
def test_resize_of_some_axes_matches_the_reference(mode: str, axes: list[int], by: str) -> None:
    x = image(2, 3, 5, 7)
    attrs = {"mode": mode, "axes": axes}
    if by == "scales":
        check([x, None, scales(*[1.6, 0.8][: len(axes)])], attrs)
    else:
        check([x, None, None, sizes(*[4, 9][: len(axes)])], attrs)


def test_resize_axes_of_roi() -> None:
    attrs = {"mode": "linear", "axes": [3, 2]}
    attrs["coordinate_transformation_mode"] = "tf_crop_and_resize"
    roi = np.array([0.1, 0.4, 0.9, 0.6], np.float32)
    check([image(2, 3, 5, 7), roi, None, sizes(4, 6)], attrs)


@pytest.mark.parametrize("policy", ["stretch", "not_larger", "not_smaller"])
@pytest.mark.parametrize("target", [(10, 10), (3, 20), (4, 6)])
@pytest.mark.parametrize("mode", ["nearest", "linear"])
def test_resize_that_keeps_the_aspect_ratio_matches_the_reference(
    policy: str, target: tuple[int, int], mode: str
) -> None:
    attrs = {"mode": mode, "keep_aspect_ratio_policy": policy, "axes": [2, 3]}
    check([image(2, 3, 5, 7), None, None, sizes(*target)], attrs)


@pytest.mark.parametrize("rank", [1, 2, 3, 5])
@pytest.mark.parametrize("mode", ["nearest", "linear", "cubic"])
def test_resize_of_any_rank_matches_the_reference(rank: int, mode: str) -> None:
    shape = (4, 3, 5, 4, 3)[-rank:]
    check([image(*shape), None, scales(*[2.0] * rank)], {"mode": mode})
    check([image(*shape), None, None, sizes(*[6] * rank)], {"mode": mode})


DTYPES = [np.float64, np.float16, ml_dtypes.bfloat16, np.uint8, np.int8, np.int32, np.int64]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("mode", ["nearest", "linear", "cubic"])
def test_resize_of_every_dtype_matches_the_definition(dtype: Any, mode: str) -> None:
    x = image(1, 2, 5, 7, dtype=dtype)
    wide = x.astype(np.float64)
    inputs = [wide, None, None, sizes(1, 2, 8, 4)]
    (want,) = check_node("Resize", inputs, {"mode": mode})
    if np.dtype(dtype).kind in "iu":
        want = np.rint(want).clip(np.iinfo(dtype).min, np.iinfo(dtype).max)
    inputs[0] = x
    tolerance = 1e-2 if np.dtype(dtype).itemsize == 2 else 1e-6
    check(inputs, {"mode": mode}, expected=[want.astype(dtype)], rtol=tolerance, atol=tolerance)


def test_resize_other_of_every_dtype_matches_the_definition() -> None:
    inputs = [np.array([["a", "b"]], object), None, scales(2, 2)]
    want = inputs[0].repeat(2, 0).repeat(2, 1)
    check_node("Resize", inputs, expected=[want])
    with pytest.raises(ShapeError, match="strings"):
        check_node("Resize", inputs, {"mode": "linear"}, expected=[want])
    flags = np.array([True, False, True])
    check_node("Resize", [flags, None, scales(2)], expected=[flags.repeat(2)])
    x = image(4) + 1j * image(4)
    (real,) = check_node("Resize", [x.real.copy(), None, scales(2)], {"mode": "linear"})
    (imag,) = check_node("Resize", [x.imag.copy(), None, scales(2)], {"mode": "linear"})
    check_node("Resize", [x, None, scales(2)], {"mode": "linear"}, expected=[real + 1j * imag])


def test_resize_of_a_strided_input_matches_that_of_a_copy() -> None:
    for mode in ("nearest", "linear"):
        x = image(3, 2, 7, 10).transpose(1, 0, 3, 2)[..., ::2]
        check([x, None, scales(1, 1, 2, 2)], {"mode": mode})
        check([x, None, scales(1, 1, 1.5, 0.5)], {"mode": mode})


@pytest.mark.parametrize("mode", ["nearest", "linear"])
@pytest.mark.parametrize("factors", [(2, 2), (1.5, 1.7), (0.5, 3)])
def test_resize_blocks_matches_the_reference(mode: str, factors: tuple[float, float]) -> None:
    """Large enough to be resized block by block, the last one smaller."""
    x = image(2, 13, 60, 64)
    (y,) = check_node("Resize", [x[:1, :1], None, scales(1, 1, *factors)], {"mode": mode})
    want = np.empty((2, 13, *y.shape[2:]), np.float32)
    for n in range(2):
        for c in range(13):
            part = [x[n : n + 1, c : c + 1], None, scales(1, 1, *factors)]
            (want[n : n + 1, c : c + 1],) = check_node("Resize", part, {"mode": mode})
    check([x, None, scales(1, 1, *factors)], {"mode": mode}, expected=[want])


def test_resize_to_the_same_size_copies() -> None:
    x = image(2, 3, 4)
    check([x, None, scales(1, 1, 1)], {"mode": "cubic"}, expected=[x])
    check([x, None, None, sizes(2, 3, 4)], {}, expected=[x])
    check([x, None, None, sizes(2, 0, 4)], {}, expected=[x[:, :0]])
    check([x[:, :0], None, None, sizes(2, 0, 8)], {}, expected=[np.zeros((2, 0, 8), np.float32)])
    check([x[:, :, :1], None, None, sizes(2, 3, 5)], {"mode": "linear"})


def test_resize_keeps_infinities_in_place() -> None:
    x = np.ones((1, 1, 6, 6), np.float32)
    x[0, 0, 2, 2], x[0, 0, 4, 4] = np.inf, np.nan
    # Each pixel is half of what its two neighbours to either side become.
    want = np.ones((1, 1, 12, 12), np.float32)
    want[0, 0, 3:7, 3:7], want[0, 0, 7:11, 7:11] = np.inf, np.nan
    check([x, None, scales(1, 1, 2, 2)], {"mode": "linear"}, expected=[want])


def test_resize_roi_ending_at_the_border_is_not_extrapolated() -> None:
    """In float32, 0.4 + (1 - 0.4) may come out above 1, and is not outside all the same."""
    x = np.arange(7, dtype=np.float32)
    attrs = {"mode": "linear", "coordinate_transformation_mode": "tf_crop_and_resize"}
    roi = np.array([0.4, 1], np.float32)
    want = np.linspace(2.4, 6, 7).astype(np.float32)
    check([x, roi, None, sizes(7)], {**attrs, "extrapolation_value": 99.0}, expected=[want])


@pytest.mark.parametrize(
    ("inputs", "attrs"),
    [
        ([None, None, None], {}),
        ([None, scales(1, 1), sizes(4, 5)], {}),
        ([None, scales(1), None], {}),
        ([None, scales(1, 0), None], {}),
        ([None, scales(1, -2), None], {}),
        ([None, scales(1, np.nan), None], {}),
        ([None, None, sizes(1)], {}),
        ([None, None, sizes(1, -1)], {}),
        ([None, scales(1, 2), None], {"mode": "quintic"}),
        ([None, scales(1, 2), None], {"nearest_mode": "up"}),
        ([None, scales(1, 2), None], {"coordinate_transformation_mode": "polar"}),
        ([None, scales(1, 2), None], {"coordinate_transformation_mode": "tf_crop_and_resize"}),
        (
            [np.ones(3, np.float32), None, sizes(0, 0)],
            {"coordinate_transformation_mode": "tf_crop_and_resize"},
        ),
        ([None, None, sizes(1, 2)], {"keep_aspect_ratio_policy": "loosely"}),
        ([None, scales(1, 2), None], {"axes": [0, 2]}),
        ([None, scales(1, 2), None], {"axes": [0, 0]}),
        ([None, scales(1, 2), None], {"axes": [1]}),
    ],
)
def test_resize_of_wrong_arguments_is_refused(inputs: list[Any], attrs: dict[str, Any]) -> None:
    while inputs and inputs[-1] is None:
        inputs.pop()
    with pytest.raises((InvalidModel, ShapeError)):
        check_node("Resize", [image(3, 4), *inputs], attrs, expected=[None])


def test_resize_of_empty_axis_is_refused() -> None:
    with pytest.raises(ShapeError, match="and cannot be resized to"):
        check_node("Resize", [image(3, 0), None, None, sizes(3, 2)], expected=[None])


def test_resize_infers_its_types() -> None:
    op = find("Resize")
    assert op is not None
    f = np.dtype(np.float32)
    x = TensorType(f, ("n", 3, "h", 10))
    s = scales(1, 1, 2, 0.5)
    (kind,) = op.infer([x, None, constant_type(s)], {}, [None, None, s])
    assert kind == TensorType(f, ("n", 3, None, 5))
    target = TensorType(np.dtype(np.int64), (4,), ("n", 3, "H", 20))
    (kind,) = op.infer([x, None, None, target], {}, [None] * 4)
    assert kind == TensorType(f, ("n", 3, "H", 20))
    target = TensorType(np.dtype(np.int64), (1,), (20,))
    (kind,) = op.infer([x, None, None, target], {"axes": [2]}, [None] * 4)
    assert kind == TensorType(f, ("n", 3, 20, 10))
    attrs = {"axes": [2, 3], "keep_aspect_ratio_policy": "not_larger"}
    target = TensorType(np.dtype(np.int64), (2,), (20, 30))
    (kind,) = op.infer([x, None, None, target], attrs, [None] * 4)
    assert kind == TensorType(f, ("n", 3, None, None))
