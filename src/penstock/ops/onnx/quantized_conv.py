"""Convolutions of 8-bit integers: ConvInteger and QLinearConv.

Exact for the same reason as matrix products (see ``quantized``): they are computed in float32,
split along the input channels into pieces with exact sums. If a kernel is too large even for one
channel, it is convolved in float64, which represents all integers up to 2**53.

The zero point is subtracted first, so that padding by 0 is padding by the zero point.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from penstock.core.records import NamedTuple
from penstock.core.types import FLOAT32, RunValue, Shape, TensorType, Type
from penstock.ir.graph import Node
from penstock.ir.op import Attrs, Consts, Types
from penstock.ops.common import fixed_point
from penstock.ops.common.constant_cache import Shared, shared
from penstock.ops.common.dtypes import FLOAT64, INT32, UINT8
from penstock.ops.common.products import convolution_work
from penstock.ops.common.shape_rules import check_shape, tensor
from penstock.ops.common.specialize import Routine, Scratch, Tensors, by_shape
from penstock.ops.onnx.convolution import conv_shape, convolution_routine
from penstock.ops.onnx.quantization import subtract_zero_point, zero_of
from penstock.ops.onnx.quantized import (
    EXACT,
    accumulate,
    bound_codes,
    constant_or_left_out,
    pieces,
    reach,
    requantize,
)
from penstock.ops.registry import MICROSOFT, operator


def _per_filter(parameter: np.ndarray, rank: int) -> np.ndarray:
    """Reshape a per-tensor or per-filter parameter to broadcast along ``rank`` dims."""
    if parameter.size == 1:
        return parameter.reshape(())
    return parameter.reshape(-1, *(1,) * (rank - 1))


def _shifted(w: np.ndarray, zero: np.ndarray | None, out: np.ndarray) -> np.ndarray:
    """The weights minus their zero points, per tensor or per filter."""
    subtract_zero_point(w, None if zero is None else zero_of(_per_filter(zero, w.ndim)), out)
    return out


class _Cut(NamedTuple):
    """The split of sums over channels: channels per part, and the dtype to compute in."""

    dtype: np.dtype
    spans: list[slice]
    parts: list[np.ndarray] | None = None
    """the parts of constant weights"""


def _cut(
    dims: tuple[int, ...], x_reach: int, w_reach: int, weights: np.ndarray | None = None
) -> _Cut:
    """The split for filters of ``dims``; ``weights`` are their values if known."""
    positions = math.prod(dims[2:])
    if x_reach * w_reach * positions > EXACT:
        return _Cut(FLOAT64, [slice(None)])
    sums = None
    if weights is not None:
        sums = np.abs(weights).reshape(*dims[:2], positions).sum(-1).T
    return _Cut(FLOAT32, pieces(dims[1], x_reach, w_reach * positions, sums))


def _constant_filters(
    node: Node, w: tuple[int, int], x_reach: int, w_reach: int
) -> Shared[_Cut] | None:
    """The filters minus their zero points, if both are constant."""
    _, weights = constant_or_left_out(node, w[0])
    zero_known, zero = constant_or_left_out(node, w[1])
    if weights is None or weights.ndim < 3 or not zero_known:
        return None

    def prepared() -> _Cut:
        less_zero = _shifted(weights, zero, np.empty(weights.shape, np.float32))
        part = _cut(less_zero.shape, x_reach, w_reach, less_zero)
        parts = [np.ascontiguousarray(less_zero[:, s], part.dtype) for s in part.spans]
        return part._replace(parts=parts)

    return shared(("filters", x_reach, w_reach), prepared, weights, zero)


class _Convolution:
    """The convolution of two inputs of a node minus their zero points, with scratch memory in
    ``layout``. ``x`` and ``w`` are the input indices of a tensor and its zero point."""

    def __init__(
        self, node: Node, inputs: Tensors, x: tuple[int, int], w: tuple[int, int], integer: bool
    ) -> None:
        attrs, layout = node.attrs, Scratch()
        self.layout = layout
        self.group: int = attrs.get("group", 1)
        self.last = bool(attrs.get("channels_last", 0))
        x_dims = channels_first(tensor(inputs, x[0]).dims, self.last)
        w_dims = tensor(inputs, w[0]).dims
        x_reach, w_reach = reach(node, inputs, *x), reach(node, inputs, *w)
        # A strong reference, because the cache holds only a weak one.
        self._fixed = fixed = _constant_filters(node, w, x_reach, w_reach)
        cut = _cut(w_dims, x_reach, w_reach) if fixed is None else fixed.value
        self.dtype, self.spans, parts = cut
        shape: Any = conv_shape(x_dims, w_dims, attrs)
        self.left = layout.field(x_dims, self.dtype)
        self.right = layout.field(w_dims, FLOAT32) if parts is None else None
        self.values = layout.field(shape, self.dtype)
        """scratch that the caller may use after the convolution"""
        several = len(self.spans) > 1
        # float32 may not represent the sum of several parts exactly.
        self.total = layout.field(shape, INT32) if several or integer else None
        self.parts = parts
        self.routines: list[Routine] = []
        for i, span in enumerate(self.spans):
            depth = len(range(w_dims[1])[span])
            x_type = TensorType(self.dtype, (x_dims[0], depth * self.group, *x_dims[2:]))
            w_type = TensorType(self.dtype, (w_dims[0], depth, *w_dims[2:]))
            part = parts[i] if parts else None
            self.routines.append(convolution_routine(x_type, w_type, attrs, part))
        room = max(routine.workspace for routine in self.routines)
        self.scratch = layout.field((room,), UINT8) if room else None

    def __call__(self, *arguments: RunValue) -> np.ndarray:
        """Convolve; the result has channels first, int32 in ``out`` if given, else int32 or
        float.
        """
        x, x_zero, w, w_zero, out, workspace = arguments
        left, values = self.left(workspace), self.values(workspace)
        x = np.moveaxis(x, -1, 1) if self.last else x
        subtract_zero_point(x, None if x_zero is None else zero_of(x_zero), left)
        parts = self.parts
        if parts is None:
            assert self.right is not None
            weights = _shifted(w, w_zero, self.right(workspace))
            parts = [np.ascontiguousarray(weights[:, s], self.dtype) for s in self.spans]
        total = self.total(workspace) if out is None and self.total is not None else out
        scratch = () if self.scratch is None else (self.scratch(workspace),)
        for i, routine in enumerate(self.routines):
            channels = _channels(left, self.group, self.spans[i])
            routine.into(channels, parts[i], values, *(scratch if routine.workspace else ()))
            if total is None:
                return values
            accumulate(i, values, total)
        return total


def _channels(x: np.ndarray, group: int, span: slice) -> np.ndarray:
    """The channels ``span`` of each group."""
    if group == 1 or span == slice(None):
        return x[:, span]
    n, c, *spatial = x.shape
    return x.reshape(n, group, c // group, *spatial)[:, :, span].reshape(n, -1, *spatial)


def channels_first(shape: Any, last: bool) -> Any:
    """Move the channels of a shape to axis 1, if they are ``last``."""
    return (*shape[:1], *shape[-1:], *shape[1:-1]) if last and shape is not None else shape


def channels_back(shape: Any, last: bool) -> Any:
    """The inverse of ``channels_first``."""
    return (shape[0], *shape[2:], shape[1]) if last and shape is not None else shape


def _check(
    types: Types, shape: Shape | None, scalars: Sequence[int], vectors: Sequence[int]
) -> None:
    """Check that parameters are scalars, or have one entry per filter."""
    for i in (*scalars, *vectors):
        parameter = tensor(types, i).shape
        filters = (None if shape is None else shape[1],) if i in vectors else ()
        if parameter is not None and parameter.count(1) < len(parameter):
            check_shape(f"input {i}", parameter, (), (1,), filters)


def _infer_conv_integer(types: Types, attrs: Attrs, consts: Consts) -> Sequence[Type]:
    x, zero = tensor(types, 0).shape, tensor(types, 2).shape
    shape = conv_shape(x, tensor(types, 1).shape, attrs)
    # TFLite's images have a zero point each, [N, 1, ...].
    by_image = None if x is None else (*x[:1], *[1] * len(x[1:]))
    _check(types, shape, () if zero is not None and zero == by_image else (2,), (3,))
    return (TensorType(INT32, shape),)


@operator(
    "ConvInteger", since=10, infer=_infer_conv_integer, work=convolution_work(1), traits={"heavy"}
)
@by_shape(arity=(4, 1))
def conv_integer(node: Node, inputs: Tensors, outputs: Tensors, consts: Consts) -> Routine:
    convolve = _Convolution(node, inputs, (0, 2), (1, 3), integer=False)
    return Routine(
        lambda x, w, x_zero, w_zero, *rest: convolve(x, x_zero, w, w_zero, *rest),
        convolve.layout.size,
    )


def _infer_qlinear_conv(types: Types, attrs: Attrs, consts: Consts) -> Sequence[Type]:
    last = bool(attrs.get("channels_last", 0))
    x = channels_first(tensor(types, 0).shape, last)
    shape = conv_shape(x, tensor(types, 3).shape, attrs)
    _check(types, shape, (1, 2, 6, 7), (4, 5))
    check_shape("bias", tensor(types, 8).shape, (None if shape is None else shape[1],))
    return (TensorType(tensor(types, 7).dtype, channels_back(shape, last)),)


@operator("QLinearConv", since=10, infer=_infer_qlinear_conv, work=convolution_work(3))
@operator("QLinearConv", domain=MICROSOFT, infer=_infer_qlinear_conv, work=convolution_work(3))
@by_shape(arity=(9, 1))
def qlinear_conv(node: Node, inputs: Tensors, outputs: Tensors, consts: Consts) -> Routine:
    # A bias that float32 does not represent exactly is added in int32.
    bias_is_known, bias_const = constant_or_left_out(node, 8)
    exact = bias_const is not None and not (np.abs(bias_const) > EXACT).any()
    limits = node.attrs.get("code_limits")
    is_fixed = bool(node.attrs.get("fixed_point"))
    integer = is_fixed or (not exact and not (bias_is_known and bias_const is None))
    fixed_bias = bias_const.astype(np.float32) if bias_const is not None and exact else None
    convolve = _Convolution(node, inputs, (0, 2), (3, 5), integer)
    layout, values = convolve.layout, convolve.values
    real = values if convolve.dtype == FLOAT32 else layout.field(values.shape, FLOAT32)
    spatial = len(values.shape) - 1

    def into(*arguments: RunValue) -> None:
        x, x_scale, x_zero, w, w_scale, w_zero, y_scale, y_zero, bias, out, workspace = arguments
        total = convolve(x, x_zero, w, w_zero, None, workspace)
        if bias is not None:
            if fixed_bias is not None and total.dtype == FLOAT32:
                bias = fixed_bias
            np.add(total, _per_filter(bias, spatial), total)
        target = np.moveaxis(out, -1, 1) if convolve.last else out
        zero = y_zero.reshape(())
        if is_fixed:
            rounded = out.dtype == UINT8
            scales = fixed_point.of_products(x_scale, w_scale, y_scale, rounded=rounded)
            by_filter = scales.mapped(lambda part: _per_filter(part, spatial))
            fixed_point.store_rescaled(total, by_filter, zero, target)
        else:
            # For scales of rank 0, NumPy returns a scalar rather than an array.
            scale = x_scale.reshape(()) * w_scale / y_scale.reshape(())
            factor = _per_filter(np.asarray(scale, np.float32), spatial)
            requantize(total, factor, zero, real(workspace), target)
        bound_codes(out, limits)

    return Routine(into, layout.size)
