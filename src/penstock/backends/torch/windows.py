"""Kernels over windows: Conv, ConvTranspose and pooling, and the padding of windows as torch has
it: both ends of an axis alike, or else a step of its own."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor

from penstock.backends.torch.elementwise import writing
from penstock.backends.torch.site import TorchSite
from penstock.ir.kernel import Kernel
from penstock.ops.common.windows import behind, kernel_shape, parse_axes, windows


class Padding:
    """The padding of an operation's windows for images of any size.

    ``alike``: the padding of each axis, if it is the same at both ends whatever the size; else
    ``pad`` pads an image, and the operation itself must not."""

    def __init__(self, attrs: Mapping[str, Any], kernel: Sequence[int]) -> None:
        self.attrs = attrs
        self.kernel = tuple(kernel)
        axes, auto_pad = parse_axes(attrs, len(kernel))
        self.strides = [axis.stride for axis in axes]
        self.dilations = [axis.dilation for axis in axes]
        same = auto_pad.startswith("SAME")
        # SAME depends on sizes of images, and may put one more at an end.
        even = not same and all(axis.begin == axis.end for axis in axes)
        self.alike = [axis.begin for axis in axes] if even else None
        self._widths = lru_cache(64)(self._compute)

    def _compute(self, sizes: tuple[int, ...]) -> tuple[int, ...]:
        """Elements to add to images of ``sizes``, as ``torch.nn.functional.pad`` takes them."""
        found = windows(self.attrs, self.kernel, sizes)
        ends = [max(end, 0) for end in behind(found)]
        pairs = [(window.begin, end) for window, end in zip(found, ends, strict=True)]
        return tuple([width for pair in reversed(pairs) for width in pair])

    def pad(self, x: Tensor, value: float = 0.0) -> Tensor:
        """``x`` with the padding of its windows."""
        widths = self._widths(tuple(x.shape[2:]))
        if not any(widths):
            return x
        return torch.constant_pad_nd(x, widths, value)


# Convolutions: Conv and ConvTranspose.


def _convolve(site: TorchSite, transposed: bool, groups: int) -> Callable[..., Tensor]:
    """``convolve(x, w, b, strides, padding, dilations, output_padding)``. On a GPU, operands are
    rounded to TensorFloat-32 only if the session allows that, whatever the flags of the process
    say."""
    convolve: Callable[..., Tensor] = torch.convolution
    if not site.memory.on_host:
        # All are given: results must not follow from what else the process has set.
        flags = {"benchmark": False, "deterministic": False, "cudnn_enabled": True}
        convolve = partial(torch._convolution, **flags, allow_tf32=site.tf32)
    return lambda x, w, b, strides, padding, dilations, more: convolve(
        x, w, b, strides, padding, dilations, transposed, more, groups
    )


def _window(site: TorchSite) -> list[int] | None:
    """The spatial dims of weights, if torch has a convolution with these."""
    w = site.type(1)
    if not site.are_floats(0, 1, 2) or w is None or w.shape is None:
        return None
    kernel = [dim for dim in w.shape[2:] if isinstance(dim, int)]
    return kernel if 1 <= len(kernel) <= 3 and len(kernel) == len(w.shape) - 2 else None


def convolution(site: TorchSite) -> Kernel | None:
    """Conv of images with one to three spatial axes."""
    kernel = _window(site)
    if kernel is None:
        return None
    padding = Padding(site.attrs, kernel)
    convolve = _convolve(site, False, site.attrs.get("group", 1))
    strides, dilations = padding.strides, padding.dilations
    alike, none = padding.alike, [0] * len(kernel)

    def function(x: Tensor, w: Tensor, b: Tensor | None = None) -> Tensor:
        if alike is None:
            return convolve(padding.pad(x), w, b, strides, none, dilations, none)
        return convolve(x, w, b, strides, alike, dilations, none)

    return Kernel(function)


def transposed_convolution(site: TorchSite) -> Kernel | None:
    """ConvTranspose with declared padding: of a result that is larger, a part is cut out."""
    kernel, attrs = _window(site), site.attrs
    automatic = site.text("auto_pad") not in ("", "NOTSET")
    if kernel is None or automatic or attrs.get("output_shape"):
        return None
    padding = Padding(attrs, kernel)
    strides, dilations = padding.strides, padding.dilations
    more = list(attrs.get("output_padding") or [0] * len(kernel))
    # torch takes less than a stride or a dilation.
    if any(m >= max(s, d) for m, s, d in zip(more, strides, dilations, strict=True)):
        return None
    convolve = _convolve(site, True, attrs.get("group", 1))
    pads = list(attrs.get("pads") or [0] * 2 * len(kernel))
    begins, ends = pads[: len(kernel)], pads[len(kernel) :]
    common = [min(pair) for pair in zip(begins, ends, strict=True)]
    cuts: list[tuple[Any, ...]] = [
        (b - c, e - c) for b, e, c in zip(begins, ends, common, strict=True)
    ]

    def function(x: Tensor, w: Tensor, b: Tensor | None = None) -> Tensor:
        y = convolve(x, w, b, strides, common, dilations, more)
        for axis, (first, last) in enumerate(cuts, 2):
            if first or last:
                y = y.narrow(axis, first, y.shape[axis] - first - last)
        return y

    return Kernel(function)


# Pooling over windows: MaxPool, AveragePool and the global ones.


def _padding(site: TorchSite) -> Padding | None:
    """The padding of a pooling's windows; None for images that torch cannot pool."""
    rank = site.rank(0)
    if rank is None or not 3 <= rank <= 5:
        return None
    return Padding(site.attrs, kernel_shape(site.attrs, rank - 2))


def _fits(padding: Padding) -> bool:
    """Whether torch pads as much itself: at most half of a window."""
    pairs = zip(padding.alike or (), padding.kernel, strict=False)
    return padding.alike is not None and all(2 * p <= k for p, k in pairs)


def max_pool(site: TorchSite) -> Kernel | None:
    """MaxPool, without the places of maxima."""
    padding = _padding(site)
    # Windows that hang over the end begin elsewhere in torch.
    if padding is None or site.output(1) is not None or site.attrs.get("ceil_mode"):
        return None
    pool = getattr(torch, f"max_pool{len(padding.kernel)}d")
    kernel, strides, dilations = padding.kernel, padding.strides, padding.dilations
    if _fits(padding):
        alike = padding.alike
        return Kernel(lambda x: pool(x, kernel, strides, alike, dilations))
    return Kernel(lambda x: pool(padding.pad(x, -math.inf), kernel, strides, 0, dilations))


def average_pool(site: TorchSite) -> Kernel | None:
    """AveragePool, where torch divides by as many elements."""
    padding = _padding(site)
    if padding is None or site.attrs.get("ceil_mode") or any(d != 1 for d in padding.dilations):
        return None
    kernel, strides = padding.kernel, padding.strides
    pool = getattr(torch.nn.functional, f"avg_pool{len(kernel)}d")
    whole = bool(site.attrs.get("count_include_pad", 0))
    if _fits(padding):
        alike = padding.alike
        return Kernel(lambda x: pool(x, kernel, strides, alike, False, whole))
    if not whole:
        return None
    return Kernel(lambda x: pool(padding.pad(x), kernel, strides, 0))


def global_pool(site: TorchSite) -> Kernel | None:
    """GlobalAveragePool and GlobalMaxPool: the mean or maximum of each channel."""
    rank = site.rank(0)
    if rank is None or rank < 3:
        return None
    axes = tuple(range(2, rank))
    reduce = torch.amax if site.node.op.name == "GlobalMaxPool" else torch.mean
    return writing(partial(reduce, dim=axes, keepdim=True), 1)
