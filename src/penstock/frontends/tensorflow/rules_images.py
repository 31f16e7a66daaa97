"""Rules of operations on images: convolution, pooling, normalization, resizing, selection of boxes.

ONNX has channels first. If TensorFlow has them last, the node is put between two Transposes, which
are views and cost nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from penstock.core.types import FLOAT32, Shape, ShapeError
from penstock.frontends.common.diagnostics import InexpressibleError, NodeError
from penstock.frontends.tensorflow.conversion import Conversion, rule
from penstock.ir.graph import Value
from penstock.ir.op import AttrDict, Attrs
from penstock.ops.common.shape_rules import all_known, element_number
from penstock.ops.registry import TENSORFLOW
from penstock.ops.tensorflow.windows import backward_attrs


class ImageFormat:
    """The order of an image's dims. ``spatial``: the number of dims besides batch and channels."""

    def __init__(self, c: Conversion, spatial: int) -> None:
        name = c.attrs.get("data_format", "")
        if name not in ("NHWC", "NDHWC", "", "NCHW", "NCDHW"):
            raise InexpressibleError(f"its data_format is {name!r}; use NHWC or NCHW")
        self.c = c
        self.rank = spatial + 2
        self.channels_last = not name.startswith("NC")
        self.axes = range(1, spatial + 1) if self.channels_last else range(2, spatial + 2)

    def spatial_entries(self, name: str) -> list[int]:
        """Return the entries for spatial dims of an attribute with an entry for each dim."""
        entries = self.c.attrs.get(name)
        if not isinstance(entries, list) or len(entries) != self.rank:
            raise NodeError(f"has {name} {entries!r}, which is not an entry for each dim")
        if any(entry != 1 for i, entry in enumerate(entries) if i not in self.axes):
            raise InexpressibleError(f"its {name} {entries} move along the batch or the channels")
        return [int(entries[i]) for i in self.axes]

    def padding(self) -> AttrDict:
        """Return ONNX's attributes for the padding."""
        padding = self.c.attrs.get("padding")
        if padding == "EXPLICIT":
            paddings = self.c.attrs.get("explicit_paddings") or []
            if len(paddings) != 2 * self.rank:
                raise NodeError(f"has explicit_paddings {paddings}, which are not two for each dim")
            return {"pads": [int(paddings[2 * i + end]) for end in (0, 1) for i in self.axes]}
        if padding not in ("SAME", "VALID"):
            raise NodeError(f"has padding {padding!r}, which is not SAME, VALID or EXPLICIT")
        # TensorFlow pads an odd number of elements with one more at the end.
        return {"auto_pad": "SAME_UPPER" if padding == "SAME" else "VALID"}

    def conv_attrs(self) -> AttrDict:
        entries = {name: self.spatial_entries(name) for name in ("strides", "dilations")}
        return {**entries, **self.padding()}

    def channels_first_order(self) -> list[int]:
        """The axes of the image in the order [N, C, ...]."""
        return [0, self.rank - 1, *self.axes] if self.channels_last else list(range(self.rank))

    def channels_first(self, value: Value) -> Value:
        """Return ``value`` with its channels first."""
        if not self.channels_last:
            return value
        return self.c.emit("Transpose", [value], {"perm": self.channels_first_order()})

    def channels_last_of(self, value: Value) -> Value:
        """Return ``value`` with its channels last."""
        if self.channels_last:
            return value
        return self.c.emit("Transpose", [value], {"perm": [0, *range(2, self.rank), 1]})

    def emit_final_channels_last(self, op: str, inputs: Sequence[Value], attrs: Attrs) -> None:
        """Emit an operation of TensorFlow with channels last, for the node's only output."""
        if self.channels_last:
            self.c.emit_final(op, inputs, attrs, domain=TENSORFLOW)
            return
        result = self.c.emit(op, inputs, attrs, domain=TENSORFLOW)
        self.c.emit_final(
            "Transpose", [result], {"perm": [0, self.rank - 1, *range(1, self.rank - 1)]}
        )

    def emit_final(self, op: str, inputs: Sequence[Value], attrs: Attrs, domain: str = "") -> None:
        """Emit an operation with channels first, for the node's first output in its own order."""
        outputs = self.c.outputs[:1]
        if self.channels_last:
            result = self.c.emit(op, inputs, attrs, domain=domain)
            op, inputs, domain = "Transpose", [result], ""
            attrs = {"perm": [0, *range(2, self.rank), 1]}
        self.c.emit_final(op, inputs, attrs, domain=domain, outputs=outputs)


@rule("Conv2D", "Conv3D")
def conv(c: Conversion) -> None:
    n = 3 if c.op == "Conv3D" else 2
    image_format = ImageFormat(c, n)
    attrs = {**image_format.conv_attrs(), "group": _groups(c, image_format, c.shape(0))}
    # TensorFlow's filters are [H, W, I, O], those of ONNX [O, I, H, W].
    weights = c.emit("Transpose", [c.inputs[1]], {"perm": [n + 1, n, *range(n)]})
    image_format.emit_final("Conv", [image_format.channels_first(c.inputs[0]), weights], attrs)


def _groups(c: Conversion, image_format: ImageFormat, image: Shape | None) -> int:
    """Return the image's channels divided by the filter's, or 1 if they cannot be inferred."""
    filters = c.shape(1)
    if image is None or filters is None or len(image) != image_format.rank:
        return 1
    channels, per_group = image[-1 if image_format.channels_last else 1], filters[-2]
    if not isinstance(channels, int) or not isinstance(per_group, int) or per_group < 1:
        return 1
    if channels % per_group:
        raise NodeError(f"has an image of {channels} channels, and a filter for {per_group}")
    return max(channels // per_group, 1)


@rule("DepthwiseConv2dNative")
def depthwise(c: Conversion) -> None:
    """A filter [H, W, C, M], with M outputs for each channel, is a convolution in C groups."""
    image_format = ImageFormat(c, 2)
    attrs = image_format.conv_attrs()
    if all_known(c.shape(1)) is None:  # such as that of a filter repeated for each channel
        inputs = [image_format.channels_first(c.inputs[0]), c.inputs[1]]
        image_format.emit_final(c.op, inputs, attrs, domain=TENSORFLOW)
        return
    weights, channels = _depthwise_weights(c)
    attrs["group"] = channels
    image_format.emit_final("Conv", [image_format.channels_first(c.inputs[0]), weights], attrs)


def _depthwise_weights(c: Conversion) -> tuple[Value, int]:
    """Return a filter [H, W, C, M] as weights [C * M, 1, H, W] of C groups, and C."""
    shape = c.static_shape(1, "the filter")
    if len(shape) != 4:
        raise NodeError(f"has a filter of shape {shape}, which must have four dims")
    height, width, channels, multiplier = shape
    flat = c.constant([height, width, 1, channels * multiplier])
    weights = c.emit("Reshape", [c.inputs[1], flat])
    return c.emit("Transpose", [weights], {"perm": [3, 2, 0, 1]}), channels


@rule("Conv2DBackpropInput", "Conv3DBackpropInputV2", "DepthwiseConv2dNativeBackpropInput")
def conv_transpose(c: Conversion) -> None:
    """The gradient of a convolution. The image's size, an input, determines the padding."""
    n = 3 if c.op.startswith("Conv3D") else 2
    image_format = ImageFormat(c, n)
    attrs = image_format.conv_attrs()
    attrs = {
        "strides": attrs["strides"],
        "dilations": attrs["dilations"],
        "padding": c.attrs["padding"],
        "pads": attrs.get("pads", []),
    }
    sizes, window = c.elements(0), c.shape(1)
    if c.op.startswith("Depthwise"):
        weights, groups = _depthwise_weights(c)
    else:
        # The output of the forward convolution is the input of this one: its O are ONNX's C.
        weights = c.emit("Transpose", [c.inputs[1]], {"perm": [n + 1, n, *range(n)]})
        groups = _groups(c, image_format, None if sizes is None else tuple(sizes))
    inputs = [image_format.channels_first(c.inputs[2]), weights]
    if sizes is not None and len(sizes) == n + 2:
        sizes = [sizes[i] for i in image_format.axes]
    image = None if sizes is None else all_known(sizes)
    if image is not None and window is not None and all_known(window) and len(image) == n:
        try:
            given = [dim for i, dim in enumerate(c.shape(2) or ()) if i in image_format.axes]
            attrs = backward_attrs(image, all_known(window) or (), attrs, given)
        except ShapeError as error:
            raise NodeError(str(error)) from error
        image_format.emit_final("ConvTranspose", inputs, {**attrs, "group": groups})
        return
    # With channels first, the spatial dims stand last.
    order = c.constant(image_format.channels_first_order())
    size = c.emit("GatherV2", [c.inputs[0], order], {"batch_dims": 0}, domain=TENSORFLOW)
    op = "Conv3DBackpropInputV2" if n == 3 else "Conv2DBackpropInput"
    image_format.emit_final(op, [*inputs, size], attrs, domain=TENSORFLOW)


_FILTER_GRADIENTS = (
    *("Conv2DBackpropFilter", "Conv3DBackpropFilterV2", "DepthwiseConv2dNativeBackpropFilter"),
)


@rule(*_FILTER_GRADIENTS)
def conv_filter_gradient(c: Conversion) -> None:
    image_format = ImageFormat(c, 3 if c.op.startswith("Conv3D") else 2)
    attrs = {**image_format.conv_attrs(), "depthwise": c.op.startswith("Depthwise")}
    x, sizes, dy = c.inputs
    inputs = [image_format.channels_last_of(x), sizes, image_format.channels_last_of(dy)]
    c.emit_final("ConvBackpropFilter", inputs, attrs, domain=TENSORFLOW)


def _pool_attrs(image_format: ImageFormat) -> AttrDict:
    return {
        "kernel_shape": image_format.spatial_entries("ksize"),
        "strides": image_format.spatial_entries("strides"),
        **image_format.padding(),
    }


@rule("AvgPool", "AvgPool3D", "MaxPool", "MaxPool3D")
def pool(c: Conversion) -> None:
    image_format = ImageFormat(c, 3 if c.op.endswith("3D") else 2)
    attrs = _pool_attrs(image_format)
    name = "MaxPool" if c.op.startswith("Max") else "AveragePool"
    image_format.emit_final(name, [image_format.channels_first(c.inputs[0])], attrs)


@rule("MaxPoolV2")
def max_pool_v2(c: Conversion) -> None:
    """Window and strides are inputs."""
    for i, name in ((1, "ksize"), (2, "strides")):
        c.attrs[name] = c.constant_integers(i, name)
    pool(c)


@rule("MaxPoolWithArgmax")
def max_pool_with_argmax(c: Conversion) -> None:
    """ONNX counts places with the channels first, TensorFlow with the channels last."""
    image_format = ImageFormat(c, 2)
    known = (c.shape(0) or (None, None))[1:]
    dims = all_known(known)
    if dims is None or len(dims) != 3 or not image_format.channels_last:
        raise InexpressibleError("the dims of its image are unknown; export the model with them")
    area, channels = dims[0] * dims[1], dims[2]
    x = image_format.channels_first(c.inputs[0])
    pooled, places = c.emit_several("MaxPool", [x], _pool_attrs(image_format), count=2)
    plane = c.emit("Div", [places, c.constant(area)])
    channel = c.emit("Mod", [plane, c.constant(channels)])
    inside = c.emit("Mul", [c.emit("Mod", [places, c.constant(area)]), c.constant(channels)])
    found = c.emit("Add", [inside, channel])
    if c.attrs["include_batch_in_index"]:
        image = c.emit("Div", [plane, c.constant(channels)])
        found = c.emit("Add", [found, c.emit("Mul", [image, c.constant(area * channels)])])
    last = c.emit("Transpose", [found], {"perm": [0, 2, 3, 1]})
    c.emit_final("Transpose", [pooled], {"perm": [0, 2, 3, 1]}, outputs=c.outputs[:1])
    to = {"to": element_number(c.attrs["Targmax"])}
    c.emit_extra_output(c.outputs[1], "Cast", [last], to)


@rule("MaxPoolGrad", "MaxPool3DGrad", "AvgPoolGrad", "AvgPool3DGrad")
def pool_gradient(c: Conversion) -> None:
    image_format = ImageFormat(c, 3 if "3D" in c.op else 2)
    *first, dy = c.inputs
    if c.op.startswith("Avg"):  # the size of the image, with its dims in the image's own order
        order = [0, *image_format.axes, image_format.rank - 1 if image_format.channels_last else 1]
        attrs = {"batch_dims": 0}
        first = [c.emit("GatherV2", [*first, c.constant(order)], attrs, domain=TENSORFLOW)]
    else:
        first = [image_format.channels_last_of(value) for value in first]
    name = "MaxPoolGrad" if c.op.startswith("Max") else "AvgPoolGrad"
    inputs = [*first, image_format.channels_last_of(dy)]
    image_format.emit_final_channels_last(name, inputs, _pool_attrs(image_format))


@rule("FusedBatchNormGrad", "FusedBatchNormGradV2", "FusedBatchNormGradV3")
def batch_norm_gradient(c: Conversion) -> None:
    attrs = {"epsilon": c.attrs["epsilon"], "training": c.attrs["is_training"]}
    attrs["data_format"] = c.attrs["data_format"]
    c.emit_final("FusedBatchNormGrad", c.inputs[:5], attrs, domain=TENSORFLOW)


@rule("FusedBatchNorm", "FusedBatchNormV2", "FusedBatchNormV3")
def batch_norm(c: Conversion) -> None:
    x, *statistics = c.inputs
    attrs = {"epsilon": c.attrs["epsilon"]}
    data_format = c.attrs["data_format"]
    if c.attrs["is_training"]:
        factor = c.attrs["exponential_avg_factor"]
        attrs = {**attrs, "data_format": str(data_format), "factor": factor}
        c.emit_final("FusedBatchNorm", attrs=attrs, domain=TENSORFLOW)
        return
    image_format = ImageFormat(c, 3 if data_format in ("NDHWC", "NCDHW") else 2)
    inputs = [image_format.channels_first(x), *statistics]
    image_format.emit_final("BatchNormalization", inputs, attrs)
    # Outputs for a gradient: the given mean and variance.
    for output, value in zip(c.outputs[1:5], 2 * statistics[2:], strict=True):
        c.emit_extra_output(output, "Identity", [value])
    if len(c.outputs) > 5:
        c.emit_extra_output(c.outputs[5], "Identity", [c.constant(0, FLOAT32)])


@rule("LRN")
def lrn(c: Conversion) -> None:
    image_format = ImageFormat(c, 2)
    # ONNX divides alpha by the size of the window, TensorFlow does not.
    size = 2 * c.attrs["depth_radius"] + 1
    attrs = {
        "size": size,
        "bias": c.attrs["bias"],
        "alpha": c.attrs["alpha"] * size,
        "beta": c.attrs["beta"],
    }
    image_format.emit_final("LRN", [image_format.channels_first(c.inputs[0])], attrs)


@rule("ResizeBilinear", "ResizeNearestNeighbor")
def resize(c: Conversion) -> None:
    """Bilinear interpolation has a float32 result for images of any element type. For the nearest
    element, coordinates are rounded down, or to the nearest with centres or corners aligned."""
    image = c.inputs[0]
    coordinates = "half_pixel" if c.attrs["half_pixel_centers"] else "asymmetric"
    if c.attrs["align_corners"]:
        coordinates = "align_corners"
    attrs = {"axes": [1, 2], "mode": "linear", "coordinate_transformation_mode": coordinates}
    if c.op == "ResizeNearestNeighbor":
        rounding = "floor" if coordinates == "asymmetric" else "round_prefer_ceil"
        attrs |= {"mode": "nearest", "nearest_mode": rounding}
    elif c.dtype(0) != np.float32:
        image = c.cast(image, "float32")
    c.emit_final("Resize", [image, None, None, c.vector(1)], attrs)


@rule("ImageProjectiveTransformV2", "ImageProjectiveTransformV3")
def image_projective_transform(c: Conversion) -> None:
    """V2 fills with zeros."""
    inputs = c.inputs if len(c.inputs) == 4 else [*c.inputs, c.constant(0.0, FLOAT32)]
    attrs = {name: c.attrs[name] for name in ("interpolation", "fill_mode")}
    c.emit_final("ImageProjectiveTransform", inputs, attrs, domain=TENSORFLOW)


@rule("AdjustContrastv2")
def adjust_contrast(c: Conversion) -> None:
    """Away from the mean of each channel of each image."""
    image, factor = c.inputs
    if (rank := c.rank(0)) is not None and rank < 3:
        raise NodeError(f"has an image of rank {rank}, which must be 3 at least")
    scalar = c.emit("Reshape", [factor, []])
    mean = c.emit("ReduceMean", [image, [-3, -2]], {"keepdims": 1})
    away = c.emit("Mul", [c.emit("Sub", [image, mean]), scalar])
    c.emit_final("Add", [away, mean])


@rule(*(f"NonMaxSuppression{version}" for version in ("", "V2", "V3", "V4", "V5")))
def suppression(c: Conversion) -> None:
    """All versions except the combined one."""
    inputs = list(c.inputs)
    if c.op == "NonMaxSuppression":  # its threshold is an attribute
        inputs.append(c.constant(c.attrs.get("iou_threshold", 0.5), FLOAT32))
    if len(inputs) == 4:
        inputs.append(c.constant(-np.inf, FLOAT32))
    padded = c.attrs.get("pad_to_max_output_size", False)
    attrs = {"pad_to_max_output_size": padded, "outputs": len(c.outputs)}
    c.emit_final("NonMaxSuppression", inputs, attrs, domain=TENSORFLOW)


# Files.


@rule("DecodeJpeg")
def decode_jpeg(c: Conversion) -> None:
    """TensorFlow takes ``dct_method`` for a hint. Pillow has the accurate method."""
    if not c.attrs["fancy_upscaling"] or c.attrs["ratio"] not in (1, 2, 4, 8):
        raise InexpressibleError("only fancy_upscaling, and a ratio of 1, 2, 4 or 8, are available")
    if c.attrs["try_recover_truncated"] or c.attrs["acceptable_fraction"] != 1:
        raise InexpressibleError("truncated files are not decoded")
    c.emit_same_op({"channels", "ratio"})


@rule("DecodePng", "DecodeImage")
def decode_file(c: Conversion) -> None:
    if c.attrs["dtype"] == "uint16":
        raise InexpressibleError("no files of 16 bits are decoded; convert them to 8 bits")
    c.emit_same_op({"channels", "dtype", "expand_animations"} & c.attrs.keys())
