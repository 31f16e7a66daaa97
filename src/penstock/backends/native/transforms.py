"""Discrete Fourier transforms."""

from __future__ import annotations

import math

import numpy as np

from penstock.backends.native import family, rows_ns, str_
from penstock.backends.native.kernel import NativeCall, Site, Tensor
from penstock.core.records import NamedTuple
from penstock.core.types import TensorType
from penstock.ops.common.shape_rules import given
from penstock.ops.onnx.signal import dft_sizes, stft_sizes

_POINTS, _TOGETHER = 2048, 16  # as in c/rows/transforms.c
_MOST_RADIX = 31
"""largest prime factor of lengths, beyond which NumPy has a faster algorithm"""


class _Signals(NamedTuple):
    """Signals of ``inner`` contiguous ones each, of which ``read`` elements are read; or ``frames``
    of each, ``hop`` elements apart, multiplied by a ``window``. ``hermitian``: they are halves of
    symmetric spectra."""

    outer: int
    inner: int
    size: int
    read: int
    is_complex: bool
    frames: int = 1
    hop: int = 0
    window: Tensor | None = None
    inverse: bool = False
    hermitian: bool = False


@family("DFT")
def dft(site: Site) -> NativeCall | None:
    """DFT of constant length and axis."""
    x = site.tensor(0)
    types = site.tensors[: len(site.node.inputs)]
    axis, length = dft_sizes(site.node.op.since, types, site.node.attrs, site.constants)
    if axis is None or not isinstance(length, int):
        return None
    outer, size, inner = math.prod(x.dims[:axis]), x.dims[axis], math.prod(x.dims[axis + 1 : -1])
    inverse = bool(site.attr("inverse", 0))
    hermitian = inverse and bool(site.attr("onesided", 0))
    read = min(size, length // 2 + 1 if hermitian else length)
    signals = _Signals(outer, inner, size, read, x.dims[-1] == 2)
    return _call(site, x, signals._replace(inverse=inverse, hermitian=hermitian), length)


@family("STFT")
def stft(site: Site) -> NativeCall | None:
    """STFT of constant length and step."""
    x = site.tensor(0)
    types = site.tensors[: len(site.node.inputs)]
    step, length, frames = stft_sizes(types, site.constants)
    if not isinstance(step, int) or not isinstance(length, int) or not isinstance(frames, int):
        return None
    window = Tensor(2) if given(types, 2) else None
    is_complex = x.dims[2:] == (2,)
    signals = _Signals(x.dims[0], 1, x.dims[1], length, is_complex, frames, step, window)
    return _call(site, x, signals, length)


def _call(site: Site, x: TensorType, signals: _Signals, length: int) -> NativeCall | None:
    """The call of a transform of this ``length``; None for lengths that it does not take."""
    y, inverse, hermitian = site.output(), signals.inverse, signals.hermitian
    halves = length % 2 == 0 and (hermitian or not (signals.is_complex or inverse))
    points = length // 2 if halves else length
    # The summation order depends on the number of signals.
    if str_(x.dtype) not in ("float32", "float64") or points > _POINTS or site.ordered:
        return None
    radices = _radices(points)
    if 0 in (*x.dims, *y.dims) or max(radices, default=1) > _MOST_RADIX:
        return None
    phase = np.arange(length) * (2 * np.pi / length)
    circle = np.stack([np.cos(phase), -np.sin(phase)], 1).astype(x.dtype)
    count = signals.outer * signals.inner * signals.frames
    together = min(_TOGETHER, _POINTS // points, count)
    axis_dims = y.elements // (count * y.dims[-1])
    additions = points * (8 * math.log2(points + 1) + 16)
    return NativeCall(
        f"transforms_{x.dtype}",
        (
            *(Tensor(0), site.result(), signals.window, circle, np.array(radices, np.int64)),
            *(len(radices), count, together, signals.inner, signals.frames, signals.hop),
            *(signals.size * signals.inner, length, signals.read, axis_dims),
            *(int(signals.is_complex), int(hermitian), int(y.dims[-1] == 1), int(inverse)),
            int(halves),
        ),
        items=math.ceil(count / together),
        item_ns=rows_ns(together * additions, rows=1),
    )


def _radices(points: int) -> list[int]:
    """The factors of ``points``: fours, and primes in ascending order."""
    factors = []
    for factor in (4, 2, *range(3, points + 1, 2)):
        while points % factor == 0:
            factors.append(factor)
            points //= factor
        if points == 1 or factor > _MOST_RADIX:
            break
    return [*factors, points] if points > 1 else factors
