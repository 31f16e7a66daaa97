"""LinearAttention: the state of a head stays in the first-level cache from step to step."""

from __future__ import annotations

import math

from penstock.backends.native import below_numpy, family, rows_ns
from penstock.backends.native.kernel import WORKSPACE, NativeCall, Site, Tensor
from penstock.core.types import FLOAT32

_COLUMNS, _MOST_KEYS = 64, 512  # as in c/attention/linear_attention.c


@family("LinearAttention", work=below_numpy)
def linear_attention_call(site: Site) -> NativeCall | None:
    """LinearAttention of float32, by any of its rules."""
    types, outputs = [site.input(i) for i in range(6)], site.tensors[len(site.node.inputs) :]
    q, _, v, *others = types
    given = [t for t in (*types, *outputs) if t is not None]
    if q is None or v is None or outputs[0] is None or any(t.dtype != FLOAT32 for t in given):
        return None
    heads, key_heads = site.node.attrs["q_num_heads"], site.node.attrs["kv_num_heads"]
    (batch, length, hidden), values = q.dims, v.dims[2] // key_heads
    size, state = hidden // heads, None if len(outputs) < 2 else outputs[1]
    if not 0 < size <= _MOST_KEYS or not values or not batch:
        return None
    optional = [None if t is None else Tensor(3 + i) for i, t in enumerate(others)]
    blocks, elements = -(-values // _COLUMNS), batch * key_heads * size * values
    return NativeCall(
        "linear_attention",
        (
            *(Tensor(0), Tensor(1), Tensor(2), *optional, site.result()),
            *(WORKSPACE if state is None else site.result(1), length, heads, key_heads, size),
            *(values, *[0 if t is None else t.dims[2] for t in others[1:]], blocks),
            site.attr("scale", 0.0) or 1 / math.sqrt(size),
        ),
        items=batch * key_heads * blocks,
        item_ns=rows_ns(size * min(values, _COLUMNS) * length * (2 + heads // key_heads)),
        workspace=elements * FLOAT32.itemsize if state is None else 0,
    )
