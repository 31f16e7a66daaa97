"""Normalizations by instance, group and layer, and by the root mean square of a layer."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial

import numpy as np

from penstock.backends.native import by_memory, family, rows_ns
from penstock.backends.native.kernel import NativeCall, Site, Tensor, UnsupportedError
from penstock.ir.layout import channels_last, packed_strides
from penstock.ops.common.shape_rules import normalize_axis

_MOST_CHANNELS = 1024  # as in c/normalization.c
_BLOCK = 64  # channels that lie side by side, of which sums are in the first-level cache
_DTYPES = ("float32", "float64")
_ROWS = 4096  # elements of an item of rows


@family("GroupNormalization", "InstanceNormalization", work=by_memory)
def group_normalization(site: Site) -> NativeCall | None:
    """InstanceNormalization is a GroupNormalization with a group for each channel."""
    x, scale, bias = (site.input(i) for i in range(3))
    if x is None or str(x.dtype) not in _DTYPES or 0 in x.dims:
        return None
    if scale is None or bias is None or not scale.dtype == bias.dtype == x.dtype:
        return None
    return _call(site, (None,) * len(site.tensors))


@family(
    "LayerNormalization",
    "RMSNormalization",
    "SimplifiedLayerNormalization",
    work=partial(by_memory, additions=6),
)
def layer_normalization(site: Site) -> NativeCall | None:
    """LayerNormalization, and RMSNormalization, which subtracts no mean."""
    x, centred = site.input(0), site.node.op.name == "LayerNormalization"
    given = [type_ for type_ in site.tensors if type_ is not None]
    if x is None or str(x.dtype) not in _DTYPES or any(t.dtype != x.dtype for t in given):
        return None
    if not x.dims or not x.elements:
        return None
    tail = x.dims[normalize_axis(site.attr("axis", -1), len(x.dims)) :]
    scale, bias = _along(site, 1, tail), _along(site, 2, tail)
    if scale is None or (bias is None and site.input(2) is not None):
        return None
    y, *statistics = range(len(site.node.inputs), len(site.tensors))
    means, inverses = [*([] if centred else [None]), *statistics, None, None][:2]
    width = math.prod(tail)
    rows, block = x.elements // width, max(_ROWS // width, 1)
    saved = [None if i is None or site.tensors[i] is None else Tensor(i) for i in (means, inverses)]
    return NativeCall(
        f"layer_normalization_{x.dtype}",
        (
            *(Tensor(0), scale, bias, Tensor(y), *saved, rows, width, block),
            *(int(centred), float(site.attr("epsilon", 1e-5))),
        ),
        items=math.ceil(rows / block),
        item_ns=rows_ns(2 * block * width, rows=1.5 * block),
        inplace=(0,),
    )


def _along(site: Site, i: int, tail: tuple[int, ...]) -> Tensor | np.ndarray | None:
    """Input ``i``, a factor or term of each element of a row; None if it is no such input."""
    type_, constant = site.input(i), site.constant(i)
    if type_ is None:
        return None
    dims = type_.dims[max(len(type_.dims) - len(tail), 0) :]
    if math.prod(dims) != type_.elements:
        return None
    if type_.elements == math.prod(tail):
        return Tensor(i)
    return None if constant is None else np.array(np.broadcast_to(constant.reshape(dims), tail))


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
        item_ns=rows_ns(8 * width * positions, rows=2),
        inplace=(0,),
        restrided=partial(_call, site),
    )
