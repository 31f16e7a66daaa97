"""Random convolutions, pooling, resizing and regions."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from penstock.ir.graph import Node
from penstock.ops.internal.fused import fused
from penstock.ops.onnx.convolution import conv_shape
from tests.support.draws import (
    CODES,
    FLOATS,
    HOLDER,
    WHOLE,
    Draw,
    Source,
    draws,
    joined,
    limits_of_codes,
    short_name,
)
from tests.support.draws_products import (
    bound_of_products,
    operands_of_product,
    scaled,
    with_activation,
)
from tests.support.error_bounds import Rounded, gamma, unit

# NumPy multiplies these in a tenth of a second, and kernels of all levels in all forms in one.
_MOST_PRODUCTS = 1 << 28


def _image(
    rng: Source, name: str, dtype: str, wild: float = 0.1
) -> tuple[np.ndarray, np.ndarray, dict[str, Any]]:
    """Images and weights of a convolution, and its attributes: padding is as large as the window,
    or larger, and windows are as large as what they look at."""
    rank = rng.pick(1, 2, 2, 2, 3)
    depthwise = rng.chance(0.3)
    group = rng.size(33) if depthwise else rng.pick(1, 1, 1, 2, 3)
    channels = group * (1 if depthwise else rng.size(37))
    filters = group * (rng.pick(1, 1, 2) if depthwise else rng.size(37))
    sizes = [rng.size({1: 65, 2: 17, 3: 7}[rank]) for _ in range(rank)]
    kernel = [rng.pick(1, 1, 2, 3, 3, 4, 5, 7)] * rank
    if rng.chance(0.4):
        kernel = [rng.pick(1, 2, 3, 5) for _ in range(rank)]
    dilations = [rng.pick(1, 1, 1, 2, 5) for _ in range(rank)]
    spans = [(k - 1) * d + 1 for k, d in zip(kernel, dilations, strict=True)]
    pads = [int(rng.integers(0, span + 1)) if rng.chance(0.6) else 0 for span in spans * 2]
    for axis in range(rank):
        lack = spans[axis] - sizes[axis] - pads[axis] - pads[axis + rank]
        sizes[axis] += max(lack, 0)
    attrs: dict[str, Any] = {"pads": pads, "dilations": dilations, "group": group}
    attrs["strides"] = [rng.pick(1, 1, 2, 3) for _ in range(rank)]
    if rng.chance(0.15) and name != "DeformConv":
        attrs["auto_pad"] = rng.pick("SAME_UPPER", "SAME_LOWER", "VALID")
        attrs.pop("pads")
    batch = rng.pick(1, 1, 2, 3)
    if batch * channels * filters // group * math.prod(kernel) * math.prod(sizes) > _MOST_PRODUCTS:
        channels = filters = group
    dims = (filters, channels // group) if "Transpose" not in name else (channels, filters // group)
    # Groups of few channels are multiplied together, by zeros where they do not belong.
    wild = wild if group == 1 or group == channels == filters else 0
    x = rng.numbers((batch, channels, *sizes), dtype, wild)
    # Transposed convolutions multiply some weights by zeros between elements.
    wild = 0 if "Transpose" in name else wild
    return x, rng.numbers((*dims, *kernel), dtype, wild), attrs


@draws("Conv ConvTranspose penstock.Fused(Conv)")
def _convolution(rng: Source, full_name: str) -> Draw:
    name = "Conv" if "(" in full_name else full_name
    x, w, attrs = _image(rng, name, "float32")
    if name == "ConvTranspose":
        attrs.pop("auto_pad", None)
        rank = x.ndim - 2
        attrs["output_padding"] = [int(rng.integers(0, s)) for s in attrs["strides"]]
        spans = [(k - 1) * d + 1 for k, d in zip(w.shape[2:], attrs["dilations"], strict=True)]
        attrs["pads"] = [min(p, (spans * 2)[i] // 2) for i, p in enumerate([0] * 2 * rank)]
    terms = math.prod(w.shape[1:]) if name == "Conv" else x.shape[1] * math.prod(w.shape[2:])
    filters = w.shape[0] if name == "Conv" else w.shape[1] * attrs["group"]
    inputs = [x, w, *([rng.numbers((filters,), "float32")] if rng.chance(0.6) else [])]
    constants = [1, 2][: len(inputs) - 1] if rng.chance(0.8) or "(" in full_name else []
    draw = Draw(name, inputs, attrs, bound_of_products(terms + 2), constants)
    return with_activation(rng, draw) if "(" in full_name else draw


@draws("ConvInteger penstock.Fused(ConvInteger) QLinearConv com.microsoft.QLinearConv")
@draws("penstock.Fused(DequantizeLinear)")
def _codes_convolution(rng: Source, full_name: str) -> Draw:
    x_dtype, w_dtype = rng.pick(*CODES), rng.pick(*CODES)
    if "(D" in full_name and rng.chance(0.3):
        a, b = operands_of_product(rng, "float32")
        x, w, attrs = a, b, {}
    else:
        x, w, attrs = _image(rng, "Conv", "float32", 0)
    x, w = rng.numbers(x.shape, x_dtype), rng.numbers(w.shape, w_dtype)
    filters = w.shape[0]
    by_filter = () if not attrs else rng.pick((), (filters,))
    zeros = [rng.numbers((), x_dtype), rng.numbers(by_filter, w_dtype)]
    if "ConvInteger" in full_name:
        by_image = rng.chance(0.4)  # a zero point of each, and a scale
        ones, rest = [1] * (x.ndim - 2), [] if by_image else [4]
        if by_image:
            zeros[0] = rng.numbers((len(x), 1, *ones), x_dtype)
        if "(" in full_name:
            size = (len(x), rng.pick(1, filters), *ones) if by_image else ()
            inputs = [x, w, *zeros, np.asarray(2.0 ** -rng.integers(1, 5, size), np.float32)]
            build = lambda node: scaled(node, "ConvInteger", **attrs)  # noqa: E731
            return Draw(HOLDER, inputs, constants=[1, 3, *rest], fused=build)
        return Draw("ConvInteger", [x, w, *zeros], attrs, constants=[1, 2, 3])
    # Scales that are powers of two make NumPy's sums of real numbers exact.
    scales = [np.array(0.5, np.float32), 2.0 ** -rng.integers(3, 6, zeros[1].shape)]
    x_scale, w_scale = (np.asarray(s, np.float32) for s in scales)
    result = [np.array(rng.pick(8.0, 64.0), np.float32), rng.numbers((), x_dtype)]
    inputs = [x, x_scale, zeros[0], w, w_scale, zeros[1], *result]
    if "(" in full_name:
        return _of_real_codes(rng, inputs, attrs)
    if rng.chance(0.5):
        inputs.append(rng.integers(-2000, 2000, filters, np.int32))
    name, domain = short_name(full_name)
    constants = [1, 2, *range(3, len(inputs))]
    attrs = {**attrs, **_of_integers(rng, inputs)}
    return Draw(name, inputs, attrs, None, constants, domain=domain, version=1 if domain else 26)


def _of_integers(rng: Source, inputs: list[Any]) -> dict[str, Any]:
    """Attributes of layers of TFLite, whose scales may be any: rescaled in integers, and bounded
    from the zero point on, or elsewhere."""
    if rng.chance(0.4):
        return {}
    inputs[4][...] = 2.0 ** rng.uniform(-12, 8, inputs[4].shape)
    return {"fixed_point": 1, "code_limits": limits_of_codes(rng, inputs[7])}


def _of_real_codes(rng: Source, inputs: list[Any], attrs: dict[str, Any]) -> Draw:
    """The codes of a Conv of what codes stand for, as exporters write it."""
    bounded = rng.chance(0.5)

    def build(node: Node) -> Node:
        values = node.inputs
        x = joined("DequantizeLinear", values[:3])
        w = joined("DequantizeLinear", values[3:6], axis=0)
        operation = "Conv" if attrs else "MatMul"
        nodes = [x, w, joined(operation, [x.outputs[0], w.outputs[0]], **attrs)]
        if bounded:
            nodes.append(joined("Relu", [nodes[-1].outputs[0]]))
        nodes.append(joined("QuantizeLinear", [nodes[-1].outputs[0], *values[6:8]]))
        return fused(nodes)

    constants = [i for i in range(1, 8) if attrs or i != 3]
    return Draw(HOLDER, inputs, constants=constants, fused=build)


@draws("AveragePool GlobalAveragePool GlobalLpPool GlobalMaxPool LpPool MaxPool")
def _pooling(rng: Source, name: str) -> Draw:
    dtype = rng.pick(*FLOATS, *(CODES if name == "MaxPool" else ()))
    x, w, attrs = _image(rng, name, "float32", 0)
    x = rng.numbers(x.shape, dtype, 0.4 if "Max" in name else 0)
    outputs = 1
    taps = math.prod(x.shape[2:] if name.startswith("Global") else w.shape[2:])
    attrs.pop("group")
    if name.startswith("Global"):
        attrs = {}
    else:
        attrs["kernel_shape"] = list(w.shape[2:])
        pads = attrs.get("pads", [])
        spans = [(k - 1) * d for k, d in zip(w.shape[2:], attrs["dilations"], strict=True)]
        for i, pad in enumerate(pads):  # no window may see padding alone
            attrs["pads"][i] = min(pad, (spans * 2)[i] // 2, w.shape[2 + i % len(spans)] - 1)
        attrs["ceil_mode"] = int(rng.chance(0.3))
        if "auto_pad" in attrs:
            attrs["ceil_mode"] = 0
    if name == "AveragePool":
        attrs["count_include_pad"] = int(rng.chance(0.5))
    p = rng.pick(1, 2) if "Lp" in name else 0
    attrs |= {"p": p} if p else {}
    if name == "MaxPool" and rng.chance(0.4):
        outputs, attrs["storage_order"] = 2, int(rng.chance(0.3))

    def bound(draw: Draw) -> list[Rounded | None]:
        if p == 2:
            (root,) = draw.wide()
            squares = Rounded.exact(root**2, draw.dtype)
            return [squares.rounded(squares.value, 0, taps + 1).sqrt()]
        return draw.linear(taps + 2)

    return Draw(name, [x], attrs, None if "Max" in name else bound, outputs=outputs)


@draws("Col2Im")
def _col2im(rng: Source, name: str) -> Draw:
    x, w, attrs = _image(rng, name, "float32", 0)
    attrs.pop("group"), attrs.pop("auto_pad", None)
    attrs.setdefault("pads", [0] * 2 * (x.ndim - 2))
    count = math.prod(conv_shape(x.shape, (1, x.shape[1], *w.shape[2:]), attrs)[2:])
    columns = rng.numbers((2, 3 * math.prod(w.shape[2:]), count), rng.pick(*FLOATS), 0.3)
    return Draw(name, [columns, np.array(x.shape[2:]), np.array(w.shape[2:])], attrs, None, [1, 2])


@draws("DeformConv")
def _deform(rng: Source, name: str) -> Draw:
    dtype = rng.pick(*FLOATS)
    x, w, attrs = _image(rng, name, dtype, 0)
    x, w = (v.reshape(*v.shape[:2], -1, 1) if v.ndim == 3 else v for v in (x, w))
    if x.ndim != 4 or w.shape[2:] != w.shape[2:][:2]:
        x, w = rng.numbers((1, 4, 6, 7), dtype), rng.numbers((3, 4, 3, 2), dtype)
        attrs = {"group": 1}
    rank = 2
    for key, neutral in (("strides", 1), ("dilations", 1), ("pads", 0)):
        length = rank * (1 + (key == "pads"))
        if len(attrs.get(key, ())) not in (0, length):
            attrs[key] = [neutral] * length
    shape = conv_shape(x.shape, w.shape, attrs)
    taps = math.prod(w.shape[2:])
    offsets = rng.normal(0, 2, (x.shape[0], 2 * taps, *shape[2:])).astype(dtype)
    inputs = [x, w, offsets, rng.numbers((w.shape[0],), dtype)]
    inputs += [rng.numbers((x.shape[0], taps, *shape[2:]), dtype)] if rng.chance(0.5) else []
    terms = math.prod(w.shape[1:])

    def bound(draw: Draw) -> list[Rounded | None]:
        # A place is wrong by its own rounding; between pixels, values change by at most twice the
        # largest along each axis, and so do the weights of its four neighbours.
        u = unit(draw.dtype)
        (value,) = draw.wide()
        reach = np.abs(draw.inputs[2]).max() + max(x.shape[2:]) + sum(attrs.get("pads", (0,))) + 9
        masks = 1.0 if len(draw.inputs) < 5 else np.abs(draw.inputs[4]).astype(np.float64).max()
        most = np.abs(x.astype(np.float64)).max() * masks
        per_filter = np.abs(w.astype(np.float64)).sum((1, 2, 3))[:, None, None] * most
        bias = np.abs(draw.inputs[3].astype(np.float64))[:, None, None]
        error = per_filter * (gamma(terms + 12, u) + 8 * 3 * u * reach) + gamma(terms, u) * bias
        return [Rounded(value, np.broadcast_to(error, value.shape), draw.dtype)]

    return Draw(name, inputs, attrs, bound)


@draws("tflite.IntegerResize")
def _integer_resize(rng: Source, full_name: str) -> Draw:
    # Twice as many: weights are sums of few powers of two, and products are exact.
    dims = (*rng.dims(2, 40), rng.size(17), rng.size(17))
    x = rng.numbers(dims, rng.pick(*CODES, "int16"))
    attrs = {"mode": "linear", "fraction_bits": 0 if x.dtype == np.uint8 else 10}
    attrs["coordinate_transformation_mode"] = rng.pick("half_pixel", "asymmetric")
    inputs, (name, domain) = [x, None, None, np.array(dims) * [1, 1, 2, 2]], short_name(full_name)
    return Draw(name, inputs, attrs, None, [3], domain=domain, version=1)


@draws("Resize")
def _resize(rng: Source, name: str) -> Draw:
    rank = rng.integers(1, 4)
    mode = rng.pick("nearest", "linear", "cubic")
    dtype = rng.pick(*FLOATS, *(("float16", *CODES, "int64") if mode == "nearest" else ()))
    dims = (*rng.dims(2, 40), *[rng.size(17) for _ in range(rank)])
    if mode == "linear" and rng.chance(0.4):
        # Twice as many: weights are sums of few powers of two, and products are exact.
        x = rng.numbers(dims, rng.pick(*CODES, "int16", "uint16", "int32"))
        return Draw(
            name,
            [x, None, None, np.array(dims) * ([1] * 2 + [2] * rank)],
            {"mode": mode},
            None,
            [3],
        )
    x = rng.numbers(dims, dtype, 0.5 * (mode == "nearest"))
    target = np.array([*dims[:2], *[rng.size(33) for _ in range(rank)]])
    attrs = {"mode": mode, "nearest_mode": rng.pick("round_prefer_floor", "ceil", "floor")}
    attrs["coordinate_transformation_mode"] = rng.pick(
        "half_pixel", "half_pixel_symmetric", "pytorch_half_pixel", "align_corners", "asymmetric"
    )
    if mode != "nearest" and rng.chance(0.3):
        attrs["antialias"] = 1

    def bound(draw: Draw) -> list[Rounded | None]:
        # Weights are of float64, and rounded. The magnitudes of those of cubic interpolation with
        # the coefficient -0.75 sum up to at most 1.375 along an axis, and to 1 before that sum is
        # divided: with antialias, divisors may be 0.7 of it.
        (value,) = draw.wide()
        sums = (1.375 / 0.7) ** rank if mode == "cubic" else 1.0
        most = np.abs(x.astype(np.float64)).max((*range(2, x.ndim),), keepdims=True) * sums
        taps = [4 * max(1, math.ceil(a / b)) for a, b in zip(dims, target, strict=True)]
        own = gamma(sum(taps[2:]) + 3 * rank, unit(draw.dtype)) * most
        return [Rounded(value, np.broadcast_to(own, value.shape), draw.dtype)]

    return Draw(name, [x, None, None, target], attrs, None if mode == "nearest" else bound, [3])


@draws("Pad")
def _pad(rng: Source, name: str) -> Draw:
    dims = rng.dims(rng.integers(1, 5), 2000)
    mode = rng.pick("constant", "constant", "reflect", "edge", "wrap")
    most = [max(n - 1, 0) if mode == "reflect" else n if mode == "wrap" else n + 3 for n in dims]
    pads = np.array([rng.integers(0, min(m, 40) + 1) for m in most * 2])
    if mode == "constant" and rng.chance(0.3):
        pads -= rng.integers(0, 2, len(pads)) * (np.array(dims * 2) > 2)
    x = rng.numbers(dims, rng.pick(*FLOATS, *WHOLE, "float16", *CODES, "bool"), 0.5)
    inputs = [x, pads] + ([x.reshape(-1)[0]] if mode == "constant" else [])
    inputs = [np.asarray(v) for v in inputs]
    return Draw(name, inputs, {"mode": mode}, None, rng.pick([], range(1, len(inputs))))


@draws("GridSample")
def _grid_sample(rng: Source, name: str) -> Draw:
    rank, dtype = rng.integers(1, 4), rng.pick(*FLOATS)
    dims = (*rng.dims(2, 12), *[rng.size(9) for _ in range(rank)])
    target = [rng.size(65 if rank == 1 else 9) for _ in range(rank)]
    x = rng.numbers(dims, dtype)
    grid = rng.normal(0, 0.8, (dims[0], *target, rank)).astype(dtype)
    mode = rng.pick("nearest", "linear", "cubic")
    padding = rng.pick("zeros", "border", "reflection")
    attrs = {"mode": mode, "padding_mode": padding, "align_corners": int(rng.chance(0.5))}

    def bound(draw: Draw) -> list[Rounded | None]:
        # A place is wrong by four roundings of at most its size and that of the image; values
        # change by at most twice the largest from pixel to pixel, cubic ones by three times.
        (value,) = draw.wide()
        u, most = unit(draw.dtype), np.abs(x.astype(np.float64)).max()
        place = 8 * u * max(dims[2:]) * (np.abs(grid.astype(np.float64)).max() + 2)
        sums = 1.375**rank if mode == "cubic" else 1.0
        error = most * sums * (gamma(16 * rank + 8, u) + 3 * rank * place)
        return [Rounded(value, np.full(value.shape, error), draw.dtype)]

    return Draw(name, [x, grid], attrs, None if mode == "nearest" else bound)


@draws("AffineGrid")
def _affine_grid(rng: Source, name: str) -> Draw:
    rank, dtype = rng.integers(2, 4), rng.pick(*FLOATS)
    size = (*rng.dims(2, 6), *[rng.size(17) for _ in range(rank)])
    theta = rng.numbers((size[0], rank, rank + 1), dtype)
    attrs = {"align_corners": int(rng.chance(0.5))}

    def bound(draw: Draw) -> list[Rounded | None]:
        # Coordinates are at most 1, with four roundings; sums have rank + 1 products.
        (value,) = draw.wide()
        most = np.abs(theta.astype(np.float64)).sum(-1).reshape(-1, *[1] * rank, rank)
        own = gamma(rank + 6, unit(draw.dtype)) * most
        return [Rounded(value, np.broadcast_to(own, value.shape), draw.dtype)]

    return Draw(name, [theta, np.array(size)], attrs, bound, [1])


@draws("com.microsoft.CropAndResize tensorflow.CropAndResize")
def _crops(rng: Source, full_name: str) -> Draw:
    name, domain = short_name(full_name)
    dims, count = (2, *[rng.size(13) for _ in range(3)]), rng.size(9)
    boxes = np.round(rng.uniform(-0.3, 1.3, (count, 4)), rng.pick(1, 7)).astype(np.float32)
    size = np.array([rng.size(6), rng.size(6)], np.int32)
    inputs = [rng.numbers(dims, "float32", 0.1), boxes, rng.integers(0, 2, count, np.int32), size]
    attr = "mode" if domain == "com.microsoft" else "method"
    attrs = {attr: rng.pick("bilinear", "nearest"), "extrapolation_value": rng.pick(0.0, -2.5)}
    return Draw(name, inputs, attrs, None, [3], 1, domain, 1)


@draws("RoiAlign MaxRoiPool NonMaxSuppression tensorflow.NonMaxSuppression")
def _regions(rng: Source, name: str) -> Draw:
    count, dtype = rng.size(33), rng.pick(*FLOATS)
    corners = rng.uniform(-3, 12, (count, 2))
    boxes = np.concatenate([corners, corners + rng.uniform(-1, 9, (count, 2))], 1)
    if name.endswith("NonMaxSuppression"):
        scores = np.round(rng.normal(size=(1, 2, count)), 1).astype(np.float32)
        inputs = [boxes[None].astype(np.float32), scores, np.array([rng.pick(0, 1, 3, 1000)])]
        inputs += [np.array([rng.pick(0.0, 0.3, 1.0)], np.float32)]
        inputs += [np.array([0.2], np.float32)] if rng.chance(0.5) or name[0] == "t" else []
        if name[0] == "t":
            one = [inputs[0][0], scores[0, 0], inputs[2].astype(np.int32), *inputs[3:]]
            attrs = {"inclusive": rng.chance(0.5)}
            return Draw("NonMaxSuppression", one, attrs, None, [2], 1, "tensorflow", 1)
        return Draw(name, inputs, {"center_point_box": int(rng.chance(0.5))})
    dims = (2, *[rng.size(13) for _ in range(3)])
    if name == "MaxRoiPool":
        x = rng.numbers(dims, "float32", 0.5)
        rois = np.concatenate([rng.integers(0, 2, (count, 1)), boxes], 1).astype(np.float32)
        attrs = {"pooled_shape": [rng.size(5), rng.size(5)], "spatial_scale": rng.pick(0.9, 1.0)}
        return Draw(name, [x, rois], attrs)
    x = rng.numbers(dims, dtype)
    ratio, height, width = rng.pick(0, 1, 2, 3), rng.size(5), rng.size(5)
    mode = rng.pick("avg", "max")
    attrs = {"mode": mode, "sampling_ratio": ratio, "output_height": height, "output_width": width}
    attrs["coordinate_transformation_mode"] = rng.pick("half_pixel", "output_half_pixel")

    def bound(draw: Draw) -> list[Rounded | None]:
        # As for GridSample; a place has at most eight roundings of numbers below 64.
        (value,) = draw.wide()
        u, most = unit(draw.dtype), np.abs(x.astype(np.float64)).max()
        samples = (ratio or 32) ** 2
        error = most * (gamma(4 * samples + 8, u) + 4 * 8 * u * 64)
        return [Rounded(value, np.full(value.shape, error), draw.dtype)]

    inputs = [x, boxes.astype(dtype), rng.integers(0, 2, count)]
    return Draw(name, inputs, attrs, bound)
