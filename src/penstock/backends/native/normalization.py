"""Batch, instance, group, layer and RMS normalization, and LRN."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np

from penstock.backends.native import by_memory, family, fused_with, rows_ns, str_
from penstock.backends.native.kernel import NativeCall, Site, Tensor, UnsupportedError, Word
from penstock.core.records import replace
from penstock.ir.layout import channels_last, strides_of
from penstock.ops.common.shape_rules import normalize_axis
from penstock.ops.internal.fused import parts

_MOST_CHANNELS = 1024  # as in c/rows/normalization.c
_MOST_ROW, _MOST_AROUND = 8192, 64  # as there, of LRN
_BLOCK = 64  # adjacent channels whose sums stay in the L1 cache
_DTYPES = ("float32", "float64")
_ROWS, _LRN_ROWS = 4096, 1024  # elements per item of rows

_Strides = Sequence[tuple[int, ...] | None]


@family("GroupNormalization", "InstanceNormalization", work=by_memory)
def group_normalization(site: Site) -> NativeCall | None:
    """GroupNormalization, and InstanceNormalization as one with a group per channel."""
    x, scale, bias = (site.input(i) for i in range(3))
    if x is None or str_(x.dtype) not in _DTYPES or 0 in x.dims:
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
    """LayerNormalization and RMSNormalization, which does not subtract the mean."""
    x, centred = site.tensor(0), site.node.op.name == "LayerNormalization"
    given = [type_ for type_ in site.tensors if type_ is not None]
    if str_(x.dtype) not in _DTYPES or any(t.dtype != x.dtype for t in given):
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
    """Return input ``i``, a per-element scale or bias of rows; None if it has another shape."""
    type_, constant = site.input(i), site.constant(i)
    if type_ is None:
        return None
    dims = type_.dims[max(len(type_.dims) - len(tail), 0) :]
    if math.prod(dims) != type_.elements:
        return None
    if type_.elements == math.prod(tail):
        return Tensor(i)
    return None if constant is None else np.array(np.broadcast_to(constant.reshape(dims), tail))


def _call(site: Site, strides: _Strides) -> NativeCall:
    """Return the call for tensors of these strides. Raises ``UnsupportedError``."""
    x = site.tensor(0)
    last = strides[0] is not None
    if last:
        innermost = strides_of(x.dims, 1, channels_last(len(x.dims)))
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


@family(
    "BatchNormalization", fused_with("BatchNormalization"), work=partial(by_memory, additions=2)
)
def batch_normalization(site: Site) -> NativeCall | None:
    """BatchNormalization in inference mode, optionally with a fused Relu."""
    node, *behind = parts(site.node)
    if [part.op.name for part in behind] not in ([], ["Relu"]) or node.attrs.get("training_mode"):
        return None
    if len(site.tensors) != len(site.node.inputs) + 1:
        return None
    inputs = site.node.attrs["region"].inputs if behind else node.inputs
    places = [list(inputs).index(value) for value in node.inputs]
    x, *parameters = [site.input(i) for i in places]
    if x is None or places[0] or str_(x.dtype) not in _DTYPES or len(x.dims) < 2 or not x.elements:
        return None
    if any(t is None or t.dtype != x.dtype for t in (*parameters, site.output())):
        return None
    epsilon = float(node.attrs.get("epsilon", 1e-5))
    words: tuple[Word, ...] = tuple(map(Tensor, places[1:]))
    given = [site.constant(i) for i in places[1:]]
    constants = [array for array in given if array is not None]
    if len(constants) == len(given):
        scale, bias, mean, variance = [array.astype(np.float64) for array in constants]
        factor = scale / np.sqrt(variance + epsilon)
        words = (factor.astype(x.dtype), (bias - mean * factor).astype(x.dtype), None, None)
    low = 0.0 if behind else -math.inf
    return _by_channel(site, partial(_batch, words, (epsilon, low)))


def _batch(
    parameters: tuple[Word, ...], ends: tuple[float, ...], site: Site, rows: int, inner: int
) -> NativeCall:
    """Return the call for ``rows`` rows of channels, each of ``inner`` positions."""
    x = site.output()
    width = inner if inner > 1 else x.dims[1]
    block = max(_ROWS // width, 1)
    return NativeCall(
        f"batch_normalization_{x.dtype}",
        (Tensor(0), *parameters, site.result(), rows, x.dims[1], inner, block, *ends),
        items=math.ceil(rows * (x.dims[1] if inner > 1 else 1) / block),
        item_ns=rows_ns(2 * block * width, rows=block),
        inplace=(0,),
    )


def _by_channel(
    site: Site, build: Callable[[Site, int, int], NativeCall], strides: _Strides = ()
) -> NativeCall:
    """Return the call of ``build`` for numbers of channel rows and of positions per channel, for
    contiguous or channels-last images. Raises ``UnsupportedError``."""
    x = site.output()
    images = [strides[i] for i in (0, len(site.node.inputs))] if strides else [None, None]
    inner, positions = math.prod(x.dims[2:]), 1
    if any(s for i, s in enumerate(strides) if i not in (0, len(site.node.inputs))):
        raise UnsupportedError
    if any(images):
        innermost = strides_of(x.dims, 1, channels_last(len(x.dims)))
        if images != [innermost, innermost]:
            raise UnsupportedError
        inner, positions = 1, inner
    call = build(site, x.dims[0] * positions, inner)
    return replace(call, restrided=partial(_by_channel, site, build))


@family("LRN", work=partial(by_memory, additions=10))
def local_response_normalization(site: Site) -> NativeCall | None:
    """LRN of float32 over neighboring channels."""
    x, size = site.tensor(0), site.attr("size", 1)
    if str_(x.dtype) != "float32" or not x.elements:
        return None
    return _by_channel(site, _lrn) if size <= 2 * _MOST_AROUND else None


def _lrn(site: Site, rows: int, inner: int) -> NativeCall:
    """As ``_batch``. Raises ``UnsupportedError``."""
    channels, size = site.output().dims[1], site.attr("size", 1)
    if inner == 1 and channels > _MOST_ROW:
        raise UnsupportedError
    width = inner if inner > 1 else channels
    block = max(_LRN_ROWS // channels, 1) if inner == 1 else 1
    return NativeCall(
        "lrn",
        (
            *(Tensor(0), site.result(), rows, channels, inner, (size - 1) // 2, size // 2, block),
            *(float(site.attr("alpha", 1e-4)) / size, float(site.attr("beta", 0.75))),
            float(site.attr("bias", 1.0)),
        ),
        items=math.ceil(rows / block) if inner == 1 else rows * channels,
        item_ns=rows_ns(block * width * (10 + size), rows=block),
    )
