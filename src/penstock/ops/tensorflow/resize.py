"""ResizeBicubic, ResizeArea and ScaleAndTranslate, whose definitions differ from ONNX's Resize."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from penstock.core.types import FLOAT32, ShapeError, TensorType, Type
from penstock.ir.op import Attrs, Consts, Types
from penstock.ops.common.shape_rules import ints, pad_with_none, tensor
from penstock.ops.onnx.resize import cubic_weights
from penstock.ops.tensorflow.common import array_operator, lengths

_STEPS = 1024  # positions are rounded to 1 / _STEPS of a pixel for cubic weights


def _infer(types: Types, attrs: Attrs, consts: Consts) -> Sequence[Type]:
    image, size = tensor(types, 0).shape, lengths(ints(types, consts, 1))
    if image is not None and len(image) != 4:
        raise ShapeError(f"images must have shape [N, H, W, C], not {image}")
    if size is not None and len(size) != 2:
        raise ShapeError(f"size {list(size)} must be [height, width]")
    batch, *_, channels = pad_with_none(image or (), 4)
    return (TensorType(FLOAT32, (batch, *(size or (None, None)), channels)),)


def _sizes(image: np.ndarray, size: np.ndarray) -> list[tuple[int, int]]:
    """Return (input size, output size) for height and width."""
    if image.ndim != 4 or size.shape != (2,) or size.min() < 1 or 0 in image.shape[1:3]:
        raise ShapeError(f"sizes must be positive: {image.shape} resized to {size.tolist()}")
    return list(zip(image.shape[1:3], size.tolist(), strict=True))


def _scale(before: int, after: int, corners: bool) -> np.float32:
    """Input pixels per output pixel."""
    if corners and after > 1:
        return np.float32((before - 1) / np.float32(after - 1))
    return np.float32(before / np.float32(after))


Taps = tuple[np.ndarray, np.ndarray]
"""for each output pixel, the indices of the input pixels that it reads, and their weights"""


def _resized(image: np.ndarray, taps: Sequence[Taps]) -> np.ndarray:
    result = image.astype(np.float32)
    for axis, (places, weights) in reversed([*enumerate(taps, 1)]):
        shape = [1] * 4
        shape[axis] = len(places)
        parts: Any = 0
        for place, weight in zip(places.T, weights.T, strict=True):
            parts = parts + np.take(result, place, axis) * weight.reshape(shape)
        result = parts
    return result


def _resize(name: str, taps: Callable[..., Taps]) -> None:
    @array_operator(name, infer=_infer)
    def resize(
        image: np.ndarray,
        size: np.ndarray,
        *,
        align_corners: bool = False,
        half_pixel_centers: bool = False,
    ) -> np.ndarray:
        if align_corners and half_pixel_centers:
            raise ShapeError("align_corners and half_pixel_centers must not both be true")
        each = [
            taps(before, after, _scale(before, after, align_corners), half_pixel_centers)
            for before, after in _sizes(image, size)
        ]
        return _resized(image, each)


def _cubic_taps(before: int, after: int, scale: np.float32, centres: bool) -> Taps:
    """Four taps of Keys' cubic convolution (1981). With half-pixel centres, its parameter is -0.5
    and pixels outside the image have weight 0; otherwise it is -0.75 and the border is repeated.
    """
    a = np.float32(-0.5 if centres else -0.75)
    at = np.arange(after, dtype=np.float32)
    at = (at + np.float32(0.5)) * scale - np.float32(0.5) if centres else at * scale
    first = np.floor(at)
    # TensorFlow uses a table of weights: the same rounding of positions reproduces its results.
    offset = np.rint((at - first) * np.float32(_STEPS)) / np.float32(_STEPS)

    weights = np.stack(cubic_weights(offset, a), 1)
    places = first.astype(np.int64)[:, np.newaxis] + np.arange(-1, 3)
    bounded = places.clip(0, before - 1)
    if centres:
        weights = np.where(places == bounded, weights, np.float32(0))
        total = weights.sum(axis=1, keepdims=True)
        # TensorFlow's bound: weights that nearly cancel are not normalized.
        small = np.abs(total) < 1000 * np.finfo(np.float32).tiny
        weights = np.where(small, weights, weights / total)
    return bounded, weights.astype(np.float32)


def _area_taps(before: int, after: int, scale: np.float32, centres: bool) -> Taps:
    """The input pixels that each output pixel covers, weighted by the covered area."""
    low = np.arange(after, dtype=np.float32) * scale
    high = np.arange(1, after + 1, dtype=np.float32) * scale
    first, end = np.floor(low).astype(np.int64), np.ceil(high).astype(np.int64)
    places = first[:, np.newaxis] + np.arange(int((end - first).max()))
    starts, ends = low[:, np.newaxis], high[:, np.newaxis]
    covered = np.minimum(places + 1, ends) - np.maximum(places, starts)
    weights = np.where(places < end[:, np.newaxis], covered, 0) / scale
    return places.clip(0, before - 1), weights.astype(np.float32)


_resize("ResizeBicubic", _cubic_taps)
_resize("ResizeArea", _area_taps)


_Window = Callable[[np.ndarray], np.ndarray]


def _lanczos(radius: int) -> _Window:
    return lambda x: np.sinc(x) * np.sinc(x / radius)


def _keys(x: np.ndarray) -> np.ndarray:
    near, far = ((1.5 * x - 2.5) * x) * x + 1, ((-0.5 * x + 2.5) * x - 4) * x + 2
    return np.where(x < 1, near, far)


def _mitchell(x: np.ndarray) -> np.ndarray:
    near = ((7 / 6 * x - 2) * x) * x + 8 / 9
    return np.where(x < 1, near, ((-7 / 18 * x + 2) * x - 10 / 3) * x + 16 / 9)


_WINDOWS: dict[str, tuple[float, _Window]] = {
    **{f"lanczos{n}": (n, _lanczos(n)) for n in (1, 3, 5)},
    "gaussian": (1.5, lambda x: np.exp(-2 * x * x)),
    "box": (1.0, lambda x: np.where(x < 0.5, 1, np.where(x == 0.5, 0.5, 0))),
    "triangle": (1.0, lambda x: 1 - x),
    "keyscubic": (2.0, _keys),
    "mitchellcubic": (2.0, _mitchell),
}
"""the radius of each kernel, and its weight at a distance up to that"""


@array_operator("ScaleAndTranslate", infer=_infer)
def scale_and_translate(
    image: np.ndarray,
    size: np.ndarray,
    scale: np.ndarray,
    translation: np.ndarray,
    *,
    kernel_type: str,
    antialias: bool,
) -> np.ndarray:
    """Pixel p of the image goes to scale * p + translation. An antialiased kernel is as wide as the
    output's pixels are in the image."""
    if scale.shape != (2,) or translation.shape != (2,) or not (scale > 0).all():
        raise ShapeError(f"two positive scales are needed, and two translations, not {scale}")
    if kernel_type not in _WINDOWS:
        raise ShapeError(f"kernel_type {kernel_type!r} is none of {', '.join(_WINDOWS)}")
    radius, window = _WINDOWS[kernel_type]
    each = []
    for (before, after), factor, shift in zip(
        _sizes(image, size), scale.astype(np.float32), translation.astype(np.float32), strict=True
    ):
        step = np.float32(1) / factor
        wide = max(step, np.float32(1)) if antialias else np.float32(1)
        at = (np.arange(after, dtype=np.float32) + np.float32(0.5)) * step - step * shift
        reach = np.float32(radius) * wide
        first = np.ceil(at - reach - np.float32(0.5)).clip(0, before - 1).astype(np.int64)
        last = np.floor(at + reach - np.float32(0.5)).clip(0, before - 1).astype(np.int64)
        # Taps beyond the last one of an output pixel get the weight 0.
        places = first[:, np.newaxis] + np.arange(int((last - first).max(initial=0)) + 1)
        distance = np.abs((places + np.float32(0.5) - at[:, np.newaxis]) / wide)
        inside = (places <= last[:, np.newaxis]) & (distance < radius)
        weights = np.where(inside, window(distance), 0)
        weights[(at < 0) | (at > before)] = 0  # pixels from outside of the image are 0
        total = weights.sum(1, keepdims=True)
        # TensorFlow's bound: weights that nearly cancel are not normalized.
        small = np.abs(total) < 1000 * np.finfo(np.float32).tiny
        weights = np.divide(weights, total, out=np.zeros_like(weights), where=~small)
        each.append((places.clip(0, before - 1), weights.astype(np.float32)))
    return _resized(image, each)
