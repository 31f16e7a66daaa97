"""Convolutions: Conv and ConvTranspose."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from penstock.backends.torch.site import TorchSite
from penstock.backends.torch.windows import Padding
from penstock.ir.kernel import Kernel


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
