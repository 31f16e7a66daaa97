"""GridSample, AffineGrid, ImageDecoder and NonMaxSuppression."""

from __future__ import annotations

import sys
from io import BytesIO
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from PIL import Image

import penstock as ps
from penstock.core.types import INT64, ShapeError, TensorType, constant_type
from penstock.ops import find
from tests.ops.harness import check_node, node_model

rng = np.random.default_rng(11)
FLOAT = np.dtype(np.float32)


def normal(*shape: int, dtype: Any = np.float32) -> np.ndarray:
    return rng.normal(size=shape).astype(dtype)


def grid(*shape: int, dtype: Any = np.float32) -> np.ndarray:
    """Positions well beyond the borders too."""
    return rng.uniform(-2.5, 2.5, shape).astype(dtype)


PADDINGS = ["zeros", "border", "reflection"]


@pytest.mark.parametrize("mode", ["nearest", "linear", "cubic"])
@pytest.mark.parametrize("padding", PADDINGS)
@pytest.mark.parametrize("corners", [0, 1])
@pytest.mark.parametrize("rank", [1, 2, 3])
def test_grid_sample_matches_the_reference(
    mode: str, padding: str, corners: int, rank: int
) -> None:
    sizes, points = (5, 4, 3)[:rank], (3, 2, 4)[:rank]
    if (mode, padding) == ("cubic", "border"):
        pytest.skip("the reference clamps positions, ONNX Runtime and we what a position reads")
    inputs = [normal(2, 3, *sizes), grid(2, *points, rank)]
    attrs = {"mode": mode, "padding_mode": padding, "align_corners": corners}
    check_node("GridSample", inputs, attrs, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("mode", ["nearest", "linear", "cubic"])
@pytest.mark.parametrize("padding", PADDINGS)
@pytest.mark.parametrize("corners", [0, 1])
def test_grid_sample_matches_onnx_runtime(mode: str, padding: str, corners: int) -> None:
    inputs = [normal(2, 3, 6, 5), grid(2, 4, 7, 2)]
    attrs = {"mode": mode, "padding_mode": padding, "align_corners": corners}
    check_node("GridSample", inputs, attrs, expected="ort", opset=20, atol=2e-5, rtol=1e-4)
    attrs["mode"] = {"linear": "bilinear", "cubic": "bicubic"}.get(mode, mode)
    check_node("GridSample", inputs, attrs, expected="ort", opset=16, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("dtype", [np.float64, np.float16, ml_dtypes.bfloat16])
def test_grid_sample_of_every_dtype_matches_the_definition(dtype: Any) -> None:
    x, where = normal(1, 2, 4, 4, dtype=dtype), grid(1, 3, 3, 2)
    inputs = [x.astype(np.float32), where]
    (want,) = check_node("GridSample", inputs, atol=1e-5)
    tolerance = 1e-5 if dtype == np.float64 else 1e-2
    check_node(
        "GridSample", [x, where], expected=[want.astype(dtype)], rtol=tolerance, atol=tolerance
    )


def test_grid_sample_other_of_every_dtype_matches_the_definition() -> None:
    x, where = rng.integers(0, 90, (1, 1, 4, 4)).astype(np.int32), grid(1, 3, 3, 2)
    (want,) = check_node("GridSample", [x.astype(np.float64), where], atol=1e-5)
    check_node("GridSample", [x, where], expected=[np.trunc(want).astype(np.int32)])
    attrs = {"mode": "nearest"}
    (want,) = check_node("GridSample", [x.astype(np.float32), where], attrs)
    check_node("GridSample", [x, where], attrs, expected=[want.astype(np.int32)])
    words = np.vectorize(lambda n: f"{n}." if n else "")(x).astype(object)
    texts = np.vectorize(lambda n: f"{int(n)}." if n else "")(want).astype(object)
    check_node("GridSample", [words, where], attrs, expected=[texts])


@pytest.mark.parametrize("padding", PADDINGS)
@pytest.mark.parametrize("mode", ["nearest", "linear", "cubic"])
def test_grid_sample_far_out(mode: str, padding: str) -> None:
    """Positions no integer can hold are clipped, never out of bounds."""
    where = np.array([[[[1e30, -1e30], [np.inf, 0], [np.nan, np.nan], [-3e9, 3e9]]]], np.float32)
    attrs = {"mode": mode, "padding_mode": padding}
    model_outputs = [np.zeros((1, 1, 1, 4), np.float32)]
    if padding == "zeros":
        check_node("GridSample", [normal(1, 1, 3, 3), where], attrs, expected=model_outputs)
    else:
        x = np.ones((1, 1, 3, 3), np.float32)
        ones = [np.ones((1, 1, 1, 4), np.float32)]
        check_node("GridSample", [x, where], attrs, expected=ones)


def test_grid_sample_outside_reads_zero_beside_infinity() -> None:
    x = np.full((1, 1, 2, 2), np.inf, np.float32)
    where = np.array([[[[5, 5]]]], np.float32)
    check_node("GridSample", [x, where], expected=[np.zeros((1, 1, 1, 1), np.float32)])


def test_grid_sample_one_pixel_reflected() -> None:
    attrs = {"padding_mode": "reflection", "align_corners": 1}
    x = np.full((1, 1, 1, 1), 3, np.float32)
    check_node(
        "GridSample", [x, grid(1, 2, 2, 2)], attrs, expected=[np.full((1, 1, 2, 2), 3.0, "f")]
    )


def test_grid_sample_empty_matches_the_reference() -> None:
    want = np.zeros((2, 3, 0, 4), np.float32)
    check_node("GridSample", [normal(2, 3, 5, 5), grid(2, 0, 4, 2)], expected=[want])
    with pytest.raises(ShapeError, match="has no elements to sample"):
        check_node("GridSample", [normal(2, 3, 0, 5), grid(2, 1, 4, 2)], expected=[want])


@pytest.mark.parametrize(
    ("x", "where", "attrs"),
    [
        ((1, 1, 3, 3), (1, 2, 2, 3), {}),
        ((1, 1, 3, 3), (2, 2, 2, 2), {}),
        ((1, 1, 3, 3), (1, 2, 2), {}),
        ((1, 1), (1, 2), {}),
        ((1, 1, 3, 3), (1, 2, 2, 2), {"mode": "quartic"}),
        ((1, 1, 3, 3), (1, 2, 2, 2), {"padding_mode": "wrap"}),
    ],
)
def test_grid_sample_with_bad_inputs_is_refused(
    x: tuple[int, ...], where: tuple[int, ...], attrs: dict[str, Any]
) -> None:
    with pytest.raises(ShapeError):
        check_node("GridSample", [normal(*x), grid(*where)], attrs, expected=[None])


def test_grid_sample_infers_its_types() -> None:
    op = find("GridSample")
    assert op is not None
    types = [TensorType(FLOAT, (None, "c", 4, 4)), TensorType(FLOAT, ("n", 5, "w", 2))]
    assert op.infer(types, {}, [None, None]) == (TensorType(FLOAT, ("n", "c", 5, "w")),)


@pytest.mark.parametrize("corners", [0, 1])
@pytest.mark.parametrize("size", [(2, 3, 4, 5), (2, 3, 4, 5, 6), (2, 3, 0, 4)])
@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_affine_grid_matches_the_reference(corners: int, size: tuple[int, ...], dtype: Any) -> None:
    rank = len(size) - 2
    theta = normal(2, rank, rank + 1, dtype=dtype)
    inputs = [theta, np.array(size, np.int64)]
    attrs = {"align_corners": corners}
    expected: Any = "reference"
    if 0 in size:
        expected = [np.zeros((2, *size[2:], rank), dtype)]
    elif dtype != np.float32:
        wide = [theta.astype(np.float32), inputs[1]]
        expected = [check_node("AffineGrid", wide, attrs)[0].astype(dtype)]
    tolerance = 1e-5 if dtype == np.float32 else 1e-2
    for constants in ((), (1,)):
        check_node(
            "AffineGrid",
            inputs,
            attrs,
            expected=expected,
            constants=constants,
            rtol=tolerance,
            atol=tolerance,
        )


def test_affine_grid_of_one_pixel() -> None:
    theta = np.array([[[1, 0, 0.5], [0, 1, 0.25]]], np.float32)
    want = np.array([[[[0.5, 0.25]]]], np.float32)
    for corners in (0, 1):
        inputs = [theta, np.array([1, 1, 1, 1])]
        check_node("AffineGrid", inputs, {"align_corners": corners}, expected=[want])


@pytest.mark.parametrize(
    ("theta", "size"),
    [
        ((2, 2, 3), [2, 1, 4, 4, 4]),
        ((2, 3, 4), [2, 1, 4, 4]),
        ((2, 2, 3), [1, 1, 4, 4]),
        ((2, 2, 2), [2, 1, 4, 4]),
        ((2, 3), [2, 1, 4, 4]),
        ((2, 2, 3), [2, 1, 4]),
        ((2, 2, 3), [2, 1, 4, -1]),
    ],
)
def test_affine_grid_with_bad_inputs_is_refused(theta: tuple[int, ...], size: list[int]) -> None:
    with pytest.raises(ShapeError):
        check_node("AffineGrid", [normal(*theta), np.array(size)], expected=[None])


def test_affine_grid_infers_its_types() -> None:
    op = find("AffineGrid")
    assert op is not None
    size = TensorType(INT64, (4,), ("n", 3, "h", 8))
    types = [TensorType(FLOAT, (None, 2, 3)), size]
    assert op.infer(types, {}, [None, None]) == (TensorType(FLOAT, ("n", "h", 8, 2)),)
    types[1] = TensorType(INT64, (4,))
    assert op.infer(types, {}, [None, None]) == (TensorType(FLOAT, (None, None, None, 2)),)


def boxes(batch: int, count: int, centre: int) -> np.ndarray:
    corner = rng.uniform(0, 10, (batch, count, 2))
    size = rng.uniform(0.5, 4, (batch, count, 2))
    other = size if centre else corner + size
    found = np.concatenate([corner, other], -1)
    if not centre:  # any diagonal
        flip = rng.random((batch, count)) < 0.5
        found[flip] = found[flip][:, [2, 1, 0, 3]]
    return found.astype(np.float32)


def scalar(value: Any, dtype: Any) -> np.ndarray:
    return np.array([value], dtype)


@pytest.mark.parametrize("centre", [0, 1])
@pytest.mark.parametrize("most", [1, 5, 1000])
@pytest.mark.parametrize("overlap", [0.0, 0.3, 0.7, 1.0])
@pytest.mark.parametrize("least", [None, 0.4])
def test_nms_matches_the_reference(
    centre: int, most: int, overlap: float, least: float | None
) -> None:
    inputs = [
        boxes(2, 60, centre),
        np.round(rng.random((2, 3, 60)), 1).astype(np.float32),  # with ties
        scalar(most, np.int64),
        scalar(overlap, np.float32),
    ]
    if least is not None:
        inputs.append(scalar(least, np.float32))
    attrs = {"center_point_box": centre}
    check_node("NonMaxSuppression", inputs, attrs, expected="ort", opset=11)


def test_nms_defaults_matches_the_reference() -> None:
    """No output unless asked for, whatever overlaps."""
    inputs = [boxes(1, 5, 0), rng.random((1, 2, 5)).astype(np.float32)]
    check_node("NonMaxSuppression", inputs, expected=[np.empty((0, 3), np.int64)])
    inputs += [np.array(0)]
    check_node("NonMaxSuppression", inputs, expected=[np.empty((0, 3), np.int64)])
    inputs[2] = np.array(3)
    check_node("NonMaxSuppression", inputs, expected="ort", opset=11)


def test_nms_degenerate_boxes_matches_the_reference() -> None:
    """Boxes without an area overlap with nothing, not even themselves."""
    flat = np.array([[[0, 0, 0, 0], [0, 0, 0, 0], [0, 0, 1, 1], [0, 0, 1, 1]]], np.float32)
    scores = np.array([[[0.9, 0.8, 0.7, 0.6]]], np.float32)
    inputs = [flat, scores, scalar(9, np.int64), scalar(0, np.float32)]
    (kept,) = check_node("NonMaxSuppression", inputs, expected="ort", opset=11)
    assert kept[:, 2].tolist() == [0, 1, 2]


def test_nms_empty_matches_the_reference() -> None:
    inputs = [np.zeros((1, 0, 4), "f"), np.zeros((1, 2, 0), "f"), scalar(3, np.int64)]
    check_node("NonMaxSuppression", inputs, expected=[np.empty((0, 3), np.int64)])
    inputs = [np.zeros((0, 5, 4), "f"), np.zeros((0, 2, 5), "f"), scalar(3, np.int64)]
    check_node("NonMaxSuppression", inputs, expected=[np.empty((0, 3), np.int64)])


@pytest.mark.parametrize(
    ("shapes", "overlap"),
    [
        (((1, 5, 3), (1, 2, 5)), 0.5),
        (((1, 5, 4), (1, 2, 6)), 0.5),
        (((2, 5, 4), (1, 2, 5)), 0.5),
        (((5, 4), (1, 2, 5)), 0.5),
        (((1, 5, 4), (1, 2, 5)), 1.5),
        (((1, 5, 4), (1, 2, 5)), -0.5),
    ],
)
def test_nms_with_bad_inputs_is_refused(
    shapes: tuple[tuple[int, ...], ...], overlap: float
) -> None:
    inputs = [np.zeros(shape, np.float32) for shape in shapes]
    inputs += [scalar(3, np.int64), scalar(overlap, np.float32)]
    with pytest.raises(ShapeError):
        check_node("NonMaxSuppression", inputs, expected=[None])


def test_nms_infers_its_types() -> None:
    op = find("NonMaxSuppression")
    assert op is not None
    assert op.infer([TensorType()] * 2, {}, [None] * 2) == (TensorType(INT64, (None, 3)),)


def test_affine_grid_of_constant_size_infers_its_shape() -> None:
    op = find("AffineGrid")
    assert op is not None
    size = np.array([2, 3, 4, 5])
    types = [TensorType(FLOAT), constant_type(size)]
    assert op.infer(types, {}, [None, size]) == (TensorType(FLOAT, (2, 4, 5, 2)),)


def encoded(pixels: np.ndarray, format: str = "PNG") -> np.ndarray:
    file = BytesIO()
    Image.fromarray(pixels).save(file, format)
    return np.frombuffer(file.getvalue(), np.uint8)


PIXELS = np.random.default_rng(3).integers(0, 255, (5, 7, 3), np.uint8)


@pytest.mark.parametrize("form", ["RGB", "BGR", "Grayscale"])
@pytest.mark.parametrize("format", ["PNG", "JPEG", "BMP", "TIFF", "PPM"])
def test_image_decoder_matches_the_reference(form: str, format: str) -> None:
    (y,) = check_node("ImageDecoder", [encoded(PIXELS, format)], {"pixel_format": form})
    assert y.shape == (5, 7, 1 if form == "Grayscale" else 3)


def test_image_decoder_gives_three_channels_of_a_grey_image() -> None:
    (y,) = check_node("ImageDecoder", [encoded(PIXELS[..., 0])], expected=[PIXELS[..., [0, 0, 0]]])
    assert y.flags.c_contiguous


@pytest.mark.parametrize("size", [0, 20, 60])
def test_image_decoder_gives_an_empty_image_of_damaged_bytes(size: int) -> None:
    check_node("ImageDecoder", [encoded(PIXELS)[:size]], expected=[np.empty((0, 0, 3), np.uint8)])


def test_image_decoder_without_pillow_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    x = encoded(PIXELS)
    model = node_model("ImageDecoder", [x])
    monkeypatch.setitem(sys.modules, "PIL", None)
    with pytest.raises(ps.PenstockError, match=r"pip install 'penstock-runtime\[image\]'"):
        ps.compile(model).run({"x0": x})
