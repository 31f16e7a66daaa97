"""Rotary position embedding: pairs of features turn by an angle that grows with their position.

https://arxiv.org/pdf/2104.09864
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np

from penstock.ir.graph import Node
from penstock.ir.op import Attrs, Consts, Types
from penstock.ops.common.shape_rules import all_known, check_shape, given, tensor
from penstock.ops.common.specialize import Routine, Scratch, Tensors, by_shape
from penstock.ops.onnx.attention import share
from penstock.ops.registry import MICROSOFT, operator
from penstock.types import Dim, ShapeError, Type


def _angles(cache: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """Rows of a cache of cosines or sines, as [batch, 1, sequence, half]."""
    if positions.size and (positions.min() < 0 or positions.max() >= len(cache)):
        raise ShapeError(f"positions up to {positions.max()} do not fit a cache of {len(cache)}")
    return np.take(cache, positions, 0)[:, None]


# Where cosines, sines and positions stand among the inputs. One position id alone, which
# com.microsoft has, is where all samples start.
_ONNX = (1, 2, 3)
_MICROSOFT = (2, 3, 1)


def _heads(shape: tuple[Dim, ...], attrs: Attrs, half: Dim) -> tuple[Dim, ...]:
    """[batch, heads, sequence, size] of the input."""
    if len(shape) == 4:
        return shape
    if len(shape) != 3:
        raise ShapeError(f"the input must have rank 3 or 4, its shape is {shape}")
    hidden, heads = shape[2], attrs.get("num_heads") or 0
    if heads < 1 and not attrs.get("rotary_embedding_dim") and isinstance(half, int) and half:
        # As ONNX Runtime has it, the cache says how large a head is.
        heads = hidden // (2 * half) if isinstance(hidden, int) else 0
    if heads < 1:
        if hidden is None or isinstance(hidden, str):
            return (shape[0], None, shape[1], None)
        raise ShapeError("an input of rank 3 needs a positive num_heads")
    return (shape[0], heads, shape[1], share(hidden, heads, "the input"))


def _infer_rotary(
    order: tuple[int, int, int], types: Types, attrs: Attrs, consts: Consts
) -> Sequence[Type]:
    if attrs.get("is_packed_batching") or attrs.get("scale", 1.0) != 1.0:
        raise ShapeError("RotaryEmbedding with is_packed_batching or scale is not supported")
    x, cos, sin, ids = (tensor(types, i) for i in (0, *order))
    if x.shape is None or cos.shape is None:
        return (x.without_data(),)
    batch, _, length, size = _heads(x.shape, attrs, cos.shape[-1] if cos.shape else None)
    turning = attrs.get("rotary_embedding_dim") or size
    if isinstance(turning, int):
        if turning % 2 or (isinstance(size, int) and turning > size):
            raise ShapeError(f"{turning} of {size} features cannot be turned in pairs")
        if isinstance(cos.shape[-1], int) and cos.shape[-1] != turning // 2:
            raise ShapeError(f"caches of shape {cos.shape} do not fit {turning // 2} angles")
    if sin.shape is not None and len(sin.shape) != len(cos.shape):
        raise ShapeError(f"caches have other shapes, {cos.shape} and {sin.shape}")
    positions = ids.shape if given(types, order[2]) else ()
    if positions == ():
        check_shape("a cache without position_ids", cos.shape, (batch, length, None))
    else:
        check_shape("a cache", cos.shape, (None, None))
        start = ((1,),) if order is _MICROSOFT else ()
        check_shape("position_ids", positions, (batch, length), *start)
    return (x.without_data(),)


@operator("RotaryEmbedding", since=23, infer=partial(_infer_rotary, _ONNX))
@operator("RotaryEmbedding", domain=MICROSOFT, infer=partial(_infer_rotary, _MICROSOFT))
@by_shape(arity=(4, 1))
def rotary_embedding(node: Node, inputs: Tensors, outputs: Tensors, consts: Consts) -> Routine:
    order = _MICROSOFT if node.op.domain == MICROSOFT else _ONNX
    x, half = tensor(inputs, 0), tensor(inputs, order[0]).dims[-1]
    batch, heads, length, size = all_known(_heads(x.dims, node.attrs, half)) or (0,) * 4
    four = len(x.dims) == 4
    layout = Scratch()
    # Half of the turning features, and their partners; those beyond stay as they are.
    first, second = slice(0, half), slice(half, 2 * half)
    if node.attrs.get("interleaved", 0):
        first, second = slice(0, 2 * half, 2), slice(1, 2 * half, 2)
    spare_field = layout.field((batch, heads, length, half), x.dtype)

    def into(x: np.ndarray, *arguments: Any) -> None:
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
            cos, sin = _angles(cos, positions), _angles(sin, positions)
        a, b, out_a, out_b = x[..., first], x[..., second], out[..., first], out[..., second]
        spare = spare_field(workspace)
        np.multiply(a, cos, out_a)
        np.multiply(b, sin, spare)
        np.subtract(out_a, spare, out_a)
        np.multiply(a, sin, out_b)
        np.multiply(b, cos, spare)
        np.add(out_b, spare, out_b)
        if 2 * half < size:
            np.copyto(out[..., 2 * half :], x[..., 2 * half :])

    return Routine(into, layout.size)
