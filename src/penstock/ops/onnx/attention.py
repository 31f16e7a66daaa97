"""Scaled dot-product attention, and ONNX's Attention on top of it.

All inputs are viewed as [batch, heads, sequence, head size]. Scores are computed block by block in
scratch memory of bounded size: a block has some heads of some samples, or some rows of one head.

A query whose keys are all masked yields zeros, not the NaNs of a softmax over an empty set.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import product
from typing import Any

import numpy as np

from penstock.core.checkpoints import checkpoint
from penstock.core.records import NamedTuple
from penstock.core.types import BOOL, Dim, RunValue, Shape, ShapeError, TensorType, Type, dtype_name
from penstock.ir.graph import Node
from penstock.ir.op import Attrs, Consts, Types
from penstock.ops.common import row_reduce
from penstock.ops.common import shape_rules as rules
from penstock.ops.common.dtypes import FLOAT64, is_float
from penstock.ops.common.products import attention_work
from penstock.ops.common.specialize import Field, Routine, Scratch, Tensors, by_shape, static_type
from penstock.ops.registry import operator

# Bytes of a block of scores, which fit into a core's own cache.
_BLOCK_BYTES = 2**19

# The stages of the scores that qk_matmul_output may hold (qk_matmul_output_mode).
RAW, CAPPED, BIASED, SOFTMAX = range(4)

_ANY: Shape = (None,) * 4


class Heads(NamedTuple):
    """The sizes of an attention; ``heads // kv_heads`` query heads share each key head."""

    batch: int
    heads: int
    kv_heads: int
    queries: int
    keys: int
    size: int
    value_size: int

    @property
    def group(self) -> int:
        return self.heads // self.kv_heads


class _Block(NamedTuple):
    """A block of the scores, and the place of its scratch memory."""

    part: tuple[slice, slice, slice]  # of query heads
    kv_part: tuple[slice, slice]
    q: Field
    scores: Field
    wide: Field | None
    context: Field
    total: Field


class Scoring(NamedTuple):
    """The computation of scores. ``shown``: the stage of the scores that ``Core.run`` writes to
    ``show``; ``precise``: the softmax is computed in float64."""

    scale: float
    softcap: float = 0.0
    shown: int | None = None
    precise: bool = False


class Sight(NamedTuple):
    """The masks of an attention. ``blocked`` is true where a key is masked out (None: nowhere), and
    ``biases`` are added to the scores; both broadcast to [batch, heads, queries, keys]. ``sink``
    [heads] is the score of an additional key whose value is zero."""

    blocked: Sequence[np.ndarray | None] = ()
    biases: Sequence[np.ndarray] = ()
    sink: np.ndarray | None = None


class Core:
    """``softmax(softcap(q k^T scale) + bias) v`` for given sizes."""

    def __init__(self, layout: Scratch, heads: Heads, dtype: np.dtype, scoring: Scoring) -> None:
        if not is_float(dtype):
            raise ShapeError(f"attention requires floating-point inputs, not {dtype_name(dtype)}")
        self.heads, self.shown, precise = heads, scoring.shown, scoring.precise
        self.scale, self.softcap = dtype.type(scoring.scale), dtype.type(scoring.softcap)
        slices = _blocks(heads, dtype.itemsize)
        # No block is larger than the first one.
        lines = math.prod(s.stop - s.start for s in slices[0]) * heads.group if slices else 0
        q = layout.field((lines * heads.size,), dtype)
        scores = layout.field((lines * heads.keys,), dtype)
        wide = layout.field((lines * heads.keys,), FLOAT64) if precise else None
        context = layout.field((lines * heads.value_size,), dtype)
        total = layout.field((lines,), FLOAT64 if precise else dtype)
        self.blocks = []
        for b, kv, s in slices:
            query_heads = slice(kv.start * heads.group, kv.stop * heads.group)
            part = b, query_heads, s
            shape = [x.stop - x.start for x in part]
            self.blocks.append(
                _Block(
                    part,
                    (b, kv),
                    q.reshaped(*shape, heads.size),
                    scores.reshaped(*shape, heads.keys),
                    None if wide is None else wide.reshaped(*shape, heads.keys),
                    context.reshaped(*shape, heads.value_size),
                    total.reshaped(*shape, 1),
                )
            )

    def run(
        self,
        parts: Sequence[np.ndarray],
        sight: Sight,
        out: np.ndarray,
        workspace: np.ndarray,
        show: np.ndarray | None = None,
    ) -> None:
        """Compute the attention of ``parts``: queries, keys and values. Rows without an unmasked
        key are zero."""
        (q, k, v), (flags_or_none, biases, sink), heads = parts, sight, self.heads
        whole = (heads.batch, heads.heads, heads.queries)
        blocked = [
            np.broadcast_to(flags, (*whole, heads.keys))
            for flags in flags_or_none
            if flags is not None
        ]
        biases = [np.broadcast_to(bias, (*whole, bias.shape[-1])) for bias in biases]
        masked = bool(blocked or biases)
        keys = k.swapaxes(2, 3)
        for block in self.blocks:
            checkpoint()
            part = block.part
            queries, scores = block.q(workspace), block.scores(workspace)
            np.multiply(q[part], self.scale, queries)
            self._multiply(queries, keys[block.kv_part], scores)
            self._show(RAW, scores, show, part)
            if self.softcap:
                np.divide(scores, self.softcap, scores)
                np.tanh(scores, scores)
                np.multiply(scores, self.softcap, scores)
            self._show(CAPPED, scores, show, part)
            for bias in biases:
                width = bias.shape[3]
                seen = scores[..., :width]
                np.add(seen, bias[part], seen, casting="unsafe")
                # ONNX pads a mask that is shorter than the keys with minus infinity.
                scores[..., width:] = -np.inf
            for flags in blocked:
                np.copyto(scores, -np.inf, where=flags[part])
            self._show(BIASED, scores, show, part)
            total, soft = block.total(workspace), scores
            if block.wide is not None:
                soft = block.wide(workspace)
                np.copyto(soft, scores)
            part_sink = None if sink is None else sink[part[1], None, None]
            _exponentials(soft, total, masked, part_sink)
            if self.shown == SOFTMAX:
                # The weights in ``show`` must be normalized here; the later division by 1 keeps
                # them.
                np.divide(soft, total, soft)
                total[...] = 1
                self._show(SOFTMAX, soft, show, part)
            if soft is not scores:
                np.copyto(scores, soft, casting="unsafe")
            context = block.context(workspace)
            self._multiply(scores, v[block.kv_part], context)
            np.divide(context, total, out[part], casting="unsafe")

    def _multiply(self, a: np.ndarray, b: np.ndarray, out: np.ndarray) -> None:
        """``a @ b``, with the query heads that share a key head as rows of one matrix product."""
        n, heads, rows, _ = a.shape
        group = self.heads.group
        if group > 1:
            a = a.reshape(n, heads // group, group * rows, a.shape[3])
            out = out.reshape(n, heads // group, group * rows, out.shape[3])
        np.matmul(a, b, out, casting="unsafe")

    def _show(self, stage: int, scores: np.ndarray, show: Any, part: Any) -> None:
        if self.shown == stage:
            np.copyto(show[part], scores[..., : show.shape[3]], casting="unsafe")


def _exponentials(
    scores: np.ndarray, total: np.ndarray, masked: bool, sink: np.ndarray | None = None
) -> None:
    """Replace scores by exp(score - row maximum) in place, and return the row sums, including
    ``sink``."""
    if not scores.shape[-1]:
        total[...] = 1
        return
    matrix, column = scores.reshape(-1, scores.shape[-1]), total.reshape(-1, 1)
    # Subtracting the row maximum avoids overflow and leaves the softmax unchanged.
    row_reduce.maxima(matrix, column)
    if sink is not None:
        np.maximum(total, sink, out=total)
    if masked:  # a row whose keys are all masked
        np.copyto(total, 0, where=np.isneginf(total))
    np.subtract(scores, total, scores)
    np.exp(scores, scores)
    drained = None if sink is None else np.exp(sink - total)
    row_reduce.sums(matrix, column)
    if drained is not None:
        np.add(total, drained, total)
    # All exponentials of such a row are 0; dividing them by 1 keeps them 0.
    if masked:
        np.copyto(total, 1, where=total == 0)


def _blocks(heads: Heads, itemsize: int) -> list[tuple[slice, slice, slice]]:
    """Slices of batch, key heads and queries whose scores fit into a block."""
    row = max(heads.keys * heads.group * itemsize, 1)
    per_head = max(row * heads.queries, 1)
    per_sample = per_head * heads.kv_heads
    if per_sample <= _BLOCK_BYTES:
        steps = _BLOCK_BYTES // max(per_sample, 1), heads.kv_heads, heads.queries
    elif per_head <= _BLOCK_BYTES:
        steps = 1, _BLOCK_BYTES // per_head, heads.queries
    else:
        steps = 1, 1, _BLOCK_BYTES // row

    def cut(size: int, step: int) -> list[slice]:
        step = max(step, 1)
        return [slice(i, min(i + step, size)) for i in range(0, size, step)]

    batches, kv_heads, queries = map(cut, (heads.batch, heads.kv_heads, heads.queries), steps)
    return list(product(batches, kv_heads, queries))


def share(hidden: Dim, heads: int, name: str) -> Dim:
    """The head size of ``name``, whose last dim ``hidden`` covers all heads."""
    if isinstance(hidden, int) and hidden % heads:
        raise ShapeError(
            f"the last dim of {name}, {hidden}, must be divisible by its number of heads, {heads}"
        )
    return hidden // heads if isinstance(hidden, int) else None


def _head_shape(type_: TensorType, attrs: Attrs, attr: str, name: str) -> Shape:
    """[batch, heads, sequence, head size] of Q, K or V."""
    shape = type_.shape
    if shape is None or len(shape) == 4:
        return shape or _ANY
    if len(shape) != 3:
        raise ShapeError(f"{name} must have rank 3 or 4, but has shape {shape}")
    heads = attrs.get(attr)
    if not heads or heads < 1:
        raise ShapeError(f"{name} has rank 3: the attribute {attr} must be positive")
    return (shape[0], heads, shape[1], share(shape[2], heads, name))


def attention_dims(types: Types, attrs: Attrs) -> tuple[Dim, ...]:
    """Batch, query heads, key heads, queries, keys including the past, and the head sizes of keys
    and values."""
    q = _head_shape(rules.tensor(types, 0), attrs, "q_num_heads", "Q")
    k = _head_shape(rules.tensor(types, 1), attrs, "kv_num_heads", "K")
    v = _head_shape(rules.tensor(types, 2), attrs, "kv_num_heads", "V")
    batch = rules.same_dim(k[0], v[0], "the batch sizes of K and V")
    batch = rules.same_dim(q[0], batch, "the batch sizes of Q and K")
    kv_heads = rules.same_dim(k[1], v[1], "the numbers of heads of K and V")
    keys = rules.same_dim(k[2], v[2], "the sequence lengths of K and V")
    size = rules.same_dim(q[3], k[3], "the head sizes of Q and K")
    heads = q[1]
    if isinstance(heads, int) and isinstance(kv_heads, int) and (not kv_heads or heads % kv_heads):
        raise ShapeError(f"{heads} query heads must be a multiple of {kv_heads} key heads")
    if rules.given(types, 4) != rules.given(types, 5):
        raise ShapeError("past_key and past_value must be given together")
    if rules.given(types, 4):
        if rules.given(types, 6):
            raise ShapeError("nonpad_kv_seqlen cannot be combined with past_key")
        old_k, old_v = rules.tensor(types, 4).shape, rules.tensor(types, 5).shape
        rules.check_shape("past_key", old_k, (k[0], k[1], None, k[3]))
        rules.check_shape("past_value", old_v, (v[0], v[1], None, v[3]))
        before = rules.same_dim(
            (old_k or _ANY)[2],
            (old_v or _ANY)[2],
            "the sequence lengths of past_key and past_value",
        )
        keys = before + keys if isinstance(before, int) and isinstance(keys, int) else None
    return batch, heads, kv_heads, q[2], keys, size, v[3]


def _infer_attention(types: Types, attrs: Attrs, consts: Consts) -> Sequence[Type]:
    q, v = rules.tensor(types, 0), rules.tensor(types, 2)
    batch, heads, kv_heads, queries, keys, size, value_size = attention_dims(types, attrs)
    shape: tuple[Dim, ...] | None = None
    if q.shape is not None:
        shape = (batch, heads, queries, value_size)
        if len(q.shape) == 3:
            shape = (batch, queries, rules.dim_product((heads, value_size)))
    sizes = (batch, heads, kv_heads, queries, keys, size, value_size)
    mask = rules.all_known(rules.tensor(types, 3).shape) if rules.given(types, 3) else None
    if mask is not None and rules.all_known(sizes) is not None:
        check_mask(mask, Heads._make(sizes))
    for name in ("left_window_size", "right_window_size"):
        if attrs.get(name, -1) < -1:
            raise ShapeError(f"{name} is {attrs[name]}: it must be at least -1 (no limit)")
    return (
        TensorType(q.dtype, shape),
        TensorType(rules.tensor(types, 1).dtype, (batch, kv_heads, keys, size)),
        TensorType(v.dtype, (batch, kv_heads, keys, value_size)),
        TensorType(q.dtype, (batch, heads, queries, keys)),
    )


def split_heads(x: np.ndarray, heads: int) -> np.ndarray:
    """[batch, sequence, heads * size] as [batch, heads, sequence, size]: a view."""
    if x.ndim == 4:  # it already has four axes
        return x
    batch, length, hidden = x.shape
    return x.reshape(batch, length, heads, hidden // heads).transpose(0, 2, 1, 3)


class Cache(NamedTuple):
    """Keys or values of ``past`` positions, and scratch memory to append new ones if needed."""

    past: int
    field: Field | None

    def join(
        self,
        new: np.ndarray,
        old: np.ndarray | None,
        out: np.ndarray | None,
        workspace: np.ndarray,
        start: int | None = None,
    ) -> np.ndarray:
        """Concatenate past and new positions, in ``out`` if given; without a past, return the new
        ones. ``start`` is the position of the new ones in a past buffer with room for them."""
        if self.field is not None:
            out = self.field(workspace)
        if out is None:
            return new
        if old is not None:
            np.copyto(out[:, :, : old.shape[2]], old)
        start = self.past if start is None else start
        np.copyto(out[:, :, start : start + new.shape[2]], new)
        return out


def out_of_sight(
    queries: int,
    keys: int,
    offset: int | np.ndarray,
    *,
    causal: bool,
    left: int = -1,
    right: int = -1,
) -> np.ndarray | None:
    """A mask, true for the keys that causality and windows hide from queries which start at
    position ``offset``."""
    if causal:
        right = 0
    if left < 0 and right < 0:
        return None
    ahead = np.arange(keys) - (np.arange(queries)[:, None] + offset)
    blocked = ahead > right if right >= 0 else np.zeros(ahead.shape, BOOL)
    if left >= 0:
        blocked |= ahead < -left
    return blocked


@operator("Attention", since=23, infer=_infer_attention, work=attention_work)
@by_shape(arity=(7, 4))
def attention(node: Node, inputs: Tensors, outputs: Tensors, consts: Consts) -> Routine:
    attrs = node.attrs
    dims = attention_dims(inputs, attrs)
    assert all(isinstance(dim, int) for dim in dims)
    heads = Heads._make(dims)
    (_, dtype), mask, old = static_type(inputs, 0), inputs[3], inputs[4]
    scale = attrs.get("scale")
    # To NumPy, None equals the default dtype, float64.
    precision = rules.dtype_attribute(attrs, "softmax_precision")
    layout = Scratch()
    scoring = Scoring(
        1 / math.sqrt(max(heads.size, 1)) if scale is None else scale,
        attrs.get("softcap", 0.0),
        None if outputs[3] is None else attrs.get("qk_matmul_output_mode", 0),
        precision is not None and precision == FLOAT64 != dtype,
    )
    core = Core(layout, heads, dtype, scoring)
    past = 0 if old is None else old.dims[2]
    caches = []
    for i, size in ((1, heads.size), (2, heads.value_size)):
        shape = (heads.batch, heads.kv_heads, heads.keys, size)
        # If present_key and present_value are outputs, the cache is concatenated there.
        own = old is not None and outputs[i] is None
        room = layout.field(shape, rules.tensor(inputs, i).dtype) if own else None
        caches.append(Cache(past, room))
    fixed = None if inputs[6] is not None else unseen(heads, past, attrs)
    if mask is not None:
        check_mask(mask.dims, heads)

    def into(*arguments: RunValue) -> None:
        q, k, v, mask, old_k, old_v, lengths, y, new_k, new_v, show, workspace = arguments
        q = split_heads(q, heads.heads)
        k = caches[0].join(split_heads(k, heads.kv_heads), old_k, new_k, workspace)
        v = caches[1].join(split_heads(v, heads.kv_heads), old_v, new_v, workspace)
        blocked, biases = [fixed], []
        # The last query of each sample is at the position of its last key that is not padding.
        if lengths is not None:
            ends = lengths.reshape(-1, 1, 1, 1)
            blocked += [np.arange(heads.keys) >= ends, unseen(heads, ends - heads.queries, attrs)]
        if mask is not None and mask.dtype == BOOL:
            blocked.append(_blocked_by(mask, heads.keys))
        elif mask is not None:
            biases.append(mask)
        y = split_heads(y, heads.heads)
        core.run((q, k, v), Sight(blocked, biases), y, workspace, show)

    return Routine(into, layout.size)


def unseen(heads: Heads, offset: int | np.ndarray, attrs: Attrs) -> np.ndarray | None:
    """A mask, true for the keys that an Attention hides from queries at ``offset`` and later."""
    left, right = attrs.get("left_window_size", -1), attrs.get("right_window_size", -1)
    causal = bool(attrs.get("is_causal", 0))
    return out_of_sight(heads.queries, heads.keys, offset, causal=causal, left=left, right=right)


def _blocked_by(mask: np.ndarray, keys: int) -> np.ndarray:
    """A mask, true for keys where ``mask`` is false, and for those beyond its last dim."""
    hidden = np.logical_not(mask)
    if mask.shape[-1] == keys:
        return hidden
    return np.concatenate((hidden, np.ones((*mask.shape[:-1], keys - mask.shape[-1]), BOOL)), -1)


def check_mask(shape: tuple[int, ...], heads: Heads) -> None:
    """Check that the mask broadcasts to the scores, except that its last dim may be shorter."""
    wanted = (heads.batch, heads.heads, heads.queries)
    fits = 1 <= len(shape) <= 4 and shape[-1] <= heads.keys
    for got, want in zip(shape[-2::-1], wanted[::-1], strict=False):
        fits = fits and got in (1, want)
    if not fits:
        raise ShapeError(
            f"attn_mask of shape {shape} does not broadcast to the scores, {(*wanted, heads.keys)}"
        )
