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
    beyond = ~((y >= 0) & (y <= height - 1))[:, :, None] | ~((x >= 0) & (x <= width - 1))[:, None]
    # What lies outside is replaced, but needs some place to be read from.
    y = np.clip(np.nan_to_num(y), 0, height - 1)
    x = np.clip(np.nan_to_num(x), 0, width - 1)
    begins = which.astype(np.int64)[:, None] * height
    # Channels of a single image that lie first are picked one by one: to move them takes longer.
    by_plane = len(image) == 1 and not image.flags.c_contiguous
    every = image.reshape(-1, image.shape[3])

    def pixels(y: np.ndarray, x: np.ndarray) -> np.ndarray:
        lines = (begins + y.astype(np.int64)) * width
        places = lines[:, :, None] + x.astype(np.int64)[:, None]
        picked = np.take(every.T, places, 1) if by_plane else np.take(every, places, 0)
        return (np.moveaxis(picked, 0, -1) if by_plane else picked).astype(np.float32, copy=False)

    def row(y: np.ndarray) -> np.ndarray:
        first, last = pixels(y, np.floor(x)), pixels(y, np.ceil(x))
        return _between(first, last, (x - np.floor(x))[:, None, :, None])

    if nearest:  # halves are rounded away from zero, as in C
        result = pixels(np.floor(y + np.float32(0.5)), np.floor(x + np.float32(0.5)))
    else:
        result = _between(row(np.floor(y)), row(np.ceil(y)), (y - np.floor(y))[:, :, None, None])
    if beyond.any():
        result[beyond] = outside
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
