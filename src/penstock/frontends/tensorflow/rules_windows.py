"""Rules of convolution, pooling and normalisation of images.

ONNX has channels first. Where TensorFlow has them last, the node is put between two Transposes,
which are views and cost nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from penstock.frontends.common.diagnostics import InexpressibleError, NodeError
from penstock.frontends.common.images import (
    channels_first_order,
    emit_final_channels_last,
    to_channels_first,
)
from penstock.frontends.tensorflow.conversion import Conversion, Rule
from penstock.ir.graph import Value
from penstock.ops.common.shape_rules import all_known
from penstock.ops.registry import TENSORFLOW
from penstock.ops.tensorflow.windows import backward_attrs
from penstock.types import FLOAT32, ShapeError

RULES: dict[str, Rule] = {}


class ImageFormat:
    """The order of an image's dims. ``spatial``: the number of dims besides batch and channels."""

    def __init__(self, c: Conversion, spatial: int) -> None:
        self.c = c
        self.spatial = spatial
        name = c.attrs.get("data_format", "")
        self.channels_last = name in ("NHWC", "NDHWC", "")
        if not self.channels_last and name not in ("NCHW", "NCDHW"):
            raise InexpressibleError(f"its data_format is {name!r}; use NHWC or NCHW")
        self.rank = spatial + 2

    def spatial_entries(self, name: str) -> list[int]:
        """The entries for spatial dims of an attribute with an entry for each dim."""
        entries = self.c.attrs.get(name)
        if not isinstance(entries, list) or len(entries) != self.spatial + 2:
            raise NodeError(f"has {name} {entries!r}, which is not an entry for each dim")
        first = 1 if self.channels_last else 2
        inner = entries[first : first + self.spatial]
        outer = entries[:first] + entries[first + self.spatial :]
        if outer != [1, 1]:
            raise InexpressibleError(f"its {name} {entries} move along the batch or the channels")
        return [int(entry) for entry in inner]

    def explicit_pads(self) -> list[int]:
        """The attribute ``explicit_paddings`` as ONNX's ``pads``."""
        paddings = self.c.attrs.get("explicit_paddings") or []
        if len(paddings) != 2 * (self.spatial + 2):
            raise NodeError(f"has explicit_paddings {paddings}, which are not two for each dim")
        first = 1 if self.channels_last else 2
        pairs = [paddings[2 * i : 2 * i + 2] for i in range(first, first + self.spatial)]
        return [int(pair[0]) for pair in pairs] + [int(pair[1]) for pair in pairs]

    def padding(self) -> dict[str, Any]:
        """ONNX's attributes for the padding."""
        padding = self.c.attrs.get("padding")
        if padding == "EXPLICIT":
            return {"pads": self.explicit_pads()}
        if padding not in ("SAME", "VALID"):
            raise NodeError(f"has padding {padding!r}, which is not SAME, VALID or EXPLICIT")
        return {"auto_pad": "SAME_UPPER" if padding == "SAME" else "VALID"}

    def channels_first(self, value: Value) -> Value:
        """``value`` with its channels first."""
        if not self.channels_last:
            return value
        return to_channels_first(self.c, value, self.rank)

    def emit_final(
        self, op: str, inputs: Sequence[Value], attrs: Mapping[str, Any], domain: str = ""
    ) -> None:
        """Emit an operation with channels first, for the node's first output in its own order."""
        if self.channels_last:
            emit_final_channels_last(self.c, op, inputs, attrs, self.rank, domain)
        else:
            self.c.emit_final(op, inputs, attrs, domain=domain, outputs=self.c.outputs[:1])


def conv(c: Conversion) -> None:
    image_format = ImageFormat(c, 3 if c.op == "Conv3D" else 2)
    n = image_format.spatial
    attrs = {
        "strides": image_format.spatial_entries("strides"),
        "dilations": image_format.spatial_entries("dilations"),
        "group": _groups(c, image_format),
        **image_format.padding(),
    }
    weights = c.emit("Transpose", [c.inputs[1]], {"perm": [n + 1, n, *range(n)]})
    image_format.emit_final("Conv", [image_format.channels_first(c.inputs[0]), weights], attrs)


def _groups(c: Conversion, image_format: ImageFormat) -> int:
    """Channels of the image by those of the filter, if both can be inferred; else 1."""
    image, filters = c.shape(0), c.shape(1)
    if image is None or filters is None or len(image) != image_format.spatial + 2:
        return 1
    channels, per_group = image[-1 if image_format.channels_last else 1], filters[-2]
    if not isinstance(channels, int) or not isinstance(per_group, int) or per_group < 1:
        return 1
    if channels % per_group:
        raise NodeError(f"has an image of {channels} channels, and a filter for {per_group}")
    return max(channels // per_group, 1)


def depthwise(c: Conversion) -> None:
    """A filter [H, W, C, M], with M outputs for each channel, is a convolution in C groups."""
    image_format = ImageFormat(c, 2)
    height, width, channels, multiplier = _four(c.static_shape(1, "the filter"), "filter")
    shape = c.constant([height, width, 1, channels * multiplier])
    weights = c.emit("Reshape", [c.inputs[1], shape])
    weights = c.emit("Transpose", [weights], {"perm": [3, 2, 0, 1]})
    attrs = {
        "strides": image_format.spatial_entries("strides"),
        "dilations": image_format.spatial_entries("dilations"),
        "group": channels,
        **image_format.padding(),
    }
    image_format.emit_final("Conv", [image_format.channels_first(c.inputs[0]), weights], attrs)


def _four(shape: tuple[int, ...], role: str) -> tuple[int, int, int, int]:
    if len(shape) != 4:
        raise NodeError(f"has a {role} of shape {shape}, which must have four dims")
    return shape


def conv_transpose(c: Conversion) -> None:
    """The gradient of a convolution. The image's size, an input, determines the padding."""
    n = 3 if c.op.startswith("Conv3D") else 2
    image_format = ImageFormat(c, n)
    padding = image_format.padding()
    attrs: dict[str, Any] = {
        "strides": image_format.spatial_entries("strides"),
        "dilations": image_format.spatial_entries("dilations"),
        "padding": c.attrs["padding"],
        "pads": padding.get("pads", []),
    }
    weights = c.emit("Transpose", [c.inputs[1]], {"perm": [n + 1, n, *range(n)]})
    inputs = [image_format.channels_first(c.inputs[2]), weights]
    sizes, window = c.elements(0), c.shape(1)
    if sizes is not None and len(sizes) == n + 2:
        sizes = sizes[1:-1] if image_format.channels_last else sizes[2:]
    image = None if sizes is None else all_known(sizes)
    if image is not None and window is not None and all_known(window) and len(image) == n:
        try:
            attrs = backward_attrs(image, all_known(window) or (), attrs)
        except ShapeError as error:
            raise NodeError(str(error)) from error
        image_format.emit_final("ConvTranspose", inputs, attrs)
        return
    # With channels first, the spatial dims stand last.
    order = c.constant(channels_first_order(n + 2) if image_format.channels_last else range(n + 2))
    size = c.emit("GatherV2", [c.inputs[0], order], {"batch_dims": 0}, domain=TENSORFLOW)
    image_format.emit_final(c.op, [*inputs, size], attrs, domain=TENSORFLOW)


def pool(c: Conversion) -> None:
    image_format = ImageFormat(c, 3 if c.op.endswith("3D") else 2)
    attrs = {
        "kernel_shape": image_format.spatial_entries("ksize"),
        "strides": image_format.spatial_entries("strides"),
        **image_format.padding(),
    }
    name = "MaxPool" if c.op.startswith("Max") else "AveragePool"
    image_format.emit_final(name, [image_format.channels_first(c.inputs[0])], attrs)


def max_pool_v2(c: Conversion) -> None:
    """Window and strides are inputs."""
    for i, name in ((1, "ksize"), (2, "strides")):
        elements = c.integers(i)
        if elements is None:
            raise InexpressibleError(
                f"its {name} is not a constant; export the model with a constant one"
            )
        c.attrs[name] = elements
    pool(c)


def batch_norm(c: Conversion) -> None:
    x, scale, offset, mean, variance = c.inputs
    attrs = {"epsilon": c.attrs["epsilon"]}
    data_format = c.attrs["data_format"]
    if c.attrs["is_training"]:
        factor = c.attrs["exponential_avg_factor"]
        attrs = {**attrs, "data_format": str(data_format), "factor": factor}
        c.emit_final("FusedBatchNorm", attrs=attrs, domain=TENSORFLOW)
        return
    image_format = ImageFormat(c, 3 if data_format in ("NDHWC", "NCDHW") else 2)
    inputs = [image_format.channels_first(x), scale, offset, mean, variance]
    image_format.emit_final("BatchNormalization", inputs, attrs)
    # Outputs for a gradient: the statistics as they were given.
    for output, value in zip(c.outputs[1:5], (mean, variance, mean, variance), strict=True):
        c.emit_extra_output(output, "Identity", [value])
    if len(c.outputs) > 5:
        c.emit_extra_output(c.outputs[5], "Identity", [c.constant(0, FLOAT32)])


def lrn(c: Conversion) -> None:
    image_format = ImageFormat(c, 2)
    size = 2 * c.attrs["depth_radius"] + 1
    attrs = {
        "size": size,
        "bias": c.attrs["bias"],
        "alpha": c.attrs["alpha"] * size,
        "beta": c.attrs["beta"],
    }
    image_format.emit_final("LRN", [image_format.channels_first(c.inputs[0])], attrs)


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
