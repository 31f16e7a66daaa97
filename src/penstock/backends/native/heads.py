"""Attention: a product, its softmax, and a product of that, a head at a time.

In steps, the scores of all heads would be written to memory and read again. Here those of a few
queries with a block of keys stay in the first-level cache, and these keys with their values in the
second-level one.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial

import numpy as np

from penstock.backends.native import family, fused_with
from penstock.backends.native.kernel import NativeCall, Site, Tensor
from penstock.core.records import NamedTuple
from penstock.core.types import FLOAT32
from penstock.host.threads import core_budget
from penstock.ir.graph import Node
from penstock.ir.layout import packed_strides
from penstock.ops.internal.attention_region import AttentionRegion, attention_region

_KEYS, _COPIED, _MOST_PART, _TERMS, _LANES = 256, 32768, 768, 2, 16  # as in c/heads.c

_LEAST = 1e-18  # the least factor of scores
# Queries of an item, at most, where a thread copies a head's keys once, and where threads have
# enough items; and items of all threads, and of each core.
_PART, _LEAST_ITEMS, _ITEMS_OF_CORE = 96, 8, 4

# Approximate costs on one core: of a call, operations of products a second, a score, and an element
# of keys and values.
_CALL_S, _FLOPS_PER_S = 0.35e-6, 150e9
_SCORE_S, _COPY_S = 0.2e-9, 0.3e-9


class _Scores(NamedTuple):
    """What follows the first product: a factor, and the indices of tensors that are added then."""

    scale: float
    terms: tuple[int, ...]


def attention_seconds(node: Node) -> float:
    """The estimate for a fused node with a softmax; infinite if there is no kernel for it."""
    types = [None if value is None else value.type for value in node.inputs]
    region = attention_region(node, types)
    block = None if region is None else _block(region)
    if region is None or block is None:
        return math.inf
    heads, queries, width, keys, out = region.dims
    products = 2 * queries * _padded(keys) * width + 2 * queries * keys * _padded(out)
    each = products / _FLOPS_PER_S + queries * _padded(keys) * _SCORE_S
    copies = 1 if keys <= block else _parts(region, block)
    copied = 0
    for i, size in ((region.key, width), (region.value, out)):
        operand = node.inputs[i]
        source = None if operand is None else operand.producer
        # In steps, a transposed operand would be copied, too: once.
        transposed = source is not None and source.op.name == "Transpose"
        copied += keys * size * (copies - transposed)
    return _CALL_S + heads * (each + copied * _COPY_S)


@family(fused_with("Softmax"), seconds=attention_seconds)
def attention_call(site: Site) -> NativeCall | None:
    """Attention of heads of at most 256 values and 2,048 numbers of a query."""
    types = site.tensors[: len(site.node.inputs)]
    region = attention_region(site.node, types)
    scores = None if region is None else _scores(region, site)
    if region is None or scores is None or site.output().dtype != FLOAT32:
        return None
    if _block(region) is None:
        return None
    return _call(site, region, scores, (None,) * len(site.tensors))


def _block(region: AttentionRegion) -> int | None:
    """The most keys of a block; None if there is no room for the keys and values of any."""
    _, _, width, _, out = region.dims
    block = min(_KEYS, _COPIED // max(width, _padded(out)) // _LANES * _LANES)
    return block if block and out <= _KEYS else None


def _parts(region: AttentionRegion, block: int) -> int:
    """Into how many parts the queries of a head are divided. Each has copies of its keys, if these
    are several blocks."""
    heads, queries, _, keys, _ = region.dims
    most = math.ceil(queries / _PART)
    if keys <= block:
        return most
    items = max(_LEAST_ITEMS, _ITEMS_OF_CORE * core_budget())
    return max(math.ceil(queries / _MOST_PART), min(most, math.ceil(items / heads)))


def _padded(n: int) -> int:
    return -(-n // _LANES) * _LANES


def _scores(region: AttentionRegion, site: Site) -> _Scores | None:
    """What the nodes between the products compute; None for what the kernel does not."""
    scale, terms, last = 1.0, [], region.product.outputs[0]
    for node in region.between:
        others = [value for value in node.inputs if value is not last]
        if len(others) != 1 or len(node.inputs) != 2 or node.op.name not in ("Add", "Div", "Mul"):
            return None
        i = -1 if others[0] is None else region.place.get(others[0], -1)
        if node.op.name == "Add":
            terms.append(i)
        else:  # of numbers before the terms
            factor = None if i < 0 else site.constant(i)
            turned = node.op.name == "Div" and node.inputs[0] is not last
            if factor is None or factor.size != 1 or terms or turned:
                return None
            number = float(factor.reshape(()))
            if not _LEAST < abs(number) < 1 / _LEAST:
                return None  # steps apart may overflow where one does not, and the other way round
            scale = scale / number if node.op.name == "Div" else scale * number
        last = node.outputs[0]
    if -1 in terms or len(terms) > _TERMS:
        return None
    if not _LEAST < abs(scale) < 1 / _LEAST:
        return None
    whole = (*region.lead, *region.dims[1:4:2])
    if any(_broadcast(region.types[i].dims, whole) is None for i in terms):
        return None
    return _Scores(scale, tuple(terms))


def _broadcast(dims: tuple[int, ...], whole: tuple[int, ...]) -> tuple[int, ...] | None:
    """``dims`` with as many as ``whole`` has; None where they do not broadcast to these."""
    if len(dims) > len(whole):
        return None
    padded = (1,) * (len(whole) - len(dims)) + dims
    return padded if all(n in (1, m) for n, m in zip(padded, whole, strict=True)) else None


def _call(
    site: Site,
    region: AttentionRegion,
    scores: _Scores,
    strides: Sequence[tuple[int, ...] | None],
) -> NativeCall:
    """The call for tensors of these strides."""
    heads, queries, width, keys, out = region.dims
    lead, output = region.lead, len(site.node.inputs)

    # Constants whose rows have gaps are copied; elements of others are read one by one.
    copies = {
        i: np.ascontiguousarray(term)
        for i in scores.terms
        if (term := site.constant(i)) is not None and (strides[i] or (1,))[-1] != 1
    }

    def steps_of(i: int, whole: tuple[int, ...]) -> list[int]:
        type_ = site.tensors[i]
        assert type_ is not None
        own = (None if i in copies else strides[i]) or packed_strides(type_.dims, 1)
        more = len(whole) - len(type_.dims)
        pairs = zip((1,) * more + type_.dims, (0,) * more + tuple(own), strict=True)
        return [0 if n == 1 else step for n, step in pairs]

    square = (*lead, queries, keys)
    shapes = [
        (region.query, (*lead, queries, width)),
        (region.key, (*lead, width, keys)),
        (region.value, (*lead, keys, out)),
        *[(i, square) for i in scores.terms],
    ]
    steps = [steps_of(i, whole) for i, whole in shapes]
    steps += [[0] * len(square)] * (_TERMS - len(scores.terms))
    steps.append(steps_of(output, (*lead, queries, out)))
    missing = (None,) * (_TERMS - len(scores.terms))
    block = _block(region)
    assert block is not None
    parts = _parts(region, block)
    each_s = attention_seconds(site.node) / (heads * parts)
    return NativeCall(
        "attention_of_heads",
        (
            *[copies.get(i, Tensor(i)) for i, _ in shapes],
            *missing,
            site.result(),
            len(lead),
            np.array(lead, np.int64),
            np.array(steps, np.int64),
            *(queries, width, keys, out, parts, math.ceil(keys / block)),
            *(scores.scale, int(region.guarded)),
        ),
        items=heads * parts,
        item_ns=each_s * 1e9,
        any_layout=True,
        restrided=partial(_call, site, region, scores),
    )
