"""The axes along which a convolution moves over an image: which elements its taps read."""

from __future__ import annotations

from collections.abc import Sequence

from penstock.core.records import NamedTuple, replace
from penstock.host.on_demand import imported
from penstock.ir.graph import Node
from penstock.ops.common.windows import Window, windows

# Lazy import: few models have transposed convolutions.
TRANSPOSED_WINDOWS = imported("penstock.ops.onnx.deconvolution.transposed_windows")

_OUTSIDE = -(2**40)  # an offset outside of images
PADDING = (-1,)
"""taps that read only it"""


class SeenAxis(NamedTuple):
    """A spatial axis, as in image_convolution.c: for each phase of the result, its ``taps`` as
    kernel positions, and the input elements ``seen`` by them at the phase's first position. A phase
    without taps has the single tap ``PADDING``."""

    size: int
    results: int
    stride: int
    taps: tuple[tuple[int, ...], ...]
    seen: tuple[tuple[int, ...], ...]
    most_taps: int
    reach: int
    """elements from the first to the last that a position reads"""
    positions: int
    """positions of the largest phase"""

    @property
    def words(self) -> list[int]:
        words = [self.size, self.results, self.stride, len(self.seen)]
        for phase in self.seen:
            words += (len(phase), *phase)
        return words

    @property
    def adjacent(self) -> bool:
        """Whether the taps of each phase read adjacent elements."""
        return False not in [p == tuple(range(p[0], p[0] + len(p))) for p in self.seen]

    @property
    def ends(self) -> int:
        """Number of positions of the only phase that read padding."""
        before, inside = -self.seen[0][0], self.size - 1 - self.seen[0][-1]
        return max(-(-before // self.stride), 0) + max(self.results - inside // self.stride - 1, 0)

    @property
    def inside(self) -> bool:
        """Whether no position reads padding."""
        count, stride, seen = len(self.taps), self.stride, enumerate(self.seen)
        ends = [phase[-1] + (self.results - p - 1) // count * stride for p, phase in seen]
        return max(ends) < self.size and min(self.seen)[0] >= 0


def spans(node: Node, kernel: Sequence[int], sizes: Sequence[int]) -> list[SeenAxis] | None:
    """Return the axes of a Conv or ConvTranspose; None for unsupported sizes."""
    is_conv = node.op.name == "Conv"
    axes: Sequence[Window]
    axes = (windows if is_conv else TRANSPOSED_WINDOWS)(node.attrs, kernel, sizes)
    if False in [axis.addressable for axis in axes]:
        return None
    if is_conv:
        return list(map(_axis_of_conv, axes))
    # Along an axis with one input element, each result element can be a separate phase.
    axes = [replace(a, stride=a.size) if a.count == 1 else a for a in axes]
    phases = [zip(*[_of_phase(a, p) for p in range(a.stride)], strict=True) for a in axes]
    return [_axis_of_phases(a, *of) for a, of in zip(axes, phases, strict=True)]


def _axis_of_conv(axis: Window) -> SeenAxis:
    taps, step = tuple(range(axis.kernel)), axis.dilation
    seen = tuple(range(-axis.begin, axis.kernel * step - axis.begin, step))
    size, count, reach = axis.size, axis.count, (axis.kernel - 1) * step + 1
    return SeenAxis(size, count, axis.stride, (taps,), (seen,), axis.kernel, reach, count)


def _axis_of_phases(
    axis: Window, taps: tuple[tuple[int, ...], ...], seen: tuple[tuple[int, ...], ...]
) -> SeenAxis:
    reach = max([phase[-1] - phase[0] + 1 for phase in seen])
    most_taps, positions = max(map(len, taps)), -(-axis.size // len(taps))
    return SeenAxis(axis.count, axis.size, 1, taps, seen, most_taps, reach, positions)


def _of_phase(axis: Window, phase: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the taps of a phase of a transposed convolution, whose window describes the result as
    input, and the elements that they read."""
    at = phase + axis.begin
    taps = [k for k in reversed(range(axis.kernel)) if (at - k * axis.dilation) % axis.stride == 0]
    seen = [(at - k * axis.dilation) // axis.stride for k in taps]
    return tuple(taps) or PADDING, tuple(seen) or (_OUTSIDE,)


POINT = SeenAxis(1, 1, 1, ((0,),), ((0,),), 1, 1, 1)
