"""Signal processing: Fourier transforms and windows.

ONNX stores complex numbers in a last axis of dim 2. If it is contiguous, it is viewed as complex,
so that transforms access it without copies. ``np.fft`` computes in the precision of its input.
"""

from __future__ import annotations

import math
import platform
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np

from penstock.core.checkpoints import checkpoint
from penstock.core.errors import warn
from penstock.core.types import Dim, ShapeError, TensorType, Type
from penstock.ir.graph import Node
from penstock.ir.op import Attrs, Consts, Trait, Types
from penstock.ops.common import shape_rules as rules
from penstock.ops.common.specialize import Routine, Scratch, Tensors, by_shape, static_type
from penstock.ops.registry import Prepared, array_operator, operator

_IN_ORDER: frozenset[Trait] = frozenset(
    {"exact"} if platform.machine().lower() in ("x86_64", "amd64") else ()
)
"""NumPy transforms several signals at once if there are many. Each has the bits that it has alone
where compilers do not fuse products and sums by default: on x86-64."""


def _complex_dtype(dtype: np.dtype) -> np.dtype:
    return np.dtype(np.complex128 if dtype == np.float64 else np.complex64)


def _as_complex(x: np.ndarray) -> np.ndarray:
    """[..., 2] as complex numbers: a view if the last axis is contiguous."""
    if x.strides[-1] != x.itemsize:
        x = np.ascontiguousarray(x)
    return x.view(_complex_dtype(x.dtype))[..., 0]


def _values(x: np.ndarray) -> np.ndarray:
    """[..., 1] as real numbers, [..., 2] as complex ones."""
    return x[..., 0] if x.shape[-1] == 1 else _as_complex(x)


def _transform(
    function: Callable[..., np.ndarray], x: np.ndarray, n: int, axis: int, out: np.ndarray
) -> None:
    """``function`` of ``np.fft`` along ``axis``, into a real or a complex [..., 1 or 2] ``out``."""
    complex_out = out.shape[-1] == 2
    if complex_out and out.strides[-1] != out.itemsize:
        result = function(x, n, axis)
        out[..., 0], out[..., 1] = result.real, result.imag
        return
    target = out.view(_complex_dtype(out.dtype))[..., 0] if complex_out else out[..., 0]
    function(x, n, axis, out=target)


def _onesided(x: np.ndarray, n: int, axis: int, out: np.ndarray | None = None) -> np.ndarray:
    """The first n // 2 + 1 elements of the transform of real or complex input."""
    if x.dtype.kind != "c":
        return np.fft.rfft(x, n, axis, out=out)
    # Only the transform of real input is symmetric.
    half = np.fft.fft(x, n, axis)
    half = half[(*[slice(None)] * (axis % x.ndim), slice(n // 2 + 1))]
    if out is None:
        return half
    np.copyto(out, half)
    return out


def _function(inverse: bool, onesided: bool) -> Callable[..., np.ndarray]:
    if inverse:
        return np.fft.irfft if onesided else np.fft.ifft
    return _onesided if onesided else np.fft.fft


def dft_sizes(version: int, types: Types, attrs: Attrs, consts: Consts) -> tuple[int | None, Dim]:
    """The axis (None if unknown) and the length of a DFT."""
    shape = rules.tensor(types, 0).shape
    # Since version 20, axis is an input with another default.
    at: Dim = attrs.get("axis", 1) if version == 17 else -2
    if rules.given(types, 2):
        at = rules.one_integer(types, consts, 2, "axis")
    axis = at if isinstance(at, int) else None
    length: Dim = None
    if shape is not None:
        rank = len(shape)
        if rank < 2:
            raise ShapeError(f"the input must have rank 2 or more, but has shape {shape}")
        if isinstance(shape[-1], int) and shape[-1] not in (1, 2):
            raise ShapeError(f"the last dim of {shape} must be 1 (real) or 2 (complex)")
        if axis is not None:
            if not -rank <= axis < rank or axis % rank == rank - 1:
                raise ShapeError(
                    f"axis {axis} is not a signal axis of shape {shape}: it must not be the last "
                    "one"
                )
            axis %= rank
            length = shape[axis]
            if attrs.get("inverse") and attrs.get("onesided"):
                # A one-sided transform of n has n // 2 + 1 elements: n is assumed to be even.
                length = 2 * (length - 1) if isinstance(length, int) else None
    if rules.given(types, 1):
        length = rules.one_integer(types, consts, 1, "dft_length")
    if isinstance(length, int) and length < 1:
        raise ShapeError(f"the length of the Fourier transform is {length}: it must be positive")
    return axis, length


def _infer_dft(version: int, types: Types, attrs: Attrs, consts: Consts) -> Sequence[Type]:
    x = rules.tensor(types, 0)
    axis, length = dft_sizes(version, types, attrs, consts)
    if x.shape is None:
        return (TensorType(x.dtype),)
    inverse, onesided = attrs.get("inverse"), attrs.get("onesided")
    last = 1 if inverse and onesided else 2
    if axis is None:
        return (TensorType(x.dtype, (*[None] * (len(x.shape) - 1), last)),)
    if onesided and not inverse:
        length = length // 2 + 1 if isinstance(length, int) else None
    return (TensorType(x.dtype, (*x.shape[:axis], length, *x.shape[axis + 1 : -1], last)),)


@operator("DFT", since=17, version=19, infer=partial(_infer_dft, 17), traits=_IN_ORDER)
@operator("DFT", since=20, infer=partial(_infer_dft, 20), traits=_IN_ORDER)
@by_shape(values=(1, 2))
def dft(node: Node, inputs: Tensors, outputs: Tensors, consts: Consts) -> Routine:
    attrs = node.attrs
    function = _function(bool(attrs.get("inverse")), bool(attrs.get("onesided")))
    axis, length = dft_sizes(node.op.since, inputs, attrs, consts)

    def into(x: np.ndarray, *arguments: np.ndarray) -> None:
        _transform(function, _values(x), length, axis, arguments[-1])  # type: ignore[arg-type]

    return Routine(into, prepared=(1, 2))


def stft_sizes(types: Types, consts: Consts) -> tuple[Dim, Dim, Dim]:
    """The frame step, frame length and number of frames of an STFT."""
    shape = rules.tensor(types, 0).shape
    signal: Dim = None
    if shape is not None:
        last = shape[2:]
        if len(shape) not in (2, 3) or (last and isinstance(last[0], int) and not 0 < last[0] < 3):
            raise ShapeError(f"signal must have shape [batch, length, 1 or 2], not {shape}")
        signal = shape[1]
    step = rules.one_integer(types, consts, 1, "frame_step", 1)
    window_shape = rules.tensor(types, 2).shape
    rules.check_shape("window", window_shape, (None,))
    window: Dim = None if window_shape is None else window_shape[0]
    length: Dim = window if rules.given(types, 2) else signal
    if rules.given(types, 3):
        length = rules.one_integer(types, consts, 3, "frame_length", 1) or window
        if isinstance(window, int) and isinstance(length, int) and window != length:
            raise ShapeError(f"window has {window} elements, but frame_length is {length}")
    frames: Dim = None
    if isinstance(length, int):
        if length < 1:
            raise ShapeError(f"frame_length must be positive, not {length}")
        if isinstance(signal, int):
            if length > signal:
                raise ShapeError(f"frame_length {length} exceeds the signal length, {signal}")
            frames = (signal - length) // step + 1 if isinstance(step, int) else None
    return step, length, frames


def _infer_stft(types: Types, attrs: Attrs, consts: Consts) -> Sequence[Type]:
    x = rules.tensor(types, 0)
    _, bins, frames = stft_sizes(types, consts)
    if attrs.get("onesided", 1):
        bins = bins // 2 + 1 if isinstance(bins, int) else None
    batch = None if x.shape is None else x.shape[0]
    return (TensorType(x.dtype, (batch, frames, bins, 2)),)


@operator("STFT", since=17, infer=_infer_stft, traits=_IN_ORDER)
@by_shape(values=(1, 3))
def stft(node: Node, inputs: Tensors, outputs: Tensors, consts: Consts) -> Routine:
    function = _function(False, bool(node.attrs.get("onesided", 1)))
    (batch, _, *last), dtype = static_type(inputs, 0)
    if not last:
        warn(
            "the signal of STFT has shape [batch, length], which ONNX does not allow: it is read "
            "as [batch, length, 1], as in ONNX Runtime",
            RuntimeWarning,
        )
    step, length, frames = stft_sizes(inputs, consts)
    assert isinstance(step, int) and isinstance(length, int) and isinstance(frames, int)
    layout, windowed, n_inputs = Scratch(), rules.given(inputs, 2), len(inputs)
    framed = layout.field((batch, frames, length), _complex_dtype(dtype) if last == [2] else dtype)

    def into(*arguments: np.ndarray) -> None:
        x = _values(arguments[0]) if last else arguments[0]
        strides = (x.strides[0], step * x.strides[1], x.strides[1])
        # Frames are overlapping views.
        every = np.lib.stride_tricks.as_strided(x, framed.shape, strides, writeable=False)
        if windowed:
            every = np.multiply(every, arguments[2], framed(arguments[-1]))
        _transform(function, every, length, 2, arguments[n_inputs])

    return Routine(into, layout.size if windowed else 0, prepared=(1, 3))


# ONNX defines the Hamming window with 25 / 46 rather than the customary 0.54.
_WINDOWS = {
    "HannWindow": (0.5, 0.5),
    "HammingWindow": (25 / 46, 21 / 46),
    "BlackmanWindow": (0.42, 0.5, 0.08),
}
"""coefficients of ``sum((-1)^k * coefficients[k] * cos(k * 2 pi * n / N))``"""


_DTYPE: Prepared = {"dtype": lambda node: rules.dtype_attribute(node.attrs, "output_datatype")}


def _infer_window(types: Types, attrs: Attrs, consts: Consts) -> Sequence[Type]:
    size = rules.one_integer(types, consts, 0, "size", 0)
    return (TensorType(rules.dtype_attribute(attrs, "output_datatype"), (size,)),)


@array_operator(
    *_WINDOWS,
    since=17,
    infer=_infer_window,
    traits={"exact"},
    prepared={**_DTYPE, "coefficients": lambda node: _WINDOWS[node.op.name]},
)
def _window(
    size: np.ndarray, *, periodic: int = 1, coefficients: Sequence[float], dtype: np.dtype
) -> np.ndarray:
    n = int(rules.one_element(size, "size"))
    if n < 0:
        raise ShapeError(f"size must not be negative, but is {n}")
    # Avoids 0 / 0 for a symmetric window of one sample.
    whole = n if periodic else max(n - 1, 1)
    phase = np.arange(n) * (2 * np.pi / max(whole, 1))
    result = np.full(n, float(coefficients[0]))
    for k, coefficient in enumerate(coefficients[1:], 1):
        result += (-1) ** k * coefficient * _cosines(k * phase)
    return result.astype(dtype)


# Elements between two checks for cancellation.
_CHUNK = 2**14


def _cosines(x: np.ndarray) -> np.ndarray:
    """``np.cos``, of which NumPy has several forms, with equal bits on all processors with FMA."""
    y = np.empty_like(x)
    for start in range(0, len(x), _CHUNK):
        checkpoint()
        part = slice(start, start + _CHUNK)
        y[part] = [math.cos(element) for element in x[part].tolist()]
    return y


def _infer_mel(types: Types, attrs: Attrs, consts: Consts) -> Sequence[Type]:
    bands = rules.one_integer(types, consts, 0, "num_mel_bins", 0)
    length = rules.one_integer(types, consts, 1, "dft_length", 0)
    bins = length // 2 + 1 if isinstance(length, int) else None
    return (TensorType(rules.dtype_attribute(attrs, "output_datatype"), (bins, bands)),)


@array_operator("MelWeightMatrix", since=17, infer=_infer_mel, traits={"exact"}, prepared=_DTYPE)
def mel_weight_matrix(*inputs: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """Triangular filters over spectrum bins, evenly spaced in mel = 2595 * log10(1 + hertz / 700).

    As in ONNX's definition, edges are rounded down to whole bins, and the spacing is computed for
    one more filter than there are.
    """
    bands, length, rate = (int(rules.one_element(x, "input")) for x in inputs[:3])
    low, high = (float(rules.one_element(x, "input")) for x in inputs[3:])
    if bands < 0 or length < 0 or rate < 1 or not 0 <= low <= high < np.inf:
        raise ShapeError(
            f"{bands} mel bins from {low} to {high} hertz of a transform of length {length}"
            f" at {rate} samples a second cannot be"
        )
    # Python's logarithms and powers have one form for all processors with FMA, NumPy's several.
    first, last = (2595 * math.log10(1 + hertz / 700) for hertz in (low, high))
    mels = first + np.arange(bands + 2) * ((last - first) / (bands + 2))
    powers = np.array([10**mel for mel in (mels / 2595).tolist()])
    edges = (length + 1) * (700 * (powers - 1)) // rate
    lower, centre, upper = edges[:-2], edges[1:-1], edges[2:]
    bins = np.arange(length // 2 + 1)[:, None]
    slope = (bins - lower) / np.maximum(centre - lower, 1)
    rising = np.where(centre > lower, slope, bins == centre)
    falling = (upper - bins) / np.maximum(upper - centre, 1)
    rising *= (bins >= lower) & (bins <= centre)
    falling *= (bins >= centre) & (bins < upper)
    return np.maximum(rising, falling).astype(dtype)
