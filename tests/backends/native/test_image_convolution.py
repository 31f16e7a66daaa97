"""Compiled convolutions of images with channels innermost, against NumPy's kernels of their parts."""

from __future__ import annotations

import numpy as np
import pytest

import penstock as ps
from penstock.analysis.type_inference import infer_types
from penstock.backends.native.backend import NativeBackend
from penstock.backends.native.image_convolution import image_convolution
from penstock.backends.native.kernel import site_of
from penstock.backends.onednn.backend import OneDnnBackend
from penstock.backends.onednn.library import library as onednn
from penstock.ir.graph import Node
from penstock.ops.internal.fused import fused
from tests.support.native_kernels import LIBRARIES, check, pytestmark  # noqa: F401
from tests.support.onnx_text import model_from_text

RNG = np.random.default_rng(3)
CLOSE = {"rtol": 1e-5, "atol": 1e-5}
AFTER = {
    "nothing": "y = Identity(c)",
    "relu": "y = Relu(c)",
    "slope": "y = LeakyRelu <alpha = 0.25> (c)",
    "bounded slope of a sum": "s = Add(a, c) l = LeakyRelu(s) y = Clip(l, low, high)",
    "sum": "y = Add(a, c)",
    "bounded sum": "s = Add(c, a) y = Clip(s, low, high)",
}


def convolution(
    x_dims: tuple[int, ...],
    w_dims: tuple[int, ...],
    attrs: str = "",
    after: str = "relu",
    *,
    bias: bool = True,
) -> tuple[Node, list[np.ndarray]]:
    """A convolution with what follows it, as one node, and random images for it."""
    more = f", float{['n'] * len(x_dims)} a".replace("'", "") if "sum" in after else ""
    numbers = {"w": RNG.standard_normal(w_dims), "b": RNG.standard_normal(w_dims[0])}
    texts = {name: ", ".join(map(str, x.reshape(-1))) for name, x in numbers.items()}
    result = f"float{['n'] * len(x_dims)} y".replace("'", "")
    model = model_from_text(
        f"""g (float{list(x_dims)} x{more}) => ({result})
        <float{list(w_dims)} w = {{{texts["w"]}}}, float[{w_dims[0]}] b = {{{texts["b"]}}},
         float low = {{-0.5}}, float high = {{2}}>
        {{ i = Identity(x) c = Conv {attrs} (i, w{", b" * bias})
           {AFTER.get(after, after)} }}""",
        opset=21,
    )
    graph = ps.load(model).graph
    infer_types(graph)
    _, *nodes = graph.nodes
    conv = nodes[0]
    dims = conv.outputs[0].type.dims
    for value in graph.inputs[1:]:
        value.type = conv.outputs[0].type
    infer_types(graph)
    images = {"i": RNG.standard_normal(x_dims), "a": RNG.standard_normal(dims)}
    node = conv if after == "nothing" else fused(nodes)
    return node, [
        v.const if v.const is not None else images[v.name].astype(np.float32)
        for v in node.inputs
        if v is not None
    ]


SHAPES = {
    "positions": ((2, 8, 4, 4), (40, 8, 1, 1), ""),
    "positions of odd channels": ((1, 7, 5, 3), (19, 7, 1, 1), ""),
    "positions apart": ((1, 6, 7, 7), (12, 6, 1, 1), "<strides = [2, 2]>"),
    "an image": ((2, 3, 9, 7), (5, 3, 3, 3), "<strides = [2, 2], pads = [0, 1, 1, 1]>"),
    "dilations": ((1, 5, 8, 9), (6, 5, 2, 3), "<dilations = [2, 3]>"),
    "a signal": ((1, 6, 30), (4, 6, 5), "<pads = [2, 2]>"),
    "each channel": ((2, 16, 6, 5), (16, 1, 3, 3), "<group = 16, pads = [1, 1, 1, 1]>"),
    "each of odd channels": ((1, 13, 9, 8), (13, 1, 3, 3), "<group = 13, pads = [1, 1, 1, 1]>"),
    "each channel apart": (
        (1, 24, 9, 11),
        (24, 1, 5, 3),
        "<group = 24, strides = [2, 3], dilations = [1, 2], pads = [2, 1, 0, 4]>",
    ),
    "channels of a signal": ((1, 6, 30), (6, 1, 5), "<group = 6, strides = [2]>"),
    "long rows of channels": ((1, 64, 9, 90), (64, 1, 3, 3), "<group = 64, pads = [1, 1, 1, 1]>"),
}


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("after", ["relu", "bounded sum"])
def test_convolution_of_channels_innermost_agrees_with_numpy(name, after):
    check(*convolution(*SHAPES[name], after=after), CLOSE)


@pytest.mark.parametrize("after", AFTER)
def test_convolution_of_positions_and_what_follows_agrees_with_numpy(after):
    check(*convolution((1, 16, 3, 5), (24, 16, 1, 1), after=after, bias=False), CLOSE)


@pytest.mark.parametrize("name", ["positions", "each channel"])
def test_the_image_itself_may_be_added(name):
    x_dims, w_dims, attrs = SHAPES[name]
    w_dims = (x_dims[1], *w_dims[1:])
    check(*convolution(x_dims, w_dims, attrs, after="y = Add(c, i)"), CLOSE)


def test_bounds_of_a_convolution_leave_nan():
    node, inputs = convolution((1, 4, 3, 3), (8, 4, 1, 1), after="bounded sum")
    inputs[0][0, 1, 2, 2] = np.nan
    check(node, inputs, CLOSE)


@pytest.mark.parametrize(
    ("w_dims", "attrs"), [((8, 2, 1, 1), "<group = 2>"), ((8, 1, 1, 1), "<group = 4>")]
)
def test_convolution_of_several_channels_in_groups_has_no_kernel(w_dims, attrs):
    node, _ = convolution((1, 4, 5, 5), w_dims, attrs, after="nothing")
    for library in LIBRARIES:
        site = site_of(library, node, [v.type for v in node.inputs])
        assert image_convolution(site) is None


@pytest.mark.skipif(onednn() is None, reason="there is no oneDNN")
@pytest.mark.parametrize(
    ("x_dims", "w_dims", "attrs", "native"),
    [
        ((1, 16, 4, 4), (64, 16, 1, 1), "", True),
        ((1, 48, 8, 8), (48, 1, 3, 3), "<group = 48, strides = [2, 2], pads = [1, 1, 1, 1]>", True),
        ((1, 64, 28, 28), (64, 64, 3, 3), "<pads = [1, 1, 1, 1]>", False),
        ((1, 96, 28, 28), (96, 1, 3, 3), "<group = 96, pads = [1, 1, 1, 1]>", False),
    ],
)
def test_small_convolutions_are_estimated_to_be_faster_than_on_onednn(
    x_dims, w_dims, attrs, native
):
    node, _ = convolution(x_dims, w_dims, attrs)
    node.inputs[0].producer = node  # any: an image that enters the graph is left to others
    assert (NativeBackend().seconds(node) < OneDnnBackend().seconds(node)) is native
