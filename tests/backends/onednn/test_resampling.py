"""Resize with oneDNN equals that of NumPy."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from penstock.backends.onednn.library import library
from tests.backends.onednn.forced import (
    check,
    compile_on_onednn,
    one_node,
    ran_on,
    refused,
    same,
)
from tests.backends.onednn.test_convolution import draw

pytestmark = pytest.mark.skipif(library() is None, reason="needs libdnnl.so.3")


def resize(x, scales, **attrs):
    constants = {"scales": np.array([1, 1, *scales], np.float32)}
    return one_node("Resize", {"x": x}, constants, inputs=["x", "", "scales"], opset=19, **attrs)


MODES = [
    "half_pixel",
    "pytorch_half_pixel",
    "asymmetric",
    "align_corners",
    "half_pixel_symmetric",
    "tf_half_pixel_for_nn",
]


ROUNDINGS = ["round_prefer_floor", "round_prefer_ceil", "floor", "ceil"]


SCALES = [(2, 2), (3, 1), (0.5, 0.5), (1.5, 2), (1.7, 1.3), (4, 4), (0.6, 1.5), (7, 5)]


@pytest.mark.parametrize("scales", SCALES)
@pytest.mark.parametrize("coordinates", MODES)
def test_resize_on_any_backend_equals_numpy(coordinates, scales):
    x = draw(1, 3, 5, 8)
    for rounding in ROUNDINGS:
        attrs = {"coordinate_transformation_mode": coordinates, "nearest_mode": rounding}
        proto = resize(x, scales, mode="nearest", **attrs)
        same(compile_on_onednn(proto), proto, {"x": x})
    proto = resize(x, scales, mode="linear", coordinate_transformation_mode=coordinates)
    same(compile_on_onednn(proto), proto, {"x": x})


WHOLE = [
    ("half_pixel", "round_prefer_floor"),
    ("half_pixel", "round_prefer_ceil"),
    ("asymmetric", "floor"),
    ("tf_half_pixel_for_nn", "floor"),
]


@pytest.mark.parametrize("shape", [(2, 3, 7), (1, 3, 5, 8), (1, 2, 3, 4, 5), (1, 33, 4, 4)])
@pytest.mark.parametrize(("coordinates", "rounding"), WHOLE)
def test_resize_nearest_by_integer_factors_equals_numpy(coordinates, rounding, shape):
    x = draw(*shape)
    for factors in itertools.product((1, 2, 3, 5), repeat=2):
        scales = [*factors, 2][: len(shape) - 2]
        if set(scales) == {1}:
            continue
        proto = resize(
            x,
            scales,
            mode="nearest",
            coordinate_transformation_mode=coordinates,
            nearest_mode=rounding,
        )
        check(proto, {"x": x}, "Resize", rtol=0, atol=0)


@pytest.mark.parametrize("shape", [(2, 3, 7), (1, 3, 5, 8), (1, 2, 3, 4, 5)])
@pytest.mark.parametrize("sizes", [(10, 16, 10), (3, 4, 2), (9, 5, 11)])
def test_resize_linear_equals_numpy(shape, sizes):
    x = draw(*shape)
    wanted = np.array([*shape[:2], *sizes[: len(shape) - 2]])
    proto = one_node(
        "Resize",
        {"x": x},
        {"roi": np.zeros(0, np.float32), "s": np.zeros(0, np.float32), "sizes": wanted},
        mode="linear",
        opset=19,
    )
    session = check(proto, {"x": x}, "Resize")
    assert ran_on(session, "Resize") == {"onednn"}


@pytest.mark.parametrize(
    ("sizes", "attrs"),
    [
        ([1, 3, 3, 4], {"mode": "linear", "antialias": 1}),
        ([1, 6, 5, 8], {"mode": "linear"}),
        ([1, 3, 10, 16], {"mode": "cubic"}),
        ([1, 3, 10, 16], {"mode": "nearest", "nearest_mode": "ceil"}),
        ([1, 3, 10, 16], {"mode": "linear", "coordinate_transformation_mode": "align_corners"}),
    ],
)
def test_resize_that_onednn_lacks_runs_on_numpy(sizes, attrs):
    feeds = {"x": draw(1, 3, 5, 8)}
    constants = {"sizes": np.array(sizes)}
    proto = one_node("Resize", feeds, constants, inputs=["x", "", "", "sizes"], opset=19, **attrs)
    refused(proto, feeds, "Resize")
