"""Windows that slide over the spatial axes of a tensor: convolution, pooling and their inverses."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

from penstock.core.records import NamedTuple, dataclass
from penstock.core.traced import TRACED
from penstock.core.types import Dim, Shape, ShapeError
from penstock.ir.op import Attrs
from penstock.ops.common.shape_rules import choice

MAX_POSITIONS = 2**14
"""The most elements of a window along one axis, if there are several windows: each of them takes a
pass over all windows."""


@dataclass(frozen=True, slots=True)
class Window:
    """``count`` windows along one axis of ``size`` elements.

    Window ``o`` covers the elements ``o * stride - begin + k * dilation`` for ``k < kernel``. Those
    below 0 and from ``size`` on are padding; ``begin`` and ``end`` are its declared widths.
    """

    size: int
    count: int
    kernel: int
    stride: int = 1
    dilation: int = 1
    begin: int = 0
    end: int = 0

    def __post_init__(self) -> None:
        most = MAX_POSITIONS
        if self.kernel > most and self.count > 1 and len(self.positions) > most:
            found = len(self.positions)
            raise ShapeError(f"several windows of {found} elements: {MAX_POSITIONS} is the most")

    @property
    def positions(self) -> range:
        """The ``k`` at which some window may have an element: a kernel may be mostly padding."""
        lowest = -((self.count - 1) * self.stride - self.begin) // self.dilation
        highest = (self.size - 1 + self.begin) // self.dilation
        return range(max(lowest, 0), min(highest + 1, self.kernel))

    @property
    def span(self) -> int:
        """The number of elements from the first to the last one of a window."""
        return (self.kernel - 1) * self.dilation + 1

    @property
    def trivial(self) -> bool:
        """Whether window ``o`` is element ``o``."""
        return self.span == self.stride == 1 and self.begin == 0 and self.size == self.count

    @property
    def addressable(self) -> bool:
        """Whether sums of products of these numbers fit into 64 bits, as compiled code needs."""
        numbers = self.kernel, self.stride, self.dilation, abs(self.begin)
        return self.size < 2**31 and self.count < 2**31 and max(numbers) < 2**31

    @property
    def padded(self) -> bool:
        """Whether some window covers padding."""
        return self.begin > 0 or (self.count - 1) * self.stride + self.span > self.size + self.begin

    def inside(self, k: int) -> tuple[int, int]:
        """The range (first, end) of windows whose ``k``-th element is not padding."""
        first = self.begin - k * self.dilation
        low = max(-(-first // self.stride), 0)
        high = min((self.size - 1 + first) // self.stride + 1, self.count)
        return low, max(low, high)

    def taps(self, first: int = 0, last: int | None = None) -> list[tuple[int, slice, slice]]:
        """(k, windows, elements) for each ``k`` at which windows ``first`` to ``last`` cover some.
        Windows count from ``first``; the elements are the ``k``-th ones of these windows."""
        axes = []
        for k in self.positions:
            low, high = self.inside(k)
            low, high = max(low, first), high if last is None else min(high, last)
            if low < high:
                start = low * self.stride - self.begin + k * self.dilation
                stop = start + (high - low - 1) * self.stride + 1
                axes.append((k, slice(low - first, high - first), slice(start, stop, self.stride)))
        return axes

    @property
    def covered(self) -> slice:
        """The elements of the only window."""
        before = -(-self.begin // self.dilation)
        stop = min((self.kernel - 1) * self.dilation - self.begin + 1, self.size)
        return slice(before * self.dilation - self.begin, max(stop, 0), self.dilation)

    def elements(self, low: int, high: int) -> tuple[int, int]:
        """The range (first, end) of elements, with padding, of windows ``low`` to ``high``."""
        start = low * self.stride - self.begin
        return start, start + (high - low - 1) * self.stride + self.span

    def inner(self, first: int, last: int) -> tuple[int, int]:
        """The part of a range (first, end) of elements that is not padding."""
        begin = min(max(first, 0), self.size)
        return begin, max(min(last, self.size), begin)


class Axis(NamedTuple):
    """The attributes of one axis."""

    stride: int
    dilation: int
    begin: int
    end: int


_OF_AXES = ("strides", "dilations", "pads")


def parse_axes(attrs: Attrs, rank: int) -> tuple[Sequence[Axis], str]:
    """``strides``, ``dilations`` and ``pads`` of each of ``rank`` axes, and ``auto_pad``."""
    given = [tuple(value or ()) for value in map(attrs.get, _OF_AXES)]
    return _parsed_axes(rank, attrs.get("auto_pad"), *given)


@lru_cache(maxsize=1024)
def _parsed_axes(
    rank: int, auto_pad: str | None, *given: tuple[int, ...]
) -> tuple[Sequence[Axis], str]:
    attrs: Attrs = {"auto_pad": auto_pad, **dict(zip(_OF_AXES, given, strict=True))}
    modes = ("NOTSET", "SAME_UPPER", "SAME_LOWER", "VALID", "")  # empty in some exports
    auto_pad = choice(attrs, "auto_pad", "NOTSET", modes) or "NOTSET"
    strides = ints_of(attrs, "strides", rank, 1)
    dilations = ints_of(attrs, "dilations", rank, 1)
    pads = ints_of(attrs, "pads", 2 * rank, 0, low=0)
    # ONNX has pads of their own for NOTSET alone.
    if auto_pad != "NOTSET":
        pads = [0] * (2 * rank)
    rows = zip(strides, dilations, pads[:rank], pads[rank:], strict=True)
    return tuple([Axis(*row) for row in rows]), auto_pad


def ints_of(attrs: Attrs, name: str, count: int, default: int, low: int = 1) -> list[int]:
    """An attribute with ``count`` ints of at least ``low``; by default all are ``default``."""
    value = attrs.get(name)
    if not value:
        return [default] * count
    if len(value) != count:
        raise ShapeError(f"{name} must have {count} entries, not {len(value)}")
    if min(value) < low:
        raise ShapeError(f"{name} must be at least {low}, not {list(value)}")
    return list(value)


def kernel_shape(attrs: Attrs, rank: int) -> list[int]:
    """The ``kernel_shape`` attribute of pooling over ``rank`` axes."""
    if not attrs.get("kernel_shape"):
        raise ShapeError("kernel_shape is missing")
    return ints_of(attrs, "kernel_shape", rank, 1)


def windows(
    attrs: Attrs, kernel: Sequence[int], sizes: Sequence[int], ceil: bool = False
) -> tuple[Window, ...]:
    """The windows over axes of the given sizes; ``ceil`` keeps a last, partial window."""
    axes, auto_pad = parse_axes(attrs, len(kernel))
    of_axes = zip(axes, kernel, sizes, strict=True)
    window = _window if TRACED.isdisjoint(map(type, sizes)) else _window.__wrapped__
    return tuple([window(axis, auto_pad, k, size, ceil) for axis, k, size in of_axes])


def behind(axes: Sequence[Window]) -> list[int]:
    """The number of padding elements at the end of the last window of each axis.

    At most the declared padding, unless a partial window was kept; negative if the last window ends
    before the last element.
    """
    return [(a.count - 1) * a.stride + a.span - a.begin - a.size for a in axes]


@lru_cache(maxsize=1024)
def _window(axis: Axis, auto_pad: str, kernel: int, size: int, ceil: bool) -> Window:
    span = (kernel - 1) * axis.dilation + 1
    begin, end = axis.begin, axis.end
    if auto_pad.startswith("SAME"):
        count = -(-size // axis.stride)
        total = max((count - 1) * axis.stride + span - size, 0)
        # An odd number has one more at the end with SAME_UPPER, at the beginning with SAME_LOWER.
        begin = total // 2 if auto_pad == "SAME_UPPER" else total - total // 2
        end = total - begin
    else:
        free = size + begin + end - span
        count = free // axis.stride + 1
        if ceil and free % axis.stride and count * axis.stride < size + begin:
            # The last window may hang over the end, but must begin before the padding there.
            count += 1
    if count < 1 or size < 1:
        raise ShapeError(f"a window of {span} is larger than {size}, padded by {begin}, {end}")
    return Window(size, count, kernel, axis.stride, axis.dilation, begin, end)


def window_counts(attrs: Attrs, kernel: Sequence[Dim], sizes: Shape, ceil: bool = False) -> Shape:
    """The number of windows along each axis, if sizes and kernel are known."""
    axes, auto_pad = parse_axes(attrs, len(kernel))
    counts: list[Dim] = []
    window = _window if TRACED.isdisjoint(map(type, sizes)) else _window.__wrapped__
    for axis, k, size in zip(axes, kernel, sizes, strict=True):
        if isinstance(size, int) and isinstance(k, int):
            counts.append(window(axis, auto_pad, k, size, ceil).count)
        elif isinstance(size, int) and auto_pad.startswith("SAME"):
            counts.append(-(-size // axis.stride))
        elif axis.stride == 1 and auto_pad.startswith("SAME"):
            counts.append(size)
        elif axis.stride == 1 and isinstance(k, int) and not isinstance(size, int):
            keeps = axis.begin + axis.end == (k - 1) * axis.dilation
            counts.append(size if keeps else None)
        else:
            counts.append(None)
    return tuple(counts)
