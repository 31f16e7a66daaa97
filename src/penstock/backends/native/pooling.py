"""MaxPool, also with indices, AveragePool and LpPool over up to three axes, and the global ones."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial

import numpy as np

from penstock.backends.native import by_memory, family, rows_ns
from penstock.backends.native.kernel import NativeCall, Site, Tensor, UnsupportedError
from penstock.backends.native.reduce import reduction_over
from penstock.ir.layout import channels_last, packed_strides
from penstock.ops.common.windows import Window
from penstock.ops.onnx.pooling import pool_windows

# As in c/pooling.c.
_AXES, _BUFFER, _CHUNK, _MOST_TAPS, _WIDE, _MOST_LINES = 3, 12288, 512, 64, 1024, 64
_SUFFIXES = {"float32": "float", "float64": "double"}
_KINDS = {"AveragePool": "mean", "MaxPool": "max"}

_Strides = Sequence[tuple[int, ...] | None]


@family(
    *("AveragePool", "LpPool", "MaxPool", "GlobalAveragePool", "GlobalLpPool", "GlobalMaxPool"),
    work=by_memory,
)
def pooling_call(site: Site) -> NativeCall | None:
    """A pooling of floats, if what a window sees fits into the cache."""
    x, name, p = site.input(0), site.node.op.name, site.attr("p", 2)
    if x is None or str(x.dtype) not in _SUFFIXES or 0 in (*x.dims, *site.output().dims):
        return None
    if "Lp" in name and p not in (1, 2):
        return None
    axes = () if name.startswith("Global") else pool_windows(site.node.attrs, x.dims)
    indices = len(site.tensors) > 2 and site.tensors[2] is not None
    if not indices and all(_is_whole(axis) for axis in axes):
        kind = f"l{p}" if "Lp" in name else _KINDS[name.removeprefix("Global")]
        return reduction_over(site, kind, range(2, len(x.dims)))
    taps = math.prod(axis.kernel for axis in axes[:-1])
    if len(axes) > _AXES or max(taps, axes[-1].kernel) > _MOST_TAPS:
        return None
    if not all(axis.addressable for axis in axes):
        return None
    kind = f"l{p}" if name == "LpPool" else name.removesuffix("Pool").lower()
    axes = (*[Window(1, 1, 1)] * (_AXES - len(axes)), *axes)
    try:
        return _call(site, kind, axes, (None,) * len(site.tensors))
    except UnsupportedError:
        return None


def _is_whole(axis: Window) -> bool:
    """Whether there is one window, of all elements."""
    return axis.count == 1 and axis.kernel == axis.size and not axis.padded


def _call(site: Site, kind: str, axes: Sequence[Window], strides: _Strides) -> NativeCall:
    """The call for tensors of these strides. Raises ``UnsupportedError``."""
    x, y = site.input(0), site.output()
    assert x is not None
    indices = len(site.tensors) > 2 and site.tensors[2] is not None
    planes, channels = x.dims[0] * x.dims[1], 1
    if any(strides):
        order = channels_last(len(x.dims))
        wanted = [packed_strides(t.dims, 1, order) for t in (x, y)]
        if indices or list(strides) != wanted:
            raise UnsupportedError
        planes, channels = x.dims[0], x.dims[1]
    sizes, row = [axis.size for axis in axes], axes[-1]
    most = (_BUFFER // channels - row.span) // row.stride + 1
    chunk = min(row.count, _CHUNK, most)
    if chunk < 1 or math.prod(sizes) >= 2**31:
        raise UnsupportedError
    span = (chunk - 1) * row.stride + row.span
    pitch = -(-span // row.stride) * row.stride
    lines = min(_MOST_LINES, _WIDE // (pitch // row.stride), _BUFFER // pitch)
    lines = 1 if indices or channels > 1 or chunk < row.count else max(lines, 1)
    total = planes * math.prod(a.count for a in axes[:-1])
    if site.attr("storage_order", 0):
        pitches = [math.prod(sizes[:i]) for i in range(_AXES)]
    else:
        pitches = [math.prod(sizes[i + 1 :]) for i in range(_AXES)]
    words = [
        (a.size, a.count, a.kernel, a.stride, a.dilation, a.begin, pitch)
        for a, pitch in zip(axes, pitches, strict=True)
    ]
    taps = math.prod(a.kernel for a in axes[:-1]) * row.stride + row.kernel
    name = f"{kind}_pool{'_indices' * indices}_{_SUFFIXES[str(x.dtype)]}"
    return NativeCall(
        name,
        (
            *(Tensor(0), site.result(), site.result(1) if indices else None),
            np.array(words, np.int64),
            np.concatenate([_counted(a, site.attr("count_include_pad", 0)) for a in axes]),
            *(channels, chunk, total, lines, pitch),
        ),
        items=math.ceil(total / lines) * math.ceil(row.count / chunk),
        item_ns=rows_ns(2 * lines * chunk * channels * taps, rows=2 * lines),
        restrided=partial(_call, site, kind, axes),
    )


def _counted(axis: Window, include_padding: int) -> np.ndarray:
    """The elements along an axis by which the sum of each window is divided."""
    low, high = (-axis.begin, axis.size + axis.end) if include_padding else (0, axis.size)
    at = np.arange(axis.count)[:, None] * axis.stride - axis.begin
    at = at + np.arange(axis.kernel) * axis.dilation
    return ((at >= low) & (at < high)).sum(axis=1).astype(np.float64)
