"""com.microsoft's Attention, MultiHeadAttention and DecoderMaskedMultiHeadAttention.

``mask_filter_value`` is added to the scores of masked keys; keys after a causal query are excluded.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from penstock.core.records import NamedTuple
from penstock.core.types import Dim, RunValue, RunValues, Shape, ShapeError, TensorType, Type
from penstock.ir.graph import Node
from penstock.ir.op import Attrs, Consts, Types
from penstock.ops.common.products import attention_work, product_in_parts
from penstock.ops.common.shape_rules import check_shape, dim_product, dim_sum, given, ints, tensor
from penstock.ops.common.specialize import Field, Routine, Scratch, Tensors, by_shape, static_type
from penstock.ops.onnx.attention import (
    BIASED,
    Cache,
    Core,
    Heads,
    Scoring,
    Sight,
    out_of_sight,
    share,
    split_heads,
)
from penstock.ops.registry import MICROSOFT, operator


def _heads_of(attrs: Attrs) -> int:
    heads = attrs.get("num_heads") or 0
    if heads < 1:
        raise ShapeError("num_heads must be positive")
    return int(heads)


def _hidden_keys(mask: np.ndarray, heads: Heads) -> np.ndarray:
    """A mask, true for hidden keys, which broadcasts to the scores.

    The input is nonzero for visible keys, per sample [batch, keys] or query [batch, queries, keys],
    or has the ends of the visible keys [batch], or their ends and then starts [2 * batch].
    """
    if mask.ndim > 1:
        hidden = mask <= 0
        return hidden[:, None, None] if mask.ndim == 2 else hidden[:, None]
    place = np.arange(heads.keys)
    ends = mask[: heads.batch, None, None, None]
    if len(mask) == heads.batch:
        return place >= ends
    return (place >= ends) | (place < mask[heads.batch :, None, None, None])


def _check_mask(shape: Shape | None, batch: Dim, queries: Dim, keys: Dim) -> None:
    double = 2 * batch if isinstance(batch, int) else None
    check_shape("the mask", shape, (batch,), (double,), (batch, keys), (batch, queries, keys))


def _check_bias(shape: Shape | None, batch: Dim, heads: Dim, queries: Dim, keys: Dim) -> None:
    allowed = [(b, h, queries, keys) for b in (batch, 1) for h in (heads, 1)]
    check_shape("attention_bias", shape, *allowed)


class _Call(NamedTuple):
    """The arrays of one call; ``presents`` receive past and new keys and values.

    ``start``: the number of past positions in a shared buffer; ``beams`` [batch, beam, position]:
    the source beam of each of them; ``show``: the output for the biased scores.
    """

    q: np.ndarray
    news: Sequence[np.ndarray]
    olds: Sequence[np.ndarray | None]
    presents: Sequence[np.ndarray | None]
    y: np.ndarray
    mask: np.ndarray | None
    bias: np.ndarray | None
    start: int | None = None
    beams: np.ndarray | None = None
    show: np.ndarray | None = None


class _Attend:
    """The attention of both operations, given queries, keys and values. ``own``: whether keys and
    values need workspace to be concatenated with those of the ``past``."""

    def __init__(
        self, layout: Scratch, heads: Heads, dtype: np.dtype, node: Node, past: int, own: list[bool]
    ) -> None:
        attrs = node.attrs
        scale = attrs.get("scale") or 1 / math.sqrt(max(heads.size, 1))
        self.heads = heads
        scoring = Scoring(scale, shown=BIASED if _shown(node) else None)
        self.core = Core(layout, heads, dtype, scoring)
        self.filter = dtype.type(attrs.get("mask_filter_value", -10000.0))
        self.causal = bool(attrs.get("unidirectional", 0))
        self.unseen = out_of_sight(heads.queries, heads.keys, past, causal=self.causal)
        dims = heads.batch, heads.heads, heads.keys
        sizes = zip((heads.size, heads.value_size), own, strict=True)
        self.caches = [
            Cache(past, layout.field((*dims, size), dtype) if room else None)
            for size, room in sizes
        ]

    def run(self, call: _Call, workspace: np.ndarray) -> None:
        """Compute the attention to past and new keys and values."""
        heads, start, show, blocked = self.heads, call.start, call.show, [self.unseen]
        if start is not None:
            end = start + heads.queries
            if start < 0 or end > heads.keys:
                raise ShapeError(
                    f"past_sequence_length {start} with new positions up to {end} exceeds the "
                    f"cache of {heads.keys}"
                )
            unseen = out_of_sight(heads.queries, heads.keys, start, causal=self.causal)
            blocked = [np.arange(heads.keys) >= end, unseen]
        pairs = zip(self.caches, call.news, call.olds, call.presents, strict=True)
        k, v = (cache.join(new, old, out, workspace, start) for cache, new, old, out in pairs)
        if start is not None and call.beams is not None and heads.queries == 1:
            k, v = (_follow(call.beams, x, start) for x in (k, v))
        biases = [] if call.bias is None else [call.bias]
        if call.mask is not None:
            hidden = _hidden_keys(call.mask, heads)
            biases.append(np.where(hidden, self.filter, self.filter.dtype.type(0)))
        out = split_heads(call.y, heads.heads)
        self.core.run((call.q, k, v), Sight(blocked, biases), out, workspace, show)
        if show is not None:
            np.maximum(show, np.finfo(show.dtype).min, out=show)


def _follow(beams: np.ndarray, cache: np.ndarray, past: int) -> np.ndarray:
    """Gather the past of each sample from its source beams."""
    batch, width, _ = beams.shape
    first = np.arange(batch)[:, None, None] * width
    sources = np.tile(np.arange(len(cache))[:, None], cache.shape[2])
    sources[:, :past] = (beams[..., :past] + first).reshape(batch * width, -1)
    # NumPy moves the axes of index arrays separated by a slice to the front.
    return cache[sources, :, np.arange(cache.shape[2])].swapaxes(1, 2)


# Attention: projects its input to queries, keys and values


def _sections(attrs: Attrs, weights: Shape | None) -> tuple[Dim, Dim, Dim]:
    """The numbers of features of queries, keys and values, over all heads."""
    sizes = attrs.get("qkv_hidden_sizes")
    if sizes:
        if len(sizes) != 3 or min(sizes) < 1 or sizes[0] != sizes[1]:
            raise ShapeError(
                f"qkv_hidden_sizes {sizes} must be three positive sizes, of which the first two "
                "are equal"
            )
        check_shape("weights", weights, (None, sum(sizes)))
        return sizes[0], sizes[1], sizes[2]
    total = weights[1] if weights is not None and len(weights) == 2 else None
    size = share(total, 3, "the projection")
    return size, size, size


def _infer_attention(types: Types, attrs: Attrs, consts: Consts) -> Sequence[Type]:
    for name in ("do_rotary", "past_present_share_buffer"):
        if attrs.get(name):
            raise ShapeError(f"Attention with {name} is not supported")
    x, weights, bias, mask, past, added = (tensor(types, i) for i in range(6))
    heads = _heads_of(attrs)
    check_shape("input", x.shape, (None, None, None))
    batch, length, width = x.shape or (None, None, None)
    check_shape("weights", weights.shape, (width, None))
    q, _, v = _sections(attrs, weights.shape)
    check_shape("bias", bias.shape, (dim_sum((q, q, v)),))
    size, value_size = share(q, heads, "queries"), share(v, heads, "values")
    keys, before = length, None
    if given(types, 4):
        check_shape("past", past.shape, (2, batch, heads, None, size))
        if isinstance(size, int) and isinstance(value_size, int) and size != value_size:
            raise ShapeError("a past requires equal head sizes of keys and values")
        before = past.shape[3] if past.shape is not None else None
        keys = dim_sum((length, before))
    if given(types, 3):
        _check_mask(mask.shape, batch, length, keys)
    if given(types, 5):
        _check_bias(added.shape, batch, heads, length, keys)
    y, present = (batch, length, v), (2, batch, heads, keys, size)
    return TensorType(x.dtype, y), TensorType(x.dtype, present)


@operator("Attention", domain=MICROSOFT, infer=_infer_attention, work=attention_work)
@by_shape(arity=(7, 2))
def attention(node: Node, inputs: Tensors, outputs: Tensors, consts: Consts) -> Routine:
    (batch, length, width), dtype = static_type(inputs, 0)
    q_size, k_size, v_size = _sections(node.attrs, tensor(inputs, 1).dims)
    assert isinstance(q_size, int) and isinstance(k_size, int) and isinstance(v_size, int)
    count, past_type = _heads_of(node.attrs), inputs[4]
    past = past_type.dims[3] if past_type is not None else 0
    heads = Heads(batch, count, count, length, past + length, q_size // count, v_size // count)
    layout, total = Scratch(), q_size + k_size + v_size
    projected = layout.field((batch * length, total), dtype)
    if outputs[1] is not None and k_size != v_size:
        raise ShapeError("output present requires equal head sizes of keys and values")
    own = past_type is not None and outputs[1] is None
    attend = _Attend(layout, heads, dtype, node, past, [own, own])
    ends = q_size, q_size + k_size, total

    def into(*arguments: RunValue) -> None:
        x, w, b, mask, old, added, _, y, present, workspace = arguments
        qkv = projected(workspace)
        product_in_parts(x.reshape(batch * length, width), w, qkv)
        if b is not None:
            np.add(qkv, b, qkv)
        qkv = qkv.reshape(batch, length, total)
        starts = zip((0, *ends), ends, strict=False)
        q, *news = (split_heads(qkv[..., low:high], count) for low, high in starts)
        olds = (None, None) if old is None else old
        presents = (None, None) if present is None else present
        attend.run(_Call(q, news, olds, presents, y, mask, added), workspace)

    return Routine(into, layout.size)


# MultiHeadAttention: takes projected queries, keys and values, which may be packed


def _unpacked(shapes: Sequence[Shape | None], heads: int) -> tuple[Shape, Shape, Shape]:
    """Shapes of queries, keys and values as [batch, heads, sequence, size]."""
    unknown: Shape = (None, heads, None, None)

    def split(name: str, shape: Shape | None) -> Shape:
        if shape is None:
            return unknown
        if len(shape) == 4 and name != "query":
            check_shape(name, shape, unknown)
            return shape
        check_shape(name, shape, (None, None, None))
        return (shape[0], heads, shape[1], share(shape[2], heads, name))

    query, key, value = shapes
    if key is None:
        check_shape("the packed query, key and value", query, (None, None, heads, 3, None))
        batch, length, _, _, size = query or (None,) * 5
        return ((batch, heads, length, size),) * 3
    if value is None:
        check_shape("the packed key and value", key, (None, None, heads, 2, None))
        batch, length, _, _, size = key
        return (split("query", query), *[(batch, heads, length, size)] * 2)  # type: ignore[return-value]
    return split("query", query), split("key", key), split("value", value)


def _mha_shapes(types: Types, attrs: Attrs) -> tuple[Shape, Shape, Shape, Dim]:
    """The shapes of queries, and of keys and values including the past, and the past's length."""
    shapes = [tensor(types, i).shape if given(types, i) else None for i in range(3)]
    if any(shape is None and given(types, i) for i, shape in enumerate(shapes)):
        return (None,) * 4, (None,) * 4, (None,) * 4, None  # the packing depends on unknown shapes
    q, k, v = _unpacked(shapes, _heads_of(attrs))
    for name, a, b in (("key", k[:1], q[:1]), ("value", v[:3], k[:3]), ("key", k[3:], q[3:])):
        check_shape(f"{name} (as batch, heads, sequence, size)", a, b)
    past: Dim = 0
    if given(types, 6) != given(types, 7):
        raise ShapeError("past_key and past_value must be given together")
    if given(types, 6):
        before = tensor(types, 6).shape
        past = None if before is None or len(before) < 3 else before[2]
        check_shape("past_key", before, (k[0], k[1], None, k[3]))
        check_shape("past_value", tensor(types, 7).shape, (v[0], v[1], past, v[3]))
    elif given(types, 8):
        raise ShapeError("past_sequence_length requires past_key and past_value")
    keys = past if given(types, 8) else dim_sum((k[2], past))
    k, v = ((*shape[:2], keys, shape[3]) for shape in (k, v))
    return q, k, v, past


def _infer_mha(types: Types, attrs: Attrs, consts: Consts) -> Sequence[Type]:
    dtype, heads = tensor(types, 0).dtype, _heads_of(attrs)
    q, k, v, _ = _mha_shapes(types, attrs)
    keys = k[2]
    if given(types, 8):  # the past is a buffer, of which past_sequence_length positions are in use
        keys = dim_sum((*(ints(types, consts, 8) or (None,)), q[2]))
        check_shape("past_sequence_length", tensor(types, 8).shape, (), (1,))
        check_shape("cache_indirection", tensor(types, 9).shape, (None, None, k[2]))
    if given(types, 3):
        hidden = dim_sum([dim_product((shape[3], heads)) for shape in (q, k, v)])
        check_shape("bias", tensor(types, 3).shape, (hidden,))
    if given(types, 4):
        _check_mask(tensor(types, 4).shape, q[0], q[2], keys)
    if given(types, 5):
        _check_bias(tensor(types, 5).shape, q[0], heads, q[2], keys)
    y, scores = (q[0], q[2], dim_product((v[3], heads))), (q[0], heads, q[2], keys)
    return [TensorType(dtype, shape) for shape in (y, k, v, scores)]


def _unpack(
    count: int, q: np.ndarray, k: np.ndarray | None, v: np.ndarray | None
) -> list[np.ndarray]:
    """Queries, keys and values as [batch, heads, sequence, size]: views."""
    if k is None:
        return [q[..., i, :].transpose(0, 2, 1, 3) for i in range(3)]
    if v is None:
        k, v = (k[..., i, :].transpose(0, 2, 1, 3) for i in range(2))
    return [split_heads(x, count) for x in (q, k, v)]


def _shown(node: Node) -> bool:
    """Whether a node outputs its scores, whose shape depends on the length of the past."""
    return len(node.outputs) > 3 and node.outputs[3] is not None


def _mha(node: Node, inputs: Tensors, outputs: Tensors) -> Routine:
    _, dtype = static_type(inputs, 0)
    (batch, _, queries, size), k_shape, v_shape, past = _mha_shapes(inputs, node.attrs)
    count, layout = _heads_of(node.attrs), Scratch()
    heads = Heads(batch, count, count, queries, k_shape[2], size, v_shape[3])  # type: ignore[arg-type]
    assert isinstance(past, int)
    own = [inputs[6] is not None and outputs[i] is None for i in (1, 2)]
    attend = _Attend(layout, heads, dtype, node, past, own)
    sums: list[Field | None] = [None] * 3
    if inputs[3] is not None:
        new_keys = heads.queries if inputs[8] is not None else heads.keys - past
        rows = (heads.queries, heads.size), (new_keys, heads.size), (new_keys, heads.value_size)
        for i, x in enumerate(inputs[:3]):
            # The bias was already added to cached keys and values.
            if i == 0 or x is None or len(x.dims) != 4:
                sums[i] = layout.field((heads.batch, count, *rows[i]), dtype)

    def into(*arguments: RunValue) -> None:
        q, k, v, bias, mask, added, old_k, old_v, length, beams = arguments[:10]
        y, *presents, show, workspace = arguments[10:]
        parts, start = _unpack(count, q, k, v), 0
        for i, field in enumerate(sums):
            width = count * parts[i].shape[3]
            if field is not None:
                own = bias[start : start + width].reshape(count, 1, -1)
                parts[i] = np.add(parts[i], own, field(workspace))
            start += width
        q, *news = parts
        used = None if length is None else int(length.reshape(-1)[0])
        olds = old_k, old_v
        call = _Call(q, news, olds, presents, y, mask, added, used, beams, show)
        attend.run(call, workspace)

    return Routine(into, layout.size)


@operator("MultiHeadAttention", domain=MICROSOFT, infer=_infer_mha)
@by_shape(arity=(10, 4), contiguous=True, values=lambda node: (8,) if _shown(node) else ())
def multi_head_attention(node: Node, inputs: Tensors, outputs: Tensors, consts: Consts) -> Routine:
    return _mha(node, inputs, outputs)


# DecoderMaskedMultiHeadAttention: one query per sample, with another order of inputs


def _reordered(inputs: RunValues) -> list[Any]:
    order = (0, 1, 2, 10, 3, 4, 5, 6, 7, 9)
    return [inputs[i] if i < len(inputs) else None for i in order]


def _infer_decoder(types: Types, attrs: Attrs, consts: Consts) -> Sequence[Type]:
    check_shape("query", tensor(types, 0).shape, (None, 1, None))
    return _infer_mha(_reordered(types), attrs, _reordered(consts))


@operator("DecoderMaskedMultiHeadAttention", domain=MICROSOFT, infer=_infer_decoder)
@by_shape(arity=(11, 4), contiguous=True, values=lambda node: (7,) if _shown(node) else ())
def decoder_attention(node: Node, inputs: Tensors, outputs: Tensors, consts: Consts) -> Routine:
    routine = _mha(node, _reordered(inputs), outputs)

    def into(*arguments: RunValue) -> None:
        routine.into(*_reordered(arguments[:11]), *arguments[11:])

    return routine._replace(into=into)
