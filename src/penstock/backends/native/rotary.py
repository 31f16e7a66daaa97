"""RotaryEmbedding."""

from __future__ import annotations

from penstock.backends.native import by_memory, family, rows_ns
from penstock.backends.native.kernel import NativeCall, Site, Tensor
from penstock.core.types import FLOAT32, INT64
from penstock.ops.onnx.rotary import cache_places, heads_of


@family("RotaryEmbedding", "com.microsoft.RotaryEmbedding", work=by_memory)
def rotary(site: Site) -> NativeCall | None:
    """RotaryEmbedding of float32."""
    cos_at, sin_at, ids_at = cache_places(site.node.op)
    x, cos, sin, ids = (site.input(i) for i in (0, cos_at, sin_at, ids_at))
    if x is None or cos is None or sin is None or 0 in (*x.dims, *cos.dims):
        return None
    if any(t.dtype != FLOAT32 for t in (x, cos, sin)) or sin.dims != cos.dims:
        return None
    if ids is not None and ids.dtype != INT64:
        return None
    half, dims = cos.dims[-1], heads_of(x.dims, site.node.attrs, cos.dims[-1])
    if dims is None or 2 * half > dims[3]:
        return None
    _, heads, sequence, size = dims
    return NativeCall(
        "rotary",
        (
            *(Tensor(0), Tensor(cos_at), Tensor(sin_at), None if ids is None else Tensor(ids_at)),
            *(site.result(), heads, sequence, size, half, cos.elements // half),
            *(int(len(x.dims) == 4), int(bool(site.attr("interleaved", 0)))),
            int(ids is not None and len(ids.dims) == 1),
        ),
        items=x.elements // size,
        item_ns=rows_ns(4 * size, rows=0.5),
        can_fail=ids is not None,
    )
