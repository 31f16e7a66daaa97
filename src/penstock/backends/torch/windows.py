"""Padding of windows, as torch has it: both ends of an axis alike, or else a step of its own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from penstock.ops.common.windows import behind, parse_axes, windows


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
