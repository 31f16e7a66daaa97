"""Softmax, LogSoftmax and Hardmax along axes that are adjacent in memory."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial

from penstock.backends.native import AnyShapeCall, ahead_of_cache, by_memory, family, rows_ns, str_
from penstock.backends.native.kernel import NativeCall, Site, Tensor, UnsupportedError
from penstock.backends.native.reduce import around
from penstock.ops.common.dtypes import INT16
from penstock.ops.common.fixed_point import softmax_multiplier
from penstock.ops.common.shape_rules import normalize_axis
from penstock.ops.onnx.shape import flatten_axis
from penstock.ops.onnx.softmax import SINGLE_AXIS

_BLOCK, _COLUMNS = 2048, 256  # as in c/rows/softmax.c
_LINE, _CACHED = 16, 2**17  # elements of a cache line, and of a block of columns
_ADDITIONS = {"float32": 7, "float64": 20}  # cost of an element, in additions


@family("Hardmax", "LogSoftmax", "Softmax", work=partial(by_memory, additions=4))
def softmax_call(site: Site) -> NativeCall | None:
    """Softmax and the like along one axis or, before opset 13, over all axes from ``axis`` on."""
    x = site.tensor(0)
    if str_(x.dtype) not in _ADDITIONS or not x.elements or not x.dims:
        return None
    return _call(site, (None, None))


@family("tflite.IntegerSoftmax", work=partial(by_memory, additions=8))
def softmax_of_codes(site: Site) -> NativeCall | None:
    """IntegerSoftmax of rows of int16."""
    from penstock.ops.common.code_curves import softmax_points  # only quantized models need it

    x, attrs = site.tensor(0), site.node.attrs
    if not x.elements or not x.dims or x.dtype != INT16:
        return None
    length = x.dims[-1]
    rows = x.elements // length
    block = max(_BLOCK // length, 1)
    number, shift = softmax_multiplier(attrs["scale"], attrs["beta"])
    points = softmax_points().astype(INT16)
    words = Tensor(0), site.result(), points, rows, length, block, int(number), int(shift)
    item_ns = rows_ns(8 * block * length, rows=block)
    return NativeCall("softmax_int16", words, math.ceil(rows / block), item_ns)


def _call(site: Site, strides: Sequence[tuple[int, ...] | None]) -> NativeCall:
    """The call for tensors of these strides. Raises ``UnsupportedError``."""
    x = site.tensor(0)
    if strides[0] != strides[1]:
        raise UnsupportedError
    rank = len(x.dims)
    if site.node.op.since < SINGLE_AXIS:
        axes = range(flatten_axis(site.node.attrs, rank), rank)
    else:
        axis = normalize_axis(site.attr("axis", -1), rank)
        axes = range(axis, axis + 1)
    parts = around(x.dims, axes, strides[0])
    outer, length, inner = [math.prod(x.dims[i] for i in part) for part in parts]
    name = site.node.op.name
    own = ("hardmax", 0, 0, 0, 0) if name == "Hardmax" else ("softmax", int(name == "LogSoftmax"))
    if inner == 1:
        block = max(_BLOCK // length, 1)
    else:
        block = min(inner, max(2 * _LINE, min(_CACHED // length, _COLUMNS) // _LINE * _LINE))
        if site.ordered and block == inner:
            # Few columns have another summation order than many (c/rows/softmax.c).
            block = math.ceil(inner / 2)
    return NativeCall(
        f"{own[0]}_{x.dtype}",
        (Tensor(0), site.result(), outer, length, inner, block, *own[1:]),
        items=math.ceil(outer / block) if inner == 1 else outer * math.ceil(inner / block),
        item_ns=rows_ns(block * length * _ADDITIONS[str_(x.dtype)], rows=1),
        inplace=(0,),
        restrided=partial(_call, site),
    )


@ahead_of_cache("LogSoftmax", "Softmax")
def softmax_of_any_shape(site: Site) -> AnyShapeCall | None:
    """Softmax along the last axis."""
    x = site.tensor(0)
    if str_(x.dtype) not in _ADDITIONS or not x.shape or site.node.op.since < SINGLE_AXIS:
        return None
    rank = len(x.shape)
    if normalize_axis(site.attr("axis", -1), rank) != rank - 1:
        return None
    return site.library.functions.softmax, site.node.op.name == "LogSoftmax"
