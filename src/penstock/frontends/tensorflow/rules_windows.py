"""Rules: convolution, pooling, batch normalisation, over images with channels last or first.

ONNX has channels first. Where TensorFlow has them last, a Transpose stands in front and one behind:
views, which cost nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from penstock.frontends.tensorflow.conversion import Conversion, InexpressibleError, NodeError, Rule
from penstock.ir.graph import Value
from penstock.ops.common.shape_rules import all_known
from penstock.ops.registry import TENSORFLOW
from penstock.ops.tensorflow.windows import backward_attrs
from penstock.types import ShapeError

RULES: dict[str, Rule] = {}


class Layout:
    """Where the dims of an image are. ``spatial``: how many are neither batch nor channel."""

    def __init__(self, c: Conversion, spatial: int) -> None:
        self.c = c
        self.spatial = spatial
        name = c.attrs.get("data_format", "")
        self.last = name in ("NHWC", "NDHWC", "")
        if not self.last and name not in ("NCHW", "NCDHW"):
            raise InexpressibleError(f"its data_format is {name!r}")
        rank = spatial + 2
        self.first = [0, rank - 1, *range(1, rank - 1)]  # where channels-first finds its dims
        self.back = [0, *range(2, rank), 1]

    def spatial_of(self, name: str) -> list[int]:
        """The entries of a list with one for each dim, of those dims that windows move along."""
        found = self.c.attrs.get(name)
        if not isinstance(found, list) or len(found) != self.spatial + 2:
            raise NodeError(f"has {name} {found!r}, which is no entry for each dim")
        inner, outer = (found[1:-1], [found[0], found[-1]]) if self.last else (found[2:], found[:2])
        if outer != [1, 1]:
            raise InexpressibleError(f"its {name} {found} move along the batch or the channels")
        return [int(each) for each in inner]

    def explicit(self) -> list[int]:
        """Padding that the node says itself, as ONNX has it."""
        found = self.c.attrs.get("explicit_paddings") or []
        if len(found) != 2 * (self.spatial + 2):
            raise NodeError(f"has explicit_paddings {found}, which are no two for each dim")
        first = 1 if self.last else 2
        pairs = [found[2 * i : 2 * i + 2] for i in range(first, first + self.spatial)]
        return [int(pair[0]) for pair in pairs] + [int(pair[1]) for pair in pairs]

    def padding(self) -> dict[str, Any]:
        """Attributes of ONNX that say how the image is padded."""
        padding = self.c.attrs.get("padding")
        if padding == "EXPLICIT":
            return {"pads": self.explicit()}
        if padding not in ("SAME", "VALID"):
            raise NodeError(f"has padding {padding!r}, which is not SAME, VALID or EXPLICIT")
        return {"auto_pad": "SAME_UPPER" if padding == "SAME" else "VALID"}

    def enter(self, value: Value) -> Value:
        """``value`` with its channels first."""
        if not self.last:
            return value
        return self.c.node("Transpose", [value], {"perm": self.first})

    def leave(
        self, op: str, inputs: Sequence[Value], attrs: Mapping[str, Any], domain: str = ""
    ) -> None:
        """The node's own operation, and then its output with its channels where they were."""
        if not self.last:
            self.c.end(op, inputs, attrs, domain=domain)
            return
        made = self.c.node(op, inputs, attrs, domain=domain)
        self.c.end("Transpose", [made], {"perm": self.back}, outputs=self.c.outputs[:1])


def conv(c: Conversion) -> None:
    layout = Layout(c, 3 if c.op == "Conv3D" else 2)
    n = layout.spatial
    attrs = {
        "strides": layout.spatial_of("strides"),
        "dilations": layout.spatial_of("dilations"),
        "group": _groups(c, layout),
        **layout.padding(),
    }
    weights = c.node("Transpose", [c.inputs[1]], {"perm": [n + 1, n, *range(n)]})
    layout.leave("Conv", [layout.enter(c.inputs[0]), weights], attrs)


def _groups(c: Conversion, layout: Layout) -> int:
    """As many as the filter has fewer channels than the image, if it is known how many that has."""
    image, filters = c.shape(0), c.shape(1)
    if image is None or filters is None or len(image) != layout.spatial + 2:
        return 1
    channels, taken = image[-1 if layout.last else 1], filters[-2]
    if not isinstance(channels, int) or not isinstance(taken, int) or taken < 1:
        return 1
    if channels % taken:
        raise NodeError(f"has an image of {channels} channels, and a filter for {taken}")
    return max(channels // taken, 1)


def depthwise(c: Conversion) -> None:
    """[H, W, C, M], M outputs of each channel, is a convolution in C groups."""
    layout = Layout(c, 2)
    height, width, channels, times = _four(c.static(1, "the filter"), "filter")
    shape = c.known([height, width, 1, channels * times], np.int64)
    weights = c.node("Reshape", [c.inputs[1], shape])
    weights = c.node("Transpose", [weights], {"perm": [3, 2, 0, 1]})
    attrs = {
        "strides": layout.spatial_of("strides"),
        "dilations": layout.spatial_of("dilations"),
        "group": channels,
        **layout.padding(),
    }
    layout.leave("Conv", [layout.enter(c.inputs[0]), weights], attrs)


def _four(shape: tuple[int, ...], what: str) -> tuple[int, int, int, int]:
    if len(shape) != 4:
        raise NodeError(f"has a {what} of shape {shape}, which is not of four dims")
    return shape


def conv_transpose(c: Conversion) -> None:
    """The gradient of a convolution: what it takes for the image's size decides the padding."""
    n = 3 if c.op.startswith("Conv3D") else 2
    layout = Layout(c, n)
    padding = layout.padding()
    attrs: dict[str, Any] = {
        "strides": layout.spatial_of("strides"),
        "dilations": layout.spatial_of("dilations"),
        "padding": c.attrs["padding"],
        "pads": padding.get("pads", []),
    }
    weights = c.node("Transpose", [c.inputs[1]], {"perm": [n + 1, n, *range(n)]})
    inputs = [layout.enter(c.inputs[2]), weights]
    sizes, window = c.elements(0), c.shape(1)
    if sizes is not None and len(sizes) == n + 2:
        sizes = sizes[1:-1] if layout.last else sizes[2:]
    image = None if sizes is None else all_known(sizes)
    if image is not None and window is not None and all_known(window) and len(image) == n:
        try:
            made = backward_attrs(image, all_known(window) or (), attrs)
        except ShapeError as error:
            raise NodeError(str(error)) from error
        layout.leave("ConvTranspose", inputs, made)
        return
    # The dims of the image stand last where channels come first.
    order = c.known(layout.first if layout.last else range(n + 2), np.int64)
    size = c.node("GatherV2", [c.inputs[0], order], {"batch_dims": 0}, domain=TENSORFLOW)
    layout.leave(c.op, [*inputs, size], attrs, domain=TENSORFLOW)


def pool(c: Conversion) -> None:
    layout = Layout(c, 3 if c.op.endswith("3D") else 2)
    attrs = {
        "kernel_shape": layout.spatial_of("ksize"),
        "strides": layout.spatial_of("strides"),
        **layout.padding(),
    }
    name = "MaxPool" if c.op.startswith("Max") else "AveragePool"
    layout.leave(name, [layout.enter(c.inputs[0])], attrs)


def max_pool_v2(c: Conversion) -> None:
    """Window and strides are inputs here."""
    for i, name in ((1, "ksize"), (2, "strides")):
        found = c.integers(i)
        if found is None:
            raise InexpressibleError(f"its {name} are known only during a run")
        c.attrs[name] = found
    pool(c)


def batch_norm(c: Conversion) -> None:
    x, scale, offset, mean, variance = c.inputs
    attrs = {"epsilon": c.attrs["epsilon"]}
    if c.attrs["is_training"]:
        layout = str(c.attrs["data_format"])
        attrs = {**attrs, "data_format": layout, "factor": c.attrs["exponential_avg_factor"]}
        c.end("FusedBatchNorm", attrs=attrs, domain=TENSORFLOW)
        return
    layout_ = Layout(c, 3 if c.attrs["data_format"] in ("NDHWC", "NCDHW") else 2)
    inputs = [layout_.enter(x), scale, offset, mean, variance]
    if layout_.last:
        made = c.node("BatchNormalization", inputs, attrs)
        c.end("Transpose", [made], {"perm": layout_.back}, outputs=c.outputs[:1])
    else:
        c.end("BatchNormalization", inputs, attrs, outputs=c.outputs[:1])
    # What a gradient would read of it: the statistics as they were given.
    for output, value in zip(c.outputs[1:5], (mean, variance, mean, variance), strict=True):
        c.further(output, "Identity", [value])
    if len(c.outputs) > 5:
        c.further(c.outputs[5], "Identity", [c.known(0, np.float32)])


def lrn(c: Conversion) -> None:
    layout = Layout(c, 2)
    size = 2 * c.attrs["depth_radius"] + 1
    attrs = {
        "size": size,
        "bias": c.attrs["bias"],
        "alpha": c.attrs["alpha"] * size,
        "beta": c.attrs["beta"],
    }
    layout.leave("LRN", [layout.enter(c.inputs[0])], attrs)


RULES.update(
    {
        "Conv2D": conv,
        "Conv3D": conv,
        "Conv2DBackpropInput": conv_transpose,
        "Conv3DBackpropInputV2": conv_transpose,
        "DepthwiseConv2dNative": depthwise,
        "AvgPool": pool,
        "AvgPool3D": pool,
        "MaxPool": pool,
        "MaxPool3D": pool,
        "MaxPoolV2": max_pool_v2,
        "FusedBatchNorm": batch_norm,
        "FusedBatchNormV2": batch_norm,
        "FusedBatchNormV3": batch_norm,
        "LRN": lrn,
    }
)
