"""Spectrograms of sound, their cepstral coefficients, and rotations by Hadamard's matrix."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache, partial

import numpy as np

from penstock.core.types import FLOAT32, Dim, ShapeError, TensorType, Type
from penstock.ir.op import Attrs, Consts, Types
from penstock.ops import registry
from penstock.ops.common import shape_rules as rules

array_operator = partial(registry.array_operator, domain=registry.TFLITE)
_MOST_CHANNELS = 4096
_FLOOR = 1e-12  # of a channel, before its logarithm


def _transform_length(window: int, stride: int) -> int:
    """The least power of two that is not below the window."""
    if not (2 <= window < 2**31 and stride > 0):
        raise ShapeError(f"a spectrogram of windows of {window} samples every {stride}")
    return 1 << int(window - 1).bit_length()


def _infer_spectrogram(types: Types, attrs: Attrs, consts: Consts) -> Sequence[Type]:
    window, stride = attrs["window_size"], attrs["stride"]
    bins = _transform_length(window, stride) // 2 + 1
    rows, channels = rules.tensor(types, 0).shape or (None, None)
    windows: Dim = max((rows - window) // stride + 1, 0) if isinstance(rows, int) else None
    return (TensorType(FLOAT32, (channels, windows, bins)),)


@array_operator("AudioSpectrogram", infer=_infer_spectrogram)
def audio_spectrogram(
    x: np.ndarray, *, window_size: int, stride: int, magnitude_squared: bool = False
) -> np.ndarray:
    """Magnitudes [channels, windows, bins] of samples [samples, channels] under a Hann window."""
    length = _transform_length(window_size, stride)
    if x.ndim != 2:
        raise ShapeError(f"a spectrogram of samples of shape {x.shape}")
    if len(x) < window_size:
        return np.zeros((x.shape[1], 0, length // 2 + 1), np.float32)
    hann = 0.5 - 0.5 * np.cos(2 * np.pi * np.arange(window_size) / window_size)
    windows = np.lib.stride_tricks.sliding_window_view(x.T, window_size, 1)[:, ::stride]
    bins = np.fft.rfft(windows * hann, length)
    power = bins.real**2 + bins.imag**2
    return (power if magnitude_squared else np.sqrt(power)).astype(np.float32)


def _infer_mfcc(types: Types, attrs: Attrs, consts: Consts) -> Sequence[Type]:
    dims = rules.tensor(types, 0).shape or (None, None, None)
    return (TensorType(FLOAT32, (*dims[:2], int(attrs["dct_coefficient_count"]))),)


@array_operator("Mfcc", infer=_infer_mfcc)
def mfcc(
    x: np.ndarray,
    rate: np.ndarray,
    *,
    upper_frequency_limit: float,
    lower_frequency_limit: float,
    filterbank_channel_count: int,
    dct_coefficient_count: int,
) -> np.ndarray:
    """Cepstral coefficients [channels, windows, coefficients] of squared magnitudes with samples of
    a rate: a cosine transform of the logarithms of what triangular filters let through."""
    low, high = int(lower_frequency_limit), int(upper_frequency_limit)
    channels, count, hertz = filterbank_channel_count, dct_coefficient_count, int(rate.item())
    if not (x.ndim == 3 and x.shape[2] > 1 and hertz > 0 and 0 <= low < high):
        raise ShapeError(f"coefficients of {x.shape} at {hertz} Hz between {low} and {high} Hz")
    if not 0 < count <= channels <= _MOST_CHANNELS:
        raise ShapeError(f"{count} coefficients of {channels} channels")
    mels = np.sqrt(x.astype(np.float64)) @ _mel_filters(x.shape[2], hertz, low, high, channels)
    angles = np.pi / channels * np.arange(count) * (np.arange(channels)[:, np.newaxis] + 0.5)
    cosines = np.sqrt(2 / channels) * np.cos(angles)
    return (np.log(np.maximum(mels, _FLOOR)) @ cosines).astype(np.float32)


@lru_cache(maxsize=8)
def _mel_filters(bins: int, rate: int, low: int, high: int, channels: int) -> np.ndarray:
    """The weights of bins [bins, channels]: triangles between frequencies that are equally far
    apart in mels. A bin weighs 1 in all, in the two triangles that it lies in."""
    width = 0.5 * rate / (bins - 1)  # of a bin, in Hz
    # LiteRT leaves the bin of 0 Hz out always, as HTK does.
    first, last = int(1.5 + low / width), int(high / width)
    if last >= bins:
        raise ShapeError(f"a spectrogram of {bins} bins at {rate} Hz ends below {high} Hz")
    ends = np.linspace(np.log1p(low / 700), np.log1p(high / 700), channels + 2)
    places = np.arange(first, last + 1)
    mels = np.log1p(places * width / 700)
    triangle = np.searchsorted(ends[1:-1], mels)
    falling = (ends[triangle + 1] - mels) / (ends[triangle + 1] - ends[triangle])
    filters = np.zeros((bins, channels + 2))
    filters[places, triangle] = falling
    filters[places, triangle + 1] = 1 - falling
    return filters[:, 1:-1]


@array_operator("aeq.hadamard_rotation", infer=rules.same_type)
def hadamard_rotation(
    x: np.ndarray, *, hadamard_size: int, random_binary_vector: Sequence[int] = ()
) -> np.ndarray:
    """Each ``hadamard_size`` elements of a row times Hadamard's matrix, over the root of its size.
    LiteRT leaves the signs of the vector to other operators, too."""
    size = hadamard_size
    if size < 1 or size & (size - 1) or not x.ndim or x.shape[-1] % size:
        raise ShapeError(f"a rotation of {size} for shape {x.shape}")
    out, half = x.reshape(-1, size), 1
    # Sums and differences of halves: log2(size) passes, instead of a product with the whole matrix.
    while half < size:
        pairs = out.reshape(-1, size // (2 * half), 2, half)
        first, second = pairs[:, :, 0], pairs[:, :, 1]
        out = np.stack([first + second, first - second], 2).reshape(-1, size)
        half *= 2
    return (out / np.sqrt(np.float32(size))).astype(x.dtype).reshape(x.shape)
