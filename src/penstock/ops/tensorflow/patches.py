"""Patches of images as vectors, and the morphological dilation of images."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from penstock.core.checkpoints import checkpoint
from penstock.core.types import Dim, ShapeError, TensorType, Type
from penstock.host.current_run import reserve
from penstock.ir.op import Attrs, Consts, Types
from penstock.ops.common.shape_rules import dim_product, tensor
from penstock.ops.tensorflow.common import array_operator


def _along(size: int, window: int, stride: int, rate: int, padding: str) -> tuple[int, int, int]:
    """The number of patches along an axis, and the zero padding before and after it."""
    reach = (window - 1) * rate + 1
    if padding == "VALID":
        return max(-(-(size - reach + 1) // stride), 0), 0, 0
    count = -(-size // stride)
    total = max((count - 1) * stride + reach - size, 0)
    return count, total // 2, total - total // 2


def _spatial(attrs: Attrs) -> list[tuple[int, int, int]]:
    """Return patch size, stride and dilation for height and width."""
    entries = [attrs[name] for name in ("ksizes", "strides", "rates")]
    if any(len(e) != 4 or min(e) < 1 or e[0] != 1 or e[3] != 1 for e in entries):
        raise ShapeError(
            f"ksizes, strides and rates are {entries}: each must be [1, height, width, 1], all "
            "positive"
        )
    return [(a, b, c) for a, b, c in zip(*entries, strict=True)][1:3]


def _infer(types: Types, attrs: Attrs, consts: Consts) -> Sequence[Type]:
    x, spatial = tensor(types, 0), _spatial(attrs)
    if x.shape is None:
        return (TensorType(x.dtype),)
    if len(x.shape) != 4:
        raise ShapeError(f"images must have shape [N, H, W, C], not {x.shape}")
    padding = attrs["padding"]
    counts: list[Dim] = [
        _along(size, *steps, padding)[0] if isinstance(size, int) else None
        for size, steps in zip(x.shape[1:3], spatial, strict=True)
    ]
    depth = dim_product((x.shape[3], spatial[0][0], spatial[1][0]))
    return (TensorType(x.dtype, (x.shape[0], *counts, depth)),)


@array_operator("ExtractImagePatches", infer=_infer)
def extract_image_patches(
    x: np.ndarray,
    *,
    ksizes: Sequence[int],
    strides: Sequence[int],
    rates: Sequence[int],
    padding: str,
) -> np.ndarray:
    """Extract patches [N, rows, columns, height * width * C] from images [N, H, W, C]."""
    if x.ndim != 4:
        raise ShapeError(f"images must have shape [N, H, W, C], not {x.shape}")
    spatial = _spatial({"ksizes": ksizes, "strides": strides, "rates": rates})
    along = [_along(n, *s, padding) for n, s in zip(x.shape[1:3], spatial, strict=True)]
    (height, down, row_rate), (width, right, column_rate) = spatial
    rows, columns = along[0][0], along[1][0]
    dims = (x.shape[0], rows, columns, height * width * x.shape[3])
    if not rows * columns:
        return np.empty(dims, x.dtype)
    # Overlapping patches may need many times the memory of the images.
    reserve(x.itemsize * x.shape[0] * rows * columns * dims[3])
    image = np.pad(x, [(0, 0), *[pads[1:] for pads in along], (0, 0)])
    reaches = ((height - 1) * row_rate + 1, (width - 1) * column_rate + 1)
    patches = np.lib.stride_tricks.sliding_window_view(image, reaches, (1, 2))
    patches = patches[:, ::down, ::right, :, ::row_rate, ::column_rate][:, :rows, :columns]
    return patches.transpose(0, 1, 2, 4, 5, 3).reshape(dims)


def _dilation_steps(attrs: Attrs) -> list[tuple[int, int]]:
    """Return stride and dilation for height and width."""
    entries = [attrs[name] for name in ("strides", "rates")]
    if any(len(e) != 4 or min(e) < 1 or e[0] != 1 or e[3] != 1 for e in entries):
        raise ShapeError(
            f"strides and rates are {entries}: each must be [1, height, width, 1], all positive"
        )
    return list(zip(entries[0][1:3], entries[1][1:3], strict=True))


def _infer_dilation(types: Types, attrs: Attrs, consts: Consts) -> Sequence[Type]:
    x, kernel = tensor(types, 0), tensor(types, 1).shape
    if x.shape is None or kernel is None:
        return (TensorType(x.dtype),)
    if len(x.shape) != 4 or len(kernel) != 3:
        raise ShapeError(f"{x.shape} and {kernel} must be [N, H, W, C] and a filter [H, W, C]")
    counts: list[Dim] = [
        _along(size, window, stride, rate, attrs["padding"])[0]
        if isinstance(size, int) and isinstance(window, int)
        else None
        for size, window, (stride, rate) in zip(
            x.shape[1:3], kernel[:2], _dilation_steps(attrs), strict=True
        )
    ]
    return (TensorType(x.dtype, (x.shape[0], *counts, x.shape[3])),)


@array_operator("Dilation2D", infer=_infer_dilation)
def dilation(
    x: np.ndarray, kernel: np.ndarray, *, strides: Sequence[int], rates: Sequence[int], padding: str
) -> np.ndarray:
    """The greatest sum of a pixel of [N, H, W, C] and its entry of the filter [H, W, C], in each
    window. Pixels beyond the image do not count, and neither do sums that are NaN."""
    if x.ndim != 4 or kernel.ndim != 3 or x.shape[3] != kernel.shape[2]:
        raise ShapeError(f"images {x.shape} [N, H, W, C] do not fit a filter {kernel.shape}")
    steps = _dilation_steps({"strides": strides, "rates": rates})
    along = [
        (*_along(size, window, stride, rate, padding)[:2], stride, rate)
        for size, window, (stride, rate) in zip(x.shape[1:3], kernel.shape[:2], steps, strict=True)
    ]
    lowest = np.finfo(x.dtype).min if x.dtype.kind == "f" else np.iinfo(x.dtype).min
    out = np.full((len(x), along[0][0], along[1][0], x.shape[3]), lowest, x.dtype)
    for row in range(kernel.shape[0]):
        for column in range(kernel.shape[1]):
            checkpoint()
            (into_y, from_y), (into_x, from_x) = (
                _within(size, place, *given)
                for size, place, given in zip(x.shape[1:3], (row, column), along, strict=True)
            )
            window = out[:, into_y, into_x]
            np.fmax(window, x[:, from_y, from_x] + kernel[row, column], out=window)
    return out


def _within(
    size: int, place: int, count: int, before: int, stride: int, rate: int
) -> tuple[slice, slice]:
    """The windows whose tap at ``place`` is a pixel, and the pixels."""
    offset = place * rate - before
    first = max(-(offset // stride), 0) if offset < 0 else 0
    last = min((size - 1 - offset) // stride + 1, count)
    start = first * stride + offset
    if last <= first:
        return slice(0, 0), slice(0, 0)
    return slice(first, last), slice(start, start + (last - first - 1) * stride + 1, stride)
