"""Compiled convolutions of images with channels innermost, against NumPy's kernels of their parts."""

from __future__ import annotations

import re
from itertools import product

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

import penstock as ps
from penstock.analysis.type_inference import infer_types
from penstock.backends.native.image_convolution import image_convolution
from penstock.backends.native.kernel import native_kernel, site_of
from penstock.ir.graph import Node
from penstock.ops.internal.fused import fused
from tests.support.native_kernels import (  # noqa: F401
    LIBRARIES,
    check,
    expected,
    kernel_of,
    node_of,
    pytestmark,
    threads_of,
)
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
    "slopes of channels": "s = Add(c, a) y = PRelu(s, slopes)",
    "one slope": "y = PRelu(c, high)",
    "the larger": "l = LeakyRelu(c) y = Max(low, l)",
    "the smaller": "y = Min(c, high)",
    "a gate": "y = HardSwish(c)",
    "a scaled gate": "s = Add(c, a) h = HardSwish(s) m = Mul(h, high) y = Add(m, low)",
    "a shifted gate": "h = HardSwish(c) s = Add(low, h) y = Relu(s)",
    "a program": "y = Gelu(c)",
    "a program of scalars": "h = HardSwish(c) m = Mul(h, high) t = Tanh(m) y = Add(t, low)",
    "a program of a sum behind": "r = Relu(c) y = Add(r, a)",
    "a program of channels": "s = Sigmoid(c) y = Mul(s, slopes)",
    "a program of a sum": "s = Add(c, a) t = Tanh(s) y = Mul(t, a)",
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
    text = AFTER.get(after, after)
    more = (
        f", float{['n'] * len(x_dims)} a".replace("'", "") if "a" in re.split(r"\W+", text) else ""
    )
    slopes = (w_dims[0], *[1] * (len(x_dims) - 2))
    numbers = {"w": RNG.standard_normal(w_dims), "b": RNG.standard_normal(w_dims[0])}
    numbers["s"] = RNG.standard_normal(slopes)
    texts = {name: ", ".join(map(str, x.reshape(-1))) for name, x in numbers.items()}
    result = f"float{['n'] * len(x_dims)} y".replace("'", "")
    model = model_from_text(
        f"""g (float{list(x_dims)} x{more}) => ({result})
        <float{list(w_dims)} w = {{{texts["w"]}}}, float[{w_dims[0]}] b = {{{texts["b"]}}},
         float{list(slopes)} slopes = {{{texts["s"]}}},
         float low = {{-0.5}}, float high = {{2}}>
        {{ i = Identity(x) c = Conv {attrs} (i, w{", b" * bias})
           {text} }}""",
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
    "each of few channels": ((2, 5, 9, 40), (5, 1, 3, 3), "<group = 5, pads = [1, 1, 1, 1]>"),
    "few channels of rows apart": (
        (1, 12, 9, 31),
        (12, 1, 3, 2),
        "<group = 12, strides = [2, 1], dilations = [2, 3], pads = [3, 0, 1, 5]>",
    ),
    "few channels of long rows": ((1, 4, 3, 300), (4, 1, 2, 5), "<group = 4, pads = [0, 2, 1, 2]>"),
    "few channels of low images": ((3, 8, 1, 2), (8, 1, 5, 7), "<group = 8, pads = [9, 9, 9, 9]>"),
    "each channel apart": (
        (1, 24, 9, 11),
        (24, 1, 5, 3),
        "<group = 24, strides = [2, 3], dilations = [1, 2], pads = [2, 1, 0, 4]>",
    ),
    "channels of a signal": ((1, 6, 30), (6, 1, 5), "<group = 6, strides = [2]>"),
    "long rows of channels": ((1, 64, 9, 90), (64, 1, 3, 3), "<group = 64, pads = [1, 1, 1, 1]>"),
    "each of many channels": ((1, 150, 5, 5), (150, 1, 5, 5), "<group = 150, pads = [2, 2, 2, 2]>"),
    "wide groups": ((2, 36, 5, 4), (38, 18, 3, 3), "<group = 2, pads = [1, 1, 1, 1]>"),
    "narrow groups": ((1, 24, 5, 4), (24, 3, 3, 3), "<group = 8, pads = [1, 1, 1, 1]>"),
    "filters of each channel": ((1, 6, 7, 5), (12, 1, 3, 3), "<group = 6>"),
    "a deep window": ((1, 130, 6, 6), (70, 130, 3, 3), "<pads = [1, 1, 1, 1]>"),
    "a deep position": ((1, 530, 2, 3), (65, 530, 1, 1), ""),
    "a wide window": ((1, 3, 12, 13), (17, 3, 7, 7), "<strides = [2, 2], pads = [3, 3, 3, 3]>"),
    "low images": ((1, 20, 2, 30), (20, 1, 5, 5), "<group = 20, pads = [2, 2, 2, 2]>"),
    "low images, all channels": ((1, 20, 1, 30), (9, 20, 3, 3), "<pads = [1, 1, 1, 1]>"),
    "slices": (
        (2, 5, 4, 5, 6),
        (7, 5, 3, 2, 3),
        "<strides = [1, 2, 1], pads = [1, 0, 1, 1, 1, 1]>",
    ),
    "slices of each channel": (
        (1, 24, 5, 4, 7),
        (24, 1, 3, 3, 3),
        "<group = 24, pads = [1, 1, 1, 1, 1, 1]>",
    ),
    "padding alone": ((1, 4, 2, 2), (5, 4, 3, 3), "<pads = [3, 3, 3, 3]>"),
    "taps far apart": ((1, 5, 4, 4), (20, 5, 3, 3), "<dilations = [9, 4], pads = [9, 4, 9, 4]>"),
    "deep taps far apart": (
        (2, 260, 5, 4),
        (20, 260, 3, 3),
        "<dilations = [6, 5], pads = [6, 5, 6, 5]>",
    ),
    "a deep tap that sees all": ((1, 300, 3, 2), (9, 300, 1, 2), "<pads = [0, 3, 0, 0]>"),
    "a vector of filters": ((1, 16, 5, 30), (16, 16, 3, 3), "<pads = [1, 1, 1, 1]>"),
    "tiles of a line": ((1, 20, 6, 13), (70, 20, 3, 3), "<pads = [1, 1, 1, 1]>"),
    "tiles of two lines": ((1, 70, 7, 7), (80, 70, 3, 3), "<pads = [1, 1, 1, 1]>"),
    "uneven lines": ((1, 9, 7, 7), (64, 9, 3, 3), "<dilations = [2, 2], pads = [2, 2, 2, 2]>"),
    "groups of 8 filters": ((1, 16, 6, 14), (16, 8, 3, 3), "<group = 2, pads = [1, 1, 1, 1]>"),
    "groups of 7 filters": ((1, 24, 7, 19), (14, 12, 3, 3), "<group = 2, strides = [2, 2]>"),
    "few filters of many channels": ((1, 130, 5, 9), (5, 130, 3, 3), "<pads = [1, 1, 1, 1]>"),
    "lines of few channels": (
        (3, 3, 9, 60),
        (13, 3, 3, 3),
        "<strides = [2, 2], pads = [1, 1, 1, 1]>",
    ),
    "lines of one channel": ((2, 1, 11, 70), (24, 1, 5, 5), "<pads = [0, 4, 2, 1]>"),
    "lines of dilated taps": (
        (1, 5, 9, 40),
        (20, 5, 3, 3),
        "<dilations = [4, 6], pads = [4, 6, 4, 6]>",
    ),
    "lines far apart": (
        (2, 12, 40, 30),
        (12, 12, 7, 1),
        "<dilations = [17, 1], pads = [51, 0, 51, 0]>",
    ),
    "lines without padding": ((2, 4, 9, 61), (70, 4, 3, 3), "<strides = [2, 2]>"),
    "lines of few elements": (
        (2, 3, 8, 131),
        (70, 3, 3, 3),
        "<strides = [2, 2], pads = [1, 1, 1, 1]>",
    ),
    "lines of one element": ((1, 5, 6, 43), (40, 5, 1, 1), "<strides = [1, 2]>"),
    "lines of elements far apart": (
        (2, 6, 9, 82),
        (22, 6, 3, 2),
        "<dilations = [3, 5], pads = [3, 1, 6, 2]>",
    ),
    "lines of elements of slices": (
        (2, 2, 4, 5, 62),
        (32, 2, 3, 3, 3),
        "<pads = [1, 1, 0, 1, 1, 1]>",
    ),
    "lines of elements of groups": ((2, 10, 4, 61), (52, 5, 2, 2), "<group = 2, strides = [1, 2]>"),
    "lines of slices": ((2, 1, 4, 5, 33), (32, 1, 3, 3, 3), "<pads = [1, 1, 1, 1, 1, 1]>"),
    "lines of groups": ((2, 24, 7, 40), (24, 3, 3, 3), "<group = 8, pads = [1, 1, 1, 1]>"),
    "lines of a vector of filters": ((1, 16, 7, 45), (16, 16, 3, 3), "<pads = [1, 1, 1, 1]>"),
    "lines wider than the image": ((1, 2, 4, 9), (17, 2, 3, 3), "<pads = [2, 20, 2, 20]>"),
    "parts of long lines": ((2, 2, 3, 1900), (20, 2, 3, 5), "<pads = [1, 2, 1, 2]>"),
    **{
        f"{count} of each channel, {taps} taps, stride {stride}": (
            (1, 40, 2, (count - 1) * stride + 1),
            (40, 1, 2, taps),
            f"<group = 40, strides = [1, {stride}], pads = [1, {taps // 2}, 0, {taps // 2}]>",
        )
        for count, taps, stride in product((1, 2, 3, 9), (3, 5, 7), (1, 2))
    },
    "a long signal": ((2, 1, 1507), (32, 1, 7), ""),
    "positions of a long signal": ((2, 16, 700), (33, 16, 1), ""),
}


def close_to(w_dims: tuple[int, ...]) -> dict[str, float]:
    """Tolerances for sums with such weights: NumPy's are of float32, too."""
    return {**CLOSE, "atol": 2e-7 * max(float(np.prod(w_dims[1:])), 50)}


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("after", ["relu", "bounded sum"])
def test_convolution_of_channels_innermost_agrees_with_numpy(name, after):
    check(*convolution(*SHAPES[name], after=after), close_to(SHAPES[name][1]))


@pytest.mark.parametrize("after", AFTER)
@pytest.mark.parametrize(
    "name",
    [
        *("positions", "wide groups", "each of odd channels", "each of few channels", "an image"),
        *("a signal", "deep"),
    ],
)
def test_convolution_and_what_follows_agrees_with_numpy(name, after):
    # "deep": results are longer than a tile of a program.
    x_dims, w_dims, attrs = SHAPES.get(name, ((2, 16, 3, 5), (600, 16, 1, 1), ""))
    check(*convolution(x_dims, w_dims, attrs, after=after, bias=False), close_to(w_dims))


LINES = [name for name in SHAPES if "lines" in name] + ["a long signal", "positions"]


@pytest.mark.parametrize("name", LINES)
@pytest.mark.parametrize("after", ["relu", "a gate", "bounded slope of a sum", "a program"])
@pytest.mark.parametrize(
    "orders", list(product(["channels first", "channels innermost", "gaps"], repeat=2))
)
def test_lines_may_have_their_dims_in_unlike_orders(name, after, orders):
    node, inputs = convolution(*SHAPES[name], after=after)
    (wanted,) = expected(node, inputs)
    given = [laid_out(inputs[0], orders[0]), *inputs[1:]]
    for library in LIBRARIES:
        y = laid_out(np.full_like(wanted, np.nan), orders[1])
        function, late = kernel_of(node, library).bind(given, [y], None)
        function(*late)
        np.testing.assert_allclose(y, wanted, **close_to(SHAPES[name][1]))


@pytest.mark.parametrize(
    "name", ["positions", "each of odd channels", "each of few channels", "a signal"]
)
@pytest.mark.parametrize(
    "orders", list(product(["channels first", "channels innermost"], repeat=3))
)
def test_images_and_result_may_have_their_dims_in_unlike_orders(name, orders):
    node, inputs = convolution(*SHAPES[name], after="a program of a sum")
    (wanted,) = expected(node, inputs)
    of_x, of_y, of_added = orders
    given = [laid_out(inputs[0], of_x), *inputs[1:]]
    given = [laid_out(v, of_added) if v.shape == wanted.shape else v for v in given]
    for library in LIBRARIES:
        y = laid_out(np.full_like(wanted, np.nan), of_y)
        function, late = kernel_of(node, library).bind(given, [y], None)
        function(*late)
        np.testing.assert_allclose(y, wanted, **CLOSE)


@pytest.mark.parametrize(
    ("x_dims", "w_dims", "attrs"),
    [
        ((2, 32, 24, 23), (600, 32, 1, 1), ""),
        ((1, 64, 30, 30), (64, 32, 3, 3), "<group = 2>"),
        ((1, 480, 28, 28), (480, 1, 5, 5), "<group = 480, pads = [2, 2, 2, 2]>"),
        ((1, 6, 90, 90), (6, 1, 5, 5), "<group = 6, pads = [2, 2, 2, 2]>"),
    ],
)
def test_results_do_not_depend_on_the_number_of_threads(x_dims, w_dims, attrs):
    node, inputs = convolution(x_dims, w_dims, attrs, after="a program")
    for library in LIBRARIES:
        results = []
        for count in (1, 2, 3):
            with threads_of(library, count):
                given = [laid_out(inputs[0], "channels innermost"), *inputs[1:]]
                shape = node.outputs[0].type.dims
                y = laid_out(np.full(shape, np.nan, np.float32), "channels innermost")
                function, late = kernel_of(node, library).bind(given, [y], None)
                function(*late)
                results.append(y)
        for y in results[1:]:
            np.testing.assert_array_equal(y, results[0])


@pytest.mark.parametrize("name", ["positions", "each channel"])
def test_the_image_itself_may_be_added(name):
    x_dims, w_dims, attrs = SHAPES[name]
    w_dims = (x_dims[1], *w_dims[1:])
    check(*convolution(x_dims, w_dims, attrs, after="y = Add(c, i)"), CLOSE)


def test_bounds_of_a_convolution_leave_nan():
    node, inputs = convolution((1, 4, 3, 3), (8, 4, 1, 1), after="bounded sum")
    inputs[0][0, 1, 2, 2] = np.nan
    check(node, inputs, CLOSE)


@st.composite
def cases(draw: st.DrawFn) -> tuple[str, tuple[int, ...], tuple[int, ...], dict[str, object]]:
    """An operation, dims of images and weights, and attributes."""
    name, axes = draw(st.sampled_from(["Conv", "Conv", "ConvTranspose"])), draw(st.integers(1, 3))
    groups = draw(st.sampled_from([1, 1, 2, 5, 33]))
    per_group = draw(st.sampled_from([1, 1, 2, 3, 7, 16, 33]))
    of_group = draw(st.sampled_from([1, 1, 2, 5, 16, 23, 67]))
    large = 7 if axes == 1 else 4
    kernel, begin, end, stride, dilation, size = (
        draw(st.lists(st.integers(low, high), min_size=axes, max_size=axes))
        for low, high in [(1, large), (0, 3), (0, 3), (1, 3), (1, 3), (0, 12 if axes < 3 else 4)]
    )
    attrs = {"group": groups, "strides": stride, "dilations": dilation}
    dims = draw(st.integers(1, 3)), groups * per_group
    if name == "ConvTranspose":
        sizes = [max(s, 1) for s in size]
        full = zip(sizes, stride, kernel, dilation, strict=True)
        wide = [(n - 1) * s + (k - 1) * d + 1 for n, s, k, d in full]
        # At least one element along each axis.
        begin = [min(b, n - 1) for b, n in zip(begin, wide, strict=True)]
        end = [min(e, n - b - 1) for e, b, n in zip(end, begin, wide, strict=True)]
        attrs |= {"pads": [*begin, *end], "output_padding": [s // 2 for s in stride]}
        return name, (*dims, *sizes), (dims[1], of_group, *kernel), attrs
    # At least one window along each axis.
    spans = [(k - 1) * d + 1 for k, d in zip(kernel, dilation, strict=True)]
    sizes = [
        max(s + span - b - e, 1) for s, span, b, e in zip(size, spans, begin, end, strict=True)
    ]
    end = [max(e, span - b - n) for e, span, b, n in zip(end, spans, begin, sizes, strict=True)]
    attrs["pads"] = [*begin, *end]
    return name, (*dims, *sizes), (groups * of_group, per_group, *kernel), attrs


@given(cases(), st.integers(0, 2**32 - 1), st.sampled_from([[1, 2], [1, 2], [2], []]))
# Windows that lie inside of the image, but are copied where it has gaps; and more than there is
# room for at once.
@example(("Conv", (1, 8, 24, 24), (4, 8, 5, 5), {"group": 1}), 1, [])
@example(
    ("Conv", (2, 3, 40, 31), (70, 3, 3, 3), {"pads": [1, 1, 1, 1], "strides": [2, 2]}), 2, [1, 2]
)
@example(("Conv", (1, 300, 3, 3), (5, 300, 3, 3), {"pads": [1, 1, 1, 1]}), 3, [])
@example(("Conv", (1, 600, 4, 4), (600, 1, 5, 5), {"pads": [2, 2, 2, 2], "group": 600}), 4, [1, 2])
# Rows of taps that are computed five, three and one at a time; positions as far apart as taps, computed
# together, some of which see padding alone; long lines; phases without taps; an element for each phase; a
# kernel beyond the image.
@example(("Conv", (1, 40, 9, 23), (40, 1, 2, 7), {"group": 40, "pads": [0, 3, 1, 4]}), 5, [])
@example(
    ("Conv", (1, 33, 9, 26), (33, 1, 3, 3), {"group": 33, "pads": [4] * 4, "dilations": [2, 3]}),
    15,
    [1, 2],
)
@example(
    (
        "Conv",
        (2, 16, 40),
        (16, 1, 10),
        {"group": 16, "pads": [40, 3], "dilations": [4], "strides": [2]},
    ),
    16,
    [],
)
@example(("Conv", (1, 17, 3, 900), (17, 1, 3, 3), {"group": 17, "strides": [1, 2]}), 6, [1, 2])
@example(("Conv", (2, 36, 4, 5, 6), (36, 1, 3, 3, 3), {"group": 36, "pads": [1] * 6}), 7, [])
@example(
    ("Conv", (1, 20, 300), (20, 1, 5), {"group": 20, "strides": [7], "pads": [3, 3]}), 8, [1, 2]
)
@example(("Conv", (1, 5, 3, 3), (18, 5, 7, 7), {"pads": [6, 6, 6, 6]}), 9, [])
@example(
    ("ConvTranspose", (1, 4, 5, 6), (4, 20, 1, 2), {"strides": [3, 3], "group": 2}), 10, [1, 2]
)
@example(("ConvTranspose", (2, 30, 1, 1), (30, 40, 4, 4), {"dilations": [2, 1]}), 11, [])
@example(
    ("ConvTranspose", (1, 21, 6, 7), (21, 1, 8, 8), {"strides": [4, 4], "group": 21}), 12, [1, 2]
)
@example(("ConvTranspose", (1, 70, 40), (70, 64, 8), {"strides": [4], "pads": [2, 2]}), 13, [])
# Lines whose first and last positions see nothing of some taps: as tiles of one, two and four vectors of
# filters, far apart, alone, and divided.
@example(("Conv", (2, 40, 6, 13), (70, 40, 3, 3), {"pads": [1, 1, 1, 1]}), 17, [1, 2])
@example(("Conv", (1, 40, 4, 45), (12, 40, 3, 3), {"pads": [1, 1, 1, 1]}), 18, [1, 2])
@example(("Conv", (1, 40, 4, 29), (6, 40, 3, 3), {"pads": [0, 2, 1, 1]}), 19, [1, 2])
@example(("Conv", (1, 33, 5, 30), (40, 33, 3, 7), {"pads": [1, 3, 1, 3]}), 20, [])
@example(
    ("Conv", (1, 48, 9, 41), (64, 48, 3, 3), {"strides": [2, 2], "pads": [1, 1, 1, 1]}), 21, [1, 2]
)
@example(
    ("Conv", (1, 48, 9, 19), (64, 48, 3, 3), {"dilations": [2, 3], "pads": [2, 3, 2, 3]}), 22, []
)
@example(("Conv", (1, 36, 3, 4), (20, 36, 3, 3), {"pads": [1, 9, 1, 12]}), 23, [1, 2])
@example(("Conv", (1, 48, 2100), (40, 48, 9), {"pads": [4, 4]}), 24, [1, 2])
@example(("ConvTranspose", (1, 36, 5, 25), (36, 40, 3, 5), {"strides": [2, 2]}), 25, [1, 2])
# Each element has an address, in tiles of all numbers of vectors and rows.
@example(("Conv", (1, 3, 7, 141), (16, 3, 3, 3), {"pads": [1] * 4, "strides": [2, 2]}), 26, [1, 2])
@example(("Conv", (2, 4, 5, 60), (90, 4, 3, 3), {"pads": [1, 0, 1, 0]}), 27, [1, 2])
@example(("Conv", (1, 7, 50), (45, 7, 1), {}), 28, [])
# Two channels of few filters at once, of phases of unlike numbers of taps.
@example(("ConvTranspose", (1, 6, 9, 14), (6, 5, 3, 3), {"strides": [2, 2]}), 14, [1, 2])
def test_sums_of_convolutions_are_within_the_bound_of_float32(case, seed, constants):
    name, x_dims, w_dims, attrs = case
    group = attrs.get("group", 1)
    filters = w_dims[0] if name == "Conv" else w_dims[1] * group
    rng = np.random.default_rng(seed)
    # Magnitudes far apart: a product that is lost or counted twice exceeds the bound.
    x, w, b = (
        (rng.standard_normal(dims) * 2.0 ** rng.integers(-8, 8, dims)).astype(np.float32)
        for dims in (x_dims, w_dims, (filters,))
    )
    node = node_of(name, [x, w, b], constants=constants, **attrs)
    (exact,) = expected(
        node_of(name, [v.astype(np.float64) for v in (x, w, b)], **attrs),
        [v.astype(np.float64) for v in (x, w, b)],
    )
    sizes = [np.abs(v).astype(np.float64) for v in (x, w, b)]
    (most,) = expected(node_of(name, sizes, **attrs), sizes)
    # Sums of n terms in any order, each product rounded at most once: n u / (1 - n u) of the sum of
    # their magnitudes (Higham, Accuracy and Stability of Numerical Algorithms, section 4.2).
    terms = np.prod(w_dims[1:]) if name == "Conv" else x_dims[1] // group * np.prod(w_dims[2:])
    n, u = terms + 2, 2.0**-24
    bound = n * u / (1 - n * u) * most
    for library in LIBRARIES:
        site = site_of(library, node, [v.type for v in node.inputs])
        kernel = native_kernel(site, image_convolution(site))
        for order in ("channels first", "channels innermost", "gaps"):
            given_x, y = (
                laid_out(x, order),
                laid_out(np.full(exact.shape, np.nan, np.float32), order),
            )
            work = np.full(kernel.workspace, 0xA5, np.uint8)
            function, late = kernel.bind([given_x, w, b], [y], work)
            function(*late)
            assert np.all(np.abs(y - exact) <= bound), (library.level, order)


def laid_out(x: np.ndarray, order: str) -> np.ndarray:
    """A copy of ``x`` with this order of dims in memory; ``gaps``: innermost channels that are some
    of those of a wider image."""
    if order == "channels first":
        return x.copy()
    innermost = np.moveaxis(x, 1, -1)
    if order == "gaps":
        wide = np.full((*innermost.shape[:-1], innermost.shape[-1] + 3), np.nan, x.dtype)
        wide[..., 2:-1] = innermost
        return np.moveaxis(wide[..., 2:-1], -1, 1)
    return np.moveaxis(innermost.copy(), -1, 1)
