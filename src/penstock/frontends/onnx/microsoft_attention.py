"""Attention of ONNX Runtime, written as ONNX's operations.

Without a cache it is written out as products and a Softmax, with a cache as one node. Nodes with
masks or features of other kinds stay unchanged, since their operations have kernels; QAttention,
which has none, becomes MultiHeadAttention of its projections.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import numpy as np

from penstock.core.types import Shape
from penstock.frontends.common.diagnostics import NodeError
from penstock.frontends.onnx.microsoft_rules import as_scalar, rewrites, scaled_product, sum_of
from penstock.frontends.onnx.node_upgrade import NodeUpgrade
from penstock.ir.graph import Value
from penstock.ir.op import AttrDict
from penstock.ops.registry import MICROSOFT

_INT32 = np.dtype(np.int32)


@rewrites("MRotaryEmbedding")
def rotary_embedding_of_images(b: NodeUpgrade) -> None:
    """Each angle belongs to one of three positions of a token: in time, height or width."""
    section, width = [*b.attrs["mrope_section"]], (b.shape(2) or (None,))[-1]
    if len(section) != 3 or min(section) < 0 or (isinstance(width, int) and width != sum(section)):
        raise NodeError(f"has mrope_section {section}, not three sizes with the caches' sum")
    half, streams = sum(section), np.repeat(np.arange(3), section)
    if b.attrs.get("mrope_layout", 0):
        streams[:] = 0
        for i in (1, 2):
            streams[i : 3 * section[i] : 3] = i
    # A negative position means none; GatherElements would count from the end of the caches.
    positions = b.emit("BitwiseAnd", [b.emit("Reshape", [b.input(1), [3, 0, 0]]), [2**63 - 1]])
    places = b.emit("Gather", [positions, b.constant(streams)], axis=0)
    places = b.emit("Transpose", [places], perm=[1, 2, 0])
    rows, dims = b.emit("Flatten", [places], axis=2), b.emit("Shape", [places])
    caches = [b.emit("Reshape", [b.input(i), [0, half]]) for i in (2, 3)]
    caches = [b.emit("GatherElements", [cache, rows], axis=0) for cache in caches]
    angles = [b.emit("Reshape", [cache, dims], allowzero=1) for cache in caches]
    b.become("RotaryEmbedding", [b.input(0), *angles], b.attrs)


@rewrites("Attention", "QAttention")
def attention(b: NodeUpgrade) -> None:
    """Attention of three projections of one input."""
    masked, past, added = (5, 8, 9) if b.op == "QAttention" else (3, 4, 5)
    shape, old = b.shape(1), b.optional(past)
    cached = old is not None and b.outputs[1:] and b.outputs[1] and not _is_special(b)
    if shape is None or not isinstance(shape[-1], int):
        return
    written = _is_bias(b, masked) if cached else _is_plain(b, masked, past)
    if not written and (b.op != "QAttention" or _is_special(b)):
        return
    total = shape[-1]
    sizes = b.attrs.get("qkv_hidden_sizes") or [total // 3] * 3
    if len(sizes) != 3 or sum(sizes) != total or sizes[0] != sizes[1]:
        raise NodeError(f"projects to {total} features, which are not those of {sizes}")
    projected = list(_projections(b, sizes))
    if not written:
        _become_multi_head(b, projected, masked, old)
        return
    if not cached:
        _become_attention(b, projected, sizes, masked, b.optional(added))
        return
    operands = [*projected, _biases(b, masked, added, projected[0]), old]
    b.emit_final("StackedAttention", operands, _in_heads(b, sizes), domain="penstock")


@rewrites("MultiHeadAttention")
def multi_head_attention(b: NodeUpgrade) -> None:
    """Attention of queries, keys and values, all [batch, places, features]; keys and values of
    another sequence may be in heads."""
    biased, masked, added, past = (3, 4, 5, 6) if b.op == "MultiHeadAttention" else (10, 3, 4, 5)
    olds = [b.optional(i) for i in (past, past + 1)]
    cached = all(olds) and _is_bias(b, masked) and len(b.outputs) == 3 and all(b.outputs)
    if not (cached and not _is_special(b)) and not _is_plain(b, masked, past):
        return
    values = [b.optional(i) for i in range(3)]
    shapes = [b.shape(i) if x is not None else None for i, x in enumerate(values)]
    sizes, wide = [_features(s) for s in shapes], [len(s or ()) == 4 for s in shapes]
    # Nodes whose past shares a buffer, and nodes with beams, stay unchanged.
    others = [b.optional(i) for i in range(past + 2, past + 5)]
    if 0 in sizes or wide[0] or (cached and any(wide)) or any(others):
        return
    parts = [None] * 3 if b.optional(biased) is None else _columns(b, biased, sizes)
    sums = [
        sum_of(b, x, None if in_heads else part)
        for x, part, in_heads in zip(values, parts, wide, strict=True)
    ]
    if cached:
        biases = _biases(b, masked, added, sums[0])
        b.become("Attention", [*sums, biases, *olds], _in_heads(b, sizes))
    else:
        _become_attention(b, sums, sizes, masked, b.optional(added), wide)


@rewrites("DecoderMaskedMultiHeadAttention")
def decoder_attention(b: NodeUpgrade) -> None:
    """Attention of one query. Over a buffer it stays unchanged, except that a bias is added before
    if sizes are known."""
    if b.optional(7) is None or b.optional(10) is None:
        multi_head_attention(b)
        return
    sizes = [_features(b.shape(i)) for i in range(3)]
    if 0 not in sizes and [b.rank(i) for i in range(3)] == [3, 3, 3]:
        pairs = zip(b.inputs[:3], _columns(b, 10, sizes), strict=True)
        inputs = [*[sum_of(b, x, part) for x, part in pairs], *b.inputs[3:10]]
        b.emit_final(b.op, inputs, b.attrs, domain=MICROSOFT)


def _features(shape: Shape | None) -> int:
    """Return features of [batch, places, features] or [batch, heads, places, size], or 0."""
    dims = {3: (shape or ())[2:], 4: (shape or ())[1::2]}.get(len(shape or ()), (0,))
    return math.prod([dim if isinstance(dim, int) else 0 for dim in dims])


def _is_special(b: NodeUpgrade) -> bool:
    """Whether queries and keys are rotated, or the past and the present share a buffer."""
    return any(b.attrs.get(key) for key in ("do_rotary", "past_present_share_buffer"))


def _is_plain(b: NodeUpgrade, masked: int, past: int) -> bool:
    """Whether attention can be written out: nodes with a past, or with masks that ``_mask`` cannot
    write, stay unchanged."""
    kept = b.optional(past) or any(b.outputs[1:]) or _is_special(b)
    return not kept and _is_mask(b, masked)


def _is_bias(b: NodeUpgrade, masked: int) -> bool:
    """Whether ``_mask`` can write out a mask, if there is one, without scores."""
    return b.optional(masked) is None or b.rank(masked) in (2, 3)


def _biases(b: NodeUpgrade, masked: int, added: int, x: Value) -> Value | None:
    """Return the sum of a mask and of terms added to scores, in the dtype of ``x``."""
    mask, bias = _mask(b, masked, x), b.optional(added)
    return sum_of(b, mask, bias) if mask or bias else None


def _in_heads(b: NodeUpgrade, sizes: Sequence[int]) -> AttrDict:
    """Return the attributes of ONNX's Attention, for queries that see the whole past and, if they
    are ordered, only preceding keys."""
    heads = b.attrs["num_heads"]
    if heads < 1 or any(n % heads for n in sizes):
        raise NodeError(f"has {sizes} features, which are not those of {heads} heads")
    return {
        "q_num_heads": heads,
        "kv_num_heads": heads,
        "scale": b.attrs.get("scale") or (sizes[0] // heads) ** -0.5,
        "is_causal": b.attrs.get("unidirectional", 0),
    }


def _become_multi_head(
    b: NodeUpgrade, values: Sequence[Value], masked: int, old: Value | None
) -> None:
    """Become MultiHeadAttention, whose kernel takes masks of all kinds; ``old``: stacked keys and
    values of the past."""
    olds = [None if old is None else b.emit("Gather", [old, i], axis=0) for i in (0, 1)]
    inputs = [*values, None, b.optional(masked), None, *olds]
    present = b.outputs[1] if len(b.outputs) > 1 else None
    presents = [] if present is None else [Value(b.fresh("present")) for _ in olds]
    if present is not None:
        b.give([present], "Concat", [b.emit("Unsqueeze", [x, [0]]) for x in presents], {"axis": 0})
    outputs = [b.outputs[0], *presents]
    b.emit_final("MultiHeadAttention", inputs, b.attrs, domain=MICROSOFT, outputs=outputs)


def _become_attention(
    b: NodeUpgrade,
    values: Sequence[Value],
    sizes: Sequence[int],
    masked: int,
    added: Value | None,
    wide: Sequence[bool] = (False, False, False),
) -> None:
    """Become softmax(q k^T scale + masks) v in heads; ``wide``: the values are in heads already."""
    attrs = _in_heads(b, sizes)
    heads, scale = attrs["q_num_heads"], attrs["scale"]

    def split(x: Value, size: int, perm: Sequence[int], in_heads: bool) -> Value:
        """Return x in heads, with its dims [batch, places, heads, size] permuted by ``perm``."""
        if in_heads:
            perm = [[0, 2, 1, 3][axis] for axis in perm]
            return x if perm == [0, 1, 2, 3] else b.emit("Transpose", [x], perm=perm)
        parts = b.emit("Reshape", [x, [0, 0, heads, size // heads]])
        return b.emit("Transpose", [parts], perm=[*perm])

    orders = [0, 2, 1, 3], [0, 2, 3, 1], [0, 2, 1, 3]
    q, k, v = (split(*each) for each in zip(values, sizes, orders, wide, strict=True))
    scores = b.emit("MatMul", [q, k])
    scores = b.emit("Mul", [scores, b.like(scale, scores)])
    order = _unseen(b, scores) if attrs["is_causal"] else None
    scores = sum_of(b, scores, _mask(b, masked, scores), added, order)
    y = b.emit("MatMul", [b.emit("Softmax", [scores], axis=-1), v])
    y = b.emit("Transpose", [y], perm=[0, 2, 1, 3])
    b.become("Reshape", [y, [0, 0, sizes[2]]])


def _projections(b: NodeUpgrade, sizes: Sequence[int]) -> Iterator[Value]:
    """Yield the products of the input and parts of the weights, plus parts of the bias."""
    x = b.input(0)
    if b.op != "QAttention":
        for w, bias in zip(*(_columns(b, i, sizes) for i in (1, 2)), strict=True):
            yield sum_of(b, b.emit("MatMul", [x, w]), bias)
        return
    parts = [_columns(b, i, sizes) for i in (1, 2, 4, 7)]
    for w, bias, scale, zero in zip(*parts, strict=True):
        operands = [x, w, b.optional(6), zero]
        yield sum_of(b, scaled_product(b, operands, [b.input(3), scale]), bias)


def _columns(b: NodeUpgrade, index: int, sizes: Sequence[int]) -> Sequence[Value | None]:
    """Return an input in parts of some columns each; scalars serve all parts."""
    value = b.optional(index)
    if value is None or b.shape(index) in ((), (1,)):
        return [value] * len(sizes)
    if value.const is not None:
        arrays = np.split(value.const, np.cumsum(sizes)[:-1], -1)
        return [b.constant(np.ascontiguousarray(part), part.dtype) for part in arrays]
    return b.emit_several("Split", [value, sizes], {"axis": -1}, count=len(sizes))


def _places(b: NodeUpgrade, scores: Value, axis: int) -> Value:
    """Return the places of queries, along axis 2 of scores, or of keys, along axis 3."""
    length = b.cast(as_scalar(b, b.emit("Shape", [scores], start=axis, end=axis + 1)), "int32")
    return b.emit("Range", [b.constant(0, _INT32), length, b.constant(1, _INT32)])


def _unseen(b: NodeUpgrade, scores: Value) -> Value:
    """Return the term that hides from each query the keys after its own place."""
    queries = b.emit("Unsqueeze", [_places(b, scores, 2), [1]])
    behind = b.emit("Greater", [_places(b, scores, 3), queries])
    return b.emit("Where", [behind, b.like(-math.inf, scores), b.like(0, scores)])


def _is_mask(b: NodeUpgrade, index: int) -> bool:
    """Whether ``_mask`` can write out a mask: of places of the batch, or of its rows' ends."""
    if b.optional(index) is None:
        return True
    shape, batch = b.shape(index), (b.shape(0) or (None,))[0]
    if shape is None or len(shape) != 1:
        return shape is not None and len(shape) in (2, 3)
    return batch is not None and shape[0] == batch


def _mask(b: NodeUpgrade, index: int, scores: Value) -> Value | None:
    """Return the term that is added to scores: ``mask_filter_value`` for hidden keys."""
    mask = b.optional(index)
    if mask is None:
        return None
    rank = b.rank(index)
    if rank == 1:
        seen = b.emit("Less", [_places(b, scores, 3), b.emit("Unsqueeze", [mask, [1]])])
    else:
        seen = b.emit("Greater", [mask, b.constant(0, _INT32)])
    # -10000 is ONNX Runtime's default: hidden keys get a weight of almost 0, not exactly 0.
    hidden = b.like(b.attrs.get("mask_filter_value", -10000.0), scores)
    added = b.emit("Where", [seen, b.like(0, scores), hidden])
    # A mask of rank 3 has a row for each query; others serve all queries, and both all heads.
    return b.emit("Unsqueeze", [added, [1] if rank == 3 else [1, 2]])
