"""LinearAttention: each step updates a state matrix of keys and values, which queries read."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from penstock.core.types import FLOAT32, RunValue, ShapeError, TensorType, Type
from penstock.ir.graph import Node
from penstock.ir.op import Attrs, Consts, Types
from penstock.ops.common.shape_rules import check_shape, choice, dim_product, given, tensor
from penstock.ops.common.specialize import Routine, Tensors, by_shape
from penstock.ops.onnx.attention import share
from penstock.ops.registry import operator

# Update rule: whether the state decays, and whether the value that it predicts is subtracted.
_RULES = {
    "linear": (False, False),
    "gated": (True, False),
    "delta": (False, True),
    "gated_delta": (True, True),
}


def _infer_linear_attention(types: Types, attrs: Attrs, consts: Consts) -> Sequence[Type]:
    rule = choice(attrs, "update_rule", "gated_delta", _RULES)
    for name, index, needed in zip(("decay", "beta"), (4, 5), _RULES[rule], strict=True):
        if needed != given(types, index):
            raise ShapeError(f"update_rule {rule!r} {'requires' if needed else 'excludes'} {name}")
    heads, kv_heads = attrs.get("q_num_heads") or 0, attrs.get("kv_num_heads") or 0
    if heads < 1 or kv_heads < 1 or heads % kv_heads:
        raise ShapeError(f"q_num_heads={heads} must be a multiple of kv_num_heads={kv_heads}")
    q, k, v, past = (tensor(types, i) for i in range(4))
    for name, type_ in (("query", q), ("value", v)):
        check_shape(name, type_.shape, (None, None, None))
    batch, length, hidden = q.shape or (None, None, None)
    size = share(hidden, heads, "query")
    value_size = share(None if v.shape is None else v.shape[2], kv_heads, "value")
    keys = dim_product((size, kv_heads))
    check_shape("key", k.shape, (batch, length, keys))
    check_shape("value", v.shape, (batch, length, None))
    state = (batch, kv_heads, size, value_size)
    decay, beta = tensor(types, 4).shape, tensor(types, 5).shape
    check_shape("past_state", past.shape, state)
    check_shape("decay", decay, (batch, length, kv_heads), (batch, length, keys))
    check_shape("beta", beta, (batch, length, kv_heads), (batch, length, 1))
    y = TensorType(q.dtype, (batch, length, dim_product((value_size, heads))))
    return y, TensorType(past.dtype if given(types, 3) else q.dtype, state)


@operator("LinearAttention", since=27, infer=_infer_linear_attention)
@by_shape(arity=(6, 2))
def linear_attention(node: Node, inputs: Tensors, outputs: Tensors, consts: Consts) -> Routine:
    attrs = node.attrs
    heads, kv_heads = attrs["q_num_heads"], attrs["kv_num_heads"]
    q, v = tensor(inputs, 0), tensor(inputs, 2)
    (batch, length, hidden), group = q.dims, heads // kv_heads
    size, value_size = hidden // heads, v.dims[2] // kv_heads
    scale = FLOAT32.type(attrs.get("scale") or 1 / math.sqrt(max(size, 1)))

    def into(*arguments: RunValue) -> None:
        q, k, v, past, decay, beta, y, present = arguments
        state = np.zeros((batch, kv_heads, size, value_size), FLOAT32)
        np.copyto(state, 0 if past is None else past, casting="unsafe")
        every = (length, batch, kv_heads)

        def split(x: np.ndarray, *dims: int) -> np.ndarray:
            return x.reshape(batch, length, kv_heads, *dims).swapaxes(0, 1)

        queries, outs = split(q, group, size), split(y, group, value_size)
        keys, values = split(k, size, 1), split(v, 1, value_size)
        rates = decay_of = None
        if decay is not None:
            per_head = decay.shape[2] == kv_heads
            decay_of = np.exp(split(decay, 1 if per_head else size, 1))
        if beta is not None:
            rates = np.broadcast_to(beta.swapaxes(0, 1)[..., None, None], (*every, 1, 1))
        # Steps depend on the previous state: only heads and samples are computed together.
        for t in range(length):
            key, value = keys[t], values[t]
            if decay_of is not None:
                np.multiply(state, decay_of[t], state)
            if rates is not None:
                value = (value - key.swapaxes(2, 3) @ state) * rates[t]
            np.add(state, key * value, state)
            # One product for all query heads that share this state.
            np.multiply(np.matmul(queries[t], state), scale, outs[t])
        if present is not None:
            np.copyto(present, state, casting="unsafe")

    return Routine(into)
