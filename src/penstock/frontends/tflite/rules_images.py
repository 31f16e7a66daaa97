"""Rules of operations on images: convolution, pooling, resizing.

TFLite has channels last, ONNX first. Each node is put between two Transposes, which are views: a
layout is an order of dims in memory, and later passes remove the Transposes or move them to where
they cost nothing.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any

import numpy as np

from penstock.core.types import FLOAT32, ShapeError
from penstock.frontends.common.builder import Operand
from penstock.frontends.common.diagnostics import InexpressibleError, NodeError
from penstock.frontends.tflite.conversion import (
    CodeLayer,
    OperatorConversion,
    image_of_codes,
    is_dynamic_range,
    layer_of_codes,
    operator_rule,
)
from penstock.ir.graph import Value
from penstock.ir.op import AttrDict, Attrs
from penstock.ops.common.dtypes import INT8, INT16, UINT8
from penstock.ops.common.shape_rules import all_known
from penstock.ops.registry import TENSORFLOW, TFLITE

_PADDINGS = ("SAME", "VALID")


def _padding(c: OperatorConversion) -> str:
    number = c.option("padding")
    if number not in (0, 1):
        raise NodeError(f"has padding number {number}; export the model again")
    return _PADDINGS[number]


def _window_attrs(c: OperatorConversion, rank: int, *, dilations: bool = True) -> AttrDict:
    """Return padding, strides and dilations as ONNX's attributes."""
    dims = "dhw" if rank == 5 else "hw"
    same = _padding(c) == "SAME"
    attrs: dict[str, Any] = {"auto_pad": "SAME_UPPER" if same else "VALID"}
    attrs["strides"] = [c.option(f"stride_{dim}") for dim in dims]
    if dilations:
        attrs["dilations"] = [c.option(f"dilation_{dim}_factor") for dim in dims]
    for name in ("strides", "dilations"):
        if min(attrs.get(name, [1])) < 1:
            raise NodeError(f"has {name} {attrs[name]}, which must be positive")
    return attrs


def _convolve(c: OperatorConversion, weights: Value, groups: int, rank: int) -> None:
    attrs = {**_window_attrs(c, rank), "group": groups}
    x, _, bias = c.take(2, 3)
    if c.codes is not None:
        inputs = c.codes.convolved(c.channels_first(x), weights, bias)
        c.emit_image("QLinearConv", inputs, {**attrs, **c.codes.attrs})
        return
    image, activation = c.channels_first(x, rank), c.option("fused_activation_function")
    given = c.quantizations[1]
    if given is not None and weights.dtype == INT8:
        codes, scale, zero = c.emit_several("DynamicRangeCodes", [image], count=3, domain=TFLITE)
        sums = c.cast(c.emit("ConvInteger", [codes, weights, zero], **attrs), "float32")
        by = c.emit("Mul", [scale, c.constant(given.scale.reshape(-1, 1, 1), FLOAT32)])
        if bias is None:
            c.emit_image("Mul", [sums, by], {}, activation=activation)
            return
        bias = c.emit("Reshape", [bias, [-1, 1, 1]])
        c.emit_image("Add", [c.emit("Mul", [sums, by]), bias], {}, activation=activation)
        return
    c.emit_image("Conv", [image, weights, bias], attrs, rank=rank, activation=activation)


def _channels(c: OperatorConversion, rank: int) -> int | None:
    """Return the channels of the image, or None if they are not known."""
    declared = c.declared_shape(0)
    if len(declared) == rank and declared[-1] > 0:
        return declared[-1]
    shape = c.shape(0)
    if shape is not None and len(shape) != rank:
        raise NodeError(f"has an image of shape {shape}, which must have {rank} dims")
    channels = None if shape is None else shape[-1]
    return channels if isinstance(channels, int) else None


def _is_one_group(c: OperatorConversion) -> bool:
    """Whether images of a convolution of dynamic range become codes: those in one group do."""
    if not is_dynamic_range(c):  # types need not be inferred for others
        return False
    x, w = c.shape(0), c.shape(1)
    is_known = x is not None and w is not None and len(x) == len(w) == 4
    return is_known and x[3] == w[3]  # type: ignore[index]


@operator_rule("CONV_2D", codes=layer_of_codes, integers=_is_one_group)
def conv(c: OperatorConversion) -> None:
    """Weights [outputs, height, width, channels of a group]."""
    weights = c.static_shape(1, "the weights") if c.shape(1) is not None else (0, 0, 0, 0)
    if len(weights) != 4:
        raise NodeError(f"has weights of shape {weights}, which must have four dims")
    channels = _channels(c, 4) or weights[-1]
    if weights[-1] < 1 or channels % weights[-1]:
        raise NodeError(f"has an image of {channels} channels, and weights for {weights[-1]}")
    order = c.transposed(c.take(2, 3)[1], [0, 3, 1, 2])
    _convolve(c, order, channels // weights[-1], 4)


@operator_rule("DEPTHWISE_CONV_2D", codes=layer_of_codes)
def depthwise(c: OperatorConversion) -> None:
    """Weights [1, height, width, outputs], with as many outputs for each channel."""
    weights = c.static_shape(1, "the weights")
    if len(weights) != 4 or weights[0] != 1:
        raise NodeError(f"has weights of shape {weights}, not [1, height, width, outputs]")
    channels = _channels(c, 4) or weights[-1] // max(c.option("depth_multiplier"), 1)
    if channels < 1 or weights[-1] % channels:
        raise NodeError(f"has {channels} channels, and weights for {weights[-1]} outputs")
    order = c.transposed(c.take(2, 3)[1], [3, 0, 1, 2])
    _convolve(c, order, channels, 4)


@operator_rule("CONV_3D")
def conv_3d(c: OperatorConversion) -> None:
    """Weights [depth, height, width, channels, outputs]."""
    _convolve(c, c.transposed(c.take(2, 3)[1], [4, 3, 0, 1, 2]), 1, 5)


def _emit_code_transpose(
    c: OperatorConversion, sizes: Sequence[int], image: Value, kernel: Value, attrs: Attrs
) -> None:
    """Emit the inverse of a convolution of 8-bit codes: pixels of the result whose places have the
    same remainders by the strides are filters of one convolution, which lie apart in the result.
    ``sizes``: the height, width and channels of the result; ``attrs``: those of the
    ConvTranspose."""
    dims = all_known((c.shape(2) or ())[1:])
    assert dims is not None  # by _transposed_codes
    (down, right), pads, codes = attrs["strides"], attrs["pads"], c.codes
    given = c.quantizations[1]
    assert codes is not None and given is not None and kernel.const is not None
    weights, taps = _apart(kernel.const, given.zero_points, (down, right))
    before, after, starts, made = [], [], [], []
    for axis, (step, pad) in enumerate(zip((down, right), pads, strict=False)):
        first, last = pad // step, (pad + sizes[axis] - 1) // step
        before.append(taps[axis] - 1 - first)
        after.append(last - dims[axis] + 1)
        starts.append(pad - first * step)
        made.append(last - first + 1)

    def of_each(value: Operand) -> Operand:
        """A constant of each filter, or of all, for the filters of each remainder."""
        if not isinstance(value, Value) or value.const is None or value.const.ndim == 0:
            return value
        return c.constant(np.tile(value.const, down * right), value.const.dtype)

    bias = c.inputs[3] if len(c.inputs) > 3 else None
    layer = codes._replace(w=[*map(of_each, codes.w)], y=[*map(of_each, codes.y)])
    inputs = layer.convolved(
        c.channels_first(image), c.constant(weights, weights.dtype), of_each(bias)
    )
    value = c.emit("QLinearConv", inputs, {**codes.attrs, "pads": [*before, *after]})
    value = c.transposed(value, [0, 2, 3, 1])
    # The batch, which may be unknown, stays as it is: its dim is given as 0.
    value = c.emit("Reshape", [value, c.constant([0, *made, down, right, sizes[2]])])
    value = c.emit("Transpose", [value], perm=[0, 1, 3, 2, 4, 5])
    whole = [0, made[0] * down, made[1] * right, sizes[2]]
    value = c.emit("Reshape", [value, c.constant(whole)])
    ends = [start + size for start, size in zip(starts, sizes[:2], strict=True)]
    c.emit_final("Slice", [value, *map(c.constant, (starts, ends, [1, 2]))])


def _apart(
    kernel: np.ndarray, zeros: Sequence[int], strides: tuple[int, int]
) -> tuple[np.ndarray, list[int]]:
    """Return the weights [remainders * outputs, channels, height, width] of the convolution that
    computes the pixels of each pair of remainders, and its height and width. Remainders that have
    fewer taps of the ``kernel`` [outputs, height, width, channels] than others get ``zeros``, one
    for all or for each output."""
    outputs, *sizes, channels = kernel.shape
    taps = [-(-size // step) for size, step in zip(sizes, strides, strict=True)]
    padded = np.empty((outputs, *np.multiply(taps, strides), channels), kernel.dtype)
    padded[:] = np.reshape(zeros, (-1, 1, 1, 1))
    padded[:, : sizes[0], : sizes[1]] = kernel
    parts = padded.reshape(outputs, taps[0], strides[0], taps[1], strides[1], channels)
    turned = parts[:, ::-1, :, ::-1].transpose(2, 4, 0, 5, 1, 3)
    return np.ascontiguousarray(turned.reshape(-1, channels, *taps)), taps


def _transposed_codes(c: OperatorConversion) -> CodeLayer | None:
    """Return the codes' parameters of a TRANSPOSE_CONV whose shapes, but for the batch, are
    known."""
    image, x, w = c.elements(0), c.shape(2), all_known(c.shape(1) or (None,))
    known = [dims is not None and all_known(dims[1:]) is not None for dims in (image, x)]
    if not all(known) or w is None or len(w) != 4 or image is None or len(image) != 4:
        return None
    least = min(c.option("stride_h"), c.option("stride_w"), min(w))
    return layer_of_codes(c, (2, 1, 3)) if least > 0 else None


@operator_rule("CONV_3D_TRANSPOSE")
@operator_rule("TRANSPOSE_CONV", codes=_transposed_codes)
def conv_transpose(c: OperatorConversion) -> None:
    """The inverse of a convolution. The image's shape is an input, and determines the padding.
    Weights [outputs, height, width, channels], or [depth, height, width, outputs, channels]."""
    sizes, kernel, x, bias = c.take(3, 4)
    flat = c.op == "TRANSPOSE_CONV"
    rank = 4 if flat else 5
    attrs = _window_attrs(c, rank, dilations=not flat)
    attrs = {"strides": attrs["strides"], "dilations": attrs.get("dilations", [1, 1])}
    attrs |= {"padding": _padding(c), "pads": []}
    weights = c.transposed(kernel, [3, 0, 1, 2] if flat else [4, 3, 0, 1, 2])
    inputs = [c.channels_first(x, rank), weights]
    op, domain = f"Conv{rank - 2}DBackpropInput" + ("" if flat else "V2"), TENSORFLOW
    image, shape = c.elements(0), all_known(c.shape(1))
    # The batch, which is the input's, may be unknown.
    known = all_known(image[1:]) if image is not None and len(image) == rank else None
    if image is not None and known is not None and shape is not None:
        from penstock.ops.tensorflow.windows import backward_attrs  # few models need it

        window = shape[1:3] if flat else shape[:3]
        try:
            given = c.shape(2) or (None,) * rank
            batches = {dim for dim in (given[0], image[0]) if isinstance(dim, int)}
            if len(batches) > 1 or shape[0 if flat else 3] != known[-1]:
                raise ShapeError(
                    f"its output_shape is {list(image)}, but its input {list(given)} and its "
                    f"weights {list(shape)} make another batch or other channels"
                )
            attrs = backward_attrs(known[:-1], window, attrs, given[1:-1])
        except ShapeError as error:
            raise NodeError(f"cannot be: {error}") from error
        if c.codes is not None:
            _emit_code_transpose(c, known, x, kernel, attrs)
            return
        op, domain = "ConvTranspose", ""
    elif c.codes is not None:
        c.apply_to_reals(conv_transpose)
        return
    else:
        order = c.constant([0, rank - 1, *range(1, rank - 1)])
        # The shape is that of an image with channels last, as everywhere in the file.
        inputs.append(c.emit("Gather", [sizes, order], axis=0))
    activation = c.option("fused_activation_function")
    if bias is None:
        c.emit_image(op, inputs, attrs, rank=rank, domain=domain, activation=activation)
        return
    if op == "ConvTranspose":
        inputs.append(bias)
        c.emit_image(op, inputs, attrs, rank=rank, activation=activation)
        return
    value = c.emit(op, inputs, attrs, domain=domain)
    value = c.transposed(value, [0, *range(2, rank), 1])
    c.emit_activated("Add", [value, bias])


@operator_rule("CUSTOM:Convolution2DTransposeBias")
def transposed_with_bias(c: OperatorConversion) -> None:
    """MediaPipe's operator: the image's size follows from the padding. Its options are a structure
    of the padding, which is 1 or 2, and the strides of width and height."""
    x, kernel, bias = c.take(3)
    options = c.context.custom_options(c.operator)
    if len(options) < 12:
        raise NodeError(f"has options of {len(options)} bytes")
    padding, *strides = struct.unpack_from("<3i", options)
    if padding not in (1, 2) or min(strides) < 1:
        raise NodeError(f"has padding {padding} and strides {strides}")
    attrs = {"strides": strides[::-1], "auto_pad": "SAME_UPPER" if padding == 1 else "VALID"}
    weights = c.transposed(kernel, [3, 0, 1, 2])
    c.emit_image("ConvTranspose", [c.channels_first(x), weights, bias], attrs)


@operator_rule("AVERAGE_POOL_2D", codes=image_of_codes)
@operator_rule("MAX_POOL_2D", "L2_POOL_2D")
def pool(c: OperatorConversion) -> None:
    (x,) = c.take(1)
    attrs = _window_attrs(c, 4, dilations=False)
    attrs["kernel_shape"] = [c.option("filter_height"), c.option("filter_width")]
    if min(attrs["kernel_shape"]) < 1:
        raise NodeError(f"has a window of {attrs['kernel_shape']}, which must be positive")
    activation = c.option("fused_activation_function")
    if c.codes is not None and not c.moved_as_integers:
        c.apply_to_reals(pool)
        return
    if c.codes is not None:
        # Means of the codes themselves, exact in float32. LiteRT's kernel rounds ties away from 0:
        # the scale is below 1 by less than the distance of other means of few codes from a tie.
        dtype, zero = c.dtype(0) or INT8, c.like(0, x)
        mean = c.emit("DequantizeLinear", [c.channels_first(x), c.constant(1, FLOAT32), zero])
        mean = c.emit("AveragePool", [mean], attrs)
        inputs, limits = [mean, c.constant(1 - 2**-22, FLOAT32), zero], c.codes.limits
        if limits == [np.iinfo(dtype).min, np.iinfo(dtype).max]:
            c.emit_image("QuantizeLinear", inputs, {})
            return
        bounds = [c.constant(limit, dtype) for limit in limits]
        c.emit_image("Clip", [c.emit("QuantizeLinear", inputs), *bounds], {})
        return
    if c.op != "L2_POOL_2D":
        op = "MaxPool" if c.op == "MAX_POOL_2D" else "AveragePool"
        c.emit_image(op, [c.channels_first(x)], attrs, activation=activation)
        return
    squares = c.channels_first(c.emit("Mul", [x, x]))
    mean = c.emit("AveragePool", [squares], attrs)
    c.emit_image("Sqrt", [mean], {}, activation=activation)


@operator_rule("LOCAL_RESPONSE_NORMALIZATION")
def lrn(c: OperatorConversion) -> None:
    # ONNX divides alpha by the size of the window, TFLite does not.
    size = 2 * c.option("radius") + 1
    attrs = {"size": size, "bias": c.option("bias"), "beta": c.option("beta")}
    attrs["alpha"] = c.option("alpha") * size
    c.emit_image("LRN", [c.channels_first(c.take(1)[0])], attrs)


def _is_bilinear_of_codes(c: OperatorConversion) -> bool:
    """Whether codes of 8 or 16 bits are interpolated with an unchanged scale."""
    given, (wanted,) = c.quantizations[0], c.output_quantizations
    if c.op != "RESIZE_BILINEAR" or c.dtype(0) not in (INT8, UINT8, INT16) or given is None:
        return False
    same = wanted is not None and np.array_equal(given.scale, wanted.scale)
    return same and wanted is not None and [*given.zero_points] == [*wanted.zero_points]


@operator_rule("RESIZE_NEAREST_NEIGHBOR", moves=True)
@operator_rule("RESIZE_BILINEAR", integers=_is_bilinear_of_codes)
def resize(c: OperatorConversion) -> None:
    """For the nearest element, coordinates are rounded down, or to the nearest with centres or
    corners aligned. Codes are interpolated in integers, and rounded away from zero."""
    x, _ = c.take(2)
    coordinates = "half_pixel" if c.option("half_pixel_centers") else "asymmetric"
    if c.option("align_corners"):
        if coordinates == "half_pixel":
            raise InexpressibleError("it aligns both corners and centres")
        coordinates = "align_corners"
    attrs = {"axes": [1, 2], "mode": "linear", "coordinate_transformation_mode": coordinates}
    if c.op == "RESIZE_NEAREST_NEIGHBOR":
        rounding = "floor" if coordinates == "asymmetric" else "round_prefer_ceil"
        attrs |= {"mode": "nearest", "nearest_mode": rounding}
    dtype = c.dtype(0)
    if dtype is not None and _is_bilinear_of_codes(c):
        # LiteRT, too, computes positions of unsigned codes in real numbers.
        fixed: AttrDict = {**attrs, "fraction_bits": 0 if dtype == UINT8 else 10}
        c.emit_final("IntegerResize", [x, None, None, c.vector(1)], fixed, domain=TFLITE)
    elif attrs["mode"] == "linear" and dtype is not None and dtype.kind in "iu":
        real = c.emit("Resize", [c.cast(x, "float32"), None, None, c.vector(1)], attrs)
        c.cast_final(c.emit("Round", [real]), dtype)
    else:
        c.emit_final("Resize", [x, None, None, c.vector(1)], attrs)
