"""Attention over a cache of keys and values: GroupQueryAttention and SparseAttention.

Each sample has its own past length. New keys are appended to the past, in a buffer for the longest
sample, which either has the size of the cache or grows with each run::

    past     a0 a1 a2 .. .. ..      b0 .. .. .. .. ..
    new      a3                     b1
    present  a0 a1 a2 a3 .. ..      b0 b1 .. .. .. ..

In a prompt, all keys are new, and positions after the end of a sample are padding.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from penstock.core.records import NamedTuple
from penstock.core.types import FLOAT32, Dim, RunValue, ShapeError, TensorType, Type
from penstock.ir.graph import Node
from penstock.ir.op import Attrs, Consts, Dims, Types
from penstock.ops.common import shape_rules as rules
from penstock.ops.common.dtypes import INT8, UINT8, is_float
from penstock.ops.common.shape_rules import check_shape, given, tensor
from penstock.ops.common.specialize import Routine, Scratch, Tensors, by_shape, static_type
from penstock.ops.onnx.attention import (
    BIASED,
    SOFTMAX,
    Core,
    Heads,
    Scoring,
    Sight,
    out_of_sight,
    share,
    split_heads,
)
from penstock.ops.onnx.rotary import Rotation, angles
from penstock.ops.registry import MICROSOFT, operator

_COSINES = {"GroupQueryAttention": 7, "SparseAttention": 9}
"""the input index of cos_cache, which sin_cache follows"""


class _Sizes(NamedTuple):
    batch: Dim
    queries: Dim
    new: Dim  # keys
    size: Dim  # of a head
    room: Dim  # positions of the past
    total: Dim  # positions of the longest sample


def _heads_of(attrs: Attrs) -> tuple[int, int]:
    """The numbers of query heads and of key/value heads."""
    heads, kv_heads = attrs["num_heads"], attrs["kv_num_heads"]
    if min(heads, kv_heads) < 1 or heads % kv_heads:
        raise ShapeError(f"num_heads={heads} must be a multiple of kv_num_heads={kv_heads}")
    return heads, kv_heads


def _sizes(types: Types, attrs: Attrs, consts: Consts, total_at: int) -> _Sizes:
    """Check queries, keys and values, packed or not, and their past; ``total_at``: the index of
    input total_sequence_length.
    """
    heads, kv_heads = _heads_of(attrs)
    q, k, v, past_k, past_v = (tensor(types, i).shape for i in range(5))
    check_shape("query", q, (None, None, None))
    batch, queries, width = q or (None, None, None)
    new = queries
    if given(types, 1) != given(types, 2) or given(types, 3) != given(types, 4):
        raise ShapeError("key and value must be given together, as must past_key and past_value")
    if given(types, 1):
        size = share(width, heads, "query")
        hidden = rules.dim_product((size, kv_heads))
        new = k[1] if k is not None and len(k) == 3 else None
        check_shape("key", k, (batch, queries, hidden), (batch, 0, hidden))
        check_shape("value", v, (batch, new, hidden))
    else:
        size = share(width, heads + 2 * kv_heads, "the packed query, key and value")
    bits = _cache_bits(types, attrs)
    stored = size if bits != 4 else share(size, 2, "a byte")
    check_shape("past_key", past_k, (batch, kv_heads, None, stored))
    room: Dim = 0
    if given(types, 3):
        room = past_k[2] if past_k is not None else None
        check_shape("past_value", past_v, (batch, kv_heads, room, stored))
    contents = rules.ints(types, consts, total_at)
    if contents is not None and len(contents) != 1:
        raise ShapeError("total_sequence_length must have exactly one element")
    return _Sizes(batch, queries, new, size, room, contents[0] if contents else None)


def _cache_bits(types: Types, attrs: Attrs) -> int:
    """The bits of an element of a quantized cache, 8 or 4; 0 for a float cache."""
    modes = {attrs.get(f"{name}_quant_type", "NONE") for name in "kv"}
    if len(modes) > 1 or modes - {"NONE", "PER_TENSOR", "PER_CHANNEL"}:
        raise ShapeError(
            "k_quant_type and v_quant_type must be equal, and NONE, PER_TENSOR or PER_CHANNEL, "
            f"not {' and '.join(sorted(modes))}"
        )
    bits = 0 if modes == {"NONE"} else attrs.get("kv_cache_bit_width") or 0
    codes = {0: None, 8: INT8, 4: UINT8}
    if bits not in codes or (modes != {"NONE"}) != (bits != 0) or (bits and not given(types, 3)):
        raise ShapeError("a quantized cache requires a past, and kv_cache_bit_width 8 or 4")
    dtype = tensor(types, 3).dtype
    if dtype is not None and not (dtype == codes[bits] if bits else is_float(dtype)):
        raise ShapeError(f"a cache of {dtype} does not match kv_cache_bit_width {bits}")
    return bits


def _window(attrs: Attrs) -> int:
    """The local window size in keys; 0: unlimited."""
    # -1 means no window.
    window = max(attrs.get("local_window_size", -1), 0)
    if window and not attrs.get("causal", 1):
        raise ShapeError("local_window_size requires causal=1")
    if not window and attrs.get("sliding_window_cache", 0):
        raise ShapeError("sliding_window_cache requires local_window_size")
    return int(window)


def resident(length: np.ndarray, capacity: int, window: int) -> np.ndarray:
    """The cached positions for each ``length``, in a cache truncated to its window when full.

    >>> resident(np.arange(9), 6, 4)
    array([0, 1, 2, 3, 4, 5, 6, 4, 5])
    """
    step = capacity - window + 1
    return length - step * -(-np.maximum(length - capacity, 0) // step)


class _Store:
    """Keys or values: concatenates past and new ones."""

    def __init__(
        self,
        layout: Scratch,
        dims: tuple[int, int, int, int],
        dtype: np.dtype,
        bits: int,
        own: bool,
    ) -> None:
        """``dims``: [batch, heads, positions, size]; ``own``: whether the present output cannot
        hold all positions.
        """
        self.positions, self.bits = dims[2], bits
        stored = (*dims[:3], dims[3] // 2 if bits == 4 else dims[3])
        code = {0: dtype, 8: INT8, 4: UINT8}[bits]
        self.side = layout.field(stored, code) if own else None
        self.real = layout.field(dims, dtype) if bits else None

    def join(
        self,
        new: np.ndarray,
        old: np.ndarray | None,
        present: np.ndarray | None,
        scale: np.ndarray | None,
        rows: Sequence[tuple[int, int, int]],
        workspace: np.ndarray,
    ) -> np.ndarray:
        """Return all positions as floats. ``rows`` has, per sample, the past length, the total
        length, and the first position that the present holds."""
        if scale is not None:
            new = self._encode(new, self._scales(scale, new))
        side = self.side(workspace) if self.side is not None else present
        assert side is not None
        for b, (cached, end, start) in enumerate(rows):
            if old is not None:
                np.copyto(side[b, :, :cached], old[b, :, :cached])
            np.copyto(side[b, :, cached:end], new[b])
            # Masked keys have weight 0, but 0 times a NaN in uninitialized memory would be NaN.
            side[b, :, end:] = 0
            if present is not None and present is not side:
                np.copyto(present[b, :, : end - start], side[b, :, start:end])
                present[b, :, end - start :] = 0
        keys = side[:, :, : self.positions]
        if self.real is None or scale is None:
            return keys
        real = self.real(workspace)
        if self.bits == 8:
            np.copyto(real, keys)
        else:
            # 4-bit codes are stored with an offset of 8, two per byte, the first in the low bits.
            np.subtract(keys & 15, 8, real[..., ::2], dtype=real.dtype, casting="unsafe")
            np.subtract(keys >> 4, 8, real[..., 1::2], dtype=real.dtype, casting="unsafe")
        return np.multiply(real, self._scales(scale, real), real)

    def _scales(self, scale: np.ndarray, like: np.ndarray) -> np.ndarray:
        return scale.reshape((1, like.shape[1], 1, like.shape[3]) if scale.size > 1 else ())

    def _encode(self, new: np.ndarray, scale: np.ndarray) -> np.ndarray:
        """Quantize new positions."""
        half = 1 << (self.bits - 1)
        codes = np.clip(np.rint(new / scale), -half, half - 1)
        if self.bits == 8:
            return codes.astype(INT8)
        codes = (codes + half).astype(UINT8)
        return codes[..., ::2] | codes[..., 1::2] << 4


def _shown(attrs: Attrs, outputs: Tensors) -> int | None:
    """The stage of the scores in the fourth output, or None without that output."""
    if len(outputs) < 4 or outputs[3] is None:
        return None
    shown = {1: BIASED, 2: SOFTMAX}.get(attrs.get("qk_output", 0))
    if shown is None or attrs.get("sliding_window_cache", 0):
        raise ShapeError("output_qk requires qk_output 1 or 2, and no sliding_window_cache")
    return shown


class _Call(NamedTuple):
    """The arrays of one call. ``parts``: queries, keys and values; ``caches``: past, present and
    scales of keys and of values; ``ends``: the length of each sample; ``turning``: cosines, sines
    and positions of the rotary embedding."""

    parts: Sequence[np.ndarray]
    caches: Sequence[tuple[np.ndarray | None, np.ndarray | None, np.ndarray | None]]
    ends: np.ndarray
    turning: Sequence[np.ndarray | None]
    sight: Sight
    y: np.ndarray
    show: np.ndarray | None = None


class _CachedAttention:
    """The attention of both operations, for known sizes."""

    def __init__(
        self,
        layout: Scratch,
        node: Node,
        sizes: _Sizes,
        dtype: np.dtype,
        inputs: Tensors,
        outputs: Tensors,
    ) -> None:
        batch, queries, new, size, room, total = rules.all_known(sizes) or (0,) * 6
        attrs, bits = node.attrs, _cache_bits(inputs, node.attrs)
        heads, kv_heads = _heads_of(attrs)
        self.sliding = bool(attrs.get("sliding_window_cache", 0))
        self.room, self.total, self.new, self.window = room, total, new, _window(attrs)
        self.causal = bool(attrs.get("causal", 1))
        keys = min(total, room + new) if self.sliding else total
        self.heads = Heads(batch, heads, kv_heads, queries, keys, size, size)
        scale = attrs.get("scale") or 1 / math.sqrt(max(size, 1))
        scoring = Scoring(scale, attrs.get("softcap", 0.0), _shown(attrs, outputs))
        self.core = Core(layout, self.heads, dtype, scoring)
        dims = batch, kv_heads, keys, size
        owned = [outputs[i] is None or self.sliding for i in (1, 2)]
        self.stores = [_Store(layout, dims, dtype, bits, own) for own in owned]
        self.turns = []
        if attrs.get("do_rotary", 0):
            interleaved = bool(attrs.get("rotary_interleaved", 0))
            half = tensor(inputs, _COSINES[node.op.name]).dims[1]
            for dims in ((batch, heads, queries, size), (batch, kv_heads, new, size)):
                rotation = Rotation(layout, dims, half, dtype, interleaved)
                self.turns.append((rotation, layout.field(dims, dtype)))

    def split(self, q: np.ndarray, k: np.ndarray | None, v: np.ndarray) -> list[np.ndarray]:
        """Split queries, keys and values into [batch, heads, sequence, size]."""
        _, heads, kv_heads, *_ = self.heads
        if k is not None:
            return [split_heads(q, heads), split_heads(k, kv_heads), split_heads(v, kv_heads)]
        packed = split_heads(q, heads + 2 * kv_heads)
        return np.split(packed, (heads, heads + kv_heads), axis=1)

    def offsets(self, ends: np.ndarray) -> np.ndarray:
        """The position of the first query of each sample, given the lengths ``ends``."""
        if ends.size and (ends.min() < 1 or ends.max() > self.total):
            raise ShapeError(
                f"sequence lengths {ends.min()} to {ends.max()} must be from 1 to "
                f"total_sequence_length {self.total}"
            )
        if self.heads.queries == self.total and not (self.sliding and (ends < self.total).any()):
            return np.zeros_like(ends)
        if (ends < self.heads.queries).any():
            raise ShapeError(
                f"a sample has {self.heads.queries} queries, but only {ends.min()} positions in all"
            )
        return ends - self.heads.queries

    def run(self, call: _Call, workspace: np.ndarray) -> list[np.ndarray | None]:
        """Compute the attention; return the masks that were applied (None: no mask)."""
        parts, heads, ends = list(call.parts), self.heads, call.ends
        biases, offset = call.sight.biases, self.offsets(ends)
        if self.turns:
            cos_cache, sin_cache, given_places = call.turning
            assert cos_cache is not None and sin_cache is not None
            places = self._positions(offset, given_places)
            cos, sin = angles(cos_cache, places), angles(sin_cache, places)
            for i, (rotation, field) in enumerate(self.turns):
                turned = field(workspace)
                if turned.size:
                    rotation.run(parts[i], cos, sin, turned, workspace)
                parts[i] = turned
        # New keys follow the past; there are none if the cache already has the keys of the queries.
        before = offset + (heads.queries - self.new)
        cached, kept = before, before + self.new
        if self.sliding:
            cached = resident(before, self.room, self.window)
            kept = resident(before + self.new, self.room, self.window)
        counts = zip(cached, kept, strict=True)
        rows = [(old, old + self.new, old + self.new - n) for old, n in counts]
        parts_of_stores = zip(self.stores, parts[1:], call.caches, strict=True)
        k, v = (store.join(new, *cache, rows, workspace) for store, new, cache in parts_of_stores)
        first = (before - cached).reshape(-1, 1, 1, 1)
        flags = [np.arange(heads.keys) >= ends.reshape(-1, 1, 1, 1) - first, *call.sight.blocked]
        at, left = offset.reshape(-1, 1, 1, 1) - first, self.window - 1
        flags.append(out_of_sight(heads.queries, heads.keys, at, causal=self.causal, left=left))
        # The cache holds only some positions, but biases are indexed by absolute position.
        if self.sliding:
            where = np.minimum(first + np.arange(heads.keys), self.total - 1)
            biases = [np.take_along_axis(bias, where, 3) for bias in biases]
        sight = Sight(flags, biases, call.sight.sink)
        out = split_heads(call.y, heads.heads)
        self.core.run((parts[0], k, v), sight, out, workspace, call.show)
        return flags

    def _positions(self, offset: np.ndarray, given: np.ndarray | None) -> np.ndarray:
        """The positions of the queries. For a prompt, only the first of the given ones is used."""
        places = np.arange(self.heads.queries)
        if given is None:
            return offset[:, None] + places
        if self.heads.queries == self.total:
            # Adding zeros broadcasts to one row per sample.
            return given[:1, :1] + places + 0 * offset[:, None]
        return given


def _check_rotary(types: Types, attrs: Attrs, size: Dim, cos_at: int) -> None:
    cos, sin = tensor(types, cos_at).shape, tensor(types, cos_at + 1).shape
    if attrs.get("do_rotary", 0) and not (given(types, cos_at) and given(types, cos_at + 1)):
        raise ShapeError("do_rotary requires cos_cache and sin_cache")
    check_shape("cos_cache", cos, (None, None))
    check_shape("sin_cache", sin, (None, cos[1] if cos is not None else None))
    half = cos[1] if cos is not None else None
    if isinstance(half, int) and isinstance(size, int) and 2 * half > size:
        raise ShapeError(f"cos_cache has {half} angles, more than half the head size, {size}")


def _work(attrs: Attrs, inputs: Dims, output: tuple[int, ...]) -> int:
    """The work for all positions of the past, or of a prompt."""
    past = inputs[3]
    return 4 * math.prod(output) * max(output[1], past[2] if past else 0)


# GroupQueryAttention


def _infer_gqa(types: Types, attrs: Attrs, consts: Consts) -> Sequence[Type]:
    if given(types, 14) or given(types, 15):
        raise ShapeError("GroupQueryAttention with normalized queries and keys is not supported")
    sizes = _sizes(types, attrs, consts, 6)
    batch, queries, new, size, room, total = sizes
    heads, kv_heads = _heads_of(attrs)
    check_shape("seqlens_k", tensor(types, 5).shape, (batch,), (batch, 1))
    _check_rotary(types, attrs, size, 7)
    check_shape("position_ids", tensor(types, 9).shape, (batch, queries))
    allowed = [(b, h, queries, total) for b in (batch, 1) for h in (heads, 1)]
    check_shape("attention_bias", tensor(types, 10).shape, *allowed)
    check_shape("head_sink", tensor(types, 11).shape, (heads,))
    bits, window, sliding = _cache_bits(types, attrs), _window(attrs), _slides(types, attrs)
    for i in (12, 13) if bits else ():
        scales = tensor(types, i).shape
        count = None if scales is None else rules.dim_product(scales)
        of_channels = rules.dim_product((kv_heads, size))
        wanted = 1 if attrs["k_quant_type"] == "PER_TENSOR" else of_channels
        check_shape("the flattened scale of the cache", (count,), (wanted,))
        if not given(types, i):
            raise ShapeError("a quantized cache requires k_scale and v_scale")
    present: Dim = room
    if sliding:
        if isinstance(room, int) and room < window:
            raise ShapeError(f"a cache of {room} is smaller than local_window_size {window}")
    elif room == 0:
        present = total
    elif isinstance(room, int) and isinstance(total, int):
        present = max(room, total)
    else:
        present = None
    fixed = rules.all_known((total, new, room))
    if fixed and not sliding and (fixed[0] > fixed[2]) and total != fixed[1] + fixed[2]:
        raise ShapeError(
            f"total_sequence_length is {total}, but {room} past and {new} new positions are given"
        )
    dtype = tensor(types, 3).dtype if given(types, 3) else tensor(types, 0).dtype
    stored = size if bits != 4 else share(size, 2, "a byte")
    cache = TensorType(dtype, (batch, kv_heads, present, stored))
    y = (batch, queries, rules.dim_product((heads, size)))
    scores = (batch, heads, queries, total)
    first = tensor(types, 0).dtype
    return (TensorType(first, y), cache, cache, TensorType(first, scores))


def _slides(types: Types, attrs: Attrs) -> bool:
    sliding = bool(attrs.get("sliding_window_cache", 0))
    if sliding and not given(types, 3):
        raise ShapeError("sliding_window_cache requires past_key and past_value")
    return sliding


@operator("GroupQueryAttention", domain=MICROSOFT, infer=_infer_gqa, work=_work)
@by_shape(arity=(16, 4), values=(6,), contiguous=True)
def group_query_attention(node: Node, inputs: Tensors, outputs: Tensors, consts: Consts) -> Routine:
    attrs, layout = node.attrs, Scratch()
    bits, shown = _cache_bits(inputs, attrs), _shown(attrs, outputs)
    _, dtype = static_type(inputs, 0)
    if inputs[3] is not None and not bits and inputs[3].dtype != dtype:
        # Of two float types, neither may represent the values of the other.
        dtype = FLOAT32
    sizes = _sizes(inputs, attrs, consts, 6)
    attend = _CachedAttention(layout, node, sizes, dtype, inputs, outputs)
    # Smooth softmax adds 1 to the denominator, like an additional key with score 0.
    smooth = np.zeros(_heads_of(attrs)[0], dtype) if attrs.get("smooth_softmax", -1) == 1 else None

    def into(*arguments: RunValue) -> None:
        q, k, v, old_k, old_v, lengths, _, cos, sin, places, bias, sink, *scales = arguments[:14]
        y, new_k, new_v, show, workspace = arguments[16:]
        k_scale, v_scale = scales if bits else (None, None)
        call = _Call(
            attend.split(q, k, v),
            ((old_k, new_k, k_scale), (old_v, new_v, v_scale)),
            # seqlens_k is the length minus 1.
            lengths.reshape(-1) + 1,
            (cos, sin, places),
            Sight((), () if bias is None else (bias,), smooth if sink is None else sink),
            y,
            show,
        )
        flags = attend.run(call, workspace)
        for hidden in flags if shown == BIASED else ():
            if hidden is not None:
                np.copyto(show, 0, where=hidden)

    return Routine(into, layout.size)


# SparseAttention: a block mask selects the keys that a query sees


def _infer_sparse(types: Types, attrs: Attrs, consts: Consts) -> Sequence[Type]:
    batch, queries, _, size, room, total = _sizes(types, attrs, consts, 7)
    heads, kv_heads = _heads_of(attrs)
    rows, columns = tensor(types, 5).shape, tensor(types, 6).shape
    check_shape("block_row_indices", rows, (None, None))
    if given(types, 3) and tensor(types, 3).dtype != tensor(types, 0).dtype:
        raise ShapeError("query and past_key must have the same dtype")
    layouts, blocks = rows or (None, None)
    check_shape("block_col_indices", columns, (layouts, None))
    if isinstance(layouts, int) and (layouts < 1 or heads % layouts):
        raise ShapeError(
            f"num_heads={heads} must be a multiple of the {layouts} layouts of block_row_indices"
        )
    check_shape("key_total_sequence_lengths", tensor(types, 8).shape, (batch,))
    _check_rotary(types, attrs, size, 9)
    block = attrs["sparse_block_size"]
    covered = (blocks - 1) * block if isinstance(blocks, int) else None
    for limit in (room, covered):
        if isinstance(limit, int) and isinstance(total, int) and not 1 <= total <= limit:
            raise ShapeError(f"total_sequence_length {total} must be from 1 to {limit}")
    dtype = tensor(types, 0).dtype
    cache = TensorType(dtype, (batch, kv_heads, room, size))
    y = (batch, queries, rules.dim_product((heads, size)))
    return (TensorType(dtype, y), cache, cache)


def _hidden_blocks(rows: np.ndarray, columns: np.ndarray) -> np.ndarray:
    """A mask of hidden blocks [layout, query block, key block], from the visible blocks in CSR
    format."""
    layouts, blocks = len(rows), rows.shape[1] - 1
    hidden = np.ones((layouts, blocks, blocks), np.bool_)
    for starts, ends, layout in zip(rows, columns, hidden, strict=True):
        counts = np.diff(starts)
        keys = ends[: starts[-1]]
        if (
            starts[0]
            or (counts < 0).any()
            or starts[-1] > len(ends)
            or keys.min(initial=0) < 0
            or keys.max(initial=0) >= blocks
        ):
            raise ShapeError("block_row_indices and block_col_indices are not a valid CSR matrix")
        layout[np.repeat(np.arange(blocks), counts), keys] = False
    return hidden


@operator("SparseAttention", domain=MICROSOFT, infer=_infer_sparse, work=_work)
@by_shape(arity=(11, 3), values=(7,), contiguous=True)
def sparse_attention(node: Node, inputs: Tensors, outputs: Tensors, consts: Consts) -> Routine:
    layout, block = Scratch(), node.attrs["sparse_block_size"]
    _, dtype = static_type(inputs, 0)
    sizes = _sizes(inputs, node.attrs, consts, 7)
    attend = _CachedAttention(layout, node, sizes, dtype, inputs, outputs)
    heads = attend.heads

    def into(*arguments: RunValue) -> None:
        q, k, v, old_k, old_v, starts, columns, _, ends, cos, sin = arguments[:11]
        y, new_k, new_v, workspace = arguments[11:]
        blocks = _hidden_blocks(starts, columns)
        places = (attend.offsets(ends)[:, None] + np.arange(heads.queries)) // block
        hidden = np.moveaxis(blocks[:, places], 0, 1)[..., np.arange(heads.keys) // block]
        call = _Call(
            attend.split(q, k, v),
            ((old_k, new_k, None), (old_v, new_v, None)),
            ends,
            (cos, sin, None),
            Sight((np.tile(hidden, (1, heads.heads // len(blocks), 1, 1)),)),
            y,
        )
        attend.run(call, workspace)

    return Routine(into, layout.size)
