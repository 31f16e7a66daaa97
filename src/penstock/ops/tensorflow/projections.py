"""Images transformed by projections, as Keras's RandomRotation, RandomZoom and their kin do."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from penstock.core.types import ShapeError, TensorType, Type
from penstock.host.current_run import reserve
from penstock.ir.op import Attrs, Consts, Types
from penstock.ops.common.shape_rules import tensor
from penstock.ops.tensorflow.common import array_operator

# Coordinates beyond an image, by the fill mode. Like TensorFlow, they are computed in float32.


def _bounded(x: np.ndarray, size: int) -> np.ndarray:
    return np.clip(x, np.float32(0), np.float32(size - 1))


def _reflected(x: np.ndarray, size: int) -> np.ndarray:
    """d c b a | a b c d | d c b a"""
    if size <= 1:
        return np.zeros_like(x)
    both = np.float32(2 * size)
    low = np.where(x < both, both * np.trunc(-x / both) + x, x)
    low = np.where(low < -size, low + both, -low - np.float32(1))
    high = x - both * np.trunc(x / both)
    high = np.where(high >= size, both - high - np.float32(1), high)
    return _bounded(np.where(x < 0, low, np.where(x > size - 1, high, x)), size)


def _wrapped(x: np.ndarray, size: int) -> np.ndarray:
    """a b c d | a b c d | a b c d"""
    if size <= 1:
        return np.zeros_like(x)
    whole, last = np.float32(size), np.float32(size - 1)
    low = x + whole * (np.trunc(-x / last) + np.float32(1))
    high = x - whole * np.trunc(x / last)
    return _bounded(np.where(x < 0, low, np.where(x > last, high, x)), size)


_FILLS: Mapping[str, Callable[[np.ndarray, int], np.ndarray]] = {
    "CONSTANT": lambda x, size: x,
    "NEAREST": _bounded,
    "REFLECT": _reflected,
    "WRAP": _wrapped,
}


def _infer(types: Types, attrs: Attrs, consts: Consts) -> Sequence[Type]:
    images, size = tensor(types, 0), consts[2]
    if images.shape is None or len(images.shape) != 4:
        return (TensorType(images.dtype),)
    side = (None, None) if size is None or size.size != 2 else tuple(size.reshape(-1).tolist())
    return (TensorType(images.dtype, (images.shape[0], *side, images.shape[3])),)


@array_operator("ImageProjectiveTransform", infer=_infer)
def image_projective_transform(
    images: np.ndarray,
    transforms: np.ndarray,
    size: np.ndarray,
    fill: np.ndarray,
    *,
    interpolation: str,
    fill_mode: str,
) -> np.ndarray:
    """Read the pixel (x, y) of a result from ((a x + b y + c) / k, (d x + e y + f) / k) of its
    image [N, H, W, C], with k = g x + h y + 1; ``transforms`` are [a, b, c, d, e, f, g, h], one for
    each image, or one for all."""
    if images.ndim != 4 or size.shape != (2,) or (size <= 0).any():
        raise ShapeError(f"images {images.shape} must be [N, H, W, C], and output_shape {size} two")
    if transforms.ndim != 2 or transforms.shape[1] != 8:
        raise ShapeError(f"transforms must have shape [N, 8] or [1, 8], not {transforms.shape}")
    if transforms.shape[0] not in (1, len(images)):
        raise ShapeError(f"{transforms.shape[0]} transforms do not fit {len(images)} images")
    if interpolation not in ("NEAREST", "BILINEAR") or fill_mode not in _FILLS:
        raise ShapeError(f"interpolation {interpolation!r} or fill_mode {fill_mode!r} is unknown")
    count, height, width, depth = images.shape
    rows, columns = size.tolist()
    # Coordinates, and up to four pixels for each.
    reserve((8 * 4 + 4 * depth * 6) * count * rows * columns)
    y, x = np.ogrid[:rows, :columns]
    x, y = x.astype(np.float32), y.astype(np.float32)
    a, b, c, d, e, f, g, h = transforms.astype(np.float32).T[:, :, np.newaxis, np.newaxis]
    with np.errstate(all="ignore"):
        divisor = g * x + h * y + np.float32(1)
        read_x = _FILLS[fill_mode]((a * x + b * y + c) / divisor, width)
        read_y = _FILLS[fill_mode]((d * x + e * y + f) / divisor, height)
    value = fill.reshape(()).astype(images.dtype)
    read = _Pixels(images, value, np.broadcast_shapes(divisor.shape, (count, rows, columns)))
    result = (read.nearest if interpolation == "NEAREST" else read.bilinear)(read_y, read_x)
    shape = (count, rows, columns, 1)
    return np.where(np.broadcast_to(divisor[..., np.newaxis] == 0, shape), value, result)


class _Pixels:
    """Pixels of images at float32 coordinates; ``fill`` beyond the images."""

    def __init__(self, images: np.ndarray, fill: np.ndarray, shape: tuple[int, ...]) -> None:
        self.images, self.fill, self.shape = images, fill, shape
        self.numbers = np.arange(len(images))[:, np.newaxis, np.newaxis]

    def at(self, y: np.ndarray, x: np.ndarray) -> np.ndarray:
        height, width = self.images.shape[1:3]
        inside = (y >= 0) & (y < height) & (x >= 0) & (x < width)
        row, column = (np.where(inside, place, 0).astype(np.intp) for place in (y, x))
        if not self.images.size:
            return np.full((*self.shape, self.images.shape[3]), self.fill)
        pixels = self.images[self.numbers, row, column]
        return np.where(np.broadcast_to(inside, self.shape)[..., np.newaxis], pixels, self.fill)

    def nearest(self, y: np.ndarray, x: np.ndarray) -> np.ndarray:
        """Halves are rounded away from 0."""
        return self.at(*(np.trunc(place + np.copysign(0.5, place)) for place in (y, x)))

    def bilinear(self, y: np.ndarray, x: np.ndarray) -> np.ndarray:
        one = np.float32(1)
        top, left = np.floor(y), np.floor(x)
        right = (x - left)[..., np.newaxis]
        low = (y - top)[..., np.newaxis]
        far_right = (left + one - x)[..., np.newaxis]
        far_low = (top + one - y)[..., np.newaxis]
        real = np.float64 if self.images.dtype == np.float64 else np.float32

        def between(row: np.ndarray) -> np.ndarray:
            first, second = (self.at(row, place).astype(real) for place in (left, left + one))
            return far_right * first + right * second

        mean = far_low * between(top) + low * between(top + one)
        return mean.astype(self.images.dtype)
