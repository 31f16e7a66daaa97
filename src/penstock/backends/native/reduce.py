"""Reductions over axes that are adjacent in memory, ArgMax and ArgMin."""

from __future__ import annotations

import math
from collections.abc import Container, Sequence
from functools import partial

import numpy as np

from penstock.backends.native import by_memory, family, rows_ns, str_
from penstock.backends.native.kernel import NativeCall, Site, Tensor, UnsupportedError
from penstock.core.types import BOOL
from penstock.ir.layout import strides_of
from penstock.ops.common.dtypes import INT32
from penstock.ops.common.fixed_point import (
    mean_multiplier,
    mean_scales,
    product_multiplier,
    short_multiplier,
)
from penstock.ops.common.shape_rules import normalize_axes

# The dtypes that kernels take, by the operation; of others, ``_FLOATS``.
_FLOATS = ("float32", "float64")
_NUMBERS = (*_FLOATS, "int32", "int64")
_DTYPES = {
    **dict.fromkeys(("mean", "prod", "sum"), _NUMBERS),
    **dict.fromkeys(
        ("max", "min", "argmax", "argmin"), (*_NUMBERS, "int8", "uint8", "int16", "bool")
    ),
}
_COLUMNS = 256  # as in c/rows/reduce.c
_BLOCK = 4096  # elements of an item of rows
_MOST_CODES = 2**23

_Strides = Sequence[tuple[int, ...] | None]


def _axes(site: Site, rank: int) -> tuple[int, ...] | None:
    """Return the axes of a reduction; None if unknown."""
    if site.node.op.name.startswith("Arg"):
        return normalize_axes([site.attr("axis", 0)], rank)
    spelled = site.attr("axes", ())
    if site.input(1) is not None:
        const = site.constant(1)
        if const is None:
            return None
        spelled = const.reshape(-1).tolist()
    if not len(spelled):
        return () if site.attr("noop_with_empty_axes", 0) else tuple(range(rank))
    return normalize_axes(spelled, rank)


@family(
    *("ArgMax", "ArgMin", "ReduceL1", "ReduceL2", "ReduceLogSum", "ReduceLogSumExp", "ReduceMax"),
    *("ReduceMean", "ReduceMin", "ReduceProd", "ReduceSum", "ReduceSumSquare"),
    *("tflite.ArgMax", "tflite.ArgMin", "tflite.ReduceMax", "tflite.ReduceMin"),
    work=by_memory,
)
def reduction_call(site: Site) -> NativeCall | None:
    """ReduceSum and the like, ArgMax and ArgMin."""
    x, name = site.tensor(0), site.node.op.name.lower().removeprefix("reduce")
    if not x.dims or 0 in x.dims or str_(x.dtype) not in _DTYPES.get(name, _FLOATS):
        return None
    axes = _axes(site, len(x.dims))
    return reduction_over(site, "place" if name[:3] == "arg" else name, axes) if axes else None


@family("tflite.IntegerMean", work=by_memory)
def mean_of_codes(site: Site) -> NativeCall | None:
    """IntegerMean of so few codes that int32 holds their sum."""
    x = site.tensor(0)
    if 0 in x.dims or x.elements > _MOST_CODES:
        return None
    return reduction_over(site, "mean", site.node.attrs["axes"])


@family("tflite.IntegerProduct", work=by_memory)
def product_of_codes(site: Site) -> NativeCall | None:
    """IntegerProduct of signed codes."""
    x = site.tensor(0)
    if 0 in x.dims or str_(x.dtype) not in ("int8", "int16"):
        return None
    return reduction_over(site, "product", site.node.attrs["axes"])


def _rescaling(site: Site) -> tuple[float, ...]:
    """Return the further arguments of the kernels of means and products of codes."""
    x, attrs, name = site.tensor(0), site.node.attrs, site.node.op.name
    if x.dtype is None or name not in ("IntegerMean", "IntegerProduct"):
        return ()
    (of_x, of_y), scales, ends = attrs["zero_points"], attrs["scales"], np.iinfo(x.dtype)
    number = shift = 0
    count = math.prod([x.dims[axis] for axis in attrs["axes"]])
    if name == "IntegerProduct":
        number, shift = short_multiplier(product_multiplier(scales, count))
    elif attrs["form"] == "fixed point":
        number, shift = [int(v) for v in mean_multiplier(scales, count)]
    else:
        scales = mean_scales(scales, count, attrs["form"])
    ratio = float(np.float32(scales[1]) / np.float32(scales[0]))
    return of_x, number, shift, of_y, ends.min, ends.max, ratio


def reduction_over(site: Site, name: str, axes: Sequence[int]) -> NativeCall:
    """Return the call of a reduction over these axes. Raises ``UnsupportedError`` unless
    adjacent."""
    x = site.tensor(0)
    dtype = "uint8" if x.dtype == BOOL else x.dtype
    return _call(site, f"{name}_{dtype}", axes, (None,) * len(site.tensors))


def _call(site: Site, name: str, axes: Sequence[int], strides: _Strides) -> NativeCall:
    """The call for tensors of these strides. Raises ``UnsupportedError``."""
    x, y = site.tensor(0), site.output()
    parts = around(x.dims, axes, strides[0])
    kept = [i for i in range(len(x.dims)) if len(y.dims) == len(x.dims) or i not in axes]
    # Products that are rounded after each factor have a fixed order.
    if name.startswith("product") and parts[1] != sorted(parts[1]):
        raise UnsupportedError
    if parts[0] + parts[2] != [kept[i] for i in _order(y.dims, strides[len(site.node.inputs)])]:
        raise UnsupportedError
    outer, length, inner = [math.prod(x.dims[i] for i in part) for part in parts]
    block = min(inner, _COLUMNS) if inner > 1 else max(_BLOCK // length, 1)
    if site.ordered and 1 < block == inner:
        # Long columns are reduced by whole rows, in another order than short ones, so that sums of
        # a text would depend on its padding rows.
        block = math.ceil(inner / 2)
    return NativeCall(
        name,
        (
            *(Tensor(0), site.result(), outer, length, inner, block),
            *(int(site.node.op.name == "ArgMin"), int(bool(site.attr("select_last_index", 0)))),
            *(int(site.output().dtype == INT32), int(bool(site.attr("skip_nan", 0)))),
            *_rescaling(site),
        ),
        items=outer * math.ceil(inner / block) if inner > 1 else math.ceil(outer / block),
        item_ns=rows_ns(3 * block * length, rows=0.3 * block),
        restrided=partial(_call, site, name, axes),
    )


def around(
    dims: Sequence[int], axes: Container[int], strides: tuple[int, ...] | None
) -> tuple[list[int], list[int], list[int]]:
    """Return the axes longer than 1 that are outside of ``axes`` in memory, those of ``axes``, and
    those inside. Raises ``UnsupportedError`` if ``axes`` are not adjacent."""
    order = _order(dims, strides)
    places = [i for i, axis in enumerate(order) if axis in axes]
    first, end = (places[0], places[-1] + 1) if places else (len(order), len(order))
    if end - first > len(places):
        raise UnsupportedError
    return order[:first], order[first:end], order[end:]


def _order(dims: Sequence[int], strides: tuple[int, ...] | None) -> list[int]:
    """Return the axes longer than 1, outermost in memory first. Raises ``UnsupportedError`` for a
    tensor with gaps."""
    order = [axis for axis, n in enumerate(dims) if n > 1]
    if strides is not None:
        order.sort(key=lambda axis: -strides[axis])
        packed = strides_of(tuple([dims[i] for i in order]), 1)
        if tuple([strides[i] for i in order]) != packed:
            raise UnsupportedError
    return order
