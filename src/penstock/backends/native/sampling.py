"""GridSample, and the grids of AffineGrid."""

from __future__ import annotations

import math

import numpy as np

from penstock.backends.native import by_memory, family, rows_ns, str_
from penstock.backends.native.kernel import NativeCall, Site, Tensor
from penstock.ops.onnx.image import pixel_centres, sampling_modes

_POINTS, _MOST_TAPS, _MOST_RANK = 64, 64, 3  # as in c/windows/sampling.c
_MOST_PIXELS = 2**31
_TAPS = {"nearest": 1, "linear": 2, "cubic": 4}
_PADDING = ("zeros", "border", "reflection")
_SUFFIXES = {"float32": "float", "float64": "double"}


@family("GridSample", work=by_memory)
def grid_sample(site: Site) -> NativeCall | None:
    """GridSample of images in the type of their grids."""
    x, grid, y = site.tensor(0), site.tensor(1), site.output()
    suffix = _SUFFIXES.get(str_(x.dtype))
    if suffix is None or grid.dtype != x.dtype or 0 in x.dims:
        return None
    mode, padding = sampling_modes(site.node.attrs)
    sizes, points, taps = x.dims[2:], math.prod(y.dims[2:]), _TAPS[mode]
    rank, pixels = len(sizes), math.prod(sizes)
    if rank > _MOST_RANK or pixels >= _MOST_PIXELS:
        return None
    together = min(points, _POINTS)
    reads = together * taps**rank
    return NativeCall(
        f"grid_sample_{suffix}",
        (
            *(Tensor(0), Tensor(1), site.result(), np.array(sizes, np.int64)),
            *(rank, x.dims[1], points, taps),
            _PADDING.index(padding),
            int(bool(site.attr("align_corners", 0))),
        ),
        items=x.dims[0] * math.ceil(points / _POINTS),
        item_ns=rows_ns(reads * (20 + 12 * x.dims[1]), rows=together),
    )


@family("AffineGrid", work=by_memory)
def affine_grid(site: Site) -> NativeCall | None:
    """AffineGrid of a constant size."""
    theta, y = site.tensor(0), site.output()
    suffix = _SUFFIXES.get(str_(theta.dtype))
    if suffix is None or site.constant(1) is None or 0 in y.dims:
        return None
    batch, *sizes, rank = y.dims
    corners = bool(site.attr("align_corners", 0))
    centres = np.concatenate([pixel_centres(size, corners) for size in sizes])
    rows = math.prod(sizes[:-1])
    return NativeCall(
        f"affine_grid_{suffix}",
        (
            *(Tensor(0), centres.astype(theta.dtype), site.result()),
            *(np.array(sizes, np.int64), rank, rows),
        ),
        items=batch * rows,
        item_ns=rows_ns(10 * sizes[-1] * rank, rows=2),
    )
