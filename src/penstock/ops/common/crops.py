"""Boxes cut out of images and resized, as TensorFlow and ONNX Runtime have it."""

from __future__ import annotations

import numpy as np

from penstock.core.records import NamedTuple
from penstock.core.types import ShapeError


class CropSampling(NamedTuple):
    """The samples of a box: the ``nearest`` pixels or interpolated ones; those beyond the image are
    ``outside``. ``exact_ends``: the last sample lies on the box's end, however the others are
    rounded."""

    nearest: bool
    outside: float
    exact_ends: bool = False


def resized_crops(
    image: np.ndarray,
    boxes: np.ndarray,
    which: np.ndarray,
    size: np.ndarray,
    sampling: CropSampling,
) -> np.ndarray:
    """Samples of boxes (y1, x1, y2, x2), in parts of an image [batch, height, width, channels];
    ``which`` image each box is of."""
    nearest, outside, exact_ends = sampling
    if image.ndim != 4 or boxes.ndim != 2 or boxes.shape[1:] != (4,):
        raise ShapeError(f"an image of {image.shape} and boxes of {boxes.shape}")
    if which.shape != boxes.shape[:1] or size.shape != (2,) or (size <= 0).any():
        raise ShapeError(f"{boxes.shape[0]} boxes with images {which.shape}, size {size}")
    if which.size and not 0 <= which.min() <= which.max() < image.shape[0]:
        raise ShapeError(f"boxes are of images {which.tolist()}, of {image.shape[0]}")
    height, width = image.shape[1:3]
    y = _positions(boxes[:, 0], boxes[:, 2], height, int(size[0]), exact_ends)
    x = _positions(boxes[:, 1], boxes[:, 3], width, int(size[1]), exact_ends)
    inside = ((y >= 0) & (y <= height - 1))[:, :, None] & ((x >= 0) & (x <= width - 1))[:, None]
    # What lies outside is replaced, but needs some place to be read from.
    y = np.clip(np.nan_to_num(y), 0, height - 1)
    x = np.clip(np.nan_to_num(x), 0, width - 1)
    sampled = (_nearest if nearest else _bilinear)(image, which, y, x)
    return np.where(inside[..., np.newaxis], sampled, np.float32(outside)).astype(np.float32)


def _positions(
    low: np.ndarray, high: np.ndarray, length: int, count: int, exact_ends: bool
) -> np.ndarray:
    """The places of the samples of each box in a dim of the image, of which boxes are parts."""
    if count > 1:
        step = (high - low) * np.float32(length - 1) / np.float32(count - 1)
        first = low * np.float32(length - 1)
        places = first[:, np.newaxis] + np.arange(count, dtype=np.float32) * step[:, np.newaxis]
        if exact_ends:
            places[:, -1] = high * np.float32(length - 1)
        return places
    return (np.float32(0.5) * (low + high) * np.float32(length - 1))[:, np.newaxis]


def _pixels(image: np.ndarray, which: np.ndarray, y: np.ndarray, x: np.ndarray) -> np.ndarray:
    rows, columns = y.astype(np.int64), x.astype(np.int64)
    return image[which[:, None, None], rows[:, :, None], columns[:, None, :]]


def _nearest(image: np.ndarray, which: np.ndarray, y: np.ndarray, x: np.ndarray) -> np.ndarray:
    """Halves are rounded away from zero, as in C."""
    half = np.float32(0.5)
    return _pixels(image, which, np.floor(y + half), np.floor(x + half))


def _bilinear(image: np.ndarray, which: np.ndarray, y: np.ndarray, x: np.ndarray) -> np.ndarray:
    top, left, bottom, right = np.floor(y), np.floor(x), np.ceil(y), np.ceil(x)
    down = (y - top).astype(np.float32)[:, :, None, None]
    along = (x - left).astype(np.float32)[:, None, :, None]

    def row(y: np.ndarray) -> np.ndarray:
        first, last = (_pixels(image, which, y, x).astype(np.float32) for x in (left, right))
        return first + (last - first) * along

    above = row(top)
    return above + (row(bottom) - above) * down
