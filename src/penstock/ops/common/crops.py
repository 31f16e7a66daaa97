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
    inside_y, inside_x = (y >= 0) & (y <= height - 1), (x >= 0) & (x <= width - 1)
    # Values outside are replaced, but need some place to be read from.
    y, x = np.where(inside_y, y, np.float32(0)), np.where(inside_x, x, np.float32(0))
    begins = which.astype(np.int64)[:, None] * height
    # Channels of a single image that lie first are picked one by one: to move them takes longer.
    by_plane = len(image) == 1 and not image.flags.c_contiguous
    every = image.reshape(-1, image.shape[3])

    def pixels(y: np.ndarray, x: np.ndarray) -> np.ndarray:
        places = ((begins + y) * width)[:, :, None] + x[:, None]
        picked = np.take(every.T, places, 1) if by_plane else np.take(every, places, 0)
        return (np.moveaxis(picked, 0, -1) if by_plane else picked).astype(np.float32, copy=False)

    if nearest:  # halves are rounded away from zero, as in C
        y, x = y + np.float32(0.5), x + np.float32(0.5)
    top, left = y.astype(np.int64), x.astype(np.int64)
    result = pixels(top, left)
    if not nearest:
        bottom, right = np.ceil(y).astype(np.int64), np.ceil(x).astype(np.int64)
        along = (x - left)[:, None, :, None]
        result = _between(result, pixels(top, right), along)
        below = _between(pixels(bottom, left), pixels(bottom, right), along)
        result = _between(result, below, (y - top)[:, :, None, None])
    if not (inside_y.all() and inside_x.all()):
        result[~(inside_y[:, :, None] & inside_x[:, None])] = outside
    return result


def _between(first: np.ndarray, last: np.ndarray, part: np.ndarray) -> np.ndarray:
    """first + (last - first) part, in the place of ``last``."""
    last -= first
    last *= part.astype(np.float32, copy=False)
    last += first
    return last


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
