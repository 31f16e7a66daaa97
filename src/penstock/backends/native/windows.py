"""Col2Im, and MaxPool with indices, over up to three axes."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from penstock.backends.native.kernel import NativeCall, Site, Tensor
from penstock.ops.common.windows import Window, windows
from penstock.ops.onnx.pooling import pool_windows
from penstock.types import TensorType

_AXES = 3  # as in c/windows.c
_SUFFIXES = {"float32": "float", "float64": "double"}


def col2im(site: Site) -> NativeCall | None:
    """Col2Im with constant shapes."""
    block, y = site.constant(2), site.output()
    if site.constant(1) is None or block is None:
        return None
    axes = windows(site.node.attrs, [int(k) for k in block], y.dims[2:])
    planes = y.dims[0] * y.dims[1]
    return _call(site, "col2im", axes, planes, (Tensor(0), site.result(), None))


def max_pool(site: Site) -> NativeCall | None:
    """MaxPool with indices: oneDNN has it without."""
    x = site.input(0)
    if x is None or len(site.tensors) < 3 or site.tensors[2] is None:
        return None
    axes = pool_windows(site.node.attrs, x.dims)
    arrays = (Tensor(0), site.result(0), site.result(1))
    return _call(site, "max_pool", axes, x.dims[0] * x.dims[1], arrays)


def _call(
    site: Site, name: str, axes: Sequence[Window], planes: int, arrays: tuple[Tensor | None, ...]
) -> NativeCall | None:
    x = site.input(0)
    assert isinstance(x, TensorType)
    if str(x.dtype) not in _SUFFIXES or len(axes) > _AXES or 0 in (*x.dims, *site.output().dims):
        return None
    sizes = [axis.size for axis in axes]
    if site.attr("storage_order", 0):
        pitches = [math.prod(sizes[:i]) for i in range(len(sizes))]
    else:
        pitches = [math.prod(sizes[i + 1 :]) for i in range(len(sizes))]
    rows = [(1, 1, 1, 1, 1, 0, 0)] * (_AXES - len(axes))
    for axis, pitch in zip(axes, pitches, strict=True):
        shape = (axis.size, axis.count, axis.kernel, axis.stride, axis.dilation, axis.begin)
        rows.append((*shape, pitch))
    taps = math.prod(axis.kernel * axis.count for axis in axes)
    return NativeCall(
        f"{name}_{_SUFFIXES[str(x.dtype)]}",
        (*arrays, np.array(rows, np.int64)),
        items=planes,
        item_ns=10 + taps,
    )
