"""Pooling over windows: MaxPool, AveragePool and the global ones."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial

import torch

from penstock.backends.torch.elementwise import writing
from penstock.backends.torch.site import TorchSite
from penstock.backends.torch.windows import Padding
from penstock.core.types import RunValue
from penstock.ir.kernel import Kernel
from penstock.ops.common.windows import kernel_shape

_MAX: Mapping[int, Callable[..., RunValue]] = {
    1: torch.max_pool1d,
    2: torch.max_pool2d,
    3: torch.max_pool3d,
}
_AVERAGE: Mapping[int, Callable[..., RunValue]] = {
    1: torch.nn.functional.avg_pool1d,
    2: torch.nn.functional.avg_pool2d,
    3: torch.nn.functional.avg_pool3d,
}


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
    pool = _MAX[len(padding.kernel)]
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
    pool, kernel, strides = _AVERAGE[len(padding.kernel)], padding.kernel, padding.strides
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
