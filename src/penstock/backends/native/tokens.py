"""Tokens of com.microsoft: hashes of n-grams, embeddings of words, paths, and repeated n-grams."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from struct import Struct
from typing import Any

import numpy as np

from penstock.backends.native import family, of_any_shape, rows_ns
from penstock.backends.native.kernel import NativeCall, Site, Tensor, Word
from penstock.core.checkpoints import checkpoint
from penstock.core.types import FLOAT32, INT64, Type
from penstock.host.native import NativeLibrary
from penstock.ir.graph import Node
from penstock.ir.kernel import Kernel
from penstock.ops.common.constant_cache import shared
from penstock.ops.common.dtypes import INT32

_MOST_HASHES, _FILTERS = 256, 16  # as in c/tables/tokens.c
_MOST_PRODUCTS = 1 << 22  # elements of what characters add to windows
_SIZES = Struct("=2q")  # as in c/tables/tokens.c


@family("com.microsoft.NGramHashMapping", "com.microsoft.VarlenNGramHashMapping")
def ngram_hashes(site: Site) -> NativeCall | None:
    """NGramHashMapping and VarlenNGramHashMapping of int64, of texts that nothing divides."""
    packed = site.node.op.name == "VarlenNGramHashMapping"
    past, (first, *more) = 3 + packed, site.node.outputs
    before, heads = site.attr("max_ngram_size", 0) - 1, site.attr("n_head_per_ngram", 0)
    if first is None or any([*more[1:], *site.node.inputs[past + 3 :]]):
        return None
    of_tokens = [site.input(i) for i in (0, 1, 2, past, past + 1, past + 2)]
    if any(t is not None and t.dtype != INT64 for t in of_tokens):
        return None
    ids, factors, sizes, *_, eos = of_tokens
    if ids is None or factors is None or sizes is None or factors.dims[0] <= before:
        return None
    if sizes.dims != (before * heads,) or before * heads > _MOST_HASHES:
        return None
    if eos is not None and (eos.elements != 1 or site.attr("reset_on_eos", 0)):
        return None
    given: list[Word] = [
        None if site.input(i) is None else Tensor(i) for i in (past + 1, past, past + 2)
    ]
    if eos is None:
        given[2] = np.array([site.attr("pad_id", 0)], np.int64)
    bounds = site.input(3) if packed else None
    if bounds is not None and bounds.dtype != INT32:
        return None
    texts = ids.dims[0] if bounds is None else bounds.dims[0] - 1
    words = (
        *(Tensor(0), Tensor(1), Tensor(2), *given, None if bounds is None else Tensor(3)),
        *(site.result(), site.result(1) if any(more) else None),
        *(texts, ids.dims[-1], ids.elements, before, heads),
    )
    each_ns = rows_ns(30 * ids.elements * before * heads / max(texts, 1), rows=3)
    return NativeCall("ngram_hashes", words, texts, each_ns, can_fail=True)


@family("com.microsoft.WordConvEmbedding")
def embedded_words(site: Site) -> NativeCall | None:
    """WordConvEmbedding with constant weights."""
    words, weights, table = site.tensor(0), site.constant(1), site.constant(3)
    if weights is None or table is None or words.dtype != INT32:
        return None
    (filters, _, window, _), (rows, characters) = weights.shape, words.dims
    elements = window * len(table) * filters
    if {weights.dtype, table.dtype} != {FLOAT32} or not elements or window > characters:
        return None
    if elements > _MOST_PRODUCTS or not characters or site.ordered:  # NumPy's are in any order
        return None

    def products() -> np.ndarray:
        """Return each character's contribution to a window, by its position there."""
        added = table @ weights[:, 0].transpose(1, 2, 0)
        return np.pad(added, ((0, 0), (0, 0), (0, -filters % _FILTERS)))

    share = shared(("embedded_words",), products, weights, table)
    call = (Tensor(0), share.value, Tensor(2), site.result())
    row_ns = rows_ns(4 * characters * window * filters, rows=2)
    sizes = (characters, window, len(table), filters)
    return NativeCall("embedded_words", (*call, *sizes), rows, row_ns, can_fail=True, keep=share)


@of_any_shape("com.microsoft.BifurcationDetector", "com.microsoft.DynamicTimeWarping")
def of_unknown_length(
    library: NativeLibrary, node: Node, types: Sequence[Type | None]
) -> Kernel | None:
    """BifurcationDetector of int64, and DynamicTimeWarping of float32."""
    name, settings = "time_warping", None
    if node.op.name == "BifurcationDetector":
        if len(node.outputs) != 2:
            return None
        name, attrs = "bifurcation", node.attrs
        settings = _SIZES.pack(attrs.get("min_ngram_size", 1), attrs.get("max_ngram_size", 3))
    function: Any = getattr(library.functions, name)
    otherwise = node.op.compile(node, types).function
    return Kernel(partial(function, otherwise, checkpoint, settings))
