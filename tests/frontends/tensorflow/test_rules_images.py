"""Rules of operations on images: convolution, pooling, normalization, resizing, selection of boxes."""

from __future__ import annotations

import numpy as np
import pytest

import penstock as ps
from tests.support.tf_graphs import Builder, Type
from tests.support.tf_operations import operation_tests

test_operation_matches_tensorflow, test_reversed_nodes_match_tensorflow = operation_tests(
    "frontends.tensorflow.rules_images"
)


# Gradients of images with channels first: TensorFlow's own kernels on a processor take none.

RNG = np.random.default_rng(0)
_POOL = {"ksize": [1, 3, 2, 1], "strides": [1, 2, 2, 1], "padding": "SAME"}
_CONV = {"strides": [1, 2, 1, 1], "dilations": [1, 1, 2, 1], "padding": "EXPLICIT"}
_PADS = [0, 0, 1, 2, 0, 1, 0, 0]


def real(*shape: int) -> np.ndarray:
    return RNG.normal(size=shape).astype(np.float32)


def gradient_of(op: str, data_format: str, inputs: list[np.ndarray], **attrs: object) -> np.ndarray:
    """The first output of a gradient whose inputs of four dims are images [N, H, W, C], from which
    it is told to have them in ``data_format``; the filter of a convolution stays."""
    g = Builder()
    first = data_format == "NCHW"
    names = []
    for i, x in enumerate(inputs):
        image = x.ndim == 4 and not (op == "Conv2DBackpropInput" and i == 1)
        value = np.ascontiguousarray(x.transpose(0, 3, 1, 2)) if first and image else x
        if first and x.dtype == np.int32 and not op.endswith("Filter"):  # the size of an image
            value = x[[0, 3, 1, 2]]
        names.append(g.const(value))
    for name in ("ksize", "strides", "dilations"):
        if name in attrs and first:
            attrs[name] = [attrs[name][i] for i in (0, 3, 1, 2)]
    if "explicit_paddings" in attrs and first:
        pairs = np.array(attrs["explicit_paddings"]).reshape(4, 2)[[0, 3, 1, 2]]
        attrs["explicit_paddings"] = pairs.reshape(-1).tolist()
    g.node(op, *names, name="y", T=Type("float32"), data_format=data_format, **attrs)
    result = ps.compile(g.bytes()).run({}, ["y:0"])["y:0"]
    return result.transpose(0, 2, 3, 1) if first and not op.endswith("Filter") else result


IMAGE, SIZE = real(2, 7, 6, 3), np.array([2, 7, 6, 3], np.int32)
GRADIENTS = {
    "Conv2DBackpropFilter": ([IMAGE, np.array([3, 3, 3, 5], np.int32), real(2, 4, 3, 5)], _CONV),
    "Conv2DBackpropInput": ([SIZE, real(3, 3, 3, 5), real(2, 4, 3, 5)], _CONV),
    "MaxPoolGrad": ([IMAGE, IMAGE[:, ::2, ::2], real(2, 4, 3, 3)], _POOL),
    "AvgPoolGrad": ([SIZE, real(2, 4, 3, 3)], _POOL),
    "FusedBatchNormGrad": ([IMAGE[::-1], IMAGE, real(3), real(3), abs(real(3))], {}),
}


@pytest.mark.parametrize("op", GRADIENTS)
def test_gradient_with_channels_first_equals_that_with_channels_last(op: str) -> None:
    inputs, attrs = GRADIENTS[op]
    if op.startswith("Conv2D"):
        attrs = {**attrs, "explicit_paddings": _PADS}
    last, first = (gradient_of(op, order, inputs, **attrs) for order in ("NHWC", "NCHW"))
    assert last.any()
    np.testing.assert_allclose(first, last, rtol=1e-5, atol=1e-5)


def test_places_of_maxima_need_the_dims_of_the_image() -> None:
    g = Builder()
    x = g.placeholder("x", "float32", 1, -1, 4, 2)
    sizes = {"ksize": [1, 2, 2, 1], "strides": [1, 2, 2, 1], "padding": "VALID"}
    g.node("MaxPoolWithArgmax", x, name="y", T=Type("float32"), **sizes)
    with pytest.raises(ps.Unsupported, match="the dims of its image are unknown"):
        ps.compile(g.bytes())


@pytest.mark.parametrize("rows", [8, -1])
def test_grouped_convolution_of_a_batch_of_blocks_has_its_groups(rows: int) -> None:
    """As Keras writes a convolution with groups and dilation, whose paddings depend on a shape."""
    g = Builder()
    x, pads = g.placeholder("x", "float32", -1, rows, 1, 6), g.placeholder("pads", "int32", 1, 2)
    blocks = {"Tblock_shape": Type("int32"), "Tpaddings": Type("int32")}
    sides = g.const(np.array([2], np.int32))
    parts = g.node("SpaceToBatchND", x, sides, pads, T=Type("float32"), **blocks)
    filters = real(1, 1, 2, 9)
    step = {"strides": [1, 1, 1, 1], "padding": "VALID"}
    g.node("Conv2D", parts, g.const(filters), name="y", T=Type("float32"), **step)
    image = real(2, 8, 1, 6)
    got = ps.compile(g.bytes()).run({"x": image, "pads": np.array([[1, 1]], np.int32)})["y:0"]
    padded = np.pad(image, [(0, 0), (1, 1), (0, 0), (0, 0)])
    groups = np.concatenate([padded[:, ::2], padded[:, 1::2]]).reshape(4, 5, 1, 3, 2)
    want = np.einsum("nhwgc,cgm->nhwgm", groups, filters.reshape(2, 3, 3)).reshape(4, 5, 1, 9)
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)
