"""Patches of images, as vectors."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

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
