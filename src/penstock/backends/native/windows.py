"""Col2Im over up to three axes, and reductions of windows over any."""

from __future__ import annotations

import math

import numpy as np

from penstock.backends.native import by_memory, family, part_ns, rows_ns, str_
from penstock.backends.native.kernel import NativeCall, Site, Tensor
from penstock.core.traced import int64s
from penstock.ir.layout import strides_of
from penstock.ops.common.windows import windows
from penstock.ops.work_estimate import Workload

_AXES = 3  # as in c/windows/windows.c
_SUFFIXES = {"float32": "float", "float64": "double"}


@family("Col2Im")
def col2im(site: Site) -> NativeCall | None:
    """Col2Im with constant shapes."""
    x, block, y = site.tensor(0), site.constant(2), site.output()
    if site.constant(1) is None or block is None or str_(x.dtype) not in _SUFFIXES:
        return None
    axes = windows(site.node.attrs, [int(k) for k in block], y.dims[2:])
    if len(axes) > _AXES or 0 in (*x.dims, *y.dims) or not all(a.addressable for a in axes):
        return None
    rows = [(1, 1, 1, 1, 1, 0)] * (_AXES - len(axes))
    rows += [(a.size, a.count, a.kernel, a.stride, a.dilation, a.begin) for a in axes]
    return NativeCall(
        f"col2im_{_SUFFIXES[str_(x.dtype)]}",
        (Tensor(0), site.result(), np.array(rows, np.int64)),
        items=y.dims[0] * y.dims[1],
        item_ns=part_ns(
            Workload(elements=20 * math.prod(a.kernel * a.count for a in axes), items=1)
        ),
    )


@family("tflite.ReduceWindow", work=by_memory)
def reduce_window(site: Site) -> NativeCall | None:
    """ReduceWindow with constant windows."""
    x, first, y = site.tensor(0), site.tensor(1), site.output()
    sizes, strides, dilations = (site.constant(i) for i in (2, 3, 4))
    name = f"window_{site.node.attrs['reduction']}_{y.dtype}"
    if sizes is None or strides is None or dilations is None:
        return None
    if name not in site.library.kernels or first.dtype != y.dtype or not y.elements:
        return None
    if first.elements != 1 or not x.dims:
        return None
    pitches = strides_of(x.dims, 1)
    taps = np.zeros(1, np.int64)
    for size, dilation, pitch in zip(sizes.tolist(), dilations.tolist(), pitches, strict=True):
        taps = np.add.outer(taps, np.arange(size) * dilation * pitch).reshape(-1)
    *steps, step = (strides * pitches).tolist()
    *dims, length = y.dims
    return NativeCall(
        name,
        (
            *(Tensor(0), Tensor(1), site.result(), *int64s(dims)),
            *(np.array(steps, np.int64), taps, len(dims), len(taps), length, step),
        ),
        items=math.prod(dims),
        item_ns=rows_ns(4 * length * (1 + len(taps)), rows=1),
    )
