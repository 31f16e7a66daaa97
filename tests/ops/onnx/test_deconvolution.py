"""ConvTranspose and Col2Im."""

import ml_dtypes
import numpy as np
import pytest

from penstock.core.types import FLOAT32, INT64, ShapeError, TensorType
from penstock.ops import find
from penstock.ops.onnx import deconvolution as family
from tests.ops.harness import check_node

rng = np.random.default_rng(0)


def draw(*shape, dtype=np.float32):
    if np.dtype(dtype).kind in "iu":
        return rng.integers(0, 9, shape).astype(dtype)
    return rng.standard_normal(shape).astype(dtype)


def check(x, w, attrs, bias=None):
    inputs = [draw(*x), draw(*w)] + ([draw(bias)] if bias else [])
    for constants in ((), range(1, len(inputs))):
        check_node("ConvTranspose", inputs, attrs, expected="ort", opset=21,
                   constants=constants, rtol=1e-4, atol=1e-5)  # fmt: skip


@pytest.mark.parametrize(
    "attrs",
    [
        {},
        {"strides": [2, 3]},
        {"strides": [2, 3], "pads": [1, 0, 2, 1]},
        {"strides": [2, 3], "output_padding": [1, 2]},
        {"strides": [2, 2], "dilations": [2, 1], "pads": [1, 1, 1, 1], "output_padding": [1, 1]},
        {"strides": [3, 2], "output_shape": [12, 10]},
        {"strides": [3, 2], "output_shape": [11, 9]},
        {"strides": [3, 2], "output_shape": [12, 10], "auto_pad": "SAME_UPPER"},
        {"strides": [3, 2], "output_shape": [12, 10], "auto_pad": "SAME_LOWER"},
        {"strides": [2, 2], "auto_pad": "SAME_UPPER"},
        {"strides": [2, 2], "auto_pad": "SAME_LOWER"},
        {"strides": [2, 2], "auto_pad": "VALID"},
        {"kernel_shape": [3, 2]},
    ],
)
@pytest.mark.parametrize(
    "x, w, group", [((2, 3, 4, 5), (3, 4, 3, 2), 1), ((1, 4, 4, 5), (4, 2, 3, 2), 2),
                    ((2, 3, 4, 5), (3, 1, 3, 2), 3)],
)  # fmt: skip
def test_conv_transpose_2d_matches_the_reference(x, w, group, attrs):
    check(x, w, {**attrs, "group": group}, bias=w[1] * group)


@pytest.mark.parametrize(
    "x, w, attrs",
    [
        ((2, 3, 9), (3, 4, 5), {"strides": [3], "pads": [2, 1]}),
        ((1, 2, 3, 4, 5), (2, 3, 2, 3, 2), {"strides": [2, 1, 3], "pads": [0, 1, 0, 1, 1, 1]}),
        ((1, 3, 4, 4), (3, 2, 1, 1), {}),
        ((1, 3, 4, 4), (3, 2, 2, 2), {"strides": [2, 2]}),
        ((1, 3, 4, 4), (3, 2, 1, 1), {"strides": [3, 3]}),
    ],
)
def test_conv_transpose_of_any_rank_matches_the_reference(x, w, attrs):
    check(x, w, attrs)


def test_conv_transpose_in_blocks(monkeypatch):
    monkeypatch.setattr(family, "BLOCK_BYTES", 1)
    monkeypatch.setattr(family, "MIN_BLOCK", 7)
    check((2, 3, 4, 5), (3, 4, 3, 2), {"strides": [2, 2], "pads": [1, 0, 1, 1]}, bias=4)
    check((2, 4, 12), (4, 1, 3), {"strides": [2], "group": 4})


@pytest.mark.parametrize("dtype", [np.float64, np.float16, ml_dtypes.bfloat16])
def test_conv_transpose_of_every_dtype_matches_the_definition(dtype):
    x, w = draw(1, 2, 3, dtype=dtype), draw(2, 3, 2, dtype=dtype)
    want = np.zeros((1, 3, 6))
    for i in range(3):
        want[:, :, 2 * i : 2 * i + 2] += np.einsum(
            "nc,cmk->nmk", x[:, :, i].astype(float), w.astype(float)
        )
    check_node("ConvTranspose", [x, w], {"strides": [2]}, expected=[want.astype(dtype)],
               rtol=0.02, atol=0.02)  # fmt: skip


@pytest.mark.parametrize("attrs", [{"auto_pad": "SAME_UPPER"}, {"output_shape": [9]}])
def test_conv_transpose_fills_what_no_window_reaches(attrs):
    x = draw(1, 1, 3)
    want = np.full((1, 1, 9), 2, np.float32)
    want[..., ::3] += x
    inputs = [x, np.ones((1, 1, 1), np.float32), np.full(1, 2, np.float32)]
    check_node("ConvTranspose", inputs, {"strides": [3], **attrs}, expected=[want])


@pytest.mark.parametrize(
    "x, w, attrs, bias",
    [
        ((1, 3, 4, 4), (2, 4, 3, 3), {}, None),
        ((1, 3, 4, 4), (3, 4, 3), {}, None),
        ((1, 3, 4, 4), (3, 4, 3, 3), {"group": 2}, None),
        ((1, 3, 4, 4), (3, 4, 3, 3), {"group": -1}, None),
        ((1, 3, 4, 4), (3, 4, 3, 3), {}, 3),
        ((1, 3, 4, 4), (3, 4, 3, 3), {"pads": [9, 9, 9, 9]}, None),
        ((1, 3, 4, 4), (3, 4, 3, 3), {"output_padding": [1]}, None),
        ((1, 3, 4, 4), (3, 4, 3, 3), {"output_shape": [1, 2, 3]}, None),
        ((1, 3, 4, 4), (3, 4, 0, 3), {}, None),
    ],
)
def test_conv_transpose_with_bad_inputs_is_refused(x, w, attrs, bias):
    inputs = [draw(*x), draw(*w)] + ([draw(bias)] if bias else [])
    with pytest.raises(ShapeError):
        check_node("ConvTranspose", inputs, attrs, expected=[])


def test_infer_conv_transpose_keeps_what_is_known():
    infer = find("ConvTranspose").infer

    def shape(x, w, **attrs):
        types = [TensorType(FLOAT32, x), TensorType(FLOAT32, w)]
        return infer(types, attrs, [None, None])[0].shape

    assert shape(("n", 3, "h", 4), (3, 2, 3, 3), pads=[1] * 4) == ("n", 2, "h", 4)
    assert shape(("n", 3, "h", 4), (3, 2, 3, 3), strides=[2, 2]) == ("n", 2, None, 9)
    assert shape(("n", 3, "h", 4), (3, 2, 3, 3), output_shape=[8, 8]) == ("n", 2, 8, 8)
    assert shape(("n", 3, "h", 4), (3, None, 3, None), group=3, auto_pad="SAME_UPPER",
                 strides=[1, 2]) == ("n", None, "h", 8)  # fmt: skip
    assert shape(None, (3, 2, 3, 3)) == (None, 2, None, None)
    assert shape(None, None) is None


@pytest.mark.parametrize(
    "image, block, attrs",
    [
        ((5, 6), (2, 3), {}),
        ((5, 6), (1, 5), {}),
        ((5, 6), (2, 3), {"strides": [2, 2], "pads": [1, 0, 1, 1]}),
        ((7, 6), (2, 3), {"dilations": [3, 2]}),
        ((3, 4, 5), (1, 2, 3), {"strides": [1, 2, 1]}),
    ],
)
@pytest.mark.parametrize("dtype", [np.float32, np.int32, np.uint8, np.float16])
def test_col2im_matches_the_reference(image, block, attrs, dtype):
    counts = [
        (size + sum(attrs.get("pads", [0] * 9)[i :: len(image)])
         - (k - 1) * attrs.get("dilations", [1] * 3)[i] - 1) // attrs.get("strides", [1] * 3)[i] + 1
        for i, (size, k) in enumerate(zip(image, block, strict=True))
    ]  # fmt: skip
    x = draw(2, 3 * np.prod(block), np.prod(counts), dtype=dtype)
    inputs = [x, np.array(image), np.array(block)]
    for constants in ((), (1, 2)):
        check_node("Col2Im", inputs, attrs, constants=constants, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize(
    "x, image, block",
    [
        ((1, 6, 5), (5, 5), (1, 5)),
        ((1, 5, 4), (5, 5), (1, 5)),
        ((1, 5, 5), (5, 5), (1, 5, 1)),
        ((5, 5), (5, 5), (1, 5)),
        ((1, 5, 5), (5, 5), (0, 5)),
        ((1, 5, 5), (5, 5), (6, 5)),
    ],
)
def test_col2im_with_bad_inputs_is_refused(x, image, block):
    with pytest.raises(ShapeError):
        check_node("Col2Im", [draw(*x), np.array(image), np.array(block)], expected=[])


def test_infer_col2im_from_shape_arithmetic():
    infer = find("Col2Im").infer
    x = TensorType(FLOAT32, ("n", 30, None))
    image = TensorType(INT64, (2,), ("h", 6))
    block = TensorType(INT64, (2,), (2, 3))
    assert infer([x, image, block], {}, [None] * 3)[0].shape == ("n", 5, "h", 6)
    assert infer([x, image, TensorType(INT64, (2,))], {}, [None] * 3)[0].shape == (
        "n", None, "h", 6,
    )  # fmt: skip
