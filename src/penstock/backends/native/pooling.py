"""MaxPool (also with indices), AveragePool and LpPool over up to three axes, and global pooling."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Sequence
from functools import partial
from itertools import chain

import numpy as np

from penstock.backends.native import by_memory, family, rows_ns, str_
from penstock.backends.native.image_strides import steps_of
from penstock.backends.native.kernel import NativeCall, Site, Tensor, UnsupportedError
from penstock.backends.native.reduce import reduction_over
from penstock.core.records import NamedTuple
from penstock.core.traced import deferred, int64s
from penstock.ir.layout import channels_last, strides_of
from penstock.ops.common.windows import Window
from penstock.ops.onnx.pooling import pool_windows

# As in c/windows/pooling.c.
_AXES, _BYTES, _ROW, _CHUNK, _PIECE, _MOST_TAPS = 3, 32768, 6144, 512, 64, 4096
_SUFFIXES = {"float32": "float", "float64": "double"}
_SUFFIXES_OF_MAXIMA = {**_SUFFIXES, "int8": "int8_t", "uint8": "uint8_t"}
_KINDS = {"AveragePool": "mean", "MaxPool": "max"}
# Most columns, and least planes, for which an item interleaves several planes.
_NARROW, _FEW_PLANES = 56, 8
# Least items for threads if more planes than a vector's lanes are interleaved.
_LEAST_ITEMS = 4
# Least channels or planes for which 3x3 windows share partial results of rows and columns.
_SLID = 16
_PASS = 3  # combinations that take as long as writing and reading a row of columns

_Strides = Sequence[tuple[int, ...] | None]


@family(
    *("AveragePool", "LpPool", "MaxPool", "GlobalAveragePool", "GlobalLpPool", "GlobalMaxPool"),
    work=by_memory,
)
def pooling_call(site: Site) -> NativeCall | None:
    """Pooling of floats, or MaxPool of 8-bit integers."""
    x, name, p = site.tensor(0), site.node.op.name, site.attr("p", 2)
    suffixes = _SUFFIXES_OF_MAXIMA if "Max" in name else _SUFFIXES
    if str_(x.dtype) not in suffixes or 0 in (*x.dims, *site.output().dims):
        return None
    if "Lp" in name and p not in (1, 2):
        return None
    axes = () if name.startswith("Global") else pool_windows(site.node.attrs, x.dims)
    indices = len(site.tensors) > 2 and site.tensors[2] is not None
    # A single window of all elements is a reduction.
    whole = [a.count == 1 and a.kernel == a.size and not a.padded for a in axes]
    if not indices and all(whole):
        kind = f"l{p}" if "Lp" in name else _KINDS[name.removeprefix("Global")]
        return reduction_over(site, kind, range(2, len(x.dims)))
    if len(axes) > _AXES or not all(axis.addressable for axis in axes):
        return None
    kind = f"l{p}" if name == "LpPool" else name.removesuffix("Pool").lower()
    axes = (*[Window(1, 1, 1)] * (_AXES - len(axes)), *axes)
    return _call(site, kind, axes, (None,) * len(site.tensors))


def _call(site: Site, kind: str, axes: Sequence[Window], strides: _Strides) -> NativeCall:
    """Return the call for tensors of these strides. Raises ``UnsupportedError``."""
    x, y = site.tensor(0), site.output()
    assert x.dtype is not None
    indices = len(site.tensors) > 2 and site.tensors[2] is not None
    planes, channels = x.dims[0] * x.dims[1], 1
    if any(strides):
        for t, own in zip((x, y), strides, strict=False):
            innermost = strides_of(t.dims, 1, channels_last(len(t.dims)))
            wanted = steps_of(t.dims, innermost, False)
            if indices or steps_of(t.dims, own, False) != wanted:
                raise UnsupportedError
        planes, channels = x.dims[0], x.dims[1]
    sizes = [axis.size for axis in axes]
    if math.prod(sizes) >= 2**31:
        raise UnsupportedError
    itemsize = 0 if indices or channels > 1 else x.dtype.itemsize
    ordered = site.ordered and kind == "average"
    part = _part(kind, axes, planes, channels, itemsize, ordered)
    if indices:
        part = _Part(0, 1, min(axes[-1].count, _CHUNK), 1, direct=True)
    turned = site.attr("storage_order", 0)
    pitches = [math.prod(sizes[:i] if turned else sizes[i + 1 :]) for i in range(_AXES)]
    words = [
        (a.size, a.count, a.kernel, a.stride, a.dilation, a.begin, pitch)
        for a, pitch in zip(axes, pitches, strict=True)
    ]
    padded = [(*own[:-1], axis.end) for own, axis in zip(words, axes, strict=True)]
    depth, rows, columns = [axis.count for axis in axes]
    groups = math.ceil(planes / max(part.lanes, 1))
    taps = math.prod(axis.kernel for axis in axes)
    return NativeCall(
        f"{kind}_pool{'_indices' * indices}_{_SUFFIXES_OF_MAXIMA[str_(x.dtype)]}",
        (
            *(Tensor(0), site.result(), site.result(1) if indices else None),
            *int64s([*chain(*words)]),
            deferred(_counted, site.attr("count_include_pad", 0), *chain(*padded)),
            *(planes, channels, part.lanes, part.band, part.chunk, part.group, int(part.direct)),
        ),
        items=groups * depth * math.ceil(rows / part.band) * math.ceil(columns / part.chunk),
        item_ns=rows_ns(
            part.band * part.chunk * channels * max(part.lanes, 1) * taps, rows=2 * part.band
        ),
        restrided=partial(_call, site, kind, axes),
    )


class _Part(NamedTuple):
    """Size of a work item: the number of interleaved planes ``lanes``, or 0; rows and columns of
    the result. ``group`` rows are pooled along rows, then columns, unless whole windows are pooled
    at once (``direct``)."""

    lanes: int
    band: int
    chunk: int
    group: int
    direct: bool


def _part(
    kind: str,
    axes: Sequence[Window],
    planes: int,
    channels: int,
    itemsize: int,
    ordered: bool = False,
) -> _Part:
    """Return the items of channels-last images with ``channels``, or of channels-first planes if
    their ``itemsize`` is given. ``ordered``: always pool rows first. Raises
    ``UnsupportedError``."""
    depth, height, width = axes
    outer = depth.kernel * height.kernel
    may = kind in ("average", "max") and outer * width.kernel <= _MOST_TAPS
    if max(outer, width.kernel) > _MOST_TAPS:
        raise UnsupportedError
    apart = width.stride * (outer - 1) + width.kernel - 1 + _PASS
    lanes = _PIECE // itemsize if itemsize and width.size <= _NARROW else 0
    lanes = min(lanes, planes) if planes >= _FEW_PLANES else 0
    slid = outer == width.kernel == 3 and width.dilation == 1
    slid = slid and width.stride <= (2 if kind == "max" else 1) and (lanes or channels) >= _SLID
    direct = may and not ordered and (slid or outer * width.kernel - 1 <= apart)

    def grouped(width_of: int, chunk: int) -> int:
        """Return the number of rows that are pooled together, in chunks of this many elements."""
        stretch = ((chunk - 1) * width.stride + width.span) * width_of
        if width_of == 1 and width.stride > 1:
            vector = _PIECE // (itemsize or 1)
            stretch = (stretch // width.stride + 3 * vector) // vector * vector * width.stride
        return 1 if direct else min(_ROW // stretch, height.count)

    def group_of(lanes: int, chunk: int) -> int:
        """Return the rows of a group; the last item may have a single plane."""
        return min(grouped(lanes, chunk), grouped(1, chunk))

    def fits(lanes: int, band: int, chunk: int, room: int = _BYTES) -> bool:
        slices, rows, columns = [
            min((n - 1) * axis.stride + axis.span, axis.size)
            for axis, n in zip(axes, (1, band, chunk), strict=True)
        ]
        most = max(slices * rows * columns, band * chunk) * lanes * itemsize
        return group_of(lanes, chunk) > 0 and most <= room

    while lanes > 1 and not fits(lanes, 1, 1):
        lanes //= 2
    # For small images, more planes amortize the overhead of a row.
    while 1 < lanes <= planes // (2 * _LEAST_ITEMS) and fits(
        2 * lanes, height.count, width.count, _BYTES // 2
    ):
        lanes *= 2
    if lanes > 1:
        chunk = _most(width.count, lambda n: fits(lanes, 1, n))
        band = _most(height.count, lambda n: fits(lanes, n, chunk))
        return _Part(lanes, band, chunk, group_of(lanes, chunk), direct)
    direct = direct and not (itemsize and width.stride > 1)
    if not grouped(channels, 1):
        direct = may
    if not grouped(channels, 1):
        raise UnsupportedError
    chunk = _most(width.count, lambda n: grouped(channels, n) > 0)
    group = grouped(channels, chunk)
    return _Part(0, group, chunk, group, direct)


def _most(count: int, fits: Callable[[int], bool]) -> int:
    """Return the largest number up to ``count`` that fits, by bisection; 1 always fits."""
    if count > 1 and fits(count):  # mostly
        return count
    return bisect_right(range(2, count + 1), False, key=lambda n: not fits(n)) + 1


def _counted(include_padding: int, *numbers: int) -> np.ndarray:
    """Return the divisor of each window's sum along each axis, given the numbers of the kernel's
    argument for it, and its padding at the end."""
    counts = []
    for at in range(0, len(numbers), 7):
        size, count, kernel, stride, dilation, begin, end = numbers[at : at + 7]
        low, high = (-begin, size + end) if include_padding else (0, size)
        read = np.arange(count)[:, None] * stride - begin + np.arange(kernel) * dilation
        counts.append(((read >= low) & (read < high)).sum(axis=1))
    return np.concatenate(counts).astype(np.float64)
