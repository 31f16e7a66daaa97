"""Rotary position embedding (RoPE): pairs of features are rotated by position-dependent angles.

https://arxiv.org/pdf/2104.09864
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import numpy as np

from penstock.core.types import Dim, RunValue, ShapeError, Type
from penstock.ir.graph import Node
from penstock.ir.op import Attrs, Consts, Op, Types
from penstock.ops.common.shape_rules import all_known, check_shape, given, tensor
from penstock.ops.common.specialize import Routine, Scratch, Tensors, by_shape
from penstock.ops.onnx.attention import share
from penstock.ops.registry import MICROSOFT, operator


def angles(cache: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """Gather rows of a cache of cosines or sines as [batch, 1, sequence, half]."""
    # NumPy would interpret negative positions from the end of the cache.
    if positions.size and (positions.min() < 0 or positions.max() >= len(cache)):
        raise ShapeError(f"position_ids must be in [0, {len(cache)}), the rows of the caches")
    return np.take(cache, positions, 0)[:, None]


class Rotation:
    """Rotate the first ``2 * half`` features of [batch, heads, sequence, size] in pairs."""

    def __init__(
        self,
        layout: Scratch,
        dims: Sequence[int],
        half: int,
        dtype: np.dtype | None,
        interleaved: bool,
    ) -> None:
        self.turning = 2 * half
        # The two halves of the rotated features; the remaining features are copied.
        self.first, self.second = slice(0, half), slice(half, 2 * half)
        if interleaved:
            self.first, self.second = slice(0, 2 * half, 2), slice(1, 2 * half, 2)
        self.spare = layout.field((*dims[:3], half), dtype)

    def run(
        self,
        x: np.ndarray,
        cos: np.ndarray,
        sin: np.ndarray,
        out: np.ndarray,
        workspace: np.ndarray,
    ) -> None:
        """Rotate ``x`` by angles whose cosines and sines broadcast to [batch, 1, sequence,
        half].
        """
        a, b = x[..., self.first], x[..., self.second]
        out_a, out_b = out[..., self.first], out[..., self.second]
        spare = self.spare(workspace)
        np.multiply(a, cos, out_a)
        np.multiply(b, sin, spare)
        np.subtract(out_a, spare, out_a)
        np.multiply(a, sin, out_b)
        np.multiply(b, cos, spare)
        np.add(out_b, spare, out_b)
        np.copyto(out[..., self.turning :], x[..., self.turning :])


# The input indices of cosines, sines and positions. In com.microsoft, a single position id is the
# first position of all samples. Its attributes scale and is_packed_batching are ignored, as in ONNX
# Runtime.
_ONNX = (1, 2, 3)
_MICROSOFT = (2, 3, 1)


def _heads(shape: tuple[Dim, ...], attrs: Attrs, half: Dim) -> tuple[Dim, ...]:
    """[batch, heads, sequence, size] of the input."""
    if len(shape) == 4:
        return shape
    if len(shape) != 3:
        raise ShapeError(f"the input must have rank 3 or 4, but has shape {shape}")
    hidden, heads = shape[2], attrs.get("num_heads") or 0
    if heads < 1 and not attrs.get("rotary_embedding_dim") and isinstance(half, int) and half:
        # As in ONNX Runtime, the head size follows from the cache.
        heads = hidden // (2 * half) if isinstance(hidden, int) else 0
    if heads < 1:
        if hidden is None or isinstance(hidden, str):
            return (shape[0], None, shape[1], None)
        raise ShapeError("the input has rank 3: the attribute num_heads must be positive")
    return (shape[0], heads, shape[1], share(hidden, heads, "the input"))


def _infer_rotary(
    order: tuple[int, int, int], types: Types, attrs: Attrs, consts: Consts
) -> Sequence[Type]:
    x, cos, sin, ids = (tensor(types, i) for i in (0, *order))
    if x.shape is None or cos.shape is None:
        return (x.without_data(),)
    batch, _, length, size = _heads(x.shape, attrs, cos.shape[-1] if cos.shape else None)
    turning = attrs.get("rotary_embedding_dim") or size
    if isinstance(turning, int):
        if turning % 2 or (isinstance(size, int) and turning > size):
            raise ShapeError(f"the rotary dim {turning} must be even and at most head size {size}")
        if isinstance(cos.shape[-1], int) and cos.shape[-1] != turning // 2:
            raise ShapeError(f"the last dim of the cos cache {cos.shape} must be {turning // 2}")
    if sin.shape is not None and len(sin.shape) != len(cos.shape):
        raise ShapeError(
            f"the cos and sin caches must have the same shape, but have {cos.shape} and {sin.shape}"
        )
    if not given(types, order[2]):
        check_shape("the cos cache, as position_ids is omitted,", cos.shape, (batch, length, None))
        return (x.without_data(),)
    check_shape("a cache", cos.shape, (None, None))
    allowed = [(batch, length), *([(1,)] if order is _MICROSOFT else [])]
    check_shape("position_ids", ids.shape, *allowed)
    return (x.without_data(),)


@operator("RotaryEmbedding", since=23, infer=partial(_infer_rotary, _ONNX))
@operator("RotaryEmbedding", domain=MICROSOFT, infer=partial(_infer_rotary, _MICROSOFT))
@by_shape(arity=(4, 1))
def rotary_embedding(node: Node, inputs: Tensors, outputs: Tensors, consts: Consts) -> Routine:
    order, attrs = cache_places(node.op), node.attrs
    x, half = tensor(inputs, 0), tensor(inputs, order[0]).dims[-1]
    batch, heads, length, size = heads_of(x.dims, attrs, half) or (0,) * 4
    four, layout = len(x.dims) == 4, Scratch()
    interleaved = bool(attrs.get("interleaved", 0))
    rotation = Rotation(layout, (batch, heads, length), half, x.dtype, interleaved)

    def into(x: np.ndarray, *arguments: RunValue) -> None:
        cos, sin, positions = (arguments[i - 1] for i in order)
        out, workspace = arguments[-2:]
        if not four:
            split = (batch, length, heads, size)
            x, out = (a.reshape(split).transpose(0, 2, 1, 3) for a in (x, out))
        if positions is None:
            cos, sin = cos[:, None], sin[:, None]
        else:
            if positions.ndim == 1:
                positions = positions + np.arange(length)[None]
            cos, sin = angles(cos, positions), angles(sin, positions)
        rotation.run(x, cos, sin, out, workspace)

    return Routine(into, layout.size)


def cache_places(op: Op) -> tuple[int, int, int]:
    """The input indices of cosines, sines and positions of an operation."""
    return _MICROSOFT if op.domain == MICROSOFT else _ONNX


def heads_of(dims: Sequence[int], attrs: Attrs, half: int) -> tuple[int, ...] | None:
    """[batch, heads, sequence, size] of an input of known shape."""
    return all_known(_heads(tuple(dims), attrs, half))


def _infer_gemma(types: Types, attrs: Attrs, consts: Consts) -> Sequence[Type]:
    angle, q, k = (tensor(types, i) for i in (0, 1, 3))
    check_shape("emb", angle.shape, (None, None, None))
    batch, length, size = angle.shape or (None, None, None)
    for x, turned in ((q, tensor(types, 2)), (k, tensor(types, 4))):
        check_shape("a query or key", x.shape, (batch, None, length, size))
        check_shape("one with its halves exchanged", turned.shape, x.shape)
    return (q.without_data(), k.without_data())


@operator("GemmaRotaryEmbedding", domain=MICROSOFT, infer=_infer_gemma)
@by_shape(arity=(5, 2))
def gemma_rotary_embedding(
    node: Node, inputs: Tensors, outputs: Tensors, consts: Consts
) -> Routine:
    def into(angle: np.ndarray, *arguments: np.ndarray) -> None:
        cos, sin = np.cos(angle)[:, None], np.sin(angle)[:, None]
        q, turned_q, k, turned_k, out_q, out_k = arguments
        for x, turned, out in ((q, turned_q, out_q), (k, turned_k, out_k)):
            np.multiply(x, cos, out)
            np.add(out, turned * sin, out)

    return Routine(into)
