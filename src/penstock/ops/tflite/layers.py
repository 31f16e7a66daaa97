"""Layers that ONNX does not have: LSTMs with a projection, clipped cells or normalized gates; LSTMs
and SVDF of integers; dense layers of real numbers with weights of 8 bits."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from penstock.core.types import FLOAT32, RunValue, Shape, ShapeError, TensorType, Type
from penstock.ir.graph import Node
from penstock.ir.kernel import Kernel
from penstock.ir.op import Attrs, Consts, Types
from penstock.ops.common import fixed_point
from penstock.ops.common.dtypes import INT8, INT16, INT32, UINT8
from penstock.ops.common.elementwise import plain_sigmoid
from penstock.ops.common.integer_curves import integer_logistic, integer_tanh
from penstock.ops.common.products import product_work
from penstock.ops.common.shape_rules import check_shape, match_dims, same_dim, tensor
from penstock.ops.onnx.quantization import dynamic_parameters, store, zero_of
from penstock.ops.registry import TFLITE, array_operator, operator

_ACTIVATIONS: dict[int, Any] = {
    0: lambda x: x,
    1: lambda x: np.maximum(x, 0),
    2: lambda x: np.clip(x, -1, 1),
    3: lambda x: np.clip(x, 0, 6),
    4: np.tanh,
}
_EPSILON = 1e-8  # of the variance of a normalized gate


def _patterns(attrs: Attrs, gates: int) -> dict[str, Sequence[object]]:
    batch_first = attrs.get("layout", 0)
    states = ("batch", 1) if batch_first else (1, "batch")
    return {
        "x": ("batch", "steps", "features") if batch_first else ("steps", "batch", "features"),
        "the weights for features": (1, (gates, "cells"), "features"),
        "the weights for outputs": (1, (gates, "cells"), "outputs"),
        "the bias": (1, (2 * gates, "cells")),
        "the lengths": ("batch",),
        "the first output": (*states, "outputs"),
        "the first cells": (*states, "cells"),
        "the peepholes": (1, (gates - 1, "cells")),
        "the projection": ("outputs", "cells"),
        "the bias of the projection": ("outputs",),
        "the scales": ((gates, "cells"),),
    }


def _gates(w: Shape | None, attrs: Attrs) -> int:
    """The gates of a layer with these weights: 3 where that of the input is 1 - f."""
    return 3 if w is not None and w[1] == 3 * attrs["hidden_size"] else 4


def _infer(types: Types, attrs: Attrs, consts: Consts) -> Sequence[Type]:
    shapes = [tensor(types, i).shape for i in range(len(types))]
    patterns = _patterns(attrs, _gates(shapes[1], attrs))
    sizes = match_dims(patterns, shapes, {"cells": attrs["hidden_size"]})
    dtype, (steps, batch) = tensor(types, 0).dtype, map(sizes.get, ("steps", "batch"))
    outputs, cells = map(sizes.get, ("outputs", "cells"))
    if attrs.get("layout", 0):
        dims = [(batch, steps, 1, outputs), (batch, 1, outputs), (batch, 1, cells)]
    else:
        dims = [(steps, 1, batch, outputs), (1, batch, outputs), (1, batch, cells)]
    return [TensorType(dtype, shape) for shape in dims]


@operator("Lstm", domain=TFLITE, infer=_infer)
def lstm(node: Node, types: Types) -> Kernel:
    """ONNX's LSTM of one direction, with its inputs and outputs; behind them a projection of the
    output and its bias (8, 9), and scales of normalized gates (10). The state of the cells is
    clipped to ``cell_clip``, and the projected output to ``proj_clip``, if these are not 0. Of
    weights for three gates, o, f and g, that of the input is 1 - f."""
    attrs = node.attrs
    cell_clip, proj_clip = (float(attrs.get(name, 0)) for name in ("cell_clip", "proj_clip"))
    activate = _ACTIVATIONS.get(attrs["activation"])
    axis = attrs.get("layout", 0)  # of the direction in states
    if activate is None:
        raise ShapeError(f"there is no activation number {attrs['activation']}")

    def function(*inputs: RunValue) -> RunValue:
        given = [*inputs, *[None] * (11 - len(inputs))]
        x, w, r, bias, _, h, c, peepholes, projection, projected, scales = given
        number = _gates(w.shape, attrs)
        match_dims(_patterns(attrs, number), [None if a is None else a.shape for a in inputs])
        parts = [np.split(matrix[0].T, number, axis=1) for matrix in (w, r)]
        b = np.split(np.add(*np.split(bias[0], 2)), number)
        s = None if scales is None else np.split(scales, number)
        p = None if peepholes is None else np.split(peepholes[0], number - 1)
        h, c, x = h.squeeze(axis), c.squeeze(axis), x.swapaxes(0, axis)
        outputs = np.empty((*x.shape[:2], h.shape[1]), x.dtype)
        last = number - 4  # the place of i, if there is one; those of o, f and g are behind it

        def gate(place: int, peephole: int | None, step: int, cells: np.ndarray) -> np.ndarray:
            sums = x[step] @ parts[0][place] + h @ parts[1][place]
            if p is not None and peephole is not None:
                sums = sums + p[peephole] * cells
            if s is not None:
                centred = sums - sums.mean(axis=1, keepdims=True)
                variance = (centred * centred).mean(axis=1, keepdims=True)
                sums = centred / np.sqrt(variance + np.float32(_EPSILON)) * s[place]
            return sums + b[place]

        for step in range(len(x))[:: -1 if attrs["direction"] == "reverse" else 1]:
            f = plain_sigmoid(gate(last + 2, last + 2, step, c))
            i = 1 - f if last else plain_sigmoid(gate(0, 0, step, c))
            c = f * c + i * activate(gate(last + 3, None, step, c))
            c = np.clip(c, -cell_clip, cell_clip) if cell_clip > 0 else c
            h = plain_sigmoid(gate(last + 1, last + 1, step, c)) * activate(c)
            if projection is not None:
                h = h @ projection.T
                h = h if projected is None else h + projected
                h = np.clip(h, -proj_clip, proj_clip) if proj_clip > 0 else h
            outputs[step] = h
        ends = [np.expand_dims(state, axis) for state in (h, c)]
        return np.expand_dims(outputs.swapaxes(0, axis), 1 + axis), *ends

    return Kernel(function)


# Integers.


def _infer_codes(types: Types, attrs: Attrs, consts: Consts) -> Sequence[Type]:
    shapes = [tensor(types, i).shape for i in range(len(types))]
    sizes = match_dims(_code_patterns(attrs), shapes, {})
    batch, units = sizes.get("batch"), sizes.get("units")
    dims = (batch, sizes.get("steps")) if attrs.get("layout", 0) else (sizes.get("steps"), batch)
    return [
        TensorType(INT8, (*dims, units)),
        *[TensorType(t, (batch, units)) for t in (INT8, INT16)],
    ]


def _code_patterns(attrs: Attrs) -> dict[str, Sequence[object]]:
    dims = ("batch", "steps") if attrs.get("layout", 0) else ("steps", "batch")
    return {
        "x": (*dims, "features"),
        "the weights for features": ((4, "units"), "features"),
        "the weights for outputs": ((4, "units"), "units"),
        "the bias": ((4, "units"),),
        "the bias of outputs": ((4, "units"),),
        "the first output": ("batch", "units"),
        "the first cells": ("batch", "units"),
    }


@operator("IntegerLstm", domain=TFLITE, infer=_infer_codes)
def integer_lstm(node: Node, types: Types) -> Kernel:
    """An LSTM of 8-bit codes with gates i, f, g, o, as TFLite's kernel of integers computes it:
    sums of both products, biases with what zero points add included, are rescaled by ``scales`` of
    the gates (of features, then of outputs) to 16 bits with 12 behind the point. Cells have
    ``cell_bits`` before it, and are clipped to ``cell_clip`` if that is not 0; outputs have the
    zero point ``zero`` and the last of the scales."""
    attrs = node.attrs
    by = [fixed_point.multiplier(scale) for scale in attrs["scales"]]
    zero, bits, clip = attrs["zero"], attrs["cell_bits"], attrs["cell_clip"]
    axis = attrs.get("layout", 0)

    def function(*inputs: RunValue) -> RunValue:
        match_dims(_code_patterns(attrs), [a.shape for a in inputs], {})
        x, w, r, bias, bias_of_outputs, h, c = inputs
        # Sums of codes are exact in float64.
        w, r = (np.split(matrix.T.astype(np.float64), 4, axis=1) for matrix in (w, r))
        biases = [np.split(each.astype(np.int64), 4) for each in (bias, bias_of_outputs)]
        x, c = x.swapaxes(0, axis), c.astype(np.int64)
        outputs = np.empty((*x.shape[:2], h.shape[1]), INT8)

        def gate(place: int, step: int) -> np.ndarray:
            sums = (x[step] @ w[place]).astype(np.int64) + biases[0][place]
            first = _bounded(fixed_point.rescaled(sums, by[place]))
            sums = (h @ r[place]).astype(np.int64) + biases[1][place]
            return _bounded(first + fixed_point.rescaled(sums, by[4 + place]))

        for step in range(len(x))[:: -1 if attrs["direction"] == "reverse" else 1]:
            i, f, o = (integer_logistic(gate(place, step)) for place in (0, 1, 3))
            added = fixed_point.shifted_right(i * integer_tanh(gate(2, step), 3), 15 + bits)
            c = _bounded(fixed_point.shifted_right(f * c, 15) + added)
            c = np.clip(c, -clip, clip) if clip else c
            codes = fixed_point.rescaled(o * integer_tanh(c, bits), by[8]) + zero
            outputs[step] = h = np.clip(codes, -128, 127).astype(INT8)
        return outputs.swapaxes(0, axis), h, c.astype(INT16)

    return Kernel(function)


def _bounded(x: np.ndarray) -> np.ndarray:
    return np.clip(x, -32768, 32767)


def _infer_svdf(types: Types, attrs: Attrs, consts: Consts) -> Sequence[Type]:
    sizes = match_dims(_SVDF_PATTERNS, [tensor(types, i).shape for i in range(len(types))])
    filters, units, steps = map(sizes.get, ("filters", "units", "steps"))
    if isinstance(filters, int) and isinstance(units, int) and (not units or filters % units):
        raise ShapeError(f"{filters} filters are no multiple of {units} units")
    held = filters * steps if isinstance(filters, int) and isinstance(steps, int) else None
    same_dim(held, sizes.get("held"), "the weights for steps and the memory")
    batch = sizes.get("batch")
    return [TensorType(INT8, (batch, units)), TensorType(INT16, (batch, held))]


_SVDF_PATTERNS: dict[str, Sequence[object]] = {
    "x": ("batch", "features"),
    "the weights for features": ("filters", "features"),
    "the weights for steps": ("filters", "steps"),
    "the bias of features": ("filters",),
    "the bias": ("units",),
    "the memory": ("batch", "held"),
}


@operator("IntegerSvdf", domain=TFLITE, infer=_infer_svdf)
def integer_svdf(node: Node, types: Types) -> Kernel:
    """Filters of features and of time (SVDF) of 8-bit codes, as TFLite's kernel of integers
    computes them: sums of x times the weights for features, with a bias that has what the zero
    point adds, are rescaled by the first of the ``scales`` to 16 bits, which enter the memory of
    each filter at its end. Sums of the memory times the weights for steps, of all filters of a
    unit, wrap at 32 bits; the second scale and the zero point ``zero`` make codes of them."""
    first, second = (fixed_point.multiplier(scale) for scale in node.attrs["scales"])
    zero = node.attrs["zero"]

    def function(*inputs: RunValue) -> RunValue:
        match_dims(_SVDF_PATTERNS, [a.shape for a in inputs])
        x, w, times, bias_of_features, bias, memory = inputs
        # Sums of codes are exact in float64.
        sums = (x @ w.T.astype(np.float64)).astype(np.int64) + bias_of_features
        now = _bounded(fixed_point.rescaled(sums, first)).astype(INT16)
        past = memory.reshape(len(x), *times.shape)[:, :, 1:]
        later = np.concatenate([past, now[:, :, None]], axis=2)
        weighted = (later * times.astype(np.int64)).reshape(len(x), len(bias), -1).sum(axis=2)
        codes = (fixed_point.rescaled(weighted + bias, second) + zero).astype(INT32)
        return np.clip(codes, -128, 127).astype(INT8), later.reshape(memory.shape)

    return Kernel(function)


# Dense layers.


def _infer_dense(types: Types, attrs: Attrs, consts: Consts) -> Sequence[Type]:
    x, w = tensor(types, 0).shape, tensor(types, 1).shape
    if x is None or w is None:
        return (TensorType(FLOAT32),)
    if len(w) != 2 or not x:
        raise ShapeError(f"rows of shape {x} do not fit weights of shape {w}")
    same_dim(x[-1], w[1], "the columns of rows and weights")
    check_shape("the scales", tensor(types, 2).shape, (1,), (w[0],))
    check_shape("the bias", tensor(types, 3).shape, (w[0],))
    return (TensorType(FLOAT32, (*x[:-1], w[0])),)


@array_operator("DynamicRangeDense", domain=TFLITE, infer=_infer_dense, work=product_work)
def dynamic_range_dense(
    x: np.ndarray,
    w: np.ndarray,
    scales: np.ndarray,
    bias: np.ndarray | None = None,
    *,
    asymmetric: int = 0,
    limits: Sequence[float] = (-math.inf, math.inf),
) -> np.ndarray:
    """Rows of x [..., K] times weights [N, K] of int8 with one scale, or one for each row of them;
    plus ``bias``, within ``limits``. As LiteRT's kernels do for weights of dynamic range,
    each row of x is rounded to the codes -127 to 127 over its largest magnitude or, where that is
    ``asymmetric``, to those of -128 to 127 over its range, with a zero point."""
    rows = x.reshape(-1, w.shape[1])
    least, most = rows.min(axis=1, initial=0), rows.max(axis=1, initial=0)
    if asymmetric:
        factors, scale, zero = _ranges(least.astype(np.float64), most.astype(np.float64))
    else:
        size = np.maximum(-least, most)
        empty = size == 0
        scale = np.where(empty, np.float32(1), size / np.float32(127))
        factors = np.where(empty, np.float32(0), np.float32(127) / np.where(empty, 1, size))
        zero = np.zeros(len(rows), np.float32)
    numbers = zero[:, None] + rows * factors[:, None]
    numbers = np.clip(numbers, -128 if asymmetric else -127, 127)
    whole = np.trunc(numbers)
    codes = whole + (numbers - whole >= 0.5) - (numbers - whole <= -0.5)
    # Sums of codes are exact in float64.
    sums = (codes - zero[:, None]).astype(np.float64) @ w.T.astype(np.float64)
    y = sums.astype(np.float32) * (scale[:, None] * scales.reshape(-1))
    y = y if bias is None else bias + y
    low, high = limits
    return np.clip(y, low, high).astype(np.float32).reshape(*x.shape[:-1], w.shape[0])


def _infer_image_codes(types: Types, attrs: Attrs, consts: Consts) -> Sequence[Type]:
    shape = tensor(types, 0).shape
    by_image = None if shape is None else (*shape[:1], *[1] * len(shape[1:]))
    codes = TensorType(UINT8, shape)
    return codes, TensorType(FLOAT32, by_image), TensorType(UINT8, by_image)


@operator("DynamicRangeCodes", domain=TFLITE, infer=_infer_image_codes)
def dynamic_range_codes(node: Node, types: Types) -> Kernel:
    """The codes, scale and zero point of each image of a batch [N, ...], over the range of the
    image, as DynamicQuantizeLinear computes them; scales and zero points are [N, 1, ...]."""

    def function(*inputs: RunValue) -> RunValue:
        (x,) = inputs
        codes, one = np.empty(x.shape, UINT8), (len(x), *[1] * (x.ndim - 1))
        scales, zeros = np.empty(one, np.float32), np.empty(one, UINT8)
        for i, image in enumerate(x):
            scales[i], zeros[i] = dynamic_parameters(image)
        store(x / scales, zero_of(zeros), codes, True)
        return codes, scales, zeros

    return Kernel(function)


def _ranges(least: np.ndarray, most: np.ndarray) -> tuple[np.ndarray, ...]:
    """What numbers from ``least`` to ``most`` are multiplied by, scales and zero points."""
    empty = least == most
    step = np.where(empty, 1.0, (most - least) / 255)
    below, above = -128 - least / step, 127 - most / step
    is_below = 128 + np.abs(least / step) < 127 + np.abs(most / step)
    point = np.where(is_below, below, above)
    point = np.trunc(point + np.copysign(0.5, point))
    zero = np.where(empty, 0, np.clip(point, -128, 127)).astype(np.float32)
    scale = step.astype(np.float32)
    factors = np.where(empty, np.float32(0), np.float32(1) / scale)
    return factors, scale, zero
