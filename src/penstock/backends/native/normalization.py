"""InstanceNormalization and GroupNormalization, with channels before or behind the positions."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial

from penstock.backends.native.kernel import NativeCall, Site, Tensor, UnsupportedError
from penstock.ir.layout import channels_last, packed_strides

_MOST_CHANNELS = 1024  # as in c/normalization.c
_BLOCK = 64  # channels that lie side by side, of which sums are in the first-level cache


def group_normalization(site: Site) -> NativeCall | None:
    """InstanceNormalization is a GroupNormalization with a group for each channel."""
    x, scale, bias = (site.input(i) for i in range(3))
    if x is None or str(x.dtype) not in ("float32", "float64") or 0 in x.dims:
        return None
    if scale is None or bias is None or not scale.dtype == bias.dtype == x.dtype:
        return None
    return _call(site, (None,) * len(site.tensors))


def _call(site: Site, strides: Sequence[tuple[int, ...] | None]) -> NativeCall:
    """The call for tensors of these strides. Raises ``UnsupportedError``."""
    x = site.input(0)
    assert x is not None
    last = strides[0] is not None
    if last:
        innermost = packed_strides(x.dims, 1, channels_last(len(x.dims)))
        wanted = (innermost, None, None, innermost)
        if tuple(strides) != wanted:
            raise UnsupportedError
    elif any(strides):
        raise UnsupportedError
    groups = site.attr("num_groups", x.dims[1])
    channels, positions = x.dims[1] // groups, math.prod(x.dims[2:])
    block = min(max(_BLOCK // channels, 1), groups)
    if last and channels > _MOST_CHANNELS:
        raise UnsupportedError
    width = channels * (block if last else 1)
    return NativeCall(
        f"group_normalization_{x.dtype}" + "_last" * last,
        (
            *(Tensor(0), Tensor(1), Tensor(2), site.result()),
            *(groups, channels, positions, block),
            float(site.attr("epsilon", 1e-5)),
        ),
        items=x.dims[0] * (math.ceil(groups / block) if last else groups),
        item_ns=20 + width * positions * 0.4,
        inplace=(0,),
        restrided=partial(_call, site),
    )
