"""Conversion between RGB and HSV, and adjustment of hue and saturation.

The last dim has the three channels. Hues in tensors are in [0, 1].
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from penstock.core.types import ShapeError, TensorType, Type
from penstock.ir.op import Attrs, Consts, Types
from penstock.ops.common.shape_rules import fits, one_element, tensor
from penstock.ops.tensorflow.common import array_operator


def _infer(types: Types, attrs: Attrs, consts: Consts) -> Sequence[Type]:
    x = tensor(types, 0)
    if x.shape is not None and not fits(x.shape[-1:], (3,)):
        raise ShapeError(f"the last dim of an image must be 3 (channels), not of shape {x.shape}")
    return (TensorType(x.dtype, x.shape),)


def _channels(x: np.ndarray, rank: int = 1) -> np.ndarray:
    """The channels as [3, ...], in float32 or wider."""
    if x.ndim < rank or x.shape[-1] != 3:
        raise ShapeError(
            f"the input must have rank {rank} or more and a last dim of 3, but has shape {x.shape}"
        )
    return np.moveaxis(x.astype(np.float64 if x.dtype == np.float64 else np.float32), -1, 0)


def _hue(red: np.ndarray, green: np.ndarray, blue: np.ndarray) -> tuple[np.ndarray, ...]:
    """The hue in sixths of the circle, and the minimum and maximum of the channels (Smith, Color
    gamut transform pairs, 1978)."""
    high = np.maximum(np.maximum(red, green), blue)
    low = np.minimum(np.minimum(red, green), blue)
    spread = high - low
    hue = np.where(
        red == high,
        (green - blue) / spread,
        np.where(green == high, 2 + (blue - red) / spread, 4 + (red - green) / spread),
    )
    # The hue of greys is 0 rather than 0 / 0.
    hue = np.where(spread > 0, hue, hue.dtype.type(0))
    return np.where(hue < 0, hue + 6, hue), low, high


def _weights(hue: np.ndarray) -> np.ndarray:
    """The position of each channel between minimum (0) and maximum (1), for a hue in sixths."""
    parts = (np.abs(hue - 3) - 1, 2 - np.abs(hue - 2), 2 - np.abs(hue - 4))
    return np.stack([np.clip(part, 0, 1) for part in parts])


def _image(channels: np.ndarray, dtype: np.dtype) -> np.ndarray:
    return np.ascontiguousarray(np.moveaxis(channels, 0, -1).astype(dtype))


@array_operator("RGBToHSV", infer=_infer)
def rgb_to_hsv(x: np.ndarray) -> np.ndarray:
    hue, low, high = _hue(*_channels(x))
    saturation = np.where(high > 0, (high - low) / high, high.dtype.type(0))
    return _image(np.stack([hue / 6, saturation, high]), x.dtype)


@array_operator("HSVToRGB", infer=_infer)
def hsv_to_rgb(x: np.ndarray) -> np.ndarray:
    hue, saturation, value = _channels(x)
    return _image((1 - saturation + saturation * _weights(hue * 6)) * value, x.dtype)


@array_operator("AdjustHue", infer=_infer)
def adjust_hue(x: np.ndarray, delta: np.ndarray) -> np.ndarray:
    """Rotate hues by ``delta`` of the full circle."""
    hue, low, high = _hue(*_channels(x, 3))
    turned = np.mod(hue + one_element(delta, "delta") * 6, 6)
    return _image(low + (high - low) * _weights(turned), x.dtype)


@array_operator("AdjustSaturation", infer=_infer)
def adjust_saturation(x: np.ndarray, scale: np.ndarray) -> np.ndarray:
    hue, low, high = _hue(*_channels(x, 3))
    saturation = np.where(high > 0, (high - low) / high, high.dtype.type(0))
    saturation = np.clip(saturation * one_element(scale, "scale"), 0, 1)
    return _image((1 - saturation + saturation * _weights(hue)) * high, x.dtype)
